//! Telling an API how this host is, so that an operator sees it among all others.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::{self, Receiver, Sender};
use tokio::time::{sleep, timeout};

use weighbridge_schemas::host::HostStatus;
use weighbridge_snapshots::api::Api;
use weighbridge_snapshots::follow::Event;

/// How often the API is told though nothing changed.
const BEAT: Duration = Duration::from_secs(20);
/// How long changes are collected before the API is told; by chance, so that hosts that swap together do not tell so.
const COLLECTED: Duration = Duration::from_millis(500);
/// The longest pause after the API could not be told.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What an API is told.
pub(super) struct Reports(Sender<Option<HostStatus>>);

impl Reports {
    /// Tells `api`, for as long as this is kept.
    pub(super) fn to(api: Arc<Api>) -> Self {
        let (sender, receiver) = watch::channel(None);
        tokio::spawn(tell(api, receiver));
        Self(sender)
    }

    /// What happened.
    pub(super) fn note(&self, event: &Event<'_>) {
        if let Event::Status { status, is_news } = event {
            let status = Some((*status).clone());
            // A sign of life alone is told in its own time.
            self.0.send_if_modified(|last| {
                *last = status;
                *is_news
            });
        }
    }
}

async fn tell(api: Arc<Api>, mut told: Receiver<Option<HostStatus>>) {
    let mut pause = Duration::ZERO;
    loop {
        match timeout(BEAT + pause, told.changed()).await {
            Ok(Err(_)) => return,
            Ok(Ok(())) | Err(_) => sleep(COLLECTED.mul_f64(0.5 + fastrand::f64())).await,
        }
        let Some(status) = told.borrow_and_update().clone() else { continue };
        match api.report(&status).await {
            Ok(()) => pause = Duration::ZERO,
            Err(error) => {
                if pause.is_zero() {
                    tracing::warn!(%error, "the API cannot be told how this host is");
                }
                pause = (pause * 2).clamp(BEAT, LONGEST_PAUSE);
                sleep(pause.mul_f64(fastrand::f64())).await;
            }
        }
    }
}
