//! [`TimeLimit`]: how long a text may take. It counts from the first piece, and a line is always
//! whole.

use std::time::{Duration, Instant};

/// The time of a text, from its first piece on.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeLimit {
    time: Duration,
    began: Option<Instant>,
    has_line: bool,
    /// True once it has ended the text.
    pub(super) is_over: bool,
}

impl TimeLimit {
    pub(super) fn new(time: Duration) -> Self {
        Self {
            time,
            began: None,
            has_line: false,
            is_over: false,
        }
    }

    /// True if the text ends with this piece.
    pub(super) fn ends_with(&mut self, piece: &str) -> bool {
        let began = *self.began.get_or_insert_with(Instant::now);
        self.has_line |= piece.contains('\n');
        self.is_over |= self.has_line && began.elapsed() >= self.time;
        self.is_over
    }
}
