//! Context of a layer's GEMMs in addition to their operands: it affects when and how often operands
//! are quantized, never the results.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn_core::backend::{self, DispatchTensor, DispatchTensorKind};
use burn_core::tensor::{FloatDType, Tensor};
use nvfp4_formats::StoredForm;

use super::collective::ReduceDtype;
use super::probe::Probe;
use super::sharding::{GatheredWeight, LinearSharding};
use super::{BackwardSource, LinearSpec, OperandSpec};

/// State that a layer carries from one call to the next. The default is empty.
#[derive(Clone, Debug, Default)]
pub struct LinearContext {
    pub(crate) weight: Option<CachedWeight>,
    /// Sink for samples of the operands, while telemetry is on.
    pub(crate) probe: Option<Probe>,
    /// Operands that GEMMs are assumed to read, for the choice of operand forms; `None` for what
    /// the device's GEMMs read.
    pub(crate) reads: Option<StoredForm>,
    /// Ranks that the layer is sharded over, if any.
    pub(crate) sharding: Option<LinearSharding>,
    /// Ranks that the weight is sharded over, if the weight passed to the layer is this rank's
    /// shard.
    pub(crate) gathered: Option<GatheredWeight>,
    /// Dtype in which ranks exchange the gradient of the weight, if it is that of one parameter:
    /// the layer returns the gradient in this dtype, too.
    pub(crate) reduce_dtype: ReduceDtype,
}

impl LinearContext {
    /// Returns the form that the layer's GEMMs are assumed to read; `None` for what those of the
    /// device read.
    pub(super) fn assumed_reads(&self) -> Option<StoredForm> {
        match &self.probe {
            // Telemetry samples rows of codes and scales.
            Some(_) => Some(StoredForm::Rows),
            None => self.reads,
        }
    }

    /// Removes the weight cache from the context.
    pub(crate) fn without_weight(self) -> Self {
        Self {
            weight: None,
            ..self
        }
    }
}

/// Identity of a weight's value: that of the tensor, or of the tensors that it was concatenated
/// from, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightIdentity(Vec<TensorIdentity>);

impl WeightIdentity {
    /// Returns the identity of the weight that consists of `parts`; `None` if one of them has no
    /// known identity.
    pub(crate) fn of<'a, const D: usize>(
        parts: impl IntoIterator<Item = &'a Tensor<D>>,
    ) -> Option<Self> {
        let of = |part: &Tensor<D>| TensorIdentity::of(&part.clone().into_dispatch());
        let parts: Option<Vec<_>> = parts.into_iter().map(of).collect();
        parts.map(Self)
    }

    /// Returns the node of the weight, if it is one tensor.
    pub(crate) fn node(&self) -> Option<u64> {
        match self.0[..] {
            [TensorIdentity::Node(node)] => Some(node),
            _ => None,
        }
    }
}

/// Property that a tensor keeps as long as its value does not change, and that no other tensor has.
#[derive(Debug, Clone)]
pub(crate) enum TensorIdentity {
    /// Autodiff node. A node is created with a tensor, has an id that is never reused, and keeps
    /// its initial value: every optimizer step, load, cast and copy creates another node, in the
    /// same memory or not.
    Node(u64),
    /// Id from fusion, of a tensor without autodiff: it has the same properties.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    Fusion(burn_core::backend::fusion::custom::TensorId),
    /// Memory of a Flex tensor without autodiff. It is held here: as long as it has two owners,
    /// nothing writes to it, and no other tensor gets it.
    #[cfg(feature = "flex")]
    Memory(burn_flex::FlexTensor),
}

impl PartialEq for TensorIdentity {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Node(own), Self::Node(other)) => own == other,
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            (Self::Fusion(own), Self::Fusion(other)) => own == other,
            #[cfg(feature = "flex")]
            (Self::Memory(own), Self::Memory(other)) => {
                Arc::ptr_eq(&own.data_arc(), &other.data_arc())
                    && own.layout() == other.layout()
                    && own.dtype() == other.dtype()
            }
            #[allow(unreachable_patterns, reason = "a build may have one kind")]
            _ => false,
        }
    }
}

impl Eq for TensorIdentity {}

impl TensorIdentity {
    /// Returns the identity of `tensor`, of floats or of booleans, if its backend has kernels in
    /// this crate. To fusion, a clone on another thread is another tensor.
    pub(crate) fn of(tensor: &DispatchTensor) -> Option<Self> {
        Self::of_kind(&tensor.kind)
    }

