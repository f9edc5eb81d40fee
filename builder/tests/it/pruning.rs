//! Pruning libraries that were made for the purpose. Real ones are pruned in `wheels`.

use proptest::prelude::*;
use trainyard_builder::elf::ComputeCapability;
use trainyard_builder::prune::{Error, Keep, plan};

use crate::elf::report;
use crate::elf_files::{EXACT, FAMILY, LZ4, Library, ZSTD, machine_code, ptx, region};

fn keep(gpus: &[&str]) -> Keep {
    let gpus = gpus.iter().map(|gpu| gpu.parse::<ComputeCapability>().unwrap()).collect();
    Keep { gpus, resources: false, relocatable: true, debug: false }
}

fn library() -> Library {
    let loaded = [
        region(&[machine_code(80, LZ4), machine_code(86, LZ4), machine_code(90, ZSTD), ptx(75, LZ4, (8, 0))]),
        region(&[machine_code(90, ZSTD | EXACT), machine_code(100, ZSTD | FAMILY), ptx(120, ZSTD, (9, 0))]),
    ];
    let mut resource = b"table of kernels".to_vec();
    resource.extend(region(&[machine_code(100, ZSTD | FAMILY), machine_code(90, ZSTD | EXACT)]));
    Library::named("libgpu.so.1")
        .section(".nv_fatbin", 2, loaded.concat())
        .section(
            "__nv_relfatbin",
            2,
            region(&[machine_code(90, LZ4), machine_code(80, LZ4), ptx(80, LZ4, (9, 0))]),
        )
        .section(".cask_resource", 2, resource)
        .section(".data", 3, region(&[machine_code(75, LZ4)]))
        .section(".rodata", 2, vec![3; 64])
        .section(".debug_info", 0, vec![7; 100])
}

/// Names of what has a payload, by section.
fn left(bytes: &[u8]) -> Vec<String> {
    let report = report(bytes);
    let codes = report.gpu_code.iter().flat_map(|code| {
        let elements = code.elements.iter().filter(|element| !element.is_blank);
        elements.map(|element| format!("{} {element}", code.section)).collect::<Vec<_>>()
    });
    codes.collect()
}

#[test]
fn what_other_gpus_need_goes_and_nothing_else() {
    let all = [
        ".nv_fatbin sm_80",
        ".nv_fatbin sm_86",
        ".nv_fatbin sm_90",
        ".nv_fatbin compute_75",
        ".nv_fatbin sm_90a",
        ".nv_fatbin sm_100f",
        ".nv_fatbin compute_120",
        "__nv_relfatbin sm_90",
        "__nv_relfatbin sm_80",
        "__nv_relfatbin compute_80",
        ".cask_resource sm_100f",
        ".cask_resource sm_90a",
        ".data sm_75",
    ];
    let bytes = library().bytes();
    assert_eq!(left(&bytes), all);
    let hopper = keep(&["sm_90"]);
    let linked = Keep { relocatable: false, ..hopper.clone() };
    let whole = Keep { resources: true, debug: true, ..hopper.clone() };
    for (keep, kept, debug) in [
        (&hopper, &[2, 3, 4, 7, 9, 11, 12][..], false),
        (&linked, &[2, 3, 4, 11, 12], false),
        (&whole, &[2, 3, 4, 7, 9, 10, 11, 12], true),
        (&keep(&["sm_89"]), &[0, 1, 3, 8, 9, 12], false),
        (&keep(&["sm_80", "sm_103"]), &[0, 3, 5, 8, 9, 10, 12], false),
        // All machine code is for other GPUs: what the driver would link stays.
        (&Keep { relocatable: false, ..keep(&["sm_121"]) }, &[3, 6, 9, 12], false),
    ] {
        let plan = plan("libgpu.so.1", &bytes, keep).unwrap();
        let mut pruned = Vec::new();
        plan.write(&bytes, &mut pruned).unwrap();
        let expect: Vec<_> = kept.iter().map(|index| all[*index]).collect();
        assert_eq!(left(&pruned), expect, "{keep:?}");
        assert_eq!(pruned.len(), bytes.len());
        let removed: u64 = plan.removed.values().map(|amount| amount.bytes).sum();
        assert_eq!(removed, plan.zeroed());
        assert_eq!(plan.zeroed(), 64 * (all.len() - kept.len()) as u64 + if debug { 0 } else { 100 });
        // No byte is another one than before, but those that became zeros.
        let changed = bytes.iter().zip(&pruned).filter(|(before, after)| before != after);
        assert!(changed.clone().all(|(_, after)| *after == 0));
        assert_eq!(pruned.windows(100).any(|part| part == [7; 100]), debug);
        assert!(pruned.windows(64).any(|part| part == [3; 64]));
        // Doing it again finds nothing more.
        let again = trainyard_builder::prune::plan("libgpu.so.1", &pruned, keep).unwrap();
        assert_eq!(again.zeroed(), 0, "{:?}", again.removed);
    }
}

