//! Contracts of images that were made for the purpose, and hosts that meet them or do not.

use std::collections::BTreeMap;

use trainyard_builder::contract::host::{Gpu, Host};
use trainyard_builder::contract::{Contract, Object, Refusal, Rule, Terms, Verdict, derive};

use crate::elf::report;
use crate::elf_files::{Code, EXACT, FAMILY, LZ4, Library, ZSTD, machine_code, ptx, region};

fn contract(files: &[(&str, Library)]) -> Contract {
    let object = |(path, library): &(&str, Library)| Object {
        path: (*path).to_owned(),
        report: report(&library.bytes()),
    };
    derive(&files.iter().map(object).collect::<Vec<_>>())
}

fn gpu_code(soname: &'static str, codes: &[Code]) -> Library {
    Library::named(soname).section(".nv_fatbin", 2, region(codes))
}

fn runtime(major: &'static str) -> Library {
    Library::named(major)
}

fn host(driver: &str, capability: &str, name: &str) -> Host {
    let gpu = Gpu { name: name.to_owned(), capability: capability.parse().unwrap() };
    Host { driver: Some(driver.parse().unwrap()), gpus: vec![gpu] }
}

/// One line for a verdict.
fn told(verdict: &Verdict) -> String {
    match verdict {
        Verdict::NeedsNoGpu => "needs no GPU".to_owned(),
        Verdict::Runs(Rule::Native) => "native".to_owned(),
        Verdict::Runs(Rule::MinorVersion) => "minor".to_owned(),
        Verdict::Runs(Rule::Forward) => "forward".to_owned(),
        Verdict::Refused(refusals) => {
            let one = |refusal: &Refusal| match refusal {
                Refusal::NoDriver { .. } => "no driver".to_owned(),
                Refusal::NoGpu { .. } => "no GPU".to_owned(),
                Refusal::NotCovered { .. } => "not covered".to_owned(),
                Refusal::DriverTooOld { needed, .. } => needed
                    .as_ref()
                    .map_or_else(|| "too old: ?".to_owned(), |needed| format!("too old: {needed}")),
            };
            refusals.iter().map(one).collect::<Vec<_>>().join("; ")
        }
    }
}

