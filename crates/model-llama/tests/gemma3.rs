//! Gemma 3, whose layers have two kinds of windows: logits with a windowed part that recycles its
//! cells all the time, and the greedy texts of a small trained model (made like the one that
//! `models/README.md` describes) against an independent implementation.

#![allow(clippy::unwrap_used)]

use crate::common::{STORIES, case};
use kv_backend::Backend;
use kv_core::{
    Window,
    memory::{Composite, Streams, SwaSize, Unified},
};
use kv_rows::KvType;
use model_core::architecture::{Model, ModelError};
use model_core::gguf::Metadata;
use model_tests::checks::{ONE, TOLERANCE};
use model_tests::{Runner, Setup, best, candle, cpu, distance, fixture};
use serde_json::Value;

/// Of the trained model.
const N_SWA: u32 = 64;
const N_VOCAB: usize = 1024;

/// Tokens of a prompt and its greedy continuation.
struct Text {
    prompt: Vec<u32>,
    greedy: Vec<u32>,
}

fn texts() -> Vec<Text> {
    let path = fixture("stories/stories-gemma3.reference.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let ids = |value: &Value| {
        let ids = value.as_array().unwrap().iter();
        ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
            .collect()
    };
    let prompts = file["prompts"].as_array().unwrap().iter();
    prompts
        .map(|p| Text {
            prompt: ids(&p["ids"]),
            greedy: ids(&p["greedy_ids"]),
        })
        .collect()
}

/// The memory that a model with two windows asks for, with `n_cells` cells for the windowed layers.
fn tight(model: &dyn Model, streams: Streams, n_cells: u32) -> Composite {
    let setup = Setup::with_streams(streams);
    let iswa = Composite::new(model.layers(), &setup.memory).unwrap();
    let parts = iswa.parts().iter().map(|part| {
        let mut config = *part.config();
        if config.window != Window::Full {
            config.n_cells = n_cells;
        }
        Unified::new(config).unwrap()
    });
    Composite::from_parts(parts.collect(), None).unwrap()
}

fn by_layers(model: &dyn Model) -> Composite {
    Composite::new(model.layers(), &Setup::default().memory).unwrap()
}

/// For each sequence no cell more than a window and a few tokens.
fn just_enough(model: &dyn Model) -> Composite {
    tight(model, Streams::PerSequence, N_SWA + 8)
}

#[test]
fn layers_have_the_windows_and_rotations_of_the_file() {
    for (case, n_swa, full_layers, base) in [
        (case("gemma3_iswa8"), 8, vec![5], 1e6),
        (STORIES, N_SWA, vec![3], 1e5),
    ] {
        let mut seen = 0;
        Runner::with_memory(candle(), &case, &Setup::default(), |model| {
            for (layer, _) in model.layers().iter() {
                let window = if full_layers.contains(&layer.as_usize()) {
                    Window::Full
                } else {
                    Window::Sliding(n_swa)
                };
                assert_eq!(model.layers().attention(layer).unwrap().window, window);
                seen += 1;
            }
            let text = model.graph(ONE).unwrap().text().to_string();
            let n_base = |base: f64| text.matches(&format!("base={base})")).count();
            assert_eq!((n_base(base), n_base(1e4)), (2, 2 * (seen - 1)), "{text}");
            by_layers(model)
        });
    }
}

fn recycled_windows_show_what_the_reference_saw<B: Backend>(backend: impl Fn() -> B) {
    let windowed = case("gemma3_iswa8");
    let reference = windowed.reference();
    for (streams, n_cells, piece) in [
        (Streams::Shared, 25, 1),
        (Streams::Shared, 32, 7),
        (Streams::PerSequence, 9, 1),
        (Streams::PerSequence, 12, 48),
    ] {
        let mut runner = Runner::with_memory(backend(), &windowed, &Setup::default(), |model| {
            tight(model, streams, n_cells)
        });
        for (seq, prompt) in (0..).zip(&reference.prompts()) {
            let theirs = reference.logits(seq as usize);
            let pieces = prompt.chunks(piece);
            let ours: Vec<f32> = pieces.flat_map(|p| runner.feed(seq, p, 512)).collect();
            let distance = theirs.distance(&ours);
            assert!(
                distance < TOLERANCE,
                "{streams:?}, {n_cells} cells, pieces of {piece}: off by {distance}"
            );
        }
    }
}

#[test]
fn recycled_windows_show_what_the_reference_saw_on_the_cpu() {
    recycled_windows_show_what_the_reference_saw(cpu);
}

#[test]
fn recycled_windows_show_what_the_reference_saw_on_candle() {
    recycled_windows_show_what_the_reference_saw(candle);
}

