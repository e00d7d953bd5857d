//! The examples that the page walks through: a memory of [`kv_core`] each, and what is asked of it.

use kv_core::memory::{
    Composite, Edit, MemoryConfigError, Recurrent, RecurrentConfig, Seqs, Streams, Unified,
    UnifiedConfig,
};
use kv_core::{Causality, PartIdx, Pos, PosRange, SeqId, Window};

use crate::walk::{Frame, Walk, WatchedMemory};

/// Makes the frames of an example.
type Frames = fn() -> Result<Vec<Frame>, MemoryConfigError>;

struct Example {
    name: &'static str,
    title: &'static str,
    about: &'static str,
    frames: Frames,
}

const EXAMPLES: [Example; 5] = [
    Example {
        name: "sequences",
        title: "Two sequences",
        about: "Sequences share one set of cells. A token sees the cells of its own sequence alone, \
                wherever they lie.",
        frames: sequences,
    },
    Example {
        name: "prefix",
        title: "A shared prefix",
        about: "Two texts that begin alike keep one copy of the beginning: a cell can belong to \
                several sequences.",
        frames: prefix,
    },
    Example {
        name: "window",
        title: "A sliding window",
        about: "A layer with a window of 4 sees the last 4 positions. Cells behind the window are \
                used again, so a long text needs few.",
        frames: window,
    },
    Example {
        name: "shift",
        title: "A shift",
        about: "Where the cells are full, the middle of a text can be dropped, and what is behind \
                it moves down. Keys carry their position, so these rows are rotated; none is copied.",
        frames: shift,
    },
    Example {
        name: "states",
        title: "Recurrent states",
        about: "A recurrent layer keeps one state of a sequence in place of its tokens. The states \
                before the last 2 tokens stay as snapshots, so that the text can go back.",
        frames: states,
    },
];

/// The names of all examples.
pub fn walk_names() -> impl Iterator<Item = &'static str> {
    EXAMPLES.iter().map(|example| example.name)
}

/// Walks through an example.
///
/// # Errors
/// A text that names the example that does not exist, or the memory that cannot be.
pub fn walk(name: &str) -> Result<Walk, String> {
    let found = EXAMPLES.iter().find(|example| example.name == name);
    let example = found.ok_or_else(|| {
        let known: Vec<&str> = walk_names().collect();
        format!(
            "there is no example '{name}': choose one of {}",
            known.join(", ")
        )
    })?;
    Ok(Walk {
        name: example.name,
        title: example.title,
        about: example.about,
        frames: (example.frames)().map_err(|error| error.to_string())?,
    })
}

fn cells(n_cells: u32, window: Window) -> Result<Composite, MemoryConfigError> {
    let part = Unified::new(UnifiedConfig {
        part: PartIdx(0),
        n_seqs: 2,
        n_cells,
        streams: Streams::Shared,
        window,
        causality: Causality::Causal,
    })?;
    Composite::from_parts(vec![part], None)
}

const fn removal(seq: u32, range: PosRange) -> Edit {
    Edit::Remove {
        seqs: Seqs::One(SeqId(seq)),
        range,
    }
}

fn copy_of_all() -> Edit {
    Edit::Copy {
        from: SeqId(0),
        to: SeqId(1),
        range: PosRange::ALL,
    }
}

fn sequences() -> Result<Vec<Frame>, MemoryConfigError> {
    let mut memory = WatchedMemory::new(
        cells(12, Window::Full)?,
        "12 cells. Each has room for the keys and values of one token, in every layer.",
    );
    memory.feed(
        0,
        "The cat sat",
        "Each token sees those before it, and itself.",
    );
    memory.feed(
        1,
        "A dog",
        "The next free cells. Nothing of sequence 0 is seen.",
    );
    memory.feed(
        0,
        "on the mat",
        "Sequence 0 goes on behind the cells of the other: order is by position, not by cell.",
    );
    memory.feed(1, "ran off", "Again, only its own cells are seen.");
    memory.feed(
        0,
        "and fell asleep",
        "3 tokens, but 2 cells are free. The plan fails before anything is computed, and nothing \
         has changed.",
    );
    memory.edit(
        &[removal(1, PosRange::ALL)],
        "remove sequence 1",
        "Its cells are free at once. No row is touched.",
    );
    memory.feed(
        0,
        "and fell asleep",
        "Now there is room. A token goes into the cell behind the last one of its sequence where \
         that is free: attention reads long runs faster.",
    );
    memory.feed(
        0,
        "by the fire",
        "Behind the last cell nothing is left, so gaps are filled: tokens need not be neighbours.",
    );
    Ok(memory.into_frames())
}

