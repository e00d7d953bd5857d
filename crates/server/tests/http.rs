//! The server over real sockets, with the small model that is compiled into the program.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a test fails

#[path = "http/adapters.rs"]
mod adapters;
#[path = "http/anthropic.rs"]
mod anthropic;
#[path = "http/batches.rs"]
mod batches;
#[path = "http/browsers.rs"]
mod browsers;
#[path = "http/call_matrix.rs"]
mod call_matrix;
#[path = "http/calls.rs"]
mod calls;
#[path = "http/clients.rs"]
mod clients;
#[path = "http/constraints.rs"]
mod constraints;
#[path = "http/echo.rs"]
mod echo;
#[path = "http/errors.rs"]
mod errors;
#[path = "http/fields.rs"]
mod fields;
#[path = "http/forks.rs"]
mod forks;
#[path = "http/fuzz.rs"]
mod fuzz;
#[path = "http/gaps.rs"]
mod gaps;
#[path = "../../chat/tests/answers/goldens.rs"]
mod goldens;
#[path = "http/history.rs"]
mod history;
#[path = "http/kv_events.rs"]
mod kv_events;
#[path = "http/leaving.rs"]
mod leaving;
#[path = "http/life.rs"]
mod life;
#[path = "http/limits.rs"]
mod limits;
#[path = "http/llama.rs"]
mod llama;
#[path = "http/local_clients.rs"]
mod local_clients;
#[path = "http/models.rs"]
mod models;
#[path = "http/names.rs"]
mod names;
#[path = "http/ollama.rs"]
mod ollama;
#[path = "http/openai.rs"]
mod openai;
#[path = "http/openapi.rs"]
mod openapi;
#[path = "http/options.rs"]
mod options;
#[path = "http/otlp.rs"]
mod otlp;
#[path = "http/pictures.rs"]
mod pictures;
#[path = "http/render.rs"]
mod render;
#[path = "http/reports.rs"]
mod reports;
#[path = "http/responses.rs"]
mod responses;
#[path = "http/silence.rs"]
mod silence;
#[path = "http/slots.rs"]
mod slots;
#[path = "http/stops.rs"]
mod stops;
#[path = "http/support.rs"]
mod support;
#[path = "http/tenants.rs"]
mod tenants;
#[path = "http/vectors.rs"]
mod vectors;
#[path = "http/verify.rs"]
mod verify;
#[path = "http/view.rs"]
mod view;
