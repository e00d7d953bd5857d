//! A scheduler with a real memory and a fake model, whose bookkeeping is recounted after each step.

use std::collections::{BTreeMap, BTreeSet};

use cellar_scheduler::{
    End, Event, Micros, Missed, Outcome, PrefixUse, Priority, Progress, PromptRows, Request,
    RequestError, RequestId, Reuse, RowBytes, RowUse, Scheduler, SchedulerConfig, Step,
    StepFailure, StepRow, Swap, SwapRows, SwappedIn, Tenant, TenantId, TenantLimits, Work,
};
use kv_core::batch::{BatchRules, validate};
use kv_core::memory::{
    Composite, CompositeSlot, Memory, MemoryInputs, PlannedBatch, Refusal, RestoreInto,
    RowsWritten, Seqs, Snapshot, invariants,
};
use kv_core::{CellIdx, SeqId, TokenId};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

use super::fake::{Alone, FakeRows, N_VOCAB, SavedRows, choose};
use super::holds::Holds;
use super::store::{Due, Store};

/// The task of a request, beyond its prompt.
#[derive(Clone, Debug)]
pub struct Script {
    pub prompt: Vec<TokenId>,
    pub priority: Priority,
    pub prefix: PrefixUse,
    pub prompt_rows: PromptRows,
    pub checkpoints: Vec<usize>,
    pub parting: Option<usize>,
    pub tenant: Tenant,
    /// The text is complete with this many tokens.
    pub max_tokens: usize,
    /// The row after this many tokens cannot be sampled.
    pub bad_row: Option<usize>,
    /// Steps with this request fail.
    pub is_poison: bool,
    /// The number of its text among those of a prompt, as a seed is.
    pub variant: u64,
}

#[derive(Debug)]
struct Client {
    script: Script,
    /// True if others have the same prompt.
    is_sibling: bool,
    /// Its text alone, and why that ends.
    alone: (Vec<TokenId>, End),
    text: Vec<TokenId>,
    prompt_rows: Vec<u64>,
    end: Option<End>,
    is_refused: bool,
    reuse: Option<Reuse>,
    /// Steps with it that failed, since one succeeded.
    n_failed: u32,
    /// Its state came back rounded.
    is_rounded: bool,
}

/// Who has a sequence: with whom it shares prefixes, and of a running request its group.
type User = (PrefixUse, Option<RequestId>);

/// The saved state of a request.
#[derive(Debug)]
struct SavedState {
    snapshot: Snapshot,
    rows: SavedRows,
    seq: SeqId,
    n_bytes: u64,
    file: Option<StateFile>,
}

/// The file of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StateFile {
    /// It is in memory still.
    BeingWritten,
    Complete,
}

/// A disk on which things go wrong.
#[derive(Debug)]
pub struct Disk {
    pub rng: ChaCha8Rng,
    /// So many of 8 files cannot be written, or cannot be read.
    pub n_bad: u32,
    /// So many of 8 files are complete by the next step.
    pub n_fast: u32,
}

/// Everything of one simulation.
#[derive(Debug)]
pub struct Simulator {
    pub now: u64,
    pub scheduler: Scheduler,
    pub memory: Composite,
    pub(super) rows: FakeRows,
    rules: BatchRules,
    row_bytes: RowBytes,
    tenants: BTreeMap<TenantId, TenantLimits>,
    clients: BTreeMap<RequestId, Client>,
    running: BTreeSet<RequestId>,
    /// Steps fail at this of their ubatches, once.
    pub fails_at: Option<usize>,
    pub n_steps: u64,
    /// Of the steps that did not fail.
    pub n_ubatches: u64,
    /// Plans that were edits, since the last step.
    n_edits: u32,
    /// The states of preempted requests on the host and the disk.
    saved: BTreeMap<RequestId, SavedState>,
    pub disk: Option<Disk>,
    /// So many states are saved until one is not, and so on.
    pub saves_before_failure: Option<u32>,
    n_saves: u32,
    /// Drafts tokens for running requests, where there is one.
    drafting: Option<Drafting>,
    /// A store of prefixes, where there is one.
    pub store: Option<Store>,
    /// The cost of steps, where they are measured.
    pub cost: Option<Cost>,
    /// Holds requests, where there is something that they wait for.
    pub holds: Option<Holds>,
    /// The last plan was a step with drafted tokens: the memory may hold rejected ones.
    has_rejected: bool,
}

