//! Shared secret of the processes of a run, and a handshake that proves knowledge of it without
//! sending it.
//!
//! Both sides draw 32 random bytes. Each sends an HMAC-SHA256, keyed by the token, over its role,
//! the purpose of the connection, both random numbers and the rank. The comparison takes constant
//! time. Data after the handshake is neither encrypted nor authenticated: the network between the
//! machines of a run is trusted not to modify packets.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::error::{ParallelError, Result};

/// First bytes of a connection; the last one is the protocol version.
const MAGIC: [u8; 8] = *b"nvfp4pg\x01";
const NONCE: usize = 32;
const MAC: usize = 32;
/// Maximum duration of a handshake.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// Response to a peer that does not know the token.
const REFUSED: u8 = 0;
const ACCEPTED: u8 = 1;

/// Shared secret of a run; see the [module](self).
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Minimum number of bytes of a token.
    pub const SHORTEST: usize = 16;

    /// Creates a token from `text`.
    ///
    /// # Errors
    /// Returns an error if the text is shorter than [`Token::SHORTEST`] bytes.
    pub fn new(text: &str) -> Result<Self> {
        if text.len() < Self::SHORTEST {
            return Err(ParallelError::argument(
                "token",
                format!("{} bytes long", text.len()),
                format!("at least {} bytes long", Self::SHORTEST),
            ));
        }
        Ok(Self(text.as_bytes().to_vec()))
    }

    /// Creates the text of a random token, 64 hexadecimal digits.
    ///
    /// # Errors
    /// Returns an error if the system provides no random bytes.
    pub fn random() -> Result<String> {
        let bytes = random()?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn mac(&self, role: &str, purpose: &str, nonces: [&[u8; NONCE]; 2], rank: u32) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.0);
        let mut mac = mac.expect("HMAC takes keys of any length");
        for text in [role, purpose] {
            mac.update(&(text.len() as u64).to_le_bytes());
            mac.update(text.as_bytes());
        }
        nonces.iter().for_each(|nonce| mac.update(*nonce));
        mac.update(&rank.to_le_bytes());
        mac
    }

    /// Performs the handshake on the accepting side. Returns the rank of the authenticated peer.
    ///
    /// # Errors
    /// Returns an error if the peer does not know the token, uses another protocol, or is too slow.
    pub(crate) fn accept(&self, stream: &TcpStream, purpose: &str) -> io::Result<u32> {
        let mut stream = Timed::new(stream);
        let server = random().map_err(io::Error::other)?;
        stream.write_all(&[&MAGIC[..], &server].concat())?;
        let mut answer = [0; MAGIC.len() + NONCE + 4 + MAC];
        stream.read_exact(&mut answer)?;
        let (magic, rest) = answer.split_at(MAGIC.len());
        let (client, rest) = rest.split_at(NONCE);
        let (rank, proof) = rest.split_at(4);
        let client: [u8; NONCE] = client.try_into().expect("split there");
        let rank = u32::from_le_bytes(rank.try_into().expect("split there"));
        let nonces = [&server, &client];
        let expected = self.mac("connects", purpose, nonces, rank);
        if magic != MAGIC || expected.verify_slice(proof).is_err() {
            // The peer may be gone already.
            let _ = stream.write_all(&[REFUSED; 1 + MAC]);
            let reason = "the peer does not know the token";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        let proof = self.mac("accepts", purpose, nonces, rank).finalize();
        let accepted = [&[ACCEPTED][..], &proof.into_bytes()].concat();
        stream.write_all(&accepted)?;
        stream.end()?;
        Ok(rank)
    }

    /// Performs the handshake on the connecting side, as `rank`.
    ///
    /// # Errors
    /// Returns an error if the peer refuses the token, does not know it itself, uses another
    /// protocol, or is too slow.
    pub(crate) fn connect(&self, stream: &TcpStream, purpose: &str, rank: u32) -> io::Result<()> {
        let refuse = |reason| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        let mut stream = Timed::new(stream);
        let client = random().map_err(io::Error::other)?;
        let mut greeting = [0; MAGIC.len() + NONCE];
        stream.read_exact(&mut greeting)?;
        let (magic, server) = greeting.split_at(MAGIC.len());
        if magic != MAGIC {
            return refuse("it is not the store of a run, or one of another version");
        }
        let server: [u8; NONCE] = server.try_into().expect("split there");
        let nonces = [&server, &client];
        let proof = self.mac("connects", purpose, nonces, rank).finalize();
        let answer = [
            &MAGIC[..],
            &client,
            &rank.to_le_bytes(),
            &proof.into_bytes(),
        ];
        stream.write_all(&answer.concat())?;
        let mut reply = [0; 1 + MAC];
        stream.read_exact(&mut reply)?;
        if reply[0] != ACCEPTED {
            return refuse("it has another token");
        }
        let expected = self.mac("accepts", purpose, nonces, rank);
        if expected.verify_slice(&reply[1..]).is_err() {
            return refuse("it does not know the token");
        }
        stream.end()
    }
}

fn random() -> Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    getrandom::fill(&mut bytes).map_err(|error| ParallelError::Library {
        library: "operating system",
        operation: "random bytes".into(),
        reason: error.to_string(),
    })?;
    Ok(bytes)
}

/// Stream on which all reads and writes together take at most [`HANDSHAKE`]: this also limits a
/// peer that sends one byte per second.
struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    fn new(stream: &'a TcpStream) -> Self {
        Self {
            stream,
            deadline: Instant::now() + HANDSHAKE,
        }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        match self.deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no handshake within {} s", HANDSHAKE.as_secs()),
            )),
            left => Ok(Some(left)),
        }
    }

    /// Removes the time limit for the data after the handshake.
    fn end(self) -> io::Result<()> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
