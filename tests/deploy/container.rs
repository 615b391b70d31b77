//! The image's build, which runs nowhere here: what it names is there, and what it copies is enough to build.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use crate::tools::{root, succeeds, text};

const FILE: &str = "deploy/Containerfile";

/// The instructions, each on one line.
fn instructions() -> Vec<(String, Vec<String>)> {
    let text = text(FILE).replace("\\\n", " ");
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let words = lines.map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    words.map(|mut words| (words.remove(0), words)).collect()
}

/// What is copied from the repository.
fn sources() -> Vec<String> {
    let copies = instructions().into_iter().filter(|(what, _)| what == "COPY").map(|(_, words)| words);
    let copies = copies.filter(|words| !words[0].starts_with("--from="));
    copies.flat_map(|mut words| words.drain(..words.len() - 1).collect::<Vec<_>>()).collect()
}

#[test]
fn images_are_pinned_and_the_compiler_is_the_workspaces() {
    let images: Vec<_> = instructions().into_iter().filter(|(what, _)| what == "FROM").collect();
    assert_eq!(images.len(), 2);
    for (_, words) in &images {
        let (_, tag) = words[0].split_once(':').unwrap_or_else(|| panic!("{words:?} has no tag"));
        assert!(tag.contains(|character: char| character.is_ascii_digit()), "{words:?}");
    }
    let manifest = text("Cargo.toml");
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap();
    assert_eq!(images[0].1[0], format!("rust:{}-slim-bookworm", version.trim_matches('"')));
}

#[test]
fn what_is_copied_is_let_in_and_is_a_whole_workspace() {
    let ignored = text(".dockerignore");
    let let_in: Vec<_> = ignored.lines().filter_map(|line| line.strip_prefix('!')).collect();
    let sources = sources();
    assert_eq!(let_in, sources, "{FILE} copies other things than .dockerignore lets in");
    let folder = tempfile::tempdir().unwrap();
    for source in &sources {
        let from = root().join(source);
        assert!(from.exists(), "{source} is not there");
        let to = folder.path().join(source);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        succeeds(Command::new("cp").arg("-r").arg(from).arg(to));
    }
    for left_out in ignored.lines().filter(|line| !line.starts_with(['!', '#', '*']) && !line.is_empty()) {
        std::fs::remove_dir_all(folder.path().join(left_out)).unwrap();
    }
    // That all targets of all members are there, and that the lock file is theirs.
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut metadata = Command::new(cargo);
    metadata.args(["metadata", "--locked", "--offline", "--no-deps", "--format-version=1"]);
    succeeds(metadata.current_dir(folder.path()));
    for source in sources.iter().filter(|source| *source != "tests") {
        assert_includes_what_is_there(&folder.path().join(source));
    }
}

/// Whatever files are compiled in, those of tests aside, are within what was copied.
fn assert_includes_what_is_there(copied: &Path) {
    let mut grep = Command::new("grep");
    grep.args(["-rHoE", "--include=*.rs", r#"include_(str|bytes)!\("[^"]+"\)"#]).arg(copied);
    let found = String::from_utf8(grep.output().unwrap().stdout).unwrap();
    for (file, included) in found.lines().map(|line| line.split_once(':').unwrap()) {
        let path = Path::new(file).parent().unwrap().join(included.split('"').nth(1).unwrap());
        assert!(included.contains("/tests/data/") || path.is_file(), "{file}: {included} is not copied");
    }
}

#[test]
fn the_image_leaves_the_store_to_the_configuration() {
    let variables = instructions().into_iter().filter(|(what, _)| what == "ENV");
    let names: Vec<_> = variables.flat_map(|(_, words)| words).collect();
    assert!(names.iter().any(|name| name.starts_with("WEIGHBRIDGE_SPOOL=")), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("WEIGHBRIDGE_STORE=")), "{names:?}");
}

#[test]
fn the_image_runs_as_nobody_special() {
    let user = instructions().into_iter().rfind(|(what, _)| what == "USER").unwrap().1;
    let (user, group) = user[0].split_once(':').unwrap();
    // Kubernetes can tell that it is not root by a number alone; the manifests say the same one.
    assert!(user.parse::<u32>().unwrap() > 0 && user == group);
    assert!(text("deploy/kubernetes/base/worker.yaml").contains(&format!("runAsUser: {user}\n")));
}

/// Whether `is-live.sh` says that a process is live that answers so.
fn is_live(answer: &'static str) -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let served = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        // All of it: what is not read when the connection ends takes the answer with it.
        let (mut asked, mut byte) = (Vec::new(), [0]);
        while !asked.ends_with(b"\r\n\r\n") && connection.read(&mut byte).unwrap() > 0 {
            asked.push(byte[0]);
        }
        connection.write_all(answer.as_bytes()).unwrap();
        String::from_utf8(asked).unwrap()
    });
    let status = Command::new(root().join("deploy/is-live.sh")).arg(port).status().unwrap();
    assert!(served.join().unwrap().starts_with("GET /live HTTP/1.1\r\n"));
    status.success()
}

#[test]
fn what_is_live_is_told_from_what_is_not() {
    assert!(is_live("HTTP/1.1 200 OK\r\n\r\n"));
    assert!(!is_live("HTTP/1.1 503 Service Unavailable\r\n\r\n"));
    assert!(!is_live(""));
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    assert!(!Command::new(root().join("deploy/is-live.sh")).arg(nobody).status().unwrap().success());
}
