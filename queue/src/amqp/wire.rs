//! A message as the broker carries it: properties and headers.
//!
//! | where | holds |
//! |---|---|
//! | `message_id` | the message's id |
//! | `type` | `checkpoint`, `republish` or `step` |
//! | header `weighbridge-sent` | when it was first sent, in milliseconds since 1970 |
//! | `weighbridge-device`, `weighbridge-gpu-wait` | `any`, `cpu` or `gpu`; milliseconds |
//! | `weighbridge-retries`, `weighbridge-waited` | how often it was given back, and for how many milliseconds in all |
//! | `weighbridge-abandoned` | how often it was abandoned, beside what the broker counts in `x-delivery-count` |
//!
//! What has none of these is taken for a checkpoint manifest: a trainer may send one with any AMQP library.

use std::time::Duration;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use weighbridge_schemas::ids::ObservationId;

use super::topology::{DELIVERY_LIMIT, short};
use crate::message::{BODY_BYTES, Device, ID_BYTES, Kind, Message, Priority};

/// What the names of our headers begin with.
const OURS: &str = "weighbridge-";
const SENT: &str = "weighbridge-sent";
const DEVICE: &str = "weighbridge-device";
const GPU_WAIT: &str = "weighbridge-gpu-wait";
const RETRIES: &str = "weighbridge-retries";
const WAITED: &str = "weighbridge-waited";
const ABANDONED: &str = "weighbridge-abandoned";

const KINDS: [(&str, Kind); 3] =
    [("checkpoint", Kind::Checkpoint), ("republish", Kind::Republish), ("step", Kind::Step)];

/// What a message has been through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct History {
    /// When it was first sent, since 1970, by the sender's clock: for people and metrics alone.
    pub(super) sent: Duration,
    pub(super) abandoned: u32,
    pub(super) retries: u32,
    pub(super) waited: Duration,
}

/// Longest time that is written: more than a hundred thousand years.
const MOST: Duration = Duration::from_millis(1 << 52);

fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.min(MOST).as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

fn duration(milliseconds: i64) -> Duration {
    Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0)).min(MOST)
}

/// The properties of a message; it expires where it is after `expiration` milliseconds.
pub(super) fn properties(message: &Message, history: &History, expiration: Option<u64>) -> BasicProperties {
    let kind = KINDS.iter().find(|(_, kind)| *kind == message.kind).map_or("", |(name, _)| name);
    let (device, wait) = match message.device {
        Device::Any => ("any", Duration::ZERO),
        Device::Cpu => ("cpu", Duration::ZERO),
        Device::Gpu { wait } => ("gpu", wait),
    };
    let mut headers = FieldTable::default();
    let numbers = [
        (SENT, milliseconds(history.sent)),
        (GPU_WAIT, milliseconds(wait)),
        (RETRIES, history.retries.into()),
        (WAITED, milliseconds(history.waited)),
        (ABANDONED, history.abandoned.into()),
    ];
    for (name, number) in numbers {
        headers.insert(short(name), AMQPValue::LongLongInt(number));
    }
    headers.insert(short(DEVICE), AMQPValue::LongString(device.into()));
    let properties = BasicProperties::default()
        .with_message_id(short(&message.id))
        .with_type(short(kind))
        .with_content_type(short("application/json"))
        .with_timestamp(history.sent.as_secs())
        .with_headers(headers)
        .with_delivery_mode(PERSISTENT);
    match expiration {
        Some(milliseconds) => properties.with_expiration(short(&milliseconds.to_string())),
        None => properties,
    }
}

const PERSISTENT: u8 = 2;

/// Whether this version knows what the message is.
pub(super) fn is_known(properties: &BasicProperties) -> bool {
    kind(properties).is_some()
}

fn kind(properties: &BasicProperties) -> Option<Kind> {
    let name = properties.kind().as_ref().filter(|name| !name.as_str().is_empty());
    let Some(name) = name else { return Some(Kind::Checkpoint) };
    KINDS.iter().find(|(known, _)| *known == name.as_str()).map(|(_, kind)| *kind)
}

