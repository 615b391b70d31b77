//! The API, asked by the standard gRPC library of another language: `tests/interop/client.py` by Python's grpcio.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use weighbridge_tests::certificates::Certificates;
use weighbridge_tests::packages::installed;

use crate::binary::{Store, ended};
use crate::fixtures::torchrec;

/// What the client takes, from PyPI.
const PACKAGES: [&str; 6] = [
    "grpcio==1.85.1",
    "grpcio-tools==1.85.1",
    "grpcio-health-checking==1.85.1",
    "grpcio-reflection==1.85.1",
    "protobuf==7.36.2",
    "blake3==1.0.11",
];

/// A server that is killed in the end.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves the API over `store`, and publishes what it is handed; with where it answers.
fn serve(store: &Store, certificates: &Certificates, tokens: &Path) -> (Server, String) {
    let queue = format!("embedded:{}", store.folder.path().join("queue").display());
    let mut serve = store.command(["serve", "--roles", "worker,api", "--queue", &queue]);
    serve
        .args(["--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0", "--no-sync", "--tokens"])
        .arg(tokens);
    serve.arg("--tls-certificate").arg(&certificates.server).arg("--tls-key").arg(&certificates.server_key);
    let mut server = Server(serve.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut said = BufReader::new(server.0.stderr.take().unwrap());
    let mut line = String::new();
    let address = loop {
        line.clear();
        assert_ne!(said.read_line(&mut line).unwrap(), 0, "it ended");
        if let Some(address) = line.trim_end().strip_prefix("API on https://127.0.0.1:") {
            break format!("localhost:{address}");
        }
    };
    // What it says further is of no interest, but has to go somewhere.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    (server, address)
}

#[test]
fn pythons_grpc_goes_from_a_checkpoint_to_rows() {
    let packages = installed("grpcio==1.85.1", |folder| {
        let mut install = Command::new("python3");
        install.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target"]);
        install.arg(folder).args(PACKAGES);
        install
    });
    let Some(packages) = packages else { return };
    let store = Store::new();
    let folder = store.folder.path();
    let certificates = Certificates::make(folder, "nobody");
    let (tokens, token) = (folder.join("tokens.toml"), folder.join("token"));
    let made =
        store.run(["token", "new", "python", "--role", "drop", "--role", "fetch", "--file", "tokens.toml"]);
    std::fs::write(&token, made.succeeded()["token"].as_str().unwrap()).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    // Where checkpoints may lie that are handed over.
    let sources = format!("[sources]\nallow = [{:?}]\n", torchrec().parent().unwrap());
    std::fs::write(folder.join("weighbridge.toml"), sources).unwrap();
    let mut client = Command::new("python3");
    client
        .arg(root.join("tests/interop/client.py"))
        .env("PYTHONPATH", &packages)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    client.arg("--ca").arg(&certificates.authority).arg("--token-file").arg(&token).args(["--model", "m"]);
    client.arg("--examples").arg(root.join("docs/api.md"));
    let (_server, address) = serve(&store, &certificates, &tokens);
    client.args(["--address", &address]);
    let manifest = serde_json::json!({
        "schema": "weighbridge.checkpoint/v1", "id": "3f0c8a52-6a1e-4a57-9d0e-0d3c0f4b7a11",
        "model": "m", "run": "r", "step": 100, "created_at": "2026-11-29T12:00:00Z", "location": torchrec(),
    });
    std::fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    client.arg("--manifest").arg(folder.join("manifest.json"));
    let run = ended(client.output().unwrap());
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("tables looked up"), "{run:?}");
    assert!(!run.stdout.contains(" 0 tables"), "{run:?}");
}
