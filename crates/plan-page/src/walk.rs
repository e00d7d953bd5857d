//! [`Walk`]: what a memory does step by step, as frames that a page draws.
//!
//! Invariant: every frame is read from the memory itself, after it did what the frame says. Knows
//! no example.

use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::cells::OwnedRun;
use kv_core::memory::{Composite, Edit, Edited, Memory, MemoryInputs};
use kv_core::{SeqId, TokenId};
use serde::Serialize;

/// Tokens of a ubatch.
const N_UBATCH: u32 = 8;

/// An example: its frames, from the empty memory on.
#[derive(Clone, Debug, Serialize)]
pub struct Walk {
    /// Its name.
    pub name: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// The memory after each step.
    pub frames: Vec<Frame>,
}

/// One step, and the memory after it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Frame {
    /// What is asked of the memory.
    pub does: String,
    /// Why it looks as it does.
    pub says: &'static str,
    /// The memory's reason, where it refused; nothing has changed then.
    pub refused: Option<String>,
    /// The cells, in order; `None` for a free one. Empty where there are none.
    pub cells: Vec<Option<Cell>>,
    /// The rows of recurrent states, likewise.
    pub states: Vec<Option<Cell>>,
    /// Cells that this step wrote.
    pub written: Vec<u32>,
    /// State rows that this step wrote.
    pub stored: Vec<u32>,
    /// The tokens that this step computed, and what each saw.
    pub sights: Vec<Sight>,
    /// Rows that a backend has to copy.
    pub n_copied: u32,
    /// Rows whose keys a backend has to rotate to another position.
    pub n_rotated: u32,
}

/// A cell, or a row of states, in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// Its sequences.
    pub seqs: Vec<u32>,
    /// Its position: of a state, that of the last token that went into it.
    pub pos: u32,
    /// The token.
    pub word: String,
}

/// A token that was computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sight {
    /// Its sequence.
    pub seq: u32,
    /// Its position.
    pub pos: u32,
    /// The token.
    pub word: String,
    /// The cells that it saw, its own included.
    pub cells: Vec<u32>,
    /// The state row that it went on from.
    pub state: Option<u32>,
}

/// A memory that is watched.
#[derive(Debug)]
pub(crate) struct WatchedMemory {
    memory: Composite,
    /// The token of every cell, and of every state row the last one that went into it.
    words: Vec<String>,
    state_words: Vec<String>,
    frames: Vec<Frame>,
}

impl WatchedMemory {
    /// An empty memory. The first frame shows it.
    pub(crate) fn new(memory: Composite, says: &'static str) -> Self {
        let mut watched = Self {
            memory,
            words: Vec::new(),
            state_words: Vec::new(),
            frames: Vec::new(),
        };
        watched.push(Frame {
            does: "an empty memory".to_owned(),
            says,
            ..Frame::default()
        });
        watched
    }

    /// The frames so far.
    pub(crate) fn into_frames(self) -> Vec<Frame> {
        self.frames
    }

    /// Evaluates a sequence's next tokens, one a word.
    pub(crate) fn feed(&mut self, seq: u32, text: &str, says: &'static str) {
        let words: Vec<&str> = text.split(' ').collect();
        let mut frame = Frame {
            does: match words.len() {
                1 => format!("sequence {seq}: 1 token “{text}”"),
                n => format!("sequence {seq}: {n} tokens “{text}”"),
            },
            says,
            ..Frame::default()
        };
        if let Err(refusal) = self.evaluate(SeqId(seq), &words, &mut frame) {
            frame.refused = Some(refusal);
        }
        self.push(frame);
    }

    /// Does edits; the first that is refused is the last.
    pub(crate) fn edit(&mut self, edits: &[Edit], does: &str, says: &'static str) {
        let mut frame = Frame {
            does: does.to_owned(),
            says,
            ..Frame::default()
        };
        for edit in edits {
            match self.memory.apply(*edit) {
                Ok(edited) => self.follow(&edited, &mut frame),
                Err(refusal) => {
                    frame.refused = Some(refusal.to_string());
                    break;
                }
            }
        }
        self.push(frame);
    }

