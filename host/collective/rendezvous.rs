//! Where the processes of a group find each other: rank 0 listens at an address that all know, the others connect.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::bootstrap::{Bootstrap, Watch};
use crate::transport::deadline;
use crate::transport::socket::readable;
use crate::{Error, Result};

/// The longest message of one rank. Handshakes need far less; a stranger's bytes must not make us allocate more.
const LONGEST_MESSAGE: usize = 64 << 10;
/// What a connecting rank says first, before its rank and the number of ranks.
const GREETING: [u8; 8] = *b"ringsl-1";
/// How long a stranger at rank 0's door may take to greet.
const GREETING_TIME: Duration = Duration::from_secs(2);
/// Between two attempts to connect to a rank 0 that isn't there yet.
const RETRY: Duration = Duration::from_millis(20);
/// Stands for a length when a rank leaves in good order.
const FAREWELL: u32 = u32::MAX;

/// A [`Bootstrap`] of processes, over a Unix socket or TCP.
///
/// Every other rank holds a connection to rank 0, which gathers and hands out. A rank whose process ends is noticed at
/// once. After a gathering has failed the rendezvous is over for all ranks: begin again with a new one.
pub struct Rendezvous {
    rank: usize,
    ranks: usize,
    /// At rank 0: to ranks 1 and following. Elsewhere: to rank 0.
    links: Vec<Link>,
    interface: IpAddr,
    over: bool,
}

/// A connection.
enum Link {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Rendezvous {
    /// Meets the other ranks at `address`: `unix:PATH`, or `HOST:PORT` for TCP. Rank 0 listens there, and the others may
    /// come before it. Returns when all have come.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an address or rank that can't be; [`Error::Handshake`] when a rank does not come
    /// within `timeout`, or comes twice; [`Error::Io`] when rank 0 can't listen there.
    pub fn connect(address: &str, rank: usize, ranks: usize, timeout: Duration) -> Result<Self> {
        if rank >= ranks {
            return Err(Error::InvalidArgument(format!(
                "rank {rank} of {ranks}: ranks are numbered from 0 to {}",
                ranks.saturating_sub(1)
            )));
        }
        let place = Place::parse(address)?;
        let end = deadline(timeout);
        match (rank, ranks) {
            (_, 1) => Ok(Self::new(rank, ranks, Vec::new(), Ipv4Addr::LOCALHOST.into())),
            (0, _) => Self::listen(&place, ranks, end, timeout),
            _ => Self::reach(&place, rank, ranks, end, timeout),
        }
    }

    fn new(rank: usize, ranks: usize, links: Vec<Link>, interface: IpAddr) -> Self {
        Self { rank, ranks, links, interface, over: false }
    }

    fn listen(place: &Place, ranks: usize, end: Instant, timeout: Duration) -> Result<Self> {
        let failed = |source| Error::Io { path: place.to_string(), source };
        let door = place.listen().map_err(failed)?;
        let mut seats: Vec<Option<Link>> = (1..ranks).map(|_| None).collect();
        while seats.iter().any(Option::is_none) {
            let Some(mut link) = door.accept(end).map_err(failed)? else {
                let missing = seats.iter().zip(1..).filter(|(seat, _)| seat.is_none());
                let missing: Vec<usize> = missing.map(|(_, rank)| rank).collect();
                return Err(late(&missing, timeout));
            };
            // Whoever doesn't greet like a rank is none of ours: a port scanner must not end the meeting.
            let Ok((rank, claimed)) = link.greeted(end.min(Instant::now() + GREETING_TIME)) else { continue };
            if claimed != ranks {
                return Err(Error::Handshake(format!(
                    "rank {rank} came to a group of {ranks} ranks, but was told of {claimed}"
                )));
            }
            match seats.get_mut(rank.wrapping_sub(1)) {
                Some(seat @ None) => *seat = Some(link),
                Some(Some(_)) => return Err(Error::Handshake(format!("two processes came as rank {rank}"))),
                None => {
                    return Err(Error::Handshake(format!("a process came as rank {rank} of {ranks}")));
                }
            }
        }
        // The door is closed before anybody is told that all have come, so that they may meet here again.
        drop(door);
        let mut links: Vec<_> = seats.into_iter().flatten().collect();
        for (link, rank) in links.iter_mut().zip(1..) {
            link.put(&GREETING, end).map_err(|error| lost(rank, &error, timeout))?;
        }
        let interface = match &links[0] {
            Link::Tcp(stream) => stream.local_addr().map_err(failed)?.ip(),
            Link::Unix(_) => Ipv4Addr::LOCALHOST.into(),
        };
        Ok(Self::new(0, ranks, links, interface))
    }

