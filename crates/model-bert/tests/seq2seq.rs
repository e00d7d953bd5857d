//! Encoder-decoders: logits, rows of sources, continuations, sequence operations and states are
//! those of transformers, or the same bits as without them.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::common::registry;
use cellar_engine::sampler::SamplerConfig;
use cellar_engine::session::{Activity, ServiceConfig, Session, TextRequest};
use cellar_engine::{CompletionOptions, Engine, EngineConfig, EngineError, SaveOptions};
use kv_backend::state::SavedState;
use kv_backend::{Backend, RowKind, RowSpan};
use kv_candle::CandleBackend;
use kv_core::{
    LayerIdx, PosRange, SeqId, TokenId, Window,
    batch::{Batch, BatchError, TokensOf},
    memory::{Memory, Refusal, RestoreInto, Seqs, Streams},
};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_graph::{Graph, GraphShape, Op};
use kv_rows::KvType;
use model_core::architecture::Model;
use model_core::directory::HfDirectory;
use model_core::hf::{HfConfig, HfTranslation, ModelFileError};
use model_core::tokenizer::{Tokenizer, TokenizerModel, TokenizerSpec};
use model_tests::{Recipe, Reference, best, cpu, distance, fixture};
use serde_json::json;

const RECIPES: [&str; 4] = ["t5_relu_tied", "t5_v1_1", "bart", "m2m_100"];
const TOLERANCE: f32 = 2e-4;
const N_SEQS: usize = 3;

/// A model with what transformers made of three sources.
struct Subject {
    name: &'static str,
    model: Arc<dyn Model>,
    weights: Arc<dyn WeightSource>,
    reference: Reference,
}

impl Subject {
    fn of(name: &'static str) -> Self {
        let recipe = recipe(name);
        let directory = recipe.directory(&registry()).unwrap();
        Self {
            name,
            model: Arc::clone(directory.model()),
            weights: directory.weights().clone(),
            reference: recipe.reference(),
        }
    }

    fn engine<B: Backend>(&self, backend: B, config: &EngineConfig) -> Engine<B> {
        let (model, weights) = (Arc::clone(&self.model), Arc::clone(&self.weights));
        Engine::new(backend, model, weights, config).unwrap()
    }

    fn ids(&self, name: &str, at: usize) -> Vec<TokenId> {
        let ids = self.reference.ids(&format!("{name}_{at}")).unwrap();
        ids.into_iter().map(TokenId).collect()
    }

    fn source(&self, at: usize) -> Batch {
        Batch::source(seq(at), self.ids("enc_ids", at))
    }

    fn values(&self, name: &str) -> Vec<f32> {
        self.reference.values(name).unwrap().1
    }

    /// Compares the logits of all tokens of a text with the rows that were kept.
    fn assert_logits(&self, how: &str, at: usize, got: &[f32]) {
        let n_vocab = self.model.vocab_size();
        let kept = self.reference.ids(&format!("rows_{at}")).unwrap();
        let kept = kept.iter().map(|&row| row as usize * n_vocab);
        let kept: Vec<f32> = kept
            .flat_map(|row| got[row..][..n_vocab].to_vec())
            .collect();
        self.assert_close(how, &kept, &self.values(&format!("logits_{at}")));
    }

    fn assert_close(&self, how: &str, got: &[f32], wanted: &[f32]) {
        assert_eq!(got.len(), wanted.len(), "{}, {how}", self.name);
        let off = distance(got, wanted);
        assert!(off <= TOLERANCE, "{}, {how}: off by {off}", self.name);
    }

    /// Continues a text greedily from the token that begins it.
    fn greedy<B: Backend>(&self, engine: &mut Engine<B>, of: SeqId, n: usize) -> Vec<u32> {
        let [mut token] = self.model.source_encoder().unwrap().start[..] else {
            panic!("texts begin with one token");
        };
        let mut text = Vec::new();
        for _ in 0..n {
            let logits = engine.decode(&Batch::prompt(of, [token])).unwrap();
            text.push(best(logits.last().unwrap()));
            token = TokenId(*text.last().unwrap());
        }
        text
    }
}

fn recipe(name: &str) -> Recipe {
    Recipe::open(&fixture("seq2seq").join(name))
}

fn seq(at: usize) -> SeqId {
    SeqId(u32::try_from(at).unwrap())
}

fn config() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(128),
        n_seqs: N_SEQS as u32,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    }
}

