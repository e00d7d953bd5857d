//! Attention over what layers store, and among the tokens of the ubatch.
//!
//! Invariant: an attention with linear biases has the positions of its rows as its last operand;
//! the builder adds it. Does not know what is remembered.

use kv_core::ids::LayerIdx;
use kv_core::window::Window;

use crate::op::{AttendSpec, Input, Op};
use crate::relative::{DistanceBuckets, RelativeBias, RelativeScores};
use crate::spec::{OpContext, OpResult, OpScope, OpSpec};
use crate::{Claim, Graph, GraphBuilder, GraphError, NodeId};

/// An attention with the weights that it has besides those of its projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention<'a> {
    /// Heads, widths and scale.
    pub spec: AttendSpec,
    /// Weight of `[heads]` sinks, where there are any; see [`Op::Attend`].
    pub sinks: Option<&'a str>,
}

/// The bias of an attention's scores by the distance of query and key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distances<'a> {
    /// The distances that share a bucket.
    pub buckets: DistanceBuckets,
    /// The bias of a bucket.
    pub scores: DistanceScores<'a>,
}

/// The bias that a bucket adds to a score; see [`RelativeScores`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DistanceScores<'a> {
    /// A number for each head, out of this weight of the layer, `[buckets, heads]`.
    Weight(&'a str),
    /// The same out of a weight that layers share, by its whole name.
    SharedWeight(&'a str),
    /// Numbers of queries `[n, heads, buckets]` and of keys `[n, kv_heads, buckets]`.
    Tables([NodeId; 2]),
}

impl From<AttendSpec> for Attention<'_> {
    fn from(spec: AttendSpec) -> Self {
        Self { spec, sinks: None }
    }
}

impl AttendSpec {
    /// True if every key/value head has the same number of query heads.
    pub(crate) fn is_grouped(&self) -> bool {
        self.kv_heads > 0 && self.n_heads.is_multiple_of(self.kv_heads)
    }

    /// The shape of a result, `[tokens, heads * v_dim]`.
    pub(crate) fn result(&self, n_tokens: usize) -> [usize; 2] {
        [n_tokens, self.n_heads.saturating_mul(self.v_dim)]
    }

    /// Operands of an attention with `n_others` operands other than the positions.
    pub(crate) fn n_operands(&self, n_others: usize) -> usize {
        n_others + usize::from(self.alibi.is_some())
    }

    /// Checks that operand `at` is the positions, where biases need them.
    pub(crate) fn check_positions(&self, given: &OpContext<'_>, at: usize) -> Result<(), String> {
        if self.alibi.is_none() || given.is_input(at, Input::Positions) {
            Ok(())
        } else {
            Err("the positions as its last operand".into())
        }
    }
}

/// The attributes of an attention.
pub(crate) fn with_attention<'a>(
    spec: OpSpec<'a>,
    of: &AttendSpec,
    sinks: Option<&'a String>,
) -> OpSpec<'a> {
    spec.setting("heads", format!("{}/{}", of.n_heads, of.kv_heads))
        .setting("dim", format!("{}/{}", of.k_dim, of.v_dim))
        .setting("scale", of.scale)
        .optional("soft_cap", of.soft_cap)
        .optional("alibi", of.alibi.map(|alibi| alibi.max_bias))
        .optional(
            "alibi_factor",
            of.alibi.map(|alibi| alibi.factor).filter(|&f| f != 1.0),
        )
        .weights_as("sinks", sinks)
}

/// The result of an attention whose first operand is the queries.
pub(crate) fn attended(
    given: &OpContext<'_>,
    spec: &AttendSpec,
    sinks: Option<&String>,
) -> Result<OpResult, String> {
    let &AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        ..
    } = spec;
    let n = given.graph.n_tokens;
    if given.shape(0) != [n, n_heads, k_dim] || !spec.is_grouped() {
        return Err(format!(
            "[{n}, {n_heads} (a multiple of {kv_heads}), {k_dim}]"
        ));
    }
    Ok(OpResult::f32(spec.result(n)).weight_if(sinks, [n_heads]))
}

