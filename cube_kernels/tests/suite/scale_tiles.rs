//! Quantized tensors with block scales in 128x4 tiles, as FP4 tensor cores read them, compared with
//! those with row-major scales; and GEMMs of either, which give the same bits. On CubeCL's CPU
//! runtime or on a GPU (`NVFP4_TEST_DEVICE`).

use std::ops::Range;

use crate::support::quantize::{self, AmaxRequest, TargetSpec};
use crate::support::{
    device::{assert_bytes, offsets, read_bytes, read_matrix, upload},
    gemm::multiply,
    inputs::{Kind, convert, values},
};
use cubecl::{client::Client, server::Handle};
use half::bf16;
use nvfp4_formats::{
    AmaxGranularity, BLOCK, Hadamard, HadamardSize, Nvfp4Error, QuantParams, RandomStream,
    Rounding, StoredForm, Usage, reference::swizzle,
};
use nvfp4_kernels::{
    gemm::{Gemm, Operand, Scale},
    moe::GroupOffsets,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

const STREAM: RandomStream = RandomStream::new(0x0123_4567_89ab_cdef, 5, 7);

/// Returns quantization policies: to nearest, after transforms, stochastic, and with an amax per
/// stored row.
fn policies() -> Vec<(TargetSpec, AmaxGranularity)> {
    let nearest = || TargetSpec::new(Rounding::Nearest);
    let transformed = |size, rounding| {
        TargetSpec::new(QuantParams {
            hadamard: Some(Hadamard::seeded_with_size(size, 3)),
            ..QuantParams::nvfp4(rounding)
        })
    };
    let stochastic = Rounding::Stochastic(STREAM);
    vec![
        (nearest(), AmaxGranularity::PerTensor),
        (
            transformed(HadamardSize::H16, stochastic),
            AmaxGranularity::PerTensor,
        ),
        (nearest(), AmaxGranularity::PerRow),
        (
            transformed(HadamardSize::H128, Rounding::Nearest),
            AmaxGranularity::PerTensor,
        ),
    ]
}

/// Returns groups of rows with offsets in device memory.
fn group_offsets(client: &Client, sizes: &[usize]) -> GroupOffsets {
    let Groups::Offsets { offsets, count } = offsets(client, sizes) else {
        unreachable!("offsets in device memory");
    };
    GroupOffsets { offsets, count }
}

fn amax(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    (copy, scope): &(TargetSpec, AmaxGranularity),
) -> Handle {
    let request = AmaxRequest::along(usage, *scope, copy.params.hadamard);
    let found = quantize::amaxes(client, x, groups, &request).unwrap();
    found.rows.or(found.cols).unwrap()
}

/// Returns the bytes of codes and of scales.
fn bytes(client: &Client, packed: &DeviceQuantized) -> [Vec<u8>; 2] {
    [
        read_bytes(client, &packed.codes, packed.code_bytes()),
        read_bytes(client, &packed.scales, packed.scale_bytes()),
    ]
}

/// A columnwise tensor of groups joined along its stored rows: the block range of each group.
struct SideBySide {
    outer: usize,
    blocks: usize,
    groups: Vec<Range<usize>>,
}

impl SideBySide {
    /// Returns groups of these sizes, each padded to a multiple of `unit`.
    fn new(packed: &DeviceQuantized, sizes: &[usize], unit: usize) -> Self {
        let mut start = 0;
        let groups = sizes.iter().map(|size| {
            let blocks = size.next_multiple_of(unit) / BLOCK;
            start += blocks;
            start - blocks..start
        });
        Self {
            outer: packed.outer(),
            groups: groups.collect(),
            blocks: packed.blocks(),
        }
    }

    /// Asserts that codes and tiled scales equal the row-major ones, with zeros after each group.
    fn assert_tiles(&self, found: &[Vec<u8>; 2], rows: (&Self, &[Vec<u8>; 2]), what: &str) {
        let [codes, scales] = found;
        let (of_rows, [row_codes, row_scales]) = rows;
        for (group, (tiles, own)) in self.groups.iter().zip(&of_rows.groups).enumerate() {
            let what = format!("{what}, group {group}");
            for row in 0..self.outer.next_multiple_of(128) {
                let is_padding = row >= self.outer;
                for (i, block) in tiles.clone().enumerate() {
                    let source = (!is_padding && i < own.len())
                        .then(|| row * of_rows.blocks + own.start + i);
                    let scale = source.map_or(0, |at| row_scales[at]);
                    let at = swizzle::offset(row, block, self.blocks);
                    assert_eq!(scales[at], scale, "{what}, row {row}, block {i}: scale");
                    if is_padding {
                        continue;
                    }
                    let expected =
                        source.map_or([0; 8], |at| row_codes[8 * at..][..8].try_into().unwrap());
                    let at = 8 * (row * self.blocks + block);
                    let what = format!("{what}, row {row}, block {i}: codes");
                    assert_bytes(&codes[at..][..8], &expected, &what);
                }
            }
        }
    }
}

/// Any number of tokens, in whole tiles: the row-major tensor, and zeros.
#[test]
fn tokens_in_whole_tiles() {
    let client = client!("tokens_in_whole_tiles");
    for (rows, cols) in [(70, 48), (150, 136), (128, 16), (1, 32)] {
        let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, rows as u32));
        let x = upload(&client, &x, rows, cols);
        for policy in policies() {
            let usage = Usage::Columnwise;
            let amax = amax(&client, &x, &Groups::One, usage, &policy);
            let (copy, scope) = policy;
            let made = |copy| {
                let request = quantize::target(&amax, scope, copy);
                quantize::quantize(&client, &x, &Groups::One, usage, &request).unwrap()
            };
            let unit = copy.params.unit();
            let (own, tiles) = (made(copy.clone()), made(copy.form(StoredForm::WholeTiles)));
            assert_eq!(tiles.rows(), rows.next_multiple_of(64));
            SideBySide::new(&tiles, &[rows], unit.max(64)).assert_tiles(
                &bytes(&client, &tiles),
                (&SideBySide::new(&own, &[rows], unit), &bytes(&client, &own)),
                &format!("{rows} x {cols}, transform of {unit}"),
            );
        }
    }
}

