//! Commands that are run around a swap: what they say counts, whatever becomes of them.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::binary::Store;
use crate::follower::{Checkpoint, Host, serves, versions};

/// A store with a model, and a command that writes down what it is run for.
struct Scene {
    store: Store,
    checkpoint: Checkpoint,
}

impl Scene {
    fn new() -> Self {
        let store = Store::new();
        std::fs::create_dir(store.root()).unwrap();
        let checkpoint = Checkpoint::new(&store, &[4096]);
        Self { store, checkpoint }
    }

    fn publish(&mut self) -> String {
        self.checkpoint.change(..);
        self.checkpoint.publish(&self.store)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.store.folder.path().join(name)
    }

    /// A command that writes down its phase, its snapshot, and what `current` points at; and then does `more`.
    fn command(&self, name: &str, more: &str) -> String {
        let script = self.file(name);
        let log = self.file("log");
        let text = format!(
            "#!/bin/sh\necho \"$WEIGHBRIDGE_PHASE $WEIGHBRIDGE_SNAPSHOT $(basename $(readlink \
             $WEIGHBRIDGE_CURRENT || echo none)) $WEIGHBRIDGE_PREVIOUS\" >>{}\n\
             test -d $WEIGHBRIDGE_VERSION || exit 9\n{more}\n",
            log.display()
        );
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        script.to_str().unwrap().to_owned()
    }

    /// What was written down: phase, snapshot, what `current` pointed at, what was served before.
    fn log(&self) -> Vec<[String; 4]> {
        let text = std::fs::read_to_string(self.file("log")).unwrap_or_default();
        let fields = |line: &str| {
            let mut fields = line.split(' ').map(str::to_owned);
            std::array::from_fn(|_| fields.next().unwrap_or_default())
        };
        text.lines().map(fields).collect()
    }
}

/// A line of the log.
fn line(phase: &str, snapshot: &str, current: &str, previous: &str) -> [String; 4] {
    [phase, snapshot, current, previous].map(str::to_owned)
}

#[test]
fn a_command_does_not_have_what_its_follower_asks_with() {
    let mut scene = Scene::new();
    let first = scene.publish();
    let secrets = ["WEIGHBRIDGE_API_TOKEN", "AWS_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_SAS_TOKEN"];
    let tests = secrets.map(|name| format!("test -z \"${name}\" || exit 8\n")).concat();
    let after = scene.command("after", &format!("{tests}test \"$AWS_REGION\" = here"));
    let mut command = Host::command(&scene.store, &scene.store.served(), &["--exec", &after]);
    command.envs(secrets.map(|name| (name, "secret"))).env("AWS_REGION", "here");
    let mut host = Host::spawn(command, &scene.store.served());
    assert_eq!(host.until_current(&first)["attempts"], 0);
}

#[test]
fn a_command_that_says_no_keeps_the_old_version_until_it_says_yes() {
    let mut scene = Scene::new();
    let after = scene.command("after", &format!("test ! -e {}", scene.file("ill").display()));
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&first);
    assert_eq!(scene.log(), [line("after", &first, &first, "")]);

    std::fs::write(scene.file("ill"), "").unwrap();
    let second = scene.publish();
    let status = host.until("it was tried twice", |status| {
        status["attempts"].as_u64() >= Some(2) && status["state"] == "behind"
    });
    assert_eq!(status["last_error"]["class"], "hook_failed");
    assert_eq!(status["wanted"]["snapshot"], *second);
    let log = scene.log();
    let tries = log[1..].chunks_exact(2);
    assert!(tries.len() >= 2);
    for tried in tries {
        assert_eq!(tried[0], line("after", &second, &second, &first));
        assert_eq!(tried[1], line("restore", &first, &first, &second), "the server is told to go back");
    }
    std::fs::remove_file(scene.file("ill")).unwrap();
    host.until_current(&second);
    assert_eq!(*scene.log().last().unwrap(), line("after", &second, &second, &first));
    // People are told once, not each time.
    assert_eq!(host.said().matches("hook_failed").count(), 1, "{}", host.said());
}

