//! The contract suite: what a [`Backend`] means, as tests that every backend runs.
//!
//! A backend runs all of them with one line, [`backend_contract!`](crate::backend_contract). An
//! operation that a backend does not compute yet is declared with its reason ([`KnownLimit::op`]),
//! and so is a test that it cannot pass ([`KnownLimit::fails`]); a declared failure that passes
//! fails the suite, so declarations do not outlive their reasons. Knows no backend; numbers are
//! compared with values computed in `f64` from the definitions ([`evaluate`]) within the
//! [`Tolerance`] that a backend declares.

// These are tests: they fail by panicking.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_errors_doc
)]

pub mod attend;
pub mod attend_batch;
pub mod capacity;
mod compiled;
pub mod custom;
pub mod delta_rule;
pub mod elementwise;
pub mod errors;
pub mod evaluate;
pub mod experts;
pub mod graphs;
pub mod heads;
pub mod kv_types;
mod larger;
pub mod masks;
pub mod memory;
mod one_op;
pub mod ops;
pub mod partials;
mod random;
pub mod recurrent;
pub mod rows;
pub mod scan_heads;
mod scene;
pub mod shared;
pub mod shift;
pub mod sparse;
pub mod state_types;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use kv_backend::{Backend, BackendError};
use kv_block::BlockFormat;
use kv_rows::KvType;

use larger::CompiledOps;

pub use one_op::{Attend, OneOp, StoreRows};
pub use ops::{block_weight, set_scales};
pub use random::Random;
pub use scene::{Scene, Token, in_blocks, tiny_layout, tiny_llama, tiny_weights};

/// The bound on the error of a backend's numbers.
///
/// Each is an error relative to the root mean square of the wanted values.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Elementwise operations, norms, rotations, embeddings.
    pub elementwise: f64,
    /// Attention.
    pub attend: f64,
    /// Products with weights of `F32` and `F16`.
    pub linear: f64,
    /// Products with weights of `BF16`, where a backend may round activations to it.
    pub linear_bf16: f64,
    /// Products with weights of quantised blocks, where a backend may round activations.
    pub linear_quantised: f64,
    /// Convolutions and scans, also over many tokens.
    pub recurrent: f64,
    /// The logits of a whole small model with plain weights.
    pub graph: f64,
}

impl Default for Tolerance {
    fn default() -> Self {
        Self {
            elementwise: 1e-5,
            attend: 1e-5,
            linear: 1e-5,
            linear_bf16: 1e-5,
            linear_quantised: 1e-4,
            recurrent: 1e-5,
            graph: 1e-4,
        }
    }
}

impl Tolerance {
    /// That of products with weights of a format.
    pub(crate) fn linear_of(&self, format: BlockFormat) -> f64 {
        match format {
            BlockFormat::F32 | BlockFormat::F16 => self.linear,
            BlockFormat::BF16 => self.linear_bf16,
            _ => self.linear_quantised,
        }
    }
}

/// A known limit of a backend, and its reason.
#[derive(Clone, Copy, Debug)]
pub struct KnownLimit {
    limit: Limit,
    reason: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    /// A test fails.
    Test(&'static str),
    /// Graphs with an operation of this name do not compile.
    Op(&'static str),
}

impl KnownLimit {
    /// Declares that `test` fails because of `reason`.
    pub const fn fails(test: &'static str, reason: &'static str) -> Self {
        let limit = Limit::Test(test);
        Self { limit, reason }
    }

    /// Declares that graphs with the operation `op`, named as in their text form, are refused
    /// because of `reason`: tests may fail that have such a graph refused.
    pub const fn op(op: &'static str, reason: &'static str) -> Self {
        let limit = Limit::Op(op);
        Self { limit, reason }
    }
}

/// The number of combinations of types and cases a suite tries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Combinations {
    /// Every type with every case.
    #[default]
    All,
    /// Every type and every case at least once, and every third type of rows in whole models: for
    /// devices that are simulated, whose kernels one suite with all combinations has tried.
    Sampled,
}

/// A backend under test, with what it declares of itself.
#[derive(Debug)]
pub struct Subject<B> {
    /// The backend.
    pub backend: B,
    /// The bound on the error of its numbers.
    pub tolerance: Tolerance,
    /// The tests that it is known to fail.
    pub known: Vec<KnownLimit>,
    /// The result of giving it custom operations.
    pub custom_ops: Result<(), BackendError>,
    /// The number of combinations that are tried.
    pub combinations: Combinations,
    /// The formats of matrices that it does not compute with.
    pub other_formats: Vec<BlockFormat>,
}

impl<B: Backend> Subject<B> {
    /// A backend with the default tolerance and no known failure, which is given the custom
    /// operations of the suite.
    pub fn new(mut backend: B) -> Self {
        let mut given = custom::ops().into_iter();
        let custom_ops = given.try_for_each(|ops| backend.set_custom_ops(ops));
        Self {
            backend,
            custom_ops,
            tolerance: Tolerance::default(),
            known: Vec::new(),
            combinations: Combinations::All,
            other_formats: Vec::new(),
        }
    }

