//! [`Architecture`] and [`Model`]: what an author of a model writes, and the registry that finds
//! it.
//!
//! An architecture turns a file's metadata into a [`Model`]; a model declares what its layers
//! remember and builds a graph for any shape. Invariant: a model does not know on which
//! device it runs, and holds no weights.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use kv_backend::CustomOps;
use kv_core::layers::{AttentionMemory, LayerMap};
use kv_core::{Causality, LayerIdx, Pos, TokenId};
use kv_graph::weights::{WeightError, WeightSource};
use kv_graph::{Graph, GraphShape};

use crate::adapters::Adapters;
use crate::blocks::{DraftHead, PER_LAYER_EMBEDDING, TokenGroups};
use crate::gguf::Metadata;
use crate::head_file::HeadWeights;
use crate::hf::{HfClass, HfClasses};

pub use crate::error::ModelError;

/// The token of a row that is given in place of one, where a graph needs one all the same: padding,
/// as in transformers and llama.cpp.
pub const PADDING: TokenId = TokenId(0);

/// A model of one architecture with one set of sizes.
pub trait Model: fmt::Debug + Send + Sync {
    /// The architecture's name, as in `general.architecture`.
    fn architecture(&self) -> &str;

    /// The memory of each layer.
    fn layers(&self) -> &LayerMap;

    /// Number of tokens of the vocabulary: the width of the logits.
    fn vocab_size(&self) -> usize;

    /// The context length that the model was trained with, in tokens.
    fn context_length(&self) -> usize;

    /// Width of the embedding rows.
    fn embedding_dim(&self) -> usize;

    /// Values of a row that is given in place of a token: an embedding row, and behind it what is
    /// added behind the first layers, where a model has that.
    fn given_dim(&self) -> usize {
        self.embedding_dim()
    }

    /// The kind of its graph's first output.
    fn output(&self) -> OutputKind {
        OutputKind::Logits
    }

    /// The visibility of later tokens of the same batch in the memory. Attention without a memory
    /// ([`Op::AttendBatch`](kv_graph::Op::AttendBatch)) always sees them.
    fn causality(&self) -> Causality {
        Causality::Causal
    }

    /// True if a tensor of a layer may be in files although no graph uses it, because the model
    /// computes nothing with it. Others that are not used are refused.
    fn has_no_use_for(&self, _tensor: &str) -> bool {
        false
    }

    /// The same model for sequences of at most so many tokens, where their length makes a
    /// difference. Without this, everything is for the trained length.
    fn for_context(&self, _n_tokens: usize) -> Option<Arc<dyn Model>> {
        None
    }

    /// The same model without its output matrix: its output is the final row of every wanted token,
    /// after the last norm. `None` where there is no such model, or it gives rows already.
    fn without_head(&self) -> Option<Arc<dyn Model>> {
        None
    }

    /// The same model with the head of its file that drafts: its layers are followed by the head's,
    /// and its graphs give, after the logits, the final rows of all tokens. `None` where the file
    /// has no such head. Whether its tensors are there is not checked: see [`with_draft_head`].
    fn with_draft_head(&self) -> Option<Arc<dyn Model>> {
        None
    }

    /// The head of a model that [`Model::with_draft_head`] made, as a model over the same memory:
    /// for tokens, and as embeddings the final rows of the tokens before them, logits of what
    /// follows, and final rows to go on from.
    fn draft_head(&self) -> Option<Arc<dyn Model>> {
        None
    }

    /// The rows of its layers that a head of a file of its own reads; `None` where no such head can
    /// draft for it.
    fn layer_rows(&self) -> Option<LayerRows> {
        None
    }

    /// The same model with a head that is a file of its own, in place of that of its file, as of
    /// [`Model::with_draft_head`]. `None` where it has no [`Model::layer_rows`].
    fn with_own_head(&self, _head: DraftHead) -> Option<Arc<dyn Model>> {
        None
    }

    /// The reading of a [`Model::draft_head`].
    fn head_reading(&self) -> HeadReading<'_> {
        HeadReading::default()
    }

    /// The same model for rows that are given in place of tokens, as wide as its embedding rows:
    /// what a model of images or sounds makes. A graph of it that has an input of tokens all the
    /// same gets [`PADDING`] for each row. `None` where there is no such model.
    fn of_rows(&self) -> Option<Arc<dyn Model>> {
        None
    }

    /// The encoder of the sources of its sequences, where its layers attend over any
    /// ([`Window::Source`](kv_core::Window::Source)).
    fn source_encoder(&self) -> Option<SourceEncoder> {
        None
    }

    /// The adapters that it was loaded with, where it has any. Its graphs have a further input
    /// then: a row of [`Adapters::push_row`] for each token, behind the row that is given in place
    /// of the token, where one is.
    fn adapters(&self) -> Option<&Arc<Adapters>> {
        None
    }

    /// The same model for tokens of which none has more than so many adapters. `None` where it has
    /// no adapters.
    fn with_active_adapters(&self, _n_active: usize) -> Option<Arc<dyn Model>> {
        None
    }

    /// Custom operations of its graphs. The engine registers them with the backend before it loads
    /// first, in addition to its own.
    fn custom_ops(&self) -> CustomOps {
        CustomOps::new()
    }

    /// The computation for a ubatch of this shape. Its one output is the logits,
    /// `[outputs, vocab]`, the final rows, `[outputs, dim]`, or scores, `[outputs, labels]`: see
    /// [`Model::output`].
    ///
    /// # Errors
    /// [`ModelError::Graph`] where the model's sizes do not fit together.
    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError>;
}

