//! The chain as a whole: worked probabilities, seeds, and properties over random logits.

use std::num::NonZeroU32;

use model_core::tokenizer::{TokenizerModel, TokenizerSpec};
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

#[test]
fn steps_come_in_llama_cpps_order() {
    let config = SamplerConfig {
        temperature: 0.7,
        top_n_sigma: 1.0,
        typical_p: 0.9,
        xtc: Xtc {
            probability: 0.5,
            threshold: 0.1,
        },
        logit_bias: vec![LogitBias {
            token: TokenId(0),
            bias: Bias::Ban,
        }],
        penalties: Penalties {
            repeat: 1.1,
            ..Penalties::default()
        },
        ..SamplerConfig::default()
    };
    let names = |config: &SamplerConfig| step_names(config.clone());
    let wanted = [
        "BiasStep",
        "PenaltyStep",
        "TopNSigma",
        "TopK",
        "Typical",
        "TopP",
        "MinP",
        "XtcStep",
    ];
    assert_eq!(names(&config), [&wanted[..], &["Temperature"]].concat());
    let mirostat = SamplerConfig {
        mirostat: Some(Mirostat::default()),
        ..config.clone()
    };
    let wanted = ["BiasStep", "PenaltyStep", "Temperature", "MirostatStep"];
    assert_eq!(names(&mirostat), wanted);
    let greedy = SamplerConfig {
        temperature: 0.0,
        ..config
    };
    assert_eq!(names(&greedy), ["BiasStep", "PenaltyStep"]);
}

/// "a", "b", and the end of a sequence.
fn tokenizer() -> Arc<Tokenizer> {
    let pieces = ["a", "b", "</s>"].map(str::to_owned).to_vec();
    let mut spec = TokenizerSpec::new(TokenizerModel::Spm, pieces);
    spec.scores = vec![0.0; 3];
    spec.special.eos = Some(TokenId(2));
    Arc::new(Tokenizer::new(spec).unwrap())
}

fn step_names(config: SamplerConfig) -> Vec<String> {
    let chain = Sampler::for_tokenizer(config, &tokenizer()).unwrap();
    let debug = chain.steps.iter().map(|step| format!("{step:?}"));
    let name = |debug: String| debug.split([' ', '(']).next().unwrap().to_owned();
    debug.map(name).collect()
}

#[test]
fn what_does_nothing_is_no_step() {
    assert_eq!(step_names(plain()), [""; 0]);
    let hot = SamplerConfig {
        temperature: 2.0,
        ..plain()
    };
    assert_eq!(step_names(hot), ["Temperature"]);
    let mut with_tokenizer = SamplerConfig {
        min_tokens: 1,
        ..plain()
    };
    with_tokenizer.dry.multiplier = 0.8;
    assert_eq!(step_names(with_tokenizer), ["MinTokensStep", "DryStep"]);
}

#[test]
fn what_is_out_of_range_makes_no_sampler() {
    let much = SamplerConfig {
        top_p: 1.5,
        ..plain()
    };
    assert!(Sampler::new(much.clone()).is_err());
    assert!(Sampler::for_tokenizer(much, &tokenizer()).is_err());
    let ban = |token| LogitBias {
        token: TokenId(token),
        bias: Bias::Ban,
    };
    let biased = |token| SamplerConfig {
        logit_bias: vec![ban(token)],
        ..plain()
    };
    assert!(Sampler::for_tokenizer(biased(2), &tokenizer()).is_ok());
    let refused = Sampler::for_tokenizer(biased(3), &tokenizer()).unwrap_err();
    let (token, n_tokens) = (TokenId(3), 3);
    assert_eq!(refused, ConfigError::BiasToken { token, n_tokens });
}

#[test]
fn a_reset_draws_the_same_tokens_again() {
    let mut chain = sampler(plain());
    let mut draws = || -> Vec<u32> {
        chain.reset();
        let draw = |_| chain.sample(&[0.0; 100]).unwrap().0;
        (0..8).map(draw).collect()
    };
    assert_eq!(draws(), draws());
}

