//! Which library of CUDA a file is, in which version, and with which CUDA it was built.
//!
//! There is no field for it. What is read here is what the library itself would answer, found without running it: the
//! text that NCCL and the compilers print, and the numbers that the version functions of the runtime and of cuBLAS
//! return, as the immediate operands of their x86-64 instructions. A number is believed where every operand that could
//! be one agrees, and is of the major version in the library's name; otherwise the version is not known.

use std::fmt;
use std::str::FromStr;

use memchr::memmem;

use super::{Layout, Section};

/// A library of CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Component {
    /// Its name as NVIDIA writes it in packages: `cudart`, `cublasLt`, `nccl`.
    pub name: String,
    /// Its own version, as far as it can be told.
    pub version: Option<String>,
    /// The release of CUDA that it was built with, as far as it can be told.
    pub cuda: Option<CudaRelease>,
    /// The major version of CUDA that the library's name ties it to.
    pub cuda_major: Option<u32>,
}

/// A release of CUDA, such as 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaRelease {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
}

/// What is no release of CUDA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no release of CUDA; one is written as in 13.0")]
pub struct InvalidRelease(pub String);

impl fmt::Display for CudaRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for CudaRelease {
    type Err = InvalidRelease;

    fn from_str(text: &str) -> Result<Self, InvalidRelease> {
        let number = |text: &str| {
            let is_number = (1..=3).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        text.split_once('.')
            .and_then(|(major, minor)| Some(Self { major: number(major)?, minor: number(minor)? }))
            .ok_or_else(|| InvalidRelease(text.to_owned()))
    }
}

impl CudaRelease {
    /// The release of CUDART_VERSION: 1000 for a major, 10 for a minor.
    fn from_number(number: u32) -> Option<Self> {
        number.is_multiple_of(10).then_some(Self { major: number / 1000, minor: number % 1000 / 10 })
    }
}

/// Libraries that are versioned with CUDA: the number in their name is CUDA's major version.
const OF_TOOLKIT: [&str; 6] = ["cudart", "cublas", "cublasLt", "nvrtc", "nvJitLink", "nvblas"];

/// Other libraries that CUDA's users ship.
const OTHERS: [&str; 9] =
    ["nccl", "cufft", "cusparse", "cusolver", "curand", "cudnn", "cupti", "cufile", "nvshmem_host"];

/// Machine number of x86-64, whose instructions are known here.
const X86_64: u16 = 62;

/// Most bytes of a version function that are looked at.
const LONGEST_FUNCTION: u64 = 4096;

pub(super) fn component(
    name: &str,
    bytes: &[u8],
    layout: &Layout,
    soname: Option<&str>,
) -> Option<Component> {
    let soname = soname?;
    let (library, number) = soname.strip_prefix("lib")?.split_once(".so.")?;
    let number: u32 = number.parse().ok()?;
    let is_of_toolkit = OF_TOOLKIT.contains(&library);
    if !is_of_toolkit && !OTHERS.contains(&library) && !library.starts_with("cudnn_") {
        return None;
    }
    let (version, cuda) = match library {
        "nccl" => nccl(bytes, layout),
        "nvrtc" | "nvJitLink" => compiler(bytes, layout, number),
        "cudart" if layout.machine == X86_64 => (None, runtime(bytes, layout, number)),
        "cublas" | "cublasLt" if layout.machine == X86_64 => (
            returned(bytes, layout, &format!("{library}GetVersion"), |value| value / 10_000 == number)
                .map(|value| format!("{}.{}.{}", value / 10_000, value % 10_000 / 100, value % 100)),
            returned(bytes, layout, &format!("{library}GetCudartVersion"), |value| value / 1000 == number)
                .and_then(CudaRelease::from_number),
        ),
        _ => (None, None),
    };
    Some(Component {
        name: library.to_owned(),
        version: in_file_name(name, soname).or(version),
        cuda,
        cuda_major: is_of_toolkit.then_some(number),
    })
}

/// The rest of a version in a file's name: `libcudart.so.13.0.96`, of which `libcudart.so.13` is the SONAME.
fn in_file_name(name: &str, soname: &str) -> Option<String> {
    let file = name.rsplit('/').next()?;
    let rest = file.strip_prefix(soname)?.strip_prefix('.')?;
    let is_version = !rest.is_empty() && rest.split('.').all(|part| part.parse::<u32>().is_ok());
    let (_, major) = soname.split_once(".so.")?;
    is_version.then(|| format!("{major}.{rest}"))
}

fn data<'a>(bytes: &'a [u8], layout: &'a Layout) -> impl Iterator<Item = &'a [u8]> {
    let is_text = |section: &&Section| section.is_program_data && section.is_loaded && !section.is_code;
    let sections = layout.sections.iter().filter(is_text);
    sections
        .filter(|section| section.name != ".nv_fatbin" && section.name != "__nv_relfatbin")
        .filter_map(|section| section.bytes(bytes))
}

/// What follows each place of `before` in a library's texts, up to 32 characters.
fn texts<'a>(bytes: &'a [u8], layout: &'a Layout, before: &'static [u8]) -> impl Iterator<Item = &'a str> {
    data(bytes, layout).flat_map(move |data| {
        memmem::find_iter(data, before).filter_map(move |at| {
            let rest = &data[at + before.len()..];
            let rest = &rest[..rest.len().min(32)];
            let length = rest.iter().position(|c| !c.is_ascii_graphic() && *c != b' ').unwrap_or(rest.len());
            std::str::from_utf8(&rest[..length]).ok()
        })
    })
}

