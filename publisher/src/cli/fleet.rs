//! `fleet`: which serving host wants, holds and serves what, as the API was told.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use futures::future::join_all;
use serde::Deserialize;
use serde_json::{Value, json};

use weighbridge_schemas::error::Kind;
use weighbridge_schemas::host::HostStatus;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::api::Api;
use weighbridge_snapshots::reference::Reference;

use super::Context;
use super::api::ApiOptions;
use super::output::{ago, count, error_cell, error_object, plain, short, table};
use crate::error::{Exit, Failure, Result};

/// After so many seconds without news a host counts as silent.
const SILENT: u64 = 60;

/// List serving hosts: what they follow, what they serve, how old it is, and what went wrong last.
///
/// Hosts tell the API how they are (`fetch --follow --api`); one that has told nothing for 60 s is shown as silent, and
/// after ten minutes it is forgotten. Where the API's name has several addresses, each server is asked: a host tells
/// the one that it is connected to.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  weighbridge fleet dlrm@prod --api https://weighbridge.example.org:7461\n  \
                        weighbridge fleet --stale-seconds 3600 --api https://weighbridge.example.org:7461"
)]
pub(super) struct Fleet {
    /// Only those that follow this model, or this channel of it.
    #[arg(value_name = "MODEL[@CHANNEL]")]
    reference: Option<Reference>,
    /// Exit code 1 where a host is silent, serves nothing, or serves a checkpoint that was written longer ago than so
    /// many seconds.
    #[arg(long, value_name = "N")]
    stale_seconds: Option<u64>,
    #[command(flatten)]
    api: ApiOptions,
}

/// A page of what the API answers.
#[derive(Deserialize)]
struct Answer {
    hosts: Vec<Told>,
    #[serde(default)]
    next_page_token: String,
}

#[derive(Deserialize)]
struct Told {
    status: HostStatus,
    silent_seconds: u64,
}

impl Fleet {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let servers = self.api.each(context).await?;
        let answers = join_all(servers.iter().map(told)).await;
        let (mut all, mut failures) = (Vec::new(), Vec::new());
        for answer in answers {
            match answer {
                Ok(told) => all.push(told),
                Err(failure) => failures.push(failure),
            }
        }
        if all.is_empty() {
            return Err(failures.swap_remove(0));
        }
        for failure in &failures {
            context.output.tell(&format!("hosts that tell it how they are do not show: {failure}\n"));
        }
        let rows = rows(merged(all), self.stale_seconds);
        let wanted = self.reference.as_ref();
        let rows: Vec<_> = rows.into_iter().filter(|row| wanted.is_none_or(|of| row.is_of(of))).collect();
        self.show(context, &rows, failures.len())
    }

    fn show(&self, context: &Context, rows: &[Row], unanswered: usize) -> Result<ExitCode> {
        let stale = rows.iter().filter(|row| row.stale).count();
        let unheard = rows.is_empty() && self.reference.is_some();
        let failure = (self.stale_seconds.is_some() && (stale > 0 || unheard)).then(|| {
            if unheard {
                let message =
                    "no host that follows it has been heard of in the last ten minutes, or since the API \
                               began"
                        .to_owned();
                return Failure { kind: Kind::Transient, class: "stale", message, exit: Exit::Failed };
            }
            let what = count(stale as u64, "host");
            let message =
                format!("{what} of {} out of date, or silent; see the column \"stale\"", rows.len());
            Failure { kind: Kind::Transient, class: "stale", message, exit: Exit::Failed }
        });
        let mut document = json!({ "hosts": rows.iter().map(Row::document).collect::<Vec<_>>() });
        if unanswered > 0 {
            document["servers_unanswered"] = json!(unanswered);
        }
        if let Some(failure) = &failure {
            document["error"] = error_object(failure);
        }
        context.output.listing(&document, || {
            let cells = cells(rows);
            let heading = ["host", "follows", "state", "step", "snapshot", "age", "behind", "stale", "error"];
            table(&heading, &cells)
        });
        let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
        context.output.failure_line(&failure);
        Ok(ExitCode::from(failure.exit as u8))
    }
}

