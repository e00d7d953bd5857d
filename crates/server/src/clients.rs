//! [`Clients`]: how many connections each client has.
//!
//! Invariant: no address has more than the limit. A client is an IPv4 address, or the 64 bits of an IPv6
//! address that name a network; what a proxy says of others is not looked at.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The connections of all clients. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Clients {
    counts: Arc<Mutex<BTreeMap<IpAddr, usize>>>,
    limit: Option<NonZeroUsize>,
}

/// A connection of a client, until it is dropped.
#[derive(Debug)]
pub(crate) struct ClientPlace {
    counted: Option<(Clients, IpAddr)>,
}

impl Clients {
    /// At most so many of each client; `None` for any number.
    pub(crate) fn new(limit: Option<NonZeroUsize>) -> Self {
        Self {
            counts: Arc::default(),
            limit,
        }
    }

    /// A place for a connection; `None` where the client has as many as it may. Connections without an
    /// address are not counted.
    pub(crate) fn place(&self, address: Option<IpAddr>) -> Option<ClientPlace> {
        let (Some(limit), Some(address)) = (self.limit, address) else {
            return Some(ClientPlace { counted: None });
        };
        let client = client_of(address);
        let mut counts = self.lock();
        let count = counts.entry(client).or_default();
        if *count >= limit.get() {
            return None;
        }
        *count += 1;
        Some(ClientPlace {
            counted: Some((self.clone(), client)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        let Some((clients, client)) = &self.counted else {
            return;
        };
        let mut counts = clients.lock();
        if let Some(count) = counts.get_mut(client) {
            *count -= 1;
            if *count == 0 {
                counts.remove(client);
            }
        }
    }
}

/// What counts as one client.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from(network))
        }
        address => address,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn each_client_has_so_many_places() {
        let clients = Clients::new(NonZeroUsize::new(2));
        let place = |address: &str| clients.place(Some(address.parse().unwrap()));
        let first = place("10.0.0.1").unwrap();
        let _second = place("::ffff:10.0.0.1").unwrap();
        assert!(place("10.0.0.1").is_none());
        let _other = place("10.0.0.2").unwrap();
        let _network = [place("2001:db8::1").unwrap(), place("2001:db8::2").unwrap()];
        assert!(place("2001:db8::3").is_none() && place("2001:db8:0:1::3").is_some());
        assert!(clients.place(None).is_some());
        drop(first);
        let again = place("10.0.0.1").unwrap();
        assert!(place("10.0.0.1").is_none());
        drop(again);
        assert_eq!(clients.lock().len(), 3);
        let unlimited = Clients::new(None);
        let address = Some(IpAddr::from([10, 0, 0, 1]));
        let places: Vec<_> = (0..100)
            .map(|_| unlimited.place(address).unwrap())
            .collect();
        assert_eq!(places.len(), 100);
    }
}
