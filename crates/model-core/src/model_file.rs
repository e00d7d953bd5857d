//! [`ModelFile`]: the contents of a model on disk: model, weights, tokenizer, chat template. On
//! disk it is a GGUF file, or a directory in the layout of the transformers library
//! ([`crate::hf`]).
//!
//! Invariant: what opens has every tensor that its graph names; a [`ModelFile`] has a tokenizer
//! with at most as many tokens as the logits are wide. Knows no backend.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use kv_core::TokenId;
use kv_graph::weights::{SharedBytes, WeightError, WeightInfo, WeightSource};

use crate::adapters::{AdaptedModel, AdaptedWeights, Adapters, MergedWeights};
use crate::architecture::{Model, Registry, with_draft_head};
use crate::directory::HfDirectory;
use crate::error::{MetadataError, ModelError, ModelFileError};
use crate::gguf::{Array, FromValue, GgufFile, Metadata, Value};
use crate::head_file::{HeadFile, JoinedWeights};
use crate::hf::{HfConfig, HfWeights, tokenizer_keys};
use crate::tokenizer::{
    Normalizer, SpecialIds, SpecialSpacing, TokenKind, Tokenizer, TokenizerModel, TokenizerSpec,
};
use crate::weight_summary::WeightSummary;

/// A model without its tokenizer, which not everything needs.
#[derive(Debug)]
pub struct OpenModel {
    source: Source,
    model: Arc<dyn Model>,
    /// The metadata, where they are not those of the file.
    changed: Option<Metadata>,
    /// The weights with those of adapters, or changed by them, where there are any.
    adapted: Option<AdapterUse>,
    /// The weights with those of a head of another file, where it has one.
    joined: Option<Arc<JoinedWeights>>,
}

/// The weights of a file with adapters.
#[derive(Clone, Debug)]
enum AdapterUse {
    /// They have weights of their own.
    Apart(Arc<AdaptedWeights>),
    /// They are added to the model's.
    Merged(Arc<MergedWeights>),
}

/// A model with its tokenizer.
#[derive(Debug)]
pub struct ModelFile {
    open: OpenModel,
    tokenizer: Arc<Tokenizer>,
}

/// The source of a model.
#[derive(Debug)]
enum Source {
    Gguf(Arc<GgufFile>),
    Directory(HfDirectory),
}

