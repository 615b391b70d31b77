//! Figures of what is done, and of what waits, as Prometheus reads them: `docs/metrics.md` tells what each one means.
//!
//! What is done is counted where it is done. Queue and channels belong to all workers: they are looked at from time to
//! time ([`crate::worker::watcher`]), and what was seen last is shown; nothing, where it could not be seen.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use weighbridge_queue::Depth;
use weighbridge_queue::message::Priority;
use weighbridge_schemas::encoding::ENCODING_VERSION;
use weighbridge_schemas::job::{Ended, StepKind};
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::time::Timestamp;

use crate::clock;
use crate::job::convert::Bytes;

pub mod api;

/// The media type of [`Metrics::text`].
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Most channels that are shown one by one; how many more there are is told in one figure.
pub const MOST_CHANNELS: usize = 1000;
/// Upper bounds of the durations of steps, in seconds: from a look at a record to a part on a slow disk.
const STEP_SECONDS: [f64; 15] =
    [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0];

/// What is looked at from time to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// How much waits on the queue.
    Queue,
    /// What channels serve.
    Channels,
}

/// What a channel serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// The model.
    pub model: ModelName,
    /// The channel.
    pub channel: ChannelName,
    /// When the checkpoint was written that its snapshot was made of.
    pub created_at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByStep {
    step: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByClass {
    class: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWhat {
    what: &'static str,
}

/// Figures of what is done.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    jobs: Family<ByOutcome, Counter>,
    steps: Family<ByStep, Histogram>,
    retries: Family<ByClass, Counter>,
    dead_letters: Counter,
    at_hand: Gauge,
    read: Counter,
    stored: Counter,
    reused: Counter,
    ready: Gauge,
    failures: Family<ByWhat, Counter>,
    api: Arc<api::Api>,
    seen: Arc<Seen>,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Registry::with_prefix("weighbridge"),
            jobs: Family::default(),
            steps: Family::new_with_constructor(|| Histogram::new(STEP_SECONDS)),
            retries: Family::default(),
            dead_letters: Counter::default(),
            at_hand: Gauge::default(),
            read: Counter::default(),
            stored: Counter::default(),
            reused: Counter::default(),
            ready: Gauge::default(),
            failures: Family::default(),
            api: Arc::default(),
            seen: Arc::default(),
        };
        // Series that are there from the start: a rate over one that appears with its first count misses that.
        for ended in Ended::ALL {
            metrics.jobs.get_or_create_owned(&ByOutcome { outcome: ended.as_str() });
        }
        for step in StepKind::ALL {
            metrics.steps.get_or_create_owned(&ByStep { step: step.as_str() });
        }
        for what in [Watched::Queue, Watched::Channels] {
            metrics.failures.get_or_create_owned(&ByWhat { what: what.as_str() });
        }
        metrics.registered()
    }
}

impl Metrics {
    /// Figures of the API.
    #[must_use]
    pub fn api(&self) -> &Arc<api::Api> {
        &self.api
    }

    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        self.api.register(registry);
        let build = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("encoding_version", ENCODING_VERSION.to_string()),
        ];
        registry.register("build", "What runs", Info::new(build.to_vec()));
        registry.register(
            "ready",
            "Whether queue and store answer, and messages are taken",
            self.ready.clone(),
        );
        registry.register("messages_at_hand", "Messages that are worked on", self.at_hand.clone());
        registry.register("jobs_ended", "Jobs that this process ended", self.jobs.clone());
        let (seconds, bytes) = (Unit::Seconds, Unit::Bytes);
        registry.register_with_unit(
            "step",
            "How long steps took that were done",
            seconds,
            self.steps.clone(),
        );
        registry.register("retries", "Failures after which something is tried again", self.retries.clone());
        registry.register("dead_letters", "Dead letters written", self.dead_letters.clone());
        let read = "Read of checkpoints, for parts that were done";
        registry.register_with_unit("checkpoint_read", read, bytes.clone(), self.read.clone());
        let stored = "Chunks written to the store";
        registry.register_with_unit("chunks_stored", stored, bytes.clone(), self.stored.clone());
        let reused = "Chunks made that the store had already";
        registry.register_with_unit("chunks_reused", reused, bytes, self.reused.clone());
        let failures = "Looks at the queue or at channels that failed";
        registry.register("watch_failures", failures, self.failures.clone());
        registry.register_collector(Box::new(Arc::clone(&self.seen)));
        self
    }

    /// A job ended.
    pub fn job_ended(&self, ended: Ended) {
        self.jobs.get_or_create(&ByOutcome { outcome: ended.as_str() }).inc();
    }

    /// A step was done.
    pub fn step_done(&self, step: StepKind, took: Duration) {
        self.steps.get_or_create(&ByStep { step: step.as_str() }).observe(took.as_secs_f64());
    }

    /// Something is tried again because of a failure of this class.
    pub fn retried(&self, class: &'static str) {
        self.retries.get_or_create(&ByClass { class }).inc();
    }

    /// There is a new dead letter.
    pub fn dead_letter(&self) {
        self.dead_letters.inc();
    }

    /// A part was converted: so many bytes were read of the checkpoint, and so many of chunks stored.
    pub fn converted(&self, read: u64, bytes: Bytes) {
        self.read.inc_by(read);
        self.described(bytes);
    }

    /// Headers were stored.
    pub fn described(&self, bytes: Bytes) {
        self.stored.inc_by(bytes.stored);
        self.reused.inc_by(bytes.reused);
    }

    /// A message is worked on from now on.
    pub fn taken(&self) {
        self.at_hand.inc();
    }

    /// A message is no longer worked on.
    pub fn settled(&self) {
        self.at_hand.dec();
    }

    /// Whether the worker is ready.
    pub fn set_ready(&self, ready: bool) {
        self.ready.set(ready.into());
    }

    /// What is on the queue.
    pub fn set_depth(&self, depth: Vec<Depth>) {
        self.seen.lock().depth = depth;
    }

    /// What channels serve: [`MOST_CHANNELS`] of them at most, and how many there are beside.
    pub fn set_channels(&self, mut served: Vec<Served>, beside: u64) {
        let cut = served.len().saturating_sub(MOST_CHANNELS) as u64;
        served.truncate(MOST_CHANNELS);
        let mut seen = self.seen.lock();
        seen.channels = served;
        seen.beside = beside.saturating_add(cut);
    }

    /// A look failed: what was seen before is no longer shown.
    pub fn watch_failed(&self, what: Watched) {
        self.failures.get_or_create(&ByWhat { what: what.as_str() }).inc();
        let mut seen = self.seen.lock();
        match what {
            Watched::Queue => seen.depth.clear(),
            Watched::Channels => (seen.channels, seen.beside) = (Vec::new(), 0),
        }
    }

    /// All figures in the form of OpenMetrics; [`MEDIA_TYPE`].
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // A string takes whatever is written to it.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl Watched {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Channels => "channels",
        }
    }
}

