//! Grouped GEMMs: against the oracle, byte for byte for packed tensors, and against a loop of the
//! plain GEMM over experts.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::experts::{grouped_linear, moe_permute, try_grouped_linear};
use burn_nvfp4::functions::linear;
use burn_nvfp4::ops::{
    AmaxGranularity, LinearSpec, Nvfp4KernelOps, OperandSpec, QuantParams, QuantizeRequest,
    QuantizeSource, QuantizedMatrix, RowGroups, StoredForm,
};
use burn_nvfp4::{ExpertOffsets, Hadamard, Nvfp4Recipe, RandomStream, RngState, Rounding, Usage};
use nvfp4_formats::reference::{self, EDEN_GROUP, padding};
use nvfp4_formats::{BlockScaling, Format, HadamardSize, QuantizedTensor};
use nvfp4_test_support::elsewhere;

use crate::support::{
    Matrix, activation, assert_product, device, gaussian, one_by_16, skip_where_small_only,
    small_only, spec, values,
};

/// Group sizes, and numbers of tokens that belong to no group.
fn groupings() -> Vec<(Vec<usize>, usize)> {
    if small_only() {
        vec![(vec![0, 5, 18, 0], 2)]
    } else {
        vec![
            (vec![0, 1, 15, 16, 17, 0, 40], 0),
            (vec![0, 70, 0], 0),
            (vec![33], 0),
            (vec![0, 0], 0),
            (vec![20, 3, 0, 130], 7),
            (vec![0, 1, 127, 0, 128, 129, 0], 0),
        ]
    }
}

/// Dtypes of tokens.
fn dtypes() -> Vec<DType> {
    let mut dtypes = vec![DType::F32, activation()];
    dtypes.dedup();
    dtypes
}

fn experts(sizes: &[usize], rest: usize, device: &Device) -> ExpertOffsets {
    let counts: Vec<i64> = sizes.iter().map(|&size| size as i64).collect();
    let counts = Tensor::<1, Int>::from_data(TensorData::new(counts, [sizes.len()]), device);
    ExpertOffsets::from_counts(counts, sizes.iter().sum::<usize>() + rest)
}

/// Returns the rows of each group.
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

/// Factor by which one group's values are larger than the others': an amax over all groups is wrong
/// for every other group.
const LOUD: f32 = 1000.0;

impl Matrix {
    /// Scales the rows of the last nonempty group by `LOUD`, if there is another group.
    fn with_loud_group(mut self, sizes: &[usize]) -> Self {
        let filled = ranges(sizes).into_iter().filter(|range| !range.is_empty());
        if let [.., _, loud] = filled.collect::<Vec<_>>().as_slice() {
            let values = &mut self.values[loud.start * self.cols..loud.end * self.cols];
            values.iter_mut().for_each(|value| *value *= LOUD);
        }
        Self::new(self.values, self.rows, self.cols, self.dtype)
    }
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

/// Returns the quantization parameters of dy in the default recipe, row-wise and column-wise.
fn params_of_dy(spec: &LinearSpec) -> (QuantParams, QuantParams) {
    let params = |operand: OperandSpec| *operand.params().expect("in NVFP4");
    (params(spec.dgrad_dy), params(spec.wgrad_dy))
}

/// Returns the only tensor with this usage of `x`, whose rows are in these groups.
fn quantize_one(
    x: Tensor<2>,
    groups: RowGroups<Dispatch>,
    usage: Usage,
    params: QuantParams,
) -> QuantizedMatrix<Dispatch> {
    let request = QuantizeRequest::of_matrix(x.into_dispatch()).groups(groups);
    let request = request.along(usage, params, StoredForm::Rows);
    Dispatch::nvfp4_quantize(request).into_one()
}

/// Quantizes an NVFP4 tensor from its codes.
fn requantize(
    tensor: QuantizedMatrix<Dispatch>,
    groups: RowGroups<Dispatch>,
    usage: Usage,
    params: QuantParams,
    via: FloatDType,
) -> QuantizedMatrix<Dispatch> {
    let request = QuantizeRequest::new(QuantizeSource::Quantized { tensor, via });
    let request = request.along(usage, params, StoredForm::Rows);
    Dispatch::nvfp4_quantize(request.groups(groups)).into_one()
}

/// Returns codes, scales and amax values of an NVFP4 tensor.
fn parts(packed: QuantizedMatrix<Dispatch>) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let amax = packed.amax.clone().into_option();
    let (codes, scales) = packed.into_packed();
    let codes: Vec<u32> = Tensor::<2, Int>::from_dispatch(codes)
        .into_data()
        .try_to_vec()
        .unwrap();
    let scales = Tensor::<2, Int>::from_dispatch(scales);
    let amax = Tensor::<1>::from_dispatch(amax.expect("NVFP4 has amax values"));
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
        for dtype in dtypes() {
            let (row, col) = params_of_dy(&spec(3, 5));
            for (row, col) in [
                (row, col),
                (
                    row,
                    QuantParams {
                        hadamard: None,
                        ..col
                    },
                ),
                (per_token(row), per_token(col)),
                (row, per_token(col)),
            ] {
                let what = format!("{sizes:?} + {rest}, {dtype:?}, {col:?}");
                let (tokens, cols) = (sizes.iter().sum::<usize>() + rest, 48);
                let x = Matrix::gaussian(tokens, cols, dtype, 7).with_loud_group(&sizes);
                let groups = experts(&sizes, rest, &device);
                let offsets = || groups.offsets().clone().into_dispatch();
                let request = QuantizeRequest::of_matrix(x.tensor(&device).into_dispatch());
                let request = request.both(row, col);
                let both = Dispatch::nvfp4_quantize(request.groups(RowGroups::Offsets(offsets())));
                let (both_row, both_col) = both.into_both();
                let one = |usage, params| {
                    let groups = RowGroups::Offsets(offsets());
                    quantize_one(x.tensor(&device), groups, usage, params)
                };
                let row_alone = one(Usage::Rowwise, row);
                let col_alone = one(Usage::Columnwise, col);
                assert_eq!(both_row.layout, row_alone.layout);
                assert_eq!(both_col.layout, col_alone.layout);
                let pitch = col_alone.layout.blocks();
                assert_eq!(
                    pitch * 16,
                    padding::padded_bound(tokens, sizes.len(), 16),
                    "{what}"
                );
                let mut numbers = [0; 2];
                let mut expected = [Copies::default(), Copies::default()];
                for range in ranges(&sizes) {
                    let group = rows(&x, range);
                    for (i, (usage, copy)) in [(Usage::Rowwise, row), (Usage::Columnwise, col)]
                        .into_iter()
                        .enumerate()
                    {
                        let packed = group.copy_from(usage, &copy, numbers[i]);
                        numbers[i] += packed.scales().len();
                        expected[i].push(&packed);
                    }
                }
                let [expected_row, expected_col] = &expected;
                for (row, col) in [(both_row, both_col), (row_alone, col_alone)] {
                    expected_row.assert_are(&format!("{what}: row"), row, None);
                    expected_col.assert_are(&format!("{what}: col"), col, Some(cols));
                }
            }
        }
    }
}

