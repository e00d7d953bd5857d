//! [`Intake`]: makes texts of a [`TextRequest`], in any thread, before a
//! [`Session`](super::Session) takes them.
//!
//! Invariant: a request that can be refused is refused here, so a stream that was handed out is of
//! a request that will be computed.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cellar_scheduler::{
    Overflow, PrefixUse, Priority, PromptLimits, PromptRows, Request, RequestError, RequestId,
    Retention, SchedulerConfig, SourceUse, Speculation, SpeculationOff, Tenant, TenantId,
    TenantLimits, Waiting,
};
use kv_backend::CancelFlag;
use kv_core::TokenId;
use model_core::adapters::Adapters;
use model_core::picture::{PictureRun, names_are_of};
use model_core::tokenizer::{TokenKind, Tokenizer};

use super::error::ServiceError;
use super::stream::{StepGuests, TextSender, TextStream};
use super::text::LiveText;
use crate::adapters::TextAdapters;
use crate::completion::{Completion, CompletionOptions};
use crate::context::LongContext;
use crate::draft_model::DraftModel;
use crate::error::EngineError;
use crate::logprobs::Logprobs;
use crate::pictures::Viewers;
use crate::sampler::Step;
use crate::speculate::{self, DraftMeans, DraftSource};

/// A prompt, and how it is continued.
#[derive(Debug, Default)]
pub struct TextRequest {
    /// The tokens to continue. With a model that has an encoder, the source that is encoded: the
    /// text begins with the model's start tokens.
    pub prompt: Vec<TokenId>,
    /// The pictures whose rows the prompt names
    /// ([`PromptTokens`](model_core::picture::PromptTokens)), in order.
    pub pictures: Vec<PictureRun>,
    /// Which requests go before it.
    pub priority: Priority,
    /// Whose it is: tenants share what is computed by their weights.
    pub tenant: TenantId,
    /// What that tenant gets from now on; `None` takes [`ServiceConfig::tenant_limits`].
    ///
    /// [`ServiceConfig::tenant_limits`]: super::ServiceConfig::tenant_limits
    pub tenant_limits: Option<TenantLimits>,
    /// With whom it shares cached prefixes: with all requests, unless they have other salts. With
    /// none where log probabilities of the prompt are wanted, or a source is encoded.
    pub prefix: PrefixUse,
    /// The scales of its adapters, one for each that the model was loaded with; `None` takes their
    /// default ones.
    pub adapters: Option<Arc<[f32]>>,
    /// After so many tokens of the prompt others are likely to part from it: where messages end.
    pub checkpoints: Vec<usize>,
    /// How the text is chosen, and where it ends.
    pub options: CompletionOptions,
    /// Steps of the sampler before all others: a grammar, a bias.
    pub steps: Vec<Box<dyn Step>>,
    /// Whether tokens of the text are drafted, so that a step verifies several. The text is the
    /// same.
    pub speculation: Speculation,
    /// The way in which it goes on beyond the context; `None` takes
    /// [`ServiceConfig::long_context`].
    ///
    /// [`ServiceConfig::long_context`]: super::ServiceConfig::long_context
    pub long_context: Option<LongContext>,
    /// Cancels it, from any thread; `None` leaves that to its stream. Where it is computed alone,
    /// that takes effect within a layer of the model.
    pub cancel: Option<CancelFlag>,
    /// Whether it may go on when it has ended ([`Session::resume`](super::Session::resume)), until
    /// its stream is dropped.
    pub retention: Retention,
}

/// Requests on their way to a session, each with the texts of its prompt.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(super) requests: Vec<Request>,
    pub(super) texts: Vec<(RequestId, LiveText)>,
}

/// The limits and numbers of requests.
#[derive(Debug)]
pub(crate) struct Intake {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) limits: PromptLimits,
    pub(super) draft_limit: Result<usize, SpeculationOff>,
    pub(super) draft_model: Option<DraftModel>,
    /// The adapters of the model, where it has any.
    pub(super) adapters: Option<Arc<Adapters>>,
    /// True if the model was loaded with a head that drafts.
    pub(super) has_head: bool,
    pub(super) tenant_limits: TenantLimits,
    pub(super) queue: Arc<QueueSize>,
    pub(super) next_id: AtomicU64,
    pub(super) guests: Arc<StepGuests>,
    /// With which tokens a text begins whose prompt is encoded; `None` where the model has no
    /// encoder.
    pub(super) start: Option<Vec<TokenId>>,
    /// Why a text cannot go on beyond the context.
    pub(super) long_context: LongContextLimits,
    /// The architecture of a model that sees no pictures.
    pub(super) sees_nothing: Option<String>,
    /// Set before a request fails for it.
    pub(super) has_lost_device: AtomicBool,
}

