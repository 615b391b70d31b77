//! Connections over which nobody who is known has asked anything yet: one address may have so many, so that it cannot
//! shut everybody else out.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use super::guard::neighbourhood;

type Counts = Mutex<HashMap<IpAddr, usize>>;

/// How many there are, by address.
#[derive(Debug)]
pub(super) struct Strangers {
    most: usize,
    counts: Arc<Counts>,
}

/// One of them, for as long as this is kept.
#[derive(Debug)]
pub(super) struct Stranger {
    address: IpAddr,
    counts: Arc<Counts>,
}

impl Strangers {
    /// At most `most` from one address.
    pub(super) fn new(most: usize) -> Self {
        Self { most, counts: Arc::default() }
    }

    /// One more from this address; `None` where there are too many already.
    pub(super) fn admit(&self, address: IpAddr) -> Option<Stranger> {
        let address = neighbourhood(address);
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Stranger { address, counts: Arc::clone(&self.counts) })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_has_so_many_and_others_have_theirs() {
        let strangers = Strangers::new(2);
        let [one, other]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|text| text.parse().unwrap());
        let (first, _second) = (strangers.admit(one).unwrap(), strangers.admit(one).unwrap());
        assert!(strangers.admit(one).is_none() && strangers.admit(other).is_some());
        drop(first);
        assert!(strangers.admit(one).is_some());
        assert_eq!(strangers.counts.lock().unwrap().len(), 1, "who has none is forgotten");
    }
}
