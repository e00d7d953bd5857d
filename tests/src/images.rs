//! [`ImagePrompt`]: a prompt with images, whose rows stand in place of tokens.

use kv_backend::{Backend, RowKind};
use kv_core::batch::Batch;
use kv_core::{GridPos, LayerIdx, Pos, SeqId, TokenId};
use serde_json::Value;

use crate::recorded::{RecordKey, RecordedValues};
use crate::{Case, Runner, Setup, Source, best, candle, cpu, fixture};

/// A token, or a row of an image.
#[derive(Clone, Debug, PartialEq)]
enum Content {
    Token(u32),
    Row(Vec<f32>),
}

/// A prompt with images.
#[derive(Clone, Debug)]
pub struct ImagePrompt {
    entries: Vec<(Content, [u32; 3])>,
}

impl ImagePrompt {
    /// One of the prompts of a case.
    pub fn of(case: &Case, prompt: usize) -> Self {
        let reference = case.reference();
        let ids = reference.ids(&format!("ids_{prompt}")).unwrap();
        let at = reference.ids(&format!("position_ids_{prompt}")).unwrap();
        let dim = case.model().embedding_dim();
        let (rows, placeholder) = given(case, prompt);
        let mut rows = rows.chunks(dim);
        let n = ids.len();
        let entries = ids.iter().enumerate().map(|(i, &id)| {
            let content = if u64::from(id) == placeholder {
                Content::Row(rows.next().unwrap().to_vec())
            } else {
                Content::Token(id)
            };
            (content, [at[i], at[n + i], at[2 * n + i]])
        });
        let entries = entries.collect();
        assert!(rows.next().is_none());
        Self { entries }
    }

    /// The three prompts of a case, of which at least the first two have images.
    pub fn all(case: &Case) -> [Self; 3] {
        let prompts = [0, 1, 2].map(|prompt| Self::of(case, prompt));
        let n_rows = prompts.each_ref().map(Self::n_rows);
        assert!(n_rows[0] > 0 && n_rows[1] > 0, "{n_rows:?}");
        prompts
    }

    /// Number of tokens and rows.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of them that are rows.
    pub fn n_rows(&self) -> usize {
        let is_row = |entry: &&(Content, _)| matches!(entry.0, Content::Row(_));
        self.entries.iter().filter(is_row).count()
    }

    /// The position of what follows.
    pub fn next(&self) -> Pos {
        let last = self.entries.iter().flat_map(|(_, at)| at).max();
        Pos(last.map_or(0, |&last| last + 1))
    }

    /// Batches of at most so many entries, all wanted: a batch has tokens or rows.
    pub fn batches(&self, seq: SeqId, n: usize) -> Vec<Batch> {
        let kind = |entry: &(Content, _)| matches!(entry.0, Content::Token(_));
        let same = self.entries.chunk_by(|a, b| kind(a) == kind(b));
        let pieces = same.flat_map(|entries| entries.chunks(n));
        let batch = |entries: &[(Content, [u32; 3])]| {
            let mut batch = Batch::new();
            for (content, [t, y, x]) in entries {
                let entry = match content {
                    Content::Token(id) => batch.push_token(TokenId(*id)).at(Pos(*t)),
                    Content::Row(row) => batch
                        .push_embedding(row)
                        .at_grid(Pos(*t), GridPos { y: *y, x: *x }),
                };
                entry.in_sequence(seq).with_output();
            }
            batch
        };
        pieces.map(batch).collect()
    }
}

/// The rows of the images of a prompt, and the token in whose places they are.
fn given(case: &Case, prompt: usize) -> (Vec<f32>, u64) {
    let placeholder = |config: &Value| config["image_token_id"].as_u64().unwrap();
    match case.source {
        Source::Directory(folder) | Source::GgufInDirectory(folder) => {
            let config = std::fs::read(fixture(folder).join(case.name).join("config.json"));
            let config = serde_json::from_slice(&config.unwrap()).unwrap();
            let rows = case.reference().values(&format!("image_embeds_{prompt}"));
            let rows = rows.map(|(_, rows)| rows);
            (rows.unwrap_or_default(), placeholder(&config))
        }
        _ => {
            let recipe = case.generated();
            let rows = recipe.given_rows(prompt).unwrap_or_default();
            (rows, placeholder(&recipe.config().clone().into()))
        }
    }
}

/// The logits of each prompt alone.
fn alone<B: Backend>(backend: impl Fn() -> B, case: &Case, n: usize) -> Vec<Vec<f32>> {
    let one = |prompt: &ImagePrompt| {
        let mut runner = Runner::new(backend(), case, &Setup::default());
        feed(&mut runner, prompt, SeqId(0), n)
    };
    ImagePrompt::all(case).iter().map(one).collect()
}

