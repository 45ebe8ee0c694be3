//! Loads text files into a corpus, splits it into training and validation data, and draws batches.

mod crates;
mod walk;

use std::path::PathBuf;
use std::{fmt, fs};

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use serde::{Deserialize, Serialize};

use crate::config::VOCABULARY;
use crate::random::{hash, hash_all, stream};

pub(crate) use walk::wanted_files;
use walk::{Found, given_files};

/// Byte after each file. It does not occur in text, so a model can learn where a file ends.
pub const END_OF_FILE: u8 = 0;
/// One file in this many goes to validation.
const VALIDATION_SHARE: u64 = 10;
/// Minimum number of files: the split into training and validation is by file.
const FEWEST_FILES: usize = 2;

/// Returns true if the file of this key belongs to the validation text.
fn in_validation(key: &str) -> bool {
    hash(key.as_bytes()).is_multiple_of(VALIDATION_SHARE)
}

/// Fingerprint of a corpus, which detects files that changed since a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Number of files in the training data.
    pub train_files: usize,
    /// Number of bytes in the training data.
    pub train_bytes: usize,
    /// Number of files in the validation data.
    pub valid_files: usize,
    /// Number of bytes in the validation data.
    pub valid_bytes: usize,
    /// Checksum of all bytes.
    pub checksum: String,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            train_files,
            train_bytes,
            valid_files,
            valid_bytes,
            checksum,
        } = self;
        write!(
            f,
            "{train_bytes} bytes in {train_files} files, {valid_bytes} in {valid_files} for \
             validation (checksum {checksum})"
        )
    }
}

/// The text of a run.
#[derive(Debug)]
pub struct Corpus {
    train: Vec<u8>,
    valid: Vec<u8>,
    fingerprint: Fingerprint,
    skipped: usize,
}

impl Corpus {
    /// Reads the files and folders `paths`, or the default text if `paths` is empty, until `limit`
    /// bytes are read (0 for no limit). Files are read whole, so the last one may exceed the limit,
    /// and at least two files are read regardless of the limit.
    ///
    /// The default text is the Rust sources of 148 crates that a build of the command downloads, in
    /// the versions of this project's `Cargo.lock`: 31 MB, the same bytes on every machine.
    ///
    /// Folders are walked in name order; entries that start with a dot are skipped, and a file or
    /// folder reached twice through links is read once. Empty files and files that are not UTF-8
    /// text are skipped and [counted](Self::skipped). A hash of a file's path relative to the given
    /// folder assigns about one file in ten to validation, so adding or removing other files does
    /// not move it. If one side would be empty, the file with the lowest or the highest hash moves
    /// there.
    ///
    /// # Errors
    /// Returns an error if a path does not exist or cannot be read, if a crate of the default text is
    /// missing, or if there are fewer than two text files.
    pub fn load(paths: &[PathBuf], limit: u64) -> Result<Self> {
        let files = if paths.is_empty() {
            crates::files()?
        } else {
            given_files(paths)?
        };
        let limit = if limit == 0 { u64::MAX } else { limit };
        let (mut kept, mut skipped, mut total) = (Vec::new(), 0, 0u64);
        for file in files {
            if total >= limit && kept.len() >= FEWEST_FILES {
                break;
            }
            let bytes = fs::read(&file.path)
                .with_context(|| format!("cannot read {}", file.path.display()))?;
            let text = !bytes.is_empty()
                && !bytes.contains(&END_OF_FILE)
                && std::str::from_utf8(&bytes).is_ok();
            if text {
                total += bytes.len() as u64;
                kept.push((file, bytes));
            } else {
                skipped += 1;
            }
        }
        Self::from_files(kept, skipped).with_context(|| {
            if paths.is_empty() {
                "the default text".into()
            } else {
                let names: Vec<String> = paths
                    .iter()
                    .map(|path| path.display().to_string())
                    .collect();
                format!("data {}", names.join(", "))
            }
        })
    }

