//! Measures the all-reduce among local ranks against torch.distributed's gloo, alternating, and prints the ratio:
//!
//! `cargo run --release -p trainyard-trainer --example all_reduce -- [PYTHON]`
//!
//! PYTHON is an interpreter that has torch; without it only this project's ring is measured. Bandwidth is the size of
//! the data over the median time, on rank 0.
#![expect(clippy::print_stdout, reason = "a benchmark's result goes to standard output")]

use std::error::Error;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use trainyard_spec::Digest;
use trainyard_trainer::dist::rendezvous::Rendezvous;
use trainyard_trainer::dist::{Communicator, Purpose};

const RANKS: u32 = 4;
const BYTES: usize = 64 << 20;
const ROUNDS: usize = 9;
const REPEATS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(rank) = std::env::var("RANK") {
        return run_rank(rank.parse()?);
    }
    let python = std::env::args().nth(1);
    let (mut ring, mut gloo) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        ring.push(measure(|| Ok(Command::new(std::env::current_exe()?)))?);
        if let Some(python) = &python {
            gloo.push(measure(|| {
                let mut command = Command::new(python);
                let script = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/all_reduce.py");
                command.args([script, &(BYTES / 4).to_string(), &ROUNDS.to_string()]);
                Ok(command)
            })?);
        }
    }
    println!("all-reduce of {} MiB among {RANKS} local ranks, median of {REPEATS} runs", BYTES >> 20);
    println!("ring  {:.2} GB/s  {ring:.2?}", median(&mut ring.clone()));
    if !gloo.is_empty() {
        println!("gloo  {:.2} GB/s  {gloo:.2?}", median(&mut gloo.clone()));
        println!("ratio {:.2}", median(&mut ring) / median(&mut gloo));
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Starts the ranks and returns what rank 0 prints.
fn measure(command: impl Fn() -> Result<Command, Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: u32| -> Result<Child, Box<dyn Error>> {
        let mut command = command()?;
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("OMP_NUM_THREADS", "1")
            .stdout(Stdio::piped());
        Ok(command.spawn()?)
    };
    let ranks = (0..RANKS).map(start).collect::<Result<Vec<_>, _>>()?;
    let mut result = None;
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("rank {rank} failed: {}", output.status).into());
        }
        if rank == 0 {
            result = Some(String::from_utf8(output.stdout)?.trim().parse()?);
        }
    }
    result.ok_or_else(|| "no rank 0".into())
}

fn run_rank(rank: u32) -> Result<(), Box<dyn Error>> {
    let communicator = Communicator::connect(&Rendezvous {
        rank,
        world_size: std::env::var("WORLD_SIZE")?.parse()?,
        master_addr: std::env::var("MASTER_ADDR")?,
        master_port: std::env::var("MASTER_PORT")?.parse()?,
        run_id: "benchmark".to_owned(),
        agreement: Digest::of(b""),
        patience: Duration::from_secs(60),
    })?;
    let purpose = Purpose { name: "benchmark", step: 0 };
    let mut data = vec![rank as f32; BYTES / size_of::<f32>()];
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        communicator.barrier(purpose)?;
        let start = Instant::now();
        data = communicator.start_all_reduce(purpose, data).wait()?;
        if round > 0 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    communicator.barrier(purpose)?;
    if rank == 0 {
        println!("{:.3}", BYTES as f64 / median(&mut times) / 1e9);
    }
    Ok(())
}