/// What one server was told.
async fn told(api: &Api) -> Result<Vec<Told>> {
    let mut told = Vec::new();
    let mut token = String::new();
    loop {
        let page = api.hosts(&token).await?;
        let answer: Answer = serde_json::from_slice(&page)
            .map_err(|error| Failure::internal("the API's answer is none of its own", error))?;
        told.extend(answer.hosts);
        // A token that comes again would lead round in a circle.
        if answer.next_page_token.is_empty() || answer.next_page_token == token {
            return Ok(told);
        }
        token = answer.next_page_token;
    }
}

/// What all servers were told: of a host that told several, what it told last.
fn merged(all: Vec<Vec<Told>>) -> Vec<Told> {
    let mut hosts: BTreeMap<_, Told> = BTreeMap::new();
    for told in all.into_iter().flatten() {
        let HostStatus { host, model, channel, folder, .. } = &told.status;
        let key = (host.clone(), model.clone(), channel.clone(), folder.clone());
        let known = hosts.get(&key).map(|known| known.silent_seconds);
        if known.is_none_or(|known| told.silent_seconds < known) {
            hosts.insert(key, told);
        }
    }
    hosts.into_values().collect()
}

/// A host as it is shown.
struct Row {
    status: HostStatus,
    silent_seconds: u64,
    /// How old what it serves is by now.
    age: Option<u64>,
    /// How many entries of the channel it has not got to, as far as any host of the fleet knows.
    behind: Option<u64>,
    stale: bool,
}

/// The rows of all hosts: what is newest on a channel is what any of them wants.
fn rows(told: Vec<Told>, stale_seconds: Option<u64>) -> Vec<Row> {
    let mut newest: BTreeMap<(ModelName, ChannelName), u64> = BTreeMap::new();
    for Told { status, .. } in &told {
        let wanted = status.wanted.as_ref().map_or(0, |wanted| wanted.sequence);
        let known = newest.entry((status.model.clone(), status.channel.clone())).or_default();
        *known = wanted.max(*known);
    }
    let row = |Told { status, silent_seconds }| {
        let age = status.age_seconds.map(|age| age.saturating_add(silent_seconds));
        let newest = newest.get(&(status.model.clone(), status.channel.clone())).copied().unwrap_or(0);
        let behind = status.serving.as_ref().map(|serving| newest.saturating_sub(serving.sequence));
        let is_old = stale_seconds.is_some_and(|most| age.is_none_or(|age| age > most));
        let stale = is_old || silent_seconds > SILENT;
        Row { status, silent_seconds, age, behind, stale }
    };
    told.into_iter().map(row).collect()
}

/// The rows' cells. Where several of a machine follow one channel, their folders tell them apart.
fn cells(rows: &[Row]) -> Vec<Vec<String>> {
    let mut followers: BTreeMap<_, usize> = BTreeMap::new();
    for row in rows {
        *followers.entry(row.key()).or_default() += 1;
    }
    rows.iter().map(|row| row.cells(followers.get(&row.key()).is_some_and(|&many| many > 1))).collect()
}

impl Row {
    /// What it follows, and the machine.
    fn key(&self) -> (&str, &ModelName, &ChannelName) {
        (&self.status.host, &self.status.model, &self.status.channel)
    }

    fn is_of(&self, reference: &Reference) -> bool {
        let channel = reference.at.as_deref();
        self.status.model == reference.model
            && channel.is_none_or(|channel| self.status.channel.as_str() == channel)
    }

