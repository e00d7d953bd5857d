//! [`RouteSpec`]: how a router's logits choose experts, and what weights they get.
//!
//! Invariant: of equal choices the first wins, so a route depends on its logits alone. Shazeer et
//! al., arXiv 1701.06538; groups as in DeepSeek-V2, arXiv 2405.04434, a bias on the choice alone as
//! in DeepSeek-V3, arXiv 2412.19437, and shares among near ties as in GRIN MoE, arXiv 2409.12136.
//! Does not know what experts compute.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Groups of experts that a route may have at most.
pub const MAX_ROUTE_GROUPS: usize = 64;

/// The rule by which the logits of a router become a route.
///
/// Experts have scores, which the gate makes of their logits. The `n_used` experts with the largest
/// choices are chosen, where a choice is the score, plus the expert's bias where there is one; with
/// groups, out of the best groups only. The weights are the scores of the chosen experts, without
/// biases, divided by their sum or not, times the scale and times the expert's gain where there is
/// one. Routes of [`RouteGate::Sparsemixer`] have neither biases nor groups.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteSpec {
    /// Experts that a token goes through; at least 1, at most all.
    pub n_used: usize,
    /// The function from logits to scores.
    pub gate: RouteGate,
    /// The sum of the weights of the chosen experts, before they are scaled.
    pub sum: RouteSum,
    /// Factor on the weights.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub scale: f32,
    /// Groups of experts of which only the best are chosen from, where there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<RouteGroups>,
}

fn one() -> f32 {
    1.0
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde calls it with a reference
fn is_one(scale: &f32) -> bool {
    *scale == 1.0
}

/// A route with the weight of its biases, where it has one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing<'a> {
    /// The number of groups, and their scores.
    pub spec: RouteSpec,
    /// Weight of `[experts]` that is added to scores to choose by, where there is one; see
    /// [`Op::Route`](crate::Op::Route).
    pub bias: Option<&'a str>,
    /// Weight of `[experts]` that the finished weights are multiplied with, where there is one.
    pub gain: Option<&'a str>,
}

impl From<RouteSpec> for Routing<'_> {
    fn from(spec: RouteSpec) -> Self {
        Self {
            spec,
            bias: None,
            gain: None,
        }
    }
}

/// The function from a router's logits to scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteGate {
    /// `e^x / sum(e^x)` over all experts.
    #[default]
    Softmax,
    /// `1 / (1 + e^-x)`, each expert by itself.
    Sigmoid,
    /// A chosen expert's share of a softmax over those that were not chosen before it and whose
    /// logits are near its own, `l`: `(l - x) / max(l, |x|)` is at most twice the jitter (Phi-3.5
    /// MoE). Without near ones the share is 1.
    Sparsemixer {
        /// Half of the largest distance, relative to the logits.
        jitter: f32,
    },
}

impl fmt::Display for RouteGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Softmax => f.pad("softmax"),
            Self::Sigmoid => f.pad("sigmoid"),
            Self::Sparsemixer { jitter } => write!(f, "sparsemixer({jitter})"),
        }
    }
}

impl RouteGate {
    /// True if an expert with logit `x` shares with one that is chosen by `largest`.
    fn shares(jitter: f32, largest: f32, x: f32) -> bool {
        let is_far = (largest - x) / largest.max(x.abs()) > 2.0 * jitter;
        !is_far
    }
}

/// The sum of the weights of a token's chosen experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteSum {
    /// Whatever the gate gives.
    #[default]
    Free,
    /// 1: they are divided by their sum. After a softmax this is the softmax over the chosen ones.
    One,
}

/// Neighbouring experts in equal groups, of which only the best are chosen from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RouteGroups {
    /// Number of groups; divides the number of experts, at most [`MAX_ROUTE_GROUPS`].
    pub n_groups: usize,
    /// The number of them that are chosen from.
    pub n_used: usize,
    /// The score that ranks them.
    pub score: GroupScore,
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its largest choice (DeepSeek-V2).
    Max,
    /// The sum of its two largest choices (DeepSeek-V3).
    TopTwo,
}

impl fmt::Display for GroupScore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Max => "max",
            Self::TopTwo => "top_two",
        })
    }
}

impl GroupScore {
    fn of(self, choices: &[f32]) -> f32 {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &choice in choices {
            if choice > best {
                (best, second) = (choice, best);
            } else if choice > second {
                second = choice;
            }
        }
        match self {
            Self::TopTwo if choices.len() > 1 => best + second,
            _ => best,
        }
    }
}

/// The mark of a chosen expert while experts are chosen: it is larger than no choice.
const TAKEN: f32 = f32::NAN;

