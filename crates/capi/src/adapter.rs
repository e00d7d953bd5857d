//! Adapters (`llama_adapter_lora`), and those that a context computes with, with its control
//! vector.
//!
//! Invariant: a call that fails leaves a context with the adapters that it had. What a context
//! remembers stays as it was computed. A context keeps what it needs of an adapter that is freed;
//! an adapter that is not freed goes with its model.

use std::ffi::c_char;
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError};

use cellar_engine::Engine;
use cellar_engine::with_reasons;
use kv_backend::BoxedBackend;
use model_core::adapters::{Adapter, Adapters, ControlVector, LayerRange, MAX_ADAPTERS};
use model_core::gguf::{GgufFile, Metadata};

use crate::context::{Context, State, context};
use crate::ffi::{CText, Handle, In, Out, c_api, count};
use crate::log;
use crate::meta::{entry, scalars, text_of, write_or_fail};
use crate::model::{Model, SharedModel, read_rest};

/// The target of a `llama_adapter_lora *`.
pub(crate) struct LoraAdapter {
    adapter: Arc<Adapter>,
    metadata: Metadata,
    /// Tokens from which on programs set it, where it is an activated one.
    invocation: Vec<i32>,
    model: Handle<Model>,
}

/// The adapters of a context.
#[derive(Default)]
pub(crate) struct ContextAdapters {
    /// Those that its engine has loaded, perhaps with a scale of 0.
    loaded: Vec<Arc<Adapter>>,
    control: Option<ControlVector>,
}

/// An adapter and its scale.
type Scaled = (Arc<Adapter>, f32);

impl Model {
    fn lock_adapters(&self) -> MutexGuard<'_, Vec<Handle<LoraAdapter>>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the adapters that the program did not.
    pub(crate) fn free_adapters(&self) {
        let adapters = std::mem::take(&mut *self.lock_adapters());
        adapters
            .into_iter()
            .for_each(|adapter| drop(adapter.take()));
    }
}

impl ContextAdapters {
    fn is_loaded(&self, adapter: &Arc<Adapter>) -> bool {
        self.loaded
            .iter()
            .any(|loaded| Arc::ptr_eq(loaded, adapter))
    }

    /// Has an engine compute with these adapters and no others.
    fn set(
        &mut self,
        engine: &mut Engine<BoxedBackend>,
        context: &Context,
        wanted: &[Scaled],
    ) -> Result<(), String> {
        let scale_of = |adapter: &Arc<Adapter>| {
            let wanted = wanted
                .iter()
                .find(|(wanted, _)| Arc::ptr_eq(wanted, adapter));
            wanted.map_or(0.0, |(_, scale)| *scale)
        };
        if wanted.iter().all(|(adapter, _)| self.is_loaded(adapter)) {
            let scales = self.loaded.iter().map(scale_of).collect();
            return if self.loaded.is_empty() {
                Ok(())
            } else {
                engine
                    .set_default_scales(scales)
                    .map_err(|error| with_reasons(&error))
            };
        }
        // All that the program has, so that going from one to another loads nothing.
        let mut loaded: Vec<Arc<Adapter>> = wanted.iter().map(|(a, _)| Arc::clone(a)).collect();
        for adapter in context.model.get().map_or(Vec::new(), known) {
            if loaded.len() < MAX_ADAPTERS && !loaded.iter().any(|a| Arc::ptr_eq(a, &adapter)) {
                loaded.push(adapter);
            }
        }
        let scaled: Vec<Scaled> = loaded
            .iter()
            .map(|adapter| (Arc::clone(adapter), scale_of(adapter)))
            .collect();
        exchange(engine, &context.shared, &scaled, self.control.clone())?;
        self.loaded = loaded;
        Ok(())
    }
}

/// The adapters of a model that the program has not freed.
fn known(model: &Model) -> Vec<Arc<Adapter>> {
    let handles = model.lock_adapters();
    let adapters = handles.iter().filter_map(|handle| handle.get());
    adapters.map(|known| Arc::clone(&known.adapter)).collect()
}

