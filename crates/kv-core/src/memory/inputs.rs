//! [`PartInputs`] and [`BatchVisibility`]: what a memory tells a graph of one ubatch.
//!
//! Buffers are filled anew for each ubatch and keep their capacity.

use crate::ids::CellIdx;
use crate::visibility::Visibility;
use crate::window::Window;

/// The cells of a ubatch's tokens in one part of the memory, and the cells that these tokens see.
#[derive(Clone, Debug, Default)]
pub struct PartInputs {
    /// The cell of each token, in ubatch order.
    pub cells: Vec<CellIdx>,
    /// The cells that each token sees, the ubatch's own tokens included.
    pub visibility: Visibility,
    /// The cells that each token sees through [`Window::first`]; empty in parts whose window has
    /// none.
    pub first: Visibility,
}

impl PartInputs {
    /// The cells that each token sees through a window of this part.
    pub fn seen(&self, window: Window) -> &Visibility {
        match window {
            Window::First { .. } => &self.first,
            _ => &self.visibility,
        }
    }
}

/// The visibility of the ubatch's own tokens through one window.
#[derive(Clone, Debug, Default)]
pub struct BatchVisibility {
    /// The window of the tokens.
    pub window: Window,
    /// The rows that each token sees; its cells are the rows of the ubatch.
    pub visibility: Visibility,
}
