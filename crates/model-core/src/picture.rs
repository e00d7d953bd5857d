//! [`Picture`]: a picture as the tower of a model takes it, and the names of its rows in a prompt.
//!
//! A prompt holds the rows of a picture in place of tokens, under names
//! ([`TokenId::names_row`]). Invariant: a name follows from the values that the tower is given, the
//! tower and the number of the row alone. So whatever compares tokens (cached prefixes, saved
//! states, events) tells pictures apart, and finds the same one again. A sound is one of these,
//! too: its patches are the frames of its spectrogram. Knows no file format and computes nothing.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use kv_backend::{BackendError, CancelFlag};
use kv_core::TokenId;
use kv_core::grid::GridPos;
use kv_graph::weights::SourceChanged;

use crate::error::{ModelError, ModelFileError};
use crate::media::MediaKind;

/// The identity of a picture: 128 bits of a hash of what the tower is given and of the tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PictureName(pub [u8; 16]);

/// Rows and columns of a picture's rows in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureGrid {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

/// A part of a picture that a tower computes by itself: the whole, or a tile of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tile {
    /// Values of each patch, one after the other.
    pub patches: Vec<f32>,
    /// The number of each patch's learned position, or of the place that decides whom it sees.
    pub positions: Vec<u32>,
    /// Row and column of each patch.
    pub places: Vec<GridPos>,
    /// The place of each row that comes out of them in reading order; empty where they are in it.
    pub order: Vec<u32>,
}

impl Tile {
    /// Rows and columns of its patches.
    pub fn sides(&self) -> (usize, usize) {
        let last = |side: fn(&GridPos) -> u32| {
            let most = self.places.iter().map(side).max();
            most.map_or(0, |most| most as usize + 1)
        };
        (last(|place| place.y), last(|place| place.x))
    }
}

/// A row of a picture in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureRow {
    /// The one of this number among those of all tiles, one after the other.
    OfTile(u32),
    /// The learned one behind a line of rows (LLaVA 1.6).
    LineEnd,
}

/// A picture that a tower can compute.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    name: PictureName,
    tiles: Vec<Tile>,
    n_rows: usize,
    layout: Vec<PictureRow>,
    grid: Option<PictureGrid>,
    rows_see_each_other: bool,
}

impl Picture {
    /// A picture of this name, of which a prompt gets `n_rows` rows. `grid` says where they lie
    /// where a decoder's positions depend on it; it has as many places.
    pub fn new(
        name: PictureName,
        tiles: Vec<Tile>,
        n_rows: usize,
        grid: Option<PictureGrid>,
    ) -> Self {
        Self {
            name,
            tiles,
            n_rows,
            layout: Vec::new(),
            grid,
            rows_see_each_other: false,
        }
    }

    /// The same with these rows in a prompt, where they are not those of all tiles.
    #[must_use]
    pub fn with_layout(self, layout: Vec<PictureRow>) -> Self {
        Self {
            n_rows: layout.len(),
            layout,
            ..self
        }
    }

    /// Its rows in a prompt; empty where they are those of all tiles.
    pub fn layout(&self) -> &[PictureRow] {
        &self.layout
    }

    /// The same where each of its rows in a prompt sees the later ones, too.
    #[must_use]
    pub fn with_mutual_rows(self) -> Self {
        Self {
            rows_see_each_other: true,
            ..self
        }
    }

    /// True if each of its rows in a prompt sees the later ones, too.
    pub fn rows_see_each_other(&self) -> bool {
        self.rows_see_each_other
    }

    /// Its identity.
    pub fn name(&self) -> PictureName {
        self.name
    }

    /// Its parts.
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// Number of its rows in a prompt.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Where these lie, where a decoder's positions depend on it.
    pub fn grid(&self) -> Option<PictureGrid> {
        self.grid
    }

