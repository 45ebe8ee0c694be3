//! Weight of a linear layer that is packed in its place.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::module::{Module, Param, ParamId, Reparameterization};
use burn_core::tensor::{DType, Tensor};
use nvfp4_formats::{Nvfp4Error, Rounding, Usage};

use super::observer::Observer;
use super::weight::Nvfp4Weight;
#[cfg(any(feature = "cpu", feature = "cuda"))]
use crate::decorate::packed::Route;
use crate::functions::or_panic;
use crate::ops::packed::Activations;
use crate::ops::{Nvfp4KernelOps, QuantParams, QuantizeRequest, RowGroups, StoredForm};

/// Packed weight of a linear layer, attached to the layer's parameter by
/// [`quantize`](crate::quantize()).
///
/// The parameter holds one column of zeros in place of the high-precision weight. Its value
/// (`Param::val`) is the dequantized weight, `[d_in, d_out]` or a stack. The layers of this crate
/// multiply by the codes. `burn_nn::Linear` multiplies by the dequantized weight, except on a CubeCL
/// device: there the value is a mark, as in a decorated model, and the GEMM reads the codes.
#[derive(Module, Debug)]
pub struct PackedParameter {
    /// Weight, `[d_out, d_in]`, or a stack of these.
    pub packed: Nvfp4Weight,
    /// Static global scales that dequantize the input: `f32[1]`, or one per matrix of a stack.
    pub input: Option<Param<Tensor<1>>>,
    #[module(skip)]
    activations: Activations,
    #[module(skip)]
    observer: Observer,
    /// Route of the GEMMs of a layer that is not of this crate.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[module(skip)]
    route: Option<Route>,
}

impl PackedParameter {
    /// Packs `weight`, `[d_in, d_out]` or a stack with leading axes, in 1x16 blocks along `d_in`,
    /// rounded to nearest, with one global scale per matrix. `d_in` must be a multiple of 16. The
    /// scales of static `activations` are NaN until they are loaded or set.
    ///
    /// # Errors
    /// Returns an error if the device has no implementation.
    pub(crate) fn try_new<const D: usize>(
        weight: Tensor<D>,
        activations: Activations,
    ) -> Result<Self, Nvfp4Error> {
        let dims = weight.dims();
        let [d_in, d_out] = [dims[D - 2], dims[D - 1]];
        let stack = dims[..D - 2].iter().product();
        let params = QuantParams::nvfp4(Rounding::Nearest);
        let matrix: Tensor<2> = weight.detach().reshape([stack * d_in, d_out]);
        let request = QuantizeRequest::of_matrix(matrix.into_dispatch());
        let request = request.along(Usage::Columnwise, params, StoredForm::Rows);
        let request = match stack {
            1 => request,
            _ => request.groups(RowGroups::Batch(stack)),
        };
        let made = Dispatch::nvfp4_quantize(request).into_one();
        let packed = Nvfp4Weight::from_trained(made)?.read_by(&activations.spec(), D > 2);
        let input = (activations == Activations::Static).then(|| {
            let place = (&packed.codes.device(), DType::F32);
            let scales = Tensor::<1>::full([stack], f32::NAN, place);
            Param::initialized(ParamId::new(), scales)
        });
        Ok(Self {
            packed,
            input,
            activations,
            observer: Observer::default(),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            route: None,
        })
    }

    /// Routes the GEMMs of a layer that is not of this crate.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(crate) fn set_route(&mut self, route: Route) {
        self.route = Some(route);
    }

    /// Returns the quantization of the input.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Returns the shape of the weight, `[d_in, d_out]` or a stack of these.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        let ([rows, d_in], stack) = (self.packed.shape(), self.packed.stack());
        std::array::from_fn(|axis| match D - axis {
            1 => rows / stack,
            2 => d_in,
            3 => stack,
            _ => 1,
        })
    }

    /// Returns the observer of the layer's input.
    pub(crate) fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Computes the layer for rows `x` (`[rows, d_in]`) that it has checked.
    pub(in crate::nn) fn multiply<const B: usize>(
        &self,
        x: Tensor<2>,
        bias: Option<&Param<Tensor<B>>>,
        groups: RowGroups<Dispatch>,
    ) -> Tensor<2> {
        // While the input is observed, it is not quantized: its scale is not known.
        let input = match self.observer.is_active() {
            true => (Activations::HighPrecision, None),
            false => (self.activations, self.input.as_ref()),
        };
        if self.observer.is_active() && x.shape().num_elements() > 0 {
            let amax = x.clone().detach().abs().max();
            self.observer.add(amax.into_scalar::<f32>());
        }
        self.packed.multiply(x, input, bias, groups)
    }
}

impl Reparameterization for PackedParameter {
    const NAME: &'static str = "nvfp4";

    #[track_caller]
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        #[cfg(any(feature = "cpu", feature = "cuda"))]
        if let Some(route) = &self.route
            && route.is_open(&base.device(), self.activations)
        {
            let input = self.input.as_ref().map(|input| input.val());
            let input = (self.activations, input, &self.observer);
            return route.mark(base, self.packed.quantized(), input);
        }
        let dtype = base.dtype().into();
        let values = or_panic("a packed weight", self.packed.try_dequantize(dtype));
        let [d_in, d_out] = [self.dims::<2>()[0], self.dims::<2>()[1]];
        let values = match D {
            2 => values.transpose().into_dispatch(),
            _ => {
                let stack = values.reshape([self.packed.stack(), d_out, d_in]);
                Tensor::<3>::swap_dims(stack, 1, 2).into_dispatch()
            }
        };
        Tensor::from_dispatch(values)
    }
}
