//! Text from a trained model, token by token.
//!
//! Each token runs the whole window again; keeping keys and values between tokens is left out.

use crate::checkpoint::read::Checkpoint;
use crate::checkpoint::{CheckpointError, Kind};
use crate::data::order::mix;
use crate::model::{Model, ModelError, ModelShape, ParameterLayout};
use crate::ops::cpu::Cpu;

/// What to write.
#[derive(Debug, Clone, PartialEq)]
pub struct Request<'a> {
    /// Text to go on from; an empty one stands for a new line.
    pub prompt: &'a str,
    /// Tokens to write.
    pub tokens: u32,
    /// Softmax temperature; 0 always takes the likeliest token.
    pub temperature: f64,
    /// Decides what is drawn.
    pub seed: u64,
    /// Threads to compute with.
    pub threads: usize,
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The checkpoint is unusable.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The model cannot be made.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The temperature means nothing.
    #[error("temperature is {found}; needed is 0 or a positive number")]
    Temperature {
        /// What was asked for.
        found: f64,
    },
}

/// The prompt and what the model makes of it. Bytes that are not UTF-8 come back as replacement characters.
///
/// # Errors
/// See [`SampleError`].
pub fn sample(checkpoint: &Checkpoint, request: &Request<'_>) -> Result<String, SampleError> {
    if !(request.temperature >= 0.0 && request.temperature.is_finite()) {
        return Err(SampleError::Temperature { found: request.temperature });
    }
    let identity = &checkpoint.manifest.identity;
    let shape = ModelShape::new(&identity.model, identity.vocabulary as usize);
    let mut model = Model::new(Cpu::<f32>::new(request.threads), shape, 1)?;
    let layout = ParameterLayout::new(&shape);
    checkpoint.read(Kind::Parameter, &layout, model.host_parameters_mut())?;

    let prompt = if request.prompt.is_empty() { "\n" } else { request.prompt };
    let mut tokens = identity.tokenizer.encode(prompt.as_bytes());
    let mut logits_v = vec![0.0; shape.vocabulary];
    for index in 0..request.tokens {
        let window = &tokens[tokens.len().saturating_sub(shape.context)..];
        model.logits_last(window, &mut logits_v)?;
        let uniform = (mix(request.seed ^ mix(index.into())) >> 11) as f64 / (1_u64 << 53) as f64;
        tokens.push(draw(&logits_v, request.temperature, uniform));
    }
    let bytes: Vec<u8> = tokens.iter().map(|&token| identity.tokenizer.decode(token)).collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The token at `uniform` (in 0..1) of the softmax's distribution function.
fn draw(logits_v: &[f32], temperature: f64, uniform: f64) -> u32 {
    let likeliest = (0..logits_v.len()).max_by(|&a, &b| logits_v[a].total_cmp(&logits_v[b])).unwrap_or(0);
    if temperature == 0.0 {
        return likeliest as u32;
    }
    let largest = f64::from(logits_v[likeliest]);
    let weights: Vec<f64> =
        logits_v.iter().map(|&logit| ((f64::from(logit) - largest) / temperature).exp()).collect();
    let mut left = uniform * weights.iter().sum::<f64>();
    for (token, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return token as u32;
        }
    }
    // Rounding can leave a rest beyond the last weight.
    likeliest as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_by_probability() {
        let logits = [0.0, f32::ln(2.0), f32::NEG_INFINITY, 0.0];
        for (temperature, uniform, expect) in
            [(0.0, 0.9, 1), (1.0, 0.0, 0), (1.0, 0.3, 1), (1.0, 0.74, 1), (1.0, 0.76, 3), (1.0, 0.9999, 3)]
        {
            assert_eq!(draw(&logits, temperature, uniform), expect, "{temperature} {uniform}");
        }
        // Near 0 the likeliest token takes all.
        assert_eq!(draw(&logits, 1e-3, 0.999), 1);
    }
}
