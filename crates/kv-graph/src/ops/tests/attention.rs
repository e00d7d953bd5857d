//! Attention: stored, in the ubatch, in parts, in single steps, and sparse.

use kv_core::ids::{LayerIdx, PartIdx};
use kv_core::window::Window;

use super::{assert_refused, builder, floats};
use crate::{Alibi, AttendSpec, DistanceBuckets, DistanceScores, Distances, Input, Op, ResultForm};
use crate::{Claim, GraphBuilder, IndexSpec, NodeId};

const LAYER: LayerIdx = LayerIdx(0);
const PART: PartIdx = PartIdx(0);
const SPEC: AttendSpec = AttendSpec {
    n_heads: 6,
    kv_heads: 1,
    k_dim: 3,
    v_dim: 5,
    scale: 0.5,
    soft_cap: None,
    alibi: None,
};
/// Heads that cannot be divided among those of keys.
const UNEVEN: AttendSpec = AttendSpec {
    kv_heads: 4,
    ..SPEC
};
/// No heads, of no key heads.
const NO_HEADS: AttendSpec = AttendSpec {
    n_heads: 0,
    kv_heads: 0,
    ..SPEC
};
const WITH_ALIBI: AttendSpec = AttendSpec {
    alibi: Some(Alibi::new(8.0)),
    ..SPEC
};

fn cells(b: &mut GraphBuilder) -> NodeId {
    b.input(Input::Cells { part: PART }).unwrap()
}

fn seen(b: &mut GraphBuilder) -> NodeId {
    let window = Window::Full;
    b.input(Input::Visibility { part: PART, window }).unwrap()
}

#[test]
fn stored_rows_fit_each_other_and_their_cells() {
    let mut b = builder();
    let cells = cells(&mut b);
    let wanted = b.input(Input::OutputRows).unwrap();
    let [k, v, two, some] =
        [[4, 1, 3], [4, 1, 5], [4, 3, 5], [2, 1, 3]].map(|shape| floats(&mut b, &shape));
    let kv = "[tokens, kv_heads, k_dim], [tokens, kv_heads, v_dim], [tokens]";
    assert_refused([
        (kv, b.store_kv("y", LAYER, [some, v, cells])),
        (kv, b.store_kv("y", LAYER, [k, v, wanted])),
        (kv, b.store_kv("y", LAYER, [k, two, cells])),
        (
            "[tokens, kv_heads, k_dim], [tokens]",
            b.store_k("y", LAYER, [k, wanted]),
        ),
    ]);
    b.store_kv("y", LAYER, [k, v, cells]).unwrap();
}

#[test]
fn attention_wants_whole_groups_of_heads_and_positions_for_biases() {
    let mut b = builder();
    let (cells, seen) = (cells(&mut b), seen(&mut b));
    let [q, none] = [[4, 6, 3], [4, 0, 3]].map(|shape| floats(&mut b, &shape));
    let biased = Op::Attend {
        layer: LAYER,
        spec: WITH_ALIBI,
        sinks: None,
        relative: None,
    };
    let operands = [q, seen, seen, cells];
    assert_refused([
        (
            "[4, 6 (a multiple of 4), 3]",
            b.attend("y", LAYER, UNEVEN, [q, seen, seen]),
        ),
        (
            "[4, 0 (a multiple of 0), 3]",
            b.attend("y", LAYER, NO_HEADS, [none, seen, seen]),
        ),
        (
            "the positions as its last operand",
            b.push("y", biased, &operands, Claim::default()),
        ),
    ]);
    b.attend("y", LAYER, SPEC, [q, seen, seen]).unwrap();
}

#[test]
fn scores_by_distance_want_sound_buckets_and_a_weight() {
    let mut b = builder();
    let seen = seen(&mut b);
    let q = floats(&mut b, &[4, 6, 3]);
    let mut attend = |span, scores| {
        let buckets = DistanceBuckets::Single { span };
        let distances = Distances { buckets, scores };
        b.attend_relative("y", LAYER, SPEC, [q, seen, seen], distances)
    };
    assert_refused([
        (
            "a weight of buckets: stored keys have no tables",
            attend(2, DistanceScores::Tables([q, q])),
        ),
        (
            "buckets that fit together, not single(0)",
            attend(0, DistanceScores::Weight("w")),
        ),
    ]);
    attend(1, DistanceScores::Weight("w")).unwrap();
}

