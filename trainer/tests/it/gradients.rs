//! Gradients of every operation and of the whole model against central finite differences, in f64.

use trainyard_trainer::model::{Backward, Batch, Model, ModelShape};
use trainyard_trainer::ops::cpu::Cpu;
use trainyard_trainer::ops::{AttentionShape, Finish, LayerNormBackward, Ops, Product, Span, Start};

use crate::numbers::Numbers;

const STEP: f64 = 1e-5;
/// Of the largest element of a gradient. Differences are off by about STEP^2 and by rounding, 1e-16 / STEP.
const TOLERANCE: f64 = 1e-7;

/// Memory filled with random numbers.
fn random(ops: &mut Cpu<f64>, seed: u64, len: usize) -> Span {
    let span = ops.allocate("test", len).unwrap();
    let mut numbers = Numbers::new(seed);
    ops.host_mut(span).fill_with(|| numbers.normal());
    span
}

/// Checks that `gradients[i]`, filled by `backward`, is that of the sum of `weights * out` by `inputs[i]`.
fn check(
    name: &str,
    ops: &mut Cpu<f64>,
    (out, weights): (Span, Span),
    inputs: &[Span],
    gradients: &[Span],
    mut forward: impl FnMut(&mut Cpu<f64>),
    backward: impl FnOnce(&mut Cpu<f64>),
) {
    let mut loss = |ops: &mut Cpu<f64>| -> f64 {
        forward(ops);
        let pairs = ops.host(out).iter().zip(ops.host(weights));
        pairs.map(|(out, weight)| out * weight).sum()
    };
    let differences: Vec<Vec<f64>> = inputs
        .iter()
        .map(|&input| {
            (0..input.len)
                .map(|i| {
                    let x = ops.host(input)[i];
                    ops.host_mut(input)[i] = x + STEP;
                    let above = loss(ops);
                    ops.host_mut(input)[i] = x - STEP;
                    let below = loss(ops);
                    ops.host_mut(input)[i] = x;
                    (above - below) / (2.0 * STEP)
                })
                .collect()
        })
        .collect();
    loss(ops);
    backward(ops);
    for (i, (expect, &gradient)) in differences.iter().zip(gradients).enumerate() {
        assert_close(&format!("{name}, input {i}"), ops.host(gradient), expect);
    }
}

fn assert_close(name: &str, found: &[f64], expect: &[f64]) {
    assert_eq!(found.len(), expect.len(), "{name}");
    let largest = expect.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
    assert!(largest > 1e-4, "{name}: nothing to compare");
    for (i, (found, expect)) in found.iter().zip(expect).enumerate() {
        assert!(
            (found - expect).abs() <= TOLERANCE * largest.max(1.0),
            "{name}[{i}]: {found}, by differences {expect}"
        );
    }
}

#[test]
fn layer_norm() {
    let (rows, channels) = (3, 19);
    let ops = &mut Cpu::new(2);
    let [x, out, weights, dx] = [1, 2, 3, 4].map(|seed| random(ops, seed, rows * channels));
    let [gain, bias, dgain, dbias] = [5, 6, 7, 8].map(|seed| random(ops, seed, channels));
    let stats = random(ops, 9, rows * 2);
    check(
        "layer norm",
        ops,
        (out, weights),
        &[x, gain, bias],
        &[dx, dgain, dbias],
        |ops| ops.layer_norm(out, stats, x, gain, bias),
        |ops| {
            let forward = ops.host(out).to_vec();
            ops.layer_norm_again(out, stats, x, gain, bias);
            assert_eq!(ops.host(out), forward);
            ops.layer_norm_backward(LayerNormBackward {
                dx_nc: dx,
                accumulate_dx: false,
                dgain_c: dgain,
                dbias_c: dbias,
                accumulate: false,
                dout_nc: weights,
                x_nc: x,
                stats_n2: stats,
                gain_c: gain,
            });
        },
    );
}

