//! After how many tokens copies of a request are kept, where windows or states can only be copied
//! as they are.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::reuse::{run, script, simulator, text};
use crate::support::fake::rules;
use crate::support::kinds::Kind;
use crate::support::simulator::{Script, Simulator};
use cellar_scheduler::{PrefixCaching, SchedulerConfig};

/// The lengths of what is cached after a prompt of so many tokens, shortest first, but for its
/// text.
fn kept(n_prompt: u32, checkpoints: &[usize]) -> Vec<usize> {
    kept_with(n_prompt, checkpoints, None)
}

/// The same where others part from it after so many tokens.
fn kept_with(n_prompt: u32, checkpoints: &[usize], parting: Option<usize>) -> Vec<usize> {
    let mut sim = simulator(Kind::Recurrent, 12, 900);
    let script = Script {
        checkpoints: checkpoints.to_vec(),
        parting,
        ..script(text(n_prompt, 1))
    };
    run(&mut sim, script);
    let lengths = sim.scheduler.cached().map(|line| line.tokens.len());
    let of_prompt = lengths.filter(|&n| n < n_prompt as usize);
    let mut kept: Vec<usize> = of_prompt.collect();
    kept.sort_unstable();
    sim.drain();
    kept
}

#[test]
fn copies_are_apart_and_the_last_of_near_ones_is_kept() {
    // The end of the prompt first, then checkpoints from the last one down.
    let checkpoints = [16, 31, 32, 100, 123, 124, 140, 200];
    assert_eq!(kept(140, &checkpoints), [16, 32, 100, 123, 139]);
    assert_eq!(kept(140, &[15]), [139]);
}

/// Behind the last picture a copy is kept however near the end is, but only one.
#[test]
fn a_copy_is_kept_where_others_part() {
    let kept_at = |parting| kept_with(140, &[30, 100], Some(parting));
    assert_eq!(kept_at(110), [30, 110, 139]);
    assert_eq!(kept_at(138), [30, 100, 138, 139]);
    for outside in [15, 139, 140, 200] {
        assert_eq!(kept_at(outside), [30, 100, 139], "{outside}");
    }
    assert_eq!(kept_at(16), [16, 100, 139]);
}

#[test]
fn few_tokens_are_not_kept() {
    assert!(kept(8, &[]).is_empty());
    assert_eq!(kept(9, &[]), [8]);
}

/// A copy that is kept in the middle of a prompt has no more of the prompt than it has tokens.
#[test]
fn copies_have_the_part_of_the_prompt_that_they_hold() {
    let mut sim = simulator(Kind::Recurrent, 12, 900);
    let script = Script {
        checkpoints: vec![32, 100],
        ..script(text(140, 1))
    };
    run(&mut sim, script);
    let lines = sim.scheduler.cached();
    let mut lines: Vec<(usize, usize)> = lines.map(|l| (l.tokens.len(), l.n_prompt)).collect();
    lines.sort_unstable();
    assert_eq!(lines[..3], [(32, 32), (100, 100), (139, 139)]);
    assert!(
        lines[3..]
            .iter()
            .all(|&(n, n_prompt)| n_prompt == n.min(140))
    );
    sim.drain();
}

#[test]
fn an_older_prefix_makes_room_for_a_copy() {
    let mut sim = simulator(Kind::Recurrent, 3, 900);
    for salt in [1, 2] {
        run(&mut sim, script(text(100, salt)));
    }
    let (_, again) = run(&mut sim, script(text(100, 2)));
    assert_eq!(again.n_tokens, 99);
    sim.drain();
}

#[test]
fn without_a_cache_no_copies_are_kept() {
    let config = SchedulerConfig {
        prefix_cache: PrefixCaching::Off,
        ..SchedulerConfig::new(rules(4), 64, 4000)
    };
    let mut sim = Simulator::new(Kind::Recurrent.memory(4, 500), config);
    run(&mut sim, script(text(100, 1)));
    assert_eq!(sim.scheduler.cached().count(), 0);
    sim.drain();
}