    /// Plans and commits as an engine does, with words in place of a backend's rows.
    fn evaluate(&mut self, seq: SeqId, words: &[&str], frame: &mut Frame) -> Result<(), String> {
        let n_words = words.len() as u32;
        let batch = Batch::prompt(seq, (0..n_words).map(TokenId));
        let rules = BatchRules {
            n_batch: n_words.max(1),
            n_seqs: self.memory.n_seqs(),
            n_vocab: n_words.max(1),
            n_embd: 1,
        };
        let batch = validate(&batch, &rules, |seq| self.memory.positions(seq));
        let batch = batch.map_err(|error| error.to_string())?;
        let mut inputs = MemoryInputs::default();
        let steps = self.memory.begin(&batch, N_UBATCH);
        let mut steps = steps.map_err(|refusal| refusal.to_string())?;
        while let Some(ubatch) = steps.next(&mut inputs) {
            for (row, (&token, &pos)) in (0u32..).zip(ubatch.tokens.iter().zip(&ubatch.positions)) {
                let word = words.get(token as usize).copied().unwrap_or_default();
                let part = inputs.parts.first();
                let seen = part.map(|part| part.visibility.row(row));
                let group = inputs.states.iter().find(|group| group.rows.contains(&row));
                frame.sights.push(Sight {
                    seq: seq.0,
                    pos,
                    word: word.to_owned(),
                    cells: seen.map_or(Vec::new(), |seen| seen.map(|(cell, _)| cell.0).collect()),
                    state: group.and_then(|group| group.source).map(|row| row.0),
                });
                if let Some(&cell) = part.and_then(|part| part.cells.get(row as usize)) {
                    set(&mut self.words, cell.as_usize(), word);
                    frame.written.push(cell.0);
                }
            }
            for group in &inputs.states {
                for store in &group.stores {
                    let row = group.rows.get((store.n_rows as usize).saturating_sub(1));
                    let token = row.and_then(|&row| ubatch.tokens.get(row as usize));
                    let word = token.and_then(|&token| words.get(token as usize));
                    let word = word.copied().unwrap_or_default();
                    set(&mut self.state_words, store.to.as_usize(), word);
                    frame.stored.push(store.to.0);
                }
            }
        }
        Ok(())
    }

    /// Does with words what an edit asks a backend to do with rows.
    fn follow(&mut self, edited: &Edited, frame: &mut Frame) {
        let before = self.words.clone();
        for copy in &edited.row_copies {
            for i in 0..copy.len as usize {
                let word = before.get(copy.from.as_usize() + i);
                let word = word.cloned().unwrap_or_default();
                set(&mut self.words, copy.to.as_usize() + i, &word);
            }
            frame.n_copied += copy.len;
        }
        frame.n_rotated += edited.row_shifts.iter().map(|shift| shift.len).sum::<u32>();
    }

    /// Adds the memory to a frame, and the frame to the others.
    fn push(&mut self, mut frame: Frame) {
        let occupancy = self.memory.occupancy().unwrap_or_default();
        if let Some(part) = occupancy.parts.first() {
            frame.cells = drawn(part.n_cells, &part.runs, &self.words);
        }
        if let Some(states) = &occupancy.states {
            frame.states = drawn(states.n_rows, &states.rows, &self.state_words);
        }
        self.frames.push(frame);
    }
}

fn set(words: &mut Vec<String>, at: usize, word: &str) {
    if words.len() <= at {
        words.resize(at + 1, String::new());
    }
    words[at] = word.to_owned();
}

/// All cells, with those in use.
fn drawn(n_cells: u32, runs: &[OwnedRun], words: &[String]) -> Vec<Option<Cell>> {
    let mut cells = vec![None; n_cells as usize];
    for run in runs {
        for i in 0..run.n_cells {
            let at = (run.first.0 + i) as usize;
            if let Some(cell) = cells.get_mut(at) {
                *cell = Some(Cell {
                    seqs: run.seqs.iter().map(|seq| seq.0).collect(),
                    pos: run.pos.0 + i,
                    word: words.get(at).cloned().unwrap_or_default(),
                });
            }
        }
    }
    cells
}
