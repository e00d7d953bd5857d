//! Recurrent states, alone or with attention: what the simulated backend holds of them.
//!
//! A state is the list of tokens that it has taken in. So whatever rows the memory shares, reuses
//! or goes back to, the state of a sequence must be all tokens of the model's sequence, in order.

use kv_core::memory::KeptState;
use kv_core::memory::{StateGroup, check_states};
use kv_core::{CellIdx, SeqId};

/// By row: the tokens of its state; `None` where nothing sound is.
#[derive(Clone, Debug, Default)]
pub struct StateRows(Vec<Option<Vec<u64>>>);

impl StateRows {
    /// Rows without states.
    pub fn new(n_rows: usize) -> Self {
        Self(vec![None; n_rows])
    }

    /// Every group takes its rows into the state that it begins with.
    pub fn compute(&mut self, groups: &[StateGroup], ids: &[u64]) {
        if self.0.is_empty() {
            return assert!(groups.is_empty());
        }
        self.check_groups(groups, ids.len() as u32);
        for group in groups {
            let mut state = match group.source {
                None => Vec::new(),
                Some(row) => self.0[row.as_usize()].clone().unwrap(),
            };
            for (n_rows, &row) in (1u32..).zip(&group.rows) {
                state.push(ids[row as usize]);
                if let Some(store) = group.stores.iter().find(|s| s.n_rows == n_rows) {
                    self.0[store.to.as_usize()] = Some(state.clone());
                }
            }
        }
    }

    /// The groups of a ubatch of so many tokens read and store rows that are there.
    pub fn check_groups(&self, groups: &[StateGroup], n_tokens: u32) {
        check_states(groups, n_tokens, self.0.len() as u32).unwrap();
    }

    /// Takes a state as it was saved; `None` where it could not be written.
    pub fn set(&mut self, to: CellIdx, state: Option<Vec<u64>>) {
        self.0[to.as_usize()] = state;
    }

    /// All rows: the tokens of each state.
    pub(crate) fn rows(&self) -> &[Option<Vec<u64>>] {
        &self.0
    }

    /// The tokens of a state.
    pub fn get(&self, row: CellIdx) -> Option<Vec<u64>> {
        self.0[row.as_usize()].clone()
    }

    /// Overwrites the states that a computation was to store, as a failed one may.
    pub fn destroy(&mut self, groups: &[StateGroup]) {
        for store in groups.iter().flat_map(|group| &group.stores) {
            self.0[store.to.as_usize()] = None;
        }
    }

    /// Every state that `seq` can go back to is that after the tokens up to there; the last is
    /// after all of them.
    pub fn check(&self, states: &[KeptState], seq: SeqId, tokens: &[u64]) {
        let last = states.last().map_or(0, |state| state.n_tokens as usize);
        assert_eq!(last, tokens.len(), "tokens in the state of sequence {seq}");
        for state in states {
            let taken_in = tokens[..state.n_tokens as usize].to_vec();
            assert_eq!(
                self.0[state.row.as_usize()],
                Some(taken_in),
                "sequence {seq}"
            );
        }
    }
}
