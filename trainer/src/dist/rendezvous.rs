//! How ranks find each other: rank 0 listens where the launcher's environment says, the others tell it where they
//! listen, and everyone connects to the next rank of the ring.
//!
//! A connection is taken only when it shows the run id of this attempt (and, for the ring, a token that rank 0 drew),
//! so port scanners, ranks of an earlier attempt and ranks with another configuration are turned away, with the
//! reason, and rank 0 goes on listening.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use trainyard_spec::{Digest, FormatVersion};

use super::Communicator;
use super::ring::Ring;

/// Longest greeting, so that a stray cannot make a rank allocate.
const MAX_GREETING: u32 = 1 << 20;
/// Between two tries to reach a rank that does not listen yet.
const RETRY: Duration = Duration::from_millis(20);

/// One rank's way into the group.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// This rank.
    pub rank: u32,
    /// Ranks in all.
    pub world_size: u32,
    /// Name or address of rank 0's node.
    pub master_addr: String,
    /// Port on which rank 0 listens.
    pub master_port: u16,
    /// Id of this attempt.
    pub run_id: String,
    /// What all ranks must agree on: the digest of configuration and data.
    pub agreement: Digest,
    /// Longest wait for the others, here and later in any collective without progress.
    pub patience: Duration,
}

/// Why a rank found no group.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// The master's name means nothing here.
    #[error("MASTER_ADDR {host:?} cannot be resolved: {source}")]
    Resolve {
        /// The name.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {address} (MASTER_ADDR, MASTER_PORT): {source}{}", listen_hint(.source))]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Not everyone came in time.
    #[error("{found} of {needed} ranks came within {} s; missing: {missing}{}", .patience.as_secs_f64(), turned_away(.refused))]
    Missing {
        /// Ranks that came.
        found: u32,
        /// Ranks in all.
        needed: u32,
        /// The others.
        missing: String,
        /// Why connections were refused meanwhile.
        refused: Vec<String>,
        /// How long rank 0 waited.
        patience: Duration,
    },
    /// Nobody listens at the master's address.
    #[error("rank 0 could not be reached at {address} within {} s: {source}", .patience.as_secs_f64())]
    Unreachable {
        /// Where.
        address: String,
        /// The last try's error.
        source: io::Error,
        /// How long this rank tried.
        patience: Duration,
    },
    /// Rank 0 turned this rank away.
    #[error("rank 0 at {address} refused this rank: {reason}")]
    Refused {
        /// Where.
        address: String,
        /// Its reason.
        reason: String,
        /// Whether configuration or data differ, which no new attempt will change.
        mismatch: bool,
    },
    /// A neighbour could not be connected.
    #[error("rank {peer} could not be connected to the ring: {source}")]
    Neighbour {
        /// The neighbour.
        peer: u32,
        /// Why.
        source: io::Error,
    },
    /// The operating system refused a socket or a thread.
    #[error("{operation}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn listen_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; another program uses the port: give the job another one",
        io::ErrorKind::AddrNotAvailable => "; MASTER_ADDR must be an address of rank 0's own node",
        _ => "",
    }
}

fn turned_away(refused: &[String]) -> String {
    match refused {
        [] => String::new(),
        reasons => format!("; turned away: {}", reasons.join(", ")),
    }
}

/// The first words of a rank to rank 0.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Hello {
    version: FormatVersion<1>,
    run_id: String,
    rank: u32,
    world_size: u32,
    agreement: Digest,
    /// Where the rank before this one can connect.
    listens_at: SocketAddr,
}

/// Rank 0's answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum Answer {
    Welcome { addresses: Vec<SocketAddr>, token: Digest },
    Refused { reason: String, mismatch: bool },
}

/// The first words of a rank to the next one in the ring.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RingHello {
    token: Digest,
    rank: u32,
}

impl Communicator {
    /// Finds the other ranks and builds the ring. A rank that is alone opens no socket.
    ///
    /// # Errors
    /// When the group does not come together within the patience, or turns this rank away.
    pub fn connect(rendezvous: &Rendezvous) -> Result<Self, RendezvousError> {
        if rendezvous.world_size == 1 {
            return Ok(Self::alone());
        }
        let deadline = Instant::now() + rendezvous.patience;
        let group =
            if rendezvous.rank == 0 { host(rendezvous, deadline)? } else { join(rendezvous, deadline)? };
        let ring = close_ring(rendezvous, &group, deadline)?;
        Self::over(ring).map_err(system("cannot start the thread for collectives"))
    }
}

/// What a rank knows once all have met.
struct Group {
    addresses: Vec<SocketAddr>,
    token: Digest,
    listener: TcpListener,
}

fn system(operation: &'static str) -> impl Fn(io::Error) -> RendezvousError {
    move |source| RendezvousError::System { operation, source }
}

