//! Roles of GEMMs: an observer that follows marked tensors through the graph.
//!
//! The fusion server shows every operation to its observers when it is registered, before any part
//! of it runs, with the ids of its tensors, which are never reused. So the role of a GEMM is known
//! exactly, not guessed from shapes or buffers: it is the forward GEMM of a call if its right
//! operand is that call's mark (or a view of it), and dgrad if its right operand is the transposed
//! mark. The same observer sees which operations ran, so a missed GEMM is noticed in the block that
//! ran it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use burn_core::backend::fusion::custom::{CustomOpIr, OperationIr, TensorId, TensorIr};
use burn_core::backend::fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, MatmulOpIr, NumericOperationIr, ScalarIr, TensorStatus,
};

use super::call::{BiasState, Call, CallRef, WeightGradGemm, lock};

/// Role of a GEMM.
#[derive(Debug, Clone)]
pub(super) enum Role {
    /// Forward GEMM, `y = x w`.
    Forward(Arc<Call>),
    /// Dgrad GEMM, `dx = dy wᵀ`; it also computes the weight's gradient.
    Dgrad(Arc<Call>),
    /// Wgrad GEMM, `xᵀ dy`, after dgrad, which has computed its result already.
    Wgrad {
        call: Arc<Call>,
        /// True if both operands are those of the call, so that nothing else can need the result.
        exact: bool,
    },
    /// Wgrad GEMM, `xᵀ dy`, of a call whose input needs no gradient.
    WgradOnly(Arc<Call>),
    /// Possible wgrad GEMM, `xᵀ dy`, of one of several calls: its right operand is saved until the
    /// call is known.
    Candidate(Arc<WeightGradGemm>),
}

impl Role {
    /// Handles a GEMM of this role that ran as a plain operation.
    fn missed(&self) {
        /// Ends a sentence about a missed GEMM.
        const WHY: &str = "fusion ran it as a plain operation, because its exploration limit \
            (BURN_FUSION_MAX_EXPLORATIONS) is used up, because a cached plan did not fit, or \
            because an operation before it failed";
        let (call, counters, name) = match self {
            Self::Forward(call) => (call, &call.layer.counters.forward, "forward"),
            Self::Dgrad(call) => (call, &call.layer.counters.dgrad, "input gradient"),
            // The mark of the gradient handles these.
            Self::Wgrad { .. } | Self::WgradOnly(_) | Self::Candidate(_) => return,
        };
        counters.missed();
        if call.layer.is_strict() {
            call.fail(&format!("the {name} GEMM did not run in NVFP4: {WHY}"));
        }
    }
}

/// Meaning of a tensor in a decorated layer.
#[derive(Debug, Clone)]
enum Tag {
    /// A weight: `[1, …, d_in, d_out]`, or transposed.
    Weight { call: Arc<Call>, transposed: bool },
    /// A bias.
    Bias(Arc<Call>),
    /// Result of a forward GEMM whose call may still get a bias, or whose bias it contains.
    Output(Arc<Call>),
    /// Result of a GEMM for the gradient of a weight, or the sum of its batches.
    Grad(Arc<WeightGradGemm>),
    /// Result of such a GEMM that was elided, or the sum of its batches.
    Elided(Arc<WeightGradGemm>, Arc<Call>),
}

#[derive(Default)]
struct State {
    /// Calls whose operations are about to be registered, by id.
    announced: HashMap<u64, Weak<Call>>,
    tags: HashMap<TensorId, Tag>,
    /// Inputs of forward GEMMs.
    inputs: HashMap<TensorId, Vec<Weak<Call>>>,
    /// Gradients that dgrad was registered with.
    output_grads: HashMap<TensorId, Vec<Weak<Call>>>,
    /// Transposed inputs, with the calls that the inputs belong to.
    transposed: HashMap<TensorId, Vec<Weak<Call>>>,
    /// Calls whose backward is not registered yet, by the shape of the weight.
    open: HashMap<[usize; 2], Vec<Weak<Call>>>,
    /// Roles of GEMMs that have not run.
    roles: HashMap<TensorId, Role>,
}

