//! Random operations on the memory of a device and of the CPU: both take and refuse the same ones,
//! and the logits of what follows are close.

use std::time::{Duration, Instant};

use cellar_engine::{Engine, EngineConfig, EngineError};
use kv_backend::Backend;
use kv_contract::Random;
use kv_core::{
    Pos, PosRange, SeqId, TokenId,
    batch::Batch,
    memory::{Edit, Memory, Seqs, Streams},
};
use kv_cpu::CpuBackend;
use kv_rows::KvType;
use model_tests::{Case, cpu, distance};

use super::states::{restore, save};
use super::{OpenedModel, register};

const N_SEQS: u32 = 3;
/// Operations on one pair of memories.
const N_OPERATIONS: usize = 50;

/// Models with full attention, windows, states, and attention next to states.
const MODELS: [&str; 4] = ["llama_gqa_untied", "gemma3_iswa8", "mamba2", "jamba"];

/// The time that operations go on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SoakLimit {
    /// So many operations on each model.
    Operations(usize),
    /// So long.
    Elapsed(Duration),
}

/// Two engines that are told the same.
struct Pair<D: Backend> {
    device: Engine<D>,
    cpu: Engine<CpuBackend>,
    random: Random,
    n_vocab: usize,
    tolerance: f32,
}

/// A result as text, to be compared.
fn told<T: std::fmt::Debug>(result: Result<T, EngineError>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(error @ (EngineError::Backend(_) | EngineError::RestoreRows { .. })) => {
            panic!("{error}: {:?}", std::error::Error::source(&error))
        }
        Err(error) => error.to_string(),
    }
}

impl<D: Backend> Pair<D> {
    fn seq(&mut self) -> SeqId {
        SeqId(self.random.below(N_SEQS as usize) as u32)
    }

    /// Some tokens of some sequences, the last of each wanted.
    fn decode(&mut self) -> String {
        let mut batch = Batch::new();
        for seq in 0..N_SEQS {
            let n = self.random.below(6);
            for at in 0..n {
                let token = TokenId(self.random.below(self.n_vocab) as u32);
                let entry = batch.push_token(token).in_sequence(SeqId(seq));
                if at + 1 == n {
                    entry.with_output();
                }
            }
        }
        let got = self.device.decode(&batch).map(|logits| logits.values());
        let wanted = self.cpu.decode(&batch).map(|logits| logits.values());
        match (got, wanted) {
            (Ok(got), Ok(wanted)) => {
                let off = distance(got, wanted);
                let n = batch.len();
                assert!(off < self.tolerance, "{n} tokens: off by {off}");
                format!("{n} tokens: off by {off:.1e}")
            }
            (got, wanted) => {
                let (got, wanted) = (told(got.map(drop)), told(wanted.map(drop)));
                assert_eq!(got, wanted);
                // Probably there is no room.
                let seqs = Seqs::One(self.seq());
                let range = PosRange::ALL;
                format!("{got}; {}", self.edit(Edit::Remove { seqs, range }))
            }
        }
    }

    fn edit(&mut self, edit: Edit) -> String {
        let got = told(self.device.edit(edit));
        assert_eq!(got, told(self.cpu.edit(edit)), "{edit:?}");
        format!("{edit:?}: {got}")
    }

    /// Takes the last tokens of a sequence back.
    fn go_back(&mut self) -> String {
        let (seq, n) = (self.seq(), self.random.below(4) as u32);
        match self.cpu.memory().positions(seq) {
            Some(positions) => self.edit(Edit::Remove {
                seqs: Seqs::One(seq),
                range: PosRange::from(Pos(positions.last.0.saturating_sub(n))..),
            }),
            None => self.decode(),
        }
    }

    fn shift(&mut self) -> String {
        let seq = self.seq();
        let got = told(self.device.shift_context(seq, 2));
        assert_eq!(got, told(self.cpu.shift_context(seq, 2)));
        format!("shift {seq}: {got}")
    }

    /// Gives both what one of them remembers.
    fn exchange(&mut self) -> String {
        let bytes = match self.random.below(2) {
            0 => save(&self.device),
            _ => save(&self.cpu),
        };
        restore(&mut self.device, &bytes);
        restore(&mut self.cpu, &bytes);
        assert!(save(&self.device) == save(&self.cpu), "states differ");
        format!("exchanged {} bytes", bytes.len())
    }

    fn operate(&mut self) -> String {
        let done = match self.random.below(16) {
            0..=6 => self.decode(),
            7..=9 => {
                let (from, to, range) = (self.seq(), self.seq(), PosRange::ALL);
                self.edit(Edit::Copy { from, to, range })
            }
            10 | 11 => self.go_back(),
            12 => self.shift(),
            13 => {
                let got = told(self.device.compact());
                assert_eq!(got, told(self.cpu.compact()));
                format!("compact: {got}")
            }
            14 => self.exchange(),
            _ => {
                let seq = self.seq();
                self.edit(Edit::KeepOnly(seq))
            }
        };
        assert_eq!(self.device.memory(), self.cpu.memory());
        done
    }
}

/// Random operations, from `seed` on.
///
/// # Panics
/// With the operations so far, where the two disagree.
pub(crate) fn soak<D: Backend>(backend: impl Fn() -> D, seed: u64, until: SoakLimit) {
    let started = Instant::now();
    let (mut n_rounds, mut n_operations) = (0, 0);
    let is_over = |n_rounds: usize| match until {
        SoakLimit::Operations(_) => n_rounds == MODELS.len(),
        SoakLimit::Elapsed(time) => started.elapsed() >= time,
    };
    while !is_over(n_rounds) {
        let case = Case::recipe(MODELS[n_rounds % MODELS.len()], register);
        let n = match until {
            SoakLimit::Operations(n) => n,
            SoakLimit::Elapsed(_) => N_OPERATIONS,
        };
        one_round(&backend, &case, Random::new(seed + n_rounds as u64), n);
        n_operations += n;
        n_rounds += 1;
    }
    println!("{n_operations} operations on {n_rounds} memories, seeds from {seed} on");
}

fn one_round<D: Backend>(backend: impl Fn() -> D, case: &Case, mut random: Random, n: usize) {
    // A value half-way between two of a type may be rounded up by one and down by the other.
    let (kv_type, tolerance) = [(KvType::F32, 2e-3), (KvType::F16, 5e-2)][random.below(2)];
    let streams = [Streams::Shared, Streams::PerSequence][random.below(2)];
    let config = EngineConfig {
        n_ctx: Some(64),
        n_ubatch: 8,
        n_seqs: N_SEQS,
        kv_types: kv_type.into(),
        streams,
        n_snapshots: 3,
        ..EngineConfig::default()
    };
    let opened = OpenedModel::new(case);
    let mut pair = Pair {
        device: opened.engine(backend(), &config),
        cpu: opened.engine(cpu(), &config),
        random,
        n_vocab: opened.model.vocab_size(),
        tolerance,
    };
    println!("{}, {kv_type}, {streams:?}", case.name);
    for _ in 0..n {
        // Shown by the test harness where one of them fails.
        println!("  {}", pair.operate());
    }
}