/// Quantized tensors of the groups, and their amax values.
#[derive(Default)]
struct Copies {
    codes: Vec<Vec<u8>>,
    scales: Vec<Vec<u8>>,
    amax: Vec<f32>,
}

impl Copies {
    fn push(&mut self, packed: &QuantizedTensor) {
        self.codes.push(packed.codes().to_vec());
        self.scales.push(packed.scales().to_vec());
        self.amax.extend(packed.amax().values());
    }

    /// Asserts that the tensors are concatenated in `found`, or, with `side_by_side`, within each
    /// of that many stored rows.
    fn assert_are(
        &self,
        what: &str,
        found: QuantizedMatrix<Dispatch>,
        side_by_side: Option<usize>,
    ) {
        let (codes, scales, amax) = parts(found);
        assert_eq!(amax[..self.amax.len()], self.amax, "{what}: maxima");
        assert_lie(&format!("{what}: codes"), &codes, &self.codes, side_by_side);
        let what = format!("{what}: scales");
        assert_lie(&what, &scales, &self.scales, side_by_side);
    }

    /// Version of [`assert_are`](Self::assert_are) for MXFP8.
    fn assert_mx(&self, what: &str, found: QuantizedMatrix<Dispatch>, side_by_side: Option<usize>) {
        let bytes = |tensor| -> Vec<u8> {
            let tensor = Tensor::<2, Int>::from_dispatch(tensor);
            tensor.into_data().try_to_vec().unwrap()
        };
        assert!(
            found.amax.clone().into_option().is_none(),
            "{what}: an amax"
        );
        let (codes, scales) = found.into_packed();
        let (codes, scales) = (bytes(codes), bytes(scales));
        assert_lie(&format!("{what}: codes"), &codes, &self.codes, side_by_side);
        let what = format!("{what}: scales");
        assert_lie(&what, &scales, &self.scales, side_by_side);
    }
}

/// Asserts that the bytes of the tensors are concatenated in `found`, or, with `side_by_side`,
/// within each of that many stored rows.
fn assert_lie(what: &str, found: &[u8], copies: &[Vec<u8>], side_by_side: Option<usize>) {
    let rows = side_by_side.unwrap_or(1);
    let pitch = found.len() / rows;
    for row in 0..rows {
        let parts = copies.iter().map(|copy| {
            let width = copy.len() / rows;
            &copy[row * width..][..width]
        });
        let expected = parts.collect::<Vec<_>>().concat();
        let found = &found[row * pitch..][..expected.len()];
        assert_eq!(found, expected, "{what}, stored row {row}");
    }
}

