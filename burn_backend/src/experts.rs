//! Operations on tokens sorted by expert.
//!
//! The offsets of each expert's tokens stay in device memory; no shape depends on them. An expert
//! may have any number of tokens, from none to all.
//!
//! # Groups
//!
//! The linear layers of a mixture of experts run all experts in one launch. Tokens are sorted by
//! expert, `[tokens, d_in]`. Offsets (`u32[experts + 1]`, ascending from 0, at most `tokens`) mark
//! the first token of each expert. They stay on the device: shapes depend only on the numbers of
//! tokens and experts.
//!
//! A grouped layer computes the same as the plain layer for each expert's tokens and weight:
//!
//! - In NVFP4, also with MS-EDEN, each group is quantized as a separate matrix. It has a separate
//!   amax, before and after the transform, or one per stored row. Its blocks along the tokens begin
//!   at its first token; the last block, or transform, is padded with zeros. The same applies to
//!   each expert's weight (docs/src/numerics.md, sections 4 and 9).
//! - The MX formats have no amax beyond their blocks of 32, which begin at the first token of each
//!   group.
//! - High-precision operands, original or dequantized, are multiplied without conversion.
//!
//! The experts share the random streams of the layer. Block numbers, and those of MS-EDEN's groups
//! of 128, continue from group to group, so that no two experts draw the same bits: they begin at
//! `first_row · blocks` in a row-wise tensor, and at
//! `columns · (blocks of the earlier groups along the tokens)` in a column-wise one. With experts
//! on several ranks, they continue after those of earlier ranks.

use std::ops::Range;

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use nvfp4_formats::Nvfp4Error;
pub use nvfp4_formats::reference::Router;

use crate::functions::{into_bias, or_panic};
use crate::ops::layers::OutputAmax;
use crate::ops::routing::{RoutedTensors, RoutingOps, SortedTensors, WindowTensors};
use crate::ops::{GatherSpec, LinearContext, LinearSpec, Named, Nvfp4Ops, RowGroups};
use crate::validate::{self, Weight};

/// Maximum number of experts of one layer: their offsets must fit into shared memory.
pub const MAX_EXPERTS: usize = 512;

/// Offsets of each expert's tokens among tokens sorted by expert.
#[derive(Clone, Debug)]
pub struct ExpertOffsets {
    /// `u32[experts + 1]`, ascending from 0, at most `tokens`.
    offsets: Tensor<1, Int>,
    tokens: usize,
}

impl ExpertOffsets {
    /// Computes the offsets of experts that have `counts` (`[experts]`, any integer dtype) tokens
    /// each, out of `tokens` tokens in total.
    ///
    /// The host does not read `counts`. A negative count is treated as zero, and counts beyond
    /// `tokens` are truncated. Remaining tokens belong to no expert: layers return zeros for them.
    ///
    /// # Errors
    /// Returns an error if the number of experts is zero or more than [`MAX_EXPERTS`], or there are
    /// more than 2^31 - 1 tokens.
    pub fn try_from_counts(counts: Tensor<1, Int>, tokens: usize) -> Result<Self, Nvfp4Error> {
        let [experts] = counts.dims();
        check_experts("counts", experts)?;
        if i32::try_from(tokens).is_err() {
            return Err(Nvfp4Error::value(
                "tokens",
                tokens.to_string(),
                format!("at most {}", i32::MAX),
            ));
        }
        let device = counts.device();
        // 64 bits, because only the sum is clamped to 32 bits.
        let ends = counts
            .cast(DType::I64)
            .clamp(0, tokens as i64)
            .cumsum(0)
            .clamp(0, tokens as i64);
        let first = Tensor::<1, Int>::zeros([1], (&device, DType::I64));
        Ok(Self {
            offsets: Tensor::cat(vec![first, ends], 0).cast(DType::U32),
            tokens,
        })
    }

