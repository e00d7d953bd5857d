//! Vision towers: from the bytes of a picture to rows that stand in place of tokens.
//!
//! In reading order: [`Vision`] (a tower beside a model), [`PictureReader`] (decodes a picture and
//! prepares it as the model's own processor does), [`Tower`] (its graphs, as data over the shared
//! blocks) and [`TowerEncoder`] (runs them on a backend). A family is a row of a table: which tower
//! it has, how pictures are prepared for it, and what stands for one in a prompt. Knows no decoder.

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
mod stage;
mod tiles;
mod tower;
mod vision;
mod weights;

pub use encoder::TowerEncoder;
pub use message_parts::{data_url_bytes, picture_address, take_pictures};
pub use pixels::{MAX_BYTES, MAX_PIXELS};
pub use reader::PictureReader;
pub use tower::Tower;
pub use vision::Vision;
