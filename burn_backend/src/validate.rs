//! Checks that run before an operation is queued.

use burn_core::backend::DispatchDevice;
use burn_core::module::Param;
use burn_core::tensor::{DType, Device, Shape, Tensor, kind::Basic};
use nvfp4_formats::{BLOCK, Nvfp4Error};

/// Devices that the crate was built for, for messages.
const DEVICES: &str = if cfg!(feature = "flex") {
    if cfg!(feature = "cuda") {
        if cfg!(feature = "cpu") {
            "a Flex, CubeCL CPU or CUDA device"
        } else {
            "a Flex or CUDA device"
        }
    } else if cfg!(feature = "cpu") {
        "a Flex or CubeCL CPU device"
    } else {
        "a Flex device (features `cpu` and `cuda` of burn-nvfp4 add the CubeCL ones)"
    }
} else if cfg!(feature = "cuda") {
    if cfg!(feature = "cpu") {
        "a CubeCL CPU or CUDA device"
    } else {
        "a CUDA device"
    }
} else if cfg!(feature = "cpu") {
    "a CubeCL CPU device"
} else {
    "none: burn-nvfp4 was built without the features `flex`, `cpu` and `cuda`"
};

/// Returns an error if the extension has no implementation for `device`.
pub(crate) fn device(argument: &'static str, device: &Device) -> Result<(), Nvfp4Error> {
    if is_supported(device.as_dispatch()) {
        Ok(())
    } else {
        Err(Nvfp4Error::Device {
            argument,
            found: device_name(device),
            expected: DEVICES.into(),
        })
    }
}

/// Returns the name of `device` in errors, as commands spell it.
pub(crate) fn device_name(device: &Device) -> String {
    fn name(device: &DispatchDevice) -> String {
        match device {
            DispatchDevice::Autodiff(device) => name(device),
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => "flex".into(),
            #[cfg(feature = "cpu")]
            DispatchDevice::Cube(burn_cubecl::CubeDevice::Cpu(_)) => "cpu".into(),
            #[cfg(feature = "cuda")]
            DispatchDevice::Cube(burn_cubecl::CubeDevice::Cuda(cuda)) => {
                format!("cuda:{}", cuda.index)
            }
            #[allow(unreachable_patterns)]
            other => format!("{other:?}"),
        }
    }
    name(device.as_dispatch())
}

