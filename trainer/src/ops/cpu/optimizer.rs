//! AdamW's update, and sums of squares for the norm of the gradients.

use super::element::{Element, sum_lanes};
use super::isa::{Available, per_isa};
use super::pool::Pool;
use crate::ops::AdamWStep;

/// Elements of a piece of work.
const PIECE: usize = 1 << 15;

/// [`AdamWStep`] as numbers that the inner loop multiplies by.
#[derive(Clone, Copy)]
struct Factors<E> {
    scale: E,
    beta1: E,
    rest1: E,
    beta2: E,
    rest2: E,
    keep: E,
    rate: E,
    root: E,
    epsilon: E,
}

per_isa! {
    fn update_piece<E: Element>(
        parameters: &mut [E],
        first: &mut [E],
        second: &mut [E],
        gradients: &[E],
        factors: Factors<E>,
    ) {
        let f = factors;
        let len = gradients.len();
        let (parameters, first, second) = (&mut parameters[..len], &mut first[..len], &mut second[..len]);
        for i in 0..len {
            let gradient = gradients[i] * f.scale;
            let m = f.beta1 * first[i] + f.rest1 * gradient;
            let v = f.beta2 * second[i] + f.rest2 * gradient * gradient;
            first[i] = m;
            second[i] = v;
            parameters[i] = parameters[i] * f.keep - f.rate * m / (v.sqrt() * f.root + f.epsilon);
        }
    }
}

/// One update, in place.
pub(super) fn update<E: Element>(
    available: Available,
    pool: &Pool,
    [parameters, first, second]: [&mut [E]; 3],
    gradients: &[E],
    step: &AdamWStep,
) {
    let factors = Factors {
        scale: E::from_f64(step.gradient_scale),
        beta1: E::from_f64(step.beta1),
        rest1: E::from_f64(1.0 - step.beta1),
        beta2: E::from_f64(step.beta2),
        rest2: E::from_f64(1.0 - step.beta2),
        keep: E::from_f64(1.0 - step.learning_rate * step.weight_decay),
        rate: E::from_f64(step.learning_rate / step.bias_correction1),
        root: E::from_f64(1.0 / step.bias_correction2.sqrt()),
        epsilon: E::from_f64(step.epsilon),
    };
    let items = parameters
        .chunks_mut(PIECE)
        .zip(first.chunks_mut(PIECE))
        .zip(second.chunks_mut(PIECE))
        .zip(gradients.chunks(PIECE));
    pool.each(items, |_, (((parameters, first), second), gradients)| {
        update_piece(available, parameters, first, second, gradients, factors);
    });
}

per_isa! {
    fn squares<E: Element>(x: &[E]) -> E {
        sum_lanes([x], |[x]| x * x)
    }
}

/// Sum of squares: of each piece in the elements' type, of the pieces, in order, in f64.
pub(super) fn sum_of_squares<E: Element>(
    available: Available,
    pool: &Pool,
    x: &[E],
    partials: &mut Vec<f64>,
) -> f64 {
    partials.clear();
    partials.resize(x.len().div_ceil(SQUARES), 0.0);
    pool.each(x.chunks(SQUARES).zip(partials.iter_mut()), |_, (x, partial)| {
        *partial = squares(available, x).to_f64();
    });
    partials.iter().sum()
}

/// Elements whose squares are summed in the elements' type.
const SQUARES: usize = 1 << 14;
