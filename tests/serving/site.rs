//! A server with tokens, and clients of it.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

use weighbridge::api::proto::fleet_client::FleetClient;
use weighbridge::api::proto::operating_client::OperatingClient;
use weighbridge::api::proto::publishing_client::PublishingClient;

use crate::binary::Store;

/// How long something may take to happen before a test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server, and who may ask it.
pub(crate) struct Site {
    pub(crate) store: Store,
    child: Child,
    /// `http://ADDRESS:PORT`.
    pub(crate) url: String,
    /// May do everything, for all models.
    pub(crate) all: String,
    /// May hand over, for model `m`.
    pub(crate) drop: String,
    /// May fetch, for model `m`.
    pub(crate) fetch: String,
    /// May operate, for models that begin with `m`.
    pub(crate) operate: String,
    /// May do everything, for model `other`.
    pub(crate) other: String,
}

impl Site {
    /// A server with these roles on a store of its own.
    pub(crate) fn start(roles: &str) -> Self {
        Self::on(Store::new(), roles)
    }

    pub(crate) fn on(store: Store, roles: &str) -> Self {
        let token = |name: &str, roles: &[&str], model: &str| {
            let mut arguments = vec!["token", "new", name, "--file", "tokens.toml"];
            roles.iter().for_each(|role| arguments.extend(["--role", role]));
            if !model.is_empty() {
                arguments.extend(["--model", model]);
            }
            store.run(arguments).succeeded()["token"].as_str().unwrap().to_owned()
        };
        let every = ["drop", "fetch", "operate"];
        let (all, drop) = (token("everything", &every, ""), token("trainer", &["drop"], "m"));
        let fetch = token("host", &["fetch"], "m");
        let (operate, other) = (token("ops", &["operate"], "m*"), token("others", &every, "other"));
        // Where checkpoints may lie that are handed over.
        let sources = format!("[sources]\nallow = [{:?}]\n", store.folder.path());
        std::fs::write(store.folder.path().join("weighbridge.toml"), sources).unwrap();
        let mut command = store.command(["serve", "--roles", roles, "--tokens", "tokens.toml"]);
        command.args(["--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0", "--threads", "2"]);
        command.args(["--audit-log", "audit.jsonl"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut told = Vec::new();
        let url = loop {
            let line = lines.next().unwrap_or_else(|| panic!("it ended: {told:?}"));
            if let Some(url) = line.strip_prefix("API on ") {
                break url.to_owned();
            }
            told.push(line);
        };
        std::thread::spawn(move || lines.for_each(|line| println!("server: {line}")));
        Self { store, child, url, all, drop, fetch, operate, other }
    }

    /// Tells the server to stop, and waits until it has.
    pub(crate) fn stop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }

    /// A connection.
    pub(crate) fn channel(&self) -> Channel {
        Endpoint::from_shared(self.url.clone()).unwrap().connect_lazy()
    }

    pub(crate) fn publishing(&self) -> PublishingClient<Channel> {
        PublishingClient::new(self.channel())
    }

    pub(crate) fn operating(&self) -> OperatingClient<Channel> {
        OperatingClient::new(self.channel())
    }

    pub(crate) fn fleet(&self) -> FleetClient<Channel> {
        FleetClient::new(self.channel())
    }

    /// The lines of the audit log.
    pub(crate) fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.store.folder.path().join("audit.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// A checkpoint of a few bytes, another one for each step.
    pub(crate) fn checkpoint(&self, step: u64) -> PathBuf {
        let path = self.store.folder.path().join(format!("{step}.safetensors"));
        let header = format!(
            r#"{{"w":{{"dtype":"U8","shape":[8],"data_offsets":[0,8]}},"__metadata__":{{"n":"{step}"}}}}"#
        );
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(step.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Publishes such a checkpoint in the foreground; gives the snapshot.
    pub(crate) fn publish(&self, step: u64, more: &[&str]) -> String {
        let step_text = step.to_string();
        let arguments = [&["--step", step_text.as_str()], more].concat();
        let published = self.store.publish(&self.checkpoint(step), &arguments).succeeded();
        published["snapshot"].as_str().unwrap().to_owned()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client of plain HTTP.
pub(crate) fn http() -> reqwest::Client {
    // Another test may have been first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

/// A request by the bearer of `token`.
pub(crate) fn by<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let header = MetadataValue::try_from(format!("Bearer {token}")).unwrap();
    request.metadata_mut().insert("authorization", header);
    request
}

/// A checkpoint manifest, each step's of a run of its own, so that none gives way to another; gives its id too.
pub(crate) fn manifest(model: &str, step: u64, location: &std::path::Path) -> (String, Vec<u8>) {
    let id = weighbridge::clock::operation_id();
    let manifest = json!({
        "schema": "weighbridge.checkpoint/v1",
        "id": id, "model": model, "run": format!("r{step}"), "step": step,
        "created_at": "2026-11-29T16:10:04Z",
        "location": location,
    });
    (id, manifest.to_string().into_bytes())
}

/// The failure of what has to be refused with `code`: its message says something, its details have class and kind.
#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code) -> Status {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    let details = status.get_error_details();
    let info = details.error_info().unwrap_or_else(|| panic!("no details: {status:?}"));
    assert!(!status.message().is_empty() && !info.reason.is_empty() && info.domain == "weighbridge");
    status
}

/// The stable class of a refusal.
pub(crate) fn class(status: &Status) -> String {
    status.get_error_details().error_info().map(|info| info.reason.clone()).unwrap_or_default()
}

/// The field that a refusal names.
pub(crate) fn field(status: &Status) -> String {
    let details = status.get_error_details();
    let violations = details.bad_request().map(|bad| bad.field_violations.as_slice()).unwrap_or_default();
    violations.first().map(|violation| violation.field.clone()).unwrap_or_default()
}