fn is_supported(device: &DispatchDevice) -> bool {
    match device {
        DispatchDevice::Autodiff(device) => is_supported(device),
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "cpu")]
        DispatchDevice::Cube(burn_cubecl::CubeDevice::Cpu(_)) => true,
        #[cfg(feature = "cuda")]
        DispatchDevice::Cube(burn_cubecl::CubeDevice::Cuda(_)) => true,
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// Returns an error if `second` is not on the device of `first`.
pub(crate) fn same_device(
    first: (&'static str, &Device),
    second: (&'static str, &Device),
) -> Result<(), Nvfp4Error> {
    if first.1 == second.1 {
        Ok(())
    } else {
        Err(Nvfp4Error::Device {
            argument: second.0,
            found: device_name(second.1),
            expected: format!("{}, the device of `{}`", device_name(first.1), first.0),
        })
    }
}

/// Returns an error if the dtype of `second` is not that of `first`.
pub(crate) fn same_dtype(
    first: (&'static str, DType),
    second: (&'static str, DType),
) -> Result<(), Nvfp4Error> {
    if first.1 == second.1 {
        Ok(())
    } else {
        Err(Nvfp4Error::DType {
            argument: second.0,
            found: format!("{:?}", second.1),
            expected: format!("{:?}, as `{}`", first.1, first.0),
        })
    }
}

/// Returns an error if `dtype` is not one of the three supported float dtypes.
pub(crate) fn float(argument: &'static str, dtype: DType) -> Result<(), Nvfp4Error> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        other => Err(Nvfp4Error::DType {
            argument,
            found: format!("{other:?}"),
            expected: "F32, BF16 or F16".into(),
        }),
    }
}

/// Returns an error if a dimension is not a positive multiple of the block size.
pub(crate) fn blocks(
    argument: &'static str,
    name: &str,
    dimension: usize,
) -> Result<(), Nvfp4Error> {
    if dimension > 0 && dimension.is_multiple_of(BLOCK) {
        Ok(())
    } else {
        Err(Nvfp4Error::shape(
            argument,
            format!("{name} = {dimension}"),
            format!("a positive multiple of {BLOCK}"),
        ))
    }
}

/// Checks the device and the float dtype of one operand.
pub(crate) fn operand<const D: usize>(
    argument: &'static str,
    tensor: &Tensor<D>,
) -> Result<(), Nvfp4Error> {
    device(argument, &tensor.device())?;
    float(argument, tensor.dtype())
}

/// Weight or bias: a tensor, or a parameter, which may be sharded or packed.
pub(crate) trait Weight<const D: usize> {
    /// Returns the tensor, this rank's shard of it, or the placeholder of a packed one, which has its
    /// dtype and device.
    fn held(&self) -> &Tensor<D>;

    /// Returns the shape of the whole value.
    fn whole_dims(&self) -> [usize; D];
}

impl<const D: usize> Weight<D> for Tensor<D> {
    fn held(&self) -> &Tensor<D> {
        self
    }

    fn whole_dims(&self) -> [usize; D] {
        self.dims()
    }
}

/// Returns an error if the tensors of a linear layer do not match, or the widths of its weight are
/// not those of whole blocks.
pub(crate) fn linear<const D: usize, W: Weight<2>, B: Weight<1>>(
    x: &Tensor<D>,
    weight: &W,
    bias: Option<&B>,
) -> Result<(), Nvfp4Error> {
    linear_tensors(x, weight, bias)?;
    weight_blocks("weight", weight)
}

/// Returns an error if the tensors of a linear layer do not match.
pub(crate) fn linear_tensors<const D: usize, W: Weight<2>, B: Weight<1>>(
    x: &Tensor<D>,
    weight: &W,
    bias: Option<&B>,
) -> Result<(), Nvfp4Error> {
    const { assert!(D > 0, "the input needs at least one axis") };
    operand("x", x)?;
    weight_and_bias(&x.device(), ["weight", "bias"], weight, bias)?;
    let [d_in, d_out] = weight.whole_dims();
    let dims = x.dims();
    if dims[D - 1] != d_in {
        return Err(Nvfp4Error::shape(
            "x",
            format!("{dims:?}"),
            format!("a last axis of {d_in}, the d_in of the weight [{d_in}, {d_out}]"),
        ));
    }
    Ok(())
}

/// Returns an error if the weight and bias of a linear layer, called `names`, do not match each
/// other and an `x` on `device`, or the widths of the weight are not those of whole blocks.
pub(crate) fn linear_parameters<W: Weight<2>, B: Weight<1>>(
    device: &Device,
    names: [&'static str; 2],
    weight: &W,
    bias: Option<&B>,
) -> Result<(), Nvfp4Error> {
    weight_and_bias(device, names, weight, bias)?;
    weight_blocks(names[0], weight)
}

/// Returns an error if a dimension of a weight is not a positive multiple of the block size.
pub(crate) fn weight_blocks(name: &'static str, weight: &impl Weight<2>) -> Result<(), Nvfp4Error> {
    let [d_in, d_out] = weight.whole_dims();
    blocks(name, "d_in", d_in)?;
    blocks(name, "d_out", d_out)
}

/// Returns an error if the weight and bias of a linear layer, called `names`, do not match each
/// other and an `x` on `device`.
fn weight_and_bias<W: Weight<2>, B: Weight<1>>(
    device: &Device,
    names: [&'static str; 2],
    weight: &W,
    bias: Option<&B>,
) -> Result<(), Nvfp4Error> {
    let [weight_name, bias_name] = names;
    held(device, weight_name, weight)?;
    let [d_in, d_out] = weight.whole_dims();
    if let Some(bias) = bias {
        held(device, bias_name, bias)?;
        let why = || format!("the d_out of the weight [{d_in}, {d_out}]");
        shape(bias_name, bias.whole_dims(), [d_out], why)?;
    }
    Ok(())
}

/// Returns an error if a weight or bias is not on `device`, that of `x`, or its dtype is not
/// supported.
pub(crate) fn held<const D: usize>(
    device: &Device,
    name: &'static str,
    weight: &impl Weight<D>,
) -> Result<(), Nvfp4Error> {
    operand(name, weight.held())?;
    same_device(("x", device), (name, &weight.held().device()))
}

/// Returns an error if a parameter is not on the device of `x`, and will not be. Creates the value
/// of a lazy parameter only on that device.
pub(crate) fn parameter<const D: usize>(
    device: &Device,
    name: &'static str,
    parameter: &Param<Tensor<D>>,
) -> Result<(), Nvfp4Error> {
    same_device(("x", device), (name, &parameter.lazy_device()))?;
    // Without a value, Burn reports the shape of the record, which is transposed for weights in
    // columns.
    let _ = parameter.dims();
    Ok(())
}

/// Returns an error if a shape is not the expected one; `why` describes that.
pub(crate) fn shape<const D: usize>(
    argument: &'static str,
    found: [usize; D],
    wanted: [usize; D],
    why: impl FnOnce() -> String,
) -> Result<(), Nvfp4Error> {
    if found == wanted {
        return Ok(());
    }
    let expected = format!("{wanted:?}, {}", why());
    Err(Nvfp4Error::shape(argument, format!("{found:?}"), expected))
}

/// Checks the shape and dtype of one buffer of a quantized matrix.
pub(crate) fn buffer<const D: usize, K: Basic>(
    argument: &'static str,
    tensor: &Tensor<D, K>,
    shape: [usize; D],
    dtype: DType,
) -> Result<(), Nvfp4Error> {
    if tensor.dtype() != dtype {
        return Err(Nvfp4Error::DType {
            argument,
            found: format!("{:?}", tensor.dtype()),
            expected: format!("{dtype:?}"),
        });
    }
    if tensor.shape() != Shape::new(shape) {
        return Err(Nvfp4Error::shape(
            argument,
            format!("{:?}", tensor.dims()),
            format!("{shape:?}"),
        ));
    }
    Ok(())
}
