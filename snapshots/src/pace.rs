//! How fast bytes may come in: for hosts that share a line with those whom they serve.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A bound on bytes a second; or none. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    bounded: Option<Arc<Bounded>>,
}

#[derive(Debug)]
struct Bounded {
    bytes_a_second: u64,
    /// Up to when what was taken so far uses the line.
    used_until: Mutex<Instant>,
}

impl Pace {
    /// At most `bytes_a_second`, on the average of a second or so.
    #[must_use]
    pub fn of(bytes_a_second: u64) -> Self {
        let bounded =
            Bounded { bytes_a_second: bytes_a_second.max(1), used_until: Mutex::new(Instant::now()) };
        Self { bounded: Some(Arc::new(bounded)) }
    }

    /// Waits until so many bytes may have come.
    pub async fn take(&self, bytes: u64) {
        let Some(bounded) = &self.bounded else { return };
        let wait = {
            let now = Instant::now();
            let mut until = bounded.used_until.lock().unwrap_or_else(PoisonError::into_inner);
            let seconds = bytes as f64 / bounded.bytes_a_second as f64;
            *until = (*until).max(now) + Duration::from_secs_f64(seconds.min(86_400.0));
            until.saturating_duration_since(now)
        };
        tokio::time::sleep(wait).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn those_who_share_a_pace_keep_it_together() {
        let began = Instant::now();
        let pace = Pace::of(1_000_000);
        let others = (0..4).map(|_| {
            let pace = pace.clone();
            tokio::spawn(async move {
                for _ in 0..10 {
                    pace.take(5_000).await;
                }
            })
        });
        for other in others.collect::<Vec<_>>() {
            other.await.unwrap();
        }
        assert!(began.elapsed() >= Duration::from_millis(190), "200 kB at 1 MB a second");
        Pace::default().take(u64::MAX).await;
    }
}
