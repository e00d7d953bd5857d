//! The models of the service's tests on the CPU backend, and what each request gets alone.

// A part of a test.
#![allow(unreachable_pub)]

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{
    Counters, FinishedText, PrefixCaching, Priority, Service, ServiceConfig, TextRequest,
};
use cellar_engine::{
    Completion, CompletionOptions, Engine, EngineConfig, FinishReason, LongContext,
};
use kv_backend::Backend;
use kv_core::{SeqId, TokenId, layers::RecentTokens};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, KvTypes, OldKvTypes};
use model_core::architecture::{Model, Registry};
use model_core::model_file::ModelFile;
use model_core::tokenizer::{EncodeOptions, Tokenizer};
use model_tests::Recipe;

use crate::support::text::by_hand;

/// A model, with the tokenizer that its tokens are read with.
pub struct Case {
    pub name: &'static str,
    pub model: Arc<dyn Model>,
    pub weights: Arc<dyn WeightSource>,
    pub tokenizer: Arc<Tokenizer>,
    pub kv_types: KvTypes,
}

pub fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    registry
}

/// One of the models that tell stories.
pub fn stories(name: &'static str) -> Case {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let folder = match name {
        "stories-llama" => "models",
        _ => "tests/fixtures/stories",
    };
    let path = format!("{root}/{folder}/{name}-f16.gguf");
    let file = ModelFile::open(path, &registry()).unwrap();
    Case {
        name,
        model: file.model().clone(),
        weights: file.weights(),
        tokenizer: file.tokenizer().clone(),
        kv_types: EngineConfig::default().kv_types,
    }
}

/// The same, where tokens have narrower types once others came after them.
pub fn with_old_rows(case: Case) -> Case {
    let [k, v] = [KvType::Q8_0, KvType::Q4_0];
    let old = OldKvTypes {
        k,
        v,
        recent: RecentTokens {
            n_last: 20,
            n_first: 3,
        },
    };
    Case {
        kv_types: case.kv_types.with_old(old),
        ..case
    }
}

/// A tiny model of stories that was trained with a head.
pub fn stories_head() -> Case {
    let name = "stories-head";
    let path = model_tests::fixture("heads").join("stories-head.gguf");
    let file = ModelFile::open(path, &registry()).unwrap();
    Case {
        name,
        model: file.model().clone(),
        weights: file.weights(),
        tokenizer: file.tokenizer().clone(),
        kv_types: EngineConfig::default().kv_types,
    }
}

/// A tiny model of random weights, read with the tokenizer of another.
pub fn tiny(name: &str) -> Case {
    of_recipe(&Recipe::named(name))
}

/// The same by its recipe.
pub fn of_recipe(recipe: &Recipe) -> Case {
    let directory = recipe.directory(&registry()).unwrap();
    Case {
        name: recipe.name().leak(),
        model: directory.model().clone(),
        weights: directory.weights().clone(),
        tokenizer: stories("stories-llama").tokenizer,
        kv_types: EngineConfig::default().kv_types,
    }
}

impl Case {
    pub fn engine(&self, n_seqs: u32, n_ctx: u32) -> Engine<CpuBackend> {
        let config = EngineConfig {
            n_ctx: Some(n_ctx),
            n_seqs,
            n_ubatch: 32,
            ..EngineConfig::default()
        };
        self.engine_with(&config)
    }

    pub fn engine_with(&self, config: &EngineConfig) -> Engine<CpuBackend> {
        let cpu = CpuConfig {
            n_threads: NonZeroUsize::new(1),
            ..CpuConfig::default()
        };
        let backend = CpuBackend::new(cpu).unwrap();
        let config = EngineConfig {
            kv_types: self.kv_types.clone(),
            ..config.clone()
        };
        Engine::new(backend, self.model.clone(), self.weights.clone(), &config).unwrap()
    }

    /// A service on an engine, with the default limits.
    pub fn service_on<B: Backend>(&self, engine: Engine<B>) -> Service<B> {
        Service::start(engine, &self.tokenizer, &ServiceConfig::default()).unwrap()
    }

    /// A service on an engine of its own, with the default limits.
    pub fn service(&self, n_seqs: u32, n_ctx: u32) -> Service<CpuBackend> {
        self.service_on(self.engine(n_seqs, n_ctx))
    }

