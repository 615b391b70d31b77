//! Who may import whom, and what no room may reach.
//!
//! The three middle rooms never see each other, so that each can be read, tested and replaced alone, and a serving
//! host compiles only what it needs. The rules stand in one table; rooms that are not built yet stand in it already.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, PackageId};

mod rust_text;
mod tracked;

/// A crate of ours, and what it may and may not use.
struct Room {
    name: &'static str,
    /// Crates of ours that it may reach.
    may_use: &'static [&'static str],
    /// Crates of others that it must never reach, by whatever way.
    never: &'static [&'static str],
    /// Where its sources must not touch environment, clock and terminal.
    silent: Option<&'static str>,
}

const SCHEMAS: &str = "weighbridge-schemas";
const QUEUE: &str = "weighbridge-queue";
const CONVERTER: &str = "weighbridge-converter";
const SNAPSHOTS: &str = "weighbridge-snapshots";
const PUBLISHER: &str = "weighbridge";
const PYTHON: &str = "weighbridge-python";
const TESTS: &str = "weighbridge-tests";

const ROOMS: &[Room] = &[
    Room {
        name: SCHEMAS,
        may_use: &[],
        never: &["tokio", "object_store", "lapin", "tonic"],
        silent: Some("schemas/src/"),
    },
    Room { name: QUEUE, may_use: &[SCHEMAS], never: &["object_store"], silent: None },
    Room {
        name: CONVERTER,
        may_use: &[SCHEMAS],
        // It is handed its stores ready-made; object_store itself brings the client.
        never: &["lapin", "tonic"],
        silent: Some("converter/src/"),
    },
    Room {
        name: SNAPSHOTS,
        may_use: &[SCHEMAS],
        never: &["lapin", "tonic", "cudarc"],
        silent: Some("snapshots/src/"),
    },
    Room { name: PUBLISHER, may_use: &[SCHEMAS, QUEUE, CONVERTER, SNAPSHOTS], never: &[], silent: None },
    Room { name: PYTHON, may_use: &[SCHEMAS, QUEUE, SNAPSHOTS], never: &[], silent: None },
    Room {
        name: TESTS,
        may_use: &[SCHEMAS, QUEUE, CONVERTER, SNAPSHOTS, PUBLISHER, PYTHON],
        never: &[],
        silent: None,
    },
];

/// The longest chain of imports among our crates, the tests aside.
const LONGEST_CHAIN: usize = 3;

/// Which crate uses which, by name, in ordinary builds (not to test or to build it).
type Graph = BTreeMap<String, BTreeSet<String>>;

#[expect(clippy::expect_used, reason = "a test fails by panicking")]
fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(tracked::root().join("Cargo.toml"))
        // One platform, so that crates of other ones need not be fetched.
        .other_options(["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"].map(str::to_owned))
        .exec()
        .expect("cargo metadata describes the workspace")
}

#[expect(clippy::expect_used, reason = "a test fails by panicking")]
fn graph(metadata: &Metadata) -> Graph {
    let name = |id: &PackageId| metadata[id].name.to_string();
    let resolve = metadata.resolve.as_ref().expect("cargo metadata resolves dependencies");
    let mut graph = Graph::new();
    for node in &resolve.nodes {
        let ordinary = node
            .deps
            .iter()
            .filter(|used| used.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal));
        // Two versions of one crate become one node: what either reaches counts.
        graph.entry(name(&node.id)).or_default().extend(ordinary.map(|used| name(&used.pkg)));
    }
    graph
}

fn ours(metadata: &Metadata) -> BTreeSet<String> {
    metadata.workspace_packages().iter().map(|package| package.name.to_string()).collect()
}

/// Everything that `name` reaches, each with the crate through which it does.
fn reach<'g>(graph: &'g Graph, name: &'g str) -> BTreeMap<&'g str, &'g str> {
    let mut reached = BTreeMap::new();
    let mut left = vec![name];
    while let Some(user) = left.pop() {
        for used in graph.get(user).into_iter().flatten() {
            if used != name && !reached.contains_key(used.as_str()) {
                reached.insert(used.as_str(), user);
                left.push(used);
            }
        }
    }
    reached
}

