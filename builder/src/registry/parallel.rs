//! Several transfers at a time, told of as one.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use super::Error;
use crate::progress::{Event, Progress};

/// What a worker tells the thread that waits for it.
enum Message {
    /// So many bytes of an item are done.
    Reached(usize, u64),
    Event(Event),
}

/// How the work on one item is told of.
pub(super) struct Tell<'a> {
    index: usize,
    to: mpsc::Sender<Message>,
    stop: &'a AtomicBool,
}

impl Tell<'_> {
    /// So many bytes are done.
    ///
    /// # Errors
    /// When another item has failed, so that there is no sense in going on.
    pub(super) fn reached(&self, bytes: u64) -> io::Result<()> {
        if self.stopped() {
            return Err(io::Error::other("another transfer failed"));
        }
        // The other end is there for as long as there are workers.
        let _ = self.to.send(Message::Reached(self.index, bytes));
        Ok(())
    }

    pub(super) fn event(&self, event: Event) {
        let _ = self.to.send(Message::Event(event));
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Does `work` on each item, `at_once` at a time, and calls `show` with the bytes that are done. Results come in the
/// order of the items.
///
/// # Errors
/// The first failure; the others are stopped for it.
pub(super) fn each<T: Sync, R: Send>(
    items: &[T],
    at_once: usize,
    show: impl Fn(u64) -> Event,
    progress: Progress<'_>,
    work: impl Fn(&T, &Tell<'_>) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let (stop, next) = (AtomicBool::new(false), AtomicUsize::new(0));
    let results: Mutex<Vec<Option<R>>> = Mutex::new(items.iter().map(|_| None).collect());
    let failure = Mutex::new(None);
    let (send, receive) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..at_once.clamp(1, items.len().max(1)) {
            let (to, stop, next, results, failure, work) =
                (send.clone(), &stop, &next, &results, &failure, &work);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    match work(item, &Tell { index, to: to.clone(), stop }) {
                        Ok(result) => {
                            results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
                        }
                        Err(error) => {
                            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
                            failure.get_or_insert(error);
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        drop(send);
        let mut reached = vec![0; items.len()];
        for message in receive {
            match message {
                Message::Reached(index, bytes) => {
                    reached[index] = bytes;
                    progress(show(reached.iter().sum()));
                }
                Message::Event(event) => progress(event),
            }
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => {
            Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect())
        }
    }
}
