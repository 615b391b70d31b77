//! From one channel to another, once a snapshot has stood the first one for long enough: what a model's policy says in
//! its section `[promotion]`. Done again, or by several at once, it does the same thing once: the entry's id follows
//! from the entry that was soaked. Who signs promotes what one of their own keys has signed, or one that they trust.

use std::time::Duration;

use weighbridge_schemas::channel::{Candidate, ChannelEntry, Decision, Reason, decide};
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::policy::{Policy, Promotion};
use weighbridge_schemas::report::Outcome as Gated;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::channel::{Appended, Channel, Move, Operation};
use weighbridge_snapshots::retain::claims;
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::{layout, manifest};

use crate::clock;
use crate::error::Result;
use crate::policies;

/// How many entries of a channel are searched for the snapshot: whether it was there before.
const ENTRIES: usize = 256;

/// A channel that was moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promoted {
    /// The model.
    pub model: ModelName,
    /// From which channel.
    pub from: ChannelName,
    /// Which channel was moved.
    pub to: ChannelName,
    /// Its entry.
    pub entry: ChannelEntry,
}

/// Carries out what is due, of all models. A model that fails keeps no other from it: it is told in the log.
///
/// # Errors
/// As listing the store's models fails.
pub async fn tick(root: &Root) -> Result<Vec<Promoted>> {
    let mut promoted = Vec::new();
    for model in catalog::models(root).await? {
        match of_model(root, &model).await {
            Ok(moved) => promoted.extend(moved),
            Err(error) => tracing::warn!(%model, %error, "its channels cannot be looked at"),
        }
    }
    Ok(promoted)
}

/// Carries out what is due of one model.
///
/// # Errors
/// As the store fails, or where the model's policy cannot be read.
pub async fn of_model(root: &Root, model: &ModelName) -> Result<Option<Promoted>> {
    let policy = policies::resolve(Some(root), model, None).await??.policy()?;
    let Some(promotion) = policy.promotion.clone() else { return Ok(None) };
    let from = policy.channel.name.clone();
    let moved = promote(root, model, &policy, &promotion).await?;
    Ok(moved.map(|entry| {
        tracing::info!(%model, %from, to = %promotion.to, snapshot = %entry.snapshot, "promoted after its soak");
        Promoted { model: model.clone(), from, to: promotion.to, entry }
    }))
}

async fn promote(
    root: &Root,
    model: &ModelName,
    policy: &Policy,
    promotion: &Promotion,
) -> Result<Option<ChannelEntry>> {
    let (from, to) = (&policy.channel.name, &promotion.to);
    // What is promoted is signed: nobody else's word decides what that is.
    let believing = root.believed().map_or_else(|| root.clone(), |trust| root.clone().trusting(trust));
    let (source, target) = (Channel::new(&believing, model, from), Channel::new(root, model, to));
    let Some(soaked) = source.latest().await? else { return Ok(None) };
    // Held, or rolled back: somebody is looking into it.
    if soaked.reason.holds() || !has_stood(root, model, from, &soaked, promotion).await? {
        return Ok(None);
    }
    let operation = Operation {
        id: format!("promotion of {} to {to}", soaked.id),
        who: format!("promotion from {from}"),
        when: clock::now(),
    };
    let candidate = Candidate { snapshot: soaked.snapshot, run: &soaked.run, step: soaked.step };
    let other_run = policy.channel.other_run;
    let moves = |latest: Option<&ChannelEntry>| decide(latest, candidate, other_run) == Decision::Move;
    if !moves(target.latest().await?.as_ref()) {
        return Ok(None);
    }
    // It goes there once: an operator who took it away again meant it.
    if target.log(ENTRIES).await?.iter().any(|entry| entry.snapshot == soaked.snapshot) {
        return Ok(None);
    }
    claims::claim(root, model, &soaked.snapshot, &clock::operation_id()).await?;
    manifest::get(&believing, model, &soaked.snapshot).await?;
    if manifest::report(&believing, model, &soaked.snapshot).await?.0.outcome == Gated::Rejected {
        return Ok(None);
    }
    let wanted = Move {
        snapshot: soaked.snapshot,
        run: soaked.run.clone(),
        step: soaked.step,
        created_at: soaked.created_at,
        reason: Reason::Promote,
    };
    let appended =
        target.append(&operation, |latest| if moves(latest) { Ok(wanted.clone()) } else { Err(()) });
    Ok(match appended.await? {
        Appended::Stands(entry) => Some(entry),
        Appended::Declined { .. } => None,
    })
}

/// Whether the entry was put so long ago, by the store's clock.
async fn has_stood(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    entry: &ChannelEntry,
    promotion: &Promotion,
) -> Result<bool> {
    let key = layout::channel_entry(model, channel, entry.sequence);
    let Some(found) = root.look(&key).await? else { return Ok(false) };
    let stood = root.now().nanoseconds().saturating_sub(found.modified.nanoseconds());
    Ok(Duration::from_nanos(stood) >= Duration::from_secs(u64::from(promotion.after_minutes) * 60))
}

#[cfg(test)]
mod tests {
    use weighbridge_snapshots::root::{Absent, Durability};

    use super::*;
    use crate::job::{self, Budget, Request};

    async fn publish(root: &Root, folder: &std::path::Path, step: u64) -> job::Published {
        let path = folder.join(format!("{step}.safetensors"));
        let header = format!(
            r#"{{"w":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}},"__metadata__":{{"n":"{step}"}}}}"#
        );
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.push(u8::try_from(step).unwrap());
        std::fs::write(&path, bytes).unwrap();
        let request = Request {
            checkpoint: weighbridge_converter::source::Location::Local(path),
            format: None,
            files: Vec::new(),
            created_at: None,
            model: "m".parse().unwrap(),
            run: "r".parse().unwrap(),
            step,
            policy: Policy::default(),
            channel: "canary".parse().unwrap(),
            operation: Operation { id: clock::operation_id(), who: "test".into(), when: clock::now() },
        };
        let progress: std::sync::Arc<dyn weighbridge_snapshots::fetch::Progress> = std::sync::Arc::new(());
        job::publish(root, &request, Budget { memory: 128 << 20, threads: 1 }, &progress).await.unwrap()
    }

