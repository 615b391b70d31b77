//! JSON Schemas, generated from the types. The copies under `schemas/json/` are checked in, and a test compares
//! them; `cargo run -p weighbridge-schemas --example write_schemas` writes them anew.

use schemars::schema_for;

use crate::channel::ChannelEntry;
use crate::checkpoint::CheckpointManifest;
use crate::dead::DeadLetter;
use crate::digests::PartialDigests;
use crate::host::HostStatus;
use crate::job::{Decision, Event, JobPlan, JobRecord, Outcome, PartResult, Republish, Step};
use crate::policy::PolicyFile;
use crate::report::Report;
use crate::retention::{Condemned, GcEnded, GcNote, Pin};
use crate::signature::{Envelope, Statement};
use crate::snapshot::SnapshotManifest;

/// Every document's file name under `schemas/json/`, and its JSON Schema as indented text.
#[must_use]
pub fn all() -> Vec<(&'static str, String)> {
    let schemas = [
        ("channel.v1.json", schema_for!(ChannelEntry)),
        ("checkpoint.v1.json", schema_for!(CheckpointManifest)),
        ("condemned.v1.json", schema_for!(Condemned)),
        ("dead.v1.json", schema_for!(DeadLetter)),
        ("decision.v1.json", schema_for!(Decision)),
        ("digests.v1.json", schema_for!(PartialDigests)),
        ("envelope.v1.json", schema_for!(Envelope)),
        ("event.v1.json", schema_for!(Event)),
        ("gc-ended.v1.json", schema_for!(GcEnded)),
        ("gc.v1.json", schema_for!(GcNote)),
        ("host.v1.json", schema_for!(HostStatus)),
        ("job.v1.json", schema_for!(JobRecord)),
        ("outcome.v1.json", schema_for!(Outcome)),
        ("part.v1.json", schema_for!(PartResult)),
        ("pin.v1.json", schema_for!(Pin)),
        ("plan.v1.json", schema_for!(JobPlan)),
        ("policy.v1.json", schema_for!(PolicyFile)),
        ("report.v1.json", schema_for!(Report)),
        ("republish.v1.json", schema_for!(Republish)),
        ("snapshot.v1.json", schema_for!(SnapshotManifest)),
        ("statement.v1.json", schema_for!(Statement)),
        ("step.v1.json", schema_for!(Step)),
    ];
    schemas.into_iter().map(|(name, schema)| (name, format!("{:#}\n", schema.as_value()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_checked_in_schemas_are_those_of_the_types() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("json");
        let mut names = Vec::new();
        for (name, schema) in all() {
            let checked_in = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
            assert!(
                checked_in == schema,
                "{name} has drifted; run `cargo run -p weighbridge-schemas --example write_schemas`"
            );
            names.push(name.to_owned());
        }
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, names);
    }

    #[test]
    fn the_schemas_accept_what_the_types_write_and_refuse_nonsense() {
        let (_, schema) = all().into_iter().find(|(name, _)| *name == "policy.v1.json").unwrap();
        let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
        let policy: toml::Value = toml::from_str(crate::policy::DEFAULT_POLICY).unwrap();
        assert!(jsonschema::is_valid(&schema, &serde_json::to_value(policy).unwrap()));
        assert!(!jsonschema::is_valid(
            &schema,
            &serde_json::json!({ "schema": "weighbridge.policy/v1", "x": 1 })
        ));
    }
}
