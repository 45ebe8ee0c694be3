//! The model: a decoder-only transformer over bytes.
//!
//! Blocks of [`burn_nvfp4::nn`]: RMSNorm before each half, rotary positions, causal attention, and
//! a SwiGLU feed-forward or a mixture of SwiGLU experts. The projections of a block are NVFP4
//! layers; the embedding, the routers and the head stay in high precision. Parameters are f32
//! master weights; activations between the layers have the type [`Activation`], but norms, rotary
//! embedding, softmax, routers and loss are computed in f32.

mod parallel;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::loss::{CrossEntropy, cross_entropy, linear_cross_entropy};
use burn_nvfp4::nn::tensor_parallel::ShardedParameter;
use burn_nvfp4::nn::{
    BlockOutput, Nvfp4TransformerBlock, Nvfp4TransformerBlockConfig, ResidualStream, RmsNorm,
    RmsNormConfig, RopeCache, RopeCacheConfig, expert_parameters,
};
use burn_nvfp4::parallel::Shards;
use burn_nvfp4::state::assign_layer_ids;

use crate::config::{Activation, BALANCE_SHARE, ModelConfig, RecipeName, RunConfig, VOCABULARY};
use crate::groups::ParallelGroups;
use crate::random::{hash, normal};

pub use parallel::ParallelTransformer;

/// Standard deviation of the initial embedding.
const EMBEDDING_DEVIATION: f64 = 0.1;
/// Scale of the initial head, which makes the untrained model's prediction close to uniform.
const HEAD_SCALE: f64 = 0.25;
/// Weight of each block's router z-loss in the training loss.
const Z_SHARE: f64 = 0.001;

/// A model that predicts the next byte and is trained by [`ByteTask`](crate::train::ByteTask).
pub trait LanguageModel: Module + 'static {
    /// Model on a single rank; checkpoints hold its parameters.
    type Whole: Module;

    /// Builds the untrained model of the run `config` for `recipe` on `device`. The weights depend
    /// only on the run's seed and sizes, not on the device or the recipe.
    ///
    /// # Errors
    /// Returns an error if the sizes are invalid, or if the device does not support the recipe.
    fn build(config: &RunConfig, recipe: &RecipeName, device: &Device) -> Result<Self::Whole>;

    /// Checks that the model can be built for `recipe` on `device` and split over the ranks of
    /// `groups`, without building its weights. `config` has passed its checks.
    ///
    /// # Errors
    /// Returns the errors of [`build`](Self::build) and [`part_of`](Self::part_of).
    fn check(
        config: &RunConfig,
        recipe: &RecipeName,
        device: &Device,
        groups: &ParallelGroups,
    ) -> Result<()>;

    /// Takes this rank's part of `whole`, which is the same on all ranks. Parameters keep their
    /// IDs.
    ///
    /// # Errors
    /// Returns an error if the model or its recipe cannot be split over the ranks.
    fn part_of(whole: Self::Whole, config: &RunConfig, groups: &ParallelGroups) -> Result<Self>;

    /// Returns the parameters that are split over ranks, grouped by the ranks that hold the other
    /// shards.
    fn partitions(&self, groups: &ParallelGroups) -> Vec<ModelPartition> {
        let _ = groups;
        Vec::new()
    }

    /// Returns the maximum sequence length.
    fn context(&self) -> usize;

    /// Returns the logits of the byte after each byte of `tokens` (`[batch, time]`), f32
    /// `[batch * time, 256]`, and the auxiliary loss of the model, if any.
    fn predict(&self, tokens: Tensor<2, Int>) -> (Tensor<2>, Option<Tensor<1>>);

    /// Returns the logits of the byte after each byte of `tokens`, `[batch, time]`: f32
    /// `[batch * time, 256]`.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        self.predict(tokens).0
    }

    /// Returns the mean cross entropy, in nats per byte, of `targets` under the prediction from
    /// `tokens`, both `[batch, time]`, and the auxiliary loss of the model, if any.
    fn losses(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, Option<Tensor<1>>) {
        let (logits, more) = self.predict(tokens);
        let loss = cross_entropy(logits, flat(targets), CrossEntropy::default());
        (loss, more)
    }

    /// Returns the mean cross entropy, in nats per byte, of `targets` under the prediction from
    /// `tokens`; both are `[batch, time]`.
    fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        self.losses(tokens, targets).0
    }

    /// Returns the training objective: [`loss`](Self::loss) plus the auxiliary loss of the model.
    fn training_loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        match self.losses(tokens, targets) {
            (loss, Some(more)) => loss + more,
            (loss, None) => loss,
        }
    }

    /// Reports the backend of each GEMM since the model was built, if the model is decorated.
    ///
    /// # Errors
    /// Returns an error if the report shows that the model did not follow its recipe.
    fn report(&self) -> Result<Option<String>> {
        Ok(None)
    }
}