    fn policy(minutes: u32) -> String {
        format!(
            "schema = 'weighbridge.policy/v1'\n[channel]\nname = 'canary'\n[promotion]\nto = 'prod'\n\
             after_minutes = {minutes}"
        )
    }

    #[tokio::test]
    async fn what_has_stood_the_canary_goes_on_once_and_not_past_an_operator() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("store");
        let root = Root::open_with(store.to_str().unwrap(), Absent::Create, Durability::Unsynced).unwrap();
        let (model, own) = ("m".parse().unwrap(), "default".parse().unwrap());
        let first = publish(&root, folder.path(), 1).await.snapshot;
        assert_eq!(tick(&root).await.unwrap(), [], "no policy says so");
        weighbridge_snapshots::policies::put(&root, &model, &own, &policy(60)).await.unwrap();
        assert_eq!(tick(&root).await.unwrap(), [], "it has not stood for an hour");
        weighbridge_snapshots::policies::put(&root, &model, &own, &policy(0)).await.unwrap();
        let promoted = tick(&root).await.unwrap();
        assert_eq!((promoted[0].entry.snapshot, promoted[0].entry.sequence), (first, 1));
        assert_eq!(tick(&root).await.unwrap(), [], "it has been done");

        let second = publish(&root, folder.path(), 2).await.snapshot;
        let prod = "prod".parse().unwrap();
        let channel = Channel::new(&root, &model, &prod);
        let operator = |reason: Reason, snapshot| {
            let (channel, run) = (channel.clone(), "r".parse().unwrap());
            async move {
                let wanted = Move { snapshot, run, step: 1, created_at: clock::now(), reason };
                let operation =
                    Operation { id: clock::operation_id(), who: "test".into(), when: clock::now() };
                channel.append(&operation, |_| Ok::<_, ()>(wanted.clone())).await.unwrap();
            }
        };
        operator(Reason::Hold, first).await;
        assert_eq!(tick(&root).await.unwrap(), [], "the channel is held");
        operator(Reason::Release, first).await;
        let both = tokio::join!(tick(&root), tick(&root));
        let moved: Vec<_> = [both.0.unwrap(), both.1.unwrap()].concat();
        assert!(moved.iter().all(|moved| moved.entry.snapshot == second && moved.entry.sequence == 4));
        assert_eq!(channel.latest().await.unwrap().unwrap().sequence, 4, "once, whoever does it");

        operator(Reason::Rollback, first).await;
        operator(Reason::Release, first).await;
        assert_eq!(tick(&root).await.unwrap(), [], "what an operator took back stays back");
        let canary = "canary".parse().unwrap();
        let channel = Channel::new(&root, &model, &canary);
        let wanted = Move {
            snapshot: second,
            run: "r".parse().unwrap(),
            step: 2,
            created_at: clock::now(),
            reason: Reason::Release,
        };
        let operation = Operation { id: clock::operation_id(), who: "test".into(), when: clock::now() };
        channel.append(&operation, |_| Ok::<_, ()>(wanted.clone())).await.unwrap();
        assert_eq!(tick(&root).await.unwrap(), [], "also where the canary has a new entry of it");
    }

    #[tokio::test]
    async fn who_signs_promotes_what_is_signed_by_them_or_by_whom_they_trust() {
        use weighbridge_snapshots::sign::{Signer, Signers, Trust, generate};

        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("store");
        let root = Root::open_with(store.to_str().unwrap(), Absent::Create, Durability::Unsynced).unwrap();
        let key = |name: &str| {
            let file = folder.path().join(name);
            let public = generate(&file).unwrap().key;
            (Signers::new(vec![Signer::read(&file).unwrap()]).unwrap(), Trust::new(vec![public]).unwrap())
        };
        let ((own, _), (other, trust)) = (key("own"), key("other"));
        let (own, other) = (root.clone().signing(own), root.clone().signing(other));
        let model = "m".parse().unwrap();
        weighbridge_snapshots::policies::put(&root, &model, &"default".parse().unwrap(), &policy(0))
            .await
            .unwrap();
        let refused = async |root: &Root| {
            assert_eq!(tick(root).await.unwrap(), [], "it is told in the log");
            of_model(root, &model).await.unwrap_err().exit
        };

        publish(&root, folder.path(), 1).await;
        assert_eq!(refused(&own).await, crate::error::Exit::Integrity, "nobody signed it");
        let first = publish(&other, folder.path(), 2).await.snapshot;
        assert_eq!(refused(&own).await, crate::error::Exit::Integrity, "somebody else did");
        let trusting = own.clone().trusting(trust);
        assert_eq!(tick(&trusting).await.unwrap()[0].entry.snapshot, first);
        let second = publish(&own, folder.path(), 3).await.snapshot;
        // The snapshot has to be signed too, not the entry alone.
        let envelopes = store.join(format!("models/m/snapshots/{second}.signatures"));
        let kept = std::fs::read(&envelopes).unwrap();
        std::fs::remove_file(&envelopes).unwrap();
        assert_eq!(refused(&own).await, crate::error::Exit::Integrity);
        std::fs::write(&envelopes, kept).unwrap();
        assert_eq!(tick(&own).await.unwrap()[0].entry.snapshot, second);
    }
}
