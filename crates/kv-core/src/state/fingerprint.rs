//! [`Fingerprint`]: which model computed a state.
//!
//! Two models with the same fingerprint give the same rows for the same tokens. Weights are told
//! apart by the names, shapes and formats of all that the graph uses and by samples of their bytes,
//! so no more than a few pages of each are read. That finds other models, other trainings of one
//! and other quantisations; it does not find a single value that somebody changed. Knows nothing of
//! files.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::error::StateError;
use super::xxh64::Xxh64;
use crate::graph::{Graph, Op};
use crate::layers::{LayerMap, RecentTokens};
use crate::rope::RopeSpec;
use crate::weights::WeightSource;

/// Pieces of each weight's bytes that are looked at: all over it, its first and last bytes
/// included.
const N_SAMPLES: usize = 8;
/// Bytes of a piece.
const SAMPLE: usize = 512;

/// Which model computed a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Name of the architecture, as in model files.
    pub architecture: String,
    /// Size of the vocabulary.
    pub n_vocab: u32,
    /// What each layer remembers.
    pub layers: LayerMap,
    /// The rotary embeddings of the graph, in its order.
    pub ropes: Vec<RopeRun>,
    /// The weights.
    pub weights: WeightsId,
}

/// Rotary embeddings that follow one another and are the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RopeRun {
    /// How many.
    pub n: usize,
    /// What each is: a [`RopeSpec`] as text, in which every number is exact.
    pub rope: String,
}

/// What tells the weights of two models apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsId {
    /// Number of weights that the graph uses.
    pub n_weights: usize,
    /// Their bytes.
    pub n_bytes: u64,
    /// XXH64 of their names, shapes, formats and samples of their bytes, in the order of their
    /// names.
    pub hash: u64,
}

impl Fingerprint {
    /// The fingerprint of a model with these layers, this graph (of any shape) and these weights.
    pub fn new(
        architecture: &str,
        n_vocab: u32,
        layers: &LayerMap,
        graph: &Graph,
        weights: &dyn WeightSource,
    ) -> Self {
        Self {
            architecture: architecture.to_owned(),
            n_vocab,
            layers: layers.clone(),
            ropes: ropes(graph),
            weights: WeightsId::new(graph, weights),
        }
    }

    /// The same of a model that has another graph, too: that of its encoder.
    #[must_use]
    pub fn with_graph(mut self, graph: &Graph, weights: &dyn WeightSource) -> Self {
        let other = WeightsId::new(graph, weights);
        let WeightsId {
            n_weights,
            n_bytes,
            hash,
        } = &mut self.weights;
        *n_weights += other.n_weights;
        *n_bytes += other.n_bytes;
        let mut both = Xxh64::new(*hash);
        both.update(&other.hash.to_le_bytes());
        *hash = both.finish();
        self
    }

    /// Whether a state with the fingerprint `saved` is this model's.
    ///
    /// # Errors
    /// [`StateError::OtherModel`], the first difference.
    pub fn check(&self, saved: &Self) -> Result<(), StateError> {
        let differs = |what, saved: String, here: String| {
            (saved != here).then_some(StateError::OtherModel { what, saved, here })
        };
        let layers = |f: &Self| format!("{:?}", f.layers);
        let of = |this: &Self, other: &Self| first_difference(&layers(this), &layers(other));
        let rope = |run: &RopeRun| format!("{} x {}", run.n, run.rope);
        let ropes = |f: &Self| f.ropes.iter().map(rope).collect::<Vec<_>>().join("; ");
        let rope_of = |this: &Self, other: &Self| first_difference(&ropes(this), &ropes(other));
        let weights = |f: &Self| {
            let WeightsId {
                n_weights,
                n_bytes,
                hash,
            } = f.weights;
            format!("{n_weights} tensors of {n_bytes} bytes, {hash:016x}")
        };
        let found = differs(
            "architecture",
            saved.architecture.clone(),
            self.architecture.clone(),
        )
        .or_else(|| {
            differs(
                "vocabulary",
                saved.n_vocab.to_string(),
                self.n_vocab.to_string(),
            )
        })
        .or_else(|| self.other_ages(saved))
        .or_else(|| differs("layer map", of(saved, self), of(self, saved)))
        .or_else(|| differs("RoPE", rope_of(saved, self), rope_of(self, saved)))
        .or_else(|| differs("weights", weights(saved), weights(self)));
        found.map_or(Ok(()), Err)
    }

