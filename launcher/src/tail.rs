//! Reads the lines of a file that is still being written.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// How lines are kept in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// As they were written.
    Plain,
    /// Kubernetes' log format, which conmon writes: time, stream, `F` for the end of a line or `P` for a part of one, and
    /// the text.
    Kubernetes,
}

/// A place in a file that may not exist yet.
#[derive(Debug)]
pub(crate) struct Tail {
    path: PathBuf,
    format: Format,
    file: Option<File>,
    /// Bytes after the last line's end.
    rest: Vec<u8>,
    /// Parts of a line of which the end has not come.
    parts: String,
}

impl Tail {
    pub(crate) fn new(path: &Path, format: Format) -> Self {
        Self { path: path.to_owned(), format, file: None, rest: Vec::new(), parts: String::new() }
    }

    /// The lines that were completed since the last call.
    pub(crate) fn lines(&mut self) -> io::Result<Vec<String>> {
        let file = match &mut self.file {
            Some(file) => file,
            None => match File::open(&self.path) {
                Ok(file) => self.file.insert(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                Err(error) => return Err(error),
            },
        };
        file.read_to_end(&mut self.rest)?;
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else { return Ok(Vec::new()) };
        let rest = self.rest.split_off(end + 1);
        let whole = std::mem::replace(&mut self.rest, rest);
        let text = String::from_utf8_lossy(&whole);
        Ok(text.lines().filter_map(|line| self.line(line)).collect())
    }

    fn line(&mut self, line: &str) -> Option<String> {
        match self.format {
            Format::Plain => Some(line.to_owned()),
            Format::Kubernetes => {
                let mut fields = line.splitn(4, ' ');
                let (_time, stream, tag) = (fields.next()?, fields.next()?, fields.next()?);
                if stream != "stdout" {
                    return None;
                }
                self.parts.push_str(fields.next().unwrap_or_default());
                (tag == "F").then(|| std::mem::take(&mut self.parts))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn lines_come_whole_however_they_were_written() {
        for (format, pieces, expected) in [
            (Format::Plain, ["a", "b\nc", "\nd\n"], ["ab", "c", "d"]),
            (
                Format::Kubernetes,
                ["t stdout P a\nt stdout F b\n", "t stdout F", " c d\nt stderr F x\n"],
                ["ab", "c d", ""],
            ),
        ] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            let mut tail = Tail::new(file.path(), format);
            let mut lines = Vec::new();
            for piece in pieces {
                file.write_all(piece.as_bytes()).unwrap();
                lines.extend(tail.lines().unwrap());
            }
            let expected: Vec<_> = expected.into_iter().filter(|line| !line.is_empty()).collect();
            assert_eq!(lines, expected, "{format:?}");
        }
    }
}
