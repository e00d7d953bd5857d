//! [`ModelFile`]: everything that one GGUF file says: model, weights, tokenizer, chat template.
//!
//! Invariant: what opens has every tensor that its graph names, and a tokenizer with as many tokens
//! as the logits are wide. Knows no backend.

use std::path::Path;
use std::sync::Arc;

use kv_core::TokenId;
use kv_core::weights::{SharedBytes, WeightSource};

use crate::architecture::{Model, ModelError, Registry};
use crate::gguf::{FromValue, GgufError, GgufFile, Metadata, MetadataError};
use crate::tokenizer::{
    SpecialIds, SpecialSpacing, TokenKind, Tokenizer, TokenizerError, TokenizerModel, TokenizerSpec,
};

/// A model read from a GGUF file.
#[derive(Debug)]
pub struct ModelFile {
    file: Arc<GgufFile>,
    model: Arc<dyn Model>,
    tokenizer: Tokenizer,
}

/// Why a model file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// It is no sound GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// It holds no model that is known or complete.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A metadata key is missing or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// Its tokenizer cannot be built.
    #[error("tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// Tokenizer and logits do not match.
    #[error(
        "the tokenizer has {n_tokens} tokens, but the model's logits are {n_logits} wide; a token \
         would have no logit"
    )]
    VocabTooLarge {
        /// Tokens of the tokenizer.
        n_tokens: usize,
        /// Width of the logits.
        n_logits: usize,
    },
}

impl ModelFile {
    /// Opens a GGUF file (the first part of a split one) by memory map.
    ///
    /// # Errors
    /// [`ModelFileError`]: the file, the model in it or its tokenizer is not usable.
    pub fn open(path: impl AsRef<Path>, registry: &Registry) -> Result<Self, ModelFileError> {
        Self::new(GgufFile::open(path)?, registry)
    }

    /// A model from the bytes of a GGUF file.
    ///
    /// # Errors
    /// As [`ModelFile::open`].
    pub fn from_bytes(bytes: SharedBytes, registry: &Registry) -> Result<Self, ModelFileError> {
        Self::new(GgufFile::from_bytes(bytes)?, registry)
    }

    fn new(file: GgufFile, registry: &Registry) -> Result<Self, ModelFileError> {
        let model = registry.model(file.metadata(), &file)?;
        let tokenizer = Tokenizer::new(tokenizer_spec(file.metadata())?)?;
        let (n_tokens, n_logits) = (tokenizer.n_tokens(), model.vocab_size());
        if n_tokens > n_logits {
            return Err(ModelFileError::VocabTooLarge { n_tokens, n_logits });
        }
        Ok(Self {
            file: Arc::new(file),
            model,
            tokenizer,
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<dyn Model> {
        &self.model
    }

    /// The weights, for a backend to load.
    pub fn weights(&self) -> Arc<dyn WeightSource> {
        Arc::clone(&self.file) as Arc<dyn WeightSource>
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The file itself: metadata and tensors.
    pub fn gguf(&self) -> &GgufFile {
        &self.file
    }

    /// The text of the chat template, where the file has one.
    ///
    /// # Errors
    /// [`MetadataError`] where it is no text.
    pub fn chat_template(&self) -> Result<Option<&str>, MetadataError> {
        self.file.metadata().optional("tokenizer.chat_template")
    }
}

/// What the metadata says of the tokenizer.
///
/// # Errors
/// [`ModelFileError`] naming the key that is missing or wrong.
pub fn tokenizer_spec(metadata: &Metadata) -> Result<TokenizerSpec, ModelFileError> {
    let keys = Keys(metadata);
    let tokens: &[String] = metadata.get("tokenizer.ggml.tokens")?;
    let merges: Option<&[String]> = keys.optional("merges")?;
    let codes: Vec<i32> = keys.optional("token_type")?.unwrap_or_default();
    let kinds = codes
        .iter()
        .enumerate()
        .map(|(id, &code)| TokenKind::from_code(id, i64::from(code)));
    Ok(TokenizerSpec {
        model: TokenizerModel::from_name(metadata.get("tokenizer.ggml.model")?)?,
        pre: keys.optional::<&str>("pre")?.map(str::to_owned),
        tokens: tokens.to_vec(),
        scores: keys.optional("scores")?.unwrap_or_default(),
        kinds: kinds.collect::<Result<_, _>>()?,
        merges: merges.unwrap_or_default().to_vec(),
        special: special_ids(keys)?,
        add_bos: keys.optional("add_bos_token")?,
        add_eos: keys.optional("add_eos_token")?,
        add_space_prefix: keys.optional("add_space_prefix")?,
        special_spacing: special_spacing(metadata)?,
    })
}

#[derive(Clone, Copy)]
struct Keys<'a>(&'a Metadata);

impl<'a> Keys<'a> {
    fn optional<T: FromValue<'a>>(self, name: &str) -> Result<Option<T>, MetadataError> {
        self.0.optional(&format!("tokenizer.ggml.{name}"))
    }

    fn id(self, role: &str) -> Result<Option<TokenId>, MetadataError> {
        Ok(self
            .optional::<u32>(&format!("{role}_token_id"))?
            .map(TokenId))
    }
}

fn special_ids(keys: Keys<'_>) -> Result<SpecialIds, MetadataError> {
    Ok(SpecialIds {
        bos: keys.id("bos")?,
        eos: keys.id("eos")?,
        eot: keys.id("eot")?,
        eom: keys.id("eom")?,
        unk: keys.id("unknown")?,
        pad: keys.id("padding")?,
        fim_pre: keys.id("fim_pre")?,
        fim_suf: keys.id("fim_suf")?,
        fim_mid: keys.id("fim_mid")?,
        fim_pad: keys.id("fim_pad")?,
        fim_rep: keys.id("fim_rep")?,
        fim_sep: keys.id("fim_sep")?,
    })
}

/// Phi-3 drops white space after special tokens; only its name tells.
fn special_spacing(metadata: &Metadata) -> Result<SpecialSpacing, MetadataError> {
    let name = metadata
        .optional::<&str>("general.name")?
        .unwrap_or_default()
        .to_lowercase();
    match name.contains("phi-3") || name.contains("phi3") {
        true => Ok(SpecialSpacing::Strip),
        false => Ok(SpecialSpacing::Keep),
    }
}
