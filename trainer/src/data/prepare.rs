//! Text files to a token data set, streaming.
//!
//! Texts are joined as they are, in the order given. They must be UTF-8: text in another encoding would train without
//! complaint and read as garbage. The held-out part is the end of the joined text, from a character's start on.
//!
//! Everything is written to a hidden folder beside the target, which is renamed when all of it is on disk. Its maker
//! holds a lock on it: what a killed one left behind is made anew by the next.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use trainyard_spec::{Digest, FormatVersion};

use super::shard::{SHARD_TOKENS, ShardError, ShardWriter};
use super::{DatasetManifest, MANIFEST, ShardEntry, Source, Split};
use crate::tokenizer::Tokenizer;

/// Bytes read at once.
const BLOCK: usize = 1 << 20;

/// Tokens that each part needs for a loss to exist: one to read and one to predict, and up to three by which the cut
/// moves to a character's start.
const LEAST_TOKENS: u64 = 5;

/// What to make a data set from.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// The text files, in order.
    pub texts: &'a [PathBuf],
    /// Turns text into tokens.
    pub tokenizer: Tokenizer,
    /// Part of the text, at its end, that is held out: above 0, at most 0.5.
    pub validation_fraction: f64,
    /// Folder to make; it must not exist.
    pub out: &'a Path,
}

/// Why no data set was made. Nothing is left behind then.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The operating system refused.
    #[error("{operation} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A text cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A text is a folder, a device or a pipe. It is read more than once, and its length must be known.
    #[error("cannot read {}: it is not a regular file", .path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
    },
    /// A shard could not be written.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The target is taken.
    #[error("{} exists; needed is a path where nothing is: remove it or give another", .path.display())]
    Exists {
        /// The target.
        path: PathBuf,
    },
    /// The text is in another encoding, or not text.
    #[error("{}: byte {offset} is not UTF-8; needed is UTF-8 text (iconv converts other encodings)", .path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// First byte that cannot be read.
        offset: u64,
    },
    /// There is too little text.
    #[error(
        "the text has {found} tokens; needed are at least {needed}, so that {validation_fraction} of it can be held out and each \
         part has something to predict"
    )]
    TooShort {
        /// Tokens found.
        found: u64,
        /// Tokens needed.
        needed: u64,
        /// Part to hold out.
        validation_fraction: f64,
    },
    /// The fraction cannot be held out.
    #[error("the validation fraction is {found}; needed is above 0 and at most 0.5")]
    Fraction {
        /// What was asked for.
        found: f64,
    },
    /// A file grew or shrank while it was read.
    #[error("{}: {found} bytes were read where {needed} were announced; it changed meanwhile, try again", .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Bytes read.
        found: u64,
        /// Bytes announced.
        needed: u64,
    },
}

/// Makes a data set. `progress` hears of bytes read so far and in all.
///
/// # Errors
/// See [`PrepareError`].
pub fn prepare(
    request: &Request<'_>,
    mut progress: impl FnMut(u64, u64),
) -> Result<DatasetManifest, PrepareError> {
    let fraction = request.validation_fraction;
    if !(fraction > 0.0 && fraction <= 0.5) {
        return Err(PrepareError::Fraction { found: fraction });
    }
    if request.out.exists() {
        return Err(PrepareError::Exists { path: request.out.to_owned() });
    }
    let mut sizes = Vec::with_capacity(request.texts.len());
    for path in request.texts {
        sizes.push(open_text(path)?.1);
    }
    let total: u64 = sizes.iter().sum();
    let held_out_from = total - (total as f64 * fraction).round() as u64;
    // The byte tokenizer has as many tokens as the text has bytes.
    if held_out_from < LEAST_TOKENS || total - held_out_from < LEAST_TOKENS {
        return Err(PrepareError::TooShort {
            found: total,
            needed: (((LEAST_TOKENS as f64 - 0.5) / fraction).ceil() as u64).max(2 * LEAST_TOKENS),
            validation_fraction: fraction,
        });
    }

    let folder = Partial::make(request.out)?;
    let mut train = SplitWriter::new(&folder.path, "train", request.tokenizer);
    let mut validation = SplitWriter::new(&folder.path, "validation", request.tokenizer);
    let mut source = Sha256::new();
    let mut done = 0;
    for (path, &size) in request.texts.iter().zip(&sizes) {
        let start = done;
        read_text(path, |text| {
            source.update(text);
            // Bytes of this block before the held-out part, which starts with a character.
            let mut cut = held_out_from.saturating_sub(done).min(text.len() as u64) as usize;
            while cut < text.len() && text[cut] & 0xc0 == 0x80 {
                cut += 1;
            }
            done += text.len() as u64;
            train.write(&text[..cut])?;
            validation.write(&text[cut..])?;
            progress(done.min(total), total);
            Ok(())
        })?;
        if done - start != size {
            return Err(PrepareError::Changed { path: path.clone(), found: done - start, needed: size });
        }
    }
    let (train, train_counts) = train.finish()?;
    let (validation, validation_counts) = validation.finish()?;
    let manifest = DatasetManifest {
        version: FormatVersion,
        tokenizer: request.tokenizer,
        vocabulary: request.tokenizer.vocabulary(),
        source: Source { bytes: total, digest: Digest::from_bytes(source.finalize().into()) },
        validation_fraction: fraction,
        unigram_loss: unigram_loss(&train_counts, &validation_counts),
        train,
        validation,
    };
    publish(&manifest, folder, request.out)?;
    Ok(manifest)
}