/// Groups of tokens, including empty ones: columnwise in whole tiles joined along the stored rows,
/// rowwise in tiles that restart at each group, from one read.
#[test]
fn groups_of_tokens() {
    let client = client!("groups_of_tokens");
    let (sizes, cols) = ([0, 5, 128, 0, 129, 70], 48);
    let rows = sizes.iter().sum::<usize>() + 3;
    let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, 11));
    let x = upload(&client, &x, rows, cols);
    let groups = group_offsets(&client, &sizes);
    let all = Groups::Offsets {
        offsets: groups.offsets.clone(),
        count: groups.count,
    };
    for policy in policies() {
        let col_amax = amax(&client, &x, &all, Usage::Columnwise, &policy);
        let row_policy = (TargetSpec::new(Rounding::Nearest), policy.1);
        let row_amax = amax(&client, &x, &all, Usage::Rowwise, &row_policy);
        let (copy, scope) = policy;
        let unit = copy.params.unit();
        let made = |row_copy, col_copy| {
            let row = quantize::target(&row_amax, scope, row_copy);
            let col = quantize::target(&col_amax, scope, col_copy);
            let both = (Some(&row), Some(&col));
            let made = quantize::quantize_side_by_side(&client, &x, &groups, both.0, both.1);
            let (row, col) = made.unwrap();
            (row.unwrap(), col.unwrap())
        };
        let tiles_of_row = row_policy.0.clone().form(StoredForm::Tiles);
        let (row, col) = made(row_policy.0, copy.clone());
        let (row_tiles, col_tiles) = made(tiles_of_row, copy.form(StoredForm::WholeTiles));
        SideBySide::new(&col_tiles, &sizes, unit.max(64)).assert_tiles(
            &bytes(&client, &col_tiles),
            (&SideBySide::new(&col, &sizes, unit), &bytes(&client, &col)),
            &format!("transform of {unit}, {scope:?}"),
        );
        let ([codes, scales], [row_codes, row_scales]) =
            (bytes(&client, &row_tiles), bytes(&client, &row));
        let filled = rows - 3;
        assert_bytes(
            &codes[..filled * cols / 2],
            &row_codes[..filled * cols / 2],
            "codes",
        );
        let mut starts = vec![0u32];
        starts.extend(sizes.iter().scan(0, |end, size| {
            *end += *size as u32;
            Some(*end)
        }));
        let blocks = cols / BLOCK;
        let row_scales = &row_scales[..filled * blocks];
        let (expected, ends) = swizzle::swizzle_row_groups(row_scales, filled, blocks, &starts);
        let len = *ends.last().unwrap() as usize * blocks.next_multiple_of(4);
        assert_bytes(&scales[..len], &expected[..len], "scales of groups of rows");
    }
}

