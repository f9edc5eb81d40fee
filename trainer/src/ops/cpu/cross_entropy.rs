//! Softmax and cross-entropy of rows of logits, and the gradient in their place.

use super::element::{Element, max_lanes, sum_lanes};
use super::isa::{Available, per_isa};
use super::layer_norm::piece_rows;
use super::pool::Pool;

/// Loss of each row, and with `scale` the logits' gradient times it.
pub(super) fn cross_entropy<E: Element>(
    available: Available,
    pool: &Pool,
    [losses_n, logits_nv]: [&mut [E]; 2],
    targets_n: &[u32],
    scale: Option<E>,
) {
    let vocabulary = logits_nv.len() / targets_n.len();
    let rows = piece_rows(vocabulary);
    let items =
        logits_nv.chunks_mut(rows * vocabulary).zip(losses_n.chunks_mut(rows)).zip(targets_n.chunks(rows));
    pool.each(items, |_, ((logits, losses), targets)| {
        let rows = logits.chunks_exact_mut(vocabulary);
        for ((logits, loss), &target) in rows.zip(losses).zip(targets) {
            *loss = row(available, logits, target as usize, scale);
        }
    });
}

per_isa! {
    fn row<E: Element>(logits: &mut [E], target: usize, scale: Option<E>) -> E {
        let max = max_lanes(logits);
        let at_target = logits[target];
        for logit in logits.iter_mut() {
            *logit = (*logit - max).exp();
        }
        let sum = sum_lanes([logits], |[x]| x);
        if let Some(scale) = scale {
            let factor = scale / sum;
            for logit in logits.iter_mut() {
                *logit *= factor;
            }
            logits[target] = logits[target] - scale;
        }
        sum.ln() + max - at_target
    }
}
