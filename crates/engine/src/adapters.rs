//! [`TextAdapters`]: the adapters of a text, and [`ActiveAdapters`]: those of the sequences of an
//! engine, as rows for its graphs.
//!
//! Invariant: a token's row depends on its sequence and position alone. Knows no matrices.

use std::collections::HashMap;
use std::sync::Arc;

use cellar_scheduler::{PrefixUse, Salt};
use kv_core::batch::UBatch;
use kv_core::{Pos, SeqId, TokenId};
use model_core::adapters::{AdapterError, Adapters, n_active};

/// The scales of a text's adapters, one for each that the model was loaded with; 0 leaves one out.
#[derive(Clone, Debug, PartialEq)]
pub struct TextAdapters {
    scales: Arc<[f32]>,
    /// Those before `from`, where some are activated ones.
    before: Arc<[f32]>,
    from: Pos,
    /// Differs where rows do; 0 where no adapter is active.
    key: u64,
}

impl TextAdapters {
    /// These scales for a prompt. Activated adapters are active from the last place on at which the
    /// prompt has their tokens, and nowhere in a text whose prompt has none.
    ///
    /// # Errors
    /// [`AdapterError`] where there are more or fewer scales than adapters, or one is no number.
    pub fn new(
        adapters: &Adapters,
        scales: &Arc<[f32]>,
        prompt: &[TokenId],
    ) -> Result<Self, AdapterError> {
        adapters.check_scales(scales)?;
        let mut active: Vec<f32> = scales.to_vec();
        let mut before = active.clone();
        let mut from = 0;
        let each = adapters.all().iter().zip(&mut active).zip(&mut before);
        for ((adapter, scale), before) in each {
            let wanted = adapter.invocation();
            if wanted.is_empty() || *scale == 0.0 {
                continue;
            }
            *before = 0.0;
            match prompt.windows(wanted.len()).rposition(|at| at == wanted) {
                Some(at) => from = from.max(at),
                None => *scale = 0.0,
            }
        }
        let from = u32::try_from(from).unwrap_or(u32::MAX);
        let key = adapters.key(&active);
        let key = if before == active {
            key
        } else {
            // Rows before it are the model's, so texts that are activated elsewhere share none.
            key.wrapping_add(u64::from(from)).max(1)
        };
        Ok(Self {
            scales: active.into(),
            before: before.into(),
            from: Pos(from),
            key,
        })
    }

    /// The texts that may share the rows of its tokens: those with the same adapters and scales.
    #[must_use]
    pub fn share(&self, prefix: PrefixUse) -> PrefixUse {
        match prefix {
            PrefixUse::Within(Salt(salt)) if self.key != 0 => {
                PrefixUse::Within(Salt(salt.rotate_left(17) ^ self.key))
            }
            prefix => prefix,
        }
    }

    fn at(&self, pos: Pos) -> &[f32] {
        if pos < self.from {
            &self.before
        } else {
            &self.scales
        }
    }
}

/// The adapters of the sequences of an engine.
#[derive(Debug)]
pub(crate) struct ActiveAdapters {
    adapters: Arc<Adapters>,
    /// Of sequences that do not have others.
    default_scales: Arc<[f32]>,
    /// Of sequences that do not have the default ones.
    of_seq: HashMap<SeqId, TextAdapters>,
    /// The rows of the last ubatch.
    rows: Vec<f32>,
}

impl ActiveAdapters {
    pub(crate) fn new(adapters: Arc<Adapters>) -> Self {
        Self {
            default_scales: Arc::clone(adapters.default_scales()),
            adapters,
            of_seq: HashMap::new(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn all(&self) -> &Arc<Adapters> {
        &self.adapters
    }

    pub(crate) fn default_scales(&self) -> &[f32] {
        &self.default_scales
    }

    /// Gives all sequences these scales that do not have others.
    pub(crate) fn set_default(&mut self, scales: Arc<[f32]>) -> Result<(), AdapterError> {
        self.adapters.check_scales(&scales)?;
        self.default_scales = scales;
        Ok(())
    }

    /// Gives a sequence these adapters, or the default ones.
    pub(crate) fn set(&mut self, seq: SeqId, adapters: Option<TextAdapters>) {
        match adapters {
            Some(adapters) => {
                self.of_seq.insert(seq, adapters);
            }
            None => {
                self.of_seq.remove(&seq);
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        self.of_seq.clear();
    }

    fn scales(&self, seq: SeqId, pos: Pos) -> &[f32] {
        match self.of_seq.get(&seq) {
            Some(adapters) => adapters.at(pos),
            None => &self.default_scales,
        }
    }

    /// A description that tells the rows of a sequence from those with other adapters.
    pub(crate) fn describe(&self, seq: SeqId) -> String {
        match self.of_seq.get(&seq) {
            Some(adapters) => self.adapters.describe(&adapters.scales),
            None => self.adapters.describe(&self.default_scales),
        }
    }

    /// The most adapters that a token of the ubatch has: a number of which there are few, so that
    /// few programs are compiled.
    pub(crate) fn n_active(&self, ubatch: &UBatch) -> usize {
        let each = ubatch.first_seqs.iter().zip(&ubatch.positions);
        let active = each.map(|(&seq, &pos)| n_active(self.scales(seq, Pos(pos))));
        match active.max() {
            None | Some(0) => 0,
            Some(n) => n.next_power_of_two().min(self.adapters.len()),
        }
    }

    /// The rows of the ubatch's tokens, each behind what is given in its place.
    pub(crate) fn rows(&mut self, ubatch: &UBatch, given: &[f32], n_active: usize) -> &[f32] {
        let n_rows = ubatch.positions.len().max(1);
        let width = given.len() / n_rows;
        let mut rows = std::mem::take(&mut self.rows);
        rows.clear();
        let each = ubatch.first_seqs.iter().zip(&ubatch.positions);
        for (at, (&seq, &pos)) in each.enumerate() {
            let own = given.get(at * width..(at + 1) * width);
            rows.extend_from_slice(own.unwrap_or_default());
            let scales = self.scales(seq, Pos(pos));
            self.adapters.push_row(scales, n_active, &mut rows);
        }
        self.rows = rows;
        &self.rows
    }
}
