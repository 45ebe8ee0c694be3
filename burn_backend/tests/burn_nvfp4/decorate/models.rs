//! The same model in two versions: of `burn_nn::Linear`, and of `Nvfp4Linear`.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::{DType, Device, Gradients, Tensor, TensorData, activation::gelu};
use burn_nn::{Linear, LinearConfig, LinearLayout};
use burn_nvfp4::state::assign_layer_ids;
use burn_nvfp4::{Nvfp4Linear, Nvfp4Recipe, decorate};

/// Returns true if the device is CubeCL's CPU runtime, which compiles slowly and has no `bf16`
/// arithmetic.
pub fn small_only() -> bool {
    std::env::var("NVFP4_TEST_DEVICE").map_or(cfg!(feature = "cpu"), |name| name != "cuda")
}

/// Returns the device under test, after [`decorate::install`].
pub fn device() -> Device {
    decorate::install().unwrap();
    #[cfg(feature = "cuda")]
    if !small_only() {
        return Device::cuda(0);
    }
    #[cfg(feature = "cpu")]
    return nvfp4_test_support::cpu_runtime(Device::cpu);
    #[allow(unreachable_code)]
    {
        panic!("NVFP4_TEST_DEVICE: not a device of this build");
    }
}

/// Returns `count` non-repeating values between -1 and 1, the same on every machine.
pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
        })
        .collect()
}

/// Returns a tensor of such values.
pub fn tensor<const D: usize>(
    shape: [usize; D],
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    let data = TensorData::new(noise(shape.iter().product(), seed), shape);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
}

/// Returns the bits of a tensor, as `f32`.
pub fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    let values: Vec<f32> = tensor.try_into_vec_as::<f32>().unwrap();
    assert!(values.iter().all(|value| value.is_finite()), "not finite");
    values.into_iter().map(f32::to_bits).collect()
}

/// Returns `parameter` in `dtype`, as a separate parameter: the result of a tracked cast could be
/// used in a backward only once.
pub fn leaf<const D: usize>(parameter: Tensor<D>, dtype: DType) -> Tensor<D> {
    parameter.cast(dtype).detach().require_grad()
}

/// Two Burn layers.
#[derive(Module, Debug)]
pub struct Plain {
    pub first: Linear,
    pub second: Linear,
}

impl Plain {
    pub fn new(biases: bool, device: &Device) -> Self {
        Self::with_layout(biases, LinearLayout::Row, device)
    }

    pub fn with_layout(biases: bool, layout: LinearLayout, device: &Device) -> Self {
        let linear = |d_in, d_out| {
            LinearConfig::new(d_in, d_out)
                .with_bias(biases)
                .with_layout(layout)
                .init(device)
        };
        Self {
            first: linear(32, 48),
            second: linear(48, 16),
        }
    }

    /// Converts the model to `dtype`, including parameters.
    pub fn typed(self, dtype: DType) -> Self {
        let cast = |linear: Linear| Linear {
            weight: linear.weight.map(|weight| leaf(weight, dtype)),
            bias: linear.bias.map(|bias| bias.map(|bias| leaf(bias, dtype))),
        };
        Self {
            first: cast(self.first),
            second: cast(self.second),
        }
    }

    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.second.forward(gelu(self.first.forward(x)))
    }
}

/// Two NVFP4 layers.
#[derive(Module, Debug)]
pub struct Explicit {
    pub first: Nvfp4Linear,
    pub second: Nvfp4Linear,
}

impl Explicit {
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.second.forward(gelu(self.first.forward(x)))
    }
}

/// Returns `plain` decorated, and the same parameters in explicit layers; both numbered from 0.
pub fn pair(plain: Plain, recipe: &Nvfp4Recipe) -> (Plain, Explicit) {
    let layer = |linear: &Linear| Nvfp4Linear::from_linear(linear.clone(), recipe).unwrap();
    let explicit = Explicit {
        first: layer(&plain.first),
        second: layer(&plain.second),
    };
    let decorated = decorate(plain, recipe).unwrap();
    assign_layer_ids(&explicit);
    assign_layer_ids(&decorated);
    (decorated, explicit)
}

/// Returns the gradients of the parameters that have one, in the order first, second, with weights
/// before biases.
pub fn plain_grads(model: &Plain, grads: &Gradients) -> Vec<Option<Vec<u32>>> {
    grads_of(
        [&model.first, &model.second].map(|layer| {
            let bias = layer.bias.as_ref().map(|bias| bias.base());
            (layer.weight.base(), bias)
        }),
        grads,
    )
}

/// Returns the gradients of the explicit model.
pub fn explicit_grads(model: &Explicit, grads: &Gradients) -> Vec<Option<Vec<u32>>> {
    grads_of(
        [&model.first, &model.second].map(|layer| {
            let bias = layer.bias.as_ref().map(|bias| bias.val());
            (layer.weight.val(), bias)
        }),
        grads,
    )
}

fn grads_of(
    layers: [(Tensor<2>, Option<Tensor<1>>); 2],
    grads: &Gradients,
) -> Vec<Option<Vec<u32>>> {
    let mut found = Vec::new();
    for (weight, bias) in layers {
        found.push(weight.grad(grads).map(bits));
        found.extend(bias.map(|bias| bias.grad(grads).map(bits)));
    }
    found
}

/// Runs one forward and backward of both models on `x`; every number must be the same. Returns the
/// gradients of the decorated and of the explicit model.
pub fn assert_same_step<const D: usize>(
    what: &str,
    decorated: &Plain,
    explicit: &Explicit,
    x: Tensor<D>,
    tracked: bool,
) -> (Gradients, Gradients) {
    let leaf = || {
        let x = x.clone().detach();
        if tracked { x.require_grad() } else { x }
    };
    let (x1, x2) = (leaf(), leaf());
    let (y1, y2) = (decorated.forward(x1.clone()), explicit.forward(x2.clone()));
    assert_eq!(
        bits(y1.clone().inner()),
        bits(y2.clone().inner()),
        "{what}: y"
    );
    let target = tensor(y1.dims(), 100, y1.dtype(), &x.device());
    let g1 = (y1 * target.clone()).sum().backward();
    let g2 = (y2 * target).sum().backward();
    if tracked {
        assert_eq!(
            bits(x1.grad(&g1).unwrap()),
            bits(x2.grad(&g2).unwrap()),
            "{what}: dx"
        );
    }
    let found = plain_grads(decorated, &g1);
    let expected = explicit_grads(explicit, &g2);
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        assert!(
            found == expected,
            "{what}: the gradient of parameter {index}"
        );
    }
    (g1, g2)
}
