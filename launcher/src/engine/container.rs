//! A node as a container: the request that libpod gets.
//!
//! The fields are those of libpod's `SpecGenerator` that a node needs. podman-api's own builder lacks the log file's path, so
//! the request is written here.

use std::collections::BTreeMap;
use std::fs;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use trainyard_spec::plan::{LaunchPlan, NodePlan, NodeUser};
use trainyard_spec::{Digest, env};

use crate::plan::{AGENT, hostname};

/// Labels that say whose a container or network is.
const LABEL_JOB: &str = "trainyard.job";
/// Job ids are unique in one folder of jobs alone; what belongs to a launch is found by its run directory.
pub(super) const LABEL_RUN: &str = "trainyard.run";
const LABEL_ATTEMPT: &str = "trainyard.attempt";
const LABEL_NODE: &str = "trainyard.node";

/// A container to be made.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Container {
    pub(super) name: String,
    image: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    oci_runtime: Option<String>,
    entrypoint: Vec<String>,
    pub(super) command: Vec<String>,
    env: BTreeMap<String, String>,
    pub(super) labels: BTreeMap<String, String>,
    hostname: String,
    hostadd: Vec<String>,
    user: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    userns: Option<Mode>,
    netns: Mode,
    #[serde(rename = "Networks")]
    networks: BTreeMap<String, Attachment>,
    mounts: Vec<Volume>,
    shm_size: u64,
    read_only_filesystem: bool,
    cap_drop: Vec<String>,
    no_new_privileges: bool,
    r_limits: Vec<Limit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_limits: Option<Resources>,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_configuration: Option<Log>,
    restart_policy: &'static str,
}

#[derive(Debug, Clone, Serialize)]
struct Mode {
    nsmode: &'static str,
}

#[derive(Debug, Clone, Serialize)]
struct Attachment {
    static_ips: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
struct Volume {
    destination: String,
    source: String,
    r#type: &'static str,
    options: Vec<&'static str>,
}

#[derive(Debug, Clone, Serialize)]
struct Limit {
    r#type: &'static str,
    soft: u64,
    hard: u64,
}

#[derive(Debug, Clone, Serialize)]
struct Resources {
    pids: Pids,
}

#[derive(Debug, Clone, Serialize)]
struct Pids {
    limit: u64,
}

#[derive(Debug, Clone, Serialize)]
struct Log {
    driver: &'static str,
    path: String,
}

/// What all containers of a launch have in common.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// The image's id.
    pub(super) image: Digest,
    /// OCI runtime; none: Podman's default.
    pub(super) runtime: Option<String>,
    pub(super) user: NodeUser,
    pub(super) limits: Limits,
}

/// Hard limits here, beyond which no container may ask. Podman's defaults do ask for more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) open_files: Option<u64>,
    pub(super) processes: Option<u64>,
}

impl Limits {
    pub(super) fn here() -> Self {
        let hard = |resource| getrlimit(resource).maximum;
        // Podman lowers its own limit of processes to the kernel's number of process ids.
        let ids =
            fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|text| text.trim().parse().ok());
        let processes = [hard(Resource::Nproc), ids].into_iter().flatten().min();
        Self { open_files: hard(Resource::Nofile), processes }
    }
}

/// Open files that a node asks for where it may.
const OPEN_FILES: u64 = 131_072;
/// Most processes and threads of a node, per rank, beyond those that compute.
const PIDS_PER_RANK: u64 = 256;
const PIDS_BASE: u64 = 64;

/// A container that only says the agent's version: a trial of everything that may be refused.
pub(super) fn trial(settings: &Settings, name: &str, place: &Place) -> Container {
    let (user, userns, rootful) = match settings.user {
        NodeUser::Host { uid, gid } => (format!("{uid}:{gid}"), None, true),
        NodeUser::KeepId { uid, gid } => (format!("{uid}:{gid}"), Some(Mode { nsmode: "keep-id" }), false),
    };
    let open_files = settings.limits.open_files.map_or(OPEN_FILES, |limit| limit.min(OPEN_FILES));
    let limit = |r#type, value| Limit { r#type, soft: value, hard: value };
    let mut limits = vec![limit("nofile", open_files)];
    limits.extend(settings.limits.processes.map(|value| limit("nproc", value)));
    Container {
        name: name.to_owned(),
        image: settings.image.hex(),
        oci_runtime: settings.runtime.clone(),
        // The image's own is the trainer.
        entrypoint: vec![AGENT.to_owned()],
        command: vec!["--version".to_owned()],
        env: BTreeMap::new(),
        labels: BTreeMap::new(),
        hostname: hostname(0),
        hostadd: Vec::new(),
        user,
        userns,
        netns: Mode { nsmode: "bridge" },
        networks: attached(place, 0),
        mounts: vec![Volume {
            destination: "/tmp".to_owned(),
            source: "tmpfs".to_owned(),
            r#type: "tmpfs",
            options: vec!["rw", "nosuid", "nodev", "mode=1777"],
        }],
        shm_size: 1 << 20,
        read_only_filesystem: true,
        cap_drop: vec!["all".to_owned()],
        no_new_privileges: true,
        r_limits: limits,
        // Without systemd's delegation a rootless Podman may not limit anything.
        resource_limits: rootful.then_some(Resources { pids: Pids { limit: PIDS_BASE } }),
        log_configuration: None,
        restart_policy: "no",
    }
}

