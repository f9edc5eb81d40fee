//! Reading ELF files: real ones of this machine, ones made for the purpose, and damaged ones.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;
use trainyard_builder::elf::fatbin::{Compression, Role};
use trainyard_builder::elf::{self, Error, Kind, Report};

use crate::elf_files::{EXACT, FAMILY, LZ4, Library, ZSTD, machine_code, ptx, region};

pub(crate) fn report(bytes: &[u8]) -> Report {
    elf::read("lib/test.so", bytes).unwrap().unwrap()
}

/// This test as a program, and the loader that started it.
fn real() -> (Report, PathBuf) {
    let program = std::env::current_exe().unwrap();
    let report = elf::read("test", &elf::map(&program).unwrap()).unwrap().unwrap();
    let loader = report.interpreter.clone().unwrap();
    (report, loader.into())
}

#[test]
fn real_programs_and_libraries_are_read() {
    let (program, loader) = real();
    assert_eq!((program.bits, program.little_endian, program.kind), (64, true, Kind::Program));
    assert!(program.needs.libraries.contains(&"libc.so.6".to_owned()), "{:?}", program.needs);
    assert!(program.needs.versions["libc.so.6"].iter().any(|version| version.starts_with("GLIBC_2.")));
    assert!(program.gpu_code.is_empty());
    let bytes = std::fs::read(&loader).unwrap();
    let loader = report(&bytes);
    assert_eq!(loader.kind, Kind::SharedObject);
    assert!(loader.needs.soname.unwrap().starts_with("ld-linux"));
    assert!(loader.needs.libraries.is_empty());
    assert!(loader.needs.defined.contains("GLIBC_PRIVATE"), "{:?}", loader.needs.defined);
}

#[test]
fn what_is_no_elf_file_is_told_apart() {
    for bytes in [&b""[..], b"#!/bin/sh\n", b"\x7fEL"] {
        assert!(elf::read("x", bytes).unwrap().is_none());
    }
    for bytes in [&b"\x7fELF"[..], b"\x7fELF\x02\x01\x01", b"\x7fELF\x07\x01\x01\0\0\0\0\0\0\0\0\0"] {
        assert!(matches!(elf::read("x", bytes), Err(Error::Damaged { .. })), "{bytes:?}");
    }
}

#[test]
fn the_dynamic_table_is_read() {
    let library = Library {
        soname: Some("libone.so.1"),
        needed: vec!["libc.so.6", "libcuda.so.1"],
        versions: vec![("libc.so.6", vec!["GLIBC_2.2.5", "GLIBC_2.27"]), ("libm.so.6", vec!["GLIBC_2.29"])],
        defined: vec!["ONE_1.0", "ONE_1.1"],
        runpath: Some("$ORIGIN"),
        sections: Vec::new(),
    };
    let needs = report(&library.bytes()).needs;
    assert_eq!(needs.soname.as_deref(), Some("libone.so.1"));
    assert_eq!(needs.libraries, ["libc.so.6", "libcuda.so.1"]);
    assert_eq!((needs.rpath, needs.runpath.as_deref()), (None, Some("$ORIGIN")));
    assert_eq!(needs.versions["libc.so.6"].iter().collect::<Vec<_>>(), ["GLIBC_2.2.5", "GLIBC_2.27"]);
    assert_eq!(needs.versions["libm.so.6"].iter().collect::<Vec<_>>(), ["GLIBC_2.29"]);
    assert_eq!(needs.defined.iter().collect::<Vec<_>>(), ["ONE_1.0", "ONE_1.1"]);
}

/// A library with every kind of GPU code and every place for it.
fn gpu_library() -> Library {
    let mut loaded = region(&[machine_code(80, LZ4), machine_code(90, ZSTD | EXACT), ptx(90, ZSTD, (9, 0))]);
    loaded.extend([0; 16]);
    loaded.extend(region(&[machine_code(100, ZSTD | FAMILY | 0x100_0000)]));
    let mut resource = b"a table of kernels, before them".to_vec();
    resource.resize(40, 0);
    resource.extend(region(&[machine_code(103, ZSTD | FAMILY)]));
    resource.extend(b"and after them");
    // The magic number alone, as programs that read fatbins have it.
    let mut data = 0xBA55_ED50_u64.to_le_bytes().to_vec();
    data.extend(region(&[machine_code(75, 0x11)]));
    Library::named("libgpu.so.1")
        .section(".text", 6, region(&[machine_code(70, LZ4)]))
        .section(".nv_fatbin", 2, loaded)
        .section("__nv_relfatbin", 2, region(&[machine_code(80, LZ4)]))
        .section(".cask_resource", 2, resource)
        .section(".data", 3, data)
        .section(".debug_info", 0, vec![7; 100])
}

