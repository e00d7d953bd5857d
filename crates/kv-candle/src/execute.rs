//! Runs a [`Program`]: a few lines for each operation.
//!
//! Invariant: inputs are checked whole before the first node is computed; results without values
//! (no outputs wanted) are never made, so no operation meets an empty tensor. Does not know how
//! an operation is computed where it takes more than a few lines.

use candle_core::{D, Device, Tensor};
use kv_backend::checks::{Ids, batch_visibility, ids, part_inputs, part_of, stored_visibility};
use kv_backend::{BackendError, check_inputs, check_rows, expect_len};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{LayerIdx, Visibility};
use kv_graph::{
    Activation, ConvSpec, CustomSpec, Input, Node, Op, RelativeBias, RelativeScores, ResultForm,
};
use kv_rows::ValueRows;

use crate::error::{OnDevice, failure};
use crate::ops::{self, AffineTensors, IndexQueries, Queries};
use crate::program::{Program, Rotation, unsupported};
use crate::rows::{KvTensors, RowTensor, Rows};

/// Runs `program` once.
pub(crate) fn run(
    program: &Program,
    rows: &mut Rows,
    inputs: &GraphInputs<'_>,
    outputs: &mut GraphOutputs,
) -> Result<(), BackendError> {
    let graph = &program.graph;
    check_rows(graph, rows.layout())?;
    check_inputs(graph, rows.layout(), inputs)?;
    let n_nodes = graph.nodes().len();
    let mut run = Run {
        program,
        rows,
        inputs,
        angles: Vec::new(),
        results: vec![None; n_nodes],
    };
    run.find_angles()?;
    for (at, node) in graph.nodes().iter().enumerate() {
        inputs.check_cancelled()?;
        inputs.report_step(at, n_nodes);
        let result = run.compute(node)?;
        if let Some(tensor) = &result
            && tensor.dims() != node.shape
        {
            let (name, got) = (&node.name, tensor.dims());
            return Err(failure(format!(
                "node '{name}' is {got:?}, not {:?}",
                node.shape
            )));
        }
        run.results[at] = result;
        for id in &node.operands {
            if program.last_use[id.as_usize()] == at {
                run.results[id.as_usize()] = None;
            }
        }
    }
    let wanted = graph.outputs();
    let sizes = wanted
        .iter()
        .map(|&id| graph.node(id).map_or(0, Node::n_values));
    for (buffer, id) in outputs.resize(sizes).iter_mut().zip(wanted) {
        if let Some(tensor) = &run.results[id.as_usize()] {
            copy_out(tensor, buffer)?;
        }
    }
    Ok(())
}

/// All values of `tensor`.
pub(crate) fn copy_out(tensor: &Tensor, out: &mut [f32]) -> Result<(), BackendError> {
    let values = tensor
        .flatten_all()
        .and_then(|t| t.to_vec1::<f32>())
        .on_device()?;
    expect_len("values of a result", out.len(), values.len())?;
    out.copy_from_slice(&values);
    Ok(())
}

/// `activation(x)`, or `None` for a function that this version does not know.
fn activate(activation: Activation, x: &Tensor) -> Option<candle_core::Result<Tensor>> {
    match activation {
        Activation::Silu => Some(x.silu()),
        // Candle's `gelu` is the tanh form; the exact one is its `gelu_erf`.
        Activation::GeluTanh => Some(x.gelu()),
        Activation::GeluErf => Some(x.gelu_erf()),
        Activation::Sigmoid => Some(candle_nn::ops::sigmoid(x)),
        Activation::Relu => Some(x.relu()),
        Activation::ReluSquared => Some(x.relu().and_then(|x| x.sqr())),
        _ => None,
    }
}

/// The angles of tokens of text.
fn of_numbers(
    rotation: &Rotation,
    positions: &[u32],
    device: &Device,
) -> candle_core::Result<[Tensor; 2]> {
    let coordinates: Vec<[u32; 3]> = positions.iter().map(|&pos| [pos; 3]).collect();
    ops::angles(rotation, &coordinates, device)
}

struct Run<'a> {
    program: &'a Program,
    rows: &'a Rows,
    inputs: &'a GraphInputs<'a>,
    /// Cosines and sines of each of the program's rotations.
    angles: Vec<[Tensor; 2]>,
    results: Vec<Option<Tensor>>,
}

