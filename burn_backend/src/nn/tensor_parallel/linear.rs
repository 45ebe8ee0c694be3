//! Tensor-parallel linear layers.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::super::parts::LinearPart;
use super::super::{Nvfp4Linear, rows};
use super::{ShardedParameter, TensorParallel, replaced};
use crate::functions::or_panic;
use crate::ops::RowGroups;
use crate::ops::sharding::{LinearSharding, ShardedDim};
use crate::parallel::{ProcessGroup, functions};
use crate::whole::whole_dims;

/// Linear layer with its output features sharded over ranks: a weight `[d_input, d_output / ranks]`
/// per rank.
///
/// | | input of a rank | output of a rank |
/// |---|---|---|
/// | | `[..., d_input]`, the same on all ranks | `[..., d_output / ranks]` |
/// | sequence parallel | `[tokens / ranks, ..., d_input]` | `[tokens, ..., d_output / ranks]` |
///
/// The gradient of the input is summed over the ranks; with sequence parallelism each rank gets its
/// rows of the sum, and the input is gathered in quantized form, as 4-bit codes and block scales.
/// In high precision it is gathered unquantized.
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    /// This rank's shard of the layer.
    pub linear: Nvfp4Linear,
    #[module(skip)]
    shard: Shard,
    #[module(skip)]
    gather_output: bool,
}

/// Linear layer with its input features sharded over ranks: a weight `[d_input / ranks, d_output]`
/// per rank. The bias is replicated and added once.
///
/// | | input of a rank | output of a rank |
/// |---|---|---|
/// | | `[..., d_input / ranks]` | `[..., d_output]`, the same on all ranks |
/// | sequence parallel | `[tokens, ..., d_input / ranks]` | `[tokens / ranks, ..., d_output]` |
///
/// The output is summed over the ranks. With sequence parallelism the gradient of the output is
/// gathered in quantized form.
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    /// This rank's shard of the layer.
    pub linear: Nvfp4Linear,
    #[module(skip)]
    shard: Shard,
    #[module(skip)]
    input_is_parallel: bool,
}

/// Sharding of a layer.
#[derive(Debug, Clone)]
struct Shard {
    parallel: TensorParallel,
    dim: ShardedDim,
    /// Lengths of the segments of this rank's shard.
    segments: Vec<usize>,
}

impl ColumnParallelLinear {
    /// Returns this rank's shard of `linear`, which is identical on all ranks, state included. The
    /// parameters keep their ids.
    ///
    /// # Errors
    /// Returns an error if the output features per rank are not a multiple of 16.
    pub fn from_linear(linear: Nvfp4Linear, parallel: &TensorParallel) -> Result<Self, Nvfp4Error> {
        let d_output = linear.weight.dims()[1];
        Self::from_segments(linear, &[d_output], parallel)
    }

    /// Returns this rank's shard of `linear`, whose output features are the concatenation of
    /// several layers of these widths, such as queries, keys and values. Each of them is sharded.
    ///
    /// # Errors
    /// Same as [`from_linear`](Self::from_linear) for each width; also if the widths do not add up
    /// to the output features.
    pub fn from_segments(
        linear: Nvfp4Linear,
        widths: &[usize],
        parallel: &TensorParallel,
    ) -> Result<Self, Nvfp4Error> {
        let (linear, shard) = Shard::of(linear, ShardedDim::Output, widths, parallel)?;
        Ok(Self {
            linear,
            shard,
            gather_output: false,
        })
    }

    /// Sets whether the output is gathered: every rank returns `[..., d_output]`.
    pub fn with_gather_output(self, gather_output: bool) -> Self {
        Self {
            gather_output,
            ..self
        }
    }