impl RouteSpec {
    /// The `n_used` likeliest experts with the weights that the gate gives them.
    pub const fn plain(n_used: usize, gate: RouteGate) -> Self {
        Self {
            n_used,
            gate,
            sum: RouteSum::Free,
            scale: 1.0,
            groups: None,
        }
    }

    /// The route of one token, from as many logits as it has weights, and as many biases where
    /// there are any.
    pub fn route(&self, logits: &[f32], bias: Option<&[f32]>, route: &mut [f32]) {
        debug_assert_eq!(logits.len(), route.len());
        if let RouteGate::Sparsemixer { jitter } = self.gate {
            self.share_out(jitter, logits, route);
            return;
        }
        self.choices(logits, bias, route);
        self.leave_groups_out(route);
        let mut largest = f32::NEG_INFINITY;
        for _ in 0..self.n_used.min(logits.len()) {
            let Some((expert, _)) = next(route.iter().copied()) else {
                break;
            };
            largest = largest.max(logits[expert]);
            route[expert] = TAKEN;
        }
        for (route, &logit) in route.iter_mut().zip(logits) {
            *route = if route.is_nan() {
                self.weight(logit, largest)
            } else {
                0.0
            };
        }
        let sum: f32 = match (self.sum, self.gate) {
            (RouteSum::One, _) => route.iter().sum(),
            (RouteSum::Free, RouteGate::Softmax) => {
                logits.iter().map(|&x| self.weight(x, largest)).sum()
            }
            (RouteSum::Free, RouteGate::Sigmoid | RouteGate::Sparsemixer { .. }) => 1.0,
        };
        self.scale_weights(route, sum);
    }

    /// Multiplies weights with the scale and divides them by `sum`.
    fn scale_weights(&self, route: &mut [f32], sum: f32) {
        let factor = self.scale / sum;
        if self.scale == 1.0 {
            route.iter_mut().for_each(|route| *route /= sum);
        } else {
            route.iter_mut().for_each(|route| *route *= factor);
        }
    }

    /// A route by [`RouteGate::Sparsemixer`]: no share is 0, so experts without one are those that
    /// were not chosen.
    fn share_out(&self, jitter: f32, logits: &[f32], route: &mut [f32]) {
        route.fill(0.0);
        for _ in 0..self.n_used.min(logits.len()) {
            let rest = logits
                .iter()
                .zip(&*route)
                .map(|(&logit, &share)| match share {
                    0.0 => logit,
                    _ => TAKEN,
                });
            let Some((expert, largest)) = next(rest.clone()) else {
                break;
            };
            let near = rest.filter(|x| !x.is_nan() && RouteGate::shares(jitter, largest, *x));
            route[expert] = 1.0 / near.map(|x| (x - largest).exp()).sum::<f32>();
        }
        let sum = match self.sum {
            RouteSum::One => route.iter().sum(),
            RouteSum::Free => 1.0,
        };
        self.scale_weights(route, sum);
    }

    /// Multiplies the weights of a finished route with the gains of its experts.
    pub fn apply_gain(route: &mut [f32], gain: &[f32]) {
        let pairs = route.iter_mut().zip(gain);
        pairs.for_each(|(weight, gain)| *weight *= gain);
    }

    /// The score of a logit, up to a factor for a softmax, where `largest` is a logit near to it.
    fn weight(&self, logit: f32, largest: f32) -> f32 {
        match self.gate {
            RouteGate::Softmax | RouteGate::Sparsemixer { .. } => (logit - largest).exp(),
            RouteGate::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        }
    }

    /// The values by which experts are chosen. Where their order is all that counts, logits are as
    /// good as scores, and never equal where scores have underflowed.
    fn choices(&self, logits: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
        let sums = self
            .groups
            .is_some_and(|groups| groups.score == GroupScore::TopTwo);
        if bias.is_none() && !sums {
            out.copy_from_slice(logits);
            return;
        }
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = match self.gate {
            RouteGate::Softmax => logits.iter().map(|&x| self.weight(x, largest)).sum(),
            RouteGate::Sigmoid | RouteGate::Sparsemixer { .. } => 1.0,
        };
        for (expert, (out, &logit)) in out.iter_mut().zip(logits).enumerate() {
            let bias = bias.and_then(|bias| bias.get(expert)).unwrap_or(&0.0);
            *out = self.weight(logit, largest) / sum + bias;
        }
    }