/// The properties of a message that this version does not know, when it is put off: what it says of itself, and nothing
/// by which the broker would do something with it.
pub(super) fn put_off(properties: &BasicProperties, expiration: u64) -> BasicProperties {
    let mut headers = FieldTable::default();
    for (name, value) in properties.headers().iter().flat_map(|headers| headers.inner()) {
        if name.as_str().starts_with(OURS) {
            headers.insert(name.clone(), value.clone());
        }
    }
    let mut fresh = BasicProperties::default()
        .with_headers(headers)
        .with_delivery_mode(PERSISTENT)
        .with_expiration(short(&expiration.to_string()));
    if let Some(kind) = properties.kind() {
        fresh = fresh.with_type(kind.clone());
    }
    if let Some(id) = properties.message_id() {
        fresh = fresh.with_message_id(id.clone());
    }
    if let Some(content) = properties.content_type() {
        fresh = fresh.with_content_type(content.clone());
    }
    if let Some(moment) = properties.timestamp() {
        fresh = fresh.with_timestamp(*moment);
    }
    fresh
}

/// The queue that a message was in when it was dead-lettered for the first time.
pub(super) fn first_queue(properties: &BasicProperties) -> Option<String> {
    let name = text(properties.headers().as_ref()?, "x-first-death-queue")?;
    String::from_utf8(name.to_vec()).ok()
}

/// What a broker delivered, taken from a queue of class `priority`.
pub(super) fn message(
    properties: &BasicProperties,
    mut body: Vec<u8>,
    priority: Priority,
) -> (Message, History) {
    let kind = kind(properties).unwrap_or(Kind::Checkpoint);
    // No queue of ours takes so much: what is cut is no document, and becomes a dead letter.
    body.truncate(BODY_BYTES);
    let id = properties.message_id().as_ref().map(|id| id.as_str().to_owned());
    let id = id.filter(|id| (1..=ID_BYTES).contains(&id.len()));
    let id = id.unwrap_or_else(|| ObservationId::of(&body).to_string());
    let empty = FieldTable::default();
    let headers = properties.headers().as_ref().unwrap_or(&empty);
    let device = match text(headers, DEVICE) {
        Some(b"cpu") => Device::Cpu,
        Some(b"gpu") => Device::Gpu { wait: duration(number(headers, GPU_WAIT).unwrap_or(0)) },
        _ => Device::Any,
    };
    let count = |name| u32::try_from(number(headers, name).unwrap_or(0).max(0)).unwrap_or(u32::MAX);
    let stamp = properties.timestamp().map(Duration::from_secs);
    let mut abandoned = count(ABANDONED).saturating_add(count("x-delivery-count"));
    if was_put_aside(headers) {
        abandoned = abandoned.max(DELIVERY_LIMIT);
    }
    let history = History {
        sent: number(headers, SENT).map(duration).or(stamp).unwrap_or_default(),
        abandoned,
        retries: count(RETRIES),
        waited: duration(number(headers, WAITED).unwrap_or(0)),
    };
    (Message { id, kind, body, priority, device }, history)
}

/// Whether the broker would not deliver it any more, in whatever queue it was.
fn was_put_aside(headers: &FieldTable) -> bool {
    let Some(AMQPValue::FieldArray(deaths)) = headers.inner().get("x-death") else { return false };
    deaths.as_slice().iter().any(|death| {
        matches!(death, AMQPValue::FieldTable(death)
            if text(death, "reason").is_some_and(|reason| reason == b"delivery_limit" || reason == b"rejected"))
    })
}

fn number(headers: &FieldTable, name: &str) -> Option<i64> {
    match headers.inner().get(name)? {
        AMQPValue::ShortShortInt(number) => Some((*number).into()),
        AMQPValue::ShortShortUInt(number) => Some((*number).into()),
        AMQPValue::ShortInt(number) => Some((*number).into()),
        AMQPValue::ShortUInt(number) => Some((*number).into()),
        AMQPValue::LongInt(number) => Some((*number).into()),
        AMQPValue::LongUInt(number) => Some((*number).into()),
        AMQPValue::LongLongInt(number) => Some(*number),
        AMQPValue::Timestamp(number) => i64::try_from(*number).ok(),
        _ => None,
    }
}

