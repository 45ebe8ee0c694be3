//! Swizzled scales and padded groups compared with the oracle byte for byte, on CubeCL's CPU
//! runtime or on a GPU (`NVFP4_TEST_DEVICE`).

use crate::support::device::{
    DeviceElement, assert_bytes, assert_floats, read_bytes, read_matrix, read_u32, upload,
    upload_bytes,
};
use crate::support::inputs::Generator;
use crate::support::quantize;
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::reference::{padding, swizzle};
use nvfp4_kernels::{
    moe::{self, GroupOffsets},
    tensor::{FloatKind, Matrix},
};

/// Returns scales without a zero byte, so that padding is visible.
fn scales(len: usize, seed: u32) -> Vec<u8> {
    let mut random = Generator::new(seed);
    (0..len)
        .map(|_| (random.next_u32() % 255) as u8 + 1)
        .collect()
}

/// Returns memory full of ones to the pool, so that bytes which a kernel does not write are
/// detected.
fn dirty_pool(client: &Client, bytes: usize) {
    let dirty = vec![0xFFu8; bytes.max(1)];
    for _ in 0..3 {
        drop(client.create_from_slice(&dirty));
    }
}

fn groups(client: &Client, offsets: &[u32]) -> GroupOffsets {
    let handle = client.create_from_slice(bytemuck::cast_slice(offsets));
    GroupOffsets::new(handle, offsets.len() - 1).unwrap()
}

/// Returns splits of `rows`: empty groups at the start, in the middle and at the end, rows after
/// the last group, single rows, one group, many.
fn splits(rows: u32) -> Vec<Vec<u32>> {
    let part = |numerator: u32| rows * numerator / 10;
    vec![
        vec![0, rows],
        vec![0, 0],
        vec![0, 0, part(3), part(3), part(3), part(7), rows, rows],
        vec![0, part(1), part(4), part(9)],
        vec![0, 1.min(rows), 2.min(rows), rows],
        (0..=70).map(|g| (g * 5).min(rows)).collect(),
        (0..=300).map(|g| g * rows / 300).collect(),
    ]
}

#[test]
fn swizzle_2d_and_3d() {
    let client = client!("swizzle_2d_and_3d");
    for (batch, rows, blocks) in [
        (1, 1, 1),
        (1, 128, 4),
        (1, 128, 8),
        (1, 129, 5),
        (1, 300, 7),
        (1, 0, 3),
        (1, 257, 16),
        (1, 256, 32),
        (1, 65, 12),
        (1, 1024, 64),
        (2, 128, 4),
        (3, 100, 8),
        (4, 257, 6),
        (5, 33, 17),
        (0, 16, 4),
    ] {
        let what = format!("{batch} x {rows} x {blocks}");
        let bytes = scales(batch * rows * blocks, rows as u32);
        let handle = upload_bytes(&client, &bytes);
        let expected = swizzle::swizzle_batch(&bytes, batch, rows, blocks);
        dirty_pool(&client, expected.len());
        let found = quantize::swizzle_batch(&client, &handle, batch, rows, blocks).unwrap();
        assert_bytes(
            &read_bytes(&client, &found, expected.len()),
            &expected,
            &what,
        );
        let back = quantize::unswizzle_batch(&client, &found, batch, rows, blocks).unwrap();
        assert_bytes(&read_bytes(&client, &back, bytes.len()), &bytes, &what);
        if batch == 1 {
            let found = quantize::swizzle(&client, &handle, rows, blocks).unwrap();
            assert_bytes(
                &read_bytes(&client, &found, expected.len()),
                &expected,
                &what,
            );
            let back = quantize::unswizzle(&client, &found, rows, blocks).unwrap();
            assert_bytes(&read_bytes(&client, &back, bytes.len()), &bytes, &what);
        }
    }
}

