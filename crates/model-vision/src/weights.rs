//! [`TowerWeights`]: the tensors of a tower as its graphs take them.
//!
//! Files have the matrix of patches as a convolution, of two pictures in a row for models that see
//! films, and the row before patches apart. Invariant: a name that the graphs use is here where the
//! file has what it is made of. Knows no graph.

use std::sync::Arc;

use kv_graph::weights::{
    MemoryWeights, SharedBytes, SourceChanged, Weight, WeightError, WeightInfo, WeightSource,
};

use crate::clip::ClippedMatrices;
use crate::prepare::ClassRow;
use crate::stage::{MERGER, MERGER_LAYER};
use crate::tower::{PATCH_BIAS, PATCH_EMBEDDING, POSITIONS};

/// The second half of a convolution over two pictures.
const SECOND_PICTURE: &str = "v.patch_embd.weight.1";
/// The row before those of patches.
const CLASS_ROW: &str = "v.class_embd";

/// The name of the first matrix of a feed-forward block.
const UP: &str = "v.blk.0.ffn_up.weight";

/// The norm behind the last layer, and its name in files where it is the projector's.
const LAST_NORM: [&str; 2] = ["v.post_ln.weight", "mm.input_norm.weight"];

/// The order of the values of a patch in the file's matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchOrder {
    /// All of a colour, then all of the next.
    Planes,
    /// The colours of a pixel, then those of the next.
    Pixels,
}

/// The changes of the tensors of a file.
#[derive(Clone, Debug)]
pub(crate) struct Changes {
    /// Values of a patch.
    pub(crate) patch_len: usize,
    pub(crate) order: PatchOrder,
    pub(crate) class_row: ClassRow,
    /// Of each head of queries and keys the rows in the file in the order in which graphs rotate
    /// them; empty where that is the file's.
    pub(crate) head_rows: Vec<usize>,
    /// A matrix whose rows are columns in the file.
    pub(crate) transposed: Option<&'static str>,
    /// Matrices whose columns are, in the file, for each value those of all rows that are joined,
    /// and not for each row those of all values.
    pub(crate) unfolded: Vec<&'static str>,
    /// Matrices whose inputs and outputs have bounds.
    pub(crate) clipped: ClippedMatrices,
}

/// The number that is taken off each value behind the layers, in the file, and the same with
/// another sign.
const STD_BIAS: &str = "v.std_bias";
pub(crate) const STD_SHIFT: &str = "v.std_shift";

/// The tensors of a tower.
pub(crate) struct TowerWeights {
    source: Arc<dyn WeightSource>,
    made: MemoryWeights,
    /// See [`Changes::head_rows`].
    head_rows: Vec<usize>,
    /// True if the file has the matrices of feed-forward blocks under each other's names.
    swapped: bool,
}

impl TowerWeights {
    /// Those of a file, with tensors that are computed.
    ///
    /// # Errors
    /// [`WeightError`] where one that is needed is missing or cannot be read.
    pub(crate) fn new(
        source: Arc<dyn WeightSource>,
        mut made: MemoryWeights,
        changes: Changes,
    ) -> Result<Self, WeightError> {
        let Changes {
            patch_len,
            order,
            class_row,
            head_rows,
            transposed,
            unfolded,
            clipped,
        } = changes;
        let first = source.require(PATCH_EMBEDDING)?;
        let dim = first.shape().first().copied().unwrap_or(0);
        let mut values = first.to_f32();
        // `[dim, 3, 2, patch, patch]`: what is seen is twice the same picture.
        if values.len() == 2 * dim * patch_len {
            let plane = patch_len / 3;
            let pairs = values.chunks_exact(2 * plane.max(1));
            let summed = pairs.flat_map(|pair| {
                let (first, second) = pair.split_at(plane);
                first.iter().zip(second).map(|(a, b)| a + b)
            });
            values = summed.collect();
        }
        if order == PatchOrder::Pixels {
            let patches = values.chunks_exact(patch_len.max(1));
            let planes = patches.flat_map(|patch| {
                (0..3).flat_map(|colour| patch.iter().skip(colour).step_by(3).copied())
            });
            values = planes.collect();
        }
        if let Some(second) = source.get(SECOND_PICTURE) {
            let second = second.to_f32();
            values.iter_mut().zip(second).for_each(|(sum, b)| *sum += b);
        }
        made.insert_f32(PATCH_EMBEDDING, &[dim, patch_len], &values)?;
        // Those of columns and rows are many, and looked up where they are.
        let learned = source.get(POSITIONS);
        if let Some(positions) = learned.filter(|rows| !matches!(rows.shape(), [2, _, _])) {
            let mut rows = positions.to_f32();
            if let Some(class) = source.get(CLASS_ROW) {
                let class = class.to_f32();
                if class_row == ClassRow::Corner {
                    let n = rows.len();
                    rows.rotate_right(dim.min(n));
                }
                rows.iter_mut().zip(class).for_each(|(sum, b)| *sum += b);
                // The row before patches is no patch: what the graph adds to all is taken off.
                let bias = source.get(PATCH_BIAS).map(|bias| bias.to_f32());
                let bias = bias.into_iter().flatten();
                rows.iter_mut().zip(bias).for_each(|(sum, b)| *sum -= b);
            }
            let shape = [rows.len() / dim.max(1), dim];
            made.insert_f32(POSITIONS, &shape, &rows)?;
        }
        if let Some(name) = transposed {
            let matrix = source.require(name)?;
            let (n_rows, n_columns) = (matrix.n_rows(), matrix.n_columns());
            let values = matrix.to_f32();
            let column = |at: usize| values.iter().skip(at).step_by(n_columns.max(1)).copied();
            let turned: Vec<f32> = (0..n_columns).flat_map(column).collect();
            made.insert_f32(name, &[n_columns, n_rows], &turned)?;
        }
        for name in unfolded {
            unfold(&*source, name, dim, &mut made)?;
        }
        if let Some(bias) = source.get(STD_BIAS) {
            let shift: Vec<f32> = bias.to_f32().into_iter().map(|value| -value).collect();
            made.insert_f32(STD_SHIFT, &[1, shift.len()], &shift)?;
        }
        let sizes = |name: &str| {
            let found = source.describe(name);
            let found = found.or_else(|_| source.describe(&usual_name(name)));
            match found.map(|info| info.shape).as_deref() {
                Ok(&[rows, columns]) => [rows, columns],
                _ => [0, 0],
            }
        };
        clipped.add_middles(sizes, &mut made)?;
        let up = source.describe(UP).map(|info| info.shape);
        let swapped = matches!(up.as_deref(), Ok(&[rows, columns]) if rows == dim && columns > dim);
        Ok(Self {
            source,
            made,
            head_rows,
            swapped,
        })
    }

