//! Packs documents into rows of fixed length.
//!
//! A row has `context` inputs and the same number of targets. Longer documents are cut into pieces
//! of `context` predictions, each of which starts at position 0; shorter pieces share rows. The
//! rest of a row is padding, whose targets do not count.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::loss::CrossEntropy;
use chacha20::rand_core::Rng;

use super::shard::Shard;
use crate::decoder::PackedRows;
use crate::random::{hash, stream};

/// Piece of a document in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    shard: usize,
    /// Input tokens; targets are shifted by one.
    inputs: Range<usize>,
}

/// Packed rows of training or validation data.
#[derive(Debug, Clone)]
pub struct Rows {
    shards: Vec<Arc<Shard>>,
    rows: Vec<Vec<Piece>>,
    context: usize,
    cut: Cut,
}

/// Effects of the fixed row length on documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cut {
    /// Number of documents longer than a row, which were cut.
    pub longer: usize,
    /// Number of documents with a prompt in which some targets that count are not in the first
    /// piece.
    pub parted: usize,
    /// Number of documents dropped because no target of theirs counts.
    pub left_out: usize,
    /// Number of tokens dropped in pieces without a target that counts.
    pub tokens_left_out: usize,
    /// Number of targets that count.
    pub targets: usize,
}

/// Location of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the shard.
    pub shard: usize,
    /// Index of the document in the shard.
    pub document: usize,
}

/// Token range of a document in a shard.
type Span = (usize, Range<usize>);

/// Splits the single document of `place` for training and validation: about `share` of its tokens,
/// at its end, are for validation.
///
/// # Errors
/// Returns an error if the share is not between 0 and 1, or the document is too short.
fn halves(shards: &[Arc<Shard>], place: Place, share: f64) -> Result<[Span; 2]> {
    check_share(share)?;
    let document = shards[place.shard].document(place.document);
    let targets = document.len().saturating_sub(1);
    ensure!(
        targets > 1,
        "there is one document of {} token(s), but training and validation need a target each",
        document.len()
    );
    let valid = ((targets as f64 * share).round() as usize).clamp(1, targets - 1);
    // The last target of training is the first input of validation.
    let border = document.end - 1 - valid;
    Ok([
        (place.shard, document.start..border + 1),
        (place.shard, border..document.end),
    ])
}

fn check_share(share: f64) -> Result<()> {
    ensure!(
        share > 0.0 && share < 1.0,
        "valid-share is {share}, but must be between 0 and 1"
    );
    Ok(())
}

/// Returns the places of all documents of `shards`.
pub fn places(shards: &[Arc<Shard>]) -> Vec<Place> {
    let of = |(shard, found): (usize, &Arc<Shard>)| {
        (0..found.documents()).map(move |document| Place { shard, document })
    };
    shards.iter().enumerate().flat_map(of).collect()
}

/// Splits `places` into training and validation. A hash assigns about `share` of the documents to
/// validation. Equal documents go to the same side, and other documents do not affect the
/// assignment. If one side would be empty, the document with the lowest or the highest hash moves
/// there.
///
/// # Errors
/// Returns an error if there are fewer than two documents, the share is not between 0 and 1, or an
/// ID is not in the vocabulary.
pub fn split(shards: &[Arc<Shard>], places: &[Place], share: f64) -> Result<[Vec<Place>; 2]> {
    check_share(share)?;
    ensure!(
        places.len() > 1,
        "there are {} document(s), but at least two are needed: the split into training and \
         validation is by document",
        places.len()
    );
    let hashed = |place: &Place| -> Result<(f64, Place)> {
        let shard = &shards[place.shard];
        let ids = shard.read(shard.document(place.document))?;
        let number = hash(bytemuck::cast_slice(&ids));
        // FNV mixes its low bits best.
        Ok((number.reverse_bits() as f64 / 2f64.powi(64), *place))
    };
    let hashed: Vec<(f64, Place)> = places.iter().map(hashed).collect::<Result<_>>()?;
    let mut bound = share;
    let numbers = || hashed.iter().map(|(number, _)| *number);
    let least = numbers().fold(1.0, f64::min);
    let most = numbers().fold(0.0, f64::max);
    ensure!(
        least < most,
        "all {} documents are equal, so none can be for validation: give --valid",
        places.len()
    );
    if least >= bound {
        bound = least.next_up();
    }
    bound = bound.min(most);
    let part = |valid: bool| {
        let own = hashed
            .iter()
            .filter(|(number, _)| (*number < bound) == valid);
        own.map(|(_, place)| *place).collect()
    };
    Ok([part(false), part(true)])
}

