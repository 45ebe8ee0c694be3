//! Microscaling tensors with block scales in 128x4 tiles, as tensor cores read them, compared with
//! the swizzled scales of the oracle; and GEMMs of MXFP8 with either scale layout, which give the
//! same bits. On CubeCL's CPU runtime or on a GPU (`NVFP4_TEST_DEVICE`).

use crate::support::quantize::{self, TargetSpec};
use crate::support::{
    device::{
        DeviceElement, assert_bytes, assert_floats, offsets, read_bytes, read_matrix, upload,
        upload_bytes,
    },
    gemm::multiply,
    inputs::{Kind, convert, values},
};
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, AmaxGranularity, Format, QuantParams, QuantizedTensor, Rounding, StoredForm, Usage,
    reference::{self, Element, swizzle},
};
use nvfp4_kernels::{
    gemm::Gemm,
    moe::GroupOffsets,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
const FORMATS: [Format; 2] = [Format::Mxfp8, Format::Mxfp4];

fn in_tiles(format: Format) -> TargetSpec {
    TargetSpec::new(format).form(StoredForm::Tiles)
}

/// A matrix whose rows are in groups, with some rows after the last group.
struct Case {
    sizes: Vec<usize>,
    cols: usize,
    groups: Groups,
    rest: usize,
}

fn cases(client: &Client) -> Vec<Case> {
    let any = |sizes: &[usize], rest, cols| Case {
        sizes: sizes.to_vec(),
        cols,
        groups: offsets(client, sizes),
        rest,
    };
    let even = |count, rows, cols, groups| Case {
        sizes: vec![rows; count],
        cols,
        groups,
        rest: 0,
    };
    let mut all = vec![
        any(&[0, 5, 128, 0, 129, 70, 0], 3, 80),
        any(&[33, 1, 300], 0, 144),
        any(&[0, 0, 0], 3, 48),
        even(3, 16, 32, Groups::Batch(3)),
        even(2, 33, 208, Groups::Batch(2)),
        even(3, 130, 48, Groups::Batch(3)),
    ];
    for (rows, cols) in [
        (1, 32),
        (33, 48),
        (128, 64),
        (130, 160),
        (257, 272),
        (70, 128),
    ] {
        all.push(even(1, rows, cols, Groups::One));
    }
    all
}

impl Case {
    fn rows(&self) -> usize {
        self.sizes.iter().sum::<usize>() + self.rest
    }

    /// Returns the oracle's tensor of each group.
    fn oracle<T: Element>(&self, x: &[T], usage: Usage, format: Format) -> Vec<QuantizedTensor> {
        let mut start = 0;
        let groups = self.sizes.iter().map(|&rows| {
            let part = &x[start * self.cols..][..rows * self.cols];
            start += rows;
            reference::mx_quantize(part, rows, self.cols, usage, format).unwrap()
        });
        groups.collect()
    }

    fn has_offsets(&self) -> bool {
        matches!(self.groups, Groups::Offsets { .. })
    }

    /// Asserts that `found` has the codes of `expected`, and its scales, swizzled and padded with
    /// zeros.
    fn assert_same(
        &self,
        client: &Client,
        found: &DeviceQuantized,
        expected: &[QuantizedTensor],
        usage: Usage,
        what: &str,
    ) {
        let scales = read_bytes(client, &found.scales, found.scale_bytes());
        let codes = read_bytes(client, &found.codes, found.code_bytes());
        if self.has_offsets() && usage == Usage::Columnwise {
            return self.assert_side_by_side([&codes, &scales], expected, what);
        }
        let joined = |bytes: fn(&QuantizedTensor) -> &[u8]| {
            let parts = expected.iter().map(bytes);
            parts.collect::<Vec<_>>().concat()
        };
        let expected_codes = joined(QuantizedTensor::codes);
        assert_bytes(
            &codes[..expected_codes.len()],
            &expected_codes,
            &format!("{what}: codes"),
        );
        let each = expected
            .iter()
            .map(|one| swizzle::swizzle(one.scales(), one.outer(), one.blocks()));
        let tiled = each.collect::<Vec<_>>().concat();
        assert_bytes(&scales[..tiled.len()], &tiled, &format!("{what}: scales"));
        let is_known = self.sizes.len() == 1 || !self.has_offsets();
        assert!(
            !is_known || scales.len() == tiled.len(),
            "{what}: {} bytes",
            scales.len()
        );
        // Tiles of no group, which only the worst split would fill.
        assert!(
            scales[tiled.len()..].iter().all(|&byte| byte == 0),
            "{what}: behind"
        );
    }

    /// Asserts groups of tokens joined along the stored rows, whose tiles are those of one matrix.
    fn assert_side_by_side(
        &self,
        [codes, scales]: [&[u8]; 2],
        expected: &[QuantizedTensor],
        what: &str,
    ) {
        let blocks = scales.len() / self.cols.next_multiple_of(128);
        let row_bytes = codes.len() / self.cols;
        let mut start = 0;
        for (group, one) in expected.iter().enumerate() {
            let (own, bytes) = (one.blocks(), one.layout().block_bytes());
            for row in 0..self.cols.next_multiple_of(128) {
                let what = format!("{what}, group {group}, row {row}");
                for block in 0..own {
                    let at = swizzle::offset(row, start + block, blocks);
                    let scale = match row < self.cols {
                        true => one.scales()[row * own + block],
                        false => 0,
                    };
                    assert_eq!(scales[at], scale, "{what}, block {block}");
                }
                if row < self.cols {
                    let found = &codes[row * row_bytes + start * bytes..][..own * bytes];
                    assert_bytes(
                        found,
                        &one.codes()[row * own * bytes..][..own * bytes],
                        &what,
                    );
                }
            }
            start += own;
        }
    }
}

fn check_matrices<T: DeviceElement>(client: &Client) {
    for case in cases(client) {
        let x = values(Kind::Heavy, case.rows() * case.cols, case.rows() as u32);
        let x = convert::<T>(&x);
        let matrix = upload(client, &x, case.rows(), case.cols);
        for (format, usage) in FORMATS
            .into_iter()
            .flat_map(|f| USAGES.map(|usage| (f, usage)))
        {
            let what = format!(
                "{:?} x {} {:?} {format:?} {usage:?}",
                case.sizes,
                case.cols,
                T::KIND
            );
            let form = in_tiles(format);
            let found =
                quantize::mx_quantize_groups(client, &matrix, &case.groups, usage, form).unwrap();
            let expected = case.oracle(&x, usage, format);
            case.assert_same(client, &found, &expected, usage, &what);
            // Readers of row-major scales find them; joined groups include the padding between
            // them.
            if case.has_offsets() && usage == Usage::Columnwise {
                continue;
            }
            let decoded = quantize::dequantize(client, &found, FloatKind::F32).unwrap();
            let decoded = read_matrix::<f32>(client, &decoded);
            let stored = |one: &QuantizedTensor| match (&case.groups, usage) {
                // Vertically stacked, each as it is stored.
                (Groups::Batch(_), Usage::Columnwise) => {
                    let (rows, cols) = (one.rows(), one.cols());
                    let x = reference::mx_dequantize(one);
                    let transposed = (0..rows * cols).map(|i| x[i % rows * cols + i / rows]);
                    transposed.collect()
                }
                _ => reference::mx_dequantize(one),
            };
            let expected = expected.iter().map(stored).collect::<Vec<_>>().concat();
            assert_floats(&decoded[..expected.len()], &expected, &what);
        }
    }
}

element_tests! {
    check_matrices: matrices_f32, matrices_bf16, matrices_f16;
}

/// Converts NVFP4 with either scale layout to an MX format with either layout, along both axes.
#[test]
fn requantized() {
    let client = client!("requantized");
    for case in cases(&client) {
        let x = values(Kind::Heavy, case.rows() * case.cols, 3);
        let matrix = upload(&client, &x, case.rows(), case.cols);
        // One amax per group, here equal for all of them.
        let amax = vec![reference::amax(&x); case.sizes.len()];
        let amax_on_device = upload_bytes(&client, bytemuck::cast_slice(&amax));
        for (usage, layout) in USAGES
            .into_iter()
            .flat_map(|usage| [StoredForm::Rows, StoredForm::Tiles].map(|layout| (usage, layout)))
        {
            if case.has_offsets() && usage == Usage::Columnwise {
                // Stored rows of different lengths are refused.
                continue;
            }
            let params = QuantParams::nvfp4(Rounding::Nearest);
            let target = (params, layout);
            let request = quantize::target(&amax_on_device, AmaxGranularity::PerTensor, target);
            let source = quantize::quantize(&client, &matrix, &case.groups, usage, &request);
            let source = source.unwrap();
            let decoded = decoded(&case, &x, usage, &params, amax[0]);
            for to in USAGES {
                let what = format!(
                    "{:?} x {} from {usage:?} {layout:?} to {to:?}",
                    case.sizes, case.cols
                );
                let form = in_tiles(Format::Mxfp8);
                let found =
                    quantize::mx_requantize(&client, &source, to, form, FloatKind::Bf16).unwrap();
                let expected = case.oracle(&decoded, to, Format::Mxfp8);
                case.assert_same(&client, &found, &expected, to, &what);
            }
        }
    }
}

/// Returns the values of the groups of `x` in NVFP4, in bf16.
fn decoded(case: &Case, x: &[f32], usage: Usage, params: &QuantParams, amax: f32) -> Vec<bf16> {
    let (amax, mut start) = (Amax::Tensor(amax), 0);
    let mut all = Vec::new();
    for &rows in &case.sizes {
        let part = &x[start * case.cols..][..rows * case.cols];
        start += rows;
        let packed = reference::quantize(part, rows, case.cols, usage, &amax, params, 0).unwrap();
        all.extend(convert::<bf16>(&reference::dequantize(&packed)));
    }
    all
}

/// Converts scales from tiles to rows and back, for one matrix, for stacks, and for groups of rows.
#[test]
fn there_and_back() {
    let client = client!("there_and_back");
    for case in cases(&client) {
        let x = convert::<bf16>(&values(Kind::Normal, case.rows() * case.cols, 4));
        let matrix = upload(&client, &x, case.rows(), case.cols);
        let made = quantize::mx_quantize_groups(
            &client,
            &matrix,
            &case.groups,
            Usage::Rowwise,
            in_tiles(Format::Mxfp8),
        );
        let made = made.unwrap();
        let rows = quantize::in_form(&client, &made, StoredForm::Rows).unwrap();
        let expected = case.oracle(&x, Usage::Rowwise, Format::Mxfp8);
        let scales = expected.iter().map(QuantizedTensor::scales);
        let scales = scales.collect::<Vec<_>>().concat();
        let found = read_bytes(&client, &rows.scales, rows.scale_bytes());
        assert_bytes(
            &found[..scales.len()],
            &scales,
            &format!("{:?}", case.sizes),
        );
        let tiles = quantize::in_form(&client, &rows, StoredForm::Tiles).unwrap();
        assert_eq!(tiles.layout, made.layout);
        let bytes = |made: &DeviceQuantized| read_bytes(&client, &made.scales, made.scale_bytes());
        assert_bytes(&bytes(&tiles), &bytes(&made), &format!("{:?}", case.sizes));
    }
    let bf16_values = upload(&client, &[bf16::ONE; 256], 16, 16);
    let amax = quantize::amax(&client, &bf16_values, None).unwrap();
    let request = quantize::target(
        &amax,
        AmaxGranularity::PerTensor,
        QuantParams::nvfp4(Rounding::Nearest),
    );
    let request = Some((&request, StoredForm::Bf16Unscaled));
    let made = quantize::quantize_operands(&client, &bf16_values, request, None).unwrap();
    let error = quantize::in_form(&client, &made.0.unwrap(), StoredForm::Tiles).unwrap_err();
    assert!(error.to_string().contains("packed"), "{error}");
}

/// GEMMs of MXFP8, dense and grouped, give the same bits for row-major and tiled scales, also along
/// tokens in groups that begin within a tile.
#[test]
fn gemms() {
    let client = client!("gemms");
    let (sizes, d_in, d_out) = ([0, 5, 130, 0, 70], 96, 24);
    let tokens = sizes.iter().sum();
    let matrix = |rows: usize, cols, seed| {
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, seed));
        upload(&client, &x, rows, cols)
    };
    let (x, dy) = (matrix(tokens, d_in, 1), matrix(tokens, d_out, 2));
    let w = matrix(sizes.len() * d_out, d_in, 3);
    let all = offsets(&client, &sizes);
    let Groups::Offsets { offsets, count } = &all else {
        unreachable!("offsets in device memory");
    };
    let groups = GroupOffsets::new(offsets.clone(), *count).unwrap();
    let product = |request: Gemm| {
        let request = request.out(FloatKind::F32);
        read_matrix::<f32>(&client, &multiply(&client, request).unwrap())
    };
    let products = |form: TargetSpec| {
        let made = |x: &Matrix, groups: &Groups, usage| {
            quantize::mx_quantize_groups(&client, x, groups, usage, form.clone()).unwrap()
        };
        let [x_all, w_all] = [&x, &w].map(|x| made(x, &Groups::One, Usage::Rowwise));
        let dense = product(Gemm::new(&x_all, &w_all));

        let (rows, columns) = (Usage::Rowwise, Usage::Columnwise);
        let (x_rows, stack) = (made(&x, &all, rows), made(&w, &Groups::Batch(*count), rows));
        let forward = product(Gemm::new(&x_rows, &stack).m_grouped(&groups));

        let aligned = groups.aligned(&client, tokens, 32).unwrap();
        let (a, b) = (made(&x, &all, columns), made(&dy, &all, columns));
        let gradient = product(Gemm::new(&a, &b).k_grouped(&aligned).k_alignment(32));
        [dense, forward, gradient]
    };
    let (rows, tiles) = (
        products(Format::Mxfp8.into()),
        products(in_tiles(Format::Mxfp8)),
    );
    assert_eq!(rows, tiles);

    // Tiles of a stack that do not match the GEMM's groups.
    let stack = quantize::mx_quantize_groups(
        &client,
        &w,
        &Groups::Batch(1),
        Usage::Rowwise,
        in_tiles(Format::Mxfp8),
    );
    let x = quantize::mx_quantize(&client, &x, Usage::Rowwise, Format::Mxfp8).unwrap();
    let request = Gemm::new(&x, stack.as_ref().unwrap()).m_grouped(&groups);
    let error = multiply(&client, request).unwrap_err().to_string();
    assert!(error.contains("tiles of scales"), "{error}");
}
