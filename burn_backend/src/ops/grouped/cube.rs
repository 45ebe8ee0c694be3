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
use nvfp4_kernels::gemm::{self, Scale, Target};
use nvfp4_kernels::moe::GroupOffsets;
use nvfp4_kernels::quantize::{AmaxRequest, EdenSource, QuantRequest};
use nvfp4_kernels::tensor::{DeviceQuantized, Groups, Matrix};
use nvfp4_kernels::{BlockScaling, Format, ScaleLayout, Usage, moe, quantize};

use super::super::cube::{
    Stored, beside, device, eden, float_kind, launched, mx_packed, new_tensor, packed_tensor,
    request, result, stored_shape,
};
use super::super::{
    AmaxGranularity, Bias, EdenSpec, MxPacked, Operand, Packed, PackedLayout, PackedPair, PairSpec,
    QuantizeSpec, copy_name, float_dtype, trace_op,
};
use super::operands::{stack_values, unit, values};
use super::{GroupPairSpec, Nvfp4GroupedOps, RowGradients, RowGroups, maxima, rows};

impl Nvfp4GroupedOps for CubeBackend {
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let (like, matrix, dims) = stack(w);
        trace_op("quantize", copy_name(spec.usage), matrix.rows, matrix.cols);
        let groups = Groups::Batch(dims[0]);
        let amax = group_amax(&like, &matrix, &groups);
        let request = request(&spec.copy, &amax);
        let layout = PackedLayout::stack(dims, spec.usage, spec.copy.scaling);
        let copy = launched(quantize::quantize(
            &like.client,
            &matrix,
            &groups,
            spec.usage,
            &request,
        ));
        packed_tensor(&like, copy, layout, dims[0])
    }

    fn nvfp4_quantize_stack_tiles(
        w: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self> {
        let (like, matrix, dims) = stack(w);
        trace_op("quantize", copy_name(usage), matrix.rows, matrix.cols);
        let groups = Groups::Batch(dims[0]);
        let amax = group_amax(&like, &matrix, &groups);
        let (client, compact) = (&like.client, ScaleLayout::Compact);
        let copy = launched(quantize::quantize_tile_copy(
            client, &matrix, &groups, usage, &amax, scaling, compact,
        ));
        packed_tensor(
            &like,
            copy,
            PackedLayout::stack(dims, usage, scaling),
            dims[0],
        )
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
                quantize::quantize_tile_with(client, &matrix, &groups, &amax, scaling, compact)
            }
            PairSpec::Blocks { row, col } => {
                let [row, col] = [row, col].map(|copy| request(&copy, &amax));
                quantize::quantize_both(client, &matrix, &groups, &row, &col)
            }
        });
        let layout =
            |copy: &DeviceQuantized, usage| PackedLayout::stack(dims, usage, copy.layout.scaling);
        let layouts = (
            layout(&row, Usage::Rowwise),
            layout(&col, Usage::Columnwise),
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
        let QuantizeSpec { usage, copy } = spec;
        trace_op(
            "quantize",
            copy_name(usage),
            tokens.matrix.rows,
            tokens.matrix.cols,
        );
        let scope = copy.global;
        let amaxes = tokens.amaxes(&match usage {
            Usage::Rowwise => AmaxRequest {
                rows: Some(scope),
                cols: None,
            },
            Usage::Columnwise => AmaxRequest {
                rows: None,
                cols: Some((scope, copy.hadamard)),
            },
        });
        let amax = amaxes.0.or(amaxes.1).expect("one was asked for");
        let request = request(&copy, &amax);
        let (row, col) = match usage {
            Usage::Rowwise => tokens.quantize(Some(&request), None),
            Usage::Columnwise => tokens.quantize(None, Some(&request)),
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
        // One maximum of each group serves both copies where neither has a transform or more of them.
        let one = [&row, &col]
            .iter()
            .all(|copy| copy.global == AmaxGranularity::PerTensor && copy.hadamard.is_none());
        let (row_amax, col_amax) = tokens.amaxes(&AmaxRequest {
            rows: Some(row.global),
            cols: (!one).then(|| (col.global, col.hadamard)),
        });
        let row_amax = row_amax.expect("asked for");
        let col_amax = col_amax.unwrap_or_else(|| row_amax.clone());
        let (row, col) = tokens.quantize(
            Some(&request(&row, &row_amax)),
            Some(&request(&col, &col_amax)),
        );
        PackedPair {
            row: row.expect("asked for"),
            col: col.expect("asked for"),
        }
    }

    fn nvfp4_eden_groups(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self> {
        let x = into_contiguous(x);
        let (matrix, arrangement) = (matrix(&x), groups.arrangement());
        trace_op("ms_eden", copy_name(spec.usage), matrix.rows, matrix.cols);
        let groups = device_groups(groups);
        let source = EdenSource::Grouped(&matrix, &groups);
        let layout = arrangement.eden((matrix.rows, matrix.cols), &spec);
        eden(&x, source, &spec, layout, arrangement.count())
    }

    fn nvfp4_eden_groups_packed(
        packed: Packed<Self>,
        groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self> {
        let PackedLayout { rows, cols, .. } = packed.layout;
        trace_op("ms_eden", copy_name(spec.usage), rows, cols);
        let (like, arrangement) = (packed.codes.clone(), groups.arrangement());
        let source = in_groups(packed, groups);
        let layout = arrangement.eden((rows, cols), &spec);
        let source = EdenSource::Packed(&source);
        eden(&like, source, &spec, layout, arrangement.count())
    }

    fn nvfp4_mx_quantize_groups(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
    ) -> MxPacked<Self> {
        let x = into_contiguous(x);
        let matrix = matrix(&x);
        trace_op("mx_quantize", copy_name(usage), matrix.rows, matrix.cols);
        let groups = device_groups(groups);
        let mx = quantize::mx_quantize_groups(&x.client, &matrix, &groups, usage, Format::Mxfp8);
        mx_packed(&x, launched(mx))
    }

    fn nvfp4_mx_requantize_groups(
        packed: Packed<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
        via: FloatDType,
    ) -> MxPacked<Self> {
        let PackedLayout { rows, cols, .. } = packed.layout;
        trace_op("mx_requantize", copy_name(usage), rows, cols);
        let like = packed.codes.clone();
        let source = in_groups(packed, groups);
        let mx =
            quantize::mx_requantize(&like.client, &source, usage, Format::Mxfp8, float_kind(via));
        mx_packed(&like, launched(mx))
    }

    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let values = into_contiguous(values);
        let groups = group_offsets(offsets);
        let (client, handle) = (&values.client, &values.handle);
        let spread = launched(moe::broadcast_group_values(client, handle, &groups, rows));
        new_tensor(&values, spread, Shape::new([rows]), DType::F32)
    }

    fn nvfp4_group_rows(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let like = beside(&a);
        let groups = group_offsets(offsets.clone());
        let (rows, columns) = (stored_shape(&a).0, stored_shape(&b).0 / groups.count);
        trace_op("matmul", "", rows, columns);
        let out = if is_wide(&a) || is_wide(&b) {
            let inner = type_of_product(&a, &b, dtype);
            trace_masked(rows, columns, groups.count, inner);
            let x = values::<Self>(a, &RowGroups::Offsets(offsets.clone()), inner);
            let w = stack_values::<Self>(b, groups.count, inner);
            let out = masked_rows(x, w, bias, offsets);
            let out = into_contiguous(cast(out, dtype.into()));
            let kind = float_kind(dtype);
            launched(Matrix::new(out.handle, rows, columns, kind))
        } else {
            let bias = match bias {
                Bias::Absent => None,
                Bias::Vector(bias) => Some(matrix(&into_contiguous(cast(bias, DType::F32)))),
            };
            let (a, b) = (GroupOperand::new(a), GroupOperand::new(b));
            launched(gemm::gemm_grouped_rows(
                &like.client,
                None,
                &a.view(),
                &b.view(),
                &groups,
                bias.as_ref(),
                Target::New(float_kind(dtype)),
            ))
        };
        launched(moe::zero_padding_rows(&like.client, &out, &groups));
        result(&like, out)
    }

    fn nvfp4_group_depth(
        a: Operand<Self>,
        b: Operand<Self>,
        offsets: IntTensor<Self>,
        tokens: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let like = beside(&a);
        let [m, n] = [&a, &b].map(|operand| stored_shape(operand).0);
        trace_op("matmul", "", m, n);
        let (a, b) = match (a, b) {
            // Burn's own floats, of one type: every other type is one of the kernels'.
            (Operand::Float(x, _), Operand::Float(dy, _)) if x.dtype != DType::BF16 => {
                let groups = offsets.meta.shape()[0] - 1;
                trace_masked(m, n, groups, float_dtype(x.dtype));
                return masked_depth(x, dy, offsets, dtype);
            }
            operands => operands,
        };
        let unit = unit(&a);
        let groups = group_offsets(offsets.clone());
        let aligned = launched(groups.aligned(&like.client, tokens, unit));
        let [a, b] = [a, b].map(|operand| {
            GroupOperand::new(match operand {
                Operand::Float(x, usage) => {
                    let x = Tokens::new(x, offsets.clone());
                    let padded = moe::pad_groups(&like.client, &x.matrix, &x.groups, unit);
                    Operand::Float(result(&x.tensor, launched(padded).0), usage)
                }
                packed => packed,
            })
        });
        let out = launched(gemm::gemm_grouped_depth(
            &like.client,
            None,
            &a.view(),
            &b.view(),
            &aligned,
            Target::New(float_kind(dtype)),
        ));
        let shape = Shape::new([groups.count, m, n]);
        new_tensor(&like, out.handle, shape, dtype.into())
    }

    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        let tokens = Tokens::new(x, offsets);
        let client = &tokens.tensor.client;
        let sums = launched(moe::segment_sum(client, &tokens.matrix, &tokens.groups));
        result(&tokens.tensor, sums)
    }

    fn nvfp4_add_rows(x: FloatTensor<Self>, places: IntTensor<Self>) -> FloatTensor<Self> {
        if !has_whole_words(&x) {
            return rows::add::<Self>(x, places);
        }
        combined(x, None, places)
    }

    fn nvfp4_weigh_rows(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        if !has_whole_words(&x) {
            return rows::weigh::<Self>(x, weights, places);
        }
        combined(x, Some(weights), places)
    }

    fn nvfp4_weigh_rows_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
    ) -> RowGradients<Self> {
        if !has_whole_words(&y) {
            return rows::weigh_backward::<Self>(dout, y, weights, places, choices);
        }
        let [dout, y, weights] = [dout, y, weights].map(into_contiguous);
        let choices = numbers(choices);
        let shape = weights.meta.shape().clone();
        let (by_rows, by_weights) = launched(moe::moe_unpermute_backward(
            &y.client,
            &matrix(&dout),
            &matrix(&y),
            &choices.handle,
            &weights.handle,
            shape[1],
        ));
        RowGradients {
            rows: result(&y, by_rows),
            weights: new_tensor(&y, by_weights, shape, DType::F32),
        }
    }
}

