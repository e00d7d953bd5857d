//! Tests of the backend, as one: a test program takes longer to link than most tests to run. The
//! contract suite is apart, as it takes longer to compile than all of these, and other
//! architectures are checked without it; so is `allocations`, which counts what its process
//! allocates.

mod attention_refused;
mod deltas_agree;
mod experts;
mod gates;
mod hidden_cells;
mod kernels_agree;
mod profile;
mod repacked;
mod same_bits;
mod scans_agree;
mod split_k;
mod support;
