//! The embedding of a rank.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{DType, FloatDType, Int, IntDType, Tensor};
use nvfp4_kernels::Nvfp4Error;

use super::super::Embedding;
use super::{ShardedParameter, TensorParallel, replaced};
use crate::functions::or_panic;
use crate::loss::{try_embedding, try_embedding_part};
use crate::ops::loss::TablePart;
use crate::parallel::functions;

/// [`Embedding`] with a part of the vocabulary on each rank: a table `[vocab / ranks, d_model]`.
///
/// Each row comes from the one rank that has it, so that output and gradient have the bits of one
/// device, but for the sign of zeros.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// The rank's rows.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    parallel: TensorParallel,
}

impl VocabParallelEmbedding {
    /// This rank's part of `embedding`, of which all ranks have the same. The parameter keeps its
    /// id.
    ///
    /// # Errors
    /// Returns an error if the ranks do not divide the vocabulary.
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

    /// The embedding of one device, of the parts of all ranks, each of which calls this.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_embedding(self) -> Embedding {
        let group = &self.parallel.group;
        Embedding::new(replaced(&self.weight, |weight| group.all_gather(weight, 0)))
    }

    /// The parameter, of which each rank has a part.
    pub fn sharded_parameter(&self) -> (ParamId, ShardedParameter) {
        let ranks = self.parallel.group.size();
        let sharded = ShardedParameter::of_one(&self.weight, 0, ranks);
        (self.weight.id, sharded)
    }

    /// The rows `ids` (`[tokens]`, the same on all ranks) in type `dtype`: `[tokens, d_model]`, or
    /// with sequence parallelism the rank's part of that. An id that is no row gives NaN.
    ///
    /// # Errors
    /// Same as [`try_embedding`]; also if the ranks do not divide the tokens that they share.
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
    pub fn forward(&self, ids: Tensor<1, Int>, dtype: FloatDType) -> Tensor<2> {
        or_panic(
            "VocabParallelEmbedding::forward",
            self.try_forward(ids, dtype),
        )
    }
}

/// Numbers of a vocabulary of which each rank has a part.
pub(super) struct OwnNumbers {
    /// The numbers in this rank's part, -1 for all others.
    pub own: Tensor<1, Int>,
    /// Which numbers no rank has.
    pub nowhere: Tensor<1, burn_core::tensor::Bool>,
}

/// `numbers` of a type in which smaller ones can be subtracted.
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

/// The numbers in this rank's part of `len`.
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
