//! What is written about images: read by the formats' own tools, and the same each time.

mod pushing;
mod signing;
mod validators;

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;
use trainyard_builder::image::{Image, build};
use trainyard_builder::settings::Settings;
use trainyard_builder::supply::{Error, Facts, Kind, cyclonedx, provenance, spdx};
use trainyard_builder::{inspect, lock, oci};
use trainyard_spec::Digest;

use self::validators::Validators;
use crate::images;

/// Packages of a distribution, one of them with a machine-readable copyright file; a CUDA library; a file.
const MANIFEST: &str = r#"
version = 1
name = "supplied"
platform = "linux/amd64"
compression = "zstd"
[input.userland]
kind = "deb"
packages = ["libc6", "libgcc-s1", "gcc-12-base", "zlib1g"]
dependencies = false
[input.cuda]
kind = "cuda"
version = "13.0.2"
libraries = ["cudart"]
[input.files]
kind = "files"
path = "files"
into = "/usr/share/notes"
[config]
entrypoint = ["/lib64/ld-linux-x86-64.so.2"]
user = "65532:65532"
"#;

/// An image of real packages, where these can be had.
struct Supplied {
    folder: TempDir,
    manifest: PathBuf,
    settings: Settings,
    image: Image,
}

impl Supplied {
    fn build() -> Option<Self> {
        let folder = TempDir::new().unwrap();
        std::fs::create_dir(folder.path().join("files")).unwrap();
        std::fs::write(folder.path().join("files/note"), "a note").unwrap();
        let manifest = folder.path().join("image.toml");
        std::fs::write(&manifest, MANIFEST).unwrap();
        let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
        match lock::lock(&manifest, &settings, &|_| {}) {
            Err(lock::Error::Input { source, .. }) if source.is_out_of_reach() => {
                assert_ne!(
                    std::env::var("CI").as_deref(),
                    Ok("true"),
                    "CI must reach the packages: {source}"
                );
                eprintln!("SKIPPED, packages are out of reach: {source}");
                return None;
            }
            locked => drop(locked.unwrap()),
        }
        let image = build(&manifest, &settings, &|_| {}).unwrap();
        Some(Self { folder, manifest, settings, image })
    }

    fn facts(&self) -> Facts {
        Facts::read(&self.image.digest, &self.settings.cache).unwrap()
    }
}

/// The facts' files are exactly those of the layers.
fn check_files(facts: &Facts, layout: &Path) {
    let report = inspect::inspect(&oci::Layout::open(layout).unwrap()).unwrap();
    let of_layers: Vec<(String, Digest)> = report
        .layers
        .iter()
        .flat_map(|layer| layer.files.iter().map(|(path, file)| (path.clone(), file.digest)))
        .collect();
    // A hard link is a file of the tree, and no file of its own in a layer.
    let of_facts: std::collections::BTreeMap<_, _> =
        facts.files.iter().map(|(path, file)| (path.clone(), file.sha256)).collect();
    assert!(of_layers.len() > facts.files.len() / 2);
    for (path, digest) in of_layers {
        assert_eq!(of_facts.get(&path), Some(&digest), "{path}");
    }
    for file in facts.files.values() {
        assert!(facts.packages.contains_key(&file.package), "{}", file.package);
    }
}

fn check_documents(facts: &Facts) -> (Value, Value) {
    let (spdx, cyclonedx) = (spdx::write(facts).unwrap(), cyclonedx::write(facts).unwrap());
    assert!(spdx::write(facts).unwrap() == spdx && cyclonedx::write(facts).unwrap() == cyclonedx);
    if let Some(validators) = Validators::get() {
        validators.spdx(&spdx).unwrap();
        validators.cyclonedx(&cyclonedx).unwrap();
        // The validators are no yes-men.
        let broken = |bytes: &[u8], key: &str| {
            let mut value: Value = serde_json::from_slice(bytes).unwrap();
            value[key] = Value::from("nonsense");
            serde_json::to_vec(&value).unwrap()
        };
        validators.spdx(&broken(&spdx, "documentNamespace")).unwrap_err();
        validators.cyclonedx(&broken(&cyclonedx, "serialNumber")).unwrap_err();
    }
    (serde_json::from_slice(&spdx).unwrap(), serde_json::from_slice(&cyclonedx).unwrap())
}

fn by_name<'a>(list: &'a Value, name: &str) -> &'a Value {
    list.as_array()
        .unwrap()
        .iter()
        .find(|one| one["name"] == name)
        .unwrap_or_else(|| panic!("{name} in {list}"))
}