#[test]
fn gpu_code_is_found_in_every_section_that_holds_some() {
    let found: BTreeMap<_, _> = report(&gpu_library().bytes())
        .gpu_code
        .into_iter()
        .map(|code| {
            let elements: Vec<_> =
                code.elements.iter().map(|element| (element.to_string(), element.compression)).collect();
            (code.section, (code.role, code.regions, elements))
        })
        .collect();
    let own = |text: &str| text.to_owned();
    let expect = BTreeMap::from([
        (
            own(".nv_fatbin"),
            (
                Role::Loaded,
                2,
                vec![
                    (own("sm_80"), Compression::Lz4),
                    (own("sm_90a"), Compression::Zstd),
                    (own("compute_90"), Compression::Zstd),
                    (own("sm_100f"), Compression::Zstd),
                ],
            ),
        ),
        (own("__nv_relfatbin"), (Role::Relocatable, 1, vec![(own("sm_80"), Compression::Lz4)])),
        (own(".cask_resource"), (Role::Resource, 1, vec![(own("sm_103f"), Compression::Zstd)])),
        (own(".data"), (Role::Embedded, 1, vec![(own("sm_75"), Compression::None)])),
    ]);
    assert_eq!(found, expect);
}

#[test]
fn without_sections_gpu_code_is_found_in_segments() {
    let mut bytes = gpu_library().bytes();
    bytes[40..48].fill(0);
    bytes[58..64].fill(0);
    let report = report(&bytes);
    assert_eq!(report.gpu_code.len(), 1);
    // Those of .text too: without sections nothing says that it is code.
    assert_eq!(report.gpu_code[0].regions, 6);
}

#[test]
fn scrambled_payloads_are_taken_as_they_are() {
    let mut code = ptx(75, ZSTD | 0x1_0000, (1, 66));
    (code.kind, code.payload) = (8, vec![0x0b; 64]);
    let library = Library::named("libjit.so.1").section(".rodata", 2, region(&[code]));
    let found = report(&library.bytes());
    assert_eq!(found.gpu_code[0].elements[0].to_string(), "lto_75");
    // It is no use to a driver.
    assert!(!found.gpu_code[0].elements[0].runs_on("9.0".parse().unwrap()));
}

