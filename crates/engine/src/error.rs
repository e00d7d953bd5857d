//! [`EngineError`]: why tokens could not be evaluated or chosen. Decides nothing.

use std::sync::Arc;

use kv_backend::BackendError;
use kv_backend::state::StateError;
use kv_core::batch::{BatchError, TokensOf};
use kv_core::memory::Refusal;
use kv_core::{LayerIdx, Pos, SeqId, TokenId};
use kv_graph::KeyRopeError;
use kv_graph::weights::SourceChanged;
use model_core::adapters::AdapterError;
use model_core::architecture::{Model, ModelError, OutputKind};
use model_core::picture::PictureError;
use model_core::tokenizer::TokenizerError;

use crate::config::ConfigError;
use crate::sampler::SampleError;

/// Why an engine, a generation or an embedder refuses or fails. After any of these, the memory is
/// what it was before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The batch is wrong in itself.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The memory refuses the batch or the edit.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The model cannot build its graph.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The backend failed.
    #[error(transparent)]
    Backend(BackendError),
    /// A file of the model was changed in place: nothing that is computed from it is given out.
    #[error(transparent)]
    SourceChanged(#[from] SourceChanged),
    /// The call's [`CancelFlag`](crate::CancelFlag) was set before the batch was computed.
    #[error("cancelled")]
    Cancelled,
    /// Logits were asked of a model that gives embeddings, or the other way round.
    #[error("the model '{architecture}' gives {got}, not {wanted}")]
    OtherOutput {
        /// The model's architecture.
        architecture: String,
        /// What was asked for.
        wanted: &'static str,
        /// What the model gives.
        got: &'static str,
    },
    /// Scales of adapters were given to a model without any.
    #[error("the model was loaded without adapters: give it some with --lora")]
    NoAdapters,
    /// The adapters of a model that was loaded with them are not exchanged.
    #[error("the model was loaded with adapters, which stay: load it without any")]
    LoadedWithAdapters,
    /// Scales of adapters that cannot be.
    #[error(transparent)]
    Adapters(Box<AdapterError>),
    /// A source was given to a model without an encoder.
    #[error(
        "the model '{architecture}' has no encoder: there is nothing that it does with a source"
    )]
    NoEncoder {
        /// The model's architecture.
        architecture: String,
    },
    /// Tokens of sources where those of sequences are taken, or the other way round.
    #[error("{}", wrong_tokens(*.got))]
    WrongTokens {
        /// Whose tokens the batch has.
        got: TokensOf,
    },
    /// A model whose texts have sources, where there is no place for those.
    #[error(
        "the model '{architecture}' encodes a source before each text, which is not supported here: \
         use `cellar run`, or `Engine::encode` and `Engine::decode`"
    )]
    SourcesUnsupported {
        /// The model's architecture.
        architecture: String,
    },
    /// Rows were given in place of tokens to a model that takes none.
    #[error("the model '{architecture}' takes tokens only, no rows in their place")]
    TokensOnly {
        /// The model's architecture.
        architecture: String,
    },
    /// A picture cannot be computed.
    #[error(transparent)]
    Picture(Box<PictureError>),
    /// A picture in the prompt of a model that sees none.
    #[error(
        "the model '{architecture}' does not see pictures: it has no vision tower, or none was loaded"
    )]
    SeesNothing {
        /// The model's architecture.
        architecture: String,
    },
    /// Something that is not done where a prompt has pictures.
    #[error("a prompt with pictures {what}")]
    WithPictures {
        /// The thing that is not possible.
        what: &'static str,
    },
    /// Log probabilities of a prompt that an encoder reads.
    #[error("the model encodes its prompt, whose tokens have no log probabilities then")]
    EncodedPrompt,
    /// The name of a row of a picture that is not there.
    #[error(
        "position {pos} of sequence {seq} names a row of a picture, and the picture is not there: give the          prompt again, with its pictures"
    )]
    UnknownRow {
        /// The sequence.
        seq: SeqId,
        /// The position.
        pos: Pos,
    },
    /// A tower gave rows of another width or number.
    #[error("the tower gave {got} values for a picture where {wanted} were expected")]
    WrongRows {
        /// Values expected.
        wanted: usize,
        /// Values that came.
        got: usize,
    },
    /// The backend gave another number of logits than the graph has.
    #[error("{got} logits came out where {wanted} were expected")]
    WrongLogits {
        /// Values expected.
        wanted: usize,
        /// Values that came.
        got: usize,
    },
    /// No memory for the rows that come out.
    #[error(
        "no memory for {n_rows} output rows of {width} values: ask for the output of fewer tokens \
         of a batch"
    )]
    OutputTooLarge {
        /// Rows wanted.
        n_rows: usize,
        /// Values of each.
        width: usize,
    },
    /// A state cannot be saved or restored.
    #[error(transparent)]
    State(#[from] StateError),
    /// The rows of a state could not be written.
    #[error("the saved rows could not be written{}", forgotten(*.replaced))]
    RestoreRows {
        /// What became of what was to be replaced.
        replaced: Replaced,
        /// Why.
        source: BackendError,
    },
    /// Tokens of this model cannot move to other positions at all.
    #[error("the context of this model cannot be shifted: {0}")]
    CannotShift(Arc<KeyRopeError>),
    /// A text of this model cannot get shorter than what it was.
    #[error(
        "the context of this model cannot be shifted: layer {layer} keeps one state of all tokens, and \
         none can be taken out of it"
    )]
    OneState {
        /// A recurrent layer.
        layer: LayerIdx,
    },
    /// A context that cannot be made shorter.
    #[error(
        "sequence {seq} has {n_tokens} tokens, of which {n_keep} are kept: too few are left to \
         drop half of them"
    )]
    NothingToDiscard {
        /// The sequence.
        seq: SeqId,
        /// Tokens that it has.
        n_tokens: u32,
        /// Tokens that are kept.
        n_keep: u32,
    },
    /// A memory that moves tokens in every pass of a compaction.
    #[error("after {n_passes} passes of compaction the memory still moves tokens")]
    EndlessCompaction {
        /// Passes that were done.
        n_passes: u32,
    },
    /// Groups of tokens that cannot be.
    #[error(
        "group attention: a width of {width} must be a multiple of the factor {factor}, and both \
         at least 1"
    )]
    GroupAttention {
        /// Tokens that would share a position.
        factor: u32,
        /// Tokens that would be grouped at once.
        width: u32,
    },
    /// A draft model whose tokens are others.
    #[error(
        "token {token} is {} of the model, and {} of the draft model: their vocabularies must be equal",
        token_text(.target.as_deref()),
        token_text(.draft.as_deref())
    )]
    VocabulariesDiffer {
        /// The first token that differs.
        token: TokenId,
        /// Its text in the vocabulary of the model; `None` where it has no such token.
        target: Option<String>,
        /// Its text in that of the draft model.
        draft: Option<String>,
    },
    /// No token could be chosen.
    #[error("no next token")]
    Sample(#[from] SampleError),
    /// A token that cannot be turned into text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A model whose rows cannot be had: it ranks texts, or its architecture has no such form.
    #[error("'{architecture}' gives no vectors of texts")]
    NoVectors {
        /// The model's architecture.
        architecture: String,
    },
    /// A model that scores no texts.
    #[error("'{architecture}' gives no scores of texts: it has no classification head")]
    NoScores {
        /// The model's architecture.
        architecture: String,
    },
    /// A model that gives several scores of a text, none of which is that of a pair.
    #[error("'{architecture}' is a classifier with {n_labels} labels: a reranker has one")]
    ManyLabels {
        /// The model's architecture.
        architecture: String,
        /// Its labels.
        n_labels: usize,
    },
    /// Neither the file nor the caller selects a pooling.
    #[error(
        "the model does not say how the rows of a text become one vector \
         ('{architecture}.pooling_type' is missing)"
    )]
    NoPooling {
        /// The model's architecture.
        architecture: String,
    },
    /// A text of more tokens than the model takes.
    #[error("text {} has {n_tokens} tokens, but the model takes {limit}", index + 1)]
    TextTooLong {
        /// Which text, counted from 0.
        index: usize,
        /// Its tokens, with those around it.
        n_tokens: usize,
        /// The most that a text can have.
        limit: usize,
    },
    /// A text without tokens, with a model that adds none around it.
    #[error("text {} has no tokens", index + 1)]
    EmptyText {
        /// Which text, counted from 0.
        index: usize,
    },
    /// There is nothing to continue.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The prompt was not evaluated to its end, or choosing a token failed before.
    #[error(
        "there are no logits to choose a token from: the last prompt failed or was cancelled, or no \
         token could be chosen"
    )]
    NoLogits,
    /// The prompt does not fit.
    #[error(
        "the prompt of {n_prompt} tokens does not fit the context of {n_ctx}{}",
        after(*.n_used)
    )]
    PromptTooLong {
        /// The sequence.
        seq: SeqId,
        /// Tokens of the prompt.
        n_prompt: usize,
        /// Tokens that the context holds.
        n_ctx: usize,
        /// Tokens that the sequence had before.
        n_used: usize,
    },
}