    /// Whether rows of other ages are kept apart.
    fn other_ages(&self, saved: &Self) -> Option<StateError> {
        let (saved, here) = (ages(&saved.layers), ages(&self.layers));
        (saved != here).then_some(StateError::OtherAges { saved, here })
    }
}

/// Which rows a map keeps apart.
fn ages(layers: &LayerMap) -> String {
    let first = layers.recent().first();
    let recent = first.and_then(|rows| layers.attention(rows.layer));
    match recent.and_then(|memory| RecentTokens::through(memory.window)) {
        Some(recent) => format!("old rows apart from those of {recent} tokens"),
        None => "rows of all ages together".to_owned(),
    }
}

/// Some of `text` around where it begins to differ from `other`; descriptions of many layers are
/// long.
fn first_difference(text: &str, other: &str) -> String {
    const N_AROUND: usize = 40;
    let same = text.chars().zip(other.chars()).take_while(|(a, b)| a == b);
    let n_same = same.count();
    let shown: String = text
        .chars()
        .skip(n_same.saturating_sub(N_AROUND))
        .take(2 * N_AROUND)
        .collect();
    format!("…{shown}…")
}

fn ropes(graph: &Graph) -> Vec<RopeRun> {
    let mut runs: Vec<RopeRun> = Vec::new();
    for node in graph.nodes() {
        let Op::Rope { rope } = &node.op else {
            continue;
        };
        let rope = described(rope);
        match runs.last_mut() {
            Some(run) if run.rope == rope => run.n += 1,
            _ => runs.push(RopeRun { n: 1, rope }),
        }
    }
    runs
}

fn described(rope: &RopeSpec) -> String {
    // Plain numbers and names always are JSON.
    serde_json::to_string(rope).unwrap_or_default()
}

impl WeightsId {
    fn new(graph: &Graph, weights: &dyn WeightSource) -> Self {
        let mut names: Vec<&str> = graph.weights().iter().map(|w| w.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let mut hash = Xxh64::new(0);
        let (mut n_weights, mut n_bytes) = (0, 0u64);
        let mut copy = Vec::new();
        for weight in names.into_iter().filter_map(|name| weights.get(name)) {
            let described = format!(
                "{} {:?} {}\n",
                weight.name(),
                weight.shape(),
                weight.format()
            );
            hash.update(described.as_bytes());
            let bytes = weight.bytes();
            for sample in samples(bytes.len()) {
                copy.resize(sample.len(), 0);
                // A copy, as mapped pages bring in their neighbours.
                match bytes.copy(sample.start, &mut copy) {
                    true => hash.update(&copy),
                    false => hash.update(bytes.get(sample).unwrap_or_default()),
                }
            }
            n_weights += 1;
            n_bytes += bytes.len() as u64;
        }
        Self {
            n_weights,
            n_bytes,
            hash: hash.finish(),
        }
    }
}

/// Pieces of so many bytes from all over them; all of them where they are few.
fn samples(n_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let (n, len) = match n_bytes <= N_SAMPLES * SAMPLE {
        true => (1, n_bytes),
        false => (N_SAMPLES, SAMPLE),
    };
    (0..n).map(move |i| {
        // Fits: quotient and remainder apart, so that nothing overflows.
        let room = n_bytes - len;
        let steps = (n - 1).max(1);
        let at = room / steps * i + room % steps * i / steps;
        at..at + len
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_reach_from_the_first_byte_to_the_last() {
        for len in [
            0,
            1,
            SAMPLE,
            N_SAMPLES * SAMPLE,
            N_SAMPLES * SAMPLE + 1,
            1_000_003,
        ] {
            let all: Vec<_> = samples(len).collect();
            assert_eq!((all[0].start, all[all.len() - 1].end), (0, len));
            assert!(all.iter().map(|s| s.len()).sum::<usize>() <= N_SAMPLES * SAMPLE);
            assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
