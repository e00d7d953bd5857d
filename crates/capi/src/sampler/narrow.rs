//! Samplers that leave candidates out or change the sharpness of their logits: top-k, top-p, min-p,
//! typical, temperatures, XTC, top-nσ.
//!
//! Invariant: at least one candidate stays, and `min_keep` of them where there are so many. Each
//! follows llama.cpp's arithmetic, so that the same candidates stay.

use std::ffi::CStr;

use crate::abi::TokenData;
use crate::ffi::{Handle, c_api};
use crate::sampler::array::Array;
use crate::sampler::random::Random;
use crate::sampler::{Sampler, Sampling, new_sampler};

/// What such a sampler does.
#[derive(Clone)]
enum Narrow {
    TopK(i32),
    TopP { p: f32, min_keep: usize },
    MinP { p: f32, min_keep: usize },
    Typical { p: f32, min_keep: usize },
    Temperature(f32),
    Dynamic(Dynamic),
    Xtc(Box<Xtc>),
    TopNSigma(f32),
}

/// A temperature that depends on how sure the model is.
#[derive(Clone, Copy)]
struct Dynamic {
    temperature: f32,
    delta: f32,
    exponent: f32,
}

/// Leaves out the likeliest candidates, by chance.
#[derive(Clone)]
struct Xtc {
    probability: f32,
    threshold: f32,
    min_keep: usize,
    random: Random,
}

