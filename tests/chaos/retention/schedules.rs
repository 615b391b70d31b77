//! The real code under chosen interleavings: several operations at once, of which one is let go on at a time, at every
//! request to the store, by a seed. Some of them crash. `WEIGHBRIDGE_SCHEDULES=N` tries seeds 0 to N.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fastrand::Rng;
use object_store::path::Path as Key;

use weighbridge::error::Failure;
use weighbridge::job::{self, Budget, Request as Publish};
use weighbridge::sources;
use weighbridge_schemas::channel::Reason;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::policy::{Policy, Retention};
use weighbridge_schemas::retention::GcProcess;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::{Channel, Move, Operation};
use weighbridge_snapshots::error::{Class, Result, StoreError};
use weighbridge_snapshots::fetch::{Limits, Progress};
use weighbridge_snapshots::pace::Pace;
use weighbridge_snapshots::retain::{self, HEEDED, Options, claims, pins};
use weighbridge_snapshots::root::{Absent, Durability, Intercept, Request, Root};
use weighbridge_snapshots::{catalog, layout, manifest, verify};
use weighbridge_tests::tables::{Pattern, Table, safetensors};

use crate::house::MODEL;

/// Seeds that are tried in any case.
const SEEDS: u64 = 24;
/// Rounds of a schedule; in each, some operations go on at once.
const ROUNDS: usize = 5;
/// Entries of a channel whose snapshots are kept.
const HISTORY: u32 = 2;

/// Lets one request at a time go on.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    tickets: Vec<u64>,
    granted: Option<u64>,
    busy: bool,
    over: bool,
}

impl Gate {
    fn turn(&self) {
        let mut state = self.state.lock().unwrap();
        let ticket = state.next;
        state.next += 1;
        state.tickets.push(ticket);
        self.changed.notify_all();
        while state.granted != Some(ticket) {
            state = self.changed.wait(state).unwrap();
        }
        state.granted = None;
        state.tickets.retain(|other| *other != ticket);
    }

    fn done(&self) {
        self.state.lock().unwrap().busy = false;
        self.changed.notify_all();
    }

    /// Chooses who goes on, until it is over.
    fn choose(&self, mut random: Rng) {
        loop {
            // Whoever is about to ask may come as well.
            std::thread::sleep(Duration::from_micros(50));
            let mut state = self.state.lock().unwrap();
            if state.over {
                return;
            }
            if state.tickets.is_empty() || state.granted.is_some() {
                drop(self.changed.wait_timeout(state, Duration::from_millis(5)).unwrap());
                continue;
            }
            state.granted = Some(state.tickets[random.usize(..state.tickets.len())]);
            state.busy = true;
            self.changed.notify_all();
            // A request that fails does not say that it is done.
            let until = Duration::from_millis(2);
            drop(self.changed.wait_timeout_while(state, until, |state| state.busy).unwrap());
        }
    }
}

/// One operation's way to the store.
#[derive(Debug)]
struct Actor {
    gate: Arc<Gate>,
    /// The request at which it crashes, and whether that is done.
    crash: Option<(u64, bool)>,
    requests: AtomicU64,
    crashing: AtomicBool,
    crashed: AtomicBool,
    claims: Mutex<Vec<Key>>,
}

impl Actor {
    fn crash(&self, request: &Request) -> Result<()> {
        self.crashed.store(true, Ordering::SeqCst);
        Err(StoreError::new(Class::Unreachable, &request.key, "a crash was asked for"))
    }
}

impl Intercept for Actor {
    fn before(&self, request: &Request) -> Result<()> {
        // Of the 256 folders of chunks most are empty.
        if request.name == "list" && request.key.as_ref().contains("/chunks/") {
            return Ok(());
        }
        self.gate.turn();
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        let now = self.crash.is_some_and(|(at, _)| number == at);
        if self.crashed.load(Ordering::SeqCst) || now && self.crash.is_some_and(|(_, done)| !done) {
            return self.crash(request);
        }
        if now {
            self.crashing.store(true, Ordering::SeqCst);
        }
        if request.name == "put_if_absent" && request.key.as_ref().contains("/claims/") {
            self.claims.lock().unwrap().push(request.key.clone());
        }
        Ok(())
    }

