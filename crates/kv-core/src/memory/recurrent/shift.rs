//! Moving a recurrent sequence to other positions: as a whole, or not at all.
//!
//! A state took its tokens in as one and does not depend on where they were, so a move changes
//! numbers and no row. Invariant: checked whole before anything changes.

use super::Recurrent;
use super::chain::Chain;
use crate::batch::MAX_POS;
use crate::ids::SeqId;
use crate::memory::Refusal;
use crate::memory::shift::{Division, PosChange};
use crate::window::PosRange;

/// The outcome for the sequence; `None` where nothing changes.
pub(super) fn after(
    memory: &Recurrent,
    seq: SeqId,
    range: PosRange,
    change: PosChange,
) -> Result<Option<Chain>, Refusal> {
    memory.check_seq(seq)?;
    if let PosChange::Divide(Division { by: 0, .. }) = change {
        return Err(Refusal::DivideByZero { seq });
    }
    let Some(chain) = memory.chain(seq) else {
        return Ok(None);
    };
    let has = chain.positions();
    let moved = change.changes(range).intersection(has);
    if moved.is_empty() {
        return Ok(None);
    }
    if moved != has || matches!(change, PosChange::Divide(_)) {
        return Err(Refusal::StateMovesWhole {
            seq,
            moved,
            change,
            has,
        });
    }
    let (first, last) = (change.apply(has.first), change.apply(has.last));
    if first < 0 || last > i64::from(MAX_POS.0) {
        return Err(Refusal::OutOfRange {
            seq,
            moved,
            change,
            first,
            last,
        });
    }
    Ok(Some(chain.moved(|pos| change.apply(pos))))
}
