//! Names that become file names, container names, host names and labels.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A DNS label: 1 to 63 of `a-z`, `0-9` and `-`, starting and ending with a letter or digit (RFC 1123, lower case).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Name(String);

/// Text that is not a [`Name`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{found:?} is not a name; a name is 1 to 63 of a-z, 0-9 and '-', and starts and ends with a letter or digit"
)]
pub struct NameError {
    found: String,
}

impl Name {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let well_formed = (1..=63).contains(&text.len())
            && text.bytes().all(inner)
            && !text.starts_with('-')
            && !text.ends_with('-');
        if well_formed { Ok(Self(text.to_owned())) } else { Err(NameError { found: text.to_owned() }) }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

crate::toml::string_type!(Name, "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_labels_alone() {
        for good in ["a", "gpt-small", "node-0", &"x".repeat(63)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a/b", "a b", "é", &"x".repeat(64)] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }
}
