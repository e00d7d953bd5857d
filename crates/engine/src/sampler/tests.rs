//! The chain as a whole: worked probabilities, seeds, and properties over random logits.

use std::num::NonZeroU32;

use proptest::prelude::*;

use super::*;

fn plain() -> SamplerConfig {
    SamplerConfig {
        temperature: 1.0,
        top_k: None,
        top_p: 1.0,
        min_p: 0.0,
        ..Default::default()
    }
}

fn sampler(config: SamplerConfig) -> Sampler {
    Sampler::new(config).unwrap()
}

#[test]
fn temperature_zero_is_greedy_with_ties_to_the_smallest_id() {
    let mut greedy = sampler(SamplerConfig {
        top_p: 0.0,
        ..SamplerConfig::greedy()
    });
    assert_eq!(greedy.sample(&[1.0, 7.0, 7.0, -3.0]), Ok(TokenId(1)));
    assert_eq!(
        greedy.probabilities(&[0.0, 1.0]),
        Ok(vec![(TokenId(1), 1.0)])
    );
}

#[test]
fn greedy_applies_penalties() {
    let mut config = SamplerConfig::greedy();
    config.penalties.repeat = 2.0;
    let mut greedy = sampler(config);
    let logits = [3.0, 4.0];
    assert_eq!(greedy.sample(&logits), Ok(TokenId(1)));
    greedy.accept(TokenId(1), TokenOrigin::Generated);
    assert_eq!(greedy.sample(&logits), Ok(TokenId(0)));
    greedy.reset();
    assert_eq!(greedy.sample(&logits), Ok(TokenId(1)));
}

#[test]
fn the_whole_chain_by_hand() {
    // Odds 8 : 4 : 2 : 1 : 1, token 0 seen once. Its penalty of ln 4 makes them 2 : 4 : 2 : 1 : 1;
    // top-k 4 leaves 4 : 2 : 2 : 1 (tokens 1, 0, 2, 3); top-p 0.85 of 9 needs 7.65, so 8: the
    // first three; min-p 0.4 keeps all; temperature 1/2 squares: 16 : 4 : 4.
    let mut config = SamplerConfig {
        temperature: 0.5,
        top_k: NonZeroU32::new(4),
        top_p: 0.85,
        min_p: 0.4,
        ..Default::default()
    };
    config.penalties.presence = 4f32.ln();
    let mut chain = sampler(config);
    chain.accept(TokenId(0), TokenOrigin::Prompt);
    let logits = [8f32, 4.0, 2.0, 1.0, 1.0].map(f32::ln);
    let got = chain.probabilities(&logits).unwrap();
    let wanted = [(1, 16.0 / 24.0), (0, 4.0 / 24.0), (2, 4.0 / 24.0)];
    assert_eq!(got.len(), 3, "{got:?}");
    for (token, probability) in wanted {
        let found = got.iter().find(|(t, _)| t.0 == token).unwrap();
        assert!((found.1 - probability).abs() < 1e-6, "{got:?}");
    }
}

#[test]
fn draws_follow_the_probabilities() {
    let mut chain = sampler(SamplerConfig { seed: 3, ..plain() });
    let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
    let mut counts = [0f64; 3];
    for _ in 0..20_000 {
        counts[chain.sample(&logits).unwrap().as_usize()] += 1.0;
    }
    for (count, wanted) in counts.iter().zip([0.5, 0.3, 0.2]) {
        // Five standard deviations.
        assert!((count / 20_000.0 - wanted).abs() < 0.018, "{counts:?}");
    }
}

/// The draws of a seed are part of the interface: a noted seed gives the same text later.
#[test]
fn a_seed_gives_the_same_tokens_everywhere() {
    let draws = |seed| {
        let mut chain = sampler(SamplerConfig { seed, ..plain() });
        (0..16)
            .map(|_| chain.sample(&[0.0; 10]).unwrap().0)
            .collect::<Vec<_>>()
    };
    assert_eq!(draws(42), draws(42));
    assert_ne!(draws(42), draws(43));
    let mut rng = ChaCha8Rng::seed_from_u64(42);
    let by_hand: Vec<u32> = (0..16).map(|_| (unit(&mut rng) * 10.0) as u32).collect();
    assert_eq!(draws(42), by_hand);
}