/// The next tokens of a text, with the output of each.
fn text(of: SeqId, tokens: &[TokenId]) -> Batch {
    let mut batch = Batch::new();
    for &token in tokens {
        batch.push_token(token).in_sequence(of).with_output();
    }
    batch
}

/// Logits of a text however it is given: whole, token by token, and with others.
fn logits_agree<B: Backend>(subject: &Subject, how: &str, backend: impl Fn() -> B) {
    let mut engine = subject.engine(backend(), &config());
    for at in 0..N_SEQS {
        let ids = subject.ids("dec_ids", at);
        engine.encode(&subject.source(at)).unwrap();
        let whole = engine.decode(&text(seq(at), &ids)).unwrap();
        let whole = whole.values().to_vec();
        subject.assert_logits(&format!("{how}, whole"), at, &whole);
        engine.remove(Seqs::One(seq(at)), PosRange::ALL).unwrap();
        engine.encode(&subject.source(at)).unwrap();
        let mut single = Vec::new();
        for &id in &ids {
            let logits = engine.decode(&Batch::prompt(seq(at), [id])).unwrap();
            single.extend_from_slice(logits.values());
        }
        subject.assert_logits(&format!("{how}, token by token"), at, &single);
        if how == "kv-cpu" {
            assert_eq!(single, whole, "{}, {at}", subject.name);
        }
    }
    // All sources in one batch, all texts in one batch, in another engine.
    let mut engine = subject.engine(backend(), &config());
    let mut sources = Batch::new();
    sources.set_tokens_of(TokensOf::Source);
    let mut texts = Batch::new();
    for at in 0..N_SEQS {
        for id in subject.ids("enc_ids", at) {
            sources.push_token(id).in_sequence(seq(at)).with_output();
        }
        for id in subject.ids("dec_ids", at) {
            texts.push_token(id).in_sequence(seq(at)).with_output();
        }
    }
    let hidden = engine.encode(&sources).unwrap();
    let (mut rows, dim) = (hidden.values().to_vec(), hidden.dim());
    let together = engine.decode(&texts).unwrap().values().to_vec();
    let mut rest = together.as_slice();
    for at in 0..N_SEQS {
        let n = subject.ids("dec_ids", at).len() * subject.model.vocab_size();
        let (own, others) = rest.split_at(n);
        subject.assert_logits(&format!("{how}, together"), at, own);
        rest = others;
        let kept = subject.reference.ids(&format!("enc_rows_{at}")).unwrap();
        let kept = kept.iter().map(|&row| row as usize * dim);
        let kept: Vec<f32> = kept.flat_map(|row| rows[row..][..dim].to_vec()).collect();
        let wanted = subject.values(&format!("enc_hidden_{at}"));
        subject.assert_close(&format!("{how}, source {at}"), &kept, &wanted);
        rows.drain(..subject.ids("enc_ids", at).len() * dim);
    }
}

#[test]
fn logits_are_those_of_the_reference() {
    for name in RECIPES {
        let subject = Subject::of(name);
        logits_agree(&subject, "kv-cpu", cpu);
        logits_agree(&subject, "kv-candle", CandleBackend::cpu);
    }
}

