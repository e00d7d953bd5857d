//! Inputs: what the caller hands to every run.

use kv_core::window::Window;

use crate::op::{Input, Op};
use crate::spec::{DType, OpResult, OpScope, OpSpec};
use crate::{GraphBuilder, GraphError, NodeId};

impl Input {
    /// Name of the input's node: there is at most one for each input.
    pub(crate) fn node_name(self) -> String {
        match self {
            Self::Tokens => "inp_tokens".to_owned(),
            Self::Embeddings { .. } => "inp_embd".to_owned(),
            Self::Positions => "inp_pos".to_owned(),
            Self::TokenTypes => "inp_types".to_owned(),
            Self::Coordinates => "inp_coordinates".to_owned(),
            Self::OutputRows => "inp_out_rows".to_owned(),
            Self::Cells { part } => format!("inp_cells.{part}"),
            Self::Visibility {
                part,
                window: Window::First { .. },
            } => format!("inp_visibility.{part}.first"),
            Self::Visibility { part, .. } => format!("inp_visibility.{part}"),
            Self::BatchVisibility { window } => format!("inp_visibility.batch.{window}"),
            Self::States => "inp_states".to_owned(),
        }
    }
}

/// The description of an input.
pub(crate) fn input<'a>(input: Input) -> OpSpec<'a> {
    let ids = |shape: Vec<usize>| OpResult {
        dtype: DType::U32,
        ..OpResult::f32(shape)
    };
    let name = match input {
        Input::Tokens => "tokens",
        Input::Embeddings { .. } => "embeddings",
        Input::Positions => "positions",
        Input::TokenTypes => "token_types",
        Input::Coordinates => "coordinates",
        Input::OutputRows => "output_rows",
        Input::Cells { .. } => "cells",
        Input::Visibility { .. } => "visibility",
        Input::BatchVisibility { .. } => "batch_visibility",
        Input::States => "states",
    };
    let spec = OpSpec::new(name, 0, move |given| {
        let n_tokens = given.graph.n_tokens;
        Ok(match input {
            Input::Tokens | Input::Positions | Input::TokenTypes | Input::Cells { .. } => {
                ids(vec![n_tokens])
            }
            Input::Embeddings { dim } => OpResult::f32([n_tokens, dim]),
            Input::Coordinates => ids(vec![n_tokens, 3]),
            Input::OutputRows => ids(vec![given.graph.n_outputs]),
            Input::Visibility { .. } | Input::BatchVisibility { .. } | Input::States => {
                OpResult::none()
            }
        })
    });
    let spec = spec.scope_of(OpScope::Input);
    match input {
        Input::Cells { part } => spec.setting("part", part),
        Input::Visibility { part, window } => spec.setting("part", part).setting("window", window),
        Input::BatchVisibility { window } => spec.setting("window", window),
        _ => spec,
    }
}

impl GraphBuilder {
    /// An input; asking twice gives the same node. Its name has no layer, in a
    /// [scope](GraphBuilder::scope) either.
    ///
    /// # Errors
    /// [`GraphError::DuplicateName`] where another node took the input's name.
    pub fn input(&mut self, input: Input) -> Result<NodeId, GraphError> {
        if let Some(id) = self.known_input(input) {
            return Ok(id);
        }
        self.add_node(input.node_name(), Op::Input(input), &[], Default::default())
    }
}
