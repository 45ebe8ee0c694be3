//! A decoder for training.

use anyhow::{Result, ensure};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::loss::{CHUNK_BYTES, CrossEntropy, try_linear_cross_entropy};
use burn_nvfp4::nn::Nvfp4GroupedLinearConfig;
use burn_nvfp4::state::assign_layer_ids;

use super::Decoder;
use super::feed_forward::FeedForward;
use super::projection::{Experts, Projection};
use crate::model::check_dtype;
use crate::random::hash;

impl Decoder {
    /// The model for training with `recipe`: every projection of its layers is quantized as the
    /// recipe says, but for those that it keeps in high precision; embedding, norms, routers and
    /// head are not. Parameters keep their type, and get ids of their paths; activations are of type
    /// `activation`.
    ///
    /// # Errors
    /// When a width is no multiple of 16, the device does not compute in the type, or the recipe
    /// does not pass its checks or keeps layers that the model lacks.
    pub fn into_training(self, recipe: &Nvfp4Recipe, activation: FloatDType) -> Result<Self> {
        let mut model = self;
        check_dtype(activation, &model.device())?;
        model.dtype = activation;
        for layer in &mut model.layers {
            let attention = &mut layer.attention;
            replace(&mut attention.qkv, |it| it.into_nvfp4(recipe))?;
            replace(&mut attention.out, |it| it.into_nvfp4(recipe))?;
            match &mut layer.feed_forward {
                FeedForward::Dense(dense) => {
                    replace(&mut dense.gate_up, |it| it.into_nvfp4(recipe))?;
                    replace(&mut dense.down, |it| it.into_nvfp4(recipe))?;
                }
                FeedForward::Moe(moe) => {
                    replace(&mut moe.gate_up, |it| grouped(it, recipe))?;
                    replace(&mut moe.down, |it| grouped(it, recipe))?;
                }
            }
        }
        let model = model.with_ids_of_paths();
        assign_layer_ids(&model);
        recipe.apply(&model)?;
        Ok(model)
    }

    /// The model for evaluation, without autodiff: weights that are trained in NVFP4 are quantized
    /// once, and not in each forward. Outputs stay what they are in validation. Layers without a
    /// packed form stay as they are: those in high precision, in other formats, or with adapters.
    pub fn quantized_once(self) -> Self {
        fn packed<T: Clone>(place: &mut T, make: impl FnOnce(T) -> Result<T>) {
            if let Ok(made) = make(place.clone()) {
                *place = made;
            }
        }
        let mut model = self;
        for layer in &mut model.layers {
            packed(&mut layer.attention.qkv, Projection::into_packed);
            packed(&mut layer.attention.out, Projection::into_packed);
            match &mut layer.feed_forward {
                FeedForward::Dense(dense) => {
                    packed(&mut dense.gate_up, Projection::into_packed);
                    packed(&mut dense.down, Projection::into_packed);
                }
                FeedForward::Moe(moe) => {
                    packed(&mut moe.gate_up, Experts::into_packed);
                    packed(&mut moe.down, Experts::into_packed);
                }
            }
        }
        model
    }

    /// The same parameters with ids of their paths: those of Burn are of the process, and files of a
    /// run would not be those of another.
    pub(crate) fn with_ids_of_paths(self) -> Self {
        self.map(&mut Ids::default())
    }

    /// The weight of the head, `[d_model, vocab]`; that of the embedding where they are one.
    pub fn head_weight(&self) -> Tensor<2> {
        match &self.head {
            Some(head) => head.weight.val(),
            None => self.embedding.weight.val().transpose(),
        }
    }

    /// The cross entropy, `f32[1]`, of `targets` (`[rows]`) after `features` (`[rows, d_model]`), as
    /// `params` says; differentiable. Logits of all rows are never in memory.
    ///
    /// # Errors
    /// When a type or shape does not fit.
    pub fn cross_entropy(
        &self,
        features: Tensor<2>,
        targets: Tensor<1, Int>,
        params: CrossEntropy,
    ) -> Result<Tensor<1>> {
        let weight = self.head_weight();
        let loss = try_linear_cross_entropy(features, weight, targets, params, CHUNK_BYTES)?;
        Ok(loss)
    }
}

/// Puts what `make` makes of `place` there. After an error it has no meaning.
fn replace<T: Clone>(place: &mut T, make: impl FnOnce(T) -> Result<T>) -> Result<()> {
    *place = make(place.clone())?;
    Ok(())
}

/// The experts with `recipe`.
fn grouped(experts: Experts, recipe: &Nvfp4Recipe) -> Result<Experts> {
    let Experts::Grouped(layer) = experts else {
        anyhow::bail!("packed experts cannot be trained: load the model dequantized");
    };
    let [count, d_in, d_out] = layer.weight.lazy_shape().dims();
    ensure!(
        layer.bias.is_none(),
        "experts with a bias cannot be trained"
    );
    let config = Nvfp4GroupedLinearConfig::new(count, d_in, d_out)
        .with_initializer(Initializer::Zeros)
        .with_recipe(recipe.clone());
    let mut made = config.try_init(&layer.weight.lazy_device())?;
    made.weight = layer.weight;
    Ok(Experts::Grouped(made))
}

/// Gives parameters the ids of their paths.
#[derive(Default)]
struct Ids(Vec<String>);

impl ModuleMapper for Ids {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.0.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.0.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = ParamId::from(hash(self.0.join(".").as_bytes()));
        Param::initialized(id, param.val())
    }
}