    /// An engine that can take so many tokens back, whatever its model remembers.
    pub fn engine_with_snapshots(
        &self,
        n_seqs: u32,
        n_ctx: u32,
        n_snapshots: u32,
    ) -> Engine<CpuBackend> {
        self.engine_with(&EngineConfig {
            n_ctx: Some(n_ctx),
            n_seqs,
            n_ubatch: 32,
            n_snapshots,
            ..EngineConfig::default()
        })
    }

    /// `N` conversations that take turns, each message after the answer before. Returns their
    /// tokens.
    pub fn converse<const N: usize, B: Backend>(
        &self,
        service: &Service<B>,
        n_turns: u32,
    ) -> [Vec<TokenId>; N] {
        let mut texts = [const { Vec::new() }; N];
        for turn in 0..n_turns {
            let tokens: &mut Vec<TokenId> = &mut texts[turn as usize % N];
            let message = (0..20).map(|at| TokenId(3 + (turn * 61 + at * at * 7) % 490));
            tokens.extend(message);
            let request = TextRequest {
                prompt: tokens.clone(),
                ..self.request(1 + u64::from(turn))
            };
            let answer = service.submit(request).unwrap().finish().unwrap();
            tokens.extend(answer.tokens);
        }
        texts
    }

    /// A request of its own for every number: greedy and drawn, short and long, with and without
    /// stop strings and penalties.
    pub fn request(&self, number: u64) -> TextRequest {
        let beginnings = [
            "Once upon a time",
            "Tom and his dog",
            "The sun",
            "One day, a little",
        ];
        let text = beginnings[number as usize % beginnings.len()].repeat(1 + number as usize % 5);
        let mut prompt = self.tokenizer.encode(&text, EncodeOptions::PROMPT);
        // Tokens of the tiny models are below 512; the last makes prompts differ.
        prompt.iter_mut().for_each(|token| token.0 %= 500);
        prompt.push(TokenId(3 + (number * 37 % 400) as u32));
        let mut sampler = match number % 2 {
            0 => SamplerConfig::greedy(),
            _ => SamplerConfig {
                temperature: 0.8,
                seed: number,
                ..SamplerConfig::default()
            },
        };
        if number.is_multiple_of(3) {
            sampler.penalties.repeat = 1.1;
        }
        let stop = match number % 5 {
            4 => vec![" the".to_owned()],
            _ => Vec::new(),
        };
        let n_predict = Some(8 + number as usize * 5 % 29);
        TextRequest {
            prompt,
            priority: [Priority::Normal, Priority::Batch, Priority::Interactive]
                [number as usize % 3],
            options: CompletionOptions {
                sampler,
                n_predict,
                stop,
                ..CompletionOptions::default()
            },
            steps: Vec::new(),
            ..TextRequest::default()
        }
    }

    /// What a request gets with an engine to itself.
    pub fn alone(&self, request: &TextRequest, n_ctx: u32) -> Generated {
        self.alone_on(&mut self.engine(1, n_ctx), request)
    }

    /// What a request gets with this engine to itself.
    pub fn alone_on(&self, engine: &mut Engine<CpuBackend>, request: &TextRequest) -> Generated {
        let _removed = engine.clear();
        let mut text = Completion::new(&self.tokenizer, request.options.clone()).unwrap();
        let prompt = &request.prompt;
        by_hand(engine, SeqId(0), prompt, &mut text, LongContext::Stop);
        Generated {
            text: text.text().to_owned(),
            tokens: text.tokens().to_vec(),
            finish: text.finish_reason().unwrap().clone(),
        }
    }
}

/// A text that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    pub text: String,
    pub tokens: Vec<TokenId>,
    pub finish: FinishReason,
}

impl From<FinishedText> for Generated {
    fn from(text: FinishedText) -> Self {
        Self {
            text: text.text,
            tokens: text.tokens,
            finish: text.finish,
        }
    }
}

/// What a service counted, after its last step: texts end before that step is counted.
pub fn last_counters<B: Backend>(service: &Service<B>) -> Counters {
    let until = Instant::now() + Duration::from_secs(30);
    while service.status().n_running > 0 {
        assert!(Instant::now() < until, "{:?}", service.status());
        std::thread::sleep(Duration::from_millis(1));
    }
    service.counters()
}

/// With a preemption forced after every so many steps; 0 for none. Without a cache, what was
/// preempted is computed again from its tokens.
pub fn preempting(every: u32) -> ServiceConfig {
    ServiceConfig {
        preempt_every: NonZeroU32::new(every),
        prefix_cache: match every {
            0 | 17 => PrefixCaching::On,
            _ => PrefixCaching::Off,
        },
        headroom: 1,
        ..ServiceConfig::default()
    }
}
