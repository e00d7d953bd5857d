//! Adapters: logits are those of the PEFT library, each text is what it is alone whatever shares
//! its steps, and what does not fit a model is refused by name (`fixtures/adapters/make.py`).

#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod exchanged;
mod heads;
mod on_gpus;
mod references;
mod refused;
mod together;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_rows::KvType;
use model_core::adapters::{AdapterOptions, AdapterSpec, Adapters};
use model_core::architecture::Registry;
use model_core::gguf::GgufWriter;
use model_core::model_file::OpenModel;
use model_tests::{Recipe, fixture};
use tempfile::TempDir;

/// A model and adapters of it as directories.
struct Files {
    folder: TempDir,
    registry: Registry,
}

impl Files {
    fn new() -> Self {
        let mut registry = Registry::new();
        model_llama::register(&mut registry);
        Self {
            folder: tempfile::tempdir().unwrap(),
            registry,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The directory of a model.
    fn model(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        Recipe::named(name).expand(&path);
        path
    }

    /// The same as a GGUF file.
    fn gguf(&self, name: &str) -> PathBuf {
        let open = self.open(&self.model(name));
        let mut writer = GgufWriter::with_metadata(open.metadata().clone());
        let weights = open.weights();
        for name in weights.names() {
            writer.add(weights.require(&name).unwrap()).unwrap();
        }
        let path = self.path(&format!("{name}.gguf"));
        std::fs::write(&path, writer.to_bytes().unwrap()).unwrap();
        path
    }

    /// The directory of an adapter.
    fn adapter(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        // One that is open is not written again.
        if !path.exists() {
            adapter(name).expand(&path);
        }
        path
    }

    fn open(&self, path: &Path) -> OpenModel {
        OpenModel::open(path, &self.registry).unwrap()
    }

    /// A model with these adapters.
    fn open_with(&self, model: &Path, adapters: &[(&str, f32)]) -> OpenModel {
        let file = self.open(model);
        let opened = self.adapters_of(&file, adapters);
        file.with_adapters(opened).unwrap()
    }

    /// A model to whose matrices an adapter was added.
    fn merged(&self, model: &Path, adapter: &str) -> OpenModel {
        let file = self.open(model);
        let opened = self.adapters_of(&file, &[(adapter, 1.0)]);
        file.merged_with(opened)
    }

    fn adapters_of(&self, file: &OpenModel, adapters: &[(&str, f32)]) -> Adapters {
        let specs = adapters.iter().map(|&(name, scale)| AdapterSpec {
            path: self.adapter(name),
            name: None,
            scale,
        });
        let options = AdapterOptions {
            adapters: specs.collect(),
            ..AdapterOptions::default()
        };
        options.open(file, &self.registry).unwrap().unwrap()
    }
}

fn adapter(name: &str) -> Recipe {
    Recipe::adapter(&fixture("adapters").join(name))
}

fn engine<B: Backend>(backend: B, file: &OpenModel, config: EngineConfig) -> Engine<B> {
    let config = EngineConfig {
        n_ctx: Some(config.n_ctx.unwrap_or(256)),
        kv_types: KvType::F32.into(),
        ..config
    };
    Engine::new(backend, Arc::clone(file.model()), file.weights(), &config).unwrap()
}

/// The logits of all tokens of a prompt.
fn logits<B: Backend>(engine: &mut Engine<B>, ids: &[u32]) -> Vec<f32> {
    engine.clear();
    let mut batch = Batch::new();
    for &id in ids {
        batch
            .push_token(TokenId(id))
            .in_sequence(SeqId(0))
            .with_output();
    }
    engine.decode(&batch).unwrap().values().to_vec()
}