    /// The formats of matrices that it computes with.
    pub(crate) fn formats(&self) -> impl Iterator<Item = BlockFormat> {
        let all = BlockFormat::ALL.into_iter();
        all.filter(|format| !self.other_formats.contains(format))
    }

    /// The same with another tolerance.
    pub fn with_tolerance(self, tolerance: Tolerance) -> Self {
        Self { tolerance, ..self }
    }

    /// The same with other combinations.
    pub fn with_combinations(self, combinations: Combinations) -> Self {
        Self {
            combinations,
            ..self
        }
    }

    /// The same of a backend that computes with matrices in some formats only.
    pub fn with_formats(self, is_known: impl Fn(BlockFormat) -> bool) -> Self {
        let other = BlockFormat::ALL.into_iter().filter(|f| !is_known(*f));
        Self {
            other_formats: other.collect(),
            ..self
        }
    }

    /// The types of rows that are tried in whole models.
    fn types_in_models(&self) -> Vec<KvType> {
        let all = self.backend.info().kv_types;
        match self.combinations {
            Combinations::All => all,
            Combinations::Sampled => all.into_iter().step_by(3).collect(),
        }
    }

    /// Pairs of the values of two lists.
    fn combine<X: Clone, Y: Clone>(&self, xs: &[X], ys: &[Y]) -> Vec<(X, Y)> {
        let pair = |(x, y): (&X, &Y)| (x.clone(), y.clone());
        match self.combinations {
            Combinations::All => {
                let pairs = xs.iter().flat_map(|x| ys.iter().map(move |y| (x, y)));
                pairs.map(pair).collect()
            }
            Combinations::Sampled => {
                let n = xs.len().max(ys.len());
                let pairs = xs.iter().cycle().zip(ys.iter().cycle());
                pairs.take(n).map(pair).collect()
            }
        }
    }

    /// The same with known failures.
    pub fn with_known(self, known: &[KnownLimit]) -> Self {
        Self {
            known: known.to_vec(),
            ..self
        }
    }

    /// Checks that every declared failure is that of one of `tests`, or of an operation.
    ///
    /// # Panics
    /// If one is not: it would never be missed.
    pub fn check_known(&self, tests: &[&str]) {
        for KnownLimit { limit, reason } in &self.known {
            match limit {
                Limit::Test(test) => assert!(
                    tests.contains(test),
                    "'{test}' is declared to fail ({reason}) but is no test of the suite"
                ),
                Limit::Op(op) => assert!(
                    larger::is_op(op),
                    "'{op}' is declared to be refused ({reason}) but is no operation of graphs"
                ),
            }
        }
    }