/// How it was built: everything that the lock names, and the crates, by digest.
fn check_provenance(facts: &Facts) -> Value {
    let statement = provenance::write(facts).unwrap();
    assert!(provenance::write(facts).unwrap() == statement);
    let all = provenance::statements(facts).unwrap();
    if let Some(validators) = Validators::get() {
        for (kind, statement) in &all {
            validators.in_toto(statement).unwrap_or_else(|error| panic!("{kind}: {error}"));
        }
        let broken = |text: &str, by: &str| String::from_utf8(statement.clone()).unwrap().replace(text, by);
        validators.in_toto(broken("buildType", "buildTipe").as_bytes()).unwrap_err();
        validators.in_toto(broken("\"subject\"", "\"object\"").as_bytes()).unwrap_err();
    }
    let statement: Value = serde_json::from_slice(&statement).unwrap();
    assert_eq!(statement["subject"][0]["digest"]["sha256"], facts.image.hex());
    let definition = statement["predicate"]["buildDefinition"].clone();
    assert_eq!(definition["externalParameters"]["manifest"]["name"], facts.manifest.name.as_str());
    definition["resolvedDependencies"].clone()
}

fn digest_of<'a>(dependencies: &'a Value, name: &str) -> &'a str {
    by_name(dependencies, name)["digest"]["sha256"].as_str().unwrap()
}

#[test]
fn packages_files_and_licences_are_those_of_the_image() {
    let Some(supplied) = Supplied::build() else { return };
    let facts = supplied.facts();
    check_files(&facts, &supplied.image.layout);
    let (spdx, cyclonedx) = check_documents(&facts);

    let zlib = by_name(&spdx["packages"], "zlib1g");
    assert_eq!(zlib["licenseDeclared"], "Zlib");
    let purl = zlib["externalRefs"][0]["referenceLocator"].as_str().unwrap();
    assert!(purl.starts_with("pkg:deb/debian/zlib1g@1:1.2") && purl.ends_with("?arch=amd64"), "{purl}");
    assert!(zlib["sourceInfo"].as_str().unwrap().contains("source package zlib 1:1.2"), "{zlib}");
    // glibc's copyright file is prose.
    let libc = by_name(&spdx["packages"], "libc6");
    assert_eq!(libc["licenseDeclared"], "NOASSERTION");
    assert!(libc["licenseComments"].as_str().unwrap().contains("/usr/share/doc/libc6/copyright"), "{libc}");
    assert!(facts.packages["deb:libc6"].needs.contains("deb:libgcc-s1"), "{:?}", facts.packages["deb:libc6"]);

    let cudart = by_name(&cyclonedx["components"], "cudart");
    assert_eq!(cudart["purl"], "pkg:pypi/nvidia-cuda-runtime@13.0.96");
    assert_eq!(cudart["licenses"][0]["license"]["name"], "LicenseRef-NVIDIA-CUDA-EULA");
    let text = cudart["licenses"][0]["license"]["text"]["content"].as_str().unwrap();
    assert!(text.contains("libcudart.so, libcudart_static.a"), "the EULA itself: {text:.200}");
    let file = &cudart["components"][0];
    assert_eq!(file["name"], "/usr/local/cuda/lib64/libcudart.so.13");
    let of_file = &facts.files["/usr/local/cuda/lib64/libcudart.so.13"];
    assert_eq!(file["hashes"][0]["content"], of_file.sha256.hex());
    assert_eq!(of_file.original, None, "it is as NVIDIA hands it out");

    // The SHA-1s are right, by another program's word.
    let note = facts.files.iter().find(|(path, _)| path.ends_with("/note")).unwrap();
    let said = std::process::Command::new("sha1sum")
        .arg(supplied.folder.path().join("files/note"))
        .output()
        .unwrap();
    assert!(String::from_utf8(said.stdout).unwrap().starts_with(&note.1.sha1));
    assert_eq!(facts.packages[&note.1.package].kind, Kind::Input);

    let dependencies = check_provenance(&facts);
    let lock = std::fs::read_to_string(lock::path(&supplied.manifest)).unwrap();
    let named = lock.lines().filter_map(|line| line.strip_prefix("sha256 = \"")?.strip_suffix('"'));
    let named: Vec<_> = named.map(|digest| digest.trim_start_matches("sha256:").to_owned()).collect();
    assert!(named.len() >= 5, "{lock}");
    let dependencies_text = dependencies.to_string();
    for digest in &named {
        assert!(dependencies_text.contains(digest.as_str()), "{digest} in {dependencies_text}");
    }
    assert_eq!(digest_of(&dependencies, "/usr/share/notes/note"), Digest::of(b"a note").hex());
    check_kept(&supplied, &facts);
    pushing::check_differences(&supplied);
}

