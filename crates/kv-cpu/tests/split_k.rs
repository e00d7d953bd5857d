//! Split-K attention on long contexts: how a token's cells are divided into splits and shared with
//! other sequences changes no bit of its result.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use kv_backend::{Backend, RowStorage};
use kv_contract::{Attend, OneOp, StoreRows};
use kv_core::{CellIdx, CellRun, LayerIdx, Pos, PosRange, Visibility, VisibleGroup};
use kv_cpu::CpuBackend;
use kv_cpu::isa::Isa;
use kv_graph::AttendSpec;
use kv_rows::KvType;

use crate::support::{backend, layout, run};

/// Tokens of the text.
const N_TEXT: u32 = 1100;
/// Tokens that are attended together: too many to be divided by splits.
const N_TOKENS: u32 = 70;

const SPEC: AttendSpec = AttendSpec {
    n_heads: 6,
    kv_heads: 2,
    k_dim: 32,
    v_dim: 64,
    scale: 0.6,
    soft_cap: None,
    alibi: None,
};

fn wave(n: usize, step: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * step).sin() * 2.0).collect()
}

/// The bits of the attention of tokens at `positions`, `[tokens, n_heads * v_dim]`.
fn attend(
    backend: &CpuBackend,
    rows: &mut <CpuBackend as Backend>::Rows,
    positions: &[u32],
    groups: Vec<VisibleGroup>,
    sinks: Option<&[f32]>,
) -> Vec<Vec<u32>> {
    let visibility = Visibility::new(positions.len() as u32, groups);
    visibility.check(2 * N_TEXT).unwrap();
    let width = SPEC.n_heads * SPEC.k_dim;
    let all = wave(N_TEXT as usize * width, 0.0137);
    let q: Vec<f32> = positions
        .iter()
        .flat_map(|&p| all[p as usize * width..][..width].to_vec())
        .collect();
    let args = Attend {
        layer: LayerIdx(0),
        spec: SPEC,
        q: &q,
        visibility: &visibility,
        positions: &[],
        sinks,
        spare: CellIdx(2 * N_TEXT),
    };
    let op = OneOp::attend(&rows.layout().clone(), &args);
    let out = op.run(backend, rows).unwrap();
    let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect();
    out.chunks(SPEC.n_heads * SPEC.v_dim).map(bits).collect()
}

/// Tokens `rows` at `positions` that see `runs` from position `first` on.
fn group(rows: &[u32], positions: &[u32], runs: Vec<CellRun>, first: u32) -> VisibleGroup {
    let limits = positions.iter().map(|&p| PosRange::new(Pos(first), Pos(p)));
    VisibleGroup::new(rows.to_vec(), runs, limits.collect())
}

/// The same text twice: in cells in order, and in cells in reverse order.
fn stored(backend: &CpuBackend, kv_type: KvType) -> <CpuBackend as Backend>::Rows {
    let layout = layout(&SPEC, (2 * N_TEXT + N_TOKENS) as usize, kv_type);
    let mut rows = backend.allocate(&layout).unwrap();
    let k = wave((N_TEXT * 64) as usize, 0.37);
    let v = wave((N_TEXT * 128) as usize, 0.11);
    for cells in [
        (0..N_TEXT).map(CellIdx).collect::<Vec<_>>(),
        (N_TEXT..2 * N_TEXT).rev().map(CellIdx).collect(),
    ] {
        let args = StoreRows {
            layer: LayerIdx(0),
            k: &k,
            v: &v,
            cells: &cells,
        };
        let op = OneOp::store(&layout, &args);
        op.run(backend, &mut rows).unwrap();
    }
    rows
}