    /// The names of some of its rows.
    pub fn row_names(&self, rows: Range<usize>) -> impl Iterator<Item = TokenId> {
        let (low, high) = self.name.0.split_at(8);
        let half = |bytes: &[u8]| bytes.iter().fold(0, |n: u64, &b| (n << 8) | u64::from(b));
        let (low, high) = (half(low), half(high));
        rows.map(move |row| {
            let bits = mixed(mixed(low ^ row as u64) ^ high);
            TokenId(TokenId::FIRST_ROW_NAME | (bits >> 33) as u32)
        })
    }
}

/// A number whose bits all depend on all bits of this one (SplitMix64's).
fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Rows of a picture that follow each other in a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PictureRun {
    /// The number of the first one's place among the tokens of the prompt.
    pub at: usize,
    /// The picture.
    pub picture: Arc<Picture>,
    /// The rows.
    pub rows: Range<usize>,
}

impl PictureRun {
    /// Their places among the tokens of the prompt.
    pub fn places(&self) -> Range<usize> {
        self.at..self.at + self.rows.len()
    }
}

/// A picture, and the text that stands for it in a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedPicture {
    /// The picture.
    pub picture: Arc<Picture>,
    /// The text in place of what a chat template writes for a picture. It has the model's
    /// placeholder once for each of `runs`.
    pub text: String,
    /// The numbers of rows that follow each other, in order; together all of the picture.
    pub runs: Vec<usize>,
}

/// The tokens of a prompt, of which some are names of rows, and the pictures of these.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptTokens {
    /// The tokens.
    pub tokens: Vec<TokenId>,
    /// The rows of pictures among them, in order.
    pub pictures: Vec<PictureRun>,
}

impl PromptTokens {
    /// The tokens of a prompt whose text had the placeholder once for each run of its pictures.
    ///
    /// # Errors
    /// [`PictureError::Places`] where there are more or fewer placeholders.
    pub fn new(
        tokens: &[TokenId],
        placeholder: TokenId,
        pictures: &[PreparedPicture],
    ) -> Result<Self, PictureError> {
        let n_places = tokens.iter().filter(|&&token| token == placeholder).count();
        let n_runs = pictures.iter().map(|picture| picture.runs.len()).sum();
        if n_places != n_runs {
            return Err(PictureError::Places { n_places, n_runs });
        }
        let mut runs = pictures.iter().flat_map(|prepared| {
            let ends = prepared.runs.iter().scan(0, |end, &n| {
                *end += n;
                Some(*end - n..*end)
            });
            ends.map(move |rows| (&prepared.picture, rows))
        });
        let mut prompt = Self::default();
        for &token in tokens {
            if token != placeholder {
                prompt.tokens.push(token);
                continue;
            }
            let Some((picture, rows)) = runs.next() else {
                continue;
            };
            let at = prompt.tokens.len();
            prompt.tokens.extend(picture.row_names(rows.clone()));
            prompt.pictures.push(PictureRun {
                at,
                picture: Arc::clone(picture),
                rows,
            });
        }
        Ok(prompt)
    }
}

/// True if the names of rows among these tokens are those of the pictures, and no others.
pub fn names_are_of(tokens: &[TokenId], pictures: &[PictureRun]) -> bool {
    let n_named = tokens.iter().filter(|token| token.names_row()).count();
    let n_rows: usize = pictures.iter().map(|run| run.rows.len()).sum();
    let mut runs = pictures.iter();
    n_named == n_rows
        && pictures.is_sorted_by_key(|run| run.at)
        && runs.all(|run| {
            let named = tokens.get(run.places()).unwrap_or_default();
            run.picture
                .row_names(run.rows.clone())
                .eq(named.iter().copied())
        })
}