fn io<'a>(operation: &'static str, path: &'a Path) -> impl Fn(io::Error) -> PrepareError + 'a {
    move |source| PrepareError::Io { operation, path: path.to_owned(), source }
}

/// Opens a text and tells its length in bytes.
///
/// # Errors
/// When it cannot be read or is no regular file.
pub fn open_text(path: &Path) -> Result<(File, u64), PrepareError> {
    let failed = |source| PrepareError::Text { path: path.to_owned(), source };
    // Before it is opened, which for a pipe waits until somebody writes to it.
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return Err(PrepareError::NotAFile { path: path.to_owned() });
    }
    Ok((File::open(path).map_err(failed)?, found.len()))
}

/// Passes a file on in blocks that are whole characters.
fn read_text(
    path: &Path,
    mut take: impl FnMut(&[u8]) -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    let (mut file, _) = open_text(path)?;
    let mut buffer = vec![0; BLOCK];
    // Bytes of a character that the last block cut in two.
    let mut carried = 0;
    let mut offset = 0;
    loop {
        let count = match file.read(&mut buffer[carried..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => result.map_err(|source| PrepareError::Text { path: path.to_owned(), source })?,
        };
        let filled = carried + count;
        let whole = match std::str::from_utf8(&buffer[..filled]) {
            Ok(_) => filled,
            Err(error) if error.error_len().is_none() && count > 0 => error.valid_up_to(),
            Err(error) => {
                let offset = offset + error.valid_up_to() as u64;
                return Err(PrepareError::NotUtf8 { path: path.to_owned(), offset });
            }
        };
        if count == 0 {
            return Ok(());
        }
        take(&buffer[..whole])?;
        offset += whole as u64;
        carried = filled - whole;
        buffer.copy_within(whole..filled, 0);
    }
}

/// A data set in the making, beside where it will be. Removed when dropped.
struct Partial {
    path: PathBuf,
    lock: File,
}

impl Partial {
    /// Makes the folder, or takes over what a killed process left of it. Waits for a live one.
    fn make(out: &Path) -> Result<Self, PrepareError> {
        let parent = match out.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        std::fs::create_dir_all(parent).map_err(io("cannot create", parent))?;
        let mut name = std::ffi::OsString::from(".");
        name.push(out.file_name().unwrap_or_default());
        name.push(".partial");
        let path = parent.join(name);
        loop {
            match std::fs::create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(io("cannot create", &path)(error));
                }
                _ => {}
            }
            let lock = match File::open(&path) {
                // Its maker has just given it its name.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                lock => lock.map_err(io("cannot open", &path))?,
            };
            lock.lock().map_err(io("cannot lock", &path))?;
            if out.exists() {
                return Err(PrepareError::Exists { path: out.to_owned() });
            }
            let held = lock.metadata().map_err(io("cannot look at", &path))?;
            if !std::fs::metadata(&path).is_ok_and(|there| there.ino() == held.ino()) {
                continue;
            }
            let this = Self { path, lock };
            for entry in std::fs::read_dir(&this.path).map_err(io("cannot list", &this.path))? {
                let left = entry.map_err(io("cannot list", &this.path))?.path();
                std::fs::remove_file(&left).map_err(io("cannot remove", &left))?;
            }
            // Nodes may read it as another user.
            let readable = std::fs::Permissions::from_mode(0o755);
            this.lock.set_permissions(readable).map_err(io("cannot give permissions to", &this.path))?;
            return Ok(this);
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Under its final name it stays; here nothing of it is wanted.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Writes one split, a new shard whenever one is full, and counts its tokens.
struct SplitWriter<'a> {
    folder: &'a Path,
    name: &'static str,
    tokenizer: Tokenizer,
    shards: Vec<ShardEntry>,
    open: Option<ShardWriter>,
    counts: Vec<u64>,
}

impl<'a> SplitWriter<'a> {
    fn new(folder: &'a Path, name: &'static str, tokenizer: Tokenizer) -> Self {
        let counts = vec![0; tokenizer.vocabulary() as usize];
        Self { folder, name, tokenizer, shards: Vec::new(), open: None, counts }
    }

    fn file(&self) -> String {
        format!("{}_{:06}.bin", self.name, self.shards.len())
    }

    fn write(&mut self, text: &[u8]) -> Result<(), PrepareError> {
        let tokens = self.tokenizer.encode(text);
        for &token in &tokens {
            self.counts[token as usize] += 1;
        }
        let mut rest = &tokens[..];
        while !rest.is_empty() {
            let mut writer = match self.open.take() {
                Some(writer) => writer,
                None => ShardWriter::create(self.folder.join(self.file()), self.tokenizer.vocabulary())?,
            };
            let (now, later) = rest.split_at(rest.len().min(SHARD_TOKENS - writer.tokens()));
            writer.write(now)?;
            rest = later;
            if writer.tokens() < SHARD_TOKENS {
                self.open = Some(writer);
            } else {
                self.close(writer)?;
            }
        }
        Ok(())
    }

    fn close(&mut self, writer: ShardWriter) -> Result<(), PrepareError> {
        let (file, tokens) = (self.file(), writer.tokens() as u64);
        self.shards.push(ShardEntry { file, tokens, digest: writer.finish()? });
        Ok(())
    }

    fn finish(mut self) -> Result<(Split, Vec<u64>), PrepareError> {
        if let Some(writer) = self.open.take() {
            self.close(writer)?;
        }
        let tokens = self.shards.iter().map(|shard| shard.tokens).sum();
        Ok((Split { tokens, shards: self.shards }, self.counts))
    }
}

/// Cross-entropy in nats of `validation` counts under `train` frequencies, each count raised by one.
fn unigram_loss(train: &[u64], validation: &[u64]) -> f64 {
    let train_total = train.iter().sum::<u64>() as f64 + train.len() as f64;
    let validation_total = validation.iter().sum::<u64>() as f64;
    let nats = train.iter().zip(validation).map(|(&seen, &met)| {
        let probability = (seen as f64 + 1.0) / train_total;
        -probability.ln() * met as f64
    });
    nats.sum::<f64>() / validation_total
}

/// Adds the manifest and gives the folder its name.
fn publish(manifest: &DatasetManifest, folder: Partial, out: &Path) -> Result<(), PrepareError> {
    let path = folder.path.join(MANIFEST);
    let write = || {
        let mut text = serde_json::to_vec_pretty(manifest)?;
        text.push(b'\n');
        let mut file = File::create_new(&path)?;
        io::Write::write_all(&mut file, &text)?;
        file.sync_all()?;
        folder.lock.sync_all()
    };
    write().map_err(io("cannot write", &path))?;
    match rustix::fs::renameat_with(
        rustix::fs::CWD,
        &folder.path,
        rustix::fs::CWD,
        out,
        rustix::fs::RenameFlags::NOREPLACE,
    ) {
        Err(rustix::io::Errno::EXIST) => return Err(PrepareError::Exists { path: out.to_owned() }),
        result => result.map_err(|error| io("cannot create", out)(error.into()))?,
    }
    let parent = out.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).map_err(io("cannot sync", parent))
}

