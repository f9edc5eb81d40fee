//! One rank's place in the ring: a stream to the next rank and one from the previous.
//!
//! Both directions move at once, from one thread, with non-blocking sockets and `poll`. Every transfer starts with a
//! [`Header`] that the receiver compares with its own, so ranks that run different collectives find out instead of
//! adding each other's bytes. Waiting is bounded by the time since the last byte moved, not by a transfer's size.
//!
//! Left out: which collective runs when (the communicator's queue), and who the neighbours are (rendezvous).

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Range;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{CollectiveError, Fault, Purpose};

#[cfg(target_endian = "big")]
compile_error!("numbers go over the wire as they lie in memory, which must be little-endian");

/// Bytes read at once while reducing: large enough that system calls do not matter, small enough for the L2 cache.
const PIECE: usize = 256 << 10;

/// What precedes the payload of every transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    /// Transfers done on this edge before, in both kinds.
    sequence: u32,
    /// [`REDUCTION`] or [`MESSAGE`].
    kind: u32,
    /// Bytes that follow.
    bytes: u64,
}

const REDUCTION: u32 = 0x5444_4552;
const MESSAGE: u32 = 0x4753_454d;
const HEADER: usize = 16;

/// Longest message; only small facts travel as messages.
const MAX_MESSAGE: u64 = 64 << 20;

impl Header {
    fn to_bytes(self) -> [u8; HEADER] {
        bytemuck::cast([u64::from(self.sequence) | u64::from(self.kind) << 32, self.bytes])
    }

    fn from_bytes(bytes: [u8; HEADER]) -> Self {
        let [low, bytes]: [u64; 2] = bytemuck::cast(bytes);
        Self { sequence: low as u32, kind: (low >> 32) as u32, bytes }
    }
}

/// The payload of one transfer, as the sockets see it.
trait Traffic {
    /// The neighbour has announced how many bytes it sends.
    fn announced(&mut self, bytes: u64);
    /// Bytes that may be sent now. Empty when all is sent or what comes next has not arrived yet.
    fn outgoing(&self) -> &[u8];
    /// `count` of them were sent.
    fn sent(&mut self, count: usize);
    /// Whether nothing is left to send.
    fn all_sent(&self) -> bool;
    /// Where to put what arrives. Empty when all has arrived.
    fn incoming(&mut self) -> &mut [u8];
    /// `count` bytes were put there.
    fn received(&mut self, count: usize);
    /// The part of the collective that is waited for, for messages.
    fn phase(&self) -> &'static str;
}

/// A rank's two edges.
pub(super) struct Ring {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    next: TcpStream,
    prev: TcpStream,
    patience: Duration,
    sequence: u32,
    piece: Vec<f32>,
}

impl Ring {
    /// Takes connected streams. `patience` is the longest time without any progress.
    pub(super) fn new(
        rank: u32,
        world_size: u32,
        next: TcpStream,
        prev: TcpStream,
        patience: Duration,
    ) -> io::Result<Self> {
        for stream in [&next, &prev] {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
        }
        Ok(Self {
            rank,
            world_size,
            next,
            prev,
            patience,
            sequence: 0,
            piece: vec![0.0; PIECE / size_of::<f32>()],
        })
    }

    /// Sums `data` over all ranks, in place: reduce-scatter, then all-gather, as one pipeline. Each element is added
    /// in the ring's order from the rank that its chunk starts at, so the result depends on the world size and the
    /// values alone and is the same, to the bit, on all ranks.
    pub(super) fn all_reduce(&mut self, purpose: Purpose, data: &mut [f32]) -> Result<(), CollectiveError> {
        let bytes = size_of_val(data) as u64;
        let header = self.header(REDUCTION, bytes);
        let mut piece = std::mem::take(&mut self.piece);
        let mut reduction = Reduction::new(self.rank, self.world_size, data, &mut piece);
        let result = self.pump(purpose, header, &mut reduction);
        self.piece = piece;
        result
    }

    /// Everyone's `own` bytes, by rank.
    pub(super) fn all_gather(
        &mut self,
        purpose: Purpose,
        own: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let (rank, size) = (self.rank as usize, self.world_size as usize);
        let mut parts = vec![Vec::new(); size];
        parts[rank] = own;
        for step in 0..size - 1 {
            let from = (rank + 2 * size - step - 1) % size;
            let passed_on = &parts[(from + 1) % size];
            let header = self.header(MESSAGE, passed_on.len() as u64);
            let mut message = Message { payload: passed_on, arrived: Vec::new(), arrived_bytes: 0 };
            self.pump(purpose, header, &mut message)?;
            parts[from] = message.arrived;
        }
        Ok(parts)
    }

    fn header(&mut self, kind: u32, bytes: u64) -> Header {
        self.sequence = self.sequence.wrapping_add(1);
        Header { sequence: self.sequence, kind, bytes }
    }

