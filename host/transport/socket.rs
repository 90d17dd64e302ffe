//! Ranks of several processes, on one machine or many, linked by TCP: each with each.
//!
//! Every connection has a thread that writes and one that reads, so that ranks which send to each other at once never
//! wait for each other. A connection's end is noticed at once, a process that hangs by the deadline.

use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frame;
use super::inbox::Inbox;
use super::{Abort, Delivery, Received, Sealed, Transport};
use crate::{Error, Result};

/// What a rank must know to greet another, so that strangers and ranks of other groups are not taken for members.
const PASSWORD_BYTES: usize = 16;
/// How long a stranger may take to greet.
const GREETING_TIME: Duration = Duration::from_secs(2);
/// How long a rank that leaves goes on handing over what it has sent.
const LEAVING_TIME: Duration = Duration::from_secs(1);
/// A rank that listens and has yet to be connected.
pub(crate) struct Door {
    listener: TcpListener,
    password: [u8; PASSWORD_BYTES],
}

impl Door {
    /// Listens at a free port of this machine's address `interface`.
    pub(crate) fn open(interface: IpAddr) -> Result<Self> {
        let mut password = [0; PASSWORD_BYTES];
        getrandom::fill(&mut password).map_err(|error| Error::Randomness(error.to_string()))?;
        let listener = TcpListener::bind((interface, 0)).map_err(|error| failed(&interface, error))?;
        Ok(Self { listener, password })
    }

    /// What the other ranks must know of it.
    pub(crate) fn place(&self) -> Result<Vec<u8>> {
        let address = self.listener.local_addr().map_err(|error| failed(&"a listening socket", error))?;
        Ok([&self.password, address.to_string().as_bytes()].concat())
    }

    /// Connects rank `rank` to all others, whose places are given by rank. All ranks do this at once.
    ///
    /// # Errors
    /// [`Error::Handshake`] when a rank can't be reached or doesn't come before `end`.
    pub(crate) fn connect(self, rank: usize, places: &[Vec<u8>], end: Instant) -> Result<Socket> {
        let mut links: Vec<Option<TcpStream>> = places.iter().map(|_| None).collect();
        for (peer, place) in places.iter().enumerate().take(rank) {
            let reached = reach(place, rank, end);
            links[peer] = Some(reached.map_err(|error| {
                Error::Handshake(format!("rank {peer} can't be reached from rank {rank}: {error}"))
            })?);
        }
        while let Some(missing) = (rank + 1..places.len()).find(|&peer| links[peer].is_none()) {
            let came = readable(self.listener.as_fd(), end).map_err(|error| failed(&"a socket", error))?;
            if !came {
                return Err(Error::Handshake(format!(
                    "rank {missing} did not connect to rank {rank} in time"
                )));
            }
            // Whoever doesn't greet like a member is none.
            let Ok((stream, _)) = self.listener.accept() else { continue };
            let Ok(peer) = self.greeted(&stream, end) else { continue };
            if peer > rank
                && let Some(seat @ None) = links.get_mut(peer)
            {
                *seat = Some(stream);
            }
        }
        Socket::new(rank, links)
    }

    fn greeted(&self, mut stream: &TcpStream, end: Instant) -> io::Result<usize> {
        let left = end.min(Instant::now() + GREETING_TIME).saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let mut greeting = [0; PASSWORD_BYTES + 4];
        stream.read_exact(&mut greeting)?;
        let (password, rank) = greeting.split_at(PASSWORD_BYTES);
        if password != self.password {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.set_read_timeout(None)?;
        Ok(u32::from_le_bytes([rank[0], rank[1], rank[2], rank[3]]) as usize)
    }
}

fn reach(place: &[u8], rank: usize, end: Instant) -> io::Result<TcpStream> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let (password, address) = place.split_at_checked(PASSWORD_BYTES).ok_or_else(malformed)?;
    let address: SocketAddr =
        str::from_utf8(address).ok().and_then(|text| text.parse().ok()).ok_or_else(malformed)?;
    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(&address, left)?;
    stream.write_all(&[password, &(rank as u32).to_le_bytes()].concat())?;
    Ok(stream)
}

