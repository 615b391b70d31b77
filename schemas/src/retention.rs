//! Documents of retention: what is kept from `gc`, and what a run of `gc` is about to delete.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::SnapshotId;
use crate::job::Document;
use crate::limits;
use crate::snapshot::Chunk;
use crate::time::Timestamp;

/// The `schema` field of a pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum PinSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.pin/v1")]
    V1,
}

/// Whether a snapshot is kept, whatever the policy says: the newest such document of a snapshot rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Pin {
    /// Always `weighbridge.pin/v1`.
    pub schema: PinSchema,
    /// Whether it is kept.
    pub pinned: bool,
    /// Why, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Who says so.
    pub who: String,
    /// When, by their clock.
    pub when: Timestamp,
}

impl Document for Pin {
    const NAME: &'static str = "pin";
    const MOST: usize = limits::PIN_BYTES;
}

/// The `schema` field of a note of gc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum GcSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.gc/v1")]
    V1,
}

/// A run of gc begins, goes on, or has its list whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GcNote {
    /// Always `weighbridge.gc/v1`.
    pub schema: GcSchema,
    /// The id of the process that carries it out, by chance.
    pub holder: String,
    /// Which process of which machine that is, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<GcProcess>,
    /// The fewest newest entries of channels whose snapshots this run or one before it kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_history: Option<u32>,
    /// Who that is, for people.
    pub who: String,
    /// When, by their clock.
    pub when: Timestamp,
}

/// A process, so that another one of its machine can tell whether it is still there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GcProcess {
    /// The machine since it was started, by chance.
    pub boot: String,
    /// What the number counts in: machines may have several such.
    pub namespace: String,
    /// Its number.
    pub number: u32,
    /// When it was started, in the kernel's units since the machine was.
    pub started: u64,
}

impl Document for GcNote {
    const NAME: &'static str = "gc note";
    const MOST: usize = limits::PIN_BYTES;
}

/// How a run of gc ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GcEnded {
    /// Always `weighbridge.gc/v1`.
    pub schema: GcSchema,
    /// Whether its list was carried out; it was not, or not all of it, where the run was broken off.
    pub carried_out: bool,
    /// How many snapshots it deleted.
    #[serde(default)]
    pub snapshots: u64,
    /// How many chunks it deleted.
    #[serde(default)]
    pub chunks: u64,
    /// The chunks' bytes.
    #[serde(default)]
    pub bytes: u64,
    /// Who ended it.
    pub who: String,
    /// When, by their clock.
    pub when: Timestamp,
}

impl Document for GcEnded {
    const NAME: &'static str = "end of gc";
    const MOST: usize = limits::PIN_BYTES;
}

/// A page of what a run of gc may delete: unless a root names it that was written before the run's list was whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Condemned {
    /// Always `weighbridge.gc/v1`.
    pub schema: GcSchema,
    /// Snapshots: their manifests, and what lies beside them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotId>,
    /// Chunks, ascending, within a page and from page to page.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<Chunk>,
}

impl Document for Condemned {
    const NAME: &'static str = "page of condemned objects";
    const MOST: usize = limits::CONDEMNED_PAGE_BYTES;
}
