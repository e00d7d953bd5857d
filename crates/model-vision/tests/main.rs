//! Towers against transformers, and hostile pictures and sounds.

mod company;
mod hostile;
mod sounds;
mod towers;