    fn reach(place: &Place, rank: usize, ranks: usize, end: Instant, timeout: Duration) -> Result<Self> {
        loop {
            let attempt = place.reach(end).and_then(|mut link| {
                link.greet(rank, ranks, end)?;
                let mut welcome = GREETING;
                link.fill(&mut welcome, end)?;
                if welcome != GREETING {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "something else listens there"));
                }
                let interface = match &link {
                    Link::Tcp(stream) => stream.local_addr()?.ip(),
                    Link::Unix(_) => Ipv4Addr::LOCALHOST.into(),
                };
                Ok(Self::new(rank, ranks, vec![link], interface))
            });
            match attempt {
                Ok(own) => return Ok(own),
                Err(_) if Instant::now() + RETRY < end => std::thread::sleep(RETRY),
                Err(error) => {
                    return Err(Error::Handshake(format!(
                        "rank 0 at {place} did not bring all {ranks} ranks together within {} ms: {error}",
                        timeout.as_millis()
                    )));
                }
            }
        }
    }

    fn gather_once(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let end = deadline(timeout);
        if self.rank != 0 {
            self.links[0].send(&[message], end).map_err(|error| lost(0, &error, timeout))?;
            let all = (0..self.ranks).map(|_| self.links[0].receive(end)).collect::<io::Result<_>>();
            return all.map_err(|error| lost(0, &error, timeout));
        }
        let mut all = vec![message.to_vec()];
        for (link, rank) in self.links.iter_mut().zip(1..) {
            all.push(link.receive(end).map_err(|error| lost(rank, &error, timeout))?);
        }
        let parts: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        for (link, rank) in self.links.iter_mut().zip(1..) {
            link.send(&parts, end).map_err(|error| lost(rank, &error, timeout))?;
        }
        Ok(all)
    }
}

impl Bootstrap for Rendezvous {
    fn gather(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if self.over {
            return Err(Error::Handshake(
                "this rendezvous failed before; all ranks must meet anew with a new communicator".into(),
            ));
        }
        if message.len() > LONGEST_MESSAGE {
            return Err(Error::InvalidArgument(format!(
                "a message of {} bytes: at most {LONGEST_MESSAGE} are gathered",
                message.len()
            )));
        }
        let gathered = self.gather_once(message, timeout);
        if gathered.is_err() {
            // Whoever still waits for this round learns that it will not end.
            self.over = true;
            self.links.iter().for_each(Link::cut);
        }
        gathered
    }

    fn interface(&self) -> IpAddr {
        self.interface
    }

    fn watch(&self) -> Option<Box<dyn Watch>> {
        let first = usize::from(self.rank == 0);
        let links = self.links.iter().zip(first..);
        let links = links.map(|(link, rank)| Some((rank, link.descriptor().ok()?)));
        Some(Box::new(Watcher { links: links.collect::<Option<_>>()? }))
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        for link in &mut self.links {
            // A short word into a socket's buffer. Whoever can't take it learns from the connection's end.
            let _ = link.put(&FAREWELL.to_le_bytes(), Instant::now() + Duration::from_millis(100));
        }
    }
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, ranks, .. } = self;
        formatter.debug_struct("Rendezvous").field("rank", rank).field("ranks", ranks).finish_non_exhaustive()
    }
}

