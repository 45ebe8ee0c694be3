//! Cube: launches of the grouped CubeCL kernels. Nothing waits for the device.

use burn_core::backend::{
    TensorMetadata, get_or_init_device_settings,
    ops::{BoolTensorOps, FloatTensorOps, IntTensorOps},
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{DType, FloatDType, IntDType, Shape, Slice};
use burn_cubecl::{
    CubeBackend,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use cubecl::server::Handle;
use nvfp4_kernels::device::{AmaxScope, DeviceCopy, DevicePacked, Groups, Matrix};
use nvfp4_kernels::gemm::{Elements, Operand, Scale, Target};
use nvfp4_kernels::ops::{AmaxRequest, CopyRequest, GroupOffsets};
use nvfp4_kernels::{BLOCK, PackedAxis, ScaleLayout, gemm, ops};

use super::super::cube::{device, float_kind, launched, new_tensor, packed_tensor, result};
use super::super::{
    Bias, CopySpec, Packed, PackedLayout, PackedPair, PairSpec, QuantizeSpec, copy_name,
    float_dtype, trace_op,
};
use super::{GroupPairSpec, Nvfp4GroupedOps};

impl Nvfp4GroupedOps for CubeBackend {
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let (like, matrix, dims) = stack(w);
        trace_op("quantize", copy_name(spec.axis), matrix.rows, matrix.cols);
        let groups = Groups::Batch(dims[0]);
        let amax = group_amax(&like, &matrix, &groups);
        let request = request(&amax, &spec.copy);
        let layout = PackedLayout::stack(dims, spec.axis, spec.copy.scaling);
        let copy = launched(ops::quantize(
            &like.client,
            &matrix,
            &groups,
            spec.axis,
            &request,
        ));
        packed_tensor(&like, copy, layout, dims[0])
    }

    fn nvfp4_quantize_stack_pair(w: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let (like, matrix, dims) = stack(w);
        trace_op("quantize", "pair", matrix.rows, matrix.cols);
        let groups = Groups::Batch(dims[0]);
        let amax = group_amax(&like, &matrix, &groups);
        let client = &like.client;
        let (row, col) = launched(match spec {
            PairSpec::Tile(scaling) => {
                let compact = [ScaleLayout::Compact; 2];
                ops::quantize_tile_with(client, &matrix, &groups, &amax, scaling, compact)
            }
            PairSpec::Blocks { row, col } => {
                let [row, col] = [row, col].map(|copy| request(&amax, &copy));
                ops::quantize_both(client, &matrix, &groups, &row, &col)
            }
        });
        let layout = |copy: &DevicePacked, axis| PackedLayout::stack(dims, axis, copy.scaling);
        let layouts = (
            layout(&row, PackedAxis::Cols),
            layout(&col, PackedAxis::Rows),
        );
        PackedPair {
            row: packed_tensor(&like, row, layouts.0, dims[0]),
            col: packed_tensor(&like, col, layouts.1, dims[0]),
        }
    }

    fn nvfp4_quantize_groups(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: QuantizeSpec,
    ) -> Packed<Self> {
        let tokens = Tokens::new(x, offsets);
        let QuantizeSpec { axis, copy } = spec;
        trace_op(
            "quantize",
            copy_name(axis),
            tokens.matrix.rows,
            tokens.matrix.cols,
        );
        let amaxes = tokens.amaxes(&match axis {
            PackedAxis::Cols => AmaxRequest {
                rows: Some(AmaxScope::Group),
                cols: None,
            },
            PackedAxis::Rows => AmaxRequest {
                rows: None,
                cols: Some((AmaxScope::Group, copy.hadamard)),
            },
        });
        let amax = amaxes.0.or(amaxes.1).expect("one was asked for");
        let request = request(&amax, &copy);
        let (row, col) = match axis {
            PackedAxis::Cols => tokens.quantize(Some(&request), None),
            PackedAxis::Rows => tokens.quantize(None, Some(&request)),
        };
        row.or(col).expect("one was asked for")
    }

    fn nvfp4_quantize_groups_pair(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: GroupPairSpec,
    ) -> PackedPair<Self> {
        let tokens = Tokens::new(x, offsets);
        trace_op("quantize", "pair", tokens.matrix.rows, tokens.matrix.cols);
        let GroupPairSpec { row, col } = spec;
        // Without a transform one maximum serves both copies.
        let (row_amax, col_amax) = tokens.amaxes(&AmaxRequest {
            rows: Some(AmaxScope::Group),
            cols: col
                .hadamard
                .map(|hadamard| (AmaxScope::Group, Some(hadamard))),
        });
        let row_amax = row_amax.expect("asked for");
        let col_amax = col_amax.unwrap_or_else(|| row_amax.clone());
        let (row, col) = tokens.quantize(
            Some(&request(&row_amax, &row)),
            Some(&request(&col_amax, &col)),
        );
        PackedPair {
            row: row.expect("asked for"),
            col: col.expect("asked for"),
        }
    }

    fn nvfp4_matmul_group_rows(
        a: Packed<Self>,
        b: Packed<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let like = a.codes.clone();
        let groups = group_offsets(offsets);
        trace_op(
            "matmul",
            "",
            a.layout.outer(),
            b.layout.outer() / groups.count,
        );
        let (a, b) = (device(a), device(b));
        group_rows(&like, &operand(&a), &operand(&b), bias, &groups, dtype)
    }

    fn nvfp4_matmul_group_depth(
        a: Packed<Self>,
        b: Packed<Self>,
        offsets: IntTensor<Self>,
        tokens: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let like = a.codes.clone();
        let unit = a
            .layout
            .hadamard
            .map_or(BLOCK, |hadamard| hadamard.size().elements());
        trace_op("matmul", "", a.layout.outer(), b.layout.outer());
        let groups = group_offsets(offsets);
        let aligned = launched(groups.aligned(&like.client, tokens, unit));
        let (a, b) = (device(a), device(b));
        group_depth(&like, &operand(&a), &operand(&b), &aligned, dtype)
    }

    fn nvfp4_group_sums(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        let tokens = Tokens::new(x, offsets);
        let client = &tokens.tensor.client;
        let sums = launched(ops::group_sums(client, &tokens.matrix, &tokens.groups));
        result(&tokens.tensor, sums)
    }

    fn nvfp4_float_group_rows(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        transposed: bool,
    ) -> FloatTensor<Self> {
        let dtype = float_dtype(x.dtype());
        if dtype != FloatDType::BF16 {
            return masked_rows(x, w, bias, offsets, transposed);
        }
        // The contraction is stored along the rows: `[experts, d_out, d_in]`, or `w` as it is.
        let w = cast(w, DType::BF16);
        let w = if transposed {
            w
        } else {
            CubeBackend::float_swap_dims(w, 1, 2)
        };
        let (_, stack, _) = stack(w);
        let tokens = Tokens::new(x, offsets);
        let (a, b) = ((&tokens.matrix).into(), (&stack).into());
        group_rows(&tokens.tensor, &a, &b, bias, &tokens.groups, dtype)
    }

    fn nvfp4_float_group_depth(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        if float_dtype(x.dtype()) != FloatDType::BF16 {
            return masked_depth(x, dy, offsets, dtype);
        }
        let groups = group_offsets(offsets.clone());
        let tokens = x.meta.shape()[0];
        let aligned = launched(groups.aligned(&x.client, tokens, BLOCK));
        let [(like, a), (_, b)] = [x, dy].map(|x| {
            // Groups padded to 16 tokens, with the tokens along the rows.
            let tokens = Tokens::new(x, offsets.clone());
            let (client, like) = (&tokens.tensor.client, &tokens.tensor);
            let (padded, _) = launched(ops::pad_groups(
                client,
                &tokens.matrix,
                &tokens.groups,
                BLOCK,
            ));
            let padded = result(like, padded);
            let turned = into_contiguous(CubeBackend::float_swap_dims(padded, 0, 1));
            let matrix = matrix(&turned);
            (turned, matrix)
        });
        group_depth(&like, &(&a).into(), &(&b).into(), &aligned, dtype)
    }
}

/// Tokens in groups: Burn's tensor, and the kernels' view of it and of its groups.
struct Tokens {
    tensor: CubeTensor,
    matrix: Matrix,
    groups: GroupOffsets,
}

impl Tokens {
    fn new(x: CubeTensor, offsets: CubeTensor) -> Self {
        let tensor = into_contiguous(x);
        let matrix = matrix(&tensor);
        Self {
            tensor,
            matrix,
            groups: group_offsets(offsets),
        }
    }

    /// The maxima of each group: for row-wise copies and for column-wise ones.
    fn amaxes(&self, request: &AmaxRequest) -> (Option<Handle>, Option<Handle>) {
        let groups = Groups::Offsets {
            offsets: self.groups.offsets.clone(),
            count: self.groups.count,
        };
        let found = launched(ops::amaxes(
            &self.tensor.client,
            &self.matrix,
            &groups,
            request,
        ));
        (found.rows, found.cols)
    }

    fn quantize(
        &self,
        row: Option<&CopyRequest<'_>>,
        col: Option<&CopyRequest<'_>>,
    ) -> (Option<Packed<CubeBackend>>, Option<Packed<CubeBackend>>) {
        let (client, groups) = (&self.tensor.client, &self.groups);
        let (row, col) = launched(ops::quantize_side_by_side(
            client,
            &self.matrix,
            groups,
            row,
            col,
        ));
        let tensor = |copy: DevicePacked| {
            let layout = PackedLayout {
                hadamard: copy.hadamard,
                scaling: copy.scaling,
                ..PackedLayout::plain(copy.rows, copy.cols, copy.axis)
            };
            packed_tensor(&self.tensor, copy, layout, groups.count)
        };
        (row.map(tensor), col.map(tensor))
    }
}

fn request<'a>(amax: &'a Handle, copy: &CopySpec) -> CopyRequest<'a> {
    CopyRequest {
        amax,
        scope: AmaxScope::Group,
        copy: DeviceCopy {
            hadamard: copy.hadamard,
            scaling: copy.scaling,
            ..DeviceCopy::new(copy.rounding)
        },
    }
}