/// Loads adapters and a control vector in place of those that an engine has.
fn exchange(
    engine: &mut Engine<BoxedBackend>,
    shared: &SharedModel,
    adapters: &[Scaled],
    control: Option<ControlVector>,
) -> Result<(), String> {
    let exchanged = if adapters.is_empty() && control.is_none() {
        engine.exchange_adapters(None)
    } else {
        // Files in different folders may have one name.
        let numbered = |(at, (adapter, scale)): (usize, &Scaled)| {
            let name = adapter.name();
            let before = &adapters[..at];
            let n_same = before
                .iter()
                .filter(|(other, _)| other.name() == name)
                .count();
            let adapter = Adapter::clone(adapter);
            let adapter = match n_same {
                0 => adapter,
                n => {
                    let name = format!("{name} #{}", n + 1);
                    adapter.named(name)
                }
            };
            (adapter, *scale)
        };
        let all = adapters.iter().enumerate().map(numbered).collect();
        let all = Adapters::new(&shared.open_model()?, all, control);
        engine.exchange_adapters(Some(Arc::new(all.map_err(|error| error.to_string())?)))
    };
    exchanged.map_err(|error| with_reasons(&error))
}

/// An adapter of a file that is open, or of a PEFT directory.
fn opened(model: &SharedModel, path: &str) -> Result<(Adapter, Metadata), String> {
    let (open, path) = (model.open_model()?, Path::new(path));
    if path.is_dir() {
        let adapter = Adapter::open(path, &open, &cellar::architectures());
        return Ok((adapter.map_err(|error| error.to_string())?, Metadata::new()));
    }
    let file = GgufFile::open(path).map_err(|error| error.to_string())?;
    let adapter = Adapter::from_gguf(&file, path, &open).map_err(|error| error.to_string())?;
    Ok((adapter, file.metadata().clone()))
}

fn new_adapter(
    name: &str,
    handle: Handle<Model>,
    open: impl FnOnce(&SharedModel) -> Result<(Adapter, Metadata), String>,
) -> Handle<LoraAdapter> {
    let Some(model) = handle.get() else {
        log::error(&format!("{name}: there is no such model"));
        return Handle::NULL;
    };
    let Some((adapter, metadata)) = log::or_line(name, open(&model.shared)) else {
        return Handle::NULL;
    };
    let invocation = adapter.invocation().iter();
    let new = Handle::new(LoraAdapter {
        invocation: invocation.map(|token| token.0.cast_signed()).collect(),
        adapter: Arc::new(adapter),
        metadata,
        model: handle,
    });
    model.lock_adapters().push(new);
    new
}

fn adapter<'a>(name: &str, adapter: Handle<LoraAdapter>) -> Option<&'a LoraAdapter> {
    let found = adapter.get();
    if found.is_none() {
        log::error(&format!("{name}: there is no such adapter"));
    }
    found
}

/// The keys of an adapter.
fn keys<'a>(name: &str, handle: Handle<LoraAdapter>) -> Vec<(&'a str, String)> {
    adapter(name, handle).map_or(Vec::new(), |adapter| scalars(&adapter.metadata))
}

fn set_adapters(
    context: &Context,
    adapters: &[Handle<LoraAdapter>],
    scales: &[f32],
) -> Result<(), String> {
    let mut wanted: Vec<Scaled> = Vec::new();
    for (number, (handle, &scale)) in adapters.iter().zip(scales).enumerate() {
        let adapter = handle.get();
        let adapter = adapter.ok_or_else(|| format!("adapter {number} is none, or was freed"))?;
        let of_other = adapter
            .model
            .get()
            .is_some_and(|model| !Arc::ptr_eq(&model.shared, &context.shared));
        if of_other {
            return Err(format!("adapter {number} is one of another model"));
        }
        let is_known = wanted
            .iter()
            .any(|(known, _)| Arc::ptr_eq(known, &adapter.adapter));
        if scale != 0.0 && !is_known {
            wanted.push((Arc::clone(&adapter.adapter), scale));
        }
    }
    let mut state = context.lock();
    let State {
        engine, adapters, ..
    } = &mut *state;
    adapters.set(engine, context, &wanted)
}

/// The control vector of these rows for the layers from `first` to `last`.
fn control_vector(
    engine: &Engine<BoxedBackend>,
    rows: &[f32],
    dim: i32,
    [first, last]: [i32; 2],
) -> Result<ControlVector, String> {
    let number = |n: i32| usize::try_from(n).unwrap_or(0);
    let layers = LayerRange {
        first: number(first),
        last: number(last),
    };
    let control = ControlVector::from_rows(rows, number(dim), layers, engine.model());
    control.map_err(|error| error.to_string())
}

fn set_control(context: &Context, control: Option<ControlVector>) -> Result<(), String> {
    let mut state = context.lock();
    let State {
        engine, adapters, ..
    } = &mut *state;
    if control.is_none() && adapters.control.is_none() {
        return Ok(());
    }
    let scales = engine.default_scales();
    let loaded = adapters.loaded.iter().cloned().zip(scales);
    let loaded: Vec<Scaled> = loaded.collect();
    exchange(engine, &context.shared, &loaded, control.clone())?;
    adapters.control = control;
    Ok(())
}