fn text<'a>(headers: &'a FieldTable, name: &str) -> Option<&'a [u8]> {
    match headers.inner().get(name)? {
        AMQPValue::LongString(text) => Some(text.as_bytes()),
        AMQPValue::ShortString(text) => Some(text.as_str().as_bytes()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some_message() -> impl Strategy<Value = Message> {
        let kind = prop_oneof![Just(Kind::Checkpoint), Just(Kind::Republish), Just(Kind::Step)];
        let device = prop_oneof![
            Just(Device::Any),
            Just(Device::Cpu),
            (0..u64::from(u32::MAX)).prop_map(|wait| Device::Gpu { wait: Duration::from_millis(wait) }),
        ];
        let id = any::<String>().prop_filter("an id that fits", |id| (1..=ID_BYTES).contains(&id.len()));
        (id, kind, device, any::<Vec<u8>>()).prop_map(|(id, kind, device, body)| Message {
            id,
            kind,
            body,
            priority: Priority::Low,
            device,
        })
    }

    proptest! {
        #[test]
        fn a_message_comes_back_as_it_was_sent(
            message in some_message(), sent: u32, abandoned: u32, retries: u32, waited: u32, expires: Option<u64>
        ) {
            let milliseconds = |number: u32| Duration::from_millis(number.into());
            let history = History {
                sent: milliseconds(sent), abandoned, retries, waited: milliseconds(waited)
            };
            let properties = properties(&message, &history, expires);
            let back = super::message(&properties, message.body.clone(), Priority::Low);
            prop_assert_eq!(back, (message, history));
        }
    }

    #[test]
    fn what_anybody_sends_is_a_checkpoint_manifest() {
        let (read, history) = message(&BasicProperties::default(), b"{}".to_vec(), Priority::High);
        assert_eq!((read.kind, read.priority, read.device), (Kind::Checkpoint, Priority::High, Device::Any));
        assert_eq!(history, History::default());
        let again = message(&BasicProperties::default(), b"{}".to_vec(), Priority::High).0;
        assert_eq!(read.id, again.id, "it has the same id each time");
        let large = message(&BasicProperties::default(), vec![0; BODY_BYTES + 1], Priority::Low).0;
        assert_eq!(large.body.len(), BODY_BYTES);
        assert_eq!(large.check(), Ok(()));
        let newer = BasicProperties::default().with_type(short("of tomorrow"));
        assert!(!is_known(&newer) && is_known(&BasicProperties::default()));
        assert!(is_known(&BasicProperties::default().with_type(short(""))));
    }

    #[test]
    fn what_is_put_off_says_what_it_is_and_tells_the_broker_nothing() {
        let mut headers = FieldTable::default();
        for name in ["weighbridge-new", "CC", "BCC", "x-death", "x-delivery-count"] {
            headers.insert(short(name), AMQPValue::LongLongInt(1));
        }
        let newer = BasicProperties::default()
            .with_type(short("of tomorrow"))
            .with_message_id(short("a"))
            .with_user_id(short("somebody"))
            .with_reply_to(short("x"))
            .with_headers(headers);
        let fresh = put_off(&newer, 16_000);
        let names: Vec<_> = fresh.headers().iter().flat_map(|headers| headers.inner().keys()).collect();
        assert_eq!(names, [&short("weighbridge-new")]);
        assert_eq!((fresh.kind(), fresh.message_id()), (newer.kind(), newer.message_id()));
        assert_eq!((fresh.user_id(), fresh.reply_to()), (&None, &None));
        assert_eq!(fresh.expiration(), &Some(short("16000")));
    }

    #[test]
    fn the_brokers_counts_are_heeded() {
        let mut headers = FieldTable::default();
        headers.insert(short("x-delivery-count"), AMQPValue::LongLongInt(2));
        headers.insert(short(ABANDONED), AMQPValue::LongLongInt(1));
        let abandoned = |headers: &FieldTable| {
            let properties = BasicProperties::default().with_headers(headers.clone());
            message(&properties, Vec::new(), Priority::Low).1.abandoned
        };
        assert_eq!(abandoned(&headers), 3);
        let mut death = FieldTable::default();
        death.insert(short("reason"), AMQPValue::LongString("expired".into()));
        headers.insert(short("x-death"), AMQPValue::FieldArray(vec![death.clone().into()].into()));
        assert_eq!(abandoned(&headers), 3, "a delay that is over is no death");
        death.insert(short("reason"), AMQPValue::LongString("delivery_limit".into()));
        headers.insert(short("x-death"), AMQPValue::FieldArray(vec![death.into()].into()));
        assert_eq!(abandoned(&headers), DELIVERY_LIMIT);
    }
}
