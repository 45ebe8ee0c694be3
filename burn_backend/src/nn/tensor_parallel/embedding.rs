//! Vocabulary-parallel embedding.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{DType, FloatDType, Int, IntDType, Tensor};
use nvfp4_formats::Nvfp4Error;

use super::super::Embedding;
use super::{ShardedParameter, TensorParallel, replaced};
use crate::functions::or_panic;
use crate::loss::{try_embedding, try_embedding_part};
use crate::ops::loss::TablePart;
use crate::parallel::functions;

/// [`Embedding`] with the vocabulary sharded over ranks: a table `[vocab / ranks, d_model]` per
/// rank.
///
/// Each row comes from the one rank that holds it, so output and gradient have the bits of one
/// device, except for the sign of zeros.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// Rows of this rank.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    parallel: TensorParallel,
}

impl VocabParallelEmbedding {
    /// Returns this rank's shard of `embedding`, which is identical on all ranks. The parameter
    /// keeps its id.
    ///
    /// # Errors
    /// Returns an error if the number of ranks does not divide the vocabulary.
    pub fn from_embedding(
        embedding: Embedding,
        parallel: &TensorParallel,
    ) -> Result<Self, Nvfp4Error> {
        let group = &parallel.group;
        let vocab = embedding.weight.lazy_shape().dims::<2>()[0];
        group.check_parts("embedding", vocab)?;
        let rows = vocab / group.size();
        let own = |weight: Tensor<2>| weight.narrow(0, group.rank() * rows, rows);
        Ok(Self {
            weight: replaced(&embedding.weight, own),
            parallel: parallel.clone(),
        })
    }

    /// Gathers the shards of all ranks into an unsharded embedding. All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_embedding(self) -> Embedding {
        let group = &self.parallel.group;
        Embedding::new(replaced(&self.weight, |weight| group.all_gather(weight, 0)))
    }

    /// Returns the sharded parameter.
    pub fn sharded_parameter(&self) -> (ParamId, ShardedParameter) {
        let ranks = self.parallel.group.size();
        let sharded = ShardedParameter::of_one(&self.weight, 0, ranks);
        (self.weight.id, sharded)
    }

    /// Looks up the rows of `ids` (`[tokens]`, the same on all ranks) and returns
    /// `[tokens, d_model]` in dtype `dtype`, or with sequence parallelism the rank's rows of that.
    /// An id out of range gives NaN.
    ///
    /// # Errors
    /// Same as [`try_embedding`]; also if the number of ranks does not divide the tokens that they
    /// share.
    pub fn try_forward(
        &self,
        ids: Tensor<1, Int>,
        dtype: FloatDType,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let (group, [tokens]) = (&self.parallel.group, ids.dims());
        if self.parallel.sequence_parallel {
            group.check_parts("ids", tokens)?;
        }
        let table = self.weight.val();
        let [rows, _] = table.dims();
        if group.size() == 1 {
            return try_embedding(table, ids, dtype);
        }
        let part = TablePart {
            first: group.rank() * rows,
            of: group.size() * rows,
        };
        let vectors = try_embedding_part(table, part, signed(ids)?, dtype)?;
        Ok(match self.parallel.sequence_parallel {
            true => functions::reduce_scatter(vectors, 0, group),
            false => functions::reduce(vectors, group),
        })
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, ids: Tensor<1, Int>, dtype: FloatDType) -> Tensor<2> {
        or_panic(
            "VocabParallelEmbedding::forward",
            self.try_forward(ids, dtype),
        )
    }
}

/// Vocabulary ids, split into those of this rank's shard and invalid ones.
pub(super) struct OwnNumbers {
    /// Indices into this rank's shard, -1 for all other ids.
    pub own: Tensor<1, Int>,
    /// True for ids out of range, which no rank holds.
    pub nowhere: Tensor<1, burn_core::tensor::Bool>,
}

/// Converts `numbers` to a dtype in which they can be subtracted.
fn signed(numbers: Tensor<1, Int>) -> Result<Tensor<1, Int>, Nvfp4Error> {
    match numbers.dtype() {
        DType::I64 | DType::I32 => Ok(numbers),
        DType::U32 | DType::U8 => Ok(numbers.cast(IntDType::I64)),
        other => Err(Nvfp4Error::DType {
            argument: "ids",
            found: format!("{other:?}"),
            expected: "I64, I32, U32 or U8".into(),
        }),
    }
}

/// Converts `numbers` to indices into this rank's shard of `len` entries.
pub(super) fn own_numbers(
    numbers: Tensor<1, Int>,
    len: usize,
    parallel: &TensorParallel,
) -> Result<OwnNumbers, Nvfp4Error> {
    let (rank, size) = (parallel.group.rank(), parallel.group.size());
    let numbers = signed(numbers)?;
    let (first, len) = ((rank * len) as i64, len as i64);
    let inside = |numbers: &Tensor<1, Int>, first: i64, len: i64| {
        let from = numbers.clone().greater_equal_elem(first);
        from.bool_and(numbers.clone().lower_elem(first + len))
    };
    let own = inside(&numbers, first, len);
    let somewhere = inside(&numbers, 0, len * size as i64);
    Ok(OwnNumbers {
        own: (numbers - first).mask_fill(own.bool_not(), -1),
        nowhere: somewhere.bool_not(),
    })
}
