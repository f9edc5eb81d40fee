//! Writing a checkpoint, by all ranks together.
//!
//! `step_N.tmp` is made by rank 0; every rank writes and syncs its file; rank 0, once told of all of them, writes the
//! manifest, syncs the folder, renames it to `step_N` and syncs the folder above. At each of the three exchanges ranks
//! learn of each other's failure, so either all go on or all stop with the same cause.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use sha2::{Digest as _, Sha256};
use trainyard_spec::{Digest, FormatVersion};

use super::{
    CheckpointError, CheckpointManifest, FileEntry, Identity, Kind, MANIFEST, Refusal, folder_name, io_error,
    steps,
};
use crate::dist::{Communicator, Purpose};
use crate::model::ParameterLayout;

/// What a checkpoint holds.
#[derive(Debug, Clone, Copy)]
pub struct State<'a> {
    /// Steps done.
    pub step: u64,
    /// Samples consumed by all ranks together.
    pub samples: u64,
    /// Where tensors lie in the flat buffers.
    pub layout: &'a ParameterLayout,
    /// All parameters.
    pub parameters: &'a [f32],
    /// All of AdamW's first moments.
    pub first: &'a [f32],
    /// All of AdamW's second moments.
    pub second: &'a [f32],
}

/// A checkpoint that is on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of all files.
    pub bytes: u64,
}

/// The part of `elements` that `rank` writes.
fn share(elements: usize, rank: u32, world_size: u32) -> Range<usize> {
    let bound = |rank: u32| (elements as u128 * u128::from(rank) / u128::from(world_size)) as usize;
    bound(rank)..bound(rank + 1)
}

/// Writes `state` to `folder/step_N`, then removes all but the `keep_last` newest checkpoints there.
///
/// # Errors
/// When any rank cannot do its part. What was written so far is removed then, and earlier checkpoints are as before.
pub fn write(
    folder: &Path,
    identity: &Identity,
    state: &State<'_>,
    communicator: &Communicator,
    keep_last: u32,
) -> Result<Written, CheckpointError> {
    let target = folder.join(folder_name(state.step));
    let temporary = folder.join(format!("{}.tmp", folder_name(state.step)));
    let purpose = Purpose { name: "checkpoint", step: state.step };
    let rank_0 = communicator.rank() == 0;

    let result = (|| {
        let made = if rank_0 { start(folder, &temporary) } else { Ok(()) };
        agree(communicator, purpose, made)?;
        let own = write_share(&temporary, state, communicator);
        let files = agree(communicator, purpose, own)?;
        let bytes = files.iter().map(|file| file.bytes).sum();
        let manifest = CheckpointManifest {
            version: FormatVersion,
            identity: identity.clone(),
            step: state.step,
            samples: state.samples,
            world_size: communicator.world_size(),
            parameters: state.parameters.len() as u64,
            files,
        };
        let published = if rank_0 { publish(folder, &temporary, &target, &manifest) } else { Ok(()) };
        agree(communicator, purpose, published)?;
        if rank_0 {
            prune(folder, keep_last)?;
        }
        Ok(Written { path: target, bytes })
    })();
    if result.is_err() && rank_0 {
        // The first cause is what is reported; what cannot be removed now is removed when a run starts.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    result
}

/// Removes what earlier attempts left unfinished.
pub(super) fn sweep(folder: &Path) -> Result<(), CheckpointError> {
    for entry in std::fs::read_dir(folder).map_err(io_error("cannot list", folder))? {
        let path = entry.map_err(io_error("cannot list", folder))?.path();
        let unfinished = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("step_") && name.ends_with(".tmp"));
        if unfinished {
            std::fs::remove_dir_all(&path).map_err(io_error("cannot remove", &path))?;
        }
    }
    Ok(())
}

fn start(folder: &Path, temporary: &Path) -> Result<(), CheckpointError> {
    std::fs::create_dir_all(folder).map_err(io_error("cannot create", folder))?;
    if temporary.exists() {
        std::fs::remove_dir_all(temporary).map_err(io_error("cannot remove", temporary))?;
    }
    std::fs::create_dir(temporary).map_err(io_error("cannot create", temporary))
}