impl OpenModel {
    /// Opens a GGUF file (the first part of a split one) by memory map, or a directory.
    ///
    /// # Errors
    /// [`ModelFileError`]: the files or the model in them are not usable.
    pub fn open(path: impl AsRef<Path>, registry: &Registry) -> Result<Self, ModelFileError> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Self::from_gguf(GgufFile::open(path)?, registry);
        }
        let directory = HfDirectory::open(path, registry)?;
        Ok(Self {
            model: Arc::clone(directory.model()),
            source: Source::Directory(directory),
            changed: None,
            adapted: None,
            joined: None,
        })
    }

    /// A model from the bytes of a GGUF file.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_bytes(bytes: SharedBytes, registry: &Registry) -> Result<Self, ModelFileError> {
        Self::from_gguf(GgufFile::from_bytes(bytes)?, registry)
    }

    /// The model that was read of an open GGUF file with these metadata: the file's, perhaps with
    /// some changed.
    pub fn of_gguf(file: Arc<GgufFile>, model: Arc<dyn Model>, metadata: Metadata) -> Self {
        Self {
            source: Source::Gguf(file),
            model,
            changed: Some(metadata),
            adapted: None,
            joined: None,
        }
    }

    fn from_gguf(file: GgufFile, registry: &Registry) -> Result<Self, ModelFileError> {
        let model = registry.model(file.metadata(), &file);
        Ok(Self {
            model: model.map_err(|reason| in_file(file.label(), reason))?,
            source: Source::Gguf(Arc::new(file)),
            changed: None,
            adapted: None,
            joined: None,
        })
    }

    /// The model's name in errors: its path in quotes, or a description of the bytes.
    pub fn label(&self) -> &str {
        match &self.source {
            Source::Gguf(file) => file.label(),
            Source::Directory(directory) => directory.label(),
        }
    }

    /// The model.
    pub fn model(&self) -> &Arc<dyn Model> {
        &self.model
    }

    /// Has the model computed with the head of its file that drafts, where it has one; true if it
    /// has.
    ///
    /// # Errors
    /// As of [`with_draft_head`]; the model is as before then.
    pub fn use_draft_head(&mut self) -> Result<bool, ModelError> {
        let with = with_draft_head(&*self.model, &*self.weights())?;
        let has_head = with.is_some();
        if let Some(model) = with {
            self.model = model;
        }
        Ok(has_head)
    }

    /// Has the model computed with a head of another file, in place of that of its own.
    ///
    /// # Errors
    /// As of [`HeadFile::join`]; the model is as before then.
    pub fn use_head_of(&mut self, head: &HeadFile, registry: &Registry) -> Result<(), ModelError> {
        let joined = head.join(&*self.model, self.weights(), registry)?;
        self.model = joined.model;
        self.joined = Some(joined.weights);
        Ok(())
    }

    /// Bytes of the weights of a head of another file, as they are stored; 0 without one.
    pub fn head_bytes(&self) -> u64 {
        self.joined.as_ref().map_or(0, |joined| joined.head_bytes())
    }

    /// The weights, for a backend to load.
    pub fn weights(&self) -> Arc<dyn WeightSource> {
        if let Some(joined) = &self.joined {
            return Arc::clone(joined) as Arc<dyn WeightSource>;
        }
        match &self.adapted {
            Some(AdapterUse::Apart(weights)) => Arc::clone(weights) as Arc<dyn WeightSource>,
            Some(AdapterUse::Merged(weights)) => Arc::clone(weights) as Arc<dyn WeightSource>,
            None => self.stored_weights(),
        }
    }

    fn stored_weights(&self) -> Arc<dyn WeightSource> {
        match &self.source {
            Source::Gguf(file) => Arc::clone(file) as Arc<dyn WeightSource>,
            Source::Directory(directory) => {
                Arc::clone(directory.weights()) as Arc<dyn WeightSource>
            }
        }
    }

    /// The model that the file would be with these values of its metadata.
    ///
    /// # Errors
    /// [`ModelFileError`] where they make no model of it.
    pub fn with_metadata(
        self,
        changes: impl IntoIterator<Item = (String, Value)>,
        registry: &Registry,
    ) -> Result<Self, ModelFileError> {
        let mut metadata = self.metadata().clone();
        for (key, value) in changes {
            metadata.insert(&key, value);
        }
        let model = registry.model(&metadata, &*self.weights());
        let model = model.map_err(|reason| in_file(self.label(), reason))?;
        Ok(Self {
            model,
            changed: Some(metadata),
            ..self
        })
    }

    /// The same model with adapters.
    ///
    /// # Errors
    /// [`ModelFileError::Adapter`] where its graphs take none.
    pub fn with_adapters(self, adapters: Adapters) -> Result<Self, ModelFileError> {
        let adapters = Arc::new(adapters);
        let adapted = AdaptedModel::new(Arc::clone(&self.model), Arc::clone(&adapters));
        let model = adapted.map_err(|reason| ModelFileError::Adapter {
            file: self.label().to_owned(),
            reason: Box::new(reason),
        })?;
        let weights = AdaptedWeights::new(self.weights(), adapters);
        Ok(Self {
            model: Arc::new(model),
            adapted: Some(AdapterUse::Apart(Arc::new(weights))),
            ..self
        })
    }

    /// The same model with adapters added to its weights, each by its default scale: those that
    /// change are `F32`.
    #[must_use]
    pub fn merged_with(self, adapters: Adapters) -> Self {
        let weights = MergedWeights::new(self.weights(), Arc::new(adapters));
        Self {
            adapted: Some(AdapterUse::Merged(Arc::new(weights))),
            ..self
        }
    }

    /// Shape and format of a weight of the file, without adapters.
    ///
    /// # Errors
    /// As of [`WeightSource::describe`].
    pub fn stored_info(&self, name: &str) -> Result<WeightInfo, WeightError> {
        self.stored_weights().describe(name)
    }

    /// The form in a directory's files of a weight that is `F32` here because no format holds its
    /// numbers and scales as they are; `None` for others.
    pub fn widened(&self, name: &str) -> Option<String> {
        self.directory_weights()?.widened(name)
    }

    /// The tensors of a directory, which know the names in its files.
    pub(crate) fn directory_weights(&self) -> Option<&HfWeights> {
        match &self.source {
            Source::Gguf(_) => None,
            Source::Directory(directory) => Some(directory.weights()),
        }
    }

    /// The number of weights it has, and how they are stored. Reads no weight.
    pub fn weight_summary(&self) -> WeightSummary {
        match &self.source {
            Source::Gguf(file) => WeightSummary::of_gguf(file),
            Source::Directory(directory) => {
                WeightSummary::of_weights(directory.metadata(), &**directory.weights())
            }
        }
    }

    /// The model's metadata, in the keys of GGUF.
    pub fn metadata(&self) -> &Metadata {
        if let Some(changed) = &self.changed {
            return changed;
        }
        match &self.source {
            Source::Gguf(file) => file.metadata(),
            Source::Directory(directory) => directory.metadata(),
        }
    }
}

