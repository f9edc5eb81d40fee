//! Real wheels of CUDA libraries, hundreds of megabytes each: read, judged, pruned, loaded, and compared with NVIDIA's own
//! `cuobjdump`. Their folder is named by an environment variable; without it nothing of this is tested.
//!
//! To fill a folder: `pip download --no-deps nvidia-nccl-cu13==2.28.3 nvidia-cuda-runtime nvidia-cuda-cuobjdump`, and
//! `nvidia-cublas`, `nvidia-cublas-cu12`, `nvidia-nccl-cu12` for more.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use trainyard_builder::contract::{Object, derive};
use trainyard_builder::elf::fatbin::{Kind, Role};
use trainyard_builder::elf::{self, Report};
use trainyard_builder::prune::{Keep, plan};

const FOLDER: &str = "TRAINYARD_TEST_CUDA_WHEELS";

/// Unpacks the files of all wheels in `folder` whose name `is_wanted`.
fn unpack(folder: &Path, into: &Path, is_wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut wheels: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    wheels.retain(|path| path.extension().is_some_and(|extension| extension == "whl"));
    wheels.sort();
    let mut found = Vec::new();
    for wheel in wheels {
        let mut archive = zip::ZipArchive::new(File::open(&wheel).unwrap()).unwrap();
        for index in 0..archive.len() {
            let mut entry = archive.by_index(index).unwrap();
            let name = entry.name().unwrap().rsplit('/').next().unwrap().to_owned();
            if is_wanted(&name) {
                // Wheels of two versions have files of one name.
                let at = into.join(wheel.file_stem().unwrap());
                std::fs::create_dir_all(&at).unwrap();
                std::io::copy(&mut entry, &mut File::create(at.join(&name)).unwrap()).unwrap();
                found.push(at.join(name));
            }
        }
    }
    found
}

/// How many pieces of machine code and PTX a file has for each architecture, as `cuobjdump` says. It does not tell
/// family variants from others, and reads `.nv_fatbin` and `__nv_relfatbin`.
fn listed(cuobjdump: &Path, file: &Path, arch: Option<&str>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for (option, prefix) in [("-lelf", "sm_"), ("-lptx", "compute_")] {
        let mut command = Command::new(cuobjdump);
        command.args(["-all", option]).args(arch.iter().flat_map(|arch| ["-arch", arch])).arg(file);
        let output = command.output().unwrap();
        for line in String::from_utf8(output.stdout).unwrap().lines() {
            if let Some((_, rest)) = line.rsplit_once(".sm_") {
                let arch = rest.split('.').next().unwrap();
                *counts.entry(format!("{prefix}{arch}")).or_default() += 1;
            }
        }
    }
    counts
}

/// The same, as we find it.
fn found(report: &Report) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let codes = report.gpu_code.iter().filter(|code| matches!(code.role, Role::Loaded | Role::Relocatable));
    for element in codes.flat_map(|code| &code.elements).filter(|element| !element.is_blank) {
        if element.kind != Kind::LtoIr {
            *counts.entry(element.to_string().trim_end_matches('f').to_owned()).or_default() += 1;
        }
    }
    counts
}

fn loads(file: &Path) {
    let script = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)";
    let output = Command::new("python3").args(["-c", script]).arg(file).output().unwrap();
    assert!(output.status.success(), "{}: {}", file.display(), String::from_utf8_lossy(&output.stderr));
}

#[test]
fn real_libraries_are_read_and_pruned_as_nvidia_s_tools_see_them() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        eprintln!("SKIPPED: no real CUDA library was read or pruned: {FOLDER} names no folder of wheels");
        return;
    };
    let folder = PathBuf::from(folder);
    let work = TempDir::new().unwrap();
    let tools = unpack(&folder, work.path(), |name| name == "cuobjdump");
    let cuobjdump = tools.last().expect("the folder has no wheel of nvidia-cuda-cuobjdump");
    std::fs::set_permissions(cuobjdump, PermissionsExt::from_mode(0o755)).unwrap();
    let is_known = |name: &str| {
        ["libcudart.so.", "libnccl.so.", "libcublas.so.", "libcublasLt.so."]
            .iter()
            .any(|start| name.starts_with(start))
    };
    let libraries = unpack(&folder, work.path(), is_known);
    assert!(!libraries.is_empty(), "the folder has no wheel of a CUDA library");
    for file in &libraries {
        let map = elf::map(file).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        let report = elf::read(name, &map).unwrap().unwrap();
        let component = report.component.clone().unwrap();
        eprintln!("{}: {component:?}", file.display());
        assert_eq!(found(&report), listed(cuobjdump, file, None), "{}", file.display());
        if name.starts_with("libnccl") {
            let wheel = file.parent().unwrap().to_str().unwrap();
            assert!(wheel.contains(&format!("-{}-", component.version.unwrap())), "{wheel}");
        }
        let contract = derive(&[Object { path: name.to_owned(), report: report.clone() }]);
        eprintln!("{:#?}", contract.terms.labels());
        let hopper = "9.0".parse().unwrap();
        assert!(!contract.terms.gpus[&hopper].compiled);
        if report.gpu_code.is_empty() {
            continue;
        }
        for (gpu, resources, relocatable) in
            [("9.0", false, false), ("9.0", true, true), ("12.0", false, true)]
        {
            let keep = Keep { gpus: [gpu.parse().unwrap()].into(), resources, relocatable, debug: false };
            let plan = plan(name, &map, &keep).unwrap();
            // Where the library is: others beside it are found by $ORIGIN.
            let pruned = file.with_file_name("pruned.so");
            plan.write(&map, &mut BufWriter::new(File::create(&pruned).unwrap())).unwrap();
            let after = elf::read(name, &elf::map(&pruned).unwrap()).unwrap().unwrap();
            assert_eq!(after.needs, report.needs);
            let number = gpu.replace('.', "");
            let arch = format!("sm_{number}");
            let mine: BTreeMap<_, _> =
                found(&after).into_iter().filter(|(code, _)| code.trim_end_matches('a') == arch).collect();
            let mut theirs = listed(cuobjdump, &pruned, Some(&arch));
            theirs.retain(|code, _| code.starts_with("sm_"));
            assert_eq!(mine, theirs, "{}", file.display());
            if relocatable {
                let before: BTreeMap<_, _> = found(&report)
                    .into_iter()
                    .filter(|(code, _)| code.trim_end_matches('a') == arch)
                    .collect();
                assert_eq!(mine, before);
            }
            // Nothing is left that this GPU cannot use.
            let capability = gpu.parse().unwrap();
            assert!(
                after
                    .loadable()
                    .all(|element| element.runs_on(capability) || element.arch.capability < capability)
            );
            assert_eq!(listed(cuobjdump, &pruned, Some("sm_75")), BTreeMap::new());
            loads(&pruned);
            eprintln!("{gpu}: {} of {} bytes became zeros", plan.zeroed(), map.len());
        }
    }
}