    fn after(&self, request: &Request) -> Result<()> {
        self.gate.done();
        if self.crashed.load(Ordering::SeqCst) || self.crashing.load(Ordering::SeqCst) {
            return self.crash(request);
        }
        Ok(())
    }
}

/// Numbers of processes, and those that have crashed.
static PROCESSES: AtomicU32 = AtomicU32::new(1);
static DEAD: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn is_there(process: &GcProcess) -> Option<bool> {
    Some(!DEAD.lock().unwrap().contains(&process.number))
}

fn options(number: u32, claims: Duration) -> Options {
    Options {
        retention: Retention {
            keep_last: Some(0),
            keep_history: HISTORY,
            grace_hours: 0,
            ..Retention::default()
        },
        grace: Duration::ZERO,
        hold: Duration::from_secs(600),
        claims,
        memory: 1 << 20,
        holder: number.to_string(),
        process: Some(GcProcess { boot: "b".into(), namespace: "n".into(), number, started: 1 }),
        is_there,
        who: format!("gc {number}"),
    }
}

struct Quiet;

impl Progress for Quiet {
    fn start(&self, _bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
}

#[derive(Debug, Clone)]
enum Do {
    Publish { content: u64, step: u64, channel: &'static str },
    Gc,
    Move { id: SnapshotId, channel: &'static str, reason: Reason },
    Pin { id: SnapshotId, pinned: bool },
}

fn model() -> ModelName {
    MODEL.parse().unwrap()
}

fn channel(name: &str) -> ChannelName {
    name.parse().unwrap()
}

fn operation(number: u64) -> Operation {
    Operation { id: format!("operation-{number}"), who: "test".into(), when: Timestamp::from_nanoseconds(0) }
}

impl Do {
    fn by_chance(random: &mut Rng, known: &[SnapshotId]) -> Self {
        let channel = if random.u8(..3) == 0 { "canary" } else { "prod" };
        match (random.u8(..10), known.is_empty()) {
            (0..4, _) | (_, true) => {
                Self::Publish { content: random.u64(..3), step: random.u64(..4), channel }
            }
            (4, _) => Self::Pin { id: *random.choice(known).unwrap(), pinned: false },
            (5, _) => Self::Pin { id: *random.choice(known).unwrap(), pinned: true },
            (6, _) => Self::Move { id: *random.choice(known).unwrap(), channel, reason: Reason::Promote },
            (7, _) => Self::Move { id: *random.choice(known).unwrap(), channel, reason: Reason::Rollback },
            _ => Self::Gc,
        }
    }

    async fn run(&self, root: &Root, folder: &Path, number: u64) -> std::result::Result<(), Failure> {
        let model = model();
        match self {
            Self::Publish { content, step, channel: name } => {
                let request = Publish {
                    checkpoint: sources::locate(checkpoint(folder, *content).as_os_str()).unwrap(),
                    format: None,
                    files: Vec::new(),
                    created_at: Some(Timestamp::from_nanoseconds(0)),
                    model,
                    run: "r".parse().unwrap(),
                    step: *step,
                    policy: Policy::parse("schema = 'weighbridge.policy/v1'").unwrap(),
                    channel: channel(name),
                    operation: operation(number),
                };
                let budget = Budget { memory: 256 << 20, threads: 1 };
                let progress: Arc<dyn Progress> = Arc::new(Quiet);
                job::publish(root, &request, budget, &progress).await.map(drop)
            }
            Self::Gc => {
                let process = PROCESSES.fetch_add(1, Ordering::SeqCst);
                let collected =
                    retain::collect(root, &model, &options(process, HEEDED), &|_| (), &Quiet).await;
                DEAD.lock().unwrap().insert(process);
                Ok(collected.map(drop)?)
            }
            // As the command line does it.
            Self::Move { id, channel: name, reason } => {
                let claim = claims::claim(root, &model, id, &format!("move-{number}")).await?;
                let found = manifest::get(root, &model, id).await?;
                claim.check(root)?;
                let wanted = Move {
                    snapshot: *id,
                    run: found.run,
                    step: found.step,
                    created_at: Timestamp::from_nanoseconds(0),
                    reason: *reason,
                };
                let name = channel(name);
                let log = Channel::new(root, &model, &name);
                log.append(&operation(number), |_| Ok::<_, Infallible>(wanted.clone())).await?;
                Ok(())
            }
            Self::Pin { id, pinned } => {
                pins::set(root, &model, id, *pinned, "", &operation(number)).await?;
                Ok(())
            }
        }
    }

    /// Whether it may fail so though it has not crashed.
    fn may_fail(&self, failure: &Failure) -> bool {
        match self {
            Self::Publish { .. } => false,
            Self::Gc => failure.class == "conflict",
            Self::Move { .. } | Self::Pin { .. } => failure.class == "not_found",
        }
    }
}

fn checkpoint(folder: &Path, content: u64) -> PathBuf {
    folder.join(format!("{content}.safetensors"))
}

fn open(folder: &Path) -> Root {
    let place = folder.join("store");
    Root::open_with(place.to_str().unwrap(), Absent::Create, Durability::Unsynced).unwrap()
}

/// Does an operation as if it were a process of its own; says whether it crashed, and how it ended else. What it
/// claimed is heeded no more once it has ended.
fn attempt(
    what: &Do,
    folder: &Path,
    gate: &Arc<Gate>,
    number: u64,
    crash: Option<(u64, bool)>,
) -> (bool, std::result::Result<(), Failure>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let actor = Arc::new(Actor {
        gate: Arc::clone(gate),
        crash,
        requests: AtomicU64::default(),
        crashing: AtomicBool::default(),
        crashed: AtomicBool::default(),
        claims: Mutex::default(),
    });
    let root = open(folder).behind(actor.clone());
    let done = runtime.block_on(what.run(&root, folder, number));
    let keys = std::mem::take(&mut *actor.claims.lock().unwrap());
    runtime.block_on(open(folder).delete(&keys)).unwrap();
    (actor.crashed.load(Ordering::SeqCst), done)
}

/// An operation that has to succeed, unless it crashes.
fn act(what: &Do, folder: &Path, gate: &Arc<Gate>, number: u64, crash: Option<(u64, bool)>) {
    let (crashed, done) = attempt(what, folder, gate, number, crash);
    if crashed {
        if matches!(what, Do::Gc) {
            // Somebody may wait for it: it is run again.
            act(what, folder, gate, number, None);
        }
    } else if let Err(failure) = done {
        assert!(what.may_fail(&failure), "{what:?}: {failure:?}");
    }
}

/// What is there is whole; and so is what channels and pins point at. Gives the snapshots that are to be kept.
async fn judge(root: &Root) -> BTreeSet<SnapshotId> {
    let model = model();
    let mut kept = pins::list(root, &model).await.unwrap();
    for name in catalog::channels(root, &model).await.unwrap() {
        let log = Channel::new(root, &model, &name).log(8 * HISTORY as usize).await.unwrap();
        let mut newest = BTreeSet::new();
        for entry in log {
            if newest.len() < HISTORY as usize {
                newest.insert(entry.snapshot);
            }
        }
        kept.append(&mut newest);
    }
    let all: BTreeSet<_> = catalog::snapshots(root, &model).await.unwrap().into_iter().collect();
    let limits = Limits::new(root, 64 << 20, 4, Pace::default());
    for id in kept.union(&all) {
        let verified = verify::snapshot(root, &model, id, None, &limits, &()).await.unwrap();
        assert!(verified.problems.is_empty(), "{id}: {:?}", verified.problems);
        manifest::report(root, &model, id).await.unwrap();
    }
    kept
}

/// After a last run alone, with nobody's claims, the store holds what is reachable and nothing else.
async fn judge_end(root: &Root) {
    let model = model();
    let number = PROCESSES.fetch_add(1, Ordering::SeqCst);
    let last = options(number, Duration::ZERO);
    let told = Mutex::new(BTreeSet::new());
    let tell = |key: &str| told.lock().unwrap().extend([key.to_owned()]);
    retain::preview(root, &model, &last, &tell).await.unwrap();
    let keys = |root: Root| async move {
        let keys = root.keys(&layout::models(), None).await.unwrap();
        keys.into_iter().map(|key| key.to_string()).collect::<BTreeSet<_>>()
    };
    let before = keys(root.clone()).await;
    retain::collect(root, &model, &last, &|_| (), &Quiet).await.unwrap();
    let after = keys(root.clone()).await;
    let notes = layout::gc(&model).to_string();
    let gone: BTreeSet<_> =
        before.difference(&after).filter(|key| !key.starts_with(&notes)).cloned().collect();
    assert_eq!(*told.lock().unwrap(), gone, "a dry run tells what a real one deletes");

    let mut expected = BTreeSet::new();
    for id in judge(root).await {
        let found = manifest::get(root, &model, &id).await.unwrap();
        expected.insert(layout::snapshot(&model, &id).to_string());
        expected.insert(layout::report(&model, &id, 1).to_string());
        expected.extend(found.chunks().keys().map(|chunk| layout::chunk(&model, chunk).to_string()));
    }
    let logs =
        [layout::channels(&model), layout::gc(&model), layout::pins(&model)].map(|key| key.to_string());
    let found: BTreeSet<_> =
        after.into_iter().filter(|key| !logs.iter().any(|log| key.starts_with(log))).collect();
    assert_eq!(found, expected);
}

fn schedule(seed: u64) {
    let mut random = Rng::with_seed(seed);
    let folder = tempfile::tempdir().unwrap();
    for content in 0..3 {
        // The second has a tensor of its own and one of the first's.
        let names = [format!("a{}", content / 2), format!("b{content}")];
        let pattern = Pattern::new();
        let tables: Vec<_> = names.iter().map(|name| Table::dense(name, 8, 8 + content, &pattern)).collect();
        safetensors(&checkpoint(folder.path(), content), &tables).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let root = open(folder.path());
    let mut known = Vec::new();
    let mut number = 0;
    for _ in 0..ROUNDS {
        let gate = Arc::new(Gate::default());
        let chooser = std::thread::spawn({
            let (gate, random) = (Arc::clone(&gate), random.fork());
            move || gate.choose(random)
        });
        std::thread::scope(|scope| {
            for place in 0..random.usize(2..4) {
                let what =
                    if place == 0 && random.bool() { Do::Gc } else { Do::by_chance(&mut random, &known) };
                let crash = (random.u8(..3) == 0).then(|| (random.u64(..60), random.bool()));
                number += 1;
                let (number, gate, folder) = (number, &gate, folder.path());
                scope.spawn(move || act(&what, folder, gate, number, crash));
            }
        });
        gate.state.lock().unwrap().over = true;
        chooser.join().unwrap();
        runtime.block_on(judge(&root));
        known.extend(runtime.block_on(catalog::snapshots(&root, &model())).unwrap());
    }
    runtime.block_on(judge_end(&root));
}

#[test]
fn whatever_the_schedule_what_is_reachable_is_whole_and_nothing_else_is_left() {
    let seeds = std::env::var("WEIGHBRIDGE_SCHEDULES").map_or(SEEDS, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        let done = std::panic::catch_unwind(|| schedule(seed));
        assert!(done.is_ok(), "seed {seed}");
    }
}

/// A run of gc crashes before and after every request that it makes; the next one leaves what it would have left.
#[test]
fn crashed_at_every_request_gc_is_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let pattern = Pattern::new();
    for content in 0..3 {
        let tables = [Table::dense("t", 8, 8 + content, &pattern)];
        safetensors(&checkpoint(folder.path(), content), &tables).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let gate = Arc::new(Gate::default());
    let chooser = std::thread::spawn({
        let gate = Arc::clone(&gate);
        move || gate.choose(Rng::with_seed(0))
    });
    let mut crashes = 0;
    for number in 0..1000 {
        let mut reached = false;
        for done in [false, true] {
            for content in 0..3 {
                let publish = Do::Publish { content, step: content, channel: "prod" };
                act(&publish, folder.path(), &gate, 10_000 * number + content + u64::from(done) * 100, None);
            }
            let (crashed, _) = attempt(&Do::Gc, folder.path(), &gate, number, Some((number, done)));
            reached |= crashed;
            crashes += u64::from(crashed);
            runtime.block_on(judge_end(&open(folder.path())));
        }
        if !reached {
            break;
        }
    }
    gate.state.lock().unwrap().over = true;
    chooser.join().unwrap();
    println!("{crashes} crashes");
    assert!(crashes > 40, "{crashes}");
}
