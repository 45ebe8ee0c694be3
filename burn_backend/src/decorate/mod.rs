//! NVFP4 in unmodified models.
//!
//! [`decorate`] takes any Burn model and routes the linear layers in it (`burn_nn::Linear`, and so
//! all of `burn_nn::MultiHeadAttention`, `TransformerEncoder`, `PositionWiseFeedForward` and the
//! user's own modules that hold one) through NVFP4, forward and backward:
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
//! How it works, what it guarantees and what it refuses is in `docs/decorator.md`. In short: a
//! reparameterization marks the weights, a fusion of our own takes the products of marked weights,
//! and an observer of Burn's fusion server knows from the graph which product is which, and sees
//! whether it was taken. What the graph sees of a marked weight is NaN, so a product that was not
//! taken can give no number.

mod call;
mod fuser;
mod mark;
mod ops;
mod tracker;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex};

use burn_core::backend::DispatchDevice;
use burn_core::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId, Reparameterizer};
use burn_core::tensor::{Device, Tensor};
use burn_cubecl::fusion::RegistryError;
use burn_cubecl::{CubeDevice, fusion};
use nvfp4_kernels::Nvfp4Error;
use serde::{Deserialize, Serialize};

pub use call::LayerReport;

use crate::recipe::Nvfp4Recipe;
use crate::state::{LayerRandomness, LayerState};
use crate::validate;
use call::{Counters, Group, Layer, Mode, lock};
use mark::{Kind, Mark, collect};

/// Burn's own fusion of a product with what follows it. It would never win against ours.
const BURN_MATMUL: &str = burn_cubecl_fusion::optim::matmul::NAME;

/// Route the linear layers of `model` through NVFP4, as [`Nvfp4Linear`](crate::Nvfp4Linear) would.
///
/// Layers in the recipe's `high_precision` group are left alone. In each other one the products of
/// forward, input gradient and weight gradient are those of `Nvfp4Linear` with the same recipe,
/// layer number and offset, bit for bit. A product that cannot be taken is an error: its result is
/// NaN, and the next use of the model panics with the name of the layer (see [`Decorator::lenient`]
/// for the alternative, and [`report`] for asking).
///
/// Parameters, their ids and the records of the model stay as they are: an undecorated model loads
/// them. [`Nvfp4State`](crate::Nvfp4State) and [`number_layers`](crate::state::number_layers) see
/// the decorated layers.
///
/// # Errors
/// When the model is not on a CubeCL CPU or CUDA device, when fusion has started without
/// [`install`], when the model has no linear layer or is decorated already, when `d_in` or `d_out`
/// of a layer that is not in high precision is no multiple of 16, or when `high_precision` matches
/// no layer.
pub fn decorate<M: Module>(model: M, recipe: &Nvfp4Recipe) -> Result<M, Nvfp4Error> {
    Decorator::new(recipe).decorate(model)
}

/// [`decorate`], with choices.
#[derive(Debug, Clone)]
pub struct Decorator {
    recipe: Nvfp4Recipe,
    include: Option<ParamGroup>,
    exclude: Option<ParamGroup>,
    mode: Mode,
}

impl Decorator {
    /// A strict decorator of `burn_nn::Linear` layers.
    pub fn new(recipe: &Nvfp4Recipe) -> Self {
        Self {
            recipe: recipe.clone(),
            include: None,
            exclude: None,
            mode: Mode::Strict,
        }
    }

    /// Run a product that cannot be taken in the type of its operands, and count it in the
    /// [`report`], instead of failing.
    ///
    /// Biases are then added after the product was rounded to its type.
    pub fn lenient(mut self) -> Self {
        self.mode = Mode::Lenient;
        self
    }

    /// Decorate the weights in `group` as well: parameters of rank 2 called `weight` of modules other
    /// than `burn_nn::Linear`, which use them as `x.matmul(weight)` with `[d_in, d_out]`.
    pub fn include(mut self, group: ParamGroup) -> Self {
        self.include = Some(group);
        self
    }

    /// Leave the layers alone whose weight is in `group`, such as a model's head or router: they are
    /// not decorated at all, whatever the recipe says. It wins over [`include`](Self::include).
    ///
    /// Layers in the recipe's `high_precision` group are decorated ones that do nothing, and are in
    /// the [`report`].
    pub fn exclude(mut self, group: ParamGroup) -> Self {
        self.exclude = Some(group);
        self
    }

