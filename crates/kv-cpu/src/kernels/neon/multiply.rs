//! Weight rows against activations, with and without the extensions for products of bytes.

use super::dot::{Four, Fours, Pairs};
use super::matrix::Eights;
use super::{floats, one_row};
use crate::kernels::multiply::multiply_by;

multiply_by!(multiply: Four<Pairs>, "neon", floats::multiply, 1, 2, 3, 4, 5, 6);
multiply_by!(multiply_dot: Four<Fours>, "neon,dotprod", floats::multiply, 1, 2, 3, 4, 5, 6);
multiply_by!(multiply_i8mm: Four<Eights>, "neon,dotprod,i8mm", floats::multiply, 1, 2, 3, 4, 5, 6);
