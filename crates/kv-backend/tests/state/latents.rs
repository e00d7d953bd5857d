//! States of layers whose values are in their keys, and of layers without rows of their own: what
//! is stored once is saved once, and nothing is saved of what is not there.

use kv_backend::RowKind;
use kv_backend::state::{RowEncoding, SavedState};
use kv_core::{
    LayerIdx, SeqId, Window,
    layers::{AttentionMemory, LayerMemory},
    memory::{RestoreInto, Seqs},
};
use kv_rows::KvType;

use super::device::{Device, SHAPES, config, ids};

const ONE: SeqId = SeqId(1);

/// A latent layer, one that keeps both, and one that shares the latents.
const LAYERS: [LayerMemory; 3] = [
    LayerMemory::Latent(WIDE),
    LayerMemory::Attention(WIDE),
    LayerMemory::SharedWith(LayerIdx(0)),
];
const WIDE: AttentionMemory = AttentionMemory {
    kv_heads: 1,
    k_dim: 64,
    v_dim: 32,
    window: Window::Full,
};

#[test]
fn only_rows_that_exist_are_saved() {
    let has_shared = |layers: &&[LayerMemory]| {
        let shares = |l: &LayerMemory| matches!(l, LayerMemory::SharedWith(_));
        layers.iter().any(shares)
    };
    assert!(
        SHAPES.iter().any(has_shared),
        "the other tests have them too"
    );
    let mut source = Device::new(&LAYERS, &config(), KvType::F32);
    source.feed(ONE, &ids(1, 20));
    let bytes = source.save(Seqs::One(ONE), None);
    let state = SavedState::parse(&bytes).unwrap();
    let rows: Vec<_> = state.rows().iter().map(|rows| rows.format).collect();
    let named: Vec<_> = rows.iter().map(|r| (r.layer.0, r.kind)).collect();
    let wanted = [(0, RowKind::K), (1, RowKind::K), (1, RowKind::V)];
    assert_eq!(named, wanted);
    let n_bytes: usize = state.rows().iter().map(|rows| rows.bytes.len()).sum();
    assert_eq!(n_bytes, 20 * 4 * (64 + 64 + 32));
    // A memory whose layers are others is another model's.
    let own = LAYERS.map(|layer| match layer {
        LayerMemory::Latent(memory) => LayerMemory::Attention(memory),
        other => other,
    });
    let mut other = Device::new(&own, &config(), KvType::F32);
    let error = other.restore(&bytes, RestoreInto::All).unwrap_err();
    assert!(error.to_string().contains("layer map"), "{error}");
    // And if it were not: rows that are there on one side only are refused by name.
    let error = state.check_rows(&other.layout).unwrap_err().to_string();
    assert!(
        error.contains("layer 0") && error.contains("nothing"),
        "{error}"
    );
    let bytes = other.save(Seqs::All, None);
    let state = SavedState::parse(&bytes).unwrap();
    let error = state.check_rows(&source.layout).unwrap_err().to_string();
    assert!(
        error.contains("layer 0") && error.contains("nothing"),
        "{error}"
    );
}

#[test]
fn quantised_latents_are_saved_as_a_memory_holds_them() {
    let of = |kv_type| Device::new(&LAYERS, &config(), kv_type);
    let mut source = of(KvType::F32);
    source.feed(ONE, &ids(1, 20));
    for quantised in [KvType::Q8_0, KvType::Q4_0] {
        let bytes = source.save(Seqs::All, Some(quantised));
        assert!(bytes.len() < source.save(Seqs::All, None).len() / 2);
        let state = SavedState::parse(&bytes).unwrap();
        let mut there = of(quantised);
        // What of a key is no value must not be mixed with what is: latents are not rotated.
        let of_layers = there.layout.layers();
        let shapes = [of_layers[0].k, of_layers[1].k, of_layers[1].v];
        assert!(shapes[0].rotation.is_none() && !shapes[1].rotation.is_none());
        for (saved, shape) in state.rows().iter().zip(shapes) {
            let (RowEncoding::Heads { shape: saved, .. }, format) =
                (saved.format.stored, saved.format)
            else {
                panic!("{:?}", saved.format);
            };
            assert_eq!(saved, shape, "layer {}, {:?}", format.layer, format.kind);
        }
        // So it takes them to the bit, and another comes near.
        there.restore(&bytes, RestoreInto::All).unwrap();
        let again = there.save(Seqs::All, None);
        let again = SavedState::parse(&again).unwrap();
        for (a, b) in again.rows().iter().zip(state.rows()) {
            assert_eq!((a.format, a.bytes), (b.format, b.bytes));
        }
        let mut plain = of(KvType::F32);
        plain.restore(&bytes, RestoreInto::All).unwrap();
        assert_eq!(plain.seen(ONE), there.seen(ONE));
        let off = super::distance(&plain, &source);
        assert!(off > 0.0 && off < 0.1, "{quantised}: {off}");
    }
}