impl ModelFile {
    /// As [`OpenModel::use_draft_head`].
    ///
    /// # Errors
    /// As [`OpenModel::use_draft_head`].
    pub fn use_draft_head(&mut self) -> Result<bool, ModelError> {
        self.open.use_draft_head()
    }

    /// As [`OpenModel::use_head_of`].
    ///
    /// # Errors
    /// As [`OpenModel::use_head_of`].
    pub fn use_head_of(&mut self, head: &HeadFile, registry: &Registry) -> Result<(), ModelError> {
        self.open.use_head_of(head, registry)
    }

    /// Opens a GGUF file (the first part of a split one) by memory map, or a directory.
    ///
    /// Replace a model file by renaming a new one over it: what has the old one open goes on with
    /// it. A file that is changed in place while it is open, cut short or written over, is found
    /// out ([`WeightSource::check`]): whatever reads its weights fails with
    /// [`SourceChanged`](kv_graph::weights::SourceChanged) from then on, until it is opened again.
    ///
    /// # Errors
    /// [`ModelFileError`]: the files, the model in them or its tokenizer are not usable.
    pub fn open(path: impl AsRef<Path>, registry: &Registry) -> Result<Self, ModelFileError> {
        Self::with_tokenizer(OpenModel::open(path, registry)?)
    }

    /// A model from the bytes of a GGUF file.
    ///
    /// # Errors
    /// As [`ModelFile::open`].
    pub fn from_bytes(bytes: SharedBytes, registry: &Registry) -> Result<Self, ModelFileError> {
        Self::with_tokenizer(OpenModel::from_bytes(bytes, registry)?)
    }

    /// An open model with the tokenizer of its file.
    ///
    /// # Errors
    /// As [`ModelFile::open`].
    pub fn with_tokenizer(open: OpenModel) -> Result<Self, ModelFileError> {
        let tokenizer = tokenizer(&open);
        // What a file says that changes meanwhile is not what is wrong with it.
        open.weights().check()?;
        match tokenizer {
            Ok(tokenizer) => Ok(Self {
                open,
                tokenizer: Arc::new(tokenizer),
            }),
            Err(reason) => Err(in_file(open.label(), reason)),
        }
    }

