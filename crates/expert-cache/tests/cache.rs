//! The cache of experts: hits against other rules, and what holds after every decision.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

use std::collections::{BTreeMap, BTreeSet};

use expert_cache::{
    Acquisition, Choice, ExpertCache, ExpertId, ReadEnd, ReplayRule, RouteStep, RouteTrace, Stack,
    smallest_budget,
};

/// Numbers that look random, the same each time.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// In 0..1.
    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// `n` different numbers by these weights, in ascending order.
    fn draw(&mut self, weights: &[f64], n: usize) -> Vec<u32> {
        let key = |weight: &f64| -self.part().ln() / weight;
        let keys: Vec<f64> = weights.iter().map(key).collect();
        let mut order: Vec<u32> = (0..weights.len() as u32).collect();
        order.sort_by(|&a, &b| keys[a as usize].total_cmp(&keys[b as usize]));
        order.truncate(n);
        order.sort_unstable();
        order
    }
}

const N_LAYERS: u32 = 8;
const N_EXPERTS: usize = 64;
const N_USED: usize = 6;

/// How routers choose.
#[derive(Clone, Copy)]
struct Habits {
    name: &'static str,
    /// Weights are ranks to the power of this, negated.
    zipf: f64,
    /// The part of steps after which two experts swap ranks.
    drift: f64,
    /// Steps of a topic, which prefers some experts; 0 without topics.
    topic: usize,
    /// How much likelier the experts of the step before are.
    sticky: f64,
}

fn trace(habits: Habits, n_steps: usize) -> RouteTrace {
    drawn(habits, n_steps).trace
}

/// A trace, and what it was drawn by.
struct DrawnTrace {
    trace: RouteTrace,
    /// For each choice, how likely the same layer's router takes each expert the next time.
    odds: Vec<Vec<f64>>,
}

impl DrawnTrace {
    /// The hits of a hundred of a rule that knows how likely each expert is at any time, and not
    /// what is drawn: what is unlikeliest goes. Chance leaves no rule without the future more.
    fn informed_percent(&self, budget: u64) -> f64 {
        let n_places = (budget / 100) as usize;
        let mut odds = vec![vec![0.0; N_EXPERTS]; N_LAYERS as usize];
        let mut held: BTreeSet<(u32, u32)> = BTreeSet::new();
        let (mut n_hits, mut n_uses) = (0, 0);
        for (step, odds_after) in self.trace.steps.iter().zip(&self.odds) {
            odds[step.layer as usize].clone_from(odds_after);
            for choice in &step.choices {
                n_uses += 1;
                if !held.insert((step.layer, choice.expert)) {
                    n_hits += 1;
                }
            }
            let of = |(layer, expert): &(u32, u32)| odds[*layer as usize][*expert as usize];
            while held.len() > n_places {
                let least = held.iter().copied();
                let least = least.min_by(|a, b| of(a).total_cmp(&of(b))).unwrap();
                held.remove(&least);
            }
        }
        100.0 * f64::from(n_hits) / f64::from(n_uses)
    }
}

