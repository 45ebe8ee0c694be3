//! Multi-head attention.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, FloatDType, Int, Tensor};
use burn_nn::activation::Gelu;
use burn_nn::attention::MultiHeadAttention;
use burn_nn::{Dropout, DropoutConfig, Initializer};
use nvfp4_formats::Nvfp4Error;

use super::unfused::{UnfusedAttention, by_heads, to_rows};
use crate::attention::{
    AttentionParams, MAX_HEAD, RotaryTables, Sequences, try_attention_qkv_with_amax,
};
use crate::functions::or_panic;
use crate::nn::parts::{PartIds, parts, side_by_side};
use crate::nn::{Nvfp4Linear, Nvfp4LinearConfig, cast, checked_dropout, equal_parts};
use crate::recipe::Nvfp4Recipe;
use crate::validate;
use crate::whole::whole_dims;

/// Score of a masked key: `exp` of it is zero next to any real score.
const MASKED: f32 = -1e30;

/// Configuration of a [`RopeCache`].
#[derive(Config, Debug)]
pub struct RopeCacheConfig {
    /// Maximum sequence length.
    pub context: usize,
    /// Head size; also required without rotary positions.
    pub head: usize,
    /// True if attention is causal: a query sees no later key.
    #[config(default = true)]
    pub causal: bool,
    /// Base of the rotary frequencies: pair `i` of `head / 2` rotates by
    /// `position · base^(-2i / head)`. With `None`, queries and keys are not rotated.
    #[config(default = "Some(10_000.0)")]
    pub rotary: Option<f64>,
}

