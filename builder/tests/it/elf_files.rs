//! ELF files made byte by byte, with GPU code in them, for tests of what reads and prunes it.

/// One piece of GPU code.
#[derive(Debug, Clone)]
pub(crate) struct Code {
    pub(crate) kind: u16,
    pub(crate) arch: u32,
    pub(crate) flags: u64,
    pub(crate) version: (u16, u16),
    pub(crate) payload: Vec<u8>,
}

pub(crate) const LZ4: u64 = 0x2011;
pub(crate) const ZSTD: u64 = 0x8011;
pub(crate) const EXACT: u64 = 0x10_0000;
pub(crate) const FAMILY: u64 = 0x20_0000;

/// Machine code for `sm_<arch>`, of 64 bytes that tell the architecture.
pub(crate) fn machine_code(arch: u32, flags: u64) -> Code {
    Code { kind: 2, arch, flags, version: (1, 7), payload: payload(arch, flags) }
}

/// PTX for `compute_<arch>` of an ISA version.
pub(crate) fn ptx(arch: u32, flags: u64, version: (u16, u16)) -> Code {
    Code { kind: 1, arch, flags, version, payload: payload(arch, flags) }
}

fn payload(arch: u32, flags: u64) -> Vec<u8> {
    let start: &[u8] = match flags & (0x2000 | 0x8000) {
        0x8000 => &[0x28, 0xb5, 0x2f, 0xfd],
        0x2000 => &[0xa2, 0x7f, b'E', b'L', b'F'],
        _ => b"\x7fELF",
    };
    let mut bytes = start.to_vec();
    bytes.extend(b".text.kernel");
    bytes.resize(64, u8::try_from(arch).unwrap());
    bytes
}

/// A region of fatbin elements.
pub(crate) fn region(codes: &[Code]) -> Vec<u8> {
    let mut elements = Vec::new();
    for code in codes {
        let start = elements.len();
        // Newer elements have a note after the fixed part.
        let header = if code.flags & 0x100_0000 == 0 { 64_u32 } else { 112 };
        let padded = code.payload.len().next_multiple_of(8);
        let is_compressed = code.flags & (0x2000 | 0x8000) != 0;
        let mut fields = vec![0; header as usize];
        let mut put = |at: usize, bytes: &[u8]| fields[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &code.kind.to_le_bytes());
        put(2, &0x0101_u16.to_le_bytes());
        put(4, &header.to_le_bytes());
        put(8, &(padded as u64).to_le_bytes());
        if is_compressed {
            put(16, &u32::try_from(code.payload.len()).unwrap().to_le_bytes());
            put(56, &4096_u64.to_le_bytes());
        }
        put(24, &code.version.1.to_le_bytes());
        put(26, &code.version.0.to_le_bytes());
        put(28, &code.arch.to_le_bytes());
        put(40, &code.flags.to_le_bytes());
        elements.extend(fields);
        elements.extend(&code.payload);
        elements.resize(start + header as usize + padded, 0);
    }
    let mut bytes = 0xBA55_ED50_u32.to_le_bytes().to_vec();
    bytes.extend(1_u16.to_le_bytes());
    bytes.extend(16_u16.to_le_bytes());
    bytes.extend((elements.len() as u64).to_le_bytes());
    bytes.extend(elements);
    bytes
}

/// A 64-bit little-endian shared object with these sections, whose dynamic table names what is asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Library {
    pub(crate) soname: Option<&'static str>,
    pub(crate) needed: Vec<&'static str>,
    /// Versions that it needs, by library.
    pub(crate) versions: Vec<(&'static str, Vec<&'static str>)>,
    /// Versions that it gives.
    pub(crate) defined: Vec<&'static str>,
    pub(crate) runpath: Option<&'static str>,
    /// Name, flags (2 loaded, 4 code) and bytes.
    pub(crate) sections: Vec<(&'static str, u64, Vec<u8>)>,
}

/// Machine number of x86-64.
pub(crate) const X86_64: u16 = 62;

/// Address of the first byte of every test library; addresses and offsets differ, as in real ones.
const BASE: u64 = 0x10_0000;

impl Library {
    pub(crate) fn named(soname: &'static str) -> Self {
        Self { soname: Some(soname), ..Self::default() }
    }

