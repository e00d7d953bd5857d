//! The activation of feed-forward blocks, by its name.

use kv_graph::Activation;

use super::Hyperparameters;
use crate::error::ModelError;

/// Key of the activation's name.
pub const ACTIVATION: &str = "hidden_activation";

/// The names of activations, as `config.json` has them.
const ACTIVATIONS: &[(&str, Activation)] = &[
    ("gelu", Activation::GeluErf),
    ("gelu_python", Activation::GeluErf),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("relu", Activation::Relu),
    ("relu2", Activation::ReluSquared),
];

/// The activation of this name.
pub fn activation_named(name: &str) -> Option<Activation> {
    let found = ACTIVATIONS.iter().find(|(known, _)| *known == name);
    found.map(|(_, activation)| *activation)
}

/// The names of all activations, for errors.
pub fn activation_names() -> String {
    let names: Vec<_> = ACTIVATIONS.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}

impl Hyperparameters<'_> {
    /// The activation that the file names, or else the usual one.
    ///
    /// # Errors
    /// [`ModelError::Setting`] where it has another name than those that are known.
    pub fn activation(&self, usual: Activation) -> Result<Activation, ModelError> {
        let Some(name) = self.optional::<&str>(ACTIVATION)? else {
            return Ok(usual);
        };
        activation_named(name).ok_or_else(|| {
            let known = activation_names();
            self.wrong(ACTIVATION, format!("'{name}' is not one of: {known}"))
        })
    }
}
