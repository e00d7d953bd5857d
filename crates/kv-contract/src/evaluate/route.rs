//! The definition of routes.
//!
//! Knows nothing of what experts compute.

use kv_graph::{GroupScore, Node, RouteGate, RouteGroups, RouteSpec, RouteSum};

use super::{Evaluator, Value};

impl Evaluator<'_> {
    pub(super) fn route(
        &self,
        node: &Node,
        spec: &RouteSpec,
        bias: Option<&str>,
        gain: Option<&str>,
    ) -> Value {
        let values = |weight: Option<&str>, without: f64| {
            weight.map_or_else(|| vec![without; node.row_len()], |w| self.weight(w))
        };
        let (bias, gain) = (values(bias, 0.0), values(gain, 1.0));
        let rows = self.operand(node, 0).chunks_exact(node.row_len());
        let gained = |logits: &[f64]| -> Value {
            let route = route(logits, spec, &bias).into_iter().zip(&gain);
            route.map(|(weight, gain)| weight * gain).collect()
        };
        rows.flat_map(gained).collect()
    }
}

/// A route by sparsemixer: each chosen expert's share among those left that are near to it.
fn sparsemixer(logits: &[f64], spec: &RouteSpec, jitter: f64) -> Value {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let mut route = vec![0.0; logits.len()];
    for (rank, &expert) in order[..spec.n_used].iter().enumerate() {
        let own = logits[expert];
        let near = |x: &f64| (own - x) / own.max(x.abs()) <= 2.0 * jitter;
        let rest = order[rank..].iter().map(|&other| logits[other]);
        route[expert] = own.exp() / rest.filter(near).map(f64::exp).sum::<f64>();
    }
    let sum: f64 = match spec.sum {
        RouteSum::Free => 1.0,
        RouteSum::One => route.iter().sum(),
    };
    let weights = route.into_iter();
    weights.map(|w| w * f64::from(spec.scale) / sum).collect()
}

/// The weights of all experts of one token.
fn route(logits: &[f64], spec: &RouteSpec, bias: &[f64]) -> Value {
    if let RouteGate::Sparsemixer { jitter } = spec.gate {
        return sparsemixer(logits, spec, f64::from(jitter));
    }
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |logit: f64| match spec.gate {
        RouteGate::Softmax => logit.exp() / sum,
        _ => 1.0 / (1.0 + (-logit).exp()),
    };
    let scores: Value = logits.iter().map(|&logit| score(logit)).collect();
    let choices: Value = scores
        .iter()
        .zip(bias)
        .map(|(score, bias)| score + bias)
        .collect();
    let mut allowed = vec![true; logits.len()];
    if let Some(groups) = &spec.groups {
        let len = logits.len() / groups.n_groups;
        let best = best_groups(&choices, groups);
        for (expert, allowed) in allowed.iter_mut().enumerate() {
            *allowed = best.contains(&(expert / len));
        }
    }
    let mut order: Vec<usize> = (0..logits.len())
        .filter(|&expert| allowed[expert])
        .collect();
    order.sort_by(|&a, &b| choices[b].total_cmp(&choices[a]));
    let chosen = &order[..spec.n_used];
    let sum = match spec.sum {
        RouteSum::Free => 1.0,
        RouteSum::One => chosen.iter().map(|&expert| scores[expert]).sum(),
    };
    let mut route = vec![0.0; logits.len()];
    for &expert in chosen {
        route[expert] = f64::from(spec.scale) * scores[expert] / sum;
    }
    route
}

/// The groups that are chosen from.
fn best_groups(choices: &[f64], groups: &RouteGroups) -> Vec<usize> {
    let score = |choices: &[f64]| {
        let mut choices = choices.to_vec();
        choices.sort_by(|a, b| b.total_cmp(a));
        let n = match groups.score {
            GroupScore::Max => 1,
            GroupScore::TopTwo => 2,
        };
        choices.iter().take(n).sum::<f64>()
    };
    let scores: Value = choices
        .chunks(choices.len() / groups.n_groups)
        .map(score)
        .collect();
    let mut order: Vec<usize> = (0..groups.n_groups).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(groups.n_used);
    order
}