/// Waits until something can be read, or accepted, or the time is over: false.
pub(crate) fn readable(socket: BorrowedFd<'_>, end: Instant) -> io::Result<bool> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&wait)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn failed(what: &dyn fmt::Display, source: io::Error) -> Error {
    Error::Io { path: what.to_string(), source }
}

/// A rank's connections to all others. Made by [`Communicator::new`](crate::collective::Communicator::new).
pub struct Socket {
    rank: usize,
    inbox: Arc<Inbox>,
    /// By rank; none to itself.
    peers: Vec<Option<Peer>>,
    /// Disconnected when all writers have ended.
    writers: Receiver<()>,
}

struct Peer {
    stream: TcpStream,
    outbox: Option<Sender<Vec<u8>>>,
    threads: [JoinHandle<()>; 2],
}

impl Socket {
    fn new(rank: usize, links: Vec<Option<TcpStream>>) -> Result<Self> {
        let inbox = Arc::new(Inbox::new(links.len()));
        let (running, writers) = mpsc::channel();
        // Filled as threads start, so that those that have are stopped if the next one can't.
        let mut socket = Self { rank, inbox, peers: Vec::new(), writers };
        for (peer, link) in links.into_iter().enumerate() {
            let peer = link.map(|stream| socket.attend(peer, stream, running.clone())).transpose();
            socket.peers.push(peer.map_err(|error| failed(&"a connection between ranks", error))?);
        }
        Ok(socket)
    }

    fn attend(&self, peer: usize, stream: TcpStream, running: Sender<()>) -> io::Result<Peer> {
        stream.set_nodelay(true)?;
        let (outbox, frames) = mpsc::channel::<Vec<u8>>();
        let [mut out, incoming] = [stream.try_clone()?, stream.try_clone()?];
        let name = |what| format!("rank {} {what} {peer}", self.rank);
        let writer = thread::Builder::new().name(name("to")).spawn(move || {
            for frame in frames {
                if out.write_all(&frame).is_err() {
                    break;
                }
            }
            let _ = out.shutdown(Shutdown::Write);
            drop(running);
        })?;
        let inbox = self.inbox.clone();
        let reader = thread::Builder::new().name(name("from")).spawn(move || {
            let mut incoming = BufReader::with_capacity(256 << 10, incoming);
            while frame::read(&mut incoming, peer, &inbox).is_ok() {}
            inbox.lose(peer);
        });
        match reader {
            Ok(reader) => Ok(Peer { stream, outbox: Some(outbox), threads: [writer, reader] }),
            // The writer ends when its outbox is gone.
            Err(error) => Err(error),
        }
    }

    fn post(&self, to: usize, frame: Vec<u8>) {
        if let Some(Peer { outbox: Some(outbox), .. }) = &self.peers[to] {
            // A writer has ended only if the connection has, which whoever awaits the peer is told.
            let _ = outbox.send(frame);
        }
    }
}

