//! KV events as a router reads them: over ZeroMQ, with a replay of what came before it subscribed.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use cellar_telemetry::kv_events::{HashFormat, KvEvents, publish};
use model_tests::http::post;
use serde_json::json;
use sha2::{Digest, Sha256};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::support::{Server, Setup};

/// What a batch says, of the little that is read here.
fn names(batch: &[u8]) -> BTreeSet<&'static str> {
    ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
        .into_iter()
        .filter(|name| {
            batch
                .windows(name.len())
                .any(|part| part == name.as_bytes())
        })
        .collect()
}

/// An endpoint that nobody has.
fn endpoint() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("tcp://{}", listener.local_addr().unwrap())
}

async fn receive(socket: &mut impl SocketRecv) -> Vec<bytes::Bytes> {
    let received = tokio::time::timeout(Duration::from_secs(60), socket.recv()).await;
    received.unwrap().unwrap().into_vec()
}

#[test]
fn a_router_learns_what_is_cached_and_asks_for_what_it_missed() {
    let (events, replay) = (endpoint(), endpoint());
    let observer = publish(KvEvents {
        endpoint: events.clone(),
        replay: Some(replay.clone()),
        topic: "kv".to_owned(),
        block_size: NonZeroU32::new(4).unwrap(),
        hash_format: HashFormat::Bytes,
        hash_seed: "0".to_owned(),
    });
    let server = Setup::default().start_observed(Some(observer.unwrap()));
    let ask = |prompt: &str| {
        let body = json!({"prompt": prompt, "max_tokens": 4});
        assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    // Before anybody listens.
    let first = "Once upon a time there was a little girl with a big red ball and a dog.";
    ask(first);
    let hashes = hashes_of_prompt(&server, first);
    runtime.block_on(async {
        let mut subscriber = SubSocket::new();
        subscriber.connect(&events).await.unwrap();
        subscriber.subscribe("kv").await.unwrap();
        // A subscription takes effect some time after it is made.
        let mut first = None;
        for n in 0..100 {
            ask(&format!("Tom {n} went to the big park with his dog."));
            let wait = Duration::from_millis(100);
            if let Ok(message) = tokio::time::timeout(wait, subscriber.recv()).await {
                first = Some(message.unwrap().into_vec());
                break;
            }
        }
        let [topic, number, batch] = &first.expect("an event")[..] else {
            panic!("not three frames");
        };
        assert_eq!(topic.as_ref(), b"kv");
        assert!(names(batch).contains("BlockStored"));
        let number = u64::from_be_bytes(number.as_ref().try_into().unwrap());
        assert!(number > 0);

        let mut dealer = DealerSocket::new();
        dealer.connect(&replay).await.unwrap();
        let mut asked = ZmqMessage::from(bytes::Bytes::new());
        asked.push_back(bytes::Bytes::from_static(&[0; 8]));
        dealer.send(asked).await.unwrap();
        let (mut numbers, mut seen) = (Vec::new(), BTreeSet::new());
        let mut found = BTreeSet::<[u8; 32]>::new();
        loop {
            let frames = receive(&mut dealer).await;
            let [empty, topic, number, batch] = &frames[..] else {
                panic!("{frames:?}");
            };
            assert!(empty.is_empty());
            let number = i64::from_be_bytes(number.as_ref().try_into().unwrap());
            if number < 0 {
                assert!(batch.is_empty() && topic.is_empty());
                break;
            }
            assert_eq!(topic.as_ref(), b"kv");
            let is_in = |hash: &&[u8; 32]| batch.windows(32).any(|part| part == hash.as_slice());
            found.extend(hashes.iter().filter(is_in).copied());
            if number == 0 {
                assert_eq!(names(batch), BTreeSet::from(["AllBlocksCleared"]));
            }
            seen.extend(names(batch));
            numbers.push(number as u64);
        }
        assert!(numbers.len() as u64 > number);
        assert!(
            numbers.iter().copied().eq(0..numbers.len() as u64),
            "{numbers:?}"
        );
        assert!(seen.contains("BlockStored"));
        assert!(found.len() == hashes.len() && hashes.len() > 2, "{found:?}");
    });
}

/// The names of a prompt's blocks as a router computes them, from the tokens that the server
/// renders.
fn hashes_of_prompt(server: &Server, prompt: &str) -> Vec<[u8; 32]> {
    let body = json!({ "prompt": prompt });
    let rendered = post(server.address, "/v1/completions/render", &body).json();
    let ids: Vec<u16> = serde_json::from_value(rendered[0]["token_ids"].clone()).unwrap();
    let mut parent: [u8; 32] = Sha256::digest(b"\x610").into();
    let hash = |tokens: &[u16]| {
        let mut cbor = vec![0x83, 0x58, 0x20];
        cbor.extend_from_slice(&parent);
        cbor.push(0x80 | tokens.len() as u8);
        for &token in tokens {
            match token {
                0..24 => cbor.push(token as u8),
                24..256 => cbor.extend([0x18, token as u8]),
                _ => {
                    cbor.push(0x19);
                    cbor.extend(token.to_be_bytes());
                }
            }
        }
        cbor.push(0xf6);
        parent = Sha256::digest(&cbor).into();
        parent
    };
    ids.chunks_exact(4).map(hash).collect()
}

#[test]
fn an_endpoint_that_is_none_is_refused_with_its_name() {
    let wrong = |endpoint: &str| {
        publish(KvEvents {
            endpoint: endpoint.to_owned(),
            replay: None,
            topic: String::new(),
            block_size: NonZeroU32::MIN,
            hash_format: HashFormat::Int,
            hash_seed: String::new(),
        })
    };
    for endpoint in ["localhost", "udp://127.0.0.1:1", "tcp://nowhere.invalid:1"] {
        let error = wrong(endpoint).unwrap_err().to_string();
        assert!(error.contains(endpoint), "{error}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let error = wrong(&format!("tcp://{}", taken.local_addr().unwrap()));
    assert!(error.is_err());
}
