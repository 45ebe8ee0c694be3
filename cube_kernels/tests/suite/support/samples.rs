//! Compares every quantization of one matrix with the oracle: dense tensors, tiles, per token,
//! MXFP8, dequantization, and fused prologues. Bands of 32 rows or columns are compared byte for
//! byte: all of them in small matrices, some of them in large ones.

use super::device::{read_f32, upload};
use super::inputs::{Kind, convert, values};
use super::policies::{
    self, COMPACT, MAE, MSE, NEAREST, PLAIN, Policy, STOCHASTIC, STREAM, SWIZZLED, assert_bytes,
    col_policies, device_amax, per_token_policies, policy, quantize_per_token_both, row_policies,
    transformed,
};
use super::quantize::{self, AmaxRequest, EdenSource, Prologue, TargetSpec};
use cubecl::{prelude::*, server::Handle};
use half::bf16;
use nvfp4_formats::{
    Amax, AmaxGranularity, BlockScaling, Format, Hadamard, HadamardSize, QuantParams,
    QuantizedTensor, Usage,
    reference::{self, EDEN_GROUP, EdenParams, swizzle},
};
use nvfp4_kernels::tensor::{DeviceQuantized, FloatKind, Groups, Matrix};
use std::{borrow::Cow, ops::Range};

/// Number of rows or columns that are compared together: a multiple of every block, so that a band
/// can be quantized separately.
const BAND: usize = 32;
pub const ONE: &Groups = &Groups::One;
const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];

/// A matrix on host and device.
pub struct Sample {
    pub x: Vec<bf16>,
    pub matrix: Matrix,
    pub amax: f32,
}

impl Sample {
    pub fn new(client: &Client, (rows, cols): (usize, usize)) -> Self {
        // The period divides no row length, so that every row differs.
        let period = convert::<bf16>(&values(Kind::Heavy, 1_000_003.min(rows * cols), 1));
        let mut x = Vec::with_capacity(rows * cols);
        while x.len() < rows * cols {
            x.extend_from_slice(&period[..period.len().min(rows * cols - x.len())]);
        }
        // The last element is the largest, so that amax values are wrong if it was not read.
        let amax = 2.0 * reference::amax(&period);
        *x.last_mut().expect("there are elements") = bf16::from_f32(-amax);
        Self {
            matrix: upload(client, &x, rows, cols),
            amax,
            x,
        }
    }

    pub fn shape(&self) -> (usize, usize) {
        (self.matrix.rows, self.matrix.cols)
    }

    /// Returns the bands of stored lines along `usage` that are compared.
    fn bands(&self, usage: Usage) -> Vec<Band> {
        let (rows, cols) = self.shape();
        let (outer, inner) = usage.stored_shape(rows, cols);
        let count = outer.div_ceil(BAND);
        let chosen: Vec<usize> = if rows * cols <= 1 << 19 {
            (0..count).collect()
        } else {
            (0..5).map(|i| i * (count - 1) / 4).collect()
        };
        let band = |index: usize| {
            let first = index * BAND;
            let lines = BAND.min(outer - first);
            let x = match usage {
                Usage::Rowwise => self.x[first * cols..][..lines * cols].to_vec(),
                Usage::Columnwise => (self.x.chunks_exact(cols))
                    .flat_map(|row| row[first..first + lines].iter().copied())
                    .collect(),
            };
            let (rows, cols) = usage.stored_shape(lines, inner);
            Band {
                usage,
                first,
                x,
                rows,
                cols,
            }
        };
        chosen.into_iter().map(band).collect()
    }
}

/// Some stored lines of a matrix: rows, or columns.
struct Band {
    usage: Usage,
    /// First line.
    first: usize,
    x: Vec<bf16>,
    rows: usize,
    cols: usize,
}

