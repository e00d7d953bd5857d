//! A server on this machine that behaves like the hub: listings, redirects to a content server on
//! another port, ranges, and the faults that a test asks for. No test needs the internet.

// Each test file uses a part of this, and a panic is how a test fails.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

/// The commit of the repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A fault of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Ends the body after so many bytes, this many times.
    Truncate { n_bytes: usize, n_times: usize },
    /// Sends the whole file, whatever range is asked for.
    IgnoreRange,
    /// Sends other bytes than those of the hash.
    Corrupt,
    /// Sends more bytes than it said.
    TooLong,
    /// Answers with this code, this many times.
    Status { status: u16, n_times: usize },
    /// Wants the terms to be accepted.
    Gated,
    /// Redirects to itself for ever.
    RedirectLoop,
    /// Sends so many bytes of the body, and then none for a minute.
    Stall { n_bytes: usize },
    /// Leaves the hash out.
    NoETag,
}

/// A file of the repository.
#[derive(Clone, Debug)]
pub struct ServedFile {
    pub path: String,
    pub bytes: Vec<u8>,
    pub faults: Vec<Fault>,
    /// The size that is claimed, where it is not that of the bytes.
    pub claimed: Option<u64>,
}

impl ServedFile {
    fn n_bytes(&self) -> u64 {
        self.claimed.unwrap_or(self.bytes.len() as u64)
    }
}

/// A request that was made.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    /// True if the content server got it.
    pub is_content: bool,
}

#[derive(Default)]
struct State {
    repo: String,
    files: Vec<ServedFile>,
    requests: Vec<Request>,
    content: String,
    /// The only token that may read it.
    token: Option<String>,
    /// The code that everything is answered with.
    status: Option<u16>,
    /// The page that everything is answered with.
    page: Option<String>,
}

/// One of the two servers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Hub,
    Content,
}

/// Both directions of a connection.
pub trait Connection: Read + Write {}

impl<C: Read + Write> Connection for C {}

/// A hub with one repository.
#[derive(Clone)]
pub struct HubServer {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl HubServer {
    /// Starts it; it ends with the process.
    pub fn start(repo: &str) -> Self {
        Self::start_over("http://127.0.0.1", repo, |stream| Some(Box::new(stream)))
    }

    /// Starts it with another scheme and name of this machine.
    pub fn start_over(
        origin: &str,
        repo: &str,
        accept: impl Fn(TcpStream) -> Option<Box<dyn Connection>> + Send + Sync + 'static,
    ) -> Self {
        let accept = Arc::new(accept);
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let content = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = |listener: &TcpListener| {
            let port = listener.local_addr().unwrap().port();
            format!("{origin}:{port}")
        };
        let state = Arc::new(Mutex::new(State {
            repo: repo.to_owned(),
            content: address(&content),
            ..State::default()
        }));
        let endpoint = address(&hub);
        for (listener, role) in [(hub, Role::Hub), (content, Role::Content)] {
            let (state, accept) = (Arc::clone(&state), Arc::clone(&accept));
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let (state, accept) = (Arc::clone(&state), Arc::clone(&accept));
                    thread::spawn(move || {
                        if let Some(connection) = accept(stream.unwrap()) {
                            answer(connection, &state, role);
                        }
                    });
                }
            });
        }
        Self { endpoint, state }
    }

    pub fn add(&self, path: &str, bytes: &[u8]) -> &Self {
        self.add_faulty(path, bytes, &[])
    }

    /// Adds or replaces a file.
    pub fn add_faulty(&self, path: &str, bytes: &[u8], faults: &[Fault]) -> &Self {
        let mut state = self.state.lock().unwrap();
        state.files.retain(|file| file.path != path);
        state.files.push(ServedFile {
            path: path.to_owned(),
            bytes: bytes.to_vec(),
            faults: faults.to_vec(),
            claimed: None,
        });
        self
    }

    /// Claims another size of a file.
    pub fn pretend_size(&self, path: &str, n_bytes: u64) -> &Self {
        let mut state = self.state.lock().unwrap();
        let mut files = state.files.iter_mut();
        files.find(|file| file.path == path).unwrap().claimed = Some(n_bytes);
        drop(state);
        self
    }

    /// Serves no one without this token.
    pub fn require_token(&self, token: &str) -> &Self {
        self.state.lock().unwrap().token = Some(token.to_owned());
        self
    }

    /// Answers everything with this code.
    pub fn fail_with(&self, status: u16) -> &Self {
        self.state.lock().unwrap().status = Some(status);
        self
    }

    /// Answers everything with this page, as a proxy does that wants a login.
    pub fn answer_with_page(&self, page: &str) -> &Self {
        self.state.lock().unwrap().page = Some(page.to_owned());
        self
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
}

fn answer(stream: Box<dyn Connection>, state: &Mutex<State>, role: Role) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let mut words = line.split(' ');
    let (Some(method), Some(path)) = (words.next(), words.next()) else {
        return;
    };
    let mut request = Request {
        method: method.to_owned(),
        path: path.to_owned(),
        headers: HashMap::new(),
        is_content: role == Role::Content,
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim().split_once(':') else {
            break;
        };
        let name = name.to_ascii_lowercase();
        request.headers.insert(name, value.trim().to_owned());
    }
    let mut response = {
        let mut state = state.lock().unwrap();
        state.requests.push(request.clone());
        respond(&mut state, &request)
    };
    if request.method == "HEAD" {
        response.body.clear();
    }
    // A client that has seen enough hangs up.
    let _ = response.send(&mut **reader.get_mut());
}

struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// The time that the connection stays open after the body.
    stays: Duration,
}

