//! Times whole training steps (forward, backward, clip, AdamW), alone or against PyTorch.
//!
//! `step run CONFIG SECONDS` prints one line of JSON; `step compare PYTHON` runs it and `step_pytorch.py` beside this
//! file in turns, each in its own process, and prints a table. Two steps warm up; the rate is that of the median step,
//! so that what else the machine does for a moment does not count. Each turn also measures what the processor can do at
//! most, so that both rates are given as shares of it.
#![expect(clippy::print_stdout, reason = "a benchmark prints its result")]

use std::collections::BTreeMap;
use std::error::Error;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Deserialize;
use trainyard_trainer::model::{Backward, Batch, Model, ModelShape};
use trainyard_trainer::ops::Ops as _;
use trainyard_trainer::ops::cpu::Cpu;
use trainyard_trainer::optim::{AdamW, AdamWConfig, clip_scale};

/// Threads of both programs.
const THREADS: usize = 2;
/// Turns of a comparison, and seconds measured in each.
const TURNS: usize = 5;
const SECONDS: u64 = 4;

/// Layers, heads, channels, tokens of a sequence, vocabulary, sequences.
const CONFIGS: [(&str, [usize; 6]); 3] = [
    ("12x768", [12, 12, 768, 64, 50257, 4]),
    ("6x384", [6, 6, 384, 256, 256, 8]),
    ("4x128", [4, 4, 128, 128, 256, 8]),
];

#[derive(Deserialize)]
struct Measured {
    tokens_per_second: f64,
    #[serde(default)]
    flops_per_token: f64,
    peak_bytes: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo adds a flag of its own.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", config, seconds] => run(config, Duration::from_secs(seconds.parse()?)),
        ["compare", python] => compare(python),
        _ => Err("use: step run CONFIG SECONDS, or step compare PYTHON".into()),
    }
}

fn sizes(config: &str) -> Result<[usize; 6], Box<dyn Error>> {
    let found = CONFIGS.iter().find(|(name, _)| *name == config);
    Ok(found.ok_or("no such configuration")?.1)
}

fn run(config: &str, seconds: Duration) -> Result<(), Box<dyn Error>> {
    let [layers, heads, channels, context, vocabulary, sequences] = sizes(config)?;
    let shape = ModelShape { layers, heads, channels, context, vocabulary };
    let mut model = Model::new(Cpu::<f32>::new(THREADS), shape, sequences)?;
    model.init(1);
    let all = 0..model.layout().elements();
    let optimizer = AdamW::new(
        &mut model,
        all,
        AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 },
    )?;
    let count = sequences * context;
    let tokens: Vec<u32> = (0..=count).map(|i| (i * i * 31 + i * 7) as u32 % vocabulary as u32).collect();
    let batch = Batch { tokens: &tokens[..count], targets: &tokens[1..], sequences };
    let backward = Backward { scale: 1.0, accumulate: false };
    let mut step = 0;
    let mut train = || -> Result<f64, Box<dyn Error>> {
        step += 1;
        let loss = model.forward_backward(batch, backward, None)?;
        let gradients = model.gradients();
        let norm = model.ops.sum_of_squares(gradients).sqrt();
        optimizer.update(&mut model, step, 1e-4, clip_scale(norm, 1.0));
        Ok(loss)
    };
    train()?;
    train()?;
    let (start, mut loss, mut durations) = (Instant::now(), 0.0, Vec::new());
    while start.elapsed() < seconds || durations.len() < 3 {
        let start = Instant::now();
        loss = train()?;
        durations.push(start.elapsed().as_secs_f64());
    }
    durations.sort_by(f64::total_cmp);
    let rate = count as f64 / durations[durations.len() / 2];
    println!(
        "{{\"tokens_per_second\":{rate:.1},\"flops_per_token\":{},\"peak_bytes\":{},\"loss\":{loss:.4}}}",
        shape.flops_per_token(context),
        peak()?
    );
    Ok(())
}

