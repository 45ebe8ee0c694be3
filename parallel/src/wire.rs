//! Numbers and strings in messages: little endian, lengths before contents.

use std::io::{self, Read, Write};

use crate::error::{ParallelError, Result};

/// Reads the fields of a message. Lengths are checked against the remaining bytes.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        if count > self.0.len() {
            return Err(ParallelError::Malformed(format!(
                "a field has {count} bytes, but {} are left",
                self.0.len()
            )));
        }
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let taken = self.take(N)?;
        Ok(taken.try_into().expect("as long as was taken"))
    }

    pub fn u8(&mut self) -> Result<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads bytes preceded by their number.
    pub fn bytes(&mut self) -> Result<&'a [u8]> {
        let count = self.u32()?;
        self.take(count as usize)
    }

    /// Reads UTF-8 preceded by its number of bytes.
    pub fn text(&mut self) -> Result<String> {
        let text = std::str::from_utf8(self.bytes()?);
        let text = text.map_err(|error| ParallelError::Malformed(error.to_string()))?;
        Ok(text.to_owned())
    }

    /// Returns an error if bytes remain.
    pub fn end(self) -> Result<()> {
        match self.0.len() {
            0 => Ok(()),
            left => Err(ParallelError::Malformed(format!(
                "{left} bytes follow the last field"
            ))),
        }
    }
}

/// Appends bytes preceded by their number.
pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

/// Writes a message preceded by its length.
pub(crate) fn write_frame(stream: &mut impl Write, body: &[u8]) -> io::Result<()> {
    // One write: two would wait for an acknowledgement in between.
    let mut frame = Vec::with_capacity(4 + body.len());
    put_bytes(&mut frame, body);
    stream.write_all(&frame)?;
    stream.flush()
}

/// Reads a message of at most `limit` bytes. Allocates as data arrives, not by the announced
/// length.
pub(crate) fn read_frame(stream: &mut impl Read, limit: usize) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        let reason = format!("a message says that it has {length} bytes; at most {limit} are read");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    read_exactly(stream, length)
}

/// Reads `length` bytes.
pub(crate) fn read_exactly(stream: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    stream.take(length as u64).read_to_end(&mut body)?;
    if body.len() < length {
        let reason = format!("a message of {length} bytes ended after {}", body.len());
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_bounded() {
        let mut frame = Vec::new();
        write_frame(&mut frame, b"abc").unwrap();
        assert_eq!(read_frame(&mut &frame[..], 3).unwrap(), b"abc");
        let error = read_frame(&mut &frame[..], 2).unwrap_err();
        assert!(error.to_string().contains("at most 2"), "{error}");
        let error = read_frame(&mut &frame[..6], 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        // The header announces four gigabytes, but no data follows.
        let error = read_frame(&mut &[255u8; 4][..], usize::MAX).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
