//! One text: computed by hand, which is what every other way must give, and by a session.

use std::sync::Arc;

use cellar_engine::sampler::{SamplerConfig, Step};
use cellar_engine::session::{
    Activity, PromptProgress, Retention, ServiceConfig, ServiceError, ServiceExtras, Session,
    TextRequest, TextStream, TokenPiece, Usage,
};
use cellar_engine::{
    Completion, CompletionOptions, Engine, EngineError, FinishReason, LongContext, OutputRow,
    TokenLogprobs,
};
use kv_backend::Backend;
use kv_core::batch::Batch;
use kv_core::memory::Memory;
use kv_core::{Pos, SeqId, TokenId};
use model_core::tokenizer::Tokenizer;

/// Computes a text in a sequence, which may hold tokens already, one token at a time.
pub fn by_hand<B: Backend>(
    engine: &mut Engine<B>,
    seq: SeqId,
    prompt: &[TokenId],
    completion: &mut Completion,
    long_context: LongContext,
) {
    completion.accept_prompt(prompt);
    let n_ctx = engine.settings().n_ctx as usize;
    let n_ubatch = engine.settings().n_ubatch as usize;
    let mut grouped_to = 0;
    let mut next = prompt.to_vec();
    while completion.finish_reason().is_none() {
        let n_used = match long_context {
            LongContext::Group(_) => engine.memory().n_tokens(seq) as usize,
            _ => engine.memory().next_pos(seq).as_usize(),
        };
        if n_used + next.len() > n_ctx {
            let is_shifted = match long_context {
                LongContext::Shift { n_keep } => match engine.shift_context(seq, n_keep) {
                    Err(EngineError::NothingToDiscard { .. }) => false,
                    shifted => shifted.map(|_| true).unwrap(),
                },
                _ => false,
            };
            if !is_shifted {
                completion.end(FinishReason::ContextFull);
                return;
            }
        }
        for chunk in next.chunks(n_ubatch) {
            if let LongContext::Group(group) = long_context {
                while engine.memory().next_pos(seq).0 >= grouped_to + group.width() {
                    engine.group(seq, Pos(grouped_to), group).unwrap();
                    grouped_to += group.n_positions();
                }
            }
            let batch = Batch::prompt(seq, chunk.iter().copied());
            engine.decode(&batch).unwrap();
        }
        let row = engine.last_logits().last().unwrap().to_vec();
        completion.take(OutputRow::Logits(&row)).unwrap();
        next = completion.tokens().last().copied().into_iter().collect();
    }
}

/// A greedy request for so many tokens, which may go on when it has ended.
pub fn greedy(prompt: Vec<TokenId>, n_predict: usize) -> TextRequest {
    TextRequest {
        prompt,
        options: CompletionOptions {
            sampler: SamplerConfig::greedy(),
            n_predict: Some(n_predict),
            ..CompletionOptions::default()
        },
        retention: Retention::Park,
        ..TextRequest::default()
    }
}

/// The same with a step of the sampler.
pub fn with_step(mut request: TextRequest, step: impl Step + 'static) -> TextRequest {
    request.steps.push(Box::new(step));
    request
}

/// A session with one text.
#[derive(Debug)]
pub struct Writer<B: Backend> {
    pub session: Session<B>,
    pub stream: TextStream,
    pub text: String,
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<TokenLogprobs>,
    pub last: Vec<TokenPiece>,
}

impl<B: Backend> Writer<B> {
    /// The text of a request, of which nothing is computed.
    pub fn new(
        engine: Engine<B>,
        tokenizer: &Arc<Tokenizer>,
        request: TextRequest,
    ) -> Result<Self, ServiceError> {
        Self::with(engine, tokenizer, request, ServiceExtras::default())
    }

    /// The same with a draft model.
    pub fn with(
        engine: Engine<B>,
        tokenizer: &Arc<Tokenizer>,
        request: TextRequest,
        extras: ServiceExtras,
    ) -> Result<Self, ServiceError> {
        let config = ServiceConfig::default();
        let mut session = Session::with(engine, tokenizer, &config, extras)?;
        let stream = session.submit(request)?;
        Ok(Self {
            session,
            stream,
            text: String::new(),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            last: Vec::new(),
        })
    }

    /// Computes the prompt, calling `on_progress` after each step that computes some of it.
    pub fn read_prompt(&mut self, mut on_progress: impl FnMut(PromptProgress)) {
        let mut n_done = 0;
        while !self.stream.has_read_prompt() && self.session.step() == Activity::Busy {
            let progress = self.stream.progress();
            if progress.n_done > n_done {
                n_done = progress.n_done;
                on_progress(progress);
            }
        }
    }

    /// The text of the next tokens.
    pub fn next(&mut self) -> Result<Option<String>, ServiceError> {
        self.last = self
            .session
            .next_tokens(&mut self.stream)?
            .unwrap_or_default();
        for piece in &self.last {
            self.text += &piece.text;
            self.tokens.extend(piece.token);
            self.logprobs.extend(piece.logprobs.clone());
        }
        let texts = self.last.iter().map(|piece| piece.text.as_str());
        Ok((!self.last.is_empty()).then(|| texts.collect()))
    }

    /// Writes to the end.
    pub fn finish(mut self) -> Self {
        while self.next().unwrap().is_some() {}
        self
    }

    pub fn finish_reason(&self) -> FinishReason {
        self.stream.finish_reason().unwrap()
    }

    pub fn usage(&self) -> Usage {
        self.stream.usage()
    }
}