    /// The same model with adapters.
    ///
    /// # Errors
    /// As [`OpenModel::with_adapters`].
    pub fn with_adapters(self, adapters: Adapters) -> Result<Self, ModelFileError> {
        Ok(Self {
            open: self.open.with_adapters(adapters)?,
            ..self
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The text of the chat template, where the file has one.
    ///
    /// # Errors
    /// [`MetadataError`] where it is no text.
    pub fn chat_template(&self) -> Result<Option<&str>, MetadataError> {
        self.open.metadata().optional("tokenizer.chat_template")
    }
}

/// A model with a tokenizer can stand wherever one without it can.
impl Deref for ModelFile {
    type Target = OpenModel;

    fn deref(&self) -> &OpenModel {
        &self.open
    }
}

/// The tokenizer of a GGUF file or of a directory alone. No weight is read, and there may be none:
/// files that hold only a vocabulary will do.
///
/// # Errors
/// [`ModelFileError`]: the file or the tokenizer in it is not usable.
pub fn open_tokenizer(path: impl AsRef<Path>) -> Result<Tokenizer, ModelFileError> {
    let path = path.as_ref();
    if !path.is_dir() {
        return tokenizer_of_gguf(&GgufFile::open(path)?);
    }
    let label = format!("'{}'", path.display());
    let metadata = tokenizer_keys(path)?;
    if !metadata.contains("tokenizer.ggml.model") {
        // A directory without that, either, is no model's.
        HfConfig::open(&path.join("config.json"))?;
        return Err(in_file(&label, ModelError::NoTokenizer));
    }
    read_tokenizer(&metadata).map_err(|reason| in_file(&label, reason))
}

/// The same from the bytes of a GGUF file.
///
/// # Errors
/// As [`open_tokenizer`].
pub fn tokenizer_from_bytes(bytes: SharedBytes) -> Result<Tokenizer, ModelFileError> {
    tokenizer_of_gguf(&GgufFile::from_bytes(bytes)?)
}

fn tokenizer_of_gguf(file: &GgufFile) -> Result<Tokenizer, ModelFileError> {
    let tokenizer = read_tokenizer(file.metadata());
    file.check()?;
    tokenizer.map_err(|reason| in_file(file.label(), reason))
}

fn read_tokenizer(metadata: &Metadata) -> Result<Tokenizer, ModelError> {
    Ok(Tokenizer::new(tokenizer_spec(metadata)?)?)
}

fn in_file(label: &str, reason: ModelError) -> ModelFileError {
    ModelFileError::Model {
        file: label.to_owned(),
        reason,
    }
}

/// A model's tokenizer, whose tokens all have a logit.
fn tokenizer(open: &OpenModel) -> Result<Tokenizer, ModelError> {
    let metadata = open.metadata();
    if matches!(open.source, Source::Directory(_)) && !metadata.contains("tokenizer.ggml.model") {
        return Err(ModelError::NoTokenizer);
    }
    let tokenizer = read_tokenizer(metadata)?;
    let (n_tokens, n_logits) = (tokenizer.n_tokens(), open.model.vocab_size());
    if n_tokens > n_logits {
        Err(ModelError::VocabTooLarge { n_tokens, n_logits })
    } else {
        Ok(tokenizer)
    }
}

/// True if a model's tokens are no text, so that it has no tokenizer: audio codes, for example.
///
/// # Errors
/// [`MetadataError`] where the tokenizer's name is no text.
pub fn has_no_text(metadata: &Metadata) -> Result<bool, MetadataError> {
    Ok(metadata.optional("tokenizer.ggml.model")? == Some("none"))
}

/// Reads the tokenizer from the metadata.
///
/// # Errors
/// [`ModelError`] naming the key that is missing or wrong.
pub fn tokenizer_spec(metadata: &Metadata) -> Result<TokenizerSpec, ModelError> {
    if has_no_text(metadata)? {
        return Err(ModelError::NotText);
    }
    let keys = Keys(metadata);
    let tokens: &[String] = metadata.get("tokenizer.ggml.tokens")?;
    let codes: Vec<i32> = keys.optional("token_type")?.unwrap_or_default();
    let kinds = codes
        .iter()
        .enumerate()
        .map(|(id, &code)| TokenKind::from_code(id, i64::from(code)));
    Ok(TokenizerSpec {
        model: TokenizerModel::from_name(metadata.get("tokenizer.ggml.model")?)?,
        pre: keys.optional::<&str>("pre")?.map(str::to_owned),
        expressions: keys.texts("pre_expressions")?.to_vec(),
        whole_words: keys.optional("ignore_merges")?,
        normalizers: normalizers(keys)?,
        tokens: tokens.to_vec(),
        scores: keys.optional("scores")?.unwrap_or_default(),
        kinds: kinds.collect::<Result<_, _>>()?,
        merges: keys.texts("merges")?.to_vec(),
        special: special_ids(keys)?,
        add_bos: keys.optional("add_bos_token")?,
        add_eos: keys.optional("add_eos_token")?,
        add_sep: keys.optional("add_sep_token")?,
        remove_extra_whitespaces: keys.optional("remove_extra_whitespaces")?,
        lowercase: keys.optional("normalizer.lowercase")?,
        char_map: match keys.optional::<&Array>("precompiled_charsmap")? {
            None => Vec::new(),
            Some(Array::U8(bytes)) => bytes.clone(),
            // As llama.cpp reads it, whatever the sign is.
            Some(Array::I8(bytes)) => bytes.iter().map(|byte| byte.cast_unsigned()).collect(),
            Some(_) => {
                return Err(ModelError::Setting {
                    key: "tokenizer.ggml.precompiled_charsmap".to_owned(),
                    reason: "it is no list of bytes".to_owned(),
                });
            }
        },
        add_space_prefix: keys.optional("add_space_prefix")?,
        special_spacing: special_spacing(metadata)?,
    })
}

/// The steps before a text is cut. Files of earlier versions name Unigram's
/// in a key of its own.
fn normalizers(keys: Keys<'_>) -> Result<Vec<Normalizer>, ModelError> {
    let texts = keys.texts("normalizers")?.iter().cloned();
    let form = keys.optional::<&str>("unicode_normalization")?;
    let form = form.map(|name| format!(r#"{{"type":"{}"}}"#, name.to_uppercase()));
    let has_table = keys.optional::<&Array>("precompiled_charsmap")?.is_some();
    let all = texts.chain(form.filter(|_| !has_table));
    Ok(all
        .map(|text| Normalizer::from_json(&text))
        .collect::<Result<_, _>>()?)
}

#[derive(Clone, Copy)]
struct Keys<'a>(&'a Metadata);

impl<'a> Keys<'a> {
    fn optional<T: FromValue<'a>>(self, name: &str) -> Result<Option<T>, MetadataError> {
        self.0.optional(&format!("tokenizer.ggml.{name}"))
    }

    fn texts(self, name: &str) -> Result<&'a [String], MetadataError> {
        Ok(self.optional::<&[String]>(name)?.unwrap_or_default())
    }

    fn id(self, role: &str) -> Result<Option<TokenId>, MetadataError> {
        let name = format!("{role}_token_id");
        let id = match self.0.value(&format!("tokenizer.ggml.{name}")) {
            // Some files write -1 for a token that there is not.
            Some(Value::I32(id)) => Some(id.cast_unsigned()),
            _ => self.optional::<u32>(&name)?,
        };
        Ok(id.map(TokenId))
    }
}

fn special_ids(keys: Keys<'_>) -> Result<SpecialIds, MetadataError> {
    Ok(SpecialIds {
        // BERT's marks around a text have names of their own; the misspelt one is GGUF's.
        bos: keys.id("bos")?.or(keys.id("cls")?),
        eos: keys.id("eos")?.or(keys.id("seperator")?),
        eot: keys.id("eot")?,
        eom: keys.id("eom")?,
        unk: keys.id("unknown")?,
        sep: keys.id("seperator")?,
        pad: keys.id("padding")?,
        mask: keys.id("mask")?,
        fim_pre: keys.id("fim_pre")?,
        fim_suf: keys.id("fim_suf")?,
        fim_mid: keys.id("fim_mid")?,
        fim_pad: keys.id("fim_pad")?,
        fim_rep: keys.id("fim_rep")?,
        fim_sep: keys.id("fim_sep")?,
    })
}

/// Phi-3 drops white space after special tokens; only its name identifies it.
fn special_spacing(metadata: &Metadata) -> Result<SpecialSpacing, MetadataError> {
    let name = metadata
        .optional::<&str>("general.name")?
        .unwrap_or_default()
        .to_lowercase();
    if name.contains("phi-3") || name.contains("phi3") {
        Ok(SpecialSpacing::Strip)
    } else {
        Ok(SpecialSpacing::Keep)
    }
}