#[test]
fn what_a_command_says_no_to_is_on_trial_and_not_put_live_again_and_again() {
    let mut scene = Scene::new();
    let go = scene.file("go");
    let ill = scene.file("ill");
    // What was served before is always well.
    let is_ill = format!("{{ test -e {} && test $WEIGHBRIDGE_PHASE = after; }} || exit 0", ill.display());
    let wait = format!("{is_ill}\nwhile test -e {}; do sleep 0.05; done\nexit 1", go.display());
    let after = scene.command("after", &wait);
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&first);
    for file in [&ill, &go] {
        std::fs::write(file, "").unwrap();
    }
    let second = scene.publish();
    let status = host.until("it is on trial", |status| status["state"] == "trying");
    assert_eq!(serves(&scene.store.served()).as_deref(), Some(second.as_str()));
    assert_eq!(
        (&status["serving"]["snapshot"], &status["wanted"]["snapshot"]),
        (&serde_json::json!(first), &serde_json::json!(second)),
        "what was served before counts until the command has said yes"
    );
    std::fs::remove_file(&go).unwrap();
    let log = scene.file("log");
    let tried = || std::fs::read_to_string(&log).unwrap().matches(&format!("after {second}")).count();
    host.until("it went back", |status| status["attempts"] == 1 && status["state"] == "behind");
    // It would have been tried some times by now, were it a failure like others.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!((tried(), serves(&scene.store.served()).as_deref()), (1, Some(first.as_str())));
    // A new entry is not waited with.
    std::fs::remove_file(&ill).unwrap();
    let third = scene.publish();
    host.until_current(&third);
}

#[test]
fn without_an_old_version_nothing_is_served_until_the_command_says_yes() {
    let mut scene = Scene::new();
    let after = scene.command("after", &format!("test -e {}", scene.file("well").display()));
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after, "--listen", "127.0.0.1:0"]);
    let status = host.until_behind("hook_failed");
    assert!(status["serving"].is_null() || status["serving"]["snapshot"] == *first, "{status}");
    host.until("nothing is served", |status| status["serving"].is_null());
    assert!(scene.log().iter().all(|line| line[0] == "after"), "there is nothing to go back to");
    std::fs::write(scene.file("well"), "").unwrap();
    host.until_current(&first);
}

#[test]
fn a_command_before_the_swap_that_says_no_changes_nothing() {
    let mut scene = Scene::new();
    let before = scene.command("before", &format!("test ! -e {}", scene.file("ill").display()));
    let after = scene.command("after", "");
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec-before", &before, "--exec", &after]);
    host.until_current(&first);
    std::fs::write(scene.file("ill"), "").unwrap();
    let second = scene.publish();
    host.until_behind("hook_failed");
    assert_eq!(serves(&host.into), Some(first.clone()));
    std::fs::remove_file(scene.file("ill")).unwrap();
    host.until_current(&second);
    let log = scene.log();
    assert_eq!(log[0], line("before", &first, "none", ""));
    assert_eq!(log[2], line("before", &second, &first, &first));
    assert_eq!(*log.last().unwrap(), line("after", &second, &second, &first));
    assert_eq!(log.iter().filter(|line| line[0] == "after").count(), 2);
}

#[test]
fn a_command_that_hangs_is_killed_with_all_that_it_started_and_tried_again() {
    let mut scene = Scene::new();
    let hang = format!(
        "if test -e {ill}; then (sleep 3; touch {mark}) & sleep 600; fi",
        ill = scene.file("ill").display(),
        mark = scene.file("mark").display()
    );
    let after = scene.command("after", &hang);
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after, "--exec-seconds", "1"]);
    host.until_current(&first);
    std::fs::write(scene.file("ill"), "").unwrap();
    let second = scene.publish();
    let status = host.until_behind("hook_failed");
    assert!(status["last_error"]["message"].as_str().unwrap().contains("longer than 1 s"), "{status}");
    std::fs::remove_file(scene.file("ill")).unwrap();
    host.until_current(&second);
    std::thread::sleep(Duration::from_secs(3));
    assert!(!scene.file("mark").try_exists().unwrap(), "what it started goes on");
}