/// The requests of `n` texts of a prompt, of which this is the first. Each text of an encoded
/// source has one of its own; all others share the cells of their prompt.
fn requests_of(first: Request, n: NonZeroU32) -> Vec<Request> {
    let more = (1..u64::from(n.get())).map(|number| RequestId(first.id.0 + number));
    if matches!(first.source, SourceUse::Encoded) {
        let others = more.map(|id| Request {
            id,
            ..first.clone()
        });
        let others: Vec<Request> = others.collect();
        std::iter::once(first).chain(others).collect()
    } else {
        vec![Request {
            siblings: more.collect(),
            ..first
        }]
    }
}

/// Checks what is wanted of a prompt with pictures.
fn check_with_pictures(
    long_context: Option<LongContext>,
    options: &CompletionOptions,
) -> Result<(), EngineError> {
    let what = if long_context.is_some_and(|wanted| wanted != LongContext::Stop) {
        "cannot get longer than the context: its pictures stay where they are"
    } else if options.prompt_logprobs != Logprobs::Off {
        "has no log probabilities of its tokens"
    } else {
        return Ok(());
    };
    Err(EngineError::WithPictures { what })
}

/// The tokens of pictures whose rows see each other.
pub(super) fn together(pictures: &[PictureRun]) -> Vec<Range<usize>> {
    let mutual = pictures
        .iter()
        .filter(|run| run.picture.rows_see_each_other());
    mutual.map(PictureRun::places).collect()
}

/// The limits of [`LongContext`] for a model.
#[derive(Clone, Debug)]
pub(crate) struct LongContextLimits {
    /// The default of texts whose request does not say it.
    pub(super) default: LongContext,
    /// Why tokens cannot move.
    pub(super) refused: Option<Arc<EngineError>>,
    /// Tokens at the beginning whose rows stay for good.
    pub(super) n_first: u32,
}

impl Intake {
    /// Notes that no later step can be computed.
    pub(super) fn note_lost_device(&self) {
        self.has_lost_device.store(true, Ordering::Release);
    }

    /// True if no later step can be computed.
    pub(crate) fn has_lost_device(&self) -> bool {
        self.has_lost_device.load(Ordering::Acquire)
    }

    /// Makes `n` texts of the prompt of a request. Text number `i`, counted from 0, is what the
    /// request alone gives with `i` added to its seed. `more_steps` gives the own steps of each
    /// text but the first.
    ///
    /// # Errors
    /// [`ServiceError::Refused`] with the numbers, where the prompt is empty, can never fit, or too
    /// much waits; [`ServiceError::Engine`] where an option is out of range.
    pub(crate) fn take(
        &self,
        request: TextRequest,
        n: NonZeroU32,
        more_steps: impl FnMut() -> Vec<Box<dyn Step>>,
    ) -> Result<(Submission, Vec<TextStream>), ServiceError> {
        self.check_pictures(&request.prompt, &request.pictures)?;
        self.take_with(self.start.as_deref(), request, n, more_steps)
    }

    /// The same for a text whose source is encoded already, or that has none. Its pictures were
    /// checked, where their rows are to be computed.
    pub(super) fn take_without_source(
        &self,
        request: TextRequest,
    ) -> Result<(Submission, Vec<TextStream>), ServiceError> {
        self.take_with(None, request, NonZeroU32::MIN, Vec::new)
    }

