//! Activations made ready for products, once for all products of a value.

use bytemuck::{Pod, Zeroable};
use kv_graph::{Node, NodeId};

use super::{Lower, Result, width, word};
use crate::arena::Scratch;
use crate::device::Device;
use crate::program::{Grid, Operand};

/// Columns of a tile of products with halves: their rows are multiples of it.
const TILE_COLUMNS: u32 = 64;

/// The form of a product's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ActivationForm {
    /// The values themselves.
    Floats,
    /// Blocks of 32 signed bytes.
    Int8,
    /// Rows of halves, each with a factor.
    Halves,
}

/// A value in another form than its own.
#[derive(Debug)]
pub(super) struct PreparedValue {
    pub(super) root: NodeId,
    form: ActivationForm,
    pub(super) place: Scratch,
}

/// `QuantizeArgs` of `quantize.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n_rows: u32,
    n_columns: u32,
    padded: u32,
}

/// Activations as a kernel gets them: rows of `n_columns` values.
#[derive(Debug)]
pub(crate) struct Activations<D: Device> {
    pub(crate) operand: Operand<D>,
    pub(crate) n_rows: u32,
    pub(crate) n_columns: u32,
    /// Values of a row of halves.
    pub(crate) padded: u32,
}

impl<D: Device> Lower<'_, D> {
    /// The first operand of `node` as rows in this form.
    ///
    /// # Errors
    /// If it has no values, or more than kernels can count.
    pub(crate) fn activations(
        &mut self,
        node: &Node,
        form: ActivationForm,
    ) -> Result<Activations<D>> {
        let (values, of) = (self.operand(node, 0)?, self.operand_node(node, 0)?);
        let n_columns = width(of);
        let settings = Settings {
            n_rows: word(of.n_values() / n_columns.max(1))?,
            n_columns: word(n_columns)?,
            padded: word(n_columns)?.next_multiple_of(TILE_COLUMNS),
        };
        let operand = match form {
            ActivationForm::Floats => values,
            _ => self.quantized(node, form, settings)?,
        };
        Ok(Activations {
            operand,
            n_rows: settings.n_rows,
            n_columns: settings.n_columns,
            padded: settings.padded,
        })
    }

    /// A place for the values of node `id` as blocks of int8, and their number, where a later
    /// product wants them so and they are whole blocks of `run` values in a row. Otherwise a place
    /// that is not written, and 0.
    pub(super) fn with_int8(&mut self, id: NodeId, run: usize) -> Result<(Operand<D>, u32)> {
        let graph = self.context.graph;
        let n_blocks = graph.node(id).map_or(0, |node| node.n_values() / 32);
        let mut wanted = false;
        for (reader, node) in self.readers(id) {
            let x = node.operands.first();
            if !self.done[reader.as_usize()] && x.is_some_and(|&x| self.root(x) == id) {
                wanted |= self.reads_int8(node)?;
            }
        }
        if !wanted || !run.is_multiple_of(32) {
            return Ok((Operand::Inputs(0), 0));
        }
        let place = self.scratch.take(n_blocks * 40);
        self.quantized.push(PreparedValue {
            root: id,
            form: ActivationForm::Int8,
            place,
        });
        Ok((Operand::Scratch(place.at), word(n_blocks)?))
    }

    fn quantized(
        &mut self,
        node: &Node,
        form: ActivationForm,
        settings: Settings,
    ) -> Result<Operand<D>> {
        let root = node.operands.first().map(|&id| self.root(id));
        let mut known = self.quantized.iter();
        if let Some(known) = known.find(|q| Some(q.root) == root && q.form == form) {
            return Ok(Operand::Scratch(known.place.at));
        }
        let (n_rows, n_columns) = (settings.n_rows as usize, settings.n_columns as usize);
        let (kernel, n_groups, bytes) = match form {
            ActivationForm::Halves => {
                let row = 2 * settings.padded as usize + size_of::<f32>();
                ("quantize_halves", settings.n_rows, n_rows * row)
            }
            _ => {
                let n_blocks = n_rows * n_columns / 32;
                let n_groups = word(n_blocks)?.div_ceil(4);
                ("quantize_int8", n_groups, n_blocks * 40)
            }
        };
        let values = self.operand(node, 0)?;
        let place = self.scratch.take(bytes);
        if let Some(root) = root {
            self.quantized.push(PreparedValue { root, form, place });
        }
        let to = Operand::Scratch(place.at);
        self.launch(
            kernel,
            Grid::rows(n_groups),
            vec![values, to.clone()],
            &settings,
        )?;
        Ok(to)
    }
}
