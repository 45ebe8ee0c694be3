//! Fuser that runs the GEMMs of decorated layers.
//!
//! Burn's fusion cuts a stream into blocks, offers every operation of a block to every registered
//! fuser, and selects the fuser with the best score. [`BlockFuser`] claims every block entirely, at
//! the highest score, so that no other fuser gets a GEMM and no GEMM runs on its own. Blocks that
//! are claimed entirely can always be ordered, because Burn keeps them free of cycles. If a fuser
//! left the end of a block, Burn would gather the ends of several blocks into one more block; that
//! block can depend on a block that depends on it, and Burn then drops all fusion of the segment.
//!
//! Operations before, between and after the GEMMs go to Burn's own fusers, as they would without
//! this one. The [tracker](super::tracker) knows which GEMMs belong to decorated layers; all other
//! GEMMs run unfused.

use burn_core::backend::fusion::{
    FuserProperties, FuserStatus, NumOperations, OperationFuser,
    custom::{OperationIr, TensorId, TensorIr},
    stream::Context,
};
use burn_core::backend::ops::FloatTensorOps;
use burn_core::tensor::Shape;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider,
};
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use burn_cubecl_fusion::optim::elemwise::ElementWiseFuser;
use burn_cubecl_fusion::optim::reduce::{ReduceFuser, ReduceSettings};
use burn_cubecl_fusion::optim::reduce_broadcasted::ReduceBroadcastedFuser;
use burn_ir::{FloatOperationIr, MatmulOpIr, TensorStatus};

use super::call::{BiasState, Call, lock};
use super::counters::count;
use super::fill::{equal_offsets, placeholder};
use super::packed;
use super::tracker::{Role, tracker};
use super::wgrad::compute_weight_grad;
use crate::ops::linear::{LinearRequest, RequiresGrad};
use crate::ops::{LinearSpec, QuantizeSource, RowGroups, float_dtype};

/// Name of the optimization in Burn's registry and logs.
pub(super) const NAME: &str = "Nvfp4Gemms";

/// Creates the fusers.
pub(super) struct Provider;

impl OptimizationProvider for Provider {
    type Operation = GemmBlock;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(BlockFuser {
            device: device.clone(),
            operations: Vec::new(),
        })
    }
}

/// Collects the operations of a block.
#[derive(Clone)]
struct BlockFuser {
    device: CubeDevice,
    operations: Vec<OperationIr>,
}

impl OperationFuser<CubeOptimization> for BlockFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        self.operations.push(operation.clone());
    }

    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(GemmBlock::new(&self.device, self.operations.clone()))
    }

    fn reset(&mut self) {
        self.operations.clear();
    }

    /// Returns `Closed`: the fuser accepts every operation, and never makes Burn wait for more.
    fn status(&self) -> FuserStatus {
        FuserStatus::Closed
    }

    fn properties(&self) -> FuserProperties {
        FuserProperties {
            score: u64::MAX,
            ready: !self.operations.is_empty(),
        }
    }

    fn len(&self) -> usize {
        self.operations.len()
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Returns `operation` as a GEMM, if it is one.
fn gemm(operation: &OperationIr) -> Option<&MatmulOpIr> {
    match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(gemm)) => Some(gemm),
        _ => None,
    }
}

/// Operations of a block.
pub(super) struct GemmBlock {
    operations: Vec<OperationIr>,
    parts: Vec<Part>,
}

/// Execution of a part of the operations.
enum Part {
    /// A GEMM.
    Gemm(Box<MatmulOpIr>),
    /// An unfused operation.
    Plain,
    /// Several operations, fused into one kernel.
    Fused(CubeOptimization),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Self::Gemm(_) | Self::Plain => 1,
            Self::Fused(fused) => fused.num_ops_fused(),
        }
    }
}

impl GemmBlock {
    fn new(device: &CubeDevice, operations: Vec<OperationIr>) -> Self {
        let mut parts = Vec::new();
        for run in operations.split_inclusive(|operation| gemm(operation).is_some()) {
            let (last, others) = run.split_last().expect("a run is not empty");
            match gemm(last) {
                Some(gemm) => {
                    fuse(device, others, &mut parts);
                    parts.push(Part::Gemm(Box::new(gemm.clone())));
                }
                None => fuse(device, run, &mut parts),
            }
        }
        Self { operations, parts }
    }
}