/// Why a picture cannot be read or computed, or a tower not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PictureError {
    /// The bytes are no picture or sound of a known format, or cut short.
    #[error("the {media} cannot be read: {reason}")]
    Unreadable {
        /// A picture or a sound.
        media: MediaKind,
        /// Why, in the decoder's words.
        reason: String,
    },
    /// It is larger than what is read, or longer than the model hears.
    #[error("the {media} has {got} {unit}: at most {limit} are taken")]
    TooLarge {
        /// A picture or a sound.
        media: MediaKind,
        /// Its size.
        got: u64,
        /// The name of what is counted.
        unit: &'static str,
        /// The most that is taken.
        limit: u64,
    },
    /// A shape that the model was not made for.
    #[error("the picture of {width} x {height} pixels is more than {limit} times as long as wide")]
    TooNarrow {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// The largest factor.
        limit: u32,
    },
    /// A sound ends before there is anything to hear.
    #[error("the sound has {got} samples at {rate} Hz: at least {least} are needed")]
    SoundTooShort {
        /// Its samples.
        got: usize,
        /// Samples of a second.
        rate: u32,
        /// The fewest that make a row.
        least: usize,
    },
    /// A picture for a model that hears, or a sound for one that sees.
    #[error("the model takes no {given}s: its tower makes rows of {taken}s")]
    OtherMedia {
        /// The kind that was given.
        given: MediaKind,
        /// The kind that its tower takes.
        taken: MediaKind,
    },
    /// The prompt has no place for each picture.
    #[error(
        "the prompt has {n_places} places for pictures or sounds, and those given need {n_runs}: the chat \
         template does not write one for each, or a text spells the model's mark of one"
    )]
    Places {
        /// Placeholders in the prompt.
        n_places: usize,
        /// Those that the pictures need.
        n_runs: usize,
    },
    /// The file or directory is not usable.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// The file of a tower is another one.
    #[error(
        "'{}' is no tower: its architecture is '{architecture}'; give the model's mmproj file",
        path.display()
    )]
    NoTower {
        /// The file.
        path: PathBuf,
        /// Its architecture; that of towers is `clip`.
        architecture: String,
    },
    /// The tower is not supported, or not whole.
    #[error("the tower in '{}': {reason}", path.display())]
    Tower {
        /// Where it is.
        path: PathBuf,
        /// What is wrong.
        reason: ModelError,
    },
    /// A class whose tower is not known.
    #[error(
        "the vision or audio tower of a {class} is not supported: those of these classes are: {}",
        known.join(", ")
    )]
    Unsupported {
        /// The class.
        class: String,
        /// Those that are.
        known: Vec<String>,
    },
    /// The tower is of another model.
    #[error(
        "the tower in '{}' gives rows of {got} values, and the model takes {wanted}: it is of another \
         model",
        path.display()
    )]
    OtherModel {
        /// Where it is.
        path: PathBuf,
        /// Values of its rows.
        got: usize,
        /// Values of the model's.
        wanted: usize,
    },
    /// The vocabulary has no token for pictures.
    #[error(
        "the tower in '{}' needs the token '{token}', which the model's vocabulary does not have",
        path.display()
    )]
    NoPlaceholder {
        /// Where it is.
        path: PathBuf,
        /// The token.
        token: String,
    },
    /// The tower cannot build its graph.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The file of the tower was changed in place.
    #[error(transparent)]
    Changed(#[from] SourceChanged),
}

/// A picture as far as it is computed ([`PictureEncoder::encode_piece`]). An encoder's own but for
/// the rows; empty before the first piece.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartialPicture {
    /// Its tiles, in order.
    pub tiles: Vec<PartialTile>,
    /// Its rows in a prompt, one after the other, behind the last piece.
    pub rows: Option<Vec<f32>>,
}

/// A tile as far as it is computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartialTile {
    /// Number of an encoder's steps that are done.
    pub n_steps: usize,
    /// Results of the last of them, and those of earlier ones for a later one.
    pub results: Vec<Vec<f32>>,
}

/// A picture that is being computed.
#[derive(Debug)]
pub struct PictureWork<'a> {
    /// The picture.
    pub picture: &'a Picture,
    /// Its rows so far.
    pub partial: &'a mut PartialPicture,
}

