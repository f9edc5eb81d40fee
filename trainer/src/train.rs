//! The training loop.
//!
//! A step is: this rank's samples by global index, forward and backward for each micro-batch, the sum of gradients over
//! ranks (each bucket leaves as soon as backward has finished it), clip, AdamW. Sums are in a fixed order and nothing
//! depends on the clock, so a run at a given world size and number of threads gives the same bits each time, resumed or
//! not.
//!
//! Ranks hold the same parameters and moments all the time. Left out: sharding them, and any precision but f32.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trainyard_spec::event::{FailureClass, TrainerEvent};
use trainyard_spec::trainer::TrainerConfig;
use trainyard_spec::{ByteSize, Digest};

use crate::checkpoint::read::{Checkpoint, Resume, choose};
use crate::checkpoint::write::{State, write};
use crate::checkpoint::{CheckpointError, Identity, Kind};
use crate::data::order::Order;
use crate::data::shard::ShardError;
use crate::data::{DataError, Dataset};
use crate::dist::buckets::{BUCKET_BYTES, BucketPlan};
use crate::dist::rendezvous::{Rendezvous, RendezvousError};
use crate::dist::{CollectiveError, Communicator, Purpose};
use crate::model::{Backward, Batch, Model, ModelError, ModelShape, ParameterLayout};
use crate::ops::cpu::Cpu;
use crate::ops::{Ops as _, Span};
use crate::optim::{AdamW, AdamWConfig, Schedule, clip_scale};
use crate::plan::Plan;
use crate::report::Reporter;
use crate::settings::Settings;

/// What to train, on what, and where the results go.
#[derive(Debug, Clone)]
pub struct Options {
    /// Model, optimizer and schedule.
    pub config: TrainerConfig,
    /// The data set's folder.
    pub data: PathBuf,
    /// Folder for checkpoints, the same for all ranks.
    pub checkpoints: PathBuf,
    /// What to start from.
    pub resume: Resume,
    /// Longest wait for other ranks without any progress.
    pub patience: Duration,
}

/// How a run ended that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// A rank was asked to stop; what was reached is in a checkpoint.
    Stopped {
        /// Whether this rank was.
        asked: bool,
    },
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The data set is unusable.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The data set has a token that its vocabulary lacks.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The model cannot be made.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// A rank was lost.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Training diverged.
    #[error(
        "step {step}: the loss is {loss} and the gradients' norm {norm}; the first tensor that is not finite is {tensor}. Lower \
         learning-rate or clip-norm, or lengthen the warm-up"
    )]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// Its loss.
        loss: f64,
        /// The norm of its gradients.
        norm: f64,
        /// The first tensor with a value that is not finite.
        tensor: String,
    },
    /// Signals cannot be caught.
    #[error("cannot watch for SIGTERM: {0}")]
    Signal(#[source] std::io::Error),
}

impl TrainError {
    /// Whose fault it is.
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Data(_) | Self::Shard(_) | Self::NotFinite { .. } => FailureClass::User,
            Self::Model(ModelError::Allocate(_)) => FailureClass::OutOfMemory,
            Self::Model(_) => FailureClass::User,
            Self::Rendezvous(RendezvousError::Refused { mismatch: true, .. }) => FailureClass::User,
            Self::Rendezvous(RendezvousError::Listen { .. } | RendezvousError::System { .. })
            | Self::Signal(_) => FailureClass::Host,
            Self::Rendezvous(_) | Self::Collective(_) => FailureClass::Network,
            Self::Checkpoint(error) => error.class(),
        }
    }
}

