//! Pictures and sounds on the command line: `--image`, `--audio`, and what is said where a model
//! takes none.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use model_tests::sound::sound;
use model_tests::vision::{HEARING, SIZES, expand, picture};

use serde_json::{Value, json as value};

use crate::support::{cellar, failure, json, json_lines, model};

/// The directory of a model that sees, with pictures in it.
fn seeing() -> (tempfile::TempDir, String, [String; 2]) {
    let folder = tempfile::tempdir().unwrap();
    expand("llava", "<image>", folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let pictures = [path("a.bmp"), path("b.bmp")];
    for (file, size) in pictures.iter().zip(SIZES) {
        std::fs::write(file, picture(size)).unwrap();
    }
    let model = folder.path().to_str().unwrap().to_owned();
    (folder, model, pictures)
}

#[test]
fn a_run_shows_pictures_in_their_order() {
    let (_folder, model, [a, b]) = seeing();
    let run = |images: &[&str]| {
        let mut args = vec!["run", "-m", &model, "--json", "--temp", "0", "-n", "8"];
        images
            .iter()
            .for_each(|image| args.extend(["--image", image]));
        args.push("What is this?");
        json(&args)
    };
    let one = run(&[&a]);
    let two = run(&[&a, &b]);
    // 16 rows of each, and the tokens of the question.
    let n_tokens = |report: &serde_json::Value| report["prompt_tokens"].as_u64().unwrap();
    assert_eq!(n_tokens(&two), n_tokens(&one) + 16);
    assert_eq!(run(&[&a])["tokens"], one["tokens"]);
    assert_ne!(run(&[&b])["tokens"], one["tokens"]);
    assert_ne!(run(&[&b, &a])["tokens"], two["tokens"]);
}

/// The text of a run about these pictures.
fn text_of_run(model: &str, images: &[&str]) -> String {
    let mut args = vec!["run", "-m", model, "--json", "--temp", "0", "-n", "6"];
    images
        .iter()
        .for_each(|image| args.extend(["--image", image]));
    args.push("What is this?");
    json(&args)["text"].as_str().unwrap().to_owned()
}

#[test]
fn a_batch_shows_pictures_as_run_does() {
    let (_folder, model, [a, b]) = seeing();
    let part = |url: &str| value!({"type": "image_url", "image_url": {"url": url}});
    let line = |pictures: &[Value]| {
        let mut parts = pictures.to_vec();
        parts.push(value!({"type": "text", "text": "What is this?"}));
        let message = value!({"role": "user", "content": parts});
        value!({"messages": [message], "max_tokens": 6, "temperature": 0}).to_string()
    };
    let url = format!(
        "data:image/bmp;base64,{}",
        base64(&std::fs::read(&a).unwrap())
    );
    let lines = [
        line(&[part(&a)]),
        line(&[part(&url)]),
        line(&[part(&format!("file://{b}")), part(&a)]),
        line(&[]),
    ];
    let args = ["batch", "-m", &model, "-f", "-", "--parallel", "3"];
    let answers = json_lines(&args, &lines.join("\n"));
    let wanted = [&[&*a][..], &[&a], &[&b, &a], &[]];
    for (answer, images) in answers.iter().zip(wanted) {
        assert_eq!(answer["text"], text_of_run(&model, images), "{answer}");
    }
    for (part, wanted) in [
        (
            value!({"type": "input_video"}),
            "line 1: a part of a message has the type \"input_video\"",
        ),
        (part("https://example.com/a.png"), "nothing is fetched"),
        (part("no-such.png"), "no-such.png"),
    ] {
        let done = cellar().args(args).write_stdin(line(&[part])).assert();
        let done = done.failure();
        let stderr = String::from_utf8_lossy(&done.get_output().stderr).into_owned();
        assert!(stderr.contains(wanted), "{stderr}");
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let of_three = |three: &[u8]| {
        let bits = three
            .iter()
            .fold(0, |bits, &byte| bits << 8 | u32::from(byte));
        let bits = bits << (8 * (3 - three.len()));
        let letters = (0..=three.len()).map(move |at| bits >> (18 - 6 * at) & 63);
        letters
            .map(|letter| char::from(LETTERS[letter as usize]))
            .collect::<String>()
    };
    bytes.chunks(3).map(of_three).collect()
}

#[test]
fn a_conversation_shows_pictures() {
    let (folder, model, [a, b]) = seeing();
    let saved = folder.path().join("chat.json");
    let saved = saved.to_str().unwrap();
    let chat = |flags: &[&str], lines: &[&str]| {
        let mut command = cellar();
        command.args(["chat", "-m", &model, "--temp", "0", "-n", "6"]);
        let done = command.args(flags).write_stdin(lines.join("\n")).assert();
        let out = String::from_utf8(done.success().get_output().stdout.clone()).unwrap();
        out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let shown = |name: &str| format!("/image {name}");
    let save = format!("/save {saved}");
    let answers = chat(
        &[],
        &[&shown(&a), "What is this?", &shown(&b), "And now?", &save],
    );
    assert_eq!(answers[0].trim(), text_of_run(&model, &[&a]).trim());
    let by_flag = chat(&["--image", &a], &["What is this?", &shown(&b), "And now?"]);
    assert_eq!(by_flag, answers);
    // What was shown is seen later on, too, and after it was loaded.
    let load = format!("/load {saved}");
    let later = chat(
        &["--image", &a],
        &["What is this?", &shown(&b), "And now?", "Sure?"],
    );
    assert_eq!(chat(&[], &[&load, "Sure?"]), later[2..]);
    let unseen = chat(&[], &["What is this?", "And now?", "Sure?"]);
    assert_ne!(unseen[2..], later[2..]);
    let file: Value = serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap();
    let part = value!({"type": "image", "path": a});
    assert_eq!(file["messages"][0]["content"][0], part);
    std::fs::remove_file(&a).unwrap();
    let (code, message) = {
        let mut command = cellar();
        command.args(["chat", "-m", &model]).write_stdin(load);
        let done = command.assert().failure();
        let output = done.get_output();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code().unwrap(), stderr)
    };
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("a.bmp"), "{message}");
}

#[test]
fn what_cannot_be_shown_is_said() {
    let (folder, seeing, [a, _]) = seeing();
    let stories = model();
    let stories = stories.to_str().unwrap();
    let (code, message) = failure(&["run", "-m", stories, "--image", &a, "--chat", "What?"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("has no vision or audio tower"),
        "{message}"
    );
    let text = folder.path().join("a.txt");
    std::fs::write(&text, "no picture").unwrap();
    let text = text.to_str().unwrap();
    let (code, message) = failure(&["run", "-m", &seeing, "--image", text, "What?"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("a.txt") && message.contains("none of PNG"),
        "{message}"
    );
    let (code, message) = failure(&[
        "run", "-m", &seeing, "--mmproj", stories, "--image", &a, "What?",
    ]);
    assert_eq!(code, 1);
    assert!(
        message.contains("is no tower: its architecture is 'llama'"),
        "{message}"
    );
    let (code, _) = failure(&["run", "-m", &seeing, "--image", &a, "--raw", "What?"]);
    assert_eq!(code, 2);
}

/// The directory of a model that hears, with sounds in it.
fn hearing() -> (tempfile::TempDir, String, [String; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let (name, mark) = HEARING[0];
    expand(name, mark, folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let sounds = [path("a.wav"), path("b.wav")];
    for (file, size) in sounds.iter().zip(SIZES) {
        std::fs::write(file, sound(size)).unwrap();
    }
    let model = folder.path().to_str().unwrap().to_owned();
    (folder, model, sounds)
}

#[test]
fn sounds_are_heard_in_runs_batches_and_conversations() {
    let (folder, model, [a, b]) = hearing();
    let run = |sounds: &[&str]| {
        let mut args = vec!["run", "-m", &model, "--json", "--temp", "0", "-n", "6"];
        sounds
            .iter()
            .for_each(|sound| args.extend(["--audio", sound]));
        args.push("What is this?");
        json(&args)
    };
    let text = |sounds: &[&str]| run(sounds)["text"].as_str().unwrap().to_owned();
    let n_tokens = |report: Value| report["prompt_tokens"].as_u64().unwrap();
    // 3 rows of the second, and the tokens around it.
    assert_eq!(n_tokens(run(&[&a, &b])), n_tokens(run(&[&a])) + 5);
    assert_ne!(text(&[&a]), text(&[&b]));
    let part = |part: Value| {
        let question = value!({"type": "text", "text": "What is this?"});
        let message = value!({"role": "user", "content": [part, question]});
        value!({"messages": [message], "max_tokens": 6, "temperature": 0}).to_string()
    };
    let data = base64(&std::fs::read(&a).unwrap());
    let lines = [
        part(value!({"type": "audio_url", "audio_url": {"url": a}})),
        part(value!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})),
    ];
    for answer in json_lines(&["batch", "-m", &model, "-f", "-"], &lines.join("\n")) {
        assert_eq!(answer["text"], text(&[&a]), "{answer}");
    }
    let saved = folder.path().join("chat.json");
    let saved = saved.to_str().unwrap();
    let lines = format!("/audio {a}\nWhat is this?\n/save {saved}");
    let mut command = cellar();
    command.args(["chat", "-m", &model, "--temp", "0", "-n", "6"]);
    let done = command.write_stdin(lines).assert().success();
    let out = String::from_utf8_lossy(&done.get_output().stdout).into_owned();
    assert_eq!(out.trim(), text(&[&a]).trim());
    let file: Value = serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap();
    let part = value!({"type": "audio", "path": a});
    assert_eq!(file["messages"][0]["content"][0], part);
}

#[test]
fn what_cannot_be_heard_is_said() {
    let (folder, hearing, [a, _]) = hearing();
    let stories = model();
    let stories = stories.to_str().unwrap();
    let said = |args: &[&str], why: &str| {
        let (code, message) = failure(args);
        assert_eq!(code, 1, "{message}");
        assert!(message.contains(why), "{message}");
    };
    let why = "is a sound, and";
    said(
        &["run", "-m", stories, "--audio", &a, "--chat", "What?"],
        why,
    );
    let cut = folder.path().join("cut.wav");
    std::fs::write(&cut, &sound(SIZES[0])[..2000]).unwrap();
    let cut = cut.to_str().unwrap();
    let why = "cut.wav': the sound cannot be read: it is cut short";
    said(&["run", "-m", &hearing, "--audio", cut, "What?"], why);
    let why = "the model takes no pictures";
    said(&["run", "-m", &hearing, "--image", &a, "What?"], why);
    let (code, _) = failure(&["run", "-m", &hearing, "--audio", &a, "--raw", "What?"]);
    assert_eq!(code, 2);
}
