//! Products in groups: against the oracle, byte for byte where something is packed, and against a
//! loop of the plain product over experts.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::experts::{gather_rows, grouped_linear, try_grouped_linear};
use burn_nvfp4::functions::linear;
use burn_nvfp4::ops::{
    CopySpec, GroupPairSpec, GroupedPrecision, GroupedSpec, LinearSpec, Nvfp4GroupedOps, Packed,
    PairSpec, QuantizeSpec,
};
use burn_nvfp4::{ExpertOffsets, Hadamard, LayerRandomness, Nvfp4Recipe, PackedAxis, Rounding};
use half::{bf16, f16};
use nvfp4_kernels::reference::{self, Element, padding};
use nvfp4_kernels::{Amax, BlockScaling, CopyPolicy, PackedTensor};

use crate::common::{Matrix, activation, device, gaussian, one_by_16, small_only, spec, values};

/// Sizes of groups, and tokens that belong to none.
fn groupings() -> Vec<(Vec<usize>, usize)> {
    if small_only() {
        vec![(vec![0, 5, 18], 0), (vec![3, 0], 2)]
    } else {
        vec![
            (vec![0, 1, 15, 16, 17, 0, 40], 0),
            (vec![0, 70, 0], 0),
            (vec![33], 0),
            (vec![0, 0], 0),
            (vec![20, 3, 0, 130], 7),
        ]
    }
}

fn experts(sizes: &[usize], rest: usize, device: &Device) -> ExpertOffsets {
    let counts: Vec<i64> = sizes.iter().map(|&size| size as i64).collect();
    let counts = Tensor::<1, Int>::from_data(TensorData::new(counts, [sizes.len()]), device);
    ExpertOffsets::from_counts(counts, sizes.iter().sum::<usize>() + rest)
}

/// The rows of each group.
fn ranges(sizes: &[usize]) -> Vec<std::ops::Range<usize>> {
    let mut end = 0;
    sizes
        .iter()
        .map(|size| {
            end += size;
            end - size..end
        })
        .collect()
}

fn stack(matrices: &[Matrix], device: &Device) -> Tensor<3> {
    Tensor::stack(matrices.iter().map(|m| m.tensor(device)).collect(), 0)
}

fn rows(matrix: &Matrix, rows: std::ops::Range<usize>) -> Matrix {
    Matrix {
        values: matrix.values[rows.start * matrix.cols..rows.end * matrix.cols].to_vec(),
        rows: rows.len(),
        ..*matrix
    }
}

/// The oracle's copy of one group, whose first block has number `first`.
fn oracle(
    group: &Matrix,
    axis: PackedAxis,
    rounding: Rounding,
    hadamard: Option<Hadamard>,
    first: usize,
) -> PackedTensor {
    fn run<T: Element>(
        x: &[T],
        (rows, cols): (usize, usize),
        axis: PackedAxis,
        rounding: Rounding,
        hadamard: Option<Hadamard>,
        first: usize,
    ) -> PackedTensor {
        let amax = Amax::Tensor(match &hadamard {
            Some(hadamard) => reference::amax_rht(x, rows, cols, hadamard),
            None => reference::amax(x),
        });
        let policy = CopyPolicy {
            hadamard,
            ..CopyPolicy::new(rounding)
        };
        reference::quantize(x, rows, cols, axis, &amax, &policy, first as u64).unwrap()
    }
    let shape = (group.rows, group.cols);
    match group.dtype {
        DType::F32 => run(&group.values, shape, axis, rounding, hadamard, first),
        DType::BF16 => {
            let x: Vec<bf16> = group.values.iter().map(|v| bf16::from_f32(*v)).collect();
            run(&x, shape, axis, rounding, hadamard, first)
        }
        _ => {
            let x: Vec<f16> = group.values.iter().map(|v| f16::from_f32(*v)).collect();
            run(&x, shape, axis, rounding, hadamard, first)
        }
    }
}