/// Rank 0: listens until every rank has come.
fn host(rendezvous: &Rendezvous, deadline: Instant) -> Result<Group, RendezvousError> {
    let address = resolve(rendezvous)?;
    let meeting = TcpListener::bind(address).map_err(|source| RendezvousError::Listen { address, source })?;
    let listener = listen(address.ip())?;
    let own = listener.local_addr().map_err(system("cannot read a socket's address"))?;

    let world = rendezvous.world_size as usize;
    let mut members: Vec<Option<(TcpStream, SocketAddr)>> = (0..world).map(|_| None).collect();
    let mut refused = Vec::new();
    // Each connection is read on its own thread, so that a silent stray delays nobody.
    let (arrivals, arrived) = mpsc::channel();
    meeting.set_nonblocking(true).map_err(system("cannot configure a socket"))?;
    while members.iter().skip(1).any(Option::is_none) {
        while let Ok((stream, from, hello)) = arrived.try_recv() {
            match admit(rendezvous, &hello, &members) {
                Ok(rank) => members[rank] = Some((stream, hello.listens_at)),
                Err((reason, mismatch)) => {
                    refused.push(format!("{from} ({reason})"));
                    // The stranger may have gone; that is its own affair.
                    drop(send(&stream, &Answer::Refused { reason, mismatch }, deadline));
                }
            }
        }
        match meeting.accept() {
            Ok((stream, from)) => {
                let arrivals = arrivals.clone();
                std::thread::spawn(move || {
                    // What does not greet properly is a stray: nothing is owed to it.
                    if let Ok(hello) =
                        stream.set_nonblocking(false).and_then(|()| receive::<Hello>(&stream, deadline))
                    {
                        drop(arrivals.send((stream, from, hello)));
                    }
                });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    let missing: Vec<String> = (1..world)
                        .filter(|&rank| members[rank].is_none())
                        .map(|rank| rank.to_string())
                        .collect();
                    return Err(RendezvousError::Missing {
                        found: rendezvous.world_size - missing.len() as u32,
                        needed: rendezvous.world_size,
                        missing: missing.join(", "),
                        refused,
                        patience: rendezvous.patience,
                    });
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(source) => return Err(system("cannot accept a connection")(source)),
        }
    }

    let members: Vec<(TcpStream, SocketAddr)> = members.into_iter().flatten().collect();
    let mut addresses = vec![own];
    addresses.extend(members.iter().map(|(_, address)| *address));
    let token = draw_token(rendezvous)?;
    let answer = Answer::Welcome { addresses: addresses.clone(), token };
    for (index, (stream, _)) in members.iter().enumerate() {
        send(stream, &answer, deadline)
            .map_err(|source| RendezvousError::Neighbour { peer: index as u32 + 1, source })?;
    }
    Ok(Group { addresses, token, listener })
}

/// The rank that `hello` may take, or why it may not and whether its configuration is the reason.
fn admit(
    rendezvous: &Rendezvous,
    hello: &Hello,
    members: &[Option<(TcpStream, SocketAddr)>],
) -> Result<usize, (String, bool)> {
    if hello.run_id != rendezvous.run_id {
        let reason = format!(
            "its run id is {:?}, that of this attempt is {:?}; it belongs to another job or an earlier attempt",
            hello.run_id, rendezvous.run_id
        );
        return Err((reason, false));
    }
    if hello.world_size != rendezvous.world_size {
        let reason =
            format!("its WORLD_SIZE is {}, that of rank 0 is {}", hello.world_size, rendezvous.world_size);
        return Err((reason, true));
    }
    if hello.agreement != rendezvous.agreement {
        let reason = format!(
            "its configuration or data differ from rank 0's ({} against {}); all ranks need the same",
            hello.agreement.short(),
            rendezvous.agreement.short()
        );
        return Err((reason, true));
    }
    match members.get(hello.rank as usize) {
        Some(None) if hello.rank > 0 => Ok(hello.rank as usize),
        Some(_) => Err((format!("rank {} is taken", hello.rank), true)),
        None => Err((format!("rank {} is not below WORLD_SIZE {}", hello.rank, rendezvous.world_size), true)),
    }
}

/// A token that strays cannot know by accident.
fn draw_token(rendezvous: &Rendezvous) -> Result<Digest, RendezvousError> {
    let mut seed = [0; 32];
    fs_err::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut seed))
        .map_err(system("cannot draw a random token"))?;
    Ok(Digest::of(&[&seed[..], rendezvous.run_id.as_bytes()].concat()))
}

