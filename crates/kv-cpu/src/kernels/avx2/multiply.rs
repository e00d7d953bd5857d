//! Weight rows against activations, with and without VNNI.

use super::eight::{Eight, Pairs, Vnni};
use super::{floats, one_row};
use crate::kernels::multiply::multiply_by;

multiply_by!(multiply: Eight<Pairs>, "avx2,fma,f16c", floats::multiply, 1, 2, 3, 4);
multiply_by!(multiply_vnni: Eight<Vnni>, "avx2,fma,f16c,avxvnni", floats::multiply, 1, 2, 3, 4);