/// `NCCL version 2.28.3+cuda13.0`.
fn nccl(bytes: &[u8], layout: &Layout) -> (Option<String>, Option<CudaRelease>) {
    let mut found = texts(bytes, layout, b"NCCL version ").filter_map(|text| {
        let (version, cuda) = text.split_once("+cuda")?;
        version.starts_with(|c: char| c.is_ascii_digit()).then(|| (version.to_owned(), cuda.parse().ok()))
    });
    found.next().map_or((None, None), |(version, cuda)| (Some(version), cuda))
}

/// `Cuda compilation tools, release 13.0, V13.0.88`.
fn compiler(bytes: &[u8], layout: &Layout, major: u32) -> (Option<String>, Option<CudaRelease>) {
    let mut found = texts(bytes, layout, b"Cuda compilation tools, release ").filter_map(|text| {
        let (release, version) = text.split_once(", V")?;
        let release: CudaRelease =
            release.parse().ok().filter(|release: &CudaRelease| release.major == major)?;
        let end = version.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(version.len());
        Some((Some(version[..end].to_owned()), Some(release)))
    });
    found.next().unwrap_or_default()
}

/// The runtime stores its version through its first argument: `mov dword ptr [rdi], 13000`.
fn runtime(bytes: &[u8], layout: &Layout, major: u32) -> Option<CudaRelease> {
    let code =
        layout.sections.iter().filter(|section| section.is_code).filter_map(|section| section.bytes(bytes));
    let values =
        code.flat_map(|code| memmem::find_iter(code, &[0xc7, 0x07]).filter_map(|at| word(code, at + 2)));
    one(values.filter(|value| value / 1000 == major && value % 10 == 0 && value % 1000 < 300))
        .and_then(CudaRelease::from_number)
}

/// The number of a kind that a function moves to a register or into memory, where it is the only one.
fn returned(bytes: &[u8], layout: &Layout, function: &str, is_kind: impl Fn(u32) -> bool) -> Option<u32> {
    let code = symbol(bytes, layout, function)?;
    let operands = (0..code.len()).filter_map(|at| match code[at..] {
        // mov r32, imm32
        [0xb8..=0xbf, ..] => word(code, at + 1),
        // mov dword ptr [r], imm32 and mov dword ptr [r + disp8], imm32
        [0xc7, 0x00..=0x03 | 0x06..=0x07, ..] => word(code, at + 2),
        [0xc7, 0x40..=0x43 | 0x45..=0x47, ..] => word(code, at + 3),
        _ => None,
    });
    one(operands.filter(|value| is_kind(*value)))
}

fn word(code: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(code.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn one(mut values: impl Iterator<Item = u32>) -> Option<u32> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

/// The bytes of an exported function of a 64-bit little-endian file.
fn symbol<'a>(bytes: &'a [u8], layout: &Layout, function: &str) -> Option<&'a [u8]> {
    let table = layout.sections.iter().find(|section| section.is_dynamic_symbols)?;
    let names = layout.sections.iter().find(|section| section.index == table.link)?.bytes(bytes)?;
    table.bytes(bytes)?.chunks_exact(24).find_map(|entry| {
        let name = names.get(usize::try_from(word(entry, 0)?).ok()?..)?;
        if name.strip_prefix(function.as_bytes())?.first() != Some(&0) {
            return None;
        }
        let value = u64::from_le_bytes(entry.get(8..16)?.try_into().ok()?);
        let size = u64::from_le_bytes(entry.get(16..24)?.try_into().ok()?).min(LONGEST_FUNCTION);
        let start = usize::try_from(layout.offset(value)?).ok()?;
        bytes.get(start..start.checked_add(usize::try_from(size).ok()?)?)
    })
}

#[cfg(test)]
mod tests {
    use super::{CudaRelease, in_file_name, one};

    #[test]
    fn versions_in_file_names() {
        for (name, expect) in [
            ("usr/lib/libcudart.so.13.0.96", Some("13.0.96")),
            ("libcudart.so.13", None),
            ("libcudart.so.13.", None),
            ("libcudart.so.13.x", None),
            ("libcudart.so.130.1", None),
        ] {
            assert_eq!(in_file_name(name, "libcudart.so.13").as_deref(), expect, "{name}");
        }
    }

    #[test]
    fn releases() {
        for (text, expect) in [
            ("13.0", Some((13, 0))),
            ("12.10", Some((12, 10))),
            ("13", None),
            ("13.0.1", None),
            ("a.b", None),
            ("1234.0", None),
        ] {
            let expect = expect.map(|(major, minor)| CudaRelease { major, minor });
            assert_eq!(text.parse().ok(), expect, "{text}");
        }
        for (number, expect) in [(13_000, Some((13, 0))), (12_090, Some((12, 9))), (12_095, None)] {
            let expect = expect.map(|(major, minor)| CudaRelease { major, minor });
            assert_eq!(CudaRelease::from_number(number), expect, "{number}");
        }
    }

    #[test]
    fn numbers_that_disagree_are_not_believed() {
        assert_eq!(one([1, 1].into_iter()), Some(1));
        assert_eq!(one([1, 2].into_iter()), None);
        assert_eq!(one([].into_iter()), None);
    }
}
