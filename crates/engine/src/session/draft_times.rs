//! [`DraftTimes`]: what steps with and without drafted tokens took of late, and when to draft
//! though that does not pay, to find out whether it does now.
//!
//! A step takes from the end of the one before to its own: drafting, planning and taking back what
//! was wrong belong to it. Invariant: the costs that it gives are medians of times of about the
//! same number of texts, so that what else the machine does moves them little. Knows no text and no
//! token.

use std::time::{Duration, Instant};

use super::config::DraftCostSource;
use cellar_scheduler::{DraftCosts, DraftedBy, MAX_DRAFT, MAX_HEAD_DRAFT, Step};

/// Times that are kept of each kind of step.
const N_KEPT: usize = 9;

/// Fewer tell nothing.
const N_FEW: usize = 2;

/// Steps with drafts until one without is measured again, where there are enough and where there
/// are not.
const MAX_AGE: usize = 256;
const MIN_AGE: usize = 16;

/// Steps after which times of steps with drafts are forgotten.
const LONG_AGO: usize = 4096;

/// Steps after which costs are computed again.
const UPDATE_EVERY: usize = 8;

/// Steps without drafts between trials, while drafts do not pay: at first, at least and at most.
const FIRST_WAIT: usize = 48;
const MIN_WAIT: usize = 8;
const MAX_WAIT: usize = 2048;

/// The share of right tokens of texts that are easy to draft.
const RIGHT: f64 = 0.95;

/// The last times of one kind of step.
#[derive(Clone, Debug, Default)]
struct LastTimes {
    /// In seconds.
    times: Vec<f64>,
    /// The place of the next one.
    next: usize,
    /// The number of the step of the newest.
    newest: usize,
}

impl LastTimes {
    fn push(&mut self, time: f64, step: usize) {
        self.newest = step;
        match self.times.get_mut(self.next) {
            Some(place) => *place = time,
            None => self.times.push(time),
        }
        self.next = (self.next + 1) % N_KEPT;
    }

    /// Of two the smaller one; `None` of one, which a program may have been compiled for.
    fn median(&self) -> Option<f64> {
        if self.times.len() < N_FEW {
            return None;
        }
        let mut sorted = self.times.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get((sorted.len() - 1) / 2).copied()
    }
}

/// The times of steps of about so many texts.
#[derive(Clone, Debug)]
struct TimesOfTexts {
    /// Without drafts.
    plain: LastTimes,
    /// By the number of drafted tokens of each text.
    head: Vec<LastTimes>,
    lookup: Vec<LastTimes>,
    /// Steps, and those with drafts since the last one without.
    n_steps: usize,
    n_drafted: usize,
    costs: CostsOfTexts,
}

/// Costs of drafts.
#[derive(Clone, Debug)]
pub(super) struct CostsOfTexts {
    pub(super) head: DraftCosts,
    pub(super) lookup: DraftCosts,
}

impl Default for TimesOfTexts {
    fn default() -> Self {
        Self {
            plain: LastTimes::default(),
            head: vec![LastTimes::default(); MAX_DRAFT + 1],
            lookup: vec![LastTimes::default(); MAX_DRAFT + 1],
            n_steps: 0,
            n_drafted: 0,
            costs: CostsOfTexts {
                head: DraftCosts::of(DraftedBy::Head, |_| None),
                lookup: DraftCosts::of(DraftedBy::Lookup, |_| None),
            },
        }
    }
}

impl TimesOfTexts {
    fn push(&mut self, by: DraftedBy, n_each: usize, took: f64) {
        let step = self.n_steps;
        let of_drafts = match by {
            DraftedBy::Head => &mut self.head,
            DraftedBy::Lookup => &mut self.lookup,
        };
        match n_each {
            0 => self.plain.push(took, step),
            n => of_drafts
                .get_mut(n)
                .into_iter()
                .for_each(|times| times.push(took, step)),
        }
        // Not after each step: that takes longer than it is worth.
        if self.plain.times.len() < N_KEPT || step.is_multiple_of(UPDATE_EVERY) {
            self.update();
        }
    }

    /// Costs of what was measured.
    fn update(&mut self) {
        let step = self.n_steps;
        let Some(plain) = self.plain.median().filter(|&plain| plain > 0.0) else {
            return;
        };
        let costs = |by, of: &[LastTimes]| {
            DraftCosts::of(by, |n| {
                let known = of.get(n).filter(|times| step - times.newest < LONG_AGO);
                Some(known?.median()? / plain)
            })
        };
        self.costs.head = costs(DraftedBy::Head, &self.head);
        self.costs.lookup = costs(DraftedBy::Lookup, &self.lookup);
    }
}