/// Covers `operations` with the kernels of Burn's own fusers.
fn fuse(device: &CubeDevice, mut operations: &[OperationIr], parts: &mut Vec<Part>) {
    while !operations.is_empty() {
        let mut fusers: [Box<dyn OperationFuser<CubeOptimization>>; 3] = [
            Box::new(ElementWiseFuser::new(device.clone())),
            Box::new(ReduceFuser::new(device.clone(), ReduceSettings::Always)),
            Box::new(ReduceBroadcastedFuser::new(device.clone())),
        ];
        for operation in operations {
            for fuser in &mut fusers {
                fuser.fuse(operation);
            }
        }
        let best = fusers
            .iter_mut()
            .filter(|fuser| {
                let FuserProperties { score, ready } = fuser.properties();
                ready && score > 0 && !fuser.is_empty()
            })
            .max_by_key(|fuser| fuser.properties().score);
        let part = best.map_or(Part::Plain, |fuser| Part::Fused(fuser.finish()));
        operations = &operations[part.len()..];
        parts.push(part);
    }
}

impl FusedOperation for GemmBlock {
    const NAME: &'static str = NAME;

    type State = Vec<OperationIr>;

    fn num_ops_fused(&self) -> usize {
        self.operations.len()
    }

    fn max_relative_shape_id(&self) -> Option<usize> {
        self.parts
            .iter()
            .filter_map(|part| match part {
                Part::Fused(fused) => NumOperations::max_relative_shape_id(fused),
                Part::Gemm(_) | Part::Plain => None,
            })
            .max()
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        let mut index = 0;
        for part in &mut self.parts {
            let len = part.len();
            match part {
                Part::Gemm(gemm) => {
                    run_gemm(gemm, context, &|context| fallback(index).run(context));
                }
                Part::Plain => fallback(index).run(context),
                Part::Fused(fused) => fused.run(context, &|inner| fallback(index + inner)),
            }
            index += len;
        }
    }

    fn to_state(&self) -> Self::State {
        self.operations.clone()
    }

    fn from_state(device: &CubeDevice, state: Self::State) -> Self {
        Self::new(device, state)
    }
}

/// Tensors of one GEMM while it runs.
struct Operands<'a> {
    context: &'a mut Context<CubeFusionHandle>,
    lhs: TensorIr,
    rhs: TensorIr,
    out: TensorIr,
}

impl<'a> Operands<'a> {
    fn new(gemm: &MatmulOpIr, context: &'a mut Context<CubeFusionHandle>) -> Self {
        let global = |relative: TensorId| context.tensors[&relative].clone();
        let (lhs, rhs, out) = (
            global(gemm.lhs.id),
            global(gemm.rhs.id),
            global(gemm.out.id),
        );
        Self {
            context,
            lhs,
            rhs,
            out,
        }
    }

    /// Returns a tensor without releasing its handle: the queue frees unused tensors.
    fn get(&mut self, tensor: &TensorIr) -> CubeTensor {
        let mut tensor = tensor.clone();
        tensor.status = TensorStatus::ReadOnly;
        self.context
            .handles
            .get_float_tensor::<CubeBackend>(&tensor)
    }

    fn left(&mut self) -> CubeTensor {
        let lhs = self.lhs.clone();
        matrix(self.get(&lhs))
    }

    fn right(&mut self) -> CubeTensor {
        let rhs = self.rhs.clone();
        self.get(&rhs)
    }

    /// Stores the result, in the shape of the graph.
    fn finish(self, out: CubeTensor) {
        let out = CubeBackend::float_reshape(out, self.out.shape.clone());
        self.put(out);
    }

    fn put(self, out: CubeTensor) {
        self.context
            .handles
            .register_float_tensor::<CubeBackend>(&self.out.id, out);
    }
}

/// Flattens all leading axes to rows.
fn matrix(tensor: CubeTensor) -> CubeTensor {
    let shape = tensor.meta.shape();
    let rank = shape.num_dims();
    let cols = shape[rank - 1];
    let rows = shape.num_elements() / cols.max(1);
    if rank == 2 {
        tensor
    } else {
        CubeBackend::float_reshape(tensor, Shape::new([rows, cols]))
    }
}

