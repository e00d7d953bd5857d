//! [`Skips`]: what a request asks for that is left out, as its text is the same without it.
//!
//! Invariant: what is left out is named, in the log and in the answer, once for each name; a strict
//! server refuses the request instead. Knows no API.

use std::sync::{Arc, Mutex, PoisonError};

use axum::response::Response;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::json;

/// Names in one answer: a request can have as many as its body has room for.
const MAX_NAMED: usize = 64;

/// The treatment of fields on which no text depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SkipPolicy {
    /// Leaves it out, and says so.
    #[default]
    Named,
    /// Refuses the request.
    Refused,
}

/// The fields that are left out of one request. Copies are the same list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Skips {
    policy: SkipPolicy,
    list: Arc<Mutex<Vec<Skip>>>,
}

#[derive(Clone, Debug)]
struct Skip {
    param: String,
    message: String,
}

impl Skips {
    pub(crate) fn new(policy: SkipPolicy) -> Self {
        Self {
            policy,
            list: Arc::default(),
        }
    }

    /// Leaves out what stands at this path of the request, for this reason.
    ///
    /// # Errors
    /// [`ApiError::unsupported`] where the server is strict.
    pub(crate) fn skip(&self, param: &str, why: &str) -> Result<(), ApiError> {
        if self.policy == SkipPolicy::Refused {
            let message = format!("'{param}' is not supported, and this server is strict: {why}");
            return Err(ApiError::unsupported(param, message));
        }
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = list.iter().all(|skip| skip.param != param);
        if is_new && list.len() < MAX_NAMED {
            tracing::warn!(param, why, "a field of a request is skipped");
            list.push(Skip {
                param: param.to_owned(),
                message: format!("'{param}' is skipped: {why}"),
            });
        }
        Ok(())
    }

    /// An answer with this object, which names in `warnings` what was left out.
    pub(crate) fn respond(&self, mut answer: Value) -> Response {
        self.add_to(&mut answer);
        json::respond(&answer)
    }

    /// Adds `warnings` to an object of an answer, where something was left out.
    pub(crate) fn add_to(&self, answer: &mut Value) {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let warnings = list
            .iter()
            .map(|Skip { param, message }| json!({"param": param, "message": message}));
        if let Value::Object(members) = answer
            && !list.is_empty()
        {
            members.insert("warnings".to_owned(), warnings.collect());
        }
    }
}
