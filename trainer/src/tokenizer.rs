//! Text to tokens and back.
//!
//! The byte tokenizer has one token for each byte, so every byte string comes back as it was. Left out: subword
//! tokenizers; docs/tokenizers.md says what they would cost.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A tokenizer, as job manifests, data sets and checkpoints name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tokenizer {
    /// A token is a byte.
    Byte,
}

/// A tokenizer that this build does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "tokenizer is {found:?}; needed is \"byte\", the only one of this version (docs/tokenizers.md says why)"
)]
pub struct TokenizerError {
    found: String,
}

impl FromStr for Tokenizer {
    type Err = TokenizerError;

    fn from_str(name: &str) -> Result<Self, TokenizerError> {
        match name {
            "byte" => Ok(Self::Byte),
            _ => Err(TokenizerError { found: name.to_owned() }),
        }
    }
}

impl Tokenizer {
    /// Number of different tokens.
    pub const fn vocabulary(self) -> u32 {
        match self {
            Self::Byte => 256,
        }
    }

    /// The tokens of `text`, which need not be UTF-8.
    pub fn encode(self, text: &[u8]) -> Vec<u32> {
        match self {
            Self::Byte => text.iter().map(|&byte| byte.into()).collect(),
        }
    }

    /// The bytes of one token; a character may take several tokens.
    pub fn decode(self, token: u32) -> u8 {
        match self {
            Self::Byte => token as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_byte_string_comes_back(text: Vec<u8>) {
            let tokens = Tokenizer::Byte.encode(&text);
            prop_assert!(tokens.iter().all(|&token| token < Tokenizer::Byte.vocabulary()));
            let back: Vec<u8> = tokens.iter().map(|&token| Tokenizer::Byte.decode(token)).collect();
            prop_assert_eq!(back, text);
        }
    }

    #[test]
    fn another_tokenizer_is_refused_by_name() {
        let error = "gpt2/tokenizer.json".parse::<Tokenizer>().unwrap_err().to_string();
        assert!(error.contains("gpt2/tokenizer.json") && error.contains("\"byte\""), "{error}");
    }
}
