//! Tests of [streams](super::stream), apart from them as their source is compiled a second time for
//! `tests/stream_orders.rs`.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use cellar_scheduler::RequestId;

use super::error::ServiceError;
use super::pieces::TokenPiece;
use super::stream::{TextSender, TextStream, Usage};
use crate::completion::FinishReason;

#[derive(Default)]
struct WakeCount(AtomicUsize);

impl Wake for WakeCount {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_task_that_polls_is_woken_by_each_piece_and_by_the_end() {
    let (sender, mut stream) = TextSender::new(RequestId(0), &Arc::default(), None);
    let push = |text: &str| {
        let piece = TokenPiece {
            token: None,
            text: text.to_owned(),
            logprobs: None,
        };
        sender.push(vec![piece], Usage::default());
    };
    let woken = Arc::new(WakeCount::default());
    let waker = Waker::from(Arc::clone(&woken));
    let poll = |stream: &mut TextStream| stream.poll_piece(&mut Context::from_waker(&waker));
    let times = || woken.0.load(Ordering::SeqCst);

    assert!(poll(&mut stream).is_pending());
    assert_eq!(times(), 0);
    // Some of the prompt is computed: there is no piece yet.
    let usage = Usage {
        n_prompt_done: 3,
        ..Usage::default()
    };
    sender.push(Vec::new(), usage);
    assert_eq!(times(), 1);
    assert!(poll(&mut stream).is_pending());
    assert_eq!(stream.progress().n_done, 3);
    push("Once");
    push(" upon"); // no task waits now
    assert_eq!(times(), 2);
    let Poll::Ready(Ok(Some(piece))) = poll(&mut stream) else {
        unreachable!("a piece is there")
    };
    assert_eq!(piece, "Once upon");
    assert!(poll(&mut stream).is_pending());
    sender.end(Ok((Vec::new(), FinishReason::Length, Usage::default())));
    assert_eq!(times(), 3);
    assert!(matches!(poll(&mut stream), Poll::Ready(Ok(None))));
    assert!(matches!(poll(&mut stream), Poll::Ready(Ok(None))));
    assert_eq!(stream.finish().unwrap().finish, FinishReason::Length);
}

#[test]
fn a_task_learns_that_the_service_has_gone() {
    let (sender, mut stream) = TextSender::new(RequestId(0), &Arc::default(), None);
    let woken = Arc::new(WakeCount::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut cx = Context::from_waker(&waker);
    assert!(stream.poll_piece(&mut cx).is_pending());
    drop(sender);
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    let failed = stream.poll_piece(&mut cx);
    assert!(matches!(failed, Poll::Ready(Err(ServiceError::Stopped))));
    assert!(matches!(stream.poll_piece(&mut cx), Poll::Ready(Ok(None))));
}