    fn take_with(
        &self,
        start: Option<&[TokenId]>,
        request: TextRequest,
        n: NonZeroU32,
        mut more_steps: impl FnMut() -> Vec<Box<dyn Step>>,
    ) -> Result<(Submission, Vec<TextStream>), ServiceError> {
        let submitted_at = Instant::now();
        let TextRequest {
            prompt: given,
            pictures,
            priority,
            tenant,
            tenant_limits,
            prefix,
            adapters,
            checkpoints,
            options,
            steps,
            speculation,
            long_context,
            cancel,
            retention,
        } = request;
        self.limits.check(&given)?;
        speculate::check(speculation).map_err(EngineError::from)?;
        let long_context = if pictures.is_empty() {
            long_context.unwrap_or(self.long_context.default)
        } else {
            check_with_pictures(long_context, &options)?;
            LongContext::Stop
        };
        self.long_context.check(long_context)?;
        if start.is_some() && options.prompt_logprobs != Logprobs::Off {
            return Err(EngineError::EncodedPrompt.into());
        }
        let (source, prompt) = match start {
            Some(start) => (Some(Arc::<[TokenId]>::from(given)), start.to_vec()),
            None => (None, given),
        };
        let n_prompt = prompt.len() + source.as_ref().map_or(0, |source| source.len());
        // What is reused has no rows.
        let prompt_rows = match options.prompt_logprobs {
            Logprobs::Off => PromptRows::Last,
            Logprobs::Top(_) => PromptRows::All,
        };
        let is_apart = prompt_rows == PromptRows::All || source.is_some();
        let prefix = if is_apart { PrefixUse::Off } else { prefix };
        let adapters = self.text_adapters(adapters, &prompt)?;
        let prefix = adapters.as_ref().map_or(prefix, |a| a.share(prefix));
        let mut steps = Some(steps);
        let mut completions = Vec::with_capacity(n.get() as usize);
        for number in 0..u64::from(n.get()) {
            let steps = steps.take().unwrap_or_else(&mut more_steps);
            completions.push(self.completion(&options, number, steps, &prompt)?);
        }
        let tenant = Tenant {
            id: tenant,
            limits: tenant_limits.unwrap_or(self.tenant_limits),
        };
        let place = Arc::new(self.queue.enter(n_prompt, tenant)?);
        let first_id = self.reserve_ids(u64::from(n.get()));
        let (mut texts, mut streams) = (Vec::new(), Vec::new());
        for (id, completion) in (first_id.0..).map(RequestId).zip(completions) {
            let (sender, stream) = TextSender::new(id, &self.guests, cancel.clone());
            let mut live = LiveText::new(completion, sender, submitted_at);
            live.place = Some(Arc::clone(&place));
            live.adapters.clone_from(&adapters);
            live.viewers = Viewers::of(prefix, id);
            live.pictures.clone_from(&pictures);
            match self.drafter(speculation, long_context, &pictures) {
                Ok(drafter) => live.drafter = drafter,
                Err(off) => live.usage.speculated.off = Some(off),
            }
            if let Some(drafter) = &mut live.drafter {
                drafter.push(&prompt);
            }
            if prompt_rows == PromptRows::All {
                live.prompt.clone_from(&prompt);
            }
            live.usage.n_prompt = n_prompt;
            live.source.clone_from(&source);
            if let LongContext::Group(group) = long_context {
                live.group = Some(group);
            }
            live.publish();
            texts.push((id, live));
            streams.push(stream);
        }
        let request = Request {
            id: first_id,
            priority,
            prefix,
            prompt_rows,
            checkpoints,
            parting: self.parting(&pictures, &prompt),
            together: together(&pictures),
            prompt,
            siblings: Vec::new(),
            tenant,
            overflow: self.long_context.overflow(long_context),
            source: match source {
                Some(_) => SourceUse::Encoded,
                None => SourceUse::None,
            },
            retention,
        };
        let requests = requests_of(request, n);
        Ok((Submission { requests, texts }, streams))
    }

    /// After how many tokens of a prompt others part from it that are about the same pictures:
    /// behind the rows of the last, and behind the token that marks their end where there is one.
    pub(super) fn parting(&self, pictures: &[PictureRun], prompt: &[TokenId]) -> Option<usize> {
        let end = pictures.last()?.places().end;
        let marks_end = |&token: &TokenId| {
            let is_control = self.tokenizer.token_kind(token) == Some(TokenKind::Control);
            is_control && !self.tokenizer.is_end_of_generation(token)
        };
        Some(end + usize::from(prompt.get(end).is_some_and(marks_end)))
    }

    /// The adapters of a text with these scales; `None` where the model has none.
    pub(super) fn text_adapters(
        &self,
        scales: Option<Arc<[f32]>>,
        prompt: &[TokenId],
    ) -> Result<Option<TextAdapters>, ServiceError> {
        let Some(adapters) = &self.adapters else {
            return if scales.is_none_or(|scales| scales.is_empty()) {
                Ok(None)
            } else {
                Err(EngineError::NoAdapters.into())
            };
        };
        let scales = scales.unwrap_or_else(|| Arc::clone(adapters.default_scales()));
        let text = TextAdapters::new(adapters, &scales, prompt);
        Ok(Some(text.map_err(EngineError::from)?))
    }

    /// A text of a prompt, with `number` added to its seed.
    fn completion(
        &self,
        options: &CompletionOptions,
        number: u64,
        steps: Vec<Box<dyn Step>>,
        prompt: &[TokenId],
    ) -> Result<Completion, EngineError> {
        let mut options = options.clone();
        options.sampler.seed = options.sampler.seed.wrapping_add(number);
        let mut completion = Completion::new(&self.tokenizer, options)?;
        steps
            .into_iter()
            .for_each(|step| completion.push_step(step));
        completion.accept_prompt(prompt);
        Ok(completion)
    }