    pub(crate) fn section(mut self, name: &'static str, flags: u64, bytes: Vec<u8>) -> Self {
        self.sections.push((name, flags, bytes));
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = vec![0; 64 + 2 * 56];
        let mut strings = vec![0];
        let mut string = |text: &str| {
            let at = strings.len() as u64;
            strings.extend(text.as_bytes());
            strings.push(0);
            at
        };
        let mut dynamic: Vec<(u64, u64)> = Vec::new();
        dynamic.extend(self.needed.iter().map(|name| (1, string(name))));
        dynamic.extend(self.soname.map(|name| (14, string(name))));
        dynamic.extend(self.runpath.map(|path| (29, string(path))));
        let half = |value: usize| u16::try_from(value).unwrap().to_le_bytes();
        let word = |value: u64| u32::try_from(value).unwrap().to_le_bytes();
        let mut needs = Vec::new();
        for (index, (library, versions)) in self.versions.iter().enumerate() {
            let size = 16 + 16 * versions.len() as u64;
            needs.extend([half(1), half(versions.len())].concat());
            needs.extend(word(string(library)));
            needs.extend(word(16));
            needs.extend(word(if index + 1 == self.versions.len() { 0 } else { size }));
            for (index, version) in versions.iter().enumerate() {
                needs.extend([0; 8]);
                needs.extend(word(string(version)));
                needs.extend(word(if index + 1 == versions.len() { 0 } else { 16 }));
            }
        }
        let mut defines = Vec::new();
        for (index, version) in self.defined.iter().enumerate() {
            defines.extend([half(1), half(0), half(index + 2), half(1)].concat());
            defines.extend([0; 4]);
            defines.extend(word(20));
            defines.extend(word(if index + 1 == self.defined.len() { 0 } else { 28 }));
            defines.extend(word(string(version)));
            defines.extend([0; 4]);
        }
        let place = |file: &mut Vec<u8>, bytes: &[u8]| {
            file.resize(file.len().next_multiple_of(8), 0);
            let at = file.len() as u64;
            file.extend(bytes);
            at
        };
        let at = place(&mut file, &strings);
        dynamic.extend([(5, BASE + at), (10, strings.len() as u64)]);
        if !needs.is_empty() {
            let at = place(&mut file, &needs);
            dynamic.extend([(0x6fff_fffe, BASE + at), (0x6fff_ffff, self.versions.len() as u64)]);
        }
        if !defines.is_empty() {
            let at = place(&mut file, &defines);
            dynamic.extend([(0x6fff_fffc, BASE + at), (0x6fff_fffd, self.defined.len() as u64)]);
        }
        dynamic.push((0, 0));
        let table: Vec<u8> = dynamic
            .iter()
            .flat_map(|(tag, value)| [tag.to_le_bytes(), value.to_le_bytes()].concat())
            .collect();
        let dynamic_at = place(&mut file, &table);
        let mut names = vec![0];
        let mut headers = vec![0_u8; 64];
        let mut loaded = file.len();
        for (name, flags, bytes) in &self.sections {
            let at = place(&mut file, bytes);
            if flags & 2 != 0 {
                loaded = file.len();
            }
            headers.extend(section(names.len(), 1, *flags, at, bytes.len()));
            names.extend(name.as_bytes());
            names.push(0);
        }
        let names_at = place(&mut file, &names);
        headers.extend(section(0, 3, 0, names_at, names.len()));
        let headers_at = place(&mut file, &headers);
        file[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(16, &[half(3), X86_64.to_le_bytes()].concat());
        put(20, &1_u32.to_le_bytes());
        put(32, &64_u64.to_le_bytes());
        put(40, &headers_at.to_le_bytes());
        put(52, &[half(64), half(56), half(2), half(64), half(self.sections.len() + 2)].concat());
        put(62, &half(self.sections.len() + 1));
        let segment = |kind: u32, at: u64, size: u64| {
            let words: Vec<u8> = [at, BASE + at, BASE + at, size, size, 8]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect();
            [&kind.to_le_bytes()[..], &4_u32.to_le_bytes(), &words].concat()
        };
        put(64, &segment(1, 0, loaded as u64));
        put(120, &segment(2, dynamic_at, table.len() as u64));
        file
    }
}

fn section(name: usize, kind: u32, flags: u64, at: u64, size: usize) -> Vec<u8> {
    let mut bytes = u32::try_from(name).unwrap().to_le_bytes().to_vec();
    bytes.extend(kind.to_le_bytes());
    let address = if flags & 2 == 0 { 0 } else { BASE + at };
    bytes.extend([flags, address, at, size as u64].iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend([0; 8]);
    bytes.extend([8_u64, 0].iter().flat_map(|word| word.to_le_bytes()));
    bytes
}
