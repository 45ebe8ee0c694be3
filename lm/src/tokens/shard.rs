//! Memory-mapped file of tokens.
//!
//! All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `NVFP4TOK` |
//! | 4 | version of the format, 1 |
//! | 4 | bytes per token, 2 or 4 |
//! | 8 | number of tokens |
//! | 8 | number of documents |
//! | 8 | vocabulary size; IDs are below it |
//! | 8 | hash of the tokenizer's file, FNV-1a |
//! | 8 | flags: bit 0 is set if there is a loss mask |
//! | 8 | hash of everything after the header, FNV-1a |
//! | tokens | IDs of all documents, concatenated and zero-padded to a multiple of 8 bytes |
//! | 8 per document | index one past its last token; ascending |
//! | 1 bit per token | loss mask, lowest bit first: 1 if the token counts as a target |

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use memmap2::Mmap;

use crate::random::hash;

const MAGIC: &[u8; 8] = b"NVFP4TOK";
const VERSION: u32 = 1;
const HEADER: usize = 64;
const HAS_MASK: u64 = 1;

/// Identifies the vocabulary of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vocabulary {
    /// Vocabulary size; IDs are below it.
    pub size: usize,
    /// FNV-1a hash of the tokenizer's file.
    pub tokenizer: u64,
}

/// A document: its tokens, and the mask of tokens that count as targets. Without a mask, all count.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Document {
    /// Token IDs.
    pub tokens: Vec<u32>,
    /// Loss mask, as long as the tokens.
    pub mask: Option<Vec<bool>>,
}

/// Header fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    width: usize,
    tokens: usize,
    documents: usize,
    vocabulary: Vocabulary,
    has_mask: bool,
    checksum: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.width as u32).to_le_bytes());
        let numbers = [
            self.tokens as u64,
            self.documents as u64,
            self.vocabulary.size as u64,
            self.vocabulary.tokenizer,
            if self.has_mask { HAS_MASK } else { 0 },
            self.checksum,
        ];
        for (place, number) in bytes[16..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        ensure!(
            bytes.len() >= HEADER,
            "it has {} bytes, but a header of tokens has {HEADER}",
            bytes.len()
        );
        ensure!(
            bytes[..8] == *MAGIC,
            "it does not start with NVFP4TOK: it is no file of tokens"
        );
        let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        ensure!(
            short(8) == VERSION,
            "its version is {}, but this program reads version {VERSION}",
            short(8)
        );
        let width = short(12);
        ensure!(
            width == 2 || width == 4,
            "its element width is {width} bytes, but must be 2 or 4"
        );
        let size = |at: usize, name: &str| {
            usize::try_from(number(at))
                .ok()
                .filter(|&size| size < 1 << 56)
                .with_context(|| {
                    format!("its number of {name} is {}, which is too many", number(at))
                })
        };
        let flags = number(48);
        ensure!(
            flags <= HAS_MASK,
            "its flags are {flags:#x}, but only bit 0 is known"
        );
        let header = Self {
            width: width as usize,
            tokens: size(16, "tokens")?,
            documents: size(24, "documents")?,
            vocabulary: Vocabulary {
                size: size(32, "ids of the vocabulary")?,
                tokenizer: number(40),
            },
            has_mask: flags == HAS_MASK,
            checksum: number(56),
        };
        ensure!(
            header.bytes() == bytes.len(),
            "it has {} bytes, but {} tokens in {} documents take {}: it is truncated or damaged",
            bytes.len(),
            header.tokens,
            header.documents,
            header.bytes()
        );
        Ok(header)
    }

    /// Returns the offset of the document ends.
    fn ends(&self) -> usize {
        HEADER + (self.tokens * self.width).next_multiple_of(8)
    }

    /// Returns the offset of the mask.
    fn mask(&self) -> usize {
        self.ends() + 8 * self.documents
    }

    /// Returns the size of the whole file.
    fn bytes(&self) -> usize {
        let mask = if self.has_mask {
            self.tokens.div_ceil(8)
        } else {
            0
        };
        self.mask() + mask
    }
}

/// A memory-mapped file of tokens. The file must not change while it is open.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    bytes: Mmap,
    header: Header,
}

impl Shard {
    /// Opens the file at `path` and checks the header, the length and the ends of documents. IDs
    /// are checked when they are read.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be read, or is malformed or truncated.
    pub fn open(path: &Path) -> Result<Self> {
        let context = || format!("tokens {}", path.display());
        let file = File::open(path).with_context(context)?;
        // SAFETY: the map is read only, and the file stays as it is, as the type demands.
        let bytes = unsafe { Mmap::map(&file) }.with_context(context)?;
        let header = Header::parse(&bytes).with_context(context)?;
        let path = path.to_owned();
        let shard = Self {
            path,
            bytes,
            header,
        };
        shard.check_ends().with_context(context)?;
        Ok(shard)
    }

    fn check_ends(&self) -> Result<()> {
        let mut last = 0;
        for index in 0..self.documents() {
            let end = self.end(index);
            ensure!(
                end >= last && end <= self.len(),
                "document {index} ends at token {end}, but must end between {last} and {}",
                self.len()
            );
            last = end;
        }
        ensure!(
            last == self.len(),
            "the last document ends at token {last}, but there are {} tokens",
            self.len()
        );
        Ok(())
    }