/// The largest magnitude of each matrix of a stack.
fn group_amax(like: &CubeTensor, matrix: &Matrix, groups: &Groups) -> Handle {
    let request = AmaxRequest {
        rows: Some(AmaxScope::Group),
        cols: None,
    };
    let found = launched(ops::amaxes(&like.client, matrix, groups, &request));
    found.rows.expect("asked for")
}

/// The kernels' view of a contiguous float matrix.
fn matrix(x: &CubeTensor) -> Matrix {
    let (rows, cols) = (x.meta.shape()[0], x.meta.shape()[1]);
    let kind = float_kind(float_dtype(x.dtype));
    launched(Matrix::new(x.handle.clone(), rows, cols, kind))
}

/// A stack as one contiguous matrix, `[count * rows, cols]`, and its three sizes.
fn stack(w: CubeTensor) -> (CubeTensor, Matrix, [usize; 3]) {
    let w = into_contiguous(w);
    let shape = w.meta.shape();
    let dims = [shape[0], shape[1], shape[2]];
    let kind = float_kind(float_dtype(w.dtype));
    let handle = w.handle.clone();
    let matrix = launched(Matrix::new(handle, dims[0] * dims[1], dims[2], kind));
    (w, matrix, dims)
}

fn group_offsets(offsets: CubeTensor) -> GroupOffsets {
    let offsets = into_contiguous(offsets);
    let count = offsets.meta.shape()[0] - 1;
    launched(GroupOffsets::new(offsets.handle, count))
}

