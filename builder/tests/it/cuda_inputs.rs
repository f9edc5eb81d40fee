//! CUDA libraries from wheels and from NVIDIA's archives: small ones of the same form, of which an image is the same either
//! way.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;
use trainyard_builder::image::{self, build};
use trainyard_builder::index::{FindLinks, IndexSettings, PythonIndexes, Redist};
use trainyard_builder::lock;
use trainyard_builder::settings::Settings;
use trainyard_spec::Digest;

use crate::elf_files::Library;

const LICENCE: &str = "what may be done with it";

fn wheel(folder: &Path, name: &str, entries: &[(&str, &[u8])]) {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (path, body) in entries {
        zip.start_file(*path, zip::write::SimpleFileOptions::default()).unwrap();
        zip.write_all(body).unwrap();
    }
    std::fs::write(folder.join(name), zip.finish().unwrap().into_inner()).unwrap();
}

/// An archive as NVIDIA packs them: the library under its full version, and links to it.
fn archive(root: &Path, component: &str, version: &str, libraries: &[(&str, &str)]) -> serde_json::Value {
    let inside = format!("{component}-linux-x86_64-{version}-archive");
    let mut tar = tar::Builder::new(Vec::new());
    let mut file = |path: &str, body: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(body.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, format!("{inside}/{path}"), body).unwrap();
    };
    file("LICENSE", LICENCE.as_bytes());
    file("lib/stubs/libcublas.so", b"a stub");
    for (soname, full) in libraries {
        file(&format!("lib/{full}"), &library(soname));
    }
    for (soname, full) in libraries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        tar.append_link(&mut header, format!("{inside}/lib/{soname}"), full).unwrap();
    }
    let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
    xz.write_all(&tar.into_inner().unwrap()).unwrap();
    let bytes = xz.finish().unwrap();
    let relative = format!("{component}/linux-x86_64/{inside}.tar.xz");
    let path = root.join(&relative);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    let described = json!({"relative_path": relative, "sha256": Digest::of(&bytes).hex(), "size": bytes.len().to_string()});
    json!({"name": component, "version": version, "linux-x86_64": described})
}

fn library(soname: &str) -> Vec<u8> {
    let name: &'static str = Box::leak(soname.to_owned().into_boxed_str());
    Library::named(name).bytes()
}

fn settings(folder: &Path) -> Settings {
    let settings = Settings::from_environment(folder.join("cache")).unwrap();
    let python = PythonIndexes {
        find_links: vec![FindLinks::Folder(folder.join("wheels"))],
        no_index: true,
        ..PythonIndexes::default()
    };
    let cuda = Some(Redist::Folder(folder.join("redist")));
    Settings { index: IndexSettings { python, cuda, ..IndexSettings::default() }, ..settings }
}

fn manifest(folder: &Path, from: &str, more: &str) -> PathBuf {
    let text = format!(
        r#"
version = 1
name = "small"
platform = "linux/amd64"
[input.cuda]
kind = "cuda"
version = "13.0.2"
libraries = ["cudart", "cublas", "nccl"]
from = "{from}"
{more}
[input.own]
kind = "files"
path = "own"
into = "/"
[config]
entrypoint = ["/program"]
user = "65532:65532"
"#
    );
    let path = folder.join(format!("{from}.toml"));
    std::fs::write(&path, text).unwrap();
    path
}