/// Whether the rows of `x` are whole words, as the kernels that move rows want them.
fn has_whole_words(x: &CubeTensor) -> bool {
    (x.meta.shape()[1] * x.dtype.size()).is_multiple_of(4)
}

/// Numbers of rows, as the kernels take them.
fn numbers(tensor: CubeTensor) -> CubeTensor {
    let tensor = match tensor.dtype {
        // The same bits: no number is negative.
        DType::I32 | DType::U32 => tensor,
        _ => CubeBackend::int_cast(tensor, IntDType::U32),
    };
    into_contiguous(tensor)
}

/// The rows of `x` at `places`, added up, with `weights` if there are any.
fn combined(x: CubeTensor, weights: Option<CubeTensor>, places: CubeTensor) -> CubeTensor {
    let (x, weights, places) = (
        into_contiguous(x),
        weights.map(into_contiguous),
        numbers(places),
    );
    let shape = places.meta.shape();
    let found = launched(moe::moe_unpermute(
        &x.client,
        &matrix(&x),
        &places.handle,
        weights.as_ref().map(|weights| &weights.handle),
        (shape[0], shape[1]),
    ));
    result(&x, found)
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
        let groups = with_offsets(self.groups.clone());
        let found = launched(quantize::amaxes(
            &self.tensor.client,
            &self.matrix,
            &groups,
            request,
        ));
        (found.rows, found.cols)
    }

    fn quantize(
        &self,
        row: Option<&QuantRequest<'_>>,
        col: Option<&QuantRequest<'_>>,
    ) -> (Option<Packed<CubeBackend>>, Option<Packed<CubeBackend>>) {
        let (client, groups) = (&self.tensor.client, &self.groups);
        let (row, col) = launched(quantize::quantize_side_by_side(
            client,
            &self.matrix,
            groups,
            row,
            col,
        ));
        let tensor = |copy: DeviceQuantized| {
            let layout = PackedLayout {
                hadamard: copy.layout.hadamard,
                scaling: copy.layout.scaling,
                global: copy.layout.amax,
                ..PackedLayout::plain(copy.rows(), copy.cols(), copy.usage())
            };
            let maxima = maxima(&layout, groups.count);
            packed_tensor(&self.tensor, copy, layout, maxima)
        };
        (row.map(tensor), col.map(tensor))
    }
}

