//! Every bound on input, in one place. A length, count or name from outside is checked against these before
//! anything is allocated for it.

/// Longest model, run, channel or policy name, in bytes.
pub const NAME_BYTES: usize = 128;
/// Longest tensor name, in bytes of UTF-8.
pub const TENSOR_NAME_BYTES: usize = 1024;
/// Most bytes of all tensor names of one torch.save file together: keys that are shared add up.
pub const TENSOR_NAMES_BYTES: usize = 128 << 20;
/// Most dimensions of a tensor.
pub const DIMENSIONS: usize = 16;
/// Most tensors of a checkpoint.
pub const TENSORS: usize = 500_000;
/// Most slices of all tensors of a checkpoint together.
pub const SLICES: usize = 2_000_000;
/// Most slices of one tensor.
pub const SLICES_A_TENSOR: usize = 65_536;
/// Most files that a checkpoint's folder may list.
pub const FILES: usize = 200_000;

/// Largest checkpoint manifest, in bytes.
pub const CHECKPOINT_MANIFEST_BYTES: usize = 1 << 20;
/// Largest policy, in bytes of TOML.
pub const POLICY_BYTES: usize = 64 << 10;
/// Most rules of a policy.
pub const POLICY_RULES: usize = 1_000;
/// Longest pattern or replacement in a policy, in bytes.
pub const PATTERN_BYTES: usize = 512;
/// Most patterns of artifacts to include, and as many to exclude.
pub const ARTIFACT_PATTERNS: usize = 200;
/// Most artifacts of a checkpoint.
pub const ARTIFACTS: usize = 10_000;
/// Longest path of an artifact, in bytes of UTF-8.
pub const ARTIFACT_PATH_BYTES: usize = 1024;
/// Most parts of an artifact's path, and how deep a checkpoint's folder is searched for artifacts.
pub const ARTIFACT_PATH_PARTS: usize = 16;
/// Longest part of an artifact's path, in bytes: what file systems take.
pub const PATH_PART_BYTES: usize = 255;
/// Largest snapshot manifest, in bytes.
pub const SNAPSHOT_MANIFEST_BYTES: usize = 256 << 20;
/// Largest signature envelope, and signed statement, in bytes.
pub const ENVELOPE_BYTES: usize = 256 << 10;
/// Most signatures of one envelope, or of one channel entry, and most keys to sign with.
pub const SIGNATURES: usize = 64;
/// Most signature envelopes of one snapshot: one for each set of keys and each validation report.
pub const ENVELOPES: u64 = 256;
/// Most public keys that are trusted at once: each signature is tried by every one of them.
pub const TRUSTED_KEYS: usize = 16;
/// Largest file of a signing key, private or public, in bytes.
pub const KEY_FILE_BYTES: usize = 16 << 10;
/// Largest channel entry, in bytes.
pub const CHANNEL_ENTRY_BYTES: usize = 64 << 10;
/// Largest pin, or note of gc, in bytes.
pub const PIN_BYTES: usize = 16 << 10;
/// Most objects on a page of what gc condemns.
pub const CONDEMNED_A_PAGE: usize = 10_000;
/// Largest page of what gc condemns, in bytes: a chunk takes about 100.
pub const CONDEMNED_PAGE_BYTES: usize = 4 << 20;
/// Largest document of partial digests, in bytes: some 36,000 subtrees. What would not fit is read again.
pub const PARTIAL_DIGESTS_BYTES: usize = 4 << 20;
/// Largest validation report, in bytes.
pub const REPORT_BYTES: usize = 512 << 20;