impl Band {
    /// Quantizes the band by the oracle, with compact scales; without `amax` each line has a
    /// separate amax.
    fn quantize(&self, amax: Option<f32>, params: &QuantParams) -> QuantizedTensor {
        let (rows, cols, usage) = (self.rows, self.cols, self.usage);
        let amax = match (amax, usage, &params.hadamard) {
            (Some(amax), ..) => Amax::Tensor(amax),
            (None, Usage::Rowwise, _) => Amax::PerRow(reference::amax_rows(&self.x, rows, cols)),
            (None, Usage::Columnwise, None) => {
                Amax::PerRow(reference::amax_cols(&self.x, rows, cols))
            }
            (None, Usage::Columnwise, Some(hadamard)) => {
                Amax::PerRow(reference::amax_rht_cols(&self.x, rows, cols, hadamard))
            }
        };
        let (_, inner) = usage.stored_shape(rows, cols);
        let unit = params.unit();
        let blocks = inner.div_ceil(unit) * (unit / 16);
        let first = (self.first * blocks) as u64;
        reference::quantize(&self.x, rows, cols, usage, &amax, params, first).unwrap()
    }
}

/// Device memory of which sections are read; small buffers are read as a whole.
struct Memory<'a> {
    client: &'a Client,
    handle: &'a Handle,
    all: Option<Vec<u8>>,
}

impl<'a> Memory<'a> {
    fn new(client: &'a Client, handle: &'a Handle) -> Self {
        let all = (handle.size_in_used() < 1 << 25).then(|| policies::read(client, handle));
        Self {
            client,
            handle,
            all,
        }
    }

    fn get(&self, range: Range<usize>) -> Cow<'_, [u8]> {
        match &self.all {
            Some(all) => Cow::Borrowed(&all[range]),
            None => {
                let end = self.handle.size_in_used() - range.end as u64;
                let part = self.handle.clone().offset_start(range.start as u64);
                Cow::Owned(policies::read(self.client, &part.offset_end(end)))
            }
        }
    }
}

/// Asserts that the stored lines of `found` from `first` on equal `expected`, whose scales are
/// compact.
fn assert_lines(
    client: &Client,
    found: &DeviceQuantized,
    first: usize,
    expected: &QuantizedTensor,
    what: &str,
) {
    let blocks = expected.blocks();
    assert_eq!(found.blocks(), blocks, "{what}");
    let lines = first..first + expected.outer();
    let what = format!("{what}, lines from {first}");
    let codes = Memory::new(client, &found.codes);
    let range = lines.start * blocks * 8..lines.end * blocks * 8;
    assert_bytes(
        &codes.get(range),
        expected.codes(),
        &format!("{what}: codes"),
    );
    let scales = Memory::new(client, &found.scales);
    let place = |line, block| match found.layout.form.has_tiles() {
        false => line * blocks + block,
        true => swizzle::offset(line, block, blocks),
    };
    // Both layouts keep bands of rows of 128x4 tiles contiguous.
    let start = place(lines.start / 128 * 128, 0);
    let end = match found.layout.form.has_tiles() {
        false => lines.end * blocks,
        true => start + swizzle::padded_len(128, blocks),
    };
    let bytes = scales.get(start..end);
    let scales: Vec<u8> = lines
        .flat_map(|line| (0..blocks).map(move |block| (line, block)))
        .map(|(line, block)| bytes[place(line, block) - start])
        .collect();
    assert_bytes(&scales, expected.scales(), &format!("{what}: scales"));
}

/// Asserts the rows of a matrix from `first` on.
fn assert_rows(client: &Client, found: &Matrix, first: usize, expected: &[bf16], what: &str) {
    assert_eq!(found.dtype, FloatKind::Bf16);
    let memory = Memory::new(client, &found.handle);
    let start = first * found.cols * 2;
    let bytes = memory.get(start..start + expected.len() * 2);
    let expected = bytemuck::cast_slice(expected);
    assert_bytes(&bytes, expected, &format!("{what}, rows from {first}"));
}

/// Parameters of a quantized tensor along `usage`: one amax for all, or one per line.
struct Request {
    usage: Usage,
    policy: Policy,
    scope: AmaxGranularity,
    given: Option<f32>,
    amax: Handle,
}

