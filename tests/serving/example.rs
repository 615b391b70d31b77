//! The example of a server: it answers rows, and takes the next snapshot while it runs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

use crate::binary::{self, Store};
use crate::numbered;

/// A server that is killed in the end.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server over `store`'s fetched folder: its address, and what it prints.
fn serve(store: &Store) -> (Server, String, BufReader<ChildStdout>) {
    let mut server = Command::new(binary::example("serve_rows"));
    server.arg(store.served()).arg("127.0.0.1:0").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = Server(server.spawn().unwrap());
    let mut printed = BufReader::new(server.0.stdout.take().unwrap());
    let line = line(&mut printed);
    (server, line.strip_prefix("listening on http://").unwrap().to_owned(), printed)
}

fn line(printed: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    printed.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn get(address: &str, target: &str) -> (String, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {target} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), serde_json::from_str(body).unwrap())
}

#[test]
fn the_example_serves_rows_and_swaps_while_it_runs() {
    let store = Store::new();
    let policy = numbered::policy(&store);
    let first = numbered::publish(&store, &policy, 1);
    store.fetch("m").succeeded();
    let (_server, address, mut printed) = serve(&store);
    assert_eq!(line(&mut printed), format!("serving {first}"));
    for table in numbered::TABLES {
        let (status, answer) = get(&address, &format!("/?table={table}&row=0&row=60"));
        assert_eq!((status.as_str(), &answer["snapshot"]), ("HTTP/1.1 200 OK", &first.as_str().into()));
        assert_eq!(
            answer["rows"],
            serde_json::json!([vec![1.0; numbered::WIDTH], vec![1.0; numbered::WIDTH]])
        );
    }
    for wrong in [
        "/?table=absent&row=0",
        "/?table=bags.kept.weight&row=61",
        "/?row=1",
        "/?table=bags.kept.weight&row=x",
    ] {
        let (status, answer) = get(&address, wrong);
        assert!(status.contains(" 400 ") && answer["error"].is_string(), "{wrong}: {answer}");
    }
    let second = numbered::publish(&store, &policy, 2);
    store.fetch("m").succeeded();
    assert_eq!(line(&mut printed), format!("serving {second}"));
    let (_, answer) = get(&address, "/?table=bags%2Ecoded.weight&row=7");
    assert_eq!((&answer["step"], &answer["rows"][0][3]), (&2.into(), &2.0.into()));
    // Back again, by the snapshot's id.
    store.fetch(&format!("m@{first}")).succeeded();
    assert_eq!(line(&mut printed), format!("serving {first}"));
    assert_eq!(get(&address, "/?table=bags.kept.weight&row=7").1["snapshot"], first);
}
