//! Figures of the API.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByAnswer {
    method: String,
    code: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWhy {
    why: &'static str,
}

/// Figures of the API.
#[derive(Debug, Default)]
pub struct Api {
    answered: Family<ByAnswer, Counter>,
    refused: Family<ByWhy, Counter>,
    begun: Gauge,
    connections: Gauge,
    watchers: Gauge,
    sent: Counter,
    moves: Counter,
}

/// Something that goes on, and is counted for as long as this is kept.
#[derive(Debug)]
pub struct Going(Gauge);

impl Going {
    fn on(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Api {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("api_requests", "Requests that were answered", self.answered.clone());
        registry.register(
            "api_refused",
            "Requests that were refused before they were looked at",
            self.refused.clone(),
        );
        registry.register("api_begun", "Requests whose answer has not begun", self.begun.clone());
        registry.register("api_connections", "Connections that are open", self.connections.clone());
        registry.register("api_watchers", "Streams that follow a channel", self.watchers.clone());
        registry.register_with_unit(
            "api_sent",
            "Bytes of chunks and manifests that were sent",
            Unit::Bytes,
            self.sent.clone(),
        );
        registry.register(
            "api_operations",
            "Operations that were done or refused, as the audit log has them",
            self.moves.clone(),
        );
    }

    /// A request begins.
    #[must_use]
    pub fn begin(&self) -> Going {
        Going::on(&self.begun)
    }

    /// A connection is open.
    #[must_use]
    pub fn connect(&self) -> Going {
        Going::on(&self.connections)
    }

    /// Somebody follows a channel.
    #[must_use]
    pub fn watch(&self) -> Going {
        Going::on(&self.watchers)
    }

    /// A request of `method` was answered by `code`.
    pub fn answered(&self, method: &str, code: &str) {
        let labels = ByAnswer { method: method.to_owned(), code: code.to_owned() };
        self.answered.get_or_create_owned(&labels).inc();
    }

    /// A request was refused.
    pub fn refused(&self, why: &'static str) {
        self.refused.get_or_create_owned(&ByWhy { why }).inc();
    }

    /// So many bytes are on their way.
    pub fn sends(&self, bytes: usize) {
        self.sent.inc_by(bytes as u64);
    }

    /// A line of the audit log.
    pub fn operated(&self) {
        self.moves.inc();
    }
}
