//! [`ServedModel`]: a loaded model, with what requests to it need.
//!
//! Invariant: a model does one kind of work, and a request for another kind is refused with the
//! name of what it does. Loads nothing: engines come from the caller.

use std::fmt;
use std::sync::{Arc, Once, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{Service, Speculation};
use cellar_grammar::{GrammarCompiler, GrammarError};
use cellar_tasks::{Embedder, Reranker};
use kv_backend::BoxedBackend;
use kv_core::TokenId;
use kv_graph::weights::WeightSource;
use model_core::chat_template::{
    ChatTemplate, ChatTemplateError, GenerationPrompt, TemplateTokens,
};
use model_core::media::MediaKind;
use model_core::message_ends::message_ends;
use model_core::model_file::ModelFile;
use model_core::picture::{PreparedPicture, PromptTokens};
use model_core::tokenizer::Tokenizer;
use model_core::weight_summary::WeightSummary;
use model_vision::PictureReader;

use crate::adapters::ServedAdapters;
use crate::control_texts::ControlTexts;
use crate::error::ApiError;
use crate::generate::ChatPrompt;
use crate::ids::random_id;
use crate::pictures::PictureFetcher;
use crate::texts::{EmbedWorker, RerankWorker};

/// How a model is called, and what requests to it are given where they ask for nothing.
#[derive(Clone, Debug, Default)]
pub struct ModelSettings {
    /// Its name in `/v1/models`.
    pub id: String,
    /// Other names for it, in which `*` stands for any text.
    pub aliases: Vec<String>,
    /// A chat template instead of the file's.
    pub chat_template: Option<String>,
    /// The sampler, but for its seed.
    pub sampler: SamplerConfig,
    /// The seed; `None` draws one for each request.
    pub seed: Option<u64>,
    /// After how many tokens reasoning ends, of requests that do not say it; `None` where the model
    /// ends it.
    pub reasoning_tokens: Option<usize>,
    /// How many requests are computed together at most.
    pub n_parallel: u32,
    /// How tokens of texts are drafted, so that steps verify several.
    pub speculation: Speculation,
    /// The most tokens that are drafted at once for requests that choose how; `None` for
    /// [`DEFAULT_DRAFT`](cellar_engine::serve::DEFAULT_DRAFT).
    pub draft_max: Option<usize>,
    /// Fetches pictures that requests name by an address on the network; `None` where none are.
    pub picture_fetcher: Option<PictureFetcher>,
}

impl ModelSettings {
    /// Whether the model is called so.
    pub fn is_called(&self, name: &str) -> bool {
        is_called(&self.id, &self.aliases, name)
    }
}

/// Whether this id or one of these aliases is the name.
pub(crate) fn is_called(id: &str, aliases: &[String], name: &str) -> bool {
    let is_it = |name: &str| id == name || aliases.iter().any(|alias| alias == name);
    // Clients of Ollama add its usual tag.
    is_it(name) || name.strip_suffix(":latest").is_some_and(is_it)
}

/// True if the name fits one of these aliases, in which `*` stands for any text.
pub(crate) fn is_meant(aliases: &[String], name: &str) -> bool {
    let mut patterns = aliases.iter().filter(|alias| alias.contains('*'));
    patterns.any(|pattern| fits(pattern, name))
}

/// True if a name fits a pattern: its parts between `*` come in order, the first at the beginning,
/// the last at the end.
fn fits(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(first) else {
        return false;
    };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match name.find(part) {
            Some(at) => name = &name[at + part.len()..],
            None => return false,
        }
    }
    name.ends_with(last)
}

/// What a request wants of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// A text that is continued.
    Texts,
    /// Vectors.
    Embeddings,
    /// Scores.
    Scores,
}

impl Job {
    /// Why a model that does this cannot do what is wanted: 400.
    pub(crate) fn is_not(self, wanted: Self, id: &str) -> ApiError {
        let what = match wanted {
            Self::Texts => "generate texts",
            Self::Embeddings => "give embeddings",
            Self::Scores => "score documents",
        };
        let does = match self {
            Self::Texts => "/v1/chat/completions and /v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Scores => "/v1/rerank",
        };
        let message = format!("the model '{id}' does not {what} on this server: it serves {does}");
        ApiError::invalid_param("model", message)
    }
}

/// What a model does.
#[derive(Debug)]
pub enum Work {
    /// It continues texts.
    Texts(Box<Service<BoxedBackend>>),
    /// It gives vectors.
    Embeddings(EmbedWorker),
    /// It scores documents.
    Scores(RerankWorker),
}