fn per_token(params: QuantParams) -> QuantParams {
    QuantParams {
        amax: AmaxGranularity::PerRow,
        ..params
    }
}

/// Grouped rows, for an operation and for the oracle.
struct Grouped<'a> {
    what: String,
    x: Matrix,
    parts: Vec<Matrix>,
    groups: &'a dyn Fn() -> RowGroups<Dispatch>,
    /// True if the column-wise tensors are concatenated within each stored row, instead of along
    /// the rows.
    side_by_side: bool,
    /// Returns the row-wise tensor in 1x16 blocks.
    packed: &'a dyn Fn(QuantParams) -> QuantizedMatrix<Dispatch>,
}

impl Grouped<'_> {
    /// Checks MS-EDEN and MXFP8, of the matrix and of the dequantized NVFP4 tensors: each group
    /// equals the oracle's, with its own amax, and its random bits continue after those of the
    /// previous group.
    fn check(&self, device: &Device) {
        let x = || self.x.tensor(device);
        let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 5);
        let eden_params = QuantParams::ms_eden(hadamard, RandomStream::new(6, 7, 8));
        for usage in [Usage::Rowwise, Usage::Columnwise] {
            let what = format!("{}, {:?}, along {usage:?}", self.what, self.x.dtype);
            let eden = quantize_one(x(), (self.groups)(), usage, eden_params);
            self.check_eden(&what, eden, &self.parts, usage, &eden_params);
            let mx = quantize_one(x(), (self.groups)(), usage, QuantParams::mxfp8());
            self.check_mx(&what, mx, &self.parts, usage);

            let copy = QuantParams::nvfp4(Rounding::Nearest);
            for copy in [copy, per_token(copy)] {
                let what = format!("{what}, packed {:?}", copy.amax);
                let again = |dtype| -> Vec<Matrix> {
                    let parts = self.parts.iter().map(|part| {
                        let packed = part.copy(Usage::Rowwise, &copy);
                        let values = reference::dequantize(&packed);
                        Matrix::new(values, part.rows, part.cols, dtype)
                    });
                    parts.collect()
                };
                let (source, groups) = ((self.packed)(copy), (self.groups)());
                let via = FloatDType::F32;
                let eden = requantize(source, groups, usage, eden_params, via);
                self.check_eden(&what, eden, &again(DType::F32), usage, &eden_params);
                let (source, groups) = ((self.packed)(copy), (self.groups)());
                let via = FloatDType::BF16;
                let mx_params = QuantParams::mxfp8();
                let mx = requantize(source, groups, usage, mx_params, via);
                self.check_mx(&what, mx, &again(DType::BF16), usage);
            }
        }
    }

    fn rows_beside(&self, usage: Usage) -> Option<usize> {
        (self.side_by_side && usage == Usage::Columnwise).then_some(self.x.cols)
    }

    fn check_eden(
        &self,
        what: &str,
        found: QuantizedMatrix<Dispatch>,
        parts: &[Matrix],
        usage: Usage,
        params: &QuantParams,
    ) {
        let (mut expected, mut first) = (Copies::default(), 0);
        for part in parts {
            let packed = part.eden_from(usage, params, first);
            first += packed.scales().len() / 8;
            expected.push(&packed);
        }
        let layout = found.layout;
        assert_eq!(layout.hadamard, params.hadamard, "{what}");
        let beside = self.rows_beside(usage);
        expected.assert_are(&format!("{what}, MS-EDEN"), found, beside);
    }

    fn check_mx(
        &self,
        what: &str,
        found: QuantizedMatrix<Dispatch>,
        parts: &[Matrix],
        usage: Usage,
    ) {
        let mut expected = Copies::default();
        for part in parts {
            let packed = part.mx(usage, Format::Mxfp8);
            expected.codes.push(packed.codes().to_vec());
            expected.scales.push(packed.scales().to_vec());
        }
        let what = format!("{what}, MXFP8");
        expected.assert_mx(&what, found, self.rows_beside(usage));
    }
}

