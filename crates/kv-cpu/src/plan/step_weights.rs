//! Weights of steps other than matrices, in the order in which kernels read them.
//!
//! Knows neither graphs nor steps.

use std::sync::Arc;

use kv_graph::{BucketTable, RelativeBias};

use crate::kernels::F32x16;

/// Weights of the heads of an attention, where there are any: `[n_heads]` each.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeadWeights {
    pub(crate) sinks: Option<Arc<[f32]>>,
    /// Slopes of linear biases.
    pub(crate) slopes: Option<Arc<[f32]>>,
    /// The bias on scores by distance.
    pub(crate) buckets: Option<Arc<HeadBuckets>>,
}

/// The bias on scores by the distance of query and key.
#[derive(Debug)]
pub(crate) struct HeadBuckets {
    pub(crate) table: BucketTable,
    /// Number of buckets.
    pub(crate) n: usize,
    /// `[n_heads, 2 * reach + 1]`, one number for each distance; empty where tokens have tables.
    pub(crate) by_distance: Vec<f32>,
}

impl HeadBuckets {
    /// Out of the weights `[buckets, n_heads]`, where there are any.
    pub(crate) fn new(relative: &RelativeBias, weights: Option<&[f32]>, n_heads: usize) -> Self {
        let table = relative.buckets.table();
        let of_head = |head: usize| {
            let weights = weights.unwrap_or_default();
            let buckets = table.buckets().iter();
            buckets.map(move |&bucket| weights[bucket as usize * n_heads + head])
        };
        let by_distance = match weights {
            Some(_) => (0..n_heads).flat_map(of_head).collect(),
            None => Vec::new(),
        };
        Self {
            n: relative.buckets.n(),
            by_distance,
            table,
        }
    }
}

/// Weights of a convolution.
#[derive(Debug)]
pub(crate) struct ConvKernel {
    /// One row of channels for each input, the oldest first: `[width, channels]`.
    pub(crate) taps: Vec<f32>,
    pub(crate) width: usize,
    pub(crate) bias: Option<Arc<[f32]>>,
}

/// Weights of a scan.
#[derive(Debug)]
pub(crate) struct ScanWeights {
    pub(crate) d_state: usize,
    /// The decay for powers of 2, `[tiles, d_state]`; 0 beyond the last channel.
    pub(crate) rates: Vec<F32x16>,
    /// `[channels]`.
    pub(crate) d: Arc<[f32]>,
}

/// Weights of decay factors, `[columns]` each.
#[derive(Debug)]
pub(crate) struct DecayWeights {
    pub(crate) rates: Vec<f32>,
    pub(crate) dt_bias: Arc<[f32]>,
}

/// Weights of a scan by heads, `[heads]` each.
#[derive(Debug)]
pub(crate) struct HeadScanWeights {
    pub(crate) n_groups: usize,
    pub(crate) d_state: usize,
    pub(crate) a: Arc<[f32]>,
    pub(crate) d: Arc<[f32]>,
    pub(crate) dt_bias: Arc<[f32]>,
}
