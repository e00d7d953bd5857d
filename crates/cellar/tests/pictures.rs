//! Prompts with pictures or sounds against transformers, from the bytes of files to the text; and
//! what of them is remembered.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cellar::engine::serve::{
    FinishedText, PrefixUse, Salt, ServiceExtras, TextRequest, TextStream,
};
use cellar::engine::session::{Activity, Session};
use cellar::engine::{Engine, Logprobs, MAX_TOP_LOGPROBS, Tower};
use cellar::kv_backend::BackendError;
use cellar::model_core::media::MediaKind;
use cellar::model_core::picture::{Picture, PictureEncoder, PictureName};
use cellar::{
    BackendOptions, CancelFlag, EngineConfig, Error, GenerateOptions, KvType, KvTypes, Model,
    ModelFile, ModelOptions, PictureError, PreparedPicture, PromptTokens, SamplerConfig, TokenId,
    architectures, open_backend, picture_chat, vision_of,
};
use model_tests::sound::sound;
use model_tests::vision::{HEARING, MODELS, SIZES, all_models, expand, media, picture, recipe};
use serde_json::{Value, json};

fn open(name: &str, mark: &str, engine: EngineConfig) -> Model {
    let folder = tempfile::tempdir().unwrap();
    expand(name, mark, folder.path());
    let options = ModelOptions {
        engine: EngineConfig {
            kv_types: KvTypes::from(KvType::F32),
            n_ctx: engine.n_ctx.or(Some(256)),
            ..engine
        },
        ..ModelOptions::default()
    };
    Model::open_with(folder.path(), options).unwrap()
}

fn read(model: &Model, sizes: &[[u32; 2]]) -> Vec<PreparedPicture> {
    let reader = model.picture_reader().unwrap();
    let kind = reader.media();
    let read = |&size: &_| reader.read_media(kind, &media(kind, size)).unwrap();
    sizes.iter().map(read).collect()
}

/// The prompt of the reference, about two pictures or sounds of these sizes.
fn prompt(model: &Model, sizes: &[[u32; 2]]) -> PromptTokens {
    prompt_asking(model, sizes, " of what?")
}

/// The same with another question behind the pictures.
fn prompt_asking(model: &Model, sizes: &[[u32; 2]], question: &str) -> PromptTokens {
    let text = |text: &str| json!({"type": "text", "text": text});
    let reader = model.picture_reader().unwrap();
    let part = json!({"type": reader.media().part_type()});
    let content: Value = [
        text("A picture "),
        part.clone(),
        text(" and another "),
        part,
        text(question),
    ]
    .into_iter()
    .collect();
    let messages = [json!({"role": "user", "content": content})];
    let variables = serde_json::Map::new();
    let chat = picture_chat(
        model.file(),
        reader,
        &messages,
        &variables,
        &read(model, sizes),
    );
    chat.unwrap().prompt
}

fn request(prompt: PromptTokens) -> TextRequest {
    let options = GenerateOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(12),
        ..GenerateOptions::default()
    };
    TextRequest {
        pictures: prompt.pictures,
        ..options.request(prompt.tokens)
    }
}

fn texts(model: &mut Model, prompts: Vec<PromptTokens>) -> Vec<FinishedText> {
    let requests = prompts.into_iter().map(request);
    let done = model.finish_all(requests, &CancelFlag::default()).unwrap();
    done.unwrap()
}

fn ids(text: &FinishedText) -> Vec<u32> {
    text.tokens.iter().map(|token| token.0).collect()
}

#[test]
fn texts_about_pictures_are_the_references() {
    for (name, mark) in all_models() {
        let mut model = open(name, mark, EngineConfig::default());
        let (recipe, prompt) = (recipe(name), prompt(&model, &SIZES));
        let reference = recipe.reference();
        let keys = ["image_token_id", "image_token_index", "audio_token_index"];
        let placeholder = keys
            .iter()
            .find_map(|key| recipe.config().get(*key)?.as_u64());
        let placeholder = placeholder.unwrap() as u32;
        let given = |token: &TokenId| {
            if token.names_row() {
                placeholder
            } else {
                token.0
            }
        };
        let given: Vec<u32> = prompt.tokens.iter().map(given).collect();
        assert_eq!(given, reference.ids("ids").unwrap(), "{name}");
        let done = texts(&mut model, vec![prompt]);
        assert_eq!(ids(&done[0]), reference.ids("greedy").unwrap(), "{name}");
    }
}

