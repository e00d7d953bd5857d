//! [`AnswerForm`]: what the tokens of an answer are held to.
//!
//! Invariant: every text that is held gets the same steps, in the same order, so a text can be
//! computed again.

use cellar_engine::sampler::{ReasoningBudget, Step};
use cellar_grammar::{Grammar, GrammarFailure, GrammarStep};

/// What the tokens of each text of a request are held to: nothing, where both are `None`.
#[derive(Debug, Default)]
pub(crate) struct AnswerForm {
    pub(super) grammar: Option<Grammar>,
    pub(super) budget: Option<ReasoningBudget>,
}

/// What holds one text.
#[derive(Debug, Default)]
pub(crate) struct HeldText {
    /// The steps of its sampler.
    pub(crate) steps: Vec<Box<dyn Step>>,
    /// Tells why the grammar left no token, where there is one.
    pub(super) failure: Option<GrammarFailure>,
}

impl AnswerForm {
    /// What holds one more text. It takes some time.
    pub(crate) fn hold(&self) -> HeldText {
        let step = self.grammar.as_ref().map(Grammar::step);
        let failure = step.as_ref().map(GrammarStep::failure);
        let step = step.map(|step| -> Box<dyn Step> { Box::new(step) });
        let budget = self.budget.clone();
        let budget = budget.map(|budget| -> Box<dyn Step> { Box::new(budget) });
        HeldText {
            steps: step.into_iter().chain(budget).collect(),
            failure,
        }
    }
}
