//! Chunks and statistics, put in order: the snapshot's manifest, and every tensor's figures.

use weighbridge_converter::statistics::Statistics;
use weighbridge_schemas::encoding::ENCODING_VERSION;
use weighbridge_schemas::snapshot::{Chunk, SnapshotFile, SnapshotManifest, SnapshotSchema, SnapshotTensor};

use super::Request;
use super::convert::Described;
use super::plan::Plan;

/// A piece of the plan, stored, and the statistics of each of its parts.
pub type Piece = (Chunk, Vec<Statistics>);

/// The manifest, and the statistics of the plan's tensors in order.
#[must_use]
pub fn assemble(
    request: &Request,
    plan: &Plan,
    pieces: &[Piece],
    described: &Described,
) -> (SnapshotManifest, Vec<Statistics>) {
    let manifest = SnapshotManifest {
        schema: SnapshotSchema::V1,
        model: request.model.clone(),
        run: request.run.clone(),
        step: request.step,
        format: plan.checkpoint.format,
        checkpoint: plan.checkpoint.fingerprint,
        rules: plan.rules,
        encoding_version: ENCODING_VERSION,
        files: snapshot_files(plan, pieces, described),
        tensors: snapshot_tensors(plan),
    };
    (manifest, tensor_statistics(plan, pieces))
}

fn snapshot_files(plan: &Plan, pieces: &[Piece], described: &Described) -> Vec<SnapshotFile> {
    let mut chunks: Vec<Vec<Chunk>> = described.headers.iter().map(|&header| vec![header]).collect();
    chunks.resize(plan.files.len() + plan.artifacts.len(), Vec::new());
    for (piece, (chunk, _)) in plan.pieces.iter().zip(pieces) {
        chunks[piece.file].push(*chunk);
    }
    let names = plan.files.iter().map(|file| (file.name.clone(), false));
    let names = names.chain(plan.artifacts.iter().map(|file| (file.name().to_owned(), true)));
    let mut files: Vec<_> = names
        .zip(chunks)
        .map(|((name, artifact), chunks)| SnapshotFile { artifact, ..snapshot_file(name, chunks) })
        .collect();
    if let Some((name, _)) = &plan.index {
        files.push(snapshot_file(name.clone(), described.index.clone()));
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

fn snapshot_file(name: String, chunks: Vec<Chunk>) -> SnapshotFile {
    SnapshotFile { name, size: chunks.iter().map(|chunk| chunk.size).sum(), artifact: false, chunks }
}

fn snapshot_tensors(plan: &Plan) -> Vec<SnapshotTensor> {
    let mut tensors = Vec::with_capacity(plan.tensors.len());
    for file in &plan.files {
        let mut begin = file.header.len() as u64;
        for &at in &file.tensors {
            let planned = &plan.tensors[at];
            let metadata = &plan.stored[at].metadata;
            let end = begin + plan.stored[at].bytes;
            tensors.push(SnapshotTensor {
                name: planned.name.clone(),
                shape: metadata.shape.clone(),
                source_dtype: metadata.source_dtype,
                encoding: planned.form.encoding,
                layout: planned.form.layout,
                row_alignment: planned.form.row_alignment,
                stored_width: planned.form.stored_width,
                pruned: metadata.pruned.clone(),
                file: file.name.clone(),
                begin,
                end,
            });
            begin = end;
        }
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

/// A tensor's blocks stand in order within the plan's pieces, so their statistics are added in order.
fn tensor_statistics(plan: &Plan, pieces: &[Piece]) -> Vec<Statistics> {
    let mut statistics = vec![Statistics::default(); plan.tensors.len()];
    for (piece, (_, measured)) in plan.pieces.iter().zip(pieces) {
        for (part, measured) in piece.parts.iter().zip(measured) {
            statistics[part.tensor].merge(measured);
        }
    }
    statistics
}
