//! Heads that draft for models with adapters: they read the rows that the adapters changed, and
//! texts are what they are without a head.

use std::sync::Arc;

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::session::{DraftCostSource, ServiceConfig, Session, TextRequest};
use cellar_engine::{
    CancelFlag, CompletionOptions, Engine, EngineConfig, HeadTurn, Speculated, Speculation,
};
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_cpu::CpuBackend;
use kv_graph::weights::Weight;
use model_core::adapters::{AdapterOptions, AdapterSpec};
use model_core::gguf::GgufWriter;
use model_core::head_file::HeadFile;
use model_core::model_file::{OpenModel, open_tokenizer};
use model_core::tokenizer::EncodeOptions;
use model_tests::{Recipe, cpu, fixture, heads};

use super::{Files, engine};

const MODEL: &str = "llama_gqa_untied";
/// Two of the layers, and one of the embedding and output matrices.
const ADAPTERS: [(&str, f32); 3] = [("all_linear", 0.0), ("patterns", 0.0), ("ends", 0.0)];

/// A head of EAGLE-3 for the model.
fn head(files: &Files) -> HeadFile {
    let recipe = Recipe::open(&fixture("heads/eagle3"));
    heads::own_head(&recipe, &files.path("head"), &files.registry)
}

fn with_head(files: &Files, head: &HeadFile, mut open: OpenModel) -> OpenModel {
    open.use_head_of(head, &files.registry).unwrap();
    open
}

fn prompt(number: usize) -> Vec<TokenId> {
    let length = 6 + number % 5;
    let token = |at: usize| TokenId(3 + ((number * 31 + at * 7) % 500) as u32);
    (0..length).map(token).collect()
}

/// The tokens that the head drafts after a prompt.
fn drafted(engine: &mut Engine<CpuBackend>, number: usize) -> Vec<TokenId> {
    engine.clear();
    let seq = SeqId(0);
    let prompt = prompt(number);
    engine.decode(&Batch::prompt(seq, prompt)).unwrap();
    let turns = [HeadTurn {
        seq,
        token: TokenId(17),
        n: 6,
    }];
    let drafted = engine.draft_with_head(&turns, &CancelFlag::default());
    drafted.unwrap().concat()
}

/// Adapters of the layers beside the model's matrices give the head the rows that a model gives
/// whose matrices they were added to.
#[test]
fn a_head_reads_the_rows_that_adapters_changed() {
    let files = Files::new();
    let model = files.model(MODEL);
    let head = head(&files);
    let mut n_other = 0;
    for name in ["all_linear", "patterns"] {
        let merged = with_head(&files, &head, files.merged(&model, name));
        let apart = with_head(&files, &head, files.open_with(&model, &[(name, 1.0)]));
        let bare = with_head(&files, &head, files.open(&model));
        let [mut merged, mut apart, mut bare] =
            [merged, apart, bare].map(|file| engine(cpu(), &file, EngineConfig::default()));
        for number in 0..6 {
            let wanted = drafted(&mut merged, number);
            assert_eq!(wanted.len(), 6);
            assert_eq!(drafted(&mut apart, number), wanted, "{name}, {number}");
            n_other += usize::from(drafted(&mut bare, number) != wanted);
        }
    }
    assert!(n_other > 6, "only {n_other} of 12 drafts are others");
}

