//! Small vector operations in one text for all instruction sets: eight or sixteen values at a time.
//!
//! [`Vector`] is what an instruction set provides. The bodies are inlined into functions that
//! [`vector_table!`] compiles for the features at hand. Invariant: the last few elements of a slice
//! go through the same instructions as the others, in a padded copy, so an element's bits do not
//! depend on where it stands. Knows no instruction set.

pub(super) mod delta;
pub(super) mod elementwise;
pub(super) mod functions;
mod rounding;
pub(super) mod scan;
mod slices;

use half::f16;

/// Proof that an instruction set is available, and what it does with `N` values at a time.
///
/// These functions and everything that calls them, closures too, are inlined into the one that has
/// the features: elsewhere the compiler would make a call of each instruction.
pub(super) trait Vector<const N: usize>: Copy {
    /// `N` times `f32`.
    type F: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32; N]) -> Self::F;
    fn load_f16(self, from: &[f16; N]) -> Self::F;
    fn store(self, to: &mut [f32; N], x: Self::F);
    /// Rounded to nearest, ties to even.
    fn store_f16(self, to: &mut [f16; N], x: Self::F);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn abs(self, x: Self::F) -> Self::F;
    /// The larger one; `b` where one is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller one; `b` where one is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest whole number, ties to even.
    fn round(self, x: Self::F) -> Self::F;
    /// `x · 2^n` for whole numbers `n` in −252..=254, rounded once where `x` is near 1.
    fn times_power_of_two(self, x: Self::F, n: Self::F) -> Self::F;
}

/// The operations that scans and sums over lanes need in addition: eight lanes whatever the
/// registers are, so that all instruction sets give the same bits.
pub(super) trait Vector8: Transpose<8> {
    /// The sum of all lanes: those four apart first, then two, then one.
    fn sum(self, x: Self::F) -> f32;
    /// `2^n` for whole numbers in −126..=127, and 0 for −127.
    fn power_of_two(self, n: Self::F) -> Self::F;
}

/// Loads of states of `N` channels, whose values are neighbours in memory, as lanes.
pub(super) trait Transpose<const N: usize>: Vector<N> {
    /// Rows as columns.
    fn transpose(self, rows: [Self::F; N]) -> [Self::F; N];
}

/// `$module::$name` for one instruction set, as a function pointer.
macro_rules! compiled {
    ($features:literal, $vector:expr, $module:ident::$name:ident($($arg:ident: $type:ty),+) -> $result:ty) => {{
        #[target_feature(enable = $features)]
        fn inner($($arg: $type),+) -> $result {
            $crate::kernels::vector::$module::$name($vector, $($arg),+)
        }
        // SAFETY: the table is handed out only where the features are available.
        |$($arg),+| unsafe { inner($($arg),+) }
    }};
}

/// The small operations of a table, then what is its own. `$vector` is an expression of type
/// [`Vector`]; the table must only be handed out where `$features` are available.
macro_rules! vector_table {
    ($features:literal, $vector:expr, $($own:ident: $value:expr),+ $(,)?) => {{
        use $crate::kernels::vector::compiled;
        Kernels {
            axpy_f32: compiled!($features, $vector,
                elementwise::axpy_f32(acc: &mut [f32], w: f32, v: &[f32]) -> ()),
            axpy_f16: compiled!($features, $vector,
                elementwise::axpy_f16(acc: &mut [f32], w: f32, v: &[f16]) -> ()),
            scale: compiled!($features, $vector, elementwise::scale(x: &mut [f32], factor: f32) -> ()),
            add: compiled!($features, $vector, elementwise::add(a: &mut [f32], b: &[f32]) -> ()),
            mul: compiled!($features, $vector, elementwise::mul(a: &mut [f32], b: &[f32]) -> ()),
            max: compiled!($features, $vector, elementwise::max(x: &[f32]) -> f32),
            soft_cap: compiled!($features, $vector, functions::soft_cap(x: &mut [f32], cap: f32) -> ()),
            silu_mul: compiled!($features, $vector,
                functions::silu_mul(gate: &mut [f32], up: &[f32]) -> ()),
            gelu_tanh_mul: compiled!($features, $vector,
                functions::gelu_tanh_mul(gate: &mut [f32], up: &[f32]) -> ()),
            gelu_erf_mul: compiled!($features, $vector,
                functions::gelu_erf_mul(gate: &mut [f32], up: &[f32]) -> ()),
            sigmoid_mul: compiled!($features, $vector,
                functions::sigmoid_mul(gate: &mut [f32], up: &[f32]) -> ()),
            softplus: compiled!($features, $vector, functions::softplus(x: &mut [f32]) -> ()),
            multiply_add: compiled!($features, $vector,
                elementwise::multiply_add(acc: &mut [f32], a: &[f32], b: &[f32]) -> ()),
            delta_tile: compiled!($features, $vector,
                delta::delta_tile(tile: $crate::kernels::DeltaTile<'_>) -> ()),
            f32_to_f16: compiled!($features, $vector,
                elementwise::f32_to_f16(from: &[f32], to: &mut [f16]) -> ()),
            f16_to_f32: compiled!($features, $vector,
                elementwise::f16_to_f32(from: &[f16], to: &mut [f32]) -> ()),
            round_bf16: $crate::kernels::isa::scalar::vector::round_bf16,
            pack_bf16: None,
            $($own: $value,)+
        }
    }};
}

/// The same of an instruction set that takes eight values at a time ([`Vector8`]), with sums and
/// scans.
macro_rules! eight_table {
    ($features:literal, $vector:expr, $($own:ident: $value:expr),+ $(,)?) => {
        $crate::kernels::vector::vector_table!($features, $vector,
            dot_f32: compiled!($features, $vector, elementwise::dot_f32(a: &[f32], b: &[f32]) -> f32),
            dot_f16: compiled!($features, $vector, elementwise::dot_f16(a: &[f32], b: &[f16]) -> f32),
            exp_sum: compiled!($features, $vector, functions::exp_sum(x: &mut [f32], max: f32) -> f32),
            rms_norm: compiled!($features, $vector,
                elementwise::rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) -> ()),
            scan_tile: compiled!($features, $vector, scan::scan_tile(tile: ScanTile<'_>) -> ()),
            $($own: $value),+
        )
    };
}
pub(super) use {compiled, eight_table, vector_table};