/// MS-EDEN of groups of tokens, whose rotation groups are whole tiles.
#[test]
fn ms_eden_of_groups_of_tokens() {
    let client = client!("ms_eden_of_groups_of_tokens");
    let (sizes, cols) = ([0, 5, 128, 0, 129], 48);
    let rows = sizes.iter().sum();
    let x = convert::<bf16>(&values(Kind::Normal, rows * cols, 12));
    let x = upload(&client, &x, rows, cols);
    let groups = offsets(&client, &sizes);
    let (source, usage) = ((&x, &groups), Usage::Columnwise);
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 77);
    let amax = quantize::ms_eden_amax(&client, source, usage, &hadamard).unwrap();
    let made = |form| {
        quantize::ms_eden_as(&client, source, usage, &amax, &hadamard, STREAM, form).unwrap()
    };
    let (own, tiles) = (made(StoredForm::Rows), made(StoredForm::Tiles));
    let place = SideBySide::new(&own, &sizes, 128);
    let (found, expected) = (bytes(&client, &tiles), bytes(&client, &own));
    place.assert_tiles(&found, (&place, &expected), "MS-EDEN");
}

/// A dense GEMM, along tokens that are not whole tiles, gives the same bits for row-major and tiled
/// scales.
#[test]
fn dense_gemm() {
    let client = client!("dense_gemm");
    let (tokens, m, n) = (70, 40, 24);
    let operand = |cols, seed, in_tiles: bool| {
        let x = convert::<bf16>(&values(Kind::Normal, tokens * cols, seed));
        let x = upload(&client, &x, tokens, cols);
        let plain = TargetSpec::new(Rounding::Nearest);
        let amax = quantize::amax(&client, &x, None).unwrap();
        let request = quantize::target(
            &amax,
            AmaxGranularity::PerTensor,
            if in_tiles {
                plain.form(StoredForm::WholeTiles)
            } else {
                plain
            },
        );
        quantize::quantize(&client, &x, &Groups::One, Usage::Columnwise, &request).unwrap()
    };
    let product = |in_tiles| {
        let (a, b) = (operand(m, 1, in_tiles), operand(n, 2, in_tiles));
        let request = Gemm::new(&a, &b).out(FloatKind::F32);
        read_matrix::<f32>(&client, &multiply(&client, request).unwrap())
    };
    assert_eq!(product(true), product(false));
}

/// Returns an operand of a grouped GEMM with one amax per group.
fn per_group(packed: &DeviceQuantized) -> Operand<'_> {
    let operand = Operand::from(packed);
    let Scale::Tensor(amax, range) = operand.scale else {
        panic!("one amax for each group");
    };
    Operand {
        scale: Scale::PerGroup(amax, range),
        ..operand
    }
}

