//! All parts become one snapshot: assembled, judged, sealed. Then it is decided that the job goes on, its channel
//! moves, and its outcome is written.

use std::collections::VecDeque;

use futures::future::try_join_all;

use weighbridge_converter::statistics::Statistics;
use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::job::{Decided, Ended, JobPlan, JobRecord, Outcome, OutcomeSchema, Why};
use weighbridge_schemas::policy::Policy;
use weighbridge_schemas::report::{Outcome as Gated, Report};
use weighbridge_schemas::snapshot::Chunk;
use weighbridge_snapshots::channel::Channel;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::retain::claims::Claim;
use weighbridge_snapshots::root::Put;

use super::part::{plan_of, trouble, unwatched};
use super::{Stepped, Steps, Trouble, end, request, statistics};
use crate::clock;
use crate::error::Result;
use crate::job::convert::{self, Bytes};
use crate::job::plan::Plan;
use crate::job::promote::{self, Force};
use crate::job::seal::Sealing;
use crate::job::{Request, accept, assemble, judge};

/// How many entries of a channel are searched for the job's own, where it may have put one before.
const ENTRIES: usize = 256;
/// Part results that are read at once.
const RESULTS: usize = 4;
/// The largest count in a part's statistics that is believed: sums of them stay within 64 bits.
const MOST_COUNT: u64 = 1 << 45;

/// Makes a job's snapshot, and moves its channel.
pub(super) async fn finish(
    steps: &Steps,
    record: &JobRecord,
    policy: &Policy,
) -> std::result::Result<Stepped, Trouble> {
    let (model, id) = (&record.manifest.model, record.job());
    let job = Job::new(&steps.root, model, &id);
    let Some(planned) = job.plan().await? else {
        return Err(StoreError::new(Class::Integrity, &id, "the job's plan is gone from the store").into());
    };
    let plan = plan_of(steps, record, policy, &planned).await?;
    let (pieces, mut bytes) = results(&job, &planned, &plan).await?;
    let budget = steps.options.budget;
    let checked = accept::check(&plan, budget, &unwatched()).await;
    checked.map_err(|failure| trouble(steps, record, failure))?;
    let described = convert::describe(&steps.root, model, &plan, budget).await?;
    bytes += described.bytes;
    let request = request(record, policy)?;
    let (manifest, measured) = assemble::assemble(&request, &plan, &pieces, &described);
    let report = judge::judge(&request, &plan, &manifest, &measured);
    let (pieces, described) = (&pieces, &described);
    let sealing = Sealing { manifest: &manifest, report: &report, plan: &plan, pieces, described, budget };
    let claim = sealing.seal(&steps.root).await?;
    let settled = job.put_decision(&end::decision(steps, Decided::Proceed)).await?;
    if settled.ruling.decision != Decided::Proceed {
        end::carry_out(steps, record, &settled.ruling).await?;
        return Ok(Stepped::Done(0));
    }
    let (ended, entry) = if report.outcome == Gated::Rejected {
        (Ended::Quarantined, None)
    } else {
        put_on_channel(steps, record, &request, &plan, (report.snapshot, &claim), settled.put).await?
    };
    let outcome = Outcome {
        schema: OutcomeSchema::V1,
        outcome: ended,
        snapshot: Some(report.snapshot),
        sequence: entry.filter(|_| ended == Ended::Published).map(|entry| entry.sequence),
        by: None,
        error: (ended == Ended::Quarantined).then(|| rejected(&report)),
        bytes_stored: bytes.stored,
        bytes_reused: bytes.reused,
        who: steps.options.who.clone(),
        when: clock::now(),
    };
    steps.metrics.described(described.bytes);
    steps.plans.forget(&id);
    end::end(steps, record, &outcome).await?;
    Ok(Stepped::Done(0))
}

/// Moves the channel. Where the decision stood already, somebody may have got further than this: then the job's own
/// entry is looked for, since others may have moved the channel after it.
async fn put_on_channel(
    steps: &Steps,
    record: &JobRecord,
    request: &Request,
    plan: &Plan,
    (snapshot, claim): (SnapshotId, &Claim),
    decision: Put,
) -> Result<(Ended, Option<ChannelEntry>)> {
    if decision == Put::Present {
        let channel = Channel::new(&steps.root, &request.model, &request.channel);
        if let Some(own) = channel.entry_of(&request.operation, ENTRIES).await? {
            return Ok((Ended::Published, Some(own)));
        }
    }
    let force = if record.promote { Force::Promote } else { Force::No };
    promote::promote(&steps.root, request, plan, snapshot, claim, force).await
}

/// The results of all parts, in order, as pieces of the plan.
async fn results(
    job: &Job<'_>,
    planned: &JobPlan,
    plan: &Plan,
) -> Result<(Vec<(Chunk, Vec<Statistics>)>, Bytes)> {
    let mut pieces = Vec::with_capacity(plan.pieces.len());
    let mut bytes = Bytes::default();
    let parts = planned.parts.len() as u64;
    let mut read = VecDeque::new();
    for (number, range) in (0u64..).zip(&planned.parts) {
        if read.is_empty() {
            let next = (number..parts).take(RESULTS).map(|part| job.part(planned, part));
            read.extend(try_join_all(next).await?);
        }
        let wrong = |why: &str| StoreError::new(Class::Integrity, format!("part {number} of the job"), why);
        let result = read.pop_front().flatten().ok_or_else(|| wrong("its result is gone from the store"))?;
        let fits = result.fingerprint == planned.fingerprint
            && (range.first, range.count) == (pieces.len() as u64, result.chunks.len() as u64);
        if !fits {
            return Err(wrong("its result is not what the plan asks for").into());
        }
        plan.checkpoint.source.adopt(&result.digests)?;
        bytes += Bytes { stored: result.bytes_stored, reused: result.bytes_reused };
        for chunk in &result.chunks {
            let Some(piece) = plan.pieces.get(pieces.len()) else {
                return Err(wrong("its result names more chunks than there are").into());
            };
            let believed = chunk.chunk.size == piece.bytes
                && chunk.statistics.len() == piece.parts.len()
                && chunk.statistics.iter().all(|run| run.rows.max(run.elements) < MOST_COUNT);
            if !believed {
                return Err(wrong("its result is not what the plan asks for").into());
            }
            pieces.push((chunk.chunk, chunk.statistics.iter().map(statistics::from_document).collect()));
        }
    }
    if pieces.len() == plan.pieces.len() {
        return Ok((pieces, bytes));
    }
    let why = "the results of its parts do not add up to the snapshot";
    Err(StoreError::new(Class::Integrity, "the job", why).into())
}

/// Why a gate keeps a snapshot off its channel: the first finding, and how many more there are.
fn rejected(report: &Report) -> Why {
    let rejecting = report.gates.iter().filter(|gate| gate.outcome == Gated::Rejected);
    let mut findings = rejecting.flat_map(|gate| gate.findings.iter().map(move |finding| (gate, finding)));
    let first = findings.next().map(|(gate, finding)| {
        format!("{}: tensor {:?}: {}", gate.gate, finding.tensor.as_str(), finding.message)
    });
    let more = match findings.count() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let message = format!(
        "{}{more}; `weighbridge report {}@{}` tells all",
        first.unwrap_or_default(),
        report.model,
        report.snapshot
    );
    Why { kind: "permanent".to_owned(), class: crate::gates::REJECTED.to_owned(), message }
}
