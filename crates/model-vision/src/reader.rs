//! [`PictureReader`]: from the bytes of a picture or a sound to what a prompt has of it.
//!
//! Invariant: the same pixels or samples for the same tower have the same name, others another one.
//! Runs on any thread. Knows no backend.

use std::sync::Arc;

use kv_core::TokenId;
use model_core::media::MediaKind;
use model_core::picture::{
    Picture, PictureError, PictureName, PictureRow, PreparedPicture, PromptTokens, Tile,
};
use sha2::{Digest, Sha256};

use crate::arrange::Arrangement;
use crate::family::{Family, PictureText, SliceNames, TileNames, TileText};
use crate::pixels::Pixels;
use crate::prepare::{self, Preparation};
use crate::sound::{Sound, SoundPreparation};
use crate::tiles::TileGrid;

/// The way from what a tower sees or hears to what it takes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MediaPreparation {
    /// It sees.
    Picture(Preparation),
    /// It hears.
    Sound(SoundPreparation),
}

/// Reads pictures or sounds for one tower.
#[derive(Clone, Debug)]
pub struct PictureReader {
    pub(crate) family: &'static Family,
    pub(crate) preparation: MediaPreparation,
    pub(crate) arrangement: Arrangement,
    /// True if rows of a picture all see each other in the decoder.
    pub(crate) sees_itself: bool,
    /// The tower's settings and some of its weights, hashed.
    pub(crate) fingerprint: [u8; 32],
    /// The token in whose places rows of pictures stand, and its text.
    pub(crate) placeholder: (TokenId, String),
}

impl PictureReader {
    /// The kind of media that its tower makes rows of.
    pub fn media(&self) -> MediaKind {
        self.family.tower.media()
    }

    /// Decodes and prepares what its tower takes: as [`PictureReader::read`], or as
    /// [`PictureReader::read_sound`].
    ///
    /// # Errors
    /// [`PictureError`]: it cannot be read, is too large, or none that the model takes.
    pub fn read_media(
        &self,
        media: MediaKind,
        bytes: &[u8],
    ) -> Result<PreparedPicture, PictureError> {
        match media {
            MediaKind::Picture => self.read(bytes),
            MediaKind::Sound => self.read_sound(bytes),
        }
    }

    /// Decodes and prepares a picture: PNG, JPEG, WebP, BMP, or the first frame of a GIF.
    ///
    /// # Errors
    /// [`PictureError`]: it cannot be read, is too large, or of a shape that the model does not
    /// take; [`PictureError::OtherMedia`] where its tower hears.
    pub fn read(&self, bytes: &[u8]) -> Result<PreparedPicture, PictureError> {
        let preparation = self.of_pictures()?;
        let prepared = preparation.prepare(&Pixels::decode(bytes)?)?;
        Ok(self.placed(prepared))
    }

    /// Prepares a picture of `values` in rows from top to bottom, `[height, width, 3]`: red, green
    /// and blue of each pixel.
    ///
    /// # Errors
    /// [`PictureError`]: `values` are more or fewer, or it is of a size that is not taken;
    /// [`PictureError::OtherMedia`] where its tower hears.
    pub fn read_rgb(
        &self,
        size: [u32; 2],
        values: Vec<u8>,
    ) -> Result<PreparedPicture, PictureError> {
        let [height, width] = size;
        let preparation = self.of_pictures()?;
        let prepared = preparation.prepare(&Pixels::new(width, height, values)?)?;
        Ok(self.placed(prepared))
    }

    /// Decodes and prepares a sound: WAV, MP3 or FLAC.
    ///
    /// # Errors
    /// [`PictureError`]: it cannot be read, is too large, too long or too short;
    /// [`PictureError::OtherMedia`] where its tower sees.
    pub fn read_sound(&self, bytes: &[u8]) -> Result<PreparedPicture, PictureError> {
        let preparation = self.of_sounds()?;
        self.heard(&Sound::decode(bytes, preparation.most_seconds())?)
    }

    /// Prepares a sound of one channel, of `rate` samples of a second, from -1 to 1.
    ///
    /// # Errors
    /// As [`PictureReader::read_sound`].
    pub fn read_samples(
        &self,
        rate: u32,
        samples: &[f32],
    ) -> Result<PreparedPicture, PictureError> {
        let preparation = self.of_sounds()?;
        self.heard(&Sound::new(rate, samples, preparation.most_seconds())?)
    }

    fn of_pictures(&self) -> Result<&Preparation, PictureError> {
        match &self.preparation {
            MediaPreparation::Picture(preparation) => Ok(preparation),
            MediaPreparation::Sound(_) => Err(self.takes_no(MediaKind::Picture)),
        }
    }

    fn of_sounds(&self) -> Result<&SoundPreparation, PictureError> {
        match &self.preparation {
            MediaPreparation::Sound(preparation) => Ok(preparation),
            MediaPreparation::Picture(_) => Err(self.takes_no(MediaKind::Sound)),
        }
    }

    fn takes_no(&self, given: MediaKind) -> PictureError {
        let taken = self.media();
        PictureError::OtherMedia { given, taken }
    }

    fn heard(&self, sound: &Sound) -> Result<PreparedPicture, PictureError> {
        let tile = self.of_sounds()?.prepare(sound)?;
        Ok(self.placed(prepare::PreparedPicture::of(tile)))
    }

