//! Stochastic rounding by the logical position of a block: each shard of a matrix is quantized to
//! the bytes of its section of the quantized matrix, including random bits; by the oracle, on
//! CubeCL's CPU runtime or on a GPU.

use crate::support::quantize::{self, Quantize, TargetSpec};
use cubecl::prelude::*;
use half::bf16;
use nvfp4_formats::{
    Amax, AmaxGranularity, BlockPosition, Gap, Gaps, Hadamard, HadamardSize, Origin, QuantParams,
    QuantRounding, QuantizedTensor, RandomStream, Rounding, Usage,
    reference::{self, EdenParams},
};
use nvfp4_kernels::{
    moe::{EarlierGroups, GroupOffsets},
    tensor::{DeviceQuantized, Groups},
};

use crate::support::device::{offsets, upload};
use crate::support::inputs::{Kind, convert, values};
use crate::support::policies::{device_amax, read};

const STREAM: RandomStream = RandomStream::new(0x1234_5678_9abc_def0, 3, 0xffff_fffe);
const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
/// Elements per block.
const BLOCK: usize = 16;
/// Elements per transform of MS-EDEN.
const GROUP: usize = 128;

/// A matrix.
struct Whole {
    x: Vec<bf16>,
    rows: usize,
    cols: usize,
}

/// Shard of a matrix: its first row and column, and its numbers of rows and columns.
#[derive(Debug, Clone, Copy)]
struct Shard {
    start: (usize, usize),
    shape: (usize, usize),
}

impl Whole {
    fn new(rows: usize, cols: usize) -> Self {
        let x = convert(&values(Kind::Normal, rows * cols, 7));
        Self { x, rows, cols }
    }

    /// Returns the matrix, its second half by rows, its second half by columns, and a quarter.
    fn shards(&self) -> [Shard; 4] {
        let (rows, cols) = (self.rows / 2, self.cols / 2);
        let shard = |start, shape| Shard { start, shape };
        [
            shard((0, 0), (self.rows, self.cols)),
            shard((rows, 0), (rows, self.cols)),
            shard((0, cols), (self.rows, cols)),
            shard((rows, cols), (rows, cols)),
        ]
    }

    fn values(&self, shard: Shard) -> Vec<bf16> {
        let rows = (0..shard.shape.0).map(|row| {
            let start = (shard.start.0 + row) * self.cols + shard.start.1;
            &self.x[start..start + shard.shape.1]
        });
        rows.flatten().copied().collect()
    }

    /// Returns the stream of a shard whose K dimension is padded to `unit`.
    fn stream(&self, shard: Shard, usage: Usage, unit: usize) -> RandomStream {
        let (_, inner) = usage.stored_shape(self.rows, self.cols);
        let row_blocks = inner.next_multiple_of(unit) / BLOCK;
        let (row, element) = usage.stored_shape(shard.start.0, shard.start.1);
        STREAM.at(BlockPosition {
            first: (row * row_blocks + element / BLOCK) as u64,
            row_blocks: Some(row_blocks as u32),
            gaps: Gaps::None,
        })
    }

    /// Returns one amax of the whole matrix, or those of the stored rows of a shard.
    fn amax(&self, scope: AmaxGranularity, shard: Shard, usage: Usage) -> Amax {
        match (scope, usage) {
            (AmaxGranularity::PerTensor, _) => Amax::Tensor(reference::amax(&self.x)),
            (AmaxGranularity::PerRow, Usage::Rowwise) => {
                let all = reference::amax_rows(&self.x, self.rows, self.cols);
                Amax::PerRow(all[shard.start.0..][..shard.shape.0].to_vec())
            }
            (AmaxGranularity::PerRow, Usage::Columnwise) => {
                let all = reference::amax_cols(&self.x, self.rows, self.cols);
                Amax::PerRow(all[shard.start.1..][..shard.shape.1].to_vec())
            }
        }
    }
}