    fn from_files(mut files: Vec<(Found, Vec<u8>)>, skipped: usize) -> Result<Self> {
        ensure!(
            files.len() >= FEWEST_FILES,
            "{} file(s) of text ({skipped} left out because they are empty or not UTF-8), but at \
             least {FEWEST_FILES} are needed: the split into training and validation is by file",
            files.len()
        );
        files.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut valid: Vec<bool> = files
            .iter()
            .map(|(file, _)| in_validation(&file.key))
            .collect();
        let count = valid.iter().filter(|valid| **valid).count();
        if count == 0 || count == files.len() {
            let by_hash = |i: &usize| hash(files[*i].0.key.as_bytes());
            let changed = if count == 0 {
                (0..files.len()).min_by_key(by_hash)
            } else {
                (0..files.len()).max_by_key(by_hash)
            };
            let changed = changed.expect("there are files");
            valid[changed] = !valid[changed];
        }
        let mut parts: [(Vec<u8>, usize); 2] = Default::default();
        for ((_, bytes), valid) in files.iter().zip(valid) {
            let (part, count) = &mut parts[usize::from(valid)];
            part.extend_from_slice(bytes);
            part.push(END_OF_FILE);
            *count += 1;
        }
        let [(train, train_files), (valid, valid_files)] = parts;
        let fingerprint = Fingerprint {
            train_files,
            train_bytes: train.len(),
            valid_files,
            valid_bytes: valid.len(),
            checksum: format!("{:016x}", hash_all(&[&train, &valid])),
        };
        Ok(Self {
            train,
            valid,
            fingerprint,
            skipped,
        })
    }

    /// Returns the fingerprint of this corpus.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// Returns the number of files skipped because they are empty or not UTF-8 text.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Checks that sequences of `context` bytes can be drawn from the training and the validation
    /// data.
    ///
    /// # Errors
    /// Returns an error if either has fewer than `context + 1` bytes.
    pub fn check(&self, context: usize) -> Result<()> {
        for (name, part) in [("training", &self.train), ("validation", &self.valid)] {
            ensure!(
                part.len() > context,
                "the {name} files have {} bytes, but a context of {context} needs at least {}: \
                 give more text (--data, or a higher --data-bytes), or a smaller --context",
                part.len(),
                context + 1
            );
        }
        Ok(())
    }

    /// Returns the nats per byte of the validation text under the byte frequencies of the training
    /// text. This is the loss of the best model that uses no context.
    ///
    /// One is added to the count of every byte value, so that the result is finite.
    pub fn unigram_entropy(&self) -> f64 {
        let count = |bytes: &[u8]| {
            let mut counts = [0u64; VOCABULARY];
            bytes
                .iter()
                .for_each(|byte| counts[usize::from(*byte)] += 1);
            counts
        };
        let total = (self.train.len() + VOCABULARY) as f64;
        let nats: f64 = count(&self.train)
            .into_iter()
            .zip(count(&self.valid))
            .map(|(train, valid)| -(valid as f64) * ((train + 1) as f64 / total).ln())
            .sum();
        nats / self.valid.len() as f64
    }

    /// Returns the training batch of step `step`. It depends only on the seed and the step, so that
    /// a run can be resumed anywhere. Sequences start at random bytes.
    pub fn train_batch(&self, seed: u64, step: u64, batch: usize, context: usize) -> Batch {
        let starts = (self.train.len() - context) as u64;
        let mut stream = stream(seed, "batches", step);
        let starts = (0..batch).map(|_| stream.random_range(0..starts) as usize);
        Batch::new(&self.train, starts, context)
    }

    /// Returns batch `index` of the `count` batches of an evaluation. The sequences are evenly
    /// spaced over the validation text and always the same.
    pub fn valid_batch(&self, index: usize, count: usize, batch: usize, context: usize) -> Batch {
        let last = (self.valid.len() - context - 1) as u128;
        let sequences = (count * batch) as u128;
        let starts = (0..batch).map(|row| {
            let sequence = (index * batch + row) as u128;
            (last * sequence / (sequences - 1).max(1)) as usize
        });
        Batch::new(&self.valid, starts, context)
    }
}

/// Sequences of bytes as inputs, and the same sequences shifted by one byte as targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Bytes, row by row.
    inputs: Vec<i32>,
    targets: Vec<i32>,
    rows: usize,
}