#[test]
fn tokens_by_ms_eden_and_in_mxfp8() {
    let device = device();
    let mut cases = groupings();
    if small_only() {
        cases.push((vec![0, 1, 127, 0, 128, 129, 0], 2));
    }
    for (sizes, rest) in cases {
        for dtype in dtypes() {
            let tokens = sizes.iter().sum::<usize>() + rest;
            let x = Matrix::gaussian(tokens, 48, dtype, 7).with_loud_group(&sizes);
            let groups = experts(&sizes, rest, &device);
            let offsets = || groups.offsets().clone().into_dispatch();
            let packed = |params| {
                let groups = RowGroups::Offsets(offsets());
                quantize_one(x.tensor(&device), groups, Usage::Rowwise, params)
            };
            let grouped = Grouped {
                what: format!("{sizes:?} + {rest}"),
                parts: ranges(&sizes).into_iter().map(|r| rows(&x, r)).collect(),
                x: x.clone(),
                groups: &|| RowGroups::Offsets(offsets()),
                side_by_side: true,
                packed: &packed,
            };
            grouped.check(&device);
        }
    }
}

#[test]
fn stacks_by_ms_eden_and_in_mxfp8() {
    let device = device();
    for (count, each) in [(3, 32), (2, 144), (1, 16)] {
        let sizes = vec![each; count];
        let x = Matrix::gaussian(count * each, 48, DType::F32, 7).with_loud_group(&sizes);
        let parts: Vec<Matrix> = ranges(&sizes).into_iter().map(|r| rows(&x, r)).collect();
        let packed = |params: QuantParams| {
            let groups = match params.amax {
                AmaxGranularity::PerTensor => RowGroups::Batch(count),
                AmaxGranularity::PerRow => RowGroups::Whole,
            };
            quantize_one(x.tensor(&device), groups, Usage::Rowwise, params)
        };
        let grouped = Grouped {
            what: format!("{count} x {each}"),
            x: x.clone(),
            parts: parts.clone(),
            groups: &|| RowGroups::Batch(count),
            side_by_side: false,
            packed: &packed,
        };
        grouped.check(&device);
    }
}

/// The value of each group is broadcast to its rows.
#[test]
fn values_of_groups_are_spread() {
    let device = device();
    for (sizes, rest) in groupings() {
        let tokens = sizes.iter().sum::<usize>() + rest;
        let groups = experts(&sizes, rest, &device);
        let own: Vec<f32> = (0..sizes.len()).map(|g| g as f32 + 1.0).collect();
        let own = Tensor::<1>::from_data(TensorData::new(own, [sizes.len()]), &device);
        let offsets = groups.offsets().clone().into_dispatch();
        let spread = Dispatch::nvfp4_broadcast_group_values(own.into_dispatch(), offsets, tokens);
        let mut expected = vec![0.0; tokens];
        for (g, range) in ranges(&sizes).into_iter().enumerate() {
            expected[range].fill(g as f32 + 1.0);
        }
        assert_eq!(values(Tensor::<1>::from_dispatch(spread)), expected);
    }
}

#[test]
fn stacks_are_packed_matrix_by_matrix() {
    let device = device();
    let count = 3;
    let weights: Vec<Matrix> = (0..count)
        .map(|seed| Matrix::gaussian(32, 48, DType::F32, seed))
        .collect();
    let all = |packed: &dyn Fn(&Matrix) -> QuantizedTensor| {
        let (mut codes, mut scales, mut amax) = (Vec::new(), Vec::new(), Vec::new());
        for weight in &weights {
            let packed = packed(weight);
            codes.extend_from_slice(packed.codes());
            scales.extend_from_slice(packed.scales());
            amax.push(packed.amax().of(0));
        }
        (codes, scales, amax)
    };
    let w = || -> Tensor<2> { stack(&weights, &device).reshape([weights.len() * 32, 48]) };
    let groups = || RowGroups::Batch(weights.len());
    let pair = |params| {
        let request = QuantizeRequest::of_matrix(w().into_dispatch()).both(params, params);
        Dispatch::nvfp4_quantize(request.groups(groups())).into_both()
    };
    let (tiles_row, tiles_col) = pair(QuantParams::nvfp4_2d(BlockScaling::Standard));
    assert_eq!(
        parts(tiles_row),
        all(&|w| w.tiles(BlockScaling::Standard).0),
        "tiles, row"
    );
    assert_eq!(
        parts(tiles_col),
        all(&|w| w.tiles(BlockScaling::Standard).1),
        "tiles, col"
    );
    let nearest = Rounding::Nearest;
    let (blocks_row, blocks_col) = pair(QuantParams::nvfp4(nearest));
    assert_eq!(parts(blocks_row), all(&|w| w.row(nearest)), "blocks, row");
    let col = all(&|w| w.col(nearest, None));
    assert_eq!(parts(blocks_col), col, "blocks, col");
    let one = |usage, params| quantize_one(w(), groups(), usage, params);
    let alone = one(Usage::Columnwise, QuantParams::nvfp4(nearest));
    assert_eq!(parts(alone), col);
    // Random bits continue from matrix to matrix.
    let drawn = QuantParams::nvfp4(Rounding::Stochastic(RandomStream::new(1, 2, 3)));
    for usage in [Usage::Rowwise, Usage::Columnwise] {
        let mut expected = Copies::default();
        for (number, weight) in weights.iter().enumerate() {
            let first = number * 32 * 48 / 16;
            expected.push(&weight.copy_from(usage, &drawn, first));
        }
        let found = one(usage, drawn);
        expected.assert_are(&format!("drawn along {usage:?}"), found, None);
    }
}

