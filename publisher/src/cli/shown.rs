//! What a process that works shows of itself while it does: health and metrics on a port, readiness to systemd.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;

use super::Context;
use crate::error::Result;
use crate::http::{Port, Watched, Working};
use crate::steps::Steps;
use crate::systemd;
use crate::worker::{Health, Stop, watcher};

/// What is to be shown, and where.
pub(super) struct Shown {
    port: Option<Port>,
}

impl Shown {
    /// Takes the port, before any work begins; `None` shows nothing over HTTP.
    pub(super) async fn on(context: &Context, address: Option<SocketAddr>) -> Result<Self> {
        let Some(address) = address else { return Ok(Self { port: None }) };
        let port = Port::take(address).await?;
        let address = port.address();
        // Whoever started it may have asked for any free port, and has to learn which. In a log for programs it is a
        // line like all others, whatever is logged.
        tracing::info!(target: super::LISTENING, "listening on {address}");
        if !context.logs_json() {
            // Nobody is left to tell that standard error is closed.
            let _ = io::stderr().write_all(format!("listening on {address}\n").as_bytes());
        }
        Ok(Self { port: Some(port) })
    }

    /// Shows how a worker is, for as long as it runs.
    pub(super) fn start(self, steps: &Arc<Steps>, health: &Arc<Health>, stop: &Stop) {
        if self.port.is_some() || systemd::listens() {
            tokio::spawn(watcher::run(Arc::clone(steps), Arc::clone(health)));
        }
        let metrics = Arc::clone(steps.metrics());
        self.show(Arc::new(Working { health: Arc::clone(health), metrics }));
        let (health, mut stop) = (Arc::clone(health), stop.clone());
        tokio::spawn(async move {
            stop.wait().await;
            health.stops();
        });
    }

    /// Shows how the process is, for as long as it runs.
    pub(super) fn show(self, watched: Arc<dyn Watched>) {
        if let Some(port) = self.port {
            tokio::spawn(port.answer(Arc::clone(&watched)));
        }
        if systemd::listens() {
            tokio::spawn(systemd::tell(watched));
        }
    }
}
