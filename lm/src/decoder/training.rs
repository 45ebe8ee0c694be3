//! Prepares a decoder for training.

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::loss::{CHUNK_BYTES, CrossEntropy, try_cross_entropy, try_linear_cross_entropy};
use burn_nvfp4::nn::Nvfp4GroupedLinearConfig;
use burn_nvfp4::recipe::RecipeSchedule;
use burn_nvfp4::state::assign_layer_ids;

use super::Decoder;
use super::feed_forward::FeedForward;
use super::names;
use super::projection::{Experts, Projection};
use crate::model::check_dtype;
use crate::random::hash;

impl Decoder {
    /// Prepares the model for training with `recipe`. Every projection of its layers is quantized
    /// according to the recipe, except those that it keeps in high precision; embedding, norms,
    /// routers and head are not quantized. Parameters keep their type and get IDs derived from
    /// their paths; activations have type `activation`.
    ///
    /// # Errors
    /// Returns an error if a width is not a multiple of 16 in a projection that the recipe does not
    /// keep in high precision, the device does not support the type, or the recipe does not pass
    /// its checks or keeps layers that the model lacks.
    pub fn into_training(self, recipe: &Nvfp4Recipe, activation: FloatDType) -> Result<Self> {
        self.into_scheduled_training(&recipe.schedule("recipe")?, activation)
    }

    /// Prepares the model for training with the recipes of `schedule`, like
    /// [`into_training`](Self::into_training); it follows the first phase until the schedule is
    /// applied.
    ///
    /// # Errors
    /// Returns the errors of [`into_training`](Self::into_training), for the recipe of any phase.
    pub fn into_scheduled_training(
        self,
        schedule: &RecipeSchedule,
        activation: FloatDType,
    ) -> Result<Self> {
        let recipe = &schedule.phases()[0].recipe;
        let mut kept = 0;
        let model = self.with_projections(
            activation,
            |it, odd| {
                let Some(Odd { what, path }) = odd else {
                    return it.into_nvfp4(recipe);
                };
                let keeps = |recipe: &Nvfp4Recipe| {
                    let group = recipe.high_precision.as_ref();
                    group.is_some_and(|group| group.matches(&ParamId::new(), Some(&path)))
                };
                let mut phases = schedule.phases().iter();
                ensure!(
                    phases.all(|phase| keeps(&phase.recipe) || !phase.is_quantized()),
                    "{what}: keep them in high precision (--high-precision {}), or change the width",
                    if path.contains(FEED_FORWARD) { FEED_FORWARD } else { "attention" }
                );
                kept += usize::from(keeps(recipe));
                Ok(it)
            },
            |it| grouped(it, recipe),
        )?;
        match recipe.apply(&model) {
            // The pattern matches only projections that are not NVFP4 layers.
            Err(_) if kept > 0 => recipe.clone().with_high_precision(None).apply(&model)?,
            applied => applied?,
        };
        Ok(model)
    }

    /// Prepares the model for training adapters: packed weights stay packed, and high-precision
    /// weights are not quantized. Parameters get IDs derived from their paths; activations have
    /// type `activation`. [`into_lora`](Self::into_lora) then freezes the model.
    ///
    /// # Errors
    /// Returns an error if a width is not a multiple of 16, or if the device does not support the
    /// type.
    pub fn into_frozen(self, activation: FloatDType) -> Result<Self> {
        let recipe = Nvfp4Recipe::bf16();
        self.with_projections(
            activation,
            |it, odd| match it.is_packed() || odd.is_some() {
                true => Ok(it),
                false => it.into_nvfp4(&recipe),
            },
            |it| match it.is_packed() {
                true => Ok(it),
                false => grouped(it, &recipe),
            },
        )
    }

    /// Converts the projections and experts of the model with the given functions, and gives
    /// parameters IDs derived from their paths.
    fn with_projections(
        self,
        activation: FloatDType,
        mut projection: impl FnMut(Projection, Option<Odd>) -> Result<Projection>,
        experts: impl Fn(Experts) -> Result<Experts>,
    ) -> Result<Self> {
        let mut model = self;
        let config = model.config.clone();
        check_dtype(activation, &model.device())?;
        model.dtype = activation;
        for (index, layer) in model.layers.iter_mut().enumerate() {
            for (site, place) in layer.projections_mut() {
                let [d_in, d_out] = place.shape();
                let parts = site.parts(&config, index, d_out);
                // The path that patterns match for NVFP4 layers.
                let path = format!("layers.{index}.{}.Nvfp4.weight", site.path());
                let what = names::odd_widths(&config, &parts, d_in);
                let odd = what.map(|what| Odd { what, path });
                replace(place, |it| projection(it, odd)).with_context(|| parts[0].name.clone())?;
            }
            if let FeedForward::Moe(moe) = &mut layer.feed_forward {
                let context = || format!("the experts of {}", names::layer(index));
                replace(&mut moe.gate_up, &experts).with_context(context)?;
                replace(&mut moe.down, &experts).with_context(context)?;
            }
        }
        let model = model.with_ids_of_paths();
        assign_layer_ids(&model);
        Ok(model)
    }

