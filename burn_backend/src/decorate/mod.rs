//! NVFP4 training and inference of unmodified Burn models.
//!
//! [`decorate`] routes the `burn_nn::Linear` layers of a Burn model through NVFP4, forward and
//! backward: those of `burn_nn::MultiHeadAttention`, `TransformerEncoder`,
//! `PositionWiseFeedForward` and of user-defined modules.
//!
//! ```no_run
//! use burn_core::tensor::{Device, Tensor};
//! use burn_nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
//! use burn_nvfp4::{Nvfp4Recipe, decorate};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! burn_nvfp4::decorate::install()?; // before the first tensor
//! let device = Device::default().autodiff();
//! let model = TransformerEncoderConfig::new(256, 1024, 4, 2).init(&device);
//! let model = decorate(model, &Nvfp4Recipe::new())?;
//! let x = Tensor::<3>::zeros([8, 64, 256], &device);
//! let y = model.forward(TransformerEncoderInput::new(x));
//! let gradients = y.sum().backward();
//! let report = burn_nvfp4::decorate::report(&model)?;
//! println!("{report}");
//! # Ok(())
//! # }
//! ```
//!
//! `docs/src/decorator.md` describes the mechanism, the guarantees and the refused cases. In short:
//! a reparameterization marks the weights, and a fuser registered with Burn's fusion runs the GEMMs
//! of marked weights. An observer of Burn's fusion server derives the role of each GEMM from the
//! graph, and sees whether the GEMM ran. The graph sees a marked weight as NaN, so the result of a
//! missed GEMM is NaN.

mod call;
mod check;
mod counters;
mod exchanged;
mod fill;
mod fuser;
mod mark;
mod ops;
pub(crate) mod packed;
mod ranks;
mod report;
mod tracker;
mod wgrad;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use burn_core::module::{Module, Param, ParamGroup, ParamId, Reparameterizer};
use burn_core::tensor::Tensor;
use burn_cubecl::fusion;
use burn_cubecl::fusion::RegistryError;
use nvfp4_formats::Nvfp4Error;

pub use counters::GemmFormat;
pub(crate) use ranks::{gathered, reparameterize};
pub use report::{LayerReport, Nvfp4Report, RoleReport, report};

use crate::experts::check_experts;
use crate::recipe::Nvfp4Recipe;
use crate::state::LayerState;
use crate::survey::{Selection, Surveyed};
use call::{Group, Layer, Mode, lock};
use check::check_device;
use counters::Counters;
use mark::{Kind, Mark, collect};

/// Burn's own fusion of a matmul with the operations after it. Its score is always below that of
/// `BlockFuser`.
const BURN_MATMUL: &str = burn_cubecl_fusion::optim::matmul::NAME;

/// Routes the linear layers of `model` through NVFP4, equivalent to
/// [`Nvfp4Linear`](crate::Nvfp4Linear).
///
/// Output heads and routers, recognized by their names ([`Decorator::new`]), and layers in the
/// recipe's `high_precision` group are left unchanged. In each other layer the GEMMs of forward,
/// input gradient and weight gradient are bit for bit those of `Nvfp4Linear` with the same recipe,
/// layer id and offset. A missed GEMM is an error: its result is NaN, and the next use of the model
/// panics with the name of the layer (see [`Decorator::lenient`] for the alternative, and
/// [`report`] for the counts).
///
/// Parameters, their ids and the records of the model do not change: an undecorated model loads the
/// records. [`Nvfp4State`](crate::Nvfp4State) and
/// [`assign_layer_ids`](crate::state::assign_layer_ids) include the decorated layers.
///
/// On several ranks, decorate the model before [`fully_shard`](crate::parallel::fully_shard) or
/// [`average_in_backward`](crate::parallel::average_in_backward).
///
/// # Errors
/// Returns an error if the model is not on a CubeCL CPU or CUDA device, fusion has started without
/// [`install`], the model has no linear layer or is decorated already, `d_in` or `d_out` of a layer
/// that is not in high precision is not a multiple of 16, or `high_precision` matches no layer.
pub fn decorate<M: Module>(model: M, recipe: &Nvfp4Recipe) -> Result<M, Nvfp4Error> {
    Decorator::new(recipe).decorate(model)
}

/// [`decorate`] with options.
#[derive(Debug, Clone)]
pub struct Decorator {
    recipe: Nvfp4Recipe,
    include: Option<ParamGroup>,
    exclude: Option<ParamGroup>,
    mode: Mode,
}

impl Decorator {
    /// Creates a strict decorator of all `burn_nn::Linear` layers except output heads and routers.
    ///
    /// Heads and routers are recognized by the name of the layer or of an enclosing module. Heads
    /// are `head`, `*_head`, `classifier`, `logits`, `unembed` and `unembedding`. Routers are
    /// `router`, `*_router`, and `gate` if its parent also has a module called `experts` (the gate
    /// of a SwiGLU is not a router). They stay unchanged, in high precision, and the [`report`]
    /// lists them. [`include`](Self::include) decorates them. A head with another name is decorated
    /// unless it is in [`exclude`](Self::exclude).
    pub fn new(recipe: &Nvfp4Recipe) -> Self {
        Self {
            recipe: recipe.clone(),
            include: None,
            exclude: None,
            mode: Mode::Strict,
        }
    }

    /// Runs a missed GEMM in the dtype of its operands and counts it in the [`report`], instead of
    /// failing.
    ///
    /// In this mode biases are added after the GEMM's result is rounded to its dtype.
    pub fn lenient(mut self) -> Self {
        self.mode = Mode::Lenient;
        self
    }

