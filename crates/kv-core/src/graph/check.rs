//! Whether a graph that came from outside is one that the builder would have built.
//!
//! Every node is added again through [`GraphBuilder`] and compared with what the text said, so there
//! is one definition of shapes and operands. Knows no format.

use super::builder::{GraphBuilder, GraphError, NormGain};
use super::op::{AttendSpec, Input, Op};
use super::{Graph, Node, NodeId};

/// The same graph, built again.
pub(super) fn rebuild(graph: &Graph) -> Result<Graph, GraphError> {
    let mut b = GraphBuilder::new(graph.shape);
    for (at, node) in graph.nodes.iter().enumerate() {
        let known = node.operands.iter().find(|o| o.as_usize() >= at);
        if let Some(&operand) = known {
            return Err(GraphError::UnknownOperand {
                node: node.name.clone(),
                operand,
            });
        }
        add(&mut b, graph, node)?;
    }
    let rebuilt = b.finish(&graph.outputs)?;
    let differs = |(a, b): (&Node, &Node)| (a != b).then(|| b.name.clone());
    let node = rebuilt.nodes.iter().zip(&graph.nodes).find_map(differs);
    match node {
        Some(node) => Err(GraphError::NotAsBuilt { node }),
        None if rebuilt != *graph => Err(GraphError::NotAsBuilt {
            node: "graph".into(),
        }),
        None => Ok(rebuilt),
    }
}

/// Adds a node whose operands are those of `b`, with the weights that `graph` declares.
pub(super) fn add(b: &mut GraphBuilder, graph: &Graph, node: &Node) -> Result<NodeId, GraphError> {
    let name = node.name.as_str();
    match &node.op {
        Op::Input(input) => {
            let [] = operands(node)?;
            b.input(*input)
        }
        Op::Embed { weight } => {
            let [tokens] = operands(node)?;
            let used = graph.weights.iter().find(|w| w.name == *weight);
            let Some(&[vocab, dim]) = used.map(|w| w.shape.as_slice()) else {
                return Err(GraphError::NotAsBuilt {
                    node: name.to_owned(),
                });
            };
            b.embed(name, tokens, weight, [vocab, dim])
        }
        Op::Linear { weight, bias } => {
            let [x] = operands(node)?;
            let n_out = node.shape.last().copied().unwrap_or(0);
            b.affine(name, x, (weight, bias.as_deref()), n_out)
        }
        Op::RmsNorm { weight, eps } => {
            let [x] = operands(node)?;
            let shape = |name: &str| graph.weights.iter().find(|w| w.name == name);
            let gain = match weight.as_deref() {
                None => NormGain::None,
                Some(weight) if shape(weight).is_some_and(|w| w.shape.len() == 2) => {
                    NormGain::PerGroup(weight)
                }
                Some(weight) => NormGain::Shared(weight),
            };
            b.rms_norm_with(name, x, gain, *eps)
        }
        Op::Rope { rope } => {
            let [x, positions] = operands(node)?;
            b.rope(name, x, positions, rope)
        }
        Op::RopeSections { rope, sections } => {
            let [x, coordinates] = operands(node)?;
            b.rope_sections(name, (x, coordinates), rope, *sections)
        }
        Op::Reshape => {
            let [x] = operands(node)?;
            b.reshape(name, x, &node.shape)
        }
        Op::Add => {
            let [x, y] = operands(node)?;
            b.add(name, x, y)
        }
        Op::Mul => {
            let [x, y] = operands(node)?;
            b.mul(name, x, y)
        }
        Op::Scale { factor } => {
            let [x] = operands(node)?;
            b.scale(name, x, *factor)
        }
        Op::Gate { activation } => {
            let [gate, up] = operands(node)?;
            b.gate(name, *activation, gate, up)
        }
        Op::Activate { activation } => {
            let [x] = operands(node)?;
            b.activate(name, *activation, x)
        }
        Op::Columns { first } => {
            let [x] = operands(node)?;
            let len = node.shape.last().copied().unwrap_or(0);
            b.columns(name, x, *first..first.saturating_add(len))
        }
        Op::Conv { layer, conv } => b.conv(name, *layer, conv, operands(node)?),
        Op::Scan { layer, scan } => b.scan(name, *layer, scan, operands(node)?),
        Op::ScanHeads { layer, scan } => b.scan_heads(name, *layer, scan, operands(node)?),
        Op::StoreK { layer } => b.store_k(name, *layer, operands(node)?),
        Op::StoreKv { layer } => b.store_kv(name, *layer, operands(node)?),
        Op::LayerNorm { weight, bias, eps } => {
            let [x] = operands(node)?;
            b.layer_norm(name, x, (weight, bias.as_deref()), *eps)
        }
        Op::AddRow { weight, row } => {
            let [x] = operands(node)?;
            let used = graph.weights.iter().find(|w| w.name == *weight);
            let n_rows = used.and_then(|w| w.shape.first()).copied().unwrap_or(0);
            b.add_row(name, x, (weight, n_rows), *row)
        }
        Op::SoftCap { cap } => {
            let [x] = operands(node)?;
            b.soft_cap(name, x, *cap)
        }
        Op::ClampedGate { slope, limit } => b.clamped_gate(name, (*slope, *limit), operands(node)?),
        Op::ScaleByPosition { scale } => b.scale_by_position(name, *scale, operands(node)?),
        Op::Route { spec } => {
            let [logits] = operands(node)?;
            b.route(name, logits, *spec)
        }
        Op::ExpertLinear { weight, bias } => {
            let n_out = node.shape.last().copied().unwrap_or(0);
            b.expert_linear(name, operands(node)?, (weight, bias.as_deref()), n_out)
        }
        Op::ExpertWeigh => b.expert_weigh(name, operands(node)?),
        Op::ExpertSum => {
            let [x] = operands(node)?;
            b.expert_sum(name, x)
        }
        Op::Attend { layer, spec, sinks } => {
            let operands = attend_operands(node, spec)?;
            b.attend_with_sinks(name, *layer, (*spec, sinks.as_deref()), operands)
        }
        Op::AttendBatch { spec, sinks } => {
            let [q, k, v, visibility] = attend_operands(node, spec)?;
            let window = match b.op_of(visibility) {
                Some(Op::Input(Input::BatchVisibility { window })) => *window,
                _ => {
                    return Err(GraphError::NotAsBuilt {
                        node: name.to_owned(),
                    });
                }
            };
            b.attend_batch(name, (*spec, sinks.as_deref()), [q, k, v], window)
        }
        Op::Custom { custom } => {
            let shape_of = |name: &String| {
                let used = graph.weights.iter().find(|w| w.name == *name);
                used.map_or(&[][..], |w| &w.shape)
            };
            let shapes: Vec<&[usize]> = custom.weights.iter().map(shape_of).collect();
            let width = node.shape.last().copied().unwrap_or(0);
            b.custom(name, custom, &node.operands, (&shapes, width))
        }
        Op::Kq { layer, spec } => {
            let n_kv = node.shape.last().copied().unwrap_or(0);
            b.kq(name, (*layer, *spec), operands(node)?, n_kv)
        }
        Op::KqSoftMax { spec, sinks } => {
            let operands = attend_operands(node, spec)?;
            b.kq_soft_max(name, (*spec, sinks.as_deref()), operands)
        }
        Op::Kqv { layer, spec } => b.kqv(name, (*layer, *spec), operands(node)?),
        Op::TakeRows => {
            let [x, rows] = operands(node)?;
            b.take_rows(name, x, rows)
        }
    }
}