fn drawn(habits: Habits, n_steps: usize) -> DrawnTrace {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let by_rank: Vec<f64> = (1..=N_EXPERTS)
        .map(|r| (r as f64).powf(-habits.zipf))
        .collect();
    let n_layers = N_LAYERS as usize;
    let mut ranks: Vec<Vec<usize>> = vec![(0..N_EXPERTS).collect(); n_layers];
    for ranks in &mut ranks {
        (1..N_EXPERTS)
            .rev()
            .for_each(|i| ranks.swap(i, numbers.below(i + 1)));
    }
    let mut of_topic = || if numbers.part() < 0.15 { 6.0 } else { 0.4 };
    let topics: Vec<Vec<f64>> = (0..6 * n_layers)
        .map(|_| (0..N_EXPERTS).map(|_| of_topic()).collect())
        .collect();
    let mut topic = 0;
    let mut before: Vec<Vec<u32>> = vec![Vec::new(); n_layers];
    let (mut steps, mut odds) = (Vec::new(), Vec::new());
    for step in 0..n_steps {
        if habits.topic > 0 && step % habits.topic == 0 {
            topic = numbers.below(6);
        }
        for layer in 0..n_layers {
            if numbers.part() < habits.drift {
                let (a, b) = (numbers.below(N_EXPERTS), numbers.below(N_EXPERTS));
                ranks[layer].swap(a, b);
            }
            let mut weights: Vec<f64> = ranks[layer].iter().map(|&rank| by_rank[rank]).collect();
            if habits.topic > 0 {
                let factors = &topics[topic * n_layers + layer];
                weights
                    .iter_mut()
                    .zip(factors)
                    .for_each(|(w, factor)| *w *= factor);
            }
            let plain = weights.clone();
            for &expert in &before[layer] {
                weights[expert as usize] *= 1.0 + habits.sticky;
            }
            let chosen = numbers.draw(&weights, N_USED);
            let mut after = plain;
            for &expert in &chosen {
                after[expert as usize] *= 1.0 + habits.sticky;
            }
            let sum: f64 = after.iter().sum();
            odds.push(after.iter().map(|weight| weight / sum).collect());
            let choices = chosen.iter().map(|&expert| Choice { expert, n_rows: 1 });
            steps.push(RouteStep {
                layer: layer as u32,
                n_rows: 1,
                choices: choices.collect(),
            });
            before[layer] = chosen;
        }
    }
    let stacks = (0..N_LAYERS).map(|layer| Stack {
        layer,
        n_experts: N_EXPERTS as u32,
        n_bytes: 100,
    });
    let trace = RouteTrace {
        stacks: stacks.collect(),
        budget: 0,
        steps,
    };
    DrawnTrace { trace, odds }
}

/// No rule wins everywhere: counting is best while nothing changes, recency after a change. The
/// value rule is near the better one everywhere, and better than each by far where it is wrong.
/// Chance is most of what remains to the future: the value rule has at most three points less than
/// a rule that knows how likely each expert is.
#[test]
fn value_hits_more_than_recency_and_than_counting() {
    let plain = Habits {
        name: "zipf",
        zipf: 1.0,
        drift: 0.0,
        topic: 0,
        sticky: 0.0,
    };
    let all = [
        plain,
        Habits {
            name: "drift",
            drift: 0.02,
            ..plain
        },
        Habits {
            name: "fast drift",
            zipf: 1.1,
            drift: 0.2,
            ..plain
        },
        Habits {
            name: "topics",
            zipf: 0.8,
            topic: 200,
            ..plain
        },
        Habits {
            name: "topics and words",
            zipf: 0.7,
            drift: 0.005,
            topic: 300,
            sticky: 4.0,
        },
        Habits {
            name: "words alone",
            zipf: 0.3,
            sticky: 20.0,
            ..plain
        },
    ];
    let (mut sums, mut informed_sum) = ([0.0; 4], 0.0);
    println!(
        "{:18} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "budget", "value", "recency", "frequency", "informed", "future"
    );
    for habits in all {
        let drawn = drawn(habits, 3000);
        let trace = &drawn.trace;
        for percent in [25, 50] {
            let budget = trace.total_bytes() * percent / 100;
            let hits = ReplayRule::ALL.map(|rule| {
                let replayed = trace.replay(budget, rule);
                assert!(replayed.most_bytes <= budget);
                assert_eq!(replayed.bytes_read, replayed.n_misses * 100);
                replayed.hit_percent()
            });
            let [value, recency, frequency, future] = hits;
            let informed = drawn.informed_percent(budget);
            informed_sum += informed / 12.0;
            println!(
                "{:18} {percent:>5}% {value:9.1} {recency:9.1} {frequency:9.1} {informed:9.1} \
                 {future:9.1}",
                habits.name
            );
            let better = recency.max(frequency);
            assert!(value > better - 1.0, "{}: {value} of {better}", habits.name);
            assert!(value < future, "{}: {value} of {future}", habits.name);
            let is_still = habits.drift + habits.sticky == 0.0 && habits.topic == 0;
            if is_still {
                assert!(value > recency + 5.0, "{value} of {recency}");
            } else if percent == 25 {
                assert!(value > frequency + 5.0, "{value} of {frequency}");
            }
            sums.iter_mut()
                .zip(hits)
                .for_each(|(sum, hits)| *sum += hits / 12.0);
        }
    }
    let [value, recency, frequency, future] = sums;
    println!(
        "{:25} {value:9.1} {recency:9.1} {frequency:9.1} {informed_sum:9.1} {future:9.1}",
        "mean"
    );
    assert!(value > recency + 5.0 && value > frequency + 5.0);
    assert!(value > informed_sum - 3.0, "{value} of {informed_sum}");
}