/// The rows of a model's layers, as a head of another file reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRows {
    /// Number of layers.
    pub n_layers: usize,
    /// Width of a row.
    pub dim: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Name of the output matrix.
    pub output_weight: String,
    /// The layers that have keys and values of their own, in order.
    pub owners: Vec<RowOwner>,
}

/// A layer that has keys and values of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOwner {
    /// Its number.
    pub layer: LayerIdx,
    /// Its heads and its window.
    pub memory: AttentionMemory,
}

/// The rows that a head attends over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadRows {
    /// Its own: it stores those of every token.
    #[default]
    Own,
    /// Those of its model. It stores none: its tokens stand at the position of the first one that
    /// is drafted for, and see what is before that.
    OfModel,
}

/// The reading of a head that drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadReading<'a> {
    /// The token of each of its logits, where these are not all of the model's in order.
    pub tokens: Option<&'a [TokenId]>,
    /// The first position that its tokens see: before it, it was trained with none.
    pub first: Pos,
    /// The rows that it attends over.
    pub rows: HeadRows,
    /// The groups of tokens that it chooses from: its third output has the logits of these.
    pub groups: Option<&'a TokenGroups>,
}

/// A family of heads that are files of their own, and draft for models of other files.
pub trait HeadArchitecture: Send + Sync {
    /// The name that files give it in `general.architecture`.
    fn name(&self) -> &'static str;

    /// Reads the sizes of a head that drafts for a model with these rows. Its layers have the
    /// numbers behind the model's last one; its other tensors have
    /// [`OWN_HEAD`](crate::blocks::OWN_HEAD) before their names.
    ///
    /// # Errors
    /// [`ModelError`] naming the key or tensor that is missing, wrong, or does not fit the model.
    fn head(
        &self,
        metadata: &Metadata,
        weights: &dyn HeadWeights,
        of: &LayerRows,
    ) -> Result<DraftHead, ModelError>;
}

/// The encoder of a model with one.
#[derive(Clone, Debug)]
pub struct SourceEncoder {
    /// The encoder as a model over the same memory: it stores, for every layer that attends over
    /// sources, the keys and values of a source's tokens. Its output is their final rows.
    pub model: Arc<dyn Model>,
    /// The tokens with which every text of the decoder begins: one, and perhaps another that the
    /// model's files force after it, as the language of a translation.
    pub start: Vec<TokenId>,
}

/// The kind of a model's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputKind {
    /// A score for every token of the vocabulary: a language model.
    #[default]
    Logits,
    /// The final row of every wanted token, as wide as the embedding rows: an encoder.
    Embeddings,
    /// A score for every label of the model, from the row of a text's first token: a classifier,
    /// or with one label a reranker.
    Scores {
        /// Scores of a text.
        n_labels: usize,
    },
    /// A score for every token of the vocabulary, for the masks of a text whose tokens all see each
    /// other: a diffusion language model.
    MaskLogits(MaskPlace),
}

/// The row of a diffusion model that holds the scores of a mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaskPlace {
    /// Its own (LLaDA, arXiv 2502.09992).
    #[default]
    Own,
    /// That of the token before it, as in the decoder that the model was made of (Dream, arXiv
    /// 2508.15487).
    Before,
}

/// Key of our own, after the architecture's name: true where a decoder has no output matrix, not
/// even that of its embedding. GGUF has none.
pub(crate) const NO_HEAD: &str = "without_output";

/// A family of models: knows which metadata it needs.
pub trait Architecture: Send + Sync {
    /// The name that files give it in `general.architecture`.
    fn name(&self) -> &'static str;

    /// Reads the sizes of a model.
    ///
    /// # Errors
    /// [`ModelError`] naming the key or tensor that is missing or wrong.
    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError>;

    /// A small model with typical settings, for looking at its graph without a file.
    ///
    /// # Errors
    /// None in practice: the sizes are the author's own.
    fn example(&self) -> Result<Arc<dyn Model>, ModelError>;
}