#[cfg(test)]
mod tests {
    use super::super::Dataset;
    use super::*;

    fn run(texts: &[&[u8]], fraction: f64) -> Result<(tempfile::TempDir, Dataset), PrepareError> {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(format!("{i}.txt"))).collect();
        for (path, text) in paths.iter().zip(texts) {
            std::fs::write(path, text).unwrap();
        }
        let out = folder.path().join("sub/data");
        let request =
            Request { texts: &paths, tokenizer: Tokenizer::Byte, validation_fraction: fraction, out: &out };
        prepare(&request, |_, _| {})?;
        let left = std::fs::read_dir(folder.path().join("sub")).unwrap().count();
        assert_eq!(left, 1, "a temporary folder is left");
        let data = Dataset::open(&out).unwrap();
        Ok((folder, data))
    }

    fn all(tokens: &super::super::Tokens) -> Vec<u32> {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        tokens.read_window(0, tokens.len() as u32 - 1, &mut inputs, &mut targets).unwrap();
        inputs.extend(targets.last());
        inputs
    }

    #[test]
    fn texts_come_back_joined_and_split() {
        // 13 bytes: the cut after 8 falls into the middle of the two bytes of "ä".
        let (_folder, data) = run(&[b"abcdef", "gähijk".as_bytes()], 0.4).unwrap();
        let text: Vec<u8> =
            [all(&data.train), all(&data.validation)].concat().iter().map(|&t| t as u8).collect();
        assert_eq!(text, "abcdefgähijk".as_bytes());
        assert_eq!(data.manifest.source.digest, Digest::of("abcdefgähijk".as_bytes()));
        assert_eq!(data.manifest.validation.tokens, 4);
    }

    #[test]
    fn unigram_loss_is_that_of_smoothed_frequencies() {
        let (_folder, data) = run(&[b"aaabaabaaabaaaabbbbb"], 0.25).unwrap();
        let (total, b) = (15.0 + 256.0, 3.0 + 1.0);
        assert!((data.manifest.unigram_loss + f64::ln(b / total)).abs() < 1e-12);
    }

    #[test]
    fn bad_texts_are_named() {
        let long = [vec![b'x'; 2 * BLOCK - 1], "ä".as_bytes().to_vec(), vec![0xff]].concat();
        let cases: [(&[&[u8]], f64, &str); 7] = [
            (&[b"abc"], 0.1, "the text has 3 tokens; needed are at least 45"),
            (&[], 0.1, "the text has 0 tokens"),
            (&[b"good text", b"and \xff bad"], 0.5, "1.txt: byte 4 is not UTF-8"),
            (&[b"cut off at its end \xc3"], 0.5, "0.txt: byte 19 is not UTF-8"),
            (&[&long], 0.5, "0.txt: byte 2097153 is not UTF-8"),
            (&[b"abcdefgh"], 0.9, "the validation fraction is 0.9"),
            (&[b"abcdefgh"], f64::NAN, "the validation fraction is NaN"),
        ];
        for (texts, fraction, expect) in cases {
            let error = run(texts, fraction).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        }
        // The least that is asked for is enough.
        run(&[&[b'x'; 45]], 0.1).unwrap();
        run(&["xyz\u{1f600}\u{1f600}".as_bytes()], 0.5).unwrap();
    }

    #[test]
    fn what_a_killed_process_left_is_made_anew_and_a_live_one_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (text, out) = (folder.path().join("text"), folder.path().join("data"));
        std::fs::write(&text, "some text that is long enough").unwrap();
        let partial = folder.path().join(".data.partial");
        std::fs::create_dir(&partial).unwrap();
        std::fs::write(partial.join("train_000007.bin"), "half").unwrap();
        let texts = [text];
        let make = || {
            let request =
                Request { texts: &texts, tokenizer: Tokenizer::Byte, validation_fraction: 0.5, out: &out };
            prepare(&request, |_, _| {})
        };
        let made: Vec<_> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            makers.into_iter().map(|maker| maker.join().unwrap()).collect()
        });
        assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1, "{made:?}");
        assert!(made.iter().all(|made| matches!(made, Ok(_) | Err(PrepareError::Exists { .. }))), "{made:?}");
        assert!(!partial.exists() && !out.join("train_000007.bin").exists());
        Dataset::open(&out).unwrap();
    }

    #[test]
    fn what_is_no_regular_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        for path in [Path::new("/dev/zero"), Path::new("/dev/null"), &pipe, folder.path()] {
            let error = open_text(path).unwrap_err();
            assert!(matches!(error, PrepareError::NotAFile { .. }), "{error}");
        }
    }

    #[test]
    fn a_taken_target_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, "some text that is long enough").unwrap();
        let request = Request {
            texts: &[text],
            tokenizer: Tokenizer::Byte,
            validation_fraction: 0.5,
            out: folder.path(),
        };
        assert!(matches!(prepare(&request, |_, _| {}), Err(PrepareError::Exists { .. })));
    }
}