#[test]
fn swizzle_groups_of_rows() {
    let client = client!("swizzle_groups_of_rows");
    for (rows, blocks) in [
        (256, 8),
        (300, 5),
        (640, 16),
        (128, 8),
        (1, 4),
        (77, 1),
        (0, 8),
    ] {
        for offsets in splits(rows as u32) {
            let what = format!("{rows} x {blocks} in {offsets:?}");
            let bytes = scales(rows * blocks, 7);
            let handle = upload_bytes(&client, &bytes);
            let groups = groups(&client, &offsets);
            let (expected, starts) = swizzle::swizzle_row_groups(&bytes, rows, blocks, &offsets);
            dirty_pool(&client, expected.len());
            let (found, padded) =
                quantize::swizzle_row_groups(&client, &handle, rows, blocks, &groups).unwrap();
            assert_bytes(
                &read_bytes(&client, &found, expected.len()),
                &expected,
                &what,
            );
            assert_eq!(read_u32(&client, &padded.offsets, starts.len()), starts);
            let back =
                quantize::unswizzle_row_groups(&client, &found, rows, blocks, &groups).unwrap();
            let expected = swizzle::unswizzle_row_groups(&expected, rows, blocks, &offsets);
            assert_bytes(
                &read_bytes(&client, &back, expected.len()),
                &expected,
                &what,
            );
        }
    }
}

/// Adds values to eight partial sums in turn, then these in a tree.
fn sum_of_rows(values: impl Iterator<Item = f32>) -> f32 {
    let mut sums = [0f32; 8];
    for (i, value) in values.enumerate() {
        sums[i % 8] += value;
    }
    for width in [4, 2, 1] {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0]
}

/// Checks the sum of each column: that of the sums of equal parts.
fn check_column_sums<T: DeviceElement>(client: &Client) {
    // One part, equal parts, and a shorter last part or empty last parts.
    for (rows, cols) in [
        (0, 3),
        (1, 1),
        (127, 5),
        (128, 16),
        (200, 3),
        (64 * 128 + 1, 2),
    ] {
        let mut random = Generator::new(rows as u32);
        let x = (0..rows * cols).map(|_| T::from_f32(random.normal()));
        let x: Vec<T> = x.collect();
        let matrix = upload(client, &x, rows, cols);
        dirty_pool(client, cols * 4);
        let found = moe::column_sums(client, &matrix).unwrap();
        assert_eq!((found.rows, found.cols), (1, cols));
        let found = read_matrix::<f32>(client, &found);
        let parts = (rows / 64).clamp(1, 128);
        let len = rows.div_ceil(parts);
        for (column, found) in found.iter().enumerate() {
            let part = |part: usize| {
                let rows = (part * len).min(rows)..((part + 1) * len).min(rows);
                sum_of_rows(rows.map(|row| x[row * cols + column].to_f32()))
            };
            let sum = match parts {
                1 => part(0),
                _ => sum_of_rows((0..parts).map(part)),
            };
            let what = format!("{rows} x {cols} {:?}: {column}", T::KIND);
            assert_eq!(found.to_bits(), sum.to_bits(), "{what}");
        }
    }
}

#[test]
fn sums_of_columns() {
    let client = client!("sums_of_columns");
    check_column_sums::<f32>(&client);
    check_column_sums::<bf16>(&client);
    check_column_sums::<f16>(&client);
}

/// Checks the sum of each group, in the order specified by [`moe::segment_sum`], and zeros after
/// the last group.
fn check_group_rows<T: DeviceElement>(client: &Client) {
    for (rows, cols) in [(300, 16), (77, 3), (1, 1), (0, 8)] {
        let mut random = Generator::new(rows as u32);
        let x: Vec<T> = (0..rows * cols)
            .map(|_| T::from_f32(random.normal()))
            .collect();
        for offsets in splits(rows as u32) {
            let what = format!("{rows} x {cols} {:?} {offsets:?}", T::KIND);
            let groups = groups(client, &offsets);
            let matrix = upload(client, &x, rows, cols);
            dirty_pool(client, groups.count * cols * 4);
            let found = moe::segment_sum(client, &matrix, &groups).unwrap();
            assert_eq!((found.rows, found.cols), (groups.count, cols), "{what}");
            let found = read_matrix::<f32>(client, &found);
            for (g, group) in offsets.windows(2).enumerate() {
                for column in 0..cols {
                    let rows = group[0] as usize..group[1] as usize;
                    let sum = sum_of_rows(rows.map(|row| x[row * cols + column].to_f32()));
                    let found = found[g * cols + column];
                    assert_eq!(found.to_bits(), sum.to_bits(), "{what}: {g}, {column}");
                }
            }
            moe::zero_padding_rows(client, &matrix, &groups).unwrap();
            let mut expected = x.clone();
            let end = *offsets.last().unwrap() as usize * cols;
            expected[end..].fill(T::from_f32(0.0));
            assert_bytes(
                bytemuck::cast_slice(&read_matrix::<T>(client, &matrix)),
                bytemuck::cast_slice(&expected),
                &what,
            );
        }
    }
}

