//! Visibility against 57 masks that were computed independently: every window, causal or not,
//! several sequences, rings, gaps, shared cells; and which cells may be recycled.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::collections::BTreeMap;

use kv_core::cells::{Cell, KvCells};
use kv_core::{Causality, CellIdx, Pos, PosRange, SeqId, SeqSet, Visibility, VisibleGroup, Window};
use kv_graph::Alibi;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    swa_type: String,
    n_swa: u32,
    causal: bool,
    cells: Vec<GoldenCell>,
    queries: Vec<Query>,
    visible: Vec<Vec<u8>>,
    #[serde(default)]
    prunable: BTreeMap<String, Vec<u32>>,
    alibi: Option<GoldenAlibi>,
}

#[derive(Deserialize)]
struct GoldenCell {
    pos: i64,
    seqs: SeqSet,
}

#[derive(Deserialize)]
struct Query {
    pos: u32,
    seq: u32,
}

#[derive(Deserialize)]
struct GoldenAlibi {
    n_head: usize,
    max_bias: f32,
    slopes: Vec<f64>,
    distance: Vec<Vec<Option<i64>>>,
}

impl Case {
    fn window(&self) -> Window {
        match self.swa_type.as_str() {
            "none" => Window::Full,
            "standard" => Window::Sliding(self.n_swa),
            "chunked" => Window::Chunked(self.n_swa),
            "symmetric" => Window::Symmetric(self.n_swa),
            other => panic!("{}: unknown window {other}", self.name),
        }
    }

    fn causality(&self) -> Causality {
        if self.causal {
            Causality::Causal
        } else {
            Causality::NonCausal
        }
    }

    fn kv_cells(&self) -> KvCells {
        let mut cells = KvCells::new(0..self.cells.len() as u32, 0..256);
        for (at, cell) in (0u32..).zip(&self.cells) {
            if let Ok(pos) = u32::try_from(cell.pos) {
                cells.insert(CellIdx(at), &Cell::new(Pos(pos), cell.seqs.clone()));
            }
        }
        cells
    }

    /// A group for each query, so that none profits from another's runs.
    fn visibility(&self) -> Visibility {
        let cells = self.kv_cells();
        let group = |(row, q): (u32, &Query)| {
            let limits = self.window().visible_keys(Pos(q.pos), self.causality());
            let runs = cells.runs(SeqId(q.seq)).into_iter();
            let runs = runs.flat_map(|runs| runs.within(PosRange::ALL)).collect();
            VisibleGroup::new(vec![row], runs, vec![limits])
        };
        let n_rows = self.queries.len() as u32;
        Visibility::new(n_rows, (0u32..).zip(&self.queries).map(group).collect())
    }
}

fn cases() -> Vec<Case> {
    let golden: Golden =
        serde_json::from_str(include_str!("../../../tests/fixtures/kv-core/masks.json")).unwrap();
    assert_eq!(golden.cases.len(), 57);
    golden.cases
}

#[test]
fn k43_k46_every_golden_mask_is_met() {
    for case in cases() {
        let mask = case
            .visibility()
            .dense_mask(case.cells.len() as u32)
            .unwrap();
        for (row, expected) in (0u32..).zip(&case.visible) {
            let got: Vec<u8> = mask.row(row).iter().map(|&sees| u8::from(sees)).collect();
            assert_eq!(&got, expected, "{} row {row}\n{mask}", case.name);
        }
        assert_eq!(mask.n_rows() as usize, case.visible.len(), "{}", case.name);
    }
}

#[test]
fn cells_that_no_later_token_sees_are_recognised() {
    let (mut n_lists, mut n_cases) = (0, 0);
    for case in cases() {
        let cells = case.kv_cells();
        n_cases += u32::from(!case.prunable.is_empty());
        for (seq, expected) in &case.prunable {
            let seq = SeqId(seq.parse().unwrap());
            let runs = cells.runs(seq).unwrap();
            let next = runs.positions().map_or(Pos(0), |has| has.last.next());
            let mut expired: Vec<u32> = runs
                .within(PosRange::ALL)
                .flat_map(|run| run.iter())
                .filter(|&(_, pos)| case.window().is_expired(pos, next))
                .map(|(cell, _)| cell.0)
                .collect();
            expired.sort_unstable();
            assert_eq!(&expired, expected, "{} sequence {seq}", case.name);
            n_lists += 1;
        }
    }
    assert_eq!((n_cases, n_lists), (24, 35));
}

#[test]
fn slopes_and_positions_of_visible_cells_give_alibi_biases() {
    let mut n_cases = 0;
    for case in cases() {
        let Some(alibi) = &case.alibi else { continue };
        let (n_heads, max_bias) = (alibi.n_head, alibi.max_bias);
        let slopes = Alibi::new(max_bias).slopes(n_heads);
        assert_eq!(slopes.len(), alibi.slopes.len(), "{}", case.name);
        for (got, wanted) in slopes.iter().zip(&alibi.slopes) {
            assert!(
                (f64::from(*got) - wanted).abs() < 1e-7 * wanted,
                "{}",
                case.name
            );
        }
        let visibility = case.visibility();
        assert_eq!(alibi.distance.len(), case.queries.len(), "{}", case.name);
        for (row, (query, expected)) in (0u32..).zip(case.queries.iter().zip(&alibi.distance)) {
            let mut distance = vec![None; case.cells.len()];
            for (cell, pos) in visibility.row(row) {
                let d = i64::from(pos.0) - i64::from(query.pos);
                distance[cell.as_usize()] = Some(-d.abs());
            }
            assert_eq!(&distance, expected, "{} row {row}", case.name);
        }
        n_cases += 1;
    }
    assert_eq!(n_cases, 6);
}
