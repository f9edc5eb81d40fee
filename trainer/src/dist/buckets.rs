//! Cuts the flat gradient into buckets, each reduced as soon as backward has finished it.
//!
//! Left out: the reduction itself.

use std::ops::Range;

/// Bytes of gradient per bucket. A bucket should take much longer to reduce than the ring's hops take, and a model whose
/// gradient fits into one gains nothing from more.
pub const BUCKET_BYTES: usize = 8 << 20;

/// The flat gradient's ranges, from its start to its end: the order in which backward finishes them, the same on all
/// ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketPlan {
    ranges: Vec<Range<usize>>,
}

impl BucketPlan {
    /// Cuts `parameters` elements into buckets of at most `bucket_bytes`, as equal as possible.
    pub fn new(parameters: usize, bucket_bytes: usize) -> Self {
        let most = (bucket_bytes / size_of::<f32>()).max(1);
        let count = parameters.div_ceil(most).max(1);
        let bound = |index: usize| parameters * index / count;
        Self { ranges: (0..count).map(|index| bound(index)..bound(index + 1)).collect() }
    }

    /// The buckets in the order in which they are reduced.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// The buckets that become whole when, after the first `before` elements, the first `after` are final.
    pub fn completed(&self, before: usize, after: usize) -> &[Range<usize>] {
        let whole = |end: usize| self.ranges.partition_point(|range| range.end <= end);
        &self.ranges[whole(before)..whole(after)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_the_gradient_once() {
        for (parameters, bytes) in [(1, 4), (10, 16), (1000, 64), (7, 1 << 20), (12_345, 999)] {
            let plan = BucketPlan::new(parameters, bytes);
            let mut end = 0;
            for range in plan.ranges() {
                assert_eq!(range.start, end);
                assert!(!range.is_empty() && range.len() * 4 <= bytes, "{range:?} of {bytes} bytes");
                end = range.end;
            }
            assert_eq!(end, parameters);
        }
    }

    #[test]
    fn each_bucket_starts_once_when_whole() {
        let plan = BucketPlan::new(12, 16);
        assert_eq!(plan.ranges(), [0..4, 4..8, 8..12]);
        assert!(plan.completed(0, 3).is_empty());
        assert_eq!(plan.completed(3, 9), [0..4, 4..8]);
        assert!(plan.completed(9, 11).is_empty());
        assert_eq!(plan.completed(11, 12), &plan.ranges()[2..]);
    }
}