    /// Makes the backward of the first `layers` layers recompute the inputs of the feed-forward's
    /// activation instead of saving them. Results have the same bits.
    ///
    /// The first layers are chosen because the backward reaches them last, when the other layers
    /// have freed their memory.
    ///
    /// # Errors
    /// Returns an error if the model has fewer layers, or if one of them was not prepared by
    /// [`into_training`](Self::into_training) or has adapters.
    pub fn with_recompute(mut self, layers: usize) -> Result<Self> {
        let all = self.layers.len();
        ensure!(
            layers <= all,
            "recompute is {layers}, but the model has {all} layers"
        );
        for (index, layer) in self.layers.iter_mut().take(layers).enumerate() {
            ensure!(
                layer.feed_forward.can_recompute(),
                "recompute is {layers}, but the feed-forward of layer {index} is packed, has \
                 adapters or another activation than SiLU: only projections with SiLU that are \
                 trained, or frozen in high precision, are computed again"
            );
            layer.feed_forward.recompute();
        }
        Ok(self)
    }

    /// Gives parameters IDs derived from their paths. Burn's IDs differ between processes, so the
    /// files of a run would not be reproducible.
    pub(crate) fn with_ids_of_paths(self) -> Self {
        self.map(&mut Ids::default())
    }

    /// Returns the weight of the head, `[d_model, vocab]`; that of the embedding if tied.
    pub fn head_weight(&self) -> Tensor<2> {
        match &self.head {
            Some(head) => head.weight.val(),
            None => self.embedding.weight.val().transpose(),
        }
    }

    /// Computes the cross entropy, `f32[1]`, of `targets` (`[rows]`) after `features`
    /// (`[rows, d_model]`), according to `params`; differentiable. Unless logits have a soft cap,
    /// never holds those of all rows in memory.
    ///
    /// # Errors
    /// Returns an error if a type or shape does not match.
    pub fn cross_entropy(
        &self,
        features: Tensor<2>,
        targets: Tensor<1, Int>,
        params: CrossEntropy,
    ) -> Result<Tensor<1>> {
        if self.config.logit_cap.is_some() {
            return Ok(try_cross_entropy(self.logits(features), targets, params)?);
        }
        let weight = self.head_weight();
        let loss = try_linear_cross_entropy(features, weight, targets, params, CHUNK_BYTES)?;
        Ok(loss)
    }
}

/// Field of a layer that holds gate, up and down.
const FEED_FORWARD: &str = "feed_forward";

/// A projection whose width is not a multiple of 16.
struct Odd {
    /// Description of its modules and widths.
    what: String,
    /// Path of its weight.
    path: String,
}

/// Replaces the value at `place` by the result of `make`. The value is meaningless after an error.
fn replace<T: Clone>(place: &mut T, make: impl FnOnce(T) -> Result<T>) -> Result<()> {
    *place = make(place.clone())?;
    Ok(())
}

/// Prepares the experts for `recipe`.
fn grouped(experts: Experts, recipe: &Nvfp4Recipe) -> Result<Experts> {
    let Experts::Grouped(layer) = experts else {
        anyhow::bail!("packed experts cannot be trained: load the model dequantized");
    };
    let [count, d_in, d_out] = layer.weight.lazy_shape().dims();
    let config = Nvfp4GroupedLinearConfig::new(count, d_in, d_out)
        .with_initializer(Initializer::Zeros)
        .with_bias(layer.bias.is_some())
        .with_recipe(recipe.clone());
    let mut made = config.try_init(&layer.weight.lazy_device())?;
    made.weight = layer.weight;
    made.bias = layer.bias;
    Ok(Experts::Grouped(made))
}

/// Gives parameters IDs derived from their paths.
#[derive(Default)]
struct Ids(Vec<String>);

impl Ids {
    /// Returns the ID of the path.
    fn id(&self) -> ParamId {
        ParamId::from(hash(self.0.join(".").as_bytes()))
    }
}

impl ModuleMapper for Ids {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.0.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.0.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        Param::initialized(self.id(), param.val())
    }

    /// Codes and block scales of packed weights.
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        Param::initialized(self.id(), param.val())
    }
}
