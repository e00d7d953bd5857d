//! Vision and audio towers: from the bytes of a picture or a sound to rows that stand in place of
//! tokens.
//!
//! In reading order: [`Vision`] (a tower for a model), [`PictureReader`] (decodes a picture or
//! a sound and prepares it as the model's own processor does), [`Tower`] (its graphs, as data over
//! the shared blocks) and [`TowerEncoder`] (runs them on a backend). A family is a row of a table:
//! which tower it has, how pictures or sounds are prepared for it, and what stands for one in a
//! prompt. Knows no decoder.

mod arrange;
mod clip;
mod encoder;
mod family;
mod hf;
mod message_parts;
mod pixels;
mod prepare;
mod read;
mod reader;
mod resample;
mod size;
mod slices;
mod sound;
mod stage;
mod tile_rows;
mod tiles;
mod tower;
mod vision;
mod weights;

pub use encoder::TowerEncoder;
pub use message_parts::{MediaPart, data_url_bytes, take_pictures};
pub use pixels::{MAX_BYTES, MAX_PIXELS};
pub use reader::PictureReader;
pub use tower::Tower;
pub use vision::Vision;
