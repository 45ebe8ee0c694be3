//! Experts that a folder stores as one tensor of all experts of a layer.
//!
//! | folder | gate and up | down |
//! |---|---|---|
//! | transformers 5, if asked not to split | `gate_up_proj`, `[experts, 2 hidden, d_model]` | `down_proj`, `[experts, d_model, hidden]` |
//! | gpt-oss | `gate_up_proj`, `[experts, d_model, 2 hidden]`, columns of gate and up alternate | `down_proj`, `[experts, hidden, d_model]` |
//! | gpt-oss in MXFP4 | `gate_up_proj_blocks`, `[experts, 2 hidden, d_model / 32, 16]`, rows alternate | `down_proj_blocks`, `[experts, d_model, hidden / 32, 16]` |
//!
//! MXFP4 has the scales of the blocks in `*_scales`, and gpt-oss has biases in `*_bias`.
//!
//! [`open_tensors`] presents the matrices and biases of each expert under the names that a folder
//! with a tensor for each would give them. All readers of tensors see only these.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use burn::tensor::Tensor;

use super::names;
use crate::hf::tensors::{MXFP4_BLOCK, check};
use crate::hf::{DecoderConfig, Dtype, Family, FeedForwardConfig, TensorFolder};

/// Types of weights in high precision.
const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::BF16, Dtype::F16];

/// Returns true if folders of the family always store the experts of a layer in one tensor.
pub fn stores_fused(family: Family) -> bool {
    family == Family::GptOss
}

/// Opens the tensors of the model of `config` in `folder`, with a tensor for each expert.
///
/// # Errors
/// Returns the errors of [`TensorFolder::open`]. Returns an error if a tensor of all experts has
/// another shape or type than the configuration states, if its scales are missing, or if the folder
/// has both this tensor and one of its parts.
pub fn open_tensors(folder: &Path, config: &DecoderConfig) -> Result<TensorFolder> {
    let tensors = TensorFolder::open(folder)?;
    split(tensors, config).with_context(|| folder.display().to_string())
}

/// Replaces tensors of all experts by those of each.
///
/// # Errors
/// See [`open_tensors`].
pub fn split(mut tensors: TensorFolder, config: &DecoderConfig) -> Result<TensorFolder> {
    for (index, layer) in config.layers.iter().enumerate() {
        let FeedForwardConfig::Moe {
            experts, hidden, ..
        } = layer.feed_forward
        else {
            continue;
        };
        Layer {
            config,
            stored: format!("{}mlp", names::layer(index)),
            moe: format!("{}{}", names::layer(index), names::moe(config.family)),
            experts,
            hidden,
        }
        .split(&mut tensors)?;
    }
    Ok(tensors)
}

/// Experts of a layer.
struct Layer<'a> {
    config: &'a DecoderConfig,
    /// Module of fused experts: `mlp` in all families.
    stored: String,
    /// Module of separate experts.
    moe: String,
    experts: usize,
    hidden: usize,
}

