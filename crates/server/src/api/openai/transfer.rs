//! `kv_transfer_params`: one server computes a prompt and another one goes on with it, through the
//! store of prefixes that they share. The field has the shape of vLLM's, as routers send it.
//!
//! Invariant: a text is the same with the field and without. Where the prompt is cannot be told
//! wrongly, as the other server finds it by its tokens alone.

use cellar_engine::serve::PrefixUse;
use kv_core::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::auth::Tenant;
use crate::body_worker::run_blocking;
use crate::error::ApiError;
use crate::generate::GenerateRequest;
use crate::json::Body;
use crate::models::ModelInUse;

/// The name of the field.
const FIELD: &str = "kv_transfer_params";

/// The members that count here. Those that name blocks of a server's memory do not.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct TransferParams {
    /// Another server goes on with the prompt.
    do_remote_decode: Option<bool>,
    /// Another server has computed it.
    do_remote_prefill: Option<bool>,
}

/// A request that was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadRequest<'a> {
    pub(super) body: &'a Body,
    /// Its prompts, one each.
    pub(super) requests: &'a [GenerateRequest],
    pub(super) stream: Option<bool>,
    pub(super) transfer: Option<TransferParams>,
}

/// Prompts that another server goes on with.
#[derive(Debug)]
pub(super) struct Handover {
    prompts: Vec<Vec<TokenId>>,
    prefix: PrefixUse,
}

impl Handover {
    /// The prompts of a request, where another server goes on with them.
    ///
    /// # Errors
    /// [`ApiError`] 400 where the field is wrong, the answer is streamed, or there is no store.
    pub(super) async fn of(
        app: &App,
        model: &ModelInUse,
        tenant: Tenant,
        read: ReadRequest<'_>,
    ) -> Result<Option<Self>, ApiError> {
        let (Some(params), Some(first)) = (read.transfer, read.requests.first()) else {
            return Ok(None);
        };
        let prefix = PrefixUse::Within(tenant.salt(first.cache_salt.as_deref()));
        let has_store = store(model, prefix, Vec::new()).await?.is_some();
        if params.do_remote_prefill == Some(true) && !has_store {
            let why = "there is no store of prefixes that another server could have written to \
                       (--tier, --cache-dir): the prompt is computed here";
            read.body.skips().skip(FIELD, why)?;
        }
        if params.do_remote_decode != Some(true) {
            return Ok(None);
        }
        if !has_store {
            let message = "'do_remote_decode' needs a store of prefixes that the other server has, too: start \
                           both with --tier, or with the same --cache-dir";
            return Err(ApiError::unsupported(FIELD, message));
        }
        if read.stream == Some(true) {
            let message = "the answer to 'do_remote_decode' says what is stored, and is not streamed: leave \
                           out 'stream'";
            return Err(ApiError::invalid_param(FIELD, message));
        }
        let mut prompts = Vec::with_capacity(read.requests.len());
        for request in read.requests {
            let prompt = request.prompt.clone();
            prompts.push(app.prompt_tokens(model, prompt, request.max_tokens).await?);
        }
        Ok(Some(Self { prompts, prefix }))
    }

    /// Waits until the prompts are stored. Returns the field for the request to the other server.
    ///
    /// # Errors
    /// [`ApiError`] 503 where the server ends.
    pub(super) async fn finish(self, model: &ModelInUse) -> Result<Value, ApiError> {
        let mut n_tokens = 0;
        for prompt in self.prompts {
            n_tokens += store(model, self.prefix, prompt).await?.unwrap_or(0);
        }
        Ok(json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_engine_id": "cellar",
            "remote_block_ids": [],
            "remote_host": null,
            "remote_port": null,
            "remote_num_tokens": n_tokens,
        }))
    }
}

/// Puts what is cached of a prompt into the store; `None` where there is none.
async fn store(
    model: &ModelInUse,
    prefix: PrefixUse,
    prompt: Vec<TokenId>,
) -> Result<Option<usize>, ApiError> {
    let model = model.shared();
    run_blocking(move || Ok(model.service()?.store_prompt(prefix, prompt)?)).await?
}
