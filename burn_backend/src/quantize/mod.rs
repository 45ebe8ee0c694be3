//! Inference of a model with packed linear weights.
//!
//! [`quantize`] packs the weight of each linear layer of a Burn model in NVFP4 and frees the
//! high-precision weight. The model keeps its type and its forward.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn_core::module::Module;
//! use burn_core::tensor::{Device, Tensor};
//! use burn_nn::LinearConfig;
//! use burn_nvfp4::{QuantizeConfig, quantize};
//!
//! let device = Device::flex();
//! let config = QuantizeConfig::new();
//! let model = vec![LinearConfig::new(32, 64).init(&device), LinearConfig::new(64, 16).init(&device)];
//! let (model, report) = quantize(model, &config)?;
//! println!("{report}");
//! assert!(4 * report.bytes() < report.bytes_before());
//!
//! let record = model.clone().into_record();
//! let other = vec![LinearConfig::new(32, 64).init(&device), LinearConfig::new(64, 16).init(&device)];
//! let loaded = quantize(other, &config)?.0.load_record(record);
//! let x = Tensor::<2>::ones([1, 32], &device);
//! let [y, expected] = [loaded, model].map(|model| model[0].forward(x.clone()));
//! assert_eq!(y.into_data(), expected.into_data());
//! # }
//! # Ok::<(), burn_nvfp4::Nvfp4Error>(())
//! ```

mod report;

use std::collections::HashMap;

use burn_core::module::{Module, ModuleMapper, Param, ParamGroup, ParamId, Reparameterizer};
use burn_core::tensor::{DType, Device, FloatDType, Tensor};
use nvfp4_formats::{BLOCK, Nvfp4Error};

pub use report::{Kept, KeptParameter, PackedLayer, QuantizeReport};

use crate::decorate;
#[cfg(any(feature = "cpu", feature = "cuda"))]
use crate::decorate::packed::Route;
use crate::nn::{Activations, PackedParameter};
use crate::survey::{Found, LeftAlone, Selection, Surveyed};
use crate::validate;

/// Configuration of [`quantize`].
#[derive(Debug, Clone)]
pub struct QuantizeConfig {
    activations: Activations,
    include: Option<ParamGroup>,
    exclude: Option<ParamGroup>,
}

impl Default for QuantizeConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl QuantizeConfig {
    /// Creates the configuration of weight-only quantization (W4A16) of all linear layers except
    /// output heads and routers.
    ///
    /// Heads and routers are recognized by their names, as by the decorator: `head`, `*_head`,
    /// `classifier`, `logits`, `unembed`, `unembedding`, `router`, `*_router`, and `gate` beside
    /// `experts`. The names of layers of this crate, such as [`Nvfp4Linear`](crate::Nvfp4Linear),
    /// do not matter.
    pub fn new() -> Self {
        Self {
            activations: Activations::HighPrecision,
            include: None,
            exclude: None,
        }
    }

    /// Sets the quantization of the inputs of the layers: none (W4A16, the default),
    /// [`Activations::DYNAMIC`] (W4A4), or [`Activations::Static`] (W4A4 with scales from a
    /// calibration, [`quantize_calibrated`], or from a record).
    ///
    /// Layers of this crate quantize their inputs on all devices. A `burn_nn::Linear` does on a
    /// CubeCL device, in the kernels of [the decorator](quantize#burns-own-layers).
    pub fn with_activations(mut self, activations: Activations) -> Self {
        self.activations = activations;
        self
    }

    /// Also packs the weights in `group`: those of heads and routers, and parameters of rank 2 or 3
    /// called `weight` of other modules, which use them as `x.matmul(weight)` with `[d_in, d_out]`,
    /// or with a stack of these and an `x` of `[experts, tokens, d_in]`.
    pub fn include(mut self, group: ParamGroup) -> Self {
        self.include = Some(group);
        self
    }

