//! [`Verifier`]: computes a part of the answered texts again, when nothing else is computed, and
//! compares them.
//!
//! A text is to be what it is alone, whatever was computed with it and reused for it. Invariant: no
//! request waits for a verification, which has the lowest priority and ends with the server. Knows
//! no API.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cellar_engine::serve::{PrefixUse, Priority, Service, TextRequest};
use cellar_engine::{CompletionOptions, FinishReason, Logprobs};
use kv_backend::BoxedBackend;
use kv_core::TokenId;
use model_core::picture::PictureRun;

use crate::app::{App, Phase};
use crate::body_worker::run_blocking;
use crate::generate::AnswerForm;
use crate::model::ServedModel;

/// Texts that wait; one that comes then is not verified.
const MAX_WAITING: usize = 64;

/// The time between two looks whether something else is computed.
const LOOK: Duration = Duration::from_millis(50);

/// Chooses texts, and has those that wait.
#[derive(Debug)]
pub(crate) struct Verifier {
    /// The part of texts that are verified.
    part: f64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Texts that could have been chosen.
    n_texts: u64,
    waiting: VecDeque<AnsweredText>,
    /// True while a task computes those that wait.
    is_running: bool,
}

/// The comparison of a text with what it is when it is computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verification {
    /// The same.
    Same,
    /// Another.
    Other,
}

/// A request that may be computed again.
#[derive(Debug)]
pub(crate) struct Sample {
    model: Weak<ServedModel>,
    prompt: Vec<TokenId>,
    pictures: Vec<PictureRun>,
    adapters: Option<Arc<[f32]>>,
    form: Arc<AnswerForm>,
    options: CompletionOptions,
}

/// The same with the tokens that were chosen.
#[derive(Debug)]
struct AnsweredText {
    sample: Sample,
    tokens: Vec<TokenId>,
}

impl Verifier {
    /// One that chooses this part of all texts, from 0 to 1.
    pub(crate) fn new(part: f64) -> Self {
        Self {
            part,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is needed to compute text number `number` of a request again, where it is chosen.
    pub(crate) fn sample(
        &self,
        model: &Arc<ServedModel>,
        request: &TextRequest,
        form: &Arc<AnswerForm>,
        number: u64,
    ) -> Option<Sample> {
        if self.part <= 0.0 {
            return None;
        }
        let mut state = self.lock();
        let before = (state.n_texts as f64 * self.part).floor();
        state.n_texts += 1;
        let is_chosen = (state.n_texts as f64 * self.part).floor() > before;
        if !is_chosen || state.waiting.len() >= MAX_WAITING {
            return None;
        }
        let mut options = CompletionOptions {
            logprobs: Logprobs::Off,
            prompt_logprobs: Logprobs::Off,
            ..request.options.clone()
        };
        options.sampler.seed = options.sampler.seed.wrapping_add(number);
        Some(Sample {
            model: Arc::downgrade(model),
            prompt: request.prompt.clone(),
            pictures: request.pictures.clone(),
            adapters: request.adapters.clone(),
            form: Arc::clone(form),
            options,
        })
    }
}

impl App {
    /// Has a text computed again that ended so: later, where nothing else is computed.
    pub(crate) fn verify(&self, sample: Sample, tokens: &[TokenId], finish: &FinishReason) {
        // One that was cut off ends elsewhere.
        if matches!(finish, FinishReason::Cancelled | FinishReason::ContextFull) {
            return;
        }
        let mut state = self.verifier().lock();
        state.waiting.push_back(AnsweredText {
            sample,
            tokens: tokens.to_vec(),
        });
        if !std::mem::replace(&mut state.is_running, true) {
            tokio::spawn(verify_all(self.clone()));
        }
    }

    fn next_to_verify(&self) -> Option<AnsweredText> {
        let mut state = self.verifier().lock();
        let next = state.waiting.pop_front();
        state.is_running = next.is_some();
        next
    }
}

/// Computes what waits, one text after the other.
async fn verify_all(app: App) {
    while let Some(text) = app.next_to_verify() {
        let ended = tokio::select! {
            () = app.closing() => return,
            ended = verify(&app, &text) => ended,
        };
        if let Some(verified) = ended {
            app.metrics().verified(verified);
        }
    }
}

/// The comparison with a text that is computed again; `None` where it cannot be computed any more.
async fn verify(app: &App, text: &AnsweredText) -> Option<Verification> {
    let sample = &text.sample;
    let form = Arc::clone(&sample.form);
    let held = run_blocking(move || form.hold()).await.ok()?;
    let model = loop {
        let model = sample.model.upgrade()?;
        if app.phase() != Phase::Open {
            return None;
        }
        if is_idle(model.service().ok()?) {
            break model;
        }
        // A model that is unloaded meanwhile goes.
        drop(model);
        tokio::time::sleep(LOOK).await;
    };
    let request = TextRequest {
        prompt: sample.prompt.clone(),
        pictures: sample.pictures.clone(),
        adapters: sample.adapters.clone(),
        options: sample.options.clone(),
        steps: held.steps,
        priority: Priority::Batch,
        prefix: PrefixUse::Off,
        ..TextRequest::default()
    };
    let mut stream = model.service().ok()?.submit(request).ok()?;
    while let Ok(Some(_)) = poll_fn(|cx| stream.poll_piece(cx)).await {}
    let again = stream.finish().ok()?.tokens;
    let differs = text.tokens.iter().zip(&again).position(|(a, b)| a != b);
    let same_length = text.tokens.len() == again.len();
    let shorter = text.tokens.len().min(again.len());
    let Some(at) = differs.or((!same_length).then_some(shorter)) else {
        return Some(Verification::Same);
    };
    let token = |tokens: &[TokenId]| tokens.get(at).map(|token| token.0);
    tracing::error!(
        model = model.id(),
        n_prompt = sample.prompt.len(),
        seed = sample.options.sampler.seed,
        at,
        answered = token(&text.tokens),
        again = token(&again),
        "a text is not the same when it is computed again: please report this"
    );
    Some(Verification::Other)
}

fn is_idle(service: &Service<BoxedBackend>) -> bool {
    service.n_queued() == 0 && service.status().n_running == 0
}
