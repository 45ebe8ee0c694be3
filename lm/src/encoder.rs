//! A language model built from unmodified Burn layers, for [`decorate`](burn_nvfp4::Decorator). It
//! is an example of an existing user model.
//!
//! Byte and position embeddings, `burn_nn`'s `TransformerEncoder` with a causal mask (LayerNorm,
//! softmax attention, GELU), LayerNorm, and a head. A recipe that quantizes decorates the model;
//! `bf16` and `f32` use Burn's own arithmetic.

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor};

use crate::config::{Decoration, ModelConfig, RecipeName, RunConfig, VOCABULARY};
use crate::groups::ParallelGroups;
use crate::model::{LanguageModel, cast, check_dtype, embed, initialise};

/// A language model of Burn's own layers.
///
/// All parameters have the type of the activations, as Burn's layers require. The optimizer keeps
/// f32 copies of bf16 parameters.
#[derive(Module, Debug)]
pub struct EncoderModel {
    /// Byte embedding, `[256, width]`.
    pub embedding: Embedding,
    /// Position embedding, `[context, width]`.
    pub positions: Embedding,
    /// Transformer blocks.
    pub encoder: TransformerEncoder,
    /// Norm before the head.
    pub norm: LayerNorm,
    /// Head: maps features to the logits of the next byte.
    pub head: Linear,
    #[module(skip)]
    decoration: Option<Decoration>,
}

impl EncoderModel {
    /// Creates the model without decoration, with parameters in `dtype`.
    ///
    /// # Errors
    /// Returns an error if the sizes do not pass [`ModelConfig::check`], if they include experts,
    /// for which Burn has no layer, or if the device does not support `dtype`.
    pub fn new(
        config: &ModelConfig,
        dtype: FloatDType,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let model = Self::layout(config, dtype, device)?;
        Ok(initialise(model, seed, config.layers, dtype))
    }

    /// Creates a model whose parameters have shapes, but no values until they are read.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    fn layout(config: &ModelConfig, dtype: FloatDType, device: &Device) -> Result<Self> {
        config.check()?;
        check_dtype(dtype, device)?;
        let ModelConfig {
            width,
            layers,
            heads,
            hidden,
            context,
            experts,
            ..
        } = *config;
        ensure!(
            experts.is_none(),
            "experts is {}, but a model of Burn's own layers has none: leave out model moe, or \
             decorate",
            experts.unwrap_or_default()
        );
        Ok(Self {
            embedding: EmbeddingConfig::new(VOCABULARY, width).init(device),
            positions: EmbeddingConfig::new(context, width).init(device),
            encoder: TransformerEncoderConfig::new(width, hidden, heads, layers)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, VOCABULARY)
                .with_bias(false)
                .init(device),
            decoration: None,
        })
    }

    /// Decorates the model, if the run does that with `recipe`.
    fn decorated(self, config: &RunConfig, recipe: &RecipeName) -> Result<Self> {
        match config.decorate {
            Some(decoration) if config.is_quantized(recipe)? => {
                decorate(self, config, recipe, decoration)
            }
            _ => Ok(self),
        }
    }
}

impl LanguageModel for EncoderModel {
    type Whole = Self;

    fn build(config: &RunConfig, recipe: &RecipeName, device: &Device) -> Result<Self> {
        let dtype = config.activation_of(recipe).into();
        let model = Self::new(&config.model, dtype, config.seed, device)?;
        model.decorated(config, recipe)
    }

    fn check(
        config: &RunConfig,
        recipe: &RecipeName,
        device: &Device,
        _groups: &ParallelGroups,
    ) -> Result<()> {
        let dtype = config.activation_of(recipe).into();
        let model = Self::layout(&config.model, dtype, device)?;
        let model = model.decorated(config, recipe)?;
        Ok(config.recipe_schedule(recipe)?.check_model(&model)?)
    }

    fn part_of(whole: Self, _config: &RunConfig, groups: &ParallelGroups) -> Result<Self> {
        groups.number_draws(&whole)?;
        Ok(whole)
    }

    fn context(&self) -> usize {
        self.positions.weight.shape()[0]
    }

    fn predict(&self, tokens: Tensor<2, Int>) -> (Tensor<2>, Option<Tensor<1>>) {
        let [batch, time] = tokens.dims();
        let device = tokens.device();
        let positions = self.positions.weight.val().narrow(0, 0, time);
        let table = self.embedding.weight.val();
        let dtype = table.dtype().into();
        let x = embed(tokens, table, dtype) + positions.unsqueeze();
        let mask = generate_autoregressive_mask(batch, time, &device.without_autodiff());
        let x = self
            .encoder
            .forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(self.norm.forward(x));
        let logits = cast(logits, FloatDType::F32);
        (logits.reshape([batch * time, VOCABULARY]), None)
    }

    fn report(&self) -> Result<Option<String>> {
        self.decoration
            .map(|decoration| report(self, decoration))
            .transpose()
    }
}

/// Decorates `model` so that the linear layers of its blocks run in NVFP4. The head is excluded by
/// its name.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn decorate(
    model: EncoderModel,
    config: &RunConfig,
    recipe: &RecipeName,
    decoration: Decoration,
) -> Result<EncoderModel> {
    use burn_nvfp4::state::assign_layer_ids;

    let decorator = burn_nvfp4::Decorator::new(&config.nvfp4_recipe(recipe)?);
    let decorator = match decoration {
        Decoration::Strict => decorator,
        Decoration::Lenient => decorator.lenient(),
    };
    let mut model = decorator.decorate(model)?;
    model.decoration = Some(decoration);
    assign_layer_ids(&model);
    Ok(model)
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn decorate(
    _model: EncoderModel,
    _config: &RunConfig,
    recipe: &RecipeName,
    _decoration: Decoration,
) -> Result<EncoderModel> {
    anyhow::bail!("decorate with recipe {recipe} needs a build with --features cpu or cuda")
}

/// Reports the backend of every GEMM of a decorated model.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn report(model: &EncoderModel, decoration: Decoration) -> Result<String> {
    let report = burn_nvfp4::decorate::report(model)?;
    if decoration == Decoration::Strict {
        report.check()?;
    }
    Ok(report.to_string())
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn report(_model: &EncoderModel, _decoration: Decoration) -> Result<String> {
    unreachable!("nothing is decorated in this build")
}