#[test]
fn draws_at_the_borders_of_shares() {
    let drawn = |logits: &[f32], unit| {
        let mut buffers = CandidateBuffers::default();
        let candidates = Candidates::new(logits, &mut buffers).unwrap();
        draw(&candidates, unit)
    };
    assert_eq!(drawn(&[0.0; 2], 0.49), Some(TokenId(0)));
    assert_eq!(drawn(&[0.0; 2], 0.5), Some(TokenId(1)));
    // However sums are rounded, an excluded token is not drawn.
    assert_eq!(drawn(&[0.0, f32::NEG_INFINITY], 1.0), Some(TokenId(0)));
}

#[test]
fn candidates_are_as_many_as_steps_can_exclude_and_one_more() {
    let top_5 = SamplerConfig {
        top_k: NonZeroU32::new(5),
        ..plain()
    };
    let n = |edit: &dyn Fn(&mut SamplerConfig)| {
        let mut config = top_5.clone();
        edit(&mut config);
        Sampler::for_tokenizer(config, &tokenizer())
            .unwrap()
            .n_candidates()
    };
    assert_eq!(n(&|_| ()), Some(6));
    assert_eq!(n(&|c| c.temperature = 0.0), Some(2));
    assert_eq!(n(&|c| c.top_k = None), None);
    assert_eq!(n(&|c| c.mirostat = Some(Mirostat::default())), None);
    assert_eq!(n(&|c| c.dry.multiplier = 0.8), None);
    assert_eq!(n(&|c| c.min_tokens = 1), Some(7));
    let penalties = |repeat, frequency, presence| {
        n(&move |c| {
            c.penalties = Penalties {
                last_n: 8,
                repeat,
                frequency,
                presence,
            };
        })
    };
    assert_eq!(penalties(1.0, 0.0, 0.0), Some(6));
    for lowered in [(1.5, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 0.5)] {
        assert_eq!(penalties(lowered.0, lowered.1, lowered.2), Some(14));
    }
    for raised in [(0.5, 0.0, 0.0), (1.0, -0.5, 0.0), (1.0, 0.0, -0.5)] {
        assert_eq!(penalties(raised.0, raised.1, raised.2), None);
    }
    let biases = |biases: &[Bias]| {
        let token = TokenId(0);
        let biases = biases.iter().map(|&bias| LogitBias { token, bias });
        let biases: Vec<LogitBias> = biases.collect();
        n(&|c| c.logit_bias.clone_from(&biases))
    };
    assert_eq!(biases(&[Bias::Add(-1.0), Bias::Ban]), Some(8));
    assert_eq!(biases(&[Bias::Add(-1.0), Bias::Add(1.0)]), None);
    let mut own = sampler(top_5);
    own.push_front(Box::new(MinP(0.1)));
    assert_eq!(own.n_candidates(), None);
}

#[test]
fn options_that_need_a_tokenizer_are_refused_without_one() {
    let refused = |config| Sampler::new(config).unwrap_err().to_string();
    let min_tokens = SamplerConfig {
        min_tokens: 1,
        ..plain()
    };
    assert_eq!(
        refused(min_tokens),
        "the sampling option min_tokens needs the tokenizer of the model"
    );
    let mut dry = plain();
    dry.dry.multiplier = 0.8;
    assert_eq!(
        refused(dry),
        "the sampling option dry needs the tokenizer of the model"
    );
}

#[test]
fn a_bias_shifts_the_odds_and_a_ban_excludes() {
    let bias = |token, bias| LogitBias {
        token: TokenId(token),
        bias,
    };
    let mut chain = sampler(SamplerConfig {
        logit_bias: vec![bias(1, Bias::Add(3f32.ln())), bias(2, Bias::Ban)],
        ..plain()
    });
    // Odds 1 : 1 : 1 become 1 : 3 : 0.
    let got = chain.probabilities(&[0.0; 3]).unwrap();
    assert_eq!(got.len(), 2, "{got:?}");
    assert!(
        (got[0].1 - 0.25).abs() < 1e-6 && (got[1].1 - 0.75).abs() < 1e-6,
        "{got:?}"
    );
}

