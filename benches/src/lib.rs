//! Criterion benches of Cellar