pub(crate) fn store_kv<'a>(layer: LayerIdx) -> OpSpec<'a> {
    let spec = OpSpec::new("store_kv", 3, |given| match given.shapes() {
        [&[n, heads, _], &[nv, v_heads, _], &[nc]] if n == nv && n == nc && heads == v_heads => {
            Ok(OpResult::none())
        }
        _ => Err("[tokens, kv_heads, k_dim], [tokens, kv_heads, v_dim], [tokens]".into()),
    });
    spec.setting("layer", layer).scope_of(OpScope::Tokens)
}

pub(crate) fn store_k<'a>(layer: LayerIdx) -> OpSpec<'a> {
    let spec = OpSpec::new("store_k", 2, |given| match given.shapes() {
        [&[n, _, _], &[n_cells]] if n == n_cells => Ok(OpResult::none()),
        _ => Err("[tokens, kv_heads, k_dim], [tokens]".into()),
    });
    spec.setting("layer", layer).scope_of(OpScope::Tokens)
}

pub(crate) fn attend<'a>(
    layer: LayerIdx,
    of: &'a AttendSpec,
    sinks: Option<&'a String>,
    relative: Option<&'a RelativeBias>,
) -> OpSpec<'a> {
    let has_positions = of.alibi.is_some() || relative.is_some();
    let spec = OpSpec::new("attend", 3 + usize::from(has_positions), move |given| {
        if has_positions && !given.is_input(3, Input::Positions) {
            return Err("the positions as its last operand".into());
        }
        let inferred = attended(given, of, sinks)?;
        match relative {
            None => Ok(inferred),
            Some(relative) if relative.scores == RelativeScores::Tables => {
                Err("a weight of buckets: stored keys have no tables".into())
            }
            Some(relative) => with_buckets(given, of, relative, inferred),
        }
    });
    let spec = spec.setting("layer", layer).scope_of(OpScope::Tokens);
    with_relative(with_attention(spec, of, sinks), relative)
}

pub(crate) fn attend_batch<'a>(
    of: &'a AttendSpec,
    sinks: Option<&'a String>,
    relative: Option<&'a RelativeBias>,
) -> OpSpec<'a> {
    let n_tables = match relative.map(|relative| &relative.scores) {
        Some(RelativeScores::Tables) => 2,
        Some(RelativeScores::Weight(_)) | None => 0,
    };
    let has_positions = of.alibi.is_some() || relative.is_some();
    let n_operands = 4 + n_tables + usize::from(has_positions);
    let spec = OpSpec::new("attend_batch", n_operands, move |given| {
        let n = given.graph.n_tokens;
        let [_, k, v] = given.shapes();
        let wanted = [[n, of.kv_heads, of.k_dim], [n, of.kv_heads, of.v_dim]];
        if [k, v] != wanted.each_ref().map(|shape| &shape[..]) {
            return Err(format!("queries, {:?} and {:?}", wanted[0], wanted[1]));
        }
        if !matches!(given.op(3), Some(Op::Input(Input::BatchVisibility { .. }))) {
            return Err("what tokens see of their ubatch as its fourth operand".into());
        }
        if has_positions && !given.is_input(4 + n_tables, Input::Positions) {
            return Err("the positions as its last operand".into());
        }
        let inferred = attended(given, of, sinks)?;
        match relative {
            None => Ok(inferred),
            Some(relative) => with_buckets(given, of, relative, inferred),
        }
    });
    with_relative(
        with_attention(spec.scope_of(OpScope::Tokens), of, sinks),
        relative,
    )
}

/// The attributes of scores by distance.
fn with_relative<'a>(spec: OpSpec<'a>, relative: Option<&'a RelativeBias>) -> OpSpec<'a> {
    let Some(RelativeBias { buckets, scores }) = relative else {
        return spec;
    };
    let spec = spec.setting("buckets", buckets);
    match scores {
        RelativeScores::Weight(name) => spec.weights_as("bias", [name]),
        RelativeScores::Tables => spec,
    }
}

