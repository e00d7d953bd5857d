//! DRY: a penalty on tokens that would continue a repetition.
//!
//! Invariant: what is penalised depends only on the settings and the last tokens of the text, and
//! no penalty excludes a token. A breaker is a text, found in what the tokens write, however they
//! are cut.

use std::collections::HashMap;
use std::sync::Arc;

use kv_core::TokenId;
use model_core::tokenizer::{SpecialPieces, Tokenizer};

use super::candidates::Candidates;
use super::options::Dry;
use super::steps::{Step, TokenOrigin};

/// The text as far back as it is looked at, and the penalties that follow from it.
#[derive(Clone, Debug)]
pub struct DryStep {
    config: Dry,
    tokenizer: Arc<Tokenizer>,
    text: Vec<TokenId>,
    /// How many of the last tokens come after the last breaker.
    n_unbroken: usize,
    /// The end of the written text, shorter than the longest breaker.
    tail: Vec<u8>,
    /// Kept from one token to the next.
    matches: Vec<usize>,
    longest: HashMap<TokenId, usize>,
}

impl DryStep {
    /// Penalties over an empty text.
    pub fn new(config: Dry, tokenizer: &Arc<Tokenizer>) -> Self {
        Self {
            config,
            tokenizer: Arc::clone(tokenizer),
            text: Vec::new(),
            n_unbroken: 0,
            tail: Vec::new(),
            matches: Vec::new(),
            longest: HashMap::new(),
        }
    }

    /// The tokens that are looked at.
    fn window(&self) -> &[TokenId] {
        let n = self.config.last_n.unwrap_or(usize::MAX);
        &self.text[self.text.len().saturating_sub(n)..]
    }

    /// For each token that followed a repetition of the text's end, how long the longest one was.
    fn find_repetitions(&mut self) {
        let mut matches = std::mem::take(&mut self.matches);
        let mut longest = std::mem::take(&mut self.longest);
        longest.clear();
        let window = self.window();
        suffix_matches(window, &mut matches);
        for (end, &n) in matches.iter().enumerate().skip(1) {
            let n = n.min(self.n_unbroken);
            if n >= self.config.allowed_length {
                // The repetition ends so many tokens before the end; the next one followed it.
                let followed_by = window[window.len() - end];
                let longest = longest.entry(followed_by).or_insert(0);
                *longest = n.max(*longest);
            }
        }
        (self.matches, self.longest) = (matches, longest);
    }

    /// Whether a breaker is complete with the last token, whose text is `piece`.
    fn breaks(&mut self, piece: &[u8]) -> bool {
        let breakers = &self.config.breakers;
        let n_before = self.tail.len();
        self.tail.extend_from_slice(piece);
        let ends_in_piece = |breaker: &String| {
            let mut at = self.tail.windows(breaker.len()).enumerate();
            at.any(|(at, text)| text == breaker.as_bytes() && at + breaker.len() > n_before)
        };
        let breaks = breakers.iter().any(ends_in_piece);
        let longest = breakers.iter().map(String::len).max().unwrap_or(0);
        let n_gone = self.tail.len().saturating_sub(longest.saturating_sub(1));
        self.tail.drain(..n_gone);
        breaks
    }
}

impl Step for DryStep {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        if self.n_unbroken < self.config.allowed_length {
            return;
        }
        self.find_repetitions();
        let Dry {
            multiplier,
            base,
            allowed_length,
            ..
        } = self.config;
        for (&token, &n) in &self.longest {
            let power = libm::pow(f64::from(base), (n - allowed_length) as f64);
            let penalty = f64::from(multiplier) * power;
            candidates.adjust(token, |logit| match logit {
                f32::NEG_INFINITY => logit,
                logit => (f64::from(logit) - penalty).max(f64::from(f32::MIN)) as f32,
            });
        }
    }

    fn accept(&mut self, token: TokenId, _origin: TokenOrigin) {
        self.text.push(token);
        // A token that the vocabulary lacks writes nothing.
        let piece = self.tokenizer.piece(token, SpecialPieces::Render);
        if self.breaks(&piece.unwrap_or_default()) {
            self.n_unbroken = 0;
        } else {
            self.n_unbroken += 1;
        }
        // The window alone is kept; moving it costs one step for each token.
        if let Some(last_n) = self.config.last_n
            && self.text.len() >= 2 * last_n.max(1)
        {
            let n_gone = self.text.len() - last_n;
            self.text.drain(..n_gone);
        }
    }

    fn reset(&mut self) {
        *self = Self::new(self.config.clone(), &self.tokenizer);
    }
}

