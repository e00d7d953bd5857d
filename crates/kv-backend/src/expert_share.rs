//! [`DetachedExperts`]: a model on one backend, without the experts of some layers, which another
//! computes, as where a GPU has not room for them.
//!
//! Invariant: the experts' backend has the weights of these experts and nothing of the memory. A
//! run is one of the first backend, whose graph has a custom operation in the place of each
//! mixture; that operation is a run of the other. Does not know what either backend is.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_graph::weights::WeightSource;
use kv_graph::{CustomSpec, Graph, GraphError, GraphShape, Mixture};
use kv_rows::RowLayout;

use crate::custom::{CustomOp, CustomRows, CustomShape};
use crate::split::join;
use crate::{
    Backend, BackendError, BackendInfo, CustomOps, ExpertMeter, GraphInputs, GraphOutputs,
    OnProgress,
};

/// The name of the operation that stands for a mixture.
const OP: &str = "cellar.experts";
/// Its setting that says which program of the other backend it is.
const PROGRAM: &str = "program";
/// The most programs at a time: such numbers are exact in an `f32`.
const MAX_PROGRAMS: usize = 1 << 24;

/// The experts that are not computed where the rest of a model is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertShare {
    /// The names of their matrices.
    pub weights: HashSet<String>,
    /// Number of the layers that they are of.
    pub n_layers: usize,
}

/// A graph on two backends.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedGraph {
    /// The graph with operations in the place of mixtures.
    pub rest: Graph,
    /// The graphs that are computed in their place.
    pub mixtures: Vec<Graph>,
}

impl ExpertShare {
    /// A graph as two backends compute it, to plan what they take.
    ///
    /// # Errors
    /// [`GraphError::CannotDetach`] where experts of this share are used by more than a mixture.
    pub fn split(&self, graph: &Graph) -> Result<SharedGraph, GraphError> {
        let mixtures = self.mixtures(graph)?;
        Ok(SharedGraph {
            rest: graph.without(&mixtures, spec)?,
            mixtures: mixtures.iter().map(|of| of.graph().clone()).collect(),
        })
    }

    /// Custom operations, and the one that stands for mixtures in what [`ExpertShare::split`]
    /// returns: for plans, which compute nothing.
    pub fn planned_ops(ops: &CustomOps) -> CustomOps {
        ops.clone().with(PlannedExperts)
    }

    fn mixtures(&self, graph: &Graph) -> Result<Vec<Mixture>, GraphError> {
        graph.mixtures(|weight| self.weights.contains(weight))
    }
}

/// The operation that is a program by its number.
fn spec(program: usize) -> CustomSpec {
    CustomSpec {
        params: [(PROGRAM.to_owned(), program as f32)].into(),
        ..CustomSpec::new(OP)
    }
}

/// The operation of a plan.
#[derive(Debug)]
struct PlannedExperts;

impl CustomOp for PlannedExperts {
    fn name(&self) -> &str {
        OP
    }

    fn is_of_host(&self) -> bool {
        true
    }

    fn check(&self, _node: &CustomShape<'_>) -> Result<(), String> {
        Ok(())
    }

    fn rows(&self, _: &CustomRows<'_>, _: &mut [f32], _: &mut [f32]) -> Result<(), String> {
        Err("a plan computes nothing".to_owned())
    }
}

/// A backend that leaves some experts to another.
pub struct DetachedExperts<A: Backend, B: Backend> {
    inner: A,
    experts: Arc<ExpertPrograms<B>>,
    share: ExpertShare,
}

/// The backend of experts, and its programs by number.
struct ExpertPrograms<B: Backend> {
    backend: B,
    programs: Mutex<Vec<Option<Arc<ExpertProgram<B>>>>>,
}

/// A program of experts.
struct ExpertProgram<B: Backend> {
    /// Values of a row of each operand, and of each result.
    operands: Vec<usize>,
    results: Vec<usize>,
    state: Mutex<ProgramState<B>>,
}

/// The state that a run of experts changes.
struct ProgramState<B: Backend> {
    program: B::Program,
    /// None: experts remember nothing.
    rows: B::Rows,
    /// Kept for their capacity.
    inputs: Vec<f32>,
    outputs: GraphOutputs,
}

