//! How long look-ups took, at rest and while a version was swapped.

use std::fmt;
use std::time::Duration;

/// Steps of a doubling: quantiles are right to an eighth.
const STEPS: u32 = 8;
/// Buckets: up to 2^64 nanoseconds.
const BUCKETS: usize = 64 * STEPS as usize;

/// Times, counted in buckets whose bounds grow by an eighth of a doubling: bounded memory for any number of them.
#[derive(Debug, Clone)]
pub struct Latencies {
    buckets: Vec<u64>,
    count: u64,
    longest: Duration,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, longest: Duration::ZERO }
    }
}

impl Latencies {
    /// Counts one.
    pub fn record(&mut self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        let power = nanoseconds.ilog2();
        let within = ((u128::from(nanoseconds) * u128::from(STEPS)) >> power) as usize - STEPS as usize;
        self.buckets[power as usize * STEPS as usize + within] += 1;
        self.count += 1;
        self.longest = self.longest.max(time);
    }

    /// Takes up what was counted elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(own, other)| *own += other);
        self.count += other.count;
        self.longest = self.longest.max(other.longest);
    }

    /// How many there are.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The longest.
    #[must_use]
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// What so many of a million are not above: 500,000 for the median. An eighth too much at most.
    #[must_use]
    pub fn quantile(&self, of_a_million: u64) -> Duration {
        let rank = u128::from(self.count) * u128::from(of_a_million) / 1_000_000;
        let mut below = 0;
        let bucket = self.buckets.iter().position(|count| {
            below += u128::from(*count);
            below > rank
        });
        let Some(bucket) = bucket else { return self.longest };
        let (power, within) = (bucket / STEPS as usize, bucket as u128 % u128::from(STEPS));
        let bound = ((u128::from(STEPS) + within + 1) << power) / u128::from(STEPS);
        self.longest.min(Duration::from_nanos(u64::try_from(bound).unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [half, most, nearly_all] = [500_000, 990_000, 999_000].map(|quantile| self.quantile(quantile));
        let longest = self.longest;
        write!(
            f,
            "{} of them, p50 {half:?}, p99 {most:?}, p99.9 {nearly_all:?}, longest {longest:?}",
            self.count
        )
    }
}

/// What reading threads saw.
#[derive(Debug, Clone, Default)]
pub struct Lookups {
    /// Batches that met no swap.
    pub at_rest: Latencies,
    /// Batches during which a version was opened and swapped in.
    pub during_swaps: Latencies,
}

impl Lookups {
    /// Takes up what another thread saw.
    pub fn add(&mut self, other: &Self) {
        self.at_rest.add(&other.at_rest);
        self.during_swaps.add(&other.during_swaps);
    }
}

impl fmt::Display for Lookups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batches at rest: {}\nbatches during swaps: {}", self.at_rest, self.during_swaps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_an_eighth() {
        let mut all = Latencies::default();
        for n in 1..=1000 {
            let mut one = Latencies::default();
            one.record(Duration::from_micros(n));
            all.add(&one);
        }
        for (quantile, right) in [(1, 1), (500_000, 501), (990_000, 991), (1_000_000, 1000)] {
            let (found, right) = (all.quantile(quantile), Duration::from_micros(right));
            assert!(found >= right && found <= right * 9 / 8, "{quantile}: {found:?} for {right:?}");
        }
        assert_eq!((all.count(), all.longest()), (1000, Duration::from_millis(1)));
        all.record(Duration::MAX);
        all.record(Duration::ZERO);
        assert_eq!(Latencies::default().quantile(500_000), Duration::ZERO);
    }
}