/// The source of weights.
struct Source(Arc<dyn WeightSource>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

/// A loaded model.
#[derive(Debug)]
pub struct ServedModel {
    settings: ModelSettings,
    architecture: String,
    n_embd: usize,
    weights: WeightSummary,
    /// The source of the weights, which others can change.
    source: Source,
    created: u64,
    tokenizer: Arc<Tokenizer>,
    template: Option<(String, ChatTemplate)>,
    grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
    control_texts: OnceLock<ControlTexts>,
    adapters: Option<ServedAdapters>,
    /// Set once it was logged that calls of its form are not read.
    warned_of_calls: Once,
    /// The reader of pictures or sounds, or the reason why it takes none.
    pictures: Result<Arc<PictureReader>, String>,
    work: Work,
    instance: String,
}

impl ServedModel {
    /// A model that continues texts.
    ///
    /// # Errors
    /// [`ChatTemplateError`] where the chat template cannot be read.
    pub fn texts(
        file: &ModelFile,
        service: Service<BoxedBackend>,
        settings: ModelSettings,
    ) -> Result<Self, ChatTemplateError> {
        Self::new(file, Work::Texts(Box::new(service)), settings)
    }

    /// The same, with what reads pictures or sounds for the tower of its service, or the reason why
    /// it takes none.
    #[must_use]
    pub fn with_pictures(self, pictures: Result<Arc<PictureReader>, String>) -> Self {
        Self { pictures, ..self }
    }

    /// A model that gives vectors.
    ///
    /// # Errors
    /// As [`ServedModel::texts`].
    pub fn embeddings(
        file: &ModelFile,
        embedder: Embedder<BoxedBackend>,
        settings: ModelSettings,
    ) -> Result<Self, ChatTemplateError> {
        let worker = EmbedWorker::start(embedder, file.tokenizer());
        Self::new(file, Work::Embeddings(worker), settings)
    }

    /// A model that scores documents.
    ///
    /// # Errors
    /// As [`ServedModel::texts`].
    pub fn scores(
        file: &ModelFile,
        reranker: Reranker<BoxedBackend>,
        settings: ModelSettings,
    ) -> Result<Self, ChatTemplateError> {
        let worker = RerankWorker::start(reranker, file.tokenizer());
        Self::new(file, Work::Scores(worker), settings)
    }

    fn new(
        file: &ModelFile,
        work: Work,
        settings: ModelSettings,
    ) -> Result<Self, ChatTemplateError> {
        let source = match &settings.chat_template {
            Some(source) => Some(source.clone()),
            // A template of another type is as good as none.
            None => file.chat_template().ok().flatten().map(str::to_owned),
        };
        let template = match source {
            Some(source) => {
                let template = ChatTemplate::new(&source)?;
                Some((source, template))
            }
            None => None,
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Self {
            settings,
            architecture: file.model().architecture().to_owned(),
            n_embd: file.model().embedding_dim(),
            weights: file.weight_summary(),
            source: Source(file.weights()),
            created: since.map_or(0, |since| since.as_secs()),
            tokenizer: Arc::clone(file.tokenizer()),
            template,
            grammars: OnceLock::new(),
            control_texts: OnceLock::new(),
            adapters: file.model().adapters().cloned().map(ServedAdapters::new),
            warned_of_calls: Once::new(),
            pictures: Err("this model takes text only".to_owned()),
            work,
            instance: random_id(""),
        })
    }

    /// True if its files were written to since it was loaded: no step succeeds any more.
    pub(crate) fn is_stale(&self) -> bool {
        self.source.0.check().is_err()
    }

    /// Its adapters, where it was loaded with any.
    pub(crate) fn adapters(&self) -> Option<&ServedAdapters> {
        self.adapters.as_ref()
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.settings.id
    }

    /// What it is called, and what requests are given.
    pub fn settings(&self) -> &ModelSettings {
        &self.settings
    }

    /// The architecture of its file.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// The width of its embeddings.
    pub fn n_embd(&self) -> usize {
        self.n_embd
    }

    /// How many weights it has, and how they are stored.
    pub fn weights(&self) -> &WeightSummary {
        &self.weights
    }

    /// When it was loaded, in seconds since 1970.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// A name that no other load has, of this model or another.
    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The source of its chat template.
    pub fn template_source(&self) -> Option<&str> {
        self.template.as_ref().map(|(source, _)| source.as_str())
    }

    /// Logs once that its template shows no form of calls that is known.
    pub(crate) fn warn_of_unknown_calls(&self) {
        self.warned_of_calls.call_once(|| {
            tracing::warn!(
                model = self.id(),
                "the model's chat template shows no form of tool calls that Cellar knows: calls that \
                 it makes of its own accord come as text; 'tool_choice' required works"
            );
        });
    }

    /// How many requests are computed together at most.
    pub fn n_parallel(&self) -> usize {
        self.settings.n_parallel.max(1) as usize
    }

    /// What it does.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// What requests to it want.
    pub fn job(&self) -> Job {
        match self.work {
            Work::Texts(_) => Job::Texts,
            Work::Embeddings(_) => Job::Embeddings,
            Work::Scores(_) => Job::Scores,
        }
    }

    /// Whether it does what is wanted.
    pub fn does(&self, job: Job) -> bool {
        self.job() == job
    }

    /// The reader of its pictures or sounds, or the reason why it takes none.
    pub(crate) fn picture_reader(&self) -> Result<&PictureReader, &str> {
        match &self.pictures {
            Ok(reader) => Ok(reader),
            Err(why) => Err(why),
        }
    }

    /// True if it takes these: sees pictures, or hears sounds.
    pub(crate) fn takes(&self, media: MediaKind) -> bool {
        self.pictures
            .as_ref()
            .is_ok_and(|reader| reader.media() == media)
    }

    /// A prompt with a mark for each picture, with the places of pictures' rows instead.
    ///
    /// # Errors
    /// [`ApiError`] 400 where there are more or fewer marks.
    pub(crate) fn with_places_at(
        &self,
        text: &str,
        mark: &str,
        pictures: &[PreparedPicture],
    ) -> Result<String, ApiError> {
        match &self.pictures {
            Ok(reader) => Ok(reader.expand_marks(text, mark, pictures)?),
            Err(_) => Ok(text.to_owned()),
        }
    }

    /// A rendered prompt with the places of pictures' rows.
    ///
    /// # Errors
    /// [`ApiError`] 400 where the template writes no place for each picture.
    pub(crate) fn with_places(
        &self,
        text: String,
        pictures: &[PreparedPicture],
    ) -> Result<String, ApiError> {
        match &self.pictures {
            Ok(reader) if !pictures.is_empty() => Ok(reader.expand(&text, pictures)?),
            _ => Ok(text),
        }
    }

    /// The tokens of such a text, with the names of rows.
    ///
    /// # Errors
    /// As [`ServedModel::with_places`].
    pub(crate) fn placed(
        &self,
        tokens: Vec<TokenId>,
        pictures: &[PreparedPicture],
    ) -> Result<PromptTokens, ApiError> {
        match &self.pictures {
            Ok(reader) if !pictures.is_empty() => Ok(reader.place(tokens, pictures)?),
            _ => Ok(PromptTokens {
                tokens,
                pictures: Vec::new(),
            }),
        }
    }

    /// The service that continues texts.
    ///
    /// # Errors
    /// [`ApiError`] 400 where it does something else.
    pub fn service(&self) -> Result<&Service<BoxedBackend>, ApiError> {
        match &self.work {
            Work::Texts(service) => Ok(service),
            _ => Err(self.job().is_not(Job::Texts, self.id())),
        }
    }

    /// The worker that gives vectors.
    ///
    /// # Errors
    /// [`ApiError`] 400 where it does something else.
    pub fn embedder(&self) -> Result<&EmbedWorker, ApiError> {
        match &self.work {
            Work::Embeddings(worker) => Ok(worker),
            _ => Err(self.job().is_not(Job::Embeddings, self.id())),
        }
    }

    /// The worker that scores documents.
    ///
    /// # Errors
    /// [`ApiError`] 400 where it does something else.
    pub fn reranker(&self) -> Result<&RerankWorker, ApiError> {
        match &self.work {
            Work::Scores(worker) => Ok(worker),
            _ => Err(self.job().is_not(Job::Scores, self.id())),
        }
    }

    /// Why it cannot fill the gap of a text: 501.
    pub(crate) fn has_no_gaps(&self) -> ApiError {
        ApiError::not_implemented(format!(
            "the model '{}' cannot fill a gap: its vocabulary has no marks for the text before, after \
             and in it",
            self.id()
        ))
    }

    /// Messages and variables in the form that the chat template wants.
    ///
    /// # Errors
    /// [`ApiError`] 400 where there is no template.
    pub(crate) fn shaped(&self, chat: &ChatPrompt) -> Result<ChatPrompt, ApiError> {
        let shape = self.chat_template()?.history_shape();
        Ok(ChatPrompt {
            messages: shape.apply(&chat.messages),
            variables: shape.variables(&chat.variables),
        })
    }

    /// The text of messages in that form, with the beginning of an answer. What an assistant said
    /// last is such a beginning.
    ///
    /// # Errors
    /// [`ApiError`] 400 where there is no template, or it refuses the messages.
    pub(crate) fn render_shaped(&self, chat: &ChatPrompt) -> Result<String, ApiError> {
        let template = self.chat_template()?;
        let Some((begun, before)) = chat.begun_answer() else {
            return Ok(self.render_with(template, chat, GenerationPrompt::Add)?);
        };
        let before = ChatPrompt {
            messages: before.to_vec(),
            variables: chat.variables.clone(),
        };
        let text = self.render_with(template, &before, GenerationPrompt::Add)?;
        Ok(text + begun)
    }

    fn chat_template(&self) -> Result<&ChatTemplate, ApiError> {
        let template = self.template.as_ref().map(|(_, template)| template);
        template.ok_or_else(|| {
            let message = format!(
                "the model '{}' has no chat template: use /v1/completions with a prompt, or start the \
                 server with --chat-template FILE",
                self.id()
            );
            ApiError {
                code: Some("no_chat_template"),
                ..ApiError::invalid_param("messages", message)
            }
        })
    }

    /// After how many of these tokens, which are those of the chat, some of its messages end.
    pub(crate) fn message_ends(&self, chat: &ChatPrompt, tokens: &[TokenId]) -> Vec<usize> {
        let Some((_, template)) = &self.template else {
            return Vec::new();
        };
        let shape = template.history_shape();
        let roles = chat.messages.iter().map(|message| message["role"].as_str());
        let roles = roles.map(Option::unwrap_or_default);
        message_ends(&self.tokenizer, tokens, roles, |n| {
            let first = ChatPrompt {
                messages: shape.apply(chat.messages.get(..n)?),
                variables: shape.variables(&chat.variables),
            };
            let text = self.render_with(template, &first, GenerationPrompt::Omit);
            text.ok()
        })
    }

    fn render_with(
        &self,
        template: &ChatTemplate,
        chat: &ChatPrompt,
        prompt: GenerationPrompt,
    ) -> Result<String, ChatTemplateError> {
        let ids = self.tokenizer.special_ids();
        let text_of = |id: Option<TokenId>| id.and_then(|id| self.tokenizer.token_text(id));
        let tokens = TemplateTokens {
            bos: text_of(ids.bos).unwrap_or_default(),
            eos: text_of(ids.eos).unwrap_or_default(),
        };
        template.render_json(&chat.messages, &chat.variables, prompt, tokens)
    }

    /// What its control tokens spell; found once, in time proportional to the vocabulary.
    pub(crate) fn control_texts(&self) -> &ControlTexts {
        let template = self.template_source().unwrap_or_default();
        self.control_texts
            .get_or_init(|| ControlTexts::of(&self.tokenizer, template))
    }

    /// The texts of its control tokens, in no order.
    pub(crate) fn control_marks(&self) -> impl Iterator<Item = &str> {
        self.control_texts().iter()
    }

    /// The compiler of schemas for its tokens; made once, in time proportional to the vocabulary.
    ///
    /// # Errors
    /// [`GrammarError`] where its tokenizer cannot be used.
    pub fn grammars(&self) -> Result<&GrammarCompiler, GrammarError> {
        let compiler = self
            .grammars
            .get_or_init(|| GrammarCompiler::new(&self.tokenizer));
        compiler.as_ref().map_err(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_names_whole() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*", "anything", true),
            ("gpt-*", "gpt-4o", true),
            ("gpt-*", "my-gpt-4o", false),
            ("*-mini", "gpt-4o-mini", true),
            ("*-mini", "gpt-4o-mini-2", false),
            ("claude-*-4-*", "claude-sonnet-4-5", true),
            ("claude-*-4-*", "claude-sonnet-4", false),
            ("ab*ba", "aba", false),
            ("a*b*b", "ab", false),
            ("a**b", "a.b", true),
            ("é*ß", "éüß", true),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
        assert!(!is_meant(&["plain".to_owned()], "plain"));
    }
}