/// The time that steps take, in microseconds.
#[derive(Clone, Debug)]
pub struct Cost {
    pub step: f64,
    pub token: f64,
    /// Of a token for each one before it.
    pub depth: f64,
    /// Noise: steps take up to so much longer, as a factor.
    pub noise: f64,
    pub rng: ChaCha8Rng,
    /// Each step: texts that go on, other tokens, and its time.
    pub measured: Vec<(usize, usize, u64)>,
}

impl Cost {
    fn measure(&mut self, step: &Step) -> u64 {
        let token = |feed: &cellar_scheduler::Feed| {
            let n = feed.tokens.len() as f64;
            n * (self.token + self.depth * (f64::from(feed.first.0) + n / 2.0))
        };
        let time = self.step + step.feeds.iter().map(token).sum::<f64>();
        let n_texts = step.feeds.iter().filter(|f| f.tokens.len() == 1).count();
        let noise = self.noise * f64::from(below(&mut self.rng, 1000)) / 1000.0;
        let time = (time * (1.0 + noise)) as u64;
        self.measured
            .push((n_texts, step.batch.len() - n_texts, time));
        time
    }
}

/// The source of drafted tokens.
#[derive(Debug)]
pub struct Drafting {
    pub rng: ChaCha8Rng,
    /// So many of 8 tokens are right.
    pub n_right: u32,
}

impl Simulator {
    pub fn new(memory: Composite, config: SchedulerConfig) -> Self {
        Self {
            now: 0,
            scheduler: Scheduler::new(config, &memory).unwrap(),
            rows: FakeRows::of(&memory),
            memory,
            rules: config.rules,
            row_bytes: RowBytes::default(),
            tenants: BTreeMap::new(),
            clients: BTreeMap::new(),
            running: BTreeSet::new(),
            fails_at: None,
            n_steps: 0,
            n_ubatches: 0,
            n_edits: 0,
            saved: BTreeMap::new(),
            disk: None,
            saves_before_failure: None,
            n_saves: 0,
            drafting: None,
            store: None,
            cost: None,
            holds: None,
            has_rejected: false,
        }
    }

    /// The same with rows of these sizes.
    pub fn with_row_bytes(self, row_bytes: RowBytes) -> Self {
        Self {
            scheduler: self.scheduler.with_row_bytes(row_bytes.clone()),
            row_bytes,
            ..self
        }
    }

    /// The same with drafted tokens for running requests.
    pub fn with_drafting(self, drafting: Drafting) -> Self {
        Self {
            drafting: Some(drafting),
            ..self
        }
    }

    /// Drafts tokens for some running requests: right ones, and others.
    fn draft(&mut self) {
        let Some(Drafting { rng, n_right }) = &mut self.drafting else {
            return;
        };
        let mut drafts = Vec::new();
        for id in &self.running {
            let client = &self.clients[id];
            let after = client.alone.0.get(client.text.len()..).unwrap_or_default();
            let n = below(rng, 8) as usize;
            let tokens = (0..n).map(|at| match after.get(at) {
                Some(&token) if below(rng, 8) < *n_right => token,
                _ => TokenId(below(rng, N_VOCAB + 1)),
            });
            drafts.push((*id, tokens.collect()));
        }
        for (request, tokens) in drafts {
            let event = Event::Draft { request, tokens };
            let outcomes = self.scheduler.handle(Micros(self.now), event);
            assert!(outcomes.is_empty());
        }
    }

    /// Submits a request; returns why it was refused.
    pub fn submit(&mut self, script: Script) -> Result<RequestId, RequestError> {
        self.submit_texts(script, 1)
    }