/// Adds the weight of buckets, or checks their tables.
fn with_buckets(
    given: &OpContext<'_>,
    of: &AttendSpec,
    relative: &RelativeBias,
    inferred: OpResult,
) -> Result<OpResult, String> {
    let (n, n_buckets) = (given.graph.n_tokens, relative.buckets.n());
    if !relative.buckets.is_sound() {
        return Err(format!(
            "buckets that fit together, not {}",
            relative.buckets
        ));
    }
    match relative.scores {
        RelativeScores::Weight(_) => Ok(inferred.weight([n_buckets, of.n_heads])),
        RelativeScores::Tables => {
            let wanted = [[n, of.n_heads, n_buckets], [n, of.kv_heads, n_buckets]];
            if [given.shape(4), given.shape(5)] == wanted.each_ref().map(|shape| &shape[..]) {
                Ok(inferred)
            } else {
                Err(format!("tables {:?} and {:?}", wanted[0], wanted[1]))
            }
        }
    }
}

impl Graph {
    /// The windows through which its tokens see their own ubatch, each once.
    pub fn batch_windows(&self) -> impl Iterator<Item = Window> + '_ {
        // Inputs are shared, so there is one node for each window.
        self.nodes().iter().filter_map(|node| match node.op {
            Op::Input(Input::BatchVisibility { window }) => Some(window),
            _ => None,
        })
    }
}