    /// Makes the choices of all but the best groups smaller than any other.
    fn leave_groups_out(&self, choices: &mut [f32]) {
        let Some(groups) = self.groups else {
            return;
        };
        let len = (choices.len() / groups.n_groups.max(1)).max(1);
        let score = |group: usize| {
            let choices = choices.chunks(len).nth(group).unwrap_or_default();
            groups.score.of(choices)
        };
        let mut scores = [f32::NEG_INFINITY; MAX_ROUTE_GROUPS];
        let n_groups = groups.n_groups.min(MAX_ROUTE_GROUPS);
        let scores = &mut scores[..n_groups];
        scores
            .iter_mut()
            .enumerate()
            .for_each(|(group, s)| *s = score(group));
        for group in 0..n_groups {
            let better = |&(other, &s): &(usize, &f32)| {
                s > scores[group] || s == scores[group] && other < group
            };
            if scores.iter().enumerate().filter(better).count() >= groups.n_used {
                let left_out = choices.chunks_mut(len).nth(group);
                left_out.unwrap_or_default().fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// The expert with the largest choice that was not taken, of equal ones the first, and that choice.
fn next(choices: impl Iterator<Item = f32>) -> Option<(usize, f32)> {
    let mut best: Option<(usize, f32)> = None;
    for (expert, choice) in choices.enumerate() {
        if !choice.is_nan() && best.is_none_or(|(_, other)| choice > other) {
            best = Some((expert, choice));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots;

    fn routed(spec: RouteSpec, logits: &[f32]) -> Vec<f32> {
        biased(spec, logits, None)
    }

    fn biased(spec: RouteSpec, logits: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let mut route = vec![7.0; logits.len()];
        spec.route(logits, bias, &mut route);
        route
    }

    fn assert_near(got: &[f32], wanted: &[f32]) {
        let near = got.iter().zip(wanted).all(|(g, w)| (g - w).abs() < 1e-6);
        assert!(near && got.len() == wanted.len(), "{got:?}, not {wanted:?}");
    }

    /// Logits with these scores after a sigmoid.
    fn logits<const N: usize>(scores: [f32; N]) -> [f32; N] {
        scores.map(|s| (s / (1.0 - s)).ln())
    }

    #[test]
    fn the_largest_logits_are_chosen() {
        let logits = [0.0, 3f32.ln(), -40.0, 2f32.ln(), 2f32.ln()];
        let spec = |gate, sum| RouteSpec {
            sum,
            ..RouteSpec::plain(2, gate)
        };
        let close = |spec, wanted: [f32; 5]| assert_near(&routed(spec, &logits), &wanted);
        // Of two equal logits the first.
        close(
            spec(RouteGate::Softmax, RouteSum::One),
            [0.0, 0.6, 0.0, 0.4, 0.0],
        );
        close(
            spec(RouteGate::Softmax, RouteSum::Free),
            [0.0, 0.375, 0.0, 0.25, 0.0],
        );
        close(
            spec(RouteGate::Sigmoid, RouteSum::Free),
            [0.0, 0.75, 0.0, 2.0 / 3.0, 0.0],
        );
        let sum = 0.75 + 2.0 / 3.0;
        close(
            spec(RouteGate::Sigmoid, RouteSum::One),
            [0.0, 0.75 / sum, 0.0, 2.0 / 3.0 / sum, 0.0],
        );
        let all = RouteSpec {
            n_used: 5,
            ..spec(RouteGate::Softmax, RouteSum::One)
        };
        assert!((routed(all, &logits).iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn near_ties_share_and_others_do_not() {
        let sparse = RouteSpec::plain(2, RouteGate::Sparsemixer { jitter: 0.05 });
        // 1.9 is within a tenth of 2, and 1.75 is not; it is of 1.9. -2 is as far as can be.
        let logits = [1.75f32, 2.0, -2.0, 1.9];
        let wanted = [
            0.0,
            1.0 / (1.0 + (-0.1f32).exp()),
            0.0,
            1.0 / (1.0 + (-0.15f32).exp()),
        ];
        assert_near(&routed(sparse, &logits), &wanted);
        // At twice the jitter they still share.
        let half = RouteSpec::plain(1, RouteGate::Sparsemixer { jitter: 0.25 });
        let share = 1.0 / (1.0 + (-1f32).exp());
        assert_near(&routed(half, &[1.0, 2.0]), &[0.0, share]);
        let far = [1.0, 2.0, -2.0, 1.5];
        assert_near(&routed(sparse, &far), &[0.0, 1.0, 0.0, 1.0]);
        // Of equal ones the first, which shares with both; then the second, with one.
        assert_near(&routed(sparse, &[0.0; 3]), &[1.0 / 3.0, 0.5, 0.0]);
        // Below 0 distances are relative to the other one.
        let below = [-1.0, -1.12, -2.0];
        let wanted = [1.0 / (1.0 + (-0.12f32).exp()), 1.0, 0.0];
        let wide = RouteSpec::plain(2, RouteGate::Sparsemixer { jitter: 0.054 });
        assert_near(&routed(wide, &below), &wanted);
        let normed = RouteSpec {
            sum: RouteSum::One,
            scale: 3.0,
            ..sparse
        };
        assert_near(&routed(normed, &far), &[0.0, 1.5, 0.0, 1.5]);
    }

    #[test]
    fn a_weight_that_underflows_has_no_slot() {
        let spec = RouteSpec {
            sum: RouteSum::One,
            ..RouteSpec::plain(2, RouteGate::Softmax)
        };
        let route = routed(spec, &[-200.0, -300.0, 0.0]);
        assert_eq!(slots(&route, 2).collect::<Vec<_>>(), [(2, 1.0)]);
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let route = routed(RouteSpec::plain(1, RouteGate::Softmax), &[100.0, 0.0]);
        assert_near(&route, &[1.0, 0.0]);
    }

    #[test]
    fn a_scale_multiplies_weights_and_is_kept_in_json() {
        let scaled = |scale| RouteSpec {
            scale,
            sum: RouteSum::One,
            ..RouteSpec::plain(1, RouteGate::Softmax)
        };
        for scale in [1.0, 2.0] {
            assert_near(&routed(scaled(scale), &[1.0, 0.0]), &[scale, 0.0]);
            let json = serde_json::to_string(&scaled(scale)).unwrap();
            assert_eq!(json.contains("scale"), scale != 1.0, "{json}");
            let read: RouteSpec = serde_json::from_str(&json).unwrap();
            assert_eq!(read, scaled(scale));
        }
    }

    #[test]
    fn gains_multiply_a_finished_route() {
        let mut route = [0.0, 0.25, 0.75];
        RouteSpec::apply_gain(&mut route, &[2.0, 4.0, 0.5]);
        assert_eq!(route, [0.0, 1.0, 0.375]);
    }

    #[test]
    fn a_bias_chooses_and_does_not_weigh() {
        let spec = RouteSpec {
            sum: RouteSum::One,
            scale: 2.5,
            ..RouteSpec::plain(2, RouteGate::Sigmoid)
        };
        let logits = logits([0.5, 0.4, 0.3, 0.2]);
        let bias = [-0.4, 0.0, 0.0, 0.25];
        // Choices are 0.1, 0.4, 0.3 and 0.45.
        let wanted = [0.0, 2.5 * 0.4 / 0.6, 0.0, 2.5 * 0.2 / 0.6];
        assert_near(&biased(spec, &logits, Some(&bias)), &wanted);
        let free = RouteSpec {
            sum: RouteSum::Free,
            ..spec
        };
        let wanted = [0.0, 2.5 * 0.4, 0.0, 2.5 * 0.2];
        assert_near(&biased(free, &logits, Some(&bias)), &wanted);
        let softmax = RouteSpec::plain(1, RouteGate::Softmax);
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let wanted = [0.0, 0.0, 0.2];
        assert_near(&biased(softmax, &logits, Some(&[0.0, 0.1, 0.4])), &wanted);
    }

    #[test]
    fn groups_are_left_out_by_their_best_or_by_their_two_best() {
        let with = |score, n_used| RouteSpec {
            groups: Some(RouteGroups {
                n_groups: 3,
                n_used: 1,
                score,
            }),
            ..RouteSpec::plain(n_used, RouteGate::Sigmoid)
        };
        let logits = logits([0.1, 0.9, 0.6, 0.7, 0.65, 0.65]);
        let wanted = [0.0, 0.9, 0.0, 0.0, 0.0, 0.0];
        assert_near(&routed(with(GroupScore::Max, 1), &logits), &wanted);
        // 1.0, 1.3 and 1.3: of equal groups the first.
        let wanted = [0.0, 0.0, 0.6, 0.7, 0.0, 0.0];
        assert_near(&routed(with(GroupScore::TopTwo, 2), &logits), &wanted);
        let bias = [0.0, 0.0, 0.0, 0.0, 0.1, 0.0];
        let wanted = [0.0, 0.0, 0.0, 0.0, 0.65, 0.0];
        assert_near(
            &biased(with(GroupScore::TopTwo, 1), &logits, Some(&bias)),
            &wanted,
        );
        assert_eq!(GroupScore::TopTwo.of(&[0.25]), 0.25);
    }

    #[test]
    fn the_order_in_a_group_does_not_count() {
        for choices in [[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0]] {
            let scores = [GroupScore::Max, GroupScore::TopTwo].map(|score| score.of(&choices));
            assert_eq!(scores, [3.0, 5.0], "{choices:?}");
        }
    }

    #[test]
    fn a_group_may_be_one_expert() {
        let groups = RouteGroups {
            n_groups: 3,
            n_used: 1,
            score: GroupScore::TopTwo,
        };
        let spec = RouteSpec {
            groups: Some(groups),
            ..RouteSpec::plain(1, RouteGate::Sigmoid)
        };
        let logits = logits([0.5, 0.45, 0.9]);
        assert_near(&routed(spec, &logits), &[0.0, 0.0, 0.9]);
    }
}