/// Looks at the connections beside the rendezvous that uses them; never takes anything out.
struct Watcher {
    links: Vec<(usize, OwnedFd)>,
}

impl Watch for Watcher {
    fn lost(&mut self, wait: Duration) -> Option<usize> {
        let mut polled: Vec<_> =
            self.links.iter().map(|(_, link)| PollFd::new(link, PollFlags::RDHUP)).collect();
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        poll(&mut polled, Some(&wait)).ok()?;
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let over: Vec<bool> = polled.iter().map(|link| link.revents().intersects(ended)).collect();
        let mut lost = None;
        let mut index = 0;
        self.links.retain(|(rank, link)| {
            index += 1;
            if !over[index - 1] {
                return true;
            }
            if !left_in_good_order(link) {
                lost = lost.or(Some(*rank));
            }
            false
        });
        lost
    }
}

/// Whether the farewell lies unread in an ended connection. What lies before it is of no use to anybody any more.
fn left_in_good_order(link: &OwnedFd) -> bool {
    let mut unread = [0; 4096];
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
    match rustix::net::recv(link, &mut unread, flags) {
        Ok((_, bytes)) => unread[..bytes.min(unread.len())].ends_with(&FAREWELL.to_le_bytes()),
        Err(_) => false,
    }
}

/// An address.
enum Place {
    Tcp(String),
    Unix(PathBuf),
}

