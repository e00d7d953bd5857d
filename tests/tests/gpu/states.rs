//! Saved on one backend, continued on another.

use cellar_engine::{Engine, EngineConfig, SaveOptions};
use kv_backend::Backend;
use kv_backend::state::SavedState;
use kv_core::{
    SeqId, TokenId,
    batch::Batch,
    memory::{RestoreInto, Seqs},
};
use kv_rows::KvType;
use model_tests::{Case, cpu, distance};

use super::OpenedModel;

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);

/// A state of all sequences.
pub(crate) fn save<D: Backend>(engine: &Engine<D>) -> Vec<u8> {
    let options = SaveOptions {
        seqs: Seqs::All,
        tokens: &[],
        kv_type: None,
        state_type: None,
    };
    let mut bytes = Vec::new();
    engine.save_state(&options, &mut bytes).unwrap();
    bytes
}

/// Takes a state back.
pub(crate) fn restore<D: Backend>(engine: &mut Engine<D>, bytes: &[u8]) {
    let state = SavedState::parse(bytes).unwrap();
    engine.restore_state(&state, RestoreInto::All).unwrap();
}

fn tokens(seed: usize, n: usize) -> impl Iterator<Item = TokenId> {
    (0..n).map(move |i| TokenId(((i + seed) * 7 % 50) as u32 + 3))
}

/// The logits of the last of these tokens.
fn feed<D: Backend>(
    engine: &mut Engine<D>,
    seq: SeqId,
    tokens: impl Iterator<Item = TokenId>,
) -> Vec<f32> {
    let logits = engine.decode(&Batch::prompt(seq, tokens)).unwrap();
    logits.last().unwrap().to_vec()
}

/// What the CPU computed continues on a device and comes back: the saved bytes are the same on
/// both, and so are the logits of what follows, within `tolerance`.
pub(crate) fn states_move<D: Backend>(
    backend: impl Fn() -> D,
    case: &Case,
    kv_type: KvType,
    tolerance: f32,
) {
    let what = format!("{}, {kv_type}", case.name);
    let opened = OpenedModel::new(case);
    let config = EngineConfig {
        n_ctx: Some(96),
        n_ubatch: 16,
        n_seqs: 2,
        kv_types: kv_type.into(),
        n_snapshots: 2,
        ..EngineConfig::default()
    };
    let mut first = opened.engine(cpu(), &config);
    feed(&mut first, A, tokens(0, 21));
    feed(&mut first, B, tokens(5, 10));
    feed(&mut first, A, tokens(9, 3));
    let saved = save(&first);

    let mut second = opened.engine(backend(), &config);
    feed(&mut second, B, tokens(1, 4));
    restore(&mut second, &saved);
    assert!(save(&second) == saved, "{what}: other bytes on the device");
    for seq in [A, B, A] {
        let wanted = feed(&mut first, seq, tokens(3, 1));
        let off = distance(&feed(&mut second, seq, tokens(3, 1)), &wanted);
        assert!(off < tolerance, "{what}, on the device: off by {off}");
    }

    let saved = save(&second);
    let mut third = opened.engine(cpu(), &config);
    restore(&mut third, &saved);
    assert!(save(&third) == saved, "{what}: other bytes on the CPU");
    for seq in [B, A] {
        let wanted = feed(&mut first, seq, tokens(8, 2));
        let off = distance(&feed(&mut third, seq, tokens(8, 2)), &wanted);
        assert!(off < tolerance, "{what}, back on the CPU: off by {off}");
    }
}
