//! The version that each persisted format starts with.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The number `N` in a format's `version` field. Any other number is refused when read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FormatVersion<const N: u32>;

fn refusal(found: i64, known: u32) -> String {
    format!("format version {found} is unknown here; this trainyard reads version {known}")
}

impl<const N: u32> Serialize for FormatVersion<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(N)
    }
}

impl<'de, const N: u32> Deserialize<'de> for FormatVersion<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match i64::deserialize(deserializer)? {
            found if found == i64::from(N) => Ok(Self),
            found => Err(serde::de::Error::custom(refusal(found, N))),
        }
    }
}

impl<'de, const N: u32> toml_spanner::FromToml<'de> for FormatVersion<N> {
    fn from_toml(
        ctx: &mut toml_spanner::Context<'de>,
        item: &toml_spanner::Item<'de>,
    ) -> Result<Self, toml_spanner::Failed> {
        match i64::from_toml(ctx, item)? {
            found if found == i64::from(N) => Ok(Self),
            found => Err(ctx.push_error(toml_spanner::Error::custom_at(refusal(found, N), item))),
        }
    }
}

impl<const N: u32> toml_spanner::ToToml for FormatVersion<N> {
    fn to_toml<'a>(
        &'a self,
        _: &'a toml_spanner::Arena,
    ) -> Result<toml_spanner::Item<'a>, toml_spanner::ToTomlError> {
        Ok(toml_spanner::Item::from(i64::from(N)))
    }
}

#[cfg(feature = "schema")]
impl<const N: u32> schemars::JsonSchema for FormatVersion<N> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("FormatVersion{N}").into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "const": N })
    }
}