/// Facts stay with an image that is reused, and are made anew, the same, where they or the image are gone.
fn check_kept(supplied: &Supplied, facts: &Facts) {
    let path =
        supplied.settings.cache.join("images").join(format!("{}.facts.json", supplied.image.digest.hex()));
    let again = build(&supplied.manifest, &supplied.settings, &|_| {}).unwrap();
    assert!(again.reused);
    for damage in [None, Some("{}"), Some("no JSON")] {
        match damage {
            None => std::fs::remove_file(&path).unwrap(),
            Some(text) => std::fs::write(&path, text).unwrap(),
        }
        let error = Facts::read(&supplied.image.digest, &supplied.settings.cache).unwrap_err();
        assert!(matches!(error, Error::Unknown { .. }) && error.hint().is_some(), "{error:?}");
        build(&supplied.manifest, &supplied.settings, &|_| {}).unwrap();
        assert_eq!(supplied.facts(), *facts);
    }
    for folder in ["images", "built", "layers", "packages", "sha1"] {
        let _ = std::fs::remove_dir_all(supplied.settings.cache.join(folder));
    }
    let anew = build(&supplied.manifest, &supplied.settings, &|_| {}).unwrap();
    assert!(!anew.reused && anew.digest == supplied.image.digest);
    assert_eq!(supplied.facts(), *facts);
}

/// A base image is named by its digest, in both documents and the provenance.
pub(crate) fn check_base(image: &Image, settings: &Settings, base: &Digest) {
    let facts = Facts::read(&image.digest, &settings.cache).unwrap();
    let (spdx, cyclonedx) = check_documents(&facts);
    let named = by_name(&spdx["packages"], "base");
    assert_eq!(
        (&named["versionInfo"], &named["primaryPackagePurpose"]),
        (&base.to_string().into(), &"CONTAINER".into())
    );
    let of_image = spdx["relationships"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["spdxElementId"] == "SPDXRef-Image");
    assert!(of_image.clone().any(|one| one["relatedSpdxElement"] == named["SPDXID"]), "{named}");
    assert_eq!(by_name(&cyclonedx["components"], "base")["type"], "container");
    assert_eq!(digest_of(&check_provenance(&facts), "base image of input base"), base.hex());
}

#[test]
fn crates_and_the_c_library_that_are_linked_are_named() {
    let fixture = images::fixture();
    let facts = Facts::read(&fixture.image.digest, &fixture.settings.cache).unwrap();
    check_files(&facts, &fixture.image.layout);
    let (spdx, cyclonedx) = check_documents(&facts);

    let itoa = by_name(&spdx["packages"], "itoa");
    assert_eq!(itoa["licenseDeclared"], "MIT OR Apache-2.0");
    assert_eq!(itoa["checksums"][0]["algorithm"], "SHA256");
    let purl = itoa["externalRefs"][0]["referenceLocator"].as_str().unwrap();
    assert!(purl.starts_with("pkg:cargo/itoa@1."), "{purl}");
    let programs = by_name(&cyclonedx["components"], "programs");
    assert_eq!(programs["components"][0]["name"], "/usr/bin/fixture");
    let linked = &facts.packages["input:programs"].linked;
    assert!(linked.contains("crate:fixture@0.1.0"), "{linked:?}");
    assert!(linked.iter().any(|id| id.starts_with("rust-std@1.")), "{linked:?}");
    assert!(facts.packages["crate:fixture@0.1.0"].needs.iter().any(|id| id.starts_with("crate:itoa@1.")));
    // The host's own C library is nothing that a lock knows of.
    assert_eq!(linked.contains("deb:libc6-dev"), fixture.image.not_reproducible.is_none(), "{linked:?}");
    let dependencies = check_provenance(&facts);
    let archive =
        facts.packages.values().find(|package| package.name == "itoa").unwrap().archive.clone().unwrap();
    assert_eq!(digest_of(&dependencies, &archive.name), archive.sha256.hex());
    let toolchain = &by_name(&dependencies, "toolchain of input programs")["digest"]["gitCommit"];
    assert_eq!(toolchain.as_str().map(str::len), Some(40), "{toolchain}");
    let cargo_lock = std::fs::read(fixture.manifest.ancestors().nth(3).unwrap().join("Cargo.lock")).unwrap();
    assert_eq!(digest_of(&dependencies, "../../Cargo.lock"), Digest::of(&cargo_lock).hex());
    let folder = fixture.settings.cache.parent().unwrap().to_str().unwrap();
    assert!(
        !spdx.to_string().contains(folder) && !cyclonedx.to_string().contains(folder),
        "no path of this machine"
    );
}
