//! The vision tower of a command's model, and the pictures that it reads.
//!
//! Invariant: a tower that cannot be used is an error where a picture or `--mmproj` asks for it,
//! and otherwise a note. Knows no prompt.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cellar::{PictureReader, PreparedPicture, Vision};
use cellar_engine::Tower;
use model_core::model_file::ModelFile;

use crate::args::{ComputeArgs, RunArgs, VisionArgs};
use crate::by_name::locate;
use crate::input;
use crate::models::ModelSource;
use crate::resolve;

/// The tower of a model, or why it sees no pictures.
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
        return Ok(Err(none(source)));
    }
    match cellar::vision_of(file, &path, mmproj) {
        Ok(Some(vision)) => Ok(Ok(vision)),
        Ok(None) => Ok(Err(none(source))),
        Err(error) if mmproj.is_some() => Err(error.into()),
        Err(error) => {
            tracing::debug!(%error, "no vision tower");
            Ok(Err(error.to_string()))
        }
    }
}

/// The tower of a run that shows pictures, or names a tower.
///
/// # Errors
/// As [`sight`].
pub(crate) fn wanted_sight(
    args: &RunArgs,
    file: &ModelFile,
    source: &ModelSource,
) -> anyhow::Result<Option<Sight>> {
    if args.image.is_empty() && args.vision.mmproj.is_none() {
        return Ok(None);
    }
    Ok(Some(sight(file, source, &args.vision)?))
}

/// The same on a backend, where there are pictures to compute.
///
/// # Errors
/// As [`tower`].
pub(crate) fn wanted_tower(args: &RunArgs, sight: Option<&Sight>) -> anyhow::Result<Option<Tower>> {
    match sight {
        Some(Ok(vision)) if !args.image.is_empty() => tower(vision, &args.engine.compute).map(Some),
        _ => Ok(None),
    }
}

fn none(source: &ModelSource) -> String {
    format!(
        "{} has no vision tower: it takes text only (--mmproj FILE gives one)",
        source.name()
    )
}

/// The tower on a backend.
///
/// # Errors
/// Where there is none that can be used.
pub(crate) fn tower(vision: &Vision, compute: &ComputeArgs) -> anyhow::Result<Tower> {
    let options = resolve::backend_flags(compute)?.options();
    Ok(cellar::open_tower(vision, options)?)
}

/// The same for a command that goes on without: texts need no tower.
#[cfg(feature = "serve")]
pub(crate) fn tower_or_warning(sight: &mut Sight, compute: &ComputeArgs) -> Option<Tower> {
    let vision = sight.as_ref().ok()?;
    match tower(vision, compute) {
        Ok(tower) => Some(tower),
        Err(error) => {
            crate::failure::warn(&format!("the vision tower is not loaded: {error}"));
            *sight = Err(error.to_string());
            None
        }
    }
}

/// The reader of pictures, or the reason why there is none.
pub(crate) fn reader(sight: &Sight) -> Result<Arc<PictureReader>, String> {
    match sight {
        Ok(vision) => Ok(Arc::clone(vision.reader())),
        Err(why) => Err(why.clone()),
    }
}

/// Reads pictures from files.
///
/// # Errors
/// Where one cannot be read, or the model sees none.
pub(crate) fn read(sight: &Sight, paths: &[PathBuf]) -> anyhow::Result<Vec<PreparedPicture>> {
    paths.iter().map(|path| read_one(sight, path)).collect()
}

fn read_one(sight: &Sight, path: &Path) -> anyhow::Result<PreparedPicture> {
    let vision = match sight {
        Ok(vision) => vision,
        Err(why) => anyhow::bail!("'{}' is a picture, and {why}", path.display()),
    };
    let bytes = input::bytes(path)?;
    let read = vision.reader().read(&bytes);
    read.map_err(|error| anyhow::anyhow!("'{}': {error}", path.display()))
}
