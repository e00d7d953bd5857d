//! [`S3Store`]: groups as objects of an S3 bucket, whose lifecycle rules remove old ones.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use ureq::Agent;
use ureq::http::StatusCode;
use url::Url;

use super::{CONNECT_TIME, SILENCE, parameter, refused};
use crate::error::StoreError;
use crate::frame::MAX_FRAME;
use crate::key::GroupName;
use crate::store::{GroupStore, Kept};

/// How long a signed request may be used.
const SIGNED_FOR: Duration = Duration::from_secs(300);

/// Objects under one prefix of a bucket.
pub(super) struct S3Store {
    agent: Agent,
    bucket: Bucket,
    credentials: Option<Credentials>,
    prefix: String,
}

impl S3Store {
    pub(super) fn new(url: &Url) -> Result<Self, StoreError> {
        let wrong = |reason: String| refused(url.as_str(), reason);
        let name = url.host_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| wrong("it names no bucket: s3://BUCKET".to_owned()))?;
        let from = |parameter_name, variable: &str| {
            parameter(url, parameter_name).or_else(|| std::env::var(variable).ok())
        };
        let region = from("region", "AWS_REGION").unwrap_or_else(|| "us-east-1".to_owned());
        let own_endpoint = from("endpoint", "AWS_ENDPOINT_URL");
        // Others than Amazon's have one name for all buckets.
        let style = match own_endpoint {
            Some(_) => UrlStyle::Path,
            None => UrlStyle::VirtualHost,
        };
        let endpoint = own_endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let endpoint = Url::parse(&endpoint)
            .map_err(|error| wrong(format!("the endpoint '{endpoint}': {error}")))?;
        let bucket = Bucket::new(endpoint, style, name.to_owned(), region);
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_connect(Some(CONNECT_TIME))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        Ok(Self {
            agent: agent.into(),
            bucket: bucket.map_err(|error| wrong(error.to_string()))?,
            credentials: Credentials::from_env(),
            prefix: url.path().trim_matches('/').to_owned(),
        })
    }

    fn object(&self, name: &GroupName) -> String {
        match self.prefix.as_str() {
            "" => name.to_string(),
            prefix => format!("{prefix}/{name}"),
        }
    }

    fn has_one(&self, name: &GroupName) -> Result<bool, StoreError> {
        let object = self.object(name);
        let action = self.bucket.head_object(self.credentials.as_ref(), &object);
        let answer = self.agent.head(action.sign(SIGNED_FOR).as_str()).call();
        let status = answer.map_err(|error| failure(&error))?.status();
        match status {
            StatusCode::OK => Ok(true),
            StatusCode::NOT_FOUND => Ok(false),
            other => Err(unexpected("HEAD", other)),
        }
    }

    fn get_one(&self, name: &GroupName) -> Result<Option<Arc<[u8]>>, StoreError> {
        let object = self.object(name);
        let action = self.bucket.get_object(self.credentials.as_ref(), &object);
        let answer = self.agent.get(action.sign(SIGNED_FOR).as_str()).call();
        let answer = answer.map_err(|error| failure(&error))?;
        match answer.status() {
            StatusCode::OK => {
                let body = answer.into_body().into_with_config().limit(MAX_FRAME);
                let bytes = body.read_to_vec().map_err(|error| failure(&error))?;
                Ok(Some(bytes.into()))
            }
            StatusCode::NOT_FOUND => Ok(None),
            other => Err(unexpected("GET", other)),
        }
    }
}

fn failure(error: &ureq::Error) -> StoreError {
    match error {
        ureq::Error::Timeout(_) => StoreError::TimedOut,
        other => StoreError::Unreachable {
            reason: other.to_string(),
        },
    }
}

fn unexpected(method: &str, status: StatusCode) -> StoreError {
    let advice = match status {
        StatusCode::FORBIDDEN => ": check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        _ => "",
    };
    StoreError::Unreachable {
        reason: format!("{method} is answered with {status}{advice}"),
    }
}

impl GroupStore for S3Store {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        names.iter().map(|name| self.has_one(name)).collect()
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        names.iter().map(|name| self.get_one(name)).collect()
    }

    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        if self.has_one(&name)? {
            return Ok(Kept::Known);
        }
        let object = self.object(&name);
        let action = self.bucket.put_object(self.credentials.as_ref(), &object);
        let answer = self
            .agent
            .put(action.sign(SIGNED_FOR).as_str())
            .send(&frame[..]);
        let status = answer.map_err(|error| failure(&error))?.status();
        match status {
            StatusCode::OK => Ok(Kept::New),
            StatusCode::INSUFFICIENT_STORAGE => Err(StoreError::Full),
            other => Err(unexpected("PUT", other)),
        }
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        let object = self.object(&name);
        let action = self
            .bucket
            .delete_object(self.credentials.as_ref(), &object);
        let answer = self.agent.delete(action.sign(SIGNED_FOR).as_str()).call();
        let status = answer.map_err(|error| failure(&error))?.status();
        if status.is_success() || status == StatusCode::NOT_FOUND {
            Ok(())
        } else {
            Err(unexpected("DELETE", status))
        }
    }
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Store")
            .field("bucket", &self.bucket.name())
            .finish_non_exhaustive()
    }
}