fn operand(packed: &DevicePacked) -> Operand<'_> {
    Operand {
        elements: Elements::Packed(packed),
        scale: Scale::PerGroup(&packed.amax, packed.scaling.range()),
    }
}

/// The product of tokens with their experts' matrices, beside `like`.
fn group_rows(
    like: &CubeTensor,
    a: &Operand,
    b: &Operand,
    bias: Bias<CubeBackend>,
    groups: &GroupOffsets,
    dtype: FloatDType,
) -> CubeTensor {
    let client = &like.client;
    let bias = match bias {
        Bias::Absent => None,
        Bias::Vector(bias) => Some(matrix(&into_contiguous(cast(bias, DType::F32)))),
    };
    let out = launched(gemm::gemm_grouped_rows(
        client,
        None,
        a,
        b,
        groups,
        bias.as_ref(),
        Target::New(float_kind(dtype)),
    ));
    launched(ops::clear_rest(client, &out, groups));
    result(like, out)
}

/// A product over the tokens of each expert, `[experts, m, n]` beside `like`.
fn group_depth(
    like: &CubeTensor,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    dtype: FloatDType,
) -> CubeTensor {
    let shape = Shape::new([groups.count, a.outer(), b.outer()]);
    let out = launched(gemm::gemm_grouped_depth(
        &like.client,
        None,
        a,
        b,
        groups,
        Target::New(float_kind(dtype)),
    ));
    new_tensor(like, out.handle, shape, dtype.into())
}