/// The architectures that a program knows.
#[derive(Default)]
pub struct Registry {
    architectures: Vec<Box<dyn Architecture>>,
    heads: Vec<Box<dyn HeadArchitecture>>,
    hf: HfClasses,
}

impl Registry {
    /// A registry that knows nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an architecture, replacing one of the same name.
    pub fn register(&mut self, architecture: impl Architecture + 'static) -> &mut Self {
        self.architectures
            .retain(|a| a.name() != architecture.name());
        self.architectures.push(Box::new(architecture));
        self
    }

    /// Adds a family of heads that are files of their own, replacing one of the same name.
    pub fn register_head(&mut self, head: impl HeadArchitecture + 'static) -> &mut Self {
        self.heads.retain(|h| h.name() != head.name());
        self.heads.push(Box::new(head));
        self
    }

    /// The family of heads of this name; `None` where none is registered.
    pub fn head(&self, name: &str) -> Option<&dyn HeadArchitecture> {
        let found = self.heads.iter().find(|head| head.name() == name);
        found.map(|head| &**head)
    }

    /// Adds the translation of a class of safetensors models, replacing one of the same name.
    pub fn register_hf(&mut self, class: HfClass) -> &mut Self {
        self.hf.register(class);
        self
    }

    /// Records why a class of safetensors models has no translation, for the error
    /// on opening one.
    pub fn decline_hf(&mut self, class: &'static str, reason: &'static str) -> &mut Self {
        self.hf.decline(class, reason);
        self
    }

    /// The classes of safetensors models.
    pub fn hf_classes(&self) -> &HfClasses {
        &self.hf
    }

    /// All names, in order of registration.
    pub fn names(&self) -> Vec<String> {
        self.architectures
            .iter()
            .map(|a| a.name().to_owned())
            .collect()
    }

    /// The architecture of this name.
    ///
    /// # Errors
    /// [`ModelError::UnknownArchitecture`], which names similar ones.
    pub fn get(&self, name: &str) -> Result<&dyn Architecture, ModelError> {
        let found = self.architectures.iter().find(|a| a.name() == name);
        if found.is_none() && self.head(name).is_some() {
            let name = name.to_owned();
            return Err(ModelError::HeadAlone { name });
        }
        found
            .map(|a| &**a)
            .ok_or_else(|| ModelError::UnknownArchitecture {
                name: name.to_owned(),
                known: self.names(),
            })
    }

    /// The model that `metadata` describes, with every tensor it names checked against `weights`.
    ///
    /// # Errors
    /// [`ModelError`] naming the architecture, key or tensor.
    pub fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        check_kind(metadata)?;
        let name: &str = metadata.get("general.architecture")?;
        let architecture = self.get(name)?;
        check_layers(name, metadata, weights)?;
        let model = architecture.model(metadata, weights)?;
        let model = match metadata.optional(&format!("{name}.{NO_HEAD}"))? {
            Some(true) => model.without_head().unwrap_or(model),
            Some(false) | None => model,
        };
        check_tensors(&*model, weights)?;
        Ok(model)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.names()).finish()
    }
}

/// Refuses a file that goes with a model, and says how it is given.
fn check_kind(metadata: &Metadata) -> Result<(), ModelError> {
    let text = |key| metadata.optional::<&str>(key).ok().flatten();
    let (kind, flag) = match (text("general.type"), text("general.architecture")) {
        (Some("adapter"), _) => ("a LoRA adapter", "--lora"),
        (Some("imatrix"), _) => ("an importance matrix", "--imatrix of 'cellar convert'"),
        (Some("mmproj"), _) | (_, Some("clip")) => ("a tower for pictures", "--mmproj"),
        (_, Some("controlvector")) => ("a control vector", "--control-vector"),
        _ => return Ok(()),
    };
    Err(ModelError::NotAModel { kind, flag })
}

/// The graphs of a model for one token: its own, and those of its encoder and of its head that
/// drafts where it has such.
pub(crate) fn all_graphs(model: &dyn Model) -> Result<Vec<Graph>, ModelError> {
    let shape = GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    };
    let mut graphs = vec![model.graph(shape)?];
    if let Some(encoder) = model.source_encoder() {
        graphs.push(encoder.model.graph(shape)?);
    }
    if let Some(head) = model.draft_head() {
        graphs.push(head.graph(shape)?);
    }
    Ok(graphs)
}

/// The model with the head of its file that drafts, checked as the model was; `None` where the file
/// has none.
///
/// # Errors
/// [`ModelError::MissingTensor`] where the head is incomplete; [`ModelError::TensorShape`] with
/// both shapes where it is of another width or vocabulary; as [`Registry::model`].
pub fn with_draft_head(
    model: &dyn Model,
    weights: &dyn WeightSource,
) -> Result<Option<Arc<dyn Model>>, ModelError> {
    let Some(model) = model.with_draft_head() else {
        return Ok(None);
    };
    check_tensors(&*model, weights)?;
    Ok(Some(model))
}

