//! Text and DOT forms of a graph.
//!
//! Text is one node a line: number, name, type and shape, operation with operands and fields. It is
//! what snapshots hold, so it changes only when the graph does.

use std::fmt;

use super::custom::CustomSpec;
use super::experts::RouteSpec;
use super::op::{AttendSpec, Input, Op};
use super::{Graph, Node, NodeId};
use crate::rope::{RopeScaling, RopeSpec};

/// Displays a graph as text.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a>(pub(super) &'a Graph);

/// Displays a graph in the DOT language.
#[derive(Clone, Copy, Debug)]
pub struct Dot<'a>(pub(super) &'a Graph);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graph = self.0;
        let shape = graph.shape();
        writeln!(
            f,
            "graph: {} tokens, {} outputs",
            shape.n_tokens, shape.n_outputs
        )?;
        for (node, id) in graph.nodes().iter().zip(0..) {
            let (name, call) = (&node.name, call(node));
            writeln!(f, "{} {name}: {} = {call}", NodeId(id), type_of(node))?;
        }
        let outputs: Vec<_> = graph.outputs().iter().map(ToString::to_string).collect();
        writeln!(f, "return {}", outputs.join(", "))
    }
}

impl fmt::Display for Dot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graph = self.0;
        writeln!(f, "digraph cellar {{")?;
        writeln!(
            f,
            "  rankdir=TB; node [shape=box, fontname=\"monospace\", fontsize=10];"
        )?;
        for (node, id) in graph.nodes().iter().zip(0u32..) {
            let label = format!(
                "{}\\n{} {}",
                escape(&node.name),
                node.op.name(),
                type_of(node)
            );
            let style = match &node.op {
                Op::Input(_) => ", shape=ellipse",
                Op::StoreKv { .. }
                | Op::StoreK { .. }
                | Op::Attend { .. }
                | Op::AttendBatch { .. }
                | Op::Kq { .. }
                | Op::Kqv { .. }
                | Op::Conv { .. }
                | Op::Scan { .. }
                | Op::ScanHeads { .. }
                | Op::Custom {
                    custom: CustomSpec { layer: Some(_), .. },
                } => ", style=filled, fillcolor=lightyellow",
                _ => "",
            };
            writeln!(f, "  n{id} [label=\"{label}\"{style}];")?;
            for operand in &node.operands {
                writeln!(f, "  n{} -> n{id};", operand.0)?;
            }
        }
        for output in graph.outputs() {
            writeln!(f, "  n{} [peripheries=2];", output.0)?;
        }
        writeln!(f, "}}")
    }
}

fn escape(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"")
}

fn type_of(node: &Node) -> String {
    if node.shape.is_empty() {
        return node.dtype.to_string();
    }
    format!("{}{:?}", node.dtype, node.shape)
}

/// The operation with operands and fields, for example `linear(%4, w=blk.0.attn_q.weight)`.
fn call(node: &Node) -> String {
    let mut args: Vec<String> = node.operands.iter().map(ToString::to_string).collect();
    args.extend(fields(&node.op));
    format!("{}({})", node.op.name(), args.join(", "))
}