    /// Leaves the weights in `group` in high precision. Takes precedence over
    /// [`include`](Self::include).
    pub fn exclude(mut self, group: ParamGroup) -> Self {
        self.exclude = Some(group);
        self
    }
}

/// Packs the linear weights of `model` in NVFP4, for inference: those of `burn_nn::Linear`, of
/// [`Nvfp4Linear`](crate::Nvfp4Linear) and of
/// [`Nvfp4GroupedLinear`](crate::Nvfp4GroupedLinear), anywhere in the model. Returns the model and
/// what was packed.
///
/// A weight is quantized in 1x16 blocks along `d_in`, rounded to nearest, with one global scale,
/// and its high-precision values are freed. Layers of this crate multiply by the codes; their
/// recipe has no effect any more. Biases and all other parameters stay as they are; weights whose
/// `d_in` is not a multiple of 16 do too, and are in the report.
///
/// The record of the packed model holds the codes and scales. To load it, call `quantize` with the
/// same configuration on a new model, then `load_record`. [`dequantize`] restores high-precision
/// weights, with the quantized values.
///
/// Clones of `model` keep their weights: `quantize(model.valid(), &config)` evaluates a model
/// between two training steps.
///
/// With [`Activations::Static`] outputs are NaN until a record is loaded: use
/// [`quantize_calibrated`] to measure the scales.
///
/// # Burn's own layers
///
/// On a CubeCL device with Burn's fusion, the kernels of this project run the GEMMs of
/// `burn_nn::Linear`, as in a decorated model ([`decorate`](decorate::decorate) lists the
/// conditions): call [`decorate::install`] before the first tensor. A missed GEMM is NaN, and the
/// next forward panics with the name of the layer. On Flex, or if `install` came too late, such a
/// layer dequantizes its weight in each forward, multiplies in the dtype of its input, and frees the
/// values; its inputs cannot be quantized there.
///
/// # Errors
/// Returns an error if the model has no linear layer that can be packed, a parameter has a
/// reparameterization already (decorated, quantized, sharded, LoRA), `include` or `exclude` matches
/// nothing, the device has no implementation, a weight is not `f32`, `bf16` or `f16`, or inputs of a
/// layer that is not of this crate are to be quantized where they cannot be.
pub fn quantize<M: Module>(
    model: M,
    config: &QuantizeConfig,
) -> Result<(M, QuantizeReport), Nvfp4Error> {
    let (model, report, _) = pack(model, config)?;
    Ok((model, report))
}

/// [`quantize`] with static scales of the activations: `run` calls the forward of the packed model
/// on some batches, and the largest magnitude of each layer's inputs becomes its scale.
///
/// During `run` the inputs are not quantized. Each layer waits for the device.
///
/// # Errors
/// Same as [`quantize`]; also if the activations of `config` are not [`Activations::Static`], or a
/// layer saw no batch or an input that is not finite.
pub fn quantize_calibrated<M: Module>(
    model: M,
    config: &QuantizeConfig,
    run: impl FnOnce(&M),
) -> Result<(M, QuantizeReport), Nvfp4Error> {
    if config.activations != Activations::Static {
        return Err(Nvfp4Error::value(
            "config",
            format!("activations {:?}", config.activations),
            "Activations::Static: nothing else is calibrated",
        ));
    }
    let (model, report, packed) = pack(model, config)?;
    for (_, parameter) in &packed {
        parameter.observer().start();
    }
    run(&model);
    for device in model.devices() {
        device
            .sync()
            .map_err(|error| Nvfp4Error::value("run", error.to_string(), "no failure"))?;
    }
    let mut scales = Scales::default();
    let (mut unseen, mut not_finite) = (Vec::new(), Vec::new());
    for (path, parameter) in &packed {
        let observed = parameter.observer().finish();
        match (observed.inputs, observed.amax.is_finite()) {
            (0, _) => unseen.push(path.as_str()),
            (_, false) => not_finite.push(path.as_str()),
            (_, true) => {
                let input = parameter.input.as_ref().expect("static activations");
                scales.0.insert(input.id, observed.scale());
            }
        }
    }
    for (found, paths) in [
        ("no batch", unseen),
        ("inputs that are not finite", not_finite),
    ] {
        if !paths.is_empty() {
            return Err(Nvfp4Error::value(
                "run",
                format!("{found} in {}", paths.join(", ")),
                "a forward of every packed layer on finite inputs; `exclude` leaves a layer out",
            ));
        }
    }
    Ok((model.map(&mut scales), report))
}

