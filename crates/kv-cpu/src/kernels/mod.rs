//! [`Kernels`]: the table of kernels for one instruction set, chosen once for the machine at hand.
//!
//! A table has small vector operations, the quantization of activations, products of weight rows
//! with activations (GEMV, skinny GEMM, GEMM), and how weights are packed for these.
//! `isa/scalar` is the specification: plain code to be checked by eye. Every other folder of `isa`
//! has the same files for the same jobs, tested against it: `vector`, `quantize`, `unpack` (block
//! formats to int8), `dot` (dot products of int8), `gemv`, `float` (unquantized weights), `matmul`
//! (which kernel multiplies what). Loops that are the same for all instruction sets are in `gemm`,
//! `gemm_float`, `gemv_stored`, `matmul_stored` and `vector`, generic over traits that the folders
//! implement.
//!
//! Within one table every function gives the same bits for the same arguments, and elementwise
//! functions give an element the same bits wherever it stands in a slice of whatever length.
//! Knows nothing of tokens' meaning, heads, layers or threads.

mod delta;
pub(crate) mod exp;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod gemm;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod gemm_float;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod gemv_stored;
pub(crate) mod isa;
pub mod limits;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod matmul_stored;
pub(crate) mod prefetch;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod quant_format;
mod scan;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod vector;

use std::ops::Range;

use half::{bf16, f16};
use kv_backend::BackendError;
use kv_block::BlockFormat;

use crate::isa::Isa;
use crate::operands::{Activations, Int8RowMut};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::operands::{Int8Row, Int8Rows};
use crate::output::OutputColumns;

// Block formats unpacked in the registers of this machine.
pub use delta::{DELTA_WIDTH, DeltaDecay, DeltaScratch, DeltaTile, F32x32, MAX_DELTA_KEYS};
#[cfg(target_arch = "x86_64")]
use isa::avx2::unpack;
#[cfg(target_arch = "aarch64")]
use isa::neon::unpack;
pub use scan::{Decay, F32x16, SCAN_WIDTH, ScanTile};

/// The layout of rows of weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightLayout {
    /// One after the other, as in their file.
    Stored,
    /// Groups of [`PackFns::group_rows`] rows, interleaved.
    Packed,
}

/// Some neighbouring rows of a weight matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightRows<'a> {
    pub(crate) format: BlockFormat,
    pub(crate) layout: WeightLayout,
    /// Whole rows of `row_bytes` each, or whole groups of packed rows.
    pub(crate) bytes: &'a [u8],
    pub(crate) row_bytes: usize,
    /// The row of the matrix, hence the column of the output, that is the first.
    pub(crate) first: usize,
    pub(crate) n_columns: usize,
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl WeightRows<'_> {
    /// The operands of GEMV: the activations of one token, and where its products with these rows
    /// go. `None` where there is no such token or place.
    fn gemv_operands<'a, 'o>(
        &self,
        acts: &Int8Rows<'a>,
        token: usize,
        out: &'o mut OutputColumns<'_>,
    ) -> Option<(Int8Row<'a>, &'o mut [f32])> {
        let n_rows = self.bytes.len() / self.row_bytes.max(1);
        let out = out.values(token, self.first..self.first + n_rows)?;
        Some((acts.row(token)?, out))
    }
}

