//! What a person sees: stages, a progress line, the loss curve. Everything here goes to standard error, except what a
//! command returns as its result.

pub(crate) mod chart;
pub(crate) mod screen;
pub(crate) mod training;

use std::fmt::Write as _;

/// Text from outside for a terminal: what would move its cursor, or turn the order of letters, is written out.
pub(crate) fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            // Unicode's zero-width and bidirectional format characters.
            '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}' => {
                let _ = write!(out, "{}", letter.escape_unicode());
            }
            letter if letter.is_control() => {
                let _ = write!(out, "{}", letter.escape_default());
            }
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn what_steers_a_terminal_is_written_out() {
        for (text, shown) in [
            ("plain text, grün", "plain text, grün"),
            ("\u{1b}[2Jgone\r\n", "\\u{1b}[2Jgone\\r\\n"),
            ("evil\u{202e}txt.exe", "evil\\u{202e}txt.exe"),
        ] {
            assert_eq!(visible(text), shown);
        }
    }
}