fn greedy_texts_are_those_of_the_reference<B: Backend>(backend: impl Fn() -> B) {
    for kv_type in [KvType::F32, KvType::F16] {
        for memory in [by_layers, just_enough] {
            let mut runner =
                Runner::with_memory(backend(), &STORIES, &Setup::with_type(kv_type), memory);
            for (seq, text) in (0..).zip(texts()) {
                let logits = runner.feed(seq, &text.prompt, 512);
                let mut next = best(logits.rchunks(N_VOCAB).next().unwrap());
                let mut tokens = vec![next];
                while tokens.len() < text.greedy.len() {
                    next = best(&runner.feed(seq, &[next], 512));
                    tokens.push(next);
                }
                assert_eq!(tokens, text.greedy, "{kv_type}, text {seq}");
            }
        }
    }
}

#[test]
fn greedy_texts_are_those_of_the_reference_on_the_cpu() {
    greedy_texts_are_those_of_the_reference(cpu);
}

#[test]
fn greedy_texts_are_those_of_the_reference_on_candle() {
    greedy_texts_are_those_of_the_reference(candle);
}

#[test]
fn prompts_longer_than_the_window_go_on_as_if_generated() {
    for (n_ubatch, memory) in [
        (512, by_layers as fn(&dyn Model) -> Composite),
        (7, just_enough),
    ] {
        let mut runner =
            Runner::with_memory(cpu(), &STORIES, &Setup::with_type(KvType::F16), memory);
        for (seq, text) in (0..).zip(texts()) {
            let tokens = [&text.prompt[..], &text.greedy[..]].concat();
            assert!(tokens.len() > 2 * N_SWA as usize);
            let logits = runner.feed(seq, &tokens, n_ubatch);
            let chosen = logits.chunks(N_VOCAB).map(best).skip(text.prompt.len() - 1);
            let chosen: Vec<u32> = chosen.take(text.greedy.len()).collect();
            assert_eq!(chosen, text.greedy, "text {seq}");
        }
    }
}

#[test]
fn a_windowed_part_gives_the_logits_of_a_full_one() {
    let mut full = Setup::default().memory;
    full.swa = SwaSize::Full;
    let text = texts().remove(1);
    let tokens = [
        &text.prompt[..],
        &text.greedy[..],
        &text.prompt[1..],
        &text.greedy[..],
    ]
    .concat();
    assert!(tokens.len() > 256);
    let with = |memory: &dyn Fn(&dyn Model) -> Composite| {
        Runner::with_memory(cpu(), &STORIES, &Setup::default(), memory).feed(0, &tokens, 8)
    };
    let windowed = with(&just_enough);
    let distance = distance(
        &windowed,
        &with(&|model| Composite::new(model.layers(), &full).unwrap()),
    );
    assert!(distance < 1e-4, "off by {distance}");
}

/// The graph of the tiny model with other metadata, or why there is none.
fn graph_with(edit: impl FnOnce(&mut Metadata)) -> Result<String, ModelError> {
    let case = case("gemma3_iswa8");
    let (file, mut metadata) = case.open();
    edit(&mut metadata);
    let model = case.registry().get("gemma3")?.model(&metadata, &*file)?;
    Ok(model.graph(ONE)?.text().to_string())
}

#[test]
fn the_factor_on_scores_is_that_of_the_head_but_for_the_largest_model() {
    let scale = |n_layers: u32, given: Option<f32>| {
        let text = graph_with(|metadata| {
            metadata.insert("gemma3.block_count", n_layers);
            metadata.insert("gemma3.attention.head_count", 8u32);
            if let Some(given) = given {
                metadata.insert("gemma3.attention.scale", given);
            }
        });
        let text = text.unwrap();
        let at = text.find("scale=").unwrap();
        text[at..]
            .split(['=', ')'])
            .nth(1)
            .unwrap()
            .parse::<f32>()
            .unwrap()
    };
    assert_eq!(scale(7, None), 0.25, "heads of 16");
    assert_eq!(scale(62, None), 1.0 / 8f32.sqrt(), "64 values, 8 heads");
    assert_eq!(scale(62, Some(0.5)), 0.5);
}

#[test]
fn only_full_layers_stretch_their_rotation() {
    let text = graph_with(|metadata| {
        metadata.insert("gemma3.rope.scaling.type", "linear");
        metadata.insert("gemma3.rope.scaling.factor", 8f32);
        metadata.insert("gemma3.rope.freq_base_swa", 5000f32);
    })
    .unwrap();
    assert_eq!(text.matches("base=1000000, linear=8)").count(), 2);
    assert_eq!(text.matches("base=5000)").count(), 12);
}

#[test]
fn what_would_come_out_wrong_is_refused_by_its_key() {
    let refused = |key: &'static str, value: f32| {
        let error = graph_with(|metadata| {
            metadata.insert(key, value);
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    };
    refused("gemma3.final_logit_softcapping", 30.0);
    refused("gemma3.attn_logit_softcapping", 50.0);
    refused("gemma3.rope.freq_base_swa", 1.0);
    refused("gemma3.attention.scale", -1.0);
    assert!(graph_with(|m| drop(m.insert("gemma3.final_logit_softcapping", 0f32))).is_ok());
}