/// A program, whose experts' programs live as long.
pub struct DetachedProgram<A: Backend, B: Backend> {
    inner: A::Program,
    /// Its experts, which are given up with it.
    experts: Vec<Seat<B>>,
}

/// The number of a program of experts while it is used.
struct Seat<B: Backend> {
    number: usize,
    experts: Arc<ExpertPrograms<B>>,
}

impl<B: Backend> Drop for Seat<B> {
    fn drop(&mut self) {
        if let Some(program) = locked(&self.experts.programs).get_mut(self.number) {
            *program = None;
        }
    }
}

/// The lock's data; a thread that panicked with it left nothing that a run reads before it is
/// written.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<A: Backend, B: Backend> DetachedExperts<A, B> {
    /// `backend` computes a model but for the experts of `share`, which `experts` computes.
    ///
    /// # Errors
    /// [`BackendError::NoCustomOps`] where `backend` computes its own operations only.
    pub fn new(mut backend: A, experts: B, share: ExpertShare) -> Result<Self, BackendError> {
        let experts = Arc::new(ExpertPrograms {
            backend: experts,
            programs: Mutex::default(),
        });
        let op = ExpertOp(Arc::clone(&experts));
        backend.set_custom_ops(CustomOps::new().with(op))?;
        Ok(Self {
            inner: backend,
            experts,
            share,
        })
    }
}

impl<B: Backend> ExpertPrograms<B> {
    /// Compiles a mixture and gives it the first number that is free.
    fn compile(
        self: &Arc<Self>,
        mixture: &Mixture,
        weights: &B::Weights,
        nothing: &RowLayout,
    ) -> Result<Seat<B>, BackendError> {
        let graph = mixture.graph();
        let program = Arc::new(ExpertProgram {
            operands: mixture.operand_widths().to_vec(),
            results: widths(graph),
            state: Mutex::new(ProgramState {
                program: self.backend.compile(graph, weights, nothing)?,
                rows: self.backend.allocate(nothing)?,
                inputs: Vec::new(),
                outputs: GraphOutputs::default(),
            }),
        });
        let mut programs = locked(&self.programs);
        let free = programs.iter().position(Option::is_none);
        let number = free.unwrap_or(programs.len());
        if number >= MAX_PROGRAMS {
            return Err(BackendError::Input {
                input: "graph",
                reason: format!("{number} programs of experts are kept, and there is no more room"),
            });
        }
        if number == programs.len() {
            programs.push(None);
        }
        programs[number] = Some(program);
        Ok(Seat {
            number,
            experts: Arc::clone(self),
        })
    }

    /// The program that an operation names.
    fn named(&self, spec: &CustomSpec) -> Result<Arc<ExpertProgram<B>>, String> {
        let number = spec.param(PROGRAM).map_or(usize::MAX, |n| n as usize);
        let programs = locked(&self.programs);
        let program = programs.get(number).and_then(Option::as_ref);
        let program = program.map(Arc::clone);
        program.ok_or_else(|| format!("there is no program {number} of experts any more"))
    }
}

/// Values of a row of each output.
fn widths(graph: &Graph) -> Vec<usize> {
    let outputs = graph.outputs().iter();
    outputs
        .map(|&id| graph.node(id).map_or(0, kv_graph::Node::row_len))
        .collect()
}

impl<B: Backend> ExpertProgram<B> {
    fn run(&self, backend: &B, rows: &CustomRows<'_>, out: &mut [f32]) -> Result<(), BackendError> {
        let mut state = locked(&self.state);
        let state = &mut *state;
        let width: usize = self.operands.iter().sum();
        state.inputs.resize(rows.n_rows * width, 0.0);
        join(
            rows.operands.iter().copied(),
            &self.operands,
            &mut state.inputs,
        );
        let inputs = GraphInputs {
            shape: Some(GraphShape {
                n_tokens: rows.n_rows,
                n_outputs: rows.n_rows,
            }),
            embeddings: &state.inputs,
            ..GraphInputs::default()
        };
        let (program, outputs) = (&mut state.program, &mut state.outputs);
        backend.run(program, &mut state.rows, &inputs, outputs)?;
        let results = outputs.values.iter().map(Vec::as_slice);
        join(results, &self.results, out);
        Ok(())
    }
}

