//! The small operations in one text for every instruction set with registers: eight values at a time.
//!
//! [`Eight`] is what an instruction set brings. Its bodies are inlined into functions that
//! [`vector_table!`] compiles for the features at hand. Invariant: the last few elements of a slice go
//! through the same instructions as the others, in a padded copy, so an element's bits do not depend on
//! where it stands. Knows no instruction set.

pub(super) mod elementwise;
pub(super) mod functions;
pub(super) mod scan;
mod slices;

use half::f16;

/// Proof that an instruction set is available, and what it does with eight values at a time.
///
/// These functions and everything that calls them, closures too, are inlined into the one that has the
/// features: elsewhere the compiler would make a call of each instruction.
pub(super) trait Eight: Copy {
    /// Eight `f32`.
    type F: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32; 8]) -> Self::F;
    fn load_f16(self, from: &[f16; 8]) -> Self::F;
    fn store(self, to: &mut [f32; 8], x: Self::F);
    /// Rounded to nearest, ties to even.
    fn store_f16(self, to: &mut [f16; 8], x: Self::F);

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
    /// `2^n` for whole numbers in −126..=127, and 0 for −127.
    fn power_of_two(self, n: Self::F) -> Self::F;
    /// Two numbers whose product is `2^n`, for whole numbers in −252..=254.
    fn two_powers(self, n: Self::F) -> [Self::F; 2];
    /// The sum of all lanes: those four apart first, then two, then one.
    fn sum(self, x: Self::F) -> f32;
    /// Rows as columns.
    fn transposed(self, rows: [Self::F; 8]) -> [Self::F; 8];
}

/// `$module::$name` for one instruction set, as a function pointer.
macro_rules! compiled {
    ($features:literal, $eight:expr, $module:ident::$name:ident($($arg:ident: $type:ty),+) -> $result:ty) => {{
        #[target_feature(enable = $features)]
        fn inner($($arg: $type),+) -> $result {
            $crate::kernels::vector::$module::$name($eight, $($arg),+)
        }
        // SAFETY: the table is handed out only where the features are available.
        |$($arg),+| unsafe { inner($($arg),+) }
    }};
}

/// The small operations of a table, then what is its own. `$eight` is an expression of type [`Eight`];
/// the table must only be handed out where `$features` are available.
macro_rules! vector_table {
    ($features:literal, $eight:expr, $($own:ident: $value:expr),+ $(,)?) => {{
        use $crate::kernels::vector::compiled;
        Kernels {
            dot_f32: compiled!($features, $eight, elementwise::dot_f32(a: &[f32], b: &[f32]) -> f32),
            dot_f16: compiled!($features, $eight, elementwise::dot_f16(a: &[f32], b: &[f16]) -> f32),
            axpy_f32: compiled!($features, $eight,
                elementwise::axpy_f32(acc: &mut [f32], w: f32, v: &[f32]) -> ()),
            axpy_f16: compiled!($features, $eight,
                elementwise::axpy_f16(acc: &mut [f32], w: f32, v: &[f16]) -> ()),
            scale: compiled!($features, $eight, elementwise::scale(x: &mut [f32], factor: f32) -> ()),
            add: compiled!($features, $eight, elementwise::add(a: &mut [f32], b: &[f32]) -> ()),
            mul: compiled!($features, $eight, elementwise::mul(a: &mut [f32], b: &[f32]) -> ()),
            max: compiled!($features, $eight, elementwise::max(x: &[f32]) -> f32),
            exp_sum: compiled!($features, $eight, functions::exp_sum(x: &mut [f32], max: f32) -> f32),
            soft_cap: compiled!($features, $eight, functions::soft_cap(x: &mut [f32], cap: f32) -> ()),
            rms_norm: compiled!($features, $eight,
                elementwise::rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) -> ()),
            silu_mul: compiled!($features, $eight,
                functions::silu_mul(gate: &mut [f32], up: &[f32]) -> ()),
            gelu_tanh_mul: compiled!($features, $eight,
                functions::gelu_tanh_mul(gate: &mut [f32], up: &[f32]) -> ()),
            gelu_erf_mul: compiled!($features, $eight,
                functions::gelu_erf_mul(gate: &mut [f32], up: &[f32]) -> ()),
            softplus: compiled!($features, $eight, functions::softplus(x: &mut [f32]) -> ()),
            multiply_add: compiled!($features, $eight,
                elementwise::multiply_add(acc: &mut [f32], a: &[f32], b: &[f32]) -> ()),
            scan_tile: compiled!($features, $eight, scan::scan_tile(tile: ScanTile<'_>) -> ()),
            f32_to_f16: compiled!($features, $eight,
                elementwise::f32_to_f16(from: &[f32], to: &mut [f16]) -> ()),
            f16_to_f32: compiled!($features, $eight,
                elementwise::f16_to_f32(from: &[f16], to: &mut [f32]) -> ()),
            $($own: $value,)+
        }
    }};
}
pub(super) use {compiled, vector_table};