/// Codes, scales and maxima of a packed value.
fn parts(packed: Packed<Dispatch>) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let codes: Vec<u32> = Tensor::<2, Int>::from_dispatch(packed.codes)
        .into_data()
        .try_to_vec()
        .unwrap();
    let scales = Tensor::<2, Int>::from_dispatch(packed.scales);
    let amax = Tensor::<1>::from_dispatch(packed.amax);
    (
        codes.iter().flat_map(|word| word.to_le_bytes()).collect(),
        scales.into_data().try_to_vec().unwrap(),
        amax.into_data().try_to_vec().unwrap(),
    )
}

#[test]
fn tokens_are_packed_group_by_group() {
    let device = device();
    for (sizes, rest) in groupings() {
        for dtype in [DType::F32, activation()] {
            let GroupedSpec { gradient, .. } = spec(3, 5).try_into().unwrap();
            let (dgrad, wgrad) = (gradient.row.rounding, gradient.col.rounding);
            for hadamard in [gradient.col.hadamard, None] {
                let what = format!("{sizes:?} + {rest}, {dtype:?}, {hadamard:?}");
                let (tokens, cols) = (sizes.iter().sum::<usize>() + rest, 48);
                let x = Matrix::gaussian(tokens, cols, dtype, 7);
                let groups = experts(&sizes, rest, &device);
                let offsets = || groups.offsets().clone().into_dispatch();
                let both = Dispatch::nvfp4_quantize_groups_pair(
                    x.tensor(&device).into_dispatch(),
                    offsets(),
                    GroupPairSpec {
                        row: CopySpec::new(dgrad),
                        col: CopySpec {
                            hadamard,
                            ..CopySpec::new(wgrad)
                        },
                    },
                );
                let one = |axis, rounding, hadamard| {
                    Dispatch::nvfp4_quantize_groups(
                        x.tensor(&device).into_dispatch(),
                        offsets(),
                        QuantizeSpec {
                            axis,
                            copy: CopySpec {
                                hadamard,
                                ..CopySpec::new(rounding)
                            },
                        },
                    )
                };
                let row = one(PackedAxis::Cols, dgrad, None);
                let col = one(PackedAxis::Rows, wgrad, hadamard);
                assert_eq!(both.row.layout, row.layout);
                assert_eq!(both.col.layout, col.layout);
                let pitch = col.layout.blocks();
                assert_eq!(
                    pitch * 16,
                    padding::padded_bound(tokens, sizes.len(), 16),
                    "{what}"
                );
                for (row, col) in [(both.row, both.col), (row, col)] {
                    let (codes, scales, amax) = parts(row);
                    let blocks = cols / 16;
                    for (g, range) in ranges(&sizes).into_iter().enumerate() {
                        let first = range.start * blocks;
                        let group = rows(&x, range);
                        let expected = oracle(&group, PackedAxis::Cols, dgrad, None, first);
                        let len = group.rows * blocks;
                        assert_eq!(amax[g], expected.amax().of(0), "{what}: row amax {g}");
                        assert_eq!(&scales[first..][..len], expected.scales(), "{what}: {g}");
                        assert_eq!(
                            &codes[first * 8..][..len * 8],
                            expected.codes(),
                            "{what}: row codes {g}"
                        );
                    }
                    let (codes, scales, amax) = parts(col);
                    let mut start = 0;
                    for (g, range) in ranges(&sizes).into_iter().enumerate() {
                        let group = rows(&x, range);
                        let blocks = group.rows.div_ceil(16);
                        let expected =
                            oracle(&group, PackedAxis::Rows, wgrad, hadamard, cols * start);
                        assert_eq!(amax[g], expected.amax().of(0), "{what}: col amax {g}");
                        for column in 0..cols {
                            let (from, to) = (column * blocks, column * pitch + start);
                            assert_eq!(
                                &scales[to..][..blocks],
                                &expected.scales()[from..][..blocks],
                                "{what}: col scales {g}, {column}"
                            );
                            assert_eq!(
                                &codes[to * 8..][..blocks * 8],
                                &expected.codes()[from * 8..][..blocks * 8],
                                "{what}: col codes {g}, {column}"
                            );
                        }
                        start += blocks;
                    }
                }
            }
        }
    }
}

