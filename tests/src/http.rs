//! A plain HTTP client: what a test sends is what is on the wire, and a connection can be cut
//! anywhere.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// The time that a test waits for bytes.
const PATIENCE: Duration = Duration::from_secs(120);

/// An answer whose head has come.
#[derive(Debug)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Its headers, with names in lower case.
    pub headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
}

/// A whole answer.
#[derive(Debug)]
pub struct Response {
    /// Its status.
    pub status: u16,
    /// Its headers, with names in lower case.
    pub headers: Vec<(String, String)>,
    /// Its body, without the marks of chunks.
    pub body: String,
    /// True if it ended as HTTP demands.
    pub is_complete: bool,
}

impl Response {
    /// The body as JSON.
    ///
    /// # Panics
    /// If it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    /// The data of server-sent events.
    pub fn events(&self) -> Vec<String> {
        let lines = self.body.lines();
        let data = lines.filter_map(|line| line.strip_prefix("data: "));
        data.map(str::to_owned).collect()
    }

    /// The events that are JSON.
    pub fn json_events(&self) -> Vec<Value> {
        let events = self.events();
        let json = events.iter().filter(|data| *data != "[DONE]");
        json.map(|data| serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}")))
            .collect()
    }
}

fn find<'h>(headers: &'h [(String, String)], name: &str) -> Option<&'h str> {
    let found = headers.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_str())
}

/// Sends bytes as they are.
///
/// # Errors
/// If the connection cannot be made.
pub fn send_raw(address: SocketAddr, bytes: &[u8]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    stream.write_all(bytes)?;
    Ok(stream)
}

/// The head and body of a request, after whose answer the connection is closed.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    if !headers
        .iter()
        .any(|(name, _)| name.eq_ignore_ascii_case("host"))
    {
        text += "Host: localhost\r\n";
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    text + &format!("Content-Length: {}\r\n\r\n{body}", body.len())
}

/// Sends a request and reads the head of the answer.
///
/// # Panics
/// If there is no answer.
pub fn open(address: SocketAddr, request: &str) -> Reply {
    let stream = send_raw(address, request.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
    let mut reader = BufReader::new(stream);
    let mut line = || {
        let mut line = String::new();
        match reader.read_line(&mut line) {
            Ok(_) => line.trim_end().to_owned(),
            Err(error) => panic!("no answer: {error}"),
        }
    };
    let first = line();
    let status = first
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status: '{first}'"));
    let mut headers = Vec::new();
    loop {
        let line = line();
        match line.split_once(": ") {
            Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
            None => break,
        }
    }
    Reply {
        status,
        headers,
        reader,
    }
}

impl Reply {
    /// The next chunk of the body; `None` at its end.
    ///
    /// # Errors
    /// If the connection is cut.
    pub fn next_chunk(&mut self) -> io::Result<Option<String>> {
        let cut = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut size = String::new();
        self.reader.read_line(&mut size)?;
        let n = usize::from_str_radix(size.trim_end(), 16).map_err(|_| cut())?;
        let mut chunk = vec![0; n + 2];
        self.reader.read_exact(&mut chunk)?;
        chunk.truncate(n);
        match n {
            0 => Ok(None),
            _ => String::from_utf8(chunk).map(Some).map_err(io::Error::other),
        }
    }

    /// Reads the rest.
    pub fn finish(mut self) -> Response {
        let mut body = String::new();
        let is_complete = match find(&self.headers, "content-length") {
            Some(length) => {
                let mut bytes = vec![0; length.parse().unwrap_or(0)];
                let is_complete = self.reader.read_exact(&mut bytes).is_ok();
                body = String::from_utf8_lossy(&bytes).into_owned();
                is_complete
            }
            None => loop {
                match self.next_chunk() {
                    Ok(Some(chunk)) => body += &chunk,
                    Ok(None) => break true,
                    Err(_) => break false,
                }
            },
        };
        Response {
            status: self.status,
            headers: self.headers,
            body,
            is_complete,
        }
    }
}

/// Sends a request and reads the whole answer.
///
/// # Panics
/// As [`open`].
pub fn get(address: SocketAddr, path: &str) -> Response {
    open(address, &request("GET", path, &[], "")).finish()
}

/// Sends JSON and reads the whole answer.
///
/// # Panics
/// As [`open`].
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    open(address, &request("POST", path, &[], &body.to_string())).finish()
}