impl RopeCacheConfig {
    /// Computes the tables on `device`.
    ///
    /// # Errors
    /// Returns an error if `context` is zero, the head size is odd with rotary positions, or the
    /// base is not positive.
    pub fn try_init(&self, device: &Device) -> Result<RopeCache, Nvfp4Error> {
        let Self {
            context,
            head,
            causal,
            rotary,
        } = *self;
        if context == 0 {
            return Err(Nvfp4Error::value("context", "0", "at least 1"));
        }
        let rotary = rotary
            .map(|base| RotaryTables::try_new(context, head, base, device))
            .transpose()?;
        let (cos, sin) = rotary.map(RotaryTables::into_parts).unzip();
        Ok(RopeCache {
            cos: cos.map(Tensor::unsqueeze),
            sin: sin.map(Tensor::unsqueeze),
            causal,
            context,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> RopeCache {
        or_panic("RopeCacheConfig::init", self.try_init(device))
    }
}

/// RoPE tables and the causal flag of attention, shared by all layers of a model.
#[derive(Module, Debug)]
pub struct RopeCache {
    /// Cosine of position times frequency, `f32[1, 1, context, head / 2]`.
    cos: Option<Tensor<4>>,
    /// Sine of position times frequency, in the layout of `cos`.
    sin: Option<Tensor<4>>,
    #[module(skip)]
    causal: bool,
    #[module(skip)]
    context: usize,
}

impl RopeCache {
    /// Maximum sequence length.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Rotates each head of `x`, `[batch, heads, time, head]`, by its position: elements `i` and
    /// `i + head / 2` form a pair. The result is `f32`. Without rotary positions, returns `x`.
    pub fn rotate(&self, x: Tensor<4>) -> Tensor<4> {
        let (Some(cos), Some(sin)) = (&self.cos, &self.sin) else {
            return x;
        };
        let [_, _, time, head] = x.dims();
        let half = head / 2;
        let x = cast(x, FloatDType::F32);
        let (cos, sin) = (
            cos.clone().narrow(2, 0, time),
            sin.clone().narrow(2, 0, time),
        );
        let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let real = first.clone() * cos.clone() - second.clone() * sin.clone();
        let imaginary = second * cos + first * sin;
        Tensor::cat(vec![real, imaginary], 3)
    }

    /// Returns the tables in the form that kernels take.
    fn tables(&self) -> Result<Option<RotaryTables>, Nvfp4Error> {
        let (Some(cos), Some(sin)) = (&self.cos, &self.sin) else {
            return Ok(None);
        };
        let [.., context, half] = cos.dims();
        let table = |table: &Tensor<4>| table.clone().reshape([context, half]);
        RotaryTables::try_from_parts(table(cos), table(sin)).map(Some)
    }

    /// Returns an error if `time` positions of heads of size `head` on `device` do not fit.
    fn check(&self, time: usize, head: usize, device: &Device) -> Result<(), Nvfp4Error> {
        for table in [&self.cos, &self.sin].into_iter().flatten() {
            validate::same_device(("x", device), ("positions", &table.device()))?;
        }
        if time > self.context {
            return Err(Nvfp4Error::shape(
                "x",
                format!("{time} positions"),
                format!("at most {}, the context", self.context),
            ));
        }
        match &self.cos {
            Some(cos) if cos.dims()[3] * 2 != head => Err(Nvfp4Error::shape(
                "positions",
                format!("rotations for heads of {}", cos.dims()[3] * 2),
                format!("{head}, the size of the attention's heads"),
            )),
            _ => Ok(()),
        }
    }
}

/// Configuration of an [`Nvfp4Attention`].
#[derive(Config, Debug)]
pub struct Nvfp4AttentionConfig {
    /// Width of the input and the output, a positive multiple of 16.
    pub d_model: usize,
    /// Number of query heads. Must divide `d_model`; the head size is `d_model / heads`.
    pub heads: usize,
    /// Number of key and value heads. Must divide `heads`: each serves `heads / kv_heads` query
    /// heads (grouped-query attention). `None` means `heads`. The width of the fused projection,
    /// `(heads + 2 · kv_heads) · d_model / heads`, must be a multiple of 16.
    pub kv_heads: Option<usize>,
    /// True if the projections have a bias.
    #[config(default = false)]
    pub bias: bool,
    /// Dropout probability of the attention weights, in `[0, 1)`.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// True to add one to the denominator of the softmax, so that a head can attend to nothing.
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Sliding window: maximum number of keys that a query sees, its own included. `None` for all.
    /// Requires causal positions.
    pub window: Option<usize>,
    /// Soft cap of the scores: `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Quantization recipe of the projections.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl Nvfp4AttentionConfig {
    /// Creates an attention layer on `device`.
    ///
    /// # Errors
    /// Returns an error if `heads` does not divide `d_model`, `kv_heads` does not divide `heads`,
    /// the width of a projection is not a positive multiple of 16, `dropout` is outside `[0, 1)`,
    /// `window` or `softcap` is not positive, or the device has no implementation.
    pub fn try_init(&self, device: &Device) -> Result<Nvfp4Attention, Nvfp4Error> {
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        let linear = |d_in, d_out| {
            Nvfp4LinearConfig::new(d_in, d_out)
                .with_bias(self.bias)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone())
                .try_init(device)
        };
        let head = check_heads(self.d_model, self.heads, kv_heads)?;
        let params = AttentionParams {
            window: self.window,
            softcap: self.softcap,
            quiet_softmax: self.quiet_softmax,
            ..AttentionParams::causal(head)
        };
        params.check()?;
        Ok(Nvfp4Attention {
            qkv: linear(self.d_model, (self.heads + 2 * kv_heads) * head)?,
            out: linear(self.d_model, self.d_model)?,
            dropout: dropout(self.dropout)?,
            heads: self.heads,
            kv_heads,
            params,
            ids: None,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> Nvfp4Attention {
        or_panic("Nvfp4AttentionConfig::init", self.try_init(device))
    }
}

/// Checks the numbers of heads and returns the head size.
fn check_heads(d_model: usize, heads: usize, kv_heads: usize) -> Result<usize, Nvfp4Error> {
    let head = equal_parts(("d_model", d_model), ("heads", heads))?;
    equal_parts(("heads", heads), ("kv_heads", kv_heads))?;
    Ok(head)
}

/// Returns no module for a probability of zero, so that records have no entry for it.
fn dropout(share: f64) -> Result<Option<Dropout>, Nvfp4Error> {
    let dropout = checked_dropout(share)?;
    Ok((share > 0.0).then_some(dropout))
}

/// Multi-head attention with projections in NVFP4.
///
/// One fused GEMM computes queries, keys and values: the input is quantized once instead of three
/// times, and the three parts of the weight share one global scale. Scores, softmax and the
/// weighted sum of values are in high precision: operands in the dtype of the input, accumulation
/// and softmax in `f32`.
///
/// One kernel computes them in the forward and two in the backward, without a tokens × tokens
/// matrix ([`attention_qkv`](crate::attention::attention_qkv)). These kernels do not support
/// padding, dropout of attention weights, or heads wider than 256: Burn's operations compute these
/// cases, and materialize several such matrices.
///
/// Positions are not part of the layer: [`RopeCache`] holds the rotations and the causal flag for
/// all layers.
#[derive(Module, Debug)]
pub struct Nvfp4Attention {
    /// Fused projection of queries, keys and values, `[d_model, (heads + 2 * kv_heads) * head]`.
    pub qkv: Nvfp4Linear,
    /// Output projection, `[d_model, d_model]`.
    pub out: Nvfp4Linear,
    /// Dropout of the attention weights.
    pub dropout: Option<Dropout>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    kv_heads: usize,
    /// Parameters of scores and softmax. The causal flag comes from the positions.
    #[module(skip)]
    params: AttentionParams,
    /// Ids of the query, key and value projections that the fused one was made from.
    #[module(skip)]
    ids: Option<Vec<PartIds>>,
}

/// Fused attention without its projections.
#[derive(Debug, Clone, Copy)]
pub(in crate::nn) struct FusedAttention {
    pub heads: usize,
    pub kv_heads: usize,
    /// Head size.
    pub head: usize,
    /// Parameters of scores and softmax. The causal flag comes from the positions.
    pub params: AttentionParams,
}

impl FusedAttention {
    /// Returns `[rows, heads * head]`, given the projections of the rows. If the next layer
    /// quantizes it, its amax values are computed in the same pass.
    pub fn attend(
        &self,
        qkv: Tensor<2>,
        positions: &RopeCache,
        sequences: &Sequences,
        next: Option<&Nvfp4Linear>,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let params = AttentionParams {
            causal: positions.causal,
            ..self.params
        };
        let tables = positions.tables()?;
        let heads = [self.heads, self.kv_heads];
        let is_tracked = qkv.is_tracked();
        let amax = next.and_then(|next| next.next_spec().input_amax(is_tracked));
        try_attention_qkv_with_amax(qkv, heads, sequences, tables.as_ref(), params, amax)
    }

    /// Returns an error if `time` positions on `device` do not fit.
    pub fn check(
        &self,
        time: usize,
        positions: &RopeCache,
        device: &Device,
    ) -> Result<(), Nvfp4Error> {
        positions.check(time, self.head, device)?;
        if self.params.window.is_some() && !positions.causal {
            return Err(Nvfp4Error::value(
                "positions",
                "positions that are not causal",
                "causal ones, as the attention has a window",
            ));
        }
        Ok(())
    }
}

impl Nvfp4Attention {
    /// Number of query heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Number of key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Attends within each sequence.
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, time, d_model]`, of type `f32`, `bf16` or `f16`
    /// - `padding`: `[batch, time]`, true where a position is padding: no query attends to it
    /// - output: `[batch, time, d_model]`, in the dtype of `x`
    ///
    /// # Errors
    /// Returns an error if a shape, dtype or device does not fit, or a sequence is longer than the
    /// context of `positions`.
    pub fn try_forward(
        &self,
        x: Tensor<3>,
        positions: &RopeCache,
        padding: Option<Tensor<2, Bool>>,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        self.check(&x, positions, padding.as_ref())?;
        let [batch, time, width] = x.dims();
        let rows = batch * time;
        let qkv = self.qkv.try_forward(x.reshape([rows, width]))?;
        let head = width / self.heads;
        let mixed = match self.dropout.is_none() && padding.is_none() && head <= MAX_HEAD {
            true => self.attend(qkv, positions, &Sequences::Equal(batch.max(1)))?,
            false => self.attend_unfused(qkv, positions, padding, [batch, time]),
        };
        let out = self.out.try_forward(mixed)?;
        Ok(out.reshape([batch, time, width]))
    }

    /// Attends within each of several packed sequences of any lengths.
    ///
    /// # Shapes
    ///
    /// - `x`: `[tokens, d_model]`, of type `f32`, `bf16` or `f16`
    /// - `offsets`: `u32[sequences + 1]`, token indices that ascend from 0: sequence `s` is the
    ///   tokens from entry `s` to entry `s + 1`. The host does not read them. Sequences longer than
    ///   the context of `positions` are not refused; their tokens beyond it are rotated by its last
    ///   position.
    /// - output: `[tokens, d_model]`, in the dtype of `x`. Tokens after the last sequence attend to
    ///   nothing.
    ///
    /// # Errors
    /// Returns an error if a shape, dtype or device does not fit, or the attention has dropout or
    /// heads wider than 256.
    pub fn try_forward_packed(
        &self,
        x: Tensor<2>,
        positions: &RopeCache,
        offsets: Tensor<1, Int>,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let [tokens, width] = x.dims();
        self.check(&x.clone().reshape([tokens, 1, width]), positions, None)?;
        if self.dropout.is_some() {
            return Err(Nvfp4Error::value(
                "dropout",
                "dropout of attention weights",
                "none, where sequences are packed",
            ));
        }
        let sequences = Sequences::packed(offsets);
        sequences.check(&x.device(), tokens, tokens)?;
        let mixed = self.attend(self.qkv.try_forward(x)?, positions, &sequences)?;
        self.out.try_forward(mixed)
    }

    /// Panicking version of [`try_forward_packed`](Self::try_forward_packed).
    #[track_caller]
    pub fn forward_packed(
        &self,
        x: Tensor<2>,
        positions: &RopeCache,
        offsets: Tensor<1, Int>,
    ) -> Tensor<2> {
        or_panic(
            "Nvfp4Attention::forward_packed",
            self.try_forward_packed(x, positions, offsets),
        )
    }

    /// Computes `[rows, d_model]` from the projections of the rows by the fused kernels.
    fn attend(
        &self,
        qkv: Tensor<2>,
        positions: &RopeCache,
        sequences: &Sequences,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let [d_model, _] = self.out.weight.lazy_shape().dims();
        let heads = self.fused(d_model);
        heads.attend(qkv, positions, sequences, Some(&self.out))
    }

    fn fused(&self, d_model: usize) -> FusedAttention {
        FusedAttention {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head: d_model / self.heads,
            params: self.params,
        }
    }

    /// Splits the layer into the fused input projection, the output projection and the fused
    /// attention between them.
    ///
    /// # Errors
    /// Returns an error if the fused kernels do not support the configuration.
    pub(in crate::nn) fn into_fused(
        self,
    ) -> Result<(Nvfp4Linear, Nvfp4Linear, FusedAttention), Nvfp4Error> {
        let [d_model, _] = self.out.weight.lazy_shape().dims();
        let fused = self.fused(d_model);
        if self.dropout.is_some() {
            let expected = "none, which the kernels have not";
            return Err(Nvfp4Error::value("attention", "dropout", expected));
        }
        if fused.head > MAX_HEAD {
            let found = format!("heads of {}", fused.head);
            return Err(Nvfp4Error::value(
                "attention",
                found,
                format!("at most {MAX_HEAD}"),
            ));
        }
        Ok((self.qkv, self.out, fused))
    }

    /// Unfused version of [`attend`](Self::attend), by Burn's operations.
    fn attend_unfused(
        &self,
        qkv: Tensor<2>,
        positions: &RopeCache,
        padding: Option<Tensor<2, Bool>>,
        [batch, time]: [usize; 2],
    ) -> Tensor<2> {
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        let [_, columns] = qkv.dims();
        let head = columns / (heads + 2 * kv_heads);
        let activation: FloatDType = qkv.dtype().into();
        let part = |first: usize, heads: usize| {
            let part = qkv.clone().narrow(1, first * head, heads * head);
            by_heads(part.reshape([batch, time, heads * head]), heads)
        };
        let (q, k, v) = (
            positions.rotate(part(0, heads)),
            positions.rotate(part(heads, kv_heads)),
            part(heads + kv_heads, kv_heads),
        );
        let (k, v) = (cast(k, activation), cast(v, activation));
        let unfused = UnfusedAttention {
            params: AttentionParams {
                causal: positions.causal,
                ..self.params
            },
            masked: f64::from(MASKED),
            padding,
            mask: None,
        };
        let operands = [q, self.for_queries(k), self.for_queries(v)];
        to_rows(unfused.attend(operands, self.dropout.as_ref()).0)
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept these arguments.
    pub(in crate::nn) fn check(
        &self,
        x: &Tensor<3>,
        positions: &RopeCache,
        padding: Option<&Tensor<2, Bool>>,
    ) -> Result<(), Nvfp4Error> {
        let [batch, time, width] = x.dims();
        let [d_model, _] = whole_dims(&self.out.weight);
        let why = || "with the d_model of the attention".into();
        validate::shape("x", x.dims(), [batch, time, d_model], why)?;
        validate::operand("x", x)?;
        let device = x.device();
        if let Some(padding) = padding {
            let why = || "the positions of `x`".into();
            validate::shape("padding", padding.dims(), [batch, time], why)?;
            validate::same_device(("x", &device), ("padding", &padding.device()))?;
        }
        let fused = self.fused(width);
        fused.check(time, positions, &device)?;
        let head = fused.head;
        let qkv = [width, (self.heads + 2 * self.kv_heads) * head];
        let names = ["qkv.weight", "qkv.bias"];
        self.qkv.check_part(names, &device, qkv)?;
        let names = ["out.weight", "out.bias"];
        self.out.check_part(names, &device, [width, width])
    }

    /// Panicking version of [`try_forward`](Self::try_forward), without padding.
    #[track_caller]
    pub fn forward(&self, x: Tensor<3>, positions: &RopeCache) -> Tensor<3> {
        or_panic(
            "Nvfp4Attention::forward",
            self.try_forward(x, positions, None),
        )
    }

    /// Repeats keys or values, `[batch, kv_heads, time, head]`, for each query head.
    fn for_queries(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, kv_heads, time, head] = x.dims();
        let share = self.heads / kv_heads;
        if share == 1 {
            return x;
        }
        x.reshape([batch, kv_heads, 1, time, head])
            .expand([batch, kv_heads, share, time, head])
            .reshape([batch, self.heads, time, head])
    }

    /// Takes over the parameters of `attention`.
    ///
    /// The output projection keeps its parameters and their ids. The query, key and value
    /// projections are fused into one with new ids
    /// ([`into_multi_head_attention`](Self::into_multi_head_attention) restores the old ones); if
    /// only some of them have a bias, the missing biases become zero. The result is self-attention
    /// (`MhaInput::self_attn`): separate sequences for queries and keys, arbitrary masks and caches
    /// have no counterpart. `min_float` is not needed, because masked positions get a weight of
    /// zero. Use it with a [`RopeCache`] without rotations, causal or not.
    ///
    /// # Errors
    /// Returns an error if `d_model` is not a positive multiple of 16.
    pub fn from_multi_head_attention(
        attention: MultiHeadAttention,
        recipe: &Nvfp4Recipe,
    ) -> Result<Self, Nvfp4Error> {
        let MultiHeadAttention {
            query,
            key,
            value,
            output,
            dropout,
            d_model,
            n_heads,
            quiet_softmax,
            ..
        } = attention;
        let head = check_heads(d_model, n_heads, n_heads)?;
        let projections = [query, key, value];
        Ok(Self {
            qkv: Nvfp4Linear::from_linear(side_by_side(&projections), recipe)?,
            out: Nvfp4Linear::from_linear(output, recipe)?,
            dropout: (dropout.prob > 0.0).then_some(dropout),
            heads: n_heads,
            kv_heads: n_heads,
            params: AttentionParams {
                quiet_softmax,
                ..AttentionParams::causal(head)
            },
            ids: Some(PartIds::of(&projections)),
        })
    }

    /// Returns the parameters as a `burn_nn` attention. The output projection keeps its ids. The
    /// query, key and value projections get the ids of the attention that this one was made from,
    /// or new ids if there was none. (A bias that the original did not have gets a new id too.)
    ///
    /// # Errors
    /// Returns an error if there are fewer key and value heads than query heads: `burn_nn`'s
    /// attention does not support that.
    pub fn into_multi_head_attention(self) -> Result<MultiHeadAttention, Nvfp4Error> {
        if self.kv_heads != self.heads {
            return Err(Nvfp4Error::value(
                "kv_heads",
                self.kv_heads.to_string(),
                format!("{}, as many as heads of queries", self.heads),
            ));
        }
        let [d_model, _] = self.out.weight.dims();
        let [query, key, value] = parts(self.qkv.into_linear(), self.ids.as_deref());
        Ok(MultiHeadAttention {
            query,
            key,
            value,
            output: self.out.into_linear(),
            dropout: self
                .dropout
                .unwrap_or_else(|| DropoutConfig::new(0.0).init()),
            activation: Gelu::new(),
            d_model,
            n_heads: self.heads,
            d_k: d_model / self.heads,
            min_float: f64::from(MASKED),
            quiet_softmax: self.params.quiet_softmax,
        })
    }
}
