//! The order of the training data, as a pure function of (seed, global sample index).
//!
//! Each epoch visits every window once, in an order of its own. There is no state but the index: a run that resumes,
//! at any world size, goes on with exactly the samples that have not been seen.
//!
//! The permutation is a balanced Feistel network over the next power of four, walked until it lands inside the range
//! (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Its round function mixes as SplitMix64 does.

const ROUNDS: u64 = 4;

/// The order of `windows` windows.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    seed: u64,
    windows: u64,
    half_bits: u32,
}

impl Order {
    /// An order of `windows` windows, at least one.
    ///
    /// # Panics
    /// When there are none.
    pub fn new(seed: u64, windows: u64) -> Self {
        assert!(windows > 0, "an order needs something to order");
        let bits = u64::BITS - (windows - 1).leading_zeros();
        Self { seed, windows, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The window that sample `index` of the whole run is.
    pub fn window(&self, index: u64) -> u64 {
        let (epoch, mut place) = (index / self.windows, index % self.windows);
        let key = mix(self.seed ^ mix(epoch));
        loop {
            place = self.permute(place, key);
            if place < self.windows {
                return place;
            }
        }
    }

    fn permute(&self, place: u64, key: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (place >> self.half_bits, place & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ mix(key ^ mix(right ^ round << 56)) & mask);
        }
        left << self.half_bits | right
    }
}

/// SplitMix64's step and finaliser (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
pub(crate) const fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_epoch_visits_every_window_once(seed: u64, windows in 1_u64..3000, epoch in 0_u64..1 << 40) {
            let order = Order::new(seed, windows);
            let seen: BTreeSet<u64> = (0..windows).map(|i| order.window(epoch * windows + i)).collect();
            prop_assert_eq!(seen.len() as u64, windows);
            prop_assert_eq!(seen.last().copied(), Some(windows - 1));
        }
    }

    #[test]
    fn looks_random() {
        let windows = 10_000;
        let order = Order::new(1, windows);
        let first: Vec<u64> = (0..windows).map(|i| order.window(i)).collect();
        let fixed = first.iter().enumerate().filter(|&(i, &window)| i as u64 == window).count();
        let rising = first.windows(2).filter(|pair| pair[0] < pair[1]).count();
        // A random permutation has 1 +- 1 fixed points and rises half of the time (+- 29, one deviation).
        assert!(fixed < 8, "{fixed}");
        assert!((4870..5130).contains(&rising), "{rising}");
        assert_ne!(first[..20], (0..20).map(|i| order.window(windows + i)).collect::<Vec<_>>());
        assert_ne!(first[..20], (0..20).map(|i| Order::new(2, windows).window(i)).collect::<Vec<_>>());
    }

    /// A change of these numbers changes every run: it must be deliberate, and refuse older checkpoints.
    #[test]
    fn known_answers() {
        let order = Order::new(42, 1000);
        let found: Vec<u64> = [0, 1, 2, 999, 1000].map(|i| order.window(i)).to_vec();
        assert_eq!(found, KNOWN);
    }

    const KNOWN: [u64; 5] = [308, 631, 905, 563, 950];
}
