//! The format of Debian's control files and package lists (deb822(5)).

use std::collections::BTreeMap;
use std::io::BufRead;

/// The paragraphs of a deb822 file as fields by lower-case name. Continuation lines are joined with newlines.
pub(crate) struct Paragraphs<R> {
    lines: std::io::Lines<R>,
}

impl<R: BufRead> Paragraphs<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self { lines: reader.lines() }
    }
}

impl<R: BufRead> Iterator for Paragraphs<R> {
    type Item = std::io::Result<BTreeMap<String, String>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut fields = BTreeMap::new();
        let mut last: Option<String> = None;
        for line in self.lines.by_ref() {
            let line = match line {
                Ok(line) => line,
                Err(error) => return Some(Err(error)),
            };
            if line.trim().is_empty() {
                if fields.is_empty() {
                    continue;
                }
                return Some(Ok(fields));
            }
            if line.starts_with([' ', '\t']) {
                if let Some(value) = last.as_ref().and_then(|key| fields.get_mut(key)) {
                    let value: &mut String = value;
                    value.push('\n');
                    value.push_str(line.trim());
                }
            } else if let Some((key, value)) = line.split_once(':') {
                let key = key.to_ascii_lowercase();
                fields.insert(key.clone(), value.trim().to_owned());
                last = Some(key);
            }
        }
        (!fields.is_empty()).then_some(Ok(fields))
    }
}