/// Outputs and gradients of one grouped GEMM, or of a loop.
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
        let weight = |group| {
            let factor = if group + 1 < sizes.len() { 1.0 } else { LOUD };
            let values = gaussian(d_in * d_out, 100 + group as u64);
            let values = values.into_iter().map(|value| value * factor).collect();
            Matrix::new(values, d_in, d_out, DType::F32)
        };
        Self {
            sizes: sizes.to_vec(),
            rest,
            x: Matrix::gaussian(tokens, d_in, dtype, 1).with_loud_group(sizes),
            weights: (0..sizes.len()).map(weight).collect(),
            bias: gaussian(sizes.len() * d_out, 3),
            dy: Matrix::gaussian(tokens, d_out, dtype, 4).with_loud_group(sizes),
        }
    }

    /// Splits the results by group: name of the tensor, group index, and values. The last entry is
    /// the rows of no group.
    fn shares<'a>(&self, found: &'a Found) -> Vec<(&'static str, usize, &'a [f32])> {
        let (count, d_in, d_out) = (self.sizes.len(), self.x.cols, self.dy.cols);
        let mut shares = Vec::new();
        let mut rows = ranges(&self.sizes);
        rows.push(self.x.rows - self.rest..self.x.rows);
        for (group, rows) in rows.into_iter().enumerate() {
            shares.push(("y", group, &found.y[rows.start * d_out..rows.end * d_out]));
            shares.push(("dx", group, &found.dx[rows.start * d_in..rows.end * d_in]));
        }
        for group in 0..count {
            shares.push((
                "dw",
                group,
                &found.dw[group * d_in * d_out..][..d_in * d_out],
            ));
            shares.push(("db", group, &found.db[group * d_out..][..d_out]));
        }
        shares
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

    fn grouped(&self, device: &Device, spec: LinearSpec) -> Found {
        let groups = experts(&self.sizes, self.rest, device);
        self.run(device, |x, w, b| {
            grouped_linear(x, w, Some(b), &groups, spec)
        })
    }

    /// Computes the plain GEMM of each group, and zeros for the remaining rows.
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
                // Adds nothing, but puts every leaf in the graph.
                let nothing = x.sum() * 0.0
                    + w.sum().cast(self.x.dtype) * 0.0
                    + b.sum().cast(self.x.dtype) * 0.0;
                parts.push(nothing.reshape([1, 1]).expand([self.rest, d_out]));
            }
            Tensor::cat(parts, 0)
        })
    }
}

/// Asserts equality bit for bit, or up to the order of sums if `exact` is false.
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

/// Returns true if `name` is the device under test.
fn on(name: &str) -> bool {
    std::env::var("NVFP4_TEST_DEVICE").map_or(name == "flex", |device| device == name)
}

/// Returns a preset, with or without stochastic rounding.
fn preset(name: &str, stochastic: bool) -> LinearSpec {
    let recipe = Nvfp4Recipe::preset(name).unwrap();
    let recipe = match stochastic {
        true => recipe,
        false => recipe.with_stochastic_rounding(false),
    };
    recipe.spec(&RngState {
        seed: 1,
        layer: 0,
        offset: 0,
        rht_signs: Hadamard::DEFAULT_SIGNS,
    })
}

/// Returns true if any operand is of this kind.
fn has(spec: &LinearSpec, kind: impl Fn(&OperandSpec) -> bool) -> bool {
    let LinearSpec {
        fprop_x,
        fprop_w,
        dgrad_dy,
        dgrad_w,
        wgrad_x,
        wgrad_dy,
        ..
    } = spec;
    [fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_x, wgrad_dy]
        .into_iter()
        .any(kind)
}

/// Every preset without stochastic rounding equals the loop of the plain layer over the experts, in
/// fprop, dgrad and wgrad: bit for bit if the same code multiplies groups and matrices. MS-EDEN
/// always draws, so only the gradients whose operands come first draw the bits of the loop; the
/// others are covered by [`ms_eden_is_the_oracles`]. There is one test per preset, because a GPU
/// compiles many kernels for each.
mod the_loop_over_experts {
    use super::*;

    /// Presets whose GEMMs are Burn's own on CubeCL's CPU runtime, except for one with an NVFP4
    /// forward.
    const BY_BURN: [&str; 4] = ["weight_only_qat", "mxfp8", "mxfp4", "bf16"];

