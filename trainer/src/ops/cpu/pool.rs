//! Threads that share one operation at a time.
//!
//! Work is handed out piece by piece, so a thread that the system holds up delays the others by one piece at most. The
//! cut into pieces, never the number of threads, decides what is computed; pieces write to disjoint memory. With one
//! thread everything runs in the caller.
//!
//! Idle threads spin for some microseconds, because operations follow each other closely, and sleep afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Turns of the spin loop before an idle thread sleeps: about 20 microseconds.
const SPINS: u32 = 400;

pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// A call that every thread makes with its own number. The pointer is valid while the job stands in [`Slot`] or
/// `Shared::running` is not 0.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync));

// SAFETY: what it points at is `Sync`, and lives as long as said above.
unsafe impl Send for Job {}

struct Slot {
    job: Option<Job>,
    /// Number of the newest job, as in `Shared::newest`.
    number: u64,
    sleeping: usize,
    stop: bool,
}

struct Shared {
    slot: Mutex<Slot>,
    wake: Condvar,
    /// Changes when there is a job or the pool stops; what idle threads look at while they spin.
    newest: AtomicU64,
    /// Workers inside the job.
    running: AtomicUsize,
    panicked: AtomicBool,
}

impl Shared {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        // No code that can panic runs under this lock.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// A pool of `threads` threads, of which the caller's is one.
    pub(super) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            slot: Mutex::new(Slot { job: None, number: 0, sleeping: 0, stop: false }),
            wake: Condvar::new(),
            newest: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        });
        let workers = (1..threads)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || work(&shared, worker))
            })
            .collect();
        Self { shared, workers }
    }

    #[cfg(test)]
    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `run` for each item, by any thread, with the thread's number.
    pub(super) fn each<T: Send>(
        &self,
        mut items: impl Iterator<Item = T> + Send,
        run: impl Fn(usize, T) + Sync,
    ) {
        if self.workers.is_empty() {
            items.for_each(|item| run(0, item));
            return;
        }
        let Some(first) = items.next() else { return };
        let Some(second) = items.next() else {
            run(0, first);
            return;
        };
        let items = Mutex::new([first, second].into_iter().chain(items));
        let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
        self.broadcast(&|worker| {
            while let Some(item) = next() {
                run(worker, item);
            }
        });
    }

    /// Calls `run` in this thread and in the workers that are free before it ends here.
    fn broadcast(&self, run: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. `Finish` ends the job before `run` goes, whichever way this returns.
        let job = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(run)
        });
        let sleeping = {
            let mut slot = shared.slot();
            slot.job = Some(job);
            slot.number += 1;
            shared.newest.store(slot.number, Ordering::Release);
            slot.sleeping
        };
        if sleeping > 0 {
            shared.wake.notify_all();
        }
        let finish = Finish(shared);
        run(0);
        drop(finish);
        assert!(!shared.panicked.load(Ordering::Relaxed), "a worker thread panicked; its message is above");
    }
}

/// Ends the job when dropped: no worker may enter any more, and those inside are waited for.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.slot().job = None;
        let mut turns = 0_u32;
        while self.0.running.load(Ordering::Acquire) > 0 {
            turns += 1;
            if turns < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let mut slot = self.shared.slot();
            slot.stop = true;
            self.shared.newest.store(u64::MAX, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            if let Err(panic) = worker.join()
                && !std::thread::panicking()
            {
                resume_unwind(panic);
            }
        }
    }
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        let mut turns = 0;
        while turns < SPINS && shared.newest.load(Ordering::Acquire) == seen {
            turns += 1;
            std::hint::spin_loop();
        }
        let job = {
            let mut slot = shared.slot();
            while slot.number == seen && !slot.stop {
                slot.sleeping += 1;
                slot = shared.wake.wait(slot).unwrap_or_else(PoisonError::into_inner);
                slot.sleeping -= 1;
            }
            if slot.stop {
                return;
            }
            seen = slot.number;
            if slot.job.is_some() {
                shared.running.fetch_add(1, Ordering::Relaxed);
            }
            slot.job
        };
        if let Some(Job(run)) = job {
            // SAFETY: the job was in the slot when `running` was raised, so `Finish` waits for this thread.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*run)(worker) }));
            if result.is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
            shared.running.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_taken_once() {
        for threads in 1..5 {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for count in [0, 1, 2, 3, 100] {
                let mut counts = vec![0; count];
                pool.each(counts.iter_mut(), |worker, count| {
                    assert!(worker < threads);
                    *count += 1;
                });
                assert!(counts.iter().all(|&count| count == 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_ends() {
        let pool = Pool::new(3);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.each(0..100, |_, item| assert_ne!(item, 50));
        }));
        assert!(result.is_err());
    }
}
