//! Adapters and control vectors: a context with them computes as a model that was loaded with them.

use std::path::{Path, PathBuf};

use cellar::{Model, ModelOptions};
use cellar_engine::CancelFlag;
use kv_core::TokenId;
use kv_graph::weights::{Weight, WeightSource};
use model_core::adapters::{AdapterOptions, AdapterSpec, ControlVectorFile};
use model_core::gguf::{Array, GgufFile, GgufWriter, Metadata};
use model_tests::write_adapter;
use tempfile::TempDir;

use super::scene::{LoadedModel, N_VOCAB, STORIES, Scene, Text};
use crate::adapter::*;
use crate::context::llama_free;
use crate::ffi::{Handle, In, Out};
use crate::memory::llama_memory_clear;
use crate::state::{llama_state_get_data, llama_state_get_size, llama_state_set_data};

const PROMPT: [i32; 5] = [5, 60, 7, 300, 12];

/// Files with adapters of the stories' model.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// An adapter, in a folder of its own.
    fn adapter(&self, seed: u64) -> PathBuf {
        let folder = self.0.path().join(seed.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("adapter.gguf");
        write_adapter(&path, "llama", &GgufFile::open(STORIES).unwrap(), seed);
        path
    }
}

fn init(model: &LoadedModel, path: &Path) -> Handle<LoraAdapter> {
    let path = Text::new(path.to_str().unwrap());
    llama_adapter_lora_init(model.0, path.get())
}

/// The text of `cellar run` with these adapters.
fn wanted(adapters: AdapterOptions) -> Vec<f32> {
    let options = ModelOptions {
        adapters,
        ..ModelOptions::default()
    };
    let mut model = Model::open_with(STORIES, options).unwrap();
    let tokens = PROMPT.map(|id| TokenId(id as u32));
    let logits = model.logits(&tokens, &CancelFlag::default()).unwrap();
    logits[logits.len() - N_VOCAB..].to_vec()
}

fn wanted_with(adapters: &[(&Path, f32)]) -> Vec<f32> {
    let spec = |(number, &(path, scale)): (usize, &(&Path, f32))| AdapterSpec {
        path: path.to_owned(),
        name: Some(number.to_string()),
        scale,
    };
    wanted(AdapterOptions {
        adapters: adapters.iter().enumerate().map(spec).collect(),
        ..AdapterOptions::default()
    })
}

impl Scene {
    fn computed(&self) -> Vec<f32> {
        llama_memory_clear(self.context, true);
        assert_eq!(self.decode(0, 0, &PROMPT), 0);
        self.logits(-1).unwrap()
    }

    fn set(&self, adapters: &[Handle<LoraAdapter>], scales: &[f32]) -> i32 {
        let (n, scales) = (adapters.len(), In::of(scales.as_ptr()));
        llama_set_adapters_lora(self.context, In::of(adapters.as_ptr()), n, scales)
    }

    fn steer(&self, rows: &[f32], dim: usize, [first, last]: [i32; 2]) -> i32 {
        let (data, n) = (In::of(rows.as_ptr()), rows.len());
        llama_set_adapter_cvec(self.context, data, n, dim as i32, first, last)
    }
}

#[test]
fn a_context_computes_with_the_adapters_that_are_set() {
    let files = Files::new();
    let [one, other] = [1, 2].map(|seed| files.adapter(seed));
    let scene = Scene::new(|_| ());
    let bare = scene.computed();
    assert_eq!(bare, wanted_with(&[]));
    let [a, b] = [&one, &other].map(|path| init(&scene.model, path));
    assert!(!a.is_null() && !b.is_null());
    assert_eq!(scene.computed(), bare, "none is set");
    assert_eq!(scene.set(&[a], &[1.0]), 0);
    let with_one = wanted_with(&[(&one, 1.0)]);
    assert_eq!(scene.computed(), with_one);
    assert_ne!(with_one, bare);
    assert_eq!(scene.set(&[b, a], &[0.5, -1.0]), 0);
    let with_both = wanted_with(&[(&one, -1.0), (&other, 0.5)]);
    let off = |got: &[f32], wanted: &[f32]| model_tests::distance(got, wanted);
    assert!(off(&scene.computed(), &with_both) < 1e-5);
    // The adapter is freed and still set.
    llama_adapter_lora_free(b);
    assert!(off(&scene.computed(), &with_both) < 1e-5);
    assert_eq!(scene.set(&[a, a], &[1.0, 3.0]), 0, "the first counts");
    assert_eq!(scene.computed(), with_one);
    assert_eq!(scene.set(&[a], &[0.0]), 0);
    assert_eq!(scene.computed(), bare);
    assert_eq!(scene.set(&[], &[]), 0);
    assert_eq!(scene.computed(), bare);
    // Another context of the model has none, and then its own.
    let second = scene.model.context(|_| ());
    assert_eq!(scene.set(&[a], &[1.0]), 0);
    llama_free(second);
    assert_eq!(scene.computed(), with_one);
}