#[test]
fn a_newer_version_takes_the_place_of_one_that_is_tried_in_vain() {
    let mut scene = Scene::new();
    let after = scene
        .command("after", &format!("test $WEIGHBRIDGE_STEP != 2 || exit 3 # {}", scene.file("x").display()));
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&first);
    scene.publish();
    host.until_behind("hook_failed");
    let third = scene.publish();
    host.until_current(&third);
    let last = scene.log().last().unwrap().clone();
    assert_eq!(last, line("after", &third, &third, &first), "the server never kept the second one");
}

/// Waits until the file is there.
fn until_there(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !path.try_exists().unwrap() {
        assert!(Instant::now() < deadline, "{}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_follower_that_dies_between_swap_and_command_runs_it_when_it_is_there_again() {
    let mut scene = Scene::new();
    let (ill, mark) = (scene.file("ill"), scene.file("mark"));
    // The one that is to die is this shell's parent.
    let die =
        format!("if test -e {}; then kill -9 $PPID; touch {}; exit 1; fi", ill.display(), mark.display());
    let script = scene.command("after", &die);
    let after = format!("exec {script}");
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&first);
    std::fs::write(&ill, "").unwrap();
    let second = scene.publish();
    until_there(&mark);
    host.wait();
    assert_eq!(serves(&host.into), Some(second.clone()), "it was swapped to");
    std::fs::remove_file(&ill).unwrap();
    let before = scene.log().len();
    // Also where the store is away.
    let (store, away) = (scene.store.root(), scene.file("away"));
    std::fs::rename(&store, &away).unwrap();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until("it serves what is there", |status| status["serving"]["snapshot"] == *second);
    let deadline = Instant::now() + Duration::from_secs(30);
    while scene.log().len() == before {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(scene.log()[before..], [line("after", &second, &second, &first)]);
    std::fs::rename(&away, &store).unwrap();
    host.until_current(&second);
    assert_eq!(scene.log().len(), before + 1, "it is not run once more");
    // A restart runs nothing.
    assert_eq!(host.terminate(), Some(0));
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&second);
    assert_eq!(scene.log().len(), before + 1);
}

#[test]
fn a_follower_that_dies_while_it_goes_back_goes_on_with_that() {
    let mut scene = Scene::new();
    let (ill, mark) = (scene.file("ill"), scene.file("mark"));
    let die = format!(
        "test -e {ill} || exit 0\nif test $WEIGHBRIDGE_PHASE = restore && ! test -e {mark}; then touch {mark}; \
         kill -9 $PPID; fi\ntest $WEIGHBRIDGE_PHASE = restore",
        ill = ill.display(),
        mark = mark.display()
    );
    let after = format!("exec {}", scene.command("after", &die));
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&first);
    std::fs::write(&ill, "").unwrap();
    let second = scene.publish();
    until_there(&mark);
    host.wait();
    assert_eq!(serves(&host.into), Some(first.clone()));
    let before = scene.log().len();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_behind("hook_failed");
    assert_eq!(scene.log()[before], line("restore", &first, &first, &second));
    std::fs::remove_file(&ill).unwrap();
    host.until_current(&second);
}

#[test]
fn a_follower_that_is_told_to_stop_ends_the_swap_that_it_is_at() {
    let mut scene = Scene::new();
    let mark = scene.file("mark");
    let after = scene.command(
        "after",
        &format!("touch {}; sleep 2; echo end >>{}", mark.display(), scene.file("end").display()),
    );
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    until_there(&mark);
    assert_eq!(host.terminate(), Some(0));
    assert!(scene.file("end").try_exists().unwrap(), "the command came to its end");
    assert_eq!(serves(&host.into), Some(first));
}