    macro_rules! presets {
        ($($name:ident),* $(,)?) => {
            $(#[test]
            fn $name() {
                if small_only() && BY_BURN.contains(&stringify!($name)) {
                    elsewhere!(Flex);
                }
                is_the_loop(stringify!($name), preset(stringify!($name), false));
            })*

            const NAMES: &[&str] = &[$(stringify!($name)),*];
        };
    }
    presets!(
        nvidia,
        nvidia_4over6,
        nvidia_headroom,
        per_token,
        fwd_nvfp4_bwd_mxfp8,
        fwd_nvfp4_bwd_mxfp8_dequantized,
        fwd_nvfp4_bwd_bf16,
        weight_only_qat,
        quartet2,
        mxfp8,
        mxfp4,
        bf16,
    );

    #[test]
    fn has_every_preset() {
        for name in Nvfp4Recipe::preset_names() {
            assert!(NAMES.contains(&name), "{name}");
        }
    }

    #[test]
    fn weights_in_blocks() {
        is_the_loop("1x16 blocks of w", one_by_16(preset("nvidia", false)));
    }

    /// Backwards from the dequantized operands of a forward with a global scale per stored row.
    #[test]
    fn backwards_of_per_token_forwards() {
        let rows = OperandSpec::Quantized(super::per_token(QuantParams::nvfp4(Rounding::Nearest)));
        for name in ["quartet2", "fwd_nvfp4_bwd_mxfp8_dequantized"] {
            let spec = LinearSpec {
                fprop_x: rows,
                fprop_w: rows,
                ..preset(name, false)
            };
            is_the_loop(name, spec);
        }
    }

    fn is_the_loop(name: &str, plain: LinearSpec) {
        let device = device().autodiff();
        let float = has(&plain, |operand| *operand == OperandSpec::HighPrecision);
        let mx = has(&plain, |operand| {
            operand.params().is_some_and(|params| params.format.is_mx())
        });
        let eden = has(&plain, |operand| {
            operand.params().is_some_and(QuantParams::is_ms_eden)
        });
        // For a float stack, which the grouped GEMM copies, Flex uses other loops than for a view;
        // on CubeCL's CPU runtime only GEMMs of two NVFP4 operands use one kernel.
        let copied = plain.fprop_w == OperandSpec::HighPrecision;
        let exact = (on("flex") && !copied) || (on("cpu") && !float && !mx);
        for (sizes, rest) in groupings() {
            if sizes.iter().all(|&size| size == 0) {
                continue;
            }
            for dtype in dtypes() {
                let what = format!("{sizes:?} + {rest}, {name}, {dtype:?}");
                let case = Case::new(&sizes, rest, dtype);
                let found = case.grouped(&device, plain);
                let expected = case.looped(&device, |x, w, b| linear(x, w, Some(b), plain));
                // On NVIDIA GPUs, unquantized operands wider than bf16 are multiplied in TF32.
                let (sums, narrow) = match (on("cuda") && float, dtype) {
                    (true, DType::F32) => (2e-3, 2e-3),
                    (_, DType::F32) => (1e-5, 1e-5),
                    // One rounding to the dtype, which two orders of summation can take to
                    // neighboring values.
                    _ => (1e-5, 1e-2),
                };
                let first = sizes.iter().position(|&size| size > 0);
                let shares = case.shares(&found).into_iter().zip(case.shares(&expected));
                for ((part, group, found), (_, _, expected)) in shares {
                    // The first tokens, and for dx the first weight, draw the same bits as in the
                    // loop.
                    let same_bits = match part {
                        "dx" => group == 0 || group == sizes.len(),
                        "dw" => Some(group) == first || sizes[group] == 0,
                        _ => true,
                    };
                    if eden && !same_bits {
                        continue;
                    }
                    let what = format!("{what}: {part} of group {group}");
                    let (exact, bound) = match part {
                        // The plain layer sums the gradient of its bias in two steps, the grouped
                        // one group by group.
                        "db" => (false, 1e-5),
                        "dw" => (exact, sums),
                        _ => (exact, narrow),
                    };
                    assert_same(&what, found, expected, exact, bound);
                }
            }
        }
    }
}