#[test]
fn a_budget_for_everything_reads_everything_once() {
    let plain = Habits {
        name: "zipf",
        zipf: 0.5,
        drift: 0.0,
        topic: 0,
        sticky: 0.0,
    };
    let trace = trace(plain, 300);
    for rule in ReplayRule::ALL {
        for budget in [trace.total_bytes(), u64::MAX / 4] {
            let all = trace.replay(budget, rule);
            assert_eq!(all.bytes_read, trace.total_bytes(), "{}", rule.name());
        }
        let one = trace.replay(100, rule);
        assert_eq!(one.most_bytes, 100);
        assert!(one.n_misses > 0 && one.hit_percent() < 10.0);
        // Less than one matrix: nothing is kept.
        let none = trace.replay(99, rule);
        assert_eq!((none.n_hits, none.most_bytes), (0, 0));
    }
}

/// What a caller may do, at random, with a count of everything beside.
#[test]
fn a_random_run_never_exceeds_the_budget_and_every_wait_ends() {
    let n_decisions = match std::env::var("CELLAR_EXPERT_DECISIONS") {
        Ok(n) => n.parse().unwrap(),
        Err(_) => 100_000,
    };
    let mut decisions = 0;
    for seed in 1.. {
        decisions += random_run(seed, 2_000);
        if decisions >= n_decisions {
            break;
        }
    }
    println!("{decisions} decisions");
}

/// One to three models, and what their callers hold.
struct RandomRun {
    numbers: Numbers,
    cache: ExpertCache,
    /// By their numbers.
    models: Vec<Vec<Stack>>,
    reading: BTreeSet<ExpertId>,
    there: BTreeSet<ExpertId>,
    users: BTreeMap<ExpertId, u32>,
    waiting: BTreeSet<u32>,
}