    /// Verifies the whole file.
    ///
    /// # Errors
    /// Returns an error if its bytes differ from those written, or an ID is not in the vocabulary.
    pub fn verify(&self) -> Result<()> {
        let found = hash(&self.bytes[HEADER..]);
        ensure!(
            found == self.header.checksum,
            "tokens {}: it is damaged: its check sum is {found:016x}, but {:016x} was written",
            self.path.display(),
            self.header.checksum
        );
        for index in 0..self.documents() {
            self.read(self.document(index))?;
        }
        Ok(())
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the vocabulary and tokenizer.
    pub fn vocabulary(&self) -> Vocabulary {
        self.header.vocabulary
    }

    /// Returns the hash of tokens, ends and mask that is stored in the header.
    pub fn checksum(&self) -> u64 {
        self.header.checksum
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.header.tokens
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of documents.
    pub fn documents(&self) -> usize {
        self.header.documents
    }

    fn end(&self, index: usize) -> usize {
        let at = self.header.ends() + 8 * index;
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("8 bytes")) as usize
    }

    /// Returns the token range of document `index`.
    ///
    /// # Panics
    /// If there is no such document.
    pub fn document(&self, index: usize) -> Range<usize> {
        let begin = match index {
            0 => 0,
            _ => self.end(index - 1),
        };
        begin..self.end(index)
    }

    /// Reads the IDs of the tokens `range`.
    ///
    /// # Errors
    /// Returns an error that names the ID and its position if it is not in the vocabulary.
    ///
    /// # Panics
    /// If there are no such tokens.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u32>> {
        let width = self.header.width;
        assert!(
            range.end <= self.len(),
            "tokens {range:?} of {}",
            self.len()
        );
        let bytes = &self.bytes[HEADER + range.start * width..HEADER + range.end * width];
        let ids: Vec<u32> = match width {
            2 => bytes
                .chunks_exact(2)
                .map(|id| u32::from(u16::from_le_bytes([id[0], id[1]])))
                .collect(),
            _ => bytes
                .chunks_exact(4)
                .map(|id| u32::from_le_bytes(id.try_into().expect("4 bytes")))
                .collect(),
        };
        let size = self.header.vocabulary.size;
        if let Some(at) = ids.iter().position(|&id| id as usize >= size) {
            bail!(
                "tokens {}: token {} has id {}, but the vocabulary has {size} ids",
                self.path.display(),
                range.start + at,
                ids[at]
            );
        }
        Ok(ids)
    }

    /// Returns true if token `index` counts as a target.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn counts(&self, index: usize) -> bool {
        assert!(index < self.len(), "token {index} of {}", self.len());
        !self.header.has_mask || self.bytes[self.header.mask() + index / 8] >> (index % 8) & 1 == 1
    }
}

/// Writes documents to a new shard, with two bytes per token if the vocabulary allows.
pub struct ShardWriter {
    vocabulary: Vocabulary,
    width: usize,
    tokens: Vec<u8>,
    ends: Vec<u64>,
    count: usize,
    mask: Vec<u8>,
    has_mask: bool,
}

impl ShardWriter {
    /// Creates a writer for tokens of `vocabulary`.
    ///
    /// # Errors
    /// Returns an error if the vocabulary is empty, or larger than 2^32.
    pub fn new(vocabulary: Vocabulary) -> Result<Self> {
        let size = vocabulary.size;
        ensure!(
            (1..=1 << 32).contains(&size),
            "the vocabulary has {size} ids, but must have 1 to 2^32"
        );
        Ok(Self {
            vocabulary,
            width: if size <= 1 << 16 { 2 } else { 4 },
            tokens: Vec::new(),
            ends: Vec::new(),
            count: 0,
            mask: Vec::new(),
            has_mask: false,
        })
    }