fn prefix() -> Result<Vec<Frame>, MemoryConfigError> {
    let mut memory = WatchedMemory::new(cells(12, Window::Full)?, "12 cells.");
    memory.feed(0, "You keep a cellar", "A prompt, computed once.");
    memory.edit(
        &[copy_of_all()],
        "copy sequence 0 to sequence 1",
        "The cells belong to both now. Not one row was copied.",
    );
    memory.feed(0, "of wine", "The first text goes on.");
    memory.feed(
        1,
        "of memories .",
        "So does the second: it sees the shared cells and its own, as if it had been alone.",
    );
    memory.edit(
        &[removal(0, PosRange::ALL)],
        "remove sequence 0",
        "Only the cells that were its alone are free. The prefix stays for sequence 1.",
    );
    Ok(memory.into_frames())
}

fn window() -> Result<Vec<Frame>, MemoryConfigError> {
    let mut memory = WatchedMemory::new(
        cells(8, Window::Sliding(4))?,
        "8 cells, for a text of any length.",
    );
    memory.feed(0, "It was a dark", "4 tokens: each sees all before it.");
    memory.feed(
        0,
        "and stormy night",
        "The last token sees itself and the 3 before it.",
    );
    memory.feed(
        0,
        "in the old",
        "The oldest tokens are behind the window of all that follow: their cells are used again.",
    );
    memory.feed(0, "house by the sea", "The text has 14 tokens in 8 cells.");
    memory.edit(
        &[removal(0, PosRange::from(Pos(4)..))],
        "remove positions 4 and later",
        "To go on from there, tokens would have to be seen that are gone. This is refused, rather \
         than computed wrongly.",
    );
    Ok(memory.into_frames())
}

fn shift() -> Result<Vec<Frame>, MemoryConfigError> {
    let mut memory = WatchedMemory::new(cells(10, Window::Full)?, "10 cells.");
    memory.feed(
        0,
        "Once there was a very small red ball that",
        "One cell is left.",
    );
    memory.feed(
        0,
        "rolled away fast",
        "3 tokens, but one free cell: refused, with the numbers.",
    );
    memory.edit(
        &Edit::drop_between(SeqId(0), Pos(1), Pos(5)),
        "drop positions 1 to 4, and move the others down by 4",
        "Tokens stay in their cells; their positions change. The keys of the moved ones are \
         rotated, and 4 cells are free.",
    );
    memory.feed(
        0,
        "rolled away fast",
        "They go into the gap. They see the beginning and what was moved.",
    );
    Ok(memory.into_frames())
}

