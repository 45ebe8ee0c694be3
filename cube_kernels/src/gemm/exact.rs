//! Small GEMMs of packed operands with order-independent exact sums, and their comparison with the
//! reference. They check kernels on hardware on which these have not run before.
//!
//! Elements with their block scale are multiples of 1/4 up to 12, so a sum of up to 2048 products
//! is a multiple of 1/16 below 2^20: exact in `f32` in any order. Global scales are powers of two.

use cubecl::{client::Client, server::Handle};

use super::scheduler::GroupedDim;
use crate::{
    Amax, AmaxGranularity, BLOCK, Format, Layout, Nvfp4Error, Origin, QuantizedTensor, Usage,
    memory::download,
    moe::GroupOffsets,
    reference::{self, philox::philox4x32},
    tensor::{DeviceQuantized, Matrix},
};

/// E4M3 encodings of 1/2, 1 and 2.
const SCALES: [u8; 3] = [0x30, 0x38, 0x40];
/// UE8M0 encodings of 1/2, 1 and 2.
const POWERS: [u8; 3] = [126, 127, 128];
/// E4M3 encodings of the E2M1 magnitudes, in code order.
const ELEMENTS: [u8; 8] = [0x00, 0x30, 0x38, 0x3c, 0x40, 0x44, 0x48, 0x4c];
/// Amax that corresponds to a global scale of 1.
const AMAX: f32 = 2688.0;

