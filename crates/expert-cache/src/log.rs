//! Traces as text: a line of JSON for the stacks of a model, and one for each choice of a router.
//!
//! Invariant: what is written is read again as it was.

use std::io::BufRead;

use serde::{Deserialize, Serialize};

use crate::cache::{Choice, Stack};
use crate::replay::{RouteStep, RouteTrace};

/// A line with the stacks of the lines that follow.
#[derive(Serialize, Deserialize)]
struct StacksLine {
    expert_stacks: Vec<Stack>,
    budget: u64,
}

/// How the first line begins.
const BEGINNING: &[u8] = b"{\"expert_stacks\"";

/// A line with the choices of one layer's router in a step: pairs of an expert and its rows.
#[derive(Serialize, Deserialize)]
struct ChoiceLine {
    layer: u32,
    rows: u32,
    experts: Vec<(u32, u32)>,
}

impl RouteTrace {
    /// The line of a model's stacks and the bytes that its experts may take.
    pub fn stacks_line(stacks: &[Stack], budget: u64) -> String {
        let line = StacksLine {
            expert_stacks: stacks.to_vec(),
            budget,
        };
        serde_json::to_string(&line).unwrap_or_default()
    }

    /// True if a trace begins like this.
    pub fn begins(bytes: &[u8]) -> bool {
        bytes.starts_with(BEGINNING)
    }

    /// Reads a trace. Where a model's stacks come more than once, as more graphs are compiled, the
    /// last ones count.
    ///
    /// # Errors
    /// A text with the number of the line that is none of a trace.
    pub fn read(lines: impl BufRead) -> Result<Self, String> {
        let mut trace = Self::default();
        for (number, line) in (1..).zip(lines.lines()) {
            let wrong = |why: &dyn std::fmt::Display| format!("line {number}: {why}");
            let line = line.map_err(|e| wrong(&e))?;
            if let Ok(StacksLine {
                expert_stacks,
                budget,
            }) = serde_json::from_str(&line)
            {
                (trace.stacks, trace.budget) = (expert_stacks, budget);
                continue;
            }
            if trace.stacks.is_empty() {
                return Err(wrong(
                    &"no trace of routers: it begins with 'expert_stacks'",
                ));
            }
            let line: ChoiceLine = serde_json::from_str(&line).map_err(|e| wrong(&e))?;
            let layer = trace.stacks.iter().find(|s| s.layer == line.layer);
            let Some(n_experts) = layer.map(|s| s.n_experts) else {
                return Err(wrong(&format!("there is no layer {}", line.layer)));
            };
            if let Some((expert, _)) = line.experts.iter().find(|(e, _)| *e >= n_experts) {
                let why = format!("layer {} has no expert {expert}", line.layer);
                return Err(wrong(&why));
            }
            let choices = line.experts.into_iter();
            let choices = choices.map(|(expert, n_rows)| Choice { expert, n_rows });
            trace.steps.push(RouteStep {
                layer: line.layer,
                n_rows: line.rows,
                choices: choices.collect(),
            });
        }
        Ok(trace)
    }
}

impl RouteStep {
    /// The line of what a layer's router chose.
    pub fn line(layer: u32, choices: &[Choice], n_rows: u32) -> String {
        let experts = choices.iter().map(|c| (c.expert, c.n_rows)).collect();
        let line = ChoiceLine {
            layer,
            rows: n_rows,
            experts,
        };
        serde_json::to_string(&line).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let stack = |layer| Stack {
            layer,
            n_experts: 4,
            n_bytes: 4096,
        };
        let choice = |expert, n_rows| Choice { expert, n_rows };
        let steps = [(0, vec![choice(1, 3), choice(3, 5)], 5), (1, vec![], 5)];
        let mut text = RouteTrace::stacks_line(&[stack(0)], 9) + "\n";
        text += &(RouteTrace::stacks_line(&[stack(0), stack(1)], 8192) + "\n");
        for (layer, choices, n_rows) in &steps {
            text += &(RouteStep::line(*layer, choices, *n_rows) + "\n");
        }
        assert!(RouteTrace::begins(text.as_bytes()));
        let trace = RouteTrace::read(text.as_bytes()).unwrap();
        assert_eq!(trace.stacks, [stack(0), stack(1)]);
        assert_eq!(trace.budget, 8192);
        let found = trace.steps.into_iter();
        let found: Vec<_> = found.map(|s| (s.layer, s.choices, s.n_rows)).collect();
        assert_eq!(found, steps);
        for (wrong, why) in [
            (
                "{\"layer\":9,\"rows\":1,\"experts\":[]}",
                "line 5: there is no layer 9",
            ),
            (
                "{\"layer\":0,\"rows\":1,\"experts\":[[4,1]]}",
                "line 5: layer 0 has no expert 4",
            ),
            ("{}", "line 5: missing field"),
        ] {
            let refused = RouteTrace::read(format!("{text}{wrong}").as_bytes()).unwrap_err();
            assert!(refused.starts_with(why), "{refused}");
        }
        let refused = RouteTrace::read("{\"n_ctx\":4}".as_bytes()).unwrap_err();
        assert!(refused.contains("line 1: no trace of routers"), "{refused}");
        assert!(!RouteTrace::begins(b"{\"n_ctx\":4}"));
    }
}
