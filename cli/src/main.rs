//! The program `cellar`.
fn main() {}