/// Codes and scales of several rows.
#[derive(Clone)]
struct Rows {
    format: Format,
    rows: usize,
    k: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Rows {
    /// Random E2M1 values, in either format, with scales from [`SCALES`].
    fn random(format: Format, rows: usize, k: usize, seed: u32) -> Self {
        if !format.is_mx() {
            return Self::with_scales(rows, k, seed, |byte| SCALES[usize::from(byte) % 3]);
        }
        let drawn = Self::with_scales(rows, k, seed, |byte| POWERS[usize::from(byte) % 3]);
        // MXFP8 has half as many blocks, and a byte per code.
        let codes = drawn.codes.iter().flat_map(|byte| [byte & 0xf, byte >> 4]);
        let element = |code: u8| ELEMENTS[usize::from(code & 7)] | (code & 8) << 4;
        Self {
            format,
            codes: codes.map(element).collect(),
            scales: drawn.scales[..rows * k / format.block()].to_vec(),
            ..drawn
        }
    }

    /// Random NVFP4 codes; `scale` maps random bytes to scale bytes.
    fn with_scales(rows: usize, k: usize, seed: u32, scale: fn(u8) -> u8) -> Self {
        let blocks = rows * k / BLOCK;
        let bytes = |stream: u32, len: usize| -> Vec<u8> {
            (0..len.div_ceil(16) as u32)
                .flat_map(|counter| philox4x32([counter, stream, 0, 0], [seed, 0]))
                .flat_map(u32::to_le_bytes)
                .take(len)
                .collect()
        };
        let scales = bytes(1, blocks);
        Self {
            format: Format::Nvfp4,
            rows,
            k,
            codes: bytes(0, blocks * BLOCK / 2),
            scales: scales.into_iter().map(scale).collect(),
        }
    }

    /// Concatenates `parts` along the rows.
    fn stacked(parts: &[Self]) -> Self {
        Self {
            format: parts[0].format,
            rows: parts.iter().map(|part| part.rows).sum(),
            k: parts[0].k,
            codes: parts.iter().flat_map(|part| part.codes.clone()).collect(),
            scales: parts.iter().flat_map(|part| part.scales.clone()).collect(),
        }
    }

    /// Concatenates `parts` along the columns.
    fn side_by_side(parts: &[Self]) -> Self {
        let rows = parts[0].rows;
        let join = |bytes: fn(&Self) -> &[u8]| -> Vec<u8> {
            let mut all = Vec::new();
            for row in 0..rows {
                for part in parts {
                    let width = bytes(part).len() / rows;
                    all.extend_from_slice(&bytes(part)[row * width..(row + 1) * width]);
                }
            }
            all
        };
        Self {
            format: parts[0].format,
            rows,
            k: parts.iter().map(|part| part.k).sum(),
            codes: join(|part| &part.codes),
            scales: join(|part| &part.scales),
        }
    }

    /// Builds a tensor. In formats with global scales, the scale is 1, or one of 1, 2, 4 and 8 per
    /// row.
    fn tensor(&self, per_row: bool) -> Result<QuantizedTensor, Nvfp4Error> {
        let layout = Layout::new(self.format, (self.rows, self.k), Usage::Rowwise);
        let (granularity, amax) = match per_row {
            _ if !self.format.has_global_scale() => (AmaxGranularity::PerTensor, Amax::Absent),
            true => {
                let amax = (0..self.rows).map(|row| AMAX * (1 << (row % 4)) as f32);
                (AmaxGranularity::PerRow, Amax::PerRow(amax.collect()))
            }
            false => (AmaxGranularity::PerTensor, Amax::Tensor(AMAX)),
        };
        let layout = Layout {
            amax: granularity,
            ..layout
        };
        let (codes, scales) = (self.codes.clone(), self.scales.clone());
        QuantizedTensor::from_parts(layout, codes, scales, amax, Origin::default())
    }
}

/// Multiplies two tensors of the same format.
///
/// # Errors
/// Returns an error if their shapes do not match.
fn product(a: &QuantizedTensor, b: &QuantizedTensor) -> Result<Vec<f32>, Nvfp4Error> {
    if !a.layout().format.is_mx() {
        return reference::gemm_f32(a, b, None);
    }
    let (x, y) = (reference::mx_dequantize(a), reference::mx_dequantize(b));
    let k = a.cols().max(1);
    let dot = |x: &[f32], y: &[f32]| -> f32 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
    Ok(x.chunks(k)
        .flat_map(|x| y.chunks(k).map(move |y| dot(x, y)))
        .collect())
}

/// Returns operands of `m x n x k` whose sums depend on the order of additions: random scales from
/// 2^-3 to 16.
///
/// # Errors
/// Returns an error if a size is invalid for a packed operand.
pub(crate) fn inexact(
    client: &Client,
    (m, n, k): (usize, usize, usize),
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    let operand = |rows, seed| {
        let rows = Rows::with_scales(rows, k, seed, |byte| 0x20 + byte % 0x38);
        let tensor = rows.tensor(false)?;
        Ok(DeviceQuantized::from_host(client, &tensor))
    };
    Ok((operand(m, 11)?, operand(n, 12)?))
}

/// A GEMM whose sums are all exact.
pub(crate) struct ExactGemm {
    /// Description for messages.
    pub what: String,
    /// Left operand.
    pub a: DeviceQuantized,
    /// Right operand.
    pub b: DeviceQuantized,
    /// Grouped dimension and offsets.
    pub groups: Option<(GroupedDim, GroupOffsets)>,
    /// Alignment of groups along K.
    pub k_alignment: usize,
    /// Expected `f32` output of the rows that belong to groups.
    expected: Vec<f32>,
    /// Columns of the output.
    columns: usize,
}

impl ExactGemm {
    /// A dense `m x n x k` GEMM with one global scale per operand, or one per row of either
    /// operand; MXFP8 has none.
    ///
    /// # Errors
    /// Returns an error if a size is invalid for a packed operand.
    pub fn dense(
        client: &Client,
        format: Format,
        (m, n, k): (usize, usize, usize),
        per_row: bool,
    ) -> Result<Self, Nvfp4Error> {
        let (a, b) = (Rows::random(format, m, k, 1), Rows::random(format, n, k, 2));
        let (a, b) = (a.tensor(per_row)?, b.tensor(per_row)?);
        let kind = if per_row { "per token" } else { "dense" };
        Ok(Self {
            what: format!("{format:?}, {kind}, {m} x {n} x {k}"),
            a: DeviceQuantized::from_host(client, &a),
            b: DeviceQuantized::from_host(client, &b),
            groups: None,
            k_alignment: BLOCK,
            expected: product(&a, &b)?,
            columns: n,
        })
    }

