//! What the broker has to have, told by rules; `deploy/rabbitmq/definitions.json` tells the same, thing by thing.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::tools::text;

/// The name that all others begin with.
pub(crate) const NAME: &str = "weighbridge";
const CLASSES: [&str; 3] = ["high", "normal", "low"];
const DELAYS: [&str; 7] = ["1s", "4s", "16s", "64s", "256s", "1024s", "4096s"];

pub(crate) fn definitions() -> Value {
    serde_json::from_str(&text("deploy/rabbitmq/definitions.json")).unwrap()
}

/// Exchanges, queues and bindings, each as one line, without what is the same for all or differs between brokers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    exchanges: BTreeSet<String>,
    queues: BTreeSet<String>,
    bindings: BTreeSet<String>,
}

impl Topology {
    /// Of a file of definitions.
    pub(crate) fn of(definitions: &Value) -> Self {
        let lines = |kind: &str, line: fn(&Value) -> String| {
            definitions[kind].as_array().unwrap().iter().map(line).collect()
        };
        Self {
            exchanges: lines("exchanges", |exchange| {
                assert_eq!(exchange["durable"], true, "{exchange}");
                format!("{} {}", exchange["name"], exchange["type"])
            }),
            queues: lines("queues", |queue| {
                assert_eq!(queue["durable"], true, "{queue}");
                format!("{} {}", queue["name"], queue["arguments"])
            }),
            bindings: lines("bindings", |binding| {
                format!("{} {} {}", binding["source"], binding["routing_key"], binding["destination"])
            }),
        }
    }

    /// Of the rules.
    fn expected() -> Self {
        let (mut queues, mut bindings) = (Vec::new(), Vec::new());
        let mut queue = |queue: &str, dead_letters: Value, limit: Option<u64>| {
            let mut arguments = json!({ "x-queue-type": "quorum", "x-overflow": "reject-publish" });
            if let Value::Object(dead_letters) = dead_letters {
                arguments["x-dead-letter-exchange"] = NAME.into();
                arguments["x-dead-letter-strategy"] = "at-least-once".into();
                arguments.as_object_mut().unwrap().extend(dead_letters);
            }
            if let Some(limit) = limit {
                arguments["x-delivery-limit"] = limit.into();
            }
            queues
                .push(json!({ "name": format!("{NAME}.{queue}"), "durable": true, "arguments": arguments }));
        };
        let mut bind = |source: String, key: &str, queue: &str| {
            let destination = format!("{NAME}.{queue}");
            bindings.push(json!({ "source": source, "routing_key": key, "destination": destination }));
        };
        for class in CLASSES {
            for (device, key) in [("", "dead"), (".cpu", "dead"), (".gpu", class)] {
                let name = format!("{class}{device}");
                let mut arguments = json!({ "x-dead-letter-routing-key": key });
                if device == ".gpu" {
                    arguments["x-message-ttl"] = 86_400_000.into();
                }
                queue(&name, arguments, Some(20));
                bind(NAME.to_owned(), &name, &name);
            }
            for delay in DELAYS {
                let name = format!("{class}.delay.{delay}");
                let seconds: u64 = delay.trim_end_matches('s').parse().unwrap();
                queue(&name, json!({ "x-message-ttl": seconds * 1000 }), None);
                bind(format!("{NAME}.delay.{delay}"), &format!("{class}.#"), &name);
            }
        }
        queue("dead", Value::Null, Some(1_000_000));
        bind(NAME.to_owned(), "dead", "dead");
        let exchange = |name: String, kind: &str| json!({ "name": name, "type": kind, "durable": true });
        let delays = DELAYS.iter().map(|delay| exchange(format!("{NAME}.delay.{delay}"), "topic"));
        let exchanges: Vec<_> = delays.chain([exchange(NAME.to_owned(), "direct")]).collect();
        Self::of(&json!({ "exchanges": exchanges, "queues": queues, "bindings": bindings }))
    }
}

/// The queues that workers take from.
pub(crate) fn work_queues(devices: &[&str]) -> BTreeSet<String> {
    let names =
        CLASSES.iter().flat_map(|class| devices.iter().map(move |device| format!("{NAME}.{class}{device}")));
    names.collect()
}

#[test]
fn the_definitions_are_the_whole_topology() {
    let definitions = definitions();
    assert_eq!(Topology::of(&definitions), Topology::expected());
    for kind in ["permissions", "policies", "exchanges", "queues", "bindings"] {
        for item in definitions[kind].as_array().unwrap() {
            assert_eq!(item["vhost"], NAME, "{item}");
        }
    }
}

#[test]
fn no_user_of_the_definitions_has_a_password_or_a_tag() {
    for user in definitions()["users"].as_array().unwrap() {
        assert_eq!((&user["password_hash"], &user["tags"]), (&json!(""), &json!([])), "{user}");
    }
}

/// A policy may bound what a queue takes, and no more: others could drop messages, or undo what the arguments say.
#[test]
fn no_policy_can_drop_messages() {
    for policy in definitions()["policies"].as_array().unwrap() {
        let definition = policy["definition"].as_object().unwrap();
        assert_eq!(definition.keys().collect::<Vec<_>>(), ["max-length"], "{policy}");
        assert!(definition["max-length"].as_u64().unwrap() >= 100_000, "{policy}");
    }
}