#[test]
fn linear_with_residual() {
    let (rows, inputs, outputs) = (7, 5, 11);
    let ops = &mut Cpu::new(2);
    let [x, dx] = [1, 2].map(|seed| random(ops, seed, rows * inputs));
    let [weight, dweight] = [3, 4].map(|seed| random(ops, seed, inputs * outputs));
    let [bias, dbias] = [5, 6].map(|seed| random(ops, seed, outputs));
    let [out, weights, residual] = [7, 8, 9].map(|seed| random(ops, seed, rows * outputs));
    let product = |out, left, right, start| Product { out, left, right, start, finish: Finish::Keep };
    check(
        "linear",
        ops,
        (out, weights),
        &[x, weight, bias, residual],
        &[dx, dweight, dbias, weights],
        |ops| {
            ops.product(product(
                out.matrix(rows, outputs),
                x.matrix(rows, inputs),
                weight.matrix(inputs, outputs),
                Start::BiasAndResidual(bias, residual),
            ));
        },
        |ops| {
            let dout = weights.matrix(rows, outputs);
            ops.product(product(
                dx.matrix(rows, inputs),
                dout,
                weight.matrix(inputs, outputs).transpose(),
                Start::Zero,
            ));
            ops.product(product(
                dweight.matrix(inputs, outputs),
                x.matrix(rows, inputs).transpose(),
                dout,
                Start::Zero,
            ));
            ops.sum_rows(dbias, weights, false);
        },
    );
}

#[test]
fn gelu() {
    let ops = &mut Cpu::new(1);
    let [x, out, weights, one] = [1, 2, 3, 4].map(|seed| random(ops, seed, 30));
    let dx = random(ops, 5, 30);
    ops.host_mut(one)[..1].fill(1.0);
    check(
        "gelu",
        ops,
        (out, weights),
        &[x],
        &[dx],
        // The product with a matrix of one element, 1, leaves x and writes its GELU.
        |ops| {
            ops.product(Product {
                out: dx.matrix(30, 1),
                left: x.matrix(30, 1),
                right: one.matrix(1, 1),
                start: Start::Zero,
                finish: Finish::Gelu(out),
            });
        },
        |ops| {
            let derivative = random(ops, 6, 30);
            let values = ops.host(x).to_vec();
            ops.upload(derivative, &values);
            let forward = ops.host(out).to_vec();
            ops.gelu_with_derivative(out, derivative);
            assert_eq!(ops.host(out), forward);
            ops.product(Product {
                out: dx.matrix(30, 1),
                left: weights.matrix(30, 1),
                right: one.matrix(1, 1),
                start: Start::Zero,
                finish: Finish::Multiply(derivative),
            });
        },
    );
}

#[test]
fn attention() {
    // The second has more than one tile of queries.
    for (sequences, tokens, heads, head_channels) in [(2, 5, 3, 4), (1, 70, 1, 2)] {
        let shape = AttentionShape { sequences, tokens, heads, head_channels };
        let elements = sequences * tokens * heads * head_channels;
        let ops = &mut Cpu::new(2);
        let [out, weights] = [1, 2].map(|seed| random(ops, seed, elements));
        let [qkv, dqkv] = [3, 4].map(|seed| random(ops, seed, 3 * elements));
        let stats = random(ops, 5, sequences * tokens * heads * 2);
        check(
            "attention",
            ops,
            (out, weights),
            &[qkv],
            &[dqkv],
            |ops| ops.attention(out, stats, qkv, shape),
            |ops| ops.attention_backward(dqkv, weights, out, stats, qkv, shape),
        );
    }
}