#[test]
fn unknown_layouts_are_refused_with_their_place() {
    let base =
        Library::named("libgpu.so.1").section(".nv_fatbin", 2, region(&[machine_code(90, ZSTD)])).bytes();
    let start = base.windows(4).position(|bytes| bytes == [0x50, 0xed, 0x55, 0xba]).unwrap();
    let element = start + 16;
    for (at, bytes, what) in [
        (start, &[0xff][..], "the magic number"),
        (start + 4, &[2], "the version of fatbins"),
        (start + 6, &[24], "the size of a fatbin's header"),
        (start + 8, &[0xff; 8], "the size of a fatbin"),
        (start + 8, &[0; 1], "the magic number"),
        (element, &[4], "the kind of GPU code"),
        (element + 2, &[2], "the version of an element"),
        (element + 4, &[56], "the size of an element's header"),
        (element + 4, &[0xff; 4], "the size of an element's header"),
        (element + 8, &[0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "the size of a payload"),
        (element + 8, &[63], "the size of a payload"),
        (element + 16, &[0xff; 4], "the compressed size"),
        (element + 28, &[0xff; 4], "the architecture"),
        (element + 40, &[0x11, 0xa0], "the compression"),
        (element + 40, &[0x11, 0x80, 0x30], "the architecture's suffix"),
        (element + 40, &[0x11, 0x80, 0x40], "the flags of an element"),
        (element + 64, &[1], "the start of a zstd payload"),
    ] {
        let mut damaged = base.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        match elf::read("lib/gpu.so", &damaged) {
            Err(error @ Error::Fatbin { .. }) => {
                let Error::Fatbin { file, offset, what: found, .. } = &error else { unreachable!() };
                assert_eq!((file.as_str(), *found), ("lib/gpu.so", what));
                let near = start as u64..=(element + 64) as u64;
                // A region that is too short is noticed at the data after it.
                assert!(near.contains(offset), "{what}: {offset:#x}");
                assert!(error.hint().is_some());
            }
            other => panic!("{what}: {other:?}"),
        }
    }
}

pub(crate) fn with_note(text: &str, owner: &str) -> Vec<u8> {
    let mut owner = owner.as_bytes().to_vec();
    owner.push(0);
    let mut note = u32::try_from(owner.len()).unwrap().to_le_bytes().to_vec();
    note.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
    note.extend([0; 4]);
    owner.resize(owner.len().next_multiple_of(8), 0);
    note.extend(owner);
    note.extend(text.as_bytes());
    Library::named("libcuda.so.1").section(".note.cuda.fwd_compatibility", 2, note).bytes()
}

#[test]
fn the_forward_compatibility_note_is_read() {
    let text = r#"{"Format":1,"CUDA Version":"13.1","Driver":[535,550,570,575,580,590],"Device":[1,2,7]}"#;
    let note = report(&with_note(text, "NVIDIA Corporation")).forward.unwrap();
    assert_eq!((note.cuda.as_str(), note.devices.len()), ("13.1", 3));
    assert_eq!(note.drivers, [535, 550, 570, 575, 580, 590]);
    for (text, owner) in [
        (text, "Somebody"),
        ("{", "NVIDIA Corporation"),
        (r#"{"Format":2,"CUDA Version":"13.1"}"#, "NVIDIA Corporation"),
        (r#"{"Format":1,"CUDA Version":"13.1","Driver":["x"]}"#, "NVIDIA Corporation"),
    ] {
        let found = elf::read("libcuda.so.1", &with_note(text, owner));
        assert!(matches!(found, Err(Error::Note { .. })), "{text} {owner}: {found:?}");
    }
}

#[test]
fn versions_of_libraries_are_read_from_their_texts_and_instructions() {
    let component = |library: Library, path: &str| {
        let component = elf::read(path, &library.bytes()).unwrap().unwrap().component?;
        Some((component.name, component.version, component.cuda.map(|cuda| cuda.to_string())))
    };
    let own = |text: &str| Some(text.to_owned());
    let nccl =
        Library::named("libnccl.so.2").section(".rodata", 2, b"\0NCCL version 2.28.3+cuda13.0\0".to_vec());
    assert_eq!(component(nccl, "libnccl.so.2").unwrap(), ("nccl".into(), own("2.28.3"), own("13.0")));
    let text =
        b"\0Cuda compilation tools, release 12.9, V12.9.86\0Cuda compilation tools, release 13.0, V13.0.88\n"
            .to_vec();
    let nvrtc = Library::named("libnvrtc.so.13").section(".rodata", 2, text);
    assert_eq!(component(nvrtc, "libnvrtc.so.13").unwrap(), ("nvrtc".into(), own("13.0.88"), own("13.0")));
    let store = |value: u32| [&[0x90, 0xc7, 0x07][..], &value.to_le_bytes()].concat();
    let runtime = |code: Vec<u8>| Library::named("libcudart.so.13").section(".text", 6, code);
    let code = [store(13_000), store(7), store(13_000)].concat();
    assert_eq!(
        component(runtime(code.clone()), "usr/lib/libcudart.so.13.0.96").unwrap(),
        ("cudart".into(), own("13.0.96"), own("13.0"))
    );
    let unclear = [code, store(13_010)].concat();
    assert_eq!(component(runtime(unclear), "libcudart.so.13").unwrap(), ("cudart".into(), None, None));
    assert_eq!(component(Library::named("libz.so.1"), "libz.so.1"), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever bytes are changed, reading ends with a report or an error.
    #[test]
    fn damaged_files_never_break_the_reader(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 1_usize..=8), 1..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = Library {
            needed: vec!["libc.so.6"],
            versions: vec![("libc.so.6", vec!["GLIBC_2.2.5", "GLIBC_2.27"])],
            defined: vec!["GPU_1"],
            ..gpu_library()
        }
        .bytes();
        mutate(&mut bytes, &changes);
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = elf::read("x", &bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// The same with a real library, whose tables are larger and of every kind.
    #[test]
    fn damaged_real_files_never_break_the_reader(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 1_usize..=8), 1..40),
        at_front in any::<bool>(),
    ) {
        static LOADER: LazyLock<Vec<u8>> = LazyLock::new(|| std::fs::read(real().1).unwrap());
        let mut bytes = LOADER.clone();
        let end = if at_front { 8192 } else { bytes.len() };
        mutate(&mut bytes[..end], &changes);
        let _ = elf::read("x", &bytes);
    }
}

fn mutate(bytes: &mut [u8], changes: &[(prop::sample::Index, u64, usize)]) {
    for (at, value, size) in changes {
        let at = at.index(bytes.len());
        let end = (at + size).min(bytes.len());
        bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
    }
}