/// What was seen last of queue and channels.
#[derive(Debug, Default)]
struct Seen(Mutex<SeenLast>);

#[derive(Debug, Default)]
struct SeenLast {
    depth: Vec<Depth>,
    channels: Vec<Served>,
    beside: u64,
}

impl Seen {
    fn lock(&self) -> std::sync::MutexGuard<'_, SeenLast> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for Seen {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let seen = self.lock();
        let states = seen.depth.iter().flat_map(|depth| {
            let states = [("ready", depth.ready), ("delayed", depth.delayed), ("leased", depth.leased)];
            states.map(|(state, count)| ([("class", class(depth.priority)), ("state", state)], count))
        });
        gauges(&mut encoder, "queue_messages", "Messages on the queue", None, states)?;
        let oldest = seen.depth.iter().filter_map(|depth| {
            let none = (depth.ready + depth.delayed + depth.leased == 0).then_some(Duration::ZERO);
            let oldest = depth.oldest.or(none)?;
            Some(([("class", class(depth.priority))], oldest.as_secs_f64()))
        });
        let help = "For how long the oldest message has been on the queue; 0 where there is none";
        gauges(&mut encoder, "queue_oldest", help, Some(&Unit::Seconds), oldest)?;
        let now = clock::now().nanoseconds();
        let ages = seen.channels.iter().map(|served| {
            let age = Duration::from_nanos(now.saturating_sub(served.created_at.nanoseconds()));
            ([("model", served.model.as_str()), ("channel", served.channel.as_str())], age.as_secs_f64())
        });
        let help = "How long ago the checkpoint was written that the channel serves";
        gauges(&mut encoder, "channel_age", help, Some(&Unit::Seconds), ages)?;
        let help = "Channels beside those whose age is shown";
        let none: [(&str, &str); 0] = [];
        gauges(&mut encoder, "channels_beside", help, None, [(none, seen.beside)])
    }
}

