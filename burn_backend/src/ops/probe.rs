//! Samples of the operands of a training step, copied on the device.

use std::sync::{Arc, Mutex};

use burn_core::backend::tensor::{FloatTensor, IntTensor};
use burn_core::backend::{Backend, TensorMetadata};
use burn_core::tensor::{FloatDType, Shape, Slice, TensorData};
use futures_lite::future::block_on;
use nvfp4_formats::{Format, Layout, Usage};

use super::{MaybeTensor, Nvfp4KernelOps, Operand, OperandSpec, QuantizedData};

/// Approximate number of elements of an operand that a sample reads; at least one row per matrix.
const SAMPLE_ELEMENTS: usize = 1 << 18;

/// Sink for samples of a layer's operands.
#[derive(Clone, Default)]
pub(crate) struct Probe {
    samples: Arc<Mutex<Vec<DeviceSample>>>,
}

/// Sample on its device, as a function that reads it; `None` if reading fails.
type DeviceSample = Box<dyn FnOnce() -> Option<SampledOperand> + Send>;

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").finish_non_exhaustive()
    }
}

/// Source of a quantized operand.
pub(crate) struct OperandSource<'a, B: Backend> {
    /// Name of the operand.
    name: &'static str,
    /// Source values: `[rows, cols]`, or `[experts, rows, cols]` for a stack.
    values: FloatTensor<B>,
    /// Axis of the matrix, or of each matrix of a stack, that its blocks are along.
    usage: Usage,
    /// Offsets of each expert's rows, if there are experts.
    offsets: Option<&'a IntTensor<B>>,
}

impl<'a, B: Backend> OperandSource<'a, B> {
    /// Input or gradient, quantized row-wise; separately for each expert if `offsets` are given.
    pub(crate) fn rows(
        name: &'static str,
        values: FloatTensor<B>,
        offsets: Option<&'a IntTensor<B>>,
    ) -> Self {
        Self {
            name,
            values,
            usage: Usage::Rowwise,
            offsets,
        }
    }

    /// Input or gradient, quantized column-wise, along the tokens, for wgrad; separately for each
    /// expert if `offsets` are given.
    pub(crate) fn columns(
        name: &'static str,
        values: FloatTensor<B>,
        offsets: Option<&'a IntTensor<B>>,
    ) -> Self {
        Self {
            name,
            values,
            usage: Usage::Columnwise,
            offsets,
        }
    }

    /// Weight, or stack of weights, quantized column-wise for the forward.
    pub(crate) fn weight(name: &'static str, values: FloatTensor<B>) -> Self {
        Self {
            name,
            values,
            usage: Usage::Columnwise,
            offsets: None,
        }
    }
}

impl Probe {
    /// Reads all samples that were recorded since the last call.
    pub(crate) fn read(&self) -> Vec<SampledOperand> {
        let mut samples = self.samples.lock().expect("no panic while it is held");
        samples.drain(..).filter_map(|read| read()).collect()
    }