    fn of_kind(kind: &DispatchTensorKind) -> Option<Self> {
        #[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
        use backend::BackendTensor::{Autodiff, Bool, Float};
        match kind {
            DispatchTensorKind::Autodiff(kind) => Self::of_kind(kind),
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(tensor) => match tensor {
                Autodiff(tensor) => Some(Self::Node(tensor.id().value)),
                Float(tensor) | Bool(tensor) => Some(Self::Memory(tensor.clone())),
                _ => None,
            },
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            DispatchTensorKind::Cube(tensor) => match tensor {
                Autodiff(tensor) => Some(Self::Node(tensor.id().value)),
                Float(tensor) | Bool(tensor) => Some(Self::Fusion(tensor.id)),
                _ => None,
            },
            #[allow(unreachable_patterns, reason = "a build may have no other kind")]
            _ => None,
        }
    }

    /// Returns true if no other owner has the memory, if it is held here.
    pub(crate) fn is_last_owner(&self) -> bool {
        match self {
            #[cfg(feature = "flex")]
            Self::Memory(tensor) => tensor.is_unique(),
            _ => false,
        }
    }
}

/// Cache of a weight's quantized operands, and the weight's identity in it.
#[derive(Clone, Debug)]
pub(crate) struct CachedWeight {
    pub(crate) cache: WeightCache,
    pub(crate) identity: WeightIdentity,
}

impl CachedWeight {
    /// Returns the slot for the operands of the weight by `spec`, on `device` (its text), with
    /// activations of dtype `dtype`.
    pub(crate) fn slot(&self, device: String, dtype: FloatDType, spec: &LinearSpec) -> Slot<'_> {
        Slot {
            cache: &self.cache,
            device,
            key: WeightKey {
                identity: self.identity.clone(),
                dtype,
                fprop: spec.fprop_w,
                dgrad: Some(spec.dgrad_w).filter(OperandSpec::is_deterministic),
                source: spec.source,
            },
        }
    }
}

/// Cache of the quantized operands of a layer's weight, valid as long as the weight is the same
/// tensor: a weight is quantized once for all micro-batches of gradient accumulation, and once for
/// all batches of a validation.
///
/// The operands of the last weight are dropped when the next one is quantized: the first training
/// forward after a validation releases the weight of the validation, before an optimizer overwrites
/// it. There is one entry per device, so that replicas of data-parallel training, which share the
/// cache like the rest of a layer's state, do not evict each other's entries.
#[derive(Clone, Default)]
pub(crate) struct WeightCache {
    entries: Arc<Mutex<Vec<Entry>>>,
}

/// Weight of cached operands, and its quantization.
#[derive(Debug, Clone, PartialEq)]
struct WeightKey {
    identity: WeightIdentity,
    /// Dtype of the activations, and of operands in high precision.
    dtype: FloatDType,
    fprop: OperandSpec,
    /// `None` for an operand with random bits: it is not cached, and its draw, which differs in
    /// each forward, must not prevent a cache hit for the forward's operand.
    dgrad: Option<OperandSpec>,
    source: BackwardSource,
}

struct Entry {
    key: WeightKey,
    /// Device (`B::Device`) as text: devices of different backends have different types.
    device: String,
    /// Operands, of a type that only the backend knows.
    operands: Box<dyn Any + Send>,
}

/// Slot of one weight's operands.
pub(crate) struct Slot<'a> {
    cache: &'a WeightCache,
    device: String,
    key: WeightKey,
}

impl Slot<'_> {
    /// Returns the cached operands.
    pub(crate) fn get<T: Clone + 'static>(&self) -> Option<T> {
        let entries = self.cache.entries.lock();
        let entries = entries.expect("no panic while it is held");
        let entry = entries
            .iter()
            .find(|entry| entry.device == self.device && entry.key == self.key)?;
        entry.operands.downcast_ref().cloned()
    }

    /// Caches `operands`, and drops the previous ones of the device.
    pub(crate) fn put<T: Send + 'static>(self, operands: T) {
        let Self { cache, device, key } = self;
        let mut entries = cache.entries.lock().expect("no panic while it is held");
        entries.retain(|entry| entry.device != device);
        entries.push(Entry {
            key,
            device,
            operands: Box::new(operands),
        });
    }
}

