//! [`ModelQuery`]: the query of an address, `?model=NAME`.
//!
//! Invariant: names other than `model` are passed over; a name that is given twice is refused.

use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use serde::Deserialize;

use crate::error::ApiError;

/// The model that an address names.
#[derive(Debug, Default, Deserialize, PartialEq, Eq)]
pub(crate) struct ModelQuery {
    /// Its name.
    pub(crate) model: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for ModelQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = Query::<Self>::from_request_parts(parts, state).await;
        let query = query.map_err(|error| ApiError::invalid(error.body_text()))?;
        Ok(query.0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use axum::http::Uri;

    use super::*;

    #[test]
    fn values_are_decoded() {
        let model = |uri: &'static str| {
            let query = Query::<ModelQuery>::try_from_uri(&Uri::from_static(uri));
            query.map(|query| query.0.model)
        };
        let named = model("/props?a=1&model=a%2Fb%3Aq4+k&bad=%f").unwrap();
        assert_eq!(named.as_deref(), Some("a/b:q4 k"));
        assert_eq!(model("/props").unwrap(), None);
        assert_eq!(model("/props?other=1").unwrap(), None);
        let twice = model("/props?model=a&model=b").unwrap_err().body_text();
        assert!(twice.contains("duplicate field `model`"), "{twice}");
    }
}
