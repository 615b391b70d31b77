//! What a publish and a fetch ask of a bucket: the counts that `docs/store.md` tells, counted at a proxy.

use std::collections::BTreeMap;
use std::path::Path;

use weighbridge_tests::buckets::{FaultyProxy, Kind};
use weighbridge_tests::synthetic;

use crate::places::{House, Place, server};

/// Requests by what they are.
type Counts = BTreeMap<&'static str, u64>;

/// What came since it was asked last, in kinds that stores charge for alike; `chunks`: those about chunks alone.
fn counted(proxy: &FaultyProxy, chunks: bool) -> Counts {
    let mut counts = Counts::new();
    for entry in proxy.log() {
        let asked = &entry.asked;
        if asked.key.contains("/chunks/") != chunks {
            continue;
        }
        let kind = match asked.method.as_str() {
            "GET" if asked.query.contains("list-type") => "LIST",
            "GET" => "GET",
            "HEAD" => "HEAD",
            "PUT" => "PUT",
            _ => "other",
        };
        *counts.entry(kind).or_default() += 1;
    }
    counts
}

/// The numbers of a line of the table in `docs/store.md`, in the order HEAD, PUT, GET, LIST.
fn documented(line: &str) -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/store.md");
    let text = std::fs::read_to_string(page).unwrap();
    let row =
        text.lines().find(|row| row.starts_with(&format!("| {line} |"))).unwrap_or_else(|| panic!("{line}"));
    row.split('|').skip(2).map(|cell| cell.trim().to_owned()).filter(|cell| !cell.is_empty()).collect()
}

/// Counts as they stand in the table: those for each chunk, and the rest.
fn row(chunks: &Counts, rest: &Counts, all: u64) -> Vec<String> {
    ["HEAD", "PUT", "GET", "LIST"]
        .map(|kind| {
            let (each, rest) = (chunks.get(kind).copied().unwrap_or(0), rest.get(kind).copied().unwrap_or(0));
            assert_eq!(each % all, 0, "{kind}: {each} for {all} chunks");
            match each / all {
                0 => rest.to_string(),
                1 => format!("C + {rest}"),
                times => format!("{times} C + {rest}"),
            }
        })
        .to_vec()
}

#[test]
fn costs_are_what_the_documentation_says() {
    let Some(server) = server(Kind::Moto) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::Moto, server, Some(proxy.port()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.safetensors");
    synthetic(&path, 2, 300_000, 64);
    // Once, so that the bucket has been tried out.
    let tiny = folder.path().join("t.safetensors");
    synthetic(&tiny, 1, 2, 8);
    house.store.run(["publish", tiny.to_str().unwrap(), "--model", "other"]).succeeded();

    let counted = |arguments: &[&str]| {
        proxy.forget();
        house.store.run(arguments.iter().copied()).succeeded();
        (counted(&proxy, true), counted(&proxy, false))
    };
    let publish = |step| {
        let path = path.to_str().unwrap();
        counted(&["publish", path, "--model", "m", "--run", "r", "--step", step])
    };
    let into = folder.path().join("served");
    let fetch = || counted(&["fetch", "m", "--into", into.to_str().unwrap()]);
    let first = publish("1");
    let chunks = first.0.get("PUT").copied().unwrap();
    assert!(chunks > 10, "{chunks}");
    for (line, (about, rest)) in [
        ("publish, every chunk new", first),
        ("publish, every chunk there already", publish("2")),
        ("fetch by channel", fetch()),
        ("fetch by channel, nothing new", fetch()),
    ] {
        let counts = row(&about, &rest, chunks);
        println!("{line}: {counts:?}");
        assert_eq!(documented(line), counts, "{line}");
    }
}