/// An error and the errors that it comes from, as one text.
pub fn with_reasons(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(reason) = source {
        text.push_str(": ");
        text.push_str(&reason.to_string());
        source = reason.source();
    }
    text
}

impl From<AdapterError> for EngineError {
    fn from(error: AdapterError) -> Self {
        Self::Adapters(Box::new(error))
    }
}

impl EngineError {
    /// The refusal of a model whose outputs are not what is wanted.
    pub fn other_output(model: &dyn Model, wanted: &'static str) -> Self {
        let got = match model.output() {
            OutputKind::Logits => "logits",
            OutputKind::Embeddings => "embeddings",
            OutputKind::Scores { .. } => "scores",
            OutputKind::MaskLogits(_) => "logits of masks",
        };
        Self::OtherOutput {
            architecture: model.architecture().to_owned(),
            wanted,
            got,
        }
    }
}

impl From<BackendError> for EngineError {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Cancelled => Self::Cancelled,
            error => Self::Backend(error),
        }
    }
}

/// What becomes of the sequences that a restoration was to replace, where it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// They are what they were.
    Kept,
    /// Their rows were written over: they are empty.
    Forgotten,
}

fn wrong_tokens(got: TokensOf) -> &'static str {
    match got {
        TokensOf::Sequence => "the batch has tokens of sequences, which are decoded, not encoded",
        TokensOf::Source => "the batch has tokens of sources, which are encoded, not decoded",
    }
}

fn forgotten(replaced: Replaced) -> &'static str {
    match replaced {
        Replaced::Kept => "",
        Replaced::Forgotten => ", and what they were to replace is forgotten",
    }
}

fn token_text(text: Option<&str>) -> String {
    text.map_or_else(|| "no token".to_owned(), |text| format!("{text:?}"))
}

fn after(n_used: usize) -> String {
    match n_used {
        0 => String::new(),
        n => format!(" after the {n} tokens that its sequence has already"),
    }
}