/// Any other rank: finds rank 0, says where it listens, and waits until all have come.
fn join(rendezvous: &Rendezvous, deadline: Instant) -> Result<Group, RendezvousError> {
    let address = format!("{}:{}", rendezvous.master_addr, rendezvous.master_port);
    let unreachable = |source| RendezvousError::Unreachable {
        address: address.clone(),
        source,
        patience: rendezvous.patience,
    };
    let stream = connect(|| resolve(rendezvous).map_err(io::Error::other), deadline).map_err(unreachable)?;
    // Whoever reaches rank 0 from this address can be reached at it by the others.
    let reachable = stream.local_addr().map_err(system("cannot read a socket's address"))?.ip();
    let listener = listen(reachable)?;
    let hello = Hello {
        version: FormatVersion,
        run_id: rendezvous.run_id.clone(),
        rank: rendezvous.rank,
        world_size: rendezvous.world_size,
        agreement: rendezvous.agreement,
        listens_at: listener.local_addr().map_err(system("cannot read a socket's address"))?,
    };
    send(&stream, &hello, deadline).map_err(unreachable)?;
    match receive(&stream, deadline).map_err(unreachable)? {
        Answer::Welcome { addresses, token } => Ok(Group { addresses, token, listener }),
        Answer::Refused { reason, mismatch } => Err(RendezvousError::Refused { address, reason, mismatch }),
    }
}

/// Connects to the next rank and takes the connection of the previous.
fn close_ring(rendezvous: &Rendezvous, group: &Group, deadline: Instant) -> Result<Ring, RendezvousError> {
    let next_rank = (rendezvous.rank + 1) % rendezvous.world_size;
    let prev_rank = (rendezvous.rank + rendezvous.world_size - 1) % rendezvous.world_size;
    let neighbour = |peer| move |source| RendezvousError::Neighbour { peer, source };

    let address = group.addresses.get(next_rank as usize).copied();
    let address = address.ok_or_else(|| neighbour(next_rank)(io::ErrorKind::InvalidData.into()))?;
    let next = connect(|| Ok(address), deadline).map_err(neighbour(next_rank))?;
    let hello = RingHello { token: group.token, rank: rendezvous.rank };
    send(&next, &hello, deadline).map_err(neighbour(next_rank))?;
    let prev = accept_previous(group, prev_rank, deadline).map_err(neighbour(prev_rank))?;
    Ring::new(rendezvous.rank, rendezvous.world_size, next, prev, rendezvous.patience)
        .map_err(system("cannot configure a socket"))
}

fn accept_previous(group: &Group, prev_rank: u32, deadline: Instant) -> io::Result<TcpStream> {
    group.listener.set_nonblocking(true)?;
    let (arrivals, arrived) = mpsc::channel();
    loop {
        match group.listener.accept() {
            Ok((stream, _)) => {
                let (arrivals, token) = (arrivals.clone(), group.token);
                std::thread::spawn(move || {
                    let hello =
                        stream.set_nonblocking(false).and_then(|()| receive::<RingHello>(&stream, deadline));
                    if hello.is_ok_and(|hello| hello.token == token && hello.rank == prev_rank) {
                        drop(arrivals.send(stream));
                    }
                });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        match arrived.recv_timeout(Duration::from_millis(1)) {
            Ok(stream) => return Ok(stream),
            Err(_) if Instant::now() >= deadline => return Err(io::ErrorKind::TimedOut.into()),
            Err(_) => {}
        }
    }
}

fn resolve(rendezvous: &Rendezvous) -> Result<SocketAddr, RendezvousError> {
    let failed = |source| RendezvousError::Resolve { host: rendezvous.master_addr.clone(), source };
    (rendezvous.master_addr.as_str(), rendezvous.master_port)
        .to_socket_addrs()
        .map_err(failed)?
        .next()
        .ok_or_else(|| failed(io::Error::new(io::ErrorKind::NotFound, "it has no address")))
}

fn listen(ip: IpAddr) -> Result<TcpListener, RendezvousError> {
    let address = SocketAddr::new(ip, 0);
    TcpListener::bind(address).map_err(|source| RendezvousError::Listen { address, source })
}

/// Connects, trying again until the deadline: names may not resolve yet, and rank 0 may not listen yet.
fn connect(address: impl Fn() -> io::Result<SocketAddr>, deadline: Instant) -> io::Result<TcpStream> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(RETRY);
        let error = match address().and_then(|address| TcpStream::connect_timeout(&address, left)) {
            // Linux may connect a socket to itself when nobody listens on a port of the ephemeral range.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                io::ErrorKind::ConnectionRefused.into()
            }
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if Instant::now() + RETRY >= deadline {
            return Err(error);
        }
        std::thread::sleep(RETRY);
    }
}

/// Sends one greeting: a length and JSON.
fn send(mut stream: &TcpStream, greeting: &impl Serialize, deadline: Instant) -> io::Result<()> {
    let body = serde_json::to_vec(greeting)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    stream.set_write_timeout(Some(left(deadline)))?;
    stream.write_all(&[&length.to_le_bytes()[..], &body].concat())
}

/// Reads one greeting.
fn receive<T: DeserializeOwned>(mut stream: &TcpStream, deadline: Instant) -> io::Result<T> {
    let mut length = [0; 4];
    stream.set_read_timeout(Some(left(deadline)))?;
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_GREETING {
        let message = format!("a greeting of {length} bytes; needed is at most {MAX_GREETING}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut body = vec![0; length as usize];
    stream.set_read_timeout(Some(left(deadline)))?;
    stream.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

/// Time until the deadline, as a socket timeout, which must not be zero.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