/// 1 for the tokens of group `group` and 0 for others, `[tokens, 1]` of type `dtype`.
fn members(offsets: &CubeTensor, group: usize, tokens: usize, dtype: FloatDType) -> CubeTensor {
    let (int, device) = (IntDType::I32, offsets.device.clone());
    let bool_dtype = get_or_init_device_settings::<CubeBackend>(&device).bool_dtype;
    let numbers = CubeBackend::int_arange(0..tokens as i64, &device, int);
    let offset = |index: usize| {
        let offset = CubeBackend::int_slice(offsets.clone(), &[Slice::from(index..index + 1)]);
        let offset = CubeBackend::int_cast(offset, int);
        CubeBackend::int_expand(offset, Shape::new([tokens]))
    };
    let from = CubeBackend::int_greater_equal(numbers.clone(), offset(group), bool_dtype);
    let to = CubeBackend::int_lower(numbers, offset(group + 1), bool_dtype);
    let members = CubeBackend::bool_into_float(CubeBackend::bool_and(from, to), dtype);
    CubeBackend::float_reshape(members, Shape::new([tokens, 1]))
}

/// Matrix `index` of a stack, in type `dtype`.
fn expert(w: &CubeTensor, index: usize, dtype: FloatDType) -> CubeTensor {
    let shape = w.meta.shape();
    let (rows, cols) = (shape[1], shape[2]);
    let slices = [index..index + 1, 0..rows, 0..cols].map(Slice::from);
    let matrix = CubeBackend::float_slice(w.clone(), &slices);
    let matrix = CubeBackend::float_reshape(matrix, Shape::new([rows, cols]));
    cast(matrix, dtype.into())
}

/// The rows product in any float type: all tokens by every expert, and what is each one's own.
fn masked_rows(
    x: CubeTensor,
    w: CubeTensor,
    bias: Bias<CubeBackend>,
    offsets: CubeTensor,
    transposed: bool,
) -> CubeTensor {
    let dtype = float_dtype(x.dtype());
    let tokens = x.meta.shape()[0];
    let experts = w.meta.shape()[0];
    let products = (0..experts).map(|group| {
        let w = expert(&w, group, dtype);
        let w = if transposed {
            CubeBackend::float_swap_dims(w, 0, 1)
        } else {
            w
        };
        let mut y = CubeBackend::float_matmul(x.clone(), w);
        if let Bias::Vector(bias) = &bias {
            let columns = bias.meta.shape()[1];
            let slices = [group..group + 1, 0..columns].map(Slice::from);
            let bias = cast(
                CubeBackend::float_slice(bias.clone(), &slices),
                dtype.into(),
            );
            y = CubeBackend::float_add(y, bias);
        }
        CubeBackend::float_mul(y, members(&offsets, group, tokens, dtype))
    });
    products
        .reduce(CubeBackend::float_add)
        .expect("a stack has a matrix")
}

/// The depth product in any float type: all tokens for every expert, those of others as zeros.
fn masked_depth(
    x: CubeTensor,
    dy: CubeTensor,
    offsets: CubeTensor,
    dtype: FloatDType,
) -> CubeTensor {
    let (tokens, experts) = (x.meta.shape()[0], offsets.meta.shape()[0] - 1);
    let (m, n) = (x.meta.shape()[1], dy.meta.shape()[1]);
    let kind = float_dtype(x.dtype());
    let products = (0..experts).map(|group| {
        let own = CubeBackend::float_mul(x.clone(), members(&offsets, group, tokens, kind));
        CubeBackend::float_matmul(CubeBackend::float_swap_dims(own, 0, 1), dy.clone())
    });
    let stacked = CubeBackend::float_cat(products.collect(), 0);
    let stacked = CubeBackend::float_reshape(stacked, Shape::new([experts, m, n]));
    cast(stacked, dtype.into())
}