    /// Submits a request for several texts of one prompt, whose numbers follow the first's.
    pub fn submit_texts(&mut self, script: Script, n: u64) -> Result<RequestId, RequestError> {
        let id = RequestId(self.clients.len() as u64);
        let siblings: Vec<RequestId> = (1..n).map(|number| RequestId(id.0 + number)).collect();
        let request = Request {
            id,
            priority: script.priority,
            prompt: script.prompt.clone(),
            prefix: script.prefix,
            prompt_rows: script.prompt_rows,
            checkpoints: script.checkpoints.clone(),
            parting: script.parting,
            siblings: siblings.clone(),
            tenant: script.tenant,
            ..Request::default()
        };
        let script_tenant = script.tenant;
        let capacity = self.scheduler.capacity();
        for (variant, text) in (0..).zip(std::iter::once(id).chain(siblings)) {
            let script = Script {
                variant,
                ..script.clone()
            };
            let client = Client {
                alone: if script.prompt.is_empty() {
                    (Vec::new(), End::Complete)
                } else {
                    alone(&self.memory, &script, capacity)
                },
                script,
                is_sibling: n > 1,
                text: Vec::new(),
                prompt_rows: Vec::new(),
                end: None,
                is_refused: false,
                reuse: None,
                n_failed: 0,
                is_rounded: false,
            };
            self.clients.insert(text, client);
        }
        let sent = Event::Submit(request.clone());
        let outcomes = self.scheduler.handle(Micros(self.now), sent);
        self.ask_store(&request);
        if !outcomes
            .iter()
            .any(|outcome| matches!(outcome, Outcome::Refused { .. }))
        {
            self.tenants.insert(script_tenant.id, script_tenant.limits);
        }
        let refused = outcomes.iter().find_map(|outcome| match outcome {
            Outcome::Refused { why, .. } => Some(why.clone()),
            _ => None,
        });
        self.take(outcomes);
        refused.map_or(Ok(id), Err)
    }

    pub fn cancel(&mut self, id: RequestId) {
        let cancelled = self.scheduler.handle(Micros(self.now), Event::Cancel(id));
        self.take(cancelled);
    }

    pub fn n_clients(&self) -> u64 {
        self.clients.len() as u64
    }

    pub fn end_of(&self, id: RequestId) -> Option<End> {
        self.clients[&id].end
    }

    pub fn text_of(&self, id: RequestId) -> &[TokenId] {
        &self.clients[&id].text
    }

    /// One plan, carried out. Returns whether there was anything to do.
    pub fn step(&mut self) -> bool {
        self.write_files();
        self.answer_store(Due::Some);
        self.draft();
        for text in self.holds.as_mut().map_or_else(Vec::new, Holds::ready) {
            let event = Event::Ready(text);
            assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
        }
        let plan = self.scheduler.next(Micros(self.now), &self.memory);
        self.take(plan.outcomes);
        self.has_rejected = false;
        if !matches!(plan.work, Work::Edit(_)) {
            self.check_bytes();
        }
        match plan.work {
            Work::Idle if self.store.as_ref().is_some_and(Store::is_asked) => {
                self.answer_store(Due::All);
            }
            Work::Idle if self.holds.as_ref().is_some_and(Holds::are_due) => {}
            Work::Idle => {
                self.check();
                assert_eq!(self.scheduler.running().count(), 0, "a request is stuck");
                assert_eq!(self.scheduler.n_waiting(), 0, "a request waits for nothing");
                return false;
            }
            Work::Edit(edits) => {
                self.n_edits += 1;
                assert!(
                    self.n_edits <= 4 * self.rules.n_seqs + 4,
                    "edits without a step"
                );
                self.publish();
                edits.into_iter().for_each(|edit| self.edit(edit));
            }
            Work::SwapOut { swap, limit } => self.swap_out(swap, limit),
            Work::SwapIn(swap) => self.swap_in(swap),
            Work::Fetch(request) => self.fetch(request),
            Work::Restore(prefix) => {
                self.n_edits = 0;
                self.restore_stored(prefix);
            }
            Work::Shift(_) | Work::Encode { .. } => panic!("no request shifts or has a source"),
            Work::Decode { step, .. } if self.puts_off(&step) => {}
            Work::Decode { step, planned } => {
                self.n_edits = 0;
                self.n_steps += 1;
                self.has_rejected = step.feeds.iter().any(|feed| feed.n_draft > 0);
                self.decode(&step, planned);
            }
        }
        self.check();
        true
    }

