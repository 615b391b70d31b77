//! The Compose file: by its specification, as far as a parser of it goes, and by what it promises.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::tools::{check_command_line, has, python_package, root, said, skipped, strings, text, yaml};

const FOLDER: &str = "deploy/compose";
/// A parser of the specification, from PyPI.
const PARSER: &str = "compose-spec==0.2.1";

fn compose() -> Value {
    yaml(&text("deploy/compose/compose.yaml")).remove(0)
}

fn services(compose: &Value) -> impl Iterator<Item = (&String, &Value)> {
    compose["services"].as_object().unwrap().iter()
}

#[test]
fn the_file_is_as_the_specification_has_it() {
    let Some(packages) = python_package(PARSER) else { return };
    let program =
        "import sys; from compose_spec import PyCompose; PyCompose.from_json(sys.stdin.read()).validate()";
    let parse = |document: &Value| {
        let mut python = Command::new("python3");
        python.args(["-c", program]).env("PYTHONPATH", &packages);
        let mut python =
            python.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The parser does not know merged keys, which are in order: what it gets is merged.
        python.stdin.take().unwrap().write_all(document.to_string().as_bytes()).unwrap();
        python.wait_with_output().unwrap()
    };
    let mut compose = compose();
    let output = parse(&compose);
    assert!(output.status.success(), "{}", said(&output));
    compose["services"]["worker"]["comand"] = "x".into();
    assert!(!parse(&compose).status.success(), "the parser takes anything");
}

#[test]
fn docker_takes_the_file() {
    let known = Command::new("docker").args(["compose", "version"]).stdin(Stdio::null()).output();
    if !has("docker") || !known.is_ok_and(|output| output.status.success()) {
        skipped("no docker compose here");
        return;
    }
    let mut config = Command::new("docker");
    config.args(["compose", "--file", "compose.yaml", "config", "--quiet"]).current_dir(root().join(FOLDER));
    for variable in example() {
        config.env(variable, "x");
    }
    crate::tools::succeeds(&mut config);
}

/// The variables of `.env.example`, which are all empty there.
fn example() -> BTreeSet<String> {
    let text = text("deploy/compose/.env.example");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let name = |line: &str| line.strip_suffix('=').unwrap_or_else(|| panic!("{line} has a value")).to_owned();
    lines.map(name).collect()
}

#[test]
fn passwords_come_from_outside_and_none_has_a_default() {
    let file = text("deploy/compose/compose.yaml");
    let mut used: BTreeSet<_> =
        file.split("${").skip(1).map(|rest| rest.split(['}', ':']).next().unwrap()).collect();
    for reference in file.split("${").skip(1) {
        assert!(reference.split('}').next().unwrap().contains(":?"), "{reference} may be missing");
    }
    let compose = compose();
    let secrets = compose["secrets"].as_object().unwrap();
    used.extend(secrets.values().map(|secret| secret["environment"].as_str().unwrap()));
    assert_eq!(example().iter().map(String::as_str).collect::<BTreeSet<_>>(), used);
    // The broker's secrets are users of its definitions.
    let definitions = text("deploy/rabbitmq/definitions.json");
    for user in strings(&compose["services"]["rabbitmq"]["secrets"]) {
        assert!(definitions.contains(&format!("{{\"name\": \"{user}\", \"password_hash\"")), "{user}");
    }
}

#[test]
fn images_are_pinned_and_files_are_there() {
    for (name, service) in services(&compose()) {
        let (_, tag) = service["image"].as_str().unwrap().rsplit_once(':').unwrap();
        assert!(tag != "latest", "{name}");
        if let Some(build) = service["build"].as_object() {
            let context = root().join(FOLDER).join(build["context"].as_str().unwrap());
            assert!(context.join(build["dockerfile"].as_str().unwrap()).is_file(), "{name}");
        } else {
            assert!(tag.contains(|character: char| character.is_ascii_digit()), "{name}: {tag}");
        }
        let volumes = service.get("volumes").map(strings).unwrap_or_default();
        for source in volumes.iter().map(|volume| volume.split(':').next().unwrap()) {
            let is_there = if source.starts_with('.') {
                root().join(FOLDER).join(source).is_file()
            } else {
                compose()["volumes"].get(source).is_some()
            };
            assert!(is_there, "{name}: {source}");
        }
    }
}

#[test]
fn nothing_is_reached_from_outside() {
    for (name, service) in services(&compose()) {
        for port in service.get("ports").map(strings).unwrap_or_default() {
            assert!(port.starts_with("127.0.0.1:"), "{name}: {port}");
        }
        assert!(service.get("network_mode").is_none() && service.get("privileged").is_none(), "{name}");
        assert_ne!(service["restart"], Value::Null, "{name}");
    }
}

#[test]
fn what_is_started_is_understood_and_has_time_to_stop() {
    let configuration = weighbridge::config::Config::parse(&text("deploy/compose/weighbridge.toml")).unwrap();
    let stop_seconds = configuration.worker.stop_seconds.unwrap();
    let compose = compose();
    let buckets = &compose["services"]["buckets"]["entrypoint"][2];
    let made: BTreeSet<_> = buckets
        .as_str()
        .unwrap()
        .split_once(" in ")
        .unwrap()
        .1
        .split_once(';')
        .unwrap()
        .0
        .split(' ')
        .collect();
    let wanted = configuration.sources.allow.as_deref().unwrap().iter().chain(&configuration.store);
    let wanted = wanted.map(|url| url.strip_prefix("s3://").unwrap().split('/').next().unwrap());
    assert_eq!(made, wanted.collect(), "buckets that are made, and that are used");
    for name in ["worker", "serve", "api"] {
        let service = &compose["services"][name];
        check_command_line(&strings(&service["command"]));
        assert!(service["environment"]["WEIGHBRIDGE_STORE"].is_null(), "{name}: it goes before the file");
        let grace = service["stop_grace_period"].as_str().unwrap().strip_suffix('s').unwrap();
        assert!(grace.parse::<u64>().unwrap() > stop_seconds, "{name}");
    }
}
