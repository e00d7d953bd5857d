//! Giving a sequence the state of another.
//!
//! A state cannot be put together from two: the sequence must have no other tokens, and the other
//! must keep the state that its tokens up to the end of the range make. Knows nothing of rows.

use super::Recurrent;
use super::chain::{Chain, Cut};
use crate::ids::{Pos, SeqId};
use crate::memory::Refusal;
use crate::window::PosRange;

/// The chain of `to` with the tokens of `from` in `range`, and their number; `None` where it would
/// stay as it is.
pub(super) fn after(
    memory: &Recurrent,
    from: SeqId,
    to: SeqId,
    range: PosRange,
) -> Result<Option<(Option<Chain>, u32)>, Refusal> {
    memory.check_seq(from)?;
    memory.check_seq(to)?;
    if from == to || range.is_empty() {
        return Ok(None);
    }
    let source = memory.chain(from).filter(|chain| {
        let has = chain.positions();
        !range.intersection(has).is_empty()
    });
    let Some(source) = source else {
        // Nothing to copy: `to` only loses what it has there.
        return Ok(Some((memory.without(to, range)?, 0)));
    };
    let indivisible = |seq, has| Refusal::StateIndivisible { seq, has, range };
    if let Some(target) = memory.chain(to).map(Chain::positions)
        && range.intersection(target) != target
    {
        return Err(indivisible(to, target));
    }
    let has = source.positions();
    if range.first > has.first {
        return Err(indivisible(from, has));
    }
    // The tokens behind the range are not copied: as if they were taken from the copy.
    let copy = match source.cut(PosRange::new(range.last.next(), Pos(u32::MAX))) {
        Cut::BackTo(at) => source.clone().truncated(at),
        Cut::Gone { oldest } => {
            return Err(Refusal::StateGone {
                seq: from,
                last: has.last,
                wanted: range.last,
                oldest,
                n_snapshots: (source.states().len() - 1) as u32,
            });
        }
        _ => source.clone(),
    };
    let n_tokens = copy.current().map_or(0, |state| state.n_tokens);
    Ok(Some((Some(copy), n_tokens)))
}