/// Computes the rows of pictures: a tower, on something that computes.
pub trait PictureEncoder: Send {
    /// The rows of a picture in a prompt, one after the other, each as wide as a decoder's.
    ///
    /// # Errors
    /// [`PictureError`]; [`BackendError::Cancelled`] where `cancel` is set before.
    fn encode(&mut self, picture: &Picture, cancel: &CancelFlag) -> Result<Vec<f32>, PictureError>;

    /// The numbers of the pictures of which the next piece is, in order: the first, and those that
    /// are computed together with it. The first alone where an encoder has no pieces.
    fn picks(&self, works: &[PictureWork<'_>]) -> Vec<usize> {
        (0..works.len().min(1)).collect()
    }

    /// Computes a piece of those of these pictures that [`PictureEncoder::picks`] names, so that
    /// other work can come between two pieces. With its last one a picture has its rows: the same
    /// as [`PictureEncoder::encode`], whatever was computed together with it. That is all that
    /// there is where an encoder has no pieces.
    ///
    /// # Errors
    /// As [`PictureEncoder::encode`]. What was computed of those pictures is of no use then.
    fn encode_piece(
        &mut self,
        works: &mut [PictureWork<'_>],
        cancel: &CancelFlag,
    ) -> Result<(), PictureError> {
        if let Some(work) = works.first_mut() {
            work.partial.rows = Some(self.encode(work.picture, cancel)?);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn prepared(first: u8, runs: Vec<usize>) -> PreparedPicture {
        let name = PictureName([first; 16]);
        let picture = Picture::new(name, Vec::new(), runs.iter().sum(), None);
        PreparedPicture {
            picture: Arc::new(picture),
            text: "#".repeat(runs.len()),
            runs,
        }
    }

    fn tokens(text: &str) -> Vec<TokenId> {
        text.bytes().map(|byte| TokenId(byte.into())).collect()
    }

    const MARK: TokenId = TokenId(b'#' as u32);

    #[test]
    fn rows_take_the_places_of_marks() {
        let pictures = [prepared(1, vec![2, 3]), prepared(2, vec![4])];
        let prompt = PromptTokens::new(&tokens("a#b##c"), MARK, &pictures).unwrap();
        let letter = |token: &TokenId| {
            if token.names_row() {
                '.'
            } else {
                char::from(token.0 as u8)
            }
        };
        let named: String = prompt.tokens.iter().map(letter).collect();
        assert_eq!(named, "a..b.......c");
        let runs: Vec<_> = prompt
            .pictures
            .iter()
            .map(|run| (run.at, run.rows.clone()))
            .collect();
        assert_eq!(runs, [(1, 0..2), (4, 2..5), (7, 0..4)]);
        assert!(names_are_of(&prompt.tokens, &prompt.pictures));
        assert!(!names_are_of(&prompt.tokens, &prompt.pictures[1..]));
        let mut other = prompt.tokens.clone();
        other[1] = prompt.tokens[2];
        assert!(!names_are_of(&other, &prompt.pictures));
    }

    #[test]
    fn each_picture_needs_its_place() {
        let pictures = [prepared(1, vec![2])];
        for text in ["ab", "a##"] {
            let error = PromptTokens::new(&tokens(text), MARK, &pictures).unwrap_err();
            assert!(
                matches!(error, PictureError::Places { n_runs: 1, .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn rows_of_other_pictures_have_other_names() {
        let names = |first| -> Vec<TokenId> {
            prepared(first, vec![300])
                .picture
                .row_names(0..300)
                .collect()
        };
        let (a, b) = (names(1), names(2));
        assert!(a.iter().chain(&b).all(|name| name.names_row()));
        assert!(a.iter().zip(&b).all(|(a, b)| a != b));
        let mut all: Vec<TokenId> = a.into_iter().chain(b).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 600);
    }
}