/// For each number of tokens left out at the end, how many tokens before them equal the text's
/// last ones. The Z function of the reversed text: linear time (Gusfield, "Algorithms on Strings,
/// Trees and Sequences", 1.4).
fn suffix_matches(text: &[TokenId], matches: &mut Vec<usize>) {
    let n = text.len();
    let at = |i: usize| text[n - 1 - i];
    matches.clear();
    matches.resize(n, 0);
    // The match that reaches furthest, as the interval `left..right` of the reversed text.
    let (mut left, mut right) = (0, 0);
    for i in 1..n {
        let mut len = if i < right {
            matches[i - left].min(right - i)
        } else {
            0
        };
        while i + len < n && at(len) == at(i + len) {
            len += 1;
        }
        matches[i] = len;
        if i + len > right {
            (left, right) = (i, i + len);
        }
    }
}

#[cfg(test)]
mod tests {
    use model_core::tokenizer::{TokenizerModel, TokenizerSpec};
    use proptest::prelude::*;

    use super::*;
    use crate::sampler::CandidateBuffers;

    /// Tokens 0 to 7.
    const PIECES: [&str; 8] = ["a", "b", "c", "x\ny", "S", "TO", "P", "\n"];

    fn tokenizer() -> Arc<Tokenizer> {
        let pieces = PIECES.map(str::to_owned).to_vec();
        let mut spec = TokenizerSpec::new(TokenizerModel::Spm, pieces);
        spec.scores = vec![0.0; PIECES.len()];
        Arc::new(Tokenizer::new(spec).unwrap())
    }

    fn config() -> Dry {
        Dry {
            multiplier: 1.0,
            base: 2.0,
            breakers: vec!["\n".into(), "STOP".into()],
            ..Dry::default()
        }
    }

    /// The penalties of tokens 0 to 7 after a text.
    fn penalties(config: Dry, text: &[u32]) -> Vec<f32> {
        let mut step = DryStep::new(config, &tokenizer());
        text.iter()
            .for_each(|&t| step.accept(TokenId(t), TokenOrigin::Prompt));
        let mut buffers = CandidateBuffers::default();
        let mut candidates = Candidates::new(&[0.0; 8], &mut buffers).unwrap();
        step.apply(&mut candidates);
        candidates.iter().map(|c| 0.0 - c.logit).collect()
    }

    #[test]
    fn penalties_by_hand() {
        // "a b c a b": c followed "a b", of the allowed length: 1 * 2^0.
        let penalty = |text: &[u32]| penalties(config(), text);
        assert_eq!(penalty(&[0, 1, 2, 0, 1]), [0., 0., 1., 0., 0., 0., 0., 0.]);
        // "c a b c a b": a repetition of three tokens ("c a b" from the start), so 2^1.
        assert_eq!(
            penalty(&[2, 0, 1, 2, 0, 1]),
            [0., 0., 2., 0., 0., 0., 0., 0.]
        );
        // A repetition may overlap itself: after "a a a a", three a's were followed by an a.
        assert_eq!(penalty(&[0, 0, 0, 0]), [2., 0., 0., 0., 0., 0., 0., 0.]);
        // One token is shorter than what is allowed.
        assert_eq!(penalty(&[0, 1, 0]), [0.; 8]);
        assert_eq!(penalty(&[]), [0.; 8]);
    }

    #[test]
    fn the_longest_repetition_counts() {
        // After "b a": once "c b a" was followed by b, and once "b a" by c.
        let text = [2, 1, 0, 1, 0, 1, 0, 2, 0, 2, 1, 0];
        let got = penalties(config(), &text);
        assert_eq!(got, [0., 2., 1., 0., 0., 0., 0., 0.]);
    }

    #[test]
    fn repetitions_end_at_breakers() {
        // "a b \n a b" repeats two tokens: the one before is a breaker.
        let broken = [7, 0, 1, 2, 7, 0, 1];
        assert_eq!(penalties(config(), &broken)[2], 1.0);
        let free = Dry {
            breakers: Vec::new(),
            ..config()
        };
        assert_eq!(penalties(free, &broken)[2], 2.0);
        // A breaker inside a token, and one that three tokens write.
        assert_eq!(penalties(config(), &[3, 0, 1, 2, 3, 0, 1])[2], 1.0);
        let stop = [4, 5, 6, 0, 1, 2, 4, 5, 6, 0, 1];
        assert_eq!(penalties(config(), &stop)[2], 1.0);
        // Half of it is none: "S TO a b" repeats four tokens.
        let half = [4, 5, 0, 1, 2, 4, 5, 0, 1];
        assert_eq!(penalties(config(), &half)[2], 4.0);
        // Nothing is long enough right after a breaker.
        assert_eq!(penalties(config(), &[0, 7, 0, 7]), [0.; 8]);
    }

