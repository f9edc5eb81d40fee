//! What must give the same bits, and what must agree within rounding.

use trainyard_trainer::model::{Backward, Batch, Model, ModelError, ModelShape};
use trainyard_trainer::ops::cpu::{Cpu, Element, Isa};
use trainyard_trainer::ops::{Finish, Ops as _, Product, Real as _, Span, Start};
use trainyard_trainer::optim::{AdamW, AdamWConfig};

use crate::numbers::Numbers;

/// Sizes that no tile divides, more than one tile of queries, and more than one step of depth.
const SHAPE: ModelShape = ModelShape { layers: 2, heads: 3, channels: 111, context: 150, vocabulary: 301 };
const FRESH: Backward = Backward { scale: 1.0, accumulate: false };

fn tokens(seed: u64, count: usize, vocabulary: usize) -> Vec<u32> {
    let mut numbers = Numbers::new(seed);
    (0..count).map(|_| (numbers.normal().abs() * 1e6) as u32 % vocabulary as u32).collect()
}

fn model<E: Element>(shape: ModelShape, threads: usize, isa: Isa, sequences: usize) -> Model<Cpu<E>> {
    let mut model = Model::new(Cpu::with_isa(threads, isa), shape, sequences).unwrap();
    model.init(7);
    // Biases and gains are not drawn; give them something to lose.
    let mut numbers = Numbers::new(3);
    for parameter in model.host_parameters_mut() {
        *parameter += E::from_f64(0.05 * numbers.normal());
    }
    model
}

/// Loss and gradients, and parameters after an update.
fn step<E: Element>(mut model: Model<Cpu<E>>) -> (f64, Vec<E>, Vec<E>) {
    let tokens = tokens(5, 2 * SHAPE.context + 1, SHAPE.vocabulary);
    let batch = Batch { tokens: &tokens[1..], targets: &tokens[..tokens.len() - 1], sequences: 2 };
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
    let all = 0..model.layout().elements();
    let optimizer = AdamW::new(&mut model, all, config).unwrap();
    let loss = model.forward_backward(batch, FRESH, None).unwrap();
    let gradients = model.gradients();
    let norm = model.ops.sum_of_squares(gradients).sqrt();
    optimizer.update(&mut model, 1, 1e-3, 1.0 / norm);
    (loss, model.host_gradients().to_vec(), model.host_parameters().to_vec())
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let one = step(model::<f32>(SHAPE, 1, Isa::best(), 2));
    for threads in 2..=5 {
        assert!(one == step(model::<f32>(SHAPE, threads, Isa::best(), 2)), "{threads} threads");
    }
}

#[test]
fn instruction_sets_with_fused_multiply_add_give_the_same_bits() {
    let fused: Vec<Isa> = Isa::available().into_iter().filter(|isa| *isa > Isa::Baseline).collect();
    for pair in fused.windows(2) {
        assert!(
            step(model::<f32>(SHAPE, 2, pair[0], 2)) == step(model::<f32>(SHAPE, 2, pair[1], 2)),
            "{pair:?}"
        );
    }
}

/// f64 is checked against finite differences, so this carries over to f32 at sizes beyond one tile.
#[test]
fn f32_agrees_with_f64_on_every_instruction_set() {
    let (loss, gradients, _) = step(model::<f64>(SHAPE, 2, Isa::best(), 2));
    for isa in Isa::available() {
        let (found_loss, found, _) = step(model::<f32>(SHAPE, 2, isa, 2));
        assert!((found_loss - loss).abs() < 1e-5, "{isa:?}: {found_loss}, {loss}");
        let scale = gradients.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        for (i, (found, expect)) in found.iter().zip(&gradients).enumerate() {
            let error = (found.to_f64() - expect).abs();
            assert!(error < 3e-6 * scale, "{isa:?}, gradient {i}: {found}, {expect}");
        }
    }
}