    /// True if a step is not begun, as some of its requests are held from now on.
    fn puts_off(&mut self, step: &Step) -> bool {
        let held = self.holds.as_mut().map(|holds| holds.hold(step));
        let held = held.filter(|held| !held.is_empty()).unwrap_or_default();
        if held.is_empty() {
            return false;
        }
        let before = self.scheduler.counters();
        let put_off = Event::StepFailed(StepFailure::PutOff);
        let held = held.into_iter().map(Event::Hold);
        for event in std::iter::once(put_off).chain(held) {
            assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
        }
        assert_eq!(self.scheduler.counters().n_steps + 1, before.n_steps);
        true
    }

    pub(super) fn edit(&mut self, edit: kv_core::memory::Edit) {
        let edited = self.memory.apply(edit).unwrap();
        assert!(edited.row_shifts.is_empty());
        self.rows.copy(&edited.row_copies);
    }

    /// Saves the state of a request, where it has no more bytes than it may.
    fn swap_out(&mut self, swap: Swap, limit: u64) {
        let running = self.scheduler.running().find(|r| r.id == swap.request);
        assert_eq!(running.unwrap().n_done, swap.n_tokens);
        swap.before_saving()
            .into_iter()
            .for_each(|edit| self.edit(edit));
        let seq = swap.swapped_seq();
        let snapshot = self.memory.snapshot(Seqs::One(seq)).unwrap();
        let rows = self.rows.save(&snapshot);
        // A header and the rows, as files have them.
        let n_bytes = 7 + rows.n_bytes(&self.row_bytes);
        self.n_saves += 1;
        let fails = |n: u32| self.n_saves.is_multiple_of(n + 1);
        let room = self.scheduler.config().swap_bytes - self.bytes_in_memory();
        let swap_bytes = self.scheduler.config().swap_bytes;
        assert_eq!(limit, swap_bytes - self.scheduler.swapped_bytes());
        let is_saved = n_bytes <= limit.min(room) && !self.saves_before_failure.is_some_and(fails);
        if is_saved {
            let state = SavedState {
                snapshot,
                rows,
                seq,
                n_bytes,
                file: None,
            };
            assert!(self.saved.insert(swap.request, state).is_none());
        }
        swap.at_the_end()
            .into_iter()
            .for_each(|edit| self.edit(edit));
        let event = Event::SwappedOut {
            request: swap.request,
            n_bytes: is_saved.then_some(n_bytes),
        };
        let outcomes = self.scheduler.handle(Micros(self.now), event);
        self.take(outcomes);
    }

    /// Bytes that are in memory, those that are being written among them.
    fn bytes_in_memory(&self) -> u64 {
        let states = self.saved.values();
        let in_memory = states.filter(|state| state.file != Some(StateFile::Complete));
        in_memory.map(|state| state.n_bytes).sum()
    }

    /// Some of the files that are being written are complete now, and some cannot be.
    fn write_files(&mut self) {
        let Some(Disk { rng, n_bad, n_fast }) = &mut self.disk else {
            return;
        };
        let mut failed = Vec::new();
        for (&id, state) in &mut self.saved {
            if state.file == Some(StateFile::BeingWritten) && below(rng, 8) < *n_fast {
                let is_bad = below(rng, 8) < *n_bad;
                state.file = (!is_bad).then_some(StateFile::Complete);
                failed.extend(is_bad.then_some(id));
            }
        }
        for id in failed {
            let event = Event::SpillFailed(id);
            assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
        }
    }

    /// True if the file of a state that comes back is damaged, or gone.
    fn is_lost(&mut self, request: RequestId) -> bool {
        let is_in_file = self.saved[&request].file == Some(StateFile::Complete);
        let disk = self.disk.as_mut().filter(|_| is_in_file);
        disk.is_some_and(|disk| below(&mut disk.rng, 8) < disk.n_bad)
    }

