//! Answers that come piece by piece: an [`Encoder`] turns pieces into the wire text of its API.
//!
//! Invariant: a stream ends as its API demands, or with an error event after which the connection
//! is closed, never with a false end. A body that is dropped cancels its requests. While a long
//! prompt is computed a stream says now and then that it lives, as clients and proxies give up
//! otherwise.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use cellar_engine::serve::Usage;
use futures_core::Stream;
use tokio::time::{Instant, Sleep, sleep};

use crate::error::ApiError;
use crate::generate::{Generating, Piece};

/// Server-sent events.
pub const EVENT_STREAM: &str = "text/event-stream";

/// Tells a proxy to pass pieces on as they come: nginx collects them otherwise.
pub(crate) const UNBUFFERED: (HeaderName, HeaderValue) = (
    HeaderName::from_static("x-accel-buffering"),
    HeaderValue::from_static("no"),
);

/// Writes the stream of one API. Every method returns the text to send, which may be empty.
pub trait Encoder: Send + Unpin + 'static {
    /// The type of the body.
    fn content_type(&self) -> &'static str {
        EVENT_STREAM
    }

    /// What comes before all pieces.
    fn begin(&mut self) -> String {
        String::new()
    }

    /// The sign of life for a client that waits: a comment, which clients of
    /// server-sent events skip.
    fn alive(&mut self) -> String {
        ":\n\n".to_owned()
    }

    /// The computed part of the prompt of one of the texts has grown.
    fn progress(&mut self, _choice: usize, _usage: &Usage) -> String {
        String::new()
    }

    /// A piece of one of the texts, which are counted from 0.
    fn piece(&mut self, choice: usize, piece: Piece) -> String;

    /// What comes after the last piece of all texts.
    fn end(&mut self) -> String {
        String::new()
    }

    /// A failure; nothing comes after it.
    fn error(&mut self, error: &ApiError) -> String;
}

/// A server-sent event with these data.
pub(crate) fn event(data: &serde_json::Value) -> String {
    format!("data: {data}\n\n")
}

/// A server-sent event with a name.
pub(crate) fn named_event(name: &str, data: &serde_json::Value) -> String {
    format!("event: {name}\n{}", event(data))
}

/// The answer that streams these texts.
pub(crate) fn respond(texts: Vec<Generating>, encoder: impl Encoder) -> Response {
    let content_type = HeaderValue::from_static(encoder.content_type());
    let pause = texts.first().map(Generating::longest_silence);
    let stream = PieceStream {
        texts: texts.into_iter().map(Some).collect(),
        encoder,
        stage: Stage::Begin,
        silence: pause.map(Silence::new),
    };
    let headers = [
        (CONTENT_TYPE, content_type),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        UNBUFFERED,
    ];
    (headers, Body::from_stream(stream)).into_response()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Begin,
    Pieces,
    /// The error event was given out, and is on its way.
    Failed,
    /// The connection is to be closed.
    Broken,
    Done,
}

struct PieceStream<E> {
    /// `None` where one has ended.
    texts: Vec<Option<Generating>>,
    encoder: E,
    stage: Stage,
    /// `None` where there are no texts.
    silence: Option<Silence>,
}

/// The time in which nothing is sent.
struct Silence {
    longest: Duration,
    end: Pin<Box<Sleep>>,
}

impl Silence {
    fn new(longest: Duration) -> Self {
        Self {
            longest,
            end: Box::pin(sleep(longest)),
        }
    }

    /// Something is sent: it begins anew.
    fn restart(&mut self) {
        self.end.as_mut().reset(Instant::now() + self.longest);
    }

    /// True if it has lasted too long; it begins anew then. Wakes the task at its end.
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        let is_over = self.end.as_mut().poll(cx).is_ready();
        if is_over {
            self.restart();
            let _wakes = self.end.as_mut().poll(cx);
        }
        is_over
    }
}

impl<E: Encoder> PieceStream<E> {
    /// What is there now; empty where there is nothing.
    fn collect(&mut self, cx: &mut Context<'_>) -> String {
        let mut out = String::new();
        for (choice, text) in self.texts.iter_mut().enumerate() {
            while let Some(generating) = text {
                let polled = generating.poll_next(cx);
                if let Some(usage) = generating.new_progress() {
                    out += &self.encoder.progress(choice, &usage);
                }
                match polled {
                    Poll::Ready(Some(Ok(piece))) => out += &self.encoder.piece(choice, piece),
                    Poll::Ready(Some(Err(error))) => {
                        out += &self.encoder.error(&error);
                        self.stage = Stage::Failed;
                        self.texts.clear();
                        return out;
                    }
                    Poll::Ready(None) => *text = None,
                    Poll::Pending => break,
                }
            }
        }
        if self.texts.iter().all(Option::is_none) {
            out += &self.encoder.end();
            self.stage = Stage::Done;
        }
        out
    }
}

impl<E: Encoder> Stream for PieceStream<E> {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        match this.stage {
            Stage::Begin => {
                this.stage = Stage::Pieces;
                let begin = this.encoder.begin();
                if !begin.is_empty() {
                    return Poll::Ready(Some(Ok(begin.into())));
                }
            }
            Stage::Pieces => {}
            // Pending once: the connection writes out what it has before it is polled again.
            Stage::Failed => {
                this.stage = Stage::Broken;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Stage::Broken => {
                this.stage = Stage::Done;
                return Poll::Ready(Some(Err(io::Error::other("the text has failed"))));
            }
            Stage::Done => return Poll::Ready(None),
        }
        let mut out = this.collect(cx);
        if this.stage == Stage::Done && out.is_empty() {
            return Poll::Ready(None);
        }
        if let Some(silence) = &mut this.silence {
            if !out.is_empty() {
                silence.restart();
            } else if silence.is_over(cx) {
                out = this.encoder.alive();
            }
        }
        if out.is_empty() {
            Poll::Pending
        } else {
            Poll::Ready(Some(Ok(out.into())))
        }
    }
}
