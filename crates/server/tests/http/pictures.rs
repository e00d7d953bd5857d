//! Pictures and sounds in the messages of each API: the same text, and clear refusals.

use std::sync::Arc;

use base64::Engine as _;
use cellar_engine::serve::{Service, ServiceConfig, ServiceExtras};
use cellar_engine::{Engine, EngineConfig, Tower};
use cellar_server::{App, ModelSettings, PictureFetcher, ServedModel, ServerConfig};
use kv_backend::BoxedBackend;
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_tests::http::post;
use model_tests::sound::sound;
use model_tests::vision::{HEARING, SIZES, expand, picture};
use model_vision::Vision;
use serde_json::{Value, json};

use crate::support::Server;

fn server() -> Server {
    server_with(None)
}

fn server_with(picture_fetcher: Option<PictureFetcher>) -> Server {
    server_of("llava", "<image>", picture_fetcher)
}

fn server_of(name: &str, mark: &str, picture_fetcher: Option<PictureFetcher>) -> Server {
    let folder = tempfile::tempdir().unwrap();
    expand(name, mark, folder.path());
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let file = ModelFile::open(folder.path(), &registry).unwrap();
    let vision = Vision::of(&file, folder.path(), None).unwrap().unwrap();
    let config = EngineConfig {
        n_ctx: Some(256),
        n_seqs: 4,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    let backend = || BoxedBackend::new(model_tests::cpu());
    let engine = Engine::new(backend(), file.model().clone(), file.weights(), &config).unwrap();
    let encoder = vision.encoder(backend()).unwrap();
    let extras = ServiceExtras {
        tower: Some(Tower::new(Box::new(encoder), 1 << 20)),
        ..ServiceExtras::default()
    };
    let (tokenizer, config) = (file.tokenizer(), ServiceConfig::default());
    let service = Service::start_with(engine, tokenizer, &config, extras).unwrap();
    let settings = ModelSettings {
        id: "eyes".to_owned(),
        n_parallel: 4,
        picture_fetcher,
        ..ModelSettings::default()
    };
    let model = ServedModel::texts(&file, service, settings).unwrap();
    let model = model.with_pictures(Ok(Arc::clone(vision.reader())));
    Server::start(App::new(vec![model], ServerConfig::default()))
}

fn encoded(size: [u32; 2]) -> String {
    base64(&picture(size))
}

fn base64(bytes: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn data_url(size: [u32; 2]) -> String {
    format!("data:image/bmp;base64,{}", encoded(size))
}

fn reply(server: &Server, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, 200, "{path}: {}", reply.body);
    reply.json()
}

fn chat(server: &Server, content: &Value) -> Value {
    let body = json!({
        "temperature": 0, "max_tokens": 6, "messages": [{"role": "user", "content": content}],
    });
    reply(server, "/v1/chat/completions", &body)
}

#[test]
fn all_apis_show_the_model_the_same_picture() {
    let server = server();
    let text = "What is this?";
    let image = |size| json!({"type": "image_url", "image_url": {"url": data_url(size)}});
    let part = json!({"type": "text", "text": text});
    let answer = chat(&server, &json!([image(SIZES[0]), part]));
    let wanted = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let other = chat(&server, &json!([image(SIZES[1]), part]));
    assert_ne!(other["choices"][0]["message"]["content"], wanted);
    let n_prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let again = chat(&server, &json!([image(SIZES[0]), part]));
    assert_eq!(
        again["usage"]["prompt_tokens_details"]["cached_tokens"],
        n_prompt - 1
    );
    assert_eq!(again["choices"][0]["message"]["content"], wanted);
    let source = json!({"type": "base64", "media_type": "image/bmp", "data": encoded(SIZES[0])});
    let message = json!({
        "model": "eyes", "temperature": 0, "max_tokens": 6,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, part]}],
    });
    let message = reply(&server, "/v1/messages", &message);
    assert_eq!(message["content"][0]["text"], wanted);
    let response = json!({
        "temperature": 0, "max_output_tokens": 16, "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(SIZES[0])},
            {"type": "input_text", "text": text},
        ]}],
    });
    let response = reply(&server, "/v1/responses", &response);
    let said = response["output"][0]["content"][0]["text"]
        .as_str()
        .unwrap();
    assert!(said.starts_with(wanted), "{said}");
    let options = json!({"temperature": 0, "num_predict": 6});
    let ollama = json!({
        "model": "eyes", "stream": false, "options": options,
        "messages": [{"role": "user", "content": text, "images": [encoded(SIZES[0])]}],
    });
    assert_eq!(
        reply(&server, "/api/chat", &ollama)["message"]["content"],
        wanted
    );
    let ollama = json!({
        "model": "eyes", "stream": false, "options": options, "prompt": text,
        "images": [encoded(SIZES[0])],
    });
    assert_eq!(reply(&server, "/api/generate", &ollama)["response"], wanted);
    // The template writes nothing around a message, and the tokenizer a BOS before a prompt.
    let marked = json!({"prompt_string": format!("<__media__>{text}"),
                        "multimodal_data": [encoded(SIZES[0])]});
    for prompt in [json!(marked), json!([marked])] {
        let body = json!({"prompt": prompt, "temperature": 0, "n_predict": 6});
        let answer = reply(&server, "/completion", &body);
        let answer = answer.get(0).unwrap_or(&answer);
        assert_eq!(answer["content"], wanted);
    }
    let body = json!({"prompt": {"prompt_string": text, "multimodal_data": [encoded(SIZES[0])]}});
    let refused = post(server.address, "/completion", &body);
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(
        refused.body.contains("0 places for pictures"),
        "{}",
        refused.body
    );
}