/// The rows of a reference in place of a tower's: they do not depend on how a picture was made
/// smaller.
struct ReferenceRows(HashMap<PictureName, Vec<f32>>);

impl PictureEncoder for ReferenceRows {
    fn encode(&mut self, picture: &Picture, _: &CancelFlag) -> Result<Vec<f32>, PictureError> {
        Ok(self.0.get(&picture.name()).cloned().unwrap_or_default())
    }
}

/// A model with this encoder in place of its tower's.
fn with_encoder(name: &str, mark: &str, encoder: Box<dyn PictureEncoder>) -> Model {
    let folder = tempfile::tempdir().unwrap();
    expand(name, mark, folder.path());
    let file = ModelFile::open(folder.path(), &architectures()).unwrap();
    let config = EngineConfig {
        kv_types: KvTypes::from(KvType::F32),
        n_ctx: Some(512),
        n_seqs: 4,
        ..EngineConfig::default()
    };
    let backend = open_backend(BackendOptions::default()).unwrap();
    let engine = Engine::new(backend, file.model().clone(), file.weights(), &config).unwrap();
    let extras = ServiceExtras {
        tower: Some(Tower::new(encoder, usize::MAX)),
        ..ServiceExtras::default()
    };
    Model::with_engine(file, engine, extras).unwrap()
}

/// The tower of a model, of which pieces have so many rows of layers.
fn tower_in_pieces(name: &str, mark: &str, n_rows: usize) -> Box<dyn PictureEncoder> {
    let folder = tempfile::tempdir().unwrap();
    expand(name, mark, folder.path());
    let file = ModelFile::open(folder.path(), &architectures()).unwrap();
    let vision = vision_of(&file, folder.path(), None).unwrap().unwrap();
    let backend = open_backend(BackendOptions::default()).unwrap();
    Box::new(vision.encoder(backend).unwrap().with_piece_rows(n_rows))
}

/// Largest difference of a log probability.
const TOLERANCE: f64 = 2e-4;

#[test]
fn logits_over_the_references_rows_are_its_own() {
    for (name, mark) in all_models() {
        let seeing = open(name, mark, EngineConfig::default());
        let reference = recipe(name).reference();
        let rows = |(number, read): (usize, &PreparedPicture)| {
            let (_, rows) = reference.values(&format!("rows_{number}")).unwrap();
            (read.picture.name(), rows)
        };
        let rows = read(&seeing, &SIZES).iter().enumerate().map(rows).collect();
        let mut model = with_encoder(name, mark, Box::new(ReferenceRows(rows)));
        let prompt = prompt(&seeing, &SIZES);
        let options = GenerateOptions {
            sampler: SamplerConfig::greedy(),
            n_predict: Some(1),
            logprobs: Logprobs::Top(MAX_TOP_LOGPROBS),
            ..GenerateOptions::default()
        };
        let request = TextRequest {
            pictures: prompt.pictures,
            ..options.request(prompt.tokens)
        };
        let done = model.finish_all([request], &CancelFlag::default()).unwrap();
        let done = done.unwrap();
        let (_, logits) = reference.values("logits").unwrap();
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let top = &done[0].logprobs[0].top;
        assert_eq!(top.len(), MAX_TOP_LOGPROBS, "{name}");
        for found in top {
            let wanted = f64::from(logits[found.token.0 as usize]) - sum.ln();
            let off = (found.logprob - wanted).abs();
            assert!(off < TOLERANCE, "{name}, {}: off by {off}", found.token);
        }
    }
}