/// Parameters that are split over ranks.
#[derive(Debug, Clone)]
pub struct ModelPartition {
    /// Parameter IDs, and the ranks with the other shards.
    pub shards: Shards,
    /// Shards of parameters that are not split along their first axis, each as one segment.
    pub parameters: BTreeMap<u64, ShardedParameter>,
}

impl ModelPartition {
    /// Returns the partition of the experts of `model`, if other ranks hold different experts.
    pub(crate) fn of_experts<M: Module>(model: &M, groups: &ParallelGroups) -> Option<Self> {
        let experts = expert_parameters(model);
        (!experts.is_empty()).then(|| Self {
            shards: Shards {
                group: groups.expert().clone(),
                ids: experts.iter().map(|id| id.val()).collect(),
            },
            parameters: BTreeMap::new(),
        })
    }
}

/// Accumulates the router losses of all blocks; `balance_share` is the weight of the load-balancing
/// loss.
#[derive(Default)]
struct RouterLosses {
    sum: Option<Tensor<1>>,
}

impl RouterLosses {
    fn add<T>(&mut self, block: BlockOutput<T>, balance_share: f64) -> T {
        let BlockOutput {
            output,
            balance_loss,
            z_loss,
        } = block;
        for (loss, share) in [(balance_loss, balance_share), (z_loss, Z_SHARE)] {
            let Some(loss) = loss.map(|loss| loss.mul_scalar(share)) else {
                continue;
            };
            self.sum = Some(match self.sum.take() {
                Some(sum) => sum + loss,
                None => loss,
            });
        }
        output
    }
}

/// Checks that `device` supports `dtype`.
///
/// CubeCL's CPU runtime reports bf16 support, but its operations lack a library function, and then
/// do nothing instead of failing.
pub(crate) fn check_dtype(dtype: FloatDType, device: &Device) -> Result<()> {
    ensure!(
        dtype == FloatDType::F32 || !is_cubecl_cpu(device),
        "{dtype:?} on device cpu is not possible: CubeCL's CPU runtime computes in F32 only; use \
         device flex or cuda:N"
    );
    ensure!(
        device.supports_dtype(dtype),
        "{dtype:?} is not possible: the device does not compute in that type"
    );
    Ok(())
}

fn is_cubecl_cpu(device: &Device) -> bool {
    #[cfg(feature = "cpu")]
    return *device == Device::cpu();
    #[cfg(not(feature = "cpu"))]
    {
        let _ = device;
        false
    }
}

/// Casts `x` to `dtype`; does nothing if it already has that type.
pub(crate) fn cast<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    if x.dtype() == DType::from(dtype) {
        x
    } else {
        x.cast(dtype)
    }
}

/// The language model.
#[derive(Module, Debug)]
pub struct Transformer {
    /// Byte embedding, f32 `[256, width]`.
    pub embedding: Param<Tensor<2>>,
    /// Transformer blocks, in order.
    pub blocks: Vec<Nvfp4TransformerBlock>,
    /// Norm before the head.
    pub norm: RmsNorm,
    /// Head: maps features to the logits of the next byte, f32 `[width, 256]`.
    pub head: Param<Tensor<2>>,
    positions: RopeCache,
    #[module(skip)]
    activation: Activation,
    /// Weight of each block's load-balancing loss in the training loss.
    #[module(skip)]
    balance_share: f64,
}

impl Transformer {
    /// Creates a model on `device`. The weights depend only on `seed` and the sizes, not on the
    /// device or the recipe.
    ///
    /// # Errors
    /// Returns an error if the sizes do not pass [`ModelConfig::check`], if the device has no NVFP4
    /// implementation or does not support the activations' type, or if the recipe's group of
    /// high-precision layers matches no layer of the model.
    pub fn new(
        config: &ModelConfig,
        activation: Activation,
        recipe: &Nvfp4Recipe,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let model = Self::layout(config, activation, recipe, device)?;
        Ok(initialise(model, seed, config.layers, FloatDType::F32))
    }

