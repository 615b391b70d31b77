//! The report, the signatures where somebody signs, then the manifest. With the manifest there is a snapshot, and
//! everything that it names is there.
//!
//! Before that the snapshot is claimed from `gc`, and only then is every chunk looked for: a chunk that was there when
//! it was to be written, and that nothing named, may have been collected since. It is made again.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::ids::{ChunkId, ReportDigest};
use weighbridge_schemas::report::Report;
use weighbridge_schemas::snapshot::{Chunk, SnapshotManifest};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::fetch::Progress;
use weighbridge_snapshots::retain::claims::{self, Claim};
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::{chunk, layout, manifest, sign};

use super::Budget;
use super::assemble::Piece;
use super::convert::{self, Described};
use super::plan::Plan;
use crate::clock;
use crate::error::Result;

/// Chunks that are looked for at once.
const CONCURRENCY: usize = 16;
/// How often chunks that are not there are made again.
const ROUNDS: usize = 3;

/// A snapshot that is about to be sealed, and what its chunks can be made of again.
#[derive(Debug)]
pub struct Sealing<'a> {
    /// Its manifest.
    pub manifest: &'a SnapshotManifest,
    /// Its validation report.
    pub report: &'a Report,
    /// The plan that it was made by.
    pub plan: &'a Arc<Plan>,
    /// The plan's pieces, stored.
    pub pieces: &'a [Piece],
    /// The chunks that describe its tensors.
    pub described: &'a Described,
    /// What making chunks may use.
    pub budget: Budget,
}

impl Sealing<'_> {
    /// Stores the report and the manifest, once every chunk that the manifest names has been found in the store, of the
    /// right size: a store that lost one and said nothing must not get as far as a channel. `gc` leaves the snapshot
    /// alone while the claim that is given back is valid.
    ///
    /// # Errors
    /// As the store fails; an integrity failure for a chunk that is not there, however often it is written.
    pub async fn seal(&self, root: &Root) -> Result<Claim> {
        let claim = claims::claim_sealing(root, self.manifest, &clock::operation_id()).await?;
        let mut rounds = 0;
        loop {
            let missing = self.missing(root).await?;
            let Some((first, _)) = missing.first_key_value() else { break };
            if rounds == ROUNDS {
                let key = layout::chunk(&self.manifest.model, first);
                let why =
                    "the chunk is missing from the store, which said that it had been written; publish again";
                return Err(StoreError::new(Class::Integrity, key, why).into());
            }
            rounds += 1;
            tracing::info!(
                chunks = missing.len(),
                "chunks that nothing named were collected; they are made again"
            );
            self.make_again(root, &missing).await?;
        }
        manifest::put_report(root, self.report).await?;
        if let Some(signers) = root.signers() {
            let digest = ReportDigest::of(&self.report.to_bytes());
            sign::put(root, self.manifest, self.report, digest, signers).await?;
        }
        // Making chunks again may have taken long: what nobody claims any more may be gone again.
        claim.check(root)?;
        manifest::put(root, self.manifest).await?;
        Ok(claim)
    }

    /// The manifest's chunks that are not in the store.
    async fn missing(&self, root: &Root) -> Result<BTreeMap<ChunkId, u64>> {
        let chunks = futures::stream::iter(self.manifest.chunks());
        let looks = chunks.map(|(id, size)| async move {
            let there = chunk::is_there(root, &self.manifest.model, Chunk { id, size }).await?;
            Ok::<_, StoreError>((!there).then_some((id, size)))
        });
        Ok(looks
            .buffer_unordered(CONCURRENCY)
            .try_filter_map(|found| async move { Ok(found) })
            .try_collect()
            .await?)
    }

    async fn make_again(&self, root: &Root, missing: &BTreeMap<ChunkId, u64>) -> Result<()> {
        let model = &self.manifest.model;
        let progress: Arc<dyn Progress> = Arc::new(());
        for (at, (chunk, _)) in self.pieces.iter().enumerate() {
            if !missing.contains_key(&chunk.id) {
                continue;
            }
            let made = convert::convert(root, model, self.plan, at..at + 1, self.budget, &progress).await?;
            if made.pieces.first().is_none_or(|(again, _)| again != chunk) {
                let why =
                    "it does not come out of the checkpoint again as it did; was the checkpoint changed?";
                return Err(StoreError::new(Class::Integrity, layout::chunk(model, &chunk.id), why).into());
            }
        }
        let mut describing = self.described.headers.iter().chain(&self.described.index);
        if describing.any(|chunk| missing.contains_key(&chunk.id)) {
            convert::describe(root, model, self.plan, self.budget).await?;
        }
        Ok(())
    }
}