/// Another tenant finds neither the text's tokens nor the pictures' rows: by no time can it tell
/// what was shown before.
#[test]
fn tenants_do_not_share_pictures() {
    let (name, mark) = MODELS[0];
    let engine = EngineConfig {
        n_seqs: 4,
        n_ctx: Some(512),
        ..EngineConfig::default()
    };
    let mut model = open(name, mark, engine);
    let mut ask = |salt: u64| {
        let prompt = prompt(&model, &SIZES);
        let asked = TextRequest {
            prefix: PrefixUse::Within(Salt(salt)),
            ..request(prompt)
        };
        let done = model.finish_all([asked], &CancelFlag::default()).unwrap();
        let text = done.unwrap().remove(0);
        let n_computed = model.session().tower().unwrap().n_computed();
        (ids(&text), text.usage.n_reused(), n_computed)
    };
    let first = ask(1);
    assert_eq!((first.1, first.2), (0, 2));
    assert_eq!(ask(2), (first.0.clone(), 0, 4));
    let again = ask(1);
    assert!(again.1 > 0);
    assert_eq!((again.0, again.2), (first.0, 4));
}

#[test]
fn a_text_about_pictures_goes_on_from_a_saved_state() {
    let mut n_restored = 0;
    for (name, mark) in all_models() {
        let wanted = recipe(name).reference().ids("greedy").unwrap();
        let mut model = open(name, mark, EngineConfig::default());
        let asked = prompt(&model, &SIZES);
        let mut text = model.begin(request(asked.clone())).unwrap();
        while text.tokens().len() < 5 {
            text.next_piece(&mut model).unwrap();
        }
        let mut state = Vec::new();
        model.save(&text, &mut state).unwrap();
        drop(model);

        let mut restored = open(name, mark, EngineConfig::default());
        let known = match restored.restore(&state) {
            Ok(known) => known,
            // Where positions are places in a picture, a state does not tell them.
            Err(error) => {
                assert!(
                    error.to_string().contains("is not known"),
                    "{name}: {error}"
                );
                continue;
            }
        };
        n_restored += 1;
        assert!(known.len() >= asked.tokens.len() + 4, "{name}");
        assert!(known.starts_with(&asked.tokens), "{name}");
        let n_left = 12 - (known.len() - asked.tokens.len());
        let rest = PromptTokens {
            tokens: known.clone(),
            ..asked.clone()
        };
        let mut text = restored.begin(request(rest)).unwrap();
        while text.next_piece(&mut restored).unwrap().is_some() {}
        let all = [&known[asked.tokens.len()..], &text.tokens()[..n_left]].concat();
        let all: Vec<u32> = all.iter().map(|token| token.0).collect();
        assert_eq!(all, wanted, "{name}");
        // A state has the point alone at which it was kept, behind what is computed again.
        if !WITH_STATES.contains(&name) {
            assert_eq!(text.usage().timings().prompt.n_tokens, 1, "{name}");
            let n_computed = restored.session().tower().unwrap().n_computed();
            assert_eq!(n_computed, 0, "{name}");
        }
    }
    assert!(n_restored > 0);
}

/// In pieces, next to others and after a preemption a text is the same.
#[test]
fn texts_about_pictures_do_not_depend_on_company() {
    for (name, mark) in all_models() {
        let wanted = recipe(name).reference().ids("greedy").unwrap();
        for (n_ubatch, n_ctx) in [(24, 256), (31, 256), (512, 160)] {
            let engine = EngineConfig {
                n_ubatch,
                n_batch: 64,
                n_seqs: 3,
                ..EngineConfig::default()
            };
            let mut model = open(
                name,
                mark,
                EngineConfig {
                    n_ctx: Some(n_ctx),
                    ..engine
                },
            );
            let other = [SIZES[1], SIZES[0]];
            let prompts = [SIZES, other, SIZES].map(|sizes| prompt(&model, &sizes));
            let done = texts(&mut model, prompts.to_vec());
            assert_eq!(ids(&done[0]), wanted, "{name}, {n_ubatch}");
            assert_eq!(ids(&done[2]), wanted, "{name}, {n_ubatch}");
            assert_ne!(ids(&done[1]), wanted, "{name}, {n_ubatch}");
        }
    }
}

/// Models that keep states, which have the points alone at which they were kept.
const WITH_STATES: [&str; 4] = ["qwen3_5", "qwen3_5_moe", "lfm2_vl", "minicpmv4_6"];