/// With stochastic rounding: the GEMMs of the packed tensors that
/// [`tokens_are_packed_group_by_group`] checks, expert by expert.
#[test]
fn stochastic_gradients_are_the_oracles() {
    let device = device().autodiff();
    for spec in [spec(9, 2), preset("per_token", true)] {
        let (row, col) = params_of_dy(&spec);
        let params = |operand: OperandSpec| *operand.params().expect("in NVFP4");
        let (x_row, x_col) = (params(spec.fprop_x), params(spec.wgrad_x));
        for (sizes, rest) in groupings() {
            let case = Case::new(&sizes, rest, DType::F32);
            let found = case.grouped(&device, spec);
            let again = case.grouped(&device, spec);
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
                let x_row = x.copy(Usage::Rowwise, &x_row);
                let y = &found.y[range.start * d_out..range.end * d_out];
                let what_y = format!("{what}: y");
                assert_product(&what_y, y, &x_row, &w_col, Some(bias), DType::F32);
                let dy_row = dy.copy_from(Usage::Rowwise, &row, range.start * (d_out / 16));
                let dx = &found.dx[range.start * d_in..range.end * d_in];
                let what_dx = format!("{what}: dx");
                assert_product(&what_dx, dx, &dy_row, &w_row, None, DType::F32);
                let x_col = x.copy(Usage::Columnwise, &x_col);
                let dy_col = dy.copy_from(Usage::Columnwise, &col, d_out * start);
                let what_dw = format!("{what}: dw");
                assert_product(&what_dw, dw, &x_col, &dy_col, None, DType::F32);
                start += blocks;
            }
            let end = sizes.iter().sum::<usize>();
            assert!(found.y[end * d_out..].iter().all(|v| *v == 0.0));
            assert!(found.dx[end * d_in..].iter().all(|v| *v == 0.0));
        }
    }
}

/// Quartet II: the forward is that of each expert, and the backward's operands are those of the
/// oracle by MS-EDEN, expert by expert, with random bits that continue from one to the next.
#[test]
fn ms_eden_is_the_oracles() {
    let device = device().autodiff();
    let spec = preset("quartet2", true);
    let params = |operand: &OperandSpec| *operand.params().expect("it is quantized");
    let eden = |matrix: &Matrix, operand: &OperandSpec, usage, first| {
        matrix.eden_from(usage, &params(operand), first)
    };
    let forward =
        |matrix: &Matrix, operand: &OperandSpec, usage| matrix.copy(usage, &params(operand));
    let decoded = |packed: &QuantizedTensor| {
        let values = reference::dequantize(packed);
        Matrix::new(values, packed.rows(), packed.cols(), DType::F32)
    };
    let (rows_of, cols_of) = (Usage::Columnwise, Usage::Rowwise);
    for (sizes, rest) in groupings() {
        let case = Case::new(&sizes, rest, DType::F32);
        let found = case.grouped(&device, spec);
        let (d_in, d_out) = (case.x.cols, case.dy.cols);
        let across = d_out.div_ceil(EDEN_GROUP);
        // Number of earlier groups of 128 tokens.
        let mut before = 0;
        for (g, range) in ranges(&sizes).into_iter().enumerate() {
            let what = format!("{sizes:?}: group {g}");
            let x = rows(&case.x, range.clone());
            let x = forward(&x, &spec.fprop_x, cols_of);
            let w = forward(&case.weights[g], &spec.fprop_w, rows_of);
            let y = &found.y[range.start * d_out..range.end * d_out];
            let bias = &case.bias[g * d_out..][..d_out];
            assert_product(&format!("{what}: y"), y, &x, &w, Some(bias), DType::F32);

            let (x, w) = (decoded(&x), decoded(&w));
            let dy = rows(&case.dy, range.clone());
            let dy_row = eden(&dy, &spec.dgrad_dy, cols_of, range.start * across);
            let w = eden(&w, &spec.dgrad_w, cols_of, g * d_in * across);
            let dx = &found.dx[range.start * d_in..range.end * d_in];
            assert_product(&format!("{what}: dx"), dx, &dy_row, &w, None, DType::F32);

            let dy_col = eden(&dy, &spec.wgrad_dy, rows_of, d_out * before);
            let x = eden(&x, &spec.wgrad_x, rows_of, d_in * before);
            let dw = &found.dw[g * d_in * d_out..][..d_in * d_out];
            assert_product(&format!("{what}: dw"), dw, &x, &dy_col, None, DType::F32);
            before += range.len().div_ceil(EDEN_GROUP);
        }
    }
}

/// Presets with all kinds of quantizers. CubeCL's CPU runtime runs these; the loop over experts runs
/// every preset there that has kernels of this project.
const OF_EVERY_KIND: [&str; 4] = ["nvidia", "quartet2", "per_token", "mxfp8"];

/// A single expert with all tokens equals the plain layer, random bits included.
#[test]
fn one_expert_is_the_plain_layer() {
    let device = device().autodiff();
    let is_brief = on("cpu") && !nvfp4_test_support::is_full();
    let is_run = |name: &&str| !is_brief || OF_EVERY_KIND.contains(name);
    for name in Nvfp4Recipe::preset_names().filter(is_run) {
        let plain = preset(name, true);
        let case = Case::new(&[18], 0, DType::F32);
        let found = case.grouped(&device, plain);
        let expected = case.looped(&device, |x, w, b| linear(x, w, Some(b), plain));
        let float = has(&plain, |operand| *operand == OperandSpec::HighPrecision);
        let bound = if on("cuda") && float { 2e-3 } else { 1e-5 };
        for (part, found, expected) in [
            ("y", &found.y, &expected.y),
            ("dx", &found.dx, &expected.dx),
            ("dw", &found.dw, &expected.dw),
        ] {
            let what = format!("{name}: {part}");
            let exact = on("flex") && plain.fprop_w != OperandSpec::HighPrecision;
            assert_same(&what, found, expected, exact, bound);
        }
    }
}

