//! What a build tells its caller while it works. The library prints nothing.

use trainyard_spec::{Digest, Name};

/// Takes events as they happen, on the thread that works.
pub type Progress<'a> = &'a dyn Fn(Event);

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An input's files are being looked up.
    Resolving {
        /// The input.
        input: Name,
    },
    /// Bytes of a file have arrived.
    Downloading {
        /// File name.
        file: String,
        /// Bytes so far.
        received: u64,
        /// Bytes in all, where known.
        size: Option<u64>,
    },
    /// Bytes of an image have been sent to a registry.
    Uploading {
        /// Where to.
        to: String,
        /// Bytes so far, with those that were there.
        sent: u64,
        /// Bytes in all.
        size: u64,
    },
    /// Bytes of an archive have been written.
    Archiving {
        /// The archive.
        file: String,
        /// Bytes so far.
        written: u64,
    },
    /// A download or upload is tried again after a passing failure.
    Retrying {
        /// File name or page.
        file: String,
        /// What failed.
        reason: String,
    },
    /// The work goes on when other processes have finished theirs.
    Waiting {
        /// What they do.
        what: String,
    },
    /// An archive is being unpacked into the store.
    Unpacking {
        /// File name.
        file: String,
    },
    /// A library is being cut to the manifest's GPUs.
    Pruning {
        /// Its path in the image.
        file: String,
    },
    /// cargo has started on an input.
    Compiling {
        /// The packages asked for.
        packages: Vec<String>,
    },
    /// cargo has finished one more crate.
    Compiled {
        /// The crate.
        name: String,
        /// Crates finished so far.
        done: usize,
    },
    /// A layer is complete.
    Layer {
        /// The layer.
        name: Name,
        /// Bytes compressed.
        size: u64,
    },
    /// The image is complete.
    Image {
        /// Its digest.
        digest: Digest,
        /// Whether nothing had changed.
        reused: bool,
    },
    /// The image was linked with this host's C library, so another host builds another digest.
    NotReproducible {
        /// What differs from the lock.
        reason: String,
    },
}
