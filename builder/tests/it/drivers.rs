//! Libraries of the driver: refused, unless they are those of forward compatibility and the image stays in the house.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use trainyard_builder::image::{self, build};
use trainyard_builder::oci::Layout;
use trainyard_builder::settings::Settings;
use trainyard_builder::{driver, inspect, lock, unpack};

use crate::elf::with_note;
use crate::elf_files::Library;

fn manifest(folder: &Path, head: &str, tail: &str) -> PathBuf {
    let text = format!(
        r#"
version = 1
name = "driver"
platform = "linux/amd64"
{head}
[input.files]
kind = "files"
path = "files"
into = "/"
{tail}
[config]
entrypoint = ["/program"]
user = "65532:65532"
"#
    );
    let path = folder.join("image.toml");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn libraries_of_the_driver_come_from_the_host_or_from_its_package_of_compatibility() {
    let folder = TempDir::new().unwrap();
    let compat = folder.path().join("files/usr/local/cuda-13.0/compat");
    std::fs::create_dir_all(&compat).unwrap();
    std::fs::write(folder.path().join("files/program"), "").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path().join("files/program"), executable).unwrap();
    let library = compat.join("libcuda.so.580.65.06");
    std::os::unix::fs::symlink("libcuda.so.580.65.06", compat.join("libcuda.so.1")).unwrap();
    let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
    let attempt = |head: &str, tail: &str| {
        let path = manifest(folder.path(), head, tail);
        lock::lock(&path, &settings, &|_| {}).unwrap();
        build(&path, &settings, &|_| {})
    };

    let without = Library::named("libcuda.so.1");
    std::fs::write(&library, without.bytes()).unwrap();
    let error = attempt("", "").unwrap_err();
    assert!(matches!(error, image::Error::Driver(driver::Error::Inside { .. })), "{error:?}");
    assert!(
        error.to_string().contains("/usr/local/cuda-13.0/compat/libcuda.so.580.65.06 (input files)"),
        "{error}"
    );
    let compatible = "driver = \"compat\"\nlocal-only = true";
    let error = attempt(compatible, "").unwrap_err();
    assert!(matches!(error, image::Error::Driver(driver::Error::None)), "{error:?}");

    let json = r#"{"Format":1,"CUDA Version":"13.0","Driver":[535,550,570]}"#;
    std::fs::write(&library, with_note(json, "NVIDIA Corporation")).unwrap();
    for closure in ["", "[closure]"] {
        let image = attempt(compatible, closure).unwrap();
        let layout = Layout::open(&image.layout).unwrap();
        let report = inspect::inspect(&layout).unwrap();
        assert_eq!(report.labels["trainyard.cuda.forward"], "13.0=535,550,570");
        assert_eq!(report.labels["trainyard.local-only"], "true");
        assert_eq!(report.contract.terms.labels()["trainyard.cuda.forward"], "13.0=535,550,570");
        assert!(report.remarks.is_empty(), "{:?}", report.remarks);
        let root = unpack::unpack(&layout, &settings.cache).unwrap();
        let link = std::fs::read_link(root.join("usr/local/cuda/compat")).unwrap();
        assert_eq!(link, Path::new("/usr/local/cuda-13.0/compat"));
        assert!(root.join("usr/local/cuda-13.0/compat/libcuda.so.1").exists());
    }
}