/// Asserts that `found` has the bytes of its section of `whole`.
fn assert_part(found: &QuantizedTensor, whole: &QuantizedTensor, shard: Shard, what: &str) {
    let (row, element) = whole.usage().stored_shape(shard.start.0, shard.start.1);
    let buffers = [
        (found.codes(), whole.codes(), 8),
        (found.scales(), whole.scales(), 1),
    ];
    for (found_bytes, whole_bytes, bytes) in buffers {
        let len = found.blocks() * bytes;
        let rows = (0..found.outer()).map(|r| {
            let first = ((row + r) * whole.blocks() + element / BLOCK) * bytes;
            &whole_bytes[first..first + len]
        });
        let expected: Vec<u8> = rows.flatten().copied().collect();
        assert!(found_bytes == expected, "{what}, {shard:?}");
    }
}

fn params(stream: RandomStream, hadamard: Option<Hadamard>) -> QuantParams {
    QuantParams {
        hadamard,
        ..QuantParams::nvfp4(Rounding::Stochastic(stream))
    }
}

/// Quantizes a shard by the oracle, with the amax of the whole matrix.
fn of_oracle(
    whole: &Whole,
    shard: Shard,
    usage: Usage,
    scope: AmaxGranularity,
    params: &QuantParams,
) -> QuantizedTensor {
    let (x, (rows, cols)) = (whole.values(shard), shard.shape);
    let amax = whole.amax(scope, shard, usage);
    reference::quantize(&x, rows, cols, usage, &amax, params, 0).unwrap()
}

/// Returns the transforms that a usage supports.
fn transforms(usage: Usage) -> Vec<Option<Hadamard>> {
    match usage {
        Usage::Rowwise => vec![None],
        Usage::Columnwise => vec![
            None,
            Some(Hadamard::default()),
            Some(Hadamard::seeded_with_size(HadamardSize::H32, 5)),
        ],
    }
}

/// Runs `check` on each shard of each kind of tensor, with the tensor of the whole matrix.
fn each_shard(
    whole: &Whole,
    check: impl Fn(Shard, Usage, AmaxGranularity, &QuantParams, &QuantizedTensor),
) {
    let all = whole.shards()[0];
    for usage in USAGES {
        for scope in [AmaxGranularity::PerTensor, AmaxGranularity::PerRow] {
            for hadamard in transforms(usage) {
                let expected = of_oracle(whole, all, usage, scope, &params(STREAM, hadamard));
                for shard in whole.shards() {
                    let unit = hadamard.map_or(BLOCK, |hadamard| hadamard.size().elements());
                    let stream = whole.stream(shard, usage, unit);
                    check(shard, usage, scope, &params(stream, hadamard), &expected);
                }
            }
        }
    }
}

#[test]
fn shards_of_the_oracle() {
    for (rows, cols) in [(64, 64), (192, 96), (320, 160)] {
        let whole = Whole::new(rows, cols);
        each_shard(&whole, |shard, usage, scope, params, expected| {
            let found = of_oracle(&whole, shard, usage, scope, params);
            let what = format!("{rows} x {cols} {usage:?} {scope:?} {:?}", params.hadamard);
            assert_part(&found, expected, shard, &what);
            // A shard that draws as a separate tensor has other bits.
            let own = QuantParams {
                rounding: QuantRounding::Elements(Rounding::Stochastic(STREAM)),
                ..*params
            };
            let own = of_oracle(&whole, shard, usage, scope, &own);
            assert_eq!(
                own.codes() == found.codes(),
                shard.start == (0, 0) && shard.shape == (rows, cols)
            );
        });
    }
}

fn host(client: &Client, found: &DeviceQuantized) -> QuantizedTensor {
    found.to_host(client, Origin::default()).unwrap()
}

#[test]
fn shards_of_kernels() {
    let client = client!("shards_of_kernels");
    let whole = Whole::new(192, 96);
    each_shard(&whole, |shard, usage, scope, params, expected| {
        let (rows, cols) = shard.shape;
        let x = upload(&client, &whole.values(shard), rows, cols);
        let amax = device_amax(&client, &[whole.amax(scope, shard, usage)]);
        let request = quantize::target(&amax, scope, *params);
        let what = format!("{usage:?} {scope:?} {:?}", params.hadamard);
        let found = quantize::quantize(&client, &x, &Groups::One, usage, &request).unwrap();
        assert_part(&host(&client, &found), expected, shard, &what);
        if scope == AmaxGranularity::PerTensor {
            // The tile kernel writes rowwise tensors together with columnwise ones. Rowwise ones
            // are not transformed.
            let mut beside = request.clone();
            beside.params.hadamard = None;
            let both = quantize::quantize_both(&client, &x, &Groups::One, &beside, &request);
            let (row, col) = both.unwrap();
            let found = match usage {
                Usage::Rowwise => row,
                Usage::Columnwise => col,
            };
            let what = format!("{what}, both");
            assert_part(&host(&client, &found), expected, shard, &what);
        } else if usage == Usage::Rowwise && shard.shape.1 == whole.cols {
            let copy = (*params).into();
            let found = quantize::quantize_per_token(&client, &x, &copy).unwrap();
            let what = format!("{what}, per token");
            assert_part(&host(&client, &found), expected, shard, &what);
        }
    });
}