impl Sampling for Narrow {
    fn name(&self) -> &'static CStr {
        match self {
            Self::TopK(k) if *k <= 0 => c"?top-k",
            Self::TopK(_) => c"top-k",
            Self::TopP { p, .. } if *p >= 1.0 => c"?top-p",
            Self::TopP { .. } => c"top-p",
            Self::MinP { p, .. } if *p <= 0.0 => c"?min-p",
            Self::MinP { .. } => c"min-p",
            Self::Typical { p, .. } if *p >= 1.0 => c"?typical",
            Self::Typical { .. } => c"typical",
            Self::Temperature(t) if *t == 1.0 => c"?temp",
            Self::Temperature(_) => c"temp",
            Self::Dynamic(dynamic) if dynamic.is_idle() => c"?temp-ext",
            Self::Dynamic(_) => c"temp-ext",
            Self::Xtc(xtc) if xtc.is_idle() => c"?xtc",
            Self::Xtc(_) => c"xtc",
            Self::TopNSigma(n) if *n <= 0.0 => c"?top-n-sigma",
            Self::TopNSigma(_) => c"top-n-sigma",
        }
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if array.is_empty() {
            return;
        }
        match self {
            Self::TopK(k) => {
                if let Ok(k @ 1..) = usize::try_from(*k) {
                    array.keep_top(k);
                }
            }
            Self::TopP { p, min_keep } => top_p(array, *p, *min_keep),
            Self::MinP { p, min_keep } => min_p(array, *p, *min_keep),
            Self::Typical { p, min_keep } => typical(array, *p, *min_keep),
            Self::Temperature(temperature) => divide(array, *temperature),
            Self::Dynamic(dynamic) => dynamic.apply(array),
            Self::Xtc(xtc) => xtc.apply(array),
            Self::TopNSigma(n) => top_n_sigma(array, *n),
        }
    }

    fn reset(&mut self) {
        if let Self::Xtc(xtc) = self {
            xtc.random.reset();
        }
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

fn top_p(array: &mut Array<'_>, p: f32, min_keep: usize) {
    if p >= 1.0 {
        return;
    }
    // The sum of the probabilities is made before they are sorted.
    array.softmax();
    array.sort();
    let mut sum = 0.0;
    let tokens = array.tokens();
    let is_enough = |(index, token): (usize, &TokenData)| {
        sum += token.p;
        sum >= p && index + 1 >= min_keep
    };
    let last = tokens.iter().enumerate().position(is_enough);
    if let Some(last) = last {
        array.truncate(last + 1);
    }
}

fn min_p(array: &mut Array<'_>, p: f32, min_keep: usize) {
    if p <= 0.0 {
        return;
    }
    let least = array.max() + p.ln();
    if !array.is_sorted() {
        let tokens = array.tokens().iter();
        let kept: Vec<TokenData> = tokens
            .filter(|token| token.logit >= least)
            .copied()
            .collect();
        if !kept.is_empty() && kept.len() >= min_keep {
            array.replace(&kept);
            return;
        }
        array.sort();
    }
    let mut behind_first = array.tokens().iter().enumerate().skip(1);
    let end = behind_first.find(|(index, token)| token.logit < least && *index >= min_keep);
    if let Some((end, _)) = end {
        array.truncate(end);
    }
}

fn typical(array: &mut Array<'_>, p: f32, min_keep: usize) {
    if p >= 1.0 {
        return;
    }
    array.sorted_softmax();
    let tokens = array.tokens();
    let entropy: f32 = tokens
        .iter()
        .map(|token| -token.p * token.p.ln())
        .filter(|x| !x.is_nan())
        .sum();
    let mut by_distance = tokens.to_vec();
    let distance = |token: &TokenData| (-token.p.ln() - entropy).abs();
    by_distance.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    let mut sum = 0.0;
    let is_enough = |(index, token): (usize, &TokenData)| {
        sum += token.p;
        sum > p && index + 1 >= min_keep
    };
    let last = by_distance.iter().enumerate().position(is_enough);
    by_distance.truncate(last.map_or(by_distance.len(), |last| last + 1));
    array.replace(&by_distance);
    array.set_unsorted();
}

fn divide(array: &mut Array<'_>, temperature: f32) {
    if temperature > 0.0 {
        array
            .tokens()
            .iter_mut()
            .for_each(|token| token.logit /= temperature);
        return;
    }
    let max = array.max();
    let mut is_found = false;
    for token in array.tokens() {
        if token.logit == max && !is_found {
            is_found = true;
        } else {
            token.logit = f32::NEG_INFINITY;
        }
    }
}

impl Dynamic {
    fn is_idle(self) -> bool {
        self.temperature == 1.0 && self.delta <= 0.0
    }

    fn apply(self, array: &mut Array<'_>) {
        if self.delta <= 0.0 {
            divide(array, self.temperature);
            return;
        }
        let n = array.tokens().len();
        if n <= 1 {
            return;
        }
        let [least, most] = [
            (self.temperature - self.delta).max(0.0),
            self.temperature + self.delta,
        ];
        array.sorted_softmax();
        let tokens = array.tokens().iter().filter(|token| token.p > 0.0);
        let entropy: f32 = tokens.map(|token| -token.p * token.p.ln()).sum();
        let share = entropy / (n as f32).ln();
        divide(array, least + (most - least) * share.powf(self.exponent));
        array.softmax();
    }
}

impl Xtc {
    fn is_idle(&self) -> bool {
        self.probability <= 0.0 || self.threshold > 0.5
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if self.is_idle() || array.tokens().len() < 2 {
            return;
        }
        if self.random.unit_f32() > self.probability {
            return;
        }
        array.sorted_softmax();
        let tokens = array.tokens();
        let n_likely = tokens
            .iter()
            .take_while(|token| token.p >= self.threshold)
            .count();
        let n_dropped = n_likely.saturating_sub(1);
        if n_dropped > 0 && tokens.len() - n_dropped >= self.min_keep {
            array.skip(n_dropped);
        }
    }
}

fn top_n_sigma(array: &mut Array<'_>, n: f32) {
    if n <= 0.0 || array.tokens().len() <= 1 {
        return;
    }
    let max = array.max();
    let tokens = array.tokens();
    let finite = || {
        tokens
            .iter()
            .map(|token| token.logit)
            .filter(|&l| l != f32::NEG_INFINITY)
    };
    let count = finite().count().max(1) as f32;
    let mean = finite().sum::<f32>() / count;
    let squares: f32 = finite().map(|logit| (logit - mean) * (logit - mean)).sum();
    let least = max - n * (squares / count).sqrt();
    for token in array.tokens() {
        if token.logit < least {
            token.logit = f32::NEG_INFINITY;
        }
    }
}

c_api! {
    fn llama_sampler_init_top_k(k: i32) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Narrow::TopK(k))
    }

    fn llama_sampler_init_top_p(p: f32, min_keep: usize) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Narrow::TopP { p, min_keep })
    }

    fn llama_sampler_init_min_p(p: f32, min_keep: usize) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Narrow::MinP { p, min_keep })
    }

    fn llama_sampler_init_typical(p: f32, min_keep: usize) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Narrow::Typical { p, min_keep })
    }

    fn llama_sampler_init_temp(temperature: f32) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Narrow::Temperature(temperature))
    }

    fn llama_sampler_init_temp_ext(temperature: f32, delta: f32, exponent: f32)
        -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Narrow::Dynamic(Dynamic { temperature, delta, exponent }))
    }

    fn llama_sampler_init_xtc(probability: f32, threshold: f32, min_keep: usize, seed: u32)
        -> Handle<Sampler> = Handle::NULL; {
        let random = Random::new(seed);
        new_sampler(Narrow::Xtc(Box::new(Xtc { probability, threshold, min_keep, random })))
    }

    fn llama_sampler_init_top_n_sigma(n: f32) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Narrow::TopNSigma(n))
    }
}
