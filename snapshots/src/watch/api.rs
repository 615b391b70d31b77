//! Having an API watch a channel: lines of JSON that come as the channel moves, and a sign of life in between. A stream
//! that says nothing for longer than [`SILENCE`] is given up: what stands between may have dropped it without a word.

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use serde::Deserialize;
use tokio::time::timeout;

use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName};

use super::{Told, publishes_after};
use crate::channel::Channel;
use crate::error::{Class, Result, StoreError};
use crate::root::Root;

/// How long a stream may be silent: some signs of life.
const SILENCE: Duration = Duration::from_secs(17);
/// Longest line, in bytes.
const LINE_BYTES: usize = limits::CHANNEL_ENTRY_BYTES + 1024;

/// A channel that an API watches.
#[derive(Debug)]
pub struct ApiWatch {
    root: Root,
    model: ModelName,
    channel: ChannelName,
    /// The number of the entry that is known.
    after: Option<u64>,
    stream: Option<Stream>,
}

#[derive(Debug)]
struct Stream {
    response: reqwest::Response,
    /// What has come of the next line.
    line: Vec<u8>,
    /// Whether it has told anything yet.
    told: bool,
}

#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    entry: Option<serde_json::Value>,
    /// The number of an entry behind which all are publishes.
    #[serde(default)]
    publishes_after: Option<u64>,
    #[serde(default)]
    stale: Option<String>,
    /// The class of what makes it so.
    #[serde(default)]
    class: Option<String>,
}

impl ApiWatch {
    /// Watches `channel` of `model` by the API behind `root`: what stands there is told first, unless its number is
    /// `after`, and then what comes.
    #[must_use]
    pub fn new(root: &Root, model: ModelName, channel: ChannelName, after: Option<u64>) -> Self {
        Self { root: root.clone(), model, channel, after, stream: None }
    }

    /// As [`super::Watch::next`].
    ///
    /// # Errors
    /// As [`super::Watch::next`].
    pub async fn next(&mut self) -> Result<Told> {
        loop {
            let stream = match &mut self.stream {
                Some(stream) => stream,
                none => none.insert(open(&self.root, &self.model, &self.channel, self.after).await?),
            };
            match stream.line().await {
                Ok(Some(mut line)) => {
                    // Signs of life that waited here are as old as the last of them: only what came last counts.
                    while !tells(&line)
                        && let Some(Ok(Some(next))) = stream.line().now_or_never()
                    {
                        line = next;
                    }
                    return self.heard(&line);
                }
                Ok(None) => {
                    // A server that stops ends its streams; one that ends each at once is not asked again at once.
                    let told = stream.told;
                    self.stream = None;
                    if !told {
                        return Err(self.lost("the API ended the stream before it told anything"));
                    }
                }
                Err(why) => {
                    self.stream = None;
                    return Err(self.lost(&why));
                }
            }
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.told)
    }

    fn lost(&self, why: &str) -> StoreError {
        StoreError::new(Class::Unreachable, self.named(), why)
    }

    fn named(&self) -> String {
        format!("{}@{}", self.model, self.channel)
    }

    fn heard(&mut self, line: &[u8]) -> Result<Told> {
        let channel = Channel::new(&self.root, &self.model, &self.channel);
        let told = (|| {
            let line: Line = serde_json::from_slice(line)
                .map_err(|error| self.lost(&format!("the API sent what is no line of its own: {error}")))?;
            if let Some(why) = line.stale {
                let why = format!("the API cannot read its store: {why}");
                if line.class.as_deref() == Some(Class::Integrity.as_str()) {
                    return Err(StoreError::new(Class::Integrity, self.named(), why));
                }
                return Err(self.lost(&why));
            }
            let Some(entry) = line.entry else { return Ok(None) };
            let bytes = Bytes::from(entry.to_string());
            Ok(Some((channel.believed(&bytes)?, bytes, line.publishes_after)))
        })();
        match told {
            Ok(Some((entry, bytes, told))) => {
                self.after = Some(entry.sequence);
                let publishes_after = told.unwrap_or_else(|| publishes_after(&entry));
                Ok(Told::Entry { entry: Box::new(entry), bytes, publishes_after })
            }
            Ok(None) => Ok(Told::Quiet),
            Err(error) => {
                // What cannot be believed is told once more when the stream is begun anew.
                if error.class() == Class::Integrity && tells(line) {
                    self.stream = None;
                }
                Err(error)
            }
        }
    }
}

/// Whether a line tells of an entry.
fn tells(line: &[u8]) -> bool {
    line.starts_with(b"{\"entry\"")
}

async fn open(root: &Root, model: &ModelName, channel: &ChannelName, after: Option<u64>) -> Result<Stream> {
    let Some(api) = root.api() else {
        return Err(StoreError::new(Class::BadLocation, root, "there is no API behind it"));
    };
    let response = api.watch(model, channel, after.unwrap_or(0)).await?;
    Ok(Stream { response, line: Vec::new(), told: false })
}

impl Stream {
    /// The next line; `None` where the stream has ended. What has come of a line is kept where this is given up.
    async fn line(&mut self) -> std::result::Result<Option<Vec<u8>>, String> {
        loop {
            if let Some(end) = self.line.iter().position(|&byte| byte == b'\n') {
                let rest = self.line.split_off(end + 1);
                self.told = true;
                return Ok(Some(std::mem::replace(&mut self.line, rest)));
            }
            if self.line.len() > LINE_BYTES {
                return Err(format!("the API sent a line of more than {LINE_BYTES} bytes"));
            }
            match timeout(SILENCE, self.response.chunk()).await {
                Ok(Ok(Some(run))) => self.line.extend_from_slice(&run),
                Ok(Ok(None)) => return Ok(None),
                Ok(Err(error)) => return Err(format!("the stream broke: {error}")),
                Err(_) => return Err(format!("the API said nothing for {} s", SILENCE.as_secs())),
            }
        }
    }
}