impl Rows {
    /// Packs the documents `places` of `shards` into rows of `context`. Drops pieces without a
    /// target that counts. The result depends only on the documents.
    ///
    /// # Errors
    /// Returns an error if `context` is 0, or no target counts.
    pub fn pack(shards: &[Arc<Shard>], places: &[Place], context: usize) -> Result<Self> {
        let span = |place: &Place| (place.shard, shards[place.shard].document(place.document));
        let spans: Vec<Span> = places.iter().map(span).collect();
        Self::of_spans(shards, &spans, context)
    }

    /// Packs the single document of `place` into training rows, and its end, about `share` of its
    /// tokens, into validation rows.
    ///
    /// # Errors
    /// Returns an error if the share is not between 0 and 1, or if training or validation has no
    /// target that counts.
    pub fn pack_one(
        shards: &[Arc<Shard>],
        place: Place,
        share: f64,
        context: usize,
    ) -> Result<[Self; 2]> {
        let [train, valid] = halves(shards, place, share)?;
        Ok([
            Self::of_spans(shards, &[train], context)?,
            Self::of_spans(shards, &[valid], context)?,
        ])
    }

    fn of_spans(shards: &[Arc<Shard>], spans: &[Span], context: usize) -> Result<Self> {
        ensure!(context > 0, "context is 0, but must be at least 1");
        let mut pieces = Vec::new();
        let mut cut = Cut::default();
        for (at, document) in spans {
            let shard = &shards[*at];
            let end = document.end.saturating_sub(1);
            let before = cut.targets;
            // A text without a prompt counts from its second token on.
            let has_prompt = document.start < end && !shard.counts(document.start + 1);
            let mut is_parted = false;
            cut.longer += usize::from(end.saturating_sub(document.start) > context);
            for begin in (document.start..end).step_by(context) {
                let inputs = begin..(begin + context).min(end);
                let targets = inputs.clone().filter(|&index| shard.counts(index + 1));
                match targets.count() {
                    0 => cut.tokens_left_out += inputs.len(),
                    targets => {
                        cut.targets += targets;
                        is_parted |= has_prompt && begin > document.start;
                        pieces.push(Piece { shard: *at, inputs });
                    }
                }
            }
            cut.parted += usize::from(is_parted);
            cut.left_out += usize::from(cut.targets == before);
        }
        ensure!(
            !pieces.is_empty(),
            "the {} documents have no target: they need at least two tokens, and the loss mask one \
             that counts",
            spans.len()
        );
        // Best fit decreasing: the longest piece first, each into the fullest row with enough
        // space.
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.inputs.len()));
        let mut rows: Vec<Vec<Piece>> = Vec::new();
        let mut by_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for piece in pieces {
            let length = piece.inputs.len();
            let found = by_room.range_mut(length..).next();
            let (room, row) = match found {
                Some((&room, fitting)) => {
                    let row = fitting.pop().expect("empty entries are removed");
                    if fitting.is_empty() {
                        by_room.remove(&room);
                    }
                    (room, row)
                }
                None => {
                    rows.push(Vec::new());
                    (context, rows.len() - 1)
                }
            };
            rows[row].push(piece);
            if room > length {
                by_room.entry(room - length).or_default().push(row);
            }
        }
        Ok(Self {
            shards: shards.to_vec(),
            rows,
            context,
            cut,
        })
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns true if there is no row; [`pack`](Self::pack) refuses that.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the effects of cutting.
    pub fn cut(&self) -> Cut {
        self.cut
    }

    /// Returns the number of inputs that are not padding.
    pub fn tokens(&self) -> usize {
        let pieces = self.rows.iter().flatten();
        pieces.map(|piece| piece.inputs.len()).sum()
    }

    /// Returns the largest number of documents in a row, without padding.
    pub fn most_documents(&self) -> usize {
        self.rows.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns the inputs of the first `most` rows, concatenated without padding.
    ///
    /// # Errors
    /// Returns an error if an ID is not in the vocabulary.
    pub fn inputs(&self, most: usize) -> Result<Vec<u32>> {
        let pieces = self.rows.iter().take(most).flatten();
        let read = |piece: &Piece| self.shards[piece.shard].read(piece.inputs.clone());
        let all: Vec<Vec<u32>> = pieces.map(read).collect::<Result<_>>()?;
        Ok(all.concat())
    }

    /// Reads the rows `indices`.
    ///
    /// # Errors
    /// Returns an error if an ID is not in the vocabulary.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn batch(&self, indices: &[usize]) -> Result<RowBatch> {
        let ignore = CrossEntropy::default().ignore;
        let mut batch = RowBatch {
            context: self.context,
            ..RowBatch::default()
        };
        for &index in indices {
            let mut lengths = Vec::new();
            for Piece { shard, inputs } in &self.rows[index] {
                let shard = &self.shards[*shard];
                let ids = shard.read(inputs.start..inputs.end + 1)?;
                batch
                    .inputs
                    .extend(ids[..inputs.len()].iter().map(|&id| id as i32));
                for (at, &id) in (inputs.start + 1..).zip(&ids[1..]) {
                    let counts = shard.counts(at);
                    batch.counted += usize::from(counts);
                    batch.targets.push(if counts { id as i32 } else { ignore });
                }
                lengths.push(inputs.len());
            }
            batch.lengths.push(lengths);
            let end = batch.lengths.len() * self.context;
            batch.inputs.resize(end, 0);
            batch.targets.resize(end, ignore);
        }
        Ok(batch)
    }
}