#[test]
fn hosts_are_judged_by_machine_code_ptx_and_packing() {
    let thirteen = [("libcudart.so.13", runtime("libcudart.so.13"))];
    let twelve = [("libcudart.so.12", runtime("libcudart.so.12"))];
    let with = |base: &[(&'static str, Library)], codes: &[Code]| {
        let mut files = base.to_vec();
        files.push(("libown.so", gpu_code("libown.so", codes)));
        contract(&files)
    };
    let h100 = "NVIDIA H100 80GB HBM3";
    for (name, contract, driver, gpu, expect) in [
        ("plain", with(&thirteen, &[machine_code(90, LZ4)]), "580.65.06", "9.0", "minor"),
        ("plain", with(&thirteen, &[machine_code(90, LZ4)]), "575.57.08", "9.0", "too old: 580.65.06"),
        (
            "PTX tells the release",
            with(&thirteen, &[machine_code(90, ZSTD), ptx(90, ZSTD, (9, 1))]),
            "590.44.01",
            "9.0",
            "native",
        ),
        (
            "PTX tells the release",
            with(&thirteen, &[machine_code(90, ZSTD), ptx(90, ZSTD, (9, 1))]),
            "580.65.06",
            "9.0",
            "minor",
        ),
        (
            "PTX alone",
            with(&thirteen, &[machine_code(80, ZSTD), ptx(80, ZSTD, (9, 1))]),
            "580.65.06",
            "9.0",
            "too old: 590.44.01",
        ),
        (
            "PTX alone",
            with(&thirteen, &[machine_code(80, ZSTD), ptx(80, ZSTD, (9, 1))]),
            "590.44.01",
            "9.0",
            "native",
        ),
        (
            "PTX of two versions",
            with(&thirteen, &[ptx(75, ZSTD, (9, 0)), ptx(80, ZSTD, (9, 2))]),
            "590.44.01",
            "9.0",
            "too old: 595.45.04",
        ),
        (
            "PTX of another toolkit",
            with(&thirteen, &[machine_code(80, ZSTD), ptx(80, ZSTD, (99, 0))]),
            "999.1.1",
            "9.0",
            "too old: ?",
        ),
        (
            "its machine code still runs",
            with(&thirteen, &[machine_code(80, ZSTD), ptx(80, ZSTD, (99, 0))]),
            "580.65.06",
            "8.6",
            "minor",
        ),
        ("zstd", with(&twelve, &[machine_code(90, ZSTD)]), "525.60.13", "9.0", "too old: 550.54.14"),
        ("zstd", with(&twelve, &[machine_code(90, ZSTD)]), "550.54.14", "9.0", "minor"),
        (
            "zstd for others",
            with(&twelve, &[machine_code(90, LZ4), machine_code(100, ZSTD)]),
            "525.60.13",
            "9.0",
            "minor",
        ),
        (
            "zstd for others",
            with(&twelve, &[machine_code(90, LZ4), machine_code(100, ZSTD)]),
            "525.60.13",
            "10.0",
            "too old: 550.54.14",
        ),
        ("later member", with(&twelve, &[machine_code(80, LZ4)]), "525.60.13", "8.9", "minor"),
        ("earlier member", with(&twelve, &[machine_code(86, LZ4)]), "525.60.13", "8.0", "not covered"),
        ("exact", with(&thirteen, &[machine_code(100, ZSTD | EXACT)]), "580.65.06", "10.3", "not covered"),
        ("family", with(&thirteen, &[machine_code(100, ZSTD | FAMILY)]), "580.65.06", "10.3", "minor"),
        (
            "unknown GPU",
            with(&thirteen, &[machine_code(90, LZ4), ptx(90, LZ4, (9, 0))]),
            "610.43.02",
            "15.0",
            "native",
        ),
        (
            "unknown GPU",
            with(&thirteen, &[machine_code(90, LZ4), ptx(90, LZ4 | EXACT, (9, 0))]),
            "610.43.02",
            "15.0",
            "not covered",
        ),
        ("nobody says which CUDA", with(&[], &[machine_code(90, LZ4)]), "610.43.02", "9.0", "too old: ?"),
        ("no code of its own", contract(&thirteen), "580.65.06", "9.0", "minor"),
        ("no CUDA", contract(&[("libz.so.1", Library::named("libz.so.1"))]), "1.1", "9.0", "needs no GPU"),
    ] {
        let verdict = contract.terms.check(&host(driver, gpu, h100));
        assert_eq!(told(&verdict), expect, "{name}: {driver}, {gpu}: {:?}", contract.terms);
        // What labels say is all that a verdict needs.
        let read = Terms::from_labels(&contract.terms.labels()).unwrap();
        assert_eq!(read, contract.terms);
        if let Verdict::Refused(refusals) = verdict {
            assert!(refusals.iter().all(|refusal| !refusal.hint().is_empty()));
        }
    }
}

#[test]
fn every_library_with_gpu_code_has_to_run() {
    let files = [
        ("libcudart.so.13", runtime("libcudart.so.13")),
        ("libone.so", gpu_code("libone.so", &[machine_code(80, LZ4), machine_code(90, LZ4)])),
        ("libtwo.so", gpu_code("libtwo.so", &[machine_code(90, ZSTD), ptx(80, LZ4, (9, 0))])),
        // What only a linker reads, and kernels that a library picks from, promise nothing.
        (
            "libthree.so",
            Library::named("libthree.so").section("__nv_relfatbin", 2, region(&[machine_code(75, LZ4)])),
        ),
    ];
    let labels = contract(&files).terms.labels();
    let expect = [
        ("trainyard.cuda.driver", "580.65.06"),
        ("trainyard.cuda.gpus", "9.0=580.65.06"),
        ("trainyard.cuda.gpus.ptx", "8.0=580.65.06,8.6=580.65.06,8.9=580.65.06"),
        ("trainyard.cuda.toolkit", "13.0"),
    ];
    let own = |(label, value): (&str, &str)| (label.to_owned(), value.to_owned());
    assert_eq!(labels, expect.into_iter().map(own).collect());
}

#[test]
fn a_newer_libcuda_takes_the_place_of_an_old_one_on_data_center_gpus() {
    let labels = BTreeMap::from(
        [
            ("trainyard.cuda.toolkit", "13.1"),
            ("trainyard.cuda.driver", "590.44.01"),
            ("trainyard.cuda.gpus", "9.0=580.65.06,8.9=580.65.06"),
            ("trainyard.cuda.forward", "13.1=535,550,570,575"),
        ]
        .map(|(label, value)| (label.to_owned(), value.to_owned())),
    );
    let terms = Terms::from_labels(&labels).unwrap();
    let mut without = terms.clone();
    without.forward = None;
    for (terms, driver, gpu, name, expect) in [
        (&terms, "535.54.03", "9.0", "NVIDIA H100 80GB HBM3", "forward"),
        (&terms, "535.54.03", "8.9", "NVIDIA GeForce RTX 4090", "too old: 580.65.06"),
        (&terms, "560.28.03", "9.0", "NVIDIA H100 80GB HBM3", "too old: 580.65.06"),
        (&terms, "580.65.06", "9.0", "NVIDIA H100 80GB HBM3", "minor"),
        (&without, "535.54.03", "9.0", "NVIDIA H100 80GB HBM3", "too old: 580.65.06"),
    ] {
        let verdict = terms.check(&host(driver, gpu, name));
        assert_eq!(told(&verdict), expect, "{driver} {name}");
        if let Verdict::Refused(refusals) = verdict {
            let hint = refusals[0].hint();
            assert_eq!(hint.contains("cuda-compat"), terms.forward.is_none(), "{hint}");
            assert!(hint.contains("580.65.06 or later (with long-term support: 580 until 2028-06"), "{hint}");
        }
    }
    let mut mixed = host("535.54.03", "9.0", "NVIDIA H100 80GB HBM3");
    mixed.gpus.push(Gpu { name: "NVIDIA A100-SXM4-80GB".to_owned(), capability: "8.0".parse().unwrap() });
    mixed.gpus.push(mixed.gpus[1].clone());
    assert_eq!(told(&terms.check(&mixed)), "not covered");
    assert_eq!(told(&terms.check(&Host::default())), "no driver");
    assert_eq!(told(&terms.check(&Host { gpus: Vec::new(), ..mixed })), "no GPU");
}

#[test]
fn labels_that_say_something_else_are_refused() {
    for (label, value) in [
        ("trainyard.cuda.toolkit", "13"),
        ("trainyard.cuda.driver", "?"),
        ("trainyard.cuda.gpus", "9.0"),
        ("trainyard.cuda.gpus", "9.0=580.65.06,"),
        ("trainyard.cuda.gpus.ptx", "x=580.65.06"),
        ("trainyard.cuda.gpus.later", ""),
        ("trainyard.cuda.forward", "13.1=x"),
    ] {
        let labels = BTreeMap::from([(label.to_owned(), value.to_owned())]);
        assert_eq!(Terms::from_labels(&labels).unwrap_err().label, label, "{value}");
    }
    let other = BTreeMap::from([("org.example".to_owned(), "x".to_owned())]);
    assert_eq!(Terms::from_labels(&other), Ok(Terms::none()));
}

#[test]
fn what_nothing_in_the_image_gives_is_a_fault() {
    let libc =
        Library { defined: vec!["GLIBC_2.2.5", "GLIBC_2.9", "GLIBC_2.17"], ..Library::named("libc.so.6") };
    let user = Library {
        needed: vec!["libc.so.6", "libcuda.so.1", "libnvidia-ml.so.1", "libmissing.so.3"],
        versions: vec![
            ("libc.so.6", vec!["GLIBC_2.17", "GLIBC_2.27", "GLIBC_2.9"]),
            ("libstdc++.so.6", vec!["GLIBCXX_3.4.19", "CXXABI_1.3.9", "GLIBCXX_3.4.9"]),
        ],
        ..Library::named("libuser.so")
    };
    let found = contract(&[("usr/lib/libc.so.6", libc), ("usr/lib/libuser.so", user.clone())]);
    let faults: Vec<_> = found.faults.iter().map(ToString::to_string).collect();
    assert_eq!(
        faults,
        [
            r#""usr/lib/libuser.so" needs the library "libmissing.so.3", which is not in the image"#,
            r#""usr/lib/libuser.so" needs "GLIBC_2.27" of "libc.so.6", which the image's has not; its newest is "GLIBC_2.17""#,
        ]
    );
    assert_eq!(found.from_driver.iter().collect::<Vec<_>>(), ["libcuda.so.1", "libnvidia-ml.so.1"]);
    let floors =
        BTreeMap::from([("GLIBC", vec![2, 27]), ("GLIBCXX", vec![3, 4, 19]), ("CXXABI", vec![1, 3, 9])]);
    assert_eq!(found.floors, floors);
    // A file's name is enough, as where a library has no SONAME.
    let named = contract(&[
        ("lib/libmissing.so.3", Library::default()),
        ("lib/libc.so.6", Library::default()),
        ("lib/libuser.so", user),
    ]);
    assert_eq!(named.faults, []);
}
