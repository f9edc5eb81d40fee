//! The model and its optimizer against values that PyTorch computed in float64 (`tests/golden/make.py`).

use std::collections::HashMap;
use std::sync::LazyLock;

use safetensors::SafeTensors;
use serde::Deserialize;
use trainyard_trainer::model::{Backward, Batch, Model, ModelShape};
use trainyard_trainer::ops::Ops as _;
use trainyard_trainer::ops::cpu::{Cpu, Element, Isa};
use trainyard_trainer::optim::{AdamW, AdamWConfig, Schedule, clip_scale};

#[derive(Deserialize)]
struct Golden {
    shape: Shape,
    optimizer: Optimizer,
    sequences: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    losses: Vec<f64>,
    norms: Vec<f64>,
    #[serde(skip)]
    tensors: HashMap<String, Vec<f64>>,
}

#[derive(Deserialize)]
struct Shape {
    layers: usize,
    heads: usize,
    channels: usize,
    context: usize,
    vocabulary: usize,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Optimizer {
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
    clip_norm: f64,
    learning_rate: f64,
    min_learning_rate: f64,
    warmup_steps: u64,
    steps: u64,
}

static GOLDEN: LazyLock<Golden> = LazyLock::new(|| {
    let bytes = include_bytes!("../golden/golden.safetensors");
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let mut golden: Golden = serde_json::from_str(&header.metadata().as_ref().unwrap()["golden"]).unwrap();
    for (name, tensor) in SafeTensors::deserialize(bytes).unwrap().tensors() {
        assert_eq!(tensor.dtype(), safetensors::Dtype::F64);
        let (values, rest) = tensor.data().as_chunks::<8>();
        assert!(rest.is_empty());
        let values = values.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        golden.tensors.insert(name, values);
    }
    golden
});

impl Golden {
    fn batch(&self) -> Batch<'_> {
        Batch { tokens: &self.tokens, targets: &self.targets, sequences: self.sequences }
    }

    fn model<E: Element>(&self, isa: Isa) -> Model<Cpu<E>> {
        let Shape { layers, heads, channels, context, vocabulary } = self.shape;
        let shape = ModelShape { layers, heads, channels, context, vocabulary };
        let mut model = Model::new(Cpu::with_isa(2, isa), shape, self.sequences).unwrap();
        for parameter in model.layout().clone().iter() {
            let before = &self.tensors[&format!("before.{}", parameter.name)];
            let parameters = &mut model.host_parameters_mut()[parameter.range.clone()];
            assert_eq!(parameters.len(), before.len(), "{}", parameter.name);
            for (parameter, &before) in parameters.iter_mut().zip(before) {
                *parameter = E::from_f64(before);
            }
        }
        model
    }

    /// Compares all tensors of a kind, laid out flat as parameters are, except elements that `skip` names by tensor
    /// and index.
    fn compare<E: Element>(
        &self,
        kind: &str,
        model: &Model<Cpu<E>>,
        flat: &[E],
        tolerance: f64,
        skip: impl Fn(&str, usize) -> bool,
    ) {
        for parameter in model.layout().iter() {
            let name = format!("{kind}.{}", parameter.name);
            let expect = &self.tensors[&name];
            let mut found = flat[parameter.range.clone()].to_vec();
            for (i, found) in found.iter_mut().enumerate().filter(|(i, _)| skip(&parameter.name, *i)) {
                *found = E::from_f64(expect[i]);
            }
            close(&name, &found, expect, tolerance);
        }
    }
}

fn close<E: Element>(name: &str, found: &[E], expect: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expect.len(), "{name}");
    for (i, (found, &expect)) in found.iter().zip(expect).enumerate() {
        let found = found.to_f64();
        assert!((found - expect).abs() <= tolerance, "{name}[{i}]: {found}, PyTorch {expect}");
    }
}

/// `tolerance` is for numbers up to about 3 that went through one pass; training multiplies it, because AdamW divides
/// by roots of squares of gradients.
fn check<E: Element>(isa: Isa, tolerance: f64) {
    let golden = &*GOLDEN;
    let mut model = golden.model::<E>(isa);
    let all = 0..model.layout().elements();
    let config = &golden.optimizer;
    let optimizer = AdamW::new(
        &mut model,
        all,
        AdamWConfig {
            beta1: config.beta1,
            beta2: config.beta2,
            epsilon: config.epsilon,
            weight_decay: config.weight_decay,
        },
    )
    .unwrap();
    let schedule = Schedule {
        highest: config.learning_rate,
        lowest: config.min_learning_rate,
        warmup_steps: config.warmup_steps,
        steps: config.steps,
    };

    let vocabulary = golden.shape.vocabulary;
    let tokens = golden.tokens.len() / golden.sequences;
    let mut logits = vec![E::ZERO; vocabulary];
    model.logits_last(&golden.tokens[..tokens], &mut logits).unwrap();
    let expect = &golden.tensors["logits"][(tokens - 1) * vocabulary..][..vocabulary];
    close("logits", &logits, expect, tolerance);

    let backward = Backward { scale: 1.0, accumulate: false };
    for step in 1..=config.steps {
        let loss = model.forward_backward(golden.batch(), backward, None).unwrap();
        if step == 1 {
            golden.compare("gradient", &model, model.host_gradients(), tolerance, |_, _| false);
        }
        let at = step as usize - 1;
        let later = if step == 1 { 1.0 } else { 30.0 };
        assert!((loss - golden.losses[at]).abs() < later * tolerance, "loss of step {step}: {loss}");
        let gradients = model.gradients();
        let norm = model.ops.sum_of_squares(gradients).sqrt();
        assert!((norm - golden.norms[at]).abs() < 3.0 * later * tolerance, "norm of step {step}: {norm}");
        let scale = clip_scale(norm, config.clip_norm);
        optimizer.update(&mut model, step, schedule.learning_rate(step), scale);
    }
    // The bias of keys moves all scores of a query alike, so its gradient is 0 but for rounding, which AdamW divides by
    // its own size. In f64 it stays far below epsilon.
    let keys = golden.shape.channels..2 * golden.shape.channels;
    let rounding =
        |name: &str, i: usize| E::BYTES == 4 && name.ends_with("attn.c_attn.bias") && keys.contains(&i);
    golden.compare("after", &model, model.host_parameters(), 30.0 * tolerance, rounding);
}

#[test]
fn agrees_with_pytorch_in_f64() {
    check::<f64>(Isa::best(), 1e-12);
}

#[test]
fn agrees_with_pytorch_in_f32_on_every_instruction_set() {
    for isa in Isa::available() {
        check::<f32>(isa, 3e-6);
    }
}