impl Place {
    fn parse(address: &str) -> Result<Self> {
        match address.strip_prefix("unix:") {
            Some("") => Err(Error::InvalidArgument("unix: needs a path, as in unix:/tmp/ringseal".into())),
            Some(path) => Ok(Self::Unix(path.into())),
            None if address.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0)
            }) =>
            {
                Ok(Self::Tcp(address.into()))
            }
            None => Err(Error::InvalidArgument(format!(
                "{address:?} is no rendezvous: use HOST:PORT, as in 10.0.0.1:29500, or unix:PATH"
            ))),
        }
    }

    fn listen(&self) -> io::Result<Door> {
        match self {
            Self::Tcp(address) => TcpListener::bind(address.as_str()).map(Door::Tcp),
            Self::Unix(path) => UnixListener::bind(path).map(|door| Door::Unix(door, path.clone())),
        }
    }

    fn reach(&self, end: Instant) -> io::Result<Link> {
        match self {
            Self::Unix(path) => UnixStream::connect(path).map(Link::Unix),
            Self::Tcp(address) => {
                let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
                for address in std::net::ToSocketAddrs::to_socket_addrs(address.as_str())? {
                    match TcpStream::connect_timeout(&address, left(end)?) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            return Ok(Link::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => formatter.write_str(address),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// What rank 0 listens at.
enum Door {
    Tcp(TcpListener),
    /// With the socket's file, removed on drop.
    Unix(UnixListener, PathBuf),
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Door {
    /// The next connection, or `None` when the time is over.
    fn accept(&self, end: Instant) -> io::Result<Option<Link>> {
        let door = match self {
            Self::Tcp(door) => door.as_fd(),
            Self::Unix(door, _) => door.as_fd(),
        };
        if !readable(door, end)? {
            return Ok(None);
        }
        Ok(Some(match self {
            Self::Tcp(door) => {
                let (stream, _) = door.accept()?;
                stream.set_nodelay(true)?;
                Link::Tcp(stream)
            }
            Self::Unix(door, _) => Link::Unix(door.accept()?.0),
        }))
    }
}

impl Link {
    /// Sends each message after its length.
    fn send(&mut self, messages: &[&[u8]], end: Instant) -> io::Result<()> {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.extend_from_slice(&(message.len() as u32).to_le_bytes());
            bytes.extend_from_slice(message);
        }
        self.put(&bytes, end)
    }

    fn receive(&mut self, end: Instant) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.fill(&mut length, end)?;
        let length = u32::from_le_bytes(length);
        if length == FAREWELL {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it left the group"));
        }
        if length as usize > LONGEST_MESSAGE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes")));
        }
        let mut message = vec![0; length as usize];
        self.fill(&mut message, end)?;
        Ok(message)
    }

    fn greet(&mut self, rank: usize, ranks: usize, end: Instant) -> io::Result<()> {
        let mut greeting = [0; 16];
        greeting[..8].copy_from_slice(&GREETING);
        greeting[8..12].copy_from_slice(&(rank as u32).to_le_bytes());
        greeting[12..].copy_from_slice(&(ranks as u32).to_le_bytes());
        self.put(&greeting, end)
    }

    /// The rank and the number of ranks that the other side claims.
    fn greeted(&mut self, end: Instant) -> io::Result<(usize, usize)> {
        let mut greeting = [0; 16];
        self.fill(&mut greeting, end)?;
        if greeting[..8] != GREETING {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| greeting[at + byte])) as usize;
        Ok((word(8), word(12)))
    }

    fn put(&mut self, mut bytes: &[u8], end: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let left = Some(left(end)?);
            let written = match self {
                Self::Tcp(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
                Self::Unix(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
            };
            match written {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8], end: Instant) -> io::Result<()> {
        let mut at = 0;
        while at < bytes.len() {
            let (left, rest) = (Some(left(end)?), &mut bytes[at..]);
            let read = match self {
                Self::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(rest)),
                Self::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(rest)),
            };
            match read {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "its process ended")),
                Ok(count) => at += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn cut(&self) {
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
        };
    }

    fn descriptor(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Tcp(stream) => stream.as_fd().try_clone_to_owned(),
            Self::Unix(stream) => stream.as_fd().try_clone_to_owned(),
        }
    }
}

/// What is left until `end`; an error when nothing is.
fn left(end: Instant) -> io::Result<Duration> {
    match end.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

fn late(missing: &[usize], timeout: Duration) -> Error {
    Error::Handshake(format!("ranks {missing:?} did not come within {} ms", timeout.as_millis()))
}

fn lost(rank: usize, error: &io::Error, timeout: Duration) -> Error {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => late(&[rank], timeout),
        _ => Error::Handshake(format!("rank {rank} was lost: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn place() -> (tempfile::TempDir, String) {
        let directory = tempfile::tempdir().unwrap();
        let address = format!("unix:{}", directory.path().join("door").display());
        (directory, address)
    }

    /// A port that was free a moment ago.
    fn tcp() -> String {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
    }

    fn on_ranks<T: Send>(ranks: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ranks)
                .map(|rank| {
                    scope.spawn({
                        let work = &work;
                        move || work(rank)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_hears_every_rank_in_every_round() {
        let (_directory, unix) = place();
        for (address, ranks) in [(unix.clone(), 4), (tcp(), 3), (unix, 1)] {
            on_ranks(ranks, |rank| {
                let mut meeting = Rendezvous::connect(&address, rank, ranks, LONG).unwrap();
                for round in 0..20u8 {
                    let message = [rank as u8, round].repeat(1 + rank * 1000);
                    let all = meeting.gather(&message, LONG).unwrap();
                    for (rank, heard) in all.iter().enumerate() {
                        assert_eq!(*heard, [rank as u8, round].repeat(1 + rank * 1000));
                    }
                }
                assert!(meeting.interface().is_loopback());
            });
        }
    }

    #[test]
    fn a_rank_that_never_comes_is_named_by_all() {
        let (_directory, address) = place();
        let start = Instant::now();
        let errors = on_ranks(2, |rank| {
            let met = Rendezvous::connect(&address, rank, 3, Duration::from_millis(200));
            met.and_then(|mut meeting| meeting.gather(b"?", Duration::from_millis(200)))
                .unwrap_err()
                .to_string()
        });
        assert!(errors[0].contains("[2]") && errors[1].contains("all 3 ranks"), "{errors:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
        let alone = Rendezvous::connect(&address, 1, 2, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(alone.contains("rank 0 at unix:") && alone.contains("50 ms"), "{alone}");
    }

    #[test]
    fn a_rank_that_leaves_ends_the_meeting_for_all_at_once() {
        for leaver in 0..3 {
            let (_directory, address) = place();
            let start = Instant::now();
            let errors = on_ranks(3, |rank| {
                let mut meeting = Rendezvous::connect(&address, rank, 3, LONG).unwrap();
                meeting.gather(b"here", LONG).unwrap();
                if rank == leaver {
                    return None;
                }
                let first = meeting.gather(b"still here", LONG).unwrap_err();
                assert!(matches!(first, Error::Handshake(_)), "{first}");
                let second = meeting.gather(b"again", LONG).unwrap_err().to_string();
                assert!(second.contains("meet anew"), "{second}");
                Some(first.to_string())
            });
            assert!(
                errors.iter().flatten().any(|error| error.contains(&format!("rank {leaver}"))),
                "{errors:?}"
            );
            assert!(start.elapsed() < LONG / 2);
        }
    }

    #[test]
    fn strangers_are_ignored_and_mixed_up_ranks_are_named() {
        let (_directory, address) = place();
        let path = address.strip_prefix("unix:").unwrap();
        std::thread::scope(|scope| {
            let meet = |rank| {
                let mut meeting = Rendezvous::connect(&address, rank, 2, LONG).unwrap();
                meeting.gather(b"", LONG).unwrap();
            };
            scope.spawn(move || meet(0));
            // The stranger knocks before rank 1 sets out: once all have come, the door is gone.
            let end = Instant::now() + LONG;
            let mut stranger = loop {
                match UnixStream::connect(path) {
                    Ok(stranger) => break stranger,
                    Err(error) => assert!(Instant::now() < end, "{error}"),
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            scope.spawn(move || meet(1));
        });
        for (claims, word) in [([(1, 3), (1, 3)], "rank 1"), ([(1, 4), (2, 3)], "was told of 4")] {
            let (_directory, address) = place();
            let error = std::thread::scope(|scope| {
                for (rank, ranks) in claims {
                    let address = &address;
                    scope.spawn(move || {
                        let met = Rendezvous::connect(address, rank, ranks, Duration::from_secs(2));
                        let _ = met.map(|mut meeting| meeting.gather(b"", LONG));
                    });
                }
                Rendezvous::connect(&address, 0, 3, LONG).unwrap_err().to_string()
            });
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_watcher_tells_a_death_from_a_farewell() {
        for farewell in [true, false] {
            let (_directory, address) = place();
            let lost = on_ranks(2, |rank| {
                let mut meeting = Rendezvous::connect(&address, rank, 2, LONG).unwrap();
                let mut watcher = meeting.watch().unwrap();
                assert_eq!(watcher.lost(Duration::ZERO), None);
                meeting.gather(b"", LONG).unwrap();
                if rank == 1 {
                    if !farewell {
                        meeting.links.iter().for_each(Link::cut);
                    }
                    return None;
                }
                let end = Instant::now() + Duration::from_millis(if farewell { 300 } else { 20_000 });
                let mut lost = None;
                while lost.is_none() && Instant::now() < end {
                    lost = watcher.lost(Duration::from_millis(10));
                }
                lost
            });
            assert_eq!(lost[0], (!farewell).then_some(1));
        }
    }

    #[test]
    fn addresses_that_make_no_sense_are_refused() {
        for address in ["", "unix:", "nowhere", ":1", "host:", "host:0", "host:65536"] {
            let refused = Rendezvous::connect(address, 0, 2, LONG);
            assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{address}");
        }
        assert!(matches!(Rendezvous::connect("h:1", 2, 2, LONG), Err(Error::InvalidArgument(_))));
    }
}