#[test]
fn custom_steps_come_first() {
    #[derive(Debug)]
    struct Forbid(TokenId);
    impl Step for Forbid {
        fn apply(&mut self, candidates: &mut Candidates<'_>) {
            candidates.adjust(self.0, |_| f32::NEG_INFINITY);
        }
    }
    let mut greedy = sampler(SamplerConfig::greedy());
    greedy.push_front(Box::new(Forbid(TokenId(1))));
    assert_eq!(greedy.sample(&[0.0, 5.0, 1.0]), Ok(TokenId(2)));
    assert_eq!(
        greedy.sample(&[f32::NEG_INFINITY, 5.0]),
        Err(SampleError::NothingLeft { n_tokens: 2 })
    );
}

fn any_config() -> impl Strategy<Value = SamplerConfig> {
    let penalties = (0usize..8, 0.5f32..2.0, -1f32..1.0, -1f32..1.0);
    let numbers = (0f32..2.0, 0u32..12, 0f32..=1.0, 0f32..=1.0, any::<u64>());
    (numbers, penalties).prop_map(|((temperature, k, top_p, min_p, seed), p)| SamplerConfig {
        temperature: if temperature < 0.2 { 0.0 } else { temperature },
        top_k: NonZeroU32::new(k),
        top_p,
        min_p,
        seed,
        penalties: Penalties {
            last_n: p.0,
            repeat: p.1,
            frequency: p.2,
            presence: p.3,
        },
    })
}

fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        8 => -20f32..20.0,
        2 => Just(f32::NEG_INFINITY),
        1 => Just(0.0f32),
        1 => Just(f32::MAX),
        1 => Just(f32::MIN),
    ];
    prop::collection::vec(logit, 1..300)
}

proptest! {
    #[test]
    fn probabilities_add_up_and_draws_are_among_them(
        config in any_config(),
        logits in any_logits(),
        text in prop::collection::vec(0u32..300, 0..20),
    ) {
        let mut chain = sampler(config);
        text.iter().for_each(|&t| chain.accept(TokenId(t), TokenOrigin::Prompt));
        if logits.iter().all(|&l| l == f32::NEG_INFINITY) {
            let n_tokens = logits.len();
            prop_assert_eq!(chain.sample(&logits), Err(SampleError::NothingLeft { n_tokens }));
            return Ok(());
        }
        // A penalty can exclude the only token there was: f32::MIN minus something.
        let Ok(possible) = chain.probabilities(&logits) else {
            prop_assert!(logits.iter().all(|&l| l == f32::NEG_INFINITY || l.abs() == f32::MAX));
            return Ok(());
        };
        let sum: f64 = possible.iter().map(|(_, p)| p).sum();
        prop_assert!((sum - 1.0).abs() < 1e-9, "{}", sum);
        for &(token, probability) in &possible {
            prop_assert!(probability > 0.0);
            prop_assert!(logits[token.as_usize()] > f32::NEG_INFINITY);
        }
        for _ in 0..5 {
            let token = chain.sample(&logits).unwrap();
            prop_assert!(possible.iter().any(|&(t, _)| t == token));
        }
    }

    /// The most likely tokens are enough where the sampler says so.
    #[test]
    fn candidates_choose_as_all_logits_do(
        mut config in any_config(),
        top_k in 1u32..6,
        logits in any_logits(),
        text in prop::collection::vec(0u32..20, 0..30),
    ) {
        config.top_k = NonZeroU32::new(top_k);
        let [mut whole, mut top] = [sampler(config.clone()), sampler(config)];
        for chain in [&mut whole, &mut top] {
            text.iter().for_each(|&t| chain.accept(TokenId(t), TokenOrigin::Prompt));
        }
        let Some(k) = top.n_candidates() else { return Ok(()) };
        let mut row = vec![0.0; graph::TopK::row_len(k.min(logits.len()))];
        graph::TopK::of(&logits, &mut row);
        for _ in 0..5 {
            let from_all = whole.sample(&logits).ok();
            prop_assert_eq!(top.sample_top(graph::TopK::read(&row).unwrap()).ok(), from_all);
        }
    }

    #[test]
    fn a_logit_that_is_no_number_is_an_error(
        config in any_config(),
        mut logits in any_logits(),
        at in any::<prop::sample::Index>(),
        bad in prop_oneof![Just(f32::NAN), Just(f32::INFINITY)],
    ) {
        let token = at.index(logits.len());
        logits[token] = bad;
        let refused = matches!(
            sampler(config).sample(&logits),
            Err(SampleError::NotANumber { token: t, .. }) if t == token
        );
        prop_assert!(refused);
    }
}
