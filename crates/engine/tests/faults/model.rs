//! [`Layered`]: a small model whose layers remember whatever a test wants.

use std::sync::Arc;

use kv_backend::{CustomOp, CustomOps};
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory};
use kv_core::{LayerIdx, PartIdx, Window};
use kv_graph::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_graph::{
    AttendSpec, CustomSizes, CustomSpec, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId,
};
use model_core::architecture::{Model, ModelError};
use model_core::blocks::{ConvBias, InnerNorms, LayerContext, SsmMixerBlock};

pub(crate) const VOCAB: u32 = 32;
const WIDTH: usize = 16;
const SPEC: AttendSpec = AttendSpec {
    n_heads: 2,
    kv_heads: 1,
    k_dim: 8,
    v_dim: 8,
    scale: 0.35,
    soft_cap: None,
    alibi: None,
};
const MIXER: SsmMixerBlock = SsmMixerBlock {
    d_inner: 8,
    d_state: 4,
    d_conv: 3,
    dt_rank: 2,
    conv_bias: ConvBias::PerChannel,
    inner_norms: InnerNorms::None,
};

/// What a layer remembers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Remembers {
    /// Keys and values.
    Tokens(Window),
    /// A recurrent state.
    State,
}

/// A model of such layers.
#[derive(Debug)]
pub(crate) struct Layered {
    layers: LayerMap,
    /// Given the values behind each layer, with its number as the parameter `layer`.
    op: Option<(String, CustomOps)>,
}

impl Layered {
    pub(crate) fn new(layers: &[Remembers]) -> Self {
        let layer = |remembers: &Remembers| match *remembers {
            Remembers::Tokens(window) => LayerMemory::Attention(AttentionMemory {
                kv_heads: SPEC.kv_heads,
                k_dim: SPEC.k_dim,
                v_dim: SPEC.v_dim,
                window,
            }),
            Remembers::State => LayerMemory::Recurrent(MIXER.memory()),
        };
        Self {
            layers: LayerMap::new(layers.iter().map(layer).collect()),
            op: None,
        }
    }

    /// The same with a custom operation behind each layer.
    pub(crate) fn with_op(self, op: impl CustomOp + 'static) -> Self {
        let name = op.name().to_owned();
        Self {
            op: Some((name, CustomOps::new().with(op))),
            ..self
        }
    }

    /// Weights that are the same every time.
    pub(crate) fn random_weights(&self) -> Arc<dyn WeightSource> {
        let shape = GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        };
        let mut state = 88_172_645_463_325_252u64;
        let mut weights = MemoryWeights::new();
        for used in self.graph(shape).unwrap().weights() {
            let columns = used.shape.last().copied().unwrap_or(1) as f32;
            // Decay is negative.
            let (from, spread) = if used.name.ends_with("ssm_a") {
                (-0.6, 0.5)
            } else {
                (0.0, 1.7 / columns.sqrt())
            };
            let mut value = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                from + spread * ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
            };
            let n: usize = used.shape.iter().product();
            let values: Vec<f32> = (0..n).map(|_| value()).collect();
            weights
                .insert_f32(&used.name, &used.shape, &values)
                .unwrap();
        }
        Arc::new(weights)
    }

    fn attention(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        (x, window): (NodeId, Window),
    ) -> Result<NodeId, GraphError> {
        let n = b.shape_of(x)[0];
        let part = self.layers.part_of(layer).unwrap();
        let positions = b.input(Input::Positions)?;
        let cells = b.input(Input::Cells { part })?;
        let visibility = b.input(Input::Visibility { part, window })?;
        let rope = RopeSpec {
            style: RopeStyle::Norm,
            n_rot: SPEC.k_dim,
            base: 1000.0,
            scaling: RopeScaling::None,
            factors: None,
        };
        let name = |what: &str| format!("{what}-{layer}");
        let mut heads = |what: &str, n_heads: usize, dim: usize| {
            let weight = format!("{what}.{layer}");
            let x = b.linear(&name(what), x, &weight, n_heads * dim)?;
            b.reshape(&name(&format!("{what}_heads")), x, &[n, n_heads, dim])
        };
        let q = heads("q", SPEC.n_heads, SPEC.k_dim)?;
        let k = heads("k", SPEC.kv_heads, SPEC.k_dim)?;
        let v = heads("v", SPEC.kv_heads, SPEC.v_dim)?;
        let q = b.rope(&name("q_rope"), q, positions, &rope)?;
        let k = b.rope(&name("k_rope"), k, positions, &rope)?;
        let stored = b.store_kv(&name("store"), layer, [k, v, cells])?;
        let out = b.attend(&name("kqv"), layer, SPEC, [q, stored, visibility])?;
        b.linear(&name("out"), out, &format!("o.{layer}"), WIDTH)
    }
}

impl Model for Layered {
    fn architecture(&self) -> &str {
        "layered"
    }

    fn layers(&self) -> &LayerMap {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        VOCAB as usize
    }

    fn context_length(&self) -> usize {
        64
    }

    fn embedding_dim(&self) -> usize {
        WIDTH
    }

    fn custom_ops(&self) -> CustomOps {
        let ops = self.op.as_ref().map(|(_, ops)| ops.clone());
        ops.unwrap_or_default()
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        let b = &mut GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("embd", tokens, "tokens", [VOCAB as usize, WIDTH])?;
        for (layer, memory) in self.layers.iter() {
            let y = match memory {
                LayerMemory::Attention(a) => self.attention(b, layer, (x, a.window))?,
                _ => {
                    let at = LayerContext {
                        layer,
                        index_layer: layer,
                        part: PartIdx(0),
                        output_rows: None,
                    };
                    MIXER.build(&mut b.scope(layer), at, x)?
                }
            };
            x = b.add(&format!("sum-{layer}"), x, y)?;
            if let Some((name, _)) = &self.op {
                let spec = CustomSpec {
                    params: [("layer".to_owned(), layer.0 as f32)].into(),
                    ..CustomSpec::new(name)
                };
                let sizes = CustomSizes {
                    weights: &[],
                    width: WIDTH,
                };
                x = b.custom(&format!("op-{layer}"), &spec, &[x], sizes)?;
            }
        }
        let wanted = b.input(Input::OutputRows)?;
        let x = b.take_rows("wanted", x, wanted)?;
        let logits = b.linear("logits", x, "tokens", VOCAB as usize)?;
        Ok(std::mem::replace(b, GraphBuilder::new(shape)).finish(&[logits])?)
    }
}