fn states() -> Result<Vec<Frame>, MemoryConfigError> {
    let config = RecurrentConfig::new(2).with_snapshots(2);
    let memory = Composite::from_parts(Vec::new(), Some(Recurrent::new(config)?))?;
    let mut memory = WatchedMemory::new(
        memory,
        "No cells: rows of states. A row is written once and never updated in place.",
    );
    memory.feed(
        0,
        "The moon rose over",
        "The state behind the last token is kept, and the 2 before it. Earlier tokens are in \
         them, but cannot be gone back to.",
    );
    memory.feed(
        0,
        "us",
        "The next token goes on from the newest state. The oldest snapshot is free again.",
    );
    memory.edit(
        &[copy_of_all()],
        "copy sequence 0 to sequence 1",
        "Both are at the same states. Nothing is copied until they part.",
    );
    memory.feed(
        1,
        "all",
        "Sequence 1 reads the shared state and writes a row of its own.",
    );
    memory.edit(
        &[removal(0, PosRange::from(Pos(4)..))],
        "take the last token back from sequence 0",
        "The snapshot before it is there: sequence 0 is at it again.",
    );
    memory.edit(
        &[removal(0, PosRange::from(Pos(1)..))],
        "take 3 more tokens back",
        "There is no such state. It is refused, and what is needed can be computed again.",
    );
    Ok(memory.into_frames())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn frames(name: &str) -> Vec<Frame> {
        walk(name).unwrap().frames
    }

    /// The words of a sequence, by position.
    fn text(frame: &Frame, seq: u32) -> String {
        let mut words: Vec<(u32, &str)> = frame
            .cells
            .iter()
            .flatten()
            .filter(|cell| cell.seqs.contains(&seq))
            .map(|cell| (cell.pos, cell.word.as_str()))
            .collect();
        words.sort_unstable();
        let words: Vec<&str> = words.into_iter().map(|(_, word)| word).collect();
        words.join(" ")
    }

    fn refusals(frames: &[Frame]) -> Vec<usize> {
        let refused = (0..)
            .zip(frames)
            .filter(|(_, frame)| frame.refused.is_some());
        refused.map(|(at, _)| at).collect()
    }

    #[test]
    fn a_token_sees_its_own_sequence_and_a_refusal_changes_nothing() {
        let frames = frames("sequences");
        let [first, second] = [0, 1].map(|seq| text(&frames[4], seq));
        assert_eq!(first, "The cat sat on the mat");
        assert_eq!(second, "A dog ran off");
        // Cells of the tokens before it, and its own.
        assert_eq!(frames[3].sights[2].cells, [0, 1, 2, 5, 6, 7]);
        assert_eq!(frames[4].sights[1].cells, [3, 4, 8, 9]);
        assert_eq!(refusals(&frames), [5]);
        assert_eq!(frames[5].cells, frames[4].cells);
        let last = frames.last().unwrap();
        assert_eq!(
            text(last, 0),
            "The cat sat on the mat and fell asleep by the fire"
        );
        assert_eq!(frames[7].written, [8, 9, 10]);
        assert_eq!(last.written, [11, 3, 4]);
    }

    #[test]
    fn a_prefix_is_there_once() {
        let frames = frames("prefix");
        let shared = &frames[2];
        assert_eq!(shared.n_copied, 0);
        assert!(shared.cells[..4].iter().flatten().all(|c| c.seqs == [0, 1]));
        assert_eq!(text(&frames[4], 0), "You keep a cellar of wine");
        assert_eq!(text(&frames[4], 1), "You keep a cellar of memories .");
        let last = frames.last().unwrap();
        assert_eq!(text(last, 1), "You keep a cellar of memories .");
        assert_eq!(text(last, 0), "");
        assert_eq!(refusals(&frames), [0usize; 0]);
    }

    #[test]
    fn a_window_recycles_and_does_not_go_back() {
        let frames = frames("window");
        let n_tokens: usize = frames.iter().map(|frame| frame.written.len()).sum();
        assert_eq!(n_tokens, 14);
        for sight in frames.iter().flat_map(|frame| &frame.sights) {
            assert_eq!(
                sight.cells.len(),
                4.min(sight.pos as usize + 1),
                "{sight:?}"
            );
        }
        assert_eq!(refusals(&frames), [5]);
        assert_eq!(frames[5].cells, frames[4].cells);
    }

    #[test]
    fn a_shift_moves_positions_and_no_row() {
        let frames = frames("shift");
        assert_eq!(refusals(&frames), [2]);
        let (before, after) = (&frames[2], &frames[3]);
        assert_eq!((after.n_copied, after.n_rotated), (0, 4));
        assert_eq!(text(before, 0), "Once there was a very small red ball that");
        assert_eq!(text(after, 0), "Once small red ball that");
        let moved = |frame: &Frame| frame.cells[5].as_ref().map(|cell| cell.pos);
        assert_eq!((moved(before), moved(after)), (Some(5), Some(1)));
        let last = frames.last().unwrap();
        assert_eq!(text(last, 0), "Once small red ball that rolled away fast");
    }

    #[test]
    fn states_go_back_to_snapshots_and_no_further() {
        let frames = frames("states");
        let at = |frame: &Frame, seq| {
            let states = frame.states.iter().flatten();
            let of_seq = states.filter(|state| state.seqs.contains(&seq));
            let mut positions: Vec<u32> = of_seq.map(|state| state.pos).collect();
            positions.sort_unstable();
            positions
        };
        assert_eq!(at(&frames[1], 0), [1, 2, 3]);
        assert_eq!(at(&frames[2], 0), [2, 3, 4]);
        assert_eq!(frames[2].sights[0].state, Some(frames[1].stored[2]));
        assert_eq!(at(&frames[3], 1), [2, 3, 4]);
        assert_eq!(at(&frames[4], 1), [3, 4, 5]);
        assert_eq!(frames[4].stored.len(), 1);
        assert_eq!(at(&frames[5], 0), [2, 3]);
        assert_eq!(at(&frames[5], 1), [3, 4, 5]);
        assert_eq!(refusals(&frames), [6]);
        assert_eq!(frames[6].states, frames[5].states);
    }

    #[test]
    fn an_unknown_example_is_named_with_those_there_are() {
        let error = walk("compaction").unwrap_err();
        assert!(
            error.contains("'compaction'") && error.contains("window"),
            "{error}"
        );
    }
}