impl Answer {
    fn status(status: u16) -> Self {
        Self::new(status, Vec::new())
    }

    fn new(status: u16, body: Vec<u8>) -> Self {
        let length = ("content-length".to_owned(), body.len().to_string());
        Self {
            status,
            headers: vec![length],
            body,
            stays: Duration::ZERO,
        }
    }

    fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.retain(|(n, _)| n != name);
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    fn send(&self, stream: &mut dyn Connection) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Text\r\nconnection: close\r\n", self.status);
        for (name, value) in &self.headers {
            write!(head, "{name}: {value}\r\n").unwrap();
        }
        stream.write_all(head.as_bytes())?;
        stream.write_all(b"\r\n")?;
        stream.write_all(&self.body)?;
        stream.flush()?;
        thread::sleep(self.stays);
        Ok(())
    }
}

fn respond(state: &mut State, request: &Request) -> Answer {
    if let Some(page) = &state.page {
        return Answer::new(200, page.as_bytes().to_vec());
    }
    if let Some(status) = state.status {
        return Answer::status(status).with("retry-after", "7");
    }
    if request.is_content {
        return content(state, request);
    }
    if let Some(token) = &state.token
        && request.headers.get("authorization") != Some(&format!("Bearer {token}"))
    {
        return Answer::status(401).with("x-error-code", "RepoNotFound");
    }
    let repo = state.repo.clone();
    if request.path == format!("/api/models/{repo}/revision/main?blobs=true") {
        return listing(state);
    }
    let Some(path) = request
        .path
        .strip_prefix(&format!("/{repo}/resolve/{COMMIT}/"))
    else {
        return Answer::status(404).with("x-error-code", "RepoNotFound");
    };
    let address = format!("{}/{path}?signature=x", state.content);
    let Some(file) = state.files.iter().find(|file| file.path == unescape(path)) else {
        return Answer::status(404).with("x-error-code", "EntryNotFound");
    };
    if file.faults.contains(&Fault::Gated) {
        return Answer::status(401).with("x-error-code", "GatedRepo");
    }
    if file.faults.contains(&Fault::RedirectLoop) {
        return Answer::status(307).with("location", &*request.path);
    }
    // Small files are sent by the hub itself.
    if file.bytes.len() < 64 {
        let etag = format!("W/\"{}\"", git_blob(&file.bytes));
        return Answer::new(200, file.bytes.clone())
            .with("etag", etag)
            .with("x-repo-commit", COMMIT);
    }
    let redirect = Answer::status(302)
        .with("location", address)
        .with("x-repo-commit", COMMIT)
        .with("x-linked-size", file.n_bytes().to_string());
    if file.faults.contains(&Fault::NoETag) {
        redirect
    } else {
        redirect.with("x-linked-etag", format!("\"{}\"", sha256(&file.bytes)))
    }
}

fn listing(state: &State) -> Answer {
    let file = |file: &ServedFile| {
        format!(
            r#"{{"rfilename": "{}", "size": {}}}"#,
            file.path,
            file.n_bytes()
        )
    };
    let files: Vec<String> = state.files.iter().map(file).collect();
    let (repo, files) = (&state.repo, files.join(", "));
    let json = format!(r#"{{"id": "{repo}", "sha": "{COMMIT}", "siblings": [{files}]}}"#);
    Answer::new(200, json.into_bytes())
}

/// The content server's answer.
fn content(state: &mut State, request: &Request) -> Answer {
    assert!(
        !request.headers.contains_key("authorization"),
        "the token was sent elsewhere"
    );
    let path = request.path.trim_start_matches('/');
    let path = unescape(path.split('?').next().unwrap());
    let file = state.files.iter_mut().find(|file| file.path == path);
    let file = file.unwrap();
    let mut bytes = file.bytes.clone();
    let mut ignores_range = false;
    let mut n_sent = usize::MAX;
    let mut stays = Duration::ZERO;
    for fault in &mut file.faults {
        match fault {
            Fault::IgnoreRange => ignores_range = true,
            Fault::Corrupt => bytes[0] ^= 1,
            Fault::Stall { n_bytes } => {
                n_sent = *n_bytes;
                stays = Duration::from_secs(60);
            }
            Fault::TooLong => bytes.extend([0; 100]),
            Fault::Truncate { n_bytes, n_times } if *n_times > 0 => {
                *n_times -= 1;
                n_sent = *n_bytes;
            }
            Fault::Status { status, n_times } if *n_times > 0 => {
                *n_times -= 1;
                return Answer::status(*status);
            }
            _ => {}
        }
    }
    let range = request.headers.get("range").filter(|_| !ignores_range);
    let first = range.map(|range| {
        let range = range.strip_prefix("bytes=").unwrap();
        range.strip_suffix('-').unwrap().parse::<usize>().unwrap()
    });
    let mut answer = match first {
        Some(first) if first >= bytes.len() => return Answer::status(416),
        Some(first) => {
            let n = bytes.len();
            Answer::new(206, bytes[first..].to_vec())
                .with("content-range", format!("bytes {first}-{}/{n}", n - 1))
        }
        None => Answer::new(200, bytes),
    };
    answer.body.truncate(n_sent);
    answer.stays = stays;
    answer
}

/// The hash of small files: here only its length matters, and `git hash-object` is checked
/// elsewhere.
fn git_blob(bytes: &[u8]) -> String {
    use sha1::{Digest, Sha1};
    let mut hash = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hash.finalize()
        .iter()
        .fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
}

fn unescape(path: &str) -> String {
    percent_encoding::percent_decode_str(path)
        .decode_utf8()
        .unwrap()
        .into_owned()
}
