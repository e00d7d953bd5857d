//! Tests of the thread team that run on real threads; `tests/team.rs` tries all their orders.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kv_backend::BackendError;

use crate::team::{SPIN, Team, task_range};

fn team(n: usize) -> Team {
    Team::new(NonZeroUsize::new(n).unwrap()).unwrap()
}

#[test]
fn every_task_is_done_once() {
    for n_threads in 1..=4 {
        let team = team(n_threads);
        assert_eq!(team.n_threads(), n_threads);
        let done: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for n_tasks in (0..300).map(|i| i % 101) {
            done.iter().for_each(|d| d.store(0, Ordering::Relaxed));
            let task = |thread: usize, i: usize| {
                assert!(thread < n_threads);
                done[i].fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            team.lead().each(n_tasks, &task).unwrap();
            let once = |(i, d): (usize, &AtomicUsize)| {
                d.load(Ordering::Relaxed) == usize::from(i < n_tasks)
            };
            assert!(done.iter().enumerate().all(once));
        }
    }
}

#[test]
fn task_ranges_are_contiguous_and_complete() {
    for n_threads in 1..6 {
        for n_tasks in 0..40 {
            let ranges = (0..n_threads).map(|thread| task_range(n_tasks, thread, n_threads));
            let ranges: Vec<Range<usize>> = ranges.collect();
            assert!(ranges.iter().cloned().flatten().eq(0..n_tasks));
            let (least, most) = (n_tasks / n_threads, n_tasks.div_ceil(n_threads));
            assert!(ranges.iter().all(|s| s.len() == least || s.len() == most));
        }
    }
}

#[test]
fn tasks_that_others_have_not_begun_are_stolen() {
    // Two helpers are kept in their first tasks until the leader has done all others.
    let team = team(3);
    let (n_tasks, n_kept) = (30, AtomicUsize::new(0));
    let by_leader = AtomicUsize::new(0);
    let task = |thread: usize, _| {
        let start = Instant::now();
        let is_open = || start.elapsed() < Duration::from_secs(20);
        if thread > 0 {
            n_kept.fetch_add(1, Ordering::SeqCst);
            while by_leader.load(Ordering::SeqCst) < n_tasks - 2 && is_open() {
                thread::yield_now();
            }
        } else {
            while n_kept.load(Ordering::SeqCst) < 2 && is_open() {
                thread::yield_now();
            }
            by_leader.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    };
    team.lead().each(n_tasks, &task).unwrap();
    assert_eq!(by_leader.load(Ordering::SeqCst), n_tasks - 2);
}

#[test]
fn helpers_that_sleep_wake_up() {
    let team = team(2);
    for _ in 0..3 {
        thread::sleep(SPIN * 20);
        let helped = AtomicBool::new(false);
        let both = |thread: usize, _| {
            // The leader waits in its first task until the helper has taken one.
            let start = Instant::now();
            while thread == 0 && !helped.load(Ordering::Relaxed) {
                assert!(
                    start.elapsed() < Duration::from_secs(20),
                    "the helper sleeps on"
                );
                thread::yield_now();
            }
            helped.store(true, Ordering::Relaxed);
            Ok(())
        };
        team.lead().each(4, &both).unwrap();
    }
}

#[test]
fn panics_and_errors_come_back_and_the_team_goes_on() {
    for n_threads in [1, 3] {
        let team = team(n_threads);
        let panics = |_, i| {
            if i == 7 {
                panic!("task {i} fell over")
            } else {
                Ok(())
            }
        };
        let error = team.lead().each(20, &panics).unwrap_err();
        assert!(error.to_string().contains("task 7 fell over"), "{error}");
        let refuses = |_, _| {
            Err(BackendError::WrongLength {
                what: "values",
                wanted: 1,
                got: 2,
            })
        };
        let error = team.lead().each(20, &refuses).unwrap_err();
        assert!(matches!(error, BackendError::WrongLength { got: 2, .. }));
        team.lead().each(20, &|_, _| Ok(())).unwrap();
    }
}

#[test]
fn several_threads_take_turns_in_leading() {
    let team = team(2);
    let sum = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let add = |_, i| {
                        sum.fetch_add(i, Ordering::Relaxed);
                        Ok(())
                    };
                    team.lead().each(10, &add).unwrap();
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 3 * 200 * 45);
}
