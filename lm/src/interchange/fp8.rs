//! Linear layers in FP8: an E4M3 `weight` `[n, k]`, its `weight_scale`, which multiplies, and the
//! `input_scale` of static inputs. Both dialects have these names.

use anyhow::{Context, Result, bail, ensure};
use nvfp4_formats::format::e4m3;
use safetensors::Dtype;

use super::Dialect;
use super::format::{Fp8Format, Fp8Inputs};
use super::tensors::read_scalar;
use crate::hf::{TensorFolder, TensorSink, TensorSpec};

/// Name of the scales of the weight.
pub(super) const SCALES: &str = "weight_scale";
/// Name of the scale of static inputs.
pub(super) const INPUT: &str = "input_scale";
/// Types of scales.
const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

/// Description of a linear layer in FP8.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fp8Layer {
    /// Output features, and input features.
    pub shape: [usize; 2],
    /// Format.
    pub format: Fp8Format,
    /// Scale of static inputs.
    pub input_scale: Option<f32>,
    /// Largest scale of the weight; 448 of it is its largest magnitude.
    pub largest_scale: f32,
    /// Bytes of the layer's tensors.
    pub bytes: usize,
}

impl Fp8Layer {
    /// Reads and checks the tensors of `module`, which has the format `format`. The values of the
    /// weight are not read.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has another type or shape than `format`, or if a
    /// scale is not positive and finite.
    pub(super) fn read(
        tensors: &TensorFolder,
        dialect: Dialect,
        module: &str,
        format: Fp8Format,
    ) -> Result<Self> {
        let weight = tensors.get(&format!("{module}.weight"))?;
        let &[n, k] = weight.shape else {
            bail!("{weight} is {:?}, but a weight has two axes", weight.shape);
        };
        ensure!(
            n > 0 && k > 0,
            "{weight} is [{n}, {k}], but a weight has elements"
        );
        let scales = tensors.get(&format!("{module}.{SCALES}"))?;
        let shapes = format.scale_shapes(dialect, [n, k]);
        ensure!(
            FLOATS.contains(&scales.dtype) && shapes.iter().any(|shape| shape == scales.shape),
            "{scales} is {:?}{:?}, but a weight [{n}, {k}] in {format} needs F32, BF16 or F16{:?}",
            scales.dtype,
            scales.shape,
            shapes[0]
        );
        let values = scales.to_f32()?;
        // The largest element is 448.
        let is_scale = |scale: &f32| *scale > 0.0 && (*scale * 448.0).is_finite();
        if let Some(at) = values.iter().position(|scale| !is_scale(scale)) {
            bail!(
                "{scales}: {} is {}, but scales must be positive and finite",
                scales.place(at),
                values[at]
            );
        }
        let mut bytes = weight.stored_bytes() + scales.stored_bytes();
        let input = format!("{module}.{INPUT}");
        let input_scale = match (format.inputs, tensors.find(&input)) {
            (Fp8Inputs::Static, None) => {
                bail!("{input} is missing, but the format is {format}")
            }
            (Fp8Inputs::Static, Some(tensor)) => {
                let scale = read_scalar(tensors, &input)?;
                ensure!(
                    is_scale(&scale),
                    "{tensor} is {scale}, but it must be positive and finite"
                );
                bytes += tensor.stored_bytes();
                Some(scale)
            }
            (_, Some(_)) => {
                bail!("{input} is there, but the format is {format}: it would be ignored")
            }
            (_, None) => None,
        };
        Ok(Self {
            shape: [n, k],
            format,
            input_scale,
            largest_scale: values.iter().copied().fold(0.0, f32::max),
            bytes,
        })
    }
}

/// A weight in FP8.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Weight {
    /// Output features, and input features.
    pub shape: [usize; 2],
    /// Format.
    pub format: Fp8Format,
    /// E4M3 elements, row-major.
    pub codes: Vec<u8>,
    /// Scales, row-major.
    pub scales: Vec<f32>,
    /// Scale of static inputs.
    pub input_scale: Option<f32>,
}

impl Fp8Weight {
    /// Returns the tensors of the layer `module` in `dialect`, sorted by name.
    pub fn specs(
        dialect: Dialect,
        module: &str,
        shape: [usize; 2],
        format: Fp8Format,
    ) -> Vec<TensorSpec> {
        let spec = |leaf: &str, dtype: Dtype, shape: &[usize]| {
            TensorSpec::new(format!("{module}.{leaf}"), dtype, shape)
        };
        let scales = &format.scale_shapes(dialect, shape)[0];
        let input = (format.inputs == Fp8Inputs::Static)
            .then(|| spec(INPUT, Dtype::F32, dialect.scalar_shape()));
        let weight = spec("weight", Dtype::F8_E4M3, &shape);
        let scales = spec(SCALES, Dtype::F32, scales);
        input.into_iter().chain([weight, scales]).collect()
    }

    /// Adds the tensors of the layer `module` to `writer`.
    ///
    /// # Errors
    /// Returns an error if static inputs have no scale. Also returns the errors of
    /// [`TensorSink::add`].
    pub fn write(&self, writer: &mut dyn TensorSink, dialect: Dialect, module: &str) -> Result<()> {
        let bytes = |values: &[f32]| -> Vec<u8> {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        let mut specs = Self::specs(dialect, module, self.shape, self.format).into_iter();
        let mut add = |bytes: &[u8]| {
            let spec = specs.next().expect("one for each of the tensors below");
            writer.add(&spec.name, spec.dtype, &spec.shape, bytes)
        };
        if self.format.inputs == Fp8Inputs::Static {
            let scale = self.input_scale;
            add(&bytes(&[
                scale.with_context(|| format!("{module} has no {INPUT}"))?
            ]))?;
        }
        add(&self.codes)?;
        add(&bytes(&self.scales))
    }

    /// Returns the values, row-major: elements times scales, rounded once.
    pub fn dequantize(&self) -> Vec<f32> {
        let k = self.shape[1];
        let [rows, columns] = self.format.block(self.shape);
        let blocks = k.div_ceil(columns);
        let value = |(at, code): (usize, &u8)| {
            let scale = self.scales[at / k / rows * blocks + at % k / columns];
            e4m3::decode_element(*code) * scale
        };
        self.codes.iter().enumerate().map(value).collect()
    }

    /// Returns the number of bytes of its tensors.
    pub fn bytes(&self) -> usize {
        let scales = self.scales.len() + usize::from(self.input_scale.is_some());
        self.codes.len() + 4 * scales
    }
}