#[test]
fn stacks_are_packed_matrix_by_matrix() {
    let device = device();
    let count = 3;
    let weights: Vec<Matrix> = (0..count)
        .map(|seed| Matrix::gaussian(32, 48, DType::F32, seed))
        .collect();
    let all = |packed: &dyn Fn(&Matrix) -> PackedTensor| {
        let (mut codes, mut scales, mut amax) = (Vec::new(), Vec::new(), Vec::new());
        for weight in &weights {
            let packed = packed(weight);
            codes.extend_from_slice(packed.codes());
            scales.extend_from_slice(packed.scales());
            amax.push(packed.amax().of(0));
        }
        (codes, scales, amax)
    };
    let w = || stack(&weights, &device).into_dispatch();
    let tiles = Dispatch::nvfp4_quantize_stack_pair(w(), PairSpec::Tile(BlockScaling::Standard));
    assert_eq!(
        parts(tiles.row),
        all(&|w| w.tiles(BlockScaling::Standard).0),
        "tiles, row"
    );
    assert_eq!(
        parts(tiles.col),
        all(&|w| w.tiles(BlockScaling::Standard).1),
        "tiles, col"
    );
    let copy = CopySpec::new(Rounding::Nearest);
    let blocks = PairSpec::Blocks {
        row: copy,
        col: copy,
    };
    let blocks = Dispatch::nvfp4_quantize_stack_pair(w(), blocks);
    let nearest = Rounding::Nearest;
    assert_eq!(parts(blocks.row), all(&|w| w.row(nearest)), "blocks, row");
    let col = all(&|w| w.col(nearest, None));
    assert_eq!(parts(blocks.col), col, "blocks, col");
    let alone = QuantizeSpec::new(PackedAxis::Rows, nearest);
    assert_eq!(parts(Dispatch::nvfp4_quantize_stack(w(), alone)), col);
}

/// Outputs and gradients of one grouped product, or of a loop.
struct Found {
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
    db: Vec<f32>,
}

struct Case {
    sizes: Vec<usize>,
    rest: usize,
    x: Matrix,
    weights: Vec<Matrix>,
    bias: Vec<f32>,
    dy: Matrix,
}

impl Case {
    fn new(sizes: &[usize], rest: usize, dtype: DType) -> Self {
        let (d_in, d_out) = (32, 48);
        let tokens = sizes.iter().sum::<usize>() + rest;
        let weight = |seed| Matrix::gaussian(d_in, d_out, DType::F32, 100 + seed as u64);
        Self {
            sizes: sizes.to_vec(),
            rest,
            x: Matrix::gaussian(tokens, d_in, dtype, 1),
            weights: (0..sizes.len()).map(weight).collect(),
            bias: gaussian(sizes.len() * d_out, 3),
            dy: Matrix::gaussian(tokens, d_out, dtype, 4),
        }
    }

    fn leaves(&self, device: &Device) -> (Tensor<2>, Tensor<3>, Tensor<2>) {
        let count = self.sizes.len();
        let bias = TensorData::new(self.bias.clone(), [count, self.dy.cols]);
        (
            self.x.tensor(device).require_grad(),
            stack(&self.weights, device).require_grad(),
            Tensor::from_data(bias, device).require_grad(),
        )
    }

    fn run(
        &self,
        device: &Device,
        product: impl Fn(Tensor<2>, Tensor<3>, Tensor<2>) -> Tensor<2>,
    ) -> Found {
        let (x, w, b) = self.leaves(device);
        let y = product(x.clone(), w.clone(), b.clone());
        let grads = (y.clone() * self.dy.tensor(device)).sum().backward();
        let dw = w.grad(&grads).unwrap();
        assert_eq!(dw.dtype(), DType::F32);
        assert_eq!(y.dtype(), self.x.dtype);
        Found {
            y: values(y),
            dx: values(x.grad(&grads).unwrap()),
            dw: values(dw),
            db: values(b.grad(&grads).unwrap()),
        }
    }

    fn grouped(&self, device: &Device, precision: GroupedPrecision) -> Found {
        let groups = experts(&self.sizes, self.rest, device);
        self.run(device, |x, w, b| {
            grouped_linear(x, w, Some(b), &groups, precision)
        })
    }