#[test]
fn shards_by_ms_eden() {
    let client = client!("shards_by_ms_eden");
    let whole = Whole::new(2 * GROUP, 4 * GROUP);
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 77);
    for usage in USAGES {
        let (rows, cols) = (whole.rows, whole.cols);
        let amax = reference::ms_eden_amax(&whole.x, rows, cols, usage, &hadamard).unwrap();
        let by = |stream| EdenParams { hadamard, stream };
        let expected = reference::ms_eden(&whole.x, rows, cols, usage, amax, &by(STREAM)).unwrap();
        for shard in whole.shards() {
            let ((rows, cols), x) = (shard.shape, whole.values(shard));
            let stream = whole.stream(shard, usage, GROUP);
            let what = format!("MS-EDEN {usage:?}");
            let found = reference::ms_eden(&x, rows, cols, usage, amax, &by(stream)).unwrap();
            assert_part(&found, &expected, shard, &what);
            let matrix = upload(&client, &x, rows, cols);
            let amax = device_amax(&client, &[Amax::Tensor(amax)]);
            let found =
                quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard, stream).unwrap();
            assert_part(&host(&client, &found), &expected, shard, &what);
        }
        let within = STREAM.at(BlockPosition {
            first: 4,
            ..BlockPosition::default()
        });
        let refused = reference::ms_eden(&whole.x, rows, cols, usage, amax, &by(within));
        assert!(refused.unwrap_err().to_string().contains("multiples of 8"));
    }
}

/// Three concatenated pieces of a matrix along one axis: a rank's shards of queries, keys and
/// values.
struct Pieces<'a> {
    whole: &'a Whole,
    /// True for pieces of its rows, false for pieces of its columns.
    of_rows: bool,
    /// First row or column of each piece, and its length.
    pieces: [(usize, usize); 3],
}

impl Pieces<'_> {
    /// Returns each piece, and its start in the concatenated matrix.
    fn shards(&self) -> Vec<(Shard, usize)> {
        let mut own = 0;
        let shard = |&(start, len): &(usize, usize)| {
            let shard = match self.of_rows {
                true => Shard {
                    start: (start, 0),
                    shape: (len, self.whole.cols),
                },
                false => Shard {
                    start: (0, start),
                    shape: (self.whole.rows, len),
                },
            };
            own += len;
            (shard, own - len)
        };
        self.pieces.iter().map(shard).collect()
    }

    /// Returns the concatenated matrix.
    fn matrix(&self) -> Whole {
        let len: usize = self.pieces.iter().map(|(_, len)| len).sum();
        let (rows, cols) = match self.of_rows {
            true => (len, self.whole.cols),
            false => (self.whole.rows, len),
        };
        let mut x = vec![bf16::ZERO; rows * cols];
        for (shard, own) in self.shards() {
            let values = self.whole.values(shard);
            for (row, values) in values.chunks_exact(shard.shape.1).enumerate() {
                let (row, col) = match self.of_rows {
                    true => (own + row, 0),
                    false => (row, own),
                };
                x[row * cols + col..][..values.len()].copy_from_slice(values);
            }
        }
        Whole { x, rows, cols }
    }

    /// Returns the stream of the concatenated matrix.
    fn stream(&self, usage: Usage, unit: usize) -> RandomStream {
        let shards = self.shards();
        let stored_rows = self.of_rows == (usage == Usage::Rowwise);
        let size = if stored_rows { 1 } else { BLOCK };
        let gap = |i: usize| {
            let (start, len) = self.pieces[i - 1];
            Gap {
                at: (shards[i].1 / size) as u32,
                len: ((self.pieces[i].0 - start - len) / size) as u32,
            }
        };
        let gaps = [gap(1), gap(2)];
        let mut stream = self.whole.stream(shards[0].0, usage, unit);
        stream.position.gaps = match stored_rows {
            true => Gaps::Rows(gaps),
            false => Gaps::Blocks(gaps),
        };
        stream
    }

    /// Asserts that `found`, from the concatenated matrix, has the bytes of each piece of `all`,
    /// from the whole matrix.
    fn assert(&self, found: &QuantizedTensor, all: &QuantizedTensor, what: &str) {
        for (shard, own) in self.shards() {
            let usage = all.usage();
            let own = match self.of_rows {
                true => usage.stored_shape(own, 0),
                false => usage.stored_shape(0, own),
            };
            let at = usage.stored_shape(shard.start.0, shard.start.1);
            let (outer, inner) = usage.stored_shape(shard.shape.0, shard.shape.1);
            for row in 0..outer {
                let codes = |tensor: &QuantizedTensor, at: (usize, usize)| {
                    let first = (at.0 + row) * tensor.blocks() + at.1 / BLOCK;
                    let blocks = inner / BLOCK;
                    (
                        tensor.codes()[first * 8..][..blocks * 8].to_vec(),
                        tensor.scales()[first..][..blocks].to_vec(),
                    )
                };
                assert!(
                    codes(found, own) == codes(all, at),
                    "{what}, {shard:?}, row {row}"
                );
            }
        }
    }
}

