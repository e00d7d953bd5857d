//! [`Event`]: what happened outside, and [`Outcome`]: what became of requests.
//!
//! Plain data. Decides nothing.

use kv_core::{SeqId, TokenId};

use super::error::RequestError;
use super::ids::{Micros, RequestId};
use super::request::Request;
use super::reuse::{Missed, Reuse};
use super::stored::StoredTokens;

/// A thing that happened outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request came.
    Submit(Request),
    /// Cached prefixes are to be dropped, and what the memory holds of parked requests.
    ClearPrefixes,
    /// Tokens that may follow the last one of a request, for its next step: as many as there is
    /// room for are computed with it. One that is unknown, or whose text has not begun, changes
    /// nothing.
    Draft {
        /// The request.
        request: RequestId,
        /// The tokens.
        tokens: Vec<TokenId>,
    },
    /// Cancels a request. One that is unknown, or has ended, changes nothing; so does one that is
    /// to be parked, while its step is computed.
    Cancel(RequestId),
    /// The request cannot go on: it ends as [`End::Failed`]. One that is unknown changes nothing.
    Fail(RequestId),
    /// A request that has ended and was parked ([`Retention::Park`]) goes on with these tokens
    /// behind its own: at least one where its text was complete. One that is unknown fails.
    ///
    /// [`Retention::Park`]: crate::Retention::Park
    Resume {
        /// The request.
        request: RequestId,
        /// The tokens.
        tokens: Vec<TokenId>,
    },
    /// A request that was parked does not go on. One that is unknown changes nothing.
    Release(RequestId),
    /// The source of [`Work::Encode`](crate::Work::Encode) was encoded.
    Encoded(RequestId),
    /// The tokens of [`Work::Shift`](crate::Work::Shift) were dropped, or could not be.
    Shifted {
        /// The request.
        request: RequestId,
        /// The result.
        result: ShiftResult,
    },
    /// The step that was planned last was computed: what became of each request whose output it
    /// had, see [`Step::report`](crate::Step::report).
    StepDone(Vec<RowReport>),
    /// The time that the step took that was computed last.
    StepTime(Micros),
    /// The state of [`Work::SwapOut`](crate::Work::SwapOut) was saved, or could not be.
    SwappedOut {
        /// The request.
        request: RequestId,
        /// Bytes that its state has; `None` where it was not saved.
        n_bytes: Option<u64>,
    },
    /// The state of [`Work::SwapIn`](crate::Work::SwapIn) was restored, or could not be.
    SwappedIn {
        /// The request.
        request: RequestId,
        /// The result for its state.
        result: SwappedIn,
    },
    /// A store of prefixes is asked what it has of the prompt of a request, which waits for the
    /// answer. One that was admitted before, or is unknown, changes nothing.
    Asked(RequestId),
    /// The store has these tokens of a request, which are to be fetched where the memory does not
    /// hold them by then; or nothing, or fetching them is no use.
    Probed {
        /// The request.
        request: RequestId,
        /// The answer.
        result: Result<StoredTokens, Missed>,
    },
    /// The bytes of [`Work::Fetch`](crate::Work::Fetch) are here, perhaps of fewer tokens; or they
    /// are not, and the tokens are computed.
    Fetched {
        /// The request.
        request: RequestId,
        /// The answer.
        result: Result<StoredTokens, Missed>,
    },
    /// The result of [`Work::Restore`](crate::Work::Restore).
    Restored {
        /// Tokens that the sequence holds now.
        n_tokens: usize,
        /// The outcome of the rest.
        result: StoredRows,
    },
    /// The disk did not take a state ([`Outcome::Spilled`]): the host keeps it.
    SpillFailed(RequestId),
    /// The step that was planned last could not be computed, and the memory was rolled back.
    StepFailed(StepFailure),
    /// An input of a request's next tokens is not there yet, such as the rows of a picture: no step
    /// has any of them before [`Event::Ready`], or before it was preempted. One that has no
    /// sequence changes nothing.
    Hold(RequestId),
    /// It is there: for the request that has this text.
    Ready(RequestId),
}

/// The progress of one request by its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowReport {
    /// The request.
    pub request: RequestId,
    /// Its progress.
    pub progress: Progress,
}

/// The progress of a request by one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It goes on with this token.
    Token(TokenId),
    /// Its text is complete.
    Ended,
    /// Nothing could be chosen from its row.
    Failed,
}

/// The kind of failure of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFailure {
    /// It may succeed with other requests: those of the step are tried one by one, and only one
    /// that fails again, alone, is given up.
    Computation,
    /// It was cancelled, as are all its requests.
    Cancelled,
    /// It was not begun, as some of its requests are held ([`Event::Hold`]): the memory is as it
    /// was.
    PutOff,
    /// The device is lost: all requests are given up.
    DeviceLost,
}

/// The result of a [`Shift`](crate::Shift).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShiftResult {
    /// The tokens are gone, and the others have moved.
    Done,
    /// Tokens that others share need cells of their own to move, and there are none. The memory is
    /// as before.
    NoRoom,
    /// The memory cannot do it. It is as before, or holds nothing of the sequence.
    Refused,
}

/// The result of restoring stored tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredRows {
    /// They are in the memory, or some of them, and more will be.
    Written,
    /// The memory has no room for more of them now.
    NoRoom,
    /// No more of them can be restored.
    Failed,
}

/// The result of restoring a saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwappedIn {
    /// The memory holds it.
    Restored,
    /// The memory has no room for it now, and is as before; the bytes are kept.
    NoRoom,
    /// It could not be restored, the memory is as before, and the bytes are gone.
    Lost,
}

/// A change of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was not taken.
    Refused {
        /// The request.
        request: RequestId,
        /// Why.
        why: RequestError,
    },
    /// It was given a sequence. Comes again where it goes on after a preemption.
    Admitted {
        /// The request.
        request: RequestId,
        /// Its sequence, until it ends or is preempted.
        seq: SeqId,
        /// Its tokens that were there already.
        reuse: Reuse,
    },
    /// Its sequence was taken from it; it waits, and will go on exactly where it was.
    Preempted {
        /// The request.
        request: RequestId,
        /// Tokens that have to be computed again: none where its state was saved.
        n_tokens: usize,
    },
    /// Its state is to go from the host to the disk, while other things go on. Where the disk does
    /// not take it, that is reported ([`Event::SpillFailed`]).
    Spilled {
        /// The request.
        request: RequestId,
    },
    /// Its saved state is of no use: its bytes are to be freed, as they are when it ends.
    SwapDropped {
        /// The request.
        request: RequestId,
        /// Tokens that have to be computed again.
        n_tokens: usize,
    },
    /// It has ended. The last outcome of a request that was taken, and it comes once.
    Ended {
        /// The request.
        request: RequestId,
        /// Why.
        end: End,
    },
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its text is complete, as was reported.
    Complete,
    /// It is as long as a request can be in this memory.
    ContextFull,
    /// It was cancelled.
    Cancelled,
    /// No token could be chosen, or its step failed when it was computed alone.
    Failed,
}
