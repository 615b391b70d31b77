//! What mostly waits for a broker, all of it at the same time: one after the other it would take minutes.

use std::thread::{ScopedJoinHandle, scope};
use std::time::Instant;

use crate::{contract, network, stops, timeouts};

/// Runs a test to its end, on the runtime that a `tokio::test` would have.
fn run(name: &str, test: impl Future<Output = ()>) {
    let started = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(8).enable_all().build().unwrap();
    runtime.block_on(test);
    println!("{name}: {:?}", started.elapsed());
}

#[test]
fn what_takes_its_time() {
    let failed = scope(|scope| {
        let tests = [
            scope.spawn(|| run("contract", contract::suite())),
            scope.spawn(|| {
                run("b05", timeouts::b05_a_part_that_takes_longer_than_the_broker_allows_is_published_once());
            }),
            scope.spawn(|| {
                run("b06", stops::b06_everybody_outlives_a_broker_that_stops_blocks_and_is_killed());
            }),
            scope.spawn(|| {
                run("b06", network::b06_a_network_that_drops_every_packet_is_noticed_and_outlived());
            }),
        ];
        tests.map(ScopedJoinHandle::join).into_iter().filter(Result::is_err).count()
    });
    assert_eq!(failed, 0, "what failed stands above");
}