/// The mean surprise of 2000 tokens is that which mirostat was asked for, in bits.
fn check_surprise(tau: f32) {
    let mut chain = sampler(SamplerConfig {
        mirostat: Some(Mirostat { tau, eta: 0.1 }),
        ..plain()
    });
    // Zipf's law over 5000 tokens: the entropy is 9.4 bits.
    let logits: Vec<f32> = (1..=5000).map(|rank| -(rank as f32).ln()).collect();
    let (mut sum, n) = (0.0, 2000);
    for _ in 0..n {
        let possible = chain.probabilities(&logits).unwrap();
        let token = chain.sample(&logits).unwrap();
        let (_, p) = possible.iter().find(|(t, _)| *t == token).unwrap();
        sum -= p.log2();
        chain.accept(token, TokenOrigin::Generated);
    }
    let mean = sum / f64::from(n);
    assert!((mean - f64::from(tau)).abs() < 0.15, "{mean} {tau}");
}

// Two tests, so that they run in parallel: each takes longer than all others here.

#[test]
fn mirostat_keeps_the_surprise_of_a_text_near_a_low_target() {
    check_surprise(1.0);
}

#[test]
fn mirostat_keeps_the_surprise_of_a_text_near_a_high_target() {
    check_surprise(3.0);
}

fn any_config() -> impl Strategy<Value = SamplerConfig> {
    let penalties = (0usize..8, 0.5f32..2.0, -1f32..1.0, -1f32..1.0);
    let numbers = (0f32..2.0, 0u32..12, 0f32..=1.0, 0f32..=1.0, any::<u64>());
    let bias = (0u32..20, prop::option::of(-3f32..1.0)).prop_map(|(token, bias)| LogitBias {
        token: TokenId(token),
        bias: bias.map_or(Bias::Ban, Bias::Add),
    });
    let optional = (
        prop_oneof![3 => Just(1f32), 1 => 0f32..1.0],
        prop_oneof![3 => Just(0f32), 1 => 0f32..1.0],
        prop::option::weighted(0.2, 0.5f32..5.0),
        prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(bias, 1..4)],
    );
    let numbers_of =
        |(temperature, k, top_p, min_p, seed), p: (usize, f32, f32, f32)| SamplerConfig {
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
            ..SamplerConfig::default()
        };
    (numbers, penalties, optional).prop_map(move |(numbers, p, optional)| {
        let (typical_p, probability, tau, logit_bias) = optional;
        SamplerConfig {
            typical_p,
            xtc: Xtc {
                probability,
                threshold: 0.1,
            },
            mirostat: tau.map(|tau| Mirostat { tau, eta: 0.1 }),
            logit_bias,
            ..numbers_of(numbers, p)
        }
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
        // A penalty or a ban can exclude the only tokens there were: f32::MIN minus something.
        let banned = chain.config().logit_bias.clone();
        let Ok(possible) = chain.probabilities(&logits) else {
            let is_banned = |i: usize| banned.iter().any(|b| b.token.as_usize() == i);
            let is_out = |(i, l): (usize, &f32)| {
                *l == f32::NEG_INFINITY || l.abs() == f32::MAX || is_banned(i)
            };
            prop_assert!(logits.iter().enumerate().all(is_out));
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
        let mut row = vec![0.0; kv_graph::TopK::row_len(k.min(logits.len()))];
        kv_graph::TopK::of(&logits, &mut row);
        for _ in 0..5 {
            let from_all = whole.sample(&logits).ok();
            prop_assert_eq!(top.sample_top(kv_graph::TopK::read(&row).unwrap()).ok(), from_all);
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
