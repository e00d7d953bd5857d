//! Pictures on the command line: `--image`, and what is said where a model sees none.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use model_tests::vision::{SIZES, expand, picture};

use crate::support::{failure, json, model};

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

#[test]
fn what_cannot_be_shown_is_said() {
    let (folder, seeing, [a, _]) = seeing();
    let stories = model();
    let stories = stories.to_str().unwrap();
    let (code, message) = failure(&["run", "-m", stories, "--image", &a, "--chat", "What?"]);
    assert_eq!(code, 1);
    assert!(message.contains("has no vision tower"), "{message}");
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
    assert!(message.contains("clip.vision"), "{message}");
    let (code, _) = failure(&["run", "-m", &seeing, "--image", &a, "--raw", "What?"]);
    assert_eq!(code, 2);
}
