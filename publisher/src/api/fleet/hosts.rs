//! Serving hosts, as they told of themselves: in memory, bounded, and forgotten after a while.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use tokio::time::Instant;

use weighbridge_schemas::host::HostStatus;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName};

/// The most hosts that are kept: the one that was silent for longest goes first.
const MOST: usize = 10_000;
/// The most bytes of what they told.
const MOST_BYTES: usize = 64 << 20;
/// The most hosts of one token, so that one cannot push the others' out.
const MOST_OF_ONE: usize = 5_000;
/// A host that another token told of can be taken over after this silence.
const TAKEN_OVER: Duration = Duration::from_secs(60);
/// After which silence a host is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(600);
/// The most bytes of what hosts told on one page of a list: callers take messages of 4 MiB.
const PAGE_BYTES: usize = 2 << 20;
/// Longest text of a place in a list: host and folder, two names, in base64.
const PLACE_BYTES: usize = 2 * (limits::HOST_BYTES + limits::HOST_FOLDER_BYTES + 2 * limits::NAME_BYTES);

/// Which host it is, and what it follows where: lists are in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    host: String,
    model: ModelName,
    channel: ChannelName,
    folder: String,
}

impl Place {
    fn of(status: &HostStatus) -> Self {
        let HostStatus { host, model, channel, folder, .. } = status;
        let (host, model, channel, folder) = (host.clone(), model.clone(), channel.clone(), folder.clone());
        Self { host, model, channel, folder }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // None of them holds a line break.
        let text = [&self.host, self.model.as_str(), self.channel.as_str(), &self.folder].join("\n");
        f.write_str(&URL_SAFE_NO_PAD.encode(text))
    }
}

/// That a text is no place in a list of hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is no place in a list of hosts; give what the answer before gave, as it was")]
pub struct NoPlace;

impl FromStr for Place {
    type Err = NoPlace;

    fn from_str(text: &str) -> Result<Self, NoPlace> {
        if text.len() > PLACE_BYTES {
            return Err(NoPlace);
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| NoPlace)?;
        let text = String::from_utf8(bytes).map_err(|_| NoPlace)?;
        let parts: Vec<_> = text.splitn(4, '\n').collect();
        let [host, model, channel, folder] = parts.as_slice() else { return Err(NoPlace) };
        Ok(Self {
            host: (*host).to_owned(),
            model: model.parse().map_err(|_| NoPlace)?,
            channel: channel.parse().map_err(|_| NoPlace)?,
            folder: (*folder).to_owned(),
        })
    }
}

/// What a host told, and how long ago.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    /// The document, as it was told.
    pub written: Bytes,
    /// What it says.
    pub status: HostStatus,
    /// For how long the host has been silent since.
    pub silent: Duration,
}

/// A page of hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The hosts.
    pub hosts: Vec<Heard>,
    /// Where the next page begins: behind this one. `None` where there is none.
    pub next: Option<Place>,
}

/// What was told: the parsed document is made again when it is asked for, since it takes several times as much.
#[derive(Debug)]
struct Told {
    /// The name of the token that told it.
    by: String,
    written: Bytes,
    at: Instant,
    number: u64,
}

#[derive(Debug, Default)]
struct Known {
    hosts: BTreeMap<Place, Told>,
    /// By how long ago it was told, the oldest first.
    order: BTreeMap<u64, Place>,
    /// How many there are of each token.
    of: BTreeMap<String, usize>,
    bytes: usize,
    next: u64,
}

impl Known {
    fn forget(&mut self, place: &Place) {
        if let Some(told) = self.hosts.remove(place) {
            self.order.remove(&told.number);
            self.bytes = self.bytes.saturating_sub(told.written.len());
            if let Some(count) = self.of.get_mut(&told.by) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.of.remove(&told.by);
                }
            }
        }
    }

    /// Forgets the longest silent, one after another, for as long as it `is_too_much`.
    fn forget_while(&mut self, is_too_much: impl Fn(&Self, &Told) -> bool) {
        while let Some(place) = self.order.values().next().cloned() {
            match self.hosts.get(&place) {
                Some(told) if !is_too_much(self, told) => return,
                _ => self.forget(&place),
            }
        }
    }
}

/// The hosts that were heard of.
#[derive(Debug, Default)]
pub struct Hosts {
    known: Mutex<Known>,
}