/// Pieces that are adjacent in a rank's matrix, but not in the whole one, draw the same bits as in
/// the whole one; by the oracle, and by the kernels.
#[test]
fn pieces_with_gaps() {
    let client = client!("pieces_with_gaps");
    let whole = Whole::new(192, 160);
    let hadamard = Some(Hadamard::default());
    for of_rows in [false, true] {
        let pieces = Pieces {
            whole: &whole,
            of_rows,
            pieces: [(16, 32), (64, 16), (112, 48)],
        };
        let own = pieces.matrix();
        let (rows, cols) = (own.rows, own.cols);
        let x = upload(&client, &own.x, rows, cols);
        let all = whole.shards()[0];
        for (usage, hadamard) in [
            (Usage::Rowwise, None),
            (Usage::Columnwise, None),
            (Usage::Columnwise, hadamard),
        ] {
            let what = format!("{usage:?} {hadamard:?}, pieces of rows: {of_rows}");
            let scope = AmaxGranularity::PerTensor;
            let amax = whole.amax(scope, all, usage);
            let expected = of_oracle(&whole, all, usage, scope, &params(STREAM, hadamard));
            let by = params(pieces.stream(usage, BLOCK), hadamard);
            let found = reference::quantize(&own.x, rows, cols, usage, &amax, &by, 0).unwrap();
            pieces.assert(&found, &expected, &what);
            let amax = device_amax(&client, &[amax]);
            let request = quantize::target(&amax, scope, by);
            let found = quantize::quantize(&client, &x, &Groups::One, usage, &request).unwrap();
            pieces.assert(&host(&client, &found), &expected, &what);
            let mut beside = request.clone();
            beside.params.hadamard = None;
            let both = quantize::quantize_both(&client, &x, &Groups::One, &beside, &request);
            let (row, col) = both.unwrap();
            let found = match usage {
                Usage::Rowwise => row,
                Usage::Columnwise => col,
            };
            pieces.assert(&host(&client, &found), &expected, &format!("{what}, both"));
        }
    }
    // A separate row length has no meaning for rows with gaps.
    let mut stream = STREAM;
    stream.position.gaps = Gaps::Rows([Default::default(); 2]);
    let amax = device_amax(&client, &[Amax::Tensor(1.0)]);
    let request = quantize::target(&amax, AmaxGranularity::PerTensor, params(stream, None));
    let x = upload(&client, &whole.x, whole.rows, whole.cols);
    let refused = quantize::quantize(&client, &x, &Groups::One, Usage::Rowwise, &request);
    let error = refused.err().unwrap().to_string();
    assert!(
        error.contains("`position`") && error.contains("row_blocks"),
        "{error}"
    );
}