/// The last two rows of a layer of a sequence.
fn last_rows<B: Backend>(engine: &Engine<B>, layer: usize, kind: RowKind, of: SeqId) -> Vec<f32> {
    let layer = LayerIdx(u32::try_from(layer).unwrap());
    let layers = engine.model().layers();
    let is_source = layers.attention(layer).unwrap().window == Window::Source;
    let memory = engine.memory();
    let runs = if is_source {
        memory.source().unwrap().runs(of)
    } else {
        memory.parts()[0].runs(of)
    };
    let last = runs.last().unwrap();
    let shape = engine.settings().layout.layer(layer).unwrap().k;
    let mut bytes = vec![0; 2 * shape.bytes()];
    let span = RowSpan {
        layer,
        kind,
        first: last.cell.offset(last.len - 2),
        len: 2,
    };
    engine.read_rows(span, &mut bytes).unwrap();
    let values = bytes.as_chunks::<4>().0.iter();
    values.map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn rows_and_continuations_are_those_of_the_reference() {
    for name in RECIPES {
        let subject = Subject::of(name);
        let mut engine = subject.engine(cpu(), &config());
        let at = 2;
        engine.encode(&subject.source(at)).unwrap();
        let ids = subject.ids("dec_ids", at);
        engine.decode(&text(seq(at), &ids)).unwrap();
        let n_layers = subject.model.layers().n_layers() / 2;
        for layer in [0, n_layers - 1] {
            for (what, first) in [("self", 0), ("cross", n_layers)] {
                for (letter, kind) in [("k", RowKind::K), ("v", RowKind::V)] {
                    let wanted = format!("{what}_{letter}_l{layer}_{at}");
                    let got = last_rows(&engine, first + layer, kind, seq(at));
                    subject.assert_close(&wanted, &got, &subject.values(&wanted));
                }
            }
        }
        for at in 0..N_SEQS {
            engine.remove(Seqs::One(seq(at)), PosRange::ALL).unwrap();
            engine.encode(&subject.source(at)).unwrap();
            let wanted = subject.reference.ids(&format!("greedy_{at}")).unwrap();
            let got = subject.greedy(&mut engine, seq(at), wanted.len());
            assert_eq!(got, wanted, "{name}, {at}");
        }
    }
}

/// Several texts in one session, also where each is preempted again and again: each source is
/// encoded with its sequence, and each text is the reference's.
#[test]
fn a_session_encodes_the_source_of_each_text() {
    for name in RECIPES {
        let subject = Subject::of(name);
        let n_vocab = subject.model.vocab_size();
        let pieces: Vec<String> = (0..n_vocab).map(|id| format!("[{id}]")).collect();
        let mut spec = TokenizerSpec::new(TokenizerModel::Spm, pieces);
        spec.scores = vec![0.0; n_vocab];
        let tokenizer = Arc::new(Tokenizer::new(spec).unwrap());
        for preempt_every in [None, NonZeroU32::new(2)] {
            let engine = subject.engine(cpu(), &config());
            let limits = ServiceConfig {
                preempt_every,
                ..ServiceConfig::default()
            };
            let mut session = Session::new(engine, &tokenizer, &limits).unwrap();
            let wanted: Vec<_> = (0..N_SEQS)
                .map(|at| subject.reference.ids(&format!("greedy_{at}")).unwrap())
                .collect();
            let mut submit = |at: usize, n_predict: usize| {
                let request = TextRequest {
                    prompt: subject.ids("enc_ids", at),
                    options: CompletionOptions {
                        sampler: SamplerConfig::greedy(),
                        n_predict: Some(n_predict),
                        ..CompletionOptions::default()
                    },
                    ..TextRequest::default()
                };
                session.submit(request).unwrap()
            };
            let streams: Vec<_> = (0..N_SEQS).map(|at| submit(at, wanted[at].len())).collect();
            while session.step() == Activity::Busy {}
            for (at, stream) in streams.into_iter().enumerate() {
                let text = stream.finish().unwrap();
                let got: Vec<u32> = text.tokens.iter().map(|token| token.0).collect();
                assert_eq!(got, wanted[at], "{name}, {at}, {preempt_every:?}");
                let n_source = subject.ids("enc_ids", at).len();
                let n_start = subject.model.source_encoder().unwrap().start.len();
                assert_eq!(text.usage.n_prompt, n_source + n_start);
            }
            let n_preemptions = session.scheduler().counters().n_preemptions;
            assert_eq!(n_preemptions > 0, preempt_every.is_some());
            assert_eq!(session.into_engine().memory().n_used(), 0);
        }
    }
}

#[test]
fn copies_share_a_source_and_removals_free_it() {
    let subject = Subject::of("t5_v1_1");
    let mut engine = subject.engine(cpu(), &config());
    engine.encode(&subject.source(0)).unwrap();
    let ids = subject.ids("dec_ids", 0);
    engine.decode(&text(seq(0), &ids[..4])).unwrap();
    let n_used = engine.memory().n_used();
    engine.copy(seq(0), seq(1), PosRange::ALL).unwrap();
    assert_eq!(engine.memory().n_used(), n_used, "cells are shared");
    let [own, copy] = [0, 1].map(|at| {
        let logits = engine.decode(&text(seq(at), &ids[4..])).unwrap();
        logits.values().to_vec()
    });
    assert_eq!(own, copy);
    // A text that is taken back keeps its source; the last sequence that leaves frees it.
    engine
        .remove(Seqs::One(seq(1)), PosRange::from(kv_core::Pos(4)..))
        .unwrap();
    let again = engine
        .decode(&text(seq(1), &ids[4..]))
        .unwrap()
        .values()
        .to_vec();
    assert_eq!(again, own);
    let n_source = subject.ids("enc_ids", 0).len() as u32;
    let source = |engine: &Engine<_>| engine.memory().source().unwrap().n_used();
    engine.remove(Seqs::One(seq(0)), PosRange::ALL).unwrap();
    assert_eq!(source(&engine), n_source);
    engine.remove(Seqs::One(seq(1)), PosRange::ALL).unwrap();
    assert_eq!(engine.memory().n_used(), 0);
}

#[test]
fn shifts_leave_sources_where_they_are() {
    let subject = Subject::of("t5_relu_tied");
    let mut engine = subject.engine(cpu(), &config());
    engine.encode(&subject.source(0)).unwrap();
    let ids = subject.ids("dec_ids", 0);
    engine.decode(&text(seq(0), &ids)).unwrap();
    let before = engine.memory().source_positions(seq(0));
    assert!(engine.shift_context(seq(0), 1).unwrap() > 0);
    assert_eq!(engine.memory().source_positions(seq(0)), before);
    assert!(engine.decode(&Batch::prompt(seq(0), [TokenId(7)])).is_ok());
    // Learned positions are in the keys.
    let subject = Subject::of("bart");
    let mut engine = subject.engine(cpu(), &config());
    engine.encode(&subject.source(0)).unwrap();
    let refused = engine.shift_context(seq(0), 1);
    assert!(
        matches!(refused, Err(EngineError::CannotShift(_))),
        "{refused:?}"
    );
}

#[test]
fn states_come_back_into_other_sizes_and_streams() {
    for name in RECIPES {
        let subject = Subject::of(name);
        let mut engine = subject.engine(cpu(), &config());
        for at in 0..N_SEQS {
            engine.encode(&subject.source(at)).unwrap();
            let ids = subject.ids("dec_ids", at);
            engine.decode(&text(seq(at), &ids[..3])).unwrap();
        }
        let options = SaveOptions {
            seqs: Seqs::All,
            tokens: &[],
            kv_type: None,
            state_type: None,
        };
        let mut bytes = Vec::new();
        engine.save_state(&options, &mut bytes).unwrap();
        let state = SavedState::parse(&bytes).unwrap();
        for (n_ctx, streams) in [(200, Streams::Shared), (70, Streams::PerSequence)] {
            let config = EngineConfig {
                n_ctx: Some(n_ctx),
                streams,
                ..config()
            };
            let mut other = subject.engine(cpu(), &config);
            let restored = other.restore_state(&state, RestoreInto::All).unwrap();
            assert_eq!(restored.n_tokens, 9, "those of texts count");
            for at in 0..N_SEQS {
                let next = text(seq(at), &subject.ids("dec_ids", at)[3..]);
                let mut before = subject.engine(cpu(), &self::config());
                before.restore_state(&state, RestoreInto::All).unwrap();
                let wanted = before.decode(&next).unwrap().values().to_vec();
                let got = other.decode(&next).unwrap().values().to_vec();
                assert_eq!(got, wanted, "{name}, {at}");
            }
        }
        // One sequence becomes another.
        let mut other = subject.engine(cpu(), &config());
        let into = RestoreInto::One {
            from: seq(0),
            to: seq(2),
        };
        other.restore_state(&state, into).unwrap();
        let next = |of| text(of, &subject.ids("dec_ids", 0)[3..]);
        let got = other.decode(&next(seq(2))).unwrap().values().to_vec();
        let wanted = engine.decode(&next(seq(0))).unwrap().values().to_vec();
        assert_eq!(got, wanted, "{name}");
    }
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let subject = Subject::of("t5_v1_1");
    let mut engine = subject.engine(cpu(), &config());
    let ids = subject.ids("dec_ids", 0);
    let refused = engine.decode(&text(seq(1), &ids)).unwrap_err();
    let wanted = EngineError::Refused(Refusal::NoSource { seq: seq(1) });
    assert_eq!(refused.to_string(), wanted.to_string());
    engine.encode(&subject.source(1)).unwrap();
    let refused = engine.encode(&subject.source(1)).unwrap_err();
    assert!(
        matches!(
            refused,
            EngineError::Batch(BatchError::HasSource { n_tokens: 22, .. })
        ),
        "{refused:?}"
    );
    let refused = engine.encode(&text(seq(1), &ids)).unwrap_err();
    assert!(
        matches!(refused, EngineError::WrongTokens { .. }),
        "{refused:?}"
    );
    let refused = engine.decode(&subject.source(0)).unwrap_err();
    assert!(
        matches!(refused, EngineError::WrongTokens { .. }),
        "{refused:?}"
    );
    // Sequences with other sources cannot share a token, nor a part of a text.
    engine.encode(&subject.source(0)).unwrap();
    let mut both = Batch::new();
    both.push_token(ids[0])
        .in_sequences(&[seq(0), seq(1)].into_iter().collect());
    let other_source =
        |error: &EngineError| matches!(error, EngineError::Refused(Refusal::OtherSource { .. }));
    let refused = engine.decode(&both).unwrap_err();
    assert!(other_source(&refused), "{refused:?}");
    engine.decode(&text(seq(0), &ids[..4])).unwrap();
    engine.decode(&text(seq(1), &ids[..6])).unwrap();
    let refused = engine.copy(seq(0), seq(1), PosRange::from(..kv_core::Pos(3)));
    assert!(other_source(refused.as_ref().unwrap_err()), "{refused:?}");
    // What was refused has left no trace.
    let own = engine
        .decode(&text(seq(1), &ids[6..]))
        .unwrap()
        .values()
        .to_vec();
    let mut fresh = subject.engine(cpu(), &config());
    fresh.encode(&subject.source(1)).unwrap();
    fresh.decode(&text(seq(1), &ids[..6])).unwrap();
    assert_eq!(
        fresh.decode(&text(seq(1), &ids[6..])).unwrap().values(),
        own
    );
}

#[test]
fn a_source_that_does_not_fit_is_refused() {
    let subject = Subject::of("t5_v1_1");
    let small = EngineConfig {
        n_ctx: Some(40),
        n_ubatch: 25,
        ..config()
    };
    let mut engine = subject.engine(cpu(), &small);
    let refused = engine.encode(&subject.source(0)).unwrap_err();
    let reason = refused.to_string();
    assert!(
        reason.contains("31 tokens") && reason.contains("takes 25"),
        "{reason}"
    );
    engine.encode(&subject.source(1)).unwrap();
    engine.encode(&subject.source(2)).unwrap();
    engine.copy(seq(2), seq(0), PosRange::ALL).unwrap();
    engine.remove(Seqs::One(seq(2)), PosRange::ALL).unwrap();
    let refused = engine
        .encode(&Batch::source(seq(2), subject.ids("enc_ids", 1)))
        .unwrap_err();
    assert!(
        matches!(refused, EngineError::Refused(Refusal::NoRoom(_))),
        "{refused:?}"
    );
    assert!(refused.to_string().contains("source"), "{refused}");
    assert_eq!(engine.memory().source().unwrap().n_used(), 22 + 13);
}

#[test]
fn a_decoder_computes_no_row_of_a_source() {
    for name in RECIPES {
        let model = Subject::of(name).model;
        let shape = GraphShape {
            n_tokens: 5,
            n_outputs: 1,
        };
        let decoder = model.graph(shape).unwrap();
        let encoder = model.source_encoder().unwrap().model.graph(shape).unwrap();
        let n_layers = model.layers().n_layers() / 2;
        let stores = |graph: &Graph| {
            let stores = graph.nodes().iter().filter_map(|node| match node.op {
                Op::StoreKv { layer } => Some(layer.as_usize()),
                _ => None,
            });
            stores.collect::<Vec<_>>()
        };
        assert_eq!(stores(&decoder), (0..n_layers).collect::<Vec<_>>());
        assert_eq!(
            stores(&encoder),
            (n_layers..2 * n_layers).collect::<Vec<_>>()
        );
        // T5's other form differs in its feed-forward block.
        let pictured = [("decoder", decoder), ("encoder", encoder)];
        for (side, graph) in pictured.into_iter().filter(|_| name != "t5_relu_tied") {
            insta::assert_snapshot!(format!("{name}-{side}"), graph.text());
        }
    }
}

/// A setting that changes what is computed is read or refused by its name.
#[test]
fn settings_count() {
    let logits = |recipe: &Recipe| {
        let directory = recipe
            .directory(&registry())
            .map_err(|error| error.to_string())?;
        let subject = Subject {
            name: "edited",
            model: Arc::clone(directory.model()),
            weights: directory.weights().clone(),
            reference: recipe.reference(),
        };
        let mut engine = subject.engine(cpu(), &config());
        engine.encode(&subject.source(0)).unwrap();
        let ids = subject.ids("dec_ids", 0);
        let logits = engine.decode(&text(seq(0), &ids)).unwrap();
        Ok::<Vec<f32>, String>(logits.values().to_vec())
    };
    for (name, key, value) in [
        ("t5_relu_tied", "scale_decoder_outputs", json!(false)),
        (
            "t5_relu_tied",
            "relative_attention_max_distance",
            json!(128),
        ),
        ("t5_v1_1", "layer_norm_epsilon", json!(0.1)),
        ("t5_v1_1", "relative_attention_max_distance", json!(128)),
        ("bart", "scale_embedding", json!(true)),
        ("bart", "activation_function", json!("relu")),
        ("m2m_100", "scale_embedding", json!(false)),
        ("m2m_100", "pad_token_id", json!(3)),
    ] {
        let usual = logits(&recipe(name)).unwrap();
        let edited = recipe(name).with_config(|config| {
            config.insert(key.to_owned(), value);
        });
        assert!(
            distance(&logits(&edited).unwrap(), &usual) > 1e-2,
            "{name}, {key}"
        );
    }
    for (name, key, value, named) in [
        (
            "t5_relu_tied",
            "relative_attention_num_buckets",
            json!(6),
            "attention.relative_buckets_count",
        ),
        (
            "t5_relu_tied",
            "feed_forward_proj",
            json!("gated-relu"),
            "is_gated_act",
        ),
        ("t5_v1_1", "dense_act_fn", json!("tanh"), "dense_act_fn"),
        ("t5_v1_1", "is_decoder", json!(true), "is_decoder"),
        (
            "t5_v1_1",
            "decoder_start_token_id",
            json!(null),
            "decoder_start_token_id",
        ),
        (
            "bart",
            "activation_function",
            json!("tanh"),
            "activation_function",
        ),
        ("bart", "normalize_before", json!(true), "normalize_before"),
        (
            "bart",
            "decoder_attention_heads",
            json!(7),
            "decoder.attention.head_count",
        ),
        (
            "bart",
            "tie_word_embeddings",
            json!(false),
            "tie_word_embeddings",
        ),
        (
            "m2m_100",
            "max_position_embeddings",
            json!(1 << 30),
            "max_position_embeddings",
        ),
        ("m2m_100", "d_model", json!(2), "d_model"),
    ] {
        let edited = recipe(name).with_config(|config| {
            config.insert(key.to_owned(), value);
        });
        let refused = logits(&edited).unwrap_err();
        assert!(refused.contains(named), "{key}: {refused}");
    }
}

/// A tensor of published files of T5, which no model uses.
#[test]
fn biases_of_cross_attention_are_left_out() {
    let recipe = recipe("t5_relu_tied");
    let mut weights = MemoryWeights::new();
    for name in recipe.weights().names() {
        weights.insert(recipe.weights().get(&name).unwrap());
    }
    let name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";
    weights.insert_f32(name, &[8, 5], &[1.0; 40]).unwrap();
    let config = HfConfig::new("'config.json'", recipe.config().clone());
    let registry = registry();
    let translated =
        HfTranslation::from_parts("t5", config, &weights, registry.hf_classes()).unwrap();
    let directory = HfDirectory::from_translation(translated, &registry).unwrap();
    assert_eq!(directory.model().architecture(), "t5");
}

#[test]
fn a_text_begins_with_the_token_that_its_config_forces() {
    let with = |id: u32| {
        recipe("m2m_100").with_config(|config| {
            config.insert("forced_bos_token_id".into(), json!(id));
        })
    };
    let start = |recipe: Recipe| {
        let directory = recipe.directory(&registry())?;
        let encoder = directory.model().source_encoder().unwrap();
        Ok::<_, ModelFileError>(encoder.start)
    };
    let [first] = start(recipe("m2m_100")).unwrap()[..] else {
        panic!("texts begin with one token");
    };
    assert_eq!(start(with(7)).unwrap(), [first, TokenId(7)]);
    let error = start(with(480)).unwrap_err().to_string();
    assert!(error.contains("forced_bos_token_id"), "{error}");
}
