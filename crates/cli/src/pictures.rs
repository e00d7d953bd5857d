//! The vision or audio tower of a command's model, and the pictures or sounds that it reads.
//!
//! Invariant: a tower that cannot be used is an error where a picture, a sound or `--mmproj` asks
//! for it, and otherwise a note. Knows no prompt.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cellar::{MediaKind, MediaPart, PictureReader, PreparedPicture, Vision};
use cellar_engine::Tower;
use model_core::model_file::ModelFile;

use crate::args::{ComputeArgs, VisionArgs};
use crate::by_name::locate;
use crate::input;
use crate::models::ModelSource;
use crate::resolve;

/// The media of a command's model: texts alone, or pictures and sounds, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PictureUse {
    /// Texts alone.
    Unused,
    /// There are some.
    Shown,
}

impl PictureUse {
    /// That of so many pictures or sounds.
    pub(crate) fn of(n_pictures: usize) -> Self {
        if n_pictures == 0 {
            Self::Unused
        } else {
            Self::Shown
        }
    }
}

/// The tower of a model, or why it sees and hears nothing.
pub(crate) type Sight = Result<Vision, String>;

/// The tower of a model.
///
/// # Errors
/// Where `--mmproj` names one that cannot be used.
pub(crate) fn sight(
    file: &ModelFile,
    source: &ModelSource,
    args: &VisionArgs,
) -> anyhow::Result<Sight> {
    let path = match source {
        ModelSource::File(path) if !input::is_stdin(path) => locate(path)?.into_owned(),
        ModelSource::Embedded | ModelSource::File(_) => PathBuf::new(),
    };
    let mmproj = args.mmproj.as_deref();
    if mmproj.is_none() && path.as_os_str().is_empty() {
        return Ok(Err(NO_TOWER.to_owned()));
    }
    match cellar::vision_of(file, &path, mmproj) {
        Ok(Some(vision)) => Ok(Ok(vision)),
        Ok(None) => Ok(Err(NO_TOWER.to_owned())),
        Err(error) if mmproj.is_some() => Err(error.into()),
        Err(error) => {
            tracing::debug!(%error, "no tower");
            Ok(Err(error.to_string()))
        }
    }
}

/// The tower of a run that shows pictures, or names a tower.
///
/// # Errors
/// As [`sight`].
pub(crate) fn wanted_sight(
    shown: PictureUse,
    args: &VisionArgs,
    file: &ModelFile,
    source: &ModelSource,
) -> anyhow::Result<Option<Sight>> {
    if shown == PictureUse::Unused && args.mmproj.is_none() {
        return Ok(None);
    }
    Ok(Some(sight(file, source, args)?))
}

/// The same on a backend, where there are pictures to compute.
///
/// # Errors
/// As [`tower`].
pub(crate) fn wanted_tower(
    shown: PictureUse,
    sight: Option<&Sight>,
    compute: &ComputeArgs,
) -> anyhow::Result<Option<Tower>> {
    match sight {
        Some(Ok(vision)) if shown == PictureUse::Shown => tower(vision, compute).map(Some),
        _ => Ok(None),
    }
}

/// The reason where there is none. Clients read it, too, so it has no path.
const NO_TOWER: &str =
    "the model has no vision or audio tower: it takes text only (--mmproj FILE gives one)";

/// The tower on a backend.
///
/// # Errors
/// Where there is none that can be used.
pub(crate) fn tower(vision: &Vision, compute: &ComputeArgs) -> anyhow::Result<Tower> {
    let options = resolve::backend_flags(compute)?.options();
    Ok(cellar::open_tower(vision, options)?)
}

/// The same for a command that goes on without: texts need no tower.
pub(crate) fn tower_or_warning(sight: &mut Sight, compute: &ComputeArgs) -> Option<Tower> {
    let vision = sight.as_ref().ok()?;
    match tower(vision, compute) {
        Ok(tower) => Some(tower),
        Err(error) => {
            crate::failure::warn(&format!("the tower is not loaded: {error}"));
            *sight = Err(error.to_string());
            None
        }
    }
}