    #[test]
    fn settings_take_effect() {
        let text = [2, 0, 1, 2, 0, 1];
        let penalty = |edit: fn(&mut Dry)| {
            let mut config = config();
            edit(&mut config);
            penalties(config, &text)[2]
        };
        assert_eq!(penalty(|c| c.multiplier = 0.5), 1.0);
        assert_eq!(penalty(|c| c.base = 3.0), 3.0);
        assert_eq!(penalty(|c| c.base = 1.0), 1.0);
        assert_eq!(penalty(|c| c.allowed_length = 3), 1.0);
        assert_eq!(penalty(|c| c.allowed_length = 4), 0.0);
        assert_eq!(penalty(|c| c.last_n = Some(5)), 1.0);
        assert_eq!(penalty(|c| c.last_n = Some(4)), 0.0);
        // However long the repetition, the token stays possible.
        let long = [0; 2000];
        let got = penalties(config(), &long)[0];
        assert!(got == f32::MAX, "{got}");
    }

    #[test]
    fn an_excluded_token_stays_excluded() {
        let mut step = DryStep::new(config(), &tokenizer());
        for token in [0, 1, 2, 0, 1] {
            step.accept(TokenId(token), TokenOrigin::Generated);
        }
        let logits = [0.0, 0.0, f32::NEG_INFINITY];
        let mut buffers = CandidateBuffers::default();
        let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
        step.apply(&mut candidates);
        assert_eq!(candidates.iter().last().unwrap().logit, f32::NEG_INFINITY);
    }

    #[test]
    fn penalties_are_those_of_the_text_as_it_is() {
        let mut step = DryStep::new(config(), &tokenizer());
        let repeat = |step: &mut DryStep, text: &[u32]| {
            text.iter()
                .for_each(|&t| step.accept(TokenId(t), TokenOrigin::Generated));
            let mut buffers = CandidateBuffers::default();
            let mut candidates = Candidates::new(&[0.0; 8], &mut buffers).unwrap();
            step.apply(&mut candidates);
            candidates.iter().map(|c| 0.0 - c.logit).collect::<Vec<_>>()
        };
        let of_c = [0., 0., 1., 0., 0., 0., 0., 0.];
        assert_eq!(repeat(&mut step, &[0, 1, 2, 0, 1]), of_c);
        // "a b" was followed by another token.
        assert_eq!(repeat(&mut step, &[4, 0]), [0.; 8]);
        step.reset();
        assert_eq!(repeat(&mut step, &[1]), [0.; 8]);
        assert_eq!(repeat(&mut step, &[0, 1, 2, 0, 1]), of_c);
    }

    #[test]
    fn no_more_is_kept_than_is_looked_at() {
        let mut step = DryStep::new(
            Dry {
                last_n: Some(4),
                ..config()
            },
            &tokenizer(),
        );
        for _ in 0..100 {
            step.accept(TokenId(0), TokenOrigin::Generated);
            assert!(step.text.len() < 8 && step.tail.len() < "STOP".len());
        }
    }

    /// The definition, by comparing everything with everything.
    fn by_definition(config: &Dry, text: &[u32]) -> Vec<f32> {
        let window = &text[text
            .len()
            .saturating_sub(config.last_n.unwrap_or(usize::MAX))..];
        // How many tokens come after the last token in which a breaker ends.
        let written = |n: usize| -> String {
            let pieces = text[..n].iter().map(|&t| PIECES[t as usize]);
            pieces.collect()
        };
        let completes = |n: usize| {
            let (before, after) = (written(n - 1).len(), written(n));
            config.breakers.iter().any(|b| {
                let ends = after.match_indices(b.as_str()).map(|(at, _)| at + b.len());
                ends.into_iter().any(|end| end > before)
            })
        };
        let broken = (1..=text.len()).rev().find(|&n| completes(n)).unwrap_or(0);
        let limit = text.len() - broken;
        let mut penalties = vec![0f32; 8];
        for next in 0..window.len() {
            let (before, next) = (&window[..next], window[next]);
            let same = before.iter().rev().zip(window.iter().rev());
            let n = same.take_while(|(a, b)| a == b).count().min(limit);
            if n >= config.allowed_length && !before.is_empty() {
                let exponent = (n - config.allowed_length) as i32;
                let penalty = config.multiplier * config.base.powi(exponent);
                penalties[next as usize] = penalties[next as usize].max(penalty);
            }
        }
        penalties
    }

    proptest! {
        #[test]
        fn dry_is_its_definition(
            text in prop::collection::vec(prop_oneof![6 => 0u32..2, 1 => 2u32..8], 0..60),
            allowed_length in 1usize..4,
            last_n in prop::option::of(1usize..40),
            breakers in prop::sample::subsequence(vec!["\n", "STOP", "ab", "xa"], 0..4),
        ) {
            let config = Dry {
                multiplier: 0.5,
                base: 1.5,
                allowed_length,
                last_n,
                breakers: breakers.into_iter().map(str::to_owned).collect(),
            };
            let wanted = by_definition(&config, &text);
            for (got, wanted) in penalties(config, &text).iter().zip(&wanted) {
                prop_assert!((got - wanted).abs() <= wanted * 1e-5, "{} {}", got, wanted);
            }
        }
    }
}
