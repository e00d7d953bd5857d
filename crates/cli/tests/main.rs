//! Tests of the program, as one: a test program takes longer to link than most tests to run.

mod adapters;
mod architectures;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod backends;
mod batch;
#[cfg(feature = "hub")]
mod by_name;
#[cfg(feature = "hub")]
mod by_name_tls;
mod chat;
mod choices;
mod commands;
#[cfg(feature = "grammar")]
mod constrained;
mod convert;
mod describe;
mod diffusion;
mod directories;
mod documents;
mod embed;
mod escapes;
mod experts;
mod families;
#[cfg(unix)]
mod few_bits;
mod files;
mod flags_page;
mod habits;
mod imatrix;
#[cfg(unix)]
mod newcomer;
mod overwrite;
mod pictures;
mod plan_page;
#[cfg(target_os = "linux")]
mod plan_total;
mod real_files;
mod replay;
mod rerank;
mod run;
mod sampling;
mod seq2seq;
mod serve;
#[cfg(unix)]
mod serve_operation;
mod serve_settings;
#[cfg(unix)]
mod serve_spans;
#[cfg(feature = "hub")]
#[path = "../../hub/tests/support/mod.rs"]
mod server;
mod speculation;
mod state;
mod support;
#[cfg(unix)]
mod terminal;
mod wavtokenizer;
mod wrong_directories;
mod wrong_input;
mod wrong_invocations;