    /// Creates a model whose parameters have IDs and shapes, but no values yet: they take no memory
    /// until they are read, as zeros.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    fn layout(
        config: &ModelConfig,
        activation: Activation,
        recipe: &Nvfp4Recipe,
        device: &Device,
    ) -> Result<Self> {
        config.check()?;
        check_dtype(activation.into(), device)?;
        let ModelConfig {
            width,
            layers,
            heads,
            hidden,
            context,
            experts,
            top_k,
        } = *config;
        let block = Nvfp4TransformerBlockConfig::new(width, heads, hidden)
            .with_experts(experts)
            .with_top_k(top_k)
            .with_initializer(Initializer::Zeros)
            .with_recipe(recipe.clone());
        let blocks = (0..layers)
            .map(|_| Ok(block.try_init(device)?))
            .collect::<Result<Vec<Nvfp4TransformerBlock>>>()?;
        let model = Self {
            embedding: Initializer::Zeros.init([VOCABULARY, width], device),
            blocks,
            norm: RmsNormConfig::new(width)
                .with_epsilon(block.epsilon)
                .init(device),
            head: Initializer::Zeros.init([width, VOCABULARY], device),
            positions: RopeCacheConfig::new(context, width / heads).try_init(device)?,
            activation,
            balance_share: BALANCE_SHARE,
        };
        let model = model.map(&mut Initialise::default());
        assign_layer_ids(&model);
        recipe.apply(&model)?;
        Ok(model)
    }
}

impl LanguageModel for Transformer {
    type Whole = Self;

    fn build(config: &RunConfig, recipe: &RecipeName, device: &Device) -> Result<Self> {
        let model = Self::new(
            &config.model,
            config.activation_of(recipe),
            &config.nvfp4_recipe(recipe)?,
            config.seed,
            device,
        )?;
        Ok(Self {
            balance_share: config.balance_loss.unwrap_or(BALANCE_SHARE),
            ..model.with_recompute(config.recompute)
        })
    }

    fn check(
        config: &RunConfig,
        recipe: &RecipeName,
        device: &Device,
        _groups: &ParallelGroups,
    ) -> Result<()> {
        Self::layout_of(config, recipe, device).map(drop)
    }

    /// Keeps the experts of this rank.
    fn part_of(mut whole: Self, config: &RunConfig, groups: &ParallelGroups) -> Result<Self> {
        groups.number_draws(&whole)?;
        if groups.expert().size() == 1 {
            return Ok(whole);
        }
        let blocks = whole.blocks.into_iter().map(|block| {
            let mut block = block.into_expert_parallel(groups.expert(), groups.batch())?;
            let dispatch = config.expert_dispatch().into();
            block.expert_parallel = (block.expert_parallel).map(|moe| moe.with_dispatch(dispatch));
            if let Some(moe) = &block.expert_parallel {
                groups.number_expert_draws([&moe.gate_up, &moe.down])?;
            }
            Ok(block)
        });
        let blocks = blocks.collect::<Result<_>>();
        whole.blocks = blocks.with_context(|| format!("ep is {}", config.ep))?;
        Ok(whole)
    }

    fn partitions(&self, groups: &ParallelGroups) -> Vec<ModelPartition> {
        Vec::from_iter(ModelPartition::of_experts(self, groups))
    }

    fn context(&self) -> usize {
        self.positions.context()
    }

    /// If blocks have experts, the auxiliary loss is the weighted sum of the routers' balance and
    /// z-losses.
    fn predict(&self, tokens: Tensor<2, Int>) -> (Tensor<2>, Option<Tensor<1>>) {
        let (x, routers) = self.features(tokens);
        let head = cast(self.head.val(), self.activation.into());
        (cast(x.matmul(head), FloatDType::F32), routers)
    }

    /// Fuses the head and the loss into one operation, which materializes the logits of a few bytes
    /// at a time.
    fn losses(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, Option<Tensor<1>>) {
        let (x, routers) = self.features(tokens);
        let (head, params) = (self.head.val(), CrossEntropy::default());
        let loss = linear_cross_entropy(x, head, flat(targets), params);
        (loss, routers)
    }
}

impl Transformer {
    /// Creates the model of the run `config` for `recipe`, without [values](Self::layout).
    fn layout_of(config: &RunConfig, recipe: &RecipeName, device: &Device) -> Result<Self> {
        let activation = config.activation_of(recipe);
        let model = Self::layout(
            &config.model,
            activation,
            &config.nvfp4_recipe(recipe)?,
            device,
        )?;
        config.recipe_schedule(recipe)?.check_model(&model)?;
        Ok(model)
    }

    /// Makes the first `blocks` blocks recompute the inputs of their activation in the backward;
    /// see [`Nvfp4SwiGlu::with_recompute`](burn_nvfp4::Nvfp4SwiGlu::with_recompute).
    ///
    /// The first blocks are chosen because the backward reaches them last, when the other blocks
    /// have freed their memory.
    fn with_recompute(mut self, blocks: usize) -> Self {
        let blocks = blocks.min(self.blocks.len());
        let first = self
            .blocks
            .drain(..blocks)
            .map(|block| block.with_recompute(true));
        let first: Vec<_> = first.collect();
        self.blocks.splice(0..0, first);
        self
    }

