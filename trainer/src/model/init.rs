//! Initial parameters from a counter-based generator.
//!
//! Each element depends on the seed, the parameter's global name and the element's index in it, and on nothing else, so
//! any rank can make any part alone. Only IEEE additions, multiplications, divisions and square roots are used, none
//! fused, so that every machine gets the same bits.

use super::layout::{Initial, Parameter};

/// Elements made at a time.
pub(super) const CHUNK: usize = 1 << 16;

/// Initial values of one parameter.
pub struct Generator {
    key: u64,
    initial: Initial,
}

impl Generator {
    /// The generator for `parameter` under `seed`.
    pub fn new(seed: u64, parameter: &Parameter) -> Self {
        // FNV-1a, then mixed with the seed.
        let name = parameter.name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self { key: mix(mix(seed) ^ name), initial: parameter.initial }
    }

    /// The element at `index` of the parameter.
    pub fn value(&self, index: u64) -> f64 {
        match self.initial {
            Initial::Constant(value) => value,
            Initial::Normal(deviation) => deviation * normal(self.key, index),
        }
    }
}

/// A standard normal number for (key, index).
fn normal(key: u64, index: u64) -> f64 {
    let bits = mix(key.wrapping_add(mix(index.wrapping_add(0x9e37_79b9_7f4a_7c15))));
    // The middle of one of 2^53 equal parts of (0, 1).
    quantile(((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64)
}

/// SplitMix64's output function (Steele, Lea, Flood 2014).
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Quantile of the standard normal distribution for 0 < p < 1, by P. J. Acklam's rational approximation (2003);
/// relative error below 1.2e-9.
fn quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 6] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 5] = [
        7.784_695_709_041_462e-3,
        3.224_671_290_700_398e-1,
        2.445_134_137_142_996,
        3.754_408_661_907_416,
        1.0,
    ];
    const LOW: f64 = 0.02425;
    let tail = |p: f64| {
        let q = (-2.0 * ln(p)).sqrt();
        polynomial(&C, q) / polynomial(&D, q)
    };
    if p < LOW {
        tail(p)
    } else if p > 1.0 - LOW {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        let r = q * q;
        q * polynomial(&A, r) / polynomial(&B, r)
    }
}

fn polynomial(coefficients: &[f64], x: f64) -> f64 {
    coefficients.iter().fold(0.0, |sum, c| sum * x + c)
}

/// Natural logarithm of a positive normal number: 2 artanh((m - 1) / (m + 1)) + e ln 2 for x = m 2^e, with m between
/// 0.7 and 1.5. The standard library's may differ in its last bit from machine to machine.
fn ln(x: f64) -> f64 {
    let shifted = x.to_bits().wrapping_sub(0x3fe6_a09e_667f_3bcd);
    let exponent = (shifted as i64) >> 52;
    let m = f64::from_bits(x.to_bits().wrapping_sub((exponent << 52) as u64));
    let s = (m - 1.0) / (m + 1.0);
    let series = (0..12_i32).rev().fold(0.0, |sum, k| sum * (s * s) + 1.0 / f64::from(2 * k + 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_agrees_with_the_standard_library() {
        for i in 1..2000 {
            let x = f64::from(i) * 0.001 + 1e-12;
            assert!((ln(x) - x.ln()).abs() <= 1e-14 * x.ln().abs().max(1.0), "{x}");
        }
        assert!((ln(1e-16) - 1e-16_f64.ln()).abs() < 1e-13);
    }

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (p, expect) in [
            (0.5, 0.0),
            (0.841_344_746_068_542_9, 1.0),
            (0.022_750_131_948_179_2, -2.0),
            (0.998_650_101_968_369_9, 3.0),
            (2.866_515_718_791_933e-7, -5.0),
        ] {
            assert!((quantile(p) - expect).abs() < 1e-8, "{p}: {}", quantile(p));
        }
    }

    #[test]
    fn moments_and_independence() {
        let count = 200_000;
        let draw = |key: u64| (0..count).map(move |index| normal(key, index));
        let n = count as f64;
        let mean = draw(1).sum::<f64>() / n;
        let variance = draw(1).map(|x| x * x).sum::<f64>() / n;
        let fourth = draw(1).map(|x| x.powi(4)).sum::<f64>() / n;
        let next = draw(1).zip(draw(1).skip(1)).map(|(x, y)| x * y).sum::<f64>() / n;
        let other = draw(1).zip(draw(2)).map(|(x, y)| x * y).sum::<f64>() / n;
        // Four standard errors each: sqrt(1/n), sqrt(2/n), sqrt(96/n).
        assert!(mean.abs() < 0.009, "{mean}");
        assert!((variance - 1.0).abs() < 0.013, "{variance}");
        assert!((fourth - 3.0).abs() < 0.09, "{fourth}");
        assert!(next.abs() < 0.009 && other.abs() < 0.009, "{next} {other}");
    }
}
