//! Convolutions, scans and the delta rule, and operations that this crate does not have.

use kv_core::ids::LayerIdx;
use kv_core::window::Window;

use super::{assert_refused, builder, floats};
use crate::{
    ConvSpec, CustomScope, CustomSizes, CustomSpec, DecaySpec, DeltaSpec, HeadScanSpec, Input,
    KeySharing,
};

const LAYER: LayerIdx = LayerIdx(0);

#[test]
fn a_convolution_of_one_input_is_one() {
    let mut b = builder();
    let states = b.input(Input::States).unwrap();
    let x = floats(&mut b, &[4, 6]);
    let conv = ConvSpec {
        width: 1,
        weight: "w".into(),
        further: Vec::new(),
        bias: None,
    };
    let y = b.conv("y", LAYER, &conv, [x, states]).unwrap();
    assert_eq!(b.finish(&[y]).unwrap().weights()[0].shape, [6, 1]);
}

#[test]
fn one_head_scans_all_channels_and_no_head_scans_none() {
    let mut b = builder();
    let states = b.input(Input::States).unwrap();
    let [none, one, x, bc] = [0, 1, 6, 3].map(|width| floats(&mut b, &[4, width]));
    let scan = |n_heads| HeadScanSpec {
        n_heads,
        n_groups: n_heads,
        d_state: 3,
        a: "a".into(),
        d: "d".into(),
        dt_bias: "dt.b".into(),
    };
    let nothing = [none, none, none, none, states];
    assert_refused([(
        "(divides channels, a multiple of 0)",
        b.scan_heads("y", LAYER, &scan(0), nothing),
    )]);
    let y = b.scan_heads("y", LAYER, &scan(1), [x, one, bc, bc, states]);
    assert_eq!(b.shape_of(y.unwrap()), [4, 6]);
}

#[test]
fn decays_are_of_one_head_or_more() {
    let mut b = builder();
    let [none, x] = [0, 6].map(|width| floats(&mut b, &[4, width]));
    let decay = |n_heads| DecaySpec {
        n_heads,
        a: "a".into(),
        dt_bias: "dt.b".into(),
    };
    assert_refused([(
        "[tokens, columns] of 0 heads",
        b.decay("y", none, &decay(0), &[0]),
    )]);
    let y = b.decay("y", x, &decay(1), &[1]).unwrap();
    assert_eq!(b.shape_of(y), [4, 6]);
}

#[test]
fn keys_of_the_delta_rule_have_values() {
    let mut b = builder();
    let states = b.input(Input::States).unwrap();
    let [none, one, v] = [0, 1, 6].map(|width| floats(&mut b, &[4, width]));
    let delta = |k_dim| DeltaSpec {
        n_heads: 1,
        key_heads: 1,
        k_dim,
        sharing: KeySharing::Neighbours,
        scale: 1.0,
    };
    assert_refused([(
        "two of [4, 0]",
        b.delta("y", LAYER, delta(0), [none, none, v, one, one, states]),
    )]);
    let y = b.delta("y", LAYER, delta(1), [one, one, v, one, one, states]);
    assert_eq!(b.shape_of(y.unwrap()), [4, 6]);
}

#[test]
fn a_custom_operation_has_as_many_rows_of_floats_in_each_operand() {
    let mut b = builder();
    let tokens = b.input(Input::Tokens).unwrap();
    let states = b.input(Input::States).unwrap();
    let window = Window::Full;
    let seen = b.input(Input::BatchVisibility { window }).unwrap();
    let [x, some] = [[4, 6], [2, 6]].map(|shape| floats(&mut b, &shape));
    let rows = CustomSpec::new("rows");
    let state = CustomSpec {
        scope: CustomScope::State(LAYER),
        ..CustomSpec::new("state")
    };
    let whole = CustomSpec {
        scope: CustomScope::Sequence,
        ..CustomSpec::new("whole")
    };
    let sizes = CustomSizes {
        weights: &[],
        width: 5,
    };
    let floats = "operands f32[n, ..]";
    assert_refused([
        (floats, b.custom("y", &rows, &[x, some], sizes)),
        (floats, b.custom("y", &rows, &[x, tokens], sizes)),
        (
            "a row for each token",
            b.custom("y", &state, &[some, states], sizes),
        ),
        (
            "a row for each token",
            b.custom("y", &whole, &[some, seen], sizes),
        ),
    ]);
    let y = b.custom("y", &rows, &[some], sizes).unwrap();
    assert_eq!(b.shape_of(y), [2, 5]);
}
