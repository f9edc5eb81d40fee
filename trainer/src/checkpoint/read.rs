//! Finding, verifying and reading checkpoints.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use trainyard_spec::Digest;

use super::{
    CheckpointError, CheckpointManifest, Damage, Identity, Kind, MANIFEST, folder_name, io_error, steps,
    write,
};
use crate::model::ParameterLayout;

/// What a run starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest whole checkpoint in the folder; from the start where there is none.
    Auto,
    /// From the start; the folder must hold no checkpoint.
    None,
    /// This checkpoint.
    Path(PathBuf),
}

impl From<&str> for Resume {
    fn from(text: &str) -> Self {
        match text {
            "auto" => Self::Auto,
            "none" => Self::None,
            path => Self::Path(path.into()),
        }
    }
}

/// A whole checkpoint, mapped into memory.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What its manifest says.
    pub manifest: CheckpointManifest,
    /// What is wrong with newer ones, where [`Checkpoint::open_newest`] chose this one.
    pub passed_over: Vec<CheckpointError>,
    files: Vec<Mmap>,
}

/// What [`choose`] found.
#[derive(Debug)]
pub struct Choice {
    /// The checkpoint to go on from.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that are damaged, and where each was moved.
    pub damaged: Vec<(CheckpointError, PathBuf)>,
}

/// Decides what a run starts from, and tidies the folder: what earlier attempts left unfinished is removed, damaged
/// checkpoints are moved aside. For one rank to call before all ranks open what it found.
///
/// # Errors
/// When the checkpoint asked for is damaged, or the folder is not fit for this run.
pub fn choose(folder: &Path, resume: &Resume) -> Result<Choice, CheckpointError> {
    std::fs::create_dir_all(folder).map_err(io_error("cannot create", folder))?;
    write::sweep(folder)?;
    let mut steps = steps(folder)?;
    let newest = steps.last().copied();
    match resume {
        Resume::None => match newest {
            Some(newest) => Err(CheckpointError::Occupied { folder: folder.to_owned(), newest }),
            None => Ok(Choice { checkpoint: None, damaged: Vec::new() }),
        },
        Resume::Path(path) => {
            let checkpoint = Checkpoint::open(path)?;
            let step = checkpoint.manifest.step;
            match newest.filter(|&newest| newest > step) {
                Some(newest) => Err(CheckpointError::NotNewest { folder: folder.to_owned(), step, newest }),
                None => Ok(Choice { checkpoint: Some(checkpoint), damaged: Vec::new() }),
            }
        }
        Resume::Auto => {
            let mut damaged = Vec::new();
            while let Some(step) = steps.pop() {
                match Checkpoint::open(&folder.join(folder_name(step))) {
                    Ok(checkpoint) => {
                        let mut moved = Vec::new();
                        for error in damaged {
                            moved.push(set_aside(error)?);
                        }
                        return Ok(Choice { checkpoint: Some(checkpoint), damaged: moved });
                    }
                    Err(CheckpointError::Damaged { path, damage }) => damaged.push((path, damage)),
                    Err(error) => return Err(error),
                }
            }
            if damaged.is_empty() {
                return Ok(Choice { checkpoint: None, damaged: Vec::new() });
            }
            let problems = damaged.iter().map(|(path, damage)| format!("{}: {damage}", path.display()));
            Err(CheckpointError::NoneWhole { folder: folder.to_owned(), problems: problems.collect() })
        }
    }
}

/// Renames a damaged checkpoint, so that its step can be written again and a person can look at it.
fn set_aside((path, damage): (PathBuf, Damage)) -> Result<(CheckpointError, PathBuf), CheckpointError> {
    let mut number = 1;
    let aside = loop {
        let mut name = path.clone().into_os_string();
        name.push(format!(".damaged-{number}"));
        let aside = PathBuf::from(name);
        if !aside.exists() {
            break aside;
        }
        number += 1;
    };
    std::fs::rename(&path, &aside).map_err(io_error("cannot move aside", &path))?;
    Ok((CheckpointError::Damaged { path, damage }, aside))
}

impl Checkpoint {
    /// Opens the newest whole checkpoint of a folder, or the checkpoint that `path` is itself.
    ///
    /// # Errors
    /// When there is none.
    pub fn open_newest(path: &Path) -> Result<Self, CheckpointError> {
        if path.join(MANIFEST).exists() {
            return Self::open(path);
        }
        let mut passed_over = Vec::new();
        for step in steps(path)?.into_iter().rev() {
            match Self::open(&path.join(folder_name(step))) {
                Ok(checkpoint) => return Ok(Self { passed_over, ..checkpoint }),
                Err(error) => passed_over.push(error),
            }
        }
        Err(passed_over.into_iter().next().unwrap_or(CheckpointError::NotFound { path: path.to_owned() }))
    }