    /// Also decorates the weights in `group`: those of heads and routers, and parameters of rank 2
    /// called `weight` of modules other than `burn_nn::Linear`, which use them as
    /// `x.matmul(weight)` with `[d_in, d_out]`.
    ///
    /// A parameter of rank 3 is a stack of experts' weights, `[experts, d_in, d_out]` with at most
    /// 512 experts. It is used as `x.matmul(weight)` with an `x` of `[experts, tokens, d_in]`, and
    /// its GEMMs are bit for bit those of [`Nvfp4GroupedLinear`](crate::Nvfp4GroupedLinear) with
    /// the same number of tokens for each expert.
    pub fn include(mut self, group: ParamGroup) -> Self {
        self.include = Some(group);
        self
    }

    /// Excludes the layers whose weight is in `group`, such as a head with an unusual name. They
    /// are never decorated, whatever the recipe. Takes precedence over [`include`](Self::include).
    ///
    /// In contrast, layers in the recipe's `high_precision` group are decorated without effect, and
    /// are in the [`report`].
    pub fn exclude(mut self, group: ParamGroup) -> Self {
        self.exclude = Some(group);
        self
    }

    /// Decorates `model`; see [`decorate`].
    ///
    /// # Errors
    /// Same as [`decorate`]; also if the group of [`include`](Self::include) or of
    /// [`exclude`](Self::exclude) matches nothing.
    pub fn decorate<M: Module>(&self, model: M) -> Result<M, Nvfp4Error> {
        for device in model.devices() {
            check_device("model", &device)?;
        }
        install()?;
        self.recipe.check()?;
        let selection = Selection {
            verb: "decorate",
            own: false,
            include: self.include.as_ref(),
            exclude: self.exclude.as_ref(),
        };
        let marker = self.marker(selection.of(&model)?)?;
        let model = model.apply_reparameterization(marker);
        self.recipe.apply(&model)?;
        for mark in collect(&model) {
            check_layer(&mark)?;
        }
        Ok(model)
    }

    fn marker(&self, survey: Surveyed) -> Result<Marker, Nvfp4Error> {
        let Surveyed {
            layers,
            left_alone,
            convolutions,
        } = survey;
        let linear = left_alone.into_iter().map(|(layer, _)| layer.path);
        let left_alone = convolutions.into_iter().chain(linear).collect();
        let group = Arc::new(Group::new(self.mode, left_alone));
        let recipe = Arc::new(self.recipe.clone());
        let mut marks = HashMap::new();
        for found in layers {
            let state = LayerState::for_recipe(&recipe, None)?;
            let mark = Mark {
                kind: Kind::Weight,
                layer: Arc::new(Layer {
                    path: found.path,
                    dims: found.dims,
                    experts: found.experts,
                    group: group.clone(),
                    counters: Counters::default(),
                }),
                state,
                recipe: recipe.clone(),
                exchanged: None,
            };
            if let Some(bias) = found.bias {
                let kind = Kind::Bias;
                marks.insert(
                    bias,
                    Mark {
                        kind,
                        ..mark.clone()
                    },
                );
            }
            marks.insert(found.weight, mark);
        }
        Ok(Marker { marks })
    }
}

/// Registers the fuser with Burn's fusion. Call it at the start of the program: fusion accepts no
/// registration after the first tensor operation. Further calls have no effect.
///
/// Undecorated models keep running, except that Burn does not fuse their matmuls with the
/// operations after them.
///
/// # Errors
/// Returns an error if fusion has started already.
pub fn install() -> Result<(), Nvfp4Error> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = lock(&INSTALLED);
    if *installed {
        return Ok(());
    }
    let late = |error: RegistryError| {
        Nvfp4Error::value(
            "fusion",
            error.to_string(),
            "burn_nvfp4::decorate::install() at the start of the program, before any tensor",
        )
    };
    fusion::register(fuser::Provider).map_err(late)?;
    fusion::remove(BURN_MATMUL).map_err(late)?;
    tracker::tracker();
    *installed = true;
    Ok(())
}

/// Removes the decoration of the model.
///
/// Clones keep theirs. Use it instead of `Module::materialize`, which would replace the weights by
/// the marked values (NaN). All ranks of a [sharded](crate::parallel::fully_shard) model call this
/// together: its parameters are gathered.
pub fn undecorate<M: Module>(model: M) -> M {
    mark::bypassed(|| model.materialize())
}

/// Returns an error if the layer is not in high precision and its shape cannot be quantized.
fn check_layer(mark: &Mark) -> Result<(), Nvfp4Error> {
    if mark.state.is_high_precision() {
        return Ok(());
    }
    let [d_in, d_out] = mark.layer.dims;
    if let Some(experts) = mark.layer.experts {
        check_experts("model", experts)?;
    }
    let block = nvfp4_formats::BLOCK;
    if [d_in, d_out].iter().all(|dim| *dim > 0 && dim % block == 0) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        "model",
        format!(
            "layer `{}` with a weight of [{d_in}, {d_out}]",
            mark.layer.path
        ),
        format!("multiples of {block}, or the layer in the recipe's high_precision"),
    ))
}

/// Adds the marks to the parameters.
struct Marker {
    marks: HashMap<ParamId, Mark>,
}

impl Reparameterizer for Marker {
    type Reparam = Mark;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Mark>) {
        let mark = self.marks.get(&param.id).cloned();
        (param, mark)
    }
}