#[test]
fn a_refused_call_leaves_the_adapters() {
    let files = Files::new();
    let scene = Scene::new(|_| ());
    let path = files.adapter(1);
    let a = init(&scene.model, &path);
    assert_eq!(scene.set(&[a], &[1.0]), 0);
    let before = scene.computed();
    let other_model = LoadedModel::new();
    let foreign = init(&other_model, &path);
    let freed = init(&scene.model, &path);
    llama_adapter_lora_free(freed);
    for wrong in [foreign, freed, Handle::NULL] {
        assert_eq!(scene.set(&[a, wrong], &[0.5, 1.0]), -1);
    }
    assert_eq!(scene.set(&[a], &[f32::NAN]), -1);
    let (nothing, scale) = (In::of(std::ptr::null()), [1.0]);
    let scales = In::of(scale.as_ptr());
    assert_eq!(
        llama_set_adapters_lora(scene.context, nothing, 1, scales),
        -1
    );
    assert_eq!(scene.steer(&[1.0; 3], 3, [1, 1]), -1, "too narrow");
    assert_eq!(scene.computed(), before);
    // No adapters: a model, a file that is not there, one that is cut short.
    let cut = files.0.path().join("cut.gguf");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    for wrong in [Path::new(STORIES), &files.0.path().join("none"), &cut] {
        assert!(init(&scene.model, wrong).is_null());
    }
    // One that is not freed goes with its model.
    drop(other_model);
    assert!(foreign.get().is_none());
    llama_adapter_lora_free(foreign);
}

#[test]
fn control_vectors_are_added_to_layers() {
    let files = Files::new();
    let scene = Scene::new(|_| ());
    let dim = crate::meta::llama_model_n_embd(scene.model.0) as usize;
    let bare = scene.computed();
    let rows: Vec<f32> = (0..2 * dim).map(|at| (at as f32 * 0.7).sin()).collect();
    let path = files.0.path().join("control.gguf");
    let mut writer = GgufWriter::with_metadata(Metadata::new());
    writer.set("general.architecture", "controlvector");
    for (layer, row) in (1..).zip(rows.chunks_exact(dim)) {
        let name = format!("direction.{layer}");
        writer
            .add(Weight::from_f32(name, vec![dim], row).unwrap())
            .unwrap();
    }
    std::fs::write(&path, writer.to_bytes().unwrap()).unwrap();
    let steered = wanted(AdapterOptions {
        control_vectors: vec![ControlVectorFile { path, scale: 1.0 }],
        ..AdapterOptions::default()
    });
    assert_eq!(scene.steer(&rows, dim, [0, 100]), 0);
    assert_eq!(scene.computed(), steered);
    assert_ne!(steered, bare);
    // An adapter comes and goes, the vector stays.
    let a = init(&scene.model, &files.adapter(1));
    assert_eq!(scene.set(&[a], &[1.0]), 0);
    assert_ne!(scene.computed(), steered);
    assert_eq!(scene.set(&[], &[]), 0);
    assert_eq!(scene.computed(), steered);
    assert_eq!(scene.steer(&rows, dim, [100, 200]), 0, "no layer");
    assert_eq!(scene.computed(), bare);
    assert_eq!(scene.steer(&rows, dim, [1, 1]), 0);
    assert_ne!(scene.computed(), bare);
    let none = In::of(std::ptr::null());
    assert_eq!(llama_set_adapter_cvec(scene.context, none, 0, 0, 0, 0), 0);
    assert_eq!(scene.computed(), bare);
}

#[test]
fn states_are_of_their_adapters() {
    let files = Files::new();
    let scene = Scene::new(|_| ());
    let a = init(&scene.model, &files.adapter(1));
    assert_eq!(scene.set(&[a], &[1.0]), 0);
    scene.computed();
    let mut state = vec![0; llama_state_get_size(scene.context)];
    let n = llama_state_get_data(scene.context, Out::of(state.as_mut_ptr()), state.len());
    assert_eq!(n, state.len());
    let load = || llama_state_set_data(scene.context, In::of(state.as_ptr()), state.len());
    assert_eq!(load(), n);
    assert_eq!(scene.set(&[a], &[0.5]), 0);
    assert_eq!(load(), 0, "another scale");
    assert_eq!(scene.set(&[], &[]), 0);
    assert_eq!(load(), 0, "no adapter");
    assert_eq!(scene.set(&[a], &[1.0]), 0);
    assert_eq!(load(), n);
}

#[test]
fn an_adapter_tells_its_metadata_and_invocation_tokens() {
    let files = Files::new();
    let model = LoadedModel::new();
    let plain = GgufFile::open(files.adapter(1)).unwrap();
    let mut writer = GgufWriter::with_metadata(plain.metadata().clone());
    writer.set("adapter.alora.invocation_tokens", Array::U32(vec![7, 300]));
    for name in plain.names() {
        writer.add(plain.require(&name).unwrap()).unwrap();
    }
    let path = files.0.path().join("activated.gguf");
    std::fs::write(&path, writer.to_bytes().unwrap()).unwrap();
    let a = init(&model, &path);
    assert_eq!(llama_adapter_get_alora_n_invocation_tokens(a), 2);
    let tokens = In::of(llama_adapter_get_alora_invocation_tokens(a));
    assert_eq!(tokens.slice(2), [7, 300]);
    let mut room = [0_i8; 32];
    let mut told = |index: Result<&str, i32>| {
        let (out, size) = (Out::of(room.as_mut_ptr()), room.len());
        let n = match index {
            Ok(key) => llama_adapter_meta_val_str(a, Text::new(key).get(), out, size),
            Err(index) => llama_adapter_meta_key_by_index(a, index, out, size),
        };
        let text: Vec<u8> = room
            .iter()
            .map(|&byte| byte as u8)
            .take_while(|&b| b != 0)
            .collect();
        (n, String::from_utf8(text).unwrap())
    };
    assert_eq!(told(Ok("adapter.type")), (4, "lora".to_owned()));
    assert_eq!(
        told(Ok("adapter.alora.invocation_tokens")),
        (-1, String::new())
    );
    assert_eq!(told(Err(0)), (18, "adapter.lora.alpha".to_owned()));
    assert_eq!(told(Err(4)), (-1, String::new()));
    assert_eq!(llama_adapter_meta_count(a), 4);
}
