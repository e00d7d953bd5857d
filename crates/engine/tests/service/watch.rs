//! A watcher of a service sees which cells belong to which requests, and why.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use cellar_engine::CompletionOptions;
use cellar_engine::sampler::{Candidates, SamplerConfig, Step};
use cellar_engine::serve::{
    DropReason, End, EventKind, ExcerptLen, Frame, Missed, Note, Service, ServiceConfig,
    TextRequest, Update, Watcher,
};
use kv_core::SeqId;
use kv_core::memory::OwnedRun;
use model_core::tokenizer::EncodeOptions;

use crate::service::models::{Case, stories};

const BEGINNING: &str = "Once upon a time there was a little girl who had a red ball.";

/// Takes its time for each token.
#[derive(Debug)]
struct Slow;

impl Step for Slow {
    fn apply(&mut self, _candidates: &mut Candidates<'_>) {
        std::thread::sleep(Duration::from_millis(4));
    }
}

fn request(case: &Case, prompt: &str, n: usize) -> TextRequest {
    TextRequest {
        prompt: case.tokenizer.encode(prompt, EncodeOptions::PROMPT),
        options: CompletionOptions {
            sampler: SamplerConfig::greedy(),
            n_predict: Some(n),
            ..CompletionOptions::default()
        },
        ..TextRequest::default()
    }
}

/// The updates until nothing runs or waits.
fn until_idle(watcher: &mut Watcher) -> Vec<Update> {
    let mut updates: Vec<Update> = Vec::new();
    let is_idle = |frame: &Frame| frame.running.is_empty() && frame.waiting.is_empty();
    let mut has_ended = false;
    while !has_ended || !updates.last().is_some_and(|last| is_idle(&last.frame)) {
        let update = watcher.next_update_within(Duration::from_secs(30)).unwrap();
        let mut kinds = update.events.iter().map(|event| &event.kind);
        has_ended |= kinds.any(|kind| matches!(kind, EventKind::Ended { .. }));
        updates.push(update);
    }
    updates
}

fn kinds(updates: &[Update]) -> Vec<EventKind> {
    let events = updates.iter().flat_map(|update| &update.events);
    events.map(|event| event.kind).collect()
}

fn runs(frame: &Frame) -> &[OwnedRun] {
    &frame.occupancy.parts[0].runs
}

/// Every cell belongs to a request that runs, or to a cached prefix, and each has its tokens.
fn check_owners(frame: &Frame) {
    let running = frame.running.iter().map(|text| (text.seq, text.n_done));
    let cached = frame.cached.iter().map(|text| (text.seq, text.n_tokens));
    let known: Vec<(SeqId, usize)> = running.chain(cached).collect();
    let names: BTreeSet<SeqId> = known.iter().map(|&(seq, _)| seq).collect();
    assert_eq!(names.len(), known.len(), "a sequence has two users");
    for run in runs(frame) {
        let is_known = run.seqs.iter().all(|seq| names.contains(&seq));
        assert!(
            is_known,
            "{run:?} belongs to no request and no cached prefix"
        );
    }
    for (seq, n_tokens) in known {
        let own = runs(frame).iter().filter(|run| run.seqs.contains(seq));
        let n_cells: u32 = own.map(|run| run.n_cells).sum();
        assert_eq!(n_cells as usize, n_tokens, "cells of sequence {seq}");
    }
}

