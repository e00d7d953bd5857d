//! [`DraftSource`]: what drafts the tokens of a text, and how many at once may be asked for.
//!
//! Invariant: the tokens of a text, and what its sampler draws for them, are those without
//! speculation where rows do not depend on the number of tokens in a batch (the CPU backend).

use cellar_scheduler::{
    DraftTimes, Drafter, HeadLength, MAX_DRAFT, Speculated, Speculation, SpeculationOff,
};
use kv_core::TokenId;

use crate::config::ConfigError;
use crate::draft_model::{DraftModel, ModelDrafter};

/// Checks how many tokens are to be drafted at once.
///
/// # Errors
/// [`ConfigError::OutOfRange`] where it is 0 or above [`MAX_DRAFT`].
pub(crate) fn check(speculation: Speculation) -> Result<(), ConfigError> {
    match speculation {
        Speculation::Off => Ok(()),
        Speculation::Lookup { n_max }
        | Speculation::Draft { n_max }
        | Speculation::Head { n_max }
        | Speculation::Auto { n_max } => check_n_max(n_max),
    }
}

/// The same of the number alone.
pub(crate) fn check_n_max(n_max: usize) -> Result<(), ConfigError> {
    match n_max {
        1..=MAX_DRAFT => Ok(()),
        _ => Err(ConfigError::OutOfRange {
            name: "draft_max",
            got: n_max,
            max: MAX_DRAFT,
        }),
    }
}

/// What drafts the tokens of a text.
#[derive(Debug)]
pub(crate) enum DraftSource {
    Lookup(Box<Drafter>),
    Model(ModelDrafter),
    Head(Box<HeadDrafter>),
}

/// Drafts with a head of the model, and by prompt lookup first where that finds something.
#[derive(Debug)]
pub(crate) struct HeadDrafter {
    lookup: Option<Drafter>,
    length: HeadLength,
    n_max: usize,
    /// The last token of the text.
    last: TokenId,
    /// The source of the last draft.
    drafted: DraftedBy,
    speculated: Speculated,
}

/// The source of a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DraftedBy {
    #[default]
    Head,
    Lookup,
}

impl HeadDrafter {
    fn new(speculation: Speculation, n_max: usize) -> Self {
        Self {
            lookup: Drafter::new(speculation),
            length: HeadLength::new(n_max),
            n_max,
            last: TokenId::default(),
            drafted: DraftedBy::Head,
            speculated: Speculated::default(),
        }
    }

    /// The tokens that prompt lookup finds, at most `n_max`.
    pub(crate) fn draft_by_lookup(&mut self, n_max: usize) -> Vec<TokenId> {
        let found = self.lookup.as_ref().map(|lookup| lookup.draft(n_max));
        let found = found.unwrap_or_default();
        self.drafted = if found.is_empty() {
            DraftedBy::Head
        } else {
            DraftedBy::Lookup
        };
        found
    }

    /// The last token of the text, and the number of tokens that the head is to draft after it: at
    /// least `n_least`, also where that does not pay.
    pub(crate) fn turn(&mut self, n_max: usize, n_least: usize, times: DraftTimes) -> HeadDraft {
        let after = self.last;
        if self.speculated.off == Some(SpeculationOff::HeadFailed) {
            return HeadDraft { after, n: 0 };
        }
        let n = self.length.next(times);
        let percent = self.length.percent();
        self.speculated.off = (n == 0).then_some(SpeculationOff::DoesNotPay { percent });
        let n = n.max(n_least).min(n_max).min(self.n_max);
        HeadDraft { after, n }
    }

    /// The head cannot compute.
    pub(crate) fn fail(&mut self) {
        self.speculated.off = Some(SpeculationOff::HeadFailed);
    }

    fn push(&mut self, tokens: &[TokenId]) {
        self.last = tokens.last().copied().unwrap_or(self.last);
        if let Some(lookup) = &mut self.lookup {
            lookup.push(tokens);
        }
    }

    fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        self.speculated.n_drafted += n_drafted;
        self.speculated.n_accepted += n_accepted;
        match (&mut self.lookup, self.drafted) {
            (Some(lookup), DraftedBy::Lookup) => lookup.learn(n_drafted, n_accepted),
            _ => self.length.learn(n_drafted, n_accepted),
        }
    }
}

/// The draft that a head is to make for a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadDraft {
    /// The last token of the text.
    pub(crate) after: TokenId,
    /// The most tokens.
    pub(crate) n: usize,
}

/// The means to draft.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DraftMeans<'a> {
    pub(crate) model: Option<&'a DraftModel>,
    /// True if the model was loaded with a head that drafts.
    pub(crate) has_head: bool,
}

impl DraftSource {
    /// That of an empty text; `None` where nothing is to be drafted.
    ///
    /// # Errors
    /// [`SpeculationOff::NoDraftModel`]; [`SpeculationOff::NoHead`].
    pub(crate) fn new(
        speculation: Speculation,
        means: DraftMeans<'_>,
    ) -> Result<Option<Self>, SpeculationOff> {
        match (speculation, means) {
            (Speculation::Draft { n_max }, DraftMeans { model, .. }) => {
                let model = model.ok_or(SpeculationOff::NoDraftModel)?;
                Ok(Some(Self::Model(ModelDrafter::new(model.clone(), n_max))))
            }
            (Speculation::Head { .. }, DraftMeans { has_head, .. }) if !has_head => {
                Err(SpeculationOff::NoHead)
            }
            (Speculation::Auto { .. }, DraftMeans { has_head, .. }) if !has_head => Ok(None),
            (Speculation::Head { n_max } | Speculation::Auto { n_max }, _) => {
                let drafter = HeadDrafter::new(speculation, n_max);
                Ok(Some(Self::Head(Box::new(drafter))))
            }
            (Speculation::Off | Speculation::Lookup { .. }, _) => {
                let drafter = Drafter::new(speculation);
                Ok(drafter.map(|drafter| Self::Lookup(Box::new(drafter))))
            }
        }
    }

    /// Adds tokens of the text.
    pub(crate) fn push(&mut self, tokens: &[TokenId]) {
        match self {
            Self::Lookup(drafter) => drafter.push(tokens),
            Self::Model(drafter) => drafter.push(tokens),
            Self::Head(drafter) => drafter.push(tokens),
        }
    }

    /// Of `n_drafted` tokens that were computed, the first `n_accepted` were right.
    pub(crate) fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        match self {
            Self::Lookup(drafter) => drafter.learn(n_drafted, n_accepted),
            Self::Model(drafter) => drafter.learn(n_drafted, n_accepted),
            Self::Head(drafter) => drafter.learn(n_drafted, n_accepted),
        }
    }

    /// What became of its drafts so far.
    pub(crate) fn speculated(&self) -> Speculated {
        match self {
            Self::Lookup(drafter) => drafter.speculated(),
            Self::Model(drafter) => drafter.speculated(),
            Self::Head(drafter) => drafter.speculated,
        }
    }
}