/// Operations a second of multiply-adds in registers alone, in f32 by all threads: the most that a program could reach.
#[cfg(target_arch = "x86_64")]
fn processor() -> f64 {
    const STEPS: usize = 1 << 22;
    macro_rules! multiply_add {
        ($feature:literal, $lanes:literal, $chains:literal, $splat:ident, $fma:ident) => {{
            /// Enough to keep the processor busy while each waits for its last one, and no more than registers.
            const CHAINS: usize = $chains;
            #[target_feature(enable = $feature)]
            fn run() -> usize {
                let mut sums = [$splat(0.0); CHAINS];
                let (x, y) = std::hint::black_box(($splat(1e-9), $splat(1.0)));
                for _ in 0..STEPS {
                    for sum in &mut sums {
                        *sum = $fma(x, y, *sum);
                    }
                }
                std::hint::black_box(sums);
                2 * $lanes * CHAINS * STEPS
            }
            // SAFETY: asked for below.
            || unsafe { run() }
        }};
    }
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};
    let run: fn() -> usize = if is_x86_feature_detected!("avx512f") {
        multiply_add!("avx512f", 16, 24, _mm512_set1_ps, _mm512_fmadd_ps)
    } else {
        assert!(is_x86_feature_detected!("fma"), "a processor with AVX2 and FMA is needed");
        multiply_add!("avx2,fma", 8, 12, _mm256_set1_ps, _mm256_fmadd_ps)
    };
    std::thread::scope(|scope| {
        let timed = || {
            let start = Instant::now();
            run() as f64 / start.elapsed().as_secs_f64()
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(timed)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it cannot panic")).sum()
    })
}

/// What no kernel is written for.
#[cfg(not(target_arch = "x86_64"))]
fn processor() -> f64 {
    f64::NAN
}

/// Most memory that this process has had resident.
fn peak() -> Result<u64, Box<dyn Error>> {
    let status = fs_err::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    Ok(kilobytes.ok_or("no VmHWM")?.parse::<u64>()? * 1024)
}

fn measure(command: &mut Command) -> Result<Measured, Box<dyn Error>> {
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("{command:?} ended with {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn compare(python: &str) -> Result<(), Box<dyn Error>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/step_pytorch.py");
    let seconds = SECONDS.to_string();
    println!(
        "| model | tokens/s | PyTorch | ratio (lowest, highest) | of peak | PyTorch | memory | PyTorch | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (config, sizes) in CONFIGS {
        let mut columns: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for _ in 0..TURNS {
            let ours = measure(Command::new(std::env::current_exe()?).args(["run", config, &seconds]))?;
            let theirs = measure(
                Command::new(python)
                    .arg(script)
                    .args(sizes.map(|size| size.to_string()))
                    .args([&THREADS.to_string(), &seconds]),
            )?;
            for (column, value) in [
                ("processor", processor() / ours.flops_per_token),
                ("rate", ours.tokens_per_second),
                ("their rate", theirs.tokens_per_second),
                ("ratio", ours.tokens_per_second / theirs.tokens_per_second),
                ("peak", ours.peak_bytes / 1e6),
                ("their peak", theirs.peak_bytes / 1e6),
            ] {
                columns.entry(column).or_default().push(value);
            }
        }
        let sorted = |column: &str| {
            let mut values = columns[column].clone();
            values.sort_by(f64::total_cmp);
            values
        };
        let median = |column: &str| sorted(column)[TURNS / 2];
        let ratios = sorted("ratio");
        println!(
            "| {config} | {:.0} | {:.0} | {:.2} ({:.2}, {:.2}) | {:.2} | {:.2} | {:.0} MB | {:.0} MB | {:.2} |",
            median("rate"),
            median("their rate"),
            median("ratio"),
            ratios[0],
            ratios[TURNS - 1],
            median("rate") / median("processor"),
            median("their rate") / median("processor"),
            median("peak"),
            median("their peak"),
            median("peak") / median("their peak"),
        );
    }
    Ok(())
}