impl Layer<'_> {
    fn split(&self, tensors: &mut TensorFolder) -> Result<()> {
        let is_fused = match stores_fused(self.config.family) {
            true => self.split_alternating(tensors)?,
            false => self.split_adjacent(tensors)?,
        };
        let router = format!("{}.gate.weight", self.stored);
        if is_fused
            && self.stored != self.moe
            && let Some(place) = tensors.remove(&router)
        {
            tensors.insert(format!("{}.gate.weight", self.moe), place)?;
        }
        Ok(())
    }

    /// Splits tensors in the layout of transformers 5: every part is adjacent in the file.
    fn split_adjacent(&self, tensors: &mut TensorFolder) -> Result<bool> {
        let ([d_model, hidden], experts) = ([self.config.d_model, self.hidden], self.experts);
        let [gate, up, down] = names::gate_up_down(self.config.family);
        let mut is_fused = false;
        for (name, rows, columns, parts) in [
            ("gate_up_proj", hidden, d_model, &[gate, up][..]),
            ("down_proj", d_model, hidden, &[down][..]),
        ] {
            let name = format!("{}.experts.{name}", self.stored);
            let Some(place) = tensors.remove(&name) else {
                continue;
            };
            is_fused = true;
            check(
                &name,
                &place,
                FLOATS,
                &[experts, parts.len() * rows, columns],
            )?;
            for expert in 0..experts {
                for (index, part) in parts.iter().enumerate() {
                    let first = (expert * parts.len() + index) * rows * columns;
                    let own = place.adjacent(first, &[rows, columns]);
                    tensors.insert(self.name(expert, part, "weight"), own)?;
                }
            }
        }
        Ok(is_fused)
    }

    /// Splits tensors in the layouts of gpt-oss.
    fn split_alternating(&self, tensors: &mut TensorFolder) -> Result<bool> {
        let ([d_model, hidden], experts) = ([self.config.d_model, self.hidden], self.experts);
        let [gate, up, down] = names::gate_up_down(self.config.family);
        let mut is_fused = false;
        for (name, rows, d_in, parts) in [
            ("gate_up_proj", hidden, d_model, &[gate, up][..]),
            ("down_proj", d_model, hidden, &[down][..]),
        ] {
            let (name, count) = (format!("{}.experts.{name}", self.stored), parts.len());
            let d_out = count * rows;
            let whole = tensors.remove(&name);
            let codes = tensors.remove(&format!("{name}_blocks"));
            let scales = tensors.remove(&format!("{name}_scales"));
            ensure!(
                whole.is_none() || codes.is_none(),
                "`{name}` and `{name}_blocks` are the same experts: delete one"
            );
            ensure!(
                codes.is_some() == scales.is_some(),
                "`{name}_blocks` and `{name}_scales` belong together, but one is missing"
            );
            let bias = tensors.remove(&format!("{name}_bias"));
            is_fused |= whole.is_some() || codes.is_some() || bias.is_some();
            if let Some(whole) = &whole {
                check(&name, whole, FLOATS, &[experts, d_in, d_out])?;
            }
            if let Some(bias) = &bias {
                check(&format!("{name}_bias"), bias, FLOATS, &[experts, d_out])?;
            }
            if let (Some(codes), Some(scales)) = (&codes, &scales) {
                ensure!(
                    d_in.is_multiple_of(MXFP4_BLOCK),
                    "`{name}_blocks` has {d_in} input features, but MXFP4 needs a multiple of \
                     {MXFP4_BLOCK}"
                );
                let blocks = d_in / MXFP4_BLOCK;
                let shape = [experts, d_out, blocks, MXFP4_BLOCK / 2];
                check(&format!("{name}_blocks"), codes, &[Dtype::U8], &shape)?;
                check(&format!("{name}_scales"), scales, &[Dtype::U8], &shape[..3])?;
            }
            for expert in 0..experts {
                for (index, part) in parts.iter().enumerate() {
                    if let Some(bias) = &bias {
                        let own = bias.strided(expert * d_out + index, [count, 0], &[rows]);
                        tensors.insert(self.name(expert, part, "bias"), own)?;
                    }
                    let own = match (&whole, &codes, &scales) {
                        (Some(whole), ..) => {
                            let first = expert * d_in * d_out + index;
                            whole.strided(first, [count, d_out], &[rows, d_in])
                        }
                        (None, Some(codes), Some(scales)) => {
                            codes.mxfp4(scales, [expert * d_out + index, count], [rows, d_in])
                        }
                        _ => continue,
                    };
                    tensors.insert(self.name(expert, part, "weight"), own)?;
                }
            }
        }
        Ok(is_fused)
    }

    fn name(&self, expert: usize, part: &str, leaf: &str) -> String {
        format!("{}.experts.{expert}.{part}.{leaf}", self.moe)
    }
}

/// Rearranges the last axis of gate and up, which are adjacent there, to alternate as in gpt-oss.
pub(super) fn alternating<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dims = x.dims();
    let (width, rows) = (dims[D - 1], dims[..D - 1].iter().product());
    let pairs: Tensor<3> = x.reshape([rows, 2, width / 2]);
    pairs.swap_dims(1, 2).reshape(dims)
}
