//! The JSON Schemas in docs/schemas, generated from the types in spec/.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let stale: Vec<String> = files(root)?
        .into_iter()
        .filter(|(path, text)| !fs::read_to_string(path).is_ok_and(|found| found == *text))
        .map(|(path, _)| path.display().to_string())
        .collect();
    if !stale.is_empty() {
        bail!("not what the types say: {}; renew with: cargo xtask bless", stale.join(", "));
    }
    Ok(())
}

pub(crate) fn write(root: &Path) -> anyhow::Result<()> {
    for (path, text) in files(root)? {
        fs::create_dir_all(folder(root))?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn folder(root: &Path) -> PathBuf {
    root.join("docs/schemas")
}

fn files(root: &Path) -> anyhow::Result<Vec<(PathBuf, String)>> {
    trainyard_spec::schema::all()
        .into_iter()
        .map(|(name, schema)| {
            let text = serde_json::to_string_pretty(&schema)? + "\n";
            Ok((folder(root).join(format!("{name}.schema.json")), text))
        })
        .collect()
}