fn check(isa: Isa, n_threads: usize, kv_type: KvType) {
    let backend = backend(isa, n_threads);
    let mut rows = stored(&backend, kv_type);
    let sinks = [0.5, -3.0, 8.0, 0.0, 1.0, -1.0];
    for (sinks, first) in [(None, 0), (Some(&sinks[..]), 0), (None, 300)] {
        let at: Vec<u32> = (N_TEXT - N_TOKENS..N_TEXT).collect();
        let numbers: Vec<u32> = (0..N_TOKENS).collect();
        let whole = || vec![run(0, 0, N_TEXT)];
        let wanted = attend(
            &backend,
            &mut rows,
            &at,
            vec![group(&numbers, &at, whole(), first)],
            sinks,
        );
        let name = format!("{isa}, {n_threads} threads, {kv_type}, from {first}");
        // One token alone, and five together: both are divided by splits.
        for n in [1, 5] {
            for i in [0, 13, N_TOKENS - 5] {
                let at: Vec<u32> = (i..i + n).map(|i| at[i as usize]).collect();
                let numbers: Vec<u32> = (0..n).collect();
                let got = attend(
                    &backend,
                    &mut rows,
                    &at,
                    vec![group(&numbers, &at, whole(), first)],
                    sinks,
                );
                let wanted = &wanted[i as usize..(i + n) as usize];
                assert!(got == wanted, "{name}: {n} tokens from {i}");
            }
        }
        // Three sequences share the first 700 cells; a fourth has the text in scattered cells.
        let last = N_TEXT - 1;
        let own = |cell: u32| -> Vec<CellRun> {
            let copied = (0..N_TEXT - 700).map(|i| run(2 * N_TEXT - 1 - 700 - i, 700 + i, 1));
            match cell {
                0 => whole(),
                1 => vec![run(0, 0, 700), run(700, 700, N_TEXT - 700)],
                _ => std::iter::once(run(0, 0, 700)).chain(copied).collect(),
            }
        };
        let scattered = (0..N_TEXT).map(|i| run(2 * N_TEXT - 1 - i, i, 1)).collect();
        let groups = vec![
            group(&[2], &[last], own(0), first),
            group(&[0, 4], &[last - 1, last], own(1), first),
            group(&[1], &[last], own(2), first),
            group(&[3], &[last], scattered, first),
        ];
        let at = [last - 1, last, last, last, last];
        let got = attend(&backend, &mut rows, &at, groups, sinks);
        for (row, (got, &at)) in got.iter().zip(&at).enumerate() {
            let wanted = &wanted[(at - (N_TEXT - N_TOKENS)) as usize];
            assert!(got == wanted, "{name}: token {row} with other sequences");
        }
    }
}

#[test]
fn splits_and_other_sequences_change_no_bit() {
    for isa in Isa::all_available() {
        for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
            check(isa, 1, kv_type);
            check(isa, 3, kv_type);
        }
    }
}

/// Cells so far apart that each is in a split of its own: more splits than are computed at once,
/// for 1 token and for 64; 70 are not divided.
#[test]
fn splits_of_several_rounds_change_no_bit() {
    const N_SPLITS: u32 = 300;
    for isa in [Isa::Scalar, Isa::detect()] {
        let backend = backend(isa, 3);
        let mut rows = stored(&backend, KvType::F32);
        let runs: Vec<CellRun> = (0..N_SPLITS).map(|i| run(i, i * 256 + 3, 1)).collect();
        let at: Vec<u32> = (0..N_TOKENS).collect();
        // Even ones see the first splits, odd ones the last ones, one nothing.
        let limits = |i: u32| match i {
            5 => PosRange::EMPTY,
            _ if i.is_multiple_of(2) => PosRange::new(Pos(0), Pos((100 + 2 * i) * 256)),
            _ => PosRange::new(Pos(i * 512), Pos(u32::MAX)),
        };
        let mut attended = |at: &[u32]| {
            let group = |is_even: bool| {
                let own = (0u32..)
                    .zip(at)
                    .filter(|(_, i)| i.is_multiple_of(2) == is_even);
                let (numbers, limits) = own.map(|(row, &i)| (row, limits(i))).unzip();
                VisibleGroup::new(numbers, runs.clone(), limits)
            };
            let groups = vec![group(true), group(false)];
            attend(&backend, &mut rows, at, groups, Some(&[0.5; 6]))
        };
        let wanted = attended(&at);
        let got = attended(&at[..64]);
        assert!(got == wanted[..64], "{isa}: 64 tokens");
        for i in [0, 5, 63, 64] {
            let got = attended(&at[i..=i]);
            assert!(got == wanted[i..=i], "{isa}: token {i}");
        }
    }
}
