//! The gRPC service `Snapshots`.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::unfold;
use futures::{Stream, StreamExt};
use object_store::path::Path as Key;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::layout::Content;
use weighbridge_snapshots::{catalog, layout, manifest};

use super::answers::Refusal;
use super::events::{Event, Follower};
use super::hub::Entry;
use super::objects::{Object, PIECE};
use super::proto;
use super::proto::snapshots_server::Snapshots;
use super::proto::watch_channel_response::Event as Told;
use super::requests::{self, Range};
use super::rows;
use super::shared::{Shared, allowed, caller, connection};
use super::tokens::Role;
use crate::clock;

/// Who may see which snapshots there are: whoever moves channels has to know what to move them to.
const LOOKERS: [Role; 2] = [Role::Fetch, Role::Operate];

/// The service.
#[derive(Debug)]
pub struct Service(pub Arc<Shared>);

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Snapshots for Service {
    async fn resolve(
        &self,
        request: Request<proto::ResolveRequest>,
    ) -> Result<Response<proto::ResolveResponse>, Status> {
        let reference = requests::reference(&request.get_ref().model, &request.get_ref().at)?;
        allowed(request.extensions(), &LOOKERS, &reference.model)?;
        let resolved = self.0.resolve(&reference).await?;
        let entry = resolved.entry.map(|(name, entry)| told(&name, &entry));
        Ok(Response::new(proto::ResolveResponse { snapshot: resolved.snapshot.to_string(), entry }))
    }

    type GetManifestStream = Answers<proto::GetManifestResponse>;

    async fn get_manifest(
        &self,
        request: Request<proto::GetManifestRequest>,
    ) -> Result<Response<Self::GetManifestStream>, Status> {
        let model = requests::model(&request.get_ref().model)?;
        let id = requests::snapshot(&request.get_ref().snapshot)?;
        let caller = allowed(request.extensions(), &[Role::Fetch], &model)?;
        let (key, content) = (layout::snapshot(&model, &id), Some(Content::Manifest(id)));
        let share = self.0.objects.share(caller.name());
        let size = self.0.objects.size(&key, content, &share).await.map_err(Refusal::from)?;
        let size = size.ok_or_else(|| Refusal::from(absent(&key)))?;
        let pieces = Reading::of(&self.0, Object { key, content, size, end: size, share }, 0).pieces();
        let answers = pieces.map(move |piece| Ok(proto::GetManifestResponse { data: piece?.1, size }));
        Ok(Response::new(answers.boxed()))
    }

    async fn list_models(
        &self,
        request: Request<proto::ListModelsRequest>,
    ) -> Result<Response<proto::ListModelsResponse>, Status> {
        let caller = caller(request.extensions())?;
        if !LOOKERS.iter().any(|&role| caller.has(role)) {
            return Err(Refusal::forbidden("the token may not: it takes role fetch or operate").into());
        }
        let request = request.into_inner();
        let most = requests::page_size(request.page_size, 100, 1000)?;
        let models = catalog::models(self.0.objects.root()).await.map_err(Refusal::from)?;
        let seen = models.iter().filter(|model| caller.sees(model)).map(ToString::to_string);
        let (models, next_page_token) = page(seen, &request.page_token, most);
        Ok(Response::new(proto::ListModelsResponse { models, next_page_token }))
    }

    async fn list_snapshots(
        &self,
        request: Request<proto::ListSnapshotsRequest>,
    ) -> Result<Response<proto::ListSnapshotsResponse>, Status> {
        let model = requests::model(&request.get_ref().model)?;
        allowed(request.extensions(), &LOOKERS, &model)?;
        let request = request.into_inner();
        let most = requests::page_size(request.page_size, 20, 100)?;
        let mut ids = catalog::snapshots(self.0.objects.root(), &model).await.map_err(Refusal::from)?;
        ids.sort_unstable();
        let (ids, next_page_token) = page(ids.iter().map(ToString::to_string), &request.page_token, most);
        let mut snapshots = Vec::with_capacity(ids.len());
        for id in ids {
            let id = requests::snapshot(&id)?;
            snapshots.push(self.described(&model, id).await?);
        }
        Ok(Response::new(proto::ListSnapshotsResponse { snapshots, next_page_token }))
    }

    async fn list_channels(
        &self,
        request: Request<proto::ListChannelsRequest>,
    ) -> Result<Response<proto::ListChannelsResponse>, Status> {
        let model = requests::model(&request.get_ref().model)?;
        allowed(request.extensions(), &LOOKERS, &model)?;
        let request = request.into_inner();
        let most = requests::page_size(request.page_size, 100, 1000)?;
        let names = catalog::channels(self.0.objects.root(), &model).await.map_err(Refusal::from)?;
        let (names, next_page_token) = page(names.iter().map(ToString::to_string), &request.page_token, most);
        let (mut channels, mut damaged) = (Vec::with_capacity(names.len()), Vec::new());
        for name in names {
            let name = requests::channel(&name)?;
            match self.0.newest(&model, &name).await {
                Ok(entry) => channels.extend(entry.map(|entry| told(&name, &entry))),
                Err(refusal) if refusal.is_damage() => damaged.push(name.to_string()),
                Err(refusal) => return Err(refusal.into()),
            }
        }
        Ok(Response::new(proto::ListChannelsResponse { channels, next_page_token, damaged }))
    }

    type WatchChannelStream = Answers<proto::WatchChannelResponse>;

    async fn watch_channel(
        &self,
        request: Request<proto::WatchChannelRequest>,
    ) -> Result<Response<Self::WatchChannelStream>, Status> {
        let model = requests::model(&request.get_ref().model)?;
        let name = requests::channel(&request.get_ref().channel)?;
        let caller = allowed(request.extensions(), &[Role::Fetch], &model)?;
        let state = self.0.hub.follow_anew(&model, &name)?;
        let known = (caller, Arc::clone(&self.0.gate));
        let (after, going) = (request.get_ref().after, self.0.figures.watch());
        let follower = Follower::new(state, model, known, connection(request.extensions()), after, going);
        let answers = follower.events().map(move |event| {
            let event = match event? {
                Event::Entry(entry) => Told::Entry(told(&name, &entry)),
                Event::Heartbeat(stale) => Told::Heartbeat(proto::Heartbeat {
                    now: Some(moment(clock::now())),
                    stale: stale.map(|why| why.to_string()).unwrap_or_default(),
                }),
            };
            Ok(proto::WatchChannelResponse { event: Some(event) })
        });
        Ok(Response::new(answers.boxed()))
    }

    type ReadChunksStream = Answers<proto::ReadChunksResponse>;

    async fn read_chunks(
        &self,
        request: Request<proto::ReadChunksRequest>,
    ) -> Result<Response<Self::ReadChunksStream>, Status> {
        let model = requests::model(&request.get_ref().model)?;
        let caller = allowed(request.extensions(), &[Role::Fetch], &model)?;
        let ranges = requests::ranges(&request.get_ref().chunks)?;
        let (shared, share) = (Arc::clone(&self.0), self.0.objects.share(caller.name()));
        let reads = futures::stream::iter((0u32..).zip(ranges)).flat_map(move |(index, range)| {
            read(Arc::clone(&shared), Arc::clone(&share), &model, range)
                .map(move |piece| {
                    let (offset, data) = piece?;
                    Ok(proto::ReadChunksResponse { index, offset, data })
                })
                .boxed()
        });
        // What follows a failure would be taken for what was asked for.
        let mut failed = false;
        let answers = reads.take_while(move |piece: &Result<_, Status>| {
            let goes_on = !failed;
            failed = piece.is_err();
            std::future::ready(goes_on)
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn look_up_rows(
        &self,
        request: Request<proto::LookUpRowsRequest>,
    ) -> Result<Response<proto::LookUpRowsResponse>, Status> {
        let model = requests::model(&request.get_ref().model)?;
        allowed(request.extensions(), &[Role::Fetch], &model)?;
        let asked = requests::look_up(request.into_inner())?;
        let resolved = self.0.resolve(&asked.reference).await?;
        let manifest = self.0.objects.manifest(&model, &resolved.snapshot).await.map_err(Refusal::from)?;
        let _place = self.0.objects.look_up().await;
        let rows = rows::look_up(&self.0.objects, &model, &manifest, &asked).await?;
        self.0.figures.sends(rows.data.len());
        Ok(Response::new(proto::LookUpRowsResponse {
            snapshot: resolved.snapshot.to_string(),
            sequence: resolved.entry.map_or(0, |(_, entry)| entry.entry.sequence),
            width: rows.width,
            row_bytes: rows.row_bytes,
            data: Bytes::from(rows.data),
            encoding: rows.form.encoding.as_str().to_owned(),
            layout: rows.form.layout.as_str().to_owned(),
            pruned: rows.pruned,
        }))
    }
}

impl Service {
    /// What a snapshot is, as far as it can be read.
    async fn described(&self, model: &ModelName, id: SnapshotId) -> Result<proto::Snapshot, Refusal> {
        let mut snapshot = proto::Snapshot { id: id.to_string(), ..proto::Snapshot::default() };
        match self.0.objects.manifest(model, &id).await {
            Ok(found) => {
                snapshot.run = found.run.to_string();
                (snapshot.step, snapshot.bytes) = (found.step, found.bytes());
                snapshot.tensors = found.tensors.len() as u64;
            }
            Err(error) if matches!(error.class(), Class::Integrity | Class::NotFound) => {
                snapshot.damage = error.to_string();
                return Ok(snapshot);
            }
            Err(error) => return Err(error.into()),
        }
        match manifest::report(self.0.objects.root(), model, &id).await {
            Ok((report, _)) => report.outcome.as_str().clone_into(&mut snapshot.gates),
            Err(error) if error.class() == Class::Integrity => snapshot.damage = error.to_string(),
            Err(error) => return Err(error.into()),
        }
        Ok(snapshot)
    }
}

fn absent(key: &Key) -> StoreError {
    StoreError::new(
        Class::NotFound,
        key,
        "the store has no such object; what named it may have been collected",
    )
}

/// The bytes of a chunk that are asked for.
fn read(
    shared: Arc<Shared>,
    share: Arc<Semaphore>,
    model: &ModelName,
    range: Range,
) -> impl Stream<Item = Result<(u64, Bytes), Status>> + Send + use<> {
    let (key, content) = (layout::chunk(model, &range.chunk), Some(Content::Chunk(range.chunk)));
    let begun = async move {
        let size = shared.objects.size(&key, content, &share).await.map_err(Refusal::from)?;
        let size = size.ok_or_else(|| Refusal::from(absent(&key)))?;
        if range.offset > size {
            let why = format!("chunks: {key} has {size} bytes, and byte {} is asked for", range.offset);
            return Err(Status::from(Refusal::bad_request(why)));
        }
        let end = range.length.map_or(size, |length| size.min(range.offset + length));
        Ok(Reading::of(&shared, Object { key, content, size, end, share }, range.offset).pieces())
    };
    futures::stream::once(begun).flat_map(|begun| match begun {
        Ok(pieces) => pieces.boxed(),
        Err(status) => futures::stream::once(std::future::ready(Err(status))).boxed(),
    })
}

/// An object that is being sent.
pub(super) struct Reading {
    shared: Arc<Shared>,
    object: Object,
    from: u64,
    /// Of an object that is read whole: what has come of it so far.
    hasher: Option<blake3::Hasher>,
}

impl Reading {
    pub(super) fn of(shared: &Arc<Shared>, object: Object, from: u64) -> Self {
        // What comes out of the cache was looked at on its way in.
        let is_cached =
            shared.objects.root().is_bucket() && matches!(object.content, Some(Content::Chunk(_)));
        let is_whole = from == 0 && object.end == object.size && object.content.is_some() && !is_cached;
        Self { shared: Arc::clone(shared), object, from, hasher: is_whole.then(blake3::Hasher::new) }
    }

    /// Whether the piece, with all before it, is what the object's name says; that is known at its end.
    fn is_right(&mut self, piece: &[u8]) -> bool {
        let Some(hasher) = &mut self.hasher else { return true };
        hasher.update(piece);
        let is_last = self.from + piece.len() as u64 >= self.object.end;
        !is_last || self.object.content.is_none_or(|content| content.is_hash(&hasher.finalize()))
    }

    /// Its pieces, each with where it begins: read when they are asked for, so that a slow reader takes one at a time.
    pub(super) fn pieces(self) -> impl Stream<Item = Result<(u64, Bytes), Status>> + Send {
        unfold(self, |mut reading| async move {
            let begin = reading.from;
            if begin >= reading.object.end {
                return None;
            }
            let failure = match reading.shared.objects.piece(&reading.object, begin).await {
                // The last piece of what is wrong is kept back: nobody takes it for whole, nor keeps it.
                Ok(Some(piece)) if !piece.is_empty() && piece.len() <= PIECE && !reading.is_right(&piece) => {
                    let why = "its bytes do not have the hash that is its name";
                    StoreError::new(Class::Integrity, &reading.object.key, why)
                }
                Ok(Some(piece)) if !piece.is_empty() && piece.len() <= PIECE => {
                    reading.shared.figures.sends(piece.len());
                    reading.from += piece.len() as u64;
                    return Some((Ok((begin, piece)), reading));
                }
                Ok(_) => absent(&reading.object.key),
                Err(error) => error,
            };
            reading.from = reading.object.end;
            Some((Err(Refusal::from(failure).into()), reading))
        })
    }
}

/// Of sorted names those behind `token`, at most `most`, and the token for the rest.
pub(super) fn page(names: impl Iterator<Item = String>, token: &str, most: usize) -> (Vec<String>, String) {
    let mut names = names.filter(|name| token.is_empty() || name.as_str() > token);
    let page: Vec<_> = names.by_ref().take(most).collect();
    let next = if names.next().is_some() { page.last().cloned().unwrap_or_default() } else { String::new() };
    (page, next)
}

pub(super) fn moment(time: Timestamp) -> prost_types::Timestamp {
    let nanoseconds = time.nanoseconds();
    prost_types::Timestamp {
        seconds: i64::try_from(nanoseconds / 1_000_000_000).unwrap_or(i64::MAX),
        nanos: i32::try_from(nanoseconds % 1_000_000_000).unwrap_or(0),
    }
}

fn told(channel: &ChannelName, entry: &Entry) -> proto::ChannelEntry {
    entry_of(channel, &entry.entry, entry.bytes.clone())
}

/// A channel's entry, and its stored bytes.
pub(super) fn entry_of(channel: &ChannelName, entry: &ChannelEntry, document: Bytes) -> proto::ChannelEntry {
    proto::ChannelEntry {
        channel: channel.to_string(),
        sequence: entry.sequence,
        id: entry.id.to_string(),
        snapshot: entry.snapshot.to_string(),
        previous: entry.previous.map(|id| id.to_string()).unwrap_or_default(),
        run: entry.run.to_string(),
        step: entry.step,
        created_at: Some(moment(entry.created_at)),
        reason: entry.reason.as_str().to_owned(),
        who: entry.who.clone(),
        when: Some(moment(entry.when)),
        held: entry.reason.holds(),
        document,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_one_another_and_end() {
        let names = || ["a", "b", "c"].into_iter().map(ToOwned::to_owned);
        let (first, token) = page(names(), "", 2);
        assert_eq!((first.join(""), token.as_str()), ("ab".to_owned(), "b"));
        let (rest, token) = page(names(), &token, 2);
        assert_eq!((rest.join(""), token.as_str()), ("c".to_owned(), ""));
        assert_eq!(page(names(), "zzz", 2), (vec![], String::new()));
    }
}
