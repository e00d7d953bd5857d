//! [`Isa`]: which instruction sets this machine has, and which of them the kernels use.
//!
//! Invariant: an [`Isa`] that [`Isa::is_available`] refuses never reaches a kernel. Knows nothing
//! of the kernels themselves.

use std::fmt;
use std::str::FromStr;

use kv_backend::BackendError;

/// Name of the environment variable that forces an instruction set.
pub const ISA_VARIABLE: &str = "CELLAR_ISA";

/// An instruction set that there are kernels for, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust: the specification of all others, and what remains on other machines.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-VNNI (dot products of bytes in 256 bits), in addition to what [`Isa::Avx2`]
    /// needs.
    AvxVnni,
    /// x86-64 with AVX-512 (F, BW, DQ, VL) and VNNI, in addition to what [`Isa::Avx2`] needs.
    Avx512Vnni,
    /// x86-64 with dot products of BF16 (AVX-512 BF16), in addition to what [`Isa::Avx512Vnni`]
    /// needs.
    Avx512Bf16,
    /// AArch64: NEON.
    Neon,
    /// AArch64 with the dot-product extension, in addition to what [`Isa::Neon`] needs.
    NeonDot,
    /// AArch64 with products of int8 matrices, in addition to what [`Isa::NeonDot`] needs.
    NeonI8mm,
}

struct Names<'a>(&'a [Isa]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, isa) in self.0.iter().enumerate() {
            write!(f, "{}{isa}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl Isa {
    /// All instruction sets that there are kernels for, slowest first.
    pub const ALL: [Self; 8] = [
        Self::Scalar,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512Vnni,
        Self::Avx512Bf16,
        Self::Neon,
        Self::NeonDot,
        Self::NeonI8mm,
    ];

    /// The fastest one that this machine has.
    pub fn detect() -> Self {
        Self::ALL
            .into_iter()
            .rev()
            .find(|isa| isa.is_available())
            .unwrap_or(Self::Scalar)
    }

    /// Every one that this machine has, slowest first: for tests.
    pub fn all_available() -> Vec<Self> {
        Self::ALL
            .into_iter()
            .filter(|isa| isa.is_available())
            .collect()
    }

    /// The one named by the environment variable [`ISA_VARIABLE`]; the fastest where that is unset
    /// or empty.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] where the variable names something unknown or that this
    /// machine does not have.
    pub fn from_environment() -> Result<Self, BackendError> {
        match std::env::var_os(ISA_VARIABLE).filter(|name| !name.is_empty()) {
            Some(name) => Self::by_name(&name.to_string_lossy()),
            None => Ok(Self::detect()),
        }
    }

    /// The one with this name, if this machine has it.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] where the name is unknown or this machine does not have it.
    pub fn by_name(name: &str) -> Result<Self, BackendError> {
        let isa: Self = name.parse()?;
        isa.check()?;
        Ok(isa)
    }

    /// Checks that this machine has it.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] where it does not, with what there is instead.
    pub(crate) fn check(self) -> Result<(), BackendError> {
        if self.is_available() {
            Ok(())
        } else {
            Err(unavailable(&format!("this machine has no {self}; it has")))
        }
    }

    /// True if this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            Self::Avx2 => has_avx2(),
            Self::AvxVnni => has_avx2() && has_avx_vnni(),
            Self::Avx512Vnni => has_avx2() && has_avx512_vnni(),
            Self::Avx512Bf16 => Self::Avx512Vnni.is_available() && has_bf16(),
            Self::Neon => has_neon(),
            Self::NeonDot => has_neon() && has_dotprod(),
            Self::NeonI8mm => has_neon() && has_dotprod() && has_i8mm(),
        }
    }

    /// True if it is one of those with AVX-512.
    pub const fn is_avx512(self) -> bool {
        matches!(self, Self::Avx512Vnni | Self::Avx512Bf16)
    }

    /// Its name, as in [`ISA_VARIABLE`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Neon => "neon",
            Self::NeonDot => "neondot",
            Self::NeonI8mm => "neoni8mm",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx_vnni() -> bool {
    is_x86_feature_detected!("avxvnni")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512_vnni() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(target_arch = "x86_64")]
fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx_vnni() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512_vnni() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_bf16() -> bool {
    false
}

/// The kernels read numbers as they lie in memory: lowest byte first.
#[cfg(target_arch = "aarch64")]
fn has_neon() -> bool {
    cfg!(target_endian = "little") && std::arch::is_aarch64_feature_detected!("neon")
}

#[cfg(target_arch = "aarch64")]
fn has_dotprod() -> bool {
    std::arch::is_aarch64_feature_detected!("dotprod")
}

#[cfg(target_arch = "aarch64")]
fn has_i8mm() -> bool {
    std::arch::is_aarch64_feature_detected!("i8mm")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_neon() -> bool {
    false
}

#[cfg(not(target_arch = "aarch64"))]
fn has_dotprod() -> bool {
    false
}

#[cfg(not(target_arch = "aarch64"))]
fn has_i8mm() -> bool {
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = BackendError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL
            .into_iter()
            .find(|isa| isa.name().eq_ignore_ascii_case(name));
        let unknown = || format!("unknown instruction set '{name}'; this machine has");
        known.ok_or_else(|| unavailable(&unknown()))
    }
}

/// An instruction set that cannot be used, with those that can.
fn unavailable(what: &str) -> BackendError {
    BackendError::Unavailable {
        backend: "cpu",
        reason: format!("{what}: {}", Names(&Isa::all_available())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_detected_is_available_and_scalar_always_is() {
        assert!(Isa::detect().is_available());
        assert_eq!(Isa::all_available().first(), Some(&Isa::Scalar));
        assert_eq!(Isa::all_available().last(), Some(&Isa::detect()));
    }

    #[test]
    fn names_read_back() {
        for isa in Isa::all_available() {
            assert_eq!(Isa::by_name(&isa.to_string().to_uppercase()).unwrap(), isa);
        }
    }

    #[test]
    fn an_unknown_name_says_what_there_is() {
        let error = Isa::by_name("mmx").unwrap_err().to_string();
        assert!(
            error.contains("'mmx'") && error.contains("scalar"),
            "{error}"
        );
    }
}