/// The times that steps took of late.
#[derive(Clone, Debug)]
pub(super) struct DraftTimes {
    source: DraftCostSource,
    /// By the number of texts: 1, 2, 3 to 4, 5 to 8, and so on.
    of_texts: Vec<TimesOfTexts>,
    /// The end of the last step, where nothing came in between.
    last: Option<Instant>,
    /// Steps since the last trial.
    n_since: usize,
    /// So many before the next one.
    wait: usize,
}

/// The place among times of steps of so many texts.
fn place(n_texts: usize) -> usize {
    n_texts.max(1).next_power_of_two().trailing_zeros() as usize
}

impl DraftTimes {
    pub(super) fn new(source: DraftCostSource) -> Self {
        Self {
            source,
            of_texts: Vec::new(),
            last: None,
            n_since: 0,
            wait: FIRST_WAIT,
        }
    }

    fn of(&mut self, n_texts: usize) -> &mut TimesOfTexts {
        let at = place(n_texts);
        if self.of_texts.len() <= at {
            self.of_texts.resize_with(at + 1, TimesOfTexts::default);
        }
        &mut self.of_texts[at]
    }

    /// A step has ended, whose tokens were drafted in this way.
    pub(super) fn take_step(&mut self, step: &Step, by: Option<DraftedBy>, now: Instant) {
        if self.source == DraftCostSource::Usual {
            return;
        }
        let n_texts = step.feeds.len();
        let n_draft: usize = step.feeds.iter().map(|feed| feed.n_draft).sum();
        let n_tokens: usize = step.feeds.iter().map(|feed| feed.tokens.len()).sum();
        let before = self.last.replace(now);
        // Others read a prompt.
        if n_texts == 0 || n_tokens != n_texts + n_draft {
            self.interrupt();
        } else if let (Some(before), Some(by)) = (before, by) {
            let took = now.saturating_duration_since(before);
            self.take(n_texts, n_draft, by, took);
        }
    }

    /// Something other than steps and drafts takes time.
    pub(super) fn interrupt(&mut self) {
        self.last = None;
    }

    fn take(&mut self, n_texts: usize, n_draft: usize, by: DraftedBy, took: Duration) {
        self.n_since += 1;
        let times = self.of(n_texts);
        times.n_steps += 1;
        times.n_drafted = if n_draft == 0 { 0 } else { times.n_drafted + 1 };
        let took = took.as_secs_f64();
        if n_draft == 0 {
            times.push(by, 0, took);
        } else if let Some(plain) = times.plain.median() {
            // Where some texts have none, those that have some cost all others as much as here.
            let average = n_draft as f64 / n_texts as f64;
            let n_each = average.round().max(1.0);
            let took = plain + (took - plain) * n_each / average;
            times.push(by, n_each as usize, took);
        }
    }

    /// Costs of drafts where so many texts are computed together.
    pub(super) fn costs(&mut self, n_texts: usize) -> &CostsOfTexts {
        &self.of(n_texts).costs
    }

    /// True if a step without drafts is to be measured, where so many texts are computed together.
    /// Not until there is one: some texts may draft whatever it costs.
    pub(super) fn wants_plain_step(&mut self, n_texts: usize) -> bool {
        if self.source == DraftCostSource::Usual {
            return false;
        }
        let times = self.of(n_texts);
        let n = times.n_drafted;
        match times.plain.times.len() {
            n_plain if n_plain <= N_FEW => n.is_multiple_of(MIN_AGE),
            n_plain if n_plain < N_KEPT => n > 0 && n.is_multiple_of(MIN_AGE),
            _ => n > 0 && n.is_multiple_of(MAX_AGE),
        }
    }

    /// True if texts whose drafts do not pay are to get one token each all the same.
    pub(super) fn is_time_for_trial(&self) -> bool {
        self.n_since >= self.wait
    }

    /// Drafts were computed because they pay.
    pub(super) fn learn_that_they_pay(&mut self) {
        self.wait = self.wait.min(FIRST_WAIT);
    }