/// Exchanges each rank's result. The lowest failing rank's failure becomes everyone's.
fn agree<T>(
    communicator: &Communicator,
    purpose: Purpose,
    own: Result<T, CheckpointError>,
) -> Result<Vec<T>, CheckpointError>
where
    T: serde::Serialize + serde::de::DeserializeOwned,
{
    let told = own.as_ref().map_err(|error| Refusal {
        rank: communicator.rank(),
        class: error.class(),
        message: error.to_string(),
    });
    let unreadable = |error: serde_json::Error| CheckpointError::Io {
        operation: "cannot exchange the state of",
        path: PathBuf::from(purpose.to_string()),
        source: error.into(),
    };
    let told = serde_json::to_vec(&told).map_err(unreadable)?;
    let all = communicator.all_gather(purpose, told)?;
    own?;
    all.iter()
        .map(|told| {
            serde_json::from_slice::<Result<T, Refusal>>(told)
                .map_err(unreadable)?
                .map_err(CheckpointError::Peer)
        })
        .collect()
}

fn write_share(
    temporary: &Path,
    state: &State<'_>,
    communicator: &Communicator,
) -> Result<FileEntry, CheckpointError> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let file = format!("rank_{rank}_of_{world_size}.safetensors");
    let path = temporary.join(&file);
    let range = share(state.parameters.len(), rank, world_size);
    let serialize = |source| CheckpointError::Serialize { path: path.clone(), source };
    let mut tensors = Vec::new();
    for (parameter, part) in state.layout.within(range.clone()) {
        let offset = part.start - parameter.range.start;
        for (kind, values) in [
            (Kind::Parameter, state.parameters),
            (Kind::FirstMoment, state.first),
            (Kind::SecondMoment, state.second),
        ] {
            let bytes = bytemuck::cast_slice(&values[part.clone()]);
            let view = TensorView::new(Dtype::F32, vec![part.len()], bytes).map_err(serialize)?;
            tensors.push((kind.key(&parameter.name, offset), view));
        }
    }
    if !temporary.is_dir() {
        let folder = temporary.parent().unwrap_or(temporary).to_owned();
        return Err(CheckpointError::NotShared { folder, file: temporary.display().to_string() });
    }
    safetensors::serialize_to_file(tensors, None, &path).map_err(serialize)?;
    let (bytes, digest) = settle(&path).map_err(io_error("cannot write", &path))?;
    Ok(FileEntry { file, bytes, digest, start: range.start as u64, end: range.end as u64 })
}

/// Makes a file readable for others and waits until it is on disk. Returns its size and digest.
fn settle(path: &Path) -> io::Result<(u64, Digest)> {
    let mut file = File::open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    file.sync_all()?;
    let (mut hasher, mut bytes) = (Sha256::new(), 0);
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok((bytes, Digest::from_bytes(hasher.finalize().into()))),
            count => {
                hasher.update(&block[..count]);
                bytes += count as u64;
            }
        }
    }
}

fn publish(
    folder: &Path,
    temporary: &Path,
    target: &Path,
    manifest: &CheckpointManifest,
) -> Result<(), CheckpointError> {
    for entry in &manifest.files {
        let seen = std::fs::metadata(temporary.join(&entry.file)).map(|metadata| metadata.len());
        if !seen.is_ok_and(|bytes| bytes == entry.bytes) {
            return Err(CheckpointError::NotShared { folder: folder.to_owned(), file: entry.file.clone() });
        }
    }
    let path = temporary.join(MANIFEST);
    let write = || {
        let mut text = serde_json::to_vec_pretty(manifest)?;
        text.push(b'\n');
        let mut file = File::create_new(&path)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().map_err(io_error("cannot write", &path))?;
    let sync = |path: &Path| File::open(path).and_then(|file| file.sync_all());
    sync(temporary).map_err(io_error("cannot sync", temporary))?;
    std::fs::rename(temporary, target).map_err(io_error("cannot create", target))?;
    sync(folder).map_err(io_error("cannot sync", folder))
}

/// Removes all but the newest. Each loses its name first, so that a half removed one is not taken for whole.
fn prune(folder: &Path, keep_last: u32) -> Result<(), CheckpointError> {
    let steps = steps(folder)?;
    let surplus = steps.len().saturating_sub(keep_last as usize);
    for &step in &steps[..surplus] {
        let path = folder.join(folder_name(step));
        let doomed = folder.join(format!("{}.tmp", folder_name(step)));
        std::fs::rename(&path, &doomed).map_err(io_error("cannot remove", &path))?;
        std::fs::remove_dir_all(&doomed).map_err(io_error("cannot remove", &doomed))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_elements_once() {
        for (elements, world_size) in [(10, 3), (3, 4), (0, 2), (1 << 40, 7)] {
            let mut end = 0;
            for rank in 0..world_size {
                let range = share(elements, rank, world_size);
                assert_eq!(range.start, end);
                end = range.end;
            }
            assert_eq!(end, elements);
        }
    }
}