impl Run<'_> {
    fn find_angles(&mut self) -> Result<(), BackendError> {
        if self.program.graph.shape().n_tokens == 0 {
            return Ok(());
        }
        for rotation in &self.program.rotations {
            let positions = rotation
                .positions
                .and_then(|id| self.program.graph.node(id));
            let device = &self.program.device;
            let angles = match positions.map(|n| &n.op) {
                Some(Op::Input(Input::Coordinates)) => {
                    ops::angles(rotation, self.inputs.coordinates, device)
                }
                Some(Op::Input(Input::Tokens)) => of_numbers(rotation, self.inputs.tokens, device),
                Some(Op::Input(Input::OutputRows)) => {
                    of_numbers(rotation, self.inputs.output_rows, device)
                }
                _ => of_numbers(rotation, self.inputs.positions, device),
            };
            let angles = angles.on_device()?;
            self.angles.push(angles);
        }
        Ok(())
    }

    /// The result of `node`, or `None` where it has no values.
    fn compute(&self, node: &Node) -> Result<Option<Tensor>, BackendError> {
        if node.n_values() == 0 {
            return Ok(None);
        }
        let Self {
            program, inputs, ..
        } = self;
        let shape = node.shape.as_slice();
        let result = match &node.op {
            Op::Input(Input::Embeddings { .. }) => {
                Tensor::from_slice(inputs.embeddings, shape, &program.device)
            }
            // Ids and visibility stay on the host until an operation reads them.
            Op::Input(_) => return Ok(None),
            Op::Embed { weight } => program
                .weight(weight, node)?
                .index_select(&self.indices(node, 0)?, 0),
            Op::Linear { weight, bias } => {
                let affine = self.affine(node, weight, bias.as_deref())?;
                ops::linear(self.operand(node, 0)?, affine)
            }
            Op::RmsNorm { weight, eps } => {
                let gain = weight.as_deref().map(|w| program.weight(w, node));
                ops::rms_norm(self.operand(node, 0)?, gain.transpose()?, *eps)
            }
            Op::Rope { rope } | Op::RopeSections { rope, .. } => {
                let known = program.rotation(node);
                let angles = known.and_then(|at| self.angles.get(at));
                let angles =
                    angles.ok_or_else(|| failure(format!("no angles for {}", node.name)))?;
                ops::rotate(self.operand(node, 0)?, rope, angles)
            }
            Op::Reshape => self.operand(node, 0)?.reshape(shape),
            Op::Columns { first } => {
                let len = node.shape.last().copied().unwrap_or(0);
                let columns = self.operand(node, 0)?.narrow(D::Minus1, *first, len);
                columns.and_then(|c| c.contiguous())
            }
            Op::HeadLinear { weight } => {
                ops::head_linear(self.operand(node, 0)?, program.weight(weight, node)?)
            }
            Op::Concat => Tensor::cat(&self.operands::<2>(node)?, D::Minus1),
            Op::StoreKv { layer } => {
                let [k, v] = self.operands(node)?;
                return self.store(node, *layer, 2, [k, v]);
            }
            Op::StoreK { layer } => {
                let [k] = self.operands(node)?;
                return self.store(node, *layer, 1, [k, k]);
            }
            Op::LayerNorm { weight, bias, eps } => {
                let weights = self.optional_weights(node, [weight, bias])?;
                ops::layer_norm(self.operand(node, 0)?, weights, *eps)
            }
            Op::Route { spec, bias, gain } => {
                let tables = self.optional_weights(node, [bias, gain])?;
                ops::route(self.operand(node, 0)?, spec, tables)
            }
            Op::Mix => {
                let [x, coefficients] = self.operands::<2>(node)?;
                coefficients.matmul(x)
            }
            Op::GaussianTopK { deviations } => {
                ops::gaussian_top_k(self.operand(node, 0)?, *deviations)
            }
            Op::ExpertLinear { weight, bias } => {
                let affine = self.affine(node, weight, bias.as_deref())?;
                ops::expert_linear(self.operand(node, 0)?, &self.slots(node)?, affine)
            }
            Op::ExpertScale => ops::expert_scale(self.operand(node, 0)?, &self.slots(node)?),
            Op::ExpertSum => self.operand(node, 0)?.sum(1),
            Op::TopK { k } => ops::top_k(self.operand(node, 0)?, *k),
            Op::Custom { custom } => return self.custom(node, custom).map(Some),
            Op::TakeRows => self
                .operand(node, 0)?
                .index_select(&self.indices(node, 1)?, 0),
            _ => self.elementwise(node)?,
        };
        result.map(Some).on_device()
    }

    /// A weight and perhaps its bias.
    fn optional_weights(
        &self,
        node: &Node,
        [a, b]: [&Option<String>; 2],
    ) -> Result<[Option<&Tensor>; 2], BackendError> {
        let weight = |name: &Option<String>| {
            let weight = name.as_deref().map(|name| self.program.weight(name, node));
            weight.transpose()
        };
        Ok([weight(a)?, weight(b)?])
    }

    fn affine(
        &self,
        node: &Node,
        weight: &str,
        bias: Option<&str>,
    ) -> Result<AffineTensors<'_>, BackendError> {
        let bias = bias.map(|b| self.program.weight(b, node));
        Ok(AffineTensors {
            weight: self.program.weight(weight, node)?,
            bias: bias.transpose()?,
        })
    }

    /// The kernel `[channels, width]` of a convolution that has it in several weights.
    fn joined_kernels(&self, node: &Node, conv: &ConvSpec) -> Result<Option<Tensor>, BackendError> {
        if conv.further.is_empty() {
            return Ok(None);
        }
        let part = |name: &String| {
            let weight = self.program.weight(name, node)?;
            weight.reshape(((), conv.width)).on_device()
        };
        let parts = conv.weights().map(part).collect::<Result<Vec<_>, _>>()?;
        Tensor::cat(&parts, 0).on_device().map(Some)
    }

    /// The result of an elementwise operation.
    fn elementwise(&self, node: &Node) -> Result<candle_core::Result<Tensor>, BackendError> {
        let (program, inputs) = (self.program, self.inputs);
        let unknown = || unsupported(node);
        Ok(match &node.op {
            Op::Add => self.operand(node, 0)?.add(self.operand(node, 1)?),
            Op::Mul => self.operand(node, 0)?.mul(self.operand(node, 1)?),
            Op::Scale { factor } => self.operand(node, 0)?.affine(f64::from(*factor), 0.0),
            Op::Gate { activation } => {
                let up = self.operand(node, 1)?;
                let gate = activate(*activation, self.operand(node, 0)?).ok_or_else(unknown)?;
                gate.and_then(|gate| gate.mul(up))
            }
            Op::Activate { activation } => {
                activate(*activation, self.operand(node, 0)?).ok_or_else(unknown)?
            }
            Op::AddRow { weight, row } => {
                let added = program.weight(weight, node)?.narrow(0, *row, 1);
                let x = self.operand(node, 0)?;
                added.and_then(|added| x.broadcast_add(&added))
            }
            Op::Gain { weight } => self
                .operand(node, 0)?
                .broadcast_mul(program.weight(weight, node)?),
            Op::SoftCap { cap } => ops::soft_cap(self.operand(node, 0)?, *cap),
            Op::Clamp { limit } => self.operand(node, 0)?.clamp(-limit, *limit),
            Op::ClampedGate { slope, limit } => {
                ops::clamped_gate(self.operands(node)?, *slope, *limit)
            }
            Op::ScaleByPosition { scale } => {
                let Ids { ids, .. } = ids(&program.graph, node, 1, inputs)?;
                ops::scale_by_position(self.operand(node, 0)?, scale, ids)
            }
            _ => return self.across_tokens(node),
        })
    }

    /// The result of an operation that reads other tokens.
    fn across_tokens(&self, node: &Node) -> Result<candle_core::Result<Tensor>, BackendError> {
        let (program, inputs) = (self.program, self.inputs);
        Ok(match &node.op {
            Op::Conv { layer, conv } => {
                let (_, tensors) = self.rows.states(*layer)?;
                let joined = self.joined_kernels(node, conv)?;
                let own = self.affine(node, &conv.weight, conv.bias.as_deref())?;
                let affine = AffineTensors {
                    weight: joined.as_ref().unwrap_or(own.weight),
                    ..own
                };
                let x = self.operand(node, 0)?;
                ops::conv(&tensors.conv, x, affine, inputs.states)
            }
            Op::Scan { layer, scan } => {
                let (_, tensors) = self.rows.states(*layer)?;
                let weights = self.weights(node, [&scan.a, &scan.d])?;
                ops::scan(&tensors.state, self.operands(node)?, weights, inputs.states)
            }
            Op::ScanHeads { layer, scan } => {
                let (_, tensors) = self.rows.states(*layer)?;
                let weights = self.weights(node, [&scan.a, &scan.d, &scan.dt_bias])?;
                let operands = self.operands(node)?;
                ops::scan_heads(&tensors.state, operands, weights, scan, inputs.states)
            }
            Op::Decay { decay } => {
                let weights = self.weights(node, [&decay.a, &decay.dt_bias])?;
                ops::decay(self.operand(node, 0)?, weights, decay)
            }
            Op::Delta { layer, delta } => {
                let (_, tensors) = self.rows.states(*layer)?;
                let operands = self.operands(node)?;
                ops::delta(&tensors.state, operands, delta, inputs.states)
            }
            Op::Attend {
                layer,
                spec,
                sinks,
                relative,
            } => {
                let seen = stored_visibility(&program.graph, node, 2, inputs)?;
                let (_, tensors) = self.rows.attended(*layer)?;
                let mut queries = self.queries(node, seen, sinks.as_deref())?;
                queries.relative = match relative {
                    Some(relative) => Some(self.relative(node, relative)?),
                    None => None,
                };
                ops::attend(tensors, spec, queries)
            }
            Op::AttendPartial { layer, spec, sinks } => {
                let seen = stored_visibility(&program.graph, node, 2, inputs)?;
                let (_, tensors) = self.rows.attended(*layer)?;
                let queries = self.queries(node, seen, sinks.as_deref())?;
                let result = ops::attend(tensors, spec, queries);
                result.and_then(|result| result.reshape(node.shape.as_slice()))
            }
            Op::MergePartials { form } => ops::merge_partials(self.operands(node)?, *form),
            Op::Index { layer, index } => {
                let visibility = stored_visibility(&program.graph, node, 3, inputs)?;
                let (_, tensors) = self.rows.attended(*layer)?;
                let [q, weights] = self.operands(node)?;
                let queries = IndexQueries {
                    q,
                    weights,
                    visibility,
                };
                ops::index(&tensors.k, index, queries)
            }
            Op::AttendSparse { layer, spec } => {
                let seen = stored_visibility(&program.graph, node, 2, inputs)?;
                let (_, tensors) = self.rows.attended(*layer)?;
                let chosen = self.operand(node, 3)?;
                let per_row = chosen.dim(1).on_device()?;
                let chosen = chosen.flatten_all().and_then(|c| c.to_vec1()).on_device()?;
                let mut kept = Visibility::default();
                seen.keep_chosen(&chosen, per_row, &mut kept);
                ops::attend(tensors, spec, self.queries(node, &kept, None)?)
            }
            Op::Kq { layer, spec } => {
                let (_, tensors) = self.rows.layer(*layer)?;
                ops::kq(
                    &tensors.k,
                    spec,
                    self.operand(node, 0)?,
                    node.row_len() / spec.n_heads.max(1),
                )
            }
            Op::KqSoftMax { spec, sinks } => {
                let seen = stored_visibility(&program.graph, node, 1, inputs)?;
                let queries = self.queries(node, seen, sinks.as_deref())?;
                ops::kq_soft_max(spec, queries)
            }
            Op::Kqv { layer, spec } => {
                let (rows, tensors) = self.rows.layer(*layer)?;
                let values = match rows.values {
                    ValueRows::Own => &tensors.v,
                    ValueRows::InKeys => &tensors.k,
                };
                ops::kqv(values, spec, self.operand(node, 0)?)
            }
            Op::AttendBatch {
                spec,
                sinks,
                relative,
            } => {
                let visibility = batch_visibility(&program.graph, node, 3, inputs)?;
                let mut queries = self.queries(node, visibility, sinks.as_deref())?;
                queries.relative = match relative {
                    Some(relative) => Some(self.relative(node, relative)?),
                    None => None,
                };
                let rows = |at| RowTensor::fresh(self.operand(node, at)?).on_device();
                let (k, v) = (rows(1)?, rows(2)?);
                ops::attend(&KvTensors { k, v }, spec, queries)
            }
            _ => return Err(unsupported(node)),
        })
    }

    /// Rows of K and V to the cells that operand `at` is.
    fn store(
        &self,
        node: &Node,
        layer: LayerIdx,
        at: usize,
        rows: [&Tensor; 2],
    ) -> Result<Option<Tensor>, BackendError> {
        let part = part_of(&self.program.graph, node, at)?;
        let cells = &part_inputs(self.inputs, part)?.cells;
        if !cells.is_empty() {
            let (_, tensors) = self.rows.layer(layer)?;
            ops::store_rows(tensors, rows, cells).on_device()?;
        }
        Ok(None)
    }

    fn custom(&self, node: &Node, spec: &CustomSpec) -> Result<Tensor, BackendError> {
        let Some(custom) = self.program.custom.get(&node.name) else {
            return Err(unsupported(node));
        };
        let n_operands = node.operands.len() - spec.n_other_operands();
        let operands = (0..n_operands).map(|at| self.operand(node, at));
        let operands: Vec<&Tensor> = operands.collect::<Result<_, _>>()?;
        let states = spec
            .layer()
            .map(|layer| self.rows.states(layer))
            .transpose()?;
        let states = states.map(|(_, tensors)| &tensors.state);
        custom.run(node, spec, &operands, states, self.inputs)
    }

    /// The operands of an attention other than its rows.
    fn queries<'r>(
        &'r self,
        node: &Node,
        visibility: &'r Visibility,
        sinks: Option<&str>,
    ) -> Result<Queries<'r>, BackendError> {
        let sinks = sinks.map(|name| self.program.weight(name, node));
        Ok(Queries {
            q: self.operand(node, 0)?,
            visibility,
            positions: self.inputs.positions,
            sinks: sinks.transpose()?,
            relative: None,
            form: ResultForm::of(&node.op),
        })
    }

    /// The bias on scores by distance.
    fn relative(&self, node: &Node, relative: &RelativeBias) -> Result<ops::Buckets, BackendError> {
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let scores = match &relative.scores {
            RelativeScores::Weight(name) => {
                let weight = self.program.weight(name, node)?;
                ops::BucketScores::Heads(values(weight).on_device()?)
            }
            RelativeScores::Tables => {
                let table = |at| values(self.operand(node, at)?).on_device();
                ops::BucketScores::Tables([table(4)?, table(5)?])
            }
        };
        Ok(ops::Buckets {
            table: relative.buckets.table(),
            n: relative.buckets.n(),
            scores,
        })
    }

    /// The first operands.
    fn operands<const N: usize>(&self, node: &Node) -> Result<[&Tensor; N], BackendError> {
        let mut all = [self.operand(node, 0)?; N];
        for (at, operand) in all.iter_mut().enumerate() {
            *operand = self.operand(node, at)?;
        }
        Ok(all)
    }

    /// Weights by their names.
    fn weights<const N: usize>(
        &self,
        node: &Node,
        names: [&str; N],
    ) -> Result<[&Tensor; N], BackendError> {
        let mut all = [self.program.weight(names[0], node)?; N];
        for (weight, name) in all.iter_mut().zip(names) {
            *weight = self.program.weight(name, node)?;
        }
        Ok(all)
    }

    fn operand(&self, node: &Node, at: usize) -> Result<&Tensor, BackendError> {
        let id = node.operands.get(at);
        let tensor = id.and_then(|id| self.results.get(id.as_usize())?.as_ref());
        tensor.ok_or_else(|| failure(format!("node '{}' has no operand {at}", node.name)))
    }

    /// The slots of an operation on experts, whose second operand is a route.
    fn slots(&self, node: &Node) -> Result<ops::Slots, BackendError> {
        let n_used = node.shape.get(1).copied().unwrap_or(0);
        ops::Slots::new(self.operand(node, 1)?, n_used).on_device()
    }

    /// The ids of operand `at`, on the device.
    fn indices(&self, node: &Node, at: usize) -> Result<Tensor, BackendError> {
        let Ids { ids, .. } = ids(&self.program.graph, node, at, self.inputs)?;
        Tensor::from_slice(ids, ids.len(), &self.program.device).on_device()
    }
}
