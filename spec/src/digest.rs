//! Content digests. Only sha256 exists here: it is what OCI, Python indexes and Debian archives all use.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A sha256 digest, written `sha256:<64 lower-case hex digits>`. A value of this type is always well formed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 32]);

/// Text that is not a sha256 digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a digest; a digest is \"sha256:\" and 64 lower-case hex digits")]
pub struct DigestError {
    found: String,
}

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest whose 32 bytes a hasher has produced.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 64 hex digits without the algorithm, as used in file names.
    pub fn hex(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// The first 12 hex digits, for people.
    pub fn short(&self) -> String {
        self.hex()[..12].to_owned()
    }

    /// Reads the 64 hex digits alone, as Python indexes and Debian archives write them.
    ///
    /// # Errors
    /// When `hex` is anything else than 64 lower-case hex digits.
    pub fn from_hex(hex: &str) -> Result<Self, DigestError> {
        let wrong = || DigestError { found: hex.to_owned() };
        let digits = hex.as_bytes();
        if digits.len() != 64 {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0]).ok_or_else(wrong)? << 4 | nibble(pair[1]).ok_or_else(wrong)?;
        }
        Ok(Self(bytes))
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let hex = text.strip_prefix("sha256:").ok_or_else(|| DigestError { found: text.to_owned() })?;
        Self::from_hex(hex).map_err(|_| DigestError { found: text.to_owned() })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

crate::toml::string_type!(Digest, r"^sha256:[0-9a-f]{64}$");

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn known_answer() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        assert_eq!(EMPTY.parse(), Ok(Digest::of(b"")));
    }

    #[test]
    fn refuses_what_is_not_a_digest() {
        let long = format!("{EMPTY}0");
        for text in
            ["", "sha256:", "sha512:00", &EMPTY[7..], &EMPTY.to_uppercase(), &long, &EMPTY.replace('e', "g")]
        {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
