//! What the agent says: a queue and a thread that writes it to standard output.
//!
//! Supervision must not wait for whoever reads. Everything that decides something is always kept; lines of ranks are
//! dropped, and counted, when too many bytes of them wait. A reader that is gone is ignored.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use trainyard_spec::protocol::NodeEvent;

/// Bytes of ranks' lines that may wait to be written.
const WAITING_BYTES: usize = 32 << 20;

/// Takes what is to be said.
#[derive(Debug, Clone)]
pub(crate) struct Reporter(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Bytes that the reader has taken.
    written: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<NodeEvent>,
    bytes: usize,
    lost: u64,
    /// Whether the thread holds lines that it has not written yet.
    writing: bool,
}

impl Reporter {
    pub(crate) fn start() -> Self {
        let reporter = Self(Arc::default());
        let writer = reporter.clone();
        thread::spawn(move || writer.write());
        reporter
    }

    /// Says something, sooner or later. Never blocks for long.
    pub(crate) fn say(&self, event: NodeEvent) {
        let mut queue = self.queue();
        if let NodeEvent::Output { line, .. } = &event {
            if queue.bytes + line.len() > WAITING_BYTES {
                queue.lost += 1;
                return;
            }
            queue.bytes += line.len();
        }
        // Told where it happened: before what comes next.
        match std::mem::take(&mut queue.lost) {
            0 => {}
            lines => queue.events.push_back(NodeEvent::OutputLost { lines }),
        }
        queue.events.push_back(event);
        self.0.changed.notify_all();
    }

    /// Waits until everything is written, as long as the reader takes something at least every `patience`.
    pub(crate) fn finish(&self, patience: Duration) {
        let unwritten = |queue: &mut Queue| !queue.events.is_empty() || queue.writing;
        loop {
            let before = self.0.written.load(Ordering::Relaxed);
            let waited = self.0.changed.wait_timeout_while(self.queue(), patience, unwritten);
            let in_time = waited.is_ok_and(|(_, waited)| !waited.timed_out());
            if in_time || self.0.written.load(Ordering::Relaxed) == before {
                return;
            }
        }
    }

    fn write(&self) {
        let mut stdout = std::io::stdout().lock();
        let mut text = Vec::new();
        loop {
            let mut queue = self.queue();
            queue.writing = false;
            self.0.changed.notify_all();
            while queue.events.is_empty() {
                queue = self.0.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            let events = std::mem::take(&mut queue.events);
            queue.bytes = 0;
            queue.writing = true;
            drop(queue);
            for event in events {
                serde_json::to_writer(&mut text, &event).expect("events have text keys alone");
                text.push(b'\n');
                // A write small enough to come out whole even when the agent is killed between two.
                if text.len() > 1 << 16 {
                    let _ = stdout.write_all(&text);
                    self.0.written.fetch_add(text.len() as u64, Ordering::Relaxed);
                    text.clear();
                }
            }
            // Where nobody reads, the ranks still run.
            let _ = stdout.write_all(&text).and_then(|()| stdout.flush());
            text.clear();
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