impl WeightCache {
    /// Drops all entries.
    pub(crate) fn clear(&self) {
        self.entries
            .lock()
            .expect("no panic while it is held")
            .clear();
    }
}

impl fmt::Debug for WeightCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.lock().map_or(0, |entries| entries.len());
        write!(f, "WeightCache({entries} weights)")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use burn_core::tensor::{DType, Device, Distribution, Tensor, TensorData};

    use super::*;
    use crate::experts::{ExpertOffsets, grouped_linear_unchecked};
    use crate::functions::linear_unchecked;
    use crate::{Nvfp4Recipe, RngState};

    /// Returns the device that `NVFP4_TEST_DEVICE` names, the dtype of its activations (CubeCL's
    /// CPU runtime has no bf16 arithmetic), and true if it is a GPU.
    pub(crate) fn device() -> (Device, DType, bool) {
        match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
            #[cfg(feature = "cpu")]
            Ok("cpu") => (
                nvfp4_test_support::cpu_runtime(Device::cpu),
                DType::F32,
                false,
            ),
            #[cfg(feature = "cuda")]
            Ok("cuda") => (Device::cuda(0), DType::BF16, true),
            #[cfg(feature = "flex")]
            Ok("flex") | Err(_) => (Device::flex(), DType::BF16, false),
            other => panic!("NVFP4_TEST_DEVICE={other:?}: not a device of this build"),
        }
    }

    /// Input, weight and output gradient of a layer.
    struct Case {
        x: Tensor<2>,
        w: Tensor<2>,
        dy: Tensor<2>,
    }

    impl Case {
        fn new(tokens: usize, d_in: usize, d_out: usize, device: &Device, dtype: DType) -> Self {
            let device = device.clone().autodiff();
            let random = |rows, cols| {
                let normal = Distribution::Normal(0.0, 1.0);
                let tensor = Tensor::<2>::random([rows, cols], normal, (&device, DType::F32));
                tensor.cast(dtype).detach()
            };
            Self {
                x: random(tokens, d_in).require_grad(),
                w: random(d_in, d_out).require_grad(),
                dy: random(tokens, d_out),
            }
        }

        /// Returns `y`, `dx` and `dw` of the layer with `spec`.
        fn run(&self, spec: LinearSpec, reads: Option<StoredForm>) -> [Tensor<2>; 3] {
            let context = LinearContext {
                reads,
                ..LinearContext::default()
            };
            let y = linear_unchecked(self.x.clone(), self.w.clone(), None, spec, context);
            let sum = (y.clone() * self.dy.clone()).sum_dim(1).sum();
            let grads = sum.backward();
            let [dx, dw] = [&self.x, &self.w].map(|leaf| leaf.grad(&grads).expect("a gradient"));
            [y.inner(), dx, dw]
        }
    }

    /// Returns the spec of a preset, with some draws.
    pub(crate) fn spec(preset: &str) -> LinearSpec {
        let recipe = Nvfp4Recipe::preset(preset).expect("a preset");
        recipe.spec(&RngState {
            seed: 1,
            layer: 2,
            offset: 3,
            rht_signs: 0x1234,
        })
    }

    /// The form of the operands, chosen or default, changes no bit of outputs and gradients, even
    /// if the tokens fill no block of 16 or no tile of 64.
    fn the_form_changes_no_bit(preset: &str) {
        let (device, dtype, gpu) = device();
        let shapes: &[[usize; 3]] = match gpu {
            // For the kernel that decodes, and for those for smaller M.
            true => &[[4096, 4096, 4096], [8200, 2048, 4096], [72, 128, 256]],
            false => &[[72, 64, 32], [24, 48, 80]],
        };
        let spec = spec(preset);
        for &[tokens, d_in, d_out] in shapes {
            let case = Case::new(tokens, d_in, d_out, &device, dtype);
            let bytes = |reads| (case.run(spec, reads)).map(|x| x.into_data().as_bytes().to_vec());
            let expected = bytes(Some(StoredForm::Rows));
            for reads in [
                Some(StoredForm::Bf16Unscaled),
                Some(StoredForm::Tiles),
                None,
            ] {
                let same = bytes(reads) == expected;
                assert!(same, "{reads:?}, {tokens} x {d_in} x {d_out}");
            }
        }
    }

    /// Version of this test for experts, including an empty one and odd sizes.
    fn the_form_of_experts_changes_no_bit(preset: &str) {
        let (device, dtype, _) = device();
        let (counts, [d_in, d_out]) = ([0, 5, 130, 0, 37], [48, 32]);
        let (tokens, experts) = (counts.iter().sum::<usize>() + 2, counts.len());
        let case = Case::new(tokens, d_in, d_out, &device, dtype);
        let normal = Distribution::Normal(0.0, 1.0);
        let autodiff = device.clone().autodiff();
        let w = Tensor::<3>::random([experts, d_in, d_out], normal, (&autodiff, DType::F32));
        let w = w.cast(dtype).detach().require_grad();
        let experts = ExpertOffsets::of_counts(&counts, &autodiff);
        let spec = spec(preset);
        let bytes = |reads| {
            let context = LinearContext {
                reads,
                ..LinearContext::default()
            };
            let x = case.x.clone();
            let y = grouped_linear_unchecked(x, w.clone(), None, &experts, spec, context);
            let sum = (y.clone() * case.dy.clone()).sum_dim(1).sum();
            let grads = sum.backward();
            let bytes = |data: TensorData| data.as_bytes().to_vec();
            [
                bytes(y.inner().into_data()),
                bytes(case.x.grad(&grads).expect("a gradient").into_data()),
                bytes(w.grad(&grads).expect("a gradient").into_data()),
            ]
        };
        let expected = bytes(Some(StoredForm::Rows));
        for reads in [
            Some(StoredForm::Bf16Unscaled),
            Some(StoredForm::Tiles),
            None,
        ] {
            assert!(bytes(reads) == expected, "{reads:?}");
        }
    }

    /// A weight that was quantized to tiles before telemetry began is sampled like one in rows.
    #[test]
    fn telemetry_reads_cached_tiles() {
        let (device, dtype, _) = device();
        let case = Case::new(72, 48, 80, &device, dtype);
        let sampled = |reads| {
            let weight = CachedWeight {
                cache: WeightCache::default(),
                identity: WeightIdentity::of([&case.w]).expect("a tracked weight"),
            };
            let run = |probe: Option<Probe>| {
                let context = LinearContext {
                    weight: Some(weight.clone()),
                    reads,
                    probe,
                    ..LinearContext::default()
                };
                linear_unchecked(
                    case.x.clone(),
                    case.w.clone(),
                    None,
                    spec("nvidia"),
                    context,
                )
            };
            run(None);
            let probe = Probe::default();
            run(Some(probe.clone()));
            let samples = probe.read();
            assert!(!samples.is_empty());
            let operands = samples
                .into_iter()
                .map(|sample| (sample.name, sample.scales));
            operands.collect::<Vec<_>>()
        };
        let expected = sampled(Some(StoredForm::Rows));
        assert_eq!(sampled(Some(StoredForm::Tiles)), expected);
    }

    /// Presets whose kernels CubeCL's CPU runtime compiles in each run, because they have all kinds
    /// of quantizers: it spends ten seconds on a preset. Others are for GPUs, and for `--full`.
    const COMPILED_IN_BRIEF: [&str; 4] = ["nvidia", "quartet2", "per_token", "mxfp8"];

    /// True if this run omits a preset.
    fn is_omitted(preset: &str) -> bool {
        std::env::var("NVFP4_TEST_DEVICE").as_deref() == Ok("cpu")
            && !nvfp4_test_support::is_full()
            && !COMPILED_IN_BRIEF.contains(&preset)
    }

    /// Creates a test per preset, and one that checks that no preset is missing.
    macro_rules! presets {
        ($($preset:ident),*) => {
            mod the_form_changes_no_bit {
                $(#[test]
                fn $preset() {
                    if super::is_omitted(stringify!($preset)) {
                        nvfp4_test_support::skip!(OnlyFull);
                    }
                    super::the_form_changes_no_bit(stringify!($preset));
                    super::the_form_of_experts_changes_no_bit(stringify!($preset));
                })*

                #[test]
                fn every_preset_is_here() {
                    let here = [$(stringify!($preset)),*];
                    assert!(super::Nvfp4Recipe::preset_names().eq(here));
                }
            }
        };
    }

    presets!(
        nvidia,
        nvidia_4over6,
        nvidia_headroom,
        quartet2,
        per_token,
        fwd_nvfp4_bwd_mxfp8,
        fwd_nvfp4_bwd_mxfp8_dequantized,
        fwd_nvfp4_bwd_bf16,
        weight_only_qat,
        mxfp8,
        mxfp4,
        bf16
    );
}