impl Request {
    fn new(
        client: &Client,
        sample: &Sample,
        usage: Usage,
        copy: (Policy, AmaxGranularity),
    ) -> Self {
        let (policy, scope) = copy;
        let given = match scope {
            // Transformed values have a different amax; any value works.
            AmaxGranularity::PerTensor if policy.0.hadamard.is_some() => Some(2.0 * sample.amax),
            AmaxGranularity::PerTensor => Some(sample.amax),
            AmaxGranularity::PerRow => None,
        };
        let amax = match given {
            Some(amax) => device_amax(client, &[Amax::Tensor(amax)]),
            None => {
                let request = AmaxRequest::along(usage, scope, policy.0.hadamard);
                let found = quantize::amaxes(client, &sample.matrix, ONE, &request).unwrap();
                found.rows.or(found.cols).unwrap()
            }
        };
        Self {
            usage,
            policy,
            scope,
            given,
            amax,
        }
    }

    fn copy(&self) -> TargetSpec {
        quantize::target(&self.amax, self.scope, self.policy)
    }

    fn compare(&self, client: &Client, sample: &Sample, found: &DeviceQuantized) {
        let what = format!(
            "{:?} {:?} {:?} {:?}",
            sample.shape(),
            self.usage,
            self.scope,
            self.policy
        );
        for band in sample.bands(self.usage) {
            let expected = band.quantize(self.given, &self.policy.0);
            assert_lines(client, found, band.first, &expected, &what);
        }
    }
}

/// Checks blocks along rows and columns, made in one read if both are requested.
pub fn blocks(client: &Client, sample: &Sample) {
    let training = (
        (PLAIN, AmaxGranularity::PerTensor),
        (
            transformed(HadamardSize::H16, STOCHASTIC),
            AmaxGranularity::PerTensor,
        ),
    );
    let pairs = row_policies().into_iter().zip(col_policies());
    for (row, col) in pairs.chain([training]) {
        let row = Request::new(client, sample, Usage::Rowwise, row);
        let col = Request::new(client, sample, Usage::Columnwise, col);
        let found =
            quantize::quantize_both(client, &sample.matrix, ONE, &row.copy(), &col.copy()).unwrap();
        row.compare(client, sample, &found.0);
        col.compare(client, sample, &found.1);
    }
    let rows = [STOCHASTIC, NEAREST].map(|rounding| {
        let policy = policy(rounding, BlockScaling::Standard, COMPACT);
        let copy = (policy, AmaxGranularity::PerTensor);
        Request::new(client, sample, Usage::Rowwise, copy)
    });
    let cols = (col_policies().into_iter().skip(row_policies().len()))
        .map(|col| Request::new(client, sample, Usage::Columnwise, col));
    for request in rows.into_iter().chain(cols) {
        let copy = request.copy();
        let found = quantize::quantize(client, &sample.matrix, ONE, request.usage, &copy).unwrap();
        request.compare(client, sample, &found);
    }
}

pub fn tiles(client: &Client, sample: &Sample) {
    let amax = Amax::Tensor(sample.amax);
    let handle = device_amax(client, std::slice::from_ref(&amax));
    for scaling in [BlockScaling::Standard, BlockScaling::Headroom, MAE, MSE] {
        let layouts = [COMPACT, SWIZZLED];
        let found =
            quantize::quantize_tile_with(client, &sample.matrix, ONE, &handle, scaling, layouts);
        let (row, col) = found.unwrap();
        let what = format!("{:?} tiles {scaling:?}", sample.shape());
        for (usage, found) in USAGES.into_iter().zip([row, col]) {
            for band in sample.bands(usage) {
                let (rows, cols) = (band.rows, band.cols);
                let copies = reference::quantize_tile(&band.x, rows, cols, &amax, scaling);
                let (row, col) = copies.unwrap();
                let expected = match usage {
                    Usage::Rowwise => row,
                    Usage::Columnwise => col,
                };
                assert_lines(client, &found, band.first, &expected, &what);
            }
        }
    }
}