    /// Adds a document.
    ///
    /// # Errors
    /// Returns an error if an ID is not in the vocabulary, or the length of the mask differs from
    /// that of the tokens.
    pub fn add(&mut self, document: &Document) -> Result<()> {
        let Document { tokens, mask } = document;
        let size = self.vocabulary.size;
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= size) {
            bail!(
                "document {}: it has id {id}, but the vocabulary has {size} ids",
                self.ends.len()
            );
        }
        if let Some(mask) = mask {
            ensure!(
                mask.len() == tokens.len(),
                "document {}: its mask has {} entries, but it has {} tokens",
                self.ends.len(),
                mask.len(),
                tokens.len()
            );
            self.has_mask = true;
        }
        for (index, &id) in tokens.iter().enumerate() {
            match self.width {
                2 => self.tokens.extend((id as u16).to_le_bytes()),
                _ => self.tokens.extend(id.to_le_bytes()),
            }
            if self.count.is_multiple_of(8) {
                self.mask.push(0);
            }
            let counts = mask.as_ref().is_none_or(|mask| mask[index]);
            let last = self.mask.last_mut().expect("one was pushed");
            *last |= u8::from(counts) << (self.count % 8);
            self.count += 1;
        }
        self.ends.push(self.count as u64);
        Ok(())
    }

    /// Returns the number of tokens so far.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns true if there are no tokens yet.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Writes the file at `path` atomically.
    ///
    /// # Errors
    /// Returns an error that names the file if writing fails.
    pub fn finish(mut self, path: &Path) -> Result<()> {
        let context = || format!("tokens {}", path.display());
        self.tokens.resize(self.tokens.len().next_multiple_of(8), 0);
        let ends: Vec<u8> = self.ends.iter().flat_map(|end| end.to_le_bytes()).collect();
        let mask = if self.has_mask { &self.mask[..] } else { &[] };
        let parts = [&self.tokens[..], &ends, mask];
        let header = Header {
            width: self.width,
            tokens: self.count,
            documents: self.ends.len(),
            vocabulary: self.vocabulary,
            has_mask: self.has_mask,
            checksum: crate::random::hash_all(&parts),
        };
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".unfinished");
        let unfinished = PathBuf::from(unfinished);
        let write = || -> std::io::Result<()> {
            let mut file = BufWriter::new(File::create(&unfinished)?);
            file.write_all(&header.to_bytes())?;
            parts.iter().try_for_each(|part| file.write_all(part))?;
            file.into_inner()?.sync_all()?;
            std::fs::rename(&unfinished, path)
        };
        write().with_context(context)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use nvfp4_test_support::Scratch;

    fn vocabulary(size: usize) -> Vocabulary {
        Vocabulary {
            size,
            tokenizer: 0x1234,
        }
    }

    fn written(folder: &Scratch, size: usize) -> PathBuf {
        let mut writer = ShardWriter::new(vocabulary(size)).unwrap();
        let plain = Document {
            tokens: vec![1, 2, 3],
            mask: None,
        };
        let masked = Document {
            tokens: vec![size as u32 - 1, 0, 7, 5, 4, 3, 2],
            mask: Some(vec![false, false, true, true, false, true, true]),
        };
        writer.add(&plain).unwrap();
        writer.add(&Document::default()).unwrap();
        writer.add(&masked).unwrap();
        let path = folder.join(format!("{size}.tokens"));
        writer.finish(&path).unwrap();
        path
    }

    #[test]
    fn documents_survive_their_file() {
        let folder = Scratch::new("shard");
        for (size, width) in [(9, 2), (1 << 16, 2), (70_000, 4)] {
            let path = written(&folder, size);
            let shard = Shard::open(&path).unwrap();
            shard.verify().unwrap();
            assert_eq!(shard.header.width, width);
            assert_eq!(shard.vocabulary(), vocabulary(size));
            assert_eq!((shard.documents(), shard.len()), (3, 10));
            assert_eq!(shard.document(1), 3..3);
            assert_eq!(shard.document(2), 3..10);
            assert_eq!(shard.read(1..4).unwrap(), [2, 3, size as u32 - 1]);
            let counts: Vec<usize> = (0..10).filter(|&i| shard.counts(i)).collect();
            assert_eq!(counts, [0, 1, 2, 5, 6, 8, 9]);
        }
    }

    #[test]
    fn damage_is_an_error_that_names_the_file() {
        let folder = Scratch::new("shard-damage");
        let path = written(&folder, 9);
        let whole = fs::read(&path).unwrap();
        let opened = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            let found = Shard::open(&path).and_then(|shard| shard.verify());
            let error = format!("{:#}", found.unwrap_err());
            assert!(error.contains("9.tokens"), "{error}");
            error
        };
        let with = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            bytes
        };
        assert!(opened(&whole[..20]).contains("header"));
        assert!(opened(&whole[..whole.len() - 1]).contains("truncated"));
        assert!(opened(&with(0, b'x')).contains("no file of tokens"));
        assert!(opened(&with(8, 2)).contains("version is 2"));
        assert!(opened(&with(12, 3)).contains("width is 3"));
        assert!(opened(&with(48, 3)).contains("flags"));
        assert!(opened(&with(HEADER + 1, 1)).contains("check sum"));
        // Ends of documents: 24 bytes of tokens, then three numbers.
        assert!(opened(&with(HEADER + 24, 11)).contains("document 0"));
        // A vocabulary that has become smaller.
        let smaller = opened(&with(32, 8));
        assert!(
            smaller.contains("token 3 has id 8") && smaller.contains("8 ids"),
            "{smaller}"
        );
        assert!(opened(&[]).contains("9.tokens"));
    }

    #[test]
    fn writers_refuse_what_does_not_fit() {
        let mut writer = ShardWriter::new(vocabulary(4)).unwrap();
        let document = |tokens: &[u32], mask: Option<Vec<bool>>| Document {
            tokens: tokens.to_vec(),
            mask,
        };
        let error = writer.add(&document(&[1, 4], None)).unwrap_err();
        assert!(error.to_string().contains("id 4"), "{error}");
        let error = writer.add(&document(&[1], Some(vec![]))).unwrap_err();
        assert!(error.to_string().contains("mask"), "{error}");
        assert!(ShardWriter::new(vocabulary(0)).is_err());
    }
}