    fn state(&self) -> &'static str {
        if self.silent_seconds > SILENT { "silent" } else { self.status.state.as_str() }
    }

    fn document(&self) -> Value {
        json!({
            "host": self.status.host,
            "model": self.status.model,
            "channel": self.status.channel,
            "state": self.state(),
            "silent_seconds": self.silent_seconds,
            "age_seconds": self.age,
            "behind": self.behind,
            "stale": self.stale,
            "status": self.status,
        })
    }

    fn cells(&self, with_folder: bool) -> Vec<String> {
        let (status, serving) = (&self.status, self.status.serving.as_ref());
        let seconds = |seconds| ago(std::time::Duration::from_secs(seconds));
        let state = match self.state() {
            "silent" => format!("silent for {}", seconds(self.silent_seconds)),
            state => state.to_owned(),
        };
        let folder = if with_folder { format!(" ({})", plain(&status.folder)) } else { String::new() };
        vec![
            plain(&status.host) + &folder,
            format!("{}@{}", status.model, status.channel),
            state,
            serving.map_or("-".to_owned(), |serving| serving.step.to_string()),
            serving.map_or("-".to_owned(), |serving| short(&serving.snapshot)),
            self.age.map_or("-".to_owned(), seconds),
            self.behind.map_or("-".to_owned(), |behind| behind.to_string()),
            if self.stale { "stale" } else { "" }.to_owned(),
            status.last_error.as_ref().map(error_cell).unwrap_or_default(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::host::{HostSchema, HostState, Target};
    use weighbridge_schemas::ids::SnapshotId;
    use weighbridge_schemas::time::Timestamp;

    use super::*;

    fn told(host: &str, channel: &str, wanted: u64, serving: Option<u64>, silent_seconds: u64) -> Told {
        let time = Timestamp::from_nanoseconds(0);
        let target = |sequence| Target {
            snapshot: SnapshotId::of(b"s"),
            sequence,
            run: "r".parse().unwrap(),
            step: 7,
            created_at: time,
            when: time,
        };
        let status = HostStatus {
            schema: HostSchema::V1,
            host: host.into(),
            folder: "/srv/m".into(),
            model: "m".parse().unwrap(),
            channel: channel.parse().unwrap(),
            state: HostState::Current,
            wanted: Some(target(wanted)),
            serving: serving.map(target),
            serving_since: None,
            age_seconds: serving.map(|_| 100),
            held: Vec::new(),
            attempts: 0,
            last_error: None,
            last_error_at: None,
            heard_at: None,
            updated_at: time,
        };
        Told { status, silent_seconds }
    }

    #[test]
    fn of_a_host_that_told_two_servers_what_it_told_last_counts() {
        let one = vec![told("a", "prod", 8, Some(8), 40), told("b", "prod", 9, Some(9), 0)];
        let other = vec![told("a", "prod", 9, Some(9), 2), told("c", "prod", 9, Some(9), 1)];
        let merged: Vec<_> = merged(vec![one, other])
            .into_iter()
            .map(|told| (told.status.host, told.status.wanted.unwrap().sequence, told.silent_seconds))
            .collect();
        let expected = [("a", 9, 2), ("b", 9, 0), ("c", 9, 1)];
        assert_eq!(merged, expected.map(|(host, wanted, silent)| (host.to_owned(), wanted, silent)));
    }

    #[test]
    fn followers_of_one_machine_are_told_apart_by_their_folders() {
        let mut all = vec![told("a", "prod", 9, Some(9), 0), told("a", "prod", 9, Some(9), 0)];
        all.extend([told("a", "canary", 9, Some(9), 0), told("b", "prod", 9, Some(9), 0)]);
        all[1].status.folder = "/srv/other".into();
        let hosts: Vec<_> = cells(&rows(all, None)).into_iter().map(|cells| cells[0].clone()).collect();
        assert_eq!(hosts, ["a (/srv/m)", "a (/srv/other)", "a", "b"]);
    }

    #[test]
    fn who_is_behind_is_told_by_what_others_know() {
        let all = || {
            vec![
                told("a", "prod", 9, Some(9), 3),
                told("b", "prod", 7, Some(7), 70),
                told("c", "prod", 9, None, 0),
                told("d", "canary", 2, Some(1), 0),
            ]
        };
        let shown = |most| {
            let rows = rows(all(), most);
            rows.iter().map(|row| (row.state(), row.age, row.behind, row.stale)).collect::<Vec<_>>()
        };
        assert_eq!(
            shown(None),
            [
                ("current", Some(103), Some(0), false),
                ("silent", Some(170), Some(2), true),
                ("current", None, None, false),
                ("current", Some(100), Some(1), false),
            ]
        );
        let stale: Vec<_> = shown(Some(101)).into_iter().map(|(.., stale)| stale).collect();
        assert_eq!(stale, [true, true, true, false]);
    }
}
