//! Causal attention, a head of a sequence at a time, some queries at a time.
//!
//! Scores live in a thread's own tile and are made again going backward, so memory does not grow with the square of T.
//! Sums over keys and over queries go in order, whichever thread takes which head.

use std::sync::Mutex;

use super::element::{Element, max_lanes, sum_lanes};
use super::gemm::{Output, PackedRight, Size, View, Workspace, multiply, own, steps};
use super::isa::{Available, per_isa};
use super::pool::Pool;
use crate::ops::AttentionShape;

/// Queries of a tile, in whole panels of every kernel.
const QUERIES: usize = 48;

per_isa! {
    /// exp of the scaled scores of the keys up to the query's own, 0 beyond. Leaves the largest score and the
    /// reciprocal sum.
    fn softmax_row<E: Element>(scores: &mut [E], keys: usize, scale: E, stats: &mut [E]) {
        let (seen, unseen) = scores.split_at_mut(keys);
        unseen.fill(E::ZERO);
        let max = max_lanes(seen);
        for score in seen.iter_mut() {
            *score = ((*score - max) * scale).exp();
        }
        stats[0] = max;
        stats[1] = E::ONE / sum_lanes([seen], |[x]| x);
    }
}

per_isa! {
    /// Probabilities from scores, with the statistics of [`softmax_row`].
    fn softmax_again_row<E: Element>(scores: &mut [E], keys: usize, scale: E, stats: &[E]) {
        let (seen, unseen) = scores.split_at_mut(keys);
        unseen.fill(E::ZERO);
        for score in seen.iter_mut() {
            *score = ((*score - stats[0]) * scale).exp() * stats[1];
        }
    }
}

per_isa! {
    /// Gradients of scores from those of probabilities.
    fn softmax_backward_row<E: Element>(dscores: &mut [E], probabilities: &[E], delta: E, scale: E) {
        for (dscore, &probability) in dscores.iter_mut().zip(probabilities) {
            *dscore = probability * (*dscore - delta) * scale;
        }
    }
}

per_isa! {
    fn scale_row<E: Element>(row: &mut [E], by: E) {
        for x in row.iter_mut() {
            *x *= by;
        }
    }
}

per_isa! {
    fn dot<E: Element>(x: &[E], y: &[E]) -> E {
        sum_lanes([x, y], |[x, y]| x * y)
    }
}

/// Where one head of one sequence lies.
#[derive(Clone, Copy)]
struct Place {
    /// First element of the head's queries; keys and values are H D and 2 H D further.
    qkv: usize,
    /// First element of the head's output.
    out: usize,
    /// First of the head's statistics.
    stats: usize,
}

fn places(shape: AttentionShape) -> impl Iterator<Item = Place> + Send {
    let AttentionShape { sequences, tokens, heads, head_channels } = shape;
    let c = heads * head_channels;
    (0..sequences * heads).map(move |i| {
        let (b, h) = (i / heads, i % heads);
        Place {
            qkv: b * tokens * 3 * c + h * head_channels,
            out: b * tokens * c + h * head_channels,
            stats: i * tokens * 2,
        }
    })
}

/// A head's part of an array as a factor.
fn head<E>(from: &[E], start: usize, stride: usize) -> View<E> {
    View { start: from[start..].as_ptr(), row: stride, column: 1 }
}

/// Forward. `stats_bht2` takes each query's largest score and the reciprocal of its softmax's sum.
pub(super) fn forward<E: Element>(
    available: Available,
    pool: &Pool,
    workspaces: &[Mutex<Workspace>],
    [out_btc, stats_bht2]: [&mut [E]; 2],
    qkv_bt3c: &[E],
    shape: AttentionShape,
) {
    let (tokens, d) = (shape.tokens, shape.head_channels);
    let c = shape.heads * d;
    let scale = E::from_f64(1.0 / (d as f64).sqrt());
    let out = &Output { start: out_btc.as_mut_ptr(), stride: c };
    let items = places(shape).zip(stats_bht2.chunks_exact_mut(tokens * 2));
    pool.each(items, |worker, (place, stats_t2)| {
        let Workspace { left, right, scores, .. } = &mut *own(workspaces, worker);
        let [to_keys, to_values, ..] = right;
        let [q, k, v] = [0, c, 2 * c].map(|part| head(qkv_bt3c, place.qkv + part, 3 * c));
        // SAFETY: they are this head's.
        let (keys_dt, values_td) = unsafe {
            (
                PackedRight::new(available, to_keys, k.transpose(), d, tokens),
                PackedRight::new(available, to_values, v, tokens, d),
            )
        };
        for queries in steps(0..tokens, QUERIES) {
            let (count, keys) = (queries.len(), queries.end);
            let scores = scores.take::<E>(count * keys);
            let tile = Output { start: scores.as_mut_ptr(), stride: keys };
            let size = Size { rows: count, columns: keys, depth: d };
            // SAFETY: the queries are this head's; the tile is this thread's own.
            unsafe { multiply(available, left, size, q.from(queries.start, 0), &keys_dt, tile, false) };
            for (query, row) in queries.clone().zip(scores.chunks_exact_mut(keys)) {
                softmax_row(available, row, query + 1, scale, &mut stats_t2[query * 2..][..2]);
            }
            let size = Size { rows: count, columns: d, depth: keys };
            // SAFETY: as above, and no other thread writes this head's output.
            unsafe {
                let out = Output { start: out.start.add(place.out + queries.start * c), ..*out };
                multiply(available, left, size, head(scores, 0, keys), &values_td, out, false);
                for (i, query) in queries.enumerate() {
                    scale_row(available, out.row(i, &(0..d)), stats_t2[query * 2 + 1]);
                }
            }
        }
    });
}