/// A node's place on the network of its attempt.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) network: String,
    /// The addresses of all nodes, by index.
    pub(super) addresses: Vec<String>,
}

fn attached(place: &Place, node: u32) -> BTreeMap<String, Attachment> {
    let own = place.addresses.get(node as usize).cloned();
    BTreeMap::from([(place.network.clone(), Attachment { static_ips: own.into_iter().collect() })])
}

/// The container of a node. `folder` is the node's in the run directory, `log` the file for what its agent says.
pub(super) fn node(
    settings: &Settings,
    plan: &LaunchPlan,
    attempt: u32,
    node: &NodePlan,
    place: &Place,
    folder: &str,
    log: &str,
) -> Container {
    let bind = |host: &str, node: &str, read_only: bool| Volume {
        destination: node.to_owned(),
        source: host.to_owned(),
        r#type: "bind",
        // `z` lets containers in where SELinux rules, and is nothing elsewhere.
        options: vec!["rbind", "nosuid", "nodev", if read_only { "ro" } else { "rw" }, "z"],
    };
    let mut container = trial(settings, &name(plan, attempt, node.node), place);
    container.command.clear();
    container.env.insert(env::NODE_PLAN.to_owned(), format!("{}/{}", node.run_dir, super::NODE_PLAN_FILE));
    container.labels = labels(plan, attempt);
    container.labels.insert(LABEL_NODE.to_owned(), node.node.to_string());
    container.hostname = node.hostname.to_string();
    // Names without a resolver: a static program has none.
    let entries = (0..).zip(&place.addresses).map(|(node, address)| format!("{}:{address}", hostname(node)));
    container.hostadd = entries.collect();
    container.networks = attached(place, node.node);
    container.mounts.extend(plan.mounts.iter().map(|mount| bind(&mount.host, &mount.node, mount.read_only)));
    container.mounts.push(bind(folder, &node.run_dir, false));
    container.shm_size = plan.shm_bytes;
    if let Some(limits) = &mut container.resource_limits {
        let ranks = node.ranks.len() as u64;
        limits.pids.limit += ranks * (PIDS_PER_RANK + u64::from(plan.threads_per_rank));
    }
    container.log_configuration = Some(Log { driver: "k8s-file", path: log.to_owned() });
    container
}

/// Labels of everything that belongs to an attempt.
pub(super) fn labels(plan: &LaunchPlan, attempt: u32) -> BTreeMap<String, String> {
    BTreeMap::from([
        (LABEL_JOB.to_owned(), plan.job.to_string()),
        (LABEL_RUN.to_owned(), run(plan)),
        (LABEL_ATTEMPT.to_owned(), attempt.to_string()),
    ])
}

fn name(plan: &LaunchPlan, attempt: u32, node: u32) -> String {
    format!("{}-{}", network(plan, attempt), hostname(node))
}

/// Name of an attempt's network.
pub(super) fn network(plan: &LaunchPlan, attempt: u32) -> String {
    format!("trainyard-{}-{}-{attempt}", plan.job, run(plan))
}

/// Stands for the run directory in names and labels.
pub(super) fn run(plan: &LaunchPlan) -> String {
    Digest::of(plan.run_dir.as_bytes()).short()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::plan::{Image, Launch, plan};

    #[test]
    fn the_request_for_a_node() {
        let job = include_str!("../../tests/job.json");
        let user = NodeUser::Host { uid: 65532, gid: 65532 };
        let launch = Launch {
            id: "test-1".parse().unwrap(),
            job: serde_json::from_str(job).unwrap(),
            image: Image { digest: Digest::of(b"image"), layout: "/layout".into(), rootfs: "/rootfs".into() },
            data_dir: "/data".into(),
            nodes: 2,
            max_restarts: 3,
            run_dir: "/jobs/test-1".into(),
            engine: trainyard_spec::plan::EnginePlan::Podman { socket: None, runtime: None, user },
        };
        let machine = Machine {
            cores: 2,
            memory_available: 1 << 30,
            processes_free: 1000,
            open_files: 20_000,
            uid: 0,
            gid: 0,
        };
        let plan = plan(&launch, &machine).unwrap();
        let limits = Limits { open_files: Some(20_000), processes: None };
        let settings = Settings { image: Digest::of(b"config"), runtime: None, user, limits };
        let addresses = vec!["10.89.0.2".to_owned(), "10.89.0.3".to_owned()];
        let place = Place { network: network(&plan, 0), addresses };
        let folder = "/jobs/test-1/attempt-0/node-1";
        let request = node(
            &settings,
            &plan,
            0,
            &plan.nodes[1],
            &place,
            folder,
            "/jobs/test-1/attempt-0/node-1/said.log",
        );
        insta::assert_json_snapshot!(request);
    }
}
