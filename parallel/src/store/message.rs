//! Encoding and decoding of messages between the store and its clients.

use std::time::Duration;

use crate::activity::Snapshot;
use crate::error::{Failure, ParallelError, Result};
use crate::wire::{Reader, put_bytes};

/// Maximum bytes of a key.
pub(crate) const LONGEST_KEY: usize = 256;
/// Maximum bytes of a value.
pub(crate) const LONGEST_VALUE: usize = 64 << 10;
/// Maximum bytes of a rank's activity text.
const LONGEST_TEXT: usize = 4 << 10;
/// Maximum bytes of a message.
pub(crate) const LONGEST_MESSAGE: usize = LONGEST_VALUE + LONGEST_KEY + 64;

/// Request of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// Sets a key.
    Set { key: String, value: Vec<u8> },
    /// Returns the value of a key, if it is set.
    Get { key: String },
    /// Waits for a key to be set, and returns its value.
    Wait { key: String, patience: Duration },
    /// Adds to a counter, which begins at zero, and returns its new value.
    Add { key: String, amount: i64 },
    /// Ends the run.
    Abort(Failure),
    /// Reports that the rank of this connection is alive.
    Heartbeat(Snapshot),
    /// Reports that the rank of this connection has finished.
    Leave,
}

/// Response of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Response {
    Done,
    Value(Vec<u8>),
    Number(i64),
    /// The key is not set, or was not set in time.
    Missing,
    /// The run was ended.
    Aborted(Failure),
    /// The request is invalid, or exceeds a limit.
    Refused(String),
}

impl Request {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Set { key, value } => {
                out.push(0);
                put_bytes(&mut out, key.as_bytes());
                put_bytes(&mut out, value);
            }
            Self::Get { key } => {
                out.push(1);
                put_bytes(&mut out, key.as_bytes());
            }
            Self::Wait { key, patience } => {
                out.push(2);
                put_bytes(&mut out, key.as_bytes());
                out.extend(millis(*patience).to_le_bytes());
            }
            Self::Add { key, amount } => {
                out.push(3);
                put_bytes(&mut out, key.as_bytes());
                out.extend(amount.to_le_bytes());
            }
            Self::Abort(failure) => {
                out.push(4);
                put_failure(&mut out, failure);
            }
            Self::Heartbeat(snapshot) => {
                out.push(5);
                out.extend(snapshot.sequence.to_le_bytes());
                out.push(snapshot.inside.into());
                put_text(&mut out, &snapshot.doing);
                out.extend(millis(snapshot.since).to_le_bytes());
            }
            Self::Leave => out.push(6),
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes);
        let request = match reader.u8()? {
            0 => Self::Set {
                key: key(&mut reader)?,
                value: value(&mut reader)?,
            },
            1 => Self::Get {
                key: key(&mut reader)?,
            },
            2 => Self::Wait {
                key: key(&mut reader)?,
                patience: Duration::from_millis(reader.u64()?),
            },
            3 => Self::Add {
                key: key(&mut reader)?,
                amount: reader.u64()? as i64,
            },
            4 => Self::Abort(failure(&mut reader)?),
            5 => Self::Heartbeat(Snapshot {
                sequence: reader.u64()?,
                inside: match reader.u8()? {
                    0 => false,
                    1 => true,
                    other => return Err(malformed(format!("a truth value is {other}"))),
                },
                doing: text(&mut reader)?,
                since: Duration::from_millis(reader.u64()?),
            }),
            6 => Self::Leave,
            code => return Err(malformed(format!("there is no request {code}"))),
        };
        reader.end()?;
        Ok(request)
    }
}

impl Response {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Done => out.push(0),
            Self::Value(value) => {
                out.push(1);
                put_bytes(&mut out, value);
            }
            Self::Number(number) => {
                out.push(2);
                out.extend(number.to_le_bytes());
            }
            Self::Missing => out.push(3),
            Self::Aborted(failure) => {
                out.push(4);
                put_failure(&mut out, failure);
            }
            Self::Refused(reason) => {
                out.push(5);
                put_text(&mut out, reason);
            }
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes);
        let response = match reader.u8()? {
            0 => Self::Done,
            1 => Self::Value(value(&mut reader)?),
            2 => Self::Number(reader.u64()? as i64),
            3 => Self::Missing,
            4 => Self::Aborted(failure(&mut reader)?),
            5 => Self::Refused(text(&mut reader)?),
            code => return Err(malformed(format!("there is no response {code}"))),
        };
        reader.end()?;
        Ok(response)
    }
}