#[test]
fn attention_does_not_look_ahead() {
    let shape = AttentionShape { sequences: 1, tokens: 67, heads: 2, head_channels: 3 };
    let row = 6;
    let ops = &mut Cpu::new(1);
    let out = random(ops, 1, 67 * row);
    let qkv = random(ops, 2, 67 * 3 * row);
    let stats = random(ops, 3, 67 * 2 * 2);
    ops.attention(out, stats, qkv, shape);
    let before = ops.host(out).to_vec();
    ops.host_mut(qkv)[50 * 3 * row..].fill(3.0);
    ops.attention(out, stats, qkv, shape);
    assert_eq!(ops.host(out)[..50 * row], before[..50 * row]);
    assert_ne!(ops.host(out)[50 * row..], before[50 * row..]);
}

#[test]
fn cross_entropy() {
    let (rows, vocabulary) = (3, 21);
    let targets = [4, 0, 20];
    let ops = &mut Cpu::new(1);
    let logits = random(ops, 1, rows * vocabulary);
    let scratch = random(ops, 2, rows * vocabulary);
    let [losses, weights] = [3, 4].map(|seed| random(ops, seed, rows));
    ops.host_mut(weights).fill(0.3);
    let copy = |ops: &mut Cpu<f64>| {
        let values = ops.host(logits).to_vec();
        ops.upload(scratch, &values);
    };
    check(
        "cross-entropy",
        ops,
        (losses, weights),
        &[logits],
        &[scratch],
        |ops| {
            copy(ops);
            ops.cross_entropy(losses, scratch, &targets, None);
        },
        |ops| {
            copy(ops);
            ops.cross_entropy(losses, scratch, &targets, Some(0.3));
        },
    );
}

#[test]
fn embedding() {
    let (tokens, channels) = ([1, 3, 3, 0, 1, 3], 4);
    let ops = &mut Cpu::new(2);
    let [out, weights] = [1, 2].map(|seed| random(ops, seed, tokens.len() * channels));
    let [wte, dwte] = [3, 4].map(|seed| random(ops, seed, 5 * channels));
    let [wpe, dwpe] = [5, 6].map(|seed| random(ops, seed, 4 * channels));
    ops.host_mut(dwte).fill(0.0);
    check(
        "embedding",
        ops,
        (out, weights),
        &[wte, wpe],
        &[dwte, dwpe],
        |ops| ops.embed(out, wte, wpe, &tokens, 3),
        |ops| ops.embed_backward(dwte, dwpe, weights, &tokens, 3, false),
    );
}

#[test]
fn whole_model() {
    let shape = ModelShape { layers: 2, heads: 2, channels: 8, context: 5, vocabulary: 7 };
    let mut model = Model::new(Cpu::<f64>::new(2), shape, 2).unwrap();
    let mut numbers = Numbers::new(1);
    // Larger than initial values, so that every gradient is well above rounding.
    model.host_parameters_mut().fill_with(|| 0.5 * numbers.normal());
    let tokens = [1, 5, 2, 0, 6, 6, 3, 4];
    let targets = [5, 2, 0, 3, 6, 3, 4, 1];
    let batch = Batch { tokens: &tokens, targets: &targets, sequences: 2 };
    let backward = Backward { scale: 1.0, accumulate: false };
    // What is there before must not show.
    model.host_gradients_mut().fill(1e3);
    let loss = model.forward_backward(batch, backward, None).unwrap();
    assert_eq!(loss, model.loss(batch).unwrap());
    let gradients = model.host_gradients().to_vec();
    for parameter in model.layout().clone().iter() {
        let differences: Vec<f64> = parameter
            .range
            .clone()
            .map(|i| {
                let value = model.host_parameters()[i];
                model.host_parameters_mut()[i] = value + STEP;
                let above = model.loss(batch).unwrap();
                model.host_parameters_mut()[i] = value - STEP;
                let below = model.loss(batch).unwrap();
                model.host_parameters_mut()[i] = value;
                (above - below) / (2.0 * STEP)
            })
            .collect();
        assert_close(&parameter.name, &gradients[parameter.range.clone()], &differences);
    }
}