    /// So many of the tokens of a trial were right, where so many texts are computed together.
    pub(super) fn learn_from_trial(&mut self, n_texts: usize, n_drafted: usize, n_right: usize) {
        self.n_since = 0;
        let can_pay = self.of(n_texts).costs.head.best(RIGHT, MAX_HEAD_DRAFT) > 0;
        self.wait = if can_pay && 2 * n_right > n_drafted {
            // Perhaps the texts have changed: further trials tell soon.
            (self.wait / 4).max(MIN_WAIT)
        } else {
            (2 * self.wait).min(MAX_WAIT)
        };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(1);

    fn take(times: &mut DraftTimes, n_texts: usize, n_draft: usize, took: Duration) {
        times.take(n_texts, n_draft, DraftedBy::Head, took);
    }

    /// Times by which a token costs this much of a step.
    fn measured(token: f64) -> DraftTimes {
        let mut times = DraftTimes::new(DraftCostSource::Measured);
        for number in 0..20 {
            // One in ten takes much longer: the machine had other work.
            let other = if number % 10 == 0 { 50.0 } else { 1.0 };
            take(&mut times, 1, 0, STEP.mul_f64(other));
            take(&mut times, 1, 2, STEP.mul_f64((1.0 + 2.0 * token) * other));
        }
        times
    }

    #[test]
    fn medians_give_the_costs() {
        let mut times = measured(0.2);
        let costs = times.costs(1);
        let wanted = DraftCosts::of(DraftedBy::Head, |n| (n == 2).then_some(1.4));
        for rate in [0.1, 0.3, 0.5, 0.7, 0.9] {
            assert_eq!(costs.head.best(rate, 8), wanted.best(rate, 8), "{rate}");
        }
        assert!(costs.head.best(0.7, 8) > 0);
        assert_eq!(measured(1.1).costs(1).head.best(1.0, 8), 0);
        // Of lookup, and of other numbers of texts, nothing is known.
        assert!(measured(1.1).costs(1).lookup.best(0.7, 8) > 0);
        assert!(measured(1.1).costs(16).head.best(0.7, 8) > 0);
        // What is long ago counts for nothing.
        let mut times = measured(1.1);
        (0..LONG_AGO + 1).for_each(|_| take(&mut times, 1, 0, STEP));
        assert!(times.costs(1).head.best(0.7, 8) > 0);
    }

    /// One of four texts that drafts holds up the others: that costs four times as much.
    #[test]
    fn what_one_text_drafts_costs_the_others_time() {
        let mut times = DraftTimes::new(DraftCostSource::Measured);
        for _ in 0..20 {
            take(&mut times, 4, 0, STEP);
            take(&mut times, 4, 1, STEP.mul_f64(1.25));
        }
        let wanted = DraftCosts::of(DraftedBy::Head, |n| (n == 1).then_some(2.0));
        assert_eq!(times.costs(4).head.best(1.0, 1), wanted.best(1.0, 1));
        assert_eq!(wanted.best(1.0, 1), 0);
    }

    #[test]
    fn a_step_without_drafts_is_measured_first_and_seldom_again() {
        let mut times = DraftTimes::new(DraftCostSource::Measured);
        for _ in 0..3 {
            assert!(times.wants_plain_step(1));
            take(&mut times, 1, 0, STEP);
        }
        assert!(!times.wants_plain_step(1));
        assert!(times.wants_plain_step(4));
        let mut n_plain = 0;
        for _ in 0..2000 {
            let n_draft = if times.wants_plain_step(1) { 0 } else { 3 };
            n_plain += usize::from(n_draft == 0);
            take(&mut times, 1, n_draft, STEP);
        }
        assert!((10..=20).contains(&n_plain), "{n_plain} of 2000");
        // Nor is it waited for, where other texts draft in all steps.
        let mut others = DraftTimes::new(DraftCostSource::Measured);
        let mut n_wanted = 0;
        for _ in 0..320 {
            n_wanted += usize::from(others.wants_plain_step(2));
            take(&mut others, 2, 2, STEP);
        }
        assert_eq!(n_wanted, 20);
    }

    /// Trials of so many steps, whose token is right or wrong.
    fn n_trials(times: &mut DraftTimes, n_steps: usize, n_right: usize) -> usize {
        let mut n_trials = 0;
        for _ in 0..n_steps {
            let is_trial = times.is_time_for_trial();
            take(times, 1, usize::from(is_trial), STEP);
            if is_trial {
                n_trials += 1;
                times.learn_from_trial(1, 1, n_right);
            }
        }
        n_trials
    }

    #[test]
    fn trials_become_rare_where_they_are_wrong_and_frequent_where_they_are_right() {
        let mut times = DraftTimes::new(DraftCostSource::Measured);
        let wrong = n_trials(&mut times, 10_000, 0);
        assert!((6..=12).contains(&wrong), "{wrong} of 10000");
        let right = n_trials(&mut times, 10_000, 1);
        assert!(right > 500, "{right} of 10000");
        let wrong = n_trials(&mut times, 10_000, 0);
        assert!(wrong <= 14, "{wrong} of 10000");
        times.learn_that_they_pay();
        assert_eq!(times.wait, FIRST_WAIT);
    }

    /// However right they are, where a row takes as long as a step.
    #[test]
    fn trials_are_rare_where_no_draft_can_pay() {
        let mut times = measured(1.1);
        times.wait = FIRST_WAIT;
        let mut n_trials = 0;
        for _ in 0..3_500 {
            if times.is_time_for_trial() {
                n_trials += 1;
                take(&mut times, 1, 1, STEP.mul_f64(2.1));
                times.learn_from_trial(1, 1, 1);
            } else {
                take(&mut times, 1, 0, STEP);
            }
        }
        assert!(n_trials <= 8, "{n_trials} of 3500");
    }
}