    /// The plain product of each group, and zeros for the rest.
    fn looped(
        &self,
        device: &Device,
        product: impl Fn(Tensor<2>, Tensor<2>, Tensor<1>) -> Tensor<2>,
    ) -> Found {
        let (d_in, d_out) = (self.x.cols, self.dy.cols);
        self.run(device, |x, w, b| {
            let mut parts: Vec<Tensor<2>> = ranges(&self.sizes)
                .into_iter()
                .enumerate()
                .filter(|(_, range)| !range.is_empty())
                .map(|(g, range)| {
                    product(
                        x.clone().narrow(0, range.start, range.len()),
                        w.clone().narrow(0, g, 1).reshape([d_in, d_out]),
                        b.clone().narrow(0, g, 1).reshape([d_out]),
                    )
                })
                .collect();
            if self.rest > 0 {
                // Nothing, but in the graph of every leaf.
                let nothing = x.sum() * 0.0
                    + w.sum().cast(self.x.dtype) * 0.0
                    + b.sum().cast(self.x.dtype) * 0.0;
                parts.push(nothing.reshape([1, 1]).expand([self.rest, d_out]));
            }
            Tensor::cat(parts, 0)
        })
    }
}

/// Bit by bit, or up to the order of sums where `exact` is false.
fn assert_same(what: &str, found: &[f32], expected: &[f32], exact: bool, bound: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: elements");
    let scale = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        if exact {
            assert_eq!(f + 0.0, e + 0.0, "{what}[{i}]");
        } else {
            assert!(
                (f - e).abs() <= bound * scale,
                "{what}[{i}]: {f}, expected {e}"
            );
        }
    }
}

/// Where both are computed by the same loop over the contraction.
fn same_order() -> bool {
    std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda")
}

/// What a preset does where nothing is drawn.
fn nearest(preset: &str) -> LinearSpec {
    let recipe = Nvfp4Recipe::preset(preset).unwrap();
    recipe
        .with_stochastic_rounding(false)
        .spec(&LayerRandomness {
            seed: 1,
            layer: 0,
            offset: 0,
            rht_signs: Hadamard::DEFAULT_SIGNS,
        })
}

#[test]
fn a_grouped_product_is_the_loop_over_experts() {
    let device = device().autodiff();
    for (sizes, rest) in groupings() {
        if sizes.iter().all(|&size| size == 0) {
            continue;
        }
        let tiles = LinearSpec::nvidia(
            Some(Hadamard::default()),
            Rounding::Nearest,
            Rounding::Nearest,
        );
        for (name, plain) in [
            ("tiles", tiles),
            ("blocks", one_by_16(tiles)),
            ("four over six", nearest("nvidia_4over6")),
            ("headroom", nearest("nvidia_headroom")),
        ] {
            for dtype in [DType::F32, activation()] {
                let what = format!("{sizes:?} + {rest}, {name}, {dtype:?}");
                let case = Case::new(&sizes, rest, dtype);
                let precision = GroupedPrecision::Nvfp4(plain.try_into().unwrap());
                let found = case.grouped(&device, precision);
                let expected = case.looped(&device, |x, w, b| linear(x, w, Some(b), plain));
                // One rounding to the type, which sums in two orders may take to neighbours.
                let bound = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                let exact = same_order();
                assert_same(&format!("{what}: y"), &found.y, &expected.y, exact, bound);
                assert_same(
                    &format!("{what}: dx"),
                    &found.dx,
                    &expected.dx,
                    exact,
                    bound,
                );
                assert_same(&format!("{what}: dw"), &found.dw, &expected.dw, exact, 1e-5);
                // The plain layer sums its bias' gradient in two steps, the grouped one group by group.
                assert_same(&format!("{what}: db"), &found.db, &expected.db, false, 1e-5);
            }
        }
    }
}

