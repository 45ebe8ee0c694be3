//! Weights in FP8 with one scale per block, the form in which DeepSeek publishes V3 and R1.
//!
//! A weight `[rows, columns]` in E4M3 has a tensor `NAME_scale_inv`, f32, with one scale for each
//! block of `weight_block_size`; the last blocks of rows and columns may be smaller. A value is the
//! element times the scale of its block, rounded once to f32.

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;
use serde_json::{Map, Value};

use super::fields::Fields;
use super::tensors::{StoredTensor, TensorFolder};

/// Field of `config.json`.
const FIELD: &str = "quantization_config";
/// Appended to the name of a weight for that of its scales.
const SUFFIX: &str = "_scale_inv";

/// Returns true if `config.json` says that weights are in FP8.
pub(crate) fn is_fp8(json: &Map<String, Value>) -> bool {
    let method = json.get(FIELD).and_then(|found| found.get("quant_method"));
    method.and_then(Value::as_str) == Some("fp8")
}

/// Reads the rows and columns of a block from `quantization_config`.
///
/// # Errors
/// Returns an error if it has an unknown field or value.
pub(crate) fn block_size(json: &Map<String, Value>) -> Result<[usize; 2]> {
    let object = json.get(FIELD).and_then(Value::as_object);
    let fields = Fields::new(object.context("it must be an object")?);
    fields.take("quant_method");
    for (name, expected) in [("fmt", "e4m3"), ("activation_scheme", "dynamic")] {
        if let Some(found) = fields.optional_string(name)? {
            ensure!(
                found == expected,
                "`{name}` is `{found}`, but must be `{expected}`"
            );
        }
    }
    // Rounding of activations, which are in high precision here.
    if let Some(found) = fields.optional_string("scale_fmt")? {
        ensure!(
            ["float", "ue8m0"].contains(&found),
            "`scale_fmt` is `{found}`, but must be `float` or `ue8m0`"
        );
    }
    // Those modules have no scales.
    fields.take("modules_to_not_convert");
    let size = fields.take("weight_block_size").unwrap_or(&Value::Null);
    let numbers = size.as_array().map(|size| {
        let number = |value: &Value| value.as_u64().filter(|size| (1..=1 << 20).contains(size));
        size.iter().map(number).collect::<Option<Vec<u64>>>()
    });
    let Some(Some([rows, columns])) = numbers.as_ref().map(|it| it.as_deref()) else {
        bail!("`weight_block_size` is {size}, but must be the rows and columns of a block");
    };
    fields.refuse_all_unknown(FIELD)?;
    Ok([*rows as usize, *columns as usize])
}

impl TensorFolder {
    /// Joins weights in FP8 with their scales, if `config.json` says that there are such. The
    /// scales are then no tensors of their own.
    ///
    /// # Errors
    /// Returns an error if `quantization_config` has an unknown field or value, if a weight in FP8
    /// or its scales lack the other, or if scales have another type or shape than the blocks of the
    /// weight, or a value that is negative or not finite.
    pub(crate) fn with_fp8_scales(mut self, json: &Map<String, Value>) -> Result<Self> {
        if !is_fp8(json) {
            return Ok(self);
        }
        let block = block_size(json).context(FIELD)?;
        let names: Vec<String> = self.names().map(String::from).collect();
        for name in &names {
            let tensor = self.get(name)?;
            if let Some(weight) = name.strip_suffix(SUFFIX) {
                let is_fp8 = |it: StoredTensor<'_>| it.dtype == Dtype::F8_E4M3;
                ensure!(
                    self.find(weight).is_some_and(is_fp8),
                    "{tensor}: there is no `{weight}` of type F8_E4M3 for it"
                );
            } else if tensor.dtype == Dtype::F8_E4M3 {
                let scales = self.find(&format!("{name}{SUFFIX}"));
                let scales =
                    scales.with_context(|| format!("{tensor}: there is no `{name}{SUFFIX}`"))?;
                check(&tensor, &scales, block)?;
            }
        }
        for name in names.iter().filter(|name| name.ends_with(SUFFIX)) {
            self.join_scales(name.trim_end_matches(SUFFIX), name, block);
        }
        Ok(self)
    }
}