/// A second request about the same pictures computes neither them nor their tokens; one about
/// others shares what is before them.
#[test]
fn the_same_picture_is_computed_once() {
    for (name, mark) in all_models() {
        let mut model = open(name, mark, EngineConfig::default());
        let computed = |model: &mut Model| model.session().tower().unwrap().n_computed();
        let first = prompt(&model, &SIZES);
        let n_prompt = first.tokens.len();
        let before = first.pictures[0].at;
        let one = first.pictures[0].picture.name();
        let of_other = first.pictures.iter().find(|run| run.picture.name() != one);
        let second = of_other.unwrap().at;
        let done = texts(&mut model, vec![first]);
        let wanted = ids(&done[0]);
        assert_eq!(computed(&mut model), 2, "{name}");
        let again = prompt(&model, &SIZES);
        let again = texts(&mut model, vec![again]).remove(0);
        assert_eq!(ids(&again), wanted, "{name}");
        let assert_reused = |n: usize, wanted: usize| {
            if WITH_STATES.contains(&name) {
                // A state has the point alone at which it was kept.
                assert!(n <= wanted, "{name}");
            } else {
                assert_eq!(n, wanted, "{name}");
            }
        };
        assert_reused(again.usage.n_reused(), n_prompt - 1);
        assert_eq!(computed(&mut model), 2, "{name}");
        let other = prompt(&model, &[SIZES[0], [32, 24]]);
        let other = texts(&mut model, vec![other]).remove(0);
        assert_reused(other.usage.n_reused(), second);
        assert_eq!(computed(&mut model), 3, "{name}");
        let other = prompt(&model, &[SIZES[1], SIZES[0]]);
        let other = texts(&mut model, vec![other]).remove(0);
        // Shorter beginnings are computed again; rows of both pictures were kept.
        assert!([0, before].contains(&other.usage.n_reused()), "{name}");
        assert_eq!(computed(&mut model), 3, "{name}");
    }
}

/// A second question about the same pictures computes no token of theirs.
#[test]
fn another_question_computes_itself_alone() {
    for (name, mark) in all_models() {
        // A sequence for each copy.
        let config = EngineConfig {
            n_seqs: 4,
            ..EngineConfig::default()
        };
        let mut model = open(name, mark, config);
        let first = prompt(&model, &SIZES);
        let second = prompt_asking(
            &model,
            &SIZES,
            "Say what you see in them, in one word, and say nothing else.",
        );
        let same = first.tokens.iter().zip(&second.tokens);
        let n_same = same.take_while(|(a, b)| a == b).count();
        let (end, n_second) = (
            first.pictures.last().unwrap().places().end,
            second.tokens.len(),
        );
        assert!(n_same >= end, "{name}");
        let done = texts(
            &mut open(name, mark, EngineConfig::default()),
            vec![second.clone()],
        );
        let wanted = ids(&done[0]);
        texts(&mut model, vec![first]);
        let again = texts(&mut model, vec![second]).remove(0);
        let n_reused = again.usage.n_reused();
        if WITH_STATES.contains(&name) {
            // Behind the token that marks the picture's end, whatever the questions share.
            assert_eq!(n_reused, end + 1, "{name}");
        } else {
            assert_eq!(n_reused, n_same, "{name}");
        }
        let (n_computed, n_new) = (n_second - n_reused, n_second - n_same);
        assert!(
            n_computed * 100 <= n_new * 105,
            "{name}: {n_computed} of {n_new}"
        );
        assert_eq!(ids(&again), wanted, "{name}");
        assert_eq!(model.session().tower().unwrap().n_computed(), 2, "{name}");
    }
}

/// An encoder that a function is in place of.
struct OddEncoder<F>(F);

impl<F> PictureEncoder for OddEncoder<F>
where
    F: FnMut(&CancelFlag) -> Result<Vec<f32>, PictureError> + Send,
{
    fn encode(&mut self, _: &Picture, cancel: &CancelFlag) -> Result<Vec<f32>, PictureError> {
        self.0(cancel)
    }
}

