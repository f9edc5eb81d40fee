//! Nodes as containers, through Podman's libpod API.
//!
//! Each attempt has a private network without a way out, and each node an address on it. What an agent says is kept by its
//! container's log driver in the run directory, and so outlives the controller. Containers and networks carry labels,
//! by which they are found again without one.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::join_all;
use podman_api::models::ContainerStatus;
use podman_api::opts::{
    ContainerDeleteOpts, ContainerListFilter, ContainerListOpts, ContainerWaitOpts, NetworkCreateOpts,
    NetworkListFilter, NetworkListOpts,
};
use tokio::sync::{mpsc, oneshot};
use trainyard_spec::plan::{EnginePlan, LaunchPlan, NodePlan, NodeUser};

use super::container::{self, LABEL_RUN, Limits, Place, Settings};
use super::libpod::Libpod;
use super::{EngineError, NodeExit, Signal, Started, image};
use crate::tail::Format;

/// File of a node's folder in which its agent's lines are kept.
const SAID: &str = "said.log";
/// How often Podman looks whether a container has ended.
const WAIT_INTERVAL: &str = "200ms";

/// The containers of one launch.
#[derive(Debug)]
pub(crate) struct Podman {
    service: Libpod,
    settings: Settings,
    plan: LaunchPlan,
    attempt: u32,
    place: Option<Place>,
}

fn failed<'a>(action: &'a str, what: &'a str) -> impl Fn(podman_api::Error) -> EngineError + 'a {
    move |error| EngineError::Podman { action: format!("{action} {what}"), found: error.to_string() }
}

async fn service(plan: &LaunchPlan) -> Result<Libpod, EngineError> {
    match &plan.engine {
        EnginePlan::Podman { socket: Some(socket), .. } => Libpod::connect(Path::new(socket)).await,
        EnginePlan::Podman { socket: None, runtime, .. } => Libpod::start(runtime.as_deref()).await,
        EnginePlan::Process => unreachable!("this engine is asked about plans of its own alone"),
    }
}

impl Podman {
    pub(super) async fn open(plan: &LaunchPlan) -> Result<Self, EngineError> {
        let service = service(plan).await?;
        let image = image::ensure(&service, Path::new(&plan.image.layout), plan.image.digest).await?;
        let (runtime, user) = match &plan.engine {
            EnginePlan::Podman { runtime, user, .. } => (runtime.clone(), *user),
            EnginePlan::Process => unreachable!("this engine is asked about plans of its own alone"),
        };
        let settings = Settings { image, runtime, user, limits: Limits::here() };
        Ok(Self { service, settings, plan: plan.clone(), attempt: 0, place: None })
    }

    pub(super) async fn prepare(&mut self, plan: &LaunchPlan, attempt: u32) -> Result<(), EngineError> {
        self.attempt = attempt;
        let name = container::network(plan, attempt);
        let addresses =
            create_network(&self.service, &name, container::labels(plan, attempt), plan.nodes.len()).await?;
        self.place = Some(Place { network: name, addresses });
        self.hand_over(Path::new(&plan.run_dir).join("checkpoints"))
    }

    /// Lets the nodes' user write to a folder, where that is another than the controller's.
    fn hand_over(&self, folder: PathBuf) -> Result<(), EngineError> {
        match self.settings.user {
            NodeUser::Host { uid, gid } => std::os::unix::fs::chown(&folder, Some(uid), Some(gid))
                .map_err(|source| EngineError::Io { action: "change the owner of", path: folder, source }),
            NodeUser::KeepId { .. } => Ok(()),
        }
    }

    pub(super) async fn start(&mut self, nodes: &[(NodePlan, PathBuf)]) -> Result<Vec<Started>, EngineError> {
        let this = &*self;
        let started = join_all(nodes.iter().map(|(node, folder)| this.start_node(node, folder))).await;
        started.into_iter().collect()
    }

