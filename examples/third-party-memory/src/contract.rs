//! The memory passes the contract suite. Images, divided positions, compaction and saved states are
//! refused, which the suite allows a memory.

use kv_contract::memory::batches::N_SEQS;
use kv_contract::memory::proptest::prelude::{Just, Strategy};
use kv_contract::memory::{MemoryUnderTest, PartView};
use kv_contract::memory_contract;
use kv_core::cells::Cell;
use kv_core::memory::{Streams, UnifiedConfig};
use kv_core::{Causality, PartIdx, SeqId, SeqSet, Window};

use crate::{StreamingConfig, StreamingLlm};

impl MemoryUnderTest for StreamingLlm {
    fn parts(&self) -> Vec<PartView> {
        let config = UnifiedConfig {
            part: PartIdx(0),
            n_seqs: N_SEQS,
            n_cells: self.n_cells(),
            streams: Streams::PerSequence,
            window: Window::Full,
            causality: Causality::Causal,
        };
        let seqs = (0..N_SEQS).map(SeqId);
        let cells = seqs.flat_map(|seq| {
            let cell = move |pos| Cell::new(pos, SeqSet::one(seq));
            let tokens = self.tokens(seq).iter();
            tokens.map(move |token| (token.cell, cell(token.pos)))
        });
        vec![PartView::new(config, cells)]
    }
}

fn memory(n_sinks: u32, n_recent: u32, n_evicted: u32) -> StreamingLlm {
    StreamingLlm::new(StreamingConfig {
        n_seqs: N_SEQS,
        n_sinks,
        n_recent,
        n_evicted,
    })
}

fn any_size() -> impl Strategy<Value = StreamingLlm> {
    let sizes = (0u32..5, 1u32..20, 0u32..6);
    sizes.prop_map(|(n_sinks, n_recent, n_evicted)| memory(n_sinks, n_recent, n_evicted))
}

memory_contract!(any_sizes, any_size(), roomy: memory(4, 12, 3));
memory_contract!(one_size, Just(memory(2, 6, 2)), roomy: memory(2, 6, 2));