#[test]
fn shared_cells_are_seen_with_the_reason() {
    let case = stories("stories-llama");
    let service = case.service(4, 1024);
    let mut watcher = service.watch();
    let first = request(&case, BEGINNING, 12);
    let n_prompt = first.prompt.len();
    service.submit(first).unwrap().finish().unwrap();
    let updates = until_idle(&mut watcher);
    let frame = &updates.last().unwrap().frame;
    check_owners(frame);
    // The last token is chosen, and not computed.
    assert_eq!(frame.cached[0].n_tokens, n_prompt + 11);
    assert!(frame.cached[0].excerpt.is_none());
    let [
        EventKind::Submitted { request: id, .. },
        EventKind::Admitted { seq, reuse, .. },
        EventKind::FirstToken { .. },
        EventKind::Cache(Note::Cached { n_tokens, .. }),
        EventKind::Ended {
            end: End::Complete,
            n_tokens: 12,
            ..
        },
    ] = kinds(&updates)[..]
    else {
        panic!("{:#?}", kinds(&updates));
    };
    assert_eq!(reuse.missed, Some(Missed::NeverSeen));
    assert_eq!(n_tokens, frame.cached[0].n_tokens);

    // The second one parts from the first behind its prompt.
    let mut second = request(&case, &format!("{BEGINNING} She lost it."), 100);
    second.steps.push(Box::new(Slow));
    // A watcher that comes too late sees the end alone.
    let stream = service.submit(second).unwrap();
    let updates = until_idle(&mut watcher);
    stream.finish().unwrap();
    updates
        .iter()
        .for_each(|update| check_owners(&update.frame));
    let mut frames = updates.iter().map(|update| &update.frame);
    let frame = frames.find(|frame| !frame.running.is_empty()).unwrap();
    let own = frame.running[0].seq;
    let shared = runs(frame).iter().filter(|run| run.seqs.len() > 1);
    let n_shared: u32 = shared.map(|run| run.n_cells).sum();
    assert_eq!(frame.occupancy.parts[0].n_shared(), n_shared);
    assert!(frame.running[0].n_done < frame.running[0].n_tokens);
    assert_eq!(frame.cached[0].n_hits, 1);
    let kinds = kinds(&updates);
    let shared = Note::Shared {
        request: cellar_engine::serve::RequestId(id.0 + 1),
        seq: own,
        from: seq,
        n_tokens: n_shared as usize,
    };
    assert_eq!(kinds[1], EventKind::Cache(shared));
    let EventKind::Admitted { reuse, .. } = kinds[2] else {
        panic!("{kinds:#?}");
    };
    assert_eq!(reuse.n_tokens, n_shared as usize);
    assert!(reuse.n_tokens >= n_prompt - 1, "{reuse:?}");
    assert_eq!(reuse.missed, Some(Missed::Differs { at: reuse.n_tokens }));
}

#[test]
fn evictions_and_preemptions_are_seen() {
    let case = stories("stories-llama");
    let config = ServiceConfig {
        excerpts: ExcerptLen::Tokens(NonZeroU32::new(8).unwrap()),
        ..ServiceConfig::default()
    };
    let service = Service::start(case.engine(4, 96), &case.tokenizer, &config).unwrap();
    let mut watcher = service.watch();
    for beginning in [
        BEGINNING,
        "One day, Tom and his dog went to the big park to play",
    ] {
        let request = request(&case, beginning, 40);
        service.submit(request).unwrap().finish().unwrap();
    }
    let mut updates = until_idle(&mut watcher);
    while kinds(&updates)
        .iter()
        .filter(|kind| matches!(kind, EventKind::Ended { .. }))
        .count()
        < 2
    {
        updates.extend(until_idle(&mut watcher));
    }
    let kinds = kinds(&updates);
    let is_eviction = |kind: &EventKind| {
        let why = DropReason::Evicted;
        matches!(kind, EventKind::Cache(Note::Dropped { why: w, .. }) if *w == why)
    };
    assert!(kinds.iter().any(is_eviction), "{kinds:#?}");
    let frame = &updates.last().unwrap().frame;
    check_owners(frame);
    assert_eq!(frame.cached.len(), 1);
    let excerpt = frame.cached[0].excerpt.as_ref().unwrap();
    let n_shown = excerpt.head.len() + excerpt.tail.len();
    assert_eq!(n_shown + excerpt.n_omitted, frame.cached[0].n_tokens);
}

#[test]
fn an_idle_service_has_a_frame_for_each_new_watcher() {
    let case = stories("stories-llama");
    let service = case.service(2, 128);
    let mut first = service.watch();
    let update = first.next_update_within(Duration::from_secs(10)).unwrap();
    assert_eq!(update.frame.occupancy.parts[0].n_cells, 128);
    assert!(
        first
            .next_update_within(Duration::from_millis(300))
            .is_none()
    );
    let mut second = service.watch();
    let same = second.next_update_within(Duration::from_secs(10)).unwrap();
    assert_eq!(same.frame.number, update.frame.number);
    service.stop().unwrap();
    assert!(first.next_update_within(Duration::from_secs(10)).is_none());
}
