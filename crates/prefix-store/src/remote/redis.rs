//! [`RedisStore`]: groups in a Redis, which evicts by its own policy
//! (`maxmemory-policy allkeys-lru`).

use std::fmt;
use std::sync::Arc;

use redis::{Client, Connection, RedisError, cmd};
use url::Url;

use super::{CONNECT_TIME, SILENCE, refused};
use crate::error::StoreError;
use crate::key::GroupName;
use crate::store::{GroupStore, Kept};

/// What the names of keys begin with.
const PREFIX: &str = "cellar:";

/// The most bytes of a value: Redis closes the connection beyond (`proto-max-bulk-len`).
const MAX_VALUE: u64 = 512 << 20;

/// One connection, which is made again where it broke.
pub(super) struct RedisStore {
    client: Client,
    connection: Option<Connection>,
}

impl RedisStore {
    pub(super) fn new(url: &Url) -> Result<Self, StoreError> {
        let client = Client::open(url.as_str());
        Ok(Self {
            client: client.map_err(|error| refused(url.as_str(), error.to_string()))?,
            connection: None,
        })
    }

    fn run<T>(
        &mut self,
        ask: impl FnOnce(&mut Connection) -> Result<T, RedisError>,
    ) -> Result<T, StoreError> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => connect(&self.client).map_err(|error| failure(&error))?,
        };
        let answer = ask(&mut connection);
        match &answer {
            // What is left of an answer would be taken for that of the next question.
            Err(error) if error.is_io_error() || error.is_unrecoverable_error() => {}
            _ => self.connection = Some(connection),
        }
        answer.map_err(|error| failure(&error))
    }
}

fn connect(client: &Client) -> Result<Connection, RedisError> {
    let connection = client.get_connection_with_timeout(CONNECT_TIME)?;
    connection.set_read_timeout(Some(SILENCE))?;
    connection.set_write_timeout(Some(SILENCE))?;
    Ok(connection)
}

fn failure(error: &RedisError) -> StoreError {
    if error.code() == Some("OOM") {
        StoreError::Full
    } else if error.is_timeout() {
        StoreError::TimedOut
    } else {
        let reason = error.to_string();
        StoreError::Unreachable { reason }
    }
}

fn key(name: &GroupName) -> String {
    format!("{PREFIX}{name}")
}

impl GroupStore for RedisStore {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        self.run(|connection| {
            let mut all = redis::pipe();
            for name in names {
                all.cmd("EXISTS").arg(key(name));
            }
            all.query(connection)
        })
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        let keys: Vec<String> = names.iter().map(key).collect();
        let values: Vec<Option<Vec<u8>>> =
            self.run(|connection| cmd("MGET").arg(keys).query(connection))?;
        Ok(values
            .into_iter()
            .map(|value| value.map(Arc::from))
            .collect())
    }

    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        let n_bytes = frame.len() as u64;
        if n_bytes > MAX_VALUE {
            let max = MAX_VALUE;
            return Err(StoreError::TooLarge { n_bytes, max });
        }
        let is_there: bool =
            self.run(|connection| cmd("EXISTS").arg(key(&name)).query(connection))?;
        if is_there {
            return Ok(Kept::Known);
        }
        self.run(|connection| {
            let mut set = cmd("SET");
            set.arg(key(&name)).arg(&frame[..]).exec(connection)
        })?;
        Ok(Kept::New)
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        self.run(|connection| cmd("DEL").arg(key(&name)).exec(connection))
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_connected = self.connection.is_some();
        f.debug_struct("RedisStore")
            .field("is_connected", &is_connected)
            .finish_non_exhaustive()
    }
}