/// Replaces packed weights by high-precision weights with the quantized values, in their former
/// dtype. Also removes other reparameterizations, as `Module::materialize` does; use it instead of
/// that, which sees only the marks of Burn's own layers on a CubeCL device.
pub fn dequantize<M: Module>(model: M) -> M {
    decorate::undecorate(model)
}

/// Packs the weights of `model`. Also returns the packed weights, by the path of their layer.
#[allow(clippy::type_complexity, reason = "three results of one pass")]
fn pack<M: Module>(
    model: M,
    config: &QuantizeConfig,
) -> Result<(M, QuantizeReport, Vec<(String, PackedParameter)>), Nvfp4Error> {
    for device in model.devices() {
        validate::device("model", &device)?;
    }
    let selection = Selection {
        verb: "quantize",
        own: true,
        include: config.include.as_ref(),
        exclude: config.exclude.as_ref(),
    };
    let Surveyed {
        layers, left_alone, ..
    } = selection.of(&model)?;
    let left_alone = left_alone.into_iter().map(|(layer, why)| {
        let why = match why {
            LeftAlone::HeadOrRouter => Kept::HeadOrRouter,
            LeftAlone::Excluded => Kept::Excluded,
            LeftAlone::Sharded => Kept::Sharded,
        };
        (layer, Some(why))
    });
    let layers = layers.into_iter().map(|layer| {
        let fits = layer.dims[0] > 0 && layer.dims[0].is_multiple_of(BLOCK);
        (layer, (!fits).then_some(Kept::Width))
    });
    let weights = left_alone.chain(layers);
    let mut made = Made::default();
    let model = model.apply_reparameterization(Packer {
        weights: weights.map(|weight| (weight.0.weight, weight)).collect(),
        activations: config.activations,
        made: &mut made,
    });
    if let Some(error) = made.error {
        return Err(error);
    }
    if made.report.layers.is_empty() {
        let kept = made.report.kept.iter().map(ToString::to_string);
        return Err(Nvfp4Error::value(
            "model",
            format!("no weight to pack: {}", kept.collect::<Vec<_>>().join("; ")),
            format!("a linear layer with a d_in that is a multiple of {BLOCK}"),
        ));
    }
    Ok((model, made.report, made.packed))
}

/// Result of a [`Packer`].
#[derive(Default)]
struct Made {
    report: QuantizeReport,
    packed: Vec<(String, PackedParameter)>,
    error: Option<Nvfp4Error>,
}

/// Replaces the weights of linear layers.
struct Packer<'a> {
    /// Layer of each linear weight, and why the weight is kept, if it is.
    weights: HashMap<ParamId, (Found, Option<Kept>)>,
    activations: Activations,
    made: &'a mut Made,
}