#[test]
fn pictures_are_fetched_where_that_is_allowed() {
    let server = server_with(Some(PictureFetcher::new(|url| match url {
        "https://example.com/a.bmp" => Ok(picture(SIZES[0])),
        _ => Err("the server answers 404".to_owned()),
    })));
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let part = json!({"type": "text", "text": "What is this?"});
    let text = |url: &str| {
        let answer = chat(&server, &json!([image(url), part]));
        answer["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(text("https://example.com/a.bmp"), text(&data_url(SIZES[0])));
    let content = json!([image("https://example.com/b.bmp"), part]);
    let body = json!({"messages": [{"role": "user", "content": content}]});
    let refused = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(refused.status, 400, "{}", refused.body);
    let error = &refused.json()["error"];
    assert_eq!(error["param"], "messages[0].content[0]");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("the server answers 404"), "{message}");
}

#[test]
fn what_is_no_picture_is_refused_with_its_place() {
    let server = server();
    for (url, why) in [
        (
            "data:image/png;base64,AAAA",
            "none of PNG, JPEG, WebP, GIF and BMP",
        ),
        ("data:image/png;base64,", "there are no bytes"),
        ("data:image/png;base64,!", "it is no base64"),
        ("https://example.com/cat.png", "this server fetches none"),
    ] {
        let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
        let message = refusal(&server, &content);
        assert!(message.contains(why), "{message}");
    }
    // What a user writes is no place of a picture.
    let image = json!({"type": "image_url", "image_url": {"url": data_url(SIZES[0])}});
    let spelled = json!([image, {"type": "text", "text": "<image> is a mark"}]);
    chat(&server, &spelled);
}

#[test]
fn sounds_are_heard_in_messages_and_prompts() {
    let (name, mark) = HEARING[0];
    let server = server_of(name, mark, None);
    let text = "What is said?";
    let part = json!({"type": "text", "text": text});
    let audio = |bytes: &[u8]| {
        let audio = json!({"data": base64(bytes), "format": "wav"});
        json!({"type": "input_audio", "input_audio": audio})
    };
    let answer = chat(&server, &json!([audio(&sound(SIZES[0])), part]));
    let wanted = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let other = chat(&server, &json!([audio(&sound(SIZES[1])), part]));
    assert_ne!(other["choices"][0]["message"]["content"], wanted);
    let again = chat(&server, &json!([audio(&sound(SIZES[0])), part]));
    let n_prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        again["usage"]["prompt_tokens_details"]["cached_tokens"],
        n_prompt - 1
    );
    let url = format!("data:audio/wav;base64,{}", base64(&sound(SIZES[0])));
    let by_url = json!({"type": "audio_url", "audio_url": {"url": url}});
    let again = chat(&server, &json!([by_url, part]));
    assert_eq!(again["choices"][0]["message"]["content"], wanted);
    let marked = json!({
        "prompt_string": format!("<|audio_bos|><__media__><|audio_eos|>{text}"),
        "multimodal_data": [base64(&sound(SIZES[0]))],
    });
    let body = json!({"prompt": marked, "temperature": 0, "n_predict": 6});
    assert_eq!(reply(&server, "/completion", &body)["content"], wanted);
    let properties = model_tests::http::get(server.address, "/props").json();
    assert_eq!(
        properties["modalities"],
        json!({"vision": false, "audio": true})
    );
    let truncated = &sound(SIZES[0])[..2000];
    let image = json!({"type": "image_url", "image_url": {"url": data_url(SIZES[0])}});
    let remote = json!({"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}});
    for (content, why) in [
        (audio(truncated), "it is cut short: 978 of 9690 samples"),
        (audio(b"not a sound"), "none of WAV, MP3 and FLAC"),
        (audio(&picture(SIZES[0])), "none of WAV, MP3 and FLAC"),
        (audio(&sound([201, 0])), "2 seconds: at most 1 are taken"),
        (image, "the model takes no pictures"),
        (remote, "sounds are not fetched"),
    ] {
        let message = refusal(&server, &json!([content, part]));
        assert!(message.contains(why), "{message}");
    }
    let seeing = self::server();
    let message = refusal(&seeing, &json!([audio(&sound(SIZES[0])), part]));
    assert!(message.contains("the model takes no sounds"), "{message}");
}

/// The message with which the first part of a content is refused.
fn refusal(server: &Server, content: &Value) -> String {
    let body = json!({"messages": [{"role": "user", "content": content}]});
    let reply = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(reply.status, 400, "{}", reply.body);
    let error = &reply.json()["error"];
    assert_eq!(error["param"], "messages[0].content[0]");
    error["message"].as_str().unwrap().to_owned()
}
