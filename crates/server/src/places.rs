//! [`Places`]: how many of something each holder has, such as connections of a client, or viewers
//! of a key.
//!
//! Invariant: a place that is taken counts until it is dropped. Knows neither clients nor keys.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The places that are taken, by holder. Clones are the same places.
#[derive(Debug)]
pub(crate) struct Places<K>(Arc<Mutex<BTreeMap<K, usize>>>);

/// The number of places that may be taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceLimits {
    /// By one holder.
    pub(crate) of_one: usize,
    /// By all together.
    pub(crate) of_all: usize,
}

/// Why no place is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPlace {
    /// The holder has as many as it may.
    OfOne,
    /// All are taken.
    OfAll,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place<K: Ord> {
    places: Places<K>,
    holder: K,
}

impl<K: Ord + Clone> Places<K> {
    /// Takes a place for a holder.
    ///
    /// # Errors
    /// [`NoPlace`], which says whose limit is reached.
    pub(crate) fn take(&self, holder: K, limits: PlaceLimits) -> Result<Place<K>, NoPlace> {
        let mut taken = self.lock();
        if taken.values().sum::<usize>() >= limits.of_all {
            return Err(NoPlace::OfAll);
        }
        let count = taken.entry(holder.clone()).or_default();
        if *count >= limits.of_one {
            return Err(NoPlace::OfOne);
        }
        *count += 1;
        drop(taken);
        let places = self.clone();
        Ok(Place { places, holder })
    }
}

impl<K> Places<K> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Clone for Places<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K> Default for Places<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Ord> Drop for Place<K> {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        if let Some(count) = taken.get_mut(&self.holder) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.holder);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn each_holder_has_so_many_places_and_all_together() {
        let places = Places::default();
        let limits = PlaceLimits {
            of_one: 2,
            of_all: 4,
        };
        let take = |holder: &'static str| places.take(holder, limits);
        let first = take("a").unwrap();
        let _second = take("a").unwrap();
        assert_eq!(take("a").unwrap_err(), NoPlace::OfOne);
        let _others = [take("b").unwrap(), take("c").unwrap()];
        assert_eq!(take("d").unwrap_err(), NoPlace::OfAll);
        drop(first);
        let again = take("a").unwrap();
        assert_eq!(take("a").unwrap_err(), NoPlace::OfAll);
        drop(again);
        drop(take("d").unwrap());
        assert_eq!(places.lock().len(), 3, "who has none is forgotten");
    }
}
