//! Marks on the parameters of an unmodified model.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use burn_core::backend::Dispatch;
use burn_core::module::{Content, Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn_core::tensor::{Device, Tensor};

use super::call::{Call, CallRef, Layer};
use super::check::check_device;
use super::counters::count;
use super::exchanged::Exchanged;
use super::ops::MarkOps;
use super::tracker::tracker;
use crate::functions::or_panic;
use crate::ops::WeightIdentity;
use crate::parameterless::{Parameterless, parameterless_module};
use crate::recipe::Nvfp4Recipe;
use crate::state::LayerState;

/// Parameter of a layer that a [`Mark`] is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Weight,
    Bias,
}

/// Mark on a parameter: the value returned by `Param::val` carries it into the graph.
///
/// A module without parameters, like [`LayerState`]: it has no entry in records.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub kind: Kind,
    pub layer: Arc<Layer>,
    pub state: LayerState,
    pub recipe: Arc<Nvfp4Recipe>,
    /// Exchange with other ranks, if the model is on several.
    pub exchanged: Option<Exchanged>,
}

thread_local! {
    /// Last call on this thread: a layer reads its bias after its weight.
    static LAST: RefCell<Weak<Call>> = const { RefCell::new(Weak::new()) };
    /// True while marks have no effect.
    static BYPASSED: Cell<bool> = const { Cell::new(false) };
    /// Traversal of [`visit_marks`].
    static FOUND: RefCell<Option<Found>> = const { RefCell::new(None) };
}

/// State of a traversal of marks.
#[derive(Default)]
struct Found {
    /// Last parameter. Burn visits its mark after it.
    last: Option<ParamId>,
    marks: Vec<(ParamId, Mark)>,
}

/// Runs `body` while marks have no effect.
pub(super) fn bypassed<T>(body: impl FnOnce() -> T) -> T {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            BYPASSED.set(false);
        }
    }
    BYPASSED.set(true);
    let _end = End;
    body()
}

/// Returns true while marks have no effect on this thread.
pub(super) fn is_bypassed() -> bool {
    BYPASSED.get()
}

/// Returns the marks on the weights of `model`, in the order of its fields.
pub(super) fn collect<M: Module>(model: &M) -> Vec<Mark> {
    let marks = visit_marks(model).into_iter().map(|(_, mark)| mark);
    marks.filter(|mark| mark.kind == Kind::Weight).collect()
}

/// Returns all marks of `model`, by parameter.
pub(super) fn marks<M: Module>(model: &M) -> HashMap<ParamId, Mark> {
    visit_marks(model).into_iter().collect()
}

/// Returns all marks of `model` with their parameters, in the order of its fields.
fn visit_marks<M: Module>(model: &M) -> Vec<(ParamId, Mark)> {
    struct Last;
    impl ModuleVisitor for Last {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            FOUND.with_borrow_mut(|found| {
                if let Some(found) = found {
                    found.last = Some(param.id);
                }
            });
        }
    }
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            FOUND.set(None);
        }
    }
    FOUND.set(Some(Found::default()));
    let _end = End;
    model.visit(&mut Last);
    FOUND.take().unwrap_or_default().marks
}

impl Mark {
    /// Marks `base`, which is the weight identified by `identity`, or a view of it.
    #[track_caller]
    fn weight<const D: usize>(
        &self,
        base: Tensor<D>,
        identity: Option<WeightIdentity>,
    ) -> Tensor<D> {
        let training = base.is_autodiff();
        let dims = base.dims();
        let forward = self.state.for_forward(&self.recipe, identity, training);
        let call = Arc::new(Call::new(
            self.layer.clone(),
            [dims[D - 2], dims[D - 1]],
            or_panic("a decorated layer", forward),
            training,
            base.is_tracked(),
        ));
        LAST.set(Arc::downgrade(&call));
        let (id, call) = (call.id, CallRef(call));
        tracker().announce(&call);
        Tensor::from_dispatch(Dispatch::nvfp4_mark_weight(base.into_dispatch(), call, id))
    }

    fn bias(&self, base: Tensor<1>) -> Tensor<1> {
        let last = LAST.take().upgrade();
        match last {
            Some(call) if Arc::ptr_eq(&call.layer, &self.layer) => {
                let (id, call) = (call.id, CallRef(call));
                tracker().announce(&call);
                Tensor::from_dispatch(Dispatch::nvfp4_mark_bias(base.into_dispatch(), call, id))
            }
            // The bias was read before the weight: it is added to the rounded result, as in Burn.
            _ => {
                count(&self.layer.counters.bias_after);
                base
            }
        }
    }
}

impl Reparameterization for Mark {
    const NAME: &'static str = "nvfp4";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        // Taken before the exchange and the reshape: these are new nodes in each call.
        let (identity, base) = match &self.exchanged {
            Some(exchanged) => (exchanged.identity(&base), exchanged.apply(base)),
            None => (WeightIdentity::of([&base]), base),
        };
        if is_bypassed() || self.state.is_high_precision() {
            return base;
        }
        let device = base.device();
        if let Err(error) = check_device("model", &device) {
            panic!("nvfp4 decorate: layer `{}`: {error}", self.layer.path);
        }
        if self.layer.is_strict()
            && let Some(message) = self.layer.group.failure_message()
        {
            panic!("nvfp4 decorate: {message}");
        }
        let marked = match self.kind {
            Kind::Weight => {
                let dims = base.dims();
                match self.layer.experts {
                    None => {
                        let base: Tensor<2> = base.reshape([dims[0], dims[D - 1]]);
                        self.weight(base, identity).into_dispatch()
                    }
                    Some(experts) => {
                        let base: Tensor<3> = base.reshape([experts, dims[1], dims[D - 1]]);
                        self.weight(base, identity).into_dispatch()
                    }
                }
            }
            Kind::Bias if self.layer.is_strict() => {
                let length = base.dims()[0];
                let base: Tensor<1> = base.reshape([length]);
                self.bias(base).into_dispatch()
            }
            Kind::Bias => return base,
        };
        Tensor::from_dispatch(marked)
    }
}

impl Parameterless for Mark {
    fn pass<V: ModuleVisitor>(&self, visitor: &mut V) {
        FOUND.with_borrow_mut(|found| {
            if let Some(found) = found {
                let marks = found.last.map(|id| (id, self.clone()));
                found.marks.extend(marks);
            }
        });
        if let Some(exchanged) = &self.exchanged {
            exchanged.visit(visitor);
        }
        if self.kind == Kind::Weight {
            self.state.visit(visitor);
        }
    }

    fn forked(self, device: &Device) -> Self {
        Self {
            state: self.state.fork(device),
            ..self
        }
    }

    fn show(&self, content: Content) -> Option<Content> {
        let content = match &self.exchanged {
            Some(exchanged) => content.add_formatted(&format!("{exchanged:?}")),
            None => content,
        };
        self.state.show(content)
    }
}

parameterless_module!(Mark);
