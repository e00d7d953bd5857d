//! Cached prefixes to a file and back.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Server, Setup};

fn act(server: &Server, action: &str, body: &Value) -> (u16, Value) {
    let path = format!("/slots/0?action={action}");
    let reply = post(server.address, &path, body);
    (reply.status, reply.json())
}

fn n_cached(server: &Server) -> u64 {
    let body =
        json!({"prompt": "Once upon a time there was a cat", "max_tokens": 2, "temperature": 0});
    let answer = post(server.address, "/v1/completions", &body).json();
    let details = &answer["usage"]["prompt_tokens_details"];
    details["cached_tokens"]
        .as_u64()
        .unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn prefixes_go_to_a_file_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut setup = Setup::default();
    setup.server.slot_save_path = Some(dir.path().to_owned());
    let server = setup.start();
    let file = json!({"filename": "one.bin"});
    assert_eq!(n_cached(&server), 0);
    let cached = n_cached(&server);
    assert!(cached > 4, "{cached}");
    let (status, saved) = act(&server, "save", &file);
    assert_eq!(status, 200, "{saved}");
    assert!(saved["n_saved"].as_u64() >= Some(cached), "{saved}");
    assert_eq!(
        (&saved["filename"], &saved["id_slot"]),
        (&json!("one.bin"), &json!(0))
    );
    let n_bytes = std::fs::metadata(dir.path().join("one.bin")).unwrap().len();
    assert_eq!(saved["n_written"], n_bytes);
    let (status, erased) = act(&server, "erase", &json!({}));
    assert_eq!((status, &erased["n_erased"]), (200, &saved["n_saved"]));
    assert_eq!(n_cached(&server), 0);
    let (status, restored) = act(&server, "restore", &file);
    assert_eq!(
        (status, &restored["n_restored"]),
        (200, &saved["n_saved"]),
        "{restored}"
    );
    assert_eq!(n_cached(&server), cached);

    std::fs::write(dir.path().join("bad.bin"), "nonsense").unwrap();
    for (action, name) in [
        ("save", "../up.bin"),
        ("save", "bad.bin"),
        ("save", ".hidden"),
        ("save", ""),
        ("restore", "none.bin"),
        ("restore", "bad.bin"),
    ] {
        let (status, error) = act(&server, action, &json!({ "filename": name }));
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!("filename")),
            "{name}: {error}"
        );
    }
    // A file that is damaged at its end changes nothing either.
    let mut damaged = std::fs::read(dir.path().join("one.bin")).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(dir.path().join("damaged.bin"), damaged).unwrap();
    let (status, error) = act(&server, "restore", &json!({"filename": "damaged.bin"}));
    assert_eq!(status, 400, "{error}");
    assert!(error.to_string().contains("is damaged"), "{error}");
    assert_eq!(n_cached(&server), cached);
    let kept = std::fs::read(dir.path().join("bad.bin")).unwrap();
    assert_eq!(kept, b"nonsense", "no other file is replaced");
    assert_eq!(act(&server, "other", &file).0, 400);
    // Of the model that the body names, or the address, but not of two.
    let other = json!({"filename": "one.bin", "model": "nobody"});
    let (status, error) = act(&server, "restore&model=stories", &other);
    assert_eq!((status, &error["error"]["param"]), (400, &json!("model")));
    // In place of what is cached now, and as often as wanted.
    assert_eq!(act(&server, "restore", &file).0, 200);
    assert_eq!(act(&server, "restore", &file).0, 200);
    assert_eq!(n_cached(&server), cached);
}

#[test]
fn without_a_directory_there_are_no_files() {
    let server = Setup::default().start();
    let (status, error) = act(&server, "save", &json!({"filename": "a"}));
    assert_eq!(status, 501);
    assert!(error.to_string().contains("--slot-save-path"), "{error}");
}
