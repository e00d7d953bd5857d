//! Downloads from a server on this machine: what is asked, what is stored, and what goes wrong.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod support;

use std::fs;
use std::path::Path;
use std::time::Duration;

use cellar_hub::{Access, Event, Hub, HubConfig, HubError, PulledModel};
use support::{COMMIT, Fault, HubServer, sha256};

const REPO: &str = "owner/tiny-GGUF";

/// A file that looks random.
fn bytes(n: usize) -> Vec<u8> {
    (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

fn config(server: &HubServer, cache: &Path) -> HubConfig {
    let variables = [
        ("HF_HUB_CACHE", cache.to_str().unwrap().to_owned()),
        ("HF_ENDPOINT", server.endpoint.clone()),
    ];
    let config = HubConfig::from_variables(|name| {
        let found = variables.iter().find(|(n, _)| *n == name);
        found.map(|(_, value)| value.into())
    });
    HubConfig {
        retry_wait: Duration::from_millis(1),
        ..config.unwrap()
    }
}

fn pull(server: &HubServer, cache: &Path, name: &str) -> Result<PulledModel, HubError> {
    Hub::new(config(server, cache)).pull(&name.parse().unwrap(), &mut |_| ())
}

fn part(cache: &Path, contents: &[u8]) -> std::path::PathBuf {
    let blobs = cache.join("models--owner--tiny-GGUF/blobs");
    blobs.join(format!("{}.incomplete", sha256(contents)))
}

/// The ranges that the content server was asked for, in order; empty for a whole file.
fn ranges(server: &HubServer) -> Vec<String> {
    let content = server.requests().into_iter().filter(|r| r.is_content);
    content
        .map(|mut r| r.headers.remove("range").unwrap_or_default())
        .collect()
}

#[test]
fn a_model_lands_in_the_layout_of_other_tools() {
    let server = HubServer::start(REPO);
    let (q4, q8) = (bytes(300_000), bytes(1000));
    server
        .add("README.md", b"text")
        .add("sub dir/tiny-Q4_K_M.gguf", &q4)
        .add("tiny-Q8_0.gguf", &q8);
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::new(config(&server, dir.path()));
    let name = REPO.parse().unwrap();
    assert!(matches!(
        hub.cache().find(&name),
        Err(HubError::NotCached { .. })
    ));
    let mut chosen = String::new();
    let mut last = 0;
    let pulled = hub.pull(&name, &mut |event| match event {
        Event::Chosen {
            variant, others, ..
        } => {
            chosen = format!("{variant}; {}", others[0]);
        }
        Event::Progress { n_bytes } => {
            assert!(n_bytes >= last);
            last = n_bytes;
        }
        other => panic!("{other:?}"),
    });
    let pulled = pulled.unwrap();
    assert_eq!(chosen, "Q4_K_M (292.97 KiB); Q8_0 (1000 bytes)");
    assert_eq!(
        (last, pulled.n_bytes, pulled.n_downloaded),
        (300_000, 300_000, 300_000)
    );
    assert_eq!(pulled.name.to_string(), format!("{REPO}:Q4_K_M"));

    let repo = dir.path().join("models--owner--tiny-GGUF");
    let link = repo
        .join("snapshots")
        .join(COMMIT)
        .join("sub dir/tiny-Q4_K_M.gguf");
    assert_eq!(pulled.path, link);
    assert_eq!(fs::read(&link).unwrap(), q4);
    let target = format!("../../../blobs/{}", sha256(&q4));
    assert_eq!(fs::read_link(&link).unwrap(), Path::new(&target));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(hub.cache().find(&name).unwrap(), link);
    let any_case = "OWNER/tiny-gguf:q4_k_m".parse().unwrap();
    assert_eq!(hub.cache().find(&any_case).unwrap(), link);
    let other = format!("{REPO}:Q8_0").parse().unwrap();
    assert!(matches!(
        hub.cache().find(&other),
        Err(HubError::NotCached { .. })
    ));

    // A second pull only looks whether the repository has changed.
    server.requests();
    let again = hub.pull(&name, &mut |_| ()).unwrap();
    assert_eq!((again.path, again.n_downloaded), (link, 0));
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_directory_is_downloaded_whole() {
    let server = HubServer::start(REPO);
    server
        .add("config.json", b"{}")
        .add("model-00001-of-00002.safetensors", &bytes(100))
        .add("model-00002-of-00002.safetensors", &bytes(200))
        .add("model.safetensors.index.json", b"{\"a\": 1}")
        .add("tokenizer.json", &bytes(70))
        .add("pytorch_model.bin", &bytes(80));
    let dir = tempfile::tempdir().unwrap();
    let pulled = pull(&server, dir.path(), REPO).unwrap();
    assert_eq!(pulled.name.to_string(), format!("{REPO}:safetensors"));
    let mut names: Vec<_> = fs::read_dir(&pulled.path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(names, wanted);
    let hub = Hub::new(config(&server, dir.path()));
    assert_eq!(
        hub.cache().find(&REPO.parse().unwrap()).unwrap(),
        pulled.path
    );
    // Without one of its parts it is no model.
    fs::remove_file(pulled.path.join(wanted[1])).unwrap();
    let gone = hub.cache().find(&REPO.parse().unwrap());
    assert!(matches!(gone, Err(HubError::NotCached { .. })));
}

#[test]
fn a_broken_download_continues_where_it_broke() {
    let server = HubServer::start(REPO);
    let file = bytes(10_000);
    let truncate = Fault::Truncate {
        n_bytes: 3000,
        n_times: 2,
    };
    server.add_faulty("m-Q8_0.gguf", &file, &[truncate]);
    let dir = tempfile::tempdir().unwrap();
    let pulled = pull(&server, dir.path(), REPO).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
    assert_eq!(ranges(&server), ["", "bytes=3000-", "bytes=6000-"]);
}

#[test]
fn a_part_on_disk_is_continued() {
    let server = HubServer::start(REPO);
    let file = bytes(10_000);
    server.add("m-Q8_0.gguf", &file);
    let dir = tempfile::tempdir().unwrap();
    let part = part(dir.path(), &file);
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, &file[..4000]).unwrap();
    let pulled = pull(&server, dir.path(), REPO).unwrap();
    assert_eq!((pulled.n_bytes, pulled.n_downloaded), (10_000, 6000));
    assert_eq!(ranges(&server), ["bytes=4000-"]);
    assert_eq!(fs::read(&pulled.path).unwrap(), file);
    assert!(!part.exists());
}

#[test]
fn a_part_that_is_complete_or_too_long() {
    let server = HubServer::start(REPO);
    let file = bytes(10_000);
    server.add("m-Q8_0.gguf", &file);
    for (contents, wanted) in [(file.clone(), vec![]), (bytes(10_001), vec![""])] {
        let dir = tempfile::tempdir().unwrap();
        let part = part(dir.path(), &file);
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(&part, contents).unwrap();
        let pulled = pull(&server, dir.path(), REPO).unwrap();
        assert_eq!(fs::read(pulled.path).unwrap(), file);
        assert_eq!(ranges(&server), wanted);
    }
}

#[test]
fn a_server_without_ranges_sends_the_file_again() {
    let server = HubServer::start(REPO);
    let file = bytes(10_000);
    let truncate = Fault::Truncate {
        n_bytes: 3000,
        n_times: 1,
    };
    server.add_faulty("m-Q8_0.gguf", &file, &[truncate, Fault::IgnoreRange]);
    let dir = tempfile::tempdir().unwrap();
    let pulled = pull(&server, dir.path(), REPO).unwrap();
    assert_eq!(fs::read(pulled.path).unwrap(), file);
    assert_eq!(ranges(&server), ["", "bytes=3000-"]);
}

#[test]
fn a_connection_that_stays_broken_leaves_a_part() {
    let server = HubServer::start(REPO);
    let file = bytes(10_000);
    let truncate = |n_bytes| Fault::Truncate {
        n_bytes,
        n_times: usize::MAX,
    };
    server.add_faulty("m-Q8_0.gguf", &file, &[truncate(0)]);
    let dir = tempfile::tempdir().unwrap();
    let part = part(dir.path(), &file);
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, &file[..4000]).unwrap();
    let error = pull(&server, dir.path(), REPO).unwrap_err().to_string();
    assert!(
        error.starts_with("m-Q8_0.gguf: the connection broke at 4000 of 10000 bytes ("),
        "{error}"
    );
    assert!(
        error.ends_with("); the same command continues there"),
        "{error}"
    );
    assert_eq!(ranges(&server), ["bytes=4000-"; 5]);
    assert_eq!(fs::read(part).unwrap(), file[..4000]);
}

#[test]
fn bytes_that_are_not_those_of_the_hash_are_removed() {
    let server = HubServer::start(REPO);
    let file = bytes(10_000);
    server.add_faulty("m-Q8_0.gguf", &file, &[Fault::Corrupt]);
    let dir = tempfile::tempdir().unwrap();
    let error = pull(&server, dir.path(), REPO).unwrap_err();
    let HubError::Hash { kind, wanted, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!((*kind, wanted), ("sha256", &sha256(&file)));
    assert!(!part(dir.path(), &file).exists());
    let hub = Hub::new(config(&server, dir.path()));
    assert!(hub.cache().models().is_empty());

    // A part that another file left behind is found out, too.
    server.add("m-Q8_0.gguf", &file);
    fs::write(part(dir.path(), &file), &bytes(5000)[1..]).unwrap();
    assert!(matches!(
        pull(&server, dir.path(), REPO),
        Err(HubError::Hash { .. })
    ));
    assert!(pull(&server, dir.path(), REPO).is_ok());
}

#[test]
fn a_server_that_sends_too_much_is_refused() {
    let server = HubServer::start(REPO);
    server.add_faulty("m-Q8_0.gguf", &bytes(1000), &[Fault::TooLong]);
    let dir = tempfile::tempdir().unwrap();
    let error = pull(&server, dir.path(), REPO).unwrap_err().to_string();
    assert_eq!(
        error,
        "m-Q8_0.gguf: the server sends more than the file's 1000 bytes"
    );
}

#[test]
fn errors_of_the_server_are_tried_again() {
    let server = HubServer::start(REPO);
    let file = bytes(1000);
    let busy = |n_times| Fault::Status {
        status: 503,
        n_times,
    };
    server.add_faulty("m-Q8_0.gguf", &file, &[busy(2)]);
    let dir = tempfile::tempdir().unwrap();
    assert!(pull(&server, dir.path(), REPO).is_ok());
    let dir = tempfile::tempdir().unwrap();
    server.add_faulty("m-Q8_0.gguf", &file, &[busy(9)]);
    let error = pull(&server, dir.path(), REPO).unwrap_err().to_string();
    assert!(
        error.contains("at 0 of 1000 bytes (the server answers 503"),
        "{error}"
    );
}

#[test]
fn refusals_suggest_what_to_do() {
    let server = HubServer::start(REPO);
    let endpoint = server.endpoint.clone();
    let dir = tempfile::tempdir().unwrap();
    let error = |name: &str| pull(&server, dir.path(), name).unwrap_err().to_string();
    server.add_faulty("m-Q8_0.gguf", &bytes(1000), &[Fault::Gated]);
    assert_eq!(
        error(REPO),
        format!(
            "'{REPO}' is gated: accept its terms at {endpoint}/{REPO}, then set HF_TOKEN to a token \
             of that account"
        )
    );
    assert_eq!(
        error("owner/absent"),
        format!(
            "{endpoint} has no model repository 'owner/absent', or it is private; check the name; \
             for a private one, set HF_TOKEN"
        )
    );
    assert_eq!(
        error("owner/tiny-GGUF:q2_k"),
        format!("'{REPO}' has no model 'q2_k'; it has Q8_0 (1000 bytes)")
    );
    server.add_faulty("m-Q8_0.gguf", &bytes(1000), &[Fault::RedirectLoop]);
    assert!(error(REPO).ends_with("redirected more than 10 times"));
    server.add_faulty("m-Q8_0.gguf", &bytes(1000), &[Fault::NoETag]);
    assert!(error(REPO).ends_with("the answer has no usable ETag"));
    server.fail_with(429);
    assert!(error(REPO).ends_with("the server answers 429, too many requests; try again in 7 s"));
    server.fail_with(503);
    assert!(error(REPO).ends_with("the server answers 503; try again later, the fault is there"));
    server.answer_with_page("<!doctype html><title>Log in</title>");
    assert!(error(REPO).contains("a web page came where the hub lists files; check HF_ENDPOINT"));
    let empty = HubServer::start(REPO);
    empty.add("pytorch_model.bin", b"x");
    assert_eq!(
        pull(&empty, dir.path(), REPO).unwrap_err().to_string(),
        format!("'{REPO}' has neither GGUF nor safetensors files; it has pytorch_model.bin")
    );
}

#[test]
fn the_token_goes_to_the_hub_and_not_to_the_content_server() {
    let server = HubServer::start(REPO);
    server
        .add("m-Q8_0.gguf", &bytes(1000))
        .require_token("hf_secret");
    let dir = tempfile::tempdir().unwrap();
    assert!(pull(&server, dir.path(), REPO).is_err());
    server.requests();
    let with_token = HubConfig::from_variables(|name| match name {
        "HF_TOKEN" => Some("hf_secret".into()),
        "HF_ENDPOINT" => Some((&server.endpoint).into()),
        "HF_HUB_CACHE" => Some(dir.path().into()),
        _ => None,
    });
    let hub = Hub::new(with_token.unwrap());
    hub.pull(&REPO.parse().unwrap(), &mut |_| ()).unwrap();
    let requests = server.requests();
    assert!(requests.iter().any(|request| request.is_content));
    for request in requests {
        let has_token = request.headers.contains_key("authorization");
        assert_eq!(has_token, !request.is_content, "{request:?}");
    }
}

#[test]
fn offline_mode_and_a_dead_server_are_reported() {
    let server = HubServer::start(REPO);
    let dir = tempfile::tempdir().unwrap();
    let offline = HubConfig {
        access: Access::Offline("HF_HUB_OFFLINE"),
        ..config(&server, dir.path())
    };
    let error = Hub::new(offline).pull(&REPO.parse().unwrap(), &mut |_| ());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("HF_HUB_OFFLINE is set, which is offline mode"),
        "{error}"
    );
    assert!(server.requests().is_empty());
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = dead.local_addr().unwrap().port();
    drop(dead);
    let nowhere = HubConfig {
        endpoint: format!("http://127.0.0.1:{port}"),
        ..config(&server, dir.path())
    };
    let error = Hub::new(nowhere).pull(&REPO.parse().unwrap(), &mut |_| ());
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("cannot reach http://127.0.0.1:{port}: ")),
        "{error}"
    );
    assert!(error.contains("without a network"), "{error}");
}