    /// Checks that the model sees pictures, where there are some, and that each name of a row in a
    /// prompt is of one of them.
    pub(super) fn check_pictures(
        &self,
        prompt: &[TokenId],
        pictures: &[PictureRun],
    ) -> Result<(), ServiceError> {
        if let (Some(architecture), false) = (&self.sees_nothing, pictures.is_empty()) {
            let architecture = architecture.clone();
            return Err(EngineError::SeesNothing { architecture }.into());
        }
        if names_are_of(prompt, pictures) {
            return Ok(());
        }
        let n_vocab = self.limits.n_vocab;
        let named = (0..).zip(prompt).find(|(_, token)| token.names_row());
        let (at, token) = named.map_or((0, TokenId(n_vocab)), |(at, &token)| (at, token));
        Err(RequestError::TokenOutOfRange { at, token, n_vocab }.into())
    }

    /// The drafter of a text, or the reason why there is none.
    fn drafter(
        &self,
        speculation: Speculation,
        long_context: LongContext,
        pictures: &[PictureRun],
    ) -> Result<Option<DraftSource>, SpeculationOff> {
        match (speculation, long_context) {
            (Speculation::Off, _) => Ok(None),
            (Speculation::Auto { .. }, _) if !self.has_head => Ok(None),
            _ if !pictures.is_empty() => Err(SpeculationOff::Pictures),
            (_, LongContext::Group(_)) => Err(SpeculationOff::SharedPositions),
            _ => {
                self.draft_limit?;
                let means = DraftMeans {
                    model: self.draft_model.as_ref(),
                    has_head: self.has_head,
                };
                DraftSource::new(speculation, means)
            }
        }
    }

    pub(crate) fn prompt_limits(&self) -> PromptLimits {
        self.limits
    }

    pub(crate) fn draft_limit(&self) -> Result<usize, SpeculationOff> {
        self.draft_limit
    }

    pub(crate) fn draft_model(&self) -> Option<&DraftModel> {
        self.draft_model.as_ref()
    }

    pub(crate) fn has_head(&self) -> bool {
        self.has_head
    }

    /// Requests that wait to be admitted.
    pub(crate) fn n_queued(&self) -> usize {
        self.queue.n_requests()
    }

    /// Numbers for so many texts; the first of them.
    pub(crate) fn reserve_ids(&self, n: u64) -> RequestId {
        RequestId(self.next_id.fetch_add(n, Ordering::Relaxed))
    }
}

impl LongContextLimits {
    /// What becomes of a text that is full.
    fn overflow(&self, long_context: LongContext) -> Overflow {
        match long_context {
            LongContext::Shift { n_keep } => Overflow::Shift {
                n_keep: n_keep.max(self.n_first) as usize,
            },
            LongContext::Stop | LongContext::Group(_) => Overflow::End,
        }
    }

    pub(super) fn check(&self, long_context: LongContext) -> Result<(), ServiceError> {
        match &self.refused {
            Some(error) if long_context != LongContext::Stop => {
                Err(ServiceError::Engine(Arc::clone(error)))
            }
            _ => Ok(()),
        }
    }
}

/// The requests that wait to be admitted, and how many may.
#[derive(Debug)]
pub(crate) struct QueueSize {
    waiting: Mutex<WaitingRequests>,
    limits: SchedulerConfig,
}

/// The requests that wait, all and by tenant.
#[derive(Debug, Default)]
struct WaitingRequests {
    all: Waiting,
    of: BTreeMap<TenantId, usize>,
}

impl QueueSize {
    pub(super) fn new(limits: SchedulerConfig) -> Self {
        Self {
            waiting: Mutex::default(),
            limits,
        }
    }

    /// Requests that wait.
    pub(crate) fn n_requests(&self) -> usize {
        self.lock().all.n_requests
    }

    fn lock(&self) -> MutexGuard<'_, WaitingRequests> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a prompt.
    fn enter(
        self: &Arc<Self>,
        n_prompt: usize,
        tenant: Tenant,
    ) -> Result<QueuePlace, RequestError> {
        let mut waiting = self.lock();
        self.limits.check_queue(waiting.all, n_prompt)?;
        let own = waiting.of.get(&tenant.id).copied().unwrap_or(0);
        tenant.limits.check_queue(own)?;
        waiting.all.n_requests += 1;
        waiting.all.n_tokens += n_prompt;
        waiting.of.insert(tenant.id, own + 1);
        drop(waiting);
        Ok(QueuePlace {
            queue: Arc::clone(self),
            n_prompt,
            tenant: tenant.id,
        })
    }
}

/// A place in the queue, until it is dropped.
#[derive(Debug)]
pub(super) struct QueuePlace {
    queue: Arc<QueueSize>,
    n_prompt: usize,
    tenant: TenantId,
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let mut waiting = self.queue.lock();
        waiting.all.n_requests = waiting.all.n_requests.saturating_sub(1);
        waiting.all.n_tokens = waiting.all.n_tokens.saturating_sub(self.n_prompt);
        if let Some(own) = waiting.of.get_mut(&self.tenant) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                waiting.of.remove(&self.tenant);
            }
        }
    }
}
