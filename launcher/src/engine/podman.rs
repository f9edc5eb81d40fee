//! x
use super::*;
#[derive(Debug)]
pub(crate) struct Podman;
pub(super) async fn choose(_: &EngineSettings, _: &Image) -> Result<Chosen, EngineError> {
    Err(EngineError::NoPodman { looked: "nothing".to_owned() })
}
pub(super) async fn cleanup(_: &LaunchPlan) -> Vec<EngineError> {
    Vec::new()
}
impl Podman {
    pub(super) async fn open(_: &LaunchPlan) -> Result<Self, EngineError> {
        Err(EngineError::NoPodman { looked: "nothing".to_owned() })
    }
    pub(super) async fn prepare(&mut self, _: &LaunchPlan, _: u32) -> Result<(), EngineError> {
        Ok(())
    }
    pub(super) async fn start(&mut self, _: &[(NodePlan, PathBuf)]) -> Result<Vec<Started>, EngineError> {
        Ok(Vec::new())
    }
    pub(super) async fn teardown(&mut self) -> Vec<EngineError> {
        Vec::new()
    }
}