/// Grouped GEMMs, along rows and along tokens, give the same bits for row-major and tiled scales.
#[test]
fn grouped_gemms() {
    let client = client!("grouped_gemms");
    let (sizes, d_in, d_out) = ([0, 5, 130, 0, 70], 48, 24);
    let tokens = sizes.iter().sum();
    let matrix = |rows: usize, cols, seed| {
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, seed));
        upload(&client, &x, rows, cols)
    };
    let (x, dy) = (matrix(tokens, d_in, 1), matrix(tokens, d_out, 2));
    let w = matrix(sizes.len() * d_out, d_in, 3);
    let groups = group_offsets(&client, &sizes);
    let all = Groups::Offsets {
        offsets: groups.offsets.clone(),
        count: groups.count,
    };
    let stack = Groups::Batch(sizes.len());
    let plain = |form| TargetSpec::new(Rounding::Nearest).form(form);
    let scope = AmaxGranularity::PerTensor;
    let products = |in_tiles: bool| {
        let (row, col) = match in_tiles {
            true => (StoredForm::Tiles, StoredForm::WholeTiles),
            false => (StoredForm::Rows, StoredForm::Rows),
        };
        let (row, col, usage) = (plain(row), plain(col), Usage::Rowwise);
        let made = |x: &Matrix, usage, copy: &TargetSpec| {
            let amax = amax(&client, x, &all, usage, &(copy.clone(), scope));
            let request = quantize::target(&amax, scope, copy.clone());
            let (row, col) = match usage {
                Usage::Rowwise => (Some(&request), None),
                Usage::Columnwise => (None, Some(&request)),
            };
            let made = quantize::quantize_side_by_side(&client, x, &groups, row, col);
            let (row, col) = made.unwrap();
            row.or(col).unwrap()
        };
        let rows = made(&x, Usage::Rowwise, &row);
        let amax = amax(&client, &w, &stack, usage, &(row.clone(), scope));
        let request = quantize::target(&amax, scope, row);
        let weights = quantize::quantize(&client, &w, &stack, usage, &request).unwrap();
        let weights = DeviceQuantized {
            groups: Groups::One,
            ..weights
        };
        let forward = Gemm::new(per_group(&rows), per_group(&weights))
            .m_grouped(&groups)
            .out(FloatKind::F32);
        let forward = read_matrix::<f32>(&client, &multiply(&client, forward).unwrap());

        let unit = if in_tiles { 64 } else { BLOCK };
        let aligned = groups.aligned(&client, tokens, unit).unwrap();
        let (a, b) = (
            made(&x, Usage::Columnwise, &col),
            made(&dy, Usage::Columnwise, &col),
        );
        let gradient = Gemm::new(per_group(&a), per_group(&b))
            .k_grouped(&aligned)
            .k_alignment(unit)
            .out(FloatKind::F32);
        let gradient = read_matrix::<f32>(&client, &multiply(&client, gradient).unwrap());
        [forward, gradient]
    };
    assert_eq!(products(true), products(false));
}

/// Tensors that cannot be tiled are refused, by name.
#[test]
fn what_has_no_tiles() {
    let client = client!("what_has_no_tiles");
    let x = upload(&client, &vec![bf16::ONE; 70 * 48], 70, 48);
    let amax = quantize::amax(&client, &x, None).unwrap();
    let plain = || TargetSpec::new(Rounding::Nearest);
    let scope = AmaxGranularity::PerTensor;
    let request = |target| quantize::target(&amax, scope, target);
    let refused = |result: Result<DeviceQuantized, Nvfp4Error>, argument: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(argument), "{error}");
    };
    let quantized =
        |usage, target| quantize::quantize(&client, &x, &Groups::One, usage, &request(target));
    refused(
        quantized(Usage::Rowwise, plain().form(StoredForm::WholeTiles)),
        "form",
    );
    let groups = group_offsets(&client, &[40, 30]);
    let tiles = request(plain().form(StoredForm::Tiles));
    let made = quantize::quantize_side_by_side(&client, &x, &groups, None, Some(&tiles));
    refused(made.map(|(_, col)| col.unwrap()), "form");

    // Tiles whose starts do not match the groups of the GEMM.
    let tiles = quantized(Usage::Columnwise, tiles).unwrap();
    let request = Gemm::new(&tiles, &tiles).k_grouped(&groups);
    let error = multiply(&client, request).unwrap_err().to_string();
    assert!(error.contains("whole tiles"), "{error}");
}
