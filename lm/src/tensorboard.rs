//! Event files of TensorBoard: the rows of `metrics.csv` as scalars.
//!
//! The file is a sequence of records of TFRecord:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | length of the event, little-endian |
//! | 4 | masked CRC32C of the length |
//! | length | the event, a protocol buffer `Event` |
//! | 4 | masked CRC32C of the event |

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use crate::metrics::Row;

/// Name of the event file. TensorBoard reads files whose names contain `tfevents`.
const FILE: &str = "events.out.tfevents.0.nvfp4";
/// Bytes of a record before its event: the length and its checksum.
const HEAD: usize = 12;
/// Bytes of an event up to the end of the time: a key and an `f64`.
const TIME: usize = 9;

/// The event file of a run.
pub(crate) struct EventLog {
    path: PathBuf,
}

impl EventLog {
    /// Opens the event file in `folder` for the run with `rows` so far. A resumed run keeps the
    /// events of its rows and removes later ones.
    ///
    /// # Errors
    /// Returns an error if the folder has the events of another run, or if a file cannot be read or
    /// written.
    pub fn open(folder: &Path, rows: &[Row]) -> Result<Self> {
        let name = || format!("tensorboard {}", folder.display());
        fs::create_dir_all(folder).with_context(name)?;
        let path = folder.join(FILE);
        let old = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            read => read.with_context(name)?,
        };
        let now = now();
        let events = rows.iter().map(|row| of_row(row, now));
        let mut all = Vec::new();
        for event in [of_version(now)].into_iter().chain(events) {
            let event = record(&event);
            match old.get(all.len()..all.len() + event.len()) {
                // The time of the first process stays.
                Some(kept) if is_same(kept, &event) => all.extend(kept),
                Some(_) => anyhow::bail!("{} has the events of another run", name()),
                None => all.extend(event),
            }
        }
        ensure!(
            old.len() <= all.len() || !rows.is_empty(),
            "{} has the events of another run: choose another folder",
            name()
        );
        // A running TensorBoard continues at its position in the same file.
        fs::write(&path, all).with_context(name)?;
        Ok(Self { path })
    }

    /// Adds the scalars of a row.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn record(&self, row: &Row) -> Result<()> {
        let append = || fs::OpenOptions::new().append(true).open(&self.path);
        append()
            .and_then(|mut file| file.write_all(&record(&of_row(row, now()))))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Returns true if two records of equal length differ only in the time.
fn is_same(left: &[u8], right: &[u8]) -> bool {
    let end = left.len() - 4;
    left[..HEAD] == right[..HEAD] && left[HEAD + TIME..end] == right[HEAD + TIME..end]
}

/// Returns the seconds since 1970.
fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

/// Returns the event at the beginning of a file.
fn of_version(time: f64) -> Vec<u8> {
    let mut event = time_of(time);
    event.extend(bytes(3, b"brain.Event:2"));
    event
}

/// Returns the event of a row, with the digits that `metrics.csv` has: a resumed run knows only
/// these.
fn of_row(row: &Row, time: f64) -> Vec<u8> {
    let row = row.rounded();
    let scalars = [
        ("loss/train", row.train_loss),
        ("loss/valid", row.valid_loss),
        ("lr", Some(row.lr)),
        ("tokens_per_s", row.tokens_per_s),
    ];
    let mut summary = Vec::new();
    for (tag, value) in scalars {
        let Some(value) = value else { continue };
        let mut scalar = bytes(1, tag.as_bytes());
        scalar.push(key(2, 5));
        scalar.extend((value as f32).to_le_bytes());
        summary.extend(bytes(1, &scalar));
    }
    let mut event = time_of(time);
    event.push(key(2, 0));
    event.extend(varint(row.step));
    event.extend(bytes(5, &summary));
    event
}

/// Returns the key of a field: its number, and the wire type of its value.
const fn key(number: u8, wire: u8) -> u8 {
    (number << 3) | wire
}

/// Returns the field `wall_time`.
fn time_of(time: f64) -> Vec<u8> {
    let mut field = vec![key(1, 1)];
    field.extend(time.to_le_bytes());
    field
}

/// Returns a field of bytes: a text or a message.
fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![key(number, 2)];
    field.extend(varint(content.len() as u64));
    field.extend(content);
    field
}

/// Returns a number in groups of seven bits, the lowest first.
fn varint(mut value: u64) -> Vec<u8> {
    let mut groups = Vec::new();
    while value >= 0x80 {
        groups.push(value as u8 | 0x80);
        value >>= 7;
    }
    groups.push(value as u8);
    groups
}

/// Returns the record of an event.
fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), event, &masked_crc(event)].concat()
}

