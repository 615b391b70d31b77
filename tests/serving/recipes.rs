//! The recipes of the documents, run as they stand there, each in a folder of its own.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;
use weighbridge_tests::packages::skipped;

use crate::binary;

/// After which a recipe hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Ports of the documents, each of which becomes a free one.
const PORTS: [&str; 4] = ["7460", "7461", "7462", "7470"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// What stands in blocks of shell between the line that names the recipe and the next end.
fn commands(document: &str, recipe: &str) -> String {
    let text = std::fs::read_to_string(root().join(document)).unwrap();
    let (_, rest) = text.split_once(&format!("<!-- recipe: {recipe} -->\n")).unwrap();
    let (text, _) = rest.split_once("<!-- end -->").unwrap();
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split_once("```").unwrap().0);
    blocks.collect()
}

/// A recipe that has been followed; what it started is killed in the end.
struct Followed {
    folder: TempDir,
    shell: Child,
}

impl Drop for Followed {
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.shell.id().cast_signed()) {
            // All of it may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.shell.wait();
    }
}

impl Followed {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    #[track_caller]
    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    #[track_caller]
    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.text(name)).unwrap()
    }
}

/// Runs a recipe's commands to their end; `None`, and a line that says so, where a program is missing here.
fn follow(document: &str, recipe: &str, programs: &[&str]) -> Option<Followed> {
    let search = std::env::var_os("PATH").unwrap();
    let has = |program: &&&str| std::env::split_paths(&search).any(|folder| folder.join(program).is_file());
    if let Some(program) = programs.iter().find(|program| !has(program)) {
        skipped(&format!("no {program} here, which a recipe of {document} takes"));
        return None;
    }
    // All are held at once, so that they differ.
    let free = PORTS.map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let mut commands = commands(document, recipe);
    for (port, free) in PORTS.iter().zip(&free) {
        commands = commands.replace(port, &free.local_addr().unwrap().port().to_string());
    }
    drop(free);
    let folder = tempfile::tempdir().unwrap();
    symlink(root().join("tests"), folder.path().join("tests")).unwrap();
    let said = File::create(folder.path().join("said")).unwrap();
    let own = [
        binary::path().parent().unwrap().to_owned(),
        binary::example("serve_rows").parent().unwrap().to_owned(),
    ];
    let mut shell = Command::new("bash");
    // The serve_rows of a recipe would be installed beside the binary.
    shell.args(["-euc", &commands]).process_group(0).current_dir(folder.path());
    shell.env("PATH", std::env::join_paths(own.into_iter().chain(std::env::split_paths(&search))).unwrap());
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("WEIGHBRIDGE_"))
    {
        shell.env_remove(name);
    }
    shell.stdin(Stdio::null()).stdout(said.try_clone().unwrap()).stderr(said);
    let mut followed = Followed { folder, shell: shell.spawn().unwrap() };
    let until = Instant::now() + PATIENCE;
    let status = loop {
        match followed.shell.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > until => panic!("{recipe} hangs: {}", followed.text("said")),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{recipe}: {status}: {}", followed.text("said"));
    Some(followed)
}

#[test]
fn the_api_answers_curl_as_its_reference_says() {
    let Some(followed) = follow("docs/api.md", "api", &["bash", "curl", "jq", "openssl"]) else { return };
    let resolved = followed.json("resolved.json");
    assert_eq!((&resolved["model"], &resolved["channel"]), (&"dlrm".into(), &"prod".into()));
    assert_eq!(resolved["entry"]["snapshot"], resolved["snapshot"]);
    let id = blake3::hash(followed.text("snapshot.json").as_bytes()).to_hex().to_string();
    assert_eq!(resolved["snapshot"], id.as_str());
    assert_eq!(std::fs::read(followed.path("begin")).unwrap().len(), 1024);
    let headers = followed.text("headers").to_lowercase();
    assert!(
        headers.contains(" 206") && headers.contains("cache-control: public, max-age=31536000, immutable")
    );
    let said = followed.text("said");
    assert!(said.contains("{\"entry\":{"), "{said}");
    let current = std::fs::read_link(followed.path("served/current")).unwrap();
    assert_eq!(current.file_name().unwrap().to_str(), Some(id.as_str()));
}

#[test]
fn a_host_by_a_shell_does_as_the_document_says() {
    let Some(followed) = follow("docs/serving.md", "shell", &["bash", "curl", "seq"]) else { return };
    let behind = followed.json("behind.json");
    assert_eq!((&behind["state"], &behind["serving"]["step"]), (&"behind".into(), &200.into()));
    assert_eq!(
        (&behind["wanted"]["step"], &behind["last_error"]["class"]),
        (&300.into(), &"hook_failed".into())
    );
    let why = behind["last_error"]["message"].as_str().unwrap();
    assert!(why.contains("the server gives no row of step 300"), "{why}");
    let fleet = followed.text("fleet");
    assert!(fleet.contains("dlrm@prod") && fleet.contains("hook_failed"), "{fleet}");
    let current = followed.json("current.json");
    assert_eq!((&current["serving"]["step"], &current["attempts"]), (&200.into(), &0.into()));
    assert_eq!(current["serving"]["snapshot"], behind["serving"]["snapshot"]);
    let link = std::fs::read_link(followed.path("dlrm/current")).unwrap();
    assert_eq!(link.file_name().unwrap().to_str(), current["serving"]["snapshot"].as_str());
    // Where no server answers (nothing listens at this proxy), only what is served first passes.
    let checked = |previous: &str| {
        let mut check = Command::new(followed.path("check.sh"));
        check.env("http_proxy", "http://127.0.0.1:1").env_remove("no_proxy").env_remove("NO_PROXY");
        check.env("WEIGHBRIDGE_PREVIOUS", previous).env("WEIGHBRIDGE_SNAPSHOT", "").stdout(Stdio::null());
        check.status().unwrap().code()
    };
    assert_eq!((checked(""), checked("the one before")), (Some(0), Some(1)));
}

#[test]
fn a_server_that_swaps_by_itself_does_as_the_document_says() {
    let Some(followed) = follow("docs/serving.md", "rust", &["bash", "curl"]) else { return };
    let row = followed.json("row");
    assert_eq!((&row["step"], row["rows"].as_array().unwrap().len()), (&100.into(), 2));
    let log = followed.text("rows.log");
    assert_eq!(log.lines().filter(|line| line.starts_with("serving ")).count(), 3, "{log}");
}
