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
    /// The rule for arguments of free calls.
    pub arguments: Arguments,
    /// The places of its parts in the request.
    pub paths: ToolPaths,
}

/// The places of a tool's parts in a request, for errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolPaths {
    /// For example `tools[0].function.strict`.
    pub strict: String,
    /// For example `tools[0].function.parameters`.
    pub parameters: String,
}

/// The rule for arguments of a call that the model makes of its own accord.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arguments {
    /// Any object.
    #[default]
    Free,
    /// Those that the tool's schema allows (`strict`).
    Strict,
}

/// The number of calls that an answer may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallNumber {
    /// One at most.
    One,
    /// As many as the model likes.
    #[default]
    Several,
}