fn malformed(reason: String) -> ParallelError {
    ParallelError::Malformed(reason)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Appends `text`, truncated to the limit of a message.
fn put_text(out: &mut Vec<u8>, text: &str) {
    put_bytes(
        out,
        &text.as_bytes()[..text.floor_char_boundary(LONGEST_TEXT)],
    );
}

fn put_failure(out: &mut Vec<u8>, failure: &Failure) {
    out.extend((failure.rank as u64).to_le_bytes());
    put_text(out, &failure.doing);
    put_text(out, &failure.reason);
}

fn failure(reader: &mut Reader<'_>) -> Result<Failure> {
    let rank = usize::try_from(reader.u64()?).map_err(|error| malformed(error.to_string()))?;
    Ok(Failure {
        rank,
        doing: text(reader)?,
        reason: text(reader)?,
    })
}

fn bounded(what: &str, length: usize, longest: usize) -> Result<()> {
    match length > longest {
        true => Err(malformed(format!(
            "a {what} has {length} bytes, more than {longest}"
        ))),
        false => Ok(()),
    }
}

fn key(reader: &mut Reader<'_>) -> Result<String> {
    let key = reader.text()?;
    bounded("key", key.len(), LONGEST_KEY)?;
    Ok(key)
}

fn text(reader: &mut Reader<'_>) -> Result<String> {
    let text = reader.text()?;
    bounded("text", text.len(), LONGEST_TEXT)?;
    Ok(text)
}

fn value(reader: &mut Reader<'_>) -> Result<Vec<u8>> {
    let value = reader.bytes()?;
    bounded("value", value.len(), LONGEST_VALUE)?;
    Ok(value.to_vec())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn failures() -> impl Strategy<Value = Failure> {
        (0..64usize, ".{0,20}", ".{0,20}").prop_map(|(rank, doing, reason)| Failure {
            rank,
            doing,
            reason,
        })
    }

    fn requests() -> impl Strategy<Value = Request> {
        let key = ".{0,30}";
        let millis = (0..u64::MAX).prop_map(Duration::from_millis);
        let bytes = proptest::collection::vec(any::<u8>(), 0..100);
        prop_oneof![
            (key, bytes).prop_map(|(key, value)| Request::Set { key, value }),
            key.prop_map(|key| Request::Get { key }),
            (key, millis.clone()).prop_map(|(key, patience)| Request::Wait { key, patience }),
            (key, any::<i64>()).prop_map(|(key, amount)| Request::Add { key, amount }),
            failures().prop_map(Request::Abort),
            (any::<u64>(), any::<bool>(), ".{0,30}", millis).prop_map(
                |(sequence, inside, doing, since)| Request::Heartbeat(Snapshot {
                    sequence,
                    inside,
                    doing,
                    since,
                })
            ),
            Just(Request::Leave),
        ]
    }

    fn responses() -> impl Strategy<Value = Response> {
        prop_oneof![
            Just(Response::Done),
            proptest::collection::vec(any::<u8>(), 0..100).prop_map(Response::Value),
            any::<i64>().prop_map(Response::Number),
            Just(Response::Missing),
            failures().prop_map(Response::Aborted),
            ".{0,30}".prop_map(Response::Refused),
        ]
    }

    proptest! {
        #[test]
        fn messages_travel(request in requests(), response in responses()) {
            prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
            prop_assert_eq!(Response::decode(&response.encode()), Ok(response));
        }

        /// Encoding is unique: re-encoding a decoded message gives the same bytes.
        #[test]
        fn any_bytes_are_a_message_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Ok(request) = Request::decode(&bytes) {
                prop_assert_eq!(request.encode(), bytes.clone());
            }
            if let Ok(response) = Response::decode(&bytes) {
                prop_assert_eq!(response.encode(), bytes);
            }
        }

        #[test]
        fn changed_messages_are_messages_or_errors(
            request in requests(),
            place in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = request.encode();
            let place = place.index(bytes.len());
            bytes[place] = byte;
            if let Ok(other) = Request::decode(&bytes) {
                prop_assert_eq!(other.encode(), bytes.clone());
            }
            let cut = cut.index(bytes.len());
            if let Ok(shorter) = Request::decode(&bytes[..cut]) {
                prop_assert_eq!(shorter.encode(), &bytes[..cut]);
            }
        }
    }

    #[test]
    fn lengths_are_bounded() {
        let long = Request::Get {
            key: "k".repeat(LONGEST_KEY + 1),
        };
        let error = Request::decode(&long.encode()).unwrap_err().to_string();
        assert!(error.contains("key has 257 bytes"), "{error}");
        let most = Request::Set {
            key: "k".repeat(LONGEST_KEY),
            value: vec![0; LONGEST_VALUE],
        };
        assert!(most.encode().len() <= LONGEST_MESSAGE);
        // A rank's own description is truncated, not refused: it is for human readers.
        let failure = Failure {
            rank: 0,
            doing: "ä".repeat(LONGEST_TEXT),
            reason: String::new(),
        };
        let Request::Abort(cut) = Request::decode(&Request::Abort(failure).encode()).unwrap()
        else {
            panic!("another request");
        };
        assert_eq!(cut.doing.len(), LONGEST_TEXT);
    }
}
