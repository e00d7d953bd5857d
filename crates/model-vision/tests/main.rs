//! Towers against transformers, and hostile pictures and sounds.

mod hostile;
mod sounds;
mod towers;
