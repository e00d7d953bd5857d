//! [`Fingerprint`]: which model computed a state.
//!
//! Two models with the same fingerprint give the same rows for the same tokens. Weights are told
//! apart by the names, shapes and formats of all that the graph uses and by samples of their bytes,
//! so no more than a few pages of each are read. That finds other models, other trainings of one
//! and other quantisations; it does not find a single value that somebody changed. Knows nothing of
//! files.

use std::ops::Range;

use kv_core::layers::{LayerMap, RecentTokens};
use kv_graph::rope::RopeSpec;
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, Op};
use serde::{Deserialize, Serialize};

use super::error::StateError;
use super::xxh64::Xxh64;

/// Pieces of each weight's bytes that are looked at: all over it, its first and last bytes
/// included.
const N_SAMPLES: usize = 8;
/// Bytes of a piece.
const SAMPLE: usize = 512;

/// The model that computed a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Name of the architecture, as in model files.
    pub architecture: String,
    /// Size of the vocabulary.
    pub n_vocab: u32,
    /// The memory of each layer.
    pub layers: LayerMap,
    /// The rotary embeddings of the graph, in its order.
    pub ropes: Vec<RopeRun>,
    /// The weights.
    pub weights: WeightsId,
    /// The adapters whose products are in the rows, with their scales; empty without any.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub adapters: String,
}

/// Rotary embeddings that follow one another and are the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RopeRun {
    /// Their number.
    pub n: usize,
    /// The rotation: a [`RopeSpec`] as text, in which every number is exact.
    pub rope: String,
}

/// A value that tells the weights of two models apart.
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
            adapters: String::new(),
        }
    }

    /// The same of rows that were computed with these adapters.
    #[must_use]
    pub fn with_adapters(self, adapters: impl Into<String>) -> Self {
        Self {
            adapters: adapters.into(),
            ..self
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

    /// Checks that a state with the fingerprint `saved` is this model's.
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
        .or_else(|| differs("weights", weights(saved), weights(self)))
        .or_else(|| self.other_adapters(saved));
        found.map_or(Ok(()), Err)
    }

    /// Compares the adapters.
    fn other_adapters(&self, saved: &Self) -> Option<StateError> {
        let named = |adapters: &String| match adapters.as_str() {
            "" => "none".to_owned(),
            adapters => adapters.to_owned(),
        };
        (saved.adapters != self.adapters).then(|| StateError::OtherAdapters {
            saved: named(&saved.adapters),
            here: named(&self.adapters),
        })
    }

    /// Compares the settings of rows of other ages.
    fn other_ages(&self, saved: &Self) -> Option<StateError> {
        let (saved, here) = (ages(&saved.layers), ages(&self.layers));
        (saved != here).then_some(StateError::OtherAges { saved, here })
    }
}

