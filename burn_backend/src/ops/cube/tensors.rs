//! Conversions between Burn's tensors and the kernels' matrices and quantized tensors.

use burn_core::backend::tensor::IntTensor;
use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, CubeDevice, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{MemoryReport, MemoryScope, client::Client, server::Handle};
use nvfp4_formats::{Layout, Nvfp4Error};
use nvfp4_kernels::graph::hold_for_branch;
use nvfp4_kernels::moe::{EarlierGroups, GroupOffsets};
use nvfp4_kernels::tensor::{DeviceQuantized, FloatKind, Groups, Matrix};

use super::super::dtype::float_kind;
use super::super::layout::{GroupCount, code_words};
use super::super::tensors::{MaybeTensor, Operand, QuantizedData, QuantizedMatrix, RowGroups};
use super::super::{float_dtype, trace_op};

/// Contiguous float matrix, as Burn's tensor and as the kernels' view of it.
pub(in crate::ops) struct Source {
    pub tensor: CubeTensor,
    pub matrix: Matrix,
}

impl Source {
    pub fn new(x: CubeTensor) -> Self {
        let tensor = into_contiguous(x);
        // The tensor may be a copy that Burn has allocated.
        hold_for_branch(&tensor.handle);
        let matrix = matrix(&tensor);
        Self { tensor, matrix }
    }

    /// Returns rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.matrix.rows, self.matrix.cols)
    }
}

/// Returns the kernels' view of a contiguous float matrix.
pub(in crate::ops) fn matrix(x: &CubeTensor) -> Matrix {
    let (rows, cols) = (x.meta.shape()[0], x.meta.shape()[1]);
    let kind = float_kind(float_dtype(x.dtype));
    launched(Matrix::new(x.handle.clone(), rows, cols, kind))
}

/// Converts offsets of groups to the kernels' form.
pub(in crate::ops) fn group_offsets(offsets: IntTensor<CubeBackend>) -> GroupOffsets {
    let offsets = into_contiguous(offsets);
    let count = offsets.meta.shape()[0] - 1;
    launched(GroupOffsets::new(offsets.handle, count))
}

/// Converts groups to the kernels' form.
pub(in crate::ops) fn device_groups(groups: RowGroups<CubeBackend>) -> Groups {
    match groups {
        RowGroups::Whole => Groups::One,
        RowGroups::Batch(count) => Groups::Batch(count),
        RowGroups::Offsets(offsets) | RowGroups::Window { offsets, .. } => {
            let GroupOffsets { offsets, count } = group_offsets(offsets);
            Groups::Offsets { offsets, count }
        }
    }
}

/// Returns the groups before `groups`, after which stochastic rounding numbers the blocks, if there
/// can be any.
pub(in crate::ops) fn earlier_groups(groups: &RowGroups<CubeBackend>) -> Option<EarlierGroups> {
    let RowGroups::Window { earlier, .. } = groups else {
        return None;
    };
    let earlier = into_contiguous(earlier.clone());
    Some(launched(EarlierGroups::new(earlier.handle)))
}

/// Returns `tensor`, contiguous and in exclusive memory that a kernel may write to: a copy if
/// another tensor shares its memory.
///
/// CubeCL's CPU runtime returns the memory itself on a read, not a copy, so data that were read
/// before would see the write: there the result is always a copy.
pub(in crate::ops) fn owned(op: &'static str, tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    let is_read = matches!(tensor.device, CubeDevice::Cpu(_));
    match is_own(&tensor) && !is_read {
        true => tensor,
        false => {
            let shape = tensor.meta.shape().clone();
            let elements = shape.num_elements();
            trace_op(op, "copy", 1, elements);
            // As one row: a copy of several rows may have padding between them.
            let dtype = tensor.dtype;
            let row = Shape::new([elements]);
            let row = new_tensor(&tensor, tensor.handle.clone(), row, dtype).copy();
            new_tensor(&tensor, row.handle, shape, dtype)
        }
    }
}

/// Returns true if nothing else holds the memory of `tensor`.
///
/// The runtime's thread holds memory briefly while it allocates it. In a graph, a copy for that
/// reason would be silent and wrong: there this waits for the thread.
pub(in crate::ops) fn is_own(tensor: &CubeTensor) -> bool {
    if !tensor.can_mut() && tensor.client.is_capturing() {
        settle(&tensor.client);
    }
    tensor.can_mut()
}