    /// Restores it, where there is room.
    fn swap_in(&mut self, swap: Swap) {
        let request = swap.request;
        if self.is_lost(request) {
            self.saved.remove(&request);
            let result = SwappedIn::Lost;
            let event = Event::SwappedIn { request, result };
            assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
            return;
        }
        let state = self.saved.get_mut(&swap.request).unwrap();
        if self.scheduler.config().swap_rows == SwapRows::Rounded {
            state.rows.round();
        }
        let into = RestoreInto::One {
            from: state.seq,
            to: swap.swapped_seq(),
        };
        let mut after = self.memory.clone();
        let result = match after.restore(&state.snapshot, into) {
            Ok(restored) => {
                self.rows.restore(&state.rows, &restored);
                self.memory = after;
                SwappedIn::Restored
            }
            Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => SwappedIn::NoRoom,
            Err(other) => panic!("{other}: {swap:?}"),
        };
        if result == SwappedIn::Restored {
            let is_rounded = self.scheduler.config().swap_rows == SwapRows::Rounded;
            self.clients.get_mut(&request).unwrap().is_rounded |= is_rounded;
            let edits = swap.after_restoring().into_iter().chain(swap.at_the_end());
            edits.for_each(|edit| self.edit(edit));
            self.saved.remove(&swap.request);
        }
        let event = Event::SwappedIn { request, result };
        let outcomes = self.scheduler.handle(Micros(self.now), event);
        self.take(outcomes);
    }

    /// Until every request has ended.
    pub fn drain(&mut self) {
        let mut left = 200_000;
        while self.step() {
            left -= 1;
            assert!(left > 0, "it never ends");
        }
        let open = self
            .clients
            .iter()
            .find(|(_, c)| c.end.is_none() && !c.is_refused);
        assert!(open.is_none(), "{open:?} has not ended");
        self.scheduler
            .handle(Micros(self.now), Event::ClearPrefixes);
        while self.step() {}
        assert_eq!(self.memory.n_used(), 0, "cells are in use");
        let states = self.memory.states().map_or(0, |states| states.n_used());
        assert_eq!(states, 0, "states are in use");
        assert!(self.saved.is_empty(), "there are states");
    }

    /// The prompt and the text of a request.
    pub fn tokens_of(&self, id: RequestId) -> Vec<TokenId> {
        let client = &self.clients[&id];
        [client.script.prompt.as_slice(), &client.text].concat()
    }

    /// With whom a request shares.
    pub fn prefix_of(&self, id: RequestId) -> PrefixUse {
        self.clients[&id].script.prefix
    }

    /// The part of a request that was cached when it was first admitted.
    pub fn reuse_of(&self, id: RequestId) -> Reuse {
        self.clients[&id].reuse.unwrap()
    }

    fn decode(&mut self, step: &Step, planned: PlannedBatch<CompositeSlot>) {
        self.check_progress(step);
        let outputs = self.compute(step, planned);
        for text in step.texts() {
            let client = self.clients.get_mut(&text).unwrap();
            client.n_failed = match outputs {
                Some(_) => 0,
                None => client.n_failed + 1,
            };
        }
        let event = match outputs {
            Some(outputs) => {
                let wanted: Vec<StepRow> = step.rows().collect();
                assert_eq!(wanted.last().map_or(0, |row| row.row + 1), outputs.len());
                let rows = step.report(|row| {
                    let output = outputs[row.row];
                    self.note_prompt_row(row, output);
                    match row.use_of {
                        RowUse::Prompt => None,
                        RowUse::NextToken | RowUse::AfterDraft(_) => {
                            Some(self.row(row.request, output))
                        }
                    }
                });
                Event::StepDone(rows)
            }
            None => Event::StepFailed(StepFailure::Computation),
        };
        let outcomes = self.scheduler.handle(Micros(self.now), event);
        self.take(outcomes);
        if let Some(cost) = &mut self.cost {
            let took = cost.measure(step);
            self.now += took;
            let event = Event::StepTime(Micros(took));
            assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
        }
    }

    /// The first request that is not held is in every step, but while single requests are tried
    /// after a failure; one that is held is in none.
    fn check_progress(&self, step: &Step) {
        let is_held = |request| self.holds.as_ref().is_some_and(|h| h.is_held(request));
        let mut running = self.scheduler.running();
        let running = running.find(|r| !is_held(r.id)).unwrap();
        assert!(!step.feeds.iter().any(|feed| is_held(feed.request)));
        let is_first = step.feeds.iter().any(|feed| feed.request == running.id);
        assert!(is_first || step.feeds.len() == 1, "{running:?}: {step:?}");
        for feed in &step.feeds {
            let own = self
                .scheduler
                .running()
                .find(|r| r.id == feed.request)
                .unwrap();
            let n_certain = feed.tokens.len() - feed.n_draft;
            let next = own.n_done..own.n_done + n_certain;
            assert_eq!((feed.seq, feed.first.as_usize()), (own.seq, own.n_done));
            assert_eq!(own.tokens[next], feed.tokens[..n_certain]);
            assert!(feed.n_draft <= self.scheduler.draft_limit().unwrap_or(0));
            assert!(feed.n_draft == 0 || n_certain == 1);
        }
    }

