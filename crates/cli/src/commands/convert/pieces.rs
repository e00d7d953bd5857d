//! Work on many values, in pieces that threads do. Knows nothing of formats.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread;

/// How many threads there are.
pub(super) fn n_threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// What `encode` makes of each piece of the values, one after the other; each has a thread.
pub(super) fn in_pieces(
    values: &[f32],
    piece_len: usize,
    encode: impl Fn(&[f32]) -> anyhow::Result<Vec<u8>> + Sync,
) -> anyhow::Result<Vec<u8>> {
    let encode = &encode;
    let pieces = thread::scope(|scope| {
        let start = |piece| scope.spawn(move || encode(piece));
        let running: Vec<_> = values.chunks(piece_len).map(start).collect();
        let done = running.into_iter().map(|piece| match piece.join() {
            Ok(done) => done,
            Err(panic) => resume_unwind(panic),
        });
        done.collect::<anyhow::Result<Vec<Vec<u8>>>>()
    })?;
    Ok(pieces.concat())
}
