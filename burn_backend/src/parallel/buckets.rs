//! Buckets of gradients of a module.

use std::ops::Range;

use burn_core::module::{Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{DType, Tensor};
use burn_optim::GradientsParams;

/// Groups the gradients of a module into buckets of one dtype each. All ranks visit the same
/// parameters in the same order, and so have the same buckets.
pub(super) struct Buckets<F> {
    /// Number of elements from which a bucket is full.
    most: usize,
    /// True if the gradient of a parameter is exchanged.
    takes: F,
}

impl<F: Fn(ParamId) -> bool> Buckets<F> {
    pub fn new(most: usize, takes: F) -> Self {
        Self { most, takes }
    }

    /// Replaces the selected gradients of `model` by their parts of the results of `exchange` for
    /// the buckets.
    pub fn exchange<M: Module>(
        self,
        model: &M,
        gradients: &mut GradientsParams,
        exchange: impl FnOnce(Vec<Tensor<1>>) -> Vec<Tensor<1>>,
    ) {
        let mut visitor = Visitor {
            rules: self,
            gradients,
            buckets: Vec::new(),
        };
        model.visit(&mut visitor);
        let buckets = visitor.buckets.into_iter().map(Bucket::join);
        let (flat, parts): (Vec<_>, Vec<_>) = buckets.unzip();
        for (made, parts) in exchange(flat).into_iter().zip(parts) {
            for part in parts {
                part(gradients, &made);
            }
        }
    }
}

struct Visitor<'a, F> {
    rules: Buckets<F>,
    gradients: &'a mut GradientsParams,
    buckets: Vec<Bucket>,
}

/// Concatenated gradients of one dtype.
struct Bucket {
    dtype: DType,
    flat: Vec<Tensor<1>>,
    elements: usize,
    parts: Vec<Part>,
}

/// Takes one gradient from the result of its bucket.
type Part = Box<dyn FnOnce(&mut GradientsParams, &Tensor<1>)>;

impl Bucket {
    fn new(dtype: DType) -> Self {
        Self {
            dtype,
            flat: Vec::new(),
            elements: 0,
            parts: Vec::new(),
        }
    }

    /// Appends a tensor; returns its range of elements.
    fn push(&mut self, tensor: Tensor<1>) -> Range<usize> {
        let start = self.elements;
        self.elements += tensor.shape().num_elements();
        self.flat.push(tensor);
        start..self.elements
    }

    fn join(self) -> (Tensor<1>, Vec<Part>) {
        (Tensor::cat(self.flat, 0), self.parts)
    }
}

impl<F: Fn(ParamId) -> bool> ModuleVisitor for Visitor<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let id = param.id;
        if !(self.rules.takes)(id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(id) else {
            return;
        };
        let (shape, dtype) = (gradient.shape(), gradient.dtype());
        let most = self.rules.most;
        let fits = |bucket: &Bucket| bucket.dtype == dtype && bucket.elements < most;
        let place = self.buckets.iter().position(fits);
        let place = place.unwrap_or_else(|| {
            self.buckets.push(Bucket::new(dtype));
            self.buckets.len() - 1
        });
        let bucket = &mut self.buckets[place];
        let range = bucket.push(gradient.reshape([shape.num_elements()]));
        bucket.parts.push(Box::new(move |gradients, made| {
            let own = made.clone().slice(range).reshape::<D, _>(shape);
            gradients.register(id, own);
        }));
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_core::tensor::{Device, Distribution, FloatDType};
    use burn_nn::{Linear, LinearConfig};

    use super::*;

    /// Returns a layer with gradients of two dtypes.
    fn layer() -> (Linear, GradientsParams, Tensor<2>, Tensor<1>) {
        let device = Device::flex().autodiff();
        let layer = LinearConfig::new(16, 32).init(&device);
        let mut gradients = GradientsParams::new();
        let plain = device.without_autodiff();
        let weight = Tensor::<2>::random([16, 32], Distribution::Default, &plain);
        gradients.register(layer.weight.id, weight.clone());
        let bias = Tensor::<1>::ones([32], &plain).cast(FloatDType::F16);
        gradients.register(layer.bias.as_ref().unwrap().id, bias.clone());
        (layer, gradients, weight, bias)
    }

    #[test]
    fn they_hold_every_gradient() {
        let (layer, mut gradients, weight, bias) = layer();
        Buckets::new(usize::MAX, |_| true).exchange(&layer, &mut gradients, |flat| {
            let sizes: Vec<_> = flat.iter().map(|x| (x.dtype(), x.dims())).collect();
            assert_eq!(sizes, [(DType::F32, [512]), (DType::F16, [32])]);
            flat.into_iter().map(|flat| flat * 2).collect()
        });
        let back: Tensor<2> = gradients.get(layer.weight.id).unwrap();
        assert_eq!(back.into_data(), (weight * 2).into_data());
        let id = layer.bias.as_ref().unwrap().id;
        let back: Tensor<1> = gradients.get(id).unwrap();
        assert_eq!(back.into_data(), (bias * 2).into_data());
        assert_eq!(gradients.len(), 2);
    }

    /// A full bucket accepts no more gradients; gradients that are not selected are unchanged.
    #[test]
    fn they_are_cut_and_choose() {
        let device = Device::flex().autodiff();
        let plain = device.clone().without_autodiff();
        let layers: Vec<_> = (0..3)
            .map(|_| LinearConfig::new(16, 32).init(&device))
            .collect();
        let mut gradients = GradientsParams::new();
        for layer in &layers {
            gradients.register(layer.weight.id, Tensor::<2>::ones([16, 32], &plain));
        }
        let kept = layers[2].weight.id;
        Buckets::new(512, |id| id != kept).exchange(&layers, &mut gradients, |flat| {
            let sizes: Vec<_> = flat.iter().map(|flat| flat.dims()).collect();
            assert_eq!(sizes, [[512], [512]]);
            flat.into_iter().map(|flat| flat * 2).collect()
        });
        for (layer, expected) in layers.iter().zip([2.0f32, 2.0, 1.0]) {
            let gradient: Tensor<2> = gradients.get(layer.weight.id).unwrap();
            assert_eq!(gradient.max().into_scalar::<f32>(), expected);
        }
    }
}
