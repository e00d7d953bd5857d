//! The decode loop, sampler and sessions of Cellar
//!
//! In reading order: [`sampler`] (from logits to a token), [`stop`] (when text ends).

pub mod sampler;
pub mod stop;