    /// Exchanges headers, then moves `traffic`, both ways until all is sent and received.
    fn pump(
        &mut self,
        purpose: Purpose,
        header: Header,
        traffic: &mut impl Traffic,
    ) -> Result<(), CollectiveError> {
        let next_rank = (self.rank + 1) % self.world_size;
        let prev_rank = (self.rank + self.world_size - 1) % self.world_size;
        let lost = |peer, phase, fault| CollectiveError::Lost { peer, phase, purpose, fault };
        let header_out = header.to_bytes();
        let mut header_in = [0; HEADER];
        let (mut header_sent, mut header_got) = (0, 0);
        let mut idle_since: Option<Instant> = None;
        loop {
            let mut moved = false;
            let space = if header_got < HEADER { &mut header_in[header_got..] } else { traffic.incoming() };
            let receiving = !space.is_empty();
            if receiving {
                match self.prev.read(space) {
                    Ok(0) => return Err(lost(prev_rank, traffic.phase(), Fault::Closed)),
                    Ok(count) if header_got < HEADER => {
                        moved = true;
                        header_got += count;
                        if header_got == HEADER {
                            let bytes = check(Header::from_bytes(header_in), header)
                                .map_err(|fault| lost(prev_rank, traffic.phase(), fault))?;
                            traffic.announced(bytes);
                        }
                    }
                    Ok(count) => {
                        moved = true;
                        traffic.received(count);
                    }
                    Err(error) if is_transient(&error) => {}
                    Err(error) => return Err(lost(prev_rank, traffic.phase(), Fault::Io(error))),
                }
            }
            let ready = if header_sent < HEADER { &header_out[header_sent..] } else { traffic.outgoing() };
            let sending = !ready.is_empty();
            if sending {
                match self.next.write(ready) {
                    Ok(count) if header_sent < HEADER => {
                        moved = true;
                        header_sent += count;
                    }
                    Ok(count) => {
                        moved = true;
                        traffic.sent(count);
                    }
                    Err(error) if is_transient(&error) => {}
                    Err(error) => return Err(lost(next_rank, traffic.phase(), Fault::Io(error))),
                }
            }
            let sent = header_sent == HEADER && traffic.all_sent();
            let received = header_got == HEADER && traffic.incoming().is_empty();
            if sent && received {
                return Ok(());
            }
            if moved {
                idle_since = None;
                continue;
            }
            let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
            let Some(left) = self.patience.checked_sub(idle).filter(|left| !left.is_zero()) else {
                let peer = if received { next_rank } else { prev_rank };
                return Err(lost(peer, traffic.phase(), Fault::Silent(self.patience)));
            };
            let next_lost = self
                .wait(sending, sent, receiving, left)
                .map_err(|error| lost(prev_rank, traffic.phase(), Fault::Io(error)))?;
            if next_lost {
                return Err(lost(next_rank, traffic.phase(), Fault::Closed));
            }
        }
    }

