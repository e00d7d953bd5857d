//! What a memory takes, and the largest context that a budget allows.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::model::{Layered, Remembers};
use cellar_engine::{ConfigError, EngineConfig, MemoryBudget, Settings};
use kv_core::Window;
use kv_rows::largest_n_ctx;

const FULL: Remembers = Remembers::Tokens(Window::Full);
const WINDOW: Remembers = Remembers::Tokens(Window::Sliding(4));
const STATE: Remembers = Remembers::State;

/// K and V of a token in a layer: eight values each, of two bytes.
const ROW_BYTES: u64 = 2 * 8 * 2;

/// A state of a layer, and the last inputs of its convolution, in floats.
const STATE_BYTES: u64 = (8 * 4 + 8 * 2) * 4;

fn config() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(1000),
        n_seqs: 2,
        n_ubatch: 8,
        ..EngineConfig::default()
    }
}

fn settings(layers: &[Remembers]) -> Settings {
    config().settings(&Layered::new(layers)).unwrap()
}

#[test]
fn the_cells_of_layers_that_share_them_are_counted_once() {
    let settings = settings(&[FULL, STATE, WINDOW, FULL, STATE]);
    let of_window = settings.layout.layers()[1].n_rows as u64;
    assert!(of_window < 1000);
    assert_eq!(settings.n_cells(), 1000 + of_window);
    let n_states = settings.layout.states()[0].n_rows as u64;
    let rows = (2 * 1000 + of_window) * ROW_BYTES + 2 * n_states * STATE_BYTES;
    assert_eq!(settings.memory_bytes(), rows + 128 * (1000 + of_window));
}

#[test]
fn a_row_of_each_kind_is_that_of_all_its_layers() {
    let all = settings(&[FULL, STATE, WINDOW, FULL, STATE]).row_bytes();
    assert_eq!(all.cells, [2 * ROW_BYTES, ROW_BYTES]);
    assert_eq!(all.state, Some(2 * STATE_BYTES));
    assert_eq!(settings(&[FULL]).row_bytes().state, Some(0));
}

#[test]
fn the_largest_context_is_the_last_that_fits() {
    let model = Layered::new(&[FULL, WINDOW]);
    for n_ctx in [1, 2, 37, 64] {
        let config = EngineConfig {
            n_ctx: Some(n_ctx),
            ..config()
        };
        let bytes = config.sizes(&model).unwrap().memory_bytes();
        assert_eq!(config.largest_n_ctx(&model, bytes), Some(n_ctx));
        let one_less = Some(n_ctx - 1).filter(|&n| n > 0);
        assert_eq!(config.largest_n_ctx(&model, bytes - 1), one_less);
    }
    let most = 1 << 30;
    for n_ctx in [1, 1000, most - 1, most] {
        assert_eq!(largest_n_ctx(|n| n <= n_ctx), Some(n_ctx));
    }
    assert_eq!(largest_n_ctx(|_| true), Some(most));
}

#[test]
fn a_budget_is_kept_to_the_byte() {
    let model = Layered::new(&[FULL]);
    let within = |bytes| {
        let budget = MemoryBudget::Bytes(bytes);
        EngineConfig { budget, ..config() }.settings(&model)
    };
    let bytes = 1000 * (ROW_BYTES + 128);
    assert!(within(bytes).is_ok());
    let Err(ConfigError::OverBudget {
        n_ctx: 1000,
        n_cells: 1000,
        wanted,
        available,
        largest_n_ctx: Some(999),
    }) = within(bytes - 1)
    else {
        panic!("{:?}", within(bytes - 1));
    };
    assert_eq!((wanted, available), (bytes, bytes - 1));
}