/// The rows that a map keeps apart.
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
                if bytes.copy(sample.start, &mut copy) {
                    hash.update(&copy);
                } else {
                    hash.update(bytes.get(sample).unwrap_or_default());
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
    let (n, len) = if n_bytes <= N_SAMPLES * SAMPLE {
        (1, n_bytes)
    } else {
        (N_SAMPLES, SAMPLE)
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
    use super::super::xxh64::xxh64;
    use super::*;
    use kv_core::layers::{AttentionMemory, LayerMemory};
    use kv_core::window::Window;
    use kv_graph::rope::{RopeScaling, RopeStyle};
    use kv_graph::weights::MemoryWeights;
    use kv_graph::{GraphBuilder, GraphShape, Input};

    fn rope(base: f64) -> RopeSpec {
        RopeSpec {
            style: RopeStyle::Norm,
            n_rot: 4,
            base,
            scaling: RopeScaling::None,
            factors: None,
        }
    }

    /// A graph with these rotations, which uses `b` twice, then `a`.
    fn graph(bases: &[f64]) -> Graph {
        let shape = GraphShape {
            n_tokens: 3,
            n_outputs: 0,
        };
        let mut g = GraphBuilder::new(shape);
        let mut x = g.input(Input::Embeddings { dim: 4 }).unwrap();
        let positions = g.input(Input::Positions).unwrap();
        for (number, weight) in ["b", "b", "a"].into_iter().enumerate() {
            x = g.linear(&format!("linear{number}"), x, weight, 4).unwrap();
        }
        let mut x = g.reshape("heads", x, &[3, 1, 4]).unwrap();
        for (number, &base) in bases.iter().enumerate() {
            let name = format!("rope{number}");
            x = g.rope(&name, x, positions, &rope(base)).unwrap();
        }
        g.finish(&[x]).unwrap()
    }

    fn weights(a: &[f32], b: &[f32]) -> MemoryWeights {
        let mut weights = MemoryWeights::new();
        for (name, values) in [("a", a), ("b", b), ("unused", a)] {
            weights
                .insert_f32(name, &[values.len() / 4, 4], values)
                .unwrap();
        }
        weights
    }

    fn layers(window: Window) -> LayerMap {
        let attention = |window| {
            LayerMemory::Attention(AttentionMemory {
                kv_heads: 1,
                k_dim: 4,
                v_dim: 4,
                window,
            })
        };
        LayerMap::new([window, Window::Full, Window::Full].map(attention).to_vec())
    }

    fn fingerprint() -> Fingerprint {
        let weights = weights(&[1.0; 16], &[2.0; 16]);
        let layers = layers(Window::Full);
        Fingerprint::new("here", 10, &layers, &graph(&[1.0, 1.0, 2.0]), &weights)
    }

    #[test]
    fn every_difference_is_named() {
        let here = fingerprint();
        here.check(&here.clone()).unwrap();
        let differs = |saved: Fingerprint| here.check(&saved).unwrap_err().to_string();
        let other = |change: &dyn Fn(&mut Fingerprint)| {
            let mut saved = here.clone();
            change(&mut saved);
            differs(saved)
        };
        let model = "the state is another model's: its";
        assert_eq!(
            other(&|saved| saved.architecture = "there".to_owned()),
            format!("{model} architecture is there, but here it is here")
        );
        assert_eq!(
            other(&|saved| saved.n_vocab = 11),
            format!("{model} vocabulary is 11, but here it is 10")
        );
        let text = other(&|saved| saved.layers = layers(Window::Sliding(7)));
        let (before, there) = text.split_once(", but here it is ").unwrap();
        assert!(
            before.starts_with(&format!("{model} layer map is …")),
            "{text}"
        );
        // As much before the first difference as behind it.
        for (shown, window) in [
            (before.split_once('…').unwrap().1, "Sliding(7)"),
            (&there[3..], "Full"),
        ] {
            let at = shown.find(window).unwrap();
            assert_eq!(shown[..at].chars().count(), 40, "{text}");
            assert_eq!(shown.trim_end_matches('…').chars().count(), 80, "{text}");
        }
        let aged = here.layers.with_recent(RecentTokens::last(5)).unwrap();
        assert_eq!(
            other(&|saved| saved.layers = aged.clone()),
            "the state has old rows apart from those of the last 5 tokens, but here are rows of all ages \
             together: restore it with as many recent tokens as it was saved with"
        );
        let text = other(&|saved| saved.ropes[0].n = 3);
        assert!(
            text.starts_with(&format!("{model} RoPE is …3 x {{")),
            "{text}"
        );
        let text = other(&|saved| saved.weights.hash = 5);
        assert!(
            text.contains("weights is 2 tensors of 128 bytes, 0000000000000005, but"),
            "{text}"
        );
    }

    #[test]
    fn ropes_are_counted_in_the_order_of_the_graph() {
        let described = |base| serde_json::to_string(&rope(base)).unwrap();
        let ropes = fingerprint().ropes;
        let runs: Vec<_> = ropes.iter().map(|run| (run.n, run.rope.clone())).collect();
        assert_eq!(runs, [(2, described(1.0)), (1, described(2.0))]);
    }

    #[test]
    fn weights_are_told_apart_by_all_that_the_graph_uses() {
        let (a, b) = ([1.0f32; 16], [2.0f32; 16]);
        let id = |a: &[f32], b: &[f32]| WeightsId::new(&graph(&[]), &weights(a, b));
        let bytes = |values: &[f32]| {
            values
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect::<Vec<_>>()
        };
        // In the order of their names, each once.
        let described = |name: &str, values: &[f32]| {
            [format!("{name} [4, 4] F32\n").into_bytes(), bytes(values)].concat()
        };
        let all = [described("a", &a), described("b", &b)].concat();
        let wanted = WeightsId {
            n_weights: 2,
            n_bytes: 128,
            hash: xxh64(&all, 0),
        };
        assert_eq!(id(&a, &b), wanted);
        let mut other = a;
        other[15] = 3.0;
        assert_ne!(id(&other, &b).hash, wanted.hash);
    }

    #[test]
    fn the_graph_of_an_encoder_counts_too() {
        let alone = fingerprint();
        let weights = weights(&[1.0; 16], &[2.0; 16]);
        let both = alone.clone().with_graph(&graph(&[]), &weights).weights;
        let other = WeightsId::new(&graph(&[]), &weights);
        let wanted = WeightsId {
            n_weights: 4,
            n_bytes: 256,
            hash: xxh64(&other.hash.to_le_bytes(), alone.weights.hash),
        };
        assert_eq!(both, wanted);
    }

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
