//! Layers in FP8, whose inputs are rounded to FP8 as by engines. The weights are dequantized, so
//! products are those of engines up to the rounding of their sums.

use anyhow::{Result, bail, ensure};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::ExpertOffsets;
use burn_nvfp4::nn::Nvfp4GroupedLinear;
use nvfp4_formats::format::e4m3;

use super::dense;
use crate::interchange::{Fp8Inputs, Fp8Layer};
use crate::model::cast;

/// Exponent of the smallest E4M3 value, 2⁻⁹, which is the step of the values below 2⁻⁵.
const STEP: i32 = -9;
/// Exponents of the powers of two from which on the step is twice as large.
const BINADES: std::ops::RangeInclusive<i32> = -5..=8;

/// Rounding of inputs to E4M3 values times a scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InputRounding {
    /// One scale. Larger magnitudes than 448 of it become 448 of it.
    Static(f32),
    /// A scale for each token and this number of features: the largest magnitude over 448.
    Dynamic(usize),
}

impl InputRounding {
    /// Returns the rounding of an input that all `layers` read, each given with its name; `None` if
    /// none of them rounds it. The largest static scale counts, as in vLLM.
    ///
    /// # Errors
    /// Returns an error if the layers round differently, or the number of features is not a multiple
    /// of the group.
    pub fn of<'a>(
        layers: impl IntoIterator<Item = (&'a String, Option<&'a Fp8Layer>)>,
    ) -> Result<Option<Self>> {
        let mut rounding: Option<(&String, Option<Self>)> = None;
        for (name, layer) in layers {
            let own = match layer {
                None => None,
                Some(layer) => Self::of_layer(name, layer)?,
            };
            rounding = match (rounding, own) {
                (None, own) => Some((name, own)),
                (Some((first, Some(Self::Static(a)))), Some(Self::Static(b))) => {
                    Some((first, Some(Self::Static(a.max(b)))))
                }
                (Some((first, found)), own) if found == own => Some((first, found)),
                (Some((first, _)), _) => bail!(
                    "`{name}` rounds its inputs to FP8 in another way than `{first}`: they read one \
                     input here"
                ),
            };
        }
        Ok(rounding.and_then(|(_, rounding)| rounding))
    }

    fn of_layer(name: &str, layer: &Fp8Layer) -> Result<Option<Self>> {
        let [_, k] = layer.shape;
        let group = match (layer.format.inputs, layer.input_scale) {
            (Fp8Inputs::Static, Some(scale)) => return Ok(Some(Self::Static(scale))),
            (Fp8Inputs::Static | Fp8Inputs::HighPrecision, _) => return Ok(None),
            (Fp8Inputs::PerToken, _) => k,
            (Fp8Inputs::Groups(group), _) => group,
        };
        ensure!(
            group > 0 && k.is_multiple_of(group),
            "`{name}` has a scale for each {group} features of its input, but the input has {k}"
        );
        Ok(Some(Self::Dynamic(group)))
    }

    /// Rounds `x` (`[tokens, features]`) in f32, and returns it in its type.
    pub fn round(self, x: Tensor<2>) -> Tensor<2> {
        let dtype = x.dtype().into();
        let x = cast(x, FloatDType::F32);
        let rounded = match self {
            Self::Static(scale) => to_e4m3(x.div_scalar(scale)).mul_scalar(scale),
            Self::Dynamic(group) => {
                let [tokens, features] = x.dims();
                let x = x.reshape([tokens * features / group, group]);
                let scale = x.clone().abs().max_dim(1).div_scalar(e4m3::MAX);
                // A group of zeros stays zero.
                let is_zero = scale.clone().equal_elem(0.0);
                let scale = scale.mask_fill(is_zero, 1.0);
                let rounded = to_e4m3(x / scale.clone()) * scale;
                rounded.reshape([tokens, features])
            }
        };
        cast(rounded, dtype)
    }
}

/// Rounds f32 values to the nearest E4M3 values, ties to even; larger ones than 448 to 448.
///
/// The sum with 2²³ steps is rounded to a multiple of the step.
fn to_e4m3(x: Tensor<2>) -> Tensor<2> {
    let magnitude = x.clone().abs().clamp_max(e4m3::MAX);
    let mut step = magnitude.full_like(2f32.powi(STEP));
    for exponent in BINADES {
        let is_above = magnitude.clone().greater_equal_elem(2f32.powi(exponent));
        step = step.mask_fill(is_above, 2f32.powi(exponent - 3));
    }
    let shift = step.mul_scalar(2f32.powi(23));
    ((magnitude + shift.clone()) - shift) * x.sign()
}

/// A linear layer with rounded inputs.
#[derive(Module, Debug)]
pub struct RoundedLinear {
    /// Layer in high precision.
    pub linear: Linear,
    /// Rounding of its inputs.
    #[module(skip)]
    pub inputs: InputRounding,
}

