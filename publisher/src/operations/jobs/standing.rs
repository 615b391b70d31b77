//! How far a job has got, as its documents tell.

use weighbridge_schemas::job::{Came, Decided, Decision, Ended, Event, Outcome, Why};
use weighbridge_snapshots::error::Result;
use weighbridge_snapshots::jobs::Job;

/// How far a job has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It has a record, and waits to be planned.
    Accepted,
    /// Its checkpoint is not complete.
    Waiting,
    /// It has parts, none of which is done.
    Planned,
    /// So many of its parts are done.
    Converting,
    /// Its parts are done; or it goes onto its channel.
    Finishing,
    /// It was decided that it is not published; its outcome is being written.
    Ending,
    /// It has an outcome.
    Ended(Ended),
}

/// How far a job has got, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// How far it has got.
    pub state: State,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// Parts that are done, and all.
    pub parts: Option<(u64, u64)>,
    /// Why it is dead or quarantined, or is being tried again.
    pub error: Option<Why>,
}

impl Standing {
    /// Reads what is needed to tell how far a job has got.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn of(job: &Job<'_>) -> Result<Self> {
        Self::again(job, &mut None).await
    }

    /// As [`Self::of`]; `planned` is how many parts the job has, once that is known. A plan may be large, and never
    /// changes: whoever looks again and again need not read it each time.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn again(job: &Job<'_>, planned: &mut Option<u64>) -> Result<Self> {
        if let Some(outcome) = job.outcome().await? {
            return Ok(Self::ended(outcome));
        }
        let last = job.events(1).await?.pop();
        if planned.is_none() {
            *planned = job.plan().await?.map(|plan| plan.parts.len() as u64);
        }
        let parts = match *planned {
            Some(all) => Some((job.parts_done().await?.len() as u64, all)),
            None => None,
        };
        let decision = job.decision().await?;
        let state = state(parts, decision.as_ref(), last.as_ref());
        Ok(Self { state, outcome: None, parts, error: last.and_then(|event| event.error) })
    }

    fn ended(outcome: Outcome) -> Self {
        let (state, error) = (State::Ended(outcome.outcome), outcome.error.clone());
        Self { state, outcome: Some(outcome), parts: None, error }
    }

    /// The stable name of the state.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.state {
            State::Accepted => "accepted",
            State::Waiting => "waiting",
            State::Planned => "planned",
            State::Converting => "converting",
            State::Finishing => "finishing",
            State::Ending => "ending",
            State::Ended(ended) => ended.as_str(),
        }
    }

    /// The state, for people.
    #[must_use]
    pub fn text(&self) -> String {
        match (self.state, self.parts) {
            (State::Converting, Some((done, all))) => format!("converting {done}/{all} parts"),
            (State::Waiting, _) => "waits for its checkpoint".to_owned(),
            _ => self.name().to_owned(),
        }
    }
}

fn state(parts: Option<(u64, u64)>, decision: Option<&Decision>, last: Option<&Event>) -> State {
    match (decision.map(|decision| decision.decision), parts) {
        (Some(Decided::Proceed), _) => State::Finishing,
        (Some(_), _) => State::Ending,
        _ if last.is_some_and(|event| event.came == Came::NotReady) => State::Waiting,
        (None, None) => State::Accepted,
        (None, Some((done, all))) if done >= all => State::Finishing,
        (None, Some((0, _))) => State::Planned,
        (None, Some(_)) => State::Converting,
    }
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::job::Document;

    use super::*;

    #[test]
    fn how_far_a_job_has_got() {
        let event = |came: &str| {
            let text = format!(
                r#"{{"schema":"weighbridge.event/v1","step":"plan","came":"{came}","who":"w",
                "began":"2026-01-01T00:00:00Z","milliseconds":1}}"#
            );
            Event::parse(text.as_bytes()).unwrap()
        };
        let decided = |decision: &str| {
            let text = format!(
                r#"{{"schema":"weighbridge.decision/v1","decision":"{decision}","who":"w",
                "when":"2026-01-01T00:00:00Z"}}"#
            );
            Decision::parse(text.as_bytes()).unwrap()
        };
        assert_eq!(state(None, None, None), State::Accepted);
        assert_eq!(state(None, None, Some(&event("failed"))), State::Accepted);
        assert_eq!(state(None, None, Some(&event("not_ready"))), State::Waiting);
        assert_eq!(state(Some((0, 7)), None, Some(&event("done"))), State::Planned);
        assert_eq!(state(Some((3, 7)), None, None), State::Converting);
        assert_eq!(state(Some((7, 7)), None, None), State::Finishing);
        assert_eq!(state(Some((7, 7)), Some(&decided("proceed")), None), State::Finishing);
        assert_eq!(state(None, Some(&decided("cancelled")), Some(&event("not_ready"))), State::Ending);
    }
}
