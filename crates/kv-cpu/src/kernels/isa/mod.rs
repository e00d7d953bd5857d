//! One folder for each family of instruction sets, with the same file names for the same jobs; see
//! [`crate::kernels`].

#[cfg(target_arch = "x86_64")]
pub(in crate::kernels) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(in crate::kernels) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(in crate::kernels) mod scalar;
