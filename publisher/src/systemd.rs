//! What systemd is told of a worker, where it started it: that it is ready, that it is alive, that it stops. Without
//! systemd, which names its socket in `NOTIFY_SOCKET`, nobody is told anything.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::{MissedTickBehavior, interval};

use crate::worker::Health;

/// How often it is looked whether the worker is ready, until it is.
const LOOK: Duration = Duration::from_millis(100);
/// The shortest time between two signs of life.
const SHORTEST: Duration = Duration::from_millis(10);

/// Whether somebody wants to be told.
#[must_use]
pub fn listens() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Tells systemd that the worker is ready, once it is, and that it is alive, for as long as this runs.
pub async fn tell(health: Arc<Health>) {
    tokio::join!(ready(&health), alive(&health));
}

/// Tells systemd that a process without a [`Health`] is ready.
pub fn is_ready() {
    say(&NotifyState::Ready);
}

/// Tells systemd that the worker stops. Whoever tells the worker itself does so after this, so that it is said before
/// the worker is gone.
pub fn stops() {
    say(&NotifyState::Stopping);
}

async fn ready(health: &Health) {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if health.ready().is_ok() {
            return say(&NotifyState::Ready);
        }
    }
}

/// Signs of life, twice as often as systemd wants them; none once a loop stands still.
async fn alive(health: &Health) {
    let Some(longest) = sd_notify::watchdog_enabled() else { return };
    let mut ticks = interval((longest / 2).max(SHORTEST));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match health.alive() {
            Ok(()) => say(&NotifyState::Watchdog),
            Err(why) => tracing::error!(%why, "systemd is not told that this process is alive"),
        }
    }
}

fn say(state: &NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(state)) {
        tracing::debug!(%error, %state, "systemd is not told");
    }
}
