//! Who may do what in a store's bucket: the policies of `deploy/s3`, and the table that explains them.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::tools::{root, text};

const FOLDER: &str = "deploy/s3";
const TABLE: &str = "docs/operations.md";

/// A policy by its file's name.
fn policy(name: &str) -> Value {
    serde_json::from_str(&text(&format!("{FOLDER}/{name}.json"))).unwrap()
}

/// What is allowed, as "action resource".
fn allowed(policy: &Value) -> BTreeSet<String> {
    let statements = policy["Statement"].as_array().unwrap();
    let of = |statement: &Value| {
        assert_eq!(statement["Effect"], "Allow", "{statement}");
        let resource = statement["Resource"].as_str().unwrap().to_owned();
        let actions = statement["Action"].as_array().unwrap().clone();
        actions.into_iter().map(move |action| format!("{} {resource}", action.as_str().unwrap()))
    };
    statements.iter().flat_map(of).collect()
}

/// The rows of the table: an action, and who may: `true` under the name of the policy.
fn table() -> Vec<(String, Vec<(String, bool)>)> {
    let document = text(TABLE);
    let mut rows = document.lines().map(str::trim).skip_while(|line| !line.starts_with("| action |"));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let names = cells(rows.next().unwrap_or_else(|| panic!("{TABLE} has no such table")));
    let rows = rows.skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|line| {
        let mut cells = cells(line).into_iter();
        let action = cells.next().unwrap();
        let who = names[1..names.len() - 1].iter().cloned().zip(cells.map(|cell| cell == "yes"));
        (action, who.collect())
    })
    .collect()
}

#[test]
fn the_policies_allow_what_the_table_says_and_nothing_else() {
    let table = table();
    let files = std::fs::read_dir(root().join(FOLDER)).unwrap();
    let files: BTreeSet<_> =
        files.map(|file| file.unwrap().file_name().to_str().unwrap().replace(".json", "")).collect();
    let named: BTreeSet<_> = table[0].1.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(files, named);
    for name in &files {
        let policy = policy(name);
        assert_eq!(policy["Version"], "2012-10-17", "{name}");
        let said = table.iter().filter(|(_, who)| who.iter().any(|(who, may)| who == name && *may));
        let said = said.map(|(action, _)| {
            // Amazon takes actions of buckets for the bucket, and those of objects for its objects.
            let below = if action.starts_with("s3:ListBucket") { "" } else { "/PREFIX/*" };
            format!("{action} arn:aws:s3:::BUCKET{below}")
        });
        assert_eq!(allowed(&policy), said.collect(), "{name}");
    }
}

#[test]
fn who_publishes_deletes_nothing_and_who_fetches_writes_nothing() {
    let actions = |name: &str| allowed(&policy(name));
    let (worker, gc, host) = (actions("worker"), actions("gc"), actions("host"));
    assert!(host.is_subset(&worker) && worker.is_subset(&gc));
    assert!(!worker.iter().any(|action| action.contains("Delete")));
    assert!(!host.iter().any(|action| ["Put", "Delete", "Abort"].iter().any(|word| action.contains(word))));
    for line in [worker, gc, host].iter().flatten() {
        assert!(!line.split(' ').next().unwrap().contains('*'), "{line}");
    }
}