    /// Panicking version of [`try_from_counts`](Self::try_from_counts).
    #[track_caller]
    pub fn from_counts(counts: Tensor<1, Int>, tokens: usize) -> Self {
        or_panic(
            "ExpertOffsets::from_counts",
            Self::try_from_counts(counts, tokens),
        )
    }

    /// Computes the offsets of experts with these numbers of tokens: 1 to 512 experts and fewer
    /// than 2^31 tokens.
    pub(crate) fn of_counts(counts: &[usize], device: &Device) -> Self {
        let mut offsets = vec![0u32];
        let mut tokens = 0;
        for count in counts {
            tokens += count;
            offsets.push(tokens as u32);
        }
        let data = TensorData::new(offsets, [counts.len() + 1]);
        Self {
            offsets: Tensor::from_data(data, (device, DType::U32)),
            tokens,
        }
    }

    /// Returns the offsets, `u32[experts + 1]`: expert `e` has the tokens from entry `e` to entry
    /// `e + 1`.
    pub fn offsets(&self) -> &Tensor<1, Int> {
        &self.offsets
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.offsets.dims()[0] - 1
    }

    /// Number of tokens, including those of no expert.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Returns an error if a layer cannot have this many experts.
pub(crate) fn check_experts(argument: &'static str, experts: usize) -> Result<(), Nvfp4Error> {
    if (1..=MAX_EXPERTS).contains(&experts) {
        Ok(())
    } else {
        Err(Nvfp4Error::shape(
            argument,
            format!("{experts} experts"),
            format!("1 to {MAX_EXPERTS}"),
        ))
    }
}

/// Grouped linear layer: `y[i] = Q(x[i]) Q(weight[e]) + bias[e]` for each token `i` of expert `e`,
/// differentiable by `x`, `weight` and `bias`. `spec` gives the operands of the forward and
/// backward; see the [module](self) for the quantization of
/// groups.
///
/// `x` is `[tokens, d_in]`, sorted by expert according to `experts`; `weight` is
/// `[experts, d_in, d_out]`; `bias` is `[experts, d_out]`; each `f32`, `bf16` or `f16`. The output
/// is `[tokens, d_out]` in the dtype of `x`, zero for tokens of no expert. Each gradient has the
/// dtype of its tensor.
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ, a dtype is not supported,
/// a shape does not fit, `d_in` or `d_out` is not a positive multiple of 16, or no kernel computes
/// a GEMM of `spec`.
pub fn try_grouped_linear(
    x: Tensor<2>,
    weight: Tensor<3>,
    bias: Option<Tensor<2>>,
    experts: &ExpertOffsets,
    spec: LinearSpec,
) -> Result<Tensor<2>, Nvfp4Error> {
    check_grouped_linear(&x, &weight, bias.as_ref(), experts)?;
    spec.check()?;
    let context = LinearContext::default();
    Ok(grouped_linear_unchecked(
        x, weight, bias, experts, spec, context,
    ))
}

/// Panicking version of [`try_grouped_linear`].
#[track_caller]
pub fn grouped_linear(
    x: Tensor<2>,
    weight: Tensor<3>,
    bias: Option<Tensor<2>>,
    experts: &ExpertOffsets,
    spec: LinearSpec,
) -> Tensor<2> {
    or_panic(
        "grouped_linear",
        try_grouped_linear(x, weight, bias, experts, spec),
    )
}

/// Runs the layer after [`check_grouped_linear`].
pub(crate) fn grouped_linear_unchecked(
    x: Tensor<2>,
    weight: Tensor<3>,
    bias: Option<Tensor<2>>,
    experts: &ExpertOffsets,
    spec: LinearSpec,
    context: LinearContext,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::nvfp4_linear(
        x.into_dispatch(),
        weight.into_dispatch(),
        into_bias(bias),
        RowGroups::Offsets(experts.offsets.clone().into_dispatch()),
        spec,
        context,
    ))
}

