//! [`MediaKind`]: what a tower makes rows of. A prompt holds rows of sounds as it holds those of
//! pictures, and by the same types (`crate::picture`). Knows no file format.

use std::fmt;

/// What a tower makes rows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaKind {
    /// A picture.
    Picture,
    /// A sound.
    Sound,
}

impl MediaKind {
    /// The type of its part in a message, as chat templates know it.
    pub fn part_type(self) -> &'static str {
        match self {
            Self::Picture => "image",
            Self::Sound => "audio",
        }
    }
}

impl fmt::Display for MediaKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Picture => "picture",
            Self::Sound => "sound",
        })
    }
}

/// Why a sound cannot be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SoundError {
    /// The bytes are no sound of a known format, or cut short.
    #[error("the sound cannot be read: {reason}")]
    Unreadable {
        /// Why, in the decoder's words.
        reason: String,
    },
    /// It is larger than what is read, or longer than the model hears.
    #[error("the sound has {got} {unit}: at most {limit} are taken")]
    TooLarge {
        /// Its size.
        got: u64,
        /// What is counted.
        unit: &'static str,
        /// The most that is taken.
        limit: u64,
    },
    /// It ends before there is anything to hear.
    #[error("the sound has {got} samples at {rate} Hz: at least {least} are needed")]
    TooShort {
        /// Its samples.
        got: usize,
        /// Samples of a second.
        rate: u32,
        /// The fewest that make a row.
        least: usize,
    },
}