impl RoundedLinear {
    /// Maps `[rows, d_in]` to `[rows, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        dense::forward(&self.linear, self.inputs.round(x))
    }
}

/// A linear layer for each expert, with rounded inputs.
#[derive(Module, Debug)]
pub struct RoundedExperts {
    /// Layers in high precision.
    pub linear: Nvfp4GroupedLinear,
    /// Rounding of their inputs.
    #[module(skip)]
    pub inputs: InputRounding,
}

impl RoundedExperts {
    /// Maps `[tokens, d_in]` to `[tokens, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>, experts: &ExpertOffsets) -> Result<Tensor<2>> {
        Ok(self.linear.try_forward(self.inputs.round(x), experts)?)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::interchange::{Fp8Format, Fp8Scales};

    fn devices() -> Vec<Device> {
        vec![
            Device::flex(),
            #[cfg(feature = "cpu")]
            nvfp4_test_support::cpu_runtime(Device::cpu),
        ]
    }

    fn on_host(x: f32, scale: f32) -> f32 {
        e4m3::decode_element(e4m3::encode_element(x / scale)) * scale
    }

    fn rounded(inputs: InputRounding, x: &[f32], rows: usize, device: &Device) -> Vec<f32> {
        let data = TensorData::new(x.to_vec(), [rows, x.len() / rows]);
        let x = Tensor::<2>::from_data(data, device);
        inputs.round(x).into_data().try_to_vec().unwrap()
    }

    /// All E4M3 values, the middles between them, and their neighbours; also values that saturate.
    #[test]
    fn rounding_is_that_of_the_format() {
        let values: Vec<f32> = (0..e4m3::MAX_BYTE).map(e4m3::decode).collect();
        let mut x = vec![448.0, 500.0, 1e30, f32::MIN_POSITIVE];
        for pair in values.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            x.extend([pair[0], middle.next_down(), middle, middle.next_up()]);
        }
        let x: Vec<f32> = x.iter().flat_map(|x| [*x, -x]).collect();
        for device in devices() {
            for scale in [1.0, 0.0123] {
                let x: Vec<f32> = x.iter().map(|x| x * scale).collect();
                let found = rounded(InputRounding::Static(scale), &x, 2, &device);
                for (x, found) in x.iter().zip(found) {
                    assert_eq!(found, on_host(*x, scale), "{x} {scale}");
                }
            }
            assert!(rounded(InputRounding::Static(1.0), &[f32::NAN], 1, &device)[0].is_nan());
        }
    }

    #[test]
    fn scales_are_those_of_the_group() {
        let x: Vec<f32> = (0..64)
            .map(|i| (i as f32 * 0.7).sin() * (1 + i / 16) as f32)
            .collect();
        let x = [&[0.0; 16], &x[16..]].concat();
        for device in devices() {
            for group in [16, 32] {
                let found = rounded(InputRounding::Dynamic(group), &x, 2, &device);
                for (x, found) in x.chunks(group).zip(found.chunks(group)) {
                    let amax = x.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
                    for (x, found) in x.iter().zip(found) {
                        let expected = match amax {
                            0.0 => 0.0,
                            amax => on_host(*x, amax / 448.0),
                        };
                        assert_eq!(*found, expected, "{group}: {x}");
                    }
                }
            }
        }
    }

    #[test]
    fn layers_that_read_one_input_round_it_alike() {
        let layer = |inputs, input_scale| Fp8Layer {
            shape: [16, 48],
            format: Fp8Format {
                inputs,
                scales: Fp8Scales::Channel,
            },
            input_scale,
            largest_scale: 1.0,
            bytes: 0,
        };
        let names = ["q".to_owned(), "k".to_owned()];
        let of = |a: Option<&Fp8Layer>, b: Option<&Fp8Layer>| {
            InputRounding::of([(&names[0], a), (&names[1], b)])
        };
        let [small, large] = [0.5, 0.75].map(|scale| layer(Fp8Inputs::Static, Some(scale)));
        let token = layer(Fp8Inputs::PerToken, None);
        let high = layer(Fp8Inputs::HighPrecision, None);
        let found = of(Some(&small), Some(&large)).unwrap();
        assert_eq!(found, Some(InputRounding::Static(0.75)));
        let found = of(Some(&token), Some(&token)).unwrap();
        assert_eq!(found, Some(InputRounding::Dynamic(48)));
        assert_eq!(of(Some(&high), None).unwrap(), None);
        for (a, b) in [(&small, Some(&token)), (&token, None)] {
            let error = of(Some(a), b).unwrap_err().to_string();
            assert!(error.contains("`k`") && error.contains("`q`"), "{error}");
        }
        let groups = layer(Fp8Inputs::Groups(32), None);
        let error = of(Some(&groups), None).unwrap_err().to_string();
        assert!(
            error.contains("each 32 features") && error.contains("has 48"),
            "{error}"
        );
    }
}
