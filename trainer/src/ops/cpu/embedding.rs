//! Token and position embedding, and their gradients.

use super::element::Element;
use super::layer_norm::piece_rows;
use super::pool::Pool;

/// Parts that the vocabulary is cut into for its gradient; each looks at all tokens.
const PARTS: usize = 32;

/// `out[b, t] = wte[tokens[b, t]] + wpe[t]`.
pub(super) fn forward<E: Element>(
    pool: &Pool,
    out_btc: &mut [E],
    [wte_vc, wpe_tc]: [&[E]; 2],
    tokens_bt: &[u32],
    tokens: usize,
) {
    let channels = out_btc.len() / tokens_bt.len();
    let rows = piece_rows(channels);
    let items = out_btc.chunks_mut(rows * channels).enumerate();
    pool.each(items, |_, (piece, out)| {
        for (at, out_c) in (piece * rows..).zip(out.chunks_exact_mut(channels)) {
            let wte_c = &wte_vc[tokens_bt[at] as usize * channels..][..channels];
            let wpe_c = &wpe_tc[at % tokens * channels..][..channels];
            for ((out, &wte), &wpe) in out_c.iter_mut().zip(wte_c).zip(wpe_c) {
                *out = wte + wpe;
            }
        }
    });
}

/// Adds the gradient of the token embedding, a row's share in the order of tokens.
pub(super) fn backward_tokens<E: Element>(pool: &Pool, dwte_vc: &mut [E], dout_btc: &[E], tokens_bt: &[u32]) {
    let channels = dout_btc.len() / tokens_bt.len();
    let rows = (dwte_vc.len() / channels).div_ceil(PARTS);
    pool.each(dwte_vc.chunks_mut(rows * channels).enumerate(), |_, (part, dwte)| {
        let first = part * rows;
        let own = first..first + dwte.len() / channels;
        for (&token, dout_c) in tokens_bt.iter().zip(dout_btc.chunks_exact(channels)) {
            if own.contains(&(token as usize)) {
                add(&mut dwte[(token as usize - first) * channels..][..channels], dout_c);
            }
        }
    });
}

/// Gradient of the position embedding, a row's share in the order of sequences.
pub(super) fn backward_positions<E: Element>(
    pool: &Pool,
    dwpe_tc: &mut [E],
    dout_btc: &[E],
    channels: usize,
    tokens: usize,
    accumulate: bool,
) {
    pool.each(dwpe_tc.chunks_exact_mut(channels).enumerate(), |_, (t, dwpe_c)| {
        if !accumulate {
            dwpe_c.fill(E::ZERO);
        }
        if t < tokens {
            for dout_tc in dout_btc.chunks_exact(tokens * channels) {
                add(dwpe_c, &dout_tc[t * channels..][..channels]);
            }
        }
    });
}

fn add<E: Element>(to: &mut [E], from: &[E]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += from;
    }
}