impl Hosts {
    fn known(&self, now: Instant) -> MutexGuard<'_, Known> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.forget_while(|_, told| now.saturating_duration_since(told.at) >= FORGOTTEN);
        known
    }

    /// Notes what a host told by the token `by`; `written` is the document that `status` was read from. It tells
    /// whether it was noted: a host that another token tells of is that one's, and a token has so many.
    pub fn hear(&self, by: &str, status: &HostStatus, written: Bytes, now: Instant) -> bool {
        let place = Place::of(status);
        let mut known = self.known(now);
        match known.hosts.get(&place) {
            Some(told) if told.by != by && now.saturating_duration_since(told.at) < TAKEN_OVER => {
                return false;
            }
            Some(_) => {}
            None => {
                if known.of.get(by).is_some_and(|&count| count >= MOST_OF_ONE) {
                    return false;
                }
            }
        }
        known.forget(&place);
        let number = known.next;
        known.next = number.wrapping_add(1);
        known.bytes = known.bytes.saturating_add(written.len());
        *known.of.entry(by.to_owned()).or_default() += 1;
        known.order.insert(number, place.clone());
        known.hosts.insert(place, Told { by: by.to_owned(), written, at: now, number });
        known.forget_while(|known, _| known.hosts.len() > MOST || known.bytes > MOST_BYTES);
        true
    }

    /// Hosts in order, at most `most`: of models and channels that `wanted` takes, behind `after`.
    #[must_use]
    pub fn list(
        &self,
        wanted: impl Fn(&ModelName, &ChannelName) -> bool,
        after: Option<&Place>,
        most: usize,
        now: Instant,
    ) -> Listed {
        use std::ops::Bound;
        let known = self.known(now);
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let fitting = known.hosts.range((from, Bound::Unbounded));
        let mut fitting = fitting.filter(|(place, _)| wanted(&place.model, &place.channel)).peekable();
        let mut listed = Listed { hosts: Vec::new(), next: None };
        let mut bytes = 0;
        while let Some((place, told)) = fitting.next() {
            // It was read when it was told.
            if let Ok(status) = HostStatus::parse(&told.written) {
                let silent = now.saturating_duration_since(told.at);
                listed.hosts.push(Heard { written: told.written.clone(), status, silent });
                bytes += told.written.len();
            }
            if listed.hosts.len() >= most || bytes >= PAGE_BYTES {
                listed.next = fitting.peek().is_some().then(|| place.clone());
                break;
            }
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::host::{HostSchema, HostState};
    use weighbridge_schemas::time::Timestamp;

    use super::*;

    fn status(host: &str, model: &str) -> HostStatus {
        HostStatus {
            schema: HostSchema::V1,
            host: host.into(),
            folder: "/srv/m".into(),
            model: model.parse().unwrap(),
            channel: "prod".parse().unwrap(),
            state: HostState::Starting,
            wanted: None,
            serving: None,
            serving_since: None,
            age_seconds: None,
            held: Vec::new(),
            attempts: 0,
            last_error: None,
            last_error_at: None,
            heard_at: None,
            updated_at: Timestamp::from_nanoseconds(0),
        }
    }

    fn hear(hosts: &Hosts, host: &str, model: &str, now: Instant) {
        let status = status(host, model);
        let of = if host.len() < 5 { "a" } else { &host[..1] };
        assert!(hosts.hear(of, &status, Bytes::from(status.to_json()), now));
    }

    fn names(listed: &Listed) -> Vec<&str> {
        listed.hosts.iter().map(|heard| heard.status.host.as_str()).collect()
    }

    #[test]
    fn hosts_are_listed_page_by_page_and_forgotten_after_a_while() {
        let (hosts, start) = (Hosts::default(), Instant::now());
        for host in ["c", "a", "b"] {
            hear(&hosts, host, "m", start);
        }
        hear(&hosts, "a", "other", start);
        let later = start + Duration::from_secs(90);
        hear(&hosts, "b", "m", later);
        let of_m = |model: &ModelName, _: &ChannelName| model.as_str() == "m";
        let first = hosts.list(of_m, None, 2, later);
        assert_eq!(names(&first), ["a", "b"]);
        assert_eq!(first.hosts.iter().map(|heard| heard.silent.as_secs()).collect::<Vec<_>>(), [90, 0]);
        let token = first.next.unwrap().to_string();
        let rest = hosts.list(of_m, Some(&token.parse().unwrap()), 2, later);
        assert_eq!((names(&rest), rest.next.clone()), (vec!["c"], None));
        let all = hosts.list(|_, _| true, None, 9, start + FORGOTTEN);
        assert_eq!(names(&all), ["b"], "the others have been silent for too long");
        assert_eq!(hosts.known.lock().unwrap().order.len(), 1);
    }

    #[test]
    fn there_are_only_so_many_and_the_longest_silent_goes_first() {
        let (hosts, now) = (Hosts::default(), Instant::now());
        for host in 0..MOST + 3 {
            hear(&hosts, &format!("{}{host:05}", host % 3), "m", now);
        }
        let listed = hosts.list(|_, _| true, None, 1, now);
        assert_eq!(names(&listed), ["000003"]);
        let known = hosts.known.lock().unwrap();
        assert_eq!((known.hosts.len(), known.order.len()), (MOST, MOST));
        assert_eq!(known.bytes, known.hosts.values().map(|told| told.written.len()).sum::<usize>());
    }

    #[test]
    fn one_token_neither_pushes_out_nor_speaks_for_the_hosts_of_others() {
        let (hosts, now) = (Hosts::default(), Instant::now());
        let tell = |by: &str, host: &str, now| {
            let status = status(host, "m");
            hosts.hear(by, &status, Bytes::from(status.to_json()), now)
        };
        assert!(tell("theirs", "h", now) && !tell("mine", "h", now));
        let told = (0..MOST).filter(|number| tell("mine", &number.to_string(), now)).count();
        assert_eq!(told, MOST_OF_ONE);
        assert!(tell("mine", "1", now), "what it has told already it may tell again");
        assert!(tell("theirs", "h2", now));
        assert!(tell("new", "h", now + TAKEN_OVER), "tokens are replaced");
    }

    #[test]
    fn what_is_no_place_in_a_list_is_refused() {
        let place = Place::of(&status("serving-1", "m"));
        assert_eq!(place.to_string().parse(), Ok(place));
        let short = URL_SAFE_NO_PAD.encode("a\nm\nprod");
        let bad = URL_SAFE_NO_PAD.encode("a\n../m\nprod\n/srv");
        for wrong in ["", "=", &short, &bad, &"x".repeat(PLACE_BYTES + 1)] {
            assert_eq!(wrong.parse::<Place>(), Err(NoPlace), "{wrong}");
        }
    }
}