    /// Opens a checkpoint and verifies its files' sizes and digests.
    ///
    /// # Errors
    /// When it is not there, or damaged.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |damage| CheckpointError::Damaged { path: path.to_owned(), damage };
        if !path.is_dir() {
            return Err(CheckpointError::NotFound { path: path.to_owned() });
        }
        let manifest = path.join(MANIFEST);
        let bytes = match std::fs::read(&manifest) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged(Damage::Missing { file: MANIFEST.to_owned() }));
            }
            result => result.map_err(io_error("cannot read", &manifest))?,
        };
        let manifest: CheckpointManifest =
            serde_json::from_slice(&bytes).map_err(|error| damaged(Damage::Manifest(error)))?;

        let needed = manifest.files.len() as u32;
        if manifest.world_size == 0 || manifest.world_size != needed {
            return Err(damaged(Damage::WorldSize { found: manifest.world_size, needed }));
        }
        let (mut files, mut next) = (Vec::with_capacity(manifest.files.len()), 0);
        for entry in &manifest.files {
            let file = entry.file.clone();
            if entry.start != next || entry.end < entry.start {
                return Err(damaged(Damage::Gap { file, found: entry.start, needed: next }));
            }
            next = entry.end;
            // A name from outside must not lead out of the folder.
            if Path::new(&file).file_name() != Some(file.as_ref()) {
                return Err(damaged(Damage::Name { file }));
            }
            let at = path.join(&file);
            let opened = match File::open(&at) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(damaged(Damage::Missing { file }));
                }
                result => result.map_err(io_error("cannot open", &at))?,
            };
            let found = opened.metadata().map_err(io_error("cannot read the size of", &at))?.len();
            if found != entry.bytes {
                return Err(damaged(Damage::Size { file, found, needed: entry.bytes }));
            }
            // SAFETY: a checkpoint's files are complete before the folder has its name and are never changed in place.
            let map = unsafe { Mmap::map(&opened) }.map_err(io_error("cannot map", &at))?;
            let found = Digest::of(&map);
            if found != entry.digest {
                return Err(damaged(Damage::Digest { file, found, needed: entry.digest }));
            }
            files.push(map);
        }
        if next != manifest.parameters {
            let file = MANIFEST.to_owned();
            return Err(damaged(Damage::Gap { file, found: manifest.parameters, needed: next }));
        }
        Ok(Self { path: path.to_owned(), manifest, passed_over: Vec::new(), files })
    }

    /// Whether a run may go on from here.
    ///
    /// # Errors
    /// When it is another run; names the first thing that differs.
    pub fn require(&self, needed: &Identity) -> Result<(), CheckpointError> {
        let found = &self.manifest.identity;
        let model = |identity: &Identity| {
            let model = &identity.model;
            format!(
                "{} layers, {} heads, {} channels, context {}, vocabulary {}",
                model.layers, model.heads, model.channels, model.context, identity.vocabulary
            )
        };
        let differing = [
            ("model", model(found), model(needed)),
            ("tokenizer", format!("{:?}", found.tokenizer), format!("{:?}", needed.tokenizer)),
            ("data set", found.dataset.to_string(), needed.dataset.to_string()),
            ("seed", found.seed.to_string(), needed.seed.to_string()),
        ];
        match differing.into_iter().find(|(_, found, needed)| found != needed) {
            None => Ok(()),
            Some((field, found, needed)) => {
                Err(CheckpointError::Foreign { path: self.path.clone(), field, found, needed })
            }
        }
    }

    /// Reads a whole flat buffer.
    ///
    /// # Errors
    /// When a tensor is not there or of another size.
    ///
    /// # Panics
    /// When `out` is not of the layout's size.
    pub fn read(&self, kind: Kind, layout: &ParameterLayout, out: &mut [f32]) -> Result<(), CheckpointError> {
        assert_eq!(out.len(), layout.elements(), "a flat buffer has all elements of the layout");
        let damaged = |damage| CheckpointError::Damaged { path: self.path.clone(), damage };
        if self.manifest.parameters != out.len() as u64 {
            return Err(CheckpointError::Foreign {
                path: self.path.clone(),
                field: "number of parameters",
                found: self.manifest.parameters.to_string(),
                needed: out.len().to_string(),
            });
        }
        for (entry, map) in self.manifest.files.iter().zip(&self.files) {
            let refused = |source| damaged(Damage::Tensors { file: entry.file.clone(), source });
            let tensors = SafeTensors::deserialize(map).map_err(refused)?;
            for (parameter, part) in layout.within(entry.start as usize..entry.end as usize) {
                let key = kind.key(&parameter.name, part.start - parameter.range.start);
                let tensor = tensors.tensor(&key).map_err(refused)?;
                if tensor.dtype() != Dtype::F32 || tensor.data().len() != size_of_val(&out[part.clone()]) {
                    return Err(damaged(Damage::Tensor {
                        file: entry.file.clone(),
                        key,
                        found: format!("{:?} {:?}", tensor.dtype(), tensor.shape()),
                        needed: part.len(),
                    }));
                }
                bytemuck::cast_slice_mut::<f32, u8>(&mut out[part]).copy_from_slice(tensor.data());
            }
        }
        Ok(())
    }
}
