//! What each layer of a plan remembers, in words. Knows no sizes.

use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory};
use kv_core::{LayerIdx, Window};
use serde::Serialize;

/// A layer that remembers something.
#[derive(Debug, Serialize)]
pub(super) struct LayerReport {
    pub(super) layer: LayerIdx,
    pub(super) remembers: String,
}

/// The layers of a model that remember something, those that use another's rows too.
pub(super) fn of(map: &LayerMap) -> Vec<LayerReport> {
    let report = |(layer, memory)| {
        let remembers = in_words(memory)?;
        let recent = map.recent().iter().find(|recent| recent.layer == layer);
        let remembers = match recent {
            Some(recent) => format!("{remembers} of recent tokens, of layer {}", recent.of.0),
            None => remembers,
        };
        Some(LayerReport { layer, remembers })
    };
    map.iter().filter_map(report).collect()
}

fn in_words(memory: LayerMemory) -> Option<String> {
    let words = match memory {
        LayerMemory::Attention(memory) | LayerMemory::Custom(memory) => rows(memory).to_owned(),
        LayerMemory::Latent(memory) if memory.v_dim == 0 => {
            "keys that an indexer chooses by".to_owned()
        }
        LayerMemory::Latent(_) => "latents: keys that are values too".to_owned(),
        LayerMemory::Recurrent(_) => "a state".to_owned(),
        LayerMemory::Both(memory, _) => format!("{}, and a state", rows(memory)),
        LayerMemory::SharedWith(of) => format!("shares the rows of layer {}", of.0),
        LayerMemory::Nothing => return None,
        other => format!("{other:?}"),
    };
    Some(words)
}

fn rows(memory: AttentionMemory) -> &'static str {
    match memory.window {
        Window::Source => "keys and values of the source",
        _ => "keys and values",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use cellar::architectures;

    fn remembered(architecture: &str) -> Vec<String> {
        let model = architectures().get(architecture).unwrap().example();
        let layers = of(model.unwrap().layers());
        layers.into_iter().map(|layer| layer.remembers).collect()
    }

    fn has(architecture: &str, wanted: &str) {
        let found = remembered(architecture);
        let is_there = found.iter().any(|words| words == wanted);
        assert!(is_there, "{architecture}: {found:?}");
    }

    #[test]
    fn every_kind_of_memory_has_its_words() {
        has("llama", "keys and values");
        has("deepseek2", "latents: keys that are values too");
        has("deepseek32", "keys that an indexer chooses by");
        has("t5", "keys and values of the source");
        has("mamba", "a state");
        has("falcon-h1", "keys and values, and a state");
        assert!(remembered("bert").is_empty());
        let shares = |words: &String| words.starts_with("shares the rows of layer ");
        assert!(remembered("gemma3n").iter().any(shares));
    }
}