/// With stochastic rounding: the products of the packed copies that
/// [`tokens_are_packed_group_by_group`] checks, expert by expert.
#[test]
fn stochastic_gradients_are_the_oracles() {
    let device = device().autodiff();
    let spec = GroupedSpec::try_from(spec(9, 2)).unwrap();
    for (sizes, rest) in groupings() {
        let case = Case::new(&sizes, rest, DType::F32);
        let found = case.grouped(&device, GroupedPrecision::Nvfp4(spec));
        let again = case.grouped(&device, GroupedPrecision::Nvfp4(spec));
        assert_eq!(found.dw, again.dw, "the same offset draws the same bits");
        let (d_in, d_out) = (case.x.cols, case.dy.cols);
        let mut start = 0;
        for (g, range) in ranges(&sizes).into_iter().enumerate() {
            let what = format!("{sizes:?}: group {g}");
            let (x, dy) = (rows(&case.x, range.clone()), rows(&case.dy, range.clone()));
            let blocks = x.rows.div_ceil(16);
            let dw = &found.dw[g * d_in * d_out..][..d_in * d_out];
            if x.rows == 0 {
                assert!(
                    dw.iter().all(|v| *v == 0.0),
                    "{what}: no token, no gradient"
                );
                continue;
            }
            let (w_row, w_col) = case.weights[g].tiles(BlockScaling::Standard);
            let bias = &case.bias[g * d_out..][..d_out];
            let x_row = oracle(&x, PackedAxis::Cols, Rounding::Nearest, None, 0);
            crate::common::assert_product(
                &format!("{what}: y"),
                &found.y[range.start * d_out..range.end * d_out],
                &x_row,
                &w_col,
                Some(bias),
                DType::F32,
            );
            let first = range.start * (d_out / 16);
            let dy_row = oracle(
                &dy,
                PackedAxis::Cols,
                spec.gradient.row.rounding,
                None,
                first,
            );
            crate::common::assert_product(
                &format!("{what}: dx"),
                &found.dx[range.start * d_in..range.end * d_in],
                &dy_row,
                &w_row,
                None,
                DType::F32,
            );
            let GroupPairSpec { col, .. } = spec.gradient;
            let hadamard = col.hadamard;
            let x_col = oracle(&x, PackedAxis::Rows, Rounding::Nearest, hadamard, 0);
            let first = d_out * start;
            let dy_col = oracle(&dy, PackedAxis::Rows, col.rounding, hadamard, first);
            crate::common::assert_product(
                &format!("{what}: dw"),
                dw,
                &x_col,
                &dy_col,
                None,
                DType::F32,
            );
            start += blocks;
        }
        let end = sizes.iter().sum::<usize>();
        assert!(found.y[end * d_out..].iter().all(|v| *v == 0.0));
        assert!(found.dx[end * d_in..].iter().all(|v| *v == 0.0));
    }
}

#[test]
fn high_precision_is_the_loop_over_experts() {
    let device = device().autodiff();
    for (sizes, rest) in groupings() {
        if sizes.iter().all(|&size| size == 0) {
            continue;
        }
        for dtype in [DType::F32, activation()] {
            let what = format!("{sizes:?} + {rest}, {dtype:?}");
            let case = Case::new(&sizes, rest, dtype);
            let found = case.grouped(&device, GroupedPrecision::Input);
            let expected = case.looped(&device, |x, w, b| {
                let dtype = x.dtype();
                x.matmul(w.cast(dtype)) + b.cast(dtype).unsqueeze()
            });
            let bound = if dtype == DType::F32 { 2e-3 } else { 2e-2 };
            assert_same(&format!("{what}: y"), &found.y, &expected.y, false, bound);
            assert_same(
                &format!("{what}: dx"),
                &found.dx,
                &expected.dx,
                false,
                bound,
            );
            assert_same(
                &format!("{what}: dw"),
                &found.dw,
                &expected.dw,
                false,
                bound,
            );
            assert_same(
                &format!("{what}: db"),
                &found.db,
                &expected.db,
                false,
                bound,
            );
        }
    }
}

/// What no gradient asks for is not there, and constants stay constants.
#[test]
fn only_asked_gradients_come() {
    crate::common::skip_where_small_only!();
    let device = device().autodiff();
    let case = Case::new(&[4, 0, 9], 0, DType::F32);
    let groups = experts(&case.sizes, 0, &device);
    for precision in [
        GroupedPrecision::Nvfp4(spec(1, 0).try_into().unwrap()),
        GroupedPrecision::Input,
    ] {
        for (x_grad, w_grad, b_grad) in [
            (true, false, false),
            (false, true, false),
            (false, false, true),
            (true, true, true),
        ] {
            let (x, w, b) = case.leaves(&device);
            let x = x.set_require_grad(x_grad);
            let w = w.set_require_grad(w_grad);
            let b = b.set_require_grad(b_grad);
            let y = grouped_linear(x.clone(), w.clone(), Some(b.clone()), &groups, precision);
            let grads = y.sum().backward();
            assert_eq!(x.grad(&grads).is_some(), x_grad);
            assert_eq!(w.grad(&grads).is_some(), w_grad);
            assert_eq!(b.grad(&grads).is_some(), b_grad);
        }
        let (x, w, _) = case.leaves(&device);
        let (x, w) = (x.set_require_grad(false), w.set_require_grad(false));
        let y = grouped_linear(x, w, None, &groups, precision);
        assert!(!y.is_tracked());
    }
}

