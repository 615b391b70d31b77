//! `inspect`: what is in a checkpoint, or in a snapshot.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use weighbridge_converter::checkpoint::Checkpoint;
use weighbridge_converter::read;
use weighbridge_converter::shape::gather;
use weighbridge_schemas::snapshot::{Pruned, SnapshotManifest, SnapshotTensor};
use weighbridge_snapshots::manifest;
use weighbridge_snapshots::reference::{Located, Reference};
use weighbridge_snapshots::root::Absent;

use super::output::{bytes, plain, shape, table};
use super::publish::FormatOption;
use super::{Context, MemoryOption, default_channel};
use crate::error::{Failure, Result};
use crate::job::plan::check_told;
use crate::sources;

/// How many entries that are no tensors are shown to people.
const OTHERS_SHOWN: usize = 20;

/// Look into a checkpoint or a snapshot: tensors, dtypes, shapes, encodings.
///
/// A checkpoint is listed from its metadata, and the framing of every stored slice is checked; no tensor byte is read.
#[derive(Debug, Args)]
pub(super) struct Inspect {
    /// A checkpoint's path or URL (s3://, gs://, az://, file://); or MODEL[@CHANNEL|@SNAPSHOT], or a snapshot's id.
    #[arg(value_name = "CKPT|SNAPSHOT")]
    what: OsString,
    /// The checkpoint's format.
    #[arg(long, value_enum, default_value_t = FormatOption::Auto)]
    format: FormatOption,
    /// Read the checkpoint's metadata alone, without a look at how slices are stored.
    #[arg(long)]
    metadata_only: bool,
    #[command(flatten)]
    memory: MemoryOption,
}

impl Inspect {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let path = PathBuf::from(&self.what);
        let reference = self.what.to_str().filter(|text| may_be_reference(text));
        let Some(reference) = reference.filter(|_| std::fs::symlink_metadata(&path).is_err()) else {
            return self.checkpoint(context).await;
        };
        match self.snapshot(context, reference).await {
            Err(failure) if failure.class == "not_found" => Err(Failure {
                message: format!("{reference}: there is no such checkpoint, and no such snapshot: {failure}"),
                ..failure
            }),
            done => done,
        }
    }

    async fn checkpoint(&self, context: &Context) -> Result<()> {
        let (format, metadata_only) = (self.format.format(), self.metadata_only);
        let memory = context.memory(&self.memory)?;
        let location = sources::locate(&self.what)?;
        let shown = location.to_string();
        let opened = tokio::task::spawn_blocking(move || {
            let checkpoint = read::open(&location, format, memory, &std::env::temp_dir())?;
            if !metadata_only {
                gather::check_storages(&checkpoint)?;
            }
            Ok(checkpoint)
        });
        let checkpoint = opened.await.map_err(|error| Failure::internal("inspecting", error))?.map_err(
            |error: weighbridge_converter::error::ReadError| {
                Failure::from(error).while_doing(format!("inspecting {shown}"))
            },
        )?;
        check_told(&checkpoint, memory)
            .map_err(|failure| failure.while_doing(format!("inspecting {shown}")))?;
        show_checkpoint(context, &checkpoint);
        Ok(())
    }

    async fn snapshot(&self, context: &Context, reference: &str) -> Result<()> {
        let root = context.root(Absent::Refuse)?;
        let Located { model, snapshot: id, .. } =
            Reference::locate(reference, &root, &default_channel()).await?;
        show_snapshot(context, &manifest::get(&root, &model, &id).await?);
        Ok(())
    }
}

/// Whether the text can be a reference at all; else it is taken for a path.
fn may_be_reference(text: &str) -> bool {
    text.parse::<Reference>().is_ok() && !Path::new(text).is_absolute()
}

fn show_checkpoint(context: &Context, checkpoint: &Checkpoint) {
    let total: u64 = checkpoint.tensors.iter().map(|tensor| tensor.bytes()).sum();
    let tensors: Vec<_> = checkpoint
        .tensors
        .iter()
        .map(|tensor| {
            json!({
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "bytes": tensor.bytes(),
                "slices": tensor.slices.len(),
            })
        })
        .collect();
    let unreadable: Vec<_> = checkpoint
        .unreadable
        .iter()
        .map(|(name, error)| json!({ "name": name, "class": error.class().as_str(), "message": error.to_string() }))
        .collect();
    let others: Vec<_> =
        checkpoint.others.listed.iter().map(|one| json!({ "name": one.name, "kind": one.kind })).collect();
    let document = json!({
        "kind": "checkpoint",
        "format": checkpoint.format,
        "fingerprint": checkpoint.fingerprint,
        "bytes": total,
        "tensors": tensors,
        "unreadable": unreadable,
        "others": others,
        "notes": checkpoint.notes,
    });
    context.output.listing(&document, || {
        let rows: Vec<_> = checkpoint
            .tensors
            .iter()
            .map(|tensor| {
                vec![
                    plain(tensor.name.as_str()),
                    tensor.dtype.as_str().to_owned(),
                    shape(&tensor.shape),
                    bytes(tensor.bytes()),
                    tensor.slices.len().to_string(),
                ]
            })
            .collect();
        let (count, format) = (checkpoint.tensors.len(), checkpoint.format.as_str());
        let listing = table(&["tensor", "dtype", "shape", "size", "slices"], &rows);
        format!("{listing}{count} tensors, {}, {format}\n{}", bytes(total), beside(checkpoint))
    });
}