/// Observer of the fusion server.
pub(super) struct Tracker {
    state: Mutex<State>,
}

thread_local! {
    /// GEMMs with a role in the running block. The blocks of one server run sequentially on one
    /// thread.
    static RUNNING: RefCell<Vec<TensorId>> = const { RefCell::new(Vec::new()) };
}

/// Returns the tracker of the process, which observes from its first use on.
pub(super) fn tracker() -> &'static Arc<Tracker> {
    static TRACKER: OnceLock<(Arc<Tracker>, FusionObservation)> = OnceLock::new();
    &TRACKER
        .get_or_init(|| {
            let tracker = Arc::new(Tracker {
                state: Mutex::default(),
            });
            (tracker.clone(), FusionObservation::new(tracker))
        })
        .0
}

impl Tracker {
    /// Announces that an operation that names `call` is about to be registered.
    pub fn announce(&self, call: &CallRef) {
        let mut state = lock(&self.state);
        state.prune();
        state.announced.insert(call.0.id, Arc::downgrade(&call.0));
    }

    /// Removes and returns the role of the GEMM that writes `out`: it no longer counts as missed.
    pub fn take(&self, out: TensorId) -> Option<Role> {
        lock(&self.state).roles.remove(&out)
    }
}

impl FusionObserver for Tracker {
    fn registered(&self, operation: &OperationIr) {
        let mut state = lock(&self.state);
        if state.is_idle() && !matches!(operation, OperationIr::Custom(_)) {
            return;
        }
        state.follow(operation);
        for input in operation.inputs() {
            if matches!(input.status, TensorStatus::ReadWrite)
                || matches!(operation, OperationIr::Drop(_))
            {
                state.forget(&input.id);
            }
        }
    }

    fn block_starts(&self, block: BlockOperations<'_>) {
        let state = lock(&self.state);
        if state.roles.is_empty() {
            return;
        }
        RUNNING.with_borrow_mut(|running| {
            running.extend(block.iter().filter_map(|operation| {
                match operation {
                    OperationIr::Float(_, FloatOperationIr::Matmul(gemm)) => state
                        .roles
                        .contains_key(&gemm.out.id)
                        .then_some(gemm.out.id),
                    _ => None,
                }
            }));
        });
    }

    fn block_ran(&self) {
        let ran = RUNNING.take();
        if ran.is_empty() {
            return;
        }
        let mut state = lock(&self.state);
        for out in ran {
            if let Some(role) = state.roles.remove(&out) {
                role.missed();
            }
        }
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.tags.is_empty()
            && self.inputs.is_empty()
            && self.output_grads.is_empty()
            && self.transposed.is_empty()
    }

    /// Removes the entries of tensors without a live call. Most are removed with their tensors;
    /// this covers tensors that were dropped on other threads, which no operation reports.
    fn prune(&mut self) {
        self.announced.retain(|_, call| call.strong_count() > 0);
        if self.announced.is_empty() {
            self.inputs.clear();
            self.output_grads.clear();
            self.transposed.clear();
            self.open.clear();
        }
    }

    fn forget(&mut self, id: &TensorId) {
        self.tags.remove(id);
        self.inputs.remove(id);
        self.output_grads.remove(id);
        self.transposed.remove(id);
    }

