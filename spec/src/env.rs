//! Every environment variable that Trainyard reads or sets.
//!
//! Names only; who reads them resolves them once, in its settings.

/// Read: where all state lives. Default: `$XDG_CACHE_HOME/trainyard` for what can be made again and
/// `$XDG_STATE_HOME/trainyard` for jobs; with this set, both lie below it.
pub const HOME: &str = "TRAINYARD_HOME";
/// Read: no colour in any output when set and not empty (<https://no-color.org>).
pub const NO_COLOR: &str = "NO_COLOR";
/// Read: address of the Podman service, as Podman's own client reads it.
pub const CONTAINER_HOST: &str = "CONTAINER_HOST";
/// Read: where a rootless Podman service has its socket (XDG Base Directory).
pub const XDG_RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";
/// Read: a mirror of NVIDIA's redistributable archives: the address or folder that holds `redistrib_X.Y.Z.json`.
pub const CUDA_REDIST: &str = "TRAINYARD_CUDA_REDIST";
/// Read: a folder that `trainyard vendor` wrote, in which locked files are looked for before any server is asked.
pub const VENDORED: &str = "TRAINYARD_VENDORED";
/// Read: the password of an encrypted signing key, as cosign reads it.
pub const COSIGN_PASSWORD: &str = "COSIGN_PASSWORD";

/// Set for `trainyard-node`: path of its [`crate::plan::NodePlan`] as JSON, as seen inside the node.
pub const NODE_PLAN: &str = "TRAINYARD_NODE_PLAN";
/// Set for each rank: path of the file or pipe to which the training program writes
/// [`crate::event::TrainerEvent`]s as JSON lines. A program that ignores it is still launched and supervised.
pub const EVENTS: &str = "TRAINYARD_EVENTS";

/// Set for each rank, torchrun's contract: global rank, 0 to world size - 1.
pub const RANK: &str = "RANK";
/// Set for each rank: rank within the node.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Set for each rank: index of the node.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Set for each rank: rank within its role; there is one role, so the same as [`RANK`].
pub const ROLE_RANK: &str = "ROLE_RANK";
/// Set for each rank: name of the role.
pub const ROLE_NAME: &str = "ROLE_NAME";
/// Set for each rank: number of ranks in the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Set for each rank: number of ranks on this node.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Set for each rank: number of nodes.
pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
/// Set for each rank: number of ranks of the role; the same as [`WORLD_SIZE`].
pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
/// Set for each rank: address of node 0, on which rank 0 listens.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Set for each rank: TCP port on [`MASTER_ADDR`].
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Set for each rank: attempts before this one.
pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Set for each rank: restarts allowed.
pub const MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// Set for each rank: id of this attempt, new for each.
pub const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// Set for each rank: file to which a PyTorch program writes its error as JSON.
pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Set for each rank: NCCL errors end the process instead of hanging it.
pub const NCCL_ASYNC_ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
/// Set for each rank unless the job sets it: threads of a rank.
pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
