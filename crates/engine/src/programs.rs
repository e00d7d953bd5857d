//! [`ProgramCache`]: a bounded number of compiled graphs.
//!
//! Invariant: never holds more programs than its capacity; the least recently used one is evicted.
//! Knows nothing of what a program computes.

/// Programs by the shape of their graph, the least recently used first.
#[derive(Debug)]
pub(crate) struct ProgramCache<K, P> {
    programs: Vec<(K, P)>,
    capacity: usize,
    n_compiled: u64,
}

impl<K: PartialEq, P> ProgramCache<K, P> {
    /// An empty cache for `capacity` programs, at least one.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            programs: Vec::new(),
            capacity: capacity.max(1),
            n_compiled: 0,
        }
    }

    /// The program for `shape`, compiled where it is not there.
    ///
    /// # Errors
    /// What `compile` fails with; the cache is unchanged then.
    pub(crate) fn get_or_compile<E>(
        &mut self,
        shape: K,
        compile: impl FnOnce() -> Result<P, E>,
    ) -> Result<&mut P, E> {
        let entry = match self.programs.iter().position(|(s, _)| *s == shape) {
            Some(at) => self.programs.remove(at),
            None => {
                let program = compile()?;
                self.n_compiled += 1;
                (shape, program)
            }
        };
        if self.programs.len() == self.capacity {
            self.programs.remove(0);
        }
        let at = self.programs.len();
        self.programs.push(entry);
        Ok(&mut self.programs[at].1)
    }

    /// Drops all programs.
    pub(crate) fn clear(&mut self) {
        self.programs.clear();
    }

    /// How many were compiled, those that made room included.
    pub(crate) fn n_compiled(&self) -> u64 {
        self.n_compiled
    }

    /// Number of programs held.
    pub(crate) fn len(&self) -> usize {
        self.programs.len()
    }
}

#[cfg(test)]
mod tests {
    use kv_graph::GraphShape;

    use super::*;

    #[test]
    fn the_least_recently_used_makes_room() {
        let mut cache = ProgramCache::new(2);
        let mut n_compiled = 0;
        let mut get = |n_tokens| {
            let shape = GraphShape {
                n_tokens,
                n_outputs: 1,
            };
            let compile = || {
                n_compiled += 1;
                Ok::<_, ()>(n_tokens * 10)
            };
            assert_eq!(
                cache.get_or_compile(shape, compile),
                Ok(&mut (n_tokens * 10))
            );
            (n_compiled, cache.len())
        };
        assert_eq!(get(1), (1, 1));
        assert_eq!(get(2), (2, 2));
        assert_eq!(get(1), (2, 2));
        assert_eq!(get(3), (3, 2), "2 goes");
        assert_eq!(get(1), (3, 2), "1 was used since");
        assert_eq!(get(2), (4, 2));
    }

    #[test]
    fn there_is_room_for_one_program_at_least() {
        for capacity in [0, 1] {
            let mut cache = ProgramCache::new(capacity);
            assert_eq!((cache.len(), cache.n_compiled()), (0, 0));
            for mut n in 1..=3u64 {
                assert_eq!(cache.get_or_compile(n, || Ok::<_, ()>(n)), Ok(&mut n));
                assert_eq!((cache.len(), cache.n_compiled()), (1, n));
            }
        }
    }

    #[test]
    fn a_failed_compilation_changes_nothing() {
        let mut cache = ProgramCache::new(1);
        let shape = |n_tokens| GraphShape {
            n_tokens,
            n_outputs: 1,
        };
        assert_eq!(
            cache.get_or_compile(shape(1), || Ok::<_, &str>(5)),
            Ok(&mut 5)
        );
        assert_eq!(cache.get_or_compile(shape(2), || Err("no")), Err("no"));
        assert_eq!(cache.get_or_compile(shape(1), || Err("again")), Ok(&mut 5));
    }
}