/// Returns an error if the arguments of a grouped layer do not match.
pub(crate) fn check_grouped_linear<W: Weight<3>, B: Weight<2>>(
    x: &Tensor<2>,
    weight: &W,
    bias: Option<&B>,
    experts: &ExpertOffsets,
) -> Result<(), Nvfp4Error> {
    validate::operand("x", x)?;
    let device = x.device();
    check_grouped_parameters(&device, ["weight", "bias"], weight, bias)?;
    validate::same_device(("x", &device), ("experts", &experts.offsets.device()))?;
    let [count, d_in, d_out] = weight.whole_dims();
    if experts.experts() != count {
        return Err(Nvfp4Error::shape(
            "experts",
            format!("{} experts", experts.experts()),
            format!("{count}, as many as matrices in the weight [{count}, {d_in}, {d_out}]"),
        ));
    }
    if x.dims() != [experts.tokens, d_in] {
        return Err(Nvfp4Error::shape(
            "x",
            format!("{:?}", x.dims()),
            format!(
                "[{}, {d_in}]: the tokens of `experts`, the d_in of the weight",
                experts.tokens
            ),
        ));
    }
    Ok(())
}

/// Returns an error if the weight and bias of a grouped layer, called `names`, do not match each
/// other and an `x` on `device`.
pub(crate) fn check_grouped_parameters<W: Weight<3>, B: Weight<2>>(
    device: &Device,
    names: [&'static str; 2],
    weight: &W,
    bias: Option<&B>,
) -> Result<(), Nvfp4Error> {
    let [weight_name, bias_name] = names;
    validate::held(device, weight_name, weight)?;
    let [count, d_in, d_out] = weight.whole_dims();
    validate::blocks(weight_name, "d_in", d_in)?;
    validate::blocks(weight_name, "d_out", d_out)?;
    if let Some(bias) = bias {
        validate::held(device, bias_name, bias)?;
        let why = || "the experts and the d_out of the weight".into();
        validate::shape(bias_name, bias.whole_dims(), [count, d_out], why)?;
    }
    Ok(())
}

/// Result of [`moe_route`].
#[derive(Clone, Debug)]
pub struct MoeRoute {
    /// Experts of each token, `i32[tokens, top_k]`: those with the largest logits, in descending
    /// order.
    pub chosen: Tensor<2, Int>,
    /// Weights of these experts, `f32[tokens, top_k]`: their probabilities, divided by their sum if
    /// the router normalizes. Differentiable.
    pub weights: Tensor<2>,
    /// Load-balancing loss, `f32[1]`: `experts · Σₑ fₑ · Pₑ`, with `f` the shares of the choices
    /// that went to each expert (no gradient passes) and `P` the mean probabilities.
    /// Differentiable.
    pub balance_loss: Tensor<1>,
    /// Router z-loss, `f32[1]`: the mean over tokens of `(log Σₑ exp(logitₑ))²`. Differentiable.
    pub z_loss: Tensor<1>,
    /// Number of choices per expert, `i32[experts]`.
    pub counts: Tensor<1, Int>,
}

/// Computes the softmax of `logits` (`f32[tokens, experts]`), the choice of each token's experts,
/// their weights, and the router losses, by two kernels in the forward and one in the backward. The
/// bits are those of [`reference::route`](nvfp4_formats::reference::route) on every device.
///
/// # Errors
/// Returns an error if the device has no implementation, `logits` is not `f32`, there is no token,
/// a number in `router` is out of range, or `logits` does not have one column per expert.
pub fn try_moe_route(logits: Tensor<2>, router: Router) -> Result<MoeRoute, Nvfp4Error> {
    router.check()?;
    validate::operand("logits", &logits)?;
    if logits.dtype() != DType::F32 {
        return Err(Nvfp4Error::DType {
            argument: "logits",
            found: format!("{:?}", logits.dtype()),
            expected: "F32".into(),
        });
    }
    let [tokens, experts] = logits.dims();
    if tokens == 0 || experts != router.experts {
        return Err(Nvfp4Error::shape(
            "logits",
            format!("[{tokens}, {experts}]"),
            format!("at least one token, and {} experts", router.experts),
        ));
    }
    let RoutedTensors {
        weights,
        chosen,
        counts,
    } = Dispatch::nvfp4_route(logits.into_dispatch(), router);
    let packed = Tensor::<1>::from_dispatch(weights);
    let slots = tokens * router.top_k;
    let weights = packed.clone().narrow(0, 0, slots);
    Ok(MoeRoute {
        chosen: Tensor::from_dispatch(chosen),
        weights: weights.reshape([tokens, router.top_k]),
        balance_loss: packed.clone().narrow(0, slots, 1),
        z_loss: packed.narrow(0, slots + 1, 1),
        counts: Tensor::from_dispatch(counts),
    })
}

/// Panicking version of [`try_moe_route`].
#[track_caller]
pub fn moe_route(logits: Tensor<2>, router: Router) -> MoeRoute {
    or_panic("moe_route", try_moe_route(logits, router))
}

/// Choices sorted by expert.
#[derive(Clone, Debug)]
pub(crate) struct SortedChoices {
    /// Offsets of each expert's choices in sorted order.
    pub experts: ExpertOffsets,
    /// Number of choices per expert, `i32[experts]`.
    pub counts: Tensor<1, Int>,
    /// Sorted position of each choice, `i32[slots]`.
    pub places: Tensor<1, Int>,
    /// Choice at each sorted position, `i32[slots]`.
    pub choices: Tensor<1, Int>,
}

/// Choices of a range of experts, sorted by expert. Entries for choices and positions outside the
/// range are the total number of choices.
#[derive(Clone, Debug)]
pub(crate) struct ChoiceWindow {
    /// Offsets of the choices of each of these experts among the positions of all choices.
    pub experts: ExpertOffsets,
    /// Extent of the choices of earlier experts, as in [`RowGroups::Window`].
    pub earlier: Tensor<1, Int>,
    /// Number of choices per expert, for all experts, `i32[experts]`.
    pub counts: Tensor<1, Int>,
    /// Position of each choice, `i32[tokens, top_k]`.
    pub places: Tensor<2, Int>,
    /// Choice at each position, `i32[slots]`.
    pub choices: Tensor<1, Int>,
}

/// Sorts `chosen` (`i32[tokens, top_k]`, expert indices below `experts`) by expert, keeping only
/// the choices of the experts `held`.
///
/// # Errors
/// Same as [`sort_choices`].
pub(crate) fn sort_window(
    chosen: Tensor<2, Int>,
    experts: usize,
    held: Range<usize>,
) -> Result<ChoiceWindow, Nvfp4Error> {
    let slots = check_choices(&chosen, experts)?;
    let dims = chosen.dims();
    let WindowTensors {
        choices,
        places,
        offsets,
        earlier,
        counts,
    } = Dispatch::nvfp4_sort_window(chosen.into_dispatch(), experts, held);
    Ok(ChoiceWindow {
        experts: ExpertOffsets {
            offsets: Tensor::from_dispatch(offsets),
            tokens: slots,
        },
        earlier: Tensor::from_dispatch(earlier),
        counts: Tensor::from_dispatch(counts),
        places: Tensor::<1, Int>::from_dispatch(places).reshape(dims),
        choices: Tensor::from_dispatch(choices),
    })
}

impl ChoiceWindow {
    /// Copies each token of `x` (`[tokens, width]`) once per choice of these experts to its
    /// position: `[slots, width]`, undefined after the last position. Also computes the `amax`
    /// values that the experts need. Differentiable.
    pub fn dispatch(&self, x: Tensor<2>, amax: Option<OutputAmax>) -> Tensor<2> {
        let [_, top_k] = self.places.dims();
        // An invalid choice gives an invalid token.
        let token = self.choices.clone().div_scalar(top_k as i64);
        let spec = GatherSpec {
            named: Named::Some,
            amax,
        };
        permute_unchecked(x, (token, self.places.clone()), self.groups(), spec)
    }

    /// Combines the results `y` (`[slots, width]`) of these experts per token, weighted by the
    /// weights of all choices (`f32[tokens, top_k]`), to `[tokens, width]` in the dtype of `y`.
    /// Differentiable in both.
    pub fn combine(&self, y: Tensor<2>, weights: Tensor<2>) -> Tensor<2> {
        Tensor::from_dispatch(Dispatch::nvfp4_moe_unpermute(
            y.into_dispatch(),
            weights.into_dispatch(),
            self.places.clone().into_dispatch(),
            self.choices.clone().into_dispatch(),
            Named::Some,
        ))
    }

    /// Returns the rows of these experts among those of all experts.
    pub fn groups(&self) -> RowGroups<Dispatch> {
        RowGroups::Window {
            offsets: self.experts.offsets.clone().into_dispatch(),
            earlier: self.earlier.clone().into_dispatch(),
        }
    }
}

/// Returns the number of choices in `chosen`.
///
/// # Errors
/// Same as [`sort_choices`].
fn check_choices(chosen: &Tensor<2, Int>, experts: usize) -> Result<usize, Nvfp4Error> {
    check_experts("experts", experts)?;
    validate::device("chosen", &chosen.device())?;
    let [tokens, top_k] = chosen.dims();
    let slots = tokens * top_k;
    if slots == 0 || i32::try_from(slots).is_err() {
        return Err(Nvfp4Error::shape(
            "chosen",
            format!("[{tokens}, {top_k}]"),
            "at least one token and one choice, and fewer than 2^31 choices",
        ));
    }
    Ok(slots)
}

/// Sorts `chosen` (`[tokens, top_k]`, expert indices below `experts`, any integer dtype) by expert;
/// the sort is stable.
///
/// # Errors
/// Returns an error if the device has no implementation, the number of choices is zero or at least
/// 2^31, or `experts` is not 1 to 512.
pub(crate) fn sort_choices(
    chosen: Tensor<2, Int>,
    experts: usize,
) -> Result<SortedChoices, Nvfp4Error> {
    let slots = check_choices(&chosen, experts)?;
    let SortedTensors {
        choices,
        places,
        offsets,
        counts,
    } = Dispatch::nvfp4_sort_choices(chosen.cast(DType::I32).into_dispatch(), experts);
    Ok(SortedChoices {
        experts: ExpertOffsets {
            offsets: Tensor::from_dispatch(offsets),
            tokens: slots,
        },
        counts: Tensor::from_dispatch(counts),
        places: Tensor::from_dispatch(places),
        choices: Tensor::from_dispatch(choices),
    })
}

/// Gathers rows of `x` (`[tokens, width]`): `out[s] = x[index[s]]`, `[slots, width]`, for `index`
/// `[slots]`; differentiable by `x`.
///
/// `inverse` (`[tokens, copies]`, `tokens * copies = slots`) holds the slots of each row of `x`,
/// every slot once. With it the backward gathers too, `dx[t] = Σⱼ dout[inverse[t, j]]`, accumulated
/// in `f32` in the order of `j`, whereas the backward of a plain selection scatters.
///
/// The contents of `index` and `inverse` are not checked: that would synchronize with the device.
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ or a shape does not fit.
pub fn try_moe_permute(
    x: Tensor<2>,
    index: Tensor<1, Int>,
    inverse: Tensor<2, Int>,
) -> Result<Tensor<2>, Nvfp4Error> {
    validate::operand("x", &x)?;
    validate::same_device(("x", &x.device()), ("index", &index.device()))?;
    validate::same_device(("x", &x.device()), ("inverse", &inverse.device()))?;
    let ([tokens, _], [slots]) = (x.dims(), index.dims());
    let [rows, copies] = inverse.dims();
    if rows != tokens || rows * copies != slots {
        return Err(Nvfp4Error::shape(
            "inverse",
            format!("[{rows}, {copies}]"),
            format!("[{tokens}, copies] with {slots} elements: rows of `x`, slots of `index`"),
        ));
    }
    let (places, spec) = ((index, inverse), Named::All.into());
    Ok(permute_unchecked(x, places, RowGroups::Whole, spec))
}

/// Gathers the rows of tokens of experts, as [`moe_permute`] with checked arguments, and computes
/// the `amax` values that the experts need.
pub(crate) fn permute_to_experts(
    x: Tensor<2>,
    places: (Tensor<1, Int>, Tensor<2, Int>),
    experts: &ExpertOffsets,
    amax: Option<OutputAmax>,
) -> Tensor<2> {
    let groups = RowGroups::Offsets(experts.offsets.clone().into_dispatch());
    let named = Named::All;
    permute_unchecked(x, places, groups, GatherSpec { named, amax })
}

/// Gathers rows by `index`, with its `inverse`.
fn permute_unchecked(
    x: Tensor<2>,
    (index, inverse): (Tensor<1, Int>, Tensor<2, Int>),
    groups: RowGroups<Dispatch>,
    spec: GatherSpec,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::nvfp4_moe_permute(
        x.into_dispatch(),
        index.into_dispatch(),
        inverse.into_dispatch(),
        groups,
        spec,
    ))
}