/// Gradients of queries, keys and values.
pub(super) fn backward<E: Element>(
    available: Available,
    pool: &Pool,
    workspaces: &[Mutex<Workspace>],
    dqkv_bt3c: &mut [E],
    [dout_btc, out_btc, stats_bht2, qkv_bt3c]: [&[E]; 4],
    shape: AttentionShape,
) {
    let (tokens, d) = (shape.tokens, shape.head_channels);
    let c = shape.heads * d;
    let scale = E::from_f64(1.0 / (d as f64).sqrt());
    let dqkv = &Output { start: dqkv_bt3c.as_mut_ptr(), stride: 3 * c };
    pool.each(places(shape), |worker, place| {
        let Workspace { left, right, scores, dscores } = &mut *own(workspaces, worker);
        let [for_scores, for_dprobabilities, for_dq, of_tile] = right;
        let [q, k, v] = [0, c, 2 * c].map(|part| head(qkv_bt3c, place.qkv + part, 3 * c));
        // SAFETY: they are this head's.
        let (keys_dt, values_dt, keys_td) = unsafe {
            (
                PackedRight::new(available, for_scores, k.transpose(), d, tokens),
                PackedRight::new(available, for_dprobabilities, v.transpose(), d, tokens),
                PackedRight::new(available, for_dq, k, tokens, d),
            )
        };
        // The last tile comes first: it sees all keys, so it begins the sums that the others add to.
        let tiles = tokens.div_ceil(QUERIES);
        for tile in (0..tiles).rev() {
            let queries = tile * QUERIES..tokens.min((tile + 1) * QUERIES);
            let (count, keys) = (queries.len(), queries.end);
            let accumulate = tile + 1 < tiles;
            let scores = scores.take::<E>(count * keys);
            let dscores = dscores.take::<E>(count * keys);
            let own_tile = |start: *mut E| Output { start, stride: keys };
            let to_keys = Size { rows: count, columns: keys, depth: d };
            let over_queries = Size { rows: keys, columns: d, depth: count };
            let over_keys = Size { rows: count, columns: d, depth: keys };
            let row_out = |query: usize| place.out + query * c..place.out + query * c + d;
            // SAFETY: all factors are of this head and these queries; the tiles are this thread's own, and no other
            // thread writes this head's gradients.
            unsafe {
                let q = q.from(queries.start, 0);
                let dout = head(dout_btc, place.out + queries.start * c, c);
                let gradient = |part: usize, first: usize| Output {
                    start: dqkv.start.add(place.qkv + part * c + first * 3 * c),
                    ..*dqkv
                };
                multiply(available, left, to_keys, q, &keys_dt, own_tile(scores.as_mut_ptr()), false);
                for (query, row) in queries.clone().zip(scores.chunks_exact_mut(keys)) {
                    let stats = &stats_bht2[place.stats + query * 2..][..2];
                    softmax_again_row(available, row, query + 1, scale, stats);
                }
                multiply(available, left, to_keys, dout, &values_dt, own_tile(dscores.as_mut_ptr()), false);
                let probabilities = head(scores, 0, keys).transpose();
                let dout = PackedRight::new(available, of_tile, dout, count, d);
                multiply(available, left, over_queries, probabilities, &dout, gradient(2, 0), accumulate);
                let rows = dscores.chunks_exact_mut(keys).zip(scores.chunks_exact(keys));
                for (query, (dscores, scores)) in queries.clone().zip(rows) {
                    let delta = dot(available, &dout_btc[row_out(query)], &out_btc[row_out(query)]);
                    softmax_backward_row(available, dscores, scores, delta, scale);
                }
                let dscores = head(dscores, 0, keys);
                multiply(available, left, over_keys, dscores, &keys_td, gradient(0, queries.start), false);
                let q = PackedRight::new(available, of_tile, q, count, d);
                multiply(available, left, over_queries, dscores.transpose(), &q, gradient(1, 0), accumulate);
            }
        }
    });
}
