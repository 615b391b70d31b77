//! From a channel's entry to the flipped link: many followers, each a process of its own, that hear of one small
//! snapshot after another, fetch it, sync it and swap to it.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use weighbridge_schemas::channel::Reason;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::{Channel, Move, Operation};
use weighbridge_snapshots::root::{Absent, Root};
use weighbridge_tests::lookups::Latencies;

use super::{From, House, MODEL, Running, Server};
use crate::Failure;

/// Hosts that follow.
const FOLLOWERS: usize = 20;
/// Snapshots that the channel moves to, for each round asked for.
const SWAPS: u32 = 10;
/// Rows and width of the one table.
const TABLE: (usize, usize) = (4096, 64);
/// How often links are looked at.
const LOOK: Duration = Duration::from_millis(1);
/// After which a follower has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A checkpoint whose every value is its step, so that nothing of it is the one before's.
fn checkpoint(folder: &Path, step: u64) -> Result<PathBuf, Failure> {
    let (rows, width) = TABLE;
    let path = folder.join("checkpoint.safetensors");
    #[expect(clippy::cast_precision_loss, reason = "some hundreds")]
    let values = (step as f32).to_le_bytes().repeat(rows * width);
    let view = TensorView::new(Dtype::F32, vec![rows, width], &values)?;
    std::fs::write(&path, safetensors::serialize([("bags.t.weight", view)], None)?)?;
    Ok(path)
}

/// Publishes `count` snapshots that are on no channel of anybody's.
fn publish(house: &House<'_>, count: u32) -> Result<Vec<SnapshotId>, Failure> {
    let policy = house.folder.join("policy.toml");
    std::fs::write(&policy, "schema = \"weighbridge.policy/v1\"\n[channel]\nname = \"made\"\n")?;
    let policy = policy.to_str().ok_or("the folder's name is not UTF-8")?;
    let publish = |step| house.publish(&checkpoint(&house.folder, step)?, step, &["--policy", policy]);
    (1..=u64::from(count)).map(publish).collect()
}

/// Moves the channel in this process, so that the moment is known.
async fn promote(root: &Root, snapshot: SnapshotId, step: u64) -> Result<(), Failure> {
    let (model, channel) = (MODEL.parse()?, "prod".parse()?);
    let time = Timestamp::from_nanoseconds(0);
    let operation = Operation { id: format!("{step}"), who: "load".to_owned(), when: time };
    let to = Move { snapshot, run: "r".parse()?, step, created_at: time, reason: Reason::Promote };
    Channel::new(root, &model, &channel).append(&operation, |_| Ok::<_, Infallible>(to.clone())).await?;
    Ok(())
}

fn points_at(folder: &Path, snapshot: &str) -> bool {
    std::fs::read_link(folder.join("current")).is_ok_and(|link| link.ends_with(snapshot))
}

/// Waits until every folder points at the snapshot; notes when each did, and gives when the last one did.
fn wait(
    folders: &[PathBuf],
    snapshot: SnapshotId,
    began: Instant,
    each: &mut Latencies,
) -> Result<Duration, Failure> {
    let name = snapshot.to_string();
    let mut left: Vec<_> = folders.iter().collect();
    while !left.is_empty() {
        left.retain(|folder| {
            let is_there = points_at(folder, &name);
            if is_there {
                each.record(began.elapsed());
            }
            !is_there
        });
        if began.elapsed() > PATIENCE {
            return Err(format!("{} followers do not come to {name}", left.len()).into());
        }
        std::thread::sleep(LOOK);
    }
    Ok(began.elapsed())
}

fn follow(house: &House<'_>, server: &Server, from: From, into: &Path) -> Result<Running, Failure> {
    let into = into.to_str().ok_or("the folder's name is not UTF-8")?;
    let mut command = from.command(house, server, &["fetch", "m@prod", "--follow", "--into", into]);
    command.env("WEIGHBRIDGE_LOG", "error");
    Ok(Running(command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn()?))
}

/// Measures, and gives a table.
pub(super) fn measure(house: &House<'_>, runs: u32) -> Result<String, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let count = runs * SWAPS;
    let mut snapshots = publish(house, 2 * count + 2)?.into_iter();
    let store = house.store();
    let root = Root::open(store.to_str().ok_or("the folder's name is not UTF-8")?, Absent::Refuse)?;
    let server = house.serve()?;
    let mut text = format!(
        "| from a channel's entry to the swap, {FOLLOWERS} followers | swaps | a follower: p50 ms | p99 ms | \
         longest ms | the last follower of a swap: p50 ms | longest ms |\n|---|---|---|---|---|---|---|\n"
    );
    let mut step = 0;
    for from in From::BOTH {
        let folders: Vec<_> =
            (0..FOLLOWERS).map(|number| house.folder.join(format!("{from:?}-{number}"))).collect();
        let (mut each, mut last) = (Latencies::default(), Latencies::default());
        let mut move_on = |each: &mut Latencies| {
            step += 1;
            let snapshot = snapshots.next().ok_or("there are no more snapshots")?;
            runtime.block_on(promote(&root, snapshot, step))?;
            wait(&folders, snapshot, Instant::now(), each)
        };
        let followers: Result<Vec<_>, _> =
            folders.iter().map(|into| follow(house, &server, from, into)).collect();
        let followers = followers?;
        // The first one counts for nothing: processes start, and streams are begun.
        move_on(&mut Latencies::default())?;
        for _ in 0..count {
            // Followers that ask now and then are not to be met at the same place each time.
            std::thread::sleep(Duration::from_millis(fastrand::u64(500..2500)));
            last.record(move_on(&mut each)?);
        }
        drop(followers);
        let [half, most] = [500_000, 990_000].map(|quantile| milliseconds(each.quantile(quantile)));
        text.push_str(&format!(
            "| by {} | {count} | {half} | {most} | {} | {} | {} |\n",
            from.label(),
            milliseconds(each.longest()),
            milliseconds(last.quantile(500_000)),
            milliseconds(last.longest())
        ));
    }
    Ok(text)
}

fn milliseconds(time: Duration) -> u128 {
    time.as_millis()
}
