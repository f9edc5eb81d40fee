//! The floating-point types that the processor computes with: f32 to train, f64 to check gradients.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

use super::isa::Available;
use super::kernel::Kernel;
use crate::ops::Real;

/// Lanes in which sums are kept, whatever the instruction set, so that their order is always the same.
pub(super) const LANES: usize = 16;

/// A floating-point type with the arithmetic that the kernels are written in.
pub trait Element:
    Real
    + bytemuck::Pod
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + PartialOrd
    + Sum
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;

    /// e to this power, within 2 units in the last place; 0 where that is below the smallest normal number, NaN for NaN.
    fn exp(self) -> Self;

    /// Square root, correctly rounded.
    fn sqrt(self) -> Self;

    /// Natural logarithm.
    fn ln(self) -> Self;

    /// The micro-kernel of matrix products.
    #[doc(hidden)]
    fn kernel(available: Available) -> Kernel<Self>;
}

impl Element for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    /// 2^n times a polynomial in the rest, n = round(x / ln 2). Constants of Cephes' expf (S. L. Moshier).
    #[inline(always)]
    fn exp(self) -> Self {
        // Adding it to a number below 2^22 leaves that number, rounded to an integer, in the low bits.
        const ROUND: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512
        const LN2_LOW: f32 = -2.121_944_4e-4;
        const LEAST: f32 = -87.336_54;
        const MOST: f32 = 88.376_26;
        let x = if self > MOST { MOST } else { self };
        let rounded = x * std::f32::consts::LOG2_E + ROUND;
        let n = rounded - ROUND;
        let r = x - n * LN2_HIGH - n * LN2_LOW;
        let mut p = 1.987_569_1e-4;
        p = p * r + 1.398_199_9e-3;
        p = p * r + 8.333_452e-3;
        p = p * r + 4.166_579_6e-2;
        p = p * r + 1.666_666_5e-1;
        p = p * r + 0.5;
        let y = p * (r * r) + r + 1.0;
        let power = y * Self::from_bits(rounded.to_bits().wrapping_add(127) << 23);
        if self < LEAST { 0.0 } else { power }
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Self::sqrt(self)
    }

    fn ln(self) -> Self {
        Self::ln(self)
    }

    fn kernel(available: Available) -> Kernel<Self> {
        Kernel::f32(available)
    }
}

impl Element for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    fn exp(self) -> Self {
        Self::exp(self)
    }

    fn sqrt(self) -> Self {
        Self::sqrt(self)
    }

    fn ln(self) -> Self {
        Self::ln(self)
    }

    fn kernel(available: Available) -> Kernel<Self> {
        Kernel::portable(available)
    }
}

/// The sum of `f` over the elements of arrays of one length, in [`LANES`] lanes, which are then added in order.
#[inline(always)]
pub(super) fn sum_lanes<E: Element, const N: usize>(arrays: [&[E]; N], f: impl Fn([E; N]) -> E) -> E {
    let mut lanes = [E::ZERO; LANES];
    let chunks = arrays.map(|array| array.as_chunks::<LANES>().0);
    for i in 0..chunks[0].len() {
        let chunk = chunks.map(|chunk| &chunk[i]);
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(chunk.map(|chunk| chunk[lane]));
        }
    }
    let rest = arrays.map(|array| array.as_chunks::<LANES>().1);
    for (lane, sum) in lanes.iter_mut().enumerate().take(rest[0].len()) {
        *sum += f(rest.map(|rest| rest[lane]));
    }
    lanes.into_iter().sum()
}

/// The largest of `x`; NaNs are passed over.
#[inline(always)]
pub(super) fn max_lanes<E: Element>(x: &[E]) -> E {
    let mut lanes = [x[0]; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    let rest = chunks.remainder();
    let larger = |max: E, &value: &E| if value > max { value } else { max };
    rest.iter().fold(lanes.iter().fold(lanes[0], larger), larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0_f64;
        let mut x = -87.3_f32;
        while x < 88.3 {
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * 2.0_f64.powi(exact.log2().floor() as i32);
            worst = worst.max((f64::from(Element::exp(x)) - exact).abs() / unit);
            x += 0.000_731;
        }
        assert!(worst < 2.0, "{worst}");
    }

    #[test]
    fn exponential_at_the_edges() {
        assert_eq!(Element::exp(0.0_f32), 1.0);
        assert_eq!(Element::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Element::exp(-1e4_f32), 0.0);
        assert!(Element::exp(f32::INFINITY) > 2e38);
        assert!(Element::exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_take_every_element() {
        for len in 1..70 {
            let x: Vec<f64> = (0..len).map(|i| f64::from((i * 37) % 61)).collect();
            assert_eq!(sum_lanes([&x], |[x]| x), x.iter().sum::<f64>());
            assert_eq!(max_lanes(&x), x.iter().copied().fold(f64::MIN, f64::max));
        }
    }
}