/// The packing of weight rows for an instruction set: groups of rows, interleaved.
pub(crate) struct PackFns {
    /// Rows of a group. Rows after the last whole group of a matrix stay stored.
    pub(crate) group_rows: usize,
    /// Bytes of a packed row of so many columns, on average; 0 for formats that are not packed.
    pub(crate) row_bytes: fn(BlockFormat, usize) -> usize,
    /// Packs stored rows, as many as there is room for. Returns whether that keeps every bit, which
    /// for floats depends on their values.
    pub(crate) pack: fn(&WeightRows<'_>, &mut [u8]) -> bool,
    /// Columns of a block that [`PackFns::stored_block`] returns.
    pub(crate) block_len: fn(BlockFormat) -> usize,
    /// One block of a group of packed rows as it was stored: the row in the group, then the block.
    pub(crate) stored_block: fn(&WeightRows<'_>, usize, usize, &mut [u8]),
}

/// One function per small operation. Where slices should have equal lengths and do not (a failed
/// assertion in debug builds), only what all of them have is computed.
pub struct Kernels {
    /// The instruction set of the functions below.
    pub isa: Isa,
    /// `Σ a[i] · b[i]`.
    pub dot_f32: fn(&[f32], &[f32]) -> f32,
    /// `Σ a[i] · b[i]` against a row stored in half precision.
    pub dot_f16: fn(&[f32], &[f16]) -> f32,
    /// `acc[i] += w · v[i]`: `(acc, w, v)`.
    pub axpy_f32: fn(&mut [f32], f32, &[f32]),
    /// `acc[i] += w · v[i]` with a row stored in half precision: `(acc, w, v)`.
    pub axpy_f16: fn(&mut [f32], f32, &[f16]),
    /// `x[i] *= factor`: `(x, factor)`.
    pub scale: fn(&mut [f32], f32),
    /// `a[i] += b[i]`: `(a, b)`.
    pub add: fn(&mut [f32], &[f32]),
    /// `a[i] *= b[i]`: `(a, b)`.
    pub mul: fn(&mut [f32], &[f32]),
    /// The largest value, `-∞` for none.
    pub max: fn(&[f32]) -> f32,
    /// `x[i] = e^(x[i] − max)`, and their sum: `(x, max) -> sum`. One step of an online softmax
    /// (Milakov and Gimelshein, arXiv 1805.02867). `max` must be finite.
    pub exp_sum: fn(&mut [f32], f32) -> f32,
    /// `x[i] = cap · tanh(x[i] / cap)`: `(x, cap)`. Absolute error below `cap · 3e-7`.
    pub soft_cap: fn(&mut [f32], f32),
    /// `out[i] = x[i] / sqrt(mean(x²) + eps) · w[i]` (Zhang and Sennrich, arXiv 1910.07467):
    /// `(x, w, eps, out)`.
    pub rms_norm: fn(&[f32], &[f32], f32, &mut [f32]),
    /// `gate[i] = silu(gate[i]) · up[i]`, `silu(x) = x / (1 + e^−x)`: `(gate, up)`.
    pub silu_mul: fn(&mut [f32], &[f32]),
    /// `gate[i] = gelu(gate[i]) · up[i]` with the tanh form of GELU (Hendrycks and Gimpel,
    /// arXiv 1606.08415): `(gate, up)`.
    pub gelu_tanh_mul: fn(&mut [f32], &[f32]),
    /// `gate[i] = gelu(gate[i]) · up[i]` with GELU itself, `x/2 · erfc(−x / sqrt(2))` (same paper),
    /// relative error below 2e-6 above −5 and 1e-5 below: `(gate, up)`.
    pub gelu_erf_mul: fn(&mut [f32], &[f32]),
    /// `gate[i] = up[i] / (1 + e^−gate[i])`: `(gate, up)`.
    pub sigmoid_mul: fn(&mut [f32], &[f32]),
    /// `x[i] = ln(1 + e^x[i])`.
    pub softplus: fn(&mut [f32]),
    /// `acc[i] += a[i] · b[i]`: `(acc, a, b)`.
    pub multiply_add: fn(&mut [f32], &[f32], &[f32]),
    /// Some rows through the states of some channels; see [`ScanTile`].
    pub scan_tile: fn(ScanTile<'_>),
    /// Some tokens through the states of some channels of a head; see [`DeltaTile`].
    pub delta_tile: fn(DeltaTile<'_>),
    /// Rounds to half precision, ties to even: `(from, to)`.
    pub f32_to_f16: fn(&[f32], &mut [f16]),
    /// Widens from half precision, exact: `(from, to)`.
    pub f16_to_f32: fn(&[f16], &mut [f32]),
    /// Rounds to BF16, as [`crate::operands::bf16`] says: `(from, to)`.
    pub(crate) round_bf16: fn(&[f32], &mut [bf16]),
    /// Quantizes one row of activations to int8; see [`crate::operands::int8`] for the rule.
    pub(crate) quantize: fn(&[f32], Int8RowMut<'_>),
    /// Products of weight rows with the activations of some tokens: GEMV for one token, GEMM for
    /// more. An output has the same bits whichever other rows and tokens are multiplied with it.
    pub(crate) multiply: fn(WeightRows<'_>, Activations<'_>, Range<usize>, &mut OutputColumns<'_>),
    /// The way weights are packed, if they are.
    pub(crate) pack: Option<&'static PackFns>,
    /// The same for BF16 weights that are multiplied with BF16 activations.
    pub(crate) pack_bf16: Option<&'static PackFns>,
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernels({})", self.isa)
    }
}

impl Kernels {
    /// The table for the fastest instruction set, or for the one that the environment names.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] where the environment names one that this machine does not
    /// have.
    pub fn from_environment() -> Result<&'static Self, BackendError> {
        Self::for_isa(Isa::from_environment()?)
    }

    /// The table for one instruction set.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] where this machine does not have it.
    pub fn for_isa(isa: Isa) -> Result<&'static Self, BackendError> {
        isa.check()?;
        Ok(match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &AVX_VNNI,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => &AVX512_BF16,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &NEON,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => &NEON_DOT,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => &NEON_I8MM,
            _ => &isa::scalar::TABLE,
        })
    }
}

#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = isa::avx2::TABLE;
#[cfg(target_arch = "x86_64")]
static AVX_VNNI: Kernels = isa::avx2::VNNI_TABLE;
#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = isa::avx512::TABLE;
#[cfg(target_arch = "x86_64")]
static AVX512_BF16: Kernels = isa::avx512::BF16_TABLE;
#[cfg(target_arch = "aarch64")]
static NEON: Kernels = isa::neon::TABLE;
#[cfg(target_arch = "aarch64")]
static NEON_DOT: Kernels = isa::neon::DOT_TABLE;
#[cfg(target_arch = "aarch64")]
static NEON_I8MM: Kernels = isa::neon::I8MM_TABLE;
