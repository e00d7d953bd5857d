//! The CPU backend of Cellar: own kernels, a thread team, one arena

pub mod activations;
pub mod isa;
pub mod kernels;
pub mod matrix;
pub mod output;