/// A batch of rows on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RowBatch {
    /// Input IDs, row by row.
    inputs: Vec<i32>,
    /// Target IDs. [`CrossEntropy::default`] ignores those of padding and of prompts.
    targets: Vec<i32>,
    /// Lengths of the documents in each row.
    lengths: Vec<Vec<usize>>,
    context: usize,
    counted: usize,
}

impl RowBatch {
    /// Returns batch `number` of random tokens: rows of one document each, whose targets all count.
    pub(crate) fn random(
        seed: u64,
        number: u64,
        [rows, context]: [usize; 2],
        vocab: usize,
    ) -> Self {
        let mut random = stream(seed, "random rows", number);
        let mut batch = Self {
            lengths: vec![vec![context]; rows],
            context,
            counted: rows * context,
            ..Self::default()
        };
        for _ in 0..rows {
            let ids = (0..=context).map(|_| (random.next_u32() as usize % vocab) as i32);
            let ids: Vec<i32> = ids.collect();
            batch.inputs.extend(&ids[..context]);
            batch.targets.extend(&ids[1..]);
        }
        batch
    }

    /// Returns the number of targets that count.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// Returns inputs `[rows, context]`, targets `[rows * context]` and the positions of the
    /// documents, on `device`.
    ///
    /// # Errors
    /// Returns an error if there is no row.
    pub fn tensors(&self, device: &Device) -> Result<(Tensor<2, Int>, Tensor<1, Int>, PackedRows)> {
        self.tensors_with_room(None, device)
    }

