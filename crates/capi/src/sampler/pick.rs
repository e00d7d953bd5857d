//! Samplers that choose a token: greedy, by probability, mirostat, adaptive-p.
//!
//! Invariant: the same seed, logits and history choose the token that llama.cpp chooses, as far as
//! floating point allows. Each comes last in a chain.

use std::ffi::CStr;

use crate::abi::{NO_TOKEN, TokenData};
use crate::ffi::{Handle, c_api};
use crate::sampler::array::Array;
use crate::sampler::random::Random;
use crate::sampler::{Sampler, Sampling, new_sampler};

/// Takes the likeliest.
#[derive(Clone)]
struct Greedy;

impl Sampling for Greedy {
    fn name(&self) -> &'static CStr {
        c"greedy"
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        let mut best = 0;
        let tokens = array.tokens();
        for (index, token) in tokens.iter().enumerate() {
            if token.logit > tokens[best].logit {
                best = index;
            }
        }
        let selected = if tokens.is_empty() { -1 } else { best as i64 };
        array.select(selected);
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

/// Draws by probability.
#[derive(Clone)]
struct Draw(Random);

impl Sampling for Draw {
    fn name(&self) -> &'static CStr {
        c"dist"
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if array.is_empty() {
            array.select(-1);
            return;
        }
        let max = array.max();
        let tokens = array.tokens();
        let mut total = 0.0;
        for token in &mut *tokens {
            token.p = (token.logit - max).exp();
            total += f64::from(token.p);
        }
        // One draw for each token, whatever there is to choose from.
        let wanted = total * self.0.unit();
        let mut sum = 0.0;
        let mut selected = None;
        for (index, token) in tokens.iter_mut().enumerate() {
            sum += f64::from(token.p);
            if selected.is_none() && sum >= wanted {
                selected = Some(index);
            }
            token.p = (f64::from(token.p) / total) as f32;
        }
        let last = tokens.len() - 1;
        array.select(selected.unwrap_or(last) as i64);
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }

    fn seed(&self) -> Option<u32> {
        Some(self.0.seed())
    }
}

/// Keeps the surprise of the text near a target.
#[derive(Clone)]
struct Mirostat {
    version: Version,
    tau: f32,
    eta: f32,
    mu: f32,
    random: Random,
}

#[derive(Clone, Copy)]
enum Version {
    /// Estimates the slope of the distribution from the first `m` tokens.
    One { n_vocab: i32, m: i32 },
    /// Leaves out what is too surprising.
    Two,
}

impl Mirostat {
    fn keep_first(&self, array: &mut Array<'_>) {
        let tokens = array.tokens();
        let n_kept = match self.version {
            Version::One { n_vocab, m } => {
                let n = usize::try_from(m.saturating_sub(1)).unwrap_or(0);
                let k = likely(
                    &tokens[..tokens.len().min(n.saturating_add(1))],
                    n_vocab,
                    self.mu,
                );
                k.max(1)
            }
            Version::Two => {
                let is_usual = |token: &&TokenData| -token.p.log2() <= self.mu;
                tokens.iter().take_while(is_usual).count().max(1)
            }
        };
        array.truncate(n_kept);
    }
}

/// Number of tokens that stay, from the slope of the likeliest (arXiv 2007.14966, algorithm 1).
fn likely(first: &[TokenData], n_vocab: i32, mu: f32) -> usize {
    let (mut products, mut squares) = (0.0_f32, 0.0_f32);
    for (i, pair) in first.windows(2).enumerate() {
        let t = ((i + 2) as f32 / (i + 1) as f32).ln();
        let b = (pair[0].p / pair[1].p).ln();
        products += t * b;
        squares += t * t;
    }
    let slope = products / squares;
    let epsilon = slope - 1.0;
    let share = 1.0 - (n_vocab as f32).powf(-epsilon);
    let k = (epsilon * mu.exp2() / share).powf(1.0 / slope);
    // What is no number counts as none.
    k as usize
}