#[test]
fn sums_and_rests_of_groups() {
    let client = client!("sums_and_rests_of_groups");
    check_group_rows::<f32>(&client);
    check_group_rows::<bf16>(&client);
    check_group_rows::<f16>(&client);
}

fn check_padding<T: DeviceElement>(client: &Client) {
    for (rows, cols) in [
        (300, 16),
        (77, 24),
        (20, 3),
        (1, 1),
        (129, 40),
        (0, 8),
        (8, 0),
    ] {
        let mut random = Generator::new(rows as u32);
        let x: Vec<T> = (0..rows * cols)
            .map(|_| T::from_f32(random.normal()))
            .collect();
        let matrix = upload(client, &x, rows, cols);
        for offsets in splits(rows as u32) {
            let groups = groups(client, &offsets);
            for alignment in [1, 16, 32, 128] {
                let what = format!("{rows} x {cols} {:?} to {alignment} {offsets:?}", T::KIND);
                let (expected, starts) = padding::pad_groups(&x, rows, cols, &offsets, alignment);
                dirty_pool(client, size_of_val(expected.as_slice()));
                let (found, padded) = moe::pad_groups(client, &matrix, &groups, alignment).unwrap();
                assert_eq!(found.len(), expected.len(), "{what}");
                let as_bytes = |x: &[T]| bytemuck::cast_slice(x).to_vec();
                assert_bytes(
                    &as_bytes(&read_matrix::<T>(client, &found)),
                    &as_bytes(&expected),
                    &what,
                );
                assert_eq!(
                    read_u32(client, &padded.offsets, starts.len()),
                    starts,
                    "{what}"
                );
                let back = moe::unpad_groups(client, &found, rows, &groups, alignment).unwrap();
                let expected = padding::unpad_groups(&expected, rows, cols, &offsets, alignment);
                assert_bytes(
                    &as_bytes(&read_matrix::<T>(client, &back)),
                    &as_bytes(&expected),
                    &what,
                );
            }
        }
    }
}

#[test]
fn padding_f32() {
    check_padding::<f32>(&client!("padding_f32"));
}

#[test]
fn padding_bf16() {
    check_padding::<bf16>(&client!("padding_bf16"));
}

#[test]
fn padding_f16() {
    check_padding::<f16>(&client!("padding_f16"));
}