fn offer(folder: &Path) {
    let (wheels, redist) = (folder.join("wheels"), folder.join("redist"));
    for folder in [&wheels, &redist, &folder.join("own")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let program = folder.join("own/program");
    std::fs::write(&program, "").unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let requires = "Metadata-Version: 2.4\nRequires-Dist: nvidia-cublas==13.1.0.3.*; extra == 'cublas'\n\
        Requires-Dist: nvidia-cuda-runtime==13.0.96.*; extra == 'cudart'\n";
    let toolkit = [("cuda_toolkit-13.0.2.dist-info/METADATA", requires.as_bytes())];
    wheel(&wheels, "cuda_toolkit-13.0.2-py2.py3-none-any.whl", &toolkit);
    for (name, version, sonames) in [
        ("nvidia_cublas", "13.1.0.3", &["libcublas.so.13", "libcublasLt.so.13"][..]),
        ("nvidia_cuda_runtime", "13.0.96", &["libcudart.so.13"]),
        ("nvidia_nccl_cu13", "2.28.9", &["libnccl.so.2"]),
    ] {
        let mut entries: Vec<(String, Vec<u8>)> =
            sonames.iter().map(|soname| (format!("nvidia/cu13/lib/{soname}"), library(soname))).collect();
        entries.push((format!("{name}-{version}.dist-info/licenses/License.txt"), LICENCE.into()));
        let entries: Vec<_> = entries.iter().map(|(path, body)| (path.as_str(), body.as_slice())).collect();
        wheel(&wheels, &format!("{name}-{version}-py3-none-manylinux_2_27_x86_64.whl"), &entries);
    }
    let cublas =
        [("libcublas.so.13", "libcublas.so.13.1.0.3"), ("libcublasLt.so.13", "libcublasLt.so.13.1.0.3")];
    let list = json!({
        "release_date": "2025-10-02", "release_label": "13.0.2",
        "libcublas": archive(&redist, "libcublas", "13.1.0.3", &cublas),
        "cuda_cudart": archive(&redist, "cuda_cudart", "13.0.96", &[("libcudart.so.13", "libcudart.so.13.0.96")]),
    });
    std::fs::write(redist.join("redistrib_13.0.2.json"), list.to_string()).unwrap();
}

#[test]
fn wheels_and_archives_give_the_same_image() {
    let folder = TempDir::new().unwrap();
    offer(folder.path());
    let settings = settings(folder.path());
    let built = |from: &str| {
        let path = manifest(folder.path(), from, "");
        lock::lock(&path, &settings, &|_| {}).unwrap();
        let lock = std::fs::read_to_string(lock::path(&path)).unwrap();
        (build(&path, &settings, &|_| {}).unwrap(), lock)
    };
    let (wheels, wheels_lock) = built("wheels");
    let (archives, archives_lock) = built("archives");
    assert_eq!(wheels.digest, archives.digest);
    let names: Vec<_> = wheels.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["cudart", "cublaslt", "cublas", "nccl", "own"], "cublas brings what it loads");
    assert!(wheels_lock.contains("nvidia_cublas-13.1.0.3-") && !wheels_lock.contains(".tar.xz"));
    assert!(archives_lock.contains("libcublas/linux-x86_64/libcublas-linux-x86_64-13.1.0.3-archive.tar.xz"));
    assert!(archives_lock.contains("nvidia_nccl_cu13-2.28.9-"), "NCCL is in no list of the toolkit's");
}

#[test]
fn what_a_release_lacks_is_told() {
    let folder = TempDir::new().unwrap();
    offer(folder.path());
    let settings = settings(folder.path());
    let locked = |from: &str, more: &str, edit: (&str, &str)| {
        let path = manifest(folder.path(), from, more);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace(edit.0, edit.1)).unwrap();
        lock::lock(&path, &settings, &|_| {}).map(|_| path)
    };
    for (from, edit, said) in [
        ("wheels", ("13.0.2", "13.9.9"), "cuda-toolkit 13.9.9"),
        ("wheels", ("13.0.2", "13"), "three numbers"),
        ("wheels", ("\"nccl\"", "\"nvrtc\""), "no such library"),
        ("archives", ("\"nccl\"", "\"nvrtc\""), "lists no cuda_nvrtc"),
        ("archives", ("13.0.2", "13.0.3"), "redistrib_13.0.3.json"),
    ] {
        let error = locked(from, "", edit).unwrap_err().to_string();
        assert!(error.contains(said), "{from} {edit:?}: {error}");
    }
    let error = locked("wheels", "nccl = \"2.99.1\"", ("", "")).unwrap_err().to_string();
    assert!(error.contains("nvidia-nccl-cu13 2.99.1"), "{error}");

    // An archive that is not what the list says, when it is locked and when it has been.
    let path = locked("archives", "", ("", "")).unwrap();
    let blob =
        folder.path().join("redist/libcublas/linux-x86_64/libcublas-linux-x86_64-13.1.0.3-archive.tar.xz");
    let mut bytes = std::fs::read(&blob).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    let nothing = Settings { cache: folder.path().join("nothing"), ..settings.clone() };
    for result in [
        build(&path, &nothing, &|_| {}).map(drop).map_err(|error| error.to_string()),
        lock::lock(&path, &nothing, &|_| {}).map(drop).map_err(|error| error.to_string()),
    ] {
        let error = result.unwrap_err();
        assert!(error.contains("13.1.0.3-archive.tar.xz"), "{error}");
    }
    assert!(
        matches!(build(&path, &settings, &|_| {}), Ok(image::Image { .. })),
        "the store has the right one"
    );
}
