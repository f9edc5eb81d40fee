//! GELU in its tanh form: `x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, which is `x sigmoid(2 u)` for that tanh's
//! argument u.

use super::element::Element;
use super::isa::per_isa;
use super::pool::Pool;

/// Elements of a piece of work.
const PIECE: usize = 1 << 13;

/// sigmoid(2 u), and the derivative of 2 u.
#[inline(always)]
fn sigmoid<E: Element>(x: E) -> (E, E) {
    let root = E::from_f64(1.595_769_121_605_730_8);
    let cubic = E::from_f64(1.595_769_121_605_730_8 * 0.044_715);
    let square = x * x;
    let minus = -(x * (root + cubic * square));
    // Beyond it everything is 0 to the last place of any sum; numbers below the normal ones are slow.
    let most = E::from_f64(80.0);
    let sigmoid = E::ONE / (E::ONE + if minus > most { most } else { minus }.exp());
    (sigmoid, root + E::from_f64(3.0) * cubic * square)
}

per_isa! {
    /// `out = gelu(x)`.
    pub(super) fn forward<E: Element>(out: &mut [E], x: &[E]) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = x * sigmoid(x).0;
        }
    }
}

per_isa! {
    fn with_derivative_piece<E: Element>(gelu: &mut [E], x: &mut [E]) {
        for (gelu, x) in gelu.iter_mut().zip(x) {
            let (s, du) = sigmoid(*x);
            *gelu = *x * s;
            *x = s + *gelu * (E::ONE - s) * du;
        }
    }
}

/// `gelu = gelu(x)`, and `x` becomes its derivative.
pub(super) fn with_derivative<E: Element>(
    available: super::isa::Available,
    pool: &Pool,
    gelu: &mut [E],
    x: &mut [E],
) {
    pool.each(gelu.chunks_mut(PIECE).zip(x.chunks_mut(PIECE)), |_, (gelu, x)| {
        with_derivative_piece(available, gelu, x);
    });
}