/// Checks the scales of `weight`.
fn check(weight: &StoredTensor<'_>, scales: &StoredTensor<'_>, block: [usize; 2]) -> Result<()> {
    let &[rows, columns] = weight.shape else {
        bail!(
            "{weight} is {:?}, but weights in FP8 have two axes",
            weight.shape
        );
    };
    ensure!(
        scales.dtype == Dtype::F32,
        "{scales} is of type {:?}, but must be F32",
        scales.dtype
    );
    scales.check_shape(&[rows.div_ceil(block[0]), columns.div_ceil(block[1])])?;
    let values = scales.to_f32()?;
    // The largest element is 448.
    let is_scale = |scale: &f32| *scale >= 0.0 && (*scale * 448.0).is_finite();
    if let Some(at) = values.iter().position(|scale| !is_scale(scale)) {
        bail!(
            "{scales}: {} is {}, but scales must be finite and not negative",
            scales.place(at),
            values[at]
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::decoder::load::check_tensors;
    use crate::hf::DecoderConfig;
    use crate::hf::variant::Variant;
    use nvfp4_test_support::{Scratch, golden};

    fn open(variant: &Variant) -> Result<TensorFolder> {
        let folder = Scratch::new("fp8");
        variant.write(&folder);
        let json = variant.json.as_object().unwrap();
        let tensors = TensorFolder::open(&folder)?.with_fp8_scales(json)?;
        check_tensors(&DecoderConfig::from_json(json)?, &tensors)?;
        Ok(tensors)
    }

    #[test]
    fn values_are_elements_times_the_scale_of_their_block() {
        let variant = Variant::of(&golden("deepseek3-tiny-fp8"));
        let tensors = open(&variant).unwrap();
        assert!(tensors.names().all(|name| !name.ends_with(SUFFIX)));
        // Blocks of 32: the last columns and rows are half a block.
        let name = "model.layers.1.mlp.experts.3.down_proj.weight";
        let found = tensors.get(name).unwrap();
        assert_eq!(found.shape, [64, 48]);
        let (_, _, scales) = &variant.tensors[&format!("{name}{SUFFIX}")];
        let (scales, _) = scales.as_chunks::<4>();
        let (_, _, codes) = &variant.tensors[name];
        for (at, value) in found.to_f32().unwrap().into_iter().enumerate() {
            let (row, column) = (at / 48, at % 48);
            let scale = f32::from_le_bytes(scales[row / 32 * 2 + column / 32]);
            let code = nvfp4_formats::format::e4m3::decode_element(codes[at]);
            assert_eq!(value.to_bits(), (code * scale).to_bits());
        }
    }

    #[test]
    fn bad_scales_and_fields_are_refused() {
        let weight = "model.layers.0.self_attn.o_proj.weight";
        let scales = &*format!("{weight}{SUFFIX}");
        type Change<'a> = &'a dyn Fn(&mut Variant);
        let field = |name: &'static str, value: Value| {
            move |it: &mut Variant| it.json[FIELD][name] = value.clone()
        };
        let cases: &[(Change<'_>, &str)] = &[
            (
                &|it| drop(it.tensors.remove(scales)),
                "there is no `model.layers.0.self_attn.o_proj.weight_scale_inv`",
            ),
            (
                &|it| drop(it.tensors.remove(weight)),
                "there is no `model.layers.0.self_attn.o_proj.weight` of type F8_E4M3",
            ),
            (
                &|it| it.tensors.get_mut(scales).unwrap().1 = vec![4, 1],
                "its shape is [4, 1], but must be [2, 2]",
            ),
            (
                &|it| {
                    let it = it.tensors.get_mut(scales).unwrap();
                    *it = (Dtype::BF16, vec![2, 2], vec![0; 8]);
                },
                "is of type BF16, but must be F32",
            ),
            (
                &|it| {
                    let bytes = &mut it.tensors.get_mut(scales).unwrap().2;
                    bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
                },
                "the value of row 0, column 1 is NaN, but scales must be finite",
            ),
            (
                &|it| {
                    let bytes = &mut it.tensors.get_mut(scales).unwrap().2;
                    bytes[..4].copy_from_slice(&(-1f32).to_le_bytes());
                },
                "the value of row 0, column 0 is -1",
            ),
            (
                &field("weight_block_size", json!([64, 64])),
                "its shape is [2, 3], but must be [1, 2]",
            ),
            (
                &field("weight_block_size", json!([32])),
                "`weight_block_size` is [32], but must be the rows and columns",
            ),
            (
                &field("weight_block_size", json!(null)),
                "`weight_block_size` is null",
            ),
            (&field("fmt", json!("e5m2")), "`fmt` is `e5m2`"),
            (
                &field("activation_scheme", json!("static")),
                "`activation_scheme` is `static`",
            ),
            (
                &field("rotation", json!("hadamard")),
                "has a field `rotation`",
            ),
            (
                &|it| drop(it.json.as_object_mut().unwrap().remove(FIELD)),
                "is of type F8_E4M3, not F32, BF16 or F16",
            ),
        ];
        for (change, expected) in cases {
            let mut variant = Variant::of(&golden("deepseek3-tiny-fp8"));
            change(&mut variant);
            let error = format!("{:#}", open(&variant).unwrap_err());
            assert!(error.contains(expected), "{error}\nnot: {expected}");
        }
        let mut variant = Variant::of(&golden("deepseek3-tiny-fp8"));
        variant.tensors.get_mut(weight).unwrap().2[65] = 0x7F;
        let error = open(&variant).unwrap().get(weight).unwrap().check_finite();
        let error = error.unwrap_err().to_string();
        assert!(error.contains("row 1, column 1 is NaN"), "{error}");
    }
}