/// A text that is left in the middle of its picture, and one whose picture cannot be computed, end:
/// others of the same step go on as if they were alone.
#[test]
fn a_picture_stops_with_its_own_text() {
    let (name, mark) = MODELS[0];
    let seeing = open(name, mark, EngineConfig::default());
    let plain = || PromptTokens {
        tokens: prompt(&seeing, &SIZES).tokens[..6].to_vec(),
        pictures: Vec::new(),
    };
    let wanted = ids(&texts(
        &mut open(name, mark, EngineConfig::default()),
        vec![plain()],
    )[0]);
    let left = Arc::new(Mutex::new(None::<TextStream>));
    let leaves = Arc::clone(&left);
    let was_told = Arc::new(AtomicBool::new(false));
    let tells = Arc::clone(&was_told);
    let encoder = OddEncoder(move |cancel: &CancelFlag| {
        drop(leaves.lock().unwrap().take());
        tells.store(cancel.is_cancelled(), Ordering::Relaxed);
        if cancel.is_cancelled() {
            return Err(PictureError::Backend(BackendError::Cancelled));
        }
        let reason = "it is too dark".to_owned();
        let media = MediaKind::Picture;
        Err(PictureError::Unreadable { media, reason })
    });
    let mut model = with_encoder(name, mark, Box::new(encoder));
    let session = model.session();
    // Without flags of their own, as in a server.
    let request = |prompt| TextRequest {
        cancel: None,
        ..request(prompt)
    };
    *left.lock().unwrap() = Some(session.submit(request(prompt(&seeing, &SIZES))).unwrap());
    let other = session.submit(request(plain())).unwrap();
    while session.step() == Activity::Busy {}
    assert!(was_told.load(Ordering::Relaxed));
    assert_eq!(ids(&other.finish().unwrap()), wanted);
    let dark = session.submit(request(prompt(&seeing, &SIZES))).unwrap();
    let other = session.submit(request(plain())).unwrap();
    while session.step() == Activity::Busy {}
    assert_eq!(ids(&other.finish().unwrap()), wanted);
    let error = dark.finish().unwrap_err().to_string();
    assert!(error.contains("it is too dark"), "{error}");
    assert_eq!(session.tower().unwrap().n_computed(), 0);
}

/// While a picture is computed, a text next to it gets a token after each piece. When the picture's
/// text is left, no further piece is computed.
#[test]
fn others_go_on_between_the_pieces_of_a_picture() {
    let (name, mark) = ("smolvlm", "<image>"); // ten tiles
    let seeing = open(name, mark, EngineConfig::default());
    let mut model = with_encoder(name, mark, tower_in_pieces(name, mark, 1));
    let (about, wanted) = (prompt(&seeing, &SIZES), recipe(name).reference());
    let plain = PromptTokens {
        tokens: about.tokens[..6].to_vec(),
        pictures: Vec::new(),
    };
    // Without flags of their own, as in a server.
    let request = |prompt: &PromptTokens| TextRequest {
        cancel: None,
        ..request(prompt.clone())
    };
    let session = model.session();
    let (mut talk, mut n_tokens) = (session.submit(request(&plain)).unwrap(), 0);
    // A step: the text that talks gets a token, and begins again where it has ended.
    let mut step = |session: &mut Session<_>| {
        let _idle_between_its_texts = session.step();
        match talk.try_next_tokens().transpose().unwrap() {
            Some(Some(pieces)) => n_tokens += pieces.len(),
            Some(None) => talk = session.submit(request(&plain)).unwrap(),
            None => {}
        }
        n_tokens
    };
    let done = |session: &Session<_>| {
        let tower = session.tower().unwrap();
        (tower.n_pieces(), tower.n_computed())
    };
    step(session);
    let left = session.submit(request(&about)).unwrap();
    while done(session).0 < 5 {
        step(session);
    }
    drop(left);
    for _ in 0..20 {
        step(session);
    }
    assert_eq!(done(session), (5, 0), "it goes on without a client");
    let seeing = session.submit(request(&about)).unwrap();
    let (mut before, first) = (done(session), step(session));
    let mut n_said = 0;
    while done(session).1 < 2 {
        n_said = step(session) - first;
        let after = done(session);
        assert!(after.0 <= before.0 + 1, "more than a piece before a step");
        before = after;
    }
    let n_pieces = before.0 - 5;
    assert!(n_pieces >= 20, "{n_pieces} pieces");
    // Steps in which it begins again give none.
    assert!(n_said as u64 * 5 >= n_pieces * 4, "{n_said} of {n_pieces}");
    while session.step() == Activity::Busy {}
    let text = seeing.finish().unwrap();
    assert_eq!(ids(&text), wanted.ids("greedy").unwrap());
}