/// The operation that stands for mixtures.
struct ExpertOp<B: Backend>(Arc<ExpertPrograms<B>>);

impl<B: Backend> fmt::Debug for ExpertOp<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.0.backend.info().device;
        f.debug_tuple("ExpertOp").field(&device).finish()
    }
}

impl<B: Backend> CustomOp for ExpertOp<B> {
    fn name(&self) -> &str {
        OP
    }

    fn is_of_host(&self) -> bool {
        true
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let program = self.0.named(node.spec)?;
        if program.operands == node.widths && program.results.iter().sum::<usize>() == node.width {
            Ok(())
        } else {
            let (operands, results) = (&program.operands, &program.results);
            Err(node.refusal(&format!("{operands:?} values to {results:?}")))
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        _state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let program = self.0.named(rows.spec)?;
        let done = program.run(&self.0.backend, rows, out);
        done.map_err(|error| error.to_string())
    }
}

impl<A: Backend, B: Backend> fmt::Debug for DetachedExperts<A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DetachedExperts")
            .field(&self.info())
            .finish()
    }
}

impl<A: Backend, B: Backend> fmt::Debug for DetachedProgram<A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<usize> = self.experts.iter().map(|seat| seat.number).collect();
        f.debug_tuple("DetachedProgram").field(&numbers).finish()
    }
}

impl<A: Backend, B: Backend> Backend for DetachedExperts<A, B> {
    type Rows = A::Rows;
    type Weights = (A::Weights, B::Weights);
    type Program = DetachedProgram<A, B>;

    crate::delegate!(
        memory,
        prefers_candidates,
        set_custom_ops,
        allocate,
        finish,
        read_rows,
        write_rows,
        copy_rows,
        shift_rows,
    );

    fn info(&self) -> BackendInfo {
        let (own, experts) = (self.inner.info(), self.experts.backend.info());
        let layers = match self.share.n_layers {
            1 => "1 layer".to_owned(),
            n => format!("{n} layers"),
        };
        BackendInfo {
            device: format!(
                "{}, the experts of {layers} on {}",
                own.device, experts.device
            ),
            ..own
        }
    }

    fn expert_meter(&self) -> Option<Arc<ExpertMeter>> {
        self.experts.backend.expert_meter()
    }

    fn program_capacities(&self) -> &'static [usize] {
        let (own, experts) = (
            self.inner.program_capacities(),
            self.experts.backend.program_capacities(),
        );
        if own == experts { own } else { &[] }
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<Self::Weights, BackendError> {
        let of_experts = Arc::clone(&source);
        let own = self.inner.load_weights(source, on_progress.clone())?;
        let experts = &self.experts.backend;
        Ok((own, experts.load_weights(of_experts, on_progress)?))
    }

    fn forget_weights(
        &self,
        (own, of_experts): &Self::Weights,
        names: &[String],
    ) -> Result<(), BackendError> {
        // First the one that may refuse.
        self.experts.backend.forget_weights(of_experts, names)?;
        self.inner.forget_weights(own, names)
    }

    fn compile(
        &self,
        graph: &Graph,
        (own, of_experts): &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError> {
        let refused = |error: GraphError| BackendError::Input {
            input: "graph",
            reason: error.to_string(),
        };
        let mixtures = self.share.mixtures(graph).map_err(refused)?;
        let (nothing, _) = layout.partition(|_| false);
        let compiled = mixtures
            .iter()
            .map(|mixture| self.experts.compile(mixture, of_experts, &nothing));
        let seats = compiled.collect::<Result<Vec<_>, _>>()?;
        let rest = graph.without(&mixtures, |at| spec(seats[at].number));
        let rest = rest.map_err(refused)?;
        Ok(DetachedProgram {
            inner: self.inner.compile(&rest, own, layout)?,
            experts: seats,
        })
    }

    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        self.inner.run(&mut program.inner, rows, inputs, outputs)
    }
}