fn request(number: usize, speculation: Speculation) -> TextRequest {
    let scales: [[f32; 3]; 5] = [
        [0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [0.0, 0.7, 0.0],
        [0.0, 0.0, 1.0],
        [0.5, 0.0, -0.5],
    ];
    TextRequest {
        prompt: prompt(number),
        adapters: Some(Arc::from(scales[number % scales.len()])),
        speculation,
        options: CompletionOptions {
            sampler: SamplerConfig {
                temperature: if number.is_multiple_of(2) { 0.0 } else { 0.8 },
                seed: number as u64,
                ..SamplerConfig::default()
            },
            n_predict: Some(24),
            ..CompletionOptions::default()
        },
        ..TextRequest::default()
    }
}

/// The texts of 15 requests at once, and what was drafted.
fn texts(file: &OpenModel, speculation: Speculation) -> (Vec<Vec<TokenId>>, Speculated) {
    let config = EngineConfig {
        n_ctx: Some(160),
        n_seqs: 8,
        n_active: Some(4),
        ..EngineConfig::default()
    };
    let config_of_service = ServiceConfig {
        preempt_every: std::num::NonZeroU32::new(7),
        draft_costs: DraftCostSource::Usual,
        ..ServiceConfig::default()
    };
    let engine = engine(cpu(), file, config);
    let tokenizer = Arc::new(open_tokenizer(fixture("tokenizers/spm512")).unwrap());
    let mut session = Session::new(engine, &tokenizer, &config_of_service).unwrap();
    let streams = (0..15).map(|number| session.submit(request(number, speculation)));
    let streams: Vec<_> = streams.collect::<Result<_, _>>().unwrap();
    let mut sum = Speculated::default();
    let texts = streams.into_iter().map(|mut stream| {
        let mut tokens = Vec::new();
        while let Some(pieces) = session.next_tokens(&mut stream).unwrap() {
            tokens.extend(pieces.into_iter().filter_map(|piece| piece.token));
        }
        let of_text = stream.usage().speculated;
        sum.n_drafted += of_text.n_drafted;
        sum.n_accepted += of_text.n_accepted;
        tokens
    });
    (texts.collect(), sum)
}

#[test]
fn texts_with_adapters_are_the_same_with_a_head() {
    let files = Files::new();
    let model = files.model(MODEL);
    let (wanted, off) = texts(&files.open_with(&model, &ADAPTERS), Speculation::Off);
    assert_eq!(off.n_drafted, 0);
    let with = with_head(&files, &head(&files), files.open_with(&model, &ADAPTERS));
    let (drafted, of_head) = texts(&with, Speculation::Head { n_max: 4 });
    assert_eq!(drafted, wanted);
    assert!(of_head.n_drafted > 15, "{of_head:?}");
    let (drafted, _) = texts(&with, Speculation::Off);
    assert_eq!(drafted, wanted);
}

/// A GGUF file of an adapter of the trained model: a rank of 1 for a matrix of its first layer.
fn adapter_of_stories(files: &Files, model: &OpenModel) -> std::path::PathBuf {
    let matrix = "blk.0.attn_output.weight";
    let info = model.weights().describe(matrix).unwrap();
    let [n_out, n_in] = <[usize; 2]>::try_from(info.shape.as_slice()).unwrap();
    let mut adapter = GgufWriter::new();
    for (key, value) in [
        ("general.type", "adapter"),
        ("general.architecture", "glm4moe"),
        ("adapter.type", "lora"),
    ] {
        adapter.set(key, value);
    }
    adapter.set("adapter.lora.alpha", 1f32);
    for (part, shape) in [("a", vec![1, n_in]), ("b", vec![n_out, 1])] {
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|at: usize| ((at * 37 % 11) as f32 - 5.0) * 0.06)
            .collect();
        let name = format!("{matrix}.lora_{part}");
        adapter
            .add(Weight::from_f32(&name, shape, &values).unwrap())
            .unwrap();
    }
    let path = files.path("stories-adapter.gguf");
    std::fs::write(&path, adapter.to_bytes().unwrap()).unwrap();
    path
}

/// A head of the model's own file drafts for it with an adapter, and most of its tokens are right.
#[test]
fn a_head_of_the_file_drafts_with_adapters() {
    let files = Files::new();
    let path = fixture("heads").join("stories-head.gguf");
    let tokenizer = Arc::new(open_tokenizer(&path).unwrap());
    let prompt = tokenizer.encode("Once upon a time", EncodeOptions::PROMPT);
    let adapter = adapter_of_stories(&files, &files.open(&path));
    let open = |scale: f32| {
        let file = files.open(&path);
        let options = AdapterOptions {
            adapters: vec![AdapterSpec {
                path: adapter.clone(),
                name: None,
                scale,
            }],
            ..AdapterOptions::default()
        };
        let opened = options.open(&file, &files.registry).unwrap().unwrap();
        file.with_adapters(opened).unwrap()
    };
    let text = |file: &OpenModel, speculation: Speculation| {
        let engine = engine(cpu(), file, EngineConfig::default());
        let config = ServiceConfig {
            draft_costs: DraftCostSource::Usual,
            ..ServiceConfig::default()
        };
        let mut session = Session::new(engine, &tokenizer, &config).unwrap();
        let request = TextRequest {
            prompt: prompt.clone(),
            speculation,
            options: CompletionOptions {
                sampler: SamplerConfig::greedy(),
                n_predict: Some(100),
                ..CompletionOptions::default()
            },
            ..TextRequest::default()
        };
        let mut stream = session.submit(request).unwrap();
        let mut text = String::new();
        while let Some(piece) = session.next_piece(&mut stream).unwrap() {
            text.push_str(&piece);
        }
        (text, stream.usage().speculated)
    };
    let (plain, _) = text(&files.open(&path), Speculation::Off);
    let (wanted, _) = text(&open(1.0), Speculation::Off);
    assert_ne!(wanted, plain);
    let mut with = open(1.0);
    assert!(with.use_draft_head().unwrap());
    let (drafted, speculated) = text(&with, Speculation::Head { n_max: 4 });
    assert_eq!(drafted, wanted);
    let Speculated {
        n_drafted,
        n_accepted,
        ..
    } = speculated;
    assert!(
        n_accepted * 3 > n_drafted && n_drafted > 0,
        "{n_accepted} of {n_drafted}"
    );
}
