//! What is wrong with a file a person wrote: all of it, each with its place and the way out.

use std::fmt;

/// One thing that is wrong at one place of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// What was found and what was needed.
    pub message: String,
    /// The way out, where there is one to name.
    pub hint: Option<String>,
}

/// Everything that is wrong with one file, in the order of its lines. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults {
    /// The file as the user named it.
    pub file: String,
    /// The faults, sorted by place.
    pub faults: Vec<Fault>,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{}:{}:{}: {}", self.file, fault.line, fault.column, fault.message)?;
            if let Some(hint) = &fault.hint {
                write!(f, "\n  hint: {hint}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}
