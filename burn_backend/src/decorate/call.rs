//! State of one call of a decorated layer, and state shared by all calls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use burn_core::backend::fusion::custom::{TensorId, TensorIr};
use burn_core::tensor::Shape;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

use super::counters::Counters;
use crate::nn::Observer;
use crate::ops::inference::STATIC;
use crate::ops::linear::SavedForBackward;
use crate::ops::packed::Activations;
use crate::ops::{LinearContext, LinearSpec, MaybeTensor, OperandSpec, QuantizedMatrix};

/// Handling of a GEMM that [`Decorator`](super::Decorator) could not route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Error: the result of a missed GEMM is NaN, and the next use of the model panics.
    Strict,
    /// The GEMM runs in the dtype of its operands, and is counted.
    Lenient,
}

/// State shared by all layers of one decorated model.
#[derive(Debug)]
pub(super) struct Group {
    pub mode: Mode,
    /// Paths of the linear layers that are not decorated.
    pub left_alone: Vec<String>,
    failures: Mutex<Vec<String>>,
}

impl Group {
    pub fn new(mode: Mode, left_alone: Vec<String>) -> Self {
        Self {
            mode,
            left_alone,
            failures: Mutex::default(),
        }
    }

    pub fn failures(&self) -> Vec<String> {
        lock(&self.failures).clone()
    }

    /// Returns one message for all failures, if any.
    pub fn failure_message(&self) -> Option<String> {
        failure_message(&self.failures())
    }
}

/// Decorated layer, shared by all clones of its weight.
#[derive(Debug)]
pub(super) struct Layer {
    /// Path of the layer in the model.
    pub path: String,
    /// Shape of the weight, `[d_in, d_out]`.
    pub dims: [usize; 2],
    /// Number of matrices in a stacked weight, `[experts, d_in, d_out]`.
    pub experts: Option<usize>,
    pub group: Arc<Group>,
    pub counters: Counters,
}

impl Layer {
    /// Records a broken guarantee. `what` completes the sentence "layer `path`: …".
    pub fn fail(&self, what: &str) {
        /// Maximum number of recorded failures; more would add no information.
        const LIMIT: usize = 32;
        let mut failures = lock(&self.group.failures);
        if failures.len() < LIMIT {
            failures.push(format!("layer `{}`: {what}", self.path));
        }
    }

    pub fn is_strict(&self) -> bool {
        self.group.mode == Mode::Strict
    }
}

/// Joins `failures` into one message, if any.
pub(super) fn failure_message(failures: &[String]) -> Option<String> {
    (!failures.is_empty()).then(|| failures.join("; "))
}

/// Call of a decorated layer: one call of `Param::val` on its weight, at most one forward GEMM, and
/// the two gradient GEMMs of that.
#[derive(Debug)]
pub(super) struct Call {
    pub id: u64,
    pub layer: Arc<Layer>,
    /// Shape of the weight, `[d_in, d_out]`.
    pub dims: [usize; 2],
    pub spec: LinearSpec,
    /// True if a backward may follow.
    pub training: bool,
    /// True if the weight needs a gradient.
    pub weight_tracked: bool,
    pub context: LinearContext,
    /// Input of the GEMM, if the weight is packed.
    pub packed: Option<PackedCall>,
    state: Mutex<CallState>,
}

/// Input of the GEMM of a call with a packed weight.
#[derive(Debug)]
pub(super) struct PackedCall {
    pub activations: Activations,
    /// Observer of the input, during a calibration.
    pub observer: Option<Observer>,
}

/// State of a call while its operations are registered and run.
#[derive(Debug, Default)]
pub(super) struct CallState {
    /// Weight, from its mark until its GEMM.
    pub weight: Option<CubeTensor>,
    /// Packed weight, and the static global scale of the input, if any.
    pub packed: Option<(QuantizedMatrix<CubeBackend>, MaybeTensor<CubeBackend>)>,
    pub bias: BiasState,
    /// True if the bias needs a gradient.
    pub bias_tracked: bool,
    /// True once the forward GEMM is registered.
    pub gemm: bool,
    /// True once the forward GEMM has run in NVFP4.
    pub forward: bool,
    /// True if an operation other than the addition of the bias reads the GEMM's result.
    pub output_shared: bool,
    /// Output gradient that dgrad was registered with.
    pub dy: Option<TensorId>,
    /// Operands saved for the backward.
    pub saved: Option<SavedForBackward<CubeBackend>>,
    pub weight_grad: Option<CubeTensor>,
    pub bias_grad: Option<CubeTensor>,
    /// GEMM with which Burn computes the weight's gradient.
    pub grad: Option<Arc<WeightGradGemm>>,
}

/// Bias of a call.
#[derive(Debug, Default)]
pub(super) enum BiasState {
    /// No bias, or its mark is not registered.
    #[default]
    Absent,
    /// The mark is registered and reads this tensor.
    Announced(Box<TensorIr>),
    /// The mark has run.
    Known(Box<CubeTensor>),
    /// The GEMM has added the bias.
    Added,
}

/// GEMM with which Burn computes the gradient of a weight.
#[derive(Debug)]
pub(super) struct WeightGradGemm {
    /// Right operand: the gradient of a forward GEMM's result.
    pub rhs: TensorId,
    /// Saved right operand, if it must be kept until the layer is known.
    pub dy: Mutex<Option<CubeTensor>>,
}

impl Call {
    pub fn new(
        layer: Arc<Layer>,
        dims: [usize; 2],
        (spec, context): (LinearSpec, LinearContext),
        training: bool,
        weight_tracked: bool,
    ) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            layer,
            dims,
            spec,
            training,
            weight_tracked,
            context,
            packed: None,
            state: Mutex::default(),
        }
    }

    /// Creates a call of a layer with a packed weight.
    pub fn of_packed(layer: Arc<Layer>, packed: PackedCall) -> Self {
        let spec = LinearSpec {
            fprop_x: packed.activations.spec(),
            fprop_w: OperandSpec::Quantized(STATIC),
            ..LinearSpec::high_precision()
        };
        let (dims, context) = (layer.dims, LinearContext::default());
        Self {
            packed: Some(packed),
            ..Self::new(layer, dims, (spec, context), false, false)
        }
    }

    pub fn state(&self) -> MutexGuard<'_, CallState> {
        lock(&self.state)
    }

    pub fn fail(&self, what: &str) {
        self.layer.fail(what);
    }

    /// Returns true if `shape` is that of the weight, or of the transposed weight. Leading axes of
    /// 1 are ignored.
    pub fn is_weight(&self, shape: &Shape, transposed: bool) -> bool {
        let [d_in, d_out] = self.dims;
        let matrix = if transposed {
            [d_out, d_in]
        } else {
            [d_in, d_out]
        };
        self.is_stack(shape, matrix)
    }

    /// Returns true if `shape` is `matrix`, or for a stacked weight a stack of `matrix` with one
    /// per expert.
    pub fn is_stack(&self, shape: &Shape, [rows, cols]: [usize; 2]) -> bool {
        let expected = [self.layer.experts.unwrap_or(1), rows, cols];
        let elements: usize = expected.iter().product();
        let rank = shape.num_dims();
        let skipped = usize::from(self.layer.experts.is_none());
        let own = &expected[skipped..];
        rank >= own.len()
            && shape.num_elements() == elements
            && (0..own.len()).all(|axis| shape[rank - own.len() + axis] == own[axis])
    }
}

/// Call as an argument of an operation.
#[derive(Clone, Debug)]
pub struct CallRef(pub(super) Arc<Call>);

/// Locks `mutex`, even if it is poisoned: the data stays consistent after a panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
