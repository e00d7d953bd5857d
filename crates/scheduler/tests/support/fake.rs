//! A model without weights: what it remembers of a token is a hash of the token and of everything
//! that the token sees, so a token that sees a wrong cell, or misses one, changes the whole text.

use kv_core::batch::BatchRules;
use std::collections::BTreeMap;

use cellar_scheduler::RowBytes;
use kv_core::batch::UBatch;
use kv_core::memory::RowCopy;
use kv_core::memory::{Composite, Memory, MemoryInputs, Restoration, Snapshot};
use kv_core::{Causality, CellIdx, PartIdx, Pos, TokenId, Window};

/// Tokens of the vocabulary.
pub const N_VOCAB: u32 = 1000;

/// Batches of at most 64 tokens of so many sequences.
pub fn rules(n_seqs: u32) -> BatchRules {
    BatchRules {
        n_batch: 64,
        n_seqs,
        n_vocab: N_VOCAB,
        n_embd: 8,
    }
}

/// The rows that a backend would hold.
#[derive(Debug)]
pub struct FakeRows {
    /// By part and cell.
    cells: Vec<Vec<u64>>,
    /// By row of states.
    states: Vec<u64>,
}

impl FakeRows {
    pub fn of(memory: &Composite) -> Self {
        let rows = memory.n_rows();
        Self {
            cells: rows.cells.iter().map(|&n| vec![0; n]).collect(),
            states: vec![0; rows.states],
        }
    }

    /// Copies rows, as an edit left it to do.
    pub fn copy(&mut self, copies: &[RowCopy]) {
        for copy in copies {
            let cells = &mut self.cells[copy.part.as_usize()];
            let from = copy.from.as_usize();
            cells.copy_within(from..from + copy.len as usize, copy.to.as_usize());
        }
    }

    /// The rows of what is in a snapshot.
    pub fn save(&self, snapshot: &Snapshot) -> SavedRows {
        let cells = snapshot.parts().iter().flat_map(|part| {
            let rows = &self.cells[part.part.as_usize()];
            let cells = part.cells.iter();
            cells.map(|cell| ((part.part, cell.row), rows[cell.row.as_usize()]))
        });
        let states = snapshot.state_rows().into_iter();
        SavedRows {
            cells: cells.collect(),
            states: states
                .map(|row| (row, self.states[row.as_usize()]))
                .collect(),
        }
    }

    /// Writes saved rows where a restoration wants them.
    pub fn restore(&mut self, saved: &SavedRows, restored: &Restoration) {
        for write in &restored.row_writes {
            for at in 0..write.len {
                let content = saved.cells[&(write.part, write.from.offset(at))];
                self.cells[write.part.as_usize()][write.to.offset(at).as_usize()] = content;
            }
        }
        for write in &restored.state_writes {
            self.states[write.to.as_usize()] = saved.states[&write.from];
        }
    }

    /// Computes a ubatch and returns the output of each row that is wanted.
    pub fn run(&mut self, ubatch: &UBatch, inputs: &MemoryInputs) -> Vec<u64> {
        let n_tokens = ubatch.n_tokens() as usize;
        let mut out = vec![0u64; n_tokens];
        for row in 0..n_tokens {
            let (token, pos) = (ubatch.tokens[row], Pos(ubatch.positions[row]));
            for (cells, part) in self.cells.iter_mut().zip(&inputs.parts) {
                let seen = [&part.visibility, &part.first].map(|seen| seen.row(row as u32));
                let seen = seen.into_iter().flatten();
                let before = seen.filter(|&(_, at)| at != pos);
                let sum = before.fold(0u64, |sum, (cell, at)| {
                    sum.wrapping_add(mix(cells[cell.as_usize()], u64::from(at.0)))
                });
                let content = mix(sum, u64::from(token));
                cells[part.cells[row].as_usize()] = content;
                out[row] = mix(out[row], content);
            }
        }
        for group in &inputs.states {
            let mut state = group.source.map_or(0, |row| self.states[row.as_usize()]);
            for (n, &row) in (1u32..).zip(&group.rows) {
                state = mix(state, u64::from(ubatch.tokens[row as usize]));
                out[row as usize] = mix(out[row as usize], state);
                let store = group.stores.iter().find(|store| store.n_rows == n);
                if let Some(store) = store {
                    self.states[store.to.as_usize()] = state;
                }
            }
        }
        let wanted = ubatch.output_rows.iter();
        wanted.map(|&row| out[row as usize]).collect()
    }
}

/// Rows that were saved.
#[derive(Debug)]
pub struct SavedRows {
    cells: BTreeMap<(PartIdx, CellIdx), u64>,
    states: BTreeMap<CellIdx, u64>,
}

impl SavedRows {
    /// Makes each another one, as rounding may.
    pub fn round(&mut self) {
        let contents = self.cells.values_mut().chain(self.states.values_mut());
        contents.for_each(|content| *content |= 1);
    }

    /// Their bytes.
    pub fn n_bytes(&self, row_bytes: &RowBytes) -> u64 {
        let of = |part: PartIdx| row_bytes.cells.get(part.as_usize()).copied().unwrap_or(1);
        let cells: u64 = self.cells.keys().map(|&(part, _)| of(part)).sum();
        cells + self.states.len() as u64 * row_bytes.state.unwrap_or(1)
    }
}

/// One text alone, without any memory module.
#[derive(Debug)]
pub struct Alone {
    windows: Vec<Window>,
    contents: Vec<Vec<u64>>,
    state: Option<u64>,
    n_tokens: usize,
}

impl Alone {
    pub fn new(memory: &Composite) -> Self {
        let parts = memory.parts().iter();
        let windows: Vec<Window> = parts.map(|part| part.config().window).collect();
        Self {
            contents: vec![Vec::new(); windows.len()],
            windows,
            state: memory.states().map(|_| 0),
            n_tokens: 0,
        }
    }

    /// The output after one more token.
    pub fn push(&mut self, token: TokenId) -> u64 {
        let query = Pos(self.n_tokens as u32);
        let mut out = 0;
        for (window, contents) in self.windows.iter().zip(&mut self.contents) {
            let shows = |window: Window, at: u32| window.sees(query, Pos(at), Causality::Causal);
            let shown = |at| shows(*window, at) || window.first().is_some_and(|w| shows(w, at));
            let before = (0u32..).zip(contents.iter()).filter(|(at, _)| shown(*at));
            let sum = before.fold(0u64, |sum, (at, &content)| {
                sum.wrapping_add(mix(content, u64::from(at)))
            });
            contents.push(mix(sum, u64::from(token.0)));
            out = mix(out, contents[self.n_tokens]);
        }
        if let Some(state) = &mut self.state {
            *state = mix(*state, u64::from(token.0));
            out = mix(out, *state);
        }
        self.n_tokens += 1;
        out
    }
}

/// What the fake model chooses from an output: a token, or the end of the text.
pub fn choose(output: u64) -> Option<TokenId> {
    (!(output >> 40).is_multiple_of(61)).then_some(TokenId((output % u64::from(N_VOCAB)) as u32))
}

fn mix(a: u64, b: u64) -> u64 {
    let mut x = (a ^ b.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