/// Writes a gauge of as many series as there are `values`; nothing where there are none.
pub(crate) fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    values: impl IntoIterator<Item = (L, V)>,
) -> fmt::Result {
    let mut values = values.into_iter().peekable();
    if values.peek().is_none() {
        return Ok(());
    }
    let mut gauge = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    for (labels, value) in values {
        gauge.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

/// The stable name of a class.
const fn class(priority: Priority) -> &'static str {
    match priority {
        Priority::Low => "low",
        Priority::Normal => "normal",
        Priority::High => "high",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn served(channel: &str) -> Served {
        Served {
            model: "dlrm".parse().unwrap(),
            channel: channel.parse().unwrap(),
            created_at: Timestamp::from_nanoseconds(0),
        }
    }

    fn depth(priority: Priority) -> Depth {
        let oldest = Some(Duration::from_millis(1500));
        Depth { priority, ready: 3, delayed: 2, leased: 1, oldest }
    }

    /// Metrics in which every family has a series.
    fn full() -> Metrics {
        let metrics = Metrics::default();
        metrics.job_ended(Ended::Published);
        metrics.step_done(StepKind::Part, Duration::from_secs(2));
        metrics.retried("disk_full");
        metrics.dead_letter();
        metrics.taken();
        metrics.taken();
        metrics.settled();
        metrics.converted(100, Bytes { stored: 30, reused: 10 });
        metrics.described(Bytes { stored: 1, reused: 0 });
        metrics.set_ready(true);
        metrics.set_depth([Priority::High, Priority::Normal, Priority::Low].map(depth).to_vec());
        metrics.set_channels(vec![served("prod")], 0);
        metrics.api().answered("weighbridge.v1.Snapshots/Resolve", "Ok");
        metrics.api().refused("unauthenticated");
        metrics
    }

    #[test]
    fn what_is_told_is_shown() {
        let text = full().text();
        for line in [
            "weighbridge_jobs_ended_total{outcome=\"published\"} 1",
            "weighbridge_jobs_ended_total{outcome=\"cancelled\"} 0",
            "weighbridge_step_seconds_sum{step=\"part\"} 2.0",
            "weighbridge_step_seconds_bucket{le=\"1.0\",step=\"part\"} 0",
            "weighbridge_step_seconds_bucket{le=\"3.0\",step=\"part\"} 1",
            "weighbridge_step_seconds_bucket{le=\"1800.0\",step=\"accept\"} 0",
            "weighbridge_retries_total{class=\"disk_full\"} 1",
            "weighbridge_dead_letters_total 1",
            "weighbridge_messages_at_hand 1",
            "weighbridge_checkpoint_read_bytes_total 100",
            "weighbridge_chunks_stored_bytes_total 31",
            "weighbridge_chunks_reused_bytes_total 10",
            "weighbridge_ready 1",
            "weighbridge_queue_messages{class=\"high\",state=\"ready\"} 3",
            "weighbridge_queue_messages{class=\"low\",state=\"leased\"} 1",
            "weighbridge_queue_oldest_seconds{class=\"normal\"} 1.5",
            "weighbridge_channels_beside 0",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
        assert!(text.contains("weighbridge_channel_age_seconds{model=\"dlrm\",channel=\"prod\"} "), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn series_are_bounded_and_what_cannot_be_seen_is_not_shown() {
        let metrics = full();
        metrics.set_channels((0..MOST_CHANNELS + 5).map(|number| served(&number.to_string())).collect(), 2);
        let text = metrics.text();
        assert_eq!(text.matches("weighbridge_channel_age_seconds{").count(), MOST_CHANNELS);
        assert!(text.contains("weighbridge_channels_beside 7\n"), "{text}");
        let of = |ready, oldest| Depth { ready, delayed: 0, leased: 0, oldest, ..depth(Priority::High) };
        metrics.set_depth(vec![of(1, None)]);
        assert!(!metrics.text().contains("queue_oldest_seconds{"), "nobody knows");
        metrics.set_depth(vec![of(0, None)]);
        assert!(metrics.text().contains("weighbridge_queue_oldest_seconds{class=\"high\"} 0.0\n"));
        metrics.watch_failed(Watched::Channels);
        metrics.watch_failed(Watched::Queue);
        let text = metrics.text();
        assert!(!text.contains("channel_age") && !text.contains("queue_messages"), "{text}");
        assert!(text.contains("weighbridge_watch_failures_total{what=\"queue\"} 1\n"), "{text}");
    }

    /// The type and the labels of every metric, by the name that is asked for.
    pub(crate) fn exposed(text: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
        let mut exposed = BTreeMap::new();
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (family, kind) = line.split_once(' ').unwrap();
            let samples = text.lines().filter_map(|line| line.strip_prefix(family));
            let samples = samples.filter(|rest| {
                let (suffix, _) = rest.split_at(rest.find(['{', ' ']).unwrap());
                ["", "_total", "_bucket", "_info"].contains(&suffix)
            });
            let labels = samples.filter_map(|rest| rest.split_once('{')).flat_map(|(_, rest)| {
                rest.split("\",").map(|label| label.split_once('=').unwrap().0.to_owned()).collect::<Vec<_>>()
            });
            let labels = labels.filter(|label| label != "le").collect();
            let suffix = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            exposed.insert(format!("{family}{suffix}"), (kind.to_owned(), labels));
        }
        exposed
    }

    /// The same, as the table in `docs/metrics.md` tells it.
    pub(crate) fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
        let text = std::fs::read_to_string(path).unwrap();
        let rows = text.lines().filter(|line| line.starts_with("| `weighbridge_"));
        let row = |line: &str| {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            let labels = cells[3].split(',').map(|label| label.trim().trim_matches('`').to_owned());
            let labels = labels.filter(|label| !label.is_empty()).collect();
            (cells[0].trim_matches('`').to_owned(), (cells[1].to_owned(), labels))
        };
        rows.map(row).collect()
    }

    #[test]
    fn the_reference_tells_every_metric_with_its_type_and_labels() {
        let mut documented = documented();
        documented.retain(|name, _| !name.starts_with("weighbridge_host_"));
        assert_eq!(documented, exposed(&full().text()));
    }
}