    /// The outputs of a step, or `None` where it failed and was undone.
    fn compute(&mut self, step: &Step, planned: PlannedBatch<CompositeSlot>) -> Option<Vec<u64>> {
        let is_poison = |id: &RequestId| self.clients[id].script.is_poison;
        let is_poisoned = step.texts().any(|text| is_poison(&text));
        let fails_at = if is_poisoned {
            Some(0)
        } else {
            self.fails_at.take()
        };
        let positions = |seq| self.memory.positions(seq);
        let batch = validate(&step.batch, &self.rules, positions).unwrap();
        assert_eq!(planned.batch, batch);
        let mut steps = self.memory.begin_planned(planned.plan);
        let (mut inputs, mut outputs) = (MemoryInputs::default(), Vec::new());
        let mut number = 0;
        while let Some(ubatch) = steps.next(&mut inputs) {
            outputs.extend(self.rows.run(ubatch, &inputs));
            if fails_at == Some(number) {
                steps.undo_all(RowsWritten::Perhaps);
                return None;
            }
            number += 1;
        }
        self.n_ubatches += number as u64;
        Some(outputs)
    }

    /// The rows of a prompt that wants them come in order, and again only from its beginning.
    fn note_prompt_row(&mut self, row: StepRow, output: u64) {
        let client = self.clients.get_mut(&row.request).unwrap();
        let n_prompt = client.script.prompt.len();
        match (client.script.prompt_rows, row.use_of) {
            (PromptRows::Last, RowUse::Prompt) => panic!("{row:?} was not wanted"),
            (PromptRows::All, _) if row.token < n_prompt && client.text.is_empty() => {
                assert!(
                    row.token <= client.prompt_rows.len(),
                    "{row:?} was left out"
                );
                client.prompt_rows.truncate(row.token);
                client.prompt_rows.push(output);
            }
            _ => {}
        }
    }

    /// What the sampler of a request makes of its row.
    fn row(&mut self, request: RequestId, output: u64) -> Progress {
        let client = self.clients.get_mut(&request).unwrap();
        let n = client.text.len();
        match choose_variant(output, client.script.variant) {
            _ if client.script.bad_row == Some(n) => Progress::Failed,
            None => Progress::Ended,
            Some(token) => {
                client.text.push(token);
                if n + 1 >= client.script.max_tokens {
                    Progress::Ended
                } else {
                    Progress::Token(token)
                }
            }
        }
    }

