//! How an oracle is run: random cases from a seed that is printed, as many or for as long as asked.
//!
//! `PROPTEST_CASES` is the number of cases of each test, `CELLAR_ORACLE_SECONDS` runs each test for
//! so long instead, `CELLAR_ORACLE_SEED` begins with the seed that a run before printed. A case
//! that fails is made small and printed, and its seed is kept next to the test.

use std::time::{Duration, Instant};

use proptest::strategy::Strategy;
use proptest::test_runner::{
    Config, FileFailurePersistence, RngAlgorithm, TestError, TestRng, TestRunner,
};

/// Cases of a run without wishes: some seconds.
const N_CASES: u32 = 2048;
/// Cases between two looks at the clock.
const ROUND: u32 = 256;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let parsed = text.parse();
    Some(parsed.unwrap_or_else(|_| panic!("{variable}={text} is no number")))
}

fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // Every `RandomState` is seeded by the system.
    RandomState::new().build_hasher().finish()
}

/// Runs `test` on random values. `source_file` is the test's own, for the cases that are kept.
pub fn run_cases<S: Strategy>(
    name: &'static str,
    source_file: &'static str,
    strategy: &S,
    test: impl Fn(S::Value),
) {
    let seed = number("CELLAR_ORACLE_SEED").unwrap_or_else(random_seed);
    let seconds = number("CELLAR_ORACLE_SECONDS").map(Duration::from_secs);
    let wanted = number("PROPTEST_CASES").map_or(N_CASES, |n| n as u32);
    println!("{name}: CELLAR_ORACLE_SEED={seed}");
    let started = Instant::now();
    let mut n_done = 0;
    while seconds.map_or(n_done < wanted, |s| started.elapsed() < s) {
        let config = Config {
            cases: ROUND.min(wanted.saturating_sub(n_done).max(1)),
            source_file: Some(source_file),
            test_name: Some(name),
            failure_persistence: Some(Box::new(FileFailurePersistence::WithSource(
                "proptest-regressions",
            ))),
            ..Config::default()
        };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..12].copy_from_slice(&n_done.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        n_done += config.cases;
        let mut runner = TestRunner::new_with_rng(config, rng);
        let result = runner.run(strategy, |value| {
            test(value);
            Ok(())
        });
        match result {
            Ok(()) => {}
            Err(TestError::Fail(reason, case)) => {
                panic!("{name}, seed {seed}, within {n_done} cases: {reason}\n{case:#?}")
            }
            Err(TestError::Abort(reason)) => panic!("{name}, seed {seed}: {reason}"),
        }
    }
    println!("{name}: {n_done} cases in {:.0?}", started.elapsed());
}