    /// A weight whose rows, or values, follow the order of those of heads.
    fn with_heads_in_order(&self, weight: Weight) -> Result<Weight, WeightError> {
        let n_head = self.head_rows.len();
        let n_rows = weight.shape().first().copied().unwrap_or(0);
        let n_bytes = weight.bytes().len().checked_div(n_rows).unwrap_or(0);
        let is_whole = n_bytes > 0 && n_rows.is_multiple_of(n_head);
        if n_head == 0 || !is_whole || !is_of_heads(weight.name()) {
            return Ok(weight);
        }
        let mut bytes = Vec::with_capacity(weight.bytes().len());
        for head in weight.bytes().chunks_exact(n_bytes * n_head) {
            for row in self.head_rows.iter().map(|&row| row * n_bytes) {
                bytes.extend_from_slice(head.get(row..row + n_bytes).unwrap_or_default());
            }
        }
        let bytes = SharedBytes::from(bytes);
        let shape = weight.shape().to_vec();
        Weight::new(weight.name(), shape, weight.format(), bytes)
    }

    /// The name in the file.
    fn name_in_file(&self, name: &str) -> String {
        if self.swapped && name.contains(".ffn_up.") {
            return name.replace(".ffn_up.", ".ffn_down.");
        }
        if self.swapped && name.contains(".ffn_down.") {
            return name.replace(".ffn_down.", ".ffn_up.");
        }
        let [last_norm, input_norm] = LAST_NORM;
        let other = if name == last_norm {
            input_norm.to_owned()
        } else {
            usual_name(name)
        };
        if self.source.describe(name).is_ok() || self.source.describe(&other).is_err() {
            name.to_owned()
        } else {
            other
        }
    }
}

/// Adds a matrix with its columns in the order of rows that are joined, see [`Changes::unfolded`].
fn unfold(
    source: &dyn WeightSource,
    name: &str,
    dim: usize,
    made: &mut MemoryWeights,
) -> Result<(), WeightError> {
    let matrix = source.require(name)?;
    let n_rows = matrix.shape().first().copied().unwrap_or(0);
    let n_columns = matrix.shape().iter().skip(1).product::<usize>();
    // Some files have it as a convolution.
    let width = match *matrix.shape() {
        [_, width, _, ..] => width,
        _ => dim,
    };
    let joined = n_columns / width.max(1);
    let mut columns = Vec::with_capacity(n_columns);
    for row in 0..joined {
        columns.extend((0..width).map(|value| value * joined + row));
    }
    let values = matrix.to_f32();
    let rows = values.chunks_exact(n_columns.max(1));
    let moved = rows.flat_map(|row| columns.iter().map(|&column| row[column]));
    made.insert_f32(name, &[n_rows, columns.len()], &moved.collect::<Vec<_>>())
}

/// The name in files of llama.cpp's converter of a tensor of a layer, where it is another one. It
/// has had two names for the second norm of Llama 4.
pub(crate) fn usual_name(name: &str) -> String {
    name.replace(MERGER_LAYER, MERGER)
        .replace(".attn_output.", ".attn_out.")
        .replace(".ln2.", ".attn_post_norm.")
}

/// True if the rows of a tensor are those of heads that rotate.
fn is_of_heads(name: &str) -> bool {
    let parts = [".attn_q.", ".attn_k.", ".attn_q_norm.", ".attn_k_norm."];
    parts.iter().any(|part| name.contains(part))
}

impl WeightSource for TowerWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        self.require(name).ok()
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.made.names();
        let others = self.source.names().into_iter();
        names.extend(
            others
                .filter(|name| self.made.get(name).is_none())
                .collect::<Vec<_>>(),
        );
        names
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        match self.made.get(name) {
            Some(weight) => Ok(weight),
            None => self.with_heads_in_order(self.source.require(&self.name_in_file(name))?),
        }
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        match self.made.get(name) {
            Some(weight) => Ok(weight.info()),
            None => self.source.describe(&self.name_in_file(name)),
        }
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.source.check()
    }
}
