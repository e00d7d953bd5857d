//! Real servers: a `redis-server`, and the S3 of `moto_server`; each is said to be skipped where it
//! is not installed.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cellar_prefix_store::{Job, JobId, Outcome, Tier, TierConfig, remote};

use crate::{LONG, fetch, in_time, key, names_of, store};

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _status = self.0.wait();
    }
}

impl Server {
    /// Starts a program, and waits until it listens; `None` where it is not installed.
    fn start(program: &str, args: &[&str], port: u16) -> Option<Self> {
        let mut command = Command::new(program);
        let command = command
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let Ok(child) = command.spawn() else {
            eprintln!("SKIPPED: {program} is not installed");
            return None;
        };
        let server = Self(child);
        let until = Instant::now() + LONG;
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until, "{program} does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(server)
    }

    #[cfg(unix)]
    fn signal(&self, signal: &str) {
        let process = self.0.id().to_string();
        let sent = Command::new("kill").args([signal, &process]).status();
        assert!(sent.unwrap().success());
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Groups of a text of 5 groups, more than one batch of them, and what comes back.
fn groups_come_back(url: &str) {
    let start = || {
        let stores = remote::open(url, 2).unwrap();
        Tier::start(key(1), stores, TierConfig::default()).unwrap()
    };
    let tokens: Vec<u32> = (0..20 * 256).collect();
    let names = names_of(&key(1), 0, &tokens);
    let payload = |at: usize| vec![at as u8; 70_000 + at];
    let first = start();
    store(&first, &names[..18], payload);
    assert_eq!(first.counts().n_stored, 18, "{:?}", first.counts());
    // Another machine, with a connection of its own.
    let second = start();
    let found = fetch(&second, 1, &names);
    assert_eq!(found.len(), 18);
    assert!(
        found
            .iter()
            .enumerate()
            .all(|(at, found)| *found == payload(at))
    );
    store(&second, &names[..1], payload);
    assert_eq!(second.counts().n_known, 1);
    let names = names.clone();
    let deadline = in_time();
    let id = JobId(2);
    second
        .submit(Job::Probe {
            id,
            names,
            deadline,
        })
        .unwrap();
    let probed = second.next_within(LONG);
    assert!(
        matches!(probed, Some(Outcome::Probed { n_found: 18, .. })),
        "{probed:?}"
    );
    // Another key reads nothing.
    let stores = remote::open(url, 1).unwrap();
    let other = Tier::start(key(2), stores, TierConfig::default()).unwrap();
    assert!(fetch(&other, 3, &names_of(&key(2), 0, &tokens)).is_empty());
    assert!(fetch(&other, 4, &names_of(&key(1), 0, &tokens)).is_empty());
    assert_eq!(other.counts().n_forged, 1);
}

#[cfg(unix)]
#[test]
fn a_redis_keeps_groups_hangs_and_dies() {
    let port = free_port();
    let text = port.to_string();
    let args = [
        "--port",
        &text,
        "--save",
        "",
        "--bind",
        "127.0.0.1",
        "--maxmemory",
        "64mb",
    ];
    let Some(redis) = Server::start("redis-server", &args, port) else {
        return;
    };
    let url = format!("redis://127.0.0.1:{port}");
    groups_come_back(&url);
    let config = TierConfig {
        retry_after: Duration::from_millis(50),
        ..TierConfig::default()
    };
    let tier = Tier::start(key(1), remote::open(&url, 1).unwrap(), config).unwrap();
    let names = names_of(&key(1), 1, &(0..256).collect::<Vec<_>>());
    store(&tier, &names, |_| b"rows".to_vec());
    // It hangs: the read ends by its deadline.
    redis.signal("-STOP");
    let begun = Instant::now();
    let deadline = begun + Duration::from_millis(100);
    let (id, names_) = (JobId(1), names.clone());
    tier.submit(Job::Get {
        id,
        names: names_,
        deadline,
    })
    .unwrap();
    let outcome = tier.next_within(LONG);
    assert!(
        matches!(outcome, Some(Outcome::Failed { .. })),
        "{outcome:?}"
    );
    redis.signal("-CONT");
    // The answer that came late is not taken for the next one.
    while tier.is_down() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(fetch(&tier, 2, &names), [b"rows"]);
    // It dies, and another takes its place, without what the first had.
    drop(redis);
    let (id, deadline, names_) = (JobId(3), in_time(), names.clone());
    tier.submit(Job::Get {
        id,
        names: names_,
        deadline,
    })
    .unwrap();
    let outcome = tier.next_within(LONG);
    assert!(
        matches!(outcome, Some(Outcome::Failed { .. })),
        "{outcome:?}"
    );
    let _redis = Server::start("redis-server", &args, port).unwrap();
    while tier.is_down() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(fetch(&tier, 4, &names).is_empty());
    store(&tier, &names, |_| b"again".to_vec());
    assert_eq!(fetch(&tier, 5, &names), [b"again"]);
}

#[test]
fn an_s3_keeps_groups() {
    let port = free_port();
    let program = std::env::var("CELLAR_MOTO_SERVER").unwrap_or_else(|_| "moto_server".to_owned());
    let Some(_moto) = Server::start(
        &program,
        &["-H", "127.0.0.1", "-p", &port.to_string()],
        port,
    ) else {
        return;
    };
    let made = Command::new("curl")
        .args([
            "-sf",
            "-X",
            "PUT",
            &format!("http://127.0.0.1:{port}/prefixes"),
        ])
        .status();
    assert!(made.unwrap().success());
    groups_come_back(&format!(
        "s3://prefixes/cellar?endpoint=http://127.0.0.1:{port}"
    ));
}
