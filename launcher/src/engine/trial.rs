//! Finds out whether Podman can run nodes here, and how, by running a container of the image.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rustix::process::{getegid, geteuid};
use tokio::sync::watch;
use trainyard_spec::plan::{EnginePlan, NodeUser};

use super::container::{self, Limits, Place, Settings};
use super::libpod::{Libpod, default_sockets, is_rootful, on_path};
use super::podman::{create_network, remove, remove_network, run_to_end};
use super::{Chosen, EngineError, EngineSettings, image};
use crate::plan::Image;
use crate::supervise::{Stop, asked_beyond};

/// OCI runtimes to try, after Podman's default, where that cannot start a container: a host may have one that does not
/// fit its control groups.
const RUNTIMES: [&str; 2] = ["crun", "runc"];
/// The user of nodes where root launches: nobody on the host, and what distroless images use.
const UNPRIVILEGED: u32 = 65_532;

/// Finds a service and a runtime that run a container of the image.
pub(super) async fn choose(
    settings: &EngineSettings,
    image: &Image,
    stop: &mut watch::Receiver<Stop>,
) -> Result<Chosen, EngineError> {
    let uid = geteuid().as_raw();
    let (socket, mut podman) = reach(settings, uid).await?;
    let user = node_user(uid, socket.as_deref());
    let id = tokio::select! {
        id = image::ensure(&podman, &image.layout, image.digest) => id?,
        _ = asked_beyond(stop, Stop::No) => return Err(EngineError::Interrupted),
    };
    let mut refusals = Vec::new();
    let installed = RUNTIMES.into_iter().filter(|name| on_path(name, settings.path.as_deref()));
    for runtime in [None].into_iter().chain(installed.map(Some)) {
        // Between trials alone: one that has begun is removed, too.
        if *stop.borrow() > Stop::No {
            return Err(EngineError::Interrupted);
        }
        if socket.is_none() && runtime.is_some() {
            podman = match Libpod::start(runtime).await {
                Ok(podman) => podman,
                Err(error) => {
                    refuse(&mut refusals, runtime, &error);
                    continue;
                }
            };
        }
        let settings =
            Settings { image: id, runtime: runtime.map(str::to_owned), user, limits: Limits::here() };
        match try_container(&podman, &settings).await {
            Ok(()) => {
                let refused = refusals.join("; ");
                let note = runtime.map(|name| format!("containers run with {name}: {refused}"));
                let socket = socket.map(|path| path.display().to_string());
                let engine = EnginePlan::Podman { socket, runtime: runtime.map(str::to_owned), user };
                return Ok(Chosen { engine, notes: note.into_iter().collect() });
            }
            Err(error) => refuse(&mut refusals, runtime, &error),
        }
    }
    Err(EngineError::Trial { found: refusals.join("; ") })
}

/// Notes what a runtime said: its first line, for Podman repeats itself and appends warnings; and once, for another
/// runtime often fails for the same reason.
fn refuse(refusals: &mut Vec<String>, runtime: Option<&str>, error: &EngineError) {
    let said = error.to_string();
    // Some line ends arrive quoted.
    let said = said.split('\n').next().and_then(|line| line.split("\\n").next()).unwrap_or_default();
    if !refusals.iter().any(|known| known.ends_with(said)) {
        refusals.push(format!("{}: {said}", runtime.unwrap_or("the default runtime")));
    }
}

async fn reach(settings: &EngineSettings, uid: u32) -> Result<(Option<PathBuf>, Libpod), EngineError> {
    if let Some(address) = settings.container_host.as_deref().filter(|address| !address.is_empty()) {
        let path = address.strip_prefix("unix://").filter(|path| path.starts_with('/'));
        let path = PathBuf::from(path.ok_or_else(|| EngineError::Address { found: address.to_owned() })?);
        let podman = Libpod::connect(&path).await?;
        return Ok((Some(path), podman));
    }
    let sockets = default_sockets(uid, settings.runtime_dir.as_deref());
    // Another user's socket is there for that user alone.
    let usable =
        |socket: &&PathBuf| rustix::fs::access(socket.as_path(), rustix::fs::Access::WRITE_OK).is_ok();
    if let Some(socket) = sockets.iter().find(usable) {
        let podman = Libpod::connect(socket).await?;
        return Ok((Some(socket.clone()), podman));
    }
    if on_path("podman", settings.path.as_deref()) {
        return Ok((None, Libpod::start(None).await?));
    }
    let looked: Vec<_> = sockets.iter().map(|socket| socket.display().to_string()).collect();
    Err(EngineError::NoPodman { looked: looked.join(" or ") })
}

fn node_user(uid: u32, socket: Option<&Path>) -> NodeUser {
    let gid = getegid().as_raw();
    match (uid, socket) {
        (0, _) => NodeUser::Host { uid: UNPRIVILEGED, gid: UNPRIVILEGED },
        (uid, Some(socket)) if is_rootful(socket) => NodeUser::Host { uid, gid },
        (uid, _) => NodeUser::KeepId { uid, gid },
    }
}

/// Makes a network and runs a container on it, as an attempt does, and removes both.
async fn try_container(podman: &Libpod, settings: &Settings) -> Result<(), EngineError> {
    let name = format!("trainyard-trial-{}", std::process::id());
    let addresses = create_network(podman, &name, BTreeMap::new(), 1).await;
    let ended = match addresses {
        Ok(addresses) => {
            let place = Place { network: name.clone(), addresses };
            match podman.create(&container::trial(settings, &name, &place)).await {
                Ok(_) => run_to_end(podman, &name).await,
                Err(error) => Err(error),
            }
        }
        Err(error) => Err(error),
    };
    let removed = remove(podman, &name).await;
    let network_removed = remove_network(podman, &name).await;
    let exit = ended?;
    removed?;
    network_removed?;
    match exit {
        0 => Ok(()),
        code => Err(EngineError::Trial { found: format!("{name} exited with code {code}") }),
    }
}