    async fn start_node(&self, node: &NodePlan, folder: &Path) -> Result<Started, EngineError> {
        let place = self.place.as_ref().expect("an attempt is prepared before its nodes are started");
        self.hand_over(folder.to_owned())?;
        let said = folder.join(SAID);
        let (folder_text, said_text) = (folder.display().to_string(), said.display().to_string());
        let request =
            container::node(&self.settings, &self.plan, self.attempt, node, place, &folder_text, &said_text);
        let id = self.service.create(&request).await?;
        let container = self.service.api.containers().get(id.as_str());
        container.start(None).await.map_err(failed("start container", &request.name))?;
        let (signals, requests) = mpsc::unbounded_channel();
        let (tell, exit) = oneshot::channel();
        tokio::spawn(watch(self.service.api.clone(), id, requests, tell));
        Ok(Started { folder: folder.to_owned(), said, format: Format::Kubernetes, exit, signals })
    }

    pub(super) async fn teardown(&mut self) -> Vec<EngineError> {
        self.place = None;
        remove_all(&self.service, &self.plan).await
    }
}

/// Makes a private network. Returns the addresses of its nodes.
pub(super) async fn create_network(
    service: &Libpod,
    name: &str,
    labels: BTreeMap<String, String>,
    nodes: usize,
) -> Result<Vec<String>, EngineError> {
    let options = NetworkCreateOpts::builder()
        .name(name)
        .driver("bridge")
        // Nodes need each other and nothing else.
        .internal(true)
        .dns_enabled(false)
        .labels(labels)
        .build();
    let network = service.api.networks().create(&options).await.map_err(failed("create network", name))?;
    let subnet = network.subnets.and_then(|subnets| subnets.into_iter().next()?.subnet).unwrap_or_default();
    addresses(&subnet, nodes).ok_or_else(|| EngineError::Podman {
        action: format!("give {nodes} addresses on network {name}"),
        found: format!("its subnet is {subnet:?}"),
    })
}

/// Removes a network, if it is there.
pub(super) async fn remove_network(service: &Libpod, name: &str) -> Result<(), EngineError> {
    let network = service.api.networks().get(name);
    if !network.exists().await.map_err(failed("look for network", name))? {
        return Ok(());
    }
    network.remove().await.map(drop).map_err(failed("remove network", name))
}

/// The addresses of nodes on a subnet; its first address is the gateway's.
fn addresses(subnet: &str, nodes: usize) -> Option<Vec<String>> {
    let (base, bits) = subnet.split_once('/')?;
    let (base, bits) = (u32::from(base.parse::<Ipv4Addr>().ok()?), bits.parse::<u32>().ok()?);
    let room = 1_u64.checked_shl(32_u32.checked_sub(bits)?)?.checked_sub(3)?;
    let count = u32::try_from(nodes).ok().filter(|count| u64::from(*count) <= room)?;
    Some((0..count).map(|node| Ipv4Addr::from(base + 2 + node).to_string()).collect())
}

async fn watch(
    api: podman_api::Podman,
    id: String,
    mut requests: mpsc::UnboundedReceiver<Signal>,
    tell: oneshot::Sender<NodeExit>,
) {
    let container = api.containers().get(id.as_str());
    let ended = wait(&api, &id);
    tokio::pin!(ended);
    let exit = loop {
        tokio::select! {
            exit = &mut ended => break exit,
            Some(request) = requests.recv() => {
                let signal = match request { Signal::Terminate => "SIGTERM", Signal::Kill => "SIGKILL" };
                // A container that has just ended needs no signal; one that stays is removed by force.
                drop(container.send_signal(signal).await);
            }
        }
    };
    // Nobody listens any more when the attempt was given up.
    drop(tell.send(exit));
}