/// The logits of two sequences take two parts, those of one sequence one part.
#[test]
fn logits_in_several_parts_are_one_gradient() {
    let shape = ModelShape { layers: 1, heads: 1, channels: 2, context: 20, vocabulary: 500_000 };
    let tokens = tokens(1, 41, shape.vocabulary);
    let batch = Batch { tokens: &tokens[1..], targets: &tokens[..40], sequences: 2 };
    let mut whole = model::<f32>(shape, 2, Isa::best(), 2);
    let loss = whole.forward_backward(batch, FRESH, None).unwrap();
    assert_eq!(loss, whole.loss(batch).unwrap());
    let gradients = whole.host_gradients().to_vec();
    let mut losses = 0.0;
    for (half, accumulate) in [(0..20, false), (20..40, true)] {
        let batch =
            Batch { tokens: &batch.tokens[half.clone()], targets: &batch.targets[half], sequences: 1 };
        losses += whole.forward_backward(batch, Backward { scale: 0.5, accumulate }, None).unwrap() / 2.0;
    }
    assert!((losses - loss).abs() < 1e-6, "{losses}, {loss}");
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x.abs())).sum::<f64>();
    let size = sum(&mut gradients.iter().copied());
    let off = sum(&mut gradients.iter().zip(whole.host_gradients()).map(|(a, b)| a - b));
    assert!(size > 0.1 && off < 1e-5 * size, "{off} of {size}");
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let tokens = tokens(5, 4 * SHAPE.context + 1, SHAPE.vocabulary);
    let (tokens, targets) = (&tokens[1..], &tokens[..4 * SHAPE.context]);
    let mut whole = model::<f64>(SHAPE, 2, Isa::best(), 4);
    let loss = whole.forward_backward(Batch { tokens, targets, sequences: 4 }, FRESH, None).unwrap();
    let mut parts = model::<f64>(SHAPE, 2, Isa::best(), 2);
    let half = 2 * SHAPE.context;
    let mut losses = 0.0;
    for (micro, accumulate) in [(0..half, false), (half..2 * half, true)] {
        let batch = Batch { tokens: &tokens[micro.clone()], targets: &targets[micro], sequences: 2 };
        losses += parts.forward_backward(batch, Backward { scale: 0.5, accumulate }, None).unwrap() / 2.0;
    }
    assert!((losses - loss).abs() < 1e-12);
    for (i, (found, expect)) in parts.host_gradients().iter().zip(whole.host_gradients()).enumerate() {
        assert!((found - expect).abs() < 1e-12, "gradient {i}: {found}, {expect}");
    }
}

#[test]
fn ready_gradients_are_final_and_in_order() {
    let tokens = tokens(5, 2 * SHAPE.context + 1, SHAPE.vocabulary);
    let batch = Batch { tokens: &tokens[1..], targets: &tokens[..2 * SHAPE.context], sequences: 2 };
    let mut model = model::<f32>(SHAPE, 2, Isa::best(), 2);
    let mut seen = Vec::new();
    let mut announced = 0;
    let mut on_ready = |ops: &mut Cpu<f32>, ready: Span| {
        assert_eq!(ready.start, seen.len());
        seen.extend_from_slice(ops.host(ready));
        announced += 1;
    };
    model.forward_backward(batch, FRESH, Some(&mut on_ready)).unwrap();
    assert!(seen == model.host_gradients());
    assert_eq!(announced, 2 + 2 * SHAPE.layers);
}

#[test]
fn shorter_batches_fit_the_memory_of_longer_ones() {
    let tokens = tokens(5, 60, SHAPE.vocabulary);
    let batch = Batch { tokens: &tokens[..58], targets: &tokens[1..59], sequences: 2 };
    let mut large = model::<f32>(SHAPE, 2, Isa::best(), 3);
    let small_shape = ModelShape { context: 29, ..SHAPE };
    let mut small = Model::new(Cpu::<f32>::new(1), small_shape, 2).unwrap();
    for parameter in small.layout().clone().iter() {
        let from = large.layout().find(&parameter.name).unwrap().range.start;
        let values = large.host_parameters()[from..from + parameter.range.len()].to_vec();
        small.host_parameters_mut()[parameter.range.clone()].copy_from_slice(&values);
    }
    assert_eq!(large.loss(batch).unwrap(), small.loss(batch).unwrap());
}

#[test]
fn initial_parameters_depend_on_the_seed_alone() {
    let shape = ModelShape { layers: 2, heads: 2, channels: 32, context: 8, vocabulary: 64 };
    let draw = |seed, threads| {
        let mut model = Model::new(Cpu::<f32>::new(threads), shape, 1).unwrap();
        model.init(seed);
        model
    };
    let (first, again, other) = (draw(1, 1), draw(1, 3), draw(2, 1));
    assert!(first.host_parameters() == again.host_parameters());
    assert!(first.host_parameters() != other.host_parameters());
    let deviation = |name: &str| {
        let values = &first.host_parameters()[first.layout().find(name).unwrap().range.clone()];
        (values.iter().map(|x| f64::from(x * x)).sum::<f64>() / values.len() as f64).sqrt()
    };
    for (name, expect) in [
        ("wte.weight", 0.02),
        ("h.1.attn.c_attn.weight", 0.02),
        ("h.0.mlp.c_proj.weight", 0.01),
        ("h.1.ln_2.weight", 1.0),
        ("h.1.ln_2.bias", 0.0),
    ] {
        assert!((deviation(name) - expect).abs() <= 0.05 * expect, "{name}: {}", deviation(name));
    }
    // No two tensors share their numbers.
    let start = |name: &str| first.host_parameters()[first.layout().find(name).unwrap().range.start];
    assert_ne!(start("h.0.mlp.c_fc.weight"), start("h.1.mlp.c_fc.weight"));
}

