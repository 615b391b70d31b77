//! What a host that follows a channel shows of itself: whether it serves something, and figures, as Prometheus reads
//! them. `docs/metrics.md` tells what each one means.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use weighbridge_schemas::encoding::ENCODING_VERSION;
use weighbridge_schemas::host::{HostState, HostStatus, Target};
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::follow::Event;

use crate::clock;
use crate::http::Watched;
use crate::metrics::gauges;

/// For how long a follower may give no sign of life: it gives one every few seconds.
const SILENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    model: String,
    channel: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByClass {
    model: String,
    channel: String,
    class: &'static str,
}

/// What is known of a follower.
#[derive(Debug)]
pub struct Host {
    labels: Labels,
    registry: Registry,
    ready: Gauge,
    swaps: Family<Labels, Counter>,
    failures: Family<ByClass, Counter>,
    read: Family<Labels, Counter>,
    reused: Family<Labels, Counter>,
    last: Arc<Last>,
}

/// What was told last, and when.
#[derive(Debug)]
struct Last(Mutex<(Option<HostStatus>, Instant)>);

impl Last {
    fn lock(&self) -> MutexGuard<'_, (Option<HostStatus>, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Host {
    /// A host that follows this channel, of which nothing is known yet.
    #[must_use]
    pub fn new(model: &ModelName, channel: &ChannelName) -> Self {
        let labels = Labels { model: model.to_string(), channel: channel.to_string() };
        let host = Self {
            labels,
            registry: Registry::with_prefix("weighbridge"),
            ready: Gauge::default(),
            swaps: Family::default(),
            failures: Family::default(),
            read: Family::default(),
            reused: Family::default(),
            last: Arc::new(Last(Mutex::new((None, Instant::now())))),
        };
        // Series that are there from the start: a rate over one that appears with its first count misses that.
        for counters in [&host.swaps, &host.read, &host.reused] {
            counters.get_or_create_owned(&host.labels);
        }
        host.registered()
    }

    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        let build = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("encoding_version", ENCODING_VERSION.to_string()),
        ];
        registry.register("build", "What runs", Info::new(build.to_vec()));
        registry.register("ready", "Whether something is served", self.ready.clone());
        registry.register("host_swaps", "Times that another version came to be served", self.swaps.clone());
        let failures = "Failures after which something is tried again";
        registry.register("host_failures", failures, self.failures.clone());
        let read = "Read of the store, for versions that were fetched";
        registry.register_with_unit("host_read", read, Unit::Bytes, self.read.clone());
        let reused = "Of versions that were fetched, what the host had already";
        registry.register_with_unit("host_reused", reused, Unit::Bytes, self.reused.clone());
        registry.register_collector(Box::new(Arc::clone(&self.last)));
        self
    }

    /// Takes note of what happened.
    pub fn note(&self, event: &Event<'_>) {
        match event {
            Event::Status { status, .. } => *self.last.lock() = (Some((*status).clone()), Instant::now()),
            Event::Fetched(fetched) => {
                self.read.get_or_create(&self.labels).inc_by(fetched.bytes_read);
                self.reused.get_or_create(&self.labels).inc_by(fetched.bytes_reused);
            }
            Event::Swapped => {
                self.swaps.get_or_create(&self.labels).inc();
            }
            Event::Failed { class } => {
                let Labels { model, channel } = self.labels.clone();
                self.failures.get_or_create(&ByClass { model, channel, class }).inc();
            }
        }
    }
}

impl Watched for Host {
    fn alive(&self) -> Result<(), String> {
        let silent = self.last.lock().1.elapsed();
        if silent < SILENCE {
            return Ok(());
        }
        Err(format!("the follower has given no sign of life for {} s", silent.as_secs()))
    }

    fn ready(&self) -> Result<(), String> {
        let last = self.last.lock();
        let Some(status) = &last.0 else { return Err("nothing is known yet".to_owned()) };
        if status.serving.is_some() {
            return Ok(());
        }
        let why = status.last_error.as_ref().map_or("nothing was fetched yet", |why| why.message.as_str());
        Err(format!("nothing is served: {}", why.split_whitespace().collect::<Vec<_>>().join(" ")))
    }

    fn figures(&self) -> String {
        self.ready.set(self.ready().is_ok().into());
        let mut text = String::new();
        // A string takes whatever is written to it.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl Collector for Last {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let last = self.lock();
        let Some(status) = &last.0 else { return Ok(()) };
        let mut shown = Shown { encoder: &mut encoder, status };
        let wanted = status.wanted.as_ref();
        let serving = status.serving.as_ref();
        shown.number("host_wanted_sequence", "The channel's entry that is wanted", wanted.map(sequence))?;
        shown.number(
            "host_wanted_step",
            "The training step that is wanted",
            wanted.map(|target| target.step),
        )?;
        shown.number("host_serving_sequence", "The channel's entry that is served", serving.map(sequence))?;
        shown.number(
            "host_serving_step",
            "The training step that is served",
            serving.map(|target| target.step),
        )?;
        shown.number("host_versions", "Versions that lie in the folder", Some(status.held.len() as u64))?;
        let behind = u64::from(status.state == HostState::Behind);
        shown.number("host_behind", "Whether what is wanted cannot be had at present", Some(behind))?;
        shown.number("host_attempts", "Attempts since the last success", Some(status.attempts))?;
        // Without an entry nothing tells when the checkpoint was written.
        let age = serving.filter(|target| target.sequence > 0).map(|target| since(target.created_at));
        shown.seconds("host_age", "How long ago the checkpoint was written that is served", age)?;
        let silence = status.heard_at.map(since);
        shown.seconds("host_silence", "How long ago the source of snapshots answered last", silence)
    }
}