/// What stands below the table: tensors that cannot be read, and what is no tensor.
fn beside(checkpoint: &Checkpoint) -> String {
    let unreadable = checkpoint
        .unreadable
        .iter()
        .map(|(_, error)| format!("cannot be read: {}\n", plain(&error.to_string())));
    let others = &checkpoint.others;
    let listed = others.listed.iter().take(OTHERS_SHOWN);
    let listed = listed.map(|one| format!("not a tensor: {} ({})\n", plain(&one.name), one.kind));
    let more = others.count.saturating_sub(others.listed.len().min(OTHERS_SHOWN) as u64);
    let more = (more > 0).then(|| format!("and {more} more that are no tensors\n"));
    // The reader's notes tell people of others one by one too.
    let told = |note: &&String| !note.contains("passed over");
    let notes = checkpoint.notes.iter().filter(told).map(|note| format!("note: {}\n", plain(note)));
    unreadable.chain(listed).chain(more).chain(notes).collect()
}

fn show_snapshot(context: &Context, found: &SnapshotManifest) {
    let id = found.id();
    let tensors: Vec<_> = found
        .tensors
        .iter()
        .map(|tensor| {
            let form = tensor.form();
            json!({
                "name": tensor.name,
                "dtype": form.stored_dtype(tensor.source_dtype),
                "shape": form.stored_shape(&tensor.shape, tensor.source_dtype),
                "bytes": tensor.end - tensor.begin,
                "source_dtype": tensor.source_dtype,
                "logical_shape": tensor.shape,
                "encoding": tensor.encoding,
                "layout": tensor.layout,
                "row_alignment": tensor.row_alignment,
                "stored_width": tensor.stored_width,
                "pruned": tensor.pruned,
                "file": tensor.file,
            })
        })
        .collect();
    let files: Vec<_> = found
        .files
        .iter()
        .map(|file| {
            let (name, size, chunks) = (&file.name, file.size, file.chunks.len());
            json!({ "name": name, "size": size, "chunks": chunks, "artifact": file.artifact })
        })
        .collect();
    let document = json!({
        "kind": "snapshot",
        "snapshot": id,
        "model": found.model,
        "run": found.run,
        "step": found.step,
        "format": found.format,
        "fingerprint": found.checkpoint,
        "rules": found.rules,
        "encoding_version": found.encoding_version,
        "bytes": found.bytes(),
        "tensors": tensors,
        "files": files,
    });
    context.output.listing(&document, || {
        let rows: Vec<_> = found
            .tensors
            .iter()
            .map(|tensor| {
                vec![
                    plain(tensor.name.as_str()),
                    tensor.form().to_string(),
                    tensor.source_dtype.as_str().to_owned(),
                    shape(&tensor.shape),
                    bytes(tensor.end - tensor.begin),
                    tensor.file.clone(),
                ]
            })
            .collect();
        let listing = table(&["tensor", "encoding", "source", "shape", "size", "file"], &rows);
        let (model, run, step, count) = (&found.model, &found.run, found.step, found.tensors.len());
        let pruned = pruned_tables(found);
        let artifacts = artifact_table(found);
        format!(
            "{listing}{pruned}{artifacts}snapshot {id}\nmodel {model}, run {run}, step {step}; {count} tensors, {}\n",
            bytes(found.bytes())
        )
    });
}

/// A line for each pruned table.
fn pruned_tables(found: &SnapshotManifest) -> String {
    let line = |tensor: &SnapshotTensor| {
        let Pruned { source_rows, index_remapping } = tensor.pruned.as_ref()?;
        let (name, kept) = (plain(tensor.name.as_str()), tensor.shape.first().copied().unwrap_or(0));
        let remapping = plain(index_remapping.as_str());
        Some(format!("{name}: {kept} of {source_rows} rows kept; {remapping} says which\n"))
    };
    found.tensors.iter().filter_map(line).collect()
}

/// The artifacts; nothing where there are none.
fn artifact_table(found: &SnapshotManifest) -> String {
    let artifacts = found.files.iter().filter(|file| file.artifact);
    let rows: Vec<_> = artifacts.map(|file| vec![plain(&file.name), bytes(file.size)]).collect();
    if rows.is_empty() { String::new() } else { table(&["artifact", "size"], &rows) }
}