    /// Runs one test of the suite; what [`backend_contract!`](crate::backend_contract) calls.
    ///
    /// # Panics
    /// If the test fails and is not declared to, or passes and is declared to fail, or if a graph
    /// compiles although one of its operations is declared to be refused.
    pub fn check(&self, name: &str, test: fn(&Self)) {
        CompiledOps::take();
        let outcome = catch_unwind(AssertUnwindSafe(|| test(self)));
        let CompiledOps { taken, refused } = CompiledOps::take();
        for KnownLimit { limit, reason } in &self.known {
            if let Limit::Op(op) = limit {
                assert!(
                    !taken.contains(op),
                    "'{op}' is declared to be refused ({reason}) but compiles: remove the declaration"
                );
            }
        }
        let excuses = |known: &&KnownLimit| match known.limit {
            Limit::Test(test) => test == name,
            Limit::Op(op) => outcome.is_err() && refused.contains(op),
        };
        match (self.known.iter().find(excuses), outcome) {
            (None, Ok(())) | (Some(_), Err(_)) => {}
            (None, Err(panic)) => resume_unwind(panic),
            (Some(known), Ok(())) => panic!(
                "'{name}' is declared to fail ({}) but passes: remove the declaration",
                known.reason
            ),
        }
    }
}

/// Asserts that `got` equals `want` within `tolerance`, relative to the root mean square of `want`.
///
/// # Panics
/// If it does not.
#[track_caller]
pub fn assert_close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    let mean_square = want.iter().map(|w| w * w).sum::<f64>() / want.len().max(1) as f64;
    let allowed = tolerance * mean_square.sqrt().max(1e-30);
    for (at, (&g, &w)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(g) - w).abs();
        // Not `off > allowed`: NaN must fail.
        assert!(
            off <= allowed,
            "{what}: value {at} is {g}, not {w} (off by {off}, not {allowed})"
        );
    }
}