#[test]
fn wrong_batches_and_shapes_are_refused() {
    let shape = ModelShape { layers: 1, heads: 2, channels: 4, context: 3, vocabulary: 5 };
    let mut model = Model::new(Cpu::<f32>::new(1), shape, 2).unwrap();
    let mut loss = |tokens: &[u32], targets: &[u32], sequences| {
        model.loss(Batch { tokens, targets, sequences }).unwrap_err().to_string()
    };
    assert!(loss(&[1, 5], &[0, 0], 1).starts_with("token 5 at position 1 of the batch"));
    assert!(loss(&[1, 2], &[0, 9], 1).starts_with("token 9 at position 1 of the batch"));
    for (tokens, targets, sequences) in [(0, 0, 1), (4, 4, 1), (2, 2, 0), (3, 3, 2), (2, 1, 1), (9, 9, 3)] {
        let message = loss(&vec![0; tokens], &vec![0; targets], sequences);
        assert!(message.starts_with(&format!("a batch of {tokens} tokens")), "{message}");
    }
    let refuse = |shape, sequences| Model::new(Cpu::<f32>::new(1), shape, sequences).err().unwrap();
    assert_eq!(refuse(ModelShape { layers: 0, ..shape }, 1), ModelError::Zero { field: "layers" });
    assert_eq!(refuse(shape, 0), ModelError::Zero { field: "batch" });
    assert_eq!(refuse(ModelShape { heads: 3, ..shape }, 1), ModelError::Heads { channels: 4, heads: 3 });
}

/// Products of many sizes, with every combination of transposition, against sums written out.
#[test]
fn products_of_all_sizes() {
    let mut numbers = Numbers::new(2);
    for isa in Isa::available() {
        for (rows, depth, columns) in [
            (1, 1, 1),
            (1, 300, 33),
            (9, 256, 48),
            (10, 257, 47),
            (29, 7, 65),
            (200, 513, 3),
            (3, 20, 1100),
            (90, 300, 200),
        ] {
            let ops = &mut Cpu::<f32>::with_isa(3, isa);
            let mut fill = |len| {
                let span = ops.allocate("test", len).unwrap();
                ops.host_mut(span).fill_with(|| numbers.normal() as f32);
                span
            };
            let [left, right, out] = [rows * depth, depth * columns, rows * columns].map(&mut fill);
            for transposed in 0..4 {
                let accumulate = transposed % 2 == 0;
                let before = ops.host(out).to_vec();
                let left_matrix = match transposed & 1 {
                    0 => left.matrix(rows, depth),
                    _ => left.matrix(depth, rows).transpose(),
                };
                let right_matrix = match transposed & 2 {
                    0 => right.matrix(depth, columns),
                    _ => right.matrix(columns, depth).transpose(),
                };
                ops.product(Product {
                    out: out.matrix(rows, columns),
                    left: left_matrix,
                    right: right_matrix,
                    start: if accumulate { Start::Accumulate } else { Start::Zero },
                    finish: Finish::Keep,
                });
                let (left, right) = (ops.host(left), ops.host(right));
                for (at, found) in ops.host(out).iter().enumerate() {
                    let (i, j) = (at / columns, at % columns);
                    let sum: f64 = (0..depth)
                        .map(|k| {
                            let l = if transposed & 1 == 0 { i * depth + k } else { k * rows + i };
                            let r = if transposed & 2 == 0 { k * columns + j } else { j * depth + k };
                            f64::from(left[l]) * f64::from(right[r])
                        })
                        .sum();
                    let expect = sum + if accumulate { f64::from(before[at]) } else { 0.0 };
                    let error = (f64::from(*found) - expect).abs();
                    assert!(
                        error < 1e-4,
                        "{isa:?} {rows}x{depth}x{columns}, {transposed}, {i} {j}: {found}, {expect}"
                    );
                }
            }
        }
    }
}