impl GraphBuilder {
    /// Stores `k` and `v` (`[n, kv_heads, dim]` each) in the cells of the ubatch's tokens.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where rows and cells do not match.
    pub fn store_kv(
        &mut self,
        name: &str,
        layer: LayerIdx,
        k_v_cells: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::StoreKv { layer }, &k_v_cells, Claim::default())
    }

    /// Stores `k [n, kv_heads, k_dim]`, whose heads begin with the values, in the cells of the
    /// ubatch's tokens.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where rows and cells do not match.
    pub fn store_k(
        &mut self,
        name: &str,
        layer: LayerIdx,
        k_cells: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        self.push(name, Op::StoreK { layer }, &k_cells, Claim::default())
    }

    /// Attention of `q [n, heads, k_dim]` over the rows that `stored` left behind.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match the specification.
    pub fn attend<'a>(
        &mut self,
        name: &str,
        layer: LayerIdx,
        attention: impl Into<Attention<'a>>,
        q_stored_visibility: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        let Attention { spec, sinks } = attention.into();
        let sinks = self.optional_weight_name(sinks);
        let op = Op::Attend {
            layer,
            spec,
            sinks,
            relative: None,
        };
        self.push_attend(name, op, &spec, q_stored_visibility.to_vec())
    }

    /// As [`GraphBuilder::attend`], with scores that depend on distances by a weight of buckets.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads, widths or buckets do not match, or scores are tables.
    pub fn attend_relative(
        &mut self,
        name: &str,
        layer: LayerIdx,
        spec: AttendSpec,
        [q, stored, visibility]: [NodeId; 3],
        distances: Distances<'_>,
    ) -> Result<NodeId, GraphError> {
        let positions = self.input(Input::Positions)?;
        let relative = self.relative_scores(distances).0;
        let op = Op::Attend {
            layer,
            spec,
            sinks: None,
            relative: Some(relative),
        };
        let operands = [q, stored, visibility, positions];
        self.push(name, op, &operands, Claim::default())
    }

    /// Scores by distance with whole names of weights, and their tables.
    fn relative_scores(&self, distances: Distances<'_>) -> (RelativeBias, Vec<NodeId>) {
        let Distances { buckets, scores } = distances;
        let (scores, tables) = match scores {
            DistanceScores::Weight(name) => {
                let name = self.weight_name(name);
                (RelativeScores::Weight(name), Vec::new())
            }
            DistanceScores::SharedWeight(name) => {
                (RelativeScores::Weight(name.to_owned()), Vec::new())
            }
            DistanceScores::Tables(tables) => (RelativeScores::Tables, tables.to_vec()),
        };
        (RelativeBias { buckets, scores }, tables)
    }

    /// Attention of the ubatch's tokens among themselves through `window`: `q [n, heads, k_dim]`,
    /// `k [n, kv_heads, k_dim]` and `v [n, kv_heads, v_dim]`; see [`Op::AttendBatch`].
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads or widths do not match the specification.
    pub fn attend_batch<'a>(
        &mut self,
        name: &str,
        attention: impl Into<Attention<'a>>,
        [q, k, v]: [NodeId; 3],
        window: Window,
    ) -> Result<NodeId, GraphError> {
        let Attention { spec, sinks } = attention.into();
        let sinks = self.optional_weight_name(sinks);
        let visibility = self.input(Input::BatchVisibility { window })?;
        let op = Op::AttendBatch {
            spec,
            sinks,
            relative: None,
        };
        self.push_attend(name, op, &spec, vec![q, k, v, visibility])
    }

    /// As [`GraphBuilder::attend_batch`], with scores that depend on distances.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where heads, widths or buckets do not match.
    pub fn attend_batch_relative(
        &mut self,
        name: &str,
        spec: AttendSpec,
        [q, k, v]: [NodeId; 3],
        window: Window,
        distances: Distances<'_>,
    ) -> Result<NodeId, GraphError> {
        let visibility = self.input(Input::BatchVisibility { window })?;
        let mut operands = vec![q, k, v, visibility];
        let (relative, tables) = self.relative_scores(distances);
        operands.extend(tables);
        operands.push(self.input(Input::Positions)?);
        let op = Op::AttendBatch {
            spec,
            sinks: None,
            relative: Some(relative),
        };
        self.push(name, op, &operands, Claim::default())
    }

    /// Adds an attention, with the positions as its last operand where it needs them.
    pub(crate) fn push_attend(
        &mut self,
        name: &str,
        op: Op,
        spec: &AttendSpec,
        mut operands: Vec<NodeId>,
    ) -> Result<NodeId, GraphError> {
        if spec.alibi.is_some() {
            operands.push(self.input(Input::Positions)?);
        }
        self.push(name, op, &operands, Claim::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Alibi, GraphShape};
    use kv_core::ids::PartIdx;

    const SPEC: AttendSpec = AttendSpec {
        n_heads: 2,
        kv_heads: 1,
        k_dim: 4,
        v_dim: 2,
        scale: 0.5,
        soft_cap: None,
        alibi: Some(Alibi::new(8.0)),
    };

    /// Queries, keys and values.
    fn qkv(b: &mut GraphBuilder) -> [NodeId; 3] {
        let x = b.input(Input::Embeddings { dim: 14 }).unwrap();
        let mut heads = |name: &str, at: std::ops::Range<usize>, shape: [usize; 3]| {
            let flat = b.columns(&format!("{name}.flat"), x, at).unwrap();
            b.reshape(name, flat, &shape).unwrap()
        };
        [
            heads("q", 0..8, [3, 2, 4]),
            heads("k", 8..12, [3, 1, 4]),
            heads("v", 12..14, [3, 1, 2]),
        ]
    }

    fn builder() -> GraphBuilder {
        GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        })
    }

    #[test]
    fn heads_must_divide() {
        let mut b = builder();
        let [q, ..] = qkv(&mut b);
        let spec = AttendSpec {
            kv_heads: 0,
            ..SPEC
        };
        let err = b.attend("kqv", LayerIdx(0), spec, [q, q, q]).unwrap_err();
        assert!(err.to_string().contains("a multiple of 0"), "{err}");
        let spec = AttendSpec { n_heads: 3, ..SPEC };
        assert!(b.attend("kqv", LayerIdx(0), spec, [q, q, q]).is_err());
    }

    #[test]
    fn buckets_are_part_of_the_graph() {
        let mut b = builder();
        let [q, k, v] = qkv(&mut b);
        let spec = AttendSpec {
            alibi: None,
            ..SPEC
        };
        let buckets = DistanceBuckets::Halves {
            n: 8,
            max_distance: 20,
        };
        let window = Window::Full;
        let scores = DistanceScores::SharedWeight("rel.w");
        let distances = Distances { buckets, scores };
        let y = b.attend_batch_relative("y", spec, [q, k, v], window, distances);
        for (tables, n) in [([q, k], 4), ([q, q], 2)] {
            let distances = Distances {
                buckets: DistanceBuckets::Single { span: n },
                scores: DistanceScores::Tables(tables),
            };
            let refused = b.attend_batch_relative("z", spec, [q, k, v], window, distances);
            assert!(
                matches!(refused, Err(GraphError::Shape { .. })),
                "{refused:?}"
            );
        }
        let distances = Distances {
            buckets: DistanceBuckets::Single { span: 2 },
            scores: DistanceScores::Tables([q, k]),
        };
        let z = b.attend_batch_relative("z", spec, [q, k, v], window, distances);
        let graph = b.finish(&[y.unwrap(), z.unwrap()]).unwrap();
        let text = graph.text().to_string();
        for wanted in [
            "scale=0.5, buckets=halves(8, 20), bias=rel.w)",
            "scale=0.5, buckets=single(2))",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
        assert_eq!(graph.weights()[0].shape, [8, 2]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }

    #[test]
    fn stored_keys_have_a_weight_of_buckets_and_no_tables() {
        let mut b = builder();
        let [q, k, v] = qkv(&mut b);
        let (part, window, layer) = (PartIdx(0), Window::Full, LayerIdx(2));
        let cells = b.input(Input::Cells { part }).unwrap();
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let stored = b.store_kv("store", layer, [k, v, cells]).unwrap();
        let spec = AttendSpec {
            alibi: None,
            ..SPEC
        };
        let buckets = DistanceBuckets::Earlier {
            n: 8,
            max_distance: 20,
        };
        let mut attend = |name: &str, scores| {
            let distances = Distances { buckets, scores };
            b.attend_relative(name, layer, spec, [q, stored, seen], distances)
        };
        let y = attend("y", DistanceScores::Weight("rel.w")).unwrap();
        let refused = attend("z", DistanceScores::Tables([q, k]));
        assert!(
            matches!(refused, Err(GraphError::Shape { .. })),
            "{refused:?}"
        );
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        assert!(
            text.contains("buckets=earlier(8, 20), bias=rel.w)"),
            "{text}"
        );
        assert_eq!(graph.weights()[0].shape, [8, 2]);
        let plain = graph.with_plain_attention(|_| 64).unwrap();
        assert_eq!(plain, graph, "it stays as it is");
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }

    #[test]
    fn sinks_and_positions_are_part_of_the_graph() {
        let mut b = builder();
        let [q, k, v] = qkv(&mut b);
        let both = Attention {
            spec: SPEC,
            sinks: Some("sinks.w"),
        };
        let window = Window::Symmetric(5);
        let y = b.attend_batch("kqv", both, [q, k, v], window).unwrap();
        assert!(matches!(
            b.attend_batch("wide", both, [q, v, v], window),
            Err(GraphError::Shape { .. })
        ));
        let graph = b.finish(&[y]).unwrap();
        let text = graph.text().to_string();
        for wanted in [
            "inp_visibility.batch.symmetric(5): () = batch_visibility(window=symmetric(5))",
            "attend_batch(%2, %4, %6, %7, %8, heads=2/1, dim=4/2, scale=0.5, alibi=8, sinks=sinks.w)",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
        assert_eq!(graph.weights()[0].shape, [2]);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
