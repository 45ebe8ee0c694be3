//! Saves a decoder to a folder that transformers loads.

use std::path::Path;

use anyhow::{Context, Result};
use burn::tensor::{DType, Tensor};
use serde_json::{Map, Value};

use super::attention::Attention;
use super::feed_forward::{FeedForward, Moe};
use super::fused::{alternating, stores_fused};
use super::names::{self, EMBEDDING, HEAD, NORM, Part, SINKS};
use super::projection::{Experts, Projection};
use super::{Decoder, DecoderLayer};
use crate::checkpoint::{read_json, write_json};
use crate::hf::config::CONFIG_FILE;
use crate::hf::{Dtype, NewFolder, TensorWriter};
use crate::interchange::convert::{QUANTIZATION_RECORDS, copy_companions};

impl Decoder {
    /// Writes the model atomically to `folder`, which must be absent or empty, with tensors of type
    /// `dtype`. The model folder `source` provides the files other than tensors (tokenizer, chat
    /// template, generation configuration, licence), except those that describe a quantization, and
    /// the fields of `config.json` that do not affect the arithmetic.
    ///
    /// # Errors
    /// Returns an error if `folder` has files, `dtype` is not `F32`, `BF16` or `F16`, a file of
    /// `source` cannot be read, or a file cannot be written.
    pub fn save(&self, folder: &Path, dtype: Dtype, source: Option<&Path>) -> Result<()> {
        let new = NewFolder::create(folder)?;
        self.write_config(new.path(), dtype, source)?;
        if let Some(source) = source {
            copy_companions(source, new.path(), &QUANTIZATION_RECORDS)?;
        }
        let mut writer = TensorWriter::create(new.path(), TensorWriter::SHARD_BYTES)?;
        self.write_tensors(&mut writer, dtype)?;
        writer.finish()?;
        new.finish()
    }

    /// Writes `config.json`: that of the source with another type, or one derived from the model.
    fn write_config(&self, folder: &Path, dtype: Dtype, source: Option<&Path>) -> Result<()> {
        let (_, name) = types(dtype)?;
        let json = match source {
            None => self.config.to_json(name),
            Some(source) => {
                let mut json: Map<String, Value> = read_json(&source.join(CONFIG_FILE))?;
                let field = match json.contains_key("dtype") {
                    true => "dtype",
                    false => "torch_dtype",
                };
                json.insert(field.into(), name.into());
                json.remove("quantization_config");
                if self.config.extra_layers > 0 {
                    // These layers are not loaded, so the folder does not have them.
                    json.insert("num_nextn_predict_layers".into(), 0.into());
                }
                json
            }
        };
        write_json(&folder.join(CONFIG_FILE), &json)
    }

    /// Adds all tensors in type `dtype`, under their transformers names.
    ///
    /// # Errors
    /// Returns an error if `dtype` is not `F32`, `BF16` or `F16`, or if a file cannot be written.
    pub fn write_tensors(&self, writer: &mut TensorWriter, dtype: Dtype) -> Result<()> {
        let mut writer = Writer { writer, dtype };
        writer.add(EMBEDDING, self.embedding.weight.val())?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.write_layer(&mut writer, index, layer)?;
        }
        writer.add(NORM, self.norm.gamma.val())?;
        match &self.head {
            Some(head) => writer.add(HEAD, head.weight.val().transpose()),
            None => Ok(()),
        }
    }

    fn write_layer(&self, writer: &mut Writer, index: usize, layer: &DecoderLayer) -> Result<()> {
        let path = names::layer(index);
        let names = names::norms(&self.config);
        let post = names.post.into_iter().flatten();
        let post = post.zip([&layer.attention_post_norm, &layer.feed_forward_post_norm]);
        let post = post.filter_map(|(name, norm)| Some((name, norm.as_ref()?)));
        let norms = [
            (names.attention, &layer.attention_norm),
            (names.feed_forward, &layer.feed_forward_norm),
        ];
        for (name, norm) in norms.into_iter().chain(post) {
            writer.add(&format!("{path}{name}.weight"), norm.gamma.val())?;
        }
        for (site, projection) in layer.projections() {
            let [_, outputs] = projection.shape();
            writer.projection(projection, &site.parts(&self.config, index, outputs))?;
        }
        write_attention_norms(writer, &path, &layer.attention)?;
        if let FeedForward::Moe(moe) = &layer.feed_forward {
            let family = self.config.family;
            let path = format!("{path}{}", names::moe(family));
            let [gate, up, down] = names::gate_up_down(family);
            let router = format!("{path}.{}", names::router(family));
            writer.add(&format!("{router}.weight"), moe.router.val().transpose())?;
            if let Some(bias) = &moe.router_bias {
                writer.add(&format!("{router}.bias"), bias.val())?;
            }
            if let Some(correction) = &moe.correction {
                let name = format!("{path}.{}", names::CORRECTION);
                writer.add_as(&name, correction.val(), Dtype::F32)?;
            }
            if stores_fused(family) {
                return writer.fused_experts(moe, &path);
            }
            writer.experts(&moe.gate_up, &path, &[gate, up])?;
            writer.experts(&moe.down, &path, &[down])?;
        }
        Ok(())
    }
}