#[test]
fn what_cannot_be_pruned_safely_is_refused() {
    let bytes = library().bytes();
    let hopper = keep(&["sm_90"]);
    assert!(matches!(plan("x", &bytes, &keep(&[])), Err(Error::NoGpus { .. })));
    let only = Library::named("x.so").section(".nv_fatbin", 2, region(&[machine_code(90, ZSTD)])).bytes();
    match plan("x", &only, &keep(&["sm_90", "sm_100"])) {
        Err(Error::NotCovered { gpu, has, .. }) => {
            assert_eq!((gpu.to_string().as_str(), has.as_str()), ("10.0", "sm_90"));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(plan("x", b"#!/bin/sh", &hopper), Err(Error::NotALibrary { .. })));
    let mut unknown = bytes.clone();
    let start = unknown.windows(4).position(|bytes| bytes == [0x50, 0xed, 0x55, 0xba]).unwrap();
    unknown[start + 16] = 9;
    assert!(matches!(plan("x", &unknown, &hopper), Err(Error::Elf(_))));
    let other = plan("x", &bytes, &hopper).unwrap().write(&bytes[1..], &mut Vec::new());
    assert!(matches!(other, Err(Error::OtherFile { .. })));
}

#[test]
fn sections_that_share_bytes_are_refused() {
    let mut bytes = library().bytes();
    let headers = usize::try_from(u64::from_le_bytes(bytes[40..48].try_into().unwrap())).unwrap();
    // The last sections are .rodata, .debug_info and the names: debug information moves to where .rodata is.
    let (rodata, debug) = (headers + 5 * 64, headers + 6 * 64);
    let place: [u8; 8] = bytes[rodata + 24..rodata + 32].try_into().unwrap();
    bytes[debug + 24..debug + 32].copy_from_slice(&place);
    let found = plan("x", &bytes, &keep(&["sm_90"]));
    assert!(matches!(found, Err(Error::Shared { needed: "the program", .. })), "{found:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// A damaged library is refused, or pruned to the same size with headers that read as before.
    #[test]
    fn damaged_libraries_are_refused_or_stay_readable(
        at in any::<prop::sample::Index>(),
        value in any::<u64>(),
        size in 1_usize..=8,
    ) {
        let mut bytes = library().bytes();
        let at = at.index(bytes.len());
        let end = (at + size).min(bytes.len());
        bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        if let Ok(plan) = plan("x", &bytes, &keep(&["sm_90"])) {
            let mut pruned = Vec::new();
            plan.write(&bytes, &mut pruned).unwrap();
            prop_assert_eq!(pruned.len(), bytes.len());
            let (before, after) = (report(&bytes), report(&pruned));
            prop_assert_eq!(&before.needs, &after.needs);
            let count = |report: &trainyard_builder::elf::Report| -> usize {
                report.gpu_code.iter().map(|code| code.elements.len()).sum()
            };
            prop_assert_eq!(count(&before), count(&after));
        }
    }
}
