//! What one token sees is nothing to another: infinite values, which a weight of 0 would not hide,
//! stay with the tokens that see them.

#![allow(clippy::unwrap_used)]

use kv_backend::Backend;
use kv_contract::{Attend, OneOp, StoreRows};
use kv_core::{CellIdx, CellRun, LayerIdx, PosRange, Visibility, VisibleGroup};
use kv_cpu::isa::Isa;
use kv_graph::AttendSpec;
use kv_rows::KvType;

use crate::support::{backend, layout, run};

const SPEC: AttendSpec = AttendSpec {
    n_heads: 2,
    kv_heads: 1,
    k_dim: 8,
    v_dim: 8,
    scale: 0.5,
    soft_cap: None,
    alibi: None,
};
const N_CELLS: u32 = 40;

/// Attention of two tokens, each in a group of its own, on one thread.
fn attend(isa: Isa, kv_type: KvType, runs: [&[CellRun]; 2]) -> [Vec<f32>; 2] {
    let backend = backend(isa, 1);
    let layout = layout(&SPEC, N_CELLS as usize + 2, kv_type);
    let mut rows = backend.allocate(&layout).unwrap();
    let k: Vec<f32> = (0..N_CELLS * 8).map(|i| (i as f32 * 0.3).sin()).collect();
    let mut v = k.clone();
    v[5 * 8..6 * 8].fill(f32::INFINITY);
    let cells: Vec<CellIdx> = (0..N_CELLS).map(CellIdx).collect();
    let store = StoreRows {
        layer: LayerIdx(0),
        k: &k,
        v: &v,
        cells: &cells,
    };
    let store = OneOp::store(&layout, &store);
    store.run(&backend, &mut rows).unwrap();
    let group = |(row, runs): (u32, &[CellRun])| {
        VisibleGroup::new(vec![row], runs.to_vec(), vec![PosRange::ALL])
    };
    let visibility = Visibility::new(2, (0..).zip(runs).map(group).collect());
    visibility.check(N_CELLS).unwrap();
    let args = Attend {
        layer: LayerIdx(0),
        spec: SPEC,
        q: &k[..2 * 2 * 8],
        visibility: &visibility,
        positions: &[],
        sinks: None,
        spare: CellIdx(N_CELLS),
    };
    let out = OneOp::attend(&layout, &args).run(&backend, &mut rows);
    let out = out.unwrap();
    [out[..16].to_vec(), out[16..].to_vec()]
}

/// One token sees an infinite value in a lane of a tile between two that the other sees.
#[test]
fn infinite_values_of_others_are_not_seen() {
    let (infinite, around) = ([run(0, 0, 32)], [run(32, 3, 1), run(33, 7, 1)]);
    for isa in Isa::all_available() {
        for kv_type in [KvType::F32, KvType::F16, KvType::BF16] {
            for runs in [[&infinite[..], &around[..]], [&around, &infinite]] {
                let out = attend(isa, kv_type, runs);
                for (out, runs) in out.iter().zip(runs) {
                    let is_finite = out.iter().all(|value| value.is_finite());
                    assert_eq!(is_finite, runs == around, "{isa}, {kv_type}: {out:?}");
                }
            }
        }
    }
}