/// The reader of pictures or sounds, or the reason why there is none.
pub(crate) fn reader(sight: &Sight) -> Result<Arc<PictureReader>, String> {
    match sight {
        Ok(vision) => Ok(Arc::clone(vision.reader())),
        Err(why) => Err(why.clone()),
    }
}

/// What fetches pictures that are on the network.
#[cfg(all(feature = "hub", feature = "serve"))]
pub(crate) fn fetcher() -> cellar_server::PictureFetcher {
    use std::time::Duration;

    use cellar_hub::{FetchLimits, fetch_public};

    let limits = FetchLimits {
        n_bytes: cellar::MAX_PICTURE_BYTES as u64,
        time: Duration::from_secs(10),
    };
    cellar_server::PictureFetcher::new(move |url| {
        fetch_public(url, limits).map_err(|error| error.to_string())
    })
}

/// Reads pictures and sounds from files: first these pictures, then these sounds. No model takes
/// both.
///
/// # Errors
/// Where one cannot be read, or the model does not take it.
pub(crate) fn read(
    sight: &Sight,
    pictures: &[PathBuf],
    sounds: &[PathBuf],
) -> anyhow::Result<Vec<PreparedPicture>> {
    files(pictures, sounds)
        .map(|(media, path)| read_one(sight, media, path))
        .collect()
}

/// Files with their kinds: first these pictures, then these sounds.
pub(crate) fn files<'a>(
    pictures: &'a [PathBuf],
    sounds: &'a [PathBuf],
) -> impl Iterator<Item = (MediaKind, &'a Path)> {
    let of = |media| move |path: &'a PathBuf| (media, path.as_path());
    let pictures = pictures.iter().map(of(MediaKind::Picture));
    pictures.chain(sounds.iter().map(of(MediaKind::Sound)))
}

/// Reads a picture or a sound from a file.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_one(
    sight: &Sight,
    media: MediaKind,
    path: &Path,
) -> anyhow::Result<PreparedPicture> {
    let named = || format!("'{}'", path.display());
    let vision = taking(sight, media, named)?;
    prepared(vision, media, &input::bytes(path)?, named)
}

/// Reads a picture or a sound from where a part of a message says it is: a `data:` URL, or a file.
///
/// # Errors
/// As [`read`]; where it is on the network.
pub(crate) fn read_part(sight: &Sight, part: &MediaPart<'_>) -> anyhow::Result<PreparedPicture> {
    let (media, address) = (part.media, &*part.address);
    if address.starts_with("http://") || address.starts_with("https://") {
        anyhow::bail!(
            "'{address}' is on the network, and nothing is fetched from there: give a 'data:' URL, or the name of \
             a file"
        );
    }
    if !address.starts_with("data:") {
        let path = address.strip_prefix("file://").unwrap_or(address);
        return read_one(sight, media, Path::new(path));
    }
    let named = || format!("a {media} in base64");
    let vision = taking(sight, media, named)?;
    let bytes = cellar::data_url_bytes(media, address);
    let bytes = bytes.map_err(|error| anyhow::anyhow!("{}: {error}", named()))?;
    prepared(vision, media, &bytes, named)
}

fn taking(sight: &Sight, media: MediaKind, named: impl Fn() -> String) -> anyhow::Result<&Vision> {
    match sight {
        Ok(vision) => Ok(vision),
        Err(why) => anyhow::bail!("{} is a {media}, and {why}", named()),
    }
}

fn prepared(
    vision: &Vision,
    media: MediaKind,
    bytes: &[u8],
    named: impl Fn() -> String,
) -> anyhow::Result<PreparedPicture> {
    let read = vision.reader().read_media(media, bytes);
    read.map_err(|error| anyhow::anyhow!("{}: {error}", named()))
}
