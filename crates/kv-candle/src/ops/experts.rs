//! Mixtures of experts: routes are made on the host, rows of one expert are multiplied together.
//!
//! Invariant: slots without an expert are zeros. Knows nothing of feed-forward blocks.

use candle_core::{Device, Result, Tensor};
use kv_graph::{RouteSpec, slots};

use super::AffineTensors;

/// The route of every row of `logits [n, experts]`, with biases and gains `[experts]` where there
/// are any.
pub(crate) fn route(
    logits: &Tensor,
    spec: &RouteSpec,
    bias_gain: [Option<&Tensor>; 2],
) -> Result<Tensor> {
    let values = |table: Option<&Tensor>| table.map(Tensor::to_vec1::<f32>).transpose();
    let [bias, gain] = bias_gain;
    let (bias, gain) = (values(bias)?, values(gain)?);
    let mut routes = Vec::with_capacity(logits.elem_count());
    for logits in logits.to_vec2::<f32>()? {
        let mut route = vec![0.0; logits.len()];
        spec.route(&logits, bias.as_deref(), &mut route);
        if let Some(gain) = &gain {
            RouteSpec::apply_gain(&mut route, gain);
        }
        routes.extend(route);
    }
    Tensor::from_vec(routes, logits.shape(), logits.device())
}

/// The slots of some rows, row after row.
pub(crate) struct Slots {
    n_rows: usize,
    n_used: usize,
    n_experts: usize,
    /// `(slot, expert, weight)`, where slots are counted through all rows.
    filled: Vec<(usize, usize, f32)>,
}

impl Slots {
    /// The slots of `routes [n, experts]`.
    pub(crate) fn new(routes: &Tensor, n_used: usize) -> Result<Self> {
        let (n_rows, n_experts) = routes.dims2()?;
        let mut filled = Vec::with_capacity(n_rows * n_used);
        for (row, route) in routes.to_vec2::<f32>()?.iter().enumerate() {
            let of_row = (row * n_used..).zip(slots(route, n_used));
            filled.extend(of_row.map(|(slot, (expert, weight))| (slot, expert, weight)));
        }
        Ok(Self {
            n_rows,
            n_used,
            n_experts,
            filled,
        })
    }

    /// The row of `x` for each slot: its own, or that of its token.
    fn rows(&self, x: &Tensor) -> Result<(Tensor, usize)> {
        match *x.dims() {
            [n, slots, width] => Ok((x.reshape((n * slots, width))?, 1)),
            _ => Ok((x.clone(), self.n_used)),
        }
    }
}

fn indices(ids: impl Iterator<Item = usize>, device: &Device) -> Result<Tensor> {
    // Rows of a ubatch are counted in 32 bits everywhere.
    let ids: Vec<u32> = ids
        .map(|id| u32::try_from(id).unwrap_or(u32::MAX))
        .collect();
    let n = ids.len();
    Tensor::from_vec(ids, n, device)
}

/// `x [n, in]` or `[n, slots, in]` through the matrices `[experts, out, in]` with biases
/// `[experts, out]` → `[n, slots, out]`.
pub(crate) fn expert_linear(
    x: &Tensor,
    slots: &Slots,
    affine: AffineTensors<'_>,
) -> Result<Tensor> {
    let AffineTensors { weight, bias } = affine;
    let (_, n_out, n_in) = weight.dims3()?;
    let (rows, shared_by) = slots.rows(x)?;
    let n_slots = slots.n_rows * slots.n_used;
    // Results expert by expert behind one row of zeros; and where each slot's is.
    let mut results = vec![Tensor::zeros((1, n_out), x.dtype(), x.device())?];
    let (mut n_results, mut result_of) = (1, vec![0; n_slots]);
    for expert in 0..slots.n_experts {
        let own = slots.filled.iter().filter(|(_, e, _)| *e == expert);
        let own: Vec<usize> = own.map(|&(slot, _, _)| slot).collect();
        if own.is_empty() {
            continue;
        }
        let ids = indices(own.iter().map(|slot| slot / shared_by), x.device())?;
        let matrix = weight.narrow(0, expert, 1)?.reshape((n_out, n_in))?;
        let mut y = rows.index_select(&ids, 0)?.matmul(&matrix.t()?)?;
        if let Some(bias) = bias {
            y = y.broadcast_add(&bias.narrow(0, expert, 1)?)?;
        }
        results.push(y);
        for slot in own {
            result_of[slot] = n_results;
            n_results += 1;
        }
    }
    let order = indices(result_of.into_iter(), x.device())?;
    let all = Tensor::cat(&results, 0)?.index_select(&order, 0)?;
    all.reshape((slots.n_rows, slots.n_used, n_out))
}

/// Every slot of `x [n, dim]` or `[n, slots, dim]` times its weight → `[n, slots, dim]`.
pub(crate) fn expert_scale(x: &Tensor, slots: &Slots) -> Result<Tensor> {
    let (n, n_used) = (slots.n_rows, slots.n_used);
    let mut weights = vec![0.0; n * n_used];
    for &(slot, _, weight) in &slots.filled {
        weights[slot] = weight;
    }
    let weights = Tensor::from_vec(weights, (n, n_used, 1), x.device())?;
    let x = match *x.dims() {
        [n, dim] => x.reshape((n, 1, dim))?,
        _ => x.clone(),
    };
    x.broadcast_mul(&weights)
}