/// What is wrong with the imports of the crates `ours` in `graph`: one line each.
fn wrong_imports(graph: &Graph, ours: &BTreeSet<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for name in ours {
        let Some(room) = ROOMS.iter().find(|room| room.name == name) else {
            wrong.push(format!("{name} is not in the table of rooms: say there what it may use"));
            continue;
        };
        for (used, user) in reach(graph, name) {
            if ours.contains(used) && !room.may_use.contains(&used) {
                wrong.push(format!("{name} may not use {used}, but does (through {user})"));
            }
            if room.never.contains(&used) {
                wrong.push(format!("{name} must never reach {used}, but does (through {user})"));
            }
        }
    }
    wrong
}

/// The longest chain of imports that starts at `name`, in crates; imports cannot go in circles.
fn chain(graph: &Graph, ours: &BTreeSet<String>, name: &str) -> usize {
    let used = graph.get(name).into_iter().flatten().filter(|used| ours.contains(*used));
    1 + used.map(|used| chain(graph, ours, used)).max().unwrap_or(0)
}

#[test]
fn rooms_use_only_what_they_may() {
    let metadata = metadata();
    let wrong = wrong_imports(&graph(&metadata), &ours(&metadata));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_longest_chain_is_three() {
    let metadata = metadata();
    let (graph, mut ours) = (graph(&metadata), ours(&metadata));
    ours.remove(TESTS);
    for name in &ours {
        let length = chain(&graph, &ours, name);
        assert!(length <= LONGEST_CHAIN, "{name} starts a chain of {length} crates; at most {LONGEST_CHAIN}");
    }
}

#[test]
fn crates_are_named_after_what_they_hold() {
    for name in ours(&metadata()) {
        let empty = name.split('-').find(|part| ["common", "core", "util", "utils"].contains(part));
        assert_eq!(empty, None, "{name}: name the crate after what it holds");
    }
}

/// The lock file covers every feature and platform, unlike the resolved graph.
#[test]
fn nothing_brings_a_second_cryptography_library() {
    let lock = tracked::text("Cargo.lock").expect("Cargo.lock is tracked");
    for banned in ["aws-lc-rs", "aws-lc-sys", "aws-lc-fips-sys", "openssl", "openssl-sys"] {
        let entry = format!("name = \"{banned}\"");
        assert!(
            !lock.lines().any(|line| line == entry),
            "{banned} is in Cargo.lock; choose the feature `ring`"
        );
    }
}

/// Where libraries may look outside: the clients of buckets do so by themselves.
const DOORS: [&str; 1] = ["snapshots/src/outside.rs"];

#[test]
fn libraries_are_silent() {
    let loud = ["std::env", "SystemTime", "print!", "println!", "eprint!", "eprintln!"];
    let mut wrong = Vec::new();
    for file in tracked::files().iter().filter(|file| file.ends_with(".rs")) {
        if DOORS.contains(&file.as_str()) {
            continue;
        }
        if !ROOMS.iter().filter_map(|room| room.silent).any(|folder| file.starts_with(folder)) {
            continue;
        }
        let lines = rust_text::lines(&tracked::text(file).unwrap_or_default());
        for (number, line) in lines.iter().enumerate().filter(|(_, line)| !line.test) {
            for word in loud.iter().filter(|word| rust_text::has_word(&line.code, word)) {
                let number = number + 1;
                wrong.push(format!(
                    "{file}:{number}: {word}: a library takes this by parameter, or leaves it be"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn graph_of(edges: &[(&str, &[&str])]) -> Graph {
    let owned = |used: &[&str]| used.iter().map(|&name| name.to_owned()).collect();
    edges.iter().map(|&(name, used)| (name.to_owned(), owned(used))).collect()
}

#[test]
fn wrong_imports_are_found_through_others() {
    let graph = graph_of(&[
        (SCHEMAS, &["helper"]),
        ("helper", &["tokio"]),
        (CONVERTER, &[SCHEMAS, SNAPSHOTS]),
        (SNAPSHOTS, &[SCHEMAS]),
        ("weighbridge-extra", &[]),
    ]);
    let ours = [SCHEMAS, CONVERTER, SNAPSHOTS, "weighbridge-extra"].map(str::to_owned).into();
    let wrong = wrong_imports(&graph, &ours);
    assert_eq!(
        wrong,
        [
            "weighbridge-converter may not use weighbridge-snapshots, but does (through weighbridge-converter)",
            "weighbridge-extra is not in the table of rooms: say there what it may use",
            "weighbridge-schemas must never reach tokio, but does (through helper)",
        ]
    );
    assert_eq!(chain(&graph, &ours, CONVERTER), 3);
}
