//! Models of the kinds of memory beyond plain attention, in an engine: whatever is done with their
//! sequences, and wherever their states are restored, each goes on as the same tokens alone, to the
//! bit.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::sync::Arc;

use cellar_engine::{Engine, EngineConfig, EngineError, SaveOptions};
use kv_backend::state::SavedState;
use kv_core::{
    Pos, PosRange, SeqId, TokenId,
    batch::Batch,
    memory::{Refusal, RestoreInto, Seqs, Streams},
};
use kv_cpu::CpuBackend;
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, KvTypes, StateType};
use model_core::architecture::{Model, Registry};
use model_tests::{Recipe, cpu};

/// What going back to an earlier token may be refused for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Forgets {
    /// Nothing: cells hold all that is remembered.
    Nothing,
    /// A state that was not kept, or rows that no window sees any more.
    Something,
}

/// A model for each way to remember.
const MODELS: [(&str, Forgets); 14] = [
    // States of custom operations, and of this project's.
    ("rwkv4", Forgets::Something),
    ("rwkv6", Forgets::Something),
    ("rwkv7", Forgets::Something),
    ("xlstm", Forgets::Something),
    ("mamba2", Forgets::Something),
    // Hybrids of states and attention: delta rules (with latents, with heads), gated recurrences
    // with windows, lightning attention, short convolutions, blocks whose weights are shared.
    ("kimi_linear", Forgets::Something),
    ("qwen3_next", Forgets::Something),
    ("recurrent_gemma", Forgets::Something),
    ("minimax", Forgets::Something),
    ("lfm2", Forgets::Something),
    ("zamba2", Forgets::Something),
    // Latents, with the keys of indexers, and rows that layers share.
    ("deepseek_v3", Forgets::Nothing),
    ("deepseek_v32", Forgets::Nothing),
    ("gemma3n", Forgets::Something),
];

/// States that are rounded after every token: those of scans, and of delta rules by head and by
/// key.
const ROUNDED: [(&str, StateType); 4] = [
    ("mamba2", StateType::F16),
    ("mamba", StateType::BF16),
    ("qwen3_next", StateType::F16),
    ("kimi_linear", StateType::BF16),
];
const N_SEQS: u32 = 4;
const N_SNAPSHOTS: u32 = 3;
/// Tokens that a sequence has at most.
const LONGEST: usize = 40;
/// Tokens that all of the models have.
const N_TOKENS: usize = 250;

/// Numbers from a seed (Marsaglia's xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % n
    }

    fn seq(&mut self) -> usize {
        self.below(N_SEQS as usize)
    }

    fn tokens(&mut self) -> Vec<TokenId> {
        let n = 1 + self.below(6);
        (0..n)
            .map(|_| TokenId(3 + self.below(N_TOKENS - 3) as u32))
            .collect()
    }
}

/// A model, an engine whose sequences are edited, and one that has each text alone.
struct World {
    name: &'static str,
    state_type: StateType,
    model: Arc<dyn Model>,
    weights: Arc<dyn WeightSource>,
    engine: Engine<CpuBackend>,
    alone: Engine<CpuBackend>,
    texts: Vec<Vec<TokenId>>,
    numbers: Numbers,
    /// How often sequences went back, and how often they could not.
    n_back: [usize; 2],
}

fn seq(at: usize) -> SeqId {
    SeqId(u32::try_from(at).unwrap())
}

fn config(state_type: StateType, n_ctx: u32, streams: Streams, n_snapshots: u32) -> EngineConfig {
    EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: N_SEQS,
        streams,
        n_snapshots,
        kv_types: KvTypes::from(KvType::F32).with_state(state_type),
        ..EngineConfig::default()
    }
}

impl World {
    fn new(name: &'static str, state_type: StateType, seed: u64) -> Self {
        let mut registry = Registry::new();
        model_mamba::register(&mut registry);
        model_llama::register(&mut registry);
        let directory = Recipe::named(name).directory(&registry).unwrap();
        let model = directory.model().clone();
        let weights: Arc<dyn WeightSource> = directory.weights().clone();
        let engine = |config: &EngineConfig| {
            Engine::new(cpu(), Arc::clone(&model), Arc::clone(&weights), config).unwrap()
        };
        Self {
            engine: engine(&config(state_type, 256, Streams::Shared, N_SNAPSHOTS)),
            alone: engine(&config(state_type, 64, Streams::Shared, 0)),
            name,
            state_type,
            model: Arc::clone(&model),
            weights: Arc::clone(&weights),
            texts: vec![Vec::new(); N_SEQS as usize],
            numbers: Numbers(seed),
            n_back: [0; 2],
        }
    }

    /// The logits after a text that nothing else happened to.
    fn logits_alone(&mut self, at: usize) -> Vec<f32> {
        let all = Seqs::One(SeqId(0));
        self.alone.remove(all, PosRange::ALL).unwrap();
        let batch = Batch::prompt(SeqId(0), self.texts[at].iter().copied());
        let logits = self.alone.decode(&batch).unwrap();
        logits.last().unwrap().to_vec()
    }

