//! Runs the built binary.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

/// The binary, built in the profile that these tests are built in.
pub(crate) fn path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build(["--bin", "weighbridge"]).join("weighbridge"))
}

/// An example of this name, built so too.
pub(crate) fn example(name: &str) -> PathBuf {
    build(["--example", name]).join("examples").join(name)
}

/// Builds what cargo is asked for, and gives the folder of the profile.
fn build(what: [&str; 2]) -> PathBuf {
    // target/PROFILE/deps/TEST-HASH
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    let (name, _) = test.file_name().unwrap().to_str().unwrap().rsplit_once('-').unwrap();
    // With the features that these tests are built with, so that nothing is compiled twice.
    build.args(["build", "--quiet", "--workspace", "--test", name]).args(what);
    build.arg("--target-dir").arg(profile.parent().unwrap());
    build.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
    if profile.ends_with("release") {
        build.arg("--release");
    }
    // What cargo tells a test of its package would have build scripts run again that look at it.
    for (name, _) in std::env::vars_os() {
        let told = name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"));
        if told {
            build.env_remove(name);
        }
    }
    assert!(build.status().unwrap().success(), "{what:?} does not build");
    profile.to_path_buf()
}

/// A run that has ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// The one JSON document on standard output.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The document of a run that has to succeed. It may have warned of nothing.
    #[track_caller]
    pub(crate) fn succeeded(&self) -> Value {
        assert_eq!(self.code, 0, "{self:?}");
        assert!(!self.stderr.contains("WARN") && !self.stderr.contains("ERROR"), "{self:?}");
        self.json()
    }

    /// The error's class, of a run that has to fail with `code`: one line for people, one object for programs.
    #[track_caller]
    pub(crate) fn failed(&self, code: i32) -> String {
        assert_eq!(self.code, code, "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        let lines = self.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(lines, 1, "{self:?}");
        let document = self.json();
        let error = &document["error"];
        assert!(error["message"].is_string() && error["kind"].is_string(), "{self:?}");
        error["class"].as_str().unwrap().to_owned()
    }
}

/// A folder with a store in it; or one from which a store elsewhere is used.
pub(crate) struct Store {
    pub(crate) folder: TempDir,
    /// Its URL, and the variables by which it is reached.
    elsewhere: Option<(String, BTreeMap<String, String>)>,
}

impl Store {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), elsewhere: None }
    }

    /// The store at this URL, which these variables let one use.
    pub(crate) fn elsewhere(url: String, variables: BTreeMap<String, String>) -> Self {
        Self { elsewhere: Some((url, variables)), ..Self::new() }
    }

    /// What `--store` is given.
    pub(crate) fn location(&self) -> OsString {
        self.elsewhere.as_ref().map_or_else(|| self.root().into_os_string(), |(url, _)| url.into())
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// The variables by which it is reached.
    pub(crate) fn variables(&self) -> BTreeMap<String, String> {
        self.elsewhere.as_ref().map(|(_, variables)| variables.clone()).unwrap_or_default()
    }

    /// Where tests fetch into.
    pub(crate) fn served(&self) -> PathBuf {
        self.folder.path().join("served")
    }

    /// The binary with `arguments`, this store, and `--json`.
    pub(crate) fn command<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = Command::new(path());
        command.args(arguments).arg("--json").arg("--store").arg(self.location());
        command.envs(self.variables());
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        for variable in ["WEIGHBRIDGE_STORE", "WEIGHBRIDGE_QUEUE", "WEIGHBRIDGE_CONFIG", "WEIGHBRIDGE_LOG"] {
            command.env_remove(variable);
        }
        command
    }

    pub(crate) fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Run {
        ended(self.command(arguments).output().unwrap())
    }

    /// `publish CHECKPOINT --model m` and what else is given.
    pub(crate) fn publish_command(&self, checkpoint: &Path, more: &[&str]) -> Command {
        let mut arguments =
            vec!["publish".as_ref(), checkpoint.as_os_str(), "--model".as_ref(), "m".as_ref()];
        arguments.extend(more.iter().map(OsStr::new));
        self.command(arguments)
    }

    pub(crate) fn publish(&self, checkpoint: &Path, more: &[&str]) -> Run {
        ended(self.publish_command(checkpoint, more).output().unwrap())
    }

    /// `fetch REFERENCE --into` [`Self::served`].
    pub(crate) fn fetch_command(&self, reference: &str) -> Command {
        self.command(["fetch".as_ref(), reference.as_ref(), "--into".as_ref(), self.served().as_os_str()])
    }

    pub(crate) fn fetch(&self, reference: &str) -> Run {
        ended(self.fetch_command(reference).output().unwrap())
    }

    /// A policy file with this text behind its `schema`.
    pub(crate) fn policy(&self, text: &str) -> PathBuf {
        let path = tempfile::Builder::new().suffix(".toml").tempfile_in(self.folder.path()).unwrap();
        let (_, path) = path.keep().unwrap();
        std::fs::write(&path, format!("schema = \"weighbridge.policy/v1\"\n{text}")).unwrap();
        path
    }

    /// As [`Self::objects`], without the claims that every publish leaves for a while.
    pub(crate) fn lasting_objects(&self, folder: &str) -> Vec<PathBuf> {
        let mut objects = self.objects(folder);
        objects.retain(|object| !object.components().any(|part| part.as_os_str() == "claims"));
        objects
    }

    /// Every file of the store's `folder`, relative to the store's root.
    pub(crate) fn objects(&self, folder: &str) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut folders = vec![self.root().join(folder)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { folders.push(path) } else { files.push(path) }
            }
        }
        files.sort();
        files
    }
}

pub(crate) fn ended(output: Output) -> Run {
    Run {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Starts a run that is waited for later.
pub(crate) fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for a run.
pub(crate) fn wait(child: Child) -> Run {
    ended(child.wait_with_output().unwrap())
}
