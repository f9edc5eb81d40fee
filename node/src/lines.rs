//! Cuts a stream of bytes into lines of bounded length.

use std::io::{self, BufRead, BufReader, Read};

/// Longest line in bytes; a longer one comes in pieces of this length.
pub(crate) const LONGEST: usize = 16 << 10;

/// Calls `take` for each line without its end, until the stream ends. Bytes that are not UTF-8 are replaced.
pub(crate) fn each(stream: impl Read, mut take: impl FnMut(&str)) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(1 << 16, stream);
    let mut line = Vec::new();
    loop {
        let room = LONGEST + 1 - line.len();
        let read = reader.by_ref().take(room as u64).read_until(b'\n', &mut line)?;
        let ended = line.last() == Some(&b'\n');
        if !ended && read > 0 && line.len() <= LONGEST {
            continue;
        }
        if read == 0 && line.is_empty() {
            return Ok(());
        }
        let end = if ended { line.len() - 1 } else { line.len().min(LONGEST) };
        // A piece ends between characters.
        let end = if ended || read == 0 { end } else { boundary(&line[..end]) };
        take(String::from_utf8_lossy(line[..end].strip_suffix(b"\r").unwrap_or(&line[..end])).as_ref());
        let rest = if ended { line.len() } else { end };
        line.drain(..rest);
    }
}

/// The end of the last whole character.
fn boundary(bytes: &[u8]) -> usize {
    let start = (1..=3.min(bytes.len())).map(|back| bytes.len() - back).find(|at| bytes[*at] & 0xc0 != 0x80);
    match start {
        Some(at) if bytes[at] >= 0xc0 && at > 0 && std::str::from_utf8(&bytes[at..]).is_err() => at,
        _ => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_lose_nothing() {
        let long = "é".repeat(LONGEST);
        for (text, expected) in [
            (b"".to_vec(), vec![]),
            (b"a\nb".to_vec(), vec!["a".to_owned(), "b".to_owned()]),
            (b"\n\nx\r\n".to_vec(), vec![String::new(), String::new(), "x".to_owned()]),
            (b"a\xffb\n".to_vec(), vec!["a\u{fffd}b".to_owned()]),
            ([b"x".repeat(LONGEST), b"\n".to_vec()].concat(), vec!["x".repeat(LONGEST)]),
            (b"x".repeat(LONGEST + 2), vec!["x".repeat(LONGEST), "xx".to_owned()]),
        ] {
            let mut lines = Vec::new();
            each(text.as_slice(), |line| lines.push(line.to_owned())).unwrap();
            assert_eq!(lines, expected);
        }
        let mut pieces = Vec::new();
        each(format!("x{long}\ny\n").as_bytes(), |line| pieces.push(line.to_owned())).unwrap();
        assert!(pieces.iter().all(|piece| piece.len() <= LONGEST));
        assert_eq!(pieces.concat(), format!("x{long}y"));
    }
}