/// Adds the norms inside the attention of the layer at `path`.
fn write_attention_norms(writer: &mut Writer, path: &str, layer: &Attention) -> Result<()> {
    if let Some(sinks) = &layer.sinks {
        writer.add(&format!("{path}{SINKS}"), sinks.val())?;
    }
    let latent = layer.latent.as_ref();
    let [latent_query, latent_kv] = names::LATENT_NORMS;
    for (name, norm) in [
        ("self_attn.q_norm", layer.q_norm.as_ref()),
        ("self_attn.k_norm", layer.k_norm.as_ref()),
        (
            latent_query,
            latent.and_then(|it| Some(&it.query.as_ref()?.norm)),
        ),
        (latent_kv, latent.map(|it| &it.kv.norm)),
    ] {
        if let Some(norm) = norm {
            writer.add(&format!("{path}{name}.weight"), norm.gamma.val())?;
        }
    }
    Ok(())
}

/// Returns Burn's type, and its name in `config.json`.
fn types(dtype: Dtype) -> Result<(DType, &'static str)> {
    match dtype {
        Dtype::F32 => Ok((DType::F32, "float32")),
        Dtype::BF16 => Ok((DType::BF16, "bfloat16")),
        Dtype::F16 => Ok((DType::F16, "float16")),
        other => anyhow::bail!("`dtype` is {other:?}, but must be F32, BF16 or F16"),
    }
}

struct Writer<'a> {
    writer: &'a mut TensorWriter,
    dtype: Dtype,
}

impl Writer<'_> {
    fn add<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Result<()> {
        self.add_as(name, tensor, self.dtype)
    }

    fn add_as<const D: usize>(&mut self, name: &str, tensor: Tensor<D>, as_: Dtype) -> Result<()> {
        let (dtype, _) = types(as_)?;
        let shape = tensor.dims();
        let data = tensor.into_data().convert_dtype(dtype);
        self.writer.add(name, as_, &shape, data.as_bytes())
    }

    /// Adds the parts of a fused layer.
    fn projection(&mut self, layer: &Projection, parts: &[Part]) -> Result<()> {
        let (weight, bias) = layer.dense();
        let weight = weight.transpose();
        let mut first = 0;
        for Part { name, outputs } in parts {
            let part = weight.clone().narrow(0, first, *outputs);
            self.add(&format!("{name}.weight"), part)?;
            if let Some(bias) = &bias {
                let part = bias.clone().narrow(0, first, *outputs);
                self.add(&format!("{name}.bias"), part)?;
            }
            first += outputs;
        }
        Ok(())
    }

    /// Adds the experts of a layer in the layout of gpt-oss.
    fn fused_experts(&mut self, moe: &Moe, path: &str) -> Result<()> {
        let path = format!("{path}.experts");
        let bias = |bias: Option<Tensor<2>>| bias.context("experts of gpt-oss have biases");
        self.add(
            &format!("{path}.gate_up_proj"),
            alternating(moe.gate_up.dense()),
        )?;
        let gate_up_bias = alternating(bias(moe.gate_up.bias())?);
        self.add(&format!("{path}.gate_up_proj_bias"), gate_up_bias)?;
        self.add(&format!("{path}.down_proj"), moe.down.dense())?;
        self.add(&format!("{path}.down_proj_bias"), bias(moe.down.bias())?)
    }

    /// Adds the parts of each expert, which have equal numbers of outputs.
    fn experts(&mut self, layer: &Experts, path: &str, parts: &[&str]) -> Result<()> {
        let weight = layer.dense().swap_dims(1, 2);
        let [experts, d_out, d_in] = weight.dims();
        let outputs = d_out / parts.len();
        for expert in 0..experts {
            for (index, part) in parts.iter().enumerate() {
                let matrix = weight
                    .clone()
                    .narrow(0, expert, 1)
                    .narrow(1, index * outputs, outputs)
                    .reshape([outputs, d_in]);
                self.add(&format!("{path}.experts.{expert}.{part}.weight"), matrix)?;
            }
        }
        Ok(())
    }
}
