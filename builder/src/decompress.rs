//! Layers without their compression, which is told by their first bytes: gzip, zstd or none.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

const GZIP: &[u8] = &[0x1f, 0x8b];
/// RFC 8878, "Zstandard Frames" and "Skippable Frames".
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const ZSTD_SKIPPABLE: &[u8] = &[0x2a, 0x4d, 0x18];

/// The bytes before compression.
pub(crate) fn decompress<'a>(mut layer: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let first = layer.fill_buf()?;
    if first.starts_with(GZIP) {
        return Ok(Box::new(MultiGzDecoder::new(layer)));
    }
    // A skippable frame's first byte is 0x50 to 0x5f.
    let skippable =
        first.first().is_some_and(|byte| byte & 0xf0 == 0x50) && first[1..].starts_with(ZSTD_SKIPPABLE);
    if skippable || first.starts_with(ZSTD) {
        return Ok(Box::new(Frames { source: layer, frame: FrameDecoder::new(), inside: false }));
    }
    Ok(Box::new(layer))
}

/// All frames of a zstd file, one after the other.
struct Frames<R: BufRead> {
    source: R,
    frame: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.inside && !self.next()? {
                return Ok(0);
            }
            while self.frame.can_collect() == 0 && !self.frame.is_finished() {
                let blocks = BlockDecodingStrategy::UptoBlocks(1);
                self.frame.decode_blocks(&mut self.source, blocks).map_err(invalid)?;
            }
            let read = self.frame.read(buffer)?;
            if read > 0 {
                return Ok(read);
            }
            self.inside = false;
        }
    }
}

impl<R: BufRead> Frames<R> {
    /// Goes to the next frame that holds something; false where there is none.
    fn next(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.frame.reset(&mut self.source) {
                Ok(()) => {
                    self.inside = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                    if skipped < length.into() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(invalid(error)),
            }
        }
        Ok(false)
    }
}

fn invalid(error: FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
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
        let (gzip, zstd) = (gzip(&bytes), zstd(&bytes));
        for layer in [&gzip[..gzip.len() - 9], &zstd[..zstd.len() - 5], &zstd[..6], &skipped] {
            assert!(decompress(layer).unwrap().read_to_end(&mut Vec::new()).is_err());
        }
    }
}