pub fn per_token(client: &Client, sample: &Sample) {
    let x = &sample.matrix;
    let compare = |usage, policy: Policy, found: &DeviceQuantized| {
        for band in sample.bands(usage) {
            let expected = band.quantize(None, &policy.0);
            let what = format!("{:?} per token {usage:?} {policy:?}", sample.shape());
            assert_lines(client, found, band.first, &expected, &what);
            let Amax::PerRow(maxima) = expected.amax() else {
                unreachable!()
            };
            let maxima: &[u8] = bytemuck::cast_slice(maxima);
            let start = band.first * 4;
            let found = Memory::new(client, &found.amax);
            assert_bytes(&found.get(start..start + maxima.len()), maxima, &what);
        }
    };
    for policy in per_token_policies() {
        let found = quantize::quantize_per_token(client, x, &policy.into()).unwrap();
        compare(Usage::Rowwise, policy, &found);
    }
    let row = policy(STOCHASTIC, BlockScaling::Standard, COMPACT);
    for col in [
        policy(NEAREST, MAE, COMPACT),
        transformed(HadamardSize::H16, STOCHASTIC),
    ] {
        let copies = quantize_per_token_both(client, x, ONE, row, col);
        compare(Usage::Rowwise, row, &copies.0);
        compare(Usage::Columnwise, col, &copies.1);
    }
}

/// Checks MXFP8 along both axes, from values and from NVFP4 along both axes, and its
/// dequantization.
pub fn mxfp8(client: &Client, sample: &Sample) {
    let assert_mx = |found: &DeviceQuantized, band: &Band, x: &[bf16], what: &str| {
        let expected =
            reference::mx_quantize(x, band.rows, band.cols, band.usage, Format::Mxfp8).unwrap();
        let (first, blocks) = (band.first, expected.blocks());
        let what = format!(
            "{:?} {what} to MXFP8 {:?} from {first}",
            sample.shape(),
            band.usage
        );
        for (found, expected, size) in [
            (&found.codes, expected.codes(), blocks * 32),
            (&found.scales, expected.scales(), blocks),
        ] {
            let start = first * size;
            let found = Memory::new(client, found);
            assert_bytes(&found.get(start..start + expected.len()), expected, &what);
        }
    };
    for usage in USAGES {
        let found = quantize::mx_quantize(client, &sample.matrix, usage, Format::Mxfp8).unwrap();
        for band in sample.bands(usage) {
            assert_mx(&found, &band, &band.x, "values");
        }
        let back = quantize::dequantize(client, &found, FloatKind::Bf16).unwrap();
        for band in sample.bands(Usage::Rowwise) {
            let packed =
                reference::mx_quantize(&band.x, band.rows, band.cols, usage, Format::Mxfp8)
                    .unwrap();
            let expected = convert::<bf16>(&reference::mx_dequantize(&packed));
            let what = format!("{:?} from MXFP8 {usage:?}", sample.shape());
            assert_rows(client, &back, band.first, &expected, &what);
        }
    }
    let amax = Amax::Tensor(sample.amax);
    for from in USAGES {
        let request = Request::new(client, sample, from, (PLAIN, AmaxGranularity::PerTensor));
        let packed =
            quantize::quantize(client, &sample.matrix, ONE, from, &request.copy()).unwrap();
        let values = |band: &Band| {
            let (rows, cols) = (band.rows, band.cols);
            let packed =
                reference::quantize(&band.x, rows, cols, from, &amax, &PLAIN.0, 0).unwrap();
            convert::<bf16>(&reference::dequantize(&packed))
        };
        for to in USAGES {
            let found =
                quantize::mx_requantize(client, &packed, to, Format::Mxfp8, FloatKind::Bf16)
                    .unwrap();
            for band in sample.bands(to) {
                assert_mx(&found, &band, &values(&band), &format!("NVFP4 {from:?}"));
            }
        }
        let back = quantize::dequantize(client, &packed, FloatKind::Bf16).unwrap();
        for band in sample.bands(Usage::Rowwise) {
            let what = format!("{:?} from NVFP4 {from:?}", sample.shape());
            assert_rows(client, &back, band.first, &values(&band), &what);
        }
    }
}