/// Runs one GEMM in its role, or `plain` if it has no role or the role cannot be fulfilled.
fn run_gemm(
    gemm: &MatmulOpIr,
    context: &mut Context<CubeFusionHandle>,
    plain: &dyn Fn(&mut Context<CubeFusionHandle>),
) {
    let out = context.tensors[&gemm.out.id].id;
    let Some(role) = tracker().take(out) else {
        return plain(context);
    };
    let mut operands = Operands::new(gemm, context);
    match role {
        Role::Forward(call) => {
            let x = operands.left();
            match run_forward(&call, x, &mut operands) {
                Some(y) => operands.finish(y),
                None => {
                    // The weight's mark failed, so the GEMM has no weight either.
                    call.layer.counters.forward.missed();
                    plain(context);
                }
            }
        }
        Role::Dgrad(call) if call.packed.is_some() => {
            let dy = operands.left();
            match packed::input_grad(&call, dy) {
                Some(dx) => {
                    let LinearSpec {
                        dgrad_dy, fprop_w, ..
                    } = call.spec;
                    call.layer.counters.dgrad.routed([dgrad_dy, fprop_w]);
                    operands.finish(dx);
                }
                None => {
                    call.layer.counters.dgrad.missed();
                    plain(context);
                }
            }
        }
        Role::Dgrad(call) => {
            let Some(saved) = call.state().saved.take() else {
                // The forward was missed and counted.
                call.layer.counters.dgrad.missed();
                return plain(context);
            };
            let grads = saved.backward(QuantizeSource::Matrix(operands.left()));
            {
                let mut state = call.state();
                state.weight_grad = grads.w;
                state.bias_grad = grads.bias;
            }
            let LinearSpec {
                dgrad_dy, dgrad_w, ..
            } = call.spec;
            call.layer.counters.dgrad.routed([dgrad_dy, dgrad_w]);
            operands.finish(
                grads
                    .x
                    .expect("a training forward keeps the row-wise weight"),
            );
        }
        Role::Wgrad { call, exact } => {
            let known = call.state().weight_grad.is_some();
            if known && exact {
                let like = operands.left();
                let (shape, dtype) = (operands.out.shape.clone(), operands.out.dtype);
                let out = placeholder(&like, &shape, dtype);
                operands.put(out);
            } else {
                if known {
                    count(&call.layer.counters.wgrad_wasted);
                }
                plain(context);
            }
        }
        Role::WgradOnly(call) => {
            let dy = matrix(operands.right());
            if compute_weight_grad(&call, dy.clone()) {
                let (shape, dtype) = (operands.out.shape.clone(), operands.out.dtype);
                let out = placeholder(&dy, &shape, dtype);
                operands.put(out);
            } else {
                plain(context);
            }
        }
        Role::Candidate(grad) => {
            *lock(&grad.dy) = Some(matrix(operands.right()));
            plain(context);
        }
    }
}

/// Runs the forward GEMM and saves the operands for its backward. Returns `None` if the weight is
/// missing.
fn run_forward(call: &Call, x: CubeTensor, operands: &mut Operands<'_>) -> Option<CubeTensor> {
    if let Some(input) = &call.packed {
        return packed::forward(call, input, x);
    }
    let mut state = call.state();
    let weight = state.weight.take()?;
    let bias = match std::mem::take(&mut state.bias) {
        BiasState::Known(bias) => Some(*bias),
        BiasState::Announced(ir) if operands.context.handles.has_handle(&ir.id) => {
            Some(operands.get(&ir))
        }
        // The mark of the bias will find that the GEMM ran without it.
        _ => None,
    };
    if bias.is_some() {
        state.bias = BiasState::Added;
    }
    let bias_dtype = bias
        .as_ref()
        .filter(|_| state.bias_tracked)
        .map(|bias| float_dtype(bias.dtype));
    let requires_grad = RequiresGrad {
        x: call.training,
        w: call.training && call.weight_tracked,
        bias: bias_dtype,
    };
    let groups = match call.layer.experts {
        None => RowGroups::Whole,
        Some(experts) => RowGroups::Offsets(equal_offsets(&x, experts)),
    };
    let request = LinearRequest::<CubeBackend> {
        x: QuantizeSource::Matrix(x),
        w: weight,
        bias: bias.into(),
        groups,
        spec: call.spec,
        context: call.context.clone(),
        requires_grad,
    };
    let (y, saved) = request.forward();
    state.forward = true;
    state.saved = call.training.then_some(saved);
    let LinearSpec {
        fprop_x, fprop_w, ..
    } = call.spec;
    call.layer.counters.forward.routed([fprop_x, fprop_w]);
    Some(y)
}
