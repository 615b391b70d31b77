//! A whole server of embedding rows: it answers from the snapshot that `DIR/current` points at, and takes the next one
//! as soon as it has been fetched there.
//!
//! ```sh
//! cargo run --release -p weighbridge-snapshots --example serve_rows -- /srv/dlrm 127.0.0.1:7470
//! curl 'http://127.0.0.1:7470/?table=model.ebc.embedding_bags.t1.weight&row=17&row=4'
//! ```
//!
//! It prints the address that it listens on, then what it serves. A request is one batch: all its rows are of one
//! snapshot, which the answer names. A row that was pruned counts as zeros.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program, not a library")]

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use weighbridge_snapshots::reader::{Event, Options, Serving, Version};

/// Requests that are answered at once.
const THREADS: usize = 8;
/// Longest request line and headers, in bytes.
const REQUEST_BYTES: u64 = 64 << 10;
/// Most elements of an answer.
const ELEMENTS: usize = 1 << 20;
/// How long a client may take.
const PATIENCE: Duration = Duration::from_secs(5);

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: serve_rows DIR [ADDRESS]")?;
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:7470".to_owned());

    let serving = Arc::new(Serving::open(Path::new(&folder), Options::default())?);
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