    fn follow(&mut self, operation: &OperationIr) {
        match operation {
            OperationIr::Drop(_) => {}
            OperationIr::Custom(custom) if self.custom(custom) => {}
            OperationIr::Float(_, FloatOperationIr::Matmul(gemm)) => self.gemm(gemm),
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap)) => {
                let rank = swap.input.shape.num_dims();
                let last = [rank.wrapping_sub(2), rank.wrapping_sub(1)];
                let transposes = last == [swap.dim1, swap.dim2] || last == [swap.dim2, swap.dim1];
                if transposes {
                    // The transposition may consume the input.
                    let calls = self.inputs.get(&swap.input.id).cloned().unwrap_or_default();
                    self.transposed.insert(swap.out.id, calls);
                }
                match self.tags.get(&swap.input.id).cloned() {
                    Some(Tag::Weight { call, transposed }) if transposes => {
                        let transposed = !transposed;
                        self.tags
                            .insert(swap.out.id, Tag::Weight { call, transposed });
                    }
                    _ => self.read(operation),
                }
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape)) => {
                self.view(operation, &reshape.input, &reshape.out);
            }
            OperationIr::BaseFloat(BaseOperationIr::Cast(cast)) => {
                match self.tags.get(&cast.input.id) {
                    Some(Tag::Weight { .. } | Tag::Grad(_) | Tag::Elided(..)) => {
                        self.view(operation, &cast.input, &cast.out);
                    }
                    _ => self.read(operation),
                }
            }
            OperationIr::NumericFloat(_, NumericOperationIr::SumDim(sum)) => {
                self.sum(operation, &sum.input, &sum.out);
            }
            OperationIr::NumericFloat(_, NumericOperationIr::SumDims(sum)) => {
                self.sum(operation, &sum.input, &sum.out);
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add)) => {
                let tags = [&add.lhs, &add.rhs].map(|operand| self.tags.get(&operand.id));
                match tags {
                    [Some(Tag::Output(output)), Some(Tag::Bias(bias))]
                    | [Some(Tag::Bias(bias)), Some(Tag::Output(output))]
                        if output.id == bias.id => {}
                    _ => self.read(operation),
                }
            }
            _ => self.read(operation),
        }
    }

    /// Registers `out` as a view of `input` in another shape or dtype.
    fn view(&mut self, operation: &OperationIr, input: &TensorIr, out: &TensorIr) {
        let Some(tag) = self.tags.get(&input.id).cloned() else {
            return;
        };
        let keeps = match &tag {
            Tag::Weight { call, transposed } => call.is_weight(&out.shape, *transposed),
            Tag::Bias(call) => {
                let rank = out.shape.num_dims();
                out.shape[rank - 1] == call.dims[1] && out.shape.num_elements() == call.dims[1]
            }
            Tag::Output(call) => out.shape[out.shape.num_dims() - 1] == call.dims[1],
            Tag::Grad(_) | Tag::Elided(..) => true,
        };
        if keeps {
            self.tags.insert(out.id, tag);
        } else {
            self.read(operation);
        }
    }

    /// Registers `out` as a sum of `input`: for a weight gradient, the sum over batches.
    fn sum(&mut self, operation: &OperationIr, input: &TensorIr, out: &TensorIr) {
        match self.tags.get(&input.id) {
            Some(Tag::Grad(_) | Tag::Elided(..)) => self.view(operation, input, out),
            _ => self.read(operation),
        }
    }

    /// Handles an `operation` that reads marked tensors in a way that a linear layer does not.
    fn read(&self, operation: &OperationIr) {
        for input in operation.inputs() {
            if self.tags.contains_key(&input.id) {
                self.read_one(input, &name(operation));
            }
        }
    }

    /// Handles such a read of `tensor` by `reader`.
    fn read_one(&self, tensor: &TensorIr, reader: &str) {
        match self.tags.get(&tensor.id) {
            Some(Tag::Weight { call, .. }) => call.fail(&format!(
                "its weight is read by {reader}: a decorated weight can only be the right operand \
                 of a matmul, x.matmul(weight)"
            )),
            Some(Tag::Bias(call)) => bias_misread(call, reader),
            Some(Tag::Output(call)) => {
                let mut state = call.state();
                state.output_shared = true;
                let promised = !matches!(state.bias, BiasState::Absent);
                drop(state);
                if promised {
                    bias_misread(call, reader);
                }
            }
            Some(Tag::Elided(_, call)) => call.fail(&format!(
                "{reader} reads the weight's gradient before it is complete"
            )),
            Some(Tag::Grad(_)) | None => {}
        }
    }

    /// Tracks one of this crate's operations; returns `false` for any other.
    fn custom(&mut self, custom: &CustomOpIr) -> bool {
        let Some(kind) = Edge::of(custom) else {
            return false;
        };
        let [ScalarIr::UInt(id), ..] = custom.scalars[..] else {
            return false;
        };
        // The call is alive: the operation that is being registered holds it.
        let Some(call) = self.announced.get(&id).and_then(Weak::upgrade) else {
            return false;
        };
        let (input, out) = (&custom.inputs[0], custom.outputs[0].id);
        match kind {
            Edge::Weight => {
                let transposed = false;
                self.tags.insert(out, Tag::Weight { call, transposed });
            }
            Edge::Bias => {
                let mut state = call.state();
                if !state.output_shared && !state.forward {
                    state.bias = BiasState::Announced(Box::new(input.clone()));
                    drop(state);
                    self.tags.insert(out, Tag::Bias(call));
                }
            }
            Edge::WeightGrad => {
                self.announced.remove(&id);
                if let Some(Tag::Grad(grad) | Tag::Elided(grad, _)) = self.tags.get(&input.id) {
                    call.state().grad = Some(grad.clone());
                }
            }
            Edge::BiasGrad => {}
        }
        true
    }

    fn gemm(&mut self, gemm: &MatmulOpIr) {
        let MatmulOpIr { lhs, rhs, out } = gemm;
        if let Some(Tag::Weight { call, .. }) = self.tags.get(&lhs.id) {
            call.fail(
                "its weight is the left operand of a matmul: a decorated weight can only be the \
                 right one, x.matmul(weight)",
            );
            return;
        }
        let role = match self.tags.get(&rhs.id).cloned() {
            Some(Tag::Weight { call, transposed }) => self.weight_gemm(gemm, call, transposed),
            _ => self.grad_gemm(gemm),
        };
        if let Some(role) = role {
            self.roles.insert(out.id, role);
        }
        // An operand may be the result of another layer.
        for operand in [lhs, rhs] {
            if !matches!(self.tags.get(&operand.id), Some(Tag::Weight { .. })) {
                self.read_one(operand, "a matmul");
            }
        }
    }

    /// Registers a GEMM with a weight as right operand.
    fn weight_gemm(
        &mut self,
        gemm: &MatmulOpIr,
        call: Arc<Call>,
        transposed: bool,
    ) -> Option<Role> {
        let MatmulOpIr { lhs, out, .. } = gemm;
        let mut state = call.state();
        if transposed {
            if !state.gemm {
                drop(state);
                call.fail(
                    "its weight is transposed before the matmul: decorated weights are \
                     [d_in, d_out]",
                );
                return None;
            }
            if state.dy.is_some() {
                drop(state);
                call.fail("its input gradient is computed twice from one forward");
                return None;
            }
            state.dy = Some(lhs.id);
            drop(state);
            self.output_grads
                .entry(lhs.id)
                .or_default()
                .push(Arc::downgrade(&call));
            return Some(Role::Dgrad(call));
        }
        if state.gemm {
            drop(state);
            call.fail(
                "two matmuls use one value of its weight: take the value (Param::val) once for \
                 each",
            );
            return None;
        }
        let [rows, cols] = last_two(lhs).unwrap_or_default();
        if call.layer.experts.is_some() && !call.is_stack(&lhs.shape, [rows, cols]) {
            drop(state);
            call.fail(
                "its weights are stacked, and its input is not [experts, tokens, d_in]: repeat an \
                 input that all experts share",
            );
            return None;
        }
        state.gemm = true;
        drop(state);
        let weak = Arc::downgrade(&call);
        self.inputs.entry(lhs.id).or_default().push(weak.clone());
        if call.training && call.weight_tracked {
            let open = self.open.entry(call.dims).or_default();
            open.retain(|call| call.strong_count() > 0);
            open.push(weak);
        }
        self.tags.insert(out.id, Tag::Output(call.clone()));
        Some(Role::Forward(call))
    }

    /// Registers a GEMM without a marked operand: it is the gradient of a weight if its left
    /// operand is the transpose of an input and its right operand the gradient of an output.
    fn grad_gemm(&mut self, gemm: &MatmulOpIr) -> Option<Role> {
        let MatmulOpIr { lhs, rhs, out } = gemm;
        let input_of = self.transposed.get(&lhs.id)?;
        let [d_in, rows] = last_two(lhs)?;
        let [_, d_out] = last_two(rhs)?;
        let alive = |calls: &[Weak<Call>]| -> Vec<Arc<Call>> {
            calls
                .iter()
                .filter_map(Weak::upgrade)
                .filter(|call| call.dims == [d_in, d_out] && call.training && call.weight_tracked)
                // Results for batches are summed later; results for a stack are the gradient
                // already.
                .filter(|call| call.layer.experts.is_none() || call.is_weight(&out.shape, false))
                .collect()
        };
        // Dropped calls, for example of another model with the same input, get no gradient.
        let sole = input_of
            .iter()
            .filter(|call| call.strong_count() > 0)
            .count()
            == 1;
        let by_input = alive(input_of);
        let by_grad = alive(self.output_grads.get(&rhs.id).map_or(&[], Vec::as_slice));
        let grad = Arc::new(WeightGradGemm {
            rhs: rhs.id,
            dy: Mutex::default(),
        });
        let exact = by_grad
            .iter()
            .rev()
            .find(|call| by_input.iter().any(|other| other.id == call.id));
        if let Some(call) = exact {
            self.tags.insert(out.id, Tag::Elided(grad, call.clone()));
            let call = call.clone();
            return Some(Role::Wgrad { call, exact: true });
        }
        if let Some(call) = by_grad.last() {
            // The input was recomputed for the backward, or came from another thread.
            self.tags.insert(out.id, Tag::Grad(grad));
            let call = call.clone();
            return Some(Role::Wgrad { call, exact: false });
        }
        // No dgrad was registered, so the input needs no gradient.
        let waiting = |calls: Vec<Arc<Call>>| -> Vec<Arc<Call>> {
            calls
                .into_iter()
                .filter(|call| call.state().dy.is_none())
                .collect()
        };
        let by_input = waiting(by_input);
        if let [call] = &by_input[..]
            && sole
        {
            call.state().dy = Some(rhs.id);
            self.tags.insert(out.id, Tag::Elided(grad, call.clone()));
            return Some(Role::WgradOnly(call.clone()));
        }
        let open = waiting(alive(
            self.open.get(&[d_in, d_out]).map_or(&[], Vec::as_slice),
        ));
        if open.is_empty() || rows == 0 {
            return None;
        }
        self.tags.insert(out.id, Tag::Grad(grad.clone()));
        Some(Role::Candidate(grad))
    }
}