/// Trains to the end, or until a rank is asked to stop.
///
/// # Errors
/// See [`TrainError`]; the caller reports it.
pub fn run(options: &Options, settings: &Settings, reporter: &mut Reporter) -> Result<Outcome, TrainError> {
    let config = &options.config;
    let dataset = Dataset::open(&options.data)?;
    dataset.require_context(&options.data, config.model.context)?;
    let mut session = Session::new(options, settings, dataset)?;
    session.restore(options, reporter)?;

    // Before this there is nothing worth saving, and the signal's default ends the process.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(TrainError::Signal)?;
    }
    session.report_start(reporter);
    let train = &config.train;
    while session.step < train.steps {
        let stopping = session.train_step(&stop, reporter)?;
        let last = session.step == train.steps;
        if last || session.step.is_multiple_of(train.eval_every) {
            session.validate(reporter)?;
        }
        if last || stopping || session.step.is_multiple_of(train.checkpoint_every) {
            session.checkpoint(options, reporter)?;
        }
        if stopping && !last {
            // Read again: where all are asked, the signals do not come in the same step.
            return Ok(Outcome::Stopped { asked: stop.load(Ordering::Relaxed) });
        }
    }
    let step = session.step;
    reporter.shared(|| format!("finished after {step} steps"), || TrainerEvent::Finished { step });
    Ok(Outcome::Finished)
}

/// A run on its way.
struct Session {
    config: TrainerConfig,
    identity: Identity,
    dataset: Dataset,
    order: Order,
    model: Model<Cpu<f32>>,
    optimizer: AdamW,
    schedule: Schedule,
    communicator: Communicator,
    buckets: BucketPlan,
    /// Memory of buckets between steps.
    spare: Vec<Vec<f32>>,
    /// Steps done.
    step: u64,
    /// Samples consumed by all ranks together.
    samples: u64,
    inputs: Vec<u32>,
    targets: Vec<u32>,
}

impl Session {
    fn new(options: &Options, settings: &Settings, dataset: Dataset) -> Result<Self, TrainError> {
        let config = options.config.clone();
        let vocabulary = dataset.manifest.vocabulary;
        let shape = ModelShape::new(&config.model, vocabulary as usize);
        let mut model = Model::new(Cpu::new(settings.threads), shape, config.train.batch as usize)?;
        let elements = model.layout().elements();
        let optimizer = AdamW::new(&mut model, 0..elements, AdamWConfig::from(&config.train))?;
        let communicator = Communicator::connect(&Rendezvous {
            rank: settings.rank,
            world_size: settings.world_size,
            master_addr: settings.master_addr.clone(),
            master_port: settings.master_port,
            run_id: settings.run_id.clone(),
            agreement: Digest::of(format!("{config:?} {}", dataset.digest).as_bytes()),
            patience: options.patience,
        })?;
        Ok(Self {
            identity: Identity {
                model: config.model.clone(),
                tokenizer: dataset.manifest.tokenizer,
                vocabulary,
                dataset: dataset.digest,
                seed: config.train.seed,
            },
            order: Order::new(config.train.seed, dataset.train.windows(config.model.context)),
            schedule: Schedule::from(&config.train),
            buckets: BucketPlan::new(elements, BUCKET_BYTES),
            spare: Vec::new(),
            step: 0,
            samples: 0,
            inputs: Vec::new(),
            targets: Vec::new(),
            config,
            dataset,
            model,
            optimizer,
            communicator,
        })
    }

    fn purpose(&self, name: &'static str) -> Purpose {
        Purpose { name, step: self.step }
    }

    /// Takes over a checkpoint, or draws initial parameters. Rank 0 chooses for all.
    fn restore(&mut self, options: &Options, reporter: &mut Reporter) -> Result<(), TrainError> {
        let mut chosen = None;
        let mut path = Vec::new();
        if self.communicator.rank() == 0 {
            let choice = choose(&options.checkpoints, &options.resume)?;
            for (error, aside) in choice.damaged {
                let message = format!("{error}; it was moved to {}", aside.display());
                let line = format!("warning: {message}");
                reporter.shared(|| line, || TrainerEvent::Warning { message });
            }
            if let Some(checkpoint) = &choice.checkpoint {
                path = checkpoint.path.as_os_str().as_encoded_bytes().to_vec();
            }
            chosen = choice.checkpoint;
        }
        let path = self.communicator.broadcast(self.purpose("what to resume from"), path)?;
        if chosen.is_none() && !path.is_empty() {
            use std::os::unix::ffi::OsStringExt as _;
            chosen = Some(Checkpoint::open(&PathBuf::from(std::ffi::OsString::from_vec(path)))?);
        }
        let Some(checkpoint) = chosen else {
            self.model.init(self.config.train.seed);
            return Ok(());
        };
        checkpoint.require(&self.identity)?;
        let layout = ParameterLayout::new(self.model.shape());
        for (kind, span) in [
            (Kind::Parameter, self.model.parameters()),
            (Kind::FirstMoment, self.optimizer.first_moments()),
            (Kind::SecondMoment, self.optimizer.second_moments()),
        ] {
            checkpoint.read(kind, &layout, self.model.ops.host_mut(span))?;
        }
        (self.step, self.samples) = (checkpoint.manifest.step, checkpoint.manifest.samples);
        Ok(())
    }

