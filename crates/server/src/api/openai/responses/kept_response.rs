//! [`KeptResponse`]: a response on the server's shelves, from its beginning on.
//!
//! Invariant: while it is written, others go on from what there is of it; one that fails, or whose
//! client leaves, is forgotten.

use std::sync::{Arc, MutexGuard};

use serde_json::Value;

use crate::app::App;
use crate::auth::Tenant;
use crate::conversations::{AssistantMessage, Conversation};

/// A response that is kept.
#[derive(Debug)]
pub(super) struct KeptResponse {
    app: App,
    tenant: Tenant,
    written: Arc<Conversation>,
    is_complete: bool,
}

impl KeptResponse {
    /// Keeps a response without output, behind these messages, which have no instructions.
    pub(super) fn begin(app: &App, tenant: Tenant, response: &Value, messages: Vec<Value>) -> Self {
        let kept = Self {
            app: app.clone(),
            tenant,
            written: Arc::new(Conversation::begin(response.clone(), messages)),
            is_complete: false,
        };
        kept.keep(Arc::clone(&kept.written));
        kept
    }

    /// The part of the answer that is written, to add to it.
    pub(super) fn answer(&self) -> MutexGuard<'_, AssistantMessage> {
        self.written.answer()
    }

    /// It is complete. One that was forgotten meanwhile, or had to make room, is not kept again.
    pub(super) fn complete(mut self, response: &Value, answer: AssistantMessage) {
        self.is_complete = true;
        if self
            .app
            .conversations()
            .get(self.id(), self.tenant)
            .is_some()
        {
            let whole = self.written.completed(response.clone(), answer);
            self.keep(Arc::new(whole));
        }
    }

    fn keep(&self, conversation: Arc<Conversation>) {
        let n_bytes = conversation.n_bytes();
        let kept = self.app.conversations();
        kept.keep(self.id(), self.tenant, conversation, n_bytes);
    }

    fn id(&self) -> &str {
        self.written.response["id"].as_str().unwrap_or_default()
    }
}

impl Drop for KeptResponse {
    fn drop(&mut self) {
        if !self.is_complete {
            self.app.conversations().forget(self.id(), self.tenant);
        }
    }
}