/// The largest magnitude of each matrix of a stack.
fn group_amax(like: &CubeTensor, matrix: &Matrix, groups: &Groups) -> Handle {
    let request = AmaxRequest {
        rows: Some(AmaxGranularity::PerTensor),
        cols: None,
    };
    let found = launched(quantize::amaxes(&like.client, matrix, groups, &request));
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

fn with_offsets(groups: GroupOffsets) -> Groups {
    let GroupOffsets { offsets, count } = groups;
    Groups::Offsets { offsets, count }
}

/// Groups as the kernels take them.
fn device_groups(groups: RowGroups<CubeBackend>) -> Groups {
    match groups {
        RowGroups::Batch(count) => Groups::Batch(count),
        RowGroups::Offsets(offsets) => with_offsets(group_offsets(offsets)),
    }
}

/// The kernels' view of a row-wise packed matrix, and of its groups.
fn in_groups(packed: Packed<CubeBackend>, groups: RowGroups<CubeBackend>) -> DeviceQuantized {
    DeviceQuantized {
        groups: device_groups(groups),
        ..device(packed)
    }
}

/// An operand of a grouped product as the kernels take it, holding its memory.
struct GroupOperand {
    stored: Stored,
    /// Whether each group has a maximum of its own, and not each stored row.
    per_group: bool,
}

impl GroupOperand {
    fn new(operand: Operand<CubeBackend>) -> Self {
        let per_group = matches!(&operand, Operand::Nvfp4(packed)
            if packed.layout.global == AmaxGranularity::PerTensor);
        Self {
            stored: Stored::new(operand),
            per_group,
        }
    }

    fn view(&self) -> gemm::Operand<'_> {
        let operand = self.stored.operand();
        match operand.scale {
            Scale::Tensor(amax, range) if self.per_group => gemm::Operand {
                scale: Scale::PerGroup(amax, range),
                ..operand
            },
            _ => operand,
        }
    }
}

