//! Layer norm and its gradient. Rows are independent; sums over rows go in the order of rows, a few columns at a time.

use super::element::{Element, LANES, sum_lanes};
use super::isa::{Available, per_isa};
use super::pool::Pool;

const EPSILON: f64 = 1e-5;
/// Elements of a piece of work over rows.
const PIECE: usize = 1 << 13;
/// Columns of a piece of work over columns.
const COLUMNS: usize = 4 * LANES;

/// Rows of a piece of work.
pub(super) fn piece_rows(columns: usize) -> usize {
    (PIECE / columns).max(1)
}

per_isa! {
    fn forward_rows<E: Element>(out: &mut [E], stats: &mut [E], x: &[E], gain: &[E], bias: &[E]) {
        let channels = gain.len();
        let count = E::from_f64(channels as f64);
        for ((out, stats), x) in
            out.chunks_exact_mut(channels).zip(stats.chunks_exact_mut(2)).zip(x.chunks_exact(channels))
        {
            let mean = sum_lanes([x], |[x]| x) / count;
            let variance = sum_lanes([x], |[x]| (x - mean) * (x - mean)) / count;
            let reciprocal = E::ONE / (variance + E::from_f64(EPSILON)).sqrt();
            stats.copy_from_slice(&[mean, reciprocal]);
            normalise(out, stats, x, gain, bias);
        }
    }
}

per_isa! {
    fn again_rows<E: Element>(out: &mut [E], stats: &[E], x: &[E], gain: &[E], bias: &[E]) {
        let channels = gain.len();
        for ((out, stats), x) in
            out.chunks_exact_mut(channels).zip(stats.chunks_exact(2)).zip(x.chunks_exact(channels))
        {
            normalise(out, stats, x, gain, bias);
        }
    }
}

#[inline(always)]
fn normalise<E: Element>(out: &mut [E], stats: &[E], x: &[E], gain: &[E], bias: &[E]) {
    let (mean, reciprocal) = (stats[0], stats[1]);
    for (((out, &x), &gain), &bias) in out.iter_mut().zip(x).zip(gain).zip(bias) {
        *out = (x - mean) * reciprocal * gain + bias;
    }
}

/// Forward, leaving mean and reciprocal deviation of each row in `stats`.
pub(super) fn forward<E: Element>(
    available: Available,
    pool: &Pool,
    [out, stats]: [&mut [E]; 2],
    [x, gain, bias]: [&[E]; 3],
) {
    let rows = piece_rows(gain.len());
    let piece = rows * gain.len();
    let items = out.chunks_mut(piece).zip(stats.chunks_mut(rows * 2)).zip(x.chunks(piece));
    pool.each(items, |_, ((out, stats), x)| forward_rows(available, out, stats, x, gain, bias));
}

/// Forward from the statistics.
pub(super) fn again<E: Element>(
    available: Available,
    pool: &Pool,
    out: &mut [E],
    [stats, x, gain, bias]: [&[E]; 4],
) {
    let rows = piece_rows(gain.len());
    let piece = rows * gain.len();
    let items = out.chunks_mut(piece).zip(stats.chunks(rows * 2)).zip(x.chunks(piece));
    pool.each(items, |_, ((out, stats), x)| again_rows(available, out, stats, x, gain, bias));
}

per_isa! {
    fn backward_rows<E: Element>(dx: &mut [E], accumulate: bool, dout: &[E], x: &[E], stats: &[E], gain: &[E]) {
        let channels = gain.len();
        let count = E::from_f64(channels as f64);
        for (((dx, dout), x), stats) in dx
            .chunks_exact_mut(channels)
            .zip(dout.chunks_exact(channels))
            .zip(x.chunks_exact(channels))
            .zip(stats.chunks_exact(2))
        {
            let (mean, reciprocal) = (stats[0], stats[1]);
            let normed = |x: E| (x - mean) * reciprocal;
            let mean1 = sum_lanes([dout, gain], |[dout, gain]| dout * gain) / count;
            let mean2 = sum_lanes([dout, gain, x], |[dout, gain, x]| dout * gain * normed(x)) / count;
            for (((dx, &dout), &gain), &x) in dx.iter_mut().zip(dout).zip(gain).zip(x) {
                let value = (dout * gain - mean1 - normed(x) * mean2) * reciprocal;
                *dx = if accumulate { *dx + value } else { value };
            }
        }
    }
}

/// Gradient of the input.
pub(super) fn backward_input<E: Element>(
    available: Available,
    pool: &Pool,
    dx: &mut [E],
    accumulate: bool,
    [dout, x, stats, gain]: [&[E]; 4],
) {
    let rows = piece_rows(gain.len());
    let piece = rows * gain.len();
    let items = dx.chunks_mut(piece).zip(dout.chunks(piece)).zip(x.chunks(piece)).zip(stats.chunks(rows * 2));
    pool.each(items, |_, (((dx, dout), x), stats)| {
        backward_rows(available, dx, accumulate, dout, x, stats, gain);
    });
}

per_isa! {
    fn backward_columns<E: Element>(
        dgain: &mut [E],
        dbias: &mut [E],
        start: usize,
        channels: usize,
        read: [&[E]; 3],
    ) {
        let [dout, x, stats] = read;
        let mut gains = [E::ZERO; COLUMNS];
        let mut biases = [E::ZERO; COLUMNS];
        let width = dgain.len();
        for ((dout, x), stats) in
            dout.chunks_exact(channels).zip(x.chunks_exact(channels)).zip(stats.chunks_exact(2))
        {
            let (mean, reciprocal) = (stats[0], stats[1]);
            let (dout, x) = (&dout[start..start + width], &x[start..start + width]);
            for (((gain, bias), &dout), &x) in gains.iter_mut().zip(&mut biases).zip(dout).zip(x) {
                *gain += dout * ((x - mean) * reciprocal);
                *bias += dout;
            }
        }
        for ((dgain, dbias), (&gain, &bias)) in dgain.iter_mut().zip(dbias).zip(gains.iter().zip(&biases)) {
            *dgain += gain;
            *dbias += bias;
        }
    }
}

/// Adds the gradients of gain and bias.
pub(super) fn backward_parameters<E: Element>(
    available: Available,
    pool: &Pool,
    [dgain, dbias]: [&mut [E]; 2],
    dout_x_stats: [&[E]; 3],
) {
    let channels = dgain.len();
    let items = dgain.chunks_mut(COLUMNS).zip(dbias.chunks_mut(COLUMNS)).enumerate();
    pool.each(items, |_, (piece, (dgain, dbias))| {
        backward_columns(available, dgain, dbias, piece * COLUMNS, channels, dout_x_stats);
    });
}

per_isa! {
    fn sum_columns<E: Element>(out: &mut [E], start: usize, channels: usize, x: &[E]) {
        let mut sums = [E::ZERO; COLUMNS];
        let width = out.len();
        for x in x.chunks_exact(channels) {
            for (sum, &x) in sums.iter_mut().zip(&x[start..start + width]) {
                *sum += x;
            }
        }
        for (out, &sum) in out.iter_mut().zip(&sums) {
            *out += sum;
        }
    }
}

/// Adds the sum of the rows of `x`: a bias's gradient.
pub(super) fn sum_rows<E: Element>(available: Available, pool: &Pool, out: &mut [E], x: &[E]) {
    let channels = out.len();
    pool.each(out.chunks_mut(COLUMNS).enumerate(), |_, (piece, out)| {
        sum_columns(available, out, piece * COLUMNS, channels, x);
    });
}