/// Each layer has a tensor at least: memory is taken for layers before their tensors are looked up.
/// The keys of all stacks of layers end alike.
fn check_layers(
    architecture: &str,
    metadata: &Metadata,
    weights: &dyn WeightSource,
) -> Result<(), ModelError> {
    let n_tensors = weights.names().len();
    let is_stack = |key: &str| {
        let own = key
            .strip_prefix(architecture)
            .and_then(|key| key.strip_prefix('.'));
        own.is_some_and(|key| key.ends_with("block_count") || key.ends_with("block.count"))
    };
    for (key, _) in metadata.iter().filter(|(key, _)| is_stack(key)) {
        let n = metadata.get::<u64>(key)?;
        if n > n_tensors as u64 {
            let key = key.to_owned();
            let reason = format!("it is {n}, but there are only {n_tensors} tensors");
            return Err(ModelError::Setting { key, reason });
        }
    }
    Ok(())
}

/// Checks that every tensor which these graphs name is there, in its shape, and that vectors are
/// not quantized.
///
/// # Errors
/// [`ModelError`] naming the first tensor that is not so.
pub fn check_named_tensors(graphs: &[Graph], weights: &dyn WeightSource) -> Result<(), ModelError> {
    for wanted in graphs.iter().flat_map(Graph::weights) {
        let weight = weights
            .describe(&wanted.name)
            .map_err(|error| match error {
                WeightError::Missing { name } => ModelError::MissingTensor {
                    name,
                    shape: wanted.shape.clone(),
                },
                other => ModelError::Weight(other),
            })?;
        if weight.shape != wanted.shape {
            return Err(ModelError::TensorShape {
                name: wanted.name.clone(),
                wanted: wanted.shape.clone(),
                got: weight.shape,
            });
        }
        if wanted.shape.len() == 1 && weight.format.block_len() > 1 {
            let (name, format) = (wanted.name.clone(), weight.format);
            return Err(ModelError::TensorFormat { name, format });
        }
    }
    Ok(())
}

/// Every tensor that the model's graphs name must be there, in its shape; and the graphs must use
/// every tensor of the layers that they have.
pub(crate) fn check_tensors(
    model: &dyn Model,
    weights: &dyn WeightSource,
) -> Result<(), ModelError> {
    let graphs = all_graphs(model)?;
    check_named_tensors(&graphs, weights)?;
    let layers = model.layers();
    let named = graphs.iter().flat_map(Graph::weights);
    let used: HashSet<&str> = named.map(|w| &*w.name).collect();
    let computed: HashSet<&str> = used.iter().filter_map(|name| layer_of(name)).collect();
    let of_model = |name: &str| match layer_of(name) {
        Some(layer) => computed.contains(layer),
        None => OUTER_TENSORS.contains(&name),
    };
    let mut names = weights.names().into_iter();
    let is_without_use = |name: &str| is_without_use(layers, name) || model.has_no_use_for(name);
    let is_missed = |name: &str| of_model(name) && !used.contains(name) && !is_without_use(name);
    match names.find(|name| is_missed(name)) {
        Some(name) => Err(ModelError::UnusedTensor { name }),
        None => Ok(()),
    }
}

/// Tensors outside of layers that change what enters the first one, or what leaves the last one.
const OUTER_TENSORS: [&str; 4] = [
    "output.scale",
    "position_embd.weight",
    "token_embd_norm.weight",
    PER_LAYER_EMBEDDING,
];

/// Tensors of keys and values, which files have for layers that share those of others, too.
const KEY_TENSORS: [&str; 3] = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"];

/// True if it is for the keys or values of a layer that has none of its own.
fn is_without_use(layers: &LayerMap, name: &str) -> bool {
    let Some((layer, tensor)) = layer_of(name).and_then(|layer| {
        let tensor = name.strip_prefix(layer)?.strip_prefix('.')?;
        Some((layer.strip_prefix("blk.")?.parse().ok()?, tensor))
    }) else {
        return false;
    };
    let layer = LayerIdx(layer);
    layers.attends_over(layer) != layer && KEY_TENSORS.contains(&tensor)
}

/// `blk.N` of the name of a layer's tensor, with the stack of layers before it where there are two.
fn layer_of(name: &str) -> Option<&str> {
    let stacks = ["enc.blk.", "dec.blk.", "blk."];
    let stack = stacks.into_iter().find(|stack| name.starts_with(stack))?;
    let number = name.strip_prefix(stack)?.find('.')?;
    name.get(..stack.len() + number)
}
