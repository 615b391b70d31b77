//! What operators ask for, checked.

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::reference::Reference;

use crate::api::answers::Refusal;
use crate::api::proto;
use crate::api::requests::{channel, digits, model, optional, page_size, page_token, parsed, request_id};
use crate::operations::is_prefix;
use crate::operations::pins::WHY_BYTES;

/// Entries, pins or letters on a page: usually, and at most.
const PAGE: (usize, usize) = (20, 100);
/// Longest id of a dead letter: the hash of a message.
const LETTER_BYTES: usize = 64;

/// A channel that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The model.
    pub model: ModelName,
    /// The channel.
    pub channel: ChannelName,
    /// The caller's id of the request.
    pub request_id: Option<String>,
}

impl Named {
    fn new(named: &str, name: &str, id: &str) -> Result<Self, Refusal> {
        let request_id = request_id(id)?.map(ToOwned::to_owned);
        Ok(Self { model: model(named)?, channel: channel(name)?, request_id })
    }
}

impl TryFrom<proto::HoldRequest> for Named {
    type Error = Refusal;

    fn try_from(request: proto::HoldRequest) -> Result<Self, Refusal> {
        Self::new(&request.model, &request.channel, &request.request_id)
    }
}

impl TryFrom<proto::ReleaseRequest> for Named {
    type Error = Refusal;

    fn try_from(request: proto::ReleaseRequest) -> Result<Self, Refusal> {
        Self::new(&request.model, &request.channel, &request.request_id)
    }
}

/// A channel that is to be moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promote {
    /// The channel.
    pub named: Named,
    /// What to move it to.
    pub to: Reference,
    /// Even if a gate rejected it.
    pub force: bool,
}

impl TryFrom<proto::PromoteRequest> for Promote {
    type Error = Refusal;

    fn try_from(request: proto::PromoteRequest) -> Result<Self, Refusal> {
        let named = Named::new(&request.model, &request.channel, &request.request_id)?;
        if request.to.is_empty() {
            return Err(Refusal::bad_field("to", "name a snapshot, or another channel"));
        }
        // Digits of an id could be a channel's name.
        parsed::<ChannelName>("to", &request.to)?;
        let to = Reference { model: named.model.clone(), at: Some(request.to) };
        Ok(Self { named, to, force: request.force })
    }
}

/// A channel that is to go back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rollback {
    /// The channel.
    pub named: Named,
    /// The snapshot, or its first digits; without it the one before.
    pub to: Option<String>,
}

impl TryFrom<proto::RollbackRequest> for Rollback {
    type Error = Refusal;

    fn try_from(request: proto::RollbackRequest) -> Result<Self, Refusal> {
        let named = Named::new(&request.model, &request.channel, &request.request_id)?;
        let to = if request.to.is_empty() { None } else { Some(digits("to", &request.to)?) };
        Ok(Self { named, to })
    }
}

/// A page of a channel's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entries {
    /// The model.
    pub model: ModelName,
    /// The channel.
    pub channel: ChannelName,
    /// How many.
    pub most: usize,
    /// Before which number.
    pub before: u64,
}

impl TryFrom<proto::ListEntriesRequest> for Entries {
    type Error = Refusal;

    fn try_from(request: proto::ListEntriesRequest) -> Result<Self, Refusal> {
        Ok(Self {
            model: model(&request.model)?,
            channel: channel(&request.channel)?,
            most: page_size(request.page_size, PAGE.0, PAGE.1)?,
            before: page_token(&request.page_token)?.unwrap_or(u64::MAX),
        })
    }
}

/// A snapshot that is to be pinned, or not any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// The snapshot.
    pub snapshot: Reference,
    /// Why.
    pub why: String,
}

impl Pin {
    fn new(named: &str, snapshot: &str, why: String) -> Result<Self, Refusal> {
        if why.len() > WHY_BYTES || why.chars().any(char::is_control) {
            return Err(Refusal::bad_field(
                "why",
                format!("at most {WHY_BYTES} bytes, no control characters"),
            ));
        }
        let at = Some(digits("snapshot", snapshot)?);
        Ok(Self { snapshot: Reference { model: model(named)?, at }, why })
    }
}

impl TryFrom<proto::PinRequest> for Pin {
    type Error = Refusal;

    fn try_from(request: proto::PinRequest) -> Result<Self, Refusal> {
        Self::new(&request.model, &request.snapshot, request.why)
    }
}

impl TryFrom<proto::UnpinRequest> for Pin {
    type Error = Refusal;