#[test]
fn what_is_gone_back_to_is_not_served_well_before_the_command_says_so() {
    let mut scene = Scene::new();
    let ill = scene.file("ill");
    let after = scene.command("after", &format!("test ! -e {}", ill.display()));
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&first);
    std::fs::write(&ill, "").unwrap();
    scene.publish();
    host.until_behind("hook_failed");
    scene.store.run(["rollback", "m"]).succeeded();
    let status = host.until("the first is wanted, and its command fails", |status| {
        status["wanted"]["snapshot"] == *first && status["attempts"].as_u64() >= Some(3)
    });
    assert_eq!((&status["state"], &status["last_error"]["class"]), (&"behind".into(), &"hook_failed".into()));
    // Who comes after knows it too.
    host.kill();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_behind("hook_failed");
    assert!(host.lines().iter().all(|line| line["state"] != "current"), "{:?}", host.lines());
    std::fs::remove_file(&ill).unwrap();
    host.until_current(&first);
    assert_eq!(scene.log().last().unwrap()[1], first);
}

#[test]
fn a_command_that_fails_for_what_was_fetched_again_in_place_is_tried_again() {
    let mut scene = Scene::new();
    let ill = scene.file("ill");
    let after = scene.command("after", &format!("test ! -e {}", ill.display()));
    let first = scene.publish();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until_current(&first);
    assert_eq!(host.terminate(), Some(0));
    let file = host.into.join("versions").join(&first).join("model.safetensors");
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, "damaged").unwrap();
    std::fs::write(&ill, "").unwrap();
    let mut host = Host::start(&scene.store, &["--exec", &after]);
    host.until("it was tried twice", |status| {
        status["attempts"].as_u64() >= Some(2) && status["last_error"]["class"] == "hook_failed"
    });
    assert_eq!(serves(&host.into), Some(first.clone()), "it is served meanwhile");
    std::fs::remove_file(&ill).unwrap();
    host.until_current(&first);
}

#[test]
fn versions_that_a_command_says_no_to_do_not_pile_up_and_failures_add_up() {
    for option in ["--exec", "--exec-before"] {
        let mut scene = Scene::new();
        let ill = scene.file("ill");
        let command = scene.command("command", &format!("test ! -e {}", ill.display()));
        let first = scene.publish();
        let mut host = Host::start(&scene.store, &[option, &command]);
        host.until_current(&first);
        std::fs::write(&ill, "").unwrap();
        let mut attempts = 0;
        for _ in 0..5 {
            let newest = scene.publish();
            let status = host.until("it is tried in vain", |status| {
                status["wanted"]["snapshot"] == *newest && status["attempts"].as_u64() > Some(attempts)
            });
            attempts = status["attempts"].as_u64().unwrap();
            let held = versions(&host.into);
            assert!(held.len() <= 3 && held.contains(&first), "{option}: {held:?}");
        }
        assert!(attempts >= 5, "{option}: {attempts}");
        std::fs::remove_file(&ill).unwrap();
        host.until("it is served at last", |status| status["state"] == "current" && status["attempts"] == 0);
    }
}

#[test]
fn a_folder_that_serves_another_model_is_refused() {
    let mut scene = Scene::new();
    let first = scene.publish();
    let checkpoint = scene.file("checkpoint.safetensors");
    let publish = ["publish", checkpoint.to_str().unwrap(), "--model", "other", "--step", "1"];
    scene.store.run(publish).succeeded();
    let mut host = Host::start(&scene.store, &[]);
    host.until_current(&first);
    assert_eq!(host.terminate(), Some(0));
    let into = host.into.to_str().unwrap().to_owned();
    for more in [&["--follow"][..], &[]] {
        let command = [&["fetch", "other", "--into", &into], more].concat();
        let run = scene.store.run(command);
        assert!(run.code == 1 && run.stderr.contains("another folder"), "{run:?}");
    }
    assert_eq!(serves(&host.into), Some(first.clone()));
    assert_eq!(versions(&host.into), [first]);
}