/// Boundary operation of a decorated layer; see [`MarkOps`](super::ops::MarkOps).
enum Edge {
    Weight,
    Bias,
    WeightGrad,
    BiasGrad,
}

impl Edge {
    fn of(custom: &CustomOpIr) -> Option<Self> {
        let id = custom.id.as_str();
        // Burn prefixes the method name with crate and trait.
        [
            ("nvfp4_mark_weight", Self::Weight),
            ("nvfp4_mark_packed", Self::Weight),
            ("nvfp4_mark_bias", Self::Bias),
            ("nvfp4_take_weight_grad", Self::WeightGrad),
            ("nvfp4_take_bias_grad", Self::BiasGrad),
        ]
        .into_iter()
        .find_map(|(name, edge)| id.ends_with(name).then_some(edge))
    }
}

/// Returns the last two dimensions, if the tensor has them.
fn last_two(tensor: &TensorIr) -> Option<[usize; 2]> {
    let rank = tensor.shape.num_dims();
    (rank >= 2).then(|| [tensor.shape[rank - 2], tensor.shape[rank - 1]])
}

fn bias_misread(call: &Call, reader: &str) {
    call.fail(&format!(
        "{reader} reads its bias or its matmul: where the matmul adds the bias, as in \
         burn_nn::Linear, no operation may come between them"
    ));
}

/// Returns the name of an operation for messages.
fn name(operation: &OperationIr) -> String {
    let text = format!("{operation:?}");
    let kind = text.split('{').next().unwrap_or_default();
    // In "Float(F32, Exp(UnaryOpIr " the operation's name comes before the type of its fields.
    let mut words = kind
        .split(['(', ',', ' '])
        .filter(|word| !word.is_empty())
        .rev();
    let last = words.next().unwrap_or_default();
    words.next().unwrap_or(last).to_string()
}