    fn try_from(request: proto::UnpinRequest) -> Result<Self, Refusal> {
        Self::new(&request.model, &request.snapshot, String::new())
    }
}

/// A page of a model's pins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pins {
    /// The model.
    pub model: ModelName,
    /// How many.
    pub most: usize,
    /// Behind which.
    pub after: Option<SnapshotId>,
}

impl TryFrom<proto::ListPinsRequest> for Pins {
    type Error = Refusal;

    fn try_from(request: proto::ListPinsRequest) -> Result<Self, Refusal> {
        Ok(Self {
            model: model(&request.model)?,
            most: page_size(request.page_size, PAGE.0, PAGE.1)?,
            after: page_token(&request.page_token)?,
        })
    }
}

/// A page of dead letters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Letters {
    /// Of this model; without it of all.
    pub model: Option<ModelName>,
    /// How many.
    pub most: usize,
    /// Behind which.
    pub after: Option<String>,
}

impl TryFrom<proto::ListDeadLettersRequest> for Letters {
    type Error = Refusal;

    fn try_from(request: proto::ListDeadLettersRequest) -> Result<Self, Refusal> {
        let after: Option<String> = page_token(&request.page_token)?;
        if after.as_ref().is_some_and(|after| after.len() > LETTER_BYTES) {
            return Err(Refusal::bad_field("page_token", "give what the answer before gave, as it was"));
        }
        let most = page_size(request.page_size, PAGE.0, PAGE.1)?;
        Ok(Self { model: optional("model", &request.model)?, most, after })
    }
}

/// A dead letter's whole id.
///
/// # Errors
/// Where it is none.
pub fn letter(id: &str) -> Result<String, Refusal> {
    if is_prefix(id) && id.len() <= LETTER_BYTES {
        return Ok(id.to_owned());
    }
    Err(Refusal::bad_field("id", "it is no dead letter's id, as a list of them gives it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told<T>(result: Result<T, Refusal>) -> String {
        result.err().map(|refusal| refusal.status().message().to_owned()).unwrap_or_default()
    }

    #[test]
    fn a_channel_is_moved_to_a_snapshot_or_another_channel() {
        let promote = |to: &str| {
            Promote::try_from(proto::PromoteRequest {
                model: "m".into(),
                to: to.into(),
                ..Default::default()
            })
        };
        let canary = promote("canary").unwrap();
        assert_eq!((canary.to.to_string().as_str(), canary.named.channel.as_str()), ("m@canary", "prod"));
        for wrong in ["", "a@b", "../x", &"0".repeat(200)] {
            assert!(told(promote(wrong)).starts_with("to: "), "{wrong}");
        }
        let back = |to: &str| {
            Rollback::try_from(proto::RollbackRequest {
                model: "m".into(),
                to: to.into(),
                ..Default::default()
            })
        };
        assert_eq!((back("").unwrap().to, back("abcdef").unwrap().to.as_deref()), (None, Some("abcdef")));
        assert!(told(back("canary")).starts_with("to: "));
    }

    #[test]
    fn what_is_too_long_or_no_name_is_refused() {
        let pin = |snapshot: &str, why: &str| {
            let (model, snapshot, why) = ("m".into(), snapshot.into(), why.into());
            Pin::try_from(proto::PinRequest { model, snapshot, why })
        };
        assert_eq!(pin("abcdef", "incident 7").unwrap().why, "incident 7");
        assert!(told(pin("abc", "")).starts_with("snapshot: "));
        assert!(told(pin("abcdef", &"x".repeat(WHY_BYTES + 1))).starts_with("why: "));
        for wrong in ["", "x", "../../secret", &"0".repeat(65)] {
            assert!(told(letter(wrong)).starts_with("id: "), "{wrong}");
        }
        let hold = proto::HoldRequest { model: "m".into(), channel: "a/b".into(), ..Default::default() };
        assert!(told(Named::try_from(hold)).starts_with("channel: "));
        let entries =
            proto::ListEntriesRequest { model: "m".into(), page_token: "-1".into(), ..Default::default() };
        assert!(told(Entries::try_from(entries)).starts_with("page_token: "));
        let pins = proto::ListPinsRequest { model: "m".into(), page_token: "x".into(), ..Default::default() };
        assert!(told(Pins::try_from(pins)).starts_with("page_token: "));
        let letters = proto::ListDeadLettersRequest { page_token: "0".repeat(65), ..Default::default() };
        assert!(told(Letters::try_from(letters)).starts_with("page_token: "));
    }
}