    /// Waits until bytes can move. True when the next rank has gone although it is still owed bytes; one that is owed
    /// nothing may already have finished and left.
    fn wait(&self, sending: bool, all_sent: bool, receiving: bool, left: Duration) -> io::Result<bool> {
        let next_events = match (sending, all_sent) {
            (true, _) => PollFlags::OUT | PollFlags::RDHUP,
            (false, false) => PollFlags::RDHUP,
            (false, true) => PollFlags::empty(),
        };
        let mut edges = [PollFd::new(&self.prev, PollFlags::IN), PollFd::new(&self.next, next_events)];
        let watched = match (receiving, all_sent) {
            (true, true) => &mut edges[..1],
            (true, false) => &mut edges[..],
            (false, _) => &mut edges[1..],
        };
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(watched, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        Ok(!all_sent && edges[1].revents().intersects(gone))
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Bytes that the neighbour announces, if it runs the same transfer.
fn check(found: Header, needed: Header) -> Result<u64, Fault> {
    // A message's length is its sender's business.
    let fits = found.bytes == needed.bytes || needed.kind == MESSAGE && found.bytes <= MAX_MESSAGE;
    if found.sequence == needed.sequence && found.kind == needed.kind && fits {
        return Ok(found.bytes);
    }
    let describe = |header: Header| {
        let kind = match header.kind {
            REDUCTION => "all-reduce",
            MESSAGE => "message",
            _ => "unknown transfer",
        };
        format!("{kind} {} of {} bytes", header.sequence, header.bytes)
    };
    Err(Fault::OutOfStep { found: describe(found), needed: describe(needed) })
}

/// An all-reduce under way. Step `t` of `2 (N - 1)` sends chunk `rank - t` and receives chunk `rank - t - 1`: first to
/// add (reduce-scatter), then to keep (all-gather). What step `t` receives is what step `t + 1` sends, so a byte may
/// leave as soon as it has been reduced and the steps run into each other.
struct Reduction<'a> {
    rank: usize,
    size: usize,
    data: &'a mut [f32],
    send_step: usize,
    send_bytes: usize,
    recv_step: usize,
    recv_bytes: usize,
    piece: &'a mut [f32],
    /// Bytes of an element that has arrived in part, at the start of `piece`.
    partial: usize,
}

impl<'a> Reduction<'a> {
    fn new(rank: u32, size: u32, data: &'a mut [f32], piece: &'a mut [f32]) -> Self {
        let mut reduction = Self {
            rank: rank as usize,
            size: size as usize,
            data,
            send_step: 0,
            send_bytes: 0,
            recv_step: 0,
            recv_bytes: 0,
            piece,
            partial: 0,
        };
        reduction.skip_empty();
        reduction
    }

    fn steps(&self) -> usize {
        2 * (self.size - 1)
    }

    /// Elements of the chunk that moves in `step`.
    fn chunk(&self, step: usize, received: bool) -> Range<usize> {
        let index = (self.rank + 3 * self.size - step - usize::from(received)) % self.size;
        let bound = |index: usize| (self.data.len() as u128 * index as u128 / self.size as u128) as usize;
        bound(index)..bound(index + 1)
    }

    fn chunk_bytes(&self, step: usize, received: bool) -> usize {
        self.chunk(step, received).len() * size_of::<f32>()
    }

    /// Goes past steps whose chunk is done, or has no elements.
    fn skip_empty(&mut self) {
        while self.send_step < self.steps() && self.send_bytes == self.chunk_bytes(self.send_step, false) {
            (self.send_step, self.send_bytes) = (self.send_step + 1, 0);
        }
        while self.recv_step < self.steps() && self.recv_bytes == self.chunk_bytes(self.recv_step, true) {
            (self.recv_step, self.recv_bytes) = (self.recv_step + 1, 0);
        }
    }

    fn reducing(&self) -> bool {
        self.recv_step < self.size - 1
    }
}

impl Traffic for Reduction<'_> {
    fn announced(&mut self, _: u64) {}

    fn outgoing(&self) -> &[u8] {
        if self.send_step == self.steps() {
            return &[];
        }
        let chunk: &[u8] = bytemuck::cast_slice(&self.data[self.chunk(self.send_step, false)]);
        let ready = match (self.send_step, self.recv_step + 1) {
            (0, _) => chunk.len(),
            (send, recv) if send < recv => chunk.len(),
            (send, recv) if send == recv => self.recv_bytes,
            _ => 0,
        };
        chunk.get(self.send_bytes..ready).unwrap_or_default()
    }

    fn sent(&mut self, count: usize) {
        self.send_bytes += count;
        self.skip_empty();
    }

    fn all_sent(&self) -> bool {
        self.send_step == self.steps()
    }

    fn incoming(&mut self) -> &mut [u8] {
        if self.recv_step == self.steps() {
            return &mut [];
        }
        let chunk = self.chunk(self.recv_step, true);
        if self.reducing() {
            let left = chunk.len() * size_of::<f32>() - self.recv_bytes;
            let piece: &mut [u8] = bytemuck::cast_slice_mut(self.piece);
            let end = left.min(piece.len());
            &mut piece[self.partial..end]
        } else {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.data[chunk]);
            &mut bytes[self.recv_bytes..]
        }
    }

    fn received(&mut self, count: usize) {
        if self.reducing() {
            const WIDTH: usize = size_of::<f32>();
            let arrived = self.partial + count;
            let whole = arrived / WIDTH;
            let chunk = self.chunk(self.recv_step, true);
            let start = chunk.start + self.recv_bytes / WIDTH;
            for (sum, value) in self.data[start..start + whole].iter_mut().zip(&*self.piece) {
                *sum += value;
            }
            self.partial = arrived % WIDTH;
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.piece);
            bytes.copy_within(whole * WIDTH..arrived, 0);
            self.recv_bytes += whole * WIDTH;
        } else {
            self.recv_bytes += count;
        }
        self.skip_empty();
    }

    fn phase(&self) -> &'static str {
        if self.reducing() { "reduce-scatter" } else { "all-gather" }
    }
}

/// A message of any length to the next rank and one from the previous.
struct Message<'a> {
    payload: &'a [u8],
    arrived: Vec<u8>,
    arrived_bytes: usize,
}

impl Traffic for Message<'_> {
    fn announced(&mut self, bytes: u64) {
        self.arrived = vec![0; bytes as usize];
    }

    fn outgoing(&self) -> &[u8] {
        self.payload
    }

    fn sent(&mut self, count: usize) {
        self.payload = &self.payload[count..];
    }

    fn all_sent(&self) -> bool {
        self.payload.is_empty()
    }

    fn incoming(&mut self) -> &mut [u8] {
        &mut self.arrived[self.arrived_bytes..]
    }

    fn received(&mut self, count: usize) {
        self.arrived_bytes += count;
    }

    fn phase(&self) -> &'static str {
        "exchange"
    }
}