impl RandomRun {
    fn new(seed: u64) -> Self {
        let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..8).for_each(|_| {
            numbers.next();
        });
        let n_models = 1 + numbers.below(3);
        let models: Vec<_> = (0..n_models).map(|_| random_stacks(&mut numbers)).collect();
        let least = models.iter().map(|stacks| smallest_budget(stacks)).max();
        let total: u64 = models.iter().flatten().map(stack_bytes).sum();
        let least = least.unwrap();
        let budget = least + numbers.below(1 + (total - least) as usize * 5 / 4) as u64;
        let mut cache = ExpertCache::new(budget);
        for (number, stacks) in (0..).zip(&models) {
            assert_eq!(cache.add_mixture(), number);
            for &stack in stacks {
                cache.add(number, stack);
            }
        }
        Self {
            numbers,
            cache,
            models,
            reading: BTreeSet::new(),
            there: BTreeSet::new(),
            users: BTreeMap::new(),
            waiting: BTreeSet::new(),
        }
    }

    fn size(&self, id: ExpertId) -> u64 {
        self.models[id.mixture as usize][id.stack as usize].n_bytes
    }

    fn any_id(&mut self) -> ExpertId {
        let mixture = self.numbers.below(self.models.len());
        let stacks = &self.models[mixture];
        let stack = self.numbers.below(stacks.len());
        ExpertId {
            mixture: mixture as u32,
            stack: stack as u32,
            expert: self.numbers.below(stacks[stack].n_experts as usize) as u32,
        }
    }

    fn route(&mut self, id: ExpertId) {
        let stack = self.models[id.mixture as usize][id.stack as usize];
        let n_experts = stack.n_experts as usize;
        let n = 1 + self.numbers.below(n_experts);
        let chosen = self.numbers.draw(&vec![1.0; n_experts], n);
        let choices = chosen.iter().map(|&expert| Choice { expert, n_rows: 1 });
        let choices: Vec<_> = choices.collect();
        let routed = self.cache.routed(id.mixture, stack.layer, &choices, 1);
        assert!(routed.n_hits + routed.n_misses >= n as u64);
    }

    fn ask(&mut self, id: ExpertId) {
        let is_ahead = self.numbers.below(3) == 0;
        let (begun, evicted) = if is_ahead {
            match self.cache.foresee(id) {
                Some(evicted) => (true, evicted),
                None => (false, Vec::new()),
            }
        } else {
            match self.cache.acquire(id) {
                Acquisition::Ready => {
                    assert!(self.there.contains(&id));
                    *self.users.entry(id).or_default() += 1;
                    (false, Vec::new())
                }
                Acquisition::Reading => {
                    assert!(self.reading.contains(&id));
                    (false, Vec::new())
                }
                Acquisition::Read { evicted } => (true, evicted),
                Acquisition::NoRoom => {
                    // A wait that ends: something is in use or being read, or another model waits
                    // that has something to give up.
                    let others = self.there.iter().filter(|gone| gone.mixture != id.mixture);
                    let mut waiting = others.filter(|gone| self.waiting.contains(&gone.mixture));
                    let is_held = !self.users.is_empty() || !self.reading.is_empty();
                    assert!(is_held || waiting.next().is_some());
                    (false, Vec::new())
                }
            }
        };
        for gone in evicted {
            assert!(self.there.remove(&gone), "{gone:?} was not there");
            assert!(!self.users.contains_key(&gone), "{gone:?} is in use");
        }
        if begun {
            let is_new = !self.there.contains(&id) && self.reading.insert(id);
            assert!(is_new, "{id:?} twice");
        }
    }

    fn end_read(&mut self) {
        let at = self.numbers.below(self.reading.len().max(1));
        let Some(&ended) = self.reading.iter().nth(at) else {
            return;
        };
        self.reading.remove(&ended);
        if self.numbers.below(10) > 0 {
            self.cache.read_ended(ended, ReadEnd::Done);
            self.there.insert(ended);
        } else {
            self.cache.read_ended(ended, ReadEnd::Failed);
        }
    }

    fn release(&mut self) {
        let at = self.numbers.below(self.users.len().max(1));
        let Some((&used, _)) = self.users.iter().nth(at) else {
            return;
        };
        self.cache.release(used);
        let n = self.users.get_mut(&used).unwrap();
        *n -= 1;
        if *n == 0 {
            self.users.remove(&used);
        }
    }

    /// A model comes again after it left with what it had.
    fn replace(&mut self, mixture: u32) {
        self.cache.remove_mixture(mixture);
        self.reading.retain(|id| id.mixture != mixture);
        self.there.retain(|id| id.mixture != mixture);
        self.users.retain(|id, _| id.mixture != mixture);
        self.waiting.remove(&mixture);
        self.check();
        assert_eq!(self.cache.bytes_of_mixture(mixture), 0);
        assert_eq!(self.cache.add_mixture(), mixture);
        for &stack in &self.models[mixture as usize] {
            self.cache.add(mixture, stack);
        }
    }

    fn check(&self) {
        let mut of_each = vec![0; self.models.len()];
        for &id in self.there.iter().chain(&self.reading) {
            of_each[id.mixture as usize] += self.size(id);
        }
        let n_bytes: u64 = of_each.iter().sum();
        assert_eq!(self.cache.n_bytes(), n_bytes);
        let budget = self.cache.budget();
        assert!(n_bytes <= budget, "{n_bytes} of {budget}");
        for (mixture, n_bytes) in (0..).zip(of_each) {
            assert_eq!(self.cache.bytes_of_mixture(mixture), n_bytes);
        }
    }
}

fn stack_bytes(stack: &Stack) -> u64 {
    stack.n_bytes * u64::from(stack.n_experts)
}

fn random_run(seed: u64, n_steps: usize) -> usize {
    let mut run = RandomRun::new(seed);
    for _ in 0..n_steps {
        let id = run.any_id();
        match run.numbers.below(80) {
            0..20 => run.route(id),
            20..50 => run.ask(id),
            50..68 => run.end_read(),
            68..74 => run.release(),
            74..79 => {
                if run.waiting.insert(id.mixture) {
                    run.cache.wait_begins(id.mixture);
                } else {
                    run.waiting.remove(&id.mixture);
                    run.cache.wait_ends(id.mixture);
                }
            }
            _ => run.replace(id.mixture),
        }
        run.check();
    }
    // Once nothing is in use or being read, everything can be had.
    for &id in &run.reading {
        run.cache.read_ended(id, ReadEnd::Failed);
    }
    for (&id, &n) in &run.users {
        (0..n).for_each(|_| run.cache.release(id));
    }
    run.waiting.iter().for_each(|&m| run.cache.wait_ends(m));
    for (mixture, stacks) in (0..).zip(&run.models) {
        everything_can_be_had(&mut run.cache, mixture, stacks);
    }
    n_steps
}