#[test]
fn gathers_go_back() {
    let device = device().autodiff();
    let x = Matrix::gaussian(3, 4, DType::F32, 1);
    let ints = |values: &[i64]| {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        Tensor::<1, Int>::from_data(data, &device)
    };
    // Row 0 goes to slots 5 and 1, row 1 to 0 and 3, row 2 to 2 and 4.
    let (index, inverse) = (ints(&[1, 0, 2, 1, 2, 0]), ints(&[5, 1, 0, 3, 2, 4]));
    let leaf = x.tensor(&device).require_grad();
    let out = gather_rows(leaf.clone(), index, inverse.reshape([3, 2]));
    let weights = Matrix::gaussian(6, 4, DType::F32, 2);
    let found = values(out.clone());
    for (slot, row) in [1usize, 0, 2, 1, 2, 0].into_iter().enumerate() {
        assert_eq!(found[slot * 4..][..4], x.values[row * 4..][..4]);
    }
    let grads = (out * weights.tensor(&device)).sum().backward();
    let dx = values(leaf.grad(&grads).unwrap());
    for (row, slots) in [[5usize, 1], [0, 3], [2, 4]].into_iter().enumerate() {
        for c in 0..4 {
            let expected = weights.values[slots[0] * 4 + c] + weights.values[slots[1] * 4 + c];
            assert_eq!(dx[row * 4 + c], expected);
        }
    }
}

#[test]
fn offsets_are_made_safe() {
    let device = device();
    let counts = |values: &[i64]| {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        Tensor::<1, Int>::from_data(data, &device)
    };
    let offsets = |values: &[i64], tokens| -> Vec<u32> {
        let groups = ExpertOffsets::from_counts(counts(values), tokens);
        assert_eq!((groups.experts(), groups.tokens()), (values.len(), tokens));
        groups.offsets().clone().into_data().try_to_vec().unwrap()
    };
    assert_eq!(offsets(&[2, 0, 3], 5), [0, 2, 2, 5]);
    assert_eq!(offsets(&[2, -4, 9], 5), [0, 2, 2, 5]);
    assert_eq!(offsets(&[0, 0], 0), [0, 0, 0]);
    let error = ExpertOffsets::try_from_counts(counts(&[0; 513]), 1).unwrap_err();
    assert!(error.to_string().contains("`counts`"), "{error}");
}

#[test]
fn arguments_are_named() {
    let device = device();
    let groups = experts(&[1, 2], 0, &device);
    let precision = GroupedPrecision::Nvfp4(spec(0, 0).try_into().unwrap());
    let run = |x: [usize; 2], w: [usize; 3], b: Option<[usize; 2]>| {
        let bias = b.map(|b| Tensor::<2>::zeros(b, &device));
        let (x, w) = (Tensor::zeros(x, &device), Tensor::zeros(w, &device));
        try_grouped_linear(x, w, bias, &groups, precision)
            .unwrap_err()
            .to_string()
    };
    for (argument, error) in [
        ("`weight`", run([3, 24], [2, 24, 32], None)),
        ("`weight`", run([3, 32], [2, 32, 8], None)),
        ("`x`", run([4, 32], [2, 32, 16], None)),
        ("`x`", run([3, 16], [2, 32, 16], None)),
        ("`experts`", run([3, 32], [3, 32, 16], None)),
        ("`bias`", run([3, 32], [2, 32, 16], Some([2, 32]))),
    ] {
        assert!(error.contains(argument), "{argument}: {error}");
    }
}
