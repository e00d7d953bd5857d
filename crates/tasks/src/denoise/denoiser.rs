//! [`Denoiser`]: a diffusion model on a backend. [`Denoising`]: the text that it fills.
//!
//! Invariant: a mask is filled once, and never by another mask; a step that fails changes nothing.
//! Knows no strings.

use kv_backend::Backend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use model_core::architecture::{MaskPlace, OutputKind};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::options::{DenoiseOptions, FillOrder};
use super::schedule::FillStep;
use cellar_engine::CancelFlag;
use cellar_engine::Engine;
use cellar_engine::EngineError;
use cellar_engine::sampler::{Bias, LogitBias, Sampler};

/// A diffusion language model on a backend.
///
/// ```no_run
/// # fn fill<B: kv_backend::Backend>(
/// #     engine: cellar_engine::Engine<B>,
/// #     tokenizer: &model_core::tokenizer::Tokenizer,
/// #     mask: kv_core::TokenId,
/// # ) -> Result<(), cellar_engine::EngineError> {
/// use cellar_tasks::{DenoiseOptions, Denoiser};
/// use model_core::tokenizer::EncodeOptions;
///
/// let mut denoiser = Denoiser::new(engine, mask)?;
/// let prompt = tokenizer.encode("The sky is", EncodeOptions::PROMPT);
/// let mut text = denoiser.start(&prompt, DenoiseOptions::default())?;
/// while text.step(&mut denoiser)? {}
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Denoiser<B: Backend> {
    engine: Engine<B>,
    place: MaskPlace,
    mask: TokenId,
}

/// The stream of random numbers of [`FillOrder::Random`]; tokens take stream 0, XTC takes 1.
const FILL_ORDER_STREAM: u64 = 2;

/// A text whose masks are filled.
#[derive(Debug)]
pub struct Denoising {
    /// The prompt, and behind it the text with its masks.
    tokens: Vec<TokenId>,
    n_prompt: usize,
    /// Which tokens of the text are found.
    found: Vec<bool>,
    steps: Vec<FillStep>,
    n_done: usize,
    guidance: f32,
    order: FillOrder,
    sampler: Sampler,
    rng: ChaCha8Rng,
    cancel: CancelFlag,
}

/// A token for a mask, and how sure the model is of it.
#[derive(Clone, Copy, Debug)]
struct Guess {
    /// Where it is in the text.
    at: usize,
    token: TokenId,
    confidence: f64,
}

