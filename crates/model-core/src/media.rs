//! [`MediaKind`]: what a tower makes rows of. A prompt holds rows of sounds as it holds those of
//! pictures, and by the same types (`crate::picture`). Knows no file format.

use std::fmt;

/// The kind of media that a tower makes rows of.
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

    /// The kind of the part of this type in a message, as chat templates know it.
    pub fn of_part_type(name: &str) -> Option<Self> {
        let kinds = [Self::Picture, Self::Sound];
        kinds.into_iter().find(|kind| kind.part_type() == name)
    }

    /// The type of its part in a message that gives an address, and the name of the address.
    pub fn url_type(self) -> &'static str {
        match self {
            Self::Picture => "image_url",
            Self::Sound => "audio_url",
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
