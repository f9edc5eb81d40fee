//! What the launcher's environment says, resolved once. Nothing deeper reads the environment.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use trainyard_spec::env;

/// This rank's place in the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Global rank.
    pub rank: u32,
    /// Ranks in all.
    pub world_size: u32,
    /// Name or address of rank 0's node.
    pub master_addr: String,
    /// Port on which rank 0 listens.
    pub master_port: u16,
    /// Id of this attempt.
    pub run_id: String,
    /// File for events.
    pub events: Option<PathBuf>,
    /// Threads to compute with.
    pub threads: usize,
}

/// An environment that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// A variable is not there.
    #[error(
        "{name} is not set; needed with WORLD_SIZE above 1 (torchrun's environment; `trainyard launch` sets it)"
    )]
    Missing {
        /// The variable.
        name: &'static str,
    },
    /// A variable's value is wrong.
    #[error("{name} is {found:?}; needed is {needed}")]
    Wrong {
        /// The variable.
        name: &'static str,
        /// Its value.
        found: String,
        /// What it should be.
        needed: String,
    },
}

/// File for events, known even when the rest of the environment is wrong.
pub fn events_file(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    variable(env::EVENTS).filter(|path| !path.is_empty()).map(PathBuf::from)
}

impl Settings {
    /// Resolves the environment. Without RANK and WORLD_SIZE the rank is alone. `threads` overrides OMP_NUM_THREADS;
    /// without both, the node's processors are divided among its ranks.
    ///
    /// # Errors
    /// When a variable is missing or wrong.
    pub fn resolve(
        threads: Option<NonZeroUsize>,
        processors: usize,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, SettingsError> {
        let number = |name: &'static str, needed: &str, fits: &dyn Fn(u32) -> bool| {
            variable(name)
                .map(|text| match text.parse() {
                    Ok(number) if fits(number) => Ok(number),
                    _ => Err(SettingsError::Wrong { name, found: text, needed: needed.to_owned() }),
                })
                .transpose()
        };
        let positive = |number| number > 0;
        let world_size = number(env::WORLD_SIZE, "a number of at least 1", &positive)?.unwrap_or(1);
        let below = |rank| rank < world_size;
        let rank = number(env::RANK, &format!("below WORLD_SIZE ({world_size})"), &below)?;
        let port = |port| (1..=u16::MAX.into()).contains(&port);
        let master_port = number(env::MASTER_PORT, "a port, 1 to 65535", &port)?;
        let present = |name| SettingsError::Missing { name };
        let (rank, master_addr, master_port) = if world_size == 1 {
            (0, String::new(), 0)
        } else {
            (
                rank.ok_or(present(env::RANK))?,
                variable(env::MASTER_ADDR).ok_or(present(env::MASTER_ADDR))?,
                master_port.ok_or(present(env::MASTER_PORT))?,
            )
        };
        let local = number(env::LOCAL_WORLD_SIZE, "a number of at least 1", &positive)?.unwrap_or(1);
        let threads = match threads {
            Some(threads) => threads.get(),
            None => match number(env::OMP_NUM_THREADS, "a number of at least 1", &positive)? {
                Some(threads) => threads as usize,
                None => (processors / local as usize).max(1),
            },
        };
        Ok(Self {
            rank,
            world_size,
            master_addr,
            master_port: master_port as u16,
            run_id: variable(env::RUN_ID).unwrap_or_default(),
            events: events_file(&variable),
            threads,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(variables: &[(&str, &str)]) -> Result<Settings, String> {
        Settings::resolve(None, 8, |name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
        .map_err(|error| error.to_string())
    }

    #[test]
    fn a_rank_without_environment_is_alone() {
        let settings = resolve(&[]).unwrap();
        assert_eq!((settings.rank, settings.world_size, settings.threads), (0, 1, 8));
    }

    #[test]
    fn torchruns_environment() {
        let group = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node-0"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "a-1"),
        ];
        let settings = resolve(&group).unwrap();
        assert_eq!((settings.rank, settings.world_size, settings.threads), (3, 4, 4));
        assert_eq!((settings.master_port, settings.run_id.as_str()), (29500, "a-1"));
    }

    #[test]
    fn wrong_variables_are_named() {
        for (variables, expect) in [
            (&[("WORLD_SIZE", "0")][..], "WORLD_SIZE is \"0\"; needed is a number of at least 1"),
            (&[("WORLD_SIZE", "2"), ("RANK", "2")], "RANK is \"2\"; needed is below WORLD_SIZE (2)"),
            (&[("WORLD_SIZE", "2")], "RANK is not set"),
            (&[("WORLD_SIZE", "2"), ("RANK", "1")], "MASTER_ADDR is not set"),
            (&[("MASTER_PORT", "70000")], "MASTER_PORT is \"70000\""),
            (&[("OMP_NUM_THREADS", "many")], "OMP_NUM_THREADS is \"many\""),
        ] {
            let error = resolve(variables).unwrap_err();
            assert!(error.contains(expect), "{error}");
        }
    }
}
