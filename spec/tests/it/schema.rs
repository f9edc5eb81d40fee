//! The JSON Schemas say the same as the readers.

use serde_json::Value;
use trainyard_spec::schema::all;

use crate::manifests::{CORPUS, IMAGE, JOB, edit};

fn accepts(schema: &str, text: &str) -> bool {
    let arena = toml_spanner::Arena::new();
    let document = toml_spanner::parse(text, &arena).unwrap();
    let value: Value = serde_json::to_value(document.table()).unwrap();
    let (_, schema) = all().into_iter().find(|(name, _)| *name == schema).unwrap();
    jsonschema::validator_for(schema.as_value()).unwrap().is_valid(&value)
}

#[test]
fn schemas_accept_what_the_readers_accept() {
    assert!(accepts("image-manifest", IMAGE));
    assert!(accepts("job-manifest", JOB));
    assert!(accepts("corpus-manifest", CORPUS));
}

#[test]
fn schemas_refuse_what_the_readers_refuse() {
    for (old, new) in [
        ("version = 1", "version = 2"),
        ("name = \"tiny\"", "name = \"Tiny\""),
        ("name = \"tiny\"", "name = \"tiny\"\ncolour = 1"),
        ("max-size = \"10 MB\"", "max-size = true"),
        ("max-size = \"10 MB\"", "max-size = \"10 megs\""),
        ("linux/amd64", "linux/riscv"),
        ("kind = \"deb\"", "kind = \"rpm\""),
        ("packages = [\"libc6-dev\"]", "packages = [\"libc6-dev\"]\nextra = 1"),
        ("workspace = \"../..\"\n", ""),
    ] {
        assert!(!accepts("image-manifest", &edit(IMAGE, old, new)), "{new}");
    }
    for (old, new) in [("nodes = 4", "nodes = -4"), ("steps = 10", "steps = \"10\""), ("layers = 2", "")] {
        assert!(!accepts("job-manifest", &edit(JOB, old, new)), "{new}");
    }
}