    /// Records a sample of `operand`, quantized from `source` by `spec`: evenly spaced stored rows,
    /// so that every expert has a proportional share.
    pub(crate) fn record<B: Nvfp4KernelOps>(
        &self,
        source: OperandSource<'_, B>,
        operand: &Operand<B>,
        spec: &OperandSpec,
    ) {
        let Operand::Quantized(quantized) = operand else {
            return;
        };
        let (QuantizedData::Packed { codes, scales }, MaybeTensor::Present(amax)) =
            (&quantized.data, &quantized.amax)
        else {
            return;
        };
        let layout = quantized.layout;
        if layout.format != Format::Nvfp4 {
            return;
        }
        let OperandSource {
            name,
            values: x,
            usage,
            offsets,
        } = source;
        let shape = x.shape();
        let (count, rows, cols) = match shape.num_dims() {
            2 => (1, shape[0], shape[1]),
            _ => (shape[0], shape[1], shape[2]),
        };
        let (outer, inner) = usage.stored_shape(rows, cols);
        if count * outer * inner == 0 {
            return;
        }
        let step = (count * outer * inner)
            .div_ceil(SAMPLE_ELEMENTS)
            .clamp(1, outer);
        let every = Slice::new(0, Some(outer as isize), step as isize);
        let all = |len: usize| Slice::from(0..len);
        let x = B::float_reshape(x, Shape::new([count, rows, cols]));
        let x = match usage {
            Usage::Rowwise => B::float_slice(x, &[all(count), every, all(cols)]),
            Usage::Columnwise => {
                let x = B::float_slice(x, &[all(count), all(rows), every]);
                B::float_swap_dims(x, 1, 2)
            }
        };
        let part = |tensor: &IntTensor<B>, width: usize| {
            let tensor = B::int_reshape(tensor.clone(), Shape::new([count, outer, width]));
            B::int_slice(tensor, &[all(count), every, all(width)])
        };
        let blocks = layout.blocks();
        // A weight may have been quantized before telemetry began.
        let scales = match layout.form.has_tiles() {
            false => scales.clone(),
            true => rows_of_tiles::<B>(scales.clone(), count, (outer, blocks)),
        };
        let x = B::float_cast(x, FloatDType::F32);
        let (codes, scales) = (part(codes, blocks * 2), part(&scales, blocks));
        let (amax, offsets) = (amax.clone(), offsets.cloned());
        let stochastic = !spec.is_deterministic();
        let read = move || {
            let offsets = offsets.map(|offsets| block_on(B::int_into_data(offsets)));
            let read = (
                block_on(B::float_into_data(x)),
                block_on(B::int_into_data(codes)),
                block_on(B::int_into_data(scales)),
                block_on(B::float_into_data(amax)),
                offsets.transpose(),
            );
            let (Ok(x), Ok(codes), Ok(scales), Ok(amax), Ok(offsets)) = read else {
                tracing::warn!(name, "telemetry: the operand could not be read");
                return None;
            };
            Some(SampledOperand {
                name,
                usage,
                layout,
                matrices: count,
                outer,
                inner,
                step,
                stochastic,
                x,
                codes,
                scales,
                amax,
                offsets,
            })
        };
        self.samples
            .lock()
            .expect("no panic while it is held")
            .push(Box::new(read));
    }
}

/// Converts block scales from 128x4 tiles, which begin anew at each matrix, to row-major
/// `[matrices * outer, blocks]`.
fn rows_of_tiles<B: Backend>(
    scales: IntTensor<B>,
    matrices: usize,
    (outer, blocks): (usize, usize),
) -> IntTensor<B> {
    let (down, across) = (outer.div_ceil(128), blocks.div_ceil(4));
    // A tile is 32 lines of four rows, 32 apart, with four blocks each.
    let tiles = Shape::new([matrices * down, across, 32, 4, 4]);
    let tiles = B::int_reshape(scales, tiles);
    let rows = B::int_permute(tiles, &[0, 3, 2, 1, 4]);
    let rows = B::int_reshape(rows, Shape::new([matrices, down * 128, across * 4]));
    let own = [0..matrices, 0..outer, 0..blocks].map(Slice::from);
    let rows = B::int_slice(rows, &own);
    B::int_reshape(rows, Shape::new([matrices * outer, blocks]))
}

/// Sample of an operand on the host: every `step`-th of the stored rows of each matrix.
pub(crate) struct SampledOperand {
    pub(crate) name: &'static str,
    pub(crate) usage: Usage,
    pub(crate) layout: Layout,
    /// Number of matrices in the stack, each with `outer` stored rows of `inner` values.
    pub(crate) matrices: usize,
    pub(crate) outer: usize,
    pub(crate) inner: usize,
    pub(crate) step: usize,
    pub(crate) stochastic: bool,
    pub(crate) x: TensorData,
    pub(crate) codes: TensorData,
    pub(crate) scales: TensorData,
    pub(crate) amax: TensorData,
    pub(crate) offsets: Option<TensorData>,
}
