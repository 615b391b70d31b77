//! Ports for servers of a test's own.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{Ipv4Addr, TcpListener};

/// Ports that are free, outside of the range that connections are given: a server that is down for a while finds its
/// port free again.
#[expect(clippy::expect_used, reason = "only tests use it")]
pub(crate) fn free<const COUNT: usize>() -> [u16; COUNT] {
    let random = RandomState::new();
    let mut free = (0_u64..1000).filter_map(|attempt| {
        let port = 11_000 + u16::try_from(random.hash_one(attempt) % 20_000).ok()?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()
    });
    // All are held at once, so that they differ.
    let held: [TcpListener; COUNT] = std::array::from_fn(|_| free.next().expect("there are free ports"));
    held.map(|listener| listener.local_addr().expect("it is bound").port())
}