/// One to four layers of one to three stacks each, which have one to twelve experts.
fn random_stacks(numbers: &mut Numbers) -> Vec<Stack> {
    let n_layers = 1 + numbers.below(4) as u32;
    let n_experts = 1 + numbers.below(12) as u32;
    let mut stacks = Vec::new();
    for layer in 0..n_layers {
        for _ in 0..1 + numbers.below(3) {
            let n_bytes = 1 + numbers.below(50) as u64;
            stacks.push(Stack {
                layer,
                n_experts,
                n_bytes,
            });
        }
    }
    stacks
}

fn id(stack: u32, expert: u32) -> ExpertId {
    ExpertId {
        mixture: 0,
        stack,
        expert,
    }
}

fn everything_can_be_had(cache: &mut ExpertCache, mixture: u32, stacks: &[Stack]) {
    for stack in 0..stacks.len() as u32 {
        for expert in 0..stacks[0].n_experts {
            let id = ExpertId {
                mixture,
                ..id(stack, expert)
            };
            match cache.acquire(id) {
                Acquisition::Ready => {}
                Acquisition::Read { .. } => {
                    cache.read_ended(id, ReadEnd::Done);
                    assert_eq!(cache.acquire(id), Acquisition::Ready);
                }
                other => panic!("{other:?}"),
            }
            cache.release(id);
        }
    }
}

#[test]
fn what_is_read_ahead_displaces_nothing_that_is_nearer() {
    let stacks: Vec<_> = (0..2)
        .map(|layer| Stack {
            layer,
            n_experts: 4,
            n_bytes: 10,
        })
        .collect();
    let mut cache = ExpertCache::with_stacks(40, &stacks);
    let choice = |expert| Choice { expert, n_rows: 1 };
    // Experts 0 and 1 of both layers, always.
    for _ in 0..20 {
        for layer in 0..2 {
            cache.routed(0, layer, &[choice(0), choice(1)], 1);
            assert_eq!(cache.layer_after(0, layer), 1 - layer);
            for expert in 0..2 {
                if let Acquisition::Read { .. } = cache.acquire(id(layer, expert)) {
                    cache.read_ended(id(layer, expert), ReadEnd::Done);
                    cache.acquire(id(layer, expert));
                }
                cache.release(id(layer, expert));
            }
        }
    }
    assert_eq!(cache.n_bytes(), 40);
    // Nothing that the router hardly chooses is worth a favourite.
    assert_eq!(cache.likely(0, 0), []);
    assert_eq!(cache.foresee(id(0, 2)), None);
    assert_eq!(cache.foresee(id(0, 0)), None);
    // A choice is: its place is that of what is needed last.
    let routed = cache.routed(0, 0, &[choice(0), choice(3)], 1);
    assert_eq!((routed.n_hits, routed.n_misses), (1, 1));
    assert_eq!(cache.wanted(0, 0), [id(0, 3)]);
    assert_eq!(cache.foresee(id(0, 3)), Some(vec![id(0, 1)]));
    assert_eq!(cache.acquire(id(0, 3)), Acquisition::Reading);
    cache.read_ended(id(0, 3), ReadEnd::Done);
    assert_eq!(cache.acquire(id(0, 3)), Acquisition::Ready);
    // Nothing else fits while all is in use.
    for held in [id(0, 0), id(1, 0), id(1, 1)] {
        assert_eq!(cache.acquire(held), Acquisition::Ready);
    }
    assert_eq!(cache.acquire(id(1, 2)), Acquisition::NoRoom);
    assert_eq!(cache.acquire(id(9, 0)), Acquisition::NoRoom);
    assert_eq!(cache.likely(0, 0), [id(0, 1)]);
    cache.release(id(1, 1));
    let evicted = vec![id(1, 1)];
    assert_eq!(cache.acquire(id(1, 2)), Acquisition::Read { evicted });
}

/// Models of one shape, whose routers choose by rank, in one memory.
struct SharedMixtures {
    cache: ExpertCache,
    numbers: Numbers,
    n_hits: u64,
    n_uses: u64,
}

impl SharedMixtures {
    fn new(budget: u64, n_models: usize) -> Self {
        let mut cache = ExpertCache::new(budget);
        for _ in 0..n_models {
            let mixture = cache.add_mixture();
            for stack in Self::stacks() {
                cache.add(mixture, stack);
            }
        }
        Self {
            cache,
            numbers: Numbers(0x9e37_79b9_7f4a_7c15),
            n_hits: 0,
            n_uses: 0,
        }
    }

