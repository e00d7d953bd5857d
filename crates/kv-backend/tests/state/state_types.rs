//! Recurrent states of every type are saved, and restored into memories of every other type.

use kv_backend::state::{RowEncoding, SavedState, StateError};
use kv_backend::{RowKind, RowSpan};
use kv_core::{
    CellIdx, LayerIdx,
    layers::{LayerMemory, RecurrentMemory},
    memory::{Memory as _, RestoreInto, Seqs},
};
use kv_rows::{KvType, StateType};

use super::ONE;
use super::device::{Device, FULL, config, ids};

/// States that are whole blocks of q8_0.
const STATES: LayerMemory = LayerMemory::Recurrent(RecurrentMemory {
    conv_row: 3,
    state_row: 64,
});
const LAYERS: [LayerMemory; 2] = [STATES, FULL];

/// A memory that has seen some tokens, with states whose bytes are finite floats.
fn fed(state_type: StateType) -> Device {
    let mut device = Device::with_state_type(&LAYERS, &config(), state_type);
    device.feed(ONE, &ids(1, 20));
    let n_rows = device.layout.states()[0].n_rows;
    for row in 0..n_rows as u32 {
        let value = |i: u32| (i as f32 * 0.37 + row as f32).sin() * 3.0;
        let values: Vec<f32> = (0..64).map(value).collect();
        let kv_type = state_type.kv_type();
        let mut bytes = vec![0; kv_type.row_bytes(64)];
        kv_type.encode_row(&values, &mut bytes);
        device.write(state(row), &bytes);
    }
    device
}

fn state(row: u32) -> RowSpan {
    RowSpan {
        layer: LayerIdx(0),
        kind: RowKind::State,
        first: CellIdx(row),
        len: 1,
    }
}

/// The values of the state that a sequence is at.
fn newest(device: &Device) -> Vec<f32> {
    let snapshot = device.memory.snapshot(Seqs::One(ONE)).unwrap();
    let states = snapshot.states().unwrap();
    let row = states[0].states.last().unwrap().row;
    let kv_type = device.layout.states()[0].state_type.kv_type();
    let mut values = vec![0.0; 64];
    kv_type.decode_row(device.read(state(row.0)), &mut values);
    values
}

/// The way rows of a kind are saved.
fn stored(state: &SavedState<'_>, kind: RowKind) -> RowEncoding {
    let mut rows = state.rows().iter();
    let rows = rows.find(|rows| rows.format.kind == kind).unwrap();
    rows.format.stored
}

#[test]
fn states_of_every_type_are_restored_into_every_other() {
    for from in StateType::ALL {
        let source = fed(from);
        let bytes = source.save(Seqs::All, None);
        let state = SavedState::parse(&bytes).unwrap();
        for to in StateType::ALL {
            let mut there = Device::with_state_type(&LAYERS, &config(), to);
            assert_eq!(state.is_stored_as(&there.layout), from == to);
            there.restore(&bytes, RestoreInto::All).unwrap();
            let rounded = newest(&source).into_iter().map(|v| to.round(v));
            assert_eq!(newest(&there), rounded.collect::<Vec<_>>(), "{from} {to}");
        }
    }
    // What is stored as floats is saved as it always was.
    let bytes = fed(StateType::F32).save(Seqs::All, None);
    let state = SavedState::parse(&bytes).unwrap();
    assert_eq!(stored(&state, RowKind::State), RowEncoding::Floats(64));
}

#[test]
fn states_are_saved_in_fewer_bytes_where_that_is_asked_for() {
    let mut source = fed(StateType::F32);
    let plain = source.save(Seqs::All, None);
    for (kv_type, allowed) in [(KvType::Q8_0, 0.02), (KvType::BF16, 0.02)] {
        source.saved_state_type = Some(kv_type);
        let bytes = source.save(Seqs::All, None);
        assert!(bytes.len() < plain.len());
        let state = SavedState::parse(&bytes).unwrap();
        // Inputs of convolutions, keys and values are what they were.
        assert_eq!(stored(&state, RowKind::Conv), RowEncoding::Floats(3));
        let values = RowEncoding::Values { len: 64, kv_type };
        assert_eq!(stored(&state, RowKind::State), values);
        assert_eq!(stored(&state, RowKind::K).shape().kv_type, KvType::F16);
        for to in StateType::ALL {
            let mut there = Device::with_state_type(&LAYERS, &config(), to);
            there.restore(&bytes, RestoreInto::All).unwrap();
            let pairs = newest(&source).into_iter().zip(newest(&there));
            let off = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off > 0.0 && off <= allowed, "{kv_type} {to}: {off}");
        }
    }
}

#[test]
fn states_that_are_no_whole_blocks_are_not_saved_as_such() {
    let odd = LayerMemory::Recurrent(RecurrentMemory {
        conv_row: 3,
        state_row: 40,
    });
    let mut source = Device::with_state_type(&[odd], &config(), StateType::F32);
    source.feed(ONE, &ids(1, 9));
    source.saved_state_type = Some(KvType::Q8_0);
    let error = source.try_save(Seqs::All, None).unwrap_err();
    assert!(
        matches!(
            error,
            StateError::RowType {
                layer: LayerIdx(0),
                len: 40,
                kv_type: KvType::Q8_0,
            }
        ),
        "{error}"
    );
}