/// Whether an operand is a float that the kernels do not take.
fn is_wide(operand: &Operand<CubeBackend>) -> bool {
    matches!(operand, Operand::Float(x, _) if x.dtype != DType::BF16)
}

/// In which type Burn multiplies: that of the result, if both operands have it, or `f32`, in which
/// whatever was packed is exact.
fn type_of_product(
    a: &Operand<CubeBackend>,
    b: &Operand<CubeBackend>,
    dtype: FloatDType,
) -> FloatDType {
    let has = |operand: &Operand<CubeBackend>| match operand {
        Operand::Float(x, _) => x.dtype == DType::from(dtype),
        _ => false,
    };
    if has(a) && has(b) {
        dtype
    } else {
        FloatDType::F32
    }
}

/// Says that experts are multiplied by Burn, in the type `inner`: all tokens by every expert, so as many times the
/// operations as there are groups.
fn trace_masked(m: usize, n: usize, groups: usize, inner: FloatDType) {
    tracing::debug!(
        m,
        n,
        groups,
        ?inner,
        "product by Burn's matmul, all tokens for every group"
    );
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

/// The rows product with the stack `w` (`[experts, n, k]`) in any float type: all tokens by every
/// expert, and what is each one's own.
fn masked_rows(
    x: CubeTensor,
    w: CubeTensor,
    bias: Bias<CubeBackend>,
    offsets: CubeTensor,
) -> CubeTensor {
    let dtype = float_dtype(x.dtype());
    let (tokens, shape) = (x.meta.shape()[0], w.meta.shape().clone());
    let products = (0..shape[0]).map(|group| {
        let slices = [group..group + 1, 0..shape[1], 0..shape[2]].map(Slice::from);
        let w = CubeBackend::float_slice(w.clone(), &slices);
        let w = CubeBackend::float_reshape(w, Shape::new([shape[1], shape[2]]));
        let w = CubeBackend::float_swap_dims(w, 0, 1);
        let mut y = CubeBackend::float_matmul(x.clone(), w);
        if let Bias::Vector(bias) = &bias {
            let slices = [group..group + 1, 0..shape[1]].map(Slice::from);
            let bias = CubeBackend::float_slice(bias.clone(), &slices);
            y = CubeBackend::float_add(y, cast(bias, dtype.into()));
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