    /// Gives some sequences tokens in one batch, in turn.
    fn feed(&mut self, seqs: &[usize]) {
        let more: Vec<Vec<TokenId>> = seqs.iter().map(|_| self.numbers.tokens()).collect();
        let mut batch = Batch::new();
        let mut order = Vec::new();
        for i in 0..more.iter().map(Vec::len).max().unwrap() {
            for (&at, tokens) in seqs.iter().zip(&more) {
                let Some(&token) = tokens.get(i) else {
                    continue;
                };
                let entry = batch.push_token(token).in_sequence(seq(at));
                if i + 1 == tokens.len() {
                    entry.with_output();
                    order.push(at);
                }
                self.texts[at].push(token);
            }
        }
        let n_vocab = self.model.vocab_size();
        let logits = self.engine.decode(&batch).unwrap().values().to_vec();
        for (at, ours) in order.into_iter().zip(logits.chunks(n_vocab)) {
            let wanted = self.logits_alone(at);
            assert!(ours == wanted, "{}: {at}, {:?}", self.name, self.texts);
        }
    }

    fn forget(&mut self, at: usize) {
        let one = Seqs::One(seq(at));
        self.engine.remove(one, PosRange::ALL).unwrap();
        self.texts[at].clear();
    }

    fn copy(&mut self, from: usize, to: usize) {
        if from != to && !self.texts[from].is_empty() {
            self.forget(to);
            self.engine.copy(seq(from), seq(to), PosRange::ALL).unwrap();
            self.texts[to] = self.texts[from].clone();
        }
    }

    /// Takes the last tokens of a sequence back, where a state before them was kept.
    fn go_back(&mut self, at: usize) {
        let len = self.texts[at].len();
        if len < 2 {
            return;
        }
        let n = len - 1 - self.numbers.below(4).min(len - 2);
        let rest = PosRange::from(Pos(n as u32)..);
        match self.engine.remove(Seqs::One(seq(at)), rest) {
            Ok(_) => {
                self.texts[at].truncate(n);
                self.n_back[0] += 1;
            }
            Err(EngineError::Refused(
                Refusal::StateGone { .. } | Refusal::WindowForgotten { .. },
            )) => self.n_back[1] += 1,
            Err(error) => panic!("{}: {error}", self.name),
        }
    }

    /// Saves all sequences and goes on with them in an engine of other sizes.
    fn move_house(&mut self) {
        let options = SaveOptions {
            seqs: Seqs::All,
            tokens: &[],
            kv_type: None,
            state_type: None,
        };
        let mut bytes = Vec::new();
        self.engine.save_state(&options, &mut bytes).unwrap();
        let state = SavedState::parse(&bytes).unwrap();
        let streams = [Streams::Shared, Streams::PerSequence][self.numbers.below(2)];
        let n_ctx = 200 + self.numbers.below(100) as u32;
        let n_snapshots = 1 + self.numbers.below(5) as u32;
        let config = config(self.state_type, n_ctx, streams, n_snapshots);
        let (model, weights) = (Arc::clone(&self.model), Arc::clone(&self.weights));
        self.engine = Engine::new(cpu(), model, weights, &config).unwrap();
        let restored = self.engine.restore_state(&state, RestoreInto::All).unwrap();
        let n_tokens: usize = self.texts.iter().map(Vec::len).sum();
        assert_eq!(restored.n_tokens as usize, n_tokens, "{}", self.name);
    }

    fn step(&mut self) {
        for at in 0..self.texts.len() {
            if self.texts[at].len() > LONGEST {
                self.forget(at);
            }
        }
        let (at, other) = (self.numbers.seq(), self.numbers.seq());
        match self.numbers.below(20) {
            0..7 => self.feed(&[at]),
            7..9 if at != other => self.feed(&[at, other]),
            7..11 => self.feed(&[0, 1, 2, 3]),
            11..13 => self.copy(at, other),
            13..18 => self.go_back(at),
            18 => self.forget(at),
            _ => self.move_house(),
        }
    }
}

#[test]
fn sequences_go_on_as_alone_whatever_is_done_with_them() {
    for ((name, forgets), seed) in MODELS.into_iter().zip(0x5EED..) {
        let mut world = World::new(name, StateType::F32, seed);
        for _ in 0..120 {
            world.step();
        }
        let [done, refused] = world.n_back;
        assert!(done > 5, "{name}: {:?}", world.n_back);
        let forgot = forgets == Forgets::Something;
        assert_eq!(refused > 0, forgot, "{name}: {:?}", world.n_back);
    }
}

#[test]
fn sequences_with_rounded_states_go_on_as_alone() {
    for ((name, state_type), seed) in ROUNDED.into_iter().zip(0x7E57..) {
        let mut world = World::new(name, state_type, seed);
        for _ in 0..120 {
            world.step();
        }
        let [done, refused] = world.n_back;
        assert!(done > 5 && refused > 0, "{name}: {:?}", world.n_back);
    }
}
