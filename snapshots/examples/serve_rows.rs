//! A whole server of embedding rows: it answers from the snapshot that `DIR/current` points at, and takes the next one
//! as soon as it has been fetched there; by others, or by itself, where it is told which channel to follow, and where.
//!
//! ```sh
//! cargo run --release -p weighbridge-snapshots --example serve_rows -- /srv/dlrm 127.0.0.1:7470
//! curl 'http://127.0.0.1:7470/?table=model.ebc.embedding_bags.t1.weight&row=17&row=4'
//! serve_rows /srv/dlrm 127.0.0.1:7470 dlrm@prod /srv/weighbridge/store             # it fetches, too: out of a store,
//! serve_rows /srv/dlrm 127.0.0.1:7470 dlrm@prod https://weighbridge.example.org:7461        # or by an API
//! ```
//!
//! It prints the address that it listens on, then what it serves. A request is one batch: all its rows are of one
//! snapshot, which the answer names. A row that was pruned counts as zeros. An API's token stands in the variable
//! `WEIGHBRIDGE_API_TOKEN`, and in `WEIGHBRIDGE_API_CA` a file of whose certificates one has signed the API's.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program, not a library")]

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::api::{self, Api};
use weighbridge_snapshots::bucket;
use weighbridge_snapshots::fetch::Limits;
use weighbridge_snapshots::follow::{Follower, Following, Hooks, Source};
use weighbridge_snapshots::pace::Pace;
use weighbridge_snapshots::reader::{Event, Options, Serving, Version};
use weighbridge_snapshots::root::{Absent, Durability, Root};
use weighbridge_snapshots::watch::{ApiWatch, StoreWatch, Watch};

/// Requests that are answered at once.
const THREADS: usize = 8;
/// Longest request line and headers, in bytes.
const REQUEST_BYTES: u64 = 64 << 10;
/// Most elements of an answer.
const ELEMENTS: usize = 1 << 20;
/// Memory that a fetch may take, and chunks that come at once.
const FETCH: (u64, usize) = (128 << 20, 8);
/// How often a store is asked for the channel's next entry.
const ASKED: Duration = Duration::from_secs(1);
/// How long a client may take.
const PATIENCE: Duration = Duration::from_secs(5);

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: serve_rows DIR [ADDRESS [MODEL@CHANNEL STORE|URL]]")?;
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:7470".to_owned());
    let followed = arguments.next();
    if let Some(followed) = &followed {
        let source = arguments.next().ok_or("where is it to be fetched from? STORE or URL")?;
        let (model, channel) = followed.split_once('@').ok_or("which channel? MODEL@CHANNEL")?;
        let runtime = tokio::runtime::Runtime::new()?;
        let follower =
            runtime.block_on(follower(Path::new(&folder), model.parse()?, channel.parse()?, source))?;
        std::thread::spawn(move || {
            let ended = runtime.block_on(follower.run(std::future::pending()));
            // It ends where the folder goes: whoever supervises this starts it anew.
            eprintln!("nothing is followed any more: {ended:?}");
            std::process::exit(1);
        });
    }

    let serving = Arc::new(first(Path::new(&folder), followed.is_some())?);
    let _watch = serving.watch(Duration::from_millis(100), |event| match event {
        Event::Swapped(swap) => println!("serving {}", swap.to),
        Event::Failed(error) => eprintln!("serving what was served before: {error}"),
    })?;
    let listener = TcpListener::bind(address)?;
    println!("listening on http://{}", listener.local_addr()?);
    println!("serving {}", serving.current().id());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let answered = listener.accept().and_then(|(stream, _)| answer(&serving, &stream));
                    answered.unwrap_or_else(|error| eprintln!("a request came to nothing: {error}"));
                }
            });
        }
    });
    Ok(())
}

/// Whoever keeps `folder` at what the channel points at, for as long as the process runs.
async fn follower(
    folder: &Path,
    model: ModelName,
    channel: ChannelName,
    from: String,
) -> weighbridge_snapshots::error::Result<Follower> {
    let following = Following {
        model: model.clone(),
        channel: channel.clone(),
        host: "serve_rows".to_owned(),
        keep: 2,
        hooks: Hooks { before: None, after: None, limit: PATIENCE },
        forget: false,
    };
    let opener = move || {
        let (model, channel) = (model.clone(), channel.clone());
        let (root, watch) = if from.starts_with("http://") || from.starts_with("https://") {
            // The token stands in WEIGHBRIDGE_API_TOKEN.
            let ca = std::env::var_os("WEIGHBRIDGE_API_CA").map(Into::into);
            let api = Arc::new(Api::new(&from, &api::Options { ca, ..api::Options::from_environment() })?);
            let root = Root::behind_api(&api, &bucket::Options::default())?;
            (root.clone(), Watch::Api(ApiWatch::new(&root, model, channel, None)))
        } else {
            let root = Root::open(&from, Absent::Refuse)?;
            (root.clone(), Watch::Store(StoreWatch::new(&root, model, channel, None, ASKED)))
        };
        let limits = Limits::new(&root, FETCH.0, FETCH.1, Pace::default());
        Ok(Source { watch, root, limits })
    };
    Follower::new(folder, Durability::Synced, following, Box::new(opener), Arc::new(|_| {})).await
}

/// The first version; waited for, where somebody here is about to fetch it.
fn first(folder: &Path, waits: bool) -> Result<Serving, Failure> {
    loop {
        match Serving::open(folder, Options::default()) {
            Err(_) if waits => std::thread::sleep(Duration::from_millis(50)),
            opened => return Ok(opened?),
        }
    }
}

/// Reads one request, answers it, and is done with the connection.
fn answer(serving: &Serving, mut stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = BufReader::new(stream).take(REQUEST_BYTES).lines();
    let line = request.next().transpose()?.unwrap_or_default();
    while request.next().transpose()?.is_some_and(|header| !header.is_empty()) {}
    let (status, body) = match rows(&serving.current(), &line) {
        Ok(rows) => ("200 OK", rows),
        Err(error) => ("400 Bad Request", json!({ "error": error.to_string() })),
    };
    let body = body.to_string();
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
}

/// The rows that a request line asks for, all out of `version`.
fn rows(version: &Version, line: &str) -> Result<Value, Failure> {
    let target =
        line.strip_prefix("GET ").and_then(|rest| rest.split(' ').next()).ok_or("only GET is answered")?;
    let target = url::Url::parse("http://host")?.join(target)?;
    let asked =
        |name: &'static str| target.query_pairs().filter(move |(key, _)| key == name).map(|(_, value)| value);
    let table = version.table(&asked("table").next().ok_or("?table=NAME&row=NUMBER&row=NUMBER...")?)?;
    let ids = asked("row").map(|row| row.parse()).collect::<Result<Vec<u64>, _>>()?;
    let length = ids.len().checked_mul(table.width()).filter(|length| *length <= ELEMENTS);
    let mut decoded = vec![0.0; length.ok_or("these are too many rows for one answer")?];
    let pruned = table.decode_rows(&ids, &mut decoded)?;
    let rows: Vec<&[f32]> = decoded.chunks_exact(table.width().max(1)).collect();
    Ok(json!({ "snapshot": version.id(), "step": version.manifest().step, "pruned": pruned, "rows": rows }))
}