/// Checks MS-EDEN along both axes, of values and of NVFP4, with any amax; also the amax of small
/// matrices.
pub fn ms_eden(client: &Client, sample: &Sample) {
    let (rows, cols) = sample.shape();
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 5);
    let usage = Usage::Rowwise;
    let request = Request::new(client, sample, usage, (PLAIN, AmaxGranularity::PerTensor));
    let packed = quantize::quantize(client, &sample.matrix, ONE, usage, &request.copy()).unwrap();
    let dequantized = |x: &[bf16], rows: usize, cols: usize| {
        let amax = Amax::Tensor(sample.amax);
        let packed = reference::quantize_row(x, rows, cols, &amax, &NEAREST).unwrap();
        reference::dequantize(&packed)
    };
    let given = 2.0 * sample.amax;
    let handle = device_amax(client, &[Amax::Tensor(given)]);
    for (usage, of_packed) in USAGES
        .into_iter()
        .flat_map(|usage| [(usage, false), (usage, true)])
    {
        let what = format!("{rows}x{cols} MS-EDEN {usage:?}, packed: {of_packed}");
        let values = |x: &[bf16], rows, cols| match of_packed {
            true => dequantized(x, rows, cols),
            false => x.iter().map(|value| value.to_f32()).collect(),
        };
        let source = &match of_packed {
            true => packed.request(),
            false => sample.matrix.request(),
        };
        let amax = quantize::ms_eden_amax(client, source, usage, &hadamard).unwrap();
        if rows * cols <= 1 << 22 {
            let x = values(&sample.x, rows, cols);
            let expected = reference::ms_eden_amax(&x, rows, cols, usage, &hadamard).unwrap();
            assert_eq!(read_f32(client, &amax), expected, "{what}");
        }
        let found = quantize::ms_eden(client, source, usage, &handle, &hadamard, STREAM).unwrap();
        for band in sample.bands(usage) {
            let (rows, cols) = (band.rows, band.cols);
            let groups = usage.stored_shape(rows, cols).1.div_ceil(EDEN_GROUP);
            let x = values(&band.x, rows, cols);
            let first = (band.first * groups) as u64;
            let expected = reference::ms_eden_at(
                &x,
                rows,
                cols,
                usage,
                given,
                &EdenParams {
                    hadamard,
                    stream: STREAM,
                },
                first,
            )
            .unwrap();
            assert_lines(client, &found, band.first, &expected, &what);
            let amax = Amax::Tensor(read_f32(client, &found.amax));
            assert_eq!(&amax, expected.amax(), "{what}");
        }
    }
}

/// Checks SwiGLU and its gradients. The matrix is the concatenated gate and up.
pub fn prologues(client: &Client, sample: &Sample) {
    let (_, cols) = sample.shape();
    let width = cols / 2;
    if !width.is_multiple_of(16) {
        return;
    }
    let x = &sample.matrix;
    let grad = Matrix {
        cols: width,
        ..x.clone()
    };
    let backward = Prologue::SwiGluBackward {
        grad: &grad,
        gate_up: x,
    };
    for (name, source) in [
        ("SwiGLU", Prologue::SwiGlu(x)),
        ("SwiGLU backward", backward),
    ] {
        let what = format!("{:?} {name}", sample.shape());
        let written = quantize::run_prologue(client, source).unwrap();
        for band in sample.bands(Usage::Rowwise) {
            let first = band.first;
            let computed = match name {
                "SwiGLU" => reference::swiglu(&band.x, band.rows, width),
                _ => {
                    let grad = &sample.x[first * width..][..band.rows * width];
                    reference::swiglu_backward(grad, &band.x, band.rows, width)
                }
            };
            assert_rows(client, &written, first, &computed, &what);
        }
    }
}

/// All checks above.
pub const CHECKS: [fn(&Client, &Sample); 6] = [blocks, tiles, per_token, mxfp8, ms_eden, prologues];