    /// Gathers the shards of all ranks into an unsharded layer. All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_linear(self) -> Nvfp4Linear {
        self.shard.gathered(self.linear)
    }

    /// Checks that shard boundaries, of features and (if sharded) of the `tokens` of a rank, are
    /// multiples of the recipe's block size.
    pub(super) fn check_parts(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        self.shard.check(&self.linear, 2, tokens)
    }

    /// Returns the sharded parameters.
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        self.shard.parameters(&self.linear)
    }

    /// Applies the layer; see the [type](Self) for shapes.
    ///
    /// # Errors
    /// Same as [`Nvfp4Linear::try_forward`]; also if the recipe's blocks do not fit the shards,
    /// and, with sequence parallelism, if `x` has one axis or the tokens of a rank are not a
    /// multiple of the recipe's block size.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        let tokens = self.check(&x)?;
        let (x, mut dims) = rows(x);
        let y = self.shard.forward(&self.linear, x)?;
        dims[0] *= tokens;
        dims[D - 1] = y.dims()[1];
        let y = y.reshape(dims);
        Ok(match self.gather_output {
            false => y,
            true => self.shard.gathered_output(y),
        })
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `x`. Otherwise
    /// returns the factor by which the first axis grows.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<usize, Nvfp4Error> {
        self.linear.check(x)?;
        let tokens = x.dims()[..D - 1].iter().product();
        self.shard.check(&self.linear, D, tokens)?;
        match self.shard.parallel.sequence_parallel {
            true => Ok(self.shard.parallel.group.size()),
            false => Ok(1),
        }
    }

    /// Returns the layer as a part of a feed-forward, for its next forward. `is_tracked` is true if
    /// autodiff tracks the input.
    pub(super) fn part(&self, is_tracked: bool) -> Result<LinearPart<2, 1>, Nvfp4Error> {
        self.shard.part(&self.linear, is_tracked)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("ColumnParallelLinear::forward", self.try_forward(x))
    }
}

impl RowParallelLinear {
    /// Returns this rank's shard of `linear`, which is identical on all ranks, state included. The
    /// parameters keep their ids.
    ///
    /// # Errors
    /// Returns an error if the input features per rank are not a multiple of 16.
    pub fn from_linear(linear: Nvfp4Linear, parallel: &TensorParallel) -> Result<Self, Nvfp4Error> {
        let d_input = linear.weight.dims()[0];
        let (linear, shard) = Shard::of(linear, ShardedDim::Input, &[d_input], parallel)?;
        Ok(Self {
            linear,
            shard,
            input_is_parallel: true,
        })
    }

    /// Sets whether the input of a rank is its shard, as returned by a column-parallel layer (the
    /// default), or the whole input, `[..., d_input]`.
    pub fn with_input_is_parallel(self, input_is_parallel: bool) -> Self {
        Self {
            input_is_parallel,
            ..self
        }
    }

    /// Gathers the shards of all ranks into an unsharded layer. All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_linear(self) -> Nvfp4Linear {
        self.shard.gathered(self.linear)
    }

    /// Checks that shard boundaries, of features and (if sharded) of the `tokens` of a rank, are
    /// multiples of the recipe's block size.
    pub(super) fn check_parts(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        self.shard.check(&self.linear, 2, tokens)
    }

    /// Returns the sharded parameters.
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        self.shard.parameters(&self.linear)
    }

    /// Applies the layer; see the [type](Self) for shapes.
    ///
    /// # Errors
    /// Same as [`Nvfp4Linear::try_forward`]; also if the recipe's blocks do not fit the shards,
    /// and, with sequence parallelism, if `x` has one axis, or its first axis does not divide into
    /// equal shards whose size is a multiple of the recipe's block size.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        let group = &self.shard.parallel.group;
        let x = match self.input_is_parallel {
            true => x,
            false => {
                let (found, [part, _]) = (x.dims()[D - 1], whole_dims(&self.linear.weight));
                let expected = part * group.size();
                if found != expected {
                    let found = format!("a last axis of {found}");
                    return Err(Nvfp4Error::shape(
                        "x",
                        found,
                        format!("{expected}, d_input"),
                    ));
                }
                functions::scatter(x, D - 1, group)
            }
        };
        let ranks = self.check(&x)?;
        let (x, mut dims) = rows(x);
        let y = self.shard.forward(&self.linear, x)?;
        dims[0] /= ranks;
        dims[D - 1] = y.dims()[1];
        Ok(y.reshape(dims))
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept the shard `x`.
    /// Otherwise returns the factor by which the first axis is divided.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<usize, Nvfp4Error> {
        self.linear.check(x)?;
        let (group, dims) = (&self.shard.parallel.group, x.dims());
        if !self.shard.parallel.sequence_parallel {
            self.shard.check(&self.linear, D, 0)?;
            return Ok(1);
        }
        group.check_parts("x", dims[0])?;
        let tokens: usize = dims[..D - 1].iter().product();
        self.shard.check(&self.linear, D, tokens / group.size())?;
        Ok(group.size())
    }

    /// Returns an error if the layer does not accept an input of `D` axes, as returned by a
    /// column-parallel layer for `tokens` tokens per rank.
    pub(super) fn check_tokens<const D: usize>(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        self.shard.check(&self.linear, D, tokens)
    }

    /// Returns the layer as a part of a feed-forward, for its next forward. `is_tracked` is true if
    /// autodiff tracks the input.
    pub(super) fn part(&self, is_tracked: bool) -> Result<LinearPart<2, 1>, Nvfp4Error> {
        self.shard.part(&self.linear, is_tracked)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("RowParallelLinear::forward", self.try_forward(x))
    }
}