/// Waits until a container has ended. A service that fails now and then is asked again.
async fn wait(api: &podman_api::Podman, id: &str) -> NodeExit {
    let container = api.containers().get(id);
    let options =
        ContainerWaitOpts::builder().conditions([ContainerStatus::Exited]).interval(WAIT_INTERVAL).build();
    let mut failures = 0;
    loop {
        let state = match container.wait(&options).await {
            Ok(()) => container.inspect().await.map(|container| container.state),
            Err(error) => Err(error),
        };
        match state {
            Ok(Some(state)) if state.running != Some(true) => {
                let how = format!("exited with code {}", state.exit_code.unwrap_or_default());
                return NodeExit { how, out_of_memory: state.oom_killed == Some(true) };
            }
            Ok(_) => {}
            Err(error) if failures == 5 => {
                let how = format!("was lost: its container cannot be looked at: {error}");
                return NodeExit { how, out_of_memory: false };
            }
            Err(_) => failures += 1,
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Starts a container that was created and waits for its end. Returns its exit code.
pub(super) async fn run_to_end(service: &Libpod, name: &str) -> Result<i32, EngineError> {
    let container = service.api.containers().get(name);
    container.start(None).await.map_err(failed("start container", name))?;
    let options = ContainerWaitOpts::builder().conditions([ContainerStatus::Exited]).interval("20ms").build();
    let waited = container.wait(&options);
    match tokio::time::timeout(Duration::from_secs(30), waited).await {
        Ok(waited) => waited.map_err(failed("wait for container", name))?,
        Err(_) => {
            let action = format!("run container {name}");
            return Err(EngineError::Podman { action, found: "it does not end".to_owned() });
        }
    }
    let state = container.inspect().await.map_err(failed("inspect container", name))?.state;
    Ok(state.and_then(|state| state.exit_code).unwrap_or(-1))
}

/// Removes a container, whatever state it is in, if it is there.
pub(super) async fn remove(service: &Libpod, name: &str) -> Result<(), EngineError> {
    let container = service.api.containers().get(name);
    if !container.exists().await.map_err(failed("look for container", name))? {
        return Ok(());
    }
    let options = ContainerDeleteOpts::builder().force(true).volumes(true).timeout(0_usize).build();
    container.delete(&options).await.map_err(failed("remove container", name))
}

/// Removes all containers and networks of a job that has no controller.
pub(super) async fn cleanup(plan: &LaunchPlan) -> Vec<EngineError> {
    match service(plan).await {
        Ok(service) => {
            let signalled = terminate(&service, plan).await;
            if let Err(error) = signalled {
                return vec![error];
            }
            remove_all(&service, plan).await
        }
        Err(error) => vec![error],
    }
}

/// Asks the containers of a job to stop, and gives them time to.
async fn terminate(service: &Libpod, plan: &LaunchPlan) -> Result<(), EngineError> {
    let running = containers(service, plan, false).await?;
    let stop = |id: String| async move {
        let container = service.api.containers().get(id.as_str());
        // Those that do not stop are removed by force.
        drop(container.send_signal("SIGTERM").await);
        let options = ContainerWaitOpts::builder().conditions([ContainerStatus::Exited]).build();
        drop(tokio::time::timeout(super::CLEANUP_GRACE, container.wait(&options)).await);
    };
    join_all(running.into_iter().map(stop)).await;
    Ok(())
}

async fn containers(service: &Libpod, plan: &LaunchPlan, all: bool) -> Result<Vec<String>, EngineError> {
    let filter = ContainerListFilter::LabelKeyVal(LABEL_RUN.to_owned(), container::run(plan));
    let options = ContainerListOpts::builder().all(all).filter([filter]).build();
    let found = service.api.containers().list(&options).await.map_err(failed("list", "containers"))?;
    Ok(found.into_iter().filter_map(|container| container.id).collect())
}

/// Removes every container and network of a job. Errors are collected, so that one does not keep the rest.
async fn remove_all(service: &Libpod, plan: &LaunchPlan) -> Vec<EngineError> {
    let mut errors = Vec::new();
    match containers(service, plan, true).await {
        Ok(ids) => {
            let removed = join_all(ids.iter().map(|id| remove(service, id))).await;
            errors.extend(removed.into_iter().filter_map(Result::err));
        }
        Err(error) => errors.push(error),
    }
    let filter = NetworkListFilter::LabelKeyVal(LABEL_RUN.to_owned(), container::run(plan));
    match service.api.networks().list(&NetworkListOpts::builder().filter([filter]).build()).await {
        Ok(networks) => {
            for name in networks.into_iter().filter_map(|network| network.name) {
                errors.extend(remove_network(service, &name).await.err());
            }
        }
        Err(error) => errors.push(failed("list", "networks")(error)),
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_the_gateway() {
        for (subnet, nodes, expected) in [
            ("10.89.0.0/24", 2, Some(vec!["10.89.0.2", "10.89.0.3"])),
            ("10.89.0.0/30", 2, None),
            ("10.89.0.0/30", 1, Some(vec!["10.89.0.2"])),
            ("10.89.0.0/24", 254, None),
            ("fd00::/64", 1, None),
            ("", 1, None),
        ] {
            let expected = expected.map(|list| list.into_iter().map(str::to_owned).collect());
            assert_eq!(addresses(subnet, nodes), expected, "{subnet} {nodes}");
        }
    }
}
