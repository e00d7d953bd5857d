//! [`ListQuery`]: which part of a list a client wants, by `limit`, `after`, `order` and `purpose`.
//!
//! Invariant: pages that follow one another by the last id of each have every entry once, as long
//! as none comes or goes. Other names in the query are passed over.

use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::ApiError;

/// The query of a list.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct ListQuery {
    limit: Option<String>,
    after: Option<String>,
    order: Option<String>,
    purpose: Option<String>,
}

/// How many entries a page has.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageLimits {
    usual: usize,
    most: usize,
}

impl PageLimits {
    /// OpenAI's for files.
    pub(super) const FILES: Self = Self {
        usual: 10_000,
        most: 10_000,
    };
    /// OpenAI's for batches.
    pub(super) const BATCHES: Self = Self {
        usual: 20,
        most: 100,
    };
}

impl<S: Send + Sync> FromRequestParts<S> for ListQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = Query::<Self>::from_request_parts(parts, state).await;
        let query = query.map_err(|error| ApiError::invalid(error.body_text()))?;
        Ok(query.0)
    }
}

impl ListQuery {
    /// True if entries of this purpose are wanted.
    pub(super) fn wants(&self, purpose: &str) -> bool {
        self.purpose.as_ref().is_none_or(|wanted| wanted == purpose)
    }

    /// The part of a list, given from the newest entry to the oldest, as OpenAI's object.
    ///
    /// # Errors
    /// [`ApiError`] 400 where a value is none, or no entry is called `after`.
    pub(super) fn page(&self, mut all: Vec<Value>, limits: PageLimits) -> Result<Value, ApiError> {
        let PageLimits { usual, most } = limits;
        let limit = match &self.limit {
            None => usual,
            Some(text) => match text.parse() {
                Ok(n) if (1..=most).contains(&n) => n,
                _ => {
                    let message = format!("'limit' is '{text}': it must be from 1 to {most}");
                    return Err(ApiError::invalid_param("limit", message));
                }
            },
        };
        match self.order.as_deref() {
            None | Some("desc") => {}
            Some("asc") => all.reverse(),
            Some(other) => {
                let message = format!("'order' is '{other}': it must be asc or desc");
                return Err(ApiError::invalid_param("order", message));
            }
        }
        if let Some(after) = &self.after {
            let Some(at) = all.iter().position(|one| one["id"] == **after) else {
                let message = format!("'after' is '{after}': there is no such entry");
                return Err(ApiError::invalid_param("after", message));
            };
            all.drain(..=at);
        }
        let has_more = all.len() > limit;
        all.truncate(limit);
        let id = |one: Option<&Value>| one.map(|one| one["id"].clone());
        Ok(json!({
            "object": "list",
            "first_id": id(all.first()),
            "last_id": id(all.last()),
            "has_more": has_more,
            "data": all,
        }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn page(query: ListQuery) -> Result<Value, ApiError> {
        let all = ["e", "d", "c", "b", "a"].map(|id| json!({"id": id}));
        query.page(all.to_vec(), PageLimits { usual: 2, most: 3 })
    }

    fn ids(page: &Value) -> String {
        let data = page["data"].as_array().unwrap();
        data.iter().map(|one| one["id"].as_str().unwrap()).collect()
    }

    #[test]
    fn pages_follow_one_another() {
        for (order, wanted) in [
            (None, "edcba"),
            (Some("desc"), "edcba"),
            (Some("asc"), "abcde"),
        ] {
            let (mut all, mut after) = (String::new(), None);
            loop {
                let query = ListQuery {
                    after,
                    order: order.map(str::to_owned),
                    ..ListQuery::default()
                };
                let page = page(query).unwrap();
                all.push_str(&ids(&page));
                if page["has_more"] == false {
                    break;
                }
                after = page["last_id"].as_str().map(str::to_owned);
            }
            assert_eq!(all, wanted);
        }
        let last = ListQuery {
            after: Some("a".to_owned()),
            ..ListQuery::default()
        };
        let empty = page(last).unwrap();
        assert_eq!(
            (ids(&empty), &empty["first_id"]),
            (String::new(), &Value::Null)
        );
        let three = ListQuery {
            limit: Some("3".to_owned()),
            ..ListQuery::default()
        };
        assert_eq!(ids(&page(three).unwrap()), "edc");
    }

    #[test]
    fn wrong_values_are_refused_by_their_names() {
        let text = |text: &str| Some(text.to_owned());
        let wrong = [
            (
                "limit",
                ListQuery {
                    limit: text("0"),
                    ..ListQuery::default()
                },
            ),
            (
                "limit",
                ListQuery {
                    limit: text("4"),
                    ..ListQuery::default()
                },
            ),
            (
                "limit",
                ListQuery {
                    limit: text("all"),
                    ..ListQuery::default()
                },
            ),
            (
                "order",
                ListQuery {
                    order: text("up"),
                    ..ListQuery::default()
                },
            ),
            (
                "after",
                ListQuery {
                    after: text("f"),
                    ..ListQuery::default()
                },
            ),
        ];
        for (name, query) in wrong {
            let error = page(query).unwrap_err();
            assert_eq!(
                (error.status.as_u16(), error.param.as_deref()),
                (400, Some(name))
            );
        }
    }
}