#[test]
fn high_precision_is_the_loop_over_experts() {
    skip_where_small_only!();
    let device = device().autodiff();
    for (sizes, rest) in groupings() {
        if sizes.iter().all(|&size| size == 0) {
            continue;
        }
        for dtype in dtypes() {
            let what = format!("{sizes:?} + {rest}, {dtype:?}");
            let case = Case::new(&sizes, rest, dtype);
            let found = case.grouped(&device, LinearSpec::high_precision());
            let expected = case.looped(&device, |x, w, b| {
                let dtype = x.dtype();
                x.matmul(w.cast(dtype)) + b.cast(dtype).unsqueeze()
            });
            let bound = if dtype == DType::F32 { 2e-3 } else { 2e-2 };
            let shares = case.shares(&found).into_iter().zip(case.shares(&expected));
            for ((part, group, found), (_, _, expected)) in shares {
                let what = format!("{what}: {part} of group {group}");
                assert_same(&what, found, expected, false, bound);
            }
        }
    }
}

/// NaN in rows of no group, in the input and in the output gradient, affects no group and no
/// weight.
#[test]
fn rows_of_no_group_are_not_read() {
    skip_where_small_only!();
    let device = device().autodiff();
    let (sizes, rest) = ([20, 3, 0, 130], 7);
    for dtype in dtypes() {
        for (name, spec) in [
            ("high precision", LinearSpec::high_precision()),
            ("fwd_nvfp4_bwd_bf16", preset("fwd_nvfp4_bwd_bf16", false)),
            ("nvidia", preset("nvidia", false)),
        ] {
            let mut case = Case::new(&sizes, rest, dtype);
            let expected = case.grouped(&device, spec);
            for matrix in [&mut case.x, &mut case.dy] {
                let first = (matrix.rows - rest) * matrix.cols;
                matrix.values[first..].fill(f32::NAN);
            }
            let found = case.grouped(&device, spec);
            let shares = case.shares(&found).into_iter().zip(case.shares(&expected));
            for ((part, group, found), (_, _, expected)) in shares {
                let what = format!("{name}, {dtype:?}: {part} of group {group}");
                assert_same(&what, found, expected, true, 0.0);
            }
        }
    }
}

/// Gradients that are not requested are absent, and constants stay constants.
#[test]
fn only_asked_gradients_come() {
    skip_where_small_only!();
    let device = device().autodiff();
    let case = Case::new(&[4, 0, 9], 0, DType::F32);
    let groups = experts(&case.sizes, 0, &device);
    for spec in [
        spec(1, 0),
        preset("quartet2", true),
        preset("fwd_nvfp4_bwd_mxfp8", true),
        LinearSpec::high_precision(),
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
            let y = grouped_linear(x.clone(), w.clone(), Some(b.clone()), &groups, spec);
            let grads = y.sum().backward();
            assert_eq!(x.grad(&grads).is_some(), x_grad);
            assert_eq!(w.grad(&grads).is_some(), w_grad);
            assert_eq!(b.grad(&grads).is_some(), b_grad);
        }
        let (x, w, _) = case.leaves(&device);
        let (x, w) = (x.set_require_grad(false), w.set_require_grad(false));
        let y = grouped_linear(x, w, None, &groups, spec);
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
    let out = moe_permute(leaf.clone(), index, inverse.reshape([3, 2]));
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
    let spec = spec(0, 0);
    let run = |x: [usize; 2], w: [usize; 3], b: Option<[usize; 2]>| {
        let bias = b.map(|b| Tensor::<2>::zeros(b, &device));
        let (x, w) = (Tensor::zeros(x, &device), Tensor::zeros(w, &device));
        try_grouped_linear(x, w, bias, &groups, spec)
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
    let (x, w) = (
        Tensor::zeros([3, 32], &device),
        Tensor::zeros([2, 32, 16], &device),
    );
    let tiles = LinearSpec {
        fprop_x: OperandSpec::Quantized(QuantParams::nvfp4_2d(BlockScaling::Standard)),
        ..spec
    };
    let error = try_grouped_linear(x, w, None, &groups, tiles).unwrap_err();
    assert!(
        error.to_string().contains("16x16 blocks are for weights"),
        "{error}"
    );
}