impl Shard {
    /// Returns this rank's shard of `linear`, whose sharded dimension consists of segments of these
    /// `widths`.
    fn of(
        linear: Nvfp4Linear,
        dim: ShardedDim,
        widths: &[usize],
        parallel: &TensorParallel,
    ) -> Result<(Nvfp4Linear, Self), Nvfp4Error> {
        let group = &parallel.group;
        let shape: [usize; 2] = linear.weight.dims();
        let (axis, name) = match dim {
            ShardedDim::Input => (0, "d_input"),
            ShardedDim::Output => (1, "d_output"),
        };
        let total: usize = widths.iter().sum();
        if total != shape[axis] {
            let found = format!("{widths:?}, {total} in all");
            return Err(Nvfp4Error::shape(
                "widths",
                found,
                format!("{name}, {}", shape[axis]),
            ));
        }
        let unit = 16 * group.size();
        if let Some(width) = widths.iter().find(|width| !width.is_multiple_of(unit)) {
            return Err(Nvfp4Error::shape(
                "linear",
                format!("a {name} of {width}"),
                format!(
                    "a multiple of {unit}: blocks of 16 for each of the {} ranks",
                    group.size()
                ),
            ));
        }
        let segments = widths.iter().map(|width| width / group.size()).collect();
        let shard = Self {
            parallel: parallel.clone(),
            dim,
            segments,
        };
        let weight = replaced(&linear.weight, |weight| shard.own(weight, axis, widths));
        let bias = linear.bias.as_ref().map(|bias| match dim {
            ShardedDim::Input => bias.clone(),
            ShardedDim::Output => replaced(bias, |bias| shard.own(bias, 0, widths)),
        });
        Ok((linear.with_parameters(weight, bias), shard))
    }

    /// Returns the sharded axis of the weight.
    fn axis(&self) -> usize {
        match self.dim {
            ShardedDim::Input => 0,
            ShardedDim::Output => 1,
        }
    }

    /// Returns the sharded parameters: not the bias of a row-parallel layer.
    fn parameters(&self, linear: &Nvfp4Linear) -> Vec<(ParamId, ShardedParameter)> {
        let (lens, ranks) = (&self.segments, self.parallel.group.size());
        let weight = ShardedParameter::of(&linear.weight, self.axis(), lens, ranks);
        let mut found = vec![(linear.weight.id, weight)];
        if let (ShardedDim::Output, Some(bias)) = (self.dim, &linear.bias) {
            found.push((bias.id, ShardedParameter::of(bias, 0, lens, ranks)));
        }
        found
    }

    /// Returns the rank's shard of each segment along `axis`.
    fn own<const D: usize>(&self, x: Tensor<D>, axis: usize, widths: &[usize]) -> Tensor<D> {
        let rank = self.parallel.group.rank();
        let mut first = 0;
        let parts = self.segments.iter().zip(widths).map(|(len, width)| {
            let part = x.clone().narrow(axis, first + rank * len, *len);
            first += width;
            part
        });
        Tensor::cat(parts.collect(), axis)
    }