/// Checks rows gathered by index, summed with weights and without, and the gradients. Each product
/// and each sum is rounded, in the specified order.
fn check_rows_by_number<T: DeviceElement>(client: &Client) {
    for (tokens, copies, cols) in [(37, 2, 64), (5, 1, 6), (9, 3, 2072), (0, 2, 16)] {
        let what = format!("{tokens} x {copies} rows of {cols} {:?}", T::KIND);
        let slots = tokens * copies;
        let mut random = Generator::new(slots as u32);
        let mut matrix = |rows: usize| -> Vec<T> {
            let values = (0..rows * cols).map(|_| random.normal());
            values.map(T::from_f32).collect()
        };
        let (x, grad) = (matrix(slots), matrix(tokens));
        let weights: Vec<f32> = (0..slots).map(|i| (i % 13) as f32 / 14.0 - 0.25).collect();
        // A permutation: 5 divides none of the row counts except 5, which keeps its order.
        let step = if slots == 5 { 1 } else { 5 };
        let places: Vec<u32> = (0..slots).map(|i| (i * step % slots) as u32).collect();
        let mut choices = vec![0u32; slots];
        for (choice, &place) in places.iter().enumerate() {
            choices[place as usize] = choice as u32;
        }
        let x_there = upload(client, &x, slots, cols);
        let handle = |words: &[u32]| upload_bytes(client, bytemuck::cast_slice(words));
        let weights_there = upload_bytes(client, bytemuck::cast_slice(&weights));
        let row = |matrix: &[T], row: usize| -> Vec<f32> {
            let row = &matrix[row * cols..(row + 1) * cols];
            row.iter().map(|value| value.to_f32()).collect()
        };
        for weighted in [false, true] {
            // An index that is too large names no row.
            let mut places = places.clone();
            if let Some(place) = places.last_mut() {
                *place = u32::MAX;
            }
            let weights_there = weighted.then_some(&weights_there);
            let shape = (tokens, copies);
            let found =
                moe::moe_unpermute(client, &x_there, &handle(&places), weights_there, shape)
                    .unwrap();
            assert_eq!((found.rows, found.cols), (tokens, cols), "{what}");
            let mut expected = Vec::with_capacity(tokens * cols);
            for token in 0..tokens {
                let mut sums = vec![-0f32; cols];
                for choice in token * copies..(token + 1) * copies {
                    if let Some(place) = Some(places[choice] as usize).filter(|p| *p < slots) {
                        let weight = if weighted { weights[choice] } else { 1.0 };
                        for (sum, value) in sums.iter_mut().zip(row(&x, place)) {
                            *sum += weight * value;
                        }
                    }
                }
                expected.extend(sums.into_iter().map(T::from_f32));
            }
            assert_floats(&read_matrix::<T>(client, &found), &expected, &what);
        }
        let (by_rows, by_weights) = moe::moe_unpermute_backward(
            client,
            &upload(client, &grad, tokens, cols),
            &x_there,
            &handle(&choices),
            &weights_there,
            (copies, moe::Named::All),
        )
        .unwrap();
        let by_rows = read_matrix::<T>(client, &by_rows);
        let by_weights = read_u32(client, &by_weights, slots);
        for (choice, &place) in places.iter().enumerate() {
            let (grad, own) = (row(&grad, choice / copies), row(&x, place as usize));
            let scaled = grad
                .iter()
                .map(|value| T::from_f32(weights[choice] * value));
            let found = &by_rows[place as usize * cols..][..cols];
            assert_floats(found, &scaled.collect::<Vec<_>>(), &what);
            let terms = || grad.iter().zip(&own).map(|(g, x)| f64::from(g * x));
            let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let found = f64::from(f32::from_bits(by_weights[choice]));
            // For any order of the additions.
            let bound = cols as f64 * 2f64.powi(-24) * size;
            assert!(
                (found - sum).abs() <= bound,
                "{what}: {choice}: {found}, expected {sum}"
            );
        }
    }
}