    /// Decorate `model`; see [`decorate`].
    ///
    /// # Errors
    /// As there, and when the group of [`include`](Self::include) or of [`exclude`](Self::exclude)
    /// matches nothing.
    pub fn decorate<M: Module>(&self, model: M) -> Result<M, Nvfp4Error> {
        for device in model.devices() {
            check_device("model", &device)?;
        }
        install()?;
        self.recipe.check()?;
        let mut survey = Survey {
            include: self.include.as_ref(),
            exclude: self.exclude.as_ref(),
            ..Survey::default()
        };
        model.visit(&mut survey);
        let marker = self.marker(survey)?;
        let model = model.apply_reparameterization(marker);
        self.recipe.apply(&model)?;
        for mark in collect(&model) {
            check_layer(&mark, &self.recipe)?;
        }
        Ok(model)
    }

    fn marker(&self, survey: Survey<'_>) -> Result<Marker, Nvfp4Error> {
        let Survey {
            layers,
            reparameterized,
            included,
            excluded,
            ..
        } = survey;
        if let Some(path) = reparameterized {
            return Err(Nvfp4Error::value(
                "model",
                format!("a reparameterization at `{path}`"),
                "a model without any: neither decorated nor with LoRA adapters",
            ));
        }
        if layers.is_empty() {
            return Err(Nvfp4Error::value(
                "model",
                "no linear layer",
                "a model with at least one",
            ));
        }
        if let Some(group) = &self.include
            && !included
        {
            return Err(Nvfp4Error::value(
                "include",
                format!("{group:?}, which contains no rank 2 parameter called `weight`"),
                "a group with at least one that is not in a Linear",
            ));
        }
        if let Some(group) = &self.exclude
            && !excluded
        {
            return Err(Nvfp4Error::value(
                "exclude",
                format!("{group:?}, which contains no weight of a layer to decorate"),
                "a group with at least one",
            ));
        }
        let group = Arc::new(Group::new(self.mode));
        let recipe = Arc::new(self.recipe.clone());
        let mut marks = HashMap::new();
        for found in layers {
            let state = LayerState::new(LayerRandomness {
                seed: recipe.seed,
                layer: LayerState::next_layer(),
                offset: 0,
                rht_signs: recipe.rht_signs,
            })?;
            let mark = Mark {
                kind: Kind::Weight,
                layer: Arc::new(Layer {
                    path: found.path,
                    dims: found.dims,
                    group: group.clone(),
                    counters: Counters::default(),
                }),
                state,
                recipe: recipe.clone(),
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

/// Take part in Burn's fusion. Call it at the start of the program: fusion lets no one in after the
/// first tensor operation. Calling it again does nothing.
///
/// Models that are not decorated keep running, with the difference that Burn does not fuse their
/// products with what follows them.
///
/// # Errors
/// When fusion has started already.
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

/// The model without its decoration.
///
/// Clones keep theirs. Use it in place of `Module::materialize`, which would make the marked values
/// (NaN) the weights.
pub fn undecorate<M: Module>(model: M) -> M {
    mark::bypassed(|| model.materialize())
}

/// Wait for the devices of `model`, and say what ran where in its decorated layers.
///
/// # Errors
/// When an operation failed, or when the model has no decorated layer. A broken guarantee is no
/// error here; see [`Nvfp4Report::check`].
pub fn report<M: Module>(model: &M) -> Result<Nvfp4Report, Nvfp4Error> {
    for device in model.devices() {
        device
            .sync()
            .map_err(|error| Nvfp4Error::value("model", error.to_string(), "no failure"))?;
    }
    let marks = collect(model);
    let Some(first) = marks.first() else {
        return Err(Nvfp4Error::value(
            "model",
            "no decorated layer",
            "a model that `decorate` returned",
        ));
    };
    let failures = first.layer.group.failures();
    let layers = marks
        .iter()
        .map(|mark| {
            let high_precision = mark.state.is_high_precision();
            let report = mark.layer.counters.report(high_precision);
            (mark.layer.path.clone(), report)
        })
        .collect();
    Ok(Nvfp4Report { layers, failures })
}

/// What ran where in a decorated model, since it was decorated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nvfp4Report {
    /// The layers, by path.
    pub layers: BTreeMap<String, LayerReport>,
    /// Broken guarantees, each with the name of its layer.
    pub failures: Vec<String>,
}

impl Nvfp4Report {
    /// Products that ran in high precision though they should not have.
    pub fn missed(&self) -> u64 {
        let missed =
            |layer: &LayerReport| layer.forward_missed + layer.dgrad_missed + layer.wgrad_missed;
        self.layers.values().map(missed).sum()
    }

    /// Fail unless every product of every layer ran in NVFP4.
    ///
    /// # Errors
    /// With the layers where it did not.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        let found = failure_message(&self.failures)
            .or_else(|| (self.missed() > 0).then(|| format!("products missed:\n{self}")));
        match found {
            Some(found) => Err(Nvfp4Error::value(
                "model",
                found,
                "every product of a decorated layer in NVFP4",
            )),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Nvfp4Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .layers
            .keys()
            .map(String::len)
            .max()
            .unwrap_or(0)
            .max(5);
        writeln!(
            f,
            "{:width$} {:>18} {:>18} {:>18} {:>7} {:>10}",
            "layer", "forward", "dgrad", "wgrad", "wasted", "late bias"
        )?;
        for (path, layer) in &self.layers {
            if layer.high_precision {
                writeln!(f, "{path:width$} {:>18}", "high precision")?;
                continue;
            }
            let ran = |nvfp4: u64, missed: u64| match missed {
                0 => nvfp4.to_string(),
                _ => format!("{nvfp4} ({missed} missed)"),
            };
            writeln!(
                f,
                "{path:width$} {:>18} {:>18} {:>18} {:>7} {:>10}",
                ran(layer.forward_nvfp4, layer.forward_missed),
                ran(layer.dgrad_nvfp4, layer.dgrad_missed),
                ran(layer.wgrad_nvfp4, layer.wgrad_missed),
                layer.wgrad_wasted,
                layer.bias_after,
            )?;
        }
        for failure in &self.failures {
            writeln!(f, "{failure}")?;
        }
        Ok(())
    }
}

/// One message for all of `failures`, if there are any.
fn failure_message(failures: &[String]) -> Option<String> {
    (!failures.is_empty()).then(|| failures.join("; "))
}

/// Fail unless decorated layers can run on `device`: on Burn's fusion, over a CubeCL runtime that
/// the kernels are for.
fn check_device(argument: &'static str, device: &Device) -> Result<(), Nvfp4Error> {
    fn is_cube(device: &DispatchDevice) -> bool {
        match device {
            DispatchDevice::Autodiff(device) => is_cube(device),
            DispatchDevice::Cube(CubeDevice::Cpu(_) | CubeDevice::Cuda(_)) => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
    validate::device(argument, device)?;
    if is_cube(device.as_dispatch()) {
        Ok(())
    } else {
        Err(Nvfp4Error::Device {
            argument,
            found: format!("{:?}", device.as_dispatch()),
            expected: "a CubeCL CPU or CUDA device: decorated models rest on Burn's fusion \
                (Nvfp4Linear runs elsewhere too)"
                .into(),
        })
    }
}

/// Fail unless the layer is in high precision, or its shape can be quantized.
fn check_layer(mark: &Mark, recipe: &Nvfp4Recipe) -> Result<(), Nvfp4Error> {
    if mark.state.is_high_precision() {
        return Ok(());
    }
    let [d_in, d_out] = mark.layer.dims;
    let block = nvfp4_kernels::BLOCK;
    if [d_in, d_out].iter().all(|dim| *dim > 0 && dim % block == 0) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        "model",
        format!(
            "layer `{}` with a weight of [{d_in}, {d_out}]",
            mark.layer.path
        ),
        format!(
            "multiples of {block}, or the layer in the recipe's high_precision, which is {:?}",
            recipe.high_precision
        ),
    ))
}

/// A linear layer of the model.
struct Found {
    path: String,
    weight: ParamId,
    bias: Option<ParamId>,
    dims: [usize; 2],
}

/// Finds the linear layers.
#[derive(Default)]
struct Survey<'a> {
    include: Option<&'a ParamGroup>,
    included: bool,
    exclude: Option<&'a ParamGroup>,
    excluded: bool,
    path: Vec<String>,
    containers: Vec<String>,
    layers: Vec<Found>,
    reparameterized: Option<String>,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Survey<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" && self.reparameterized.is_none() {
            self.reparameterized = Some(self.path.join("."));
        }
        self.path.push(name.into());
        self.containers.push(container_type.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((name, owner)) = self.path.split_last() else {
            return;
        };
        let is_linear = self
            .containers
            .last()
            .is_some_and(|container| container == "Struct:Linear");
        let owner = owner.join(".");
        match (name.as_str(), D) {
            ("weight", 2) => {
                let path = self.path.join(".");
                let is_in = |group: Option<&ParamGroup>| {
                    group.is_some_and(|group| group.matches(&param.id, Some(&path)))
                };
                let included = !is_linear && is_in(self.include);
                self.included |= included;
                let wanted = is_linear || included;
                let excluded = wanted && is_in(self.exclude);
                self.excluded |= excluded;
                if wanted && !excluded && self.seen.insert(param.id) {
                    let shape = param.lazy_shape();
                    self.layers.push(Found {
                        path: owner,
                        weight: param.id,
                        bias: None,
                        dims: [shape[0], shape[1]],
                    });
                }
            }
            ("bias", 1) if is_linear => {
                if let Some(layer) = self.layers.last_mut()
                    && layer.path == owner
                {
                    layer.bias = Some(param.id);
                }
            }
            _ => {}
        }
    }
}

/// Puts the marks on.
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
