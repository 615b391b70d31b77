//! SIGKILL at any moment of a follower's life: what is served is whole, and the next follower goes on.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::binary::Store;
use crate::follower::{Checkpoint, Host, Server, TABLE, serves};

/// With this variable, so many kills.
const KILLS: &str = "WEIGHBRIDGE_TEST_KILLS";

#[test]
fn a_follower_that_is_killed_at_any_moment_leaves_something_whole_and_the_next_one_goes_on() {
    let kills = std::env::var(KILLS).map_or(25, |text| text.parse().unwrap());
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[TABLE, TABLE, 9 << 20]);
    let log = store.folder.path().join("log");
    let hook = store.folder.path().join("hook");
    // Every fifth one fails.
    let text = format!(
        "#!/bin/sh\nsleep 0.02\ntest $WEIGHBRIDGE_PHASE = restore || test $(($$ % 5)) != 0 || exit 1\n\
         echo $WEIGHBRIDGE_SNAPSHOT >>{}\n",
        log.display()
    );
    std::fs::write(&hook, text).unwrap();
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).unwrap();
    let hook = hook.to_str().unwrap();
    let more = ["--exec", hook, "--exec-before", "sleep 0.02", "--interval", "100ms"];
    let mut newest = checkpoint.publish(&store);
    let mut host = Host::start(&store, &more);
    host.until_current(&newest);
    host.kill();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let load = Server::start(&store.served());
    for kill in 0..kills {
        checkpoint.change(kill % 2..=kill % 2);
        newest = checkpoint.publish(&store);
        let host = Host::start(&store, &more);
        std::thread::sleep(Duration::from_millis(random.u64(5..400)));
        let served = serves(&host.into);
        host.kill();
        assert!(served.is_some());
    }
    let mut host = Host::start(&store, &more);
    host.until_current(&newest);
    let steps = load.steps();
    println!("steps loaded: {steps:?}");
    host.until_held(2);
    assert_eq!(host.terminate(), Some(0));
    let heard = std::fs::read_to_string(&log).unwrap();
    assert_eq!(heard.lines().last(), Some(newest.as_str()), "the server was told of what is served");
    for left in [".staging", ".removed"] {
        assert!(!host.into.join(left).try_exists().unwrap(), "{left}");
    }
}
