//! One folder for each family of instruction sets, with the same file names for the same jobs; see
//! [`crate::kernels`].

/// Functions of a trait that are a few instructions each:
/// `name(arguments) -> result = expression;`.
///
/// After `unsafe;` the caller promises the instruction set, and the memory that pointers lead to.
/// After `proof;` they are methods of a value that is only there where the instruction set is;
/// references are as long as a register. They are inlined where the caller has the features.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! intrinsics {
    (unsafe; $($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $body:expr;)+) => {
        $(#[inline(always)]
        unsafe fn $name($($arg: $type),*) -> $result {
            // SAFETY: the caller promises features and memory; no load or store needs alignment.
            unsafe { $body }
        })+
    };
    (proof; $($name:ident($self:ident $(, $arg:ident: $type:ty)*) -> $result:ty = $body:expr;)+) => {
        $(#[inline(always)]
        fn $name($self $(, $arg: $type)*) -> $result {
            // SAFETY: `self` is the proof of the features; loads and stores stay inside of their
            // arrays, and need no alignment.
            unsafe { $body }
        })+
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod scalar;