    /// Returns the same tensors as [`tensors`](Self::tensors). With `documents`, the shapes are the
    /// same for all batches with this number of rows; see [`PackedRows::with_room`].
    ///
    /// # Errors
    /// Returns an error if there is no row, or if there are more documents.
    pub fn tensors_with_room(
        &self,
        documents: Option<usize>,
        device: &Device,
    ) -> Result<(Tensor<2, Int>, Tensor<1, Int>, PackedRows)> {
        let (rows, time) = (self.lengths.len(), self.context);
        let inputs = TensorData::new(self.inputs.clone(), [rows, time]);
        let targets = TensorData::new(self.targets.clone(), [rows * time]);
        Ok((
            Tensor::from_data(inputs, (device, DType::I32)),
            Tensor::from_data(targets, (device, DType::I32)),
            match documents {
                None => PackedRows::new(&self.lengths, time, device)?,
                Some(most) => PackedRows::with_room(&self.lengths, [time, most], device)?,
            },
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::shard::{Document, ShardWriter, Vocabulary};
    use super::*;
    use nvfp4_test_support::Scratch;

    fn shard(folder: &Scratch, documents: &[Document]) -> Arc<Shard> {
        let vocabulary = Vocabulary {
            size: 1000,
            tokenizer: 0,
        };
        let mut writer = ShardWriter::new(vocabulary).unwrap();
        documents
            .iter()
            .for_each(|document| writer.add(document).unwrap());
        let path = folder.join("rows.tokens");
        writer.finish(&path).unwrap();
        Arc::new(Shard::open(&path).unwrap())
    }

    fn document(tokens: Range<u32>) -> Document {
        Document {
            tokens: tokens.collect(),
            mask: None,
        }
    }

    #[test]
    fn rows_have_every_prediction_once() {
        let folder = Scratch::new("rows");
        let documents = [
            document(0..21),
            document(100..104),
            document(200..201),
            document(300..306),
            document(400..403),
        ];
        let shards = [shard(&folder, &documents)];
        let rows = Rows::pack(&shards, &places(&shards), 8).unwrap();
        let all: Vec<usize> = (0..rows.len()).collect();
        let batch = rows.batch(&all).unwrap();
        // 20 + 3 + 0 + 5 + 2 predictions: eight, eight, four with three, five with two.
        assert_eq!((rows.len(), rows.tokens(), batch.counted()), (4, 30, 30));
        let mut pairs: Vec<(i32, i32)> = batch
            .inputs
            .iter()
            .copied()
            .zip(batch.targets.iter().copied())
            .filter(|(_, target)| *target >= 0)
            .collect();
        assert!(pairs.iter().all(|(input, target)| input + 1 == *target));
        pairs.sort_unstable();
        pairs.dedup();
        assert_eq!(pairs.len(), 30);
        assert_eq!(batch.lengths, [vec![8], vec![8], vec![5, 3], vec![4, 2]]);
        let again = Rows::pack(&shards, &places(&shards), 8).unwrap();
        assert_eq!(again.batch(&all).unwrap(), batch);
    }

    #[test]
    fn masked_targets_do_not_count() {
        let folder = Scratch::new("rows-mask");
        let masked = |tokens: Range<u32>, counts: &[u32]| Document {
            mask: Some(tokens.clone().map(|id| counts.contains(&id)).collect()),
            tokens: tokens.collect(),
        };
        // The second has a piece without a counted target, the third has no counted target at all.
        let documents = [
            masked(0..4, &[0, 2]),
            masked(10..19, &[12]),
            masked(20..24, &[20]),
        ];
        let shards = [shard(&folder, &documents)];
        let rows = Rows::pack(&shards, &places(&shards), 4).unwrap();
        let batch = rows.batch(&[0, 1]).unwrap();
        assert_eq!((rows.len(), batch.counted()), (2, 2));
        assert_eq!(batch.inputs, [10, 11, 12, 13, 0, 1, 2, 0]);
        assert_eq!(batch.targets, [-100, 12, -100, -100, -100, 2, -100, -100]);
        let all = Rows::pack(&shards, &places(&shards), 4).unwrap().cut();
        let expected = Cut {
            longer: 1,
            parted: 0,
            left_out: 1,
            tokens_left_out: 7,
            targets: 2,
        };
        assert_eq!(all, expected);
        let error = Rows::pack(&shards, &places(&shards)[2..], 4).unwrap_err();
        assert!(error.to_string().contains("no target"), "{error}");
    }

    /// A prompt that fills a row separates the completion from it.
    #[test]
    fn what_is_cut_is_counted() {
        let folder = Scratch::new("rows-cut");
        let completion = |prompt: u32, length: u32| Document {
            tokens: (0..prompt + length).collect(),
            mask: Some((0..prompt + length).map(|id| id >= prompt).collect()),
        };
        // The last fits. The completion of the first is preceded only by the end of its prompt. The
        // second fits in one row except for its end.
        let documents = [completion(20, 3), completion(7, 4), completion(3, 2)];
        let shards = [shard(&folder, &documents)];
        let cut = Rows::pack(&shards, &places(&shards), 8).unwrap().cut();
        let expected = Cut {
            longer: 2,
            parted: 2,
            left_out: 0,
            tokens_left_out: 16,
            targets: 9,
        };
        assert_eq!(cut, expected);
        // Texts have no prompt.
        let shards = [shard(&folder, &[document(0..21), document(5..6)])];
        let cut = Rows::pack(&shards, &places(&shards), 8).unwrap().cut();
        assert_eq!(
            (cut.longer, cut.parted, cut.left_out, cut.targets),
            (1, 0, 1, 20)
        );
    }

    /// Every prediction of a text is either in training or in validation; the last ones are in
    /// validation.
    #[test]
    fn one_text_is_cut_in_two() {
        let folder = Scratch::new("rows-one");
        let shards = [shard(&folder, &[document(0..101)])];
        let [one] = places(&shards)[..] else {
            panic!("there is one document");
        };
        let [train, valid] = Rows::pack_one(&shards, one, 0.05, 8).unwrap();
        assert_eq!((train.tokens(), valid.tokens()), (95, 5));
        assert_eq!(valid.inputs(9).unwrap(), [95, 96, 97, 98, 99]);
        assert!(train.inputs(99).unwrap().iter().all(|&id| id < 95));
        for share in [1e-9, 1.0 - 1e-9] {
            let parts = Rows::pack_one(&shards, one, share, 8).unwrap();
            assert_eq!(parts.map(|part| part.tokens()).iter().min(), Some(&1));
        }
        assert!(Rows::pack_one(&shards, one, 1.0, 8).is_err());
        let shards = [shard(&folder, &[document(0..2)])];
        let error = Rows::pack_one(&shards, one, 0.5, 8).unwrap_err();
        assert!(
            error.to_string().contains("one document of 2 token"),
            "{error}"
        );
    }

    #[test]
    fn parts_are_by_document() {
        let folder = Scratch::new("rows-split");
        let documents: Vec<Document> = (0..200).map(|i| document(i..i + 3)).collect();
        let shards = [shard(&folder, &documents)];
        let all = places(&shards);
        let [train, valid] = split(&shards, &all, 0.2).unwrap();
        assert_eq!(train.len() + valid.len(), 200);
        assert!((20..=60).contains(&valid.len()), "{}", valid.len());
        assert!(valid.iter().all(|place| !train.contains(place)));
        // With fewer documents, the remaining ones keep their side.
        let [_, fewer] = split(&shards, &all[..100], 0.2).unwrap();
        assert!(fewer.iter().all(|place| valid.contains(place)));
        for share in [1e-9, 1.0 - 1e-9] {
            let [train, valid] = split(&shards, &all[..2], share).unwrap();
            assert_eq!((train.len(), valid.len()), (1, 1));
        }
        assert!(split(&shards, &all[..1], 0.5).is_err());
        assert!(split(&shards, &all, 1.0).is_err());
    }
}