/// Returns the CRC32C of `bytes`, masked as TFRecord stores it.
fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    let crc = crc32c(bytes).rotate_right(15);
    crc.wrapping_add(0xa282_ead8).to_le_bytes()
}

/// Returns the CRC32C (Castagnoli) of `bytes`.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), step)
    });
    !crc
}

#[cfg(test)]
mod tests {
    use nvfp4_test_support::Scratch;

    use super::*;

    /// Splits a message into the numbers and the contents of its fields.
    fn parsed(mut message: &[u8]) -> Vec<(u8, Vec<u8>)> {
        fn number(message: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let byte = message[0];
                *message = &message[1..];
                value |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            value
        }
        let mut fields = Vec::new();
        while !message.is_empty() {
            let key = number(&mut message) as u8;
            let content = match key & 7 {
                0 => number(&mut message).to_le_bytes().to_vec(),
                wire => {
                    let length = match wire {
                        1 => 8,
                        2 => number(&mut message) as usize,
                        5 => 4,
                        other => panic!("wire type {other}"),
                    };
                    let (content, rest) = message.split_at(length);
                    message = rest;
                    content.to_vec()
                }
            };
            fields.push((key >> 3, content));
        }
        fields
    }

    /// Reads the events of a file, and checks both checksums of each record.
    fn events(folder: &Path) -> Vec<Vec<(u8, Vec<u8>)>> {
        let file = fs::read(folder.join(FILE)).unwrap();
        let (mut rest, mut events) = (&file[..], Vec::new());
        while !rest.is_empty() {
            let (length, after) = rest.split_at(8);
            let count = u64::from_le_bytes(length.try_into().unwrap()) as usize;
            assert_eq!(after[..4], masked_crc(length));
            let event = &after[4..4 + count];
            assert_eq!(after[4 + count..8 + count], masked_crc(event));
            events.push(parsed(event));
            rest = &after[8 + count..];
        }
        events
    }

    /// Returns the step and the scalars of an event.
    fn scalars(event: &[(u8, Vec<u8>)]) -> (u64, Vec<(String, f32)>) {
        let [(1, _), (2, step), (5, summary)] = event else {
            panic!("{event:?}");
        };
        let scalars = parsed(summary).into_iter().map(|(number, scalar)| {
            assert_eq!(number, 1);
            let fields = parsed(&scalar);
            let [(1, tag), (2, value)] = &fields[..] else {
                panic!("{fields:?}");
            };
            let value = f32::from_le_bytes(value[..].try_into().unwrap());
            (String::from_utf8(tag.clone()).unwrap(), value)
        });
        let step = u64::from_le_bytes(step[..].try_into().unwrap());
        (step, scalars.collect())
    }

    fn row(step: u64, train_loss: Option<f64>) -> Row {
        Row {
            step,
            tokens: 0,
            train_loss,
            valid_loss: train_loss.is_none().then_some(5.5),
            lr: 1e-4,
            tokens_per_s: None,
        }
    }

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, appendix B.4, and the check value of the polynomial.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn rows_are_read_back() {
        let folder = Scratch::new("tensorboard");
        let rows = [
            row(0, None),
            row(300, Some(1.0 / 3.0)),
            row(600, Some(0.25)),
        ];
        let log = EventLog::open(&folder, &[]).unwrap();
        rows.iter().for_each(|row| log.record(row).unwrap());
        let found = events(&folder);
        assert_eq!(found[0][1], (3, b"brain.Event:2".to_vec()));
        let of = |tag: &str, value| (tag.to_owned(), value);
        let lr = of("lr", 1e-4);
        let all: Vec<_> = found[1..].iter().map(|event| scalars(event)).collect();
        let expected = [
            (0, vec![of("loss/valid", 5.5), lr.clone()]),
            (300, vec![of("loss/train", 0.333_333), lr.clone()]),
            (600, vec![of("loss/train", 0.25), lr]),
        ];
        assert_eq!(all, expected);

        // A resumed run removes what came after its checkpoint, and completes what is missing.
        let whole = fs::read(folder.join(FILE)).unwrap();
        for rows in [&rows[..2], &rows] {
            EventLog::open(&folder, rows).unwrap();
            let resumed = events(&folder);
            // The torn event of step 600 gets another time.
            assert_eq!(resumed[..3], found[..3]);
            let own: Vec<_> = resumed[1..].iter().map(|event| scalars(event)).collect();
            assert_eq!(own, expected[..rows.len()]);
            fs::write(folder.join(FILE), &whole[..whole.len() - 5]).unwrap();
        }
        for rows in [&[][..], &[row(0, None), row(300, Some(0.5))]] {
            let error = EventLog::open(&folder, rows).err().unwrap().to_string();
            assert!(error.contains("events of another run"), "{error}");
        }
    }
}
