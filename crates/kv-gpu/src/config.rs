//! [`GpuConfig`]: how a GPU backend computes.

/// The way products are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Activations as blocks of int8 that meet quantized weights, halves in products of many tokens
    /// and in attention of eight rows or more, or of heads that share keys.
    #[default]
    Fast,
    /// Floats everywhere: slow prompts, for tests and comparisons.
    Precise,
}

/// Settings of a [`GpuBackend`](crate::GpuBackend).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuConfig {
    /// The way products are computed.
    pub precision: Precision,
}