    fn take(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            match outcome {
                Outcome::Admitted { request, reuse, .. } => {
                    assert!(self.running.insert(request), "{request} was running");
                    let client = self.clients.get_mut(&request).unwrap();
                    client.reuse.get_or_insert(reuse);
                    let is_off = client.script.prefix == PrefixUse::Off && !client.is_sibling;
                    assert!(!is_off || reuse.missed == Some(Missed::Disabled));
                }
                Outcome::Preempted { request, .. } => {
                    assert!(self.running.remove(&request), "{request} was not running");
                    if let Some(holds) = &mut self.holds {
                        holds.forget(request);
                    }
                }
                Outcome::Refused { request, .. } => {
                    let client = self.clients.get_mut(&request).unwrap();
                    assert!(!client.is_refused && client.end.is_none());
                    client.is_refused = true;
                }
                Outcome::Spilled { request } => {
                    assert!(self.disk.is_some(), "there is no disk");
                    let state = self.saved.get_mut(&request).unwrap();
                    let before = state.file.replace(StateFile::BeingWritten);
                    assert_eq!(before, None, "{request}");
                }
                Outcome::SwapDropped { request, .. } => {
                    assert!(self.saved.remove(&request).is_some(), "{request}");
                }
                Outcome::Ended { request, end } => {
                    self.saved.remove(&request);
                    self.running.remove(&request);
                    self.ended(request, end);
                }
            }
        }
    }

    /// A request ends once, for a reason of its own, with the text that it has alone.
    fn ended(&mut self, id: RequestId, end: End) {
        let client = self.clients.get_mut(&id).unwrap();
        assert!(
            client.end.is_none() && !client.is_refused,
            "{id} ended twice"
        );
        client.end = Some(end);
        let Client {
            script,
            text,
            n_failed,
            alone: (alone, natural_end),
            ..
        } = &*client;
        if script.prompt_rows == PromptRows::All {
            let mut model = Alone::new(&self.memory);
            let rows: Vec<u64> = script.prompt.iter().map(|&t| model.push(t)).collect();
            assert!(
                rows.starts_with(&client.prompt_rows),
                "{id}: rows of its prompt"
            );
            assert!(
                text.is_empty() || rows.len() == client.prompt_rows.len(),
                "{id}"
            );
        }
        assert!(
            client.is_rounded || alone.starts_with(text),
            "{id}: {text:?} instead of {alone:?}"
        );
        match end {
            End::Cancelled => {}
            End::Complete | End::ContextFull if client.is_rounded => {}
            End::Failed if *n_failed >= 2 => {}
            End::Failed => assert_eq!(script.bad_row, Some(text.len()), "{id} failed"),
            end => assert_eq!((text, end), (alone, *natural_end), "{id}"),
        }
    }

    /// Before a step, cached prefixes have no more bytes than they may, counted cell by cell.
    fn check_bytes(&self) {
        let cached: BTreeMap<SeqId, usize> = self
            .scheduler
            .cached()
            .map(|line| (line.seq, line.tokens.len()))
            .collect();
        let of_cell = |part: usize| self.row_bytes.cells.get(part).copied().unwrap_or(1);
        let mut n_bytes = 0;
        for part in self.memory.parts() {
            let width = part.config().window.width().unwrap_or(u32::MAX) as usize;
            let cells = (0..part.n_cells()).filter_map(|cell| part.cell(CellIdx(cell)));
            let held = cells.filter(|cell| {
                // No token attends to a cell that is behind the window of each of its sequences.
                let is_seen = |seq| cell.pos.as_usize() + width >= cached[&seq];
                let is_cached = cell.seqs.iter().all(|seq| cached.contains_key(&seq));
                is_cached && cell.seqs.iter().any(is_seen)
            });
            n_bytes += of_cell(part.config().part.as_usize()) * held.count() as u64;
        }
        if let Some(states) = self.memory.states() {
            let mut owners: BTreeMap<CellIdx, bool> = BTreeMap::new();
            for seq in (0..self.rules.n_seqs).map(SeqId) {
                for kept in states.states(seq) {
                    *owners.entry(kept.row).or_insert(true) &= cached.contains_key(&seq);
                }
            }
            let n_held = owners.values().filter(|&&is_cached| is_cached).count();
            n_bytes += self.row_bytes.state.unwrap_or(1) * n_held as u64;
        }
        let counted = self.scheduler.cached_bytes(&self.memory);
        assert!(n_bytes <= counted, "{n_bytes} of {counted} bytes");
        let has_windows = self
            .memory
            .parts()
            .iter()
            .any(|p| p.config().window.width().is_some());
        assert!(
            has_windows || n_bytes == counted,
            "{n_bytes}, not {counted} bytes"
        );
        let limit = self.scheduler.config().prefix_bytes.unwrap_or(u64::MAX);
        assert!(counted <= limit, "{counted} of {limit} bytes");
    }

    /// No tenant has more texts running than it may.
    fn check_tenants(&self) {
        let mut n_running: BTreeMap<TenantId, usize> = BTreeMap::new();
        for running in self.scheduler.running() {
            *n_running.entry(running.tenant).or_default() += 1;
        }
        for (id, n) in n_running {
            let limits = self.tenants.get(&id).copied().unwrap_or_default();
            let limit = limits
                .max_running
                .map_or(usize::MAX, |limit| limit.get() as usize);
            assert!(n <= limit, "{n} of {limit} texts of {id:?}");
        }
    }

    /// Recounts everything.
    fn check(&self) {
        for part in self.memory.parts() {
            invariants::check(part).unwrap();
        }
        let running: BTreeMap<SeqId, _> = self.scheduler.running().map(|r| (r.seq, r)).collect();
        assert_eq!(running.len(), self.scheduler.running().count());
        assert!(running.len() <= self.scheduler.config().max_running);
        let ids: BTreeSet<RequestId> = running.values().map(|r| r.id).collect();
        assert_eq!(ids, self.running);
        for (seq, running) in &running {
            let n_held = self
                .memory
                .positions(*seq)
                .map_or(0, |p| p.last.as_usize() + 1);
            let is_right = n_held <= running.tokens.len() || self.has_rejected;
            assert!(is_right, "{n_held}: {running:?}");
        }
        let mut users: BTreeMap<SeqId, User> = BTreeMap::new();
        for (&seq, r) in &running {
            users.insert(seq, (r.prefix, Some(r.group)));
        }
        for line in self.scheduler.cached() {
            let before = users.insert(line.seq, (PrefixUse::Within(line.salt), None));
            assert!(before.is_none(), "{line:?} is also {before:?}");
            let held = self.memory.positions(line.seq);
            let n_held = held.map_or(0, |held| held.last.as_usize() + 1);
            let is_right =
                n_held == line.tokens.len() || (self.has_rejected && n_held > line.tokens.len());
            assert!(is_right, "{n_held}: {line:?}");
        }
        self.check_saved();
        self.check_isolation(&users);
        self.check_tenants();
    }

    /// What is saved has no more bytes than it may, wherever it is, and is where the scheduler
    /// takes it to be.
    fn check_saved(&self) {
        let bytes_of = |is_in_file: bool| -> u64 {
            let states = self.saved.values();
            let states = states.filter(|state| state.file.is_some() == is_in_file);
            states.map(|state| state.n_bytes).sum()
        };
        assert_eq!(bytes_of(false), self.scheduler.swapped_bytes());
        assert_eq!(bytes_of(true), self.scheduler.spilled_bytes());
        let config = self.scheduler.config();
        assert!(self.bytes_in_memory() <= config.swap_bytes);
        assert!(self.scheduler.swapped_bytes() <= config.swap_bytes);
        assert!(self.scheduler.spilled_bytes() <= config.swap_disk_bytes);
        let next = self.scheduler.next_from_disk(Micros(self.now));
        let has_file = |id| self.saved[&id].file.is_some();
        assert!(next.is_none_or(has_file), "{next:?}");
    }

    /// No cell is shared by requests of different salts, or by one that takes part in nothing, but
    /// with texts of the same prompt.
    fn check_isolation(&self, users: &BTreeMap<SeqId, User>) {
        for part in self.memory.parts() {
            let cells = (0..part.n_cells()).filter_map(|cell| part.cell(CellIdx(cell)));
            for cell in cells.filter(|cell| cell.seqs.len() > 1) {
                let of: Vec<_> = cell.seqs.iter().filter_map(|seq| users.get(&seq)).collect();
                let is_one = of.windows(2).all(|pair| pair[0].0 == pair[1].0);
                let is_group = of.windows(2).all(|pair| pair[0] == pair[1]);
                let is_off = of.iter().any(|user| user.0 == PrefixUse::Off);
                assert!(is_one && (is_group || !is_off), "{cell:?}: {of:?}");
            }
        }
    }
}

/// The text of a request alone, and why it ends.
pub fn alone(memory: &Composite, script: &Script, capacity: usize) -> (Vec<TokenId>, End) {
    let mut model = Alone::new(memory);
    let outputs = script.prompt.iter().map(|&token| model.push(token));
    let mut output = outputs.last().unwrap();
    let mut text = Vec::new();
    loop {
        let Some(token) = choose_variant(output, script.variant) else {
            return (text, End::Complete);
        };
        text.push(token);
        if text.len() >= script.max_tokens {
            return (text, End::Complete);
        }
        if script.prompt.len() + text.len() > capacity {
            return (text, End::ContextFull);
        }
        output = model.push(token);
    }
}

/// What a text of this number chooses.
fn choose_variant(output: u64, variant: u64) -> Option<TokenId> {
    choose(output ^ variant.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A number below `n`.
pub fn below(rng: &mut ChaCha8Rng, n: u32) -> u32 {
    rng.next_u32() % n.max(1)
}