/// Indices that name no row: rows are left out, and weights have no gradient.
#[test]
fn rows_of_which_some_are_elsewhere() {
    let client = client!("rows_of_which_some_are_elsewhere");
    let (tokens, copies, cols) = (5usize, 2usize, 12usize);
    let slots = tokens * copies;
    let none = slots as u32;
    let handle = |words: &[u32]| upload_bytes(&client, bytemuck::cast_slice(words));
    // Choices 1, 2, 6 and 9 are at places 0 to 3.
    let choices = [&[1, 2, 6, 9][..], &[none; 6]].concat();
    let mut places = [none; 10];
    for (place, &choice) in choices[..4].iter().enumerate() {
        places[choice as usize] = place as u32;
    }
    let values = |rows: usize, first: f32| -> Vec<f32> {
        (0..rows * cols).map(|i| first + i as f32).collect()
    };
    let x = values(tokens, 1.0);
    let named: Vec<u32> = choices
        .iter()
        .map(|choice| choice / copies as u32)
        .collect();
    let x_there = upload(&client, &x, tokens, cols);
    let found = moe::moe_permute(&client, &x_there, &handle(&named), slots).unwrap();
    let found = read_matrix::<f32>(&client, &found);
    for (place, &token) in named[..4].iter().enumerate() {
        let row = &x[token as usize * cols..][..cols];
        assert_eq!(&found[place * cols..][..cols], row);
    }
    // Rows after the last place may have any contents: here NaN.
    let mut y = values(slots, 0.5);
    y[4 * cols..].fill(f32::NAN);
    let y_there = upload(&client, &y, slots, cols);
    let weights: Vec<f32> = (0..slots).map(|i| 0.1 + i as f32).collect();
    let weights_there = upload_bytes(&client, bytemuck::cast_slice(&weights));
    let (places_there, shape) = (handle(&places), (tokens, copies));
    let sums = moe::moe_unpermute(
        &client,
        &y_there,
        &places_there,
        Some(&weights_there),
        shape,
    )
    .unwrap();
    let mut expected = vec![0f32; tokens * cols];
    for (place, &choice) in choices[..4].iter().enumerate() {
        for column in 0..cols {
            expected[choice as usize / copies * cols + column] +=
                weights[choice as usize] * y[place * cols + column];
        }
    }
    assert_eq!(read_matrix::<f32>(&client, &sums), expected);
    let grad = values(tokens, 2.0);
    let (by_rows, by_weights) = moe::moe_unpermute_backward(
        &client,
        &upload(&client, &grad, tokens, cols),
        &y_there,
        &handle(&choices),
        &weights_there,
        (copies, moe::Named::Some),
    )
    .unwrap();
    let by_rows = read_matrix::<f32>(&client, &by_rows);
    let by_weights = read_u32(&client, &by_weights, slots);
    for (choice, &place) in places.iter().enumerate() {
        let by_weight = f32::from_bits(by_weights[choice]);
        if place == none {
            assert_eq!(by_weight, 0.0, "{choice}");
            continue;
        }
        let row = &by_rows[place as usize * cols..][..cols];
        let grad = &grad[choice / copies * cols..][..cols];
        let own = &y[place as usize * cols..][..cols];
        let terms = || grad.iter().zip(own).map(|(a, b)| a * b);
        assert!((by_weight - terms().sum::<f32>()).abs() < 1e-4 * by_weight);
        for (found, grad) in row.iter().zip(grad) {
            assert_eq!(*found, weights[choice] * grad);
        }
    }
}

/// Pads groups without the rows after them.
#[test]
fn groups_alone_are_padded() {
    let client = client!("groups_alone_are_padded");
    let (rows, cols) = (30, 8);
    let x: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
    let offsets = [0, 3, 3, 20];
    let groups = GroupOffsets::new(upload_bytes(&client, bytemuck::cast_slice(&offsets)), 3);
    let matrix = upload(&client, &x, rows, cols);
    let (found, padded) = moe::pad_groups_only(&client, &matrix, &groups.unwrap(), 16).unwrap();
    let (expected, starts) = padding::pad_groups(&x, rows, cols, &offsets, 16);
    let starts_there = read_u32(&client, &padded.offsets, 4);
    assert_eq!(starts_there, starts);
    let end = starts[3] as usize * cols;
    assert_eq!(read_matrix::<f32>(&client, &found)[..end], expected[..end]);
}

#[test]
fn rows_by_number() {
    let client = client!("rows_by_number");
    check_rows_by_number::<f32>(&client);
    check_rows_by_number::<bf16>(&client);
    check_rows_by_number::<f16>(&client);
}

/// More than 2^31 bytes, on a GPU: the round trip, and the last tile by the formula.
#[test]
fn more_bytes_than_32_bits_index() {
    let client = on_gpu!("more_bytes_than_32_bits_index", "a GPU's memory is needed");
    let (rows, blocks) = (65_536 + 128, 32_768);
    let bytes: Vec<u8> = (0..rows * blocks).map(|i| (i % 251) as u8 + 1).collect();
    let handle = upload_bytes(&client, &bytes);
    let groups = groups(&client, &[0, 1 << 15, rows as u32]);
    let (swizzled, _) =
        quantize::swizzle_row_groups(&client, &handle, rows, blocks, &groups).unwrap();
    let back = quantize::unswizzle_row_groups(&client, &swizzled, rows, blocks, &groups).unwrap();
    assert!(read_bytes(&client, &back, bytes.len()) == bytes);
    drop(back);
    // Both groups are whole tiles, so the whole matrix is swizzled.
    let swizzled = read_bytes(&client, &swizzled, swizzle::padded_len(rows, blocks));
    for row in rows - 128..rows {
        for block in blocks - 64..blocks {
            let at = swizzle::offset(row, block, blocks);
            assert_eq!(
                swizzled[at],
                bytes[row * blocks + block],
                "row {row}, block {block}"
            );
        }
    }
}

