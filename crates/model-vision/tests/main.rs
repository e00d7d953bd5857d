//! Towers against transformers, and hostile pictures.

mod hostile;
mod towers;
