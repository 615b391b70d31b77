//! What systemd is told of a process that it started: that it is ready, that it is alive, that it stops. Without
//! systemd, which names its socket in `NOTIFY_SOCKET`, nobody is told anything.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::http::Watched;

/// How often it is looked whether the process is ready, until it is.
const LOOK: Duration = Duration::from_millis(100);
/// How long stopping waits for systemd to take that it is told.
const PATIENCE: Duration = Duration::from_secs(1);
/// The shortest time between two signs of life.
const SHORTEST: Duration = Duration::from_millis(10);

/// Whether somebody wants to be told.
#[must_use]
pub fn listens() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Tells systemd that the process is ready, once it is, and that it is alive, for as long as this runs.
pub async fn tell(watched: Arc<dyn Watched>) {
    tokio::join!(ready(&*watched), alive(&*watched));
}

/// Tells systemd that a process that nobody watches is ready.
pub async fn is_ready() {
    say(NotifyState::Ready).await;
}

/// Tells systemd that the process stops. Whoever tells the process itself does so after this, so that it is said before
/// it is gone.
pub async fn stops() {
    if timeout(PATIENCE, say(NotifyState::Stopping)).await.is_err() {
        tracing::debug!("systemd does not listen");
    }
}

async fn ready(watched: &dyn Watched) {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if watched.ready().is_ok() {
            return say(NotifyState::Ready).await;
        }
    }
}

/// Signs of life, twice as often as systemd wants them; none once a loop stands still.
async fn alive(watched: &dyn Watched) {
    let Some(longest) = sd_notify::watchdog_enabled() else { return };
    let mut ticks = interval((longest / 2).max(SHORTEST));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match watched.alive() {
            Ok(()) => say(NotifyState::Watchdog).await,
            Err(why) => tracing::error!(%why, "systemd is not told that this process is alive"),
        }
    }
}

/// Says it on a thread that may wait: should systemd not listen, that holds nothing else up.
async fn say(state: NotifyState<'static>) {
    let said = tokio::task::spawn_blocking(move || sd_notify::notify(&[state]));
    if let Ok(Err(error)) = said.await {
        tracing::debug!(%error, "systemd is not told");
    }
}