impl<B: Backend> Denoiser<B> {
    /// A denoiser over an engine ([`DenoiseOptions::engine_config`]), and the token that stands for
    /// a mask ([`SpecialIds::mask`](model_core::tokenizer::SpecialIds::mask)).
    ///
    /// # Errors
    /// [`EngineError::OtherOutput`] where its model is no diffusion model.
    pub fn new(engine: Engine<B>, mask: TokenId) -> Result<Self, EngineError> {
        let OutputKind::MaskLogits(place) = engine.model().output() else {
            return Err(EngineError::other_output(engine.model(), "logits of masks"));
        };
        Ok(Self {
            engine,
            place,
            mask,
        })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// A text of masks behind a prompt.
    ///
    /// # Errors
    /// [`EngineError::Config`] where an option makes no sense, [`EngineError::TextTooLong`] where
    /// prompt and masks do not fit the engine.
    pub fn start(
        &self,
        prompt: &[TokenId],
        options: DenoiseOptions,
    ) -> Result<Denoising, EngineError> {
        options.check()?;
        let n_text = options.n_tokens;
        let settings = self.engine.settings();
        let limit = settings.n_ubatch / options.n_seqs().max(1);
        let limit = limit.min(settings.n_ctx) as usize;
        let n_tokens = prompt.len().saturating_add(n_text);
        if n_tokens > limit {
            return Err(EngineError::TextTooLong {
                index: 0,
                n_tokens,
                limit,
            });
        }
        // The scores of the first token would stand before it.
        if prompt.is_empty() && self.place == MaskPlace::Before {
            return Err(EngineError::EmptyText { index: 0 });
        }
        let mut rng = ChaCha8Rng::seed_from_u64(options.sampler.seed);
        rng.set_stream(FILL_ORDER_STREAM);
        let mut sampler = options.sampler;
        // No mask is filled with a mask.
        sampler.logit_bias.push(LogitBias {
            token: self.mask,
            bias: Bias::Ban,
        });
        let mut tokens = prompt.to_vec();
        tokens.resize(n_tokens, self.mask);
        Ok(Denoising {
            tokens,
            n_prompt: prompt.len(),
            found: vec![false; n_text],
            steps: options.schedule.steps(n_text, options.n_steps),
            n_done: 0,
            guidance: options.guidance,
            order: options.order,
            sampler: Sampler::new(sampler)?,
            rng,
            cancel: options.cancel,
        })
    }

    /// The logits of the masks at these places of a text, `[places, vocab]`: a copy.
    fn mask_logits(&mut self, text: &Denoising, places: &[usize]) -> Result<Vec<f32>, EngineError> {
        let n_shift = match self.place {
            MaskPlace::Own => 0,
            MaskPlace::Before => 1,
        };
        let mut wanted = vec![false; text.tokens.len()];
        for place in places {
            wanted[text.n_prompt + place - n_shift] = true;
        }
        let n_seqs = if text.guidance > 0.0 { 2 } else { 1 };
        let mut batch = Batch::new();
        for seq in 0..n_seqs {
            for (at, (&token, &wanted)) in text.tokens.iter().zip(&wanted).enumerate() {
                let token = if seq == 1 && at < text.n_prompt {
                    self.mask
                } else {
                    token
                };
                let entry = batch.push_token(token).in_sequence(SeqId(seq));
                if wanted {
                    entry.with_output();
                }
            }
        }
        let _removed = self.engine.clear();
        let n_vocab = self.engine.settings().output_width();
        let logits = self.engine.decode_masks(&batch, &text.cancel)?;
        let n_values = places.len() * n_vocab;
        let (with, without) = logits
            .values()
            .split_at(n_values.min(logits.values().len()));
        let mut rows = with.to_vec();
        for (value, &without) in rows.iter_mut().zip(without) {
            *value = without + (text.guidance + 1.0) * (*value - without);
        }
        Ok(rows)
    }

    /// The logits of all rows of a text, `[tokens, vocab]`, as the graph gives them: with
    /// [`MaskPlace::Before`], the row of a token is of the mask behind it.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn logits(&mut self, tokens: &[TokenId]) -> Result<Vec<f32>, EngineError> {
        let mut batch = Batch::new();
        for &token in tokens {
            batch.push_token(token).in_sequence(SeqId(0)).with_output();
        }
        let _removed = self.engine.clear();
        let logits = self.engine.decode_masks(&batch, &CancelFlag::default())?;
        Ok(logits.values().to_vec())
    }
}

impl Denoising {
    /// Steps that fill all masks.
    pub fn n_steps(&self) -> usize {
        self.steps.len()
    }

    /// Steps that were computed.
    pub fn n_done(&self) -> usize {
        self.n_done
    }

    /// The tokens behind the prompt, `None` where there is a mask yet.
    pub fn text(&self) -> impl Iterator<Item = Option<TokenId>> + '_ {
        let text = self.tokens.iter().skip(self.n_prompt);
        text.zip(&self.found)
            .map(|(&token, &found)| found.then_some(token))
    }

    /// Computes the text once and fills masks. Returns whether any are left.
    ///
    /// # Errors
    /// [`EngineError`]: the text is what it was, and the step can be tried again.
    pub fn step<B: Backend>(&mut self, denoiser: &mut Denoiser<B>) -> Result<bool, EngineError> {
        let Some(step) = self.steps.get(self.n_done).cloned() else {
            return Ok(false);
        };
        let places: Vec<usize> = step.places.filter(|&at| !self.found[at]).collect();
        let rows = denoiser.mask_logits(self, &places)?;
        let mut guesses = Vec::with_capacity(places.len());
        for (&at, row) in places
            .iter()
            .zip(rows.chunks_exact(rows.len() / places.len().max(1)))
        {
            let token = self.sampler.sample(row)?;
            let confidence = self.order.confidence(row, token, &mut self.rng);
            guesses.push(Guess {
                at,
                token,
                confidence,
            });
        }
        // Stable: of equal ones the first in the text.
        guesses.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
        for guess in guesses.into_iter().take(step.n_fill) {
            self.tokens[self.n_prompt + guess.at] = guess.token;
            self.found[guess.at] = true;
        }
        self.n_done += 1;
        Ok(self.n_done < self.steps.len())
    }
}