/// All prompts in one memory, one batch of each in turn.
fn in_turn<B: Backend>(backend: B, case: &Case, n: usize) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(backend, case, &Setup::default());
    let seqs = (0u32..).zip(ImagePrompt::all(case));
    let batches: Vec<_> = seqs.map(|(seq, p)| p.batches(SeqId(seq), n)).collect();
    let mut logits = vec![Vec::new(); batches.len()];
    for at in 0..batches.iter().map(Vec::len).max().unwrap() {
        for (of, batches) in logits.iter_mut().zip(&batches) {
            if let Some(batch) = batches.get(at) {
                of.extend(runner.decode(batch, 7).concat());
            }
        }
    }
    logits
}

fn assert_close(case: &Case, logits: &[Vec<f32>]) {
    for (prompt, ours) in logits.iter().enumerate() {
        let off = case.reference().logits(prompt).distance(ours);
        assert!(
            off < case.tolerance,
            "{}, {prompt}: off by {off}",
            case.name
        );
    }
}

/// Logits are the reference's on both backends, and the CPU's the same bits, however prompts come.
pub fn logits_agree(case: &Case) {
    let whole = alone(cpu, case, 512);
    assert_close(case, &whole);
    for n in [1, 5] {
        assert!(alone(cpu, case, n) == whole, "{}: {n}", case.name);
        assert!(in_turn(cpu(), case, n) == whole, "{}: {n}", case.name);
    }
    assert_close(case, &alone(candle, case, 512));
    assert_close(case, &in_turn(candle(), case, 5));
}

/// The likeliest continuations are the reference's.
pub fn continuations_agree(case: &Case) {
    for (at, prompt) in ImagePrompt::all(case).iter().enumerate() {
        let wanted = case.reference().greedy(at);
        let mut runner = Runner::new(cpu(), case, &Setup::default());
        let ours = greedy(&mut runner, prompt, wanted.len());
        assert_eq!(ours, wanted, "{}, {at}", case.name);
    }
}

/// What layers remember of each prompt is what the reference recorded, all of it.
pub fn memories_agree(case: &Case, tolerance: f32) {
    let mut n_compared = 0;
    for (at, prompt) in ImagePrompt::all(case).iter().enumerate() {
        let mut runner = Runner::new(cpu(), case, &Setup::that_keeps_all_rows());
        feed(&mut runner, prompt, SeqId(0), 512);
        let n_tokens = prompt.len() as u32;
        let (off, n) = memories_distance(&runner, case, at, n_tokens);
        assert!(off < tolerance, "{}, {at}: off by {off}", case.name);
        n_compared += n;
    }
    assert_eq!(n_compared, case.reference().n_recorded(), "{}", case.name);
}

/// The logits of all entries of a prompt in pieces of at most so many, `[entries, vocab]`.
pub fn feed<B: Backend>(
    runner: &mut Runner<B>,
    prompt: &ImagePrompt,
    seq: SeqId,
    n: usize,
) -> Vec<f32> {
    let batches = prompt.batches(seq, n);
    let logits = batches.iter().flat_map(|batch| runner.decode(batch, 512));
    logits.collect::<Vec<_>>().concat()
}

/// The likeliest tokens after a prompt, one after the other.
pub fn greedy<B: Backend>(runner: &mut Runner<B>, prompt: &ImagePrompt, n: usize) -> Vec<u32> {
    let n_vocab = runner.model.vocab_size();
    let logits = feed(runner, prompt, SeqId(0), 512);
    let mut text = vec![best(&logits[logits.len() - n_vocab..])];
    while text.len() < n {
        let at = Pos(prompt.next().0 + text.len() as u32 - 1);
        let mut batch = Batch::new();
        let last = TokenId(text[text.len() - 1]);
        batch.push_token(last).at(at).with_output();
        text.push(best(&runner.decode(&batch, 512).concat()));
    }
    text
}

/// Largest difference of the keys, values and states that a prompt fed alone left behind from
/// those that were recorded, and how many were compared.
pub fn memories_distance<B: Backend>(
    runner: &Runner<B>,
    case: &Case,
    prompt: usize,
    n_tokens: u32,
) -> (f32, usize) {
    let reference = case.reference();
    let layers: Vec<LayerIdx> = runner.model.layers().iter().map(|(l, _)| l).collect();
    let kinds = [RowKind::K, RowKind::V, RowKind::Conv, RowKind::State];
    let (mut off, mut n_compared) = (0f32, 0);
    for (layer, kind) in layers.iter().flat_map(|&l| kinds.map(|kind| (l, kind))) {
        if runner.n_values(layer, kind).is_none() {
            continue;
        }
        let rows = runner.rows_of(layer, kind, n_tokens);
        let key = RecordKey {
            layer,
            kind,
            prompt,
        };
        if let Some(recorded) = RecordedValues::of(case, &reference, key, rows.len()) {
            off = off.max(recorded.distance(&rows));
            n_compared += 1;
        }
    }
    (off, n_compared)
}
