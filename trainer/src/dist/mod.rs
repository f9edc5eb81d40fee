//! Ranks that work together: rendezvous, and collectives over a ring of TCP connections.
//!
//! A [`Communicator`] is one group of ranks. All its collectives run on its own thread, one after another in the order
//! in which they were started, which must be the same on all ranks. [`Communicator::start_all_reduce`] returns at
//! once, so the sums of gradients that are final travel while backward computes the rest.
//!
//! Every wait is bounded. When a rank is lost, its neighbours see their connection close and leave, and theirs in turn
//! see them leave, so the whole ring learns of it.
//!
//! Left out: what is reduced and when ([`buckets`] plans it, the training loop does it). Ranks trust each other; the
//! run id keeps strays and earlier attempts apart, it does not authenticate.

pub mod buckets;
pub mod rendezvous;
mod ring;

use std::fmt;
use std::io;
use std::sync::mpsc;
use std::time::Duration;

use ring::Ring;

/// What a collective is for, as its errors name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Purpose {
    /// In a word: "gradients", "loss".
    pub name: &'static str,
    /// Steps done when it was started.
    pub step: u64,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after step {}", self.name, self.step)
    }
}

/// A collective that could not be completed. The ring is of no more use after it.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A neighbour was lost. It may itself have left because it lost a rank further along.
    #[error("lost rank {peer} in {phase} of {purpose}: {fault}")]
    Lost {
        /// The neighbour.
        peer: u32,
        /// Part of the collective.
        phase: &'static str,
        /// What it was for.
        purpose: Purpose,
        /// What is wrong with the neighbour.
        #[source]
        fault: Fault,
    },
    /// It was not tried.
    #[error("{purpose} was not exchanged, because an earlier collective failed")]
    Abandoned {
        /// What it was for.
        purpose: Purpose,
    },
}

/// What is wrong with a neighbour.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It has gone.
    #[error("it closed its connection; it, or a rank behind it, has ended")]
    Closed,
    /// Its connection broke.
    #[error("its connection broke: {0}")]
    Io(#[source] io::Error),
    /// Nothing comes from it. A rank that hangs stops the whole ring, so all others see this at about the same time.
    #[error(
        "nothing moved for {} s; it, or a rank behind it, hangs, or the network does not pass traffic",
        .0.as_secs_f64()
    )]
    Silent(Duration),
    /// It runs another collective.
    #[error("ranks are out of step: it sent {found}, needed is {needed}")]
    OutOfStep {
        /// What it sent.
        found: String,
        /// What this rank is at.
        needed: String,
    },
}

/// A group of ranks, as one of them sees it.
pub struct Communicator {
    rank: u32,
    world_size: u32,
    /// None when the rank is alone: then every collective is the identity.
    queue: Option<mpsc::Sender<Job>>,
}

enum Job {
    AllReduce {
        purpose: Purpose,
        data: Vec<f32>,
        reply: mpsc::SyncSender<Result<Vec<f32>, CollectiveError>>,
    },
    AllGather {
        purpose: Purpose,
        own: Vec<u8>,
        reply: mpsc::SyncSender<Result<Vec<Vec<u8>>, CollectiveError>>,
    },
}

/// A collective under way.
pub struct Pending<T> {
    purpose: Purpose,
    result: mpsc::Receiver<Result<T, CollectiveError>>,
}

impl<T> Pending<T> {
    /// Waits for the result. The ring bounds the wait.
    ///
    /// # Errors
    /// When a rank was lost.
    pub fn wait(self) -> Result<T, CollectiveError> {
        // The thread drops the reply of what is still queued when a collective fails.
        let purpose = self.purpose;
        self.result.recv().unwrap_or(Err(CollectiveError::Abandoned { purpose }))
    }
}

impl Communicator {
    /// A rank with nobody to talk to.
    pub const fn alone() -> Self {
        Self { rank: 0, world_size: 1, queue: None }
    }

    fn over(mut ring: Ring) -> io::Result<Self> {
        let (rank, world_size) = (ring.rank, ring.world_size);
        let (queue, jobs) = mpsc::channel();
        std::thread::Builder::new().name("collectives".to_owned()).spawn(move || {
            for job in jobs {
                // A reply that nobody waits for belongs to a rank that is leaving.
                let healthy = match job {
                    Job::AllReduce { purpose, mut data, reply } => {
                        let result = ring.all_reduce(purpose, &mut data).map(|()| data);
                        result.is_ok() & reply.send(result).is_ok()
                    }
                    Job::AllGather { purpose, own, reply } => {
                        let result = ring.all_gather(purpose, own);
                        result.is_ok() & reply.send(result).is_ok()
                    }
                };
                if !healthy {
                    break;
                }
            }
        })?;
        Ok(Self { rank, world_size, queue: Some(queue) })
    }

    /// This rank.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in the group.
    pub const fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Starts to sum `data` over all ranks. The sum has the same bits on all of them, and in every run of the same
    /// world size.
    pub fn start_all_reduce(&self, purpose: Purpose, data: Vec<f32>) -> Pending<Vec<f32>> {
        self.start(purpose, data, |data, reply| Job::AllReduce { purpose, data, reply }, |data| data)
    }

    /// What every rank contributed, by rank.
    ///
    /// # Errors
    /// When a rank was lost.
    pub fn all_gather(&self, purpose: Purpose, own: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.start(purpose, own, |own, reply| Job::AllGather { purpose, own, reply }, |own| vec![own]).wait()
    }

    /// Sums a few numbers over all ranks, in order of rank.
    ///
    /// # Errors
    /// When a rank was lost.
    pub fn sum<const N: usize>(&self, purpose: Purpose, own: [f64; N]) -> Result<[f64; N], CollectiveError> {
        let parts = self.all_gather(purpose, bytemuck::cast_slice(&own).to_vec())?;
        let mut sum = [0.0; N];
        for part in parts {
            for (sum, bytes) in sum.iter_mut().zip(part.chunks_exact(size_of::<f64>())) {
                *sum += bytemuck::pod_read_unaligned::<f64>(bytes);
            }
        }
        Ok(sum)
    }

    /// What rank 0 says.
    ///
    /// # Errors
    /// When a rank was lost.
    pub fn broadcast(&self, purpose: Purpose, from_rank_0: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let own = if self.rank == 0 { from_rank_0 } else { Vec::new() };
        Ok(self.all_gather(purpose, own)?.swap_remove(0))
    }

    /// Returns once all ranks have come here.
    ///
    /// # Errors
    /// When a rank was lost.
    pub fn barrier(&self, purpose: Purpose) -> Result<(), CollectiveError> {
        self.all_gather(purpose, Vec::new()).map(drop)
    }

    fn start<In, Out>(
        &self,
        purpose: Purpose,
        input: In,
        job: impl FnOnce(In, mpsc::SyncSender<Result<Out, CollectiveError>>) -> Job,
        alone: impl FnOnce(In) -> Out,
    ) -> Pending<Out> {
        let (reply, result) = mpsc::sync_channel(1);
        match &self.queue {
            // If the thread has ended, the job and with it the reply are dropped, and `wait` says so.
            Some(queue) => drop(queue.send(job(input, reply))),
            None => drop(reply.send(Ok(alone(input)))),
        }
        Pending { purpose, result }
    }
}
