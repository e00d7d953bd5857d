//! The operations by family: for each its description and the builder method that adds it.
//!
//! A function of the operation's name returns its [`OpSpec`](super::OpSpec); the method of the same
//! name on [`GraphBuilder`](super::GraphBuilder) adds a node. Knows no device.

pub(super) mod attend;
pub(super) mod custom;
pub(super) mod delta_rule;
pub(super) mod dense;
pub(super) mod elementwise;
pub(super) mod experts;
pub(super) mod gaussian_top_k;
pub(super) mod heads;
pub(super) mod input;
pub(super) mod mix;
pub(super) mod norm;
pub(super) mod partial;
pub(super) mod plain_attention;
pub(super) mod recurrent;
pub(super) mod rope;
pub(super) mod route;
pub(super) mod sparse;
pub(super) mod top_k;

#[cfg(test)]
mod tests;