/// Waits until the runtime's thread has processed all requests: its answer comes after them. Does
/// not wait for the device.
pub(in crate::ops) fn settle(client: &Client) -> MemoryReport {
    client.memory_report(MemoryScope::CurrentStream)
}

/// Converts a quantized tensor of a kernel to tensors on the device of `like`.
pub(in crate::ops) fn to_burn(
    like: &CubeTensor,
    made: DeviceQuantized,
    groups: GroupCount,
    layout: Layout,
) -> QuantizedMatrix<CubeBackend> {
    let outer = layout.outer();
    let amax = match layout.format.has_global_scale() {
        true => {
            let shape = Shape::new([groups.amax_len(&layout)]);
            MaybeTensor::Present(new_tensor(like, made.amax, shape, DType::F32))
        }
        false => MaybeTensor::Absent,
    };
    let data = match layout.form.is_packed() {
        true => {
            let (width, dtype) = code_words(&layout);
            let scales = Shape::new(groups.scale_shape(&layout));
            QuantizedData::Packed {
                codes: new_tensor(like, made.codes, Shape::new([outer, width]), dtype),
                scales: new_tensor(like, made.scales, scales, DType::U8),
            }
        }
        false => {
            let shape = Shape::new([outer, layout.padded_inner()]);
            QuantizedData::Bf16Unscaled(new_tensor(like, made.codes, shape, DType::BF16))
        }
    };
    QuantizedMatrix { data, amax, layout }
}

/// Returns the kernels' view of a quantized tensor, with its groups.
pub(in crate::ops) fn to_device(
    source: QuantizedMatrix<CubeBackend>,
    groups: Groups,
) -> DeviceQuantized {
    let (codes, scales) = match source.data {
        QuantizedData::Packed { codes, scales } => (codes, Some(scales)),
        QuantizedData::Bf16Unscaled(values) => (values, None),
    };
    let handle = |tensor| into_contiguous(tensor).handle;
    let codes = handle(codes);
    // The kernels do not read the buffers that a layout lacks.
    let scales = scales.map_or_else(|| codes.clone(), handle);
    let amax = source.amax.into_option();
    let amax = amax.map_or_else(|| scales.clone(), handle);
    DeviceQuantized {
        groups,
        ..DeviceQuantized::new(source.layout, (codes, scales, amax))
    }
}

/// Returns a tensor on the device of the results of a GEMM with `operand`.
pub(in crate::ops) fn like(operand: &Operand<CubeBackend>) -> CubeTensor {
    match operand {
        Operand::Quantized(quantized) | Operand::QuantizedMnMajor(quantized) => {
            like_quantized(quantized)
        }
        Operand::Float(x, _) => x.clone(),
    }
}

/// Returns the codes of a quantized tensor, or its values.
pub(in crate::ops) fn like_quantized(quantized: &QuantizedMatrix<CubeBackend>) -> CubeTensor {
    match &quantized.data {
        QuantizedData::Packed { codes, .. } => codes.clone(),
        QuantizedData::Bf16Unscaled(values) => values.clone(),
    }
}

/// Returns the number of output rows or columns of an operand, and its K in memory.
pub(in crate::ops) fn stored_shape(operand: &Operand<CubeBackend>) -> (usize, usize) {
    match operand {
        Operand::Quantized(quantized) => {
            (quantized.layout.outer(), quantized.layout.padded_inner())
        }
        Operand::QuantizedMnMajor(quantized) => {
            (quantized.layout.inner(), quantized.layout.outer())
        }
        Operand::Float(x, usage) => usage.stored_shape(x.meta.shape()[0], x.meta.shape()[1]),
    }
}

/// Converts a matrix of a kernel to a tensor on the device of `like`.
pub(in crate::ops) fn result(like: &CubeTensor, out: Matrix) -> CubeTensor {
    let dtype = match out.dtype {
        FloatKind::F32 => DType::F32,
        FloatKind::F16 => DType::F16,
        FloatKind::Bf16 => DType::BF16,
    };
    let shape = Shape::new([out.rows, out.cols]);
    new_tensor(like, out.handle, shape, dtype)
}

pub(in crate::ops) fn new_tensor(
    like: &CubeTensor,
    handle: Handle,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        handle,
        dtype,
    )
}

/// Unwraps the result of a launch whose arguments were checked before it was queued. Only the
/// runtime can fail; fusion passes the panic on to the reader of the result.
pub(in crate::ops) fn launched<T>(result: Result<T, Nvfp4Error>) -> T {
    result.unwrap_or_else(|error| panic!("nvfp4 on CubeCL: {error}"))
}