/// One `#[test]` for each test of the suite.
///
/// The argument is an expression that can be called without arguments and gives a
/// [`Subject`](crate::Subject).
///
/// ```text
/// kv_contract::backend_contract!(|| Subject::new(MyBackend::new().unwrap()));
/// ```
#[macro_export]
macro_rules! backend_contract {
    ($make:expr) => {
        $crate::backend_contract! { @tests $make;
            rows: info_names_the_backend_and_its_types, fresh_rows_are_zero,
                allocated_bytes_are_as_planned,
                written_rows_read_back, stored_rows_are_encoded_bit_for_bit,
                storing_touches_no_other_row, copies_move_whole_rows_of_one_part,
                copies_happen_in_order, rows_out_of_range_are_refused,
                buffers_of_the_wrong_length_are_refused, undeclared_kv_types_are_refused;
            kv_types: hard_rows_are_encoded_bit_for_bit, attends_over_every_pair_of_types;
            shift: d15a_golden_shifts_are_matched, shifts_change_the_named_keys_only,
                d15c_d15d_rotations_do_not_mix, shifts_that_cannot_be_are_refused;
            shared: a_shared_layer_attends_over_another_s_rows,
                values_can_be_the_beginnings_of_keys,
                latents_of_every_type_are_attended,
                graphs_with_shared_and_latent_layers_compute, states_of_latents_come_back,
                stores_that_do_not_suit_their_rows_are_refused;
            attend: attends_over_everything, attends_through_windows, attends_over_scattered_cells,
                attends_over_shared_cells, attends_over_cells_of_one_position,
                attends_with_grouped_heads, attends_with_other_value_widths,
                attends_with_a_soft_cap, attends_with_sinks, attends_with_linear_biases,
                attends_with_large_scores, a_row_that_sees_nothing_is_zero,
                bad_attention_is_refused;
            partials: partial_results_have_logarithms, recent_and_old_rows_merge,
                rows_that_see_nothing_merge_to_zero;
            masks: k43_golden_masks_are_attended;
            attend_batch: tokens_attend_within_their_ubatch, scores_by_distance_add,
                stored_keys_have_scores_by_distance, sinks_and_biases_come_from_the_graph,
                plain_attention_is_three_nodes,
                unsound_batch_visibilities_are_refused;
            ops: embed_looks_rows_up, embed_looks_positions_and_types_up, linear_multiplies, linear_adds_a_bias, linear_on_blocks, other_formats_are_refused,
                embed_on_blocks, rms_norm_divides, rope_rotates,
                rope_sections_rotate, reshape_keeps_values, add_adds,
                mul_multiplies, scale_scales, gate_activates, take_rows_takes, top_k_finds, operands_survive,
                outputs_may_repeat;
            graphs: a_small_model_computes, a_small_model_with_every_option_computes,
                chunks_give_what_the_whole_gives, a_run_changes_only_its_own_cells,
                no_outputs_are_no_error, a_program_runs_again_and_again,
                strangers_do_not_matter, random_graphs_compute;
            elementwise: layer_norm_centres, rows_of_a_weight_add, soft_cap_bends, clamped_gate_clamps,
                clamp_bounds, rectifiers_cut, positions_scale, positions_scale_from_zero,
                gains_multiply, parts_of_rows_mix, gaussian_top_k_cuts,
                elementwise_nodes_leave_operands_alone;
            experts: routes_choose_and_weigh, routes_choose_from_groups, routes_have_gains,
                routes_share_among_near_ties, experts_compute, experts_on_scaled_inputs_compute, experts_on_blocks;
            heads: heads_have_matrices, heads_on_blocks, heads_are_cut_and_joined;
            recurrent: activate_activates, columns_cut, columns_of_heads_cut, fresh_states_are_zero_and_read_back,
                convolutions_and_scans_compute,
                kernels_of_convolutions_join,
                going_back_to_a_snapshot_is_as_if_nothing_followed,
                states_of_another_shape_are_refused, unsound_states_are_refused;
            custom: custom_rows_compute, custom_operations_see_whole_sequences, custom_states_continue_however_they_are_cut,
                what_custom_operations_refuse_is_reported, unregistered_operations_are_refused;
            delta_rule: sigmoid_gates, decays_fall, delta_rules_compute, delta_states_go_back,
                delta_states_of_another_shape_are_refused;
            sparse: indexers_choose_what_is_attended,
                indexers_that_may_choose_everything_leave_nothing_out,
                indexers_need_keys_of_their_width;
            scan_heads: scans_by_heads_compute, head_states_of_another_shape_are_refused;
            state_types: undeclared_state_types_are_refused, states_of_every_type_compute,
                states_of_every_type_continue_however_they_are_cut,
                states_of_custom_operations_are_floats;
            capacity: program_capacities_ascend, one_program_runs_many_shapes,
                runs_beyond_a_program_are_refused;
            errors: a_missing_weight_is_named, a_weight_of_another_shape_is_named,
                a_layer_without_rows_is_refused, rows_of_another_shape_are_refused,
                inputs_of_the_wrong_length_are_refused, tokens_out_of_range_are_refused,
                positions_without_a_row_are_refused,
                cells_out_of_range_are_refused, output_rows_out_of_range_are_refused,
                unsound_visibilities_are_refused, a_missing_part_is_refused,
                a_refused_run_changes_nothing;
        }
    };
    (@tests $make:expr; $($module:ident: $($test:ident),+;)+) => {
        #[test]
        fn declared_failures_are_tests_of_the_suite() {
            ($make)().check_known(&[$($(stringify!($test)),+),+]);
        }

        $($(
            #[test]
            fn $test() {
                let subject = ($make)();
                subject.check(stringify!($test), $crate::$module::$test);
            }
        )+)+
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_backend::null::NullBackend;

    #[test]
    #[should_panic(expected = "'no_such_test' is declared to fail (a reason) but is no test")]
    fn a_declared_failure_of_no_test_is_refused() {
        let known = [KnownLimit::fails("no_such_test", "a reason")];
        let subject = Subject::new(NullBackend).with_known(&known);
        subject.check_known(&["a_test"]);
    }

    #[test]
    #[should_panic(expected = "'rotate' is declared to be refused (a reason) but is no operation")]
    fn a_declared_operation_that_is_none_is_refused() {
        let known = [
            KnownLimit::op("rope", "a reason"),
            KnownLimit::op("rotate", "a reason"),
        ];
        Subject::new(NullBackend)
            .with_known(&known)
            .check_known(&[]);
    }

    /// The null backend compiles every graph.
    #[test]
    #[should_panic(expected = "'linear' is declared to be refused (a reason) but compiles")]
    fn a_declared_operation_that_compiles_is_refused() {
        let known = [KnownLimit::op("linear", "a reason")];
        let subject = Subject::new(NullBackend).with_known(&known);
        subject.check("linear_multiplies", ops::linear_multiplies);
    }

    /// Nothing is excused but the refusal of a declared operation.
    #[test]
    #[should_panic(expected = "as told")]
    fn a_failure_without_a_refused_operation_fails() {
        let known = [KnownLimit::op("linear", "a reason")];
        let subject = Subject::new(NullBackend).with_known(&known);
        subject.check("a_test", |_| panic!("as told"));
    }
}
