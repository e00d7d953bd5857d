//! Mixtures of experts.

use super::{assert_refused, builder, floats};
use crate::{GroupScore, MAX_ROUTE_GROUPS, RouteGate, RouteGroups, RouteSpec, RouteSum, Routing};

const SOFTMAX: RouteSpec = RouteSpec::plain(1, RouteGate::Softmax);

fn groups(n_groups: usize, n_used: usize) -> Option<RouteGroups> {
    Some(RouteGroups {
        n_groups,
        n_used,
        score: GroupScore::Max,
    })
}

#[test]
fn slots_are_of_the_rows_of_their_route() {
    let mut b = builder();
    let [x, some] = [[4, 6], [2, 6]].map(|shape| floats(&mut b, &shape));
    let several = floats(&mut b, &[2, 1, 6]);
    let routes = b.route("route", x, SOFTMAX).unwrap();
    let slots = "a route [n, experts] of as many slots";
    assert_refused([
        (slots, b.expert_scale("y", [some, routes])),
        (slots, b.expert_scale("y", [several, routes])),
    ]);
    let y = b.expert_scale("y", [x, routes]).unwrap();
    assert_eq!(b.shape_of(y), [4, 1, 6]);
}

#[test]
fn sparsemixer_has_no_groups() {
    let mut b = builder();
    let logits = floats(&mut b, &[4, 6]);
    let plain = RouteSpec::plain(2, RouteGate::Sparsemixer { jitter: 0.01 });
    let grouped = RouteSpec {
        groups: groups(2, 2),
        ..plain
    };
    assert_refused([("neither groups nor biases", b.route("y", logits, grouped))]);
    b.route("y", logits, plain).unwrap();
}

#[test]
fn groups_may_be_as_many_as_can_be_and_used_up() {
    let mut b = builder();
    let [logits, many] = [6, MAX_ROUTE_GROUPS].map(|n| floats(&mut b, &[4, n]));
    let all_of_one = RouteSpec {
        groups: groups(2, 1),
        sum: RouteSum::One,
        ..RouteSpec::plain(3, RouteGate::Softmax)
    };
    b.route("all of one", logits, all_of_one).unwrap();
    let most = RouteSpec {
        groups: groups(MAX_ROUTE_GROUPS, 1),
        ..SOFTMAX
    };
    b.route("most", many, most).unwrap();
}

#[test]
fn a_gain_is_one_number_for_each_expert() {
    let mut b = builder();
    let logits = floats(&mut b, &[4, 6]);
    let with_gain = Routing {
        gain: Some("gain.w"),
        ..Routing::from(SOFTMAX)
    };
    let y = b.route("y", logits, with_gain).unwrap();
    assert_eq!(b.finish(&[y]).unwrap().weights()[0].shape, [6]);
}