/// Wrong offsets give wrong contents, not an access outside a buffer (which compute-sanitizer would
/// report).
#[test]
fn wrong_offsets_stay_inside_the_buffers() {
    let client = client!("wrong_offsets_stay_inside_the_buffers");
    let (rows, blocks) = (300, 8);
    let bytes = scales(rows * blocks, 1);
    let handle = upload_bytes(&client, &bytes);
    let x = upload::<bf16>(&client, &vec![bf16::ONE; rows * 16], rows, 16);
    for offsets in [
        vec![0u32, 300, 0, 300, 0, 300],
        vec![5, 4, 3, 2],
        vec![0, 1_000_000, u32::MAX],
        vec![100, 200],
    ] {
        let groups = groups(&client, &offsets);
        let (swizzled, _) =
            quantize::swizzle_row_groups(&client, &handle, rows, blocks, &groups).unwrap();
        let back =
            quantize::unswizzle_row_groups(&client, &swizzled, rows, blocks, &groups).unwrap();
        read_bytes(&client, &back, rows * blocks);
        let (padded, _) = moe::pad_groups(&client, &x, &groups, 32).unwrap();
        let back = moe::unpad_groups(&client, &padded, rows, &groups, 32).unwrap();
        read_matrix::<bf16>(&client, &back);
        let sums = moe::segment_sum(&client, &x, &groups).unwrap();
        read_matrix::<f32>(&client, &sums);
        moe::zero_padding_rows(&client, &x, &groups).unwrap();
        read_matrix::<bf16>(&client, &x);
        // No kernel wrote to its inputs; the zeroed rows are the only change to a matrix.
        assert!(
            read_bytes(&client, &handle, rows * blocks) == scales(rows * blocks, 1),
            "{offsets:?}: the scales changed"
        );
        let x = read_matrix::<bf16>(&client, &x);
        assert!(
            x.iter().all(|x| [bf16::ZERO, bf16::ONE].contains(x)),
            "{offsets:?}: the matrix has other elements"
        );
    }
}

#[test]
fn errors_name_the_argument() {
    let client = client!("errors_name_the_argument");
    let small = client.empty(4);
    let name = |error: nvfp4_formats::Nvfp4Error| error.to_string();
    let error = name(GroupOffsets::new(small.clone(), 5).unwrap_err());
    assert!(error.contains("offsets") && error.contains("24"), "{error}");
    let error = name(GroupOffsets::new(small.clone(), 0).unwrap_err());
    assert!(error.contains("at least one"), "{error}");
    let error = name(quantize::swizzle(&client, &small, 8, 8).unwrap_err());
    assert!(error.contains("scales") && error.contains("64"), "{error}");
    let error = name(quantize::unswizzle(&client, &small, 8, 8).unwrap_err());
    assert!(
        error.contains("swizzled") && error.contains("1024"),
        "{error}"
    );
    let groups = groups(&client, &[0, 4]);
    let x = Matrix::empty(&client, 4, 8, FloatKind::Bf16);
    let error = name(moe::pad_groups(&client, &x, &groups, 0).unwrap_err());
    assert!(error.contains("alignment"), "{error}");
    let error = name(moe::unpad_groups(&client, &x, 4, &groups, 16).unwrap_err());
    assert!(error.contains("padded") && error.contains("16"), "{error}");
    let odd = Matrix::empty(&client, 4, 7, FloatKind::Bf16);
    let error = name(moe::moe_unpermute(&client, &odd, &small, None, (1, 1)).unwrap_err());
    assert!(error.contains("`x`") && error.contains("even"), "{error}");
    let error = name(moe::moe_unpermute(&client, &x, &small, None, (2, 2)).unwrap_err());
    assert!(error.contains("places") && error.contains("16"), "{error}");
    let error = moe::moe_unpermute_backward(&client, &x, &x, &small, &small, (2, moe::Named::All))
        .unwrap_err();
    let error = name(error);
    assert!(error.contains("`x`") && error.contains("8 x 8"), "{error}");
}