pub(super) fn fields(op: &Op) -> Vec<String> {
    match op {
        Op::Input(Input::Visibility { part, window }) => {
            vec![format!("part={part}"), format!("window={window}")]
        }
        Op::Input(Input::Cells { part }) => vec![format!("part={part}")],
        Op::Input(Input::BatchVisibility { window }) => vec![format!("window={window}")],
        Op::Embed { weight } => vec![format!("w={weight}")],
        Op::Linear { weight, bias } | Op::ExpertLinear { weight, bias } => {
            let bias = bias.iter().map(|b| format!("b={b}"));
            std::iter::once(format!("w={weight}")).chain(bias).collect()
        }
        Op::RmsNorm { weight, eps } => {
            let weight = weight.iter().map(|w| format!("w={w}"));
            weight.chain([format!("eps={eps}")]).collect()
        }
        Op::Rope { rope } => rope_fields(rope),
        Op::RopeSections { rope, sections } => {
            let [positions, rows, columns] = sections.pairs;
            let order = format!("{:?}", sections.order).to_lowercase();
            let mut fields = rope_fields(rope);
            fields.push(format!("sections={positions}/{rows}/{columns}"));
            fields.push(format!("order={order}"));
            fields
        }
        Op::Scale { factor } => vec![format!("factor={factor}")],
        Op::Gate { activation } => vec![format!("activation={activation}")],
        Op::StoreKv { layer } | Op::StoreK { layer } => vec![format!("layer={layer}")],
        Op::Attend { layer, spec, sinks } => {
            let mut fields = vec![format!("layer={layer}")];
            fields.extend(attend_fields(spec, sinks.as_deref()));
            fields
        }
        Op::AttendBatch { spec, sinks } | Op::KqSoftMax { spec, sinks } => {
            attend_fields(spec, sinks.as_deref())
        }
        Op::Kq { layer, spec } | Op::Kqv { layer, spec } => {
            let mut fields = vec![format!("layer={layer}")];
            fields.extend(attend_fields(spec, None));
            fields
        }
        Op::Activate { activation } => vec![format!("activation={activation}")],
        Op::Columns { first } => vec![format!("first={first}")],
        Op::Conv { layer, conv } => {
            let mut fields = vec![format!("layer={layer}"), format!("width={}", conv.width)];
            fields.push(format!("w={}", conv.weight));
            fields.extend(conv.bias.iter().map(|b| format!("b={b}")));
            fields
        }
        Op::Scan { layer, scan } => vec![
            format!("layer={layer}"),
            format!("d_state={}", scan.d_state),
            format!("a={}", scan.a),
            format!("d={}", scan.d),
        ],
        Op::LayerNorm { weight, bias, eps } => {
            let mut fields = vec![format!("w={weight}")];
            fields.extend(bias.iter().map(|b| format!("b={b}")));
            fields.push(format!("eps={eps}"));
            fields
        }
        Op::AddRow { weight, row } => vec![format!("w={weight}"), format!("row={row}")],
        Op::SoftCap { cap } => vec![format!("cap={cap}")],
        Op::ClampedGate { slope, limit } => {
            vec![format!("slope={slope}"), format!("limit={limit}")]
        }
        Op::ScaleByPosition { scale } => vec![
            format!("every={}", scale.every),
            format!("strength={}", scale.strength),
        ],
        Op::Route { spec } => route_fields(spec),
        Op::Custom { custom } => {
            let mut fields = vec![custom.name.clone()];
            fields.extend(custom.layer.map(|layer| format!("layer={layer}")));
            fields.extend(
                custom
                    .params
                    .iter()
                    .map(|(name, value)| format!("{name}={value}")),
            );
            fields.extend(custom.weights.iter().map(|name| format!("w={name}")));
            fields
        }
        Op::ScanHeads { layer, scan } => vec![
            format!("layer={layer}"),
            format!("heads={}/{}", scan.n_heads, scan.n_groups),
            format!("d_state={}", scan.d_state),
            format!("a={}", scan.a),
            format!("d={}", scan.d),
            format!("dt_bias={}", scan.dt_bias),
        ],
        Op::Input(_) | Op::Reshape | Op::Add | Op::Mul | Op::TakeRows => vec![],
        Op::ExpertWeigh | Op::ExpertSum => vec![],
    }
}

fn attend_fields(spec: &AttendSpec, sinks: Option<&str>) -> Vec<String> {
    let AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        scale,
        soft_cap,
        alibi,
    } = spec;
    let mut fields = vec![
        format!("heads={n_heads}/{kv_heads}"),
        format!("dim={k_dim}/{v_dim}"),
        format!("scale={scale}"),
    ];
    fields.extend(soft_cap.map(|cap| format!("soft_cap={cap}")));
    fields.extend(alibi.map(|alibi| format!("alibi={}", alibi.max_bias)));
    fields.extend(sinks.map(|name| format!("sinks={name}")));
    fields
}

fn route_fields(spec: &RouteSpec) -> Vec<String> {
    let gate = format!("{:?}", spec.gate).to_lowercase();
    let sum = format!("{:?}", spec.sum).to_lowercase();
    vec![
        format!("used={}", spec.n_used),
        format!("gate={gate}"),
        format!("sum={sum}"),
    ]
}

fn rope_fields(rope: &RopeSpec) -> Vec<String> {
    let RopeSpec {
        style,
        n_rot,
        base,
        scaling,
        factors,
    } = rope;
    let mut fields = vec![
        format!("style={}", format!("{style:?}").to_lowercase()),
        format!("n_rot={n_rot}"),
        format!("base={base}"),
    ];
    match scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => fields.push(format!("linear={factor}")),
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
        } => {
            fields.push(format!("yarn={factor}"));
            fields.push(format!("original_context={original_context}"));
            fields.push(format!("beta={beta_fast}/{beta_slow}"));
            fields.push(format!("attention_factor={attention_factor:.6}"));
        }
        RopeScaling::LongRope { attention_factor } => {
            fields.push(format!("attention_factor={attention_factor:.6}"));
        }
    }
    fields.extend(factors.iter().map(|name| format!("factors={name}")));
    fields
}