    fn stacks() -> impl Iterator<Item = Stack> {
        (0..4).map(|layer| Stack {
            layer,
            n_experts: 16,
            n_bytes: 10,
        })
    }

    /// Bytes of one of the models.
    fn total() -> u64 {
        Self::stacks().map(|stack| stack_bytes(&stack)).sum()
    }

    fn step(&mut self, mixture: u32) {
        let weights: Vec<f64> = (1..=16).map(|rank| 1.0 / f64::from(rank)).collect();
        let cache = &mut self.cache;
        for layer in 0..4 {
            let chosen = self.numbers.draw(&weights, 3);
            let choices = chosen.iter().map(|&expert| Choice { expert, n_rows: 1 });
            let routed = cache.routed(mixture, layer, &choices.collect::<Vec<_>>(), 1);
            self.n_hits += routed.n_hits;
            self.n_uses += routed.n_hits + routed.n_misses;
            for expert in chosen {
                let id = ExpertId {
                    mixture,
                    ..id(layer, expert)
                };
                if let Acquisition::Read { .. } = cache.acquire(id) {
                    cache.read_ended(id, ReadEnd::Done);
                    assert_eq!(cache.acquire(id), Acquisition::Ready);
                }
                cache.release(id);
                assert!(cache.n_bytes() <= cache.budget());
            }
        }
    }

    /// Model 0 computes, and model 1 in each of so many of its steps. The part of the memory that
    /// model 1 has in the second half.
    fn share(&mut self, every: usize) -> f64 {
        let mut sum = 0;
        for n in 0..600 {
            self.step(0);
            if n % every == 0 {
                self.step(1);
            }
            if n >= 300 {
                sum += self.cache.bytes_of_mixture(1);
            }
        }
        sum as f64 / 300.0 / self.cache.budget() as f64
    }

    fn hit_percent(&self) -> f64 {
        100.0 * self.n_hits as f64 / self.n_uses as f64
    }
}

/// Two models that choose alike share the memory by how often they compute; one that computes no
/// more gives up all that the other one needs.
#[test]
fn the_model_that_is_used_less_gives() {
    let total = SharedMixtures::total();
    let mut models = SharedMixtures::new(total, 2);
    let equal = models.share(1);
    assert!((0.4..0.6).contains(&equal), "{equal}");
    let fewer = models.share(8);
    assert!((0.1..0.4).contains(&fewer), "{fewer}");
    let hardly = models.share(100);
    assert!(hardly < 0.15, "{hardly}");
    for _ in 0..3000 {
        models.step(0);
    }
    assert_eq!(models.cache.bytes_of_mixture(0), total);
    assert_eq!(models.cache.bytes_of_mixture(1), 0);
    // The other one comes back, and the first one rests: a pause is not held against it.
    for _ in 0..40 {
        models.step(1);
    }
    let left = models.cache.bytes_of_mixture(1);
    assert!(left > total / 2, "{left} of {total}");
    let states = models.cache.states(0).concat();
    let hits: u64 = states.iter().map(|expert| expert.counts.n_hits).sum();
    assert!(hits > 3000 * 12, "{hits}");
    models.cache.remove_mixture(0);
    assert_eq!(models.cache.n_bytes(), left);
    assert_eq!(models.cache.states(0).len(), 0);
}

/// One memory finds more than two halves of it where models are not used alike.
#[test]
fn one_memory_is_better_than_halves() {
    let total = SharedMixtures::total();
    for (every, more) in [(1, -1.5), (8, 8.0), (100, 15.0)] {
        let mut shared = SharedMixtures::new(total, 2);
        shared.share(every);
        // Each with half of the memory.
        let (mut first, mut second) = (
            SharedMixtures::new(total / 2, 1),
            SharedMixtures::new(total / 2, 1),
        );
        for n in 0..600 {
            first.step(0);
            if n % every == 0 {
                second.step(0);
            }
        }
        let n_hits = (first.n_hits + second.n_hits) as f64;
        let halves = 100.0 * n_hits / (first.n_uses + second.n_uses) as f64;
        let shared = shared.hit_percent();
        println!("1 to {every}: shared {shared:.1} %, halves {halves:.1} %");
        assert!(shared > halves + more, "{shared} and {halves}");
    }
}
