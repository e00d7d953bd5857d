//! [`Tool`]: what an answer may call.
//!
//! Plain data. Knows no model and no API.

use serde_json::Value;

/// A tool that an answer may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments; null where none is given.
    pub parameters: Value,
    /// Whether free calls are held to it.
    pub arguments: Arguments,
    /// Where its parts stand in the request.
    pub paths: ToolPaths,
}

/// Where the parts of a tool stand in a request, for errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolPaths {
    /// For example `tools[0].function.strict`.
    pub strict: String,
    /// For example `tools[0].function.parameters`.
    pub parameters: String,
}

/// What the arguments of a call may be that the model makes of its own accord.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arguments {
    /// Any object.
    #[default]
    Free,
    /// What the tool's schema allows (`strict`).
    Strict,
}

/// How many calls an answer may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallNumber {
    /// One at most.
    One,
    /// As many as the model likes.
    #[default]
    Several,
}
