//! AdamW and the norm of gradients, as a separate extension trait.
//!
//! As in [`ops`](super), arguments are not checked here: [`optim`](crate::optim) checks them before
//! anything is queued. Parameters are passed in batches of [`BATCH`], because arguments of the
//! trait cannot be lists.

mod batch;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::checkpoint::strategy::CheckpointStrategy,
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use nvfp4_formats::reference::AdamWParams;

pub use batch::{AdamWBatch, BATCH, GradientBatch, MaybeState, ParameterState};
#[cfg(feature = "cubecl-backend")]
pub use batch::{
    AdamWBatchMetadata, GradientBatchMetadata, MaybeStateMetadata, ParameterStateMetadata,
};

use super::MaybeTensor;
use super::collective::Link;
use super::known_amax::{self, GroupAmax, KnownAmax};

/// Options of an AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Constants.
    pub params: AdamWParams,
    /// True to compute the amax values of the new parameters.
    pub amax: bool,
}

/// Optimizer on the primitives of a backend. Its results are constants for `Autodiff`.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait OptimizerOps: Backend {
    /// Returns the sums of squares of the gradients' chunks
    /// ([`reference::square_sums`](nvfp4_formats::reference::square_sums)), concatenated over the
    /// gradients: `f32[chunks]`.
    #[fusion(meta = meta::square_sums)]
    fn nvfp4_square_sums(#[extension_type] gradients: GradientBatch<Self>) -> FloatTensor<Self>;

    /// Computes the norm of all gradients and the factor that scales it down to `max_norm` if it is
    /// larger, `f32[2]`, from the sums of [`nvfp4_square_sums`](Self::nvfp4_square_sums).
    #[fusion(meta = meta::clip_factor)]
    fn nvfp4_clip_factor(sums: FloatTensor<Self>, max_norm: f32) -> FloatTensor<Self>;

    /// Writes `words` to the buffer of `out`, `u32[4]`, or to a new buffer if others hold that one
    /// too. A kernel writes them, after all work queued before.
    #[fusion(meta = meta::set_words)]
    fn nvfp4_set_words(out: IntTensor<Self>, words: [u32; 4]) -> IntTensor<Self>;

    /// Takes a step of AdamW ([`reference::adamw`](nvfp4_formats::reference::adamw)). The result
    /// has the buffers of `batch`; buffers that others hold too are copied first.
    ///
    /// If requested, amax values are written to the buffer in `batch`, in place even if other
    /// owners exist: a captured step reads where the step before it wrote. A batch without that
    /// buffer gets a new one.
    ///
    /// `schedule` is `u32[4]`, the words of
    /// [`AdamWSchedule`](nvfp4_formats::reference::AdamWSchedule); `factor` is the result of
    /// [`nvfp4_clip_factor`](Self::nvfp4_clip_factor).
    #[fusion(meta = meta::adamw)]
    fn nvfp4_adamw(
        #[extension_type] gradients: GradientBatch<Self>,
        #[extension_type] batch: AdamWBatch<Self>,
        schedule: IntTensor<Self>,
        #[extension_type] factor: MaybeTensor<Self>,
        options: AdamWOptions,
    ) -> AdamWBatch<Self>;

    /// Registers entry `entry` of `maxima` as the amax of the weight with the autodiff node `node`.
    #[fusion(default)]
    fn nvfp4_remember_amax(
        maxima: FloatTensor<Self>,
        entry: usize,
        node: u64,
    ) -> FloatTensor<Self> {
        let amax = KnownAmax {
            maxima: maxima.clone(),
            entry,
            of_group: None,
        };
        known_amax::remember::<Self>(node, amax);
        maxima
    }

    /// Registers entry `entry` of `maxima` as the amax over all ranks of `group` for the weight
    /// with the autodiff node `node`: a shard whose own amax is known.
    #[fusion(default)]
    fn nvfp4_remember_group_amax(
        maxima: FloatTensor<Self>,
        entry: usize,
        node: u64,
        group: Link,
    ) -> FloatTensor<Self> {
        let amax = GroupAmax {
            group,
            maxima: maxima.clone(),
            entry,
        };
        known_amax::remember_of_group::<Self>(node, amax);
        maxima
    }

    /// Copies the elements of `from` to the buffer of `out`, in place even if other owners exist: a
    /// captured step reads where the step before it wrote. Both are `f32` of one shape. Flex, which
    /// has no graphs, returns `from`.
    #[fusion(meta = meta::write_maxima)]
    fn nvfp4_write_maxima(out: FloatTensor<Self>, from: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::{DType, Shape};
    use nvfp4_formats::reference::SQUARE_CHUNK;

    use super::super::MaybeTensorMetadata;
    use super::{AdamWBatchMetadata, AdamWOptions, BATCH, GradientBatchMetadata};

    pub(super) fn square_sums(gradients: &GradientBatchMetadata) -> TensorSpec {
        let chunks = |gradient: &TensorSpec| gradient.shape.num_elements().div_ceil(SQUARE_CHUNK);
        let count = gradients.present().map(chunks).sum();
        TensorSpec::new(Shape::new([count]), DType::F32)
    }

    pub(super) fn clip_factor(_sums: &TensorSpec, _max_norm: &f32) -> TensorSpec {
        TensorSpec::new(Shape::new([2]), DType::F32)
    }

    pub(super) fn write_maxima(out: &TensorSpec, _from: &TensorSpec) -> TensorSpec {
        out.clone()
    }

    pub(super) fn set_words(out: &TensorSpec, _words: &[u32; 4]) -> TensorSpec {
        out.clone()
    }

    pub(super) fn adamw(
        _gradients: &GradientBatchMetadata,
        batch: &AdamWBatchMetadata,
        _schedule: &TensorSpec,
        _factor: &MaybeTensorMetadata,
        options: &AdamWOptions,
    ) -> AdamWBatchMetadata {
        let mut made = batch.clone();
        made.amax = match options.amax {
            true => MaybeTensorMetadata::Present(TensorSpec::new(Shape::new([BATCH]), DType::F32)),
            false => MaybeTensorMetadata::Absent,
        };
        made
    }
}

impl<B: OptimizerOps, C: CheckpointStrategy> OptimizerOps for Autodiff<B, C> {
    fn nvfp4_square_sums(gradients: GradientBatch<Self>) -> FloatTensor<Self> {
        let gradients = gradients.map(|gradient| gradient.into_primitive());
        Self::from_inner(B::nvfp4_square_sums(gradients))
    }

    fn nvfp4_clip_factor(sums: FloatTensor<Self>, max_norm: f32) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_clip_factor(sums.into_primitive(), max_norm))
    }

    fn nvfp4_set_words(out: IntTensor<Self>, words: [u32; 4]) -> IntTensor<Self> {
        B::nvfp4_set_words(out, words)
    }

    fn nvfp4_remember_amax(
        maxima: FloatTensor<Self>,
        entry: usize,
        node: u64,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_remember_amax(maxima.into_primitive(), entry, node))
    }

    fn nvfp4_remember_group_amax(
        maxima: FloatTensor<Self>,
        entry: usize,
        node: u64,
        group: Link,
    ) -> FloatTensor<Self> {
        let maxima = maxima.into_primitive();
        Self::from_inner(B::nvfp4_remember_group_amax(maxima, entry, node, group))
    }

    fn nvfp4_write_maxima(out: FloatTensor<Self>, from: FloatTensor<Self>) -> FloatTensor<Self> {
        let [out, from] = [out, from].map(|tensor| tensor.into_primitive());
        Self::from_inner(B::nvfp4_write_maxima(out, from))
    }

    fn nvfp4_adamw(
        gradients: GradientBatch<Self>,
        batch: AdamWBatch<Self>,
        schedule: IntTensor<Self>,
        factor: MaybeTensor<Self>,
        options: AdamWOptions,
    ) -> AdamWBatch<Self> {
        let made = B::nvfp4_adamw(
            gradients.map(|tensor| tensor.into_primitive()),
            batch.map(|tensor| tensor.into_primitive()),
            schedule,
            factor.map(|tensor| tensor.into_primitive()),
            options,
        );
        made.map(Self::from_inner)
    }
}
