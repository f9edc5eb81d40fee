//! Reading TOML that people write, with every fault of a file reported at once, and writing TOML that machines write.

pub use toml_spanner::FromToml;
use toml_spanner::{Arena, Document, ErrorKind, Span, ToToml};

use crate::faults::{Fault, Faults};

/// A document read from TOML whose fields depend on each other.
pub trait Validate {
    /// Reports every rule across fields that the document breaks.
    fn validate(&self, faults: &mut Collector<'_, '_>);
}

/// Collects the faults that [`Validate::validate`] finds, each at the place of a dotted key.
pub struct Collector<'c, 'doc> {
    document: &'c Document<'doc>,
    text: &'c str,
    faults: Vec<Fault>,
}

impl Collector<'_, '_> {
    /// Reports `message` at the value of the dotted `key`, or where a missing key's nearest table stands.
    pub fn at(&mut self, key: &str, message: impl Into<String>, hint: Option<&str>) {
        let mut parts = key.split('.');
        let mut span = Span::new(0, 0);
        let mut item = parts.next().and_then(|part| self.document.table().get(part));
        while let Some(found) = item {
            span = found.span();
            item = parts.next().and_then(|part| found.as_table().and_then(|table| table.get(part)));
        }
        let (line, column) = place(self.text, span);
        self.faults.push(Fault { line, column, message: message.into(), hint: hint.map(str::to_owned) });
    }
}

/// Reads `text`, the content of `file`, into a `T`.
///
/// # Errors
/// All faults of the file: syntax, unknown keys, wrong types and values, and broken rules across fields.
pub fn read<T>(file: &str, text: &str) -> Result<T, Faults>
where
    T: Validate + for<'de> FromToml<'de>,
{
    let refuse = |mut faults: Vec<Fault>| {
        faults.sort_by_key(|fault| (fault.line, fault.column));
        Faults { file: file.to_owned(), faults }
    };
    let arena = Arena::new();
    let mut document = toml_spanner::parse_recoverable(text, &arena);
    // What a broken line was meant to say is not missing.
    let broken = !document.errors().is_empty();
    let value = document.to::<T>().map_err(|found| {
        let told =
            |error: &&toml_spanner::Error| !broken || !matches!(error.kind(), ErrorKind::MissingField(_));
        refuse(found.errors.iter().filter(told).map(|error| fault(text, error)).collect())
    })?;
    let mut collector = Collector { document: &document, text, faults: Vec::new() };
    value.validate(&mut collector);
    if collector.faults.is_empty() { Ok(value) } else { Err(refuse(collector.faults)) }
}

/// Writes `value` as TOML.
///
/// # Panics
/// When `T` cannot be written as TOML, which is a property of the type and not of the value.
#[expect(clippy::expect_used, reason = "a property of the type, proved by each type's round-trip test")]
pub fn write<T: ToToml>(value: &T) -> String {
    toml_spanner::to_string(value).expect("the type has a TOML form")
}

fn fault(text: &str, error: &toml_spanner::Error) -> Fault {
    let (line, column) = place(text, error.span());
    let message = error.message_with_path(text);
    // Inputs are the one tagged type in TOML, and the reader does not list its tags.
    match error.kind() {
        ErrorKind::Wanted { expected: &"a known variant", .. } => Fault {
            line,
            column,
            message: message.replace("expected a known variant, found table", "unknown kind"),
            hint: Some(format!("kind is one of {}", crate::input::KINDS)),
        },
        _ => Fault { line, column, message, hint: None },
    }
}

fn place(text: &str, span: Span) -> (u32, u32) {
    let start = span.range().start.min(text.len());
    let before = text.get(..start).unwrap_or(text);
    let line = before.matches('\n').count();
    let column = before.rsplit('\n').next().unwrap_or(before).chars().count();
    (u32::try_from(line + 1).unwrap_or(u32::MAX), u32::try_from(column + 1).unwrap_or(u32::MAX))
}

/// Gives a type with `FromStr`, `Display` and `Clone` its TOML form, its serde string conversions and its JSON
/// Schema: a string that matches `pattern`.
macro_rules! string_type {
    ($type:ty, $pattern:literal) => {
        impl<'de> toml_spanner::FromToml<'de> for $type {
            fn from_toml(
                ctx: &mut toml_spanner::Context<'de>,
                item: &toml_spanner::Item<'de>,
            ) -> Result<Self, toml_spanner::Failed> {
                toml_spanner::helper::parse_string::from_toml(ctx, item)
            }
        }

        impl toml_spanner::ToToml for $type {
            fn to_toml<'a>(
                &'a self,
                arena: &'a toml_spanner::Arena,
            ) -> Result<toml_spanner::Item<'a>, toml_spanner::ToTomlError> {
                toml_spanner::helper::display::to_toml(self, arena)
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $type {
            type Error = <$type as std::str::FromStr>::Err;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "pattern": $pattern })
            }
        }
    };
}
pub(crate) use string_type;
