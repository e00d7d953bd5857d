//! The engine's sampler steps over a program's candidates, and DRY, which is one.
//!
//! Invariant: candidates that a step leaves out get the logit minus infinity; their order and
//! number stay. Knows no kind of step.

use std::ffi::{CStr, c_char};

use cellar_engine::sampler::{CandidateBuffers, Candidates, Dry, DryStep, Step, TokenOrigin};
use kv_core::TokenId;

use crate::abi::TokenData;
use crate::ffi::{CText, Handle, In, c_api};
use crate::log;
use crate::model::Vocab;
use crate::sampler::array::Array;
use crate::sampler::{Sampler, Sampling, new_sampler};
use crate::vocab::shared;

/// More tokens than any vocabulary has: ids from here on are no tokens.
const MAX_IDS: usize = 1 << 24;

/// Memory for the logits of a vocabulary, kept from one token to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    logits: Vec<f32>,
    buffers: CandidateBuffers,
}

impl Row {
    /// Lets a step change the candidates.
    pub(super) fn apply(&mut self, step: &mut dyn Step, array: &mut Array<'_>) {
        let tokens = array.tokens();
        let number = |token: &TokenData| usize::try_from(token.id).ok().filter(|id| *id < MAX_IDS);
        let ids = tokens.iter().filter_map(number);
        let n = ids.max().map_or(0, |id| id + 1).max(self.logits.len());
        self.logits.clear();
        self.logits.resize(n, f32::NEG_INFINITY);
        for token in &*tokens {
            if let Some(id) = number(token) {
                self.logits[id] = token.logit;
            }
        }
        let Ok(mut candidates) = Candidates::new(&self.logits, &mut self.buffers) else {
            return;
        };
        step.apply(&mut candidates);
        let mut kept = vec![f32::NEG_INFINITY; n];
        for candidate in candidates.iter() {
            kept[candidate.token.as_usize()] = candidate.logit;
        }
        for token in tokens {
            let logit = number(token).and_then(|id| kept.get(id));
            token.logit = logit.copied().unwrap_or(f32::NEG_INFINITY);
        }
        array.set_unsorted();
    }
}

/// DRY over a text.
#[derive(Clone)]
struct DrySampler {
    /// `None` where it is turned off.
    step: Option<DryStep>,
    row: Row,
}

impl Sampling for DrySampler {
    fn name(&self) -> &'static CStr {
        if self.step.is_some() { c"dry" } else { c"?dry" }
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if let Some(step) = &mut self.step {
            self.row.apply(step, array);
        }
    }

    fn accept(&mut self, token: i32) {
        if let (Some(step), Ok(id)) = (&mut self.step, u32::try_from(token)) {
            step.accept(TokenId(id), TokenOrigin::Generated);
        }
    }

    fn reset(&mut self) {
        if let Some(step) = &mut self.step {
            step.reset();
        }
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

fn dry(vocab: Handle<Vocab>, dry: Dry) -> Option<DryStep> {
    let tokenizer = shared("llama_sampler_init_dry", vocab)?.tokenizer.as_ref();
    let Some(tokenizer) = tokenizer else {
        log::error("llama_sampler_init_dry: the model's tokens are no text");
        return None;
    };
    Some(DryStep::new(dry, tokenizer))
}

c_api! {
    fn llama_sampler_init_dry(
        vocab: Handle<Vocab>,
        multiplier: f32,
        base: f32,
        allowed_length: i32,
        last_n: i32,
        breakers: In<*const c_char>,
        n_breakers: usize,
    ) -> Handle<Sampler> = Handle::NULL; {
        let breakers = breakers.slice(n_breakers).iter();
        let texts = breakers.filter_map(|&text| CText::of(text).get());
        let config = Dry {
            multiplier,
            base,
            allowed_length: usize::try_from(allowed_length).unwrap_or(0).max(1),
            last_n: Some(usize::try_from(last_n).unwrap_or(0)),
            breakers: texts.filter(|text| !text.is_empty()).map(str::to_owned).collect(),
        };
        let is_active = config.is_active() && base >= 1.0;
        let step = if is_active { dry(vocab, config) } else { None };
        new_sampler(DrySampler { step, row: Row::default() })
    }
}
