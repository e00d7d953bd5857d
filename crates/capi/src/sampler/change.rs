//! Samplers that change logits by token: penalties, biases, and infill.
//!
//! Invariant: a token that is not mentioned keeps its logit. Knows nothing of the model.

use std::collections::{HashMap, VecDeque};
use std::ffi::CStr;
use std::sync::Arc;

use kv_core::TokenId;
use model_core::tokenizer::{SpecialPieces, Tokenizer};

use crate::abi::{TokenBias, TokenData};
use crate::ffi::{Handle, In, c_api};
use crate::model::Vocab;
use crate::sampler::array::Array;
use crate::sampler::{Sampler, Sampling, new_sampler};
use crate::vocab::{piece, shared};

/// Makes recent tokens less likely.
#[derive(Clone)]
struct Penalties {
    last_n: usize,
    repeat: f32,
    frequency: f32,
    presence: f32,
    recent: VecDeque<i32>,
    counts: HashMap<i32, u32>,
}

impl Penalties {
    fn is_idle(&self) -> bool {
        self.last_n == 0 || (self.repeat == 1.0 && self.frequency == 0.0 && self.presence == 0.0)
    }
}

impl Sampling for Penalties {
    fn name(&self) -> &'static CStr {
        if self.is_idle() {
            c"?penalties"
        } else {
            c"penalties"
        }
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if self.is_idle() {
            return;
        }
        for token in array.tokens() {
            let Some(&n) = self.counts.get(&token.id) else {
                continue;
            };
            if token.logit <= 0.0 {
                token.logit *= self.repeat;
            } else {
                token.logit /= self.repeat;
            }
            token.logit -= n as f32 * self.frequency + self.presence;
        }
        array.set_unsorted();
    }

    fn accept(&mut self, token: i32) {
        if self.last_n == 0 {
            return;
        }
        if self.recent.len() >= self.last_n
            && let Some(oldest) = self.recent.pop_front()
        {
            let n = self.counts.entry(oldest).or_default();
            *n = n.saturating_sub(1);
            if *n == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.recent.push_back(token);
        *self.counts.entry(token).or_default() += 1;
    }

    fn reset(&mut self) {
        self.recent.clear();
        self.counts.clear();
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

/// Adds to the logits of tokens.
#[derive(Clone)]
struct Biases(Vec<TokenBias>);

impl Sampling for Biases {
    fn name(&self) -> &'static CStr {
        if self.0.is_empty() {
            c"?logit-bias"
        } else {
            c"logit-bias"
        }
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        let tokens = array.tokens();
        let mut others = Vec::new();
        for change in &self.0 {
            let place = usize::try_from(change.token).ok();
            match place.and_then(|place| tokens.get_mut(place)) {
                Some(token) if token.id == change.token => token.logit += change.bias,
                _ => others.push(change),
            }
        }
        if others.is_empty() {
            return;
        }
        for token in tokens {
            if let Some(change) = others.iter().find(|change| change.token == token.id) {
                token.logit += change.bias;
            }
        }
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

/// For texts that fill a gap: ends them in time, and counts tokens with a common beginning as one.
#[derive(Clone)]
struct Infill(Arc<Tokenizer>);

/// Below this probability a token is left out.
const INFILL_LEAST: f32 = 0.2;

impl Infill {
    fn is_end(&self, token: &TokenData) -> bool {
        u32::try_from(token.id).is_ok_and(|id| self.0.is_end_of_generation(TokenId(id)))
    }

    /// Gives the probability of tokens that begin with another one to the likelier of both.
    fn combine(&self, tokens: &mut [TokenData]) {
        let texts: Vec<Vec<u8>> = tokens
            .iter()
            .map(|token| piece(&self.0, token.id, SpecialPieces::Skip))
            .collect();
        for short in 0..tokens.len() {
            for long in 0..tokens.len() {
                let is_out = |token: &TokenData| token.logit == f32::NEG_INFINITY;
                if is_out(&tokens[short]) {
                    break;
                }
                let is_prefix = !texts[short].is_empty() && texts[long].starts_with(&texts[short]);
                if short == long || is_out(&tokens[long]) || !is_prefix {
                    continue;
                }
                let (to, from) = if tokens[long].p > tokens[short].p {
                    (long, short)
                } else {
                    (short, long)
                };
                tokens[to].p += tokens[from].p;
                tokens[from].logit = f32::NEG_INFINITY;
                tokens[from].p = 0.0;
            }
        }
    }

    /// Keeps ends and tokens of at least this probability, and makes them add up to 1 again.
    fn keep(&self, array: &mut Array<'_>, least: f32) {
        let tokens = array.tokens().iter();
        let is_kept = |token: &&TokenData| token.p >= least || self.is_end(token);
        let mut kept: Vec<TokenData> = tokens.filter(is_kept).copied().collect();
        let total: f32 = kept.iter().map(|token| token.p).sum();
        kept.iter_mut().for_each(|token| token.p /= total);
        array.replace(&kept);
    }
}

impl Sampling for Infill {
    fn name(&self) -> &'static CStr {
        c"infill"
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if array.is_empty() {
            return;
        }
        array.sorted_softmax();
        let n = array.tokens().len();
        let ends: f32 = array
            .tokens()
            .iter()
            .filter(|t| self.is_end(t))
            .map(|t| t.p)
            .sum();
        let texts: f32 = array
            .tokens()
            .iter()
            .filter(|t| !self.is_end(t))
            .map(|t| t.p)
            .sum();
        if 3.0 * ends * n as f32 > texts {
            self.keep(array, f32::INFINITY);
            return;
        }
        self.combine(array.tokens());
        let is_text = |token: &TokenData| !self.is_end(token);
        let n_likely = array
            .tokens()
            .iter()
            .filter(|t| is_text(t) && t.p >= INFILL_LEAST)
            .count();
        if n_likely == 0 {
            let ids = self.0.special_ids();
            if let Some(end) = ids.eot.or(ids.eos) {
                array.truncate(1);
                array.tokens()[0].id = end.0 as i32;
                array.tokens()[0].logit = 1.0;
            }
            return;
        }
        self.keep(array, INFILL_LEAST);
        self.keep(array, 1.0 / (n_likely as f32 + 1.0));
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

c_api! {
    fn llama_sampler_init_penalties(
        _n_vocab: i32, last_n: i32, repeat: f32, frequency: f32, presence: f32,
    ) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Penalties {
            last_n: usize::try_from(last_n).unwrap_or(0),
            repeat,
            frequency,
            presence,
            recent: VecDeque::new(),
            counts: HashMap::new(),
        })
    }

    fn llama_sampler_init_logit_bias(_n_vocab: i32, n: i32, biases: In<TokenBias>)
        -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Biases(biases.slice(usize::try_from(n).unwrap_or(0)).to_vec()))
    }

    fn llama_sampler_init_infill(vocab: Handle<Vocab>) -> Handle<Sampler> = Handle::NULL; {
        let model = shared("llama_sampler_init_infill", vocab);
        match model.and_then(|model| model.tokenizer.clone()) {
            Some(tokenizer) => new_sampler(Infill(tokenizer)),
            None => Handle::NULL,
        }
    }
}