impl Sampling for Mirostat {
    fn name(&self) -> &'static CStr {
        match self.version {
            Version::One { .. } => c"mirostat",
            Version::Two => c"mirostat-v2",
        }
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if array.is_empty() {
            return;
        }
        array.sorted_softmax();
        self.keep_first(array);
        array.softmax();
        let chosen = self.random.draw(array.tokens());
        array.select(chosen as i64);
        let surprise = -array.tokens()[chosen].p.log2();
        self.mu -= self.eta * (surprise - self.tau);
    }

    fn reset(&mut self) {
        self.mu = 2.0 * self.tau;
        self.random.reset();
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }

    fn seed(&self) -> Option<u32> {
        Some(self.random.seed())
    }
}

/// Chooses tokens whose probabilities are near a target, over time.
#[derive(Clone)]
struct Adaptive {
    target: f32,
    decay: f32,
    random: Random,
    sum: f32,
    weight: f32,
    /// The token that was chosen and its probability before.
    pending: (i32, f32),
}

/// The width of the peak around the target, its height, and how fast it falls.
const WIDTH: f32 = 0.3;
const PEAK: f32 = 5.0;
const SHARPNESS: f32 = 10.0;

impl Adaptive {
    fn new(target: f32, decay: f32, seed: u32) -> Self {
        let decay = decay.clamp(0.0, 0.99);
        Self {
            target,
            decay,
            random: Random::new(seed),
            sum: target / (1.0 - decay),
            weight: 1.0 / (1.0 - decay),
            pending: (NO_TOKEN, 0.0),
        }
    }
}

impl Sampling for Adaptive {
    fn name(&self) -> &'static CStr {
        c"adaptive-p"
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if array.is_empty() {
            return;
        }
        array.softmax();
        if self.target < 0.0 {
            let chosen = self.random.draw(array.tokens());
            array.select(chosen as i64);
            return;
        }
        let before: Vec<f32> = array.tokens().iter().map(|token| token.p).collect();
        let target = self.target.clamp(0.0, 1.0);
        let adapted = if self.weight == 0.0 {
            target
        } else {
            (2.0 * target - self.sum / self.weight).clamp(0.0, 1.0)
        };
        for token in array.tokens() {
            if token.logit != f32::NEG_INFINITY {
                let distance = ((token.p - adapted) / WIDTH).abs();
                token.logit = PEAK - SHARPNESS * distance * distance / (1.0 + distance);
            }
        }
        // The order is another one now.
        array.set_unsorted();
        array.softmax();
        let chosen = self.random.draw(array.tokens());
        array.select(chosen as i64);
        self.pending = (array.tokens()[chosen].id, before[chosen]);
    }

    fn accept(&mut self, token: i32) {
        let (pending, p) = self.pending;
        if pending == token && pending != NO_TOKEN {
            self.sum = p + self.decay * self.sum;
            self.weight = 1.0 + self.decay * self.weight;
        }
        self.pending = (NO_TOKEN, 0.0);
    }

    fn reset(&mut self) {
        self.random.reset();
        self.sum = self.target / (1.0 - self.decay);
        self.weight = 1.0 / (1.0 - self.decay);
        self.pending = (NO_TOKEN, 0.0);
    }

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

c_api! {
    fn llama_sampler_init_greedy() -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Greedy)
    }

    fn llama_sampler_init_dist(seed: u32) -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Draw(Random::new(seed)))
    }

    fn llama_sampler_init_mirostat(n_vocab: i32, seed: u32, tau: f32, eta: f32, m: i32)
        -> Handle<Sampler> = Handle::NULL; {
        let version = Version::One { n_vocab, m };
        new_sampler(Mirostat { version, tau, eta, mu: 2.0 * tau, random: Random::new(seed) })
    }

    fn llama_sampler_init_mirostat_v2(seed: u32, tau: f32, eta: f32)
        -> Handle<Sampler> = Handle::NULL; {
        let version = Version::Two;
        new_sampler(Mirostat { version, tau, eta, mu: 2.0 * tau, random: Random::new(seed) })
    }

    fn llama_sampler_init_adaptive_p(target: f32, decay: f32, seed: u32)
        -> Handle<Sampler> = Handle::NULL; {
        new_sampler(Adaptive::new(target, decay, seed))
    }
}
