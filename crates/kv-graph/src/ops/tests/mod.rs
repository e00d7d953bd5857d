//! What the operations refuse, and why, in tables; and what is just not refused.
//!
//! Operations that the builder gives their last operand are pushed as a text could name them.

mod attention;
mod experts;
mod recurrent;
mod rows;

use crate::{GraphBuilder, GraphError, GraphShape, Input, NodeId};

const N_TOKENS: usize = 4;
const N_OUTPUTS: usize = 2;

/// A builder whose numbers of tokens and of outputs are no other size of these tests.
fn builder() -> GraphBuilder {
    GraphBuilder::new(GraphShape {
        n_tokens: N_TOKENS,
        n_outputs: N_OUTPUTS,
    })
}

/// Floats of a shape whose rows are the tokens or the outputs.
fn floats(b: &mut GraphBuilder, shape: &[usize]) -> NodeId {
    let x = b.input(Input::Embeddings { dim: 64 }).unwrap();
    let wanted = b.input(Input::OutputRows).unwrap();
    let width = shape[1..].iter().product();
    let flat = b.columns(&format!("flat {shape:?}"), x, 0..width).unwrap();
    let rows = if shape[0] == N_OUTPUTS {
        b.take_rows(&format!("some {shape:?}"), flat, wanted)
    } else {
        Ok(flat)
    };
    b.reshape(&format!("{shape:?}"), rows.unwrap(), shape)
        .unwrap()
}

/// Every result is a shape error whose text says what was wanted.
#[track_caller]
fn assert_refused<const N: usize>(cases: [(&str, Result<NodeId, GraphError>); N]) {
    for (at, (text, result)) in cases.into_iter().enumerate() {
        match result {
            Err(GraphError::Shape { wanted, .. }) => {
                assert!(wanted.contains(text), "case {at}: {wanted}, not {text}");
            }
            other => panic!("case {at}: {other:?}, not {text}"),
        }
    }
}