impl Batch {
    fn new(text: &[u8], starts: impl Iterator<Item = usize>, context: usize) -> Self {
        let (mut inputs, mut targets, mut rows) = (Vec::new(), Vec::new(), 0);
        for start in starts {
            let bytes = &text[start..start + context + 1];
            inputs.extend(bytes[..context].iter().map(|byte| i32::from(*byte)));
            targets.extend(bytes[1..].iter().map(|byte| i32::from(*byte)));
            rows += 1;
        }
        Self {
            inputs,
            targets,
            rows,
        }
    }

    /// Returns batch `number` of random bytes: `rows` sequences of `context` bytes.
    pub(crate) fn random(seed: u64, number: u64, rows: usize, context: usize) -> Self {
        let length = context + 1;
        let mut text = vec![0; rows * length];
        stream(seed, "random batches", number).fill(&mut text[..]);
        Self::new(&text, (0..rows).map(|row| row * length), context)
    }

    /// Returns the number of sequences.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Splits the batch into `parts` equal parts, in order.
    ///
    /// # Panics
    /// If `parts` does not divide the number of sequences.
    pub fn split(self, parts: usize) -> Vec<Self> {
        assert!(
            parts > 0 && self.rows.is_multiple_of(parts),
            "{} sequences in {parts} parts",
            self.rows
        );
        let rows = self.rows / parts;
        let length = self.inputs.len() / parts;
        self.inputs
            .chunks(length)
            .zip(self.targets.chunks(length))
            .map(|(inputs, targets)| Self {
                inputs: inputs.to_vec(),
                targets: targets.to_vec(),
                rows,
            })
            .collect()
    }

    /// Returns inputs and targets, both `[batch, context]`, on `device`.
    pub fn tensors(self, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let shape = [self.rows, self.inputs.len() / self.rows];
        let tensor = |values| Tensor::from_data(TensorData::new(values, shape), device);
        (tensor(self.inputs), tensor(self.targets))
    }
}

