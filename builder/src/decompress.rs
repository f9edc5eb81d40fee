//! Bytes without their compression, which is told by the first of them: gzip, zstd, xz or none.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;

const GZIP: &[u8] = &[0x1f, 0x8b];
/// RFC 8878, "Zstandard Frames" and "Skippable Frames".
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const ZSTD_SKIPPABLE: &[u8] = &[0x2a, 0x4d, 0x18];
/// The .xz file format, 2.1.1.1.
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
/// Most memory that xz may use. Its highest preset needs 65 MiB.
const XZ_MEMORY_KIB: u32 = 80 << 10;

/// The bytes before compression. Several members or frames are read as one; what breaks off is an error.
pub(crate) fn decompress<'a>(mut packed: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let first = packed.fill_buf()?;
    if first.starts_with(GZIP) {
        return Ok(Box::new(MultiGzDecoder::new(packed)));
    }
    if first.starts_with(XZ) {
        return Ok(Box::new(XzReader::new_mem_limit(packed, true, XZ_MEMORY_KIB)));
    }
    // A skippable frame's first byte is 0x50 to 0x5f.
    let skippable =
        first.first().is_some_and(|byte| byte & 0xf0 == 0x50) && first[1..].starts_with(ZSTD_SKIPPABLE);
    if skippable || first.starts_with(ZSTD) {
        // The library takes windows of up to 128 MiB.
        return Ok(Box::new(zstd::Decoder::with_buffer(packed)?));
    }
    Ok(Box::new(packed))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        zstd::encode_all(bytes, 1).unwrap()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
        xz.write_all(bytes).unwrap();
        xz.finish().unwrap()
    }

    #[test]
    fn every_compression_gives_the_bytes_before_it() {
        let bytes: Vec<u8> = (0..300_000_u32).flat_map(|n| (n % 1009).to_le_bytes()).collect();
        let (first, second) = bytes.split_at(bytes.len() / 3);
        let skipped = [&[0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0], &b"abc"[..]].concat();
        for (name, layer) in [
            ("none", bytes.clone()),
            ("gzip", gzip(&bytes)),
            ("gzip in members", [gzip(first), gzip(second)].concat()),
            ("xz", xz(&bytes)),
            ("xz in streams", [xz(first), xz(second)].concat()),
            ("zstd", zstd(&bytes)),
            ("zstd in frames", [zstd(first), zstd(second)].concat()),
            (
                "zstd with skippable frames",
                [&skipped[..], &zstd(first), &skipped, &zstd(second), &skipped].concat(),
            ),
        ] {
            let mut found = Vec::new();
            decompress(&layer[..]).unwrap().read_to_end(&mut found).unwrap();
            assert!(found == bytes, "{name}");
        }
        let mut found = Vec::new();
        decompress(&b""[..]).unwrap().read_to_end(&mut found).unwrap();
        assert!(found.is_empty());
    }

    #[test]
    fn what_breaks_off_is_an_error() {
        let bytes = vec![7; 100_000];
        let skipped = [0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1];
        let (gzip, zstd, xz) = (gzip(&bytes), zstd(&bytes), xz(&bytes));
        for layer in
            [&gzip[..gzip.len() - 9], &xz[..xz.len() - 5], &zstd[..zstd.len() - 5], &zstd[..6], &skipped]
        {
            assert!(decompress(layer).unwrap().read_to_end(&mut Vec::new()).is_err());
        }
    }
}