    /// The prepared picture as a prompt has it.
    fn placed(&self, prepared: prepare::PreparedPicture) -> PreparedPicture {
        let rows_of = |tile: &Tile| self.arrangement.n_rows(tile);
        let n_rows = match prepared.layout.len() {
            0 => prepared.tiles.iter().map(rows_of).sum(),
            n => n,
        };
        let name = self.name_of(&prepared);
        let (text, runs, grid) = match (self.family.text, prepared.grid) {
            (PictureText::RowEnds([row_end, end]), Some(grid)) => {
                let rows = vec![self.placeholder.1.as_str(); grid.height];
                let text = rows.join(row_end) + end;
                // Positions follow these tokens.
                (text, vec![grid.width; grid.height], None)
            }
            (PictureText::Tiles(names), grid) => {
                let runs = prepared.tiles.iter().map(rows_of).collect();
                (self.named_tiles(names, prepared.tile_grid), runs, grid)
            }
            (PictureText::Slices(names), grid) => {
                let runs = prepared.tiles.iter().map(rows_of).collect();
                (self.named_slices(names, prepared.tile_grid), runs, grid)
            }
            (PictureText::Around([before, after]), grid) => {
                let text = format!("{before}{}{after}", self.placeholder.1);
                (text, vec![n_rows], grid)
            }
            (PictureText::RowEnds([_, end]), None) => {
                (format!("{}{end}", self.placeholder.1), vec![n_rows], None)
            }
        };
        let mut picture = Picture::new(name, prepared.tiles, n_rows, grid);
        if !prepared.layout.is_empty() {
            picture = picture.with_layout(prepared.layout);
        }
        if self.sees_itself {
            picture = picture.with_mutual_rows();
        }
        PreparedPicture {
            text,
            runs,
            picture: Arc::new(picture),
        }
    }

    /// The text of tiles of so many rows and columns, and of the whole behind them.
    fn named_tiles(&self, names: TileNames, grid: TileGrid) -> String {
        let placeholder = &self.placeholder.1;
        let mut text = names.start.to_owned();
        for row in 1..=grid.rows {
            for column in 1..=grid.columns {
                match names.tile {
                    TileText::Numbers([before, between, behind]) => {
                        text += &format!("{before}{row}{between}{column}{behind}");
                    }
                    TileText::Between(between) if column > 1 => text += between,
                    TileText::Between(_) => {}
                }
                text += placeholder;
            }
            text += names.row_end;
        }
        text += if grid.rows > 0 {
            names.whole
        } else {
            names.alone
        };
        text + placeholder + names.end
    }

    /// The text of the whole, and of slices of so many rows and columns behind it.
    fn named_slices(&self, names: SliceNames, grid: TileGrid) -> String {
        let part = |[before, behind]: [&str; 2]| format!("{before}{}{behind}", self.placeholder.1);
        let row = part(names.slice).repeat(grid.columns as usize);
        let rows = vec![row; grid.rows as usize];
        part(names.whole) + &rows.join(names.row_end)
    }

    fn name_of(&self, prepared: &prepare::PreparedPicture) -> PictureName {
        let mut hash = Sha256::new();
        hash.update(self.fingerprint);
        for row in &prepared.layout {
            let number = match *row {
                PictureRow::OfTile(number) => number,
                PictureRow::LineEnd => u32::MAX,
            };
            hash.update(number.to_le_bytes());
        }
        for tile in &prepared.tiles {
            hash.update((tile.places.len() as u64).to_le_bytes());
            for place in &tile.places {
                hash.update(place.y.to_le_bytes());
                hash.update(place.x.to_le_bytes());
            }
            tile.patches
                .iter()
                .for_each(|value| hash.update(value.to_le_bytes()));
        }
        let hash: [u8; 32] = hash.finalize().into();
        let (first, _) = hash.as_chunks::<16>();
        PictureName(first.first().copied().unwrap_or_default())
    }

    /// The text that chat templates write for a picture.
    pub fn mark(&self) -> &str {
        self.family.mark
    }

    /// A rendered prompt in which the model's text for each picture stands in place of the mark.
    /// Texts without pictures stay.
    ///
    /// # Errors
    /// [`PictureError::Places`] where there are more or fewer marks than pictures.
    pub fn expand(&self, text: &str, pictures: &[PreparedPicture]) -> Result<String, PictureError> {
        if pictures.is_empty() {
            return Ok(text.to_owned());
        }
        self.expand_marks(text, self.family.mark, pictures)
    }

    /// A text in which the model's text for each picture stands in place of a mark of the caller's.
    ///
    /// # Errors
    /// As [`PictureReader::expand`].
    pub fn expand_marks(
        &self,
        text: &str,
        mark: &str,
        pictures: &[PreparedPicture],
    ) -> Result<String, PictureError> {
        let mut parts = text.split(mark);
        let mut out = parts.next().unwrap_or_default().to_owned();
        let n_places = parts.clone().count();
        if n_places != pictures.len() {
            let n_runs = pictures.len();
            return Err(PictureError::Places { n_places, n_runs });
        }
        for (number, (picture, part)) in pictures.iter().zip(parts).enumerate() {
            if let PictureText::Slices(names) = self.family.text {
                let [before, behind] = names.number;
                out.push_str(&format!("{before}{number}{behind}"));
            }
            out.push_str(&picture.text);
            out.push_str(part);
        }
        Ok(out)
    }

    /// The tokens of such a text, with the names of rows in the places of pictures.
    ///
    /// # Errors
    /// [`PictureError::Places`].
    pub fn place(
        &self,
        tokens: Vec<TokenId>,
        pictures: &[PreparedPicture],
    ) -> Result<PromptTokens, PictureError> {
        if pictures.is_empty() {
            let pictures = Vec::new();
            return Ok(PromptTokens { tokens, pictures });
        }
        PromptTokens::new(&tokens, self.placeholder.0, pictures)
    }
}
