//! Operations on single rows: shapes, norms, rotations, and combinations of parts.

use super::{assert_refused, builder, floats};
use crate::rope::{RopeScaling, RopeSections, RopeSpec, RopeStyle, SectionOrder};
use crate::{Activation, Claim, Graph, Input, NormGain, Op, RowGain};

#[test]
fn a_shape_keeps_rows_and_values() {
    let mut b = builder();
    let x = floats(&mut b, &[4, 6]);
    assert_refused([
        ("the same rows", b.reshape("y", x, &[2, 12])),
        ("as many values", b.reshape("y", x, &[4, 3])),
    ]);
}

#[test]
fn elementwise_operands_have_one_shape() {
    let mut b = builder();
    let [x, wide] = [[4, 6], [4, 7]].map(|shape| floats(&mut b, &shape));
    let equal = "two equal shapes";
    assert_refused([
        (equal, b.add("y", x, wide)),
        (equal, b.mul("y", x, wide)),
        (equal, b.gate("y", Activation::Silu, x, wide)),
    ]);
    let y = b.mul("mul", x, x).unwrap();
    let y = b.gate("gate", Activation::Silu, y, x).unwrap();
    let y = b.clamp("clamp", y, 3.0).unwrap();
    assert_eq!(b.shape_of(y), [4, 6]);
}

#[test]
fn a_norm_has_a_gain_for_each_group_of_values() {
    let mut b = builder();
    let [x, groups] = [&[4, 6][..], &[4, 3, 2]].map(|shape| floats(&mut b, shape));
    let gain = NormGain::PerGroup("groups.w");
    assert_refused([
        ("[n, groups, dim]", b.rms_norm_with("y", x, gain, 1e-5)),
        ("[.., dim]", {
            let states = b.input(Input::States).unwrap();
            b.rms_norm("y", states, "w", 1e-5)
        }),
    ]);
    let y = b.rms_norm_with("y", groups, gain, 1e-5).unwrap();
    let z = b.rms_norm("z", groups, "w", 1e-5).unwrap();
    let graph = b.finish(&[y, z]).unwrap();
    let shapes: Vec<_> = graph.weights().iter().map(|w| &w.shape[..]).collect();
    assert_eq!(shapes, [&[3, 2][..], &[2]]);
    assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
}

#[test]
fn a_gain_is_one_factor_or_one_for_each_value() {
    let mut b = builder();
    let x = floats(&mut b, &[4, 3, 2]);
    let weight = "w".to_owned();
    let claim = Claim {
        weights: &[&[3]],
        ..Claim::default()
    };
    let wrong = b.push("y", Op::Gain { weight }, &[x], claim);
    assert_refused([(
        "[.., dim] and a weight of [dim], [groups, dim] or [1]",
        wrong,
    )]);
    let y = b.gain("y", x, RowGain::PerValue("values.w")).unwrap();
    let z = b.gain("z", y, RowGain::One("one.w")).unwrap();
    let z = b.gain("g", z, RowGain::PerGroup("groups.w")).unwrap();
    assert_eq!(b.shape_of(z), [4, 3, 2]);
    let graph = b.finish(&[z]).unwrap();
    let shapes: Vec<_> = graph.weights().iter().map(|w| &w.shape[..]).collect();
    assert_eq!(shapes, [&[2][..], &[1], &[3, 2]]);
    assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
}

/// Six values of a head are rotated.
const ROPE: RopeSpec = RopeSpec {
    style: RopeStyle::Neox,
    n_rot: 6,
    base: 10_000.0,
    scaling: RopeScaling::None,
    factors: None,
};

#[test]
fn a_rotation_takes_pairs_out_of_heads_with_a_position_each() {
    let mut b = builder();
    let positions = b.input(Input::Positions).unwrap();
    let wanted = b.input(Input::OutputRows).unwrap();
    let x = floats(&mut b, &[4, 3, 7]);
    let mut rope = |n_rot, by| {
        let factors = Some("factors".to_owned());
        let rope = RopeSpec {
            n_rot,
            factors,
            ..ROPE
        };
        b.rope("y", x, by, &rope)
    };
    assert_refused([
        ("dim >= 6 (even)], [tokens]", rope(6, wanted)),
        ("dim >= 5 (even)], [tokens]", rope(5, positions)),
        ("dim >= 8 (even)], [tokens]", rope(8, positions)),
    ]);
    let y = rope(6, positions).unwrap();
    assert_eq!(b.shape_of(y), [4, 3, 7]);
    assert_eq!(b.finish(&[y]).unwrap().weights()[0].shape, [3]);
}

#[test]
fn a_rotation_in_sections_takes_coordinates_and_as_many_pairs() {
    let mut b = builder();
    let positions = b.input(Input::Positions).unwrap();
    let coordinates = b.input(Input::Coordinates).unwrap();
    let x = floats(&mut b, &[4, 3, 6]);
    let mut rope = |pairs, by| {
        let order = SectionOrder::Consecutive;
        b.rope_sections("y", [x, by], &ROPE, RopeSections { pairs, order })
    };
    let wanted = "= 3 pairs, coordinates";
    assert_refused([
        (wanted, rope([1, 1, 1], positions)),
        (wanted, rope([1, 1, 2], coordinates)),
    ]);
    let y = rope([1, 1, 1], coordinates).unwrap();
    assert_eq!(b.shape_of(y), [4, 3, 6]);
}

#[test]
fn a_threshold_is_of_matrices() {
    let mut b = builder();
    let [x, heads] = [&[4, 6][..], &[4, 3, 2]].map(|shape| floats(&mut b, shape));
    assert_refused([("[n, dim]", b.gaussian_top_k("y", heads, 1.0))]);
    let y = b.gaussian_top_k("y", x, 1.0).unwrap();
    assert_eq!(b.shape_of(y), [4, 6]);
}

#[test]
fn a_matrix_of_each_head_takes_one_head_and_not_none() {
    let mut b = builder();
    let [none, one] = [[4, 0, 3], [4, 1, 3]].map(|shape| floats(&mut b, &shape));
    assert_refused([(
        "[n, heads, in], at least 1 head",
        b.head_linear("y", none, "w", 5),
    )]);
    let y = b.head_linear("y", one, "w", 5).unwrap();
    assert_eq!(b.shape_of(y), [4, 1, 5]);
}

#[test]
fn parts_of_one_value_are_combined_and_of_none_are_not() {
    let mut b = builder();
    let [empty, one, square] =
        [[4, 2, 0], [4, 2, 1], [4, 2, 2]].map(|shape| floats(&mut b, &shape));
    assert_refused([(
        "[n, inputs, dim], [n, outputs, inputs]",
        b.mix("y", empty, square),
    )]);
    let y = b.mix("y", one, square).unwrap();
    assert_eq!(b.shape_of(y), [4, 2, 1]);
}

#[test]
fn candidates_are_at_least_one_of_columns_that_floats_count() {
    let mut b = builder();
    let x = floats(&mut b, &[4, 6]);
    let most = b.linear("most", x, "most.w", 1 << 24).unwrap();
    let more = b.linear("more", x, "more.w", (1 << 24) + 1).unwrap();
    assert_refused([("[n, 1 to 16777216]", b.top_k("y", more, 1))]);
    let y = b.top_k("y", most, 1).unwrap();
    assert_eq!(b.shape_of(y), [4, 3]);
}