/// Largest safetensors header, in bytes: the cap of the safetensors library itself.
pub const SAFETENSORS_HEADER_BYTES: u64 = 100_000_000;
/// Largest Hugging Face index, in bytes.
pub const INDEX_BYTES: u64 = 256 << 20;
/// Largest `.metadata` of a distributed checkpoint, in bytes.
pub const DCP_METADATA_BYTES: u64 = 1 << 30;
/// Largest pickle inside a torch.save archive, in bytes.
pub const PICKLE_BYTES: u64 = 64 << 20;
/// Deepest nesting of values in a pickle.
pub const PICKLE_DEPTH: usize = 256;
/// Most opcodes that one pickle may hold.
pub const PICKLE_OPCODES: u64 = 200_000_000;
/// Most entries of a zip archive inside a distributed checkpoint's file; torch writes seven.
pub const ZIP_ENTRIES: u64 = 65_536;
/// Most entries of a torch.save file: one for every storage, and a few more.
pub const TORCH_SAVE_ENTRIES: u64 = TENSORS as u64 + 16;
/// Largest central directory of a zip archive, in bytes for each entry that it may have; torch writes some 70.
pub const ZIP_DIRECTORY_ENTRY_BYTES: u64 = 256;
/// Most values that the objects of a torch.save file may hold in all, each counted wherever it is reached.
pub const OBJECT_VALUES: usize = 4_000_000;
/// Most entries without tensors (numbers, texts) of a checkpoint that are listed by name; the rest are counted.
pub const OTHERS: usize = 10_000;
/// Most bytes, dense, of all tensors of a torch.save file that are expanded: larger than the storage they view.
pub const EXPANDED_BYTES: u64 = 1 << 30;
/// How many times a torch.save file's length its tensors may take, dense and all together, [`EXPANDED_BYTES`] aside:
/// many names may share one storage, and each becomes a tensor of its own.
pub const SHARED_TIMES: u64 = 64;
/// Most that an unpacked item of a distributed checkpoint may take beyond its elements, in bytes.
pub const ITEM_SLACK_BYTES: u64 = 128 << 10;
/// Largest window of a zstd frame, as a power of two of bytes: what levels up to 19 use. It is memory.
pub const ZSTD_WINDOW_LOG: u32 = 23;

/// The share of the memory budget that a checkpoint's metadata may have in bytes, as a divisor: parsed, and turned into
/// a listing, a byte of it takes up to about so many.
pub const METADATA_SHARE: u64 = 12;

/// What digests in the making may keep in memory for all files and records of a checkpoint together, in bytes. What
/// does not fit is read again at the end.
pub const DIGEST_BYTES: i64 = 8 << 20;
/// Most rows of a table that is pruned: row numbers are 32-bit integers with a sign in the remapping that servers take.
pub const PRUNED_ROWS: u64 = i32::MAX as u64;
/// The share of the memory budget that the lists of rows to keep may have in all, as a divisor. A row takes 4 bytes.
pub const KEEP_ROWS_SHARE: u64 = 4;

/// Largest chunk, in bytes; a table's block is the largest power of two of rows whose encoded bytes fit.
pub const CHUNK_BYTES: u64 = 8 << 20;
/// Widest row that a row-wise encoding takes, in bytes of the source dtype: its minimum and maximum must be
/// known before its first byte can be written.
pub const ROW_BYTES: u64 = 8 << 20;
/// Largest chunk that a manifest may name, in bytes: a single encoded row may be over [`CHUNK_BYTES`].
pub const LARGEST_CHUNK_BYTES: u64 = 32 << 20;
/// Largest multiple that rows may be padded to, in bytes.
pub const ROW_ALIGNMENT: u64 = 4096;

/// Largest job record, and request to publish again, in bytes: a checkpoint manifest twice, and a policy.
pub const JOB_RECORD_BYTES: usize = 3 * CHECKPOINT_MANIFEST_BYTES + 4 * POLICY_BYTES;
/// Largest job plan, in bytes.
pub const JOB_PLAN_BYTES: usize = 32 << 20;
/// Most parts of a job.
pub const PARTS: u64 = 100_000;
/// Largest part result, in bytes.
pub const PART_RESULT_BYTES: usize = 64 << 20;
/// Most runs of rows in one part: each has statistics of its own in the result.
pub const PART_RUNS: u64 = 20_000;
/// Largest of a job's small documents, in bytes.
pub const JOB_DOCUMENT_BYTES: usize = 256 << 10;
/// Most events of a job that go into its dead letter.
pub const DEAD_HISTORY: usize = 50;
/// Largest dead letter, in bytes: a message in base64, and its history.
pub const DEAD_LETTER_BYTES: usize = 32 << 20;
/// Longest message of a failure in a document, in bytes.
pub const WHY_BYTES: usize = 4096;
/// Longest trace context of a checkpoint manifest, in bytes; W3C's first version has 55.
pub const TRACEPARENT_BYTES: usize = 512;
/// Longest name of a serving host, in bytes.
pub const HOST_BYTES: usize = 256;
/// Longest name of a folder that a serving host reports, in bytes.
pub const HOST_FOLDER_BYTES: usize = 4096;
/// Most versions that a serving host reports.
pub const HOST_VERSIONS: usize = 64;
/// Largest status of a serving host, in bytes.
pub const HOST_STATUS_BYTES: usize = 32 << 10;
