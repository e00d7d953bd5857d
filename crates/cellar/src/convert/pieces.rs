//! Work on many values, in pieces that threads do. Knows nothing of formats.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread;

/// How many threads there are.
pub(super) fn n_threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// What `encode` makes of each piece of the values, one after the other; each has a thread.
pub(super) fn in_pieces<E: Send>(
    values: &[f32],
    piece_len: usize,
    encode: impl Fn(&[f32]) -> Result<Vec<u8>, E> + Sync,
) -> Result<Vec<u8>, E> {
    let encode = &encode;
    let pieces = thread::scope(|scope| {
        let start = |piece| scope.spawn(move || encode(piece));
        let running: Vec<_> = values.chunks(piece_len).map(start).collect();
        let done = running.into_iter().map(|piece| match piece.join() {
            Ok(done) => done,
            Err(panic) => resume_unwind(panic),
        });
        done.collect::<Result<Vec<Vec<u8>>, E>>()
    })?;
    Ok(pieces.concat())
}
