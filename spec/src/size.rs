//! Sizes in bytes, as people write and read them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes. Written as a number with a decimal unit (`kB`, `MB`, `GB`: powers of 1000) or a binary one
/// (`KiB`, `MiB`, `GiB`: powers of 1024); `B` or no unit is bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// Text that is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a size; a size is a number with B, kB, MB, GB, KiB, MiB or GiB, as in \"10 MB\"")]
pub struct SizeError {
    found: String,
}

const UNITS: [(&str, u64); 8] = [
    ("", 1),
    ("B", 1),
    ("kB", 1000),
    ("MB", 1000 * 1000),
    ("GB", 1000 * 1000 * 1000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let wrong = || SizeError { found: text.to_owned() };
        let digits = text.trim().trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = &text.trim()[digits.len()..];
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        let digits = digits.trim_end();
        if let Ok(whole) = digits.parse::<u64>() {
            return whole.checked_mul(*factor).map(Self).ok_or_else(wrong);
        }
        let number: f64 = digits.parse().map_err(|_| wrong())?;
        let bytes = number * *factor as f64;
        if number.is_finite() && (0.0..=9.0e15).contains(&bytes) {
            Ok(Self(bytes.round() as u64))
        } else {
            Err(wrong())
        }
    }
}

/// Prints three significant digits in decimal units: `9.87 MB`.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["B", "kB", "MB", "GB"] {
            if value < 999.5 {
                return match value {
                    _ if unit == "B" => write!(f, "{value} B"),
                    v if v < 9.995 => write!(f, "{v:.2} {unit}"),
                    v if v < 99.95 => write!(f, "{v:.1} {unit}"),
                    v => write!(f, "{v:.0} {unit}"),
                };
            }
            value /= 1000.0;
        }
        write!(f, "{value:.2} TB")
    }
}

impl<'de> toml_spanner::FromToml<'de> for ByteSize {
    fn from_toml(
        ctx: &mut toml_spanner::Context<'de>,
        item: &toml_spanner::Item<'de>,
    ) -> Result<Self, toml_spanner::Failed> {
        if item.as_i64().is_some() {
            return u64::from_toml(ctx, item).map(Self);
        }
        toml_spanner::helper::parse_string::from_toml(ctx, item)
    }
}

impl toml_spanner::ToToml for ByteSize {
    fn to_toml<'a>(
        &'a self,
        arena: &'a toml_spanner::Arena,
    ) -> Result<toml_spanner::Item<'a>, toml_spanner::ToTomlError> {
        self.0.to_toml(arena)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for ByteSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ByteSize".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "oneOf": [
                { "type": "integer", "minimum": 0 },
                { "type": "string", "pattern": "^[0-9]+(\\.[0-9]+)? *(B|kB|MB|GB|KiB|MiB|GiB)?$" },
            ]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_units() {
        for (text, bytes) in [
            ("0", 0),
            ("10 MB", 10_000_000),
            ("1.5GiB", 3 << 29),
            ("64KiB", 65_536),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "MB", "-1", "1 mb", "1e400", "nan", "99999999999 GB", "1 MB 2"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn prints_three_digits() {
        for (bytes, text) in
            [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_996_000, "10.0 MB"), (123_456_789, "123 MB")]
        {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }
}
