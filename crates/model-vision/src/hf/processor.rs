//! What directories say of how pictures or sounds are prepared, in the keys of `mmproj` files.
//!
//! Knows no tower.

use std::path::Path;

use model_core::gguf::{Array, Metadata};
use model_core::hf::{HfConfig, ModelFileError};

use super::only;

/// Adds what a directory says of how pictures are prepared, and checks what it says of sounds.
///
/// # Errors
/// [`ModelFileError`] where a file cannot be read.
pub(crate) fn add_processor(
    directory: &Path,
    metadata: &mut Metadata,
) -> Result<(), ModelFileError> {
    if metadata.get::<u32>("clip.audio.num_mel_bins").is_ok() {
        return super::sound::check_processor(directory, metadata);
    }
    let mut found = None;
    for (file, object) in [
        ("processor_config.json", "image_processor"),
        ("preprocessor_config.json", ""),
    ] {
        let path = directory.join(file);
        if path.exists() && found.is_none() {
            let config = HfConfig::open(&path)?;
            if object.is_empty() || config.value(object).is_some() {
                found = Some((config, object));
            }
        }
    }
    let Some((config, object)) = found else {
        return Ok(());
    };
    let at = |key: &str| match object {
        "" => key.to_owned(),
        object => format!("{object}.{key}"),
    };
    for key in ["image_mean", "image_std"] {
        if let Some(values) = config.optional_numbers(&at(key))? {
            let values = values.iter().map(|&value| value as f32).collect();
            metadata.insert(&format!("clip.vision.{key}"), Array::F32(values));
        }
    }
    if let Some(resample) = config.optional_count(&at("resample")).ok().flatten() {
        metadata.insert("clip.vision.resample", resample as u32);
    }
    let whole = |key: &str| -> Option<u32> {
        let value = config.value(&at(key))?.as_u64()?;
        u32::try_from(value).ok()
    };
    for (to, from) in [
        ("image_longest_edge", "size.longest_edge"),
        ("preproc_image_size", "size.longest_edge"),
        ("preproc_min_tiles", "min_patches"),
        ("preproc_max_tiles", "max_patches"),
        ("preproc_min_tiles", "min_tiles"),
        ("preproc_max_tiles", "max_tiles"),
        ("preproc_image_size", "tile_size"),
        ("preproc_max_tiles", "max_slice_nums"),
        ("image_size", "scale_resolution"),
    ] {
        if let Some(value) = whole(from) {
            metadata.insert(&format!("clip.vision.{to}"), value);
        }
    }
    refuse_other_ways(&config, at)?;
    if let Some(tolerance) = config.optional_number(&at("max_pixels_tolerance"))? {
        metadata.insert("clip.vision.preproc_tolerance", tolerance as f32);
    }
    let side: Option<u32> = metadata.optional("clip.vision.image_size").ok().flatten();
    let projector: Option<&str> = metadata
        .optional("clip.vision.projector_type")
        .ok()
        .flatten();
    // Sizes that the processor states besides the tower.
    let count = |key: &str| metadata.optional::<u32>(key).ok().flatten();
    let patch = count("clip.vision.patch_size");
    let merge = count("clip.vision.projector.scale_factor");
    let twice: &[(&str, Option<u32>)] = match projector {
        Some("llama4") => &[("size.height", side), ("size.width", side)],
        Some("minicpmv4_6") => &[("patch_size", patch)],
        Some("gemma4v") => &[("patch_size", patch), ("pooling_kernel_size", merge)],
        _ => &[("max_image_size.longest_edge", side)],
    };
    for (key, of_tower) in twice {
        if let (Some(of_tower), Some(stated)) = (of_tower, whole(key))
            && *of_tower != stated
        {
            return Err(config.wrong(&at(key), format!("{of_tower}, as in the tower")));
        }
    }
    // The processor of GLM counts the pixels of a picture twice, as those of a film.
    let n_pictures = if projector == Some("glm4v") { 2 } else { 1 };
    for (to, names) in [
        (
            "image_min_pixels",
            ["min_pixels", "size.min_pixels", "size.shortest_edge"],
        ),
        (
            "image_max_pixels",
            ["max_pixels", "size.max_pixels", "size.longest_edge"],
        ),
    ] {
        let value = names.iter().find_map(|name| whole(name));
        if let Some(value) = value {
            let value = value / n_pictures;
            metadata.insert(&format!("clip.vision.{to}"), value);
        }
    }
    // The rows of a picture, in pixels.
    let of_row = patch.unwrap_or(0).saturating_mul(merge.unwrap_or(1));
    let of_row = of_row.saturating_pow(2);
    for (to, from) in [
        ("image_min_pixels", "min_image_tokens"),
        ("image_max_pixels", "max_image_tokens"),
        ("image_max_pixels", "max_soft_tokens"),
    ] {
        if let Some(n_rows) = whole(from) {
            let n_pixels = n_rows.saturating_mul(of_row);
            metadata.insert(&format!("clip.vision.{to}"), n_pixels);
        }
    }
    Ok(())
}

/// Refuses what leaves out a part of a picture or of its text, or adds to them.
fn refuse_other_ways(config: &HfConfig, at: impl Fn(&str) -> String) -> Result<(), ModelFileError> {
    for key in [
        "do_image_splitting",
        "use_thumbnail",
        "slice_mode",
        "use_image_id",
    ] {
        if config.optional_flag(&at(key))? == Some(false) {
            return Err(config.wrong(&at(key), "true"));
        }
    }
    if config.optional_flag(&at("resize_to_max_canvas"))? == Some(true) {
        return Err(config.wrong(&at("resize_to_max_canvas"), "false"));
    }
    only(config, &at("downsample_mode"), &["16x"])?;
    Ok(())
}
