//! Alerts and the dashboard, and the rules of prometheus-adapter: they use what is measured.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::promql::Reference;
use crate::tools::{debian_program, has, root, skipped, succeeds, text, yaml};

const ALERTS: &str = "deploy/prometheus/alerts.yaml";
const DASHBOARD: &str = "deploy/grafana/weighbridge.json";
/// Where alerts send people.
const RUNBOOK: &str = "docs/operations.md";

fn alerts() -> Vec<Value> {
    let document = yaml(&text(ALERTS)).remove(0);
    let groups = document["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).cloned().collect()
}

/// What stands between `before` and `after` in a text, everywhere.
fn between<'t>(text: &'t str, before: &str, after: &str) -> Vec<&'t str> {
    text.split(before).skip(1).filter_map(|rest| Some(rest.split_once(after)?.0.trim())).collect()
}

#[test]
fn alerts_use_what_is_measured() {
    let reference = Reference::read();
    let alerts = alerts();
    assert!(alerts.len() > 4, "{}", alerts.len());
    for alert in &alerts {
        let name = alert["alert"].as_str().unwrap();
        let labels =
            reference.check(alert["expr"].as_str().unwrap()).unwrap_or_else(|what| panic!("{name}: {what}"));
        for label in between(&alert["annotations"].to_string(), "$labels.", "}}") {
            assert!(labels.contains(label), "{name}: what it finds has no label {label}");
        }
        assert!(alert["labels"]["severity"].is_string(), "{name}");
    }
}

/// What a heading is called in links, as the forges make it.
fn anchor(heading: &str) -> String {
    let kept = |character: char| character.is_alphanumeric() || " -_".contains(character);
    heading
        .trim()
        .to_lowercase()
        .chars()
        .filter(|&character| kept(character))
        .collect::<String>()
        .replace(' ', "-")
}

#[test]
fn alerts_lead_to_what_to_do() {
    assert_eq!(anchor(" A worker can't work: `/ready`"), "a-worker-cant-work-ready");
    let anchors: Option<BTreeSet<_>> = std::fs::read_to_string(root().join(RUNBOOK)).ok().map(|text| {
        let headings = text.lines().filter(|line| line.starts_with('#'));
        headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
    });
    if anchors.is_none() {
        skipped(&format!("there is no {RUNBOOK}"));
    }
    for alert in alerts() {
        let link = alert["annotations"]["runbook_url"].as_str().unwrap();
        let (file, anchor) = link.split_once('#').unwrap();
        assert_eq!(file, RUNBOOK, "{link}");
        assert!(anchors.as_ref().is_none_or(|anchors| anchors.contains(anchor)), "{link}: no such heading");
    }
}

#[test]
fn prometheus_takes_the_alerts_and_they_fire() {
    let promtool = if has("promtool") {
        Some("promtool".into())
    } else {
        debian_program("prometheus", "usr/bin/promtool")
    };
    let Some(promtool) = promtool else { return };
    succeeds(Command::new(&promtool).args(["check", "rules"]).arg(root().join(ALERTS)));
    let scenes = "tests/deploy/alerts.test.yaml";
    let document = text(scenes);
    for alert in alerts() {
        assert!(document.contains(&format!("alertname=\"{}\"", alert["alert"].as_str().unwrap())), "{alert}");
    }
    succeeds(Command::new(&promtool).args(["test", "rules"]).arg(root().join(scenes)));
}

#[test]
fn prometheus_adapter_is_told_of_what_is_measured() {
    let reference = Reference::read();
    for rule in
        yaml(&text("deploy/kubernetes/hpa/adapter-rules.yaml"))[0]["externalRules"].as_array().unwrap()
    {
        for query in ["seriesQuery", "metricsQuery"] {
            reference.check(rule[query].as_str().unwrap()).unwrap();
        }
    }
}

#[test]
fn the_dashboard_shows_what_is_measured() {
    let reference = Reference::read();
    let dashboard: Value = serde_json::from_str(&text(DASHBOARD)).unwrap();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let variables: BTreeSet<_> =
        variables.iter().map(|variable| variable["name"].as_str().unwrap()).collect();
    assert!(variables.contains("datasource"), "{variables:?}");
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another panel's");
        if panel["type"] == "row" {
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title}");
        for target in targets {
            let query = target["expr"].as_str().unwrap();
            let labels = reference.check(query).unwrap_or_else(|what| panic!("{title}: {what}"));
            for label in between(target["legendFormat"].as_str().unwrap(), "{{", "}}") {
                assert!(labels.contains(label), "{title}: {query} has no label {label}");
            }
            for variable in between(query, "\"$", "\"") {
                assert!(variables.contains(variable), "{title}: there is no variable {variable}");
            }
        }
    }
}

#[test]
fn the_dashboards_variables_are_of_what_is_measured() {
    let reference = Reference::read();
    let dashboard: Value = serde_json::from_str(&text(DASHBOARD)).unwrap();
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if variable["type"] != "query" {
            assert_eq!(variable["type"], "datasource");
            continue;
        }
        let query = variable["query"]["query"].as_str().unwrap();
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
        let (selector, label) = inner.rsplit_once(", ").unwrap();
        assert!(reference.check(selector).unwrap().contains(label), "{query}");
    }
}