impl Packer<'_> {
    /// Packs the weight of `layer`.
    fn pack<const D: usize>(
        &self,
        layer: &Found,
        weight: Tensor<D>,
    ) -> Result<(PackedParameter, PackedLayer), Nvfp4Error> {
        validate::operand("model", &weight)?;
        let (device, activations) = (weight.device(), self.activations);
        let mut packed = PackedParameter::try_new(weight.clone(), activations)?;
        let mut dequantizes = false;
        if !layer.is_own {
            match routed(&mut packed, layer, &device) {
                Ok(()) => {}
                Err(_) if activations == Activations::HighPrecision => dequantizes = true,
                Err(error) => {
                    return Err(Nvfp4Error::value(
                        "config",
                        format!("{activations} for `{}`: {error}", layer.path),
                        "Activations::HighPrecision, nvfp4::nn::Linear instead of burn's, or the \
                         layer in `exclude`",
                    ));
                }
            }
        }
        let scales = packed.input.as_ref().map_or(0, |_| packed.packed.stack());
        let row = PackedLayer {
            path: layer.path.clone(),
            shape: weight.dims().to_vec(),
            activations,
            dequantizes,
            bytes_before: weight.shape().num_elements() * weight.dtype().size(),
            bytes: packed.packed.bytes() + 4 * scales,
            amax: weight.clone().abs().max().into_scalar::<f32>(),
            sqnr_db: sqnr_db(weight, &packed)?,
        };
        Ok((packed, row))
    }
}

impl Reparameterizer for Packer<'_> {
    type Reparam = PackedParameter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedParameter>) {
        let (path, reason) = match self.weights.get(&param.id) {
            Some((layer, None)) => match self.pack(layer, param.val().detach()) {
                Ok((packed, row)) => {
                    self.made.packed.push((row.path.clone(), packed.clone()));
                    self.made.report.layers.push(row);
                    // One column of the same dtype and device: Burn's modules read `d_in` there.
                    let mut dims = param.dims();
                    dims[D - 1] = 1;
                    let base = Tensor::zeros(dims, (&param.device(), param.dtype()));
                    return (Param::initialized(param.id, base), Some(packed));
                }
                Err(error) => {
                    self.made.error.get_or_insert(error);
                    return (param, None);
                }
            },
            Some((layer, Some(reason))) => (&*layer.path, *reason),
            None if D < 2 => return (param, None),
            None => (path, Kept::NotLinear),
        };
        self.made.report.kept.push(KeptParameter {
            path: path.to_owned(),
            shape: param.dims().to_vec(),
            bytes: param.shape().num_elements() * param.dtype().size(),
            reason,
        });
        (param, None)
    }
}

/// Routes the GEMMs of `layer`, which is not of this crate, to the kernels that read `packed`.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn routed(packed: &mut PackedParameter, layer: &Found, device: &Device) -> Result<(), Nvfp4Error> {
    let route = Route::new(device, &layer.path, layer.dims, layer.experts)?;
    decorate::install()?;
    packed.set_route(route);
    Ok(())
}

/// Returns an error: without CubeCL no kernel runs the GEMMs of `layer`.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn routed(_: &mut PackedParameter, _layer: &Found, device: &Device) -> Result<(), Nvfp4Error> {
    Err(Nvfp4Error::Device {
        argument: "model",
        found: validate::device_name(device),
        expected: "a CubeCL CPU or CUDA device (features `cpu` and `cuda`)".into(),
    })
}

/// Returns the ratio of the squares of `weight` and of its quantization error, in dB.
fn sqnr_db<const D: usize>(weight: Tensor<D>, packed: &PackedParameter) -> Result<f64, Nvfp4Error> {
    let [stack, d_in, d_out] = packed.dims::<3>();
    let weight = weight.cast(FloatDType::F32).reshape([stack, d_in, d_out]);
    let values = packed.packed.try_dequantize(FloatDType::F32)?;
    let values: Tensor<3> = values.reshape([stack, d_out, d_in]);
    let error = weight.clone() - values.swap_dims(1, 2);
    let sum = |x: Tensor<3>| f64::from(x.square().sum().into_scalar::<f32>());
    Ok(10.0 * (sum(weight) / sum(error)).log10())
}

/// Sets the static scales of the activations, by the id of their parameter.
#[derive(Default)]
struct Scales(HashMap<ParamId, f32>);

impl ModuleMapper for Scales {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.get(&param.id) {
            Some(scale) => param
                .map(|scales| Tensor::full(scales.dims(), *scale, (&scales.device(), DType::F32))),
            None => param,
        }
    }
}
