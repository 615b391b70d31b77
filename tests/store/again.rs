//! This program, run again: processes that use a store by the library, as they are told line by line.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use axum::body::Bytes;
use futures::future::join_all;
use object_store::path::Path as Key;
use serde_json::{Value, json};
use weighbridge_schemas::channel::Reason;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::bucket::Options;
use weighbridge_snapshots::channel::{Appended, Channel, Move, Operation};
use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::root::{Absent, Durability, Put, Root};

/// The variable by which a process learns that it is such a one: where the store lies, and for how many seconds it
/// is patient.
const TOLD: &str = "WEIGHBRIDGE_STORE_TOLD";
/// What stands before an answer; the test's harness writes to the same output.
const ANSWER: &str = "ANSWER ";

/// A process that does to a store what it is told.
pub(crate) struct Again {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Again {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Again {
    pub(crate) fn start(location: &str, variables: &BTreeMap<String, String>, patience: Duration) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "again::again", "--nocapture"]).envs(variables);
        command.env(TOLD, json!([location, patience.as_secs()]).to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, orders, answers: BufReader::new(answers) }
    }

    /// Tells it what to do.
    pub(crate) fn order(&mut self, order: &Value) {
        writeln!(self.orders, "{order}").unwrap();
    }

    /// Waits for what came of it.
    pub(crate) fn answer(&mut self) -> Value {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "it has ended");
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return serde_json::from_str(answer).unwrap();
            }
        }
    }

    pub(crate) fn ask(&mut self, order: &Value) -> Value {
        self.order(order);
        self.answer()
    }
}

/// Not a test, but such a process.
#[test]
fn again() {
    let Ok(told) = std::env::var(TOLD) else { return };
    let (location, patience): (String, u64) = serde_json::from_str(&told).unwrap();
    let options = Options { patience: Duration::from_secs(patience), ..Options::default() };
    let root = Root::open_as(&location, Absent::Create, Durability::Synced, &options).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for line in std::io::stdin().lines() {
        let order: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let answer = runtime.block_on(done(&root, &order));
        let mut output = std::io::stdout().lock();
        writeln!(output, "{ANSWER}{answer}").unwrap();
        output.flush().unwrap();
    }
}

fn failed(error: &StoreError) -> Value {
    json!({ "class": format!("{:?}", error.class()), "error": error.to_string() })
}

async fn done(root: &Root, order: &Value) -> Value {
    let text = |field: &str| order[field].as_str().unwrap().to_owned();
    let key = || Key::from(text("key"));
    match order["do"].as_str().unwrap() {
        // Puts the same bytes under each of the keys at once: whether it wrote them.
        "create" => {
            let bytes = Bytes::from(text("bytes"));
            let keys = order["keys"].as_array().unwrap().iter().map(|key| Key::from(key.as_str().unwrap()));
            let puts = keys.map(|key| {
                let bytes = bytes.clone();
                async move {
                    match root.put_if_absent(&key, bytes).await {
                        Ok(put) => json!(put == Put::Written),
                        Err(error) => failed(&error),
                    }
                }
            });
            join_all(puts).await.into()
        }
        "put" => {
            let bytes = Bytes::from(vec![7; usize::try_from(order["bytes"].as_u64().unwrap()).unwrap()]);
            root.put_advice(&key(), bytes).await.map_or_else(|error| failed(&error), |()| json!("put"))
        }
        "get" => match root.get(&key(), 1 << 30).await {
            Ok(bytes) => json!(bytes.map(|bytes| bytes.len())),
            Err(error) => failed(&error),
        },
        // Ends what writes left unfinished: how many there were.
        "abandon" => match root.unfinished(Duration::ZERO).await {
            Ok(found) => {
                let mut ended = 0;
                for one in &found {
                    ended += u64::from(root.abandon(one).await.is_ok());
                }
                json!(ended)
            }
            Err(error) => failed(&error),
        },
        "append" => append(root, &text("id")).await,
        other => panic!("{other}"),
    }
}

/// Appends an entry to the channel `m@prod`: its number.
async fn append(root: &Root, id: &str) -> Value {
    let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
    let channel = Channel::new(root, &model, &name);
    let when = Timestamp::from_nanoseconds(0);
    let operation = Operation { id: id.to_owned(), who: "test".to_owned(), when };
    let decide = |_: Option<&_>| {
        let snapshot = SnapshotId::of(id.as_bytes());
        let run = "r".parse().unwrap();
        Ok::<_, Infallible>(Move { snapshot, run, step: 1, created_at: when, reason: Reason::Promote })
    };
    match channel.append(&operation, decide).await {
        Ok(Appended::Stands(entry)) => json!(entry.sequence),
        Ok(Appended::Declined { why, .. }) => match why {},
        Err(error) => failed(&error),
    }
}