    /// Gathers the shards of all ranks of each segment along `axis`.
    fn all<const D: usize>(&self, x: Tensor<D>, axis: usize) -> Tensor<D> {
        let mut first = 0;
        let parts = self.segments.iter().map(|len| {
            let part = x.clone().narrow(axis, first, *len);
            first += len;
            self.parallel.group.all_gather(part, axis)
        });
        Tensor::cat(parts.collect(), axis)
    }

    /// Gathers the unsharded layer.
    fn gathered(&self, linear: Nvfp4Linear) -> Nvfp4Linear {
        let weight = replaced(&linear.weight, |weight| self.all(weight, self.axis()));
        let bias = linear.bias.as_ref().map(|bias| match self.dim {
            ShardedDim::Input => bias.clone(),
            ShardedDim::Output => replaced(bias, |bias| self.all(bias, 0)),
        });
        linear.with_parameters(weight, bias)
    }

    /// Gathers the output of all ranks along the last axis, segment by segment.
    fn gathered_output<const D: usize>(&self, y: Tensor<D>) -> Tensor<D> {
        let group: &ProcessGroup = &self.parallel.group;
        let mut first = 0;
        let parts = self.segments.iter().map(|len| {
            let part = y.clone().narrow(D - 1, first, *len);
            first += len;
            functions::gather(part, D - 1, group)
        });
        Tensor::cat(parts.collect(), D - 1)
    }

    /// Checks that shard boundaries are multiples of the recipe's block and transform sizes.
    /// `tokens` are those of a rank, if tokens are sharded.
    fn check(&self, linear: &Nvfp4Linear, axes: usize, tokens: usize) -> Result<(), Nvfp4Error> {
        let size = self.parallel.group.size();
        let spec = linear.next_spec();
        let unit = match self.dim {
            ShardedDim::Input => spec.fprop_x.unit().max(spec.fprop_w.unit()),
            ShardedDim::Output => spec.dgrad_dy.unit().max(spec.dgrad_w.unit()),
        };
        if let Some(len) = self.segments.iter().find(|len| !len.is_multiple_of(unit)) {
            return Err(Nvfp4Error::shape(
                "weight",
                format!("a part of {len} features on each of {size} ranks"),
                format!("a multiple of {unit}, the block of the recipe"),
            ));
        }
        if !self.parallel.sequence_parallel {
            return Ok(());
        }
        if axes < 2 {
            let expected = "two axes at least, tokens and features";
            return Err(Nvfp4Error::shape("x", format!("{axes} axis"), expected));
        }
        let unit = spec.wgrad_x.unit().max(spec.wgrad_dy.unit()).max(16);
        if !tokens.is_multiple_of(unit) {
            return Err(Nvfp4Error::shape(
                "x",
                format!("{tokens} tokens on each of {size} ranks"),
                format!("a multiple of {unit}, the block along the tokens"),
            ));
        }
        Ok(())
    }

    fn part(&self, linear: &Nvfp4Linear, is_tracked: bool) -> Result<LinearPart<2, 1>, Nvfp4Error> {
        let is_split = self.parallel.group.size() > 1;
        let mut part = match is_split {
            // A shard that is sharded again is gathered in high precision before it is quantized.
            true => linear.part_of_values(is_tracked)?,
            false => linear.part(is_tracked)?,
        };
        let context = &mut part.spec.1;
        if is_split {
            context.sharding = Some(LinearSharding {
                group: self.parallel.group.clone(),
                dim: self.dim,
                segments: self.segments.clone(),
                sequence_parallel: self.parallel.sequence_parallel,
                deterministic: self.parallel.deterministic,
            });
        }
        Ok(part)
    }

    /// Runs the layer after its checks.
    fn forward(&self, linear: &Nvfp4Linear, x: Tensor<2>) -> Result<Tensor<2>, Nvfp4Error> {
        let part = self.part(linear, x.is_tracked())?;
        Ok(part.run(x, RowGroups::Whole))
    }
}
