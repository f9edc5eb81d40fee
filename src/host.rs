//! What this machine has, as far as images ask: its NVIDIA driver and GPUs.

use std::process::Command;

use trainyard_builder::contract::host::{Host, SMI_ARGUMENTS, driver_from_proc};
use trainyard_spec::Exit;

use crate::failure::Failure;

/// Where the kernel's module of the driver says which it is.
const DRIVER: &str = "/proc/driver/nvidia/version";

/// Asks nvidia-smi, and where there is none, or it does not answer, the kernel.
pub(crate) fn read() -> Result<Host, Failure> {
    let unreadable = |error: trainyard_builder::contract::host::Error| {
        Failure::new(Exit::Infrastructure, error).with_hint(Some("run nvidia-smi, and repair the driver"))
    };
    if let Ok(answer) = Command::new("nvidia-smi").args(SMI_ARGUMENTS).output()
        && answer.status.success()
    {
        return Host::from_smi(&String::from_utf8_lossy(&answer.stdout)).map_err(unreadable);
    }
    let driver = std::fs::read_to_string(DRIVER).ok().map(|text| driver_from_proc(&text)).transpose();
    Ok(Host { driver: driver.map_err(unreadable)?, gpus: Vec::new() })
}