    /// Returns the input of the head, `[batch * time, width]` in the type of the activations, and
    /// the auxiliary loss of the routers.
    fn features(&self, tokens: Tensor<2, Int>) -> (Tensor<2>, Option<Tensor<1>>) {
        let [batch, time] = tokens.dims();
        let activation = self.activation.into();
        let x = embed(tokens, self.embedding.val(), activation);
        let mut stream = ResidualStream::from(x);
        let mut routers = RouterLosses::default();
        for block in &self.blocks {
            let block = block.forward_stream(stream, &self.positions);
            stream = routers.add(block, self.balance_share);
        }
        let (_, x) = self.norm.forward_stream(stream);
        let [_, _, width] = x.dims();
        (x.reshape([batch * time, width]), routers.sum)
    }
}

/// Flattens a batch of bytes.
fn flat(bytes: Tensor<2, Int>) -> Tensor<1, Int> {
    let [batch, time] = bytes.dims();
    bytes.reshape([batch * time])
}

/// Looks up the rows of `embedding` (`[256, width]`) for `tokens` (`[batch, time]`) in type
/// `dtype`: `[batch, time, width]`.
pub(crate) fn embed(tokens: Tensor<2, Int>, embedding: Tensor<2>, dtype: FloatDType) -> Tensor<3> {
    let ([batch, time], [_, width]) = (tokens.dims(), embedding.dims());
    let rows = burn_nvfp4::loss::embedding(embedding, flat(tokens), dtype);
    rows.reshape([batch, time, width])
}

/// Gives all parameters of `model` initial values and stable IDs, both derived from their paths,
/// and casts them to `dtype`. `layers` is the depth of the model.
///
/// Burn's initializers draw from the device's generator, and its IDs from a process-wide source, so
/// a run would not be reproducible.
pub(crate) fn initialise<M: Module>(model: M, seed: u64, layers: usize, dtype: FloatDType) -> M {
    let values = Some(Values {
        seed,
        layers,
        dtype,
    });
    let path = Vec::new();
    model.map(&mut Initialise { path, values })
}

/// Mapper that gives parameters IDs derived from their paths, and values if there are any.
#[derive(Default)]
struct Initialise {
    path: Vec<String>,
    values: Option<Values>,
}

/// Initial values of parameters.
#[derive(Clone, Copy)]
struct Values {
    seed: u64,
    layers: usize,
    dtype: FloatDType,
}

impl Initialise {
    /// Returns the path component at `index`, counted from the end.
    fn name(&self, index: usize) -> &str {
        self.path.iter().rev().nth(index).map_or("", String::as_str)
    }

    /// Returns true if the parameter, or the layer whose weight it is, has one of these names, such
    /// as the embedding or the head.
    fn is(&self, names: &[&str]) -> bool {
        names.contains(&self.name(0)) || names.contains(&self.name(1))
    }
}

impl ModuleMapper for Initialise {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        param.id = ParamId::from(hash(path.as_bytes()));
        let Some(Values {
            seed,
            layers,
            dtype,
        }) = self.values
        else {
            return param;
        };
        let shape = param.lazy_shape();
        let count = shape.num_elements();
        let values = match self.name(0) {
            "gamma" => vec![1.0; count],
            "bias" | "beta" => vec![0.0; count],
            _ if self.is(&["embedding", "positions"]) => {
                normal(seed, &path, count, EMBEDDING_DEVIATION)
            }
            _ => {
                // For all weights, including those of experts (`[experts, d_in, d_out]`), the
                // number of features that the GEMM contracts.
                let mut deviation = (shape.dims::<D>()[D.saturating_sub(2)] as f64).powf(-0.5);
                // Weights that write to the residual stream start smaller in deeper models.
                if ["out", "down", "output", "linear_outer"].contains(&self.name(1)) {
                    deviation *= (2.0 * layers as f64).powf(-0.5);
                }
                if self.is(&["head"]) {
                    deviation *= HEAD_SCALE;
                }
                normal(seed, &path, count, deviation)
            }
        };
        let device = param.lazy_device();
        let dtype = DType::from(dtype);
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        let tensor = Tensor::from_data(data, (&device, dtype));
        let tensor = if device.is_autodiff() {
            tensor.require_grad()
        } else {
            tensor
        };
        Param::initialized(param.id, tensor)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