c_api! {
    fn llama_adapter_lora_init(model: Handle<Model>, path: CText)
        -> Handle<LoraAdapter> = Handle::NULL; {
        new_adapter("llama_adapter_lora_init", model, |model| {
            opened(model, path.get().ok_or("the path is null or not UTF-8")?)
        })
    }

    fn llama_adapter_lora_init_from_file_ptr(model: Handle<Model>, file: *mut libc::FILE)
        -> Handle<LoraAdapter> = Handle::NULL; {
        new_adapter("llama_adapter_lora_init_from_file_ptr", model, |model| {
            let open = model.open_model()?;
            let file = GgufFile::from_bytes(read_rest(file)?.into());
            let file = file.map_err(|error| error.to_string())?;
            let adapter = Adapter::from_gguf(&file, Path::new("adapter"), &open);
            Ok((adapter.map_err(|error| error.to_string())?, file.metadata().clone()))
        })
    }

    fn llama_adapter_meta_val_str(
        handle: Handle<LoraAdapter>, key: CText, out: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        let adapter = adapter("llama_adapter_meta_val_str", handle);
        let text = adapter.and_then(|adapter| text_of(adapter.metadata.value(key.get()?)?));
        write_or_fail(out, size, text.as_deref())
    }

    fn llama_adapter_meta_count(handle: Handle<LoraAdapter>) -> i32 = 0; {
        count(keys("llama_adapter_meta_count", handle).len())
    }

    fn llama_adapter_meta_key_by_index(
        handle: Handle<LoraAdapter>, index: i32, out: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        let all = keys("llama_adapter_meta_key_by_index", handle);
        write_or_fail(out, size, entry(&all, index).map(|(key, _)| *key))
    }

    fn llama_adapter_meta_val_str_by_index(
        handle: Handle<LoraAdapter>, index: i32, out: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        let all = keys("llama_adapter_meta_val_str_by_index", handle);
        write_or_fail(out, size, entry(&all, index).map(|(_, value)| value.as_str()))
    }

    fn llama_adapter_lora_free(handle: Handle<LoraAdapter>); {
        match handle.take() {
            Some(adapter) => {
                if let Some(model) = adapter.model.get() {
                    model.lock_adapters().retain(|known| *known != handle);
                }
            }
            None if handle.is_null() => {}
            None => log::error(
                "llama_adapter_lora_free: there is no such adapter, or it was freed before, \
                 perhaps with its model",
            ),
        }
    }

    fn llama_adapter_get_alora_n_invocation_tokens(handle: Handle<LoraAdapter>) -> u64 = 0; {
        let adapter = adapter("llama_adapter_get_alora_n_invocation_tokens", handle);
        adapter.map_or(0, |adapter| adapter.invocation.len() as u64)
    }

    fn llama_adapter_get_alora_invocation_tokens(handle: Handle<LoraAdapter>)
        -> *const i32 = std::ptr::null(); {
        let adapter = adapter("llama_adapter_get_alora_invocation_tokens", handle);
        let tokens = adapter.map(|adapter| adapter.invocation.as_slice());
        tokens.filter(|tokens| !tokens.is_empty()).map_or(std::ptr::null(), <[i32]>::as_ptr)
    }

    fn llama_set_adapters_lora(
        handle: Handle<Context>, adapters: In<Handle<LoraAdapter>>, n: usize, scales: In<f32>,
    ) -> i32 = -1; {
        let name = "llama_set_adapters_lora";
        let Some(context) = context(name, handle) else {
            return -1;
        };
        let (adapters, scales) = (adapters.slice(n), scales.slice(n));
        if n > 0 && (adapters.is_empty() || scales.is_empty()) {
            log::error(&format!("{name}: {n} adapters, and their list or their scales are null"));
            return -1;
        }
        let set = set_adapters(context, adapters, scales);
        log::or_line(name, set).map_or(-1, |()| 0)
    }

    fn llama_set_adapter_cvec(
        handle: Handle<Context>, data: In<f32>, n: usize, n_embd: i32, first: i32, last: i32,
    ) -> i32 = -1; {
        let name = "llama_set_adapter_cvec";
        let Some(context) = context(name, handle) else {
            return -1;
        };
        let control = if data.is_null() {
            Ok(None)
        } else {
            let engine = &context.lock().engine;
            control_vector(engine, data.slice(n), n_embd, [first, last]).map(Some)
        };
        let set = control.and_then(|control| set_control(context, control));
        log::or_line(name, set).map_or(-1, |()| 0)
    }
}