/// Panicking version of [`try_moe_permute`].
#[track_caller]
pub fn moe_permute(x: Tensor<2>, index: Tensor<1, Int>, inverse: Tensor<2, Int>) -> Tensor<2> {
    or_panic("moe_permute", try_moe_permute(x, index, inverse))
}

/// Computes `out[t] = Σⱼ weights[t, j] · y[places[t, j]]` in `f32`, rounded once to the dtype of
/// `y`; differentiable by `y` (`[slots, width]`) and `weights` (`f32[tokens, copies]`).
///
/// `places` (`[tokens, copies]`) holds every slot once, and `choices` (`[slots]`) is its inverse:
/// `choices[places[t, j]] = t * copies + j`. Neither is checked: that would synchronize with the
/// device.
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ, a dtype is not supported,
/// or a shape does not fit.
pub fn try_moe_unpermute(
    y: Tensor<2>,
    weights: Tensor<2>,
    places: Tensor<2, Int>,
    choices: Tensor<1, Int>,
) -> Result<Tensor<2>, Nvfp4Error> {
    validate::operand("y", &y)?;
    validate::operand("weights", &weights)?;
    let device = y.device();
    validate::same_device(("y", &device), ("weights", &weights.device()))?;
    validate::same_device(("y", &device), ("places", &places.device()))?;
    validate::same_device(("y", &device), ("choices", &choices.device()))?;
    if weights.dtype() != DType::F32 {
        return Err(Nvfp4Error::DType {
            argument: "weights",
            found: format!("{:?}", weights.dtype()),
            expected: "F32".into(),
        });
    }
    let ([slots, _], [tokens, copies]) = (y.dims(), places.dims());
    if tokens * copies != slots || copies == 0 {
        return Err(Nvfp4Error::shape(
            "places",
            format!("[{tokens}, {copies}]"),
            format!("{slots} elements in at least one column, the rows of `y`"),
        ));
    }
    if weights.dims() != [tokens, copies] || choices.dims() != [slots] {
        return Err(Nvfp4Error::shape(
            "weights",
            format!("{:?}, choices {:?}", weights.dims(), choices.dims()),
            format!("[{tokens}, {copies}], choices [{slots}]"),
        ));
    }
    Ok(Tensor::from_dispatch(Dispatch::nvfp4_moe_unpermute(
        y.into_dispatch(),
        weights.into_dispatch(),
        places.into_dispatch(),
        choices.into_dispatch(),
        Named::All,
    )))
}

/// Panicking version of [`try_moe_unpermute`].
#[track_caller]
pub fn moe_unpermute(
    y: Tensor<2>,
    weights: Tensor<2>,
    places: Tensor<2, Int>,
    choices: Tensor<1, Int>,
) -> Tensor<2> {
    or_panic(
        "moe_unpermute",
        try_moe_unpermute(y, weights, places, choices),
    )
}