#[test]
fn a_model_larger_than_the_disk_is_refused_before_it_is_downloaded() {
    let server = HubServer::start(REPO);
    server
        .add("m-Q8_0.gguf", &bytes(1000))
        .pretend_size("m-Q8_0.gguf", 1 << 60);
    let dir = tempfile::tempdir().unwrap();
    let error = pull(&server, dir.path(), REPO).unwrap_err();
    let HubError::DiskFull {
        n_needed, n_free, ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!(n_needed, 1 << 60);
    assert!(n_free > 0 && n_free < n_needed);
    assert!(ranges(&server).is_empty());
}

#[test]
fn two_pulls_at_once_download_the_file_once() {
    let server = HubServer::start(REPO);
    let file = bytes(3_000_000);
    server.add("m-Q8_0.gguf", &file);
    let dir = tempfile::tempdir().unwrap();
    let pulls: Vec<PulledModel> = std::thread::scope(|scope| {
        let run = || pull(&server, dir.path(), REPO).unwrap();
        let both = [scope.spawn(run), scope.spawn(run)];
        both.map(|thread| thread.join().unwrap()).to_vec()
    });
    assert_eq!(fs::read(&pulls[0].path).unwrap(), file);
    assert_eq!(pulls[0].path, pulls[1].path);
    assert_eq!(ranges(&server), [""]);
}

#[test]
fn a_locked_file_is_waited_for_and_not_removed() {
    let server = HubServer::start(REPO);
    let file = bytes(1000);
    server.add("m-Q8_0.gguf", &file);
    let dir = tempfile::tempdir().unwrap();
    let locks = dir.path().join(".locks/models--owner--tiny-GGUF");
    fs::create_dir_all(&locks).unwrap();
    fs::create_dir_all(dir.path().join("models--owner--tiny-GGUF/blobs")).unwrap();
    let lock = fs::File::create(locks.join(format!("{}.lock", sha256(&file)))).unwrap();
    lock.lock().unwrap();
    let hub = Hub::new(config(&server, dir.path()));
    let name = REPO.parse().unwrap();
    let refused = hub.cache().remove(&name);
    assert!(
        matches!(refused, Err(HubError::InUse { .. })),
        "{refused:?}"
    );
    let mut lock = Some(lock);
    let mut waited = String::new();
    hub.pull(&name, &mut |event| {
        if let Event::Waiting { file } = event {
            waited = file.to_owned();
            // The other process is done.
            lock = None;
        }
    })
    .unwrap();
    assert_eq!(waited, "m-Q8_0.gguf");
}

#[test]
fn models_are_listed_and_removed() {
    let server = HubServer::start(REPO);
    let shared = bytes(5000);
    server
        .add("m-Q4_0.gguf", &shared)
        .add("m-Q8_0.gguf", &bytes(1000))
        .add("copy-F16.gguf", &shared);
    let dir = tempfile::tempdir().unwrap();
    for quant in ["Q4_0", "Q8_0", "F16"] {
        pull(&server, dir.path(), &format!("{REPO}:{quant}")).unwrap();
    }
    // Of other tools, and of an interrupted download.
    fs::create_dir_all(dir.path().join("datasets--a--b/snapshots")).unwrap();
    fs::write(part(dir.path(), b"other"), [0; 77]).unwrap();
    let hub = Hub::new(config(&server, dir.path()));
    let cache = hub.cache();
    let list = |cache: &cellar_hub::Cache| {
        let models = cache.models().into_iter();
        models
            .map(|m| format!("{} {}", m.name, m.n_bytes))
            .collect::<Vec<_>>()
    };
    let name = |quant: &str| format!("{REPO}:{quant}");
    let wanted = ["F16 5000", "Q4_0 5000", "Q8_0 1000"].map(name);
    assert_eq!(list(cache), wanted);
    assert_eq!(cache.n_incomplete_bytes(), 77);

    // The blob is also the other file's.
    let removed = cache.remove(&name("q4_0").parse().unwrap()).unwrap();
    assert_eq!((removed.n_files, removed.n_bytes), (0, 0));
    let removed = cache.remove(&name("f16").parse().unwrap()).unwrap();
    assert_eq!((removed.n_files, removed.n_bytes), (1, 5000));
    assert_eq!(list(cache), [name("Q8_0 1000")]);
    let absent = cache.remove(&name("Q4_0").parse().unwrap());
    assert!(matches!(absent, Err(HubError::NotCached { .. })));
    let removed = cache.remove(&REPO.parse().unwrap()).unwrap();
    assert_eq!((removed.n_files, removed.n_bytes), (2, 1077));
    assert!(!dir.path().join("models--owner--tiny-GGUF").exists());
    assert!(dir.path().join("datasets--a--b").exists());
    assert!(cache.remove(&REPO.parse().unwrap()).is_err());
}

#[cfg(unix)]
#[test]
fn a_removal_stays_within_the_cache() {
    let server = HubServer::start(REPO);
    server.add("m-Q8_0.gguf", &bytes(1000));
    let dir = tempfile::tempdir().unwrap();
    let pulled = pull(&server, dir.path(), REPO).unwrap();
    // A file that a link leads to, outside of the cache.
    let elsewhere = tempfile::tempdir().unwrap();
    let mine = elsewhere.path().join("mine.gguf");
    fs::write(&mine, "mine").unwrap();
    let link = pulled.path.with_file_name("mine-F16.gguf");
    std::os::unix::fs::symlink(&mine, &link).unwrap();
    let hub = Hub::new(config(&server, dir.path()));
    hub.cache()
        .remove(&format!("{REPO}:F16").parse().unwrap())
        .unwrap();
    assert!(!link.exists() && mine.exists());
    assert!(pulled.path.exists());
}

#[test]
fn a_server_that_falls_silent_is_asked_again() {
    let server = HubServer::start(REPO);
    let file = bytes(5000);
    server.add_faulty("m-Q8_0.gguf", &file, &[Fault::Stall { n_bytes: 3000 }]);
    let dir = tempfile::tempdir().unwrap();
    let config = HubConfig {
        read_timeout: Duration::from_millis(200),
        ..config(&server, dir.path())
    };
    let pulled = Hub::new(config).pull(&REPO.parse().unwrap(), &mut |_| ());
    assert_eq!(fs::read(pulled.unwrap().path).unwrap(), file);
    assert_eq!(ranges(&server), ["", "bytes=3000-"]);
}