/// A status on its way out.
struct Shown<'s, 'e> {
    encoder: &'s mut DescriptorEncoder<'e>,
    status: &'s HostStatus,
}

impl Shown<'_, '_> {
    fn number(&mut self, name: &str, help: &str, value: Option<u64>) -> fmt::Result {
        self.gauge(name, help, None, value)
    }

    fn seconds(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        self.gauge(name, help, Some(&Unit::Seconds), value)
    }

    fn gauge<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        value: Option<V>,
    ) -> fmt::Result {
        let labels = [("model", self.status.model.as_str()), ("channel", self.status.channel.as_str())];
        gauges(self.encoder, name, help, unit, value.map(|value| (labels, value)))
    }
}

fn sequence(target: &Target) -> u64 {
    target.sequence
}

/// How long ago that was, in seconds; 0 where the clocks of two machines say that it was not.
fn since(then: Timestamp) -> f64 {
    Duration::from_nanos(clock::now().nanoseconds().saturating_sub(then.nanoseconds())).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::host::HostSchema;
    use weighbridge_schemas::ids::SnapshotId;
    use weighbridge_snapshots::fetch::Fetched;

    use super::*;
    use crate::metrics::tests::{documented, exposed};

    fn status(serving: bool) -> HostStatus {
        let time = Timestamp::from_nanoseconds(0);
        let target = Target {
            snapshot: SnapshotId::of(b"s"),
            sequence: 7,
            run: "r".parse().unwrap(),
            step: 300,
            created_at: time,
            when: time,
        };
        HostStatus {
            schema: HostSchema::V1,
            host: "h".into(),
            folder: "/f".into(),
            model: "dlrm".parse().unwrap(),
            channel: "prod".parse().unwrap(),
            state: HostState::Behind,
            wanted: Some(target.clone()),
            serving: serving.then_some(target),
            serving_since: None,
            age_seconds: None,
            held: vec![SnapshotId::of(b"s")],
            attempts: 3,
            last_error: None,
            last_error_at: None,
            heard_at: Some(time),
            updated_at: time,
        }
    }

    fn host() -> Host {
        let host = Host::new(&"dlrm".parse().unwrap(), &"prod".parse().unwrap());
        let fetched = Fetched { snapshot: SnapshotId::of(b"s"), bytes: 30, bytes_read: 10, bytes_reused: 20 };
        for event in [Event::Fetched(fetched), Event::Swapped, Event::Failed { class: "disk_full" }] {
            host.note(&event);
        }
        host
    }

    #[test]
    fn what_is_told_is_shown() {
        let host = host();
        assert!(host.ready().is_err() && host.alive().is_ok());
        host.note(&Event::Status { status: &status(false), is_news: true });
        assert!(host.ready().unwrap_err().contains("nothing is served"));
        assert!(!host.figures().contains("host_serving_step"));
        host.note(&Event::Status { status: &status(true), is_news: false });
        assert_eq!(host.ready(), Ok(()));
        let text = host.figures();
        let of = "{model=\"dlrm\",channel=\"prod\"}";
        for line in [
            "weighbridge_ready 1".to_owned(),
            format!("weighbridge_host_serving_step{of} 300"),
            format!("weighbridge_host_wanted_sequence{of} 7"),
            format!("weighbridge_host_versions{of} 1"),
            format!("weighbridge_host_behind{of} 1"),
            format!("weighbridge_host_attempts{of} 3"),
            format!("weighbridge_host_swaps_total{of} 1"),
            format!("weighbridge_host_read_bytes_total{of} 10"),
            format!("weighbridge_host_reused_bytes_total{of} 20"),
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
        assert!(text.contains("class=\"disk_full\"} 1\n"), "{text}");
    }

    #[test]
    fn the_reference_tells_every_metric_with_its_type_and_labels() {
        let host = host();
        host.note(&Event::Status { status: &status(true), is_news: true });
        let of_hosts = |name: &String| name.starts_with("weighbridge_host_");
        let (mut documented, mut exposed) = (documented(), exposed(&host.figures()));
        documented.retain(|name, _| of_hosts(name));
        exposed.retain(|name, _| of_hosts(name));
        assert_eq!(documented, exposed);
    }
}