    fn samples_per_step(&self) -> u64 {
        let train = &self.config.train;
        u64::from(train.batch)
            * u64::from(train.grad_accumulation)
            * u64::from(self.communicator.world_size())
    }

    fn tokens_per_step(&self) -> u64 {
        self.samples_per_step() * u64::from(self.config.model.context)
    }

    fn report_start(&self, reporter: &mut Reporter) {
        let parameters = self.model.layout().elements() as u64;
        let (steps, first_step, tokens_per_step) =
            (self.config.train.steps, self.step, self.tokens_per_step());
        let unigram_loss = self.dataset.manifest.unigram_loss;
        let plan = Plan::new(&self.config, self.identity.vocabulary, self.communicator.world_size());
        reporter.shared(
            || {
                format!(
                    "{parameters} parameters, {} of memory a rank, {tokens_per_step} tokens a step, steps {} to {steps}, unigram \
                     loss {unigram_loss:.4}",
                    ByteSize(plan.memory_bytes),
                    first_step + 1,
                )
            },
            || TrainerEvent::Started { parameters, steps, first_step, tokens_per_step, unigram_loss },
        );
    }

    /// One optimizer step. True when a rank was asked to stop.
    fn train_step(&mut self, stop: &AtomicBool, reporter: &mut Reporter) -> Result<bool, TrainError> {
        let start = Instant::now();
        let own_loss = self.gradients()?;
        let world = f64::from(self.communicator.world_size());
        let asked = f64::from(u8::from(stop.load(Ordering::Relaxed)));
        let [loss, asked] = self.communicator.sum(self.purpose("loss"), [own_loss, asked])?;
        let loss = loss / world;
        // Gradients are summed over ranks; the mean is taken on the way into the optimizer.
        let gradients = self.model.gradients();
        let norm = self.model.ops.sum_of_squares(gradients).sqrt() / world;
        let step = self.step + 1;
        if !(loss.is_finite() && norm.is_finite()) {
            return Err(TrainError::NotFinite { step, loss, norm, tensor: self.not_finite() });
        }
        let learning_rate = self.schedule.learning_rate(step);
        let scale = clip_scale(norm, self.config.train.clip_norm) / world;
        self.optimizer.update(&mut self.model, step, learning_rate, scale);
        self.step = step;
        self.samples += self.samples_per_step();

        let tokens_per_second = self.tokens_per_step() as f64 / start.elapsed().as_secs_f64();
        let steps = self.config.train.steps;
        reporter.shared(
            || {
                format!(
                    "step {step}/{steps}  loss {loss:.4}  learning rate {learning_rate:.2e}  gradient norm {norm:.3}  \
                     {tokens_per_second:.0} tokens/s"
                )
            },
            || TrainerEvent::Step { step, loss, learning_rate, grad_norm: norm, tokens_per_second },
        );
        Ok(asked > 0.0)
    }