    /// An M-grouped GEMM with groups of `sizes` rows, each with `n` rows of `b`.
    ///
    /// # Errors
    /// See [`Self::dense`].
    pub fn m_grouped(
        client: &Client,
        format: Format,
        sizes: &[usize],
        (n, k): (usize, usize),
    ) -> Result<Self, Nvfp4Error> {
        let (mut a, mut b, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for (seed, size) in (3u32..).step_by(2).zip(sizes) {
            let (left, right) = (
                Rows::random(format, *size, k, seed),
                Rows::random(format, n, k, seed + 1),
            );
            let (x, y) = (left.tensor(false)?, right.tensor(false)?);
            expected.extend(product(&x, &y)?);
            a.push(left);
            b.push(right);
        }
        let what = format!("{format:?}, M-grouped, rows {sizes:?}, {n} x {k}");
        let operands = [Rows::stacked(&a), Rows::stacked(&b)];
        Self::of_groups(client, what, operands, (GroupedDim::M, sizes), expected, n)
    }

    /// A K-grouped GEMM with groups of `sizes` columns, which are multiples of a block.
    ///
    /// # Errors
    /// See [`Self::dense`].
    pub fn k_grouped(
        client: &Client,
        format: Format,
        sizes: &[usize],
        (m, n): (usize, usize),
    ) -> Result<Self, Nvfp4Error> {
        let (mut a, mut b, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for (seed, size) in (5u32..).step_by(2).zip(sizes) {
            let (left, right) = (
                Rows::random(format, m, *size, seed),
                Rows::random(format, n, *size, seed + 1),
            );
            match *size {
                0 => expected.extend(vec![0.0; m * n]),
                _ => {
                    let (x, y) = (left.tensor(false)?, right.tensor(false)?);
                    expected.extend(product(&x, &y)?);
                }
            }
            a.push(left);
            b.push(right);
        }
        let what = format!("{format:?}, K-grouped, columns {sizes:?}, {m} x {n}");
        let operands = [Rows::side_by_side(&a), Rows::side_by_side(&b)];
        Self::of_groups(client, what, operands, (GroupedDim::K, sizes), expected, n)
    }

    fn of_groups(
        client: &Client,
        what: String,
        [a, b]: [Rows; 2],
        (dim, sizes): (GroupedDim, &[usize]),
        expected: Vec<f32>,
        columns: usize,
    ) -> Result<Self, Nvfp4Error> {
        let mut offsets = vec![0u32];
        for size in sizes {
            offsets.push(offsets[offsets.len() - 1] + *size as u32);
        }
        let offsets: Handle = client.create_from_slice(bytemuck::cast_slice(&offsets));
        Ok(Self {
            what,
            a: DeviceQuantized::from_host(client, &a.tensor(false)?),
            b: DeviceQuantized::from_host(client, &b.tensor(false)?),
            groups: Some((dim, GroupOffsets::new(offsets, sizes.len())?)),
            k_alignment: match sizes.iter().all(|size| size.is_multiple_of(64)) {
                true => 64,
                false => BLOCK,
            },
            expected,
            columns,
        })
    }

    /// Compares `found`, in `f32`, with the reference. Waits for the device.
    ///
    /// # Errors
    /// Returns the first element that differs, or the device error.
    pub fn compare(&self, client: &Client, found: &Matrix) -> Result<(), String> {
        let bytes = download(client, &found.handle, 4 * self.expected.len());
        let bytes = bytes.map_err(|error| format!("{}: {error}", self.what))?;
        let found: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        self.compare_values(&found)
    }

    /// [`Self::compare`] for values on the host.
    fn compare_values(&self, found: &[f32]) -> Result<(), String> {
        // Zeros of either sign are equal; NaN differs from everything.
        let differs = |(found, expected): (&f32, &f32)| found != expected;
        let count = found.iter().zip(&self.expected).filter(|it| differs(*it));
        let count = count.count();
        match found.iter().zip(&self.expected).position(differs) {
            None => Ok(()),
            Some(at) => Err(format!(
                "{}: row {}, column {} is {}, and should be {} ({count} of {} elements differ)",
                self.what,
                at / self.columns,
                at % self.columns,
                found[at],
                self.expected[at],
                self.expected.len()
            )),
        }
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    /// The first difference is reported by row and column; the sign of zero is ignored.
    #[test]
    fn differences_are_named() {
        let client = crate::cpu_client();
        let case = ExactGemm::dense(&client, Format::Nvfp4, (3, 8, 32), false).unwrap();
        let mut found = case.expected.clone();
        assert_eq!(case.compare_values(&found), Ok(()));
        found[8 + 5] += 0.0625;
        found[23] = f32::NAN;
        let error = case.compare_values(&found).unwrap_err();
        assert!(error.contains("row 1, column 5"), "{error}");
        assert!(error.contains("2 of 24"), "{error}");
        let zeros = |value: f32| value == 0.0;
        let signed: Vec<f32> = case
            .expected
            .iter()
            .map(|value| if zeros(*value) { -0.0 } else { *value })
            .collect();
        assert_eq!(case.compare_values(&signed), Ok(()));
    }

    /// Sums are exact in any order: they are multiples of 1/16 below 2^20.
    #[test]
    fn sums_are_exact() {
        let client = crate::cpu_client();
        for format in [Format::Nvfp4, Format::Mxfp8] {
            let case = ExactGemm::dense(&client, format, (5, 16, 2048), false).unwrap();
            assert!(case.expected.iter().any(|value| *value != 0.0));
            for value in &case.expected {
                assert!((value * 16.0).fract() == 0.0 && value.abs() < (1 << 20) as f32);
            }
        }
    }
}