/// Pictures of several texts share pieces, and each text is as it is alone, also where another one
/// is left between two pieces.
#[test]
fn pictures_of_several_texts_are_computed_together() {
    for (name, mark) in [MODELS[0], ("llava_next", "<image>")] {
        let seeing = open(name, mark, EngineConfig::default());
        let sizes = [SIZES, [[32, 24], [64, 48]]];
        let prompts = sizes.map(|sizes| prompt(&seeing, &sizes));
        let model = |n_rows| with_encoder(name, mark, tower_in_pieces(name, mark, n_rows));
        let n_pieces = |model: &mut Model| model.session().tower().unwrap().n_pieces();
        let alone = prompts.clone().map(|prompt| {
            let mut model = model(usize::MAX);
            let done = texts(&mut model, vec![prompt]);
            (ids(&done[0]), n_pieces(&mut model))
        });
        assert_ne!(alone[0].0, alone[1].0, "{name}");
        let mut both = model(usize::MAX);
        let done = texts(&mut both, prompts.to_vec());
        for (done, (wanted, _)) in done.iter().zip(&alone) {
            assert_eq!(ids(done), *wanted, "{name}");
        }
        // All layers of all pictures, and the projector.
        assert_eq!(n_pieces(&mut both), 2, "{name}");
        assert!(alone.iter().all(|(_, n)| *n == 2), "{name}");
        for left in [0, 1] {
            let mut model = model(200);
            let session = model.session();
            let submit = |prompt: &PromptTokens| TextRequest {
                cancel: None,
                ..request(prompt.clone())
            };
            let streams = prompts.iter().map(|prompt| session.submit(submit(prompt)));
            let mut streams: Vec<TextStream> = streams.map(Result::unwrap).collect();
            while session.tower().unwrap().n_pieces() < 1 {
                assert_eq!(session.step(), Activity::Busy);
            }
            drop(streams.remove(left));
            while session.step() == Activity::Busy {}
            let stays = streams.remove(0).finish().unwrap();
            assert_eq!(ids(&stays), alone[1 - left].0, "{name}");
            assert_eq!(session.tower().unwrap().n_computed(), 2, "{name}");
        }
    }
}

#[test]
fn a_model_without_a_tower_says_so() {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");
    let mut model = Model::open(format!("{models}/stories-llama-f16.gguf")).unwrap();
    let error = model.look(&[picture(SIZES[0])], "What?", GenerateOptions::default());
    assert!(matches!(error.unwrap_err(), Error::SeesNothing));
    let error = model.listen(&[sound(SIZES[0])], "What?", GenerateOptions::default());
    assert!(matches!(error.unwrap_err(), Error::HearsNothing));
    let seeing = open("llava", "<image>", EngineConfig::default());
    let error = model.begin(request(prompt(&seeing, &SIZES))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the model 'llama' does not see pictures: it has no vision tower, or none was loaded"
    );
    let named = TextRequest {
        prompt: vec![TokenId(1), TokenId(TokenId::FIRST_ROW_NAME)],
        ..TextRequest::default()
    };
    let error = model.begin(named).unwrap_err().to_string();
    assert!(error.contains("2147483648"), "{error}");
}

#[test]
fn a_model_takes_what_its_tower_is_for() {
    let (name, mark) = HEARING[0];
    let mut hearing = open(name, mark, EngineConfig::default());
    let options = || GenerateOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(6),
        ..GenerateOptions::default()
    };
    let mut said = |size| {
        let text = hearing.listen(&[sound(size)], "What?", options());
        text.unwrap().finish().unwrap()
    };
    let first = said(SIZES[0]);
    assert_ne!(said(SIZES[1]), first);
    assert_eq!(said(SIZES[0]), first);
    let error = hearing.look(&[picture(SIZES[0])], "What?", options());
    assert_eq!(
        error.unwrap_err().to_string(),
        "the model takes no pictures: its tower makes rows of sounds"
    );
    let mut seeing = open("llava", "<image>", EngineConfig::default());
    let error = seeing.listen(&[sound(SIZES[0])], "What?", options());
    assert_eq!(
        error.unwrap_err().to_string(),
        "the model takes no sounds: its tower makes rows of pictures"
    );
}
