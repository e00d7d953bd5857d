//! [`DraftSource`]: what drafts the tokens of a text, and how many at once may be asked for.
//!
//! Invariant: the tokens of a text, and what its sampler draws for them, are those without
//! speculation where rows do not depend on the number of tokens in a batch (the CPU backend).

use cellar_scheduler::{
    DraftCosts, DraftedBy, Drafter, HeadLength, MAX_DRAFT, MAX_HEAD_DRAFT, Speculated, Speculation,
    SpeculationOff, USUAL_RATE,
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
    lookup: Option<LookupDrafter>,
    length: HeadLength,
    /// The last token of the text.
    last: TokenId,
    /// The last draft.
    drafted: LastDraft,
    speculated: Speculated,
}

/// Drafts by prompt lookup, where that pays.
#[derive(Debug)]
struct LookupDrafter {
    drafter: Drafter,
    length: HeadLength,
}

/// A draft of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LastDraft {
    source: DraftedBy,
    reason: DraftReason,
}

/// The reason for a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DraftReason {
    /// It pays.
    #[default]
    Pays,
    /// It does not, and this is to find out whether it does now.
    Trial,
}

/// The limits and costs of a step's drafts, for a head's drafter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftOffer<'a> {
    /// The most tokens that there is room for.
    pub(crate) n_max: usize,
    /// The costs of drafts of the head, and of those by lookup.
    pub(crate) head: &'a DraftCosts,
    pub(crate) lookup: &'a DraftCosts,
    /// The share of the head's tokens that were right in other texts.
    pub(crate) rate: f64,
    /// The reason for drafts.
    pub(crate) reason: DraftReason,
}

impl DraftOffer<'_> {
    /// The number of tokens to draft, of which `n` pay.
    fn n_of(&self, n: usize) -> usize {
        match self.reason {
            DraftReason::Pays => n.min(self.n_max),
            DraftReason::Trial => n.max(1).min(self.n_max),
        }
    }

    fn reason_for(n: usize) -> DraftReason {
        if n == 0 {
            DraftReason::Trial
        } else {
            DraftReason::Pays
        }
    }
}

impl HeadDrafter {
    fn new(speculation: Speculation, n_max: usize) -> Self {
        let lookup = Drafter::new(speculation).map(|drafter| LookupDrafter {
            drafter,
            length: HeadLength::new(n_max, USUAL_RATE),
        });
        Self {
            lookup,
            length: HeadLength::new(n_max.min(MAX_HEAD_DRAFT), USUAL_RATE),
            last: TokenId::default(),
            drafted: LastDraft::default(),
            speculated: Speculated::default(),
        }
    }

    /// The tokens that prompt lookup finds, where they pay.
    pub(crate) fn draft_by_lookup(&mut self, offer: DraftOffer<'_>) -> Vec<TokenId> {
        let Some(lookup) = &self.lookup else {
            return Vec::new();
        };
        let n = lookup.length.next(offer.lookup);
        let found = lookup.drafter.draft(offer.n_of(n));
        if !found.is_empty() {
            self.drafted = LastDraft {
                source: DraftedBy::Lookup,
                reason: DraftOffer::reason_for(n),
            };
        }
        found
    }

    /// The last token of the text, and the number of tokens that the head is to draft after it.
    pub(crate) fn turn(&mut self, offer: DraftOffer<'_>) -> HeadDraft {
        let after = self.last;
        if self.speculated.off == Some(SpeculationOff::HeadFailed) {
            return HeadDraft { after, n: 0 };
        }
        self.length.assume(offer.rate);
        let n = self.length.next(offer.head);
        let percent = self.length.percent();
        self.speculated.off = match self.speculated.off {
            _ if n > 0 => None,
            // Finding out what is needed takes too long for each step.
            Some(off @ SpeculationOff::DoesNotPay { percent: said, .. }) if said == percent => {
                Some(off)
            }
            _ => Some(SpeculationOff::DoesNotPay {
                percent,
                needed: offer.head.needed_percent(self.length.n_max()),
            }),
        };
        self.drafted = LastDraft {
            source: DraftedBy::Head,
            reason: DraftOffer::reason_for(n),
        };
        let n = offer.n_of(n);
        HeadDraft { after, n }
    }

    /// The head cannot compute.
    pub(crate) fn fail(&mut self) {
        self.speculated.off = Some(SpeculationOff::HeadFailed);
    }

    /// The reason for its last draft.
    pub(crate) fn reason(&self) -> DraftReason {
        self.drafted.reason
    }

    /// The source of its last draft.
    pub(crate) fn source(&self) -> DraftedBy {
        self.drafted.source
    }

    /// The share of the head's tokens that were right.
    pub(crate) fn rate(&self) -> f64 {
        self.length.rate()
    }

    fn push(&mut self, tokens: &[TokenId]) {
        self.last = tokens.last().copied().unwrap_or(self.last);
        if let Some(lookup) = &mut self.lookup {
            lookup.drafter.push(tokens);
        }
    }

    fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        self.speculated.n_drafted += n_drafted;
        self.speculated.n_accepted += n_accepted;
        match (&mut self.lookup, self.drafted.source) {
            (Some(lookup), DraftedBy::Lookup) => {
                lookup.drafter.learn(n_drafted, n_accepted);
                lookup.length.learn(n_drafted, n_accepted);
            }
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
