//! How much memory a model takes and for what, before any of it is allocated.

use std::fmt;

use trainyard_spec::ByteSize;

/// One purpose's share of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// What the memory is for.
    pub purpose: &'static str,
    /// Its size.
    pub bytes: u64,
}

/// All memory of a model, by purpose. Printing it gives a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Uses, largest first where several are printed.
    pub uses: Vec<MemoryUse>,
}

impl MemoryPlan {
    /// Adds `bytes` for `purpose`.
    pub fn add(&mut self, purpose: &'static str, bytes: u64) {
        match self.uses.iter_mut().find(|entry| entry.purpose == purpose) {
            Some(entry) => entry.bytes += bytes,
            None => self.uses.push(MemoryUse { purpose, bytes }),
        }
    }

    /// Bytes of all purposes together.
    pub fn total(&self) -> u64 {
        self.uses.iter().map(|entry| entry.bytes).sum()
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.uses.iter().map(|entry| entry.purpose.len()).max().unwrap_or(0);
        for entry in &self.uses {
            let size = ByteSize(entry.bytes).to_string();
            writeln!(f, "{:width$}  {size:>8}", entry.purpose)?;
        }
        let size = ByteSize(self.total()).to_string();
        write!(f, "{:width$}  {size:>8}", "total")
    }
}