    /// Leaves the gradients of this step, summed over ranks, in the model. Returns this rank's loss.
    fn gradients(&mut self) -> Result<f64, TrainError> {
        let train = &self.config.train;
        let (batch, micro_batches) = (u64::from(train.batch), u64::from(train.grad_accumulation));
        let (rank, world) = (u64::from(self.communicator.rank()), u64::from(self.communicator.world_size()));
        let context = self.config.model.context;
        let purpose = self.purpose("gradients");
        let mut pending = Vec::with_capacity(self.buckets.ranges().len());
        let mut loss = 0.0;
        for micro in 0..micro_batches {
            self.inputs.clear();
            self.targets.clear();
            let first = self.samples + (micro * world + rank) * batch;
            for index in first..first + batch {
                let window = self.order.window(index);
                self.dataset.train.read_window(window, context, &mut self.inputs, &mut self.targets)?;
            }
            let (communicator, buckets, spare) = (&self.communicator, &self.buckets, &mut self.spare);
            let flat = self.model.gradients();
            let mut done = 0;
            let mut on_ready = |ops: &mut Cpu<f32>, ready: Span| {
                let end = done + ready.len;
                for range in buckets.completed(done, end) {
                    let mut bucket = spare.pop().unwrap_or_default();
                    bucket.clear();
                    bucket.extend_from_slice(ops.host(flat.slice(range.clone())));
                    pending.push((range.clone(), communicator.start_all_reduce(purpose, bucket)));
                }
                done = end;
            };
            let reduces = micro + 1 == micro_batches && world > 1;
            loss += self.model.forward_backward(
                Batch { tokens: &self.inputs, targets: &self.targets, sequences: batch as usize },
                Backward { scale: 1.0 / micro_batches as f64, accumulate: micro > 0 },
                if reduces { Some(&mut on_ready) } else { None },
            )?;
        }
        for (range, bucket) in pending {
            let sum = bucket.wait()?;
            self.model.host_gradients_mut()[range].copy_from_slice(&sum);
            self.spare.push(sum);
        }
        Ok(loss / micro_batches as f64)
    }

    /// The first tensor whose gradient, or else whose value, is not finite.
    fn not_finite(&self) -> String {
        for (what, values) in
            [("gradient of ", self.model.host_gradients()), ("", self.model.host_parameters())]
        {
            for parameter in self.model.layout().iter() {
                if values[parameter.range.clone()].iter().any(|value| !value.is_finite()) {
                    return format!("{what}{}", parameter.name);
                }
            }
        }
        "the loss alone".to_owned()
    }

    /// Loss on fixed windows of the held-out text, spread evenly over it and dealt out to the ranks.
    fn validate(&mut self, reporter: &mut Reporter) -> Result<(), TrainError> {
        let context = self.config.model.context;
        let windows = self.dataset.validation.windows(context);
        let count = windows.min(self.config.train.eval_sequences.into());
        let own: Vec<u64> = (u64::from(self.communicator.rank())..count)
            .step_by(self.communicator.world_size() as usize)
            .map(|index| (u128::from(index) * u128::from(windows) / u128::from(count)) as u64)
            .collect();
        let mut sum = 0.0;
        for batch in own.chunks(self.config.train.batch as usize) {
            self.inputs.clear();
            self.targets.clear();
            for &window in batch {
                self.dataset.validation.read_window(window, context, &mut self.inputs, &mut self.targets)?;
            }
            let batch = Batch { tokens: &self.inputs, targets: &self.targets, sequences: batch.len() };
            sum += self.model.loss(batch)? * batch.sequences as f64;
        }
        let [loss] = self.communicator.sum(self.purpose("validation loss"), [sum])?;
        let (step, loss) = (self.step, loss / count as f64);
        reporter.shared(
            || format!("step {step}: validation loss {loss:.4}"),
            || TrainerEvent::Validation { step, loss },
        );
        Ok(())
    }

    fn checkpoint(&mut self, options: &Options, reporter: &mut Reporter) -> Result<(), TrainError> {
        let start = Instant::now();
        let state = State {
            step: self.step,
            samples: self.samples,
            layout: self.model.layout(),
            parameters: self.model.host_parameters(),
            first: self.model.ops.host(self.optimizer.first_moments()),
            second: self.model.ops.host(self.optimizer.second_moments()),
        };
        let keep_last = self.config.train.keep_last;
        let written = write(&options.checkpoints, &self.identity, &state, &self.communicator, keep_last)?;
        let (step, seconds) = (self.step, start.elapsed().as_secs_f64());
        let path = written.path.display().to_string();
        reporter.shared(
            || format!("step {step}: checkpoint {path}, {} in {seconds:.2} s", ByteSize(written.bytes)),
            || TrainerEvent::Checkpoint { step, path: path.clone(), bytes: written.bytes, seconds },
        );
        Ok(())
    }
}
