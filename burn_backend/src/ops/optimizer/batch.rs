//! Batches of parameters and gradients for one operation.
#![allow(
    clippy::large_enum_variant,
    reason = "a batch moves once a step, and extension types hold no Box"
)]
#![allow(
    missing_docs,
    reason = "entries of a list, in the generated metadata too"
)]

use burn_core as burn;

use burn_core::backend::{Backend, ExtensionType, tensor::FloatTensor};

use super::super::MaybeTensor;

/// Maximum number of parameters per batch.
pub const BATCH: usize = 8;

/// Up to [`BATCH`] gradients, in the first entries.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct GradientBatch<B: Backend> {
    #[extension_type]
    pub g0: MaybeTensor<B>,
    #[extension_type]
    pub g1: MaybeTensor<B>,
    #[extension_type]
    pub g2: MaybeTensor<B>,
    #[extension_type]
    pub g3: MaybeTensor<B>,
    #[extension_type]
    pub g4: MaybeTensor<B>,
    #[extension_type]
    pub g5: MaybeTensor<B>,
    #[extension_type]
    pub g6: MaybeTensor<B>,
    #[extension_type]
    pub g7: MaybeTensor<B>,
}

impl<B: Backend> GradientBatch<B> {
    fn from_entries(entries: [MaybeTensor<B>; BATCH]) -> Self {
        let [g0, g1, g2, g3, g4, g5, g6, g7] = entries;
        Self {
            g0,
            g1,
            g2,
            g3,
            g4,
            g5,
            g6,
            g7,
        }
    }

    fn into_entries(self) -> [MaybeTensor<B>; BATCH] {
        [
            self.g0, self.g1, self.g2, self.g3, self.g4, self.g5, self.g6, self.g7,
        ]
    }

    /// Creates a batch of `gradients`, at most [`BATCH`].
    pub fn new(gradients: impl IntoIterator<Item = FloatTensor<B>>) -> Self {
        let mut gradients = gradients.into_iter();
        Self::from_entries(std::array::from_fn(|_| gradients.next().into()))
    }

    /// Returns the gradients.
    pub fn into_vec(self) -> Vec<FloatTensor<B>> {
        let entries = self.into_entries().into_iter();
        entries.filter_map(MaybeTensor::into_option).collect()
    }

    /// Maps each gradient by `f`.
    pub(super) fn map<C: Backend>(
        self,
        f: impl Fn(FloatTensor<B>) -> FloatTensor<C>,
    ) -> GradientBatch<C> {
        GradientBatch::from_entries(self.into_entries().map(|entry| entry.map(&f)))
    }
}

#[cfg(feature = "cubecl-backend")]
impl GradientBatchMetadata {
    /// Returns the entries that are present.
    pub(super) fn present(
        &self,
    ) -> impl Iterator<Item = &burn_core::backend::fusion::custom::TensorSpec> {
        use super::super::MaybeTensorMetadata;
        let entries = [
            &self.g0, &self.g1, &self.g2, &self.g3, &self.g4, &self.g5, &self.g6, &self.g7,
        ];
        entries.into_iter().filter_map(|entry| match entry {
            MaybeTensorMetadata::Absent => None,
            MaybeTensorMetadata::Present(spec) => Some(spec),
        })
    }
}

/// Parameter with its optimizer state.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct ParameterState<B: Backend> {
    /// Parameter in `f32`.
    pub weight: FloatTensor<B>,
    /// First moment, the running mean of the gradient: `f32`, or `bf16` with stochastic rounding.
    pub first: FloatTensor<B>,
    /// Second moment, the running mean of the squared gradient, of the same dtype.
    pub second: FloatTensor<B>,
    /// Parameter in another dtype.
    #[extension_type]
    pub copy: MaybeTensor<B>,
    /// Weight decay.
    pub decay: f32,
    /// Key of the random bits for rounding moments.
    pub key: [u32; 2],
}

/// Parameter with its state, or none.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum MaybeState<B: Backend> {
    /// No parameter.
    Absent,
    /// Parameter with its state.
    Present(#[extension_type] ParameterState<B>),
}

/// Up to [`BATCH`] parameters, in the first entries.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct AdamWBatch<B: Backend> {
    #[extension_type]
    pub p0: MaybeState<B>,
    #[extension_type]
    pub p1: MaybeState<B>,
    #[extension_type]
    pub p2: MaybeState<B>,
    #[extension_type]
    pub p3: MaybeState<B>,
    #[extension_type]
    pub p4: MaybeState<B>,
    #[extension_type]
    pub p5: MaybeState<B>,
    #[extension_type]
    pub p6: MaybeState<B>,
    #[extension_type]
    pub p7: MaybeState<B>,
    /// Amax values of the new parameters, `f32[BATCH]`; absent before the step.
    #[extension_type]
    pub amax: MaybeTensor<B>,
}

impl<B: Backend> AdamWBatch<B> {
    /// Creates a batch of `parameters`, at most [`BATCH`].
    pub fn new(
        parameters: impl IntoIterator<Item = ParameterState<B>>,
        amax: Option<FloatTensor<B>>,
    ) -> Self {
        let mut parameters = parameters.into_iter();
        let mut next = || match parameters.next() {
            Some(parameter) => MaybeState::Present(parameter),
            None => MaybeState::Absent,
        };
        Self {
            p0: next(),
            p1: next(),
            p2: next(),
            p3: next(),
            p4: next(),
            p5: next(),
            p6: next(),
            p7: next(),
            amax: amax.into(),
        }
    }

    /// Returns the parameters and the amax values.
    pub fn into_parts(self) -> (Vec<ParameterState<B>>, Option<FloatTensor<B>>) {
        let entries = [
            self.p0, self.p1, self.p2, self.p3, self.p4, self.p5, self.p6, self.p7,
        ];
        let parameters = entries.into_iter().filter_map(|entry| match entry {
            MaybeState::Absent => None,
            MaybeState::Present(parameter) => Some(parameter),
        });
        (parameters.collect(), self.amax.into_option())
    }

    /// Maps each tensor by `f`.
    pub(super) fn map<C: Backend>(
        self,
        f: impl Fn(FloatTensor<B>) -> FloatTensor<C>,
    ) -> AdamWBatch<C> {
        let (parameters, amax) = self.into_parts();
        let parameters = parameters.into_iter().map(|parameter| ParameterState {
            weight: f(parameter.weight),
            first: f(parameter.first),
            second: f(parameter.second),
            copy: parameter.copy.map(&f),
            decay: parameter.decay,
            key: parameter.key,
        });
        AdamWBatch::new(parameters.collect::<Vec<_>>(), amax.map(&f))
    }
}
