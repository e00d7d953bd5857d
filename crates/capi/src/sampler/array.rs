//! [`Array`]: the candidates of a token, in the caller's memory.
//!
//! Invariant: what is kept is a part of what was given; `sorted` says that logits fall. Chooses
//! nothing by itself.

use std::cmp::Ordering;

use crate::abi::{TokenData, TokenDataArray};
use crate::ffi::Out;

/// A `llama_token_data_array`.
pub(crate) struct Array<'a>(&'a mut TokenDataArray);

/// Falling logit; what is no number comes last.
fn likeliest_first(a: &TokenData, b: &TokenData) -> Ordering {
    let of = |token: &TokenData| {
        if token.logit.is_nan() {
            f32::NEG_INFINITY
        } else {
            token.logit
        }
    };
    of(b).total_cmp(&of(a))
}

impl<'a> Array<'a> {
    pub(crate) fn new(array: &'a mut TokenDataArray) -> Self {
        Self(array)
    }

    /// The candidates.
    pub(crate) fn tokens(&mut self) -> &mut [TokenData] {
        Out::of(self.0.data).slice(self.0.size)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.size == 0 || self.0.data.is_null()
    }

    pub(crate) fn is_sorted(&self) -> bool {
        self.0.sorted
    }

    pub(crate) fn set_unsorted(&mut self) {
        self.0.sorted = false;
    }

    pub(crate) fn select(&mut self, index: i64) {
        self.0.selected = index;
    }

    /// Keeps the first `n`.
    pub(crate) fn truncate(&mut self, n: usize) {
        self.0.size = self.0.size.min(n);
    }

    /// Leaves out the first `n`.
    pub(crate) fn skip(&mut self, n: usize) {
        let n = n.min(self.0.size);
        self.0.data = self.tokens()[n..].as_mut_ptr();
        self.0.size -= n;
    }

    /// Keeps these, which are some of the candidates.
    pub(crate) fn replace(&mut self, kept: &[TokenData]) {
        let n = kept.len().min(self.0.size);
        self.tokens()[..n].copy_from_slice(&kept[..n]);
        self.truncate(n);
    }

    /// Sorts by falling logit.
    pub(crate) fn sort(&mut self) {
        if !self.0.sorted {
            self.tokens().sort_by(likeliest_first);
            self.0.sorted = true;
        }
    }

    /// Keeps the `k` likeliest, sorted.
    pub(crate) fn keep_top(&mut self, k: usize) {
        let k = k.min(self.0.size);
        if !self.0.sorted && k > 0 && k < self.0.size {
            self.tokens().select_nth_unstable_by(k - 1, likeliest_first);
        }
        self.truncate(k);
        self.sort();
    }

    /// The largest logit.
    pub(crate) fn max(&mut self) -> f32 {
        let logits = self.tokens().iter().map(|token| token.logit);
        logits.fold(f32::NEG_INFINITY, f32::max)
    }

    /// Writes the probabilities.
    pub(crate) fn softmax(&mut self) {
        let max = self.max();
        let mut sum = 0.0;
        for token in self.tokens() {
            token.p = (token.logit - max).exp();
            sum += token.p;
        }
        for token in self.tokens() {
            token.p /= sum;
        }
    }

    /// Sorts and writes the probabilities.
    pub(crate) fn sorted_softmax(&mut self) {
        self.sort();
        self.softmax();
    }
}