#[test]
fn attention_in_a_ubatch_wants_what_tokens_see_and_positions_for_biases() {
    let mut b = builder();
    let window = Window::Full;
    let batch = b.input(Input::BatchVisibility { window }).unwrap();
    let (cells, seen) = (cells(&mut b), seen(&mut b));
    let [q, k, v] = [[4, 6, 3], [4, 1, 3], [4, 1, 5]].map(|shape| floats(&mut b, &shape));
    let mut push = |spec, operands: &[NodeId]| {
        let op = Op::AttendBatch {
            spec,
            sinks: None,
            relative: None,
        };
        b.push("y", op, operands, Claim::default())
    };
    assert_refused([
        (
            "what tokens see of their ubatch as its fourth operand",
            push(SPEC, &[q, k, v, seen]),
        ),
        (
            "the positions as its last operand",
            push(WITH_ALIBI, &[q, k, v, batch, cells]),
        ),
    ]);
    push(SPEC, &[q, k, v, batch]).unwrap();
}

#[test]
fn partial_results_have_values_and_positions_for_biases() {
    let mut b = builder();
    let (cells, seen) = (cells(&mut b), seen(&mut b));
    let [q, empty, narrow] = [[4, 6, 3], [4, 6, 1], [4, 6, 2]].map(|shape| floats(&mut b, &shape));
    let op = Op::AttendPartial {
        layer: LAYER,
        spec: WITH_ALIBI,
        sinks: None,
    };
    let operands = [q, seen, seen, cells];
    assert_refused([
        (
            "the positions as its last operand",
            b.push("y", op, &operands, Claim::default()),
        ),
        (
            "two of [n, heads, dim + 1]",
            b.merge_partials("y", ResultForm::Whole, [empty; 2]),
        ),
    ]);
    let y = b.merge_partials("y", ResultForm::Whole, [narrow; 2]);
    assert_eq!(b.shape_of(y.unwrap()), [4, 6]);
}

#[test]
fn single_steps_of_attention_fit_its_heads() {
    let mut b = builder();
    let (cells, seen) = (cells(&mut b), seen(&mut b));
    let [q, one_head, some] = [[4, 6, 3], [4, 1, 3], [2, 6, 3]].map(|shape| floats(&mut b, &shape));
    let biased = Op::KqSoftMax {
        spec: WITH_ALIBI,
        sinks: None,
    };
    let (queries, table) = ("[4, 6, 3]", "[tokens, heads, cells]");
    assert_refused([
        (queries, b.kq("y", LAYER, UNEVEN, [q, seen], 8)),
        (queries, b.kq("y", LAYER, SPEC, [one_head, seen], 8)),
        (table, b.kq_soft_max("y", SPEC, [one_head, seen])),
        (table, b.kq_soft_max("y", SPEC, [some, seen])),
        (table, b.kqv("y", LAYER, SPEC, [one_head, seen])),
        (
            "the positions as its last operand",
            b.push("y", biased, &[q, seen, cells], Claim::default()),
        ),
    ]);
    b.kq_soft_max("y", SPEC, [q, seen]).unwrap();
}

#[test]
fn sparse_attention_wants_whole_groups_of_heads_without_biases() {
    let mut b = builder();
    let seen = seen(&mut b);
    let [q, one_head] = [[4, 6, 3], [4, 1, 3]].map(|shape| floats(&mut b, &shape));
    let weights = floats(&mut b, &[4, 6]);
    let index = IndexSpec {
        n_heads: 6,
        dim: 3,
        top_k: 1,
    };
    let chosen = b.index("chosen", LAYER, index, [q, weights, seen, seen]);
    let chosen = chosen.unwrap();
    let mut attend = |spec, q| b.attend_sparse("y", LAYER, spec, [q, seen, seen, chosen]);
    assert_refused([
        ("no linear biases", attend(WITH_ALIBI, q)),
        ("[4, 6 (a multiple of 4), 3]", attend(UNEVEN, q)),
        ("[4, 6 (a multiple of 1), 3]", attend(SPEC, one_head)),
    ]);
    attend(SPEC, q).unwrap();
}