impl Transport for Socket {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.peers.len()
    }

    fn send(&mut self, to: usize, session: u64, record: Sealed) -> Result<()> {
        if to == self.rank {
            let (bytes, tag) = record.into_parts();
            self.inbox.put(to, (session, Received { bytes, tag }));
        } else {
            self.post(to, frame::record(session, &record));
        }
        Ok(())
    }

    fn receive(&mut self, from: usize, session: u64, deadline: Instant) -> Result<Delivery> {
        Ok(self.inbox.receive(from, session, deadline))
    }

    fn abort(&mut self, session: u64, abort: Abort) {
        self.inbox.abort(session, abort);
        for peer in 0..self.peers.len() {
            self.post(peer, frame::abort(session, abort));
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let peers: Vec<Peer> = std::mem::take(&mut self.peers).into_iter().flatten().collect();
        let (streams, threads): (Vec<_>, Vec<_>) = peers
            .into_iter()
            .map(|Peer { stream, outbox, threads }| {
                drop(outbox);
                (stream, threads)
            })
            .unzip();
        // Writers hand over what is left; a peer that takes nothing must not hold us.
        let _ = self.writers.recv_timeout(LEAVING_TIME);
        for stream in streams {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in threads.into_iter().flatten() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Socket").field("rank", &self.rank).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::Cause;
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn connected(ranks: usize) -> Vec<Socket> {
        let doors: Vec<_> = (0..ranks).map(|_| Door::open(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
        let places: Vec<_> = doors.iter().map(|door| door.place().unwrap()).collect();
        // A stranger in front of the first door.
        let address = doors[0].listener.local_addr().unwrap();
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&[7; 64]).unwrap();
        thread::scope(|scope| {
            let threads: Vec<_> = doors
                .into_iter()
                .enumerate()
                .map(|(rank, door)| {
                    let places = &places;
                    scope.spawn(move || door.connect(rank, places, Instant::now() + LONG).unwrap())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn soon() -> Instant {
        Instant::now() + LONG
    }

    #[test]
    fn records_of_a_session_arrive_in_order_from_every_rank() {
        let mut ranks = connected(3);
        for (from, to) in [(0, 1), (1, 0), (2, 1), (1, 1)] {
            for number in 0..50u8 {
                ranks[from].send(to, 8, Sealed::new(vec![9], [0; 16])).unwrap();
                let bytes = vec![number; 1 + number as usize * 4096];
                ranks[from].send(to, 7, Sealed::new(bytes, [number; 16])).unwrap();
            }
            for number in 0..50u8 {
                let Delivery::Record(received) = ranks[to].receive(from, 7, soon()).unwrap() else {
                    panic!()
                };
                assert_eq!(received.tag, [number; 16]);
                assert!(received.bytes.iter().all(|&byte| byte == number));
                assert_eq!(received.bytes.len(), 1 + number as usize * 4096);
            }
        }
        let waited = ranks[0].receive(2, 7, Instant::now() + Duration::from_millis(20)).unwrap();
        assert!(matches!(waited, Delivery::TimedOut));
    }

    #[test]
    fn an_abort_reaches_all_as_it_was_meant() {
        let mut ranks = connected(3);
        for (session, cause) in [
            (1, Cause::Record { step: 2, record: 3 }),
            (2, Cause::Deadline { peer: 1, step: 5, waited_ms: 70 }),
            (3, Cause::Lost { peer: 2, step: 4 }),
            (4, Cause::Other),
        ] {
            ranks[1].abort(session, Abort { by: 1, cause });
            for (rank, from) in [(0, 2), (1, 0), (2, 1)] {
                match ranks[rank].receive(from, session, soon()).unwrap() {
                    Delivery::Aborted(abort) => assert_eq!(abort, Abort { by: 1, cause }),
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_rank_that_leaves_is_lost_once_all_it_sent_is_read() {
        let mut ranks = connected(2);
        let mut last = ranks.pop().unwrap();
        for _ in 0..20 {
            last.send(0, 7, Sealed::new(vec![1; 1 << 20], [0; 16])).unwrap();
        }
        drop(last);
        for _ in 0..20 {
            assert!(matches!(ranks[0].receive(1, 7, soon()).unwrap(), Delivery::Record(_)));
        }
        assert!(matches!(ranks[0].receive(1, 7, soon()).unwrap(), Delivery::Lost));
    }

    #[test]
    fn a_peer_that_reads_nothing_does_not_hold_a_rank_that_leaves() {
        let door = Door::open(Ipv4Addr::LOCALHOST.into()).unwrap();
        let places = [Vec::new(), door.place().unwrap()];
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut place = vec![0; PASSWORD_BYTES];
        place.extend_from_slice(listener.local_addr().unwrap().to_string().as_bytes());
        let mut rank = door.connect(1, &[place, places[1].clone()], soon()).unwrap();
        let _held = listener.accept().unwrap();
        rank.send(0, 7, Sealed::new(vec![1; 64 << 20], [0; 16])).unwrap();
        let start = Instant::now();
        drop(rank);
        assert!(start.elapsed() < 5 * LEAVING_TIME);
    }
}