/// Lists the files of `paths`, files or folders, in the order of [`Corpus::load`].
///
/// # Errors
/// Returns an error if a path does not exist or cannot be read.
pub(crate) fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let found = given_files(paths)?.into_iter();
    Ok(found.map(|file| file.path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Temporary folder, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("nvfp4-data-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn write(&self, name: &str, content: impl AsRef<[u8]>) {
            let path = self.0.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }

        fn load(&self) -> Result<Corpus> {
            Corpus::load(std::slice::from_ref(&self.0), 0)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_batch_is_split_into_equal_parts() {
        let text: Vec<u8> = (0..100).collect();
        let starts = [0, 7, 40, 61];
        let whole = Batch::new(&text, starts.into_iter(), 5);
        assert_eq!(whole.rows(), 4);
        let parts = whole.clone().split(2);
        assert_eq!(
            parts,
            [
                Batch::new(&text, starts[..2].iter().copied(), 5),
                Batch::new(&text, starts[2..].iter().copied(), 5)
            ]
        );
        assert_eq!(whole.clone().split(1), [whole]);
    }

    #[test]
    fn the_split_is_by_path_and_stays() {
        let folder = Folder::new("split");
        for i in 0..200 {
            folder.write(&format!("{}/{i}.txt", i % 7), format!("file number {i}\n"));
        }
        let first = folder.load().unwrap();
        assert_eq!(first.fingerprint(), folder.load().unwrap().fingerprint());
        assert_eq!(
            first.fingerprint().train_files + first.fingerprint().valid_files,
            200
        );
        assert!((5..40).contains(&first.fingerprint().valid_files));

        // The same files in another folder split the same way, and an additional file moves none of
        // the others.
        let copy = Folder::new("split-copy");
        for i in (0..200).rev() {
            copy.write(&format!("{}/{i}.txt", i % 7), format!("file number {i}\n"));
        }
        assert_eq!(copy.load().unwrap().fingerprint(), first.fingerprint());
        copy.write("another.txt", "another file\n");
        let more = String::from_utf8(copy.load().unwrap().valid).unwrap();
        let valid = String::from_utf8(first.valid.clone()).unwrap();
        assert!(valid.split('\0').all(|file| more.contains(file)));

        // A limit always takes the same subset.
        let part = |limit| Corpus::load(std::slice::from_ref(&folder.0), limit).unwrap();
        assert_eq!(part(1000).fingerprint(), part(1000).fingerprint());
        let files = part(1000).fingerprint().train_files + part(1000).fingerprint().valid_files;
        assert!((50..80).contains(&files), "{files} files of about 15 bytes");
    }

    #[test]
    fn what_is_not_text_is_left_out_and_counted() {
        let folder = Folder::new("text");
        folder.write("a.txt", "alpha");
        folder.write("b/b.md", "beta, größer");
        folder.write("empty", "");
        folder.write("zero", b"a\0b");
        folder.write("latin1", b"gr\xf6\xdfer");
        folder.write(".hidden", "not read");
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&folder.0, folder.0.join("circle")).unwrap();
            std::os::unix::fs::symlink(folder.0.join("a.txt"), folder.0.join("again")).unwrap();
            std::os::unix::fs::symlink("nowhere", folder.0.join("broken")).unwrap();
        }
        let corpus = folder.load().unwrap();
        assert_eq!(corpus.skipped(), 3);
        // Two files: one on each side, regardless of their hashes.
        let fingerprint = corpus.fingerprint();
        assert_eq!((fingerprint.train_files, fingerprint.valid_files), (1, 1));
        let mut parts = [corpus.train.clone(), corpus.valid.clone()];
        parts.sort();
        assert_eq!(
            parts,
            [b"alpha\0".to_vec(), "beta, größer\0".as_bytes().to_vec()]
        );
        let error = corpus.check(100).unwrap_err().to_string();
        assert!(error.contains("context of 100"), "{error}");
    }

    #[test]
    fn too_little_data_is_an_error() {
        let folder = Folder::new("little");
        folder.write("only.txt", "one file");
        let error = format!("{:#}", folder.load().unwrap_err());
        assert!(error.contains("at least 2"), "{error}");
        let missing = folder.0.join("missing");
        let error = Corpus::load(std::slice::from_ref(&missing), 0)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("missing") && error.contains("does not exist"),
            "{error}"
        );
    }

    #[test]
    fn a_limit_leaves_both_sides_a_file() {
        let folder = Folder::new("limit");
        for i in 0..20 {
            folder.write(&format!("{i}.txt"), "as long as the limit, or longer");
        }
        for limit in [1, 30] {
            let corpus = Corpus::load(std::slice::from_ref(&folder.0), limit).unwrap();
            let found = corpus.fingerprint();
            assert_eq!((found.train_files, found.valid_files), (1, 1), "{limit}");
        }
    }

    #[test]
    fn batches_depend_on_seed_and_step() {
        let folder = Folder::new("batches");
        for i in 0..20 {
            let text: String = (0..200)
                .map(|j| char::from(b' ' + ((i * j) % 90) as u8))
                .collect();
            folder.write(&format!("{i}"), text);
        }
        let corpus = folder.load().unwrap();
        let batch = |seed, step| corpus.train_batch(seed, step, 4, 16);
        assert_eq!(batch(1, 5), batch(1, 5));
        assert_ne!(batch(1, 5), batch(1, 6));
        assert_ne!(batch(1, 5), batch(2, 5));
        let Batch {
            inputs,
            targets,
            rows,
        } = batch(1, 5);
        assert_eq!(rows, 4);
        for row in 0..4 {
            assert_eq!(
                inputs[row * 16 + 1..row * 16 + 16],
                targets[row * 16..row * 16 + 15]
            );
        }
        // The evaluation covers the text from the first byte to the last.
        let first = corpus.valid_batch(0, 3, 4, 16);
        let last = corpus.valid_batch(2, 3, 4, 16);
        assert_eq!(first.inputs[0], i32::from(corpus.valid[0]));
        assert_eq!(last.targets[63], i32::from(*corpus.valid.last().unwrap()));
    }

    #[test]
    fn unigram_entropy_of_known_text() {
        let files = ["aaab", "aabb"].map(|text| {
            let key = text.to_string();
            (
                Found {
                    path: PathBuf::from(&key),
                    key,
                },
                text.as_bytes().to_vec(),
            )
        });
        let corpus = Corpus::from_files(files.to_vec(), 0).unwrap();
        let train = |byte| corpus.train.iter().filter(|b| **b == byte).count() as f64;
        let nats = |byte| -((train(byte) + 1.0) / 261.0).ln();
        let expected = corpus.valid.iter().map(|byte| nats(*byte)).sum::<f64>() / 5.0;
        assert!((corpus.unigram_entropy() - expected).abs() < 1e-12);
    }
}
