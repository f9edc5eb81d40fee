//! Images for several platforms under one name: an index, as the OCI image specification calls it.
//!
//! The same images give the same index, in whichever order they are named.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err::File;
use oci_spec::image::{
    Descriptor, DescriptorBuilder, ImageIndexBuilder, MediaType, OciLayoutBuilder, PlatformBuilder,
};
use trainyard_spec::Digest;

use crate::oci::{self, Layout};
use crate::store::{self, digest_of};

/// Why images cannot be put under one name.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One cannot be read, or is damaged.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// Two are for one platform.
    #[error("{first} and {second} are both for {platform}", first = .first.display(), second = .second.display())]
    Twice {
        /// One.
        first: PathBuf,
        /// The other.
        second: PathBuf,
        /// The platform.
        platform: String,
    },
    /// The index could not be written.
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Writes a layout with an index of the images of `layouts` into the empty folder `target`, and gives the index's digest.
///
/// # Errors
/// When an image is damaged, two are for one platform, or the layout cannot be written.
pub fn join(layouts: &[PathBuf], target: &Path) -> Result<Digest, Error> {
    let mut images: BTreeMap<String, (&Path, Descriptor)> = BTreeMap::new();
    let blobs = target.join("blobs/sha256");
    fs_err::create_dir_all(&blobs).map_err(store::io_error("create", &blobs))?;
    for folder in layouts {
        let layout = Layout::open(folder)?;
        let configuration = &layout.configuration;
        let platform = PlatformBuilder::default()
            .architecture(configuration.architecture().clone())
            .os(configuration.os().clone())
            .build()
            .map_err(oci::Error::from)?;
        let name = format!("{}/{}", configuration.os(), configuration.architecture());
        let index = oci::index(folder)?;
        let Some(image) = index.manifests().first() else { continue };
        let described = DescriptorBuilder::default()
            .media_type(image.media_type().clone())
            .digest(image.digest().clone())
            .size(image.size())
            .platform(platform)
            .build()
            .map_err(oci::Error::from)?;
        for blob in layout.manifest.layers().iter().chain([layout.manifest.config(), image]) {
            copy(folder, blob, &blobs)?;
        }
        if let Some((first, _)) = images.insert(name.clone(), (folder, described)) {
            return Err(Error::Twice { first: first.to_owned(), second: folder.clone(), platform: name });
        }
    }
    let described = images.into_values().map(|(_, described)| described).collect::<Vec<_>>();
    let joined = index_of(described)?;
    let described = oci::descriptor(MediaType::ImageIndex, &joined)?;
    let digest = Digest::of(&joined);
    store::write_whole(&blobs.join(digest.hex()), &joined)?;
    let marker =
        OciLayoutBuilder::default().image_layout_version("1.0.0").build().map_err(oci::Error::from)?;
    store::write_whole(&target.join("oci-layout"), &oci::canonical(&marker)?)?;
    store::write_whole(&target.join("index.json"), &index_of(vec![described])?)?;
    Ok(digest)
}

fn index_of(described: Vec<Descriptor>) -> Result<Vec<u8>, oci::Error> {
    let index = ImageIndexBuilder::default()
        .schema_version(2_u32)
        .media_type(MediaType::ImageIndex)
        .manifests(described)
        .build()?;
    oci::canonical(&index)
}

/// Copies a verified blob.
fn copy(folder: &Path, described: &Descriptor, blobs: &Path) -> Result<(), Error> {
    let (path, expected) = oci::place(folder, described)?;
    let read = |source| oci::Error::Read { path: path.clone(), source };
    let target = blobs.join(expected.hex());
    if target.exists() {
        return Ok(());
    }
    fs_err::copy(&path, &target).map_err(read)?;
    let (found, _) = digest_of(File::open(&target).map_err(read)?).map_err(read)?;
    if found == expected { Ok(()) } else { Err(oci::Error::Damaged { path, expected, found }.into()) }
}

/// Digests of the images of a layout: one, or those of its index.
///
/// # Errors
/// When the layout cannot be read.
pub fn images(layout: &Path) -> Result<Vec<Digest>, oci::Error> {
    let content = crate::content::Content::read(layout)?;
    let images = content.documents.iter().filter(|document| {
        let media_type = MediaType::from(document.media_type.as_str());
        crate::content::Kind::of(&media_type) == Some(crate::content::Kind::Manifest)
    });
    Ok(images.map(|document| document.digest).collect())
}