/// MS-EDEN, whose pieces consist of whole transforms along K.
#[test]
fn pieces_with_gaps_by_ms_eden() {
    let client = client!("pieces_with_gaps_by_ms_eden");
    let whole = Whole::new(6 * GROUP, 6 * GROUP);
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 77);
    for (of_rows, usage) in [
        (false, Usage::Rowwise),
        (false, Usage::Columnwise),
        (true, Usage::Columnwise),
    ] {
        let pieces = Pieces {
            whole: &whole,
            of_rows,
            pieces: [(0, GROUP), (2 * GROUP, GROUP), (5 * GROUP, GROUP)],
        };
        let what = format!("{usage:?}, pieces of rows: {of_rows}");
        let by = |stream| EdenParams { hadamard, stream };
        let (rows, cols) = (whole.rows, whole.cols);
        let amax = reference::ms_eden_amax(&whole.x, rows, cols, usage, &hadamard).unwrap();
        let expected = reference::ms_eden(&whole.x, rows, cols, usage, amax, &by(STREAM)).unwrap();
        let (own, stream) = (pieces.matrix(), pieces.stream(usage, GROUP));
        let (rows, cols) = (own.rows, own.cols);
        let found = reference::ms_eden(&own.x, rows, cols, usage, amax, &by(stream)).unwrap();
        pieces.assert(&found, &expected, &what);
        let matrix = upload(&client, &own.x, rows, cols);
        let amax = device_amax(&client, &[Amax::Tensor(amax)]);
        let found = quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard, stream).unwrap();
        pieces.assert(&host(&client, &found), &expected, &what);
    }
}

/// The groups of one rank, from some group on, draw the same bits as among all groups, whether the
/// host or the device knows their start.
#[test]
fn groups_begin_at_a_block() {
    let client = client!("groups_begin_at_a_block");
    let (sizes, cols, before) = ([40, 0, 33, 50], 64, 2);
    let whole = Whole::new(sizes.iter().sum(), cols);
    let first_row: usize = sizes[..before].iter().sum();
    let own = Shard {
        start: (first_row, 0),
        shape: (whole.rows - first_row, cols),
    };
    for usage in USAGES {
        let blocks_before: usize = match usage {
            Usage::Rowwise => first_row * cols / BLOCK,
            Usage::Columnwise => {
                let blocks = sizes[..before].iter().map(|rows| rows.div_ceil(BLOCK));
                blocks.sum::<usize>() * cols
            }
        };
        let made_behind = |shard: Shard, sizes: &[usize], stream, earlier| {
            let (rows, cols) = shard.shape;
            let x = upload(&client, &whole.values(shard), rows, cols);
            let Groups::Offsets { offsets, count } = offsets(&client, sizes) else {
                unreachable!("offsets");
            };
            let amax = device_amax(&client, &vec![Amax::Tensor(4.0); sizes.len()]);
            let request = quantize::target(
                &amax,
                AmaxGranularity::PerTensor,
                TargetSpec {
                    earlier,
                    ..TargetSpec::from(params(stream, None))
                },
            );
            let (row, col) = match usage {
                Usage::Rowwise => (Some(&request), None),
                Usage::Columnwise => (None, Some(&request)),
            };
            let groups = GroupOffsets { offsets, count };
            let made = quantize::quantize_side_by_side(&client, &x, &groups, row, col);
            made.map(|(row, col)| row.or(col).unwrap())
        };
        let made = |shard: Shard, sizes: &[usize], stream| made_behind(shard, sizes, stream, None);
        let all = made(whole.shards()[0], &sizes, STREAM).unwrap();
        let position = BlockPosition {
            first: blocks_before as u64,
            ..BlockPosition::default()
        };
        let found = made(own, &sizes[before..], STREAM.at(position)).unwrap();
        let (all_codes, codes) = (read(&client, &all.codes), read(&client, &found.codes));
        // Units of preceding groups, in device memory: for 1, 16, 32, 64 and 128 rows.
        let units = [1, 16, 32, 64, 128].map(|unit| {
            sizes[..before]
                .iter()
                .map(|rows| rows.div_ceil(unit) as u32)
                .sum()
        });
        let units: [u32; 5] = units;
        let units = client.create_from_slice(bytemuck::cast_slice(&units));
        let earlier = || Some(EarlierGroups::new(units.clone()).unwrap());
        let behind = made_behind(own, &sizes[before..], STREAM, earlier()).unwrap();
        assert_eq!(read(&client, &behind.codes), codes, "{usage:?}");
        let refused = made_behind(own, &sizes[before..], STREAM.at(position), earlier());
        assert!(refused.err().unwrap().to_string().contains("`earlier`"));
        match usage {
            Usage::Rowwise => assert_eq!(codes, all_codes[blocks_before * 8..]),
            Usage::Columnwise => {
                let start = (blocks_before / cols) * 8;
                let used: usize = sizes[before..]
                    .iter()
                    .map(|rows| rows.div_ceil(BLOCK))
                    .sum();
                for row in 0..cols {
                    let (own, all) = (row * found.blocks() * 8, row * all.blocks() * 8 + start);
                    assert_eq!(codes[own..][..used * 8], all_codes[all..][..used * 8]);
                }
            }
        }
        let rows_of_their_own = BlockPosition {
            row_blocks: Some(9),
            ..position
        };
        let refused = made(own, &sizes[before..], STREAM.at(rows_of_their_own));
        assert!(refused.err().unwrap().to_string().contains("no row_blocks"));
    }
}