/// The operands of an attention without the positions, which the builder adds itself.
fn attend_operands<const N: usize>(
    node: &Node,
    spec: &AttendSpec,
) -> Result<[NodeId; N], GraphError> {
    let n_positions = usize::from(spec.alibi.is_some());
    match node.operands.split_last_chunk::<1>() {
        Some((first, _)) if n_positions == 1 => named(node, first),
        _ => named(node, &node.operands),
    }
}

fn operands<const N: usize>(node: &Node) -> Result<[NodeId; N], GraphError> {
    named(node, &node.operands)
}

fn named<const N: usize>(node: &Node, operands: &[NodeId]) -> Result<[NodeId; N], GraphError> {
    <[NodeId; N]>::try_from(operands).map_err(|_| GraphError::OperandCount {
        node: node.name.clone(),
        op: node.op.name(),
        wanted: N,
        got: operands.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{DType, GraphShape};

    fn graph() -> Graph {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 2,
            n_outputs: 2,
        });
        let tokens = b.input(Input::Tokens).unwrap();
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        let y = b.linear("y", x, "w", 6).unwrap();
        b.finish(&[y]).unwrap()
    }

    fn refused(change: impl Fn(&mut Graph)) -> GraphError {
        let mut graph = graph();
        change(&mut graph);
        Graph::from_json(&graph.to_json().unwrap()).unwrap_err()
    }

    #[test]
    fn what_was_built_reads_back() {
        assert_eq!(Graph::from_json(&graph().to_json().unwrap()), Ok(graph()));
    }

    #[test]
    fn what_could_not_be_built_is_refused() {
        assert!(matches!(
            refused(|g| g.nodes[2].operands.clear()),
            GraphError::OperandCount {
                wanted: 1,
                got: 0,
                ..
            }
        ));
        assert!(matches!(
            refused(|g| g.nodes[1].operands = vec![NodeId(2)]),
            GraphError::UnknownOperand { .. }
        ));
        assert!(matches!(
            refused(|g| g.nodes[1].shape = vec![2, 5]),
            GraphError::NotAsBuilt { .. }
        ));
        assert!(matches!(
            refused(|g| g.nodes[2].dtype = DType::U32),
            GraphError::NotAsBuilt { .. }
        ));
        assert!(matches!(
            refused(|g| g.weights.clear()),
            GraphError::NotAsBuilt { .. }
        ));
        assert!(matches!(
            refused(|g| g.nodes[2].name = "embd".into()),
            GraphError::DuplicateName { .. }
        ));
        assert!(matches!(
            refused(|g| g.outputs = vec![NodeId(7)]),
            GraphError::UnknownOperand { .. }
        ));
        assert!(matches!(
            Graph::from_json("{}").unwrap_err(),
            GraphError::Json(_)
        ));
    }
}