/// MS-EDEN, which draws for 128 elements at once.
#[test]
fn groups_by_ms_eden_begin_where_the_device_says() {
    let client = client!("groups_by_ms_eden_begin_where_the_device_says");
    let (sizes, cols, before) = ([40usize, 0, 33, 50], 128, 2);
    let whole = Whole::new(sizes.iter().sum(), cols);
    let first_row: usize = sizes[..before].iter().sum();
    let own = Shard {
        start: (first_row, 0),
        shape: (whole.rows - first_row, cols),
    };
    let units = |unit: usize| {
        sizes[..before]
            .iter()
            .map(move |rows| rows.div_ceil(unit) as u32)
    };
    let earlier: [u32; 5] = [1, 16, 32, 64, 128].map(|unit| units(unit).sum());
    let earlier = client.create_from_slice(bytemuck::cast_slice(&earlier));
    let x = upload(&client, &whole.values(own), own.shape.0, cols);
    let groups = offsets(&client, &sizes[before..]);
    let amax = device_amax(&client, &vec![Amax::Tensor(4.0); sizes.len() - before]);
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 7);
    for usage in USAGES {
        let first = match usage {
            Usage::Rowwise => first_row * cols / BLOCK,
            Usage::Columnwise => units(GROUP).sum::<u32>() as usize * cols * GROUP / BLOCK,
        };
        let made = |stream: RandomStream, earlier| {
            let target = TargetSpec {
                earlier,
                ..TargetSpec::new(QuantParams::ms_eden(hadamard, stream)).amax(&amax)
            };
            let request = Quantize::new(&x).groups(&groups).along(usage, target);
            let made = request.launch(&client).unwrap().into_one();
            (read(&client, &made.codes), read(&client, &made.scales))
        };
        let position = BlockPosition {
            first: first as u64,
            ..BlockPosition::default()
        };
        let expected = made(STREAM.at(position), None);
        let earlier = EarlierGroups::new(earlier.clone()).unwrap();
        let found = made(STREAM, Some(earlier));
        // Memory after the last columnwise group keeps its contents.
        let used: usize = sizes[before..]
            .iter()
            .map(|rows| rows.div_ceil(GROUP))
            .sum();
        let (outer, used) = match usage {
            Usage::Rowwise => (own.shape.0, cols),
            Usage::Columnwise => (cols, used * GROUP),
        };
        let of = |bytes: &[u8], elements: usize| {
            let pitch = bytes.len() / outer;
            let used = used / elements;
            bytes
                .chunks_exact(pitch)
                .flat_map(|row| row[..used].to_vec())
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&found.0, 2), of(&expected.0, 2), "{usage:?}: codes");
        assert_eq!(
            of(&found.1, BLOCK),
            of(&expected.1, BLOCK),
            "{usage:?}: scales"
        );
        assert_ne!(
            made(STREAM, None).1,
            expected.1,
            "{usage:?}: the position counts"
        );
    }
}
