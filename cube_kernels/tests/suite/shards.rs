//! Stochastic rounding by the logical position of a block: each shard of a matrix is quantized to
//! the bytes of its part of the quantized matrix, random bits included; by the oracle, on CubeCL's
//! CPU runtime or on a GPU.

use cubecl::prelude::*;
use half::bf16;
use nvfp4_kernels::{
    Amax, BlockPosition, Hadamard, HadamardSize, Nvfp4Params, Origin, QuantizedTensor,
    RandomStream, Rounding, Usage,
    moe::GroupOffsets,
    quantize::{self, QuantRequest},
    reference::{self, EdenParams, EdenTarget},
    tensor::{AmaxGranularity, DeviceQuantized, Groups},
};

use crate::support::device::{offsets, upload};
use crate::support::inputs::{Kind, convert, values};
use crate::support::policies::{device_amax, read};

const STREAM: RandomStream = RandomStream::new(0x1234_5678_9abc_def0, 3, 0xffff_fffe);
const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
/// Elements of a block.
const BLOCK: usize = 16;
/// Elements of a transform of MS-EDEN.
const GROUP: usize = 128;
const TARGET: EdenTarget = EdenTarget::Backward;

/// A matrix.
struct Whole {
    x: Vec<bf16>,
    rows: usize,
    cols: usize,
}

/// Part of a matrix: its first row and column, its rows and columns.
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

    /// The matrix, its second half by rows, its second half by columns, and a quarter.
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

    /// The stream of a shard whose contraction is padded to `unit`.
    fn stream(&self, shard: Shard, usage: Usage, unit: usize) -> RandomStream {
        let (_, inner) = usage.stored_shape(self.rows, self.cols);
        let row_blocks = inner.next_multiple_of(unit) / BLOCK;
        let (row, element) = usage.stored_shape(shard.start.0, shard.start.1);
        STREAM.at(BlockPosition {
            first: (row * row_blocks + element / BLOCK) as u64,
            row_blocks: Some(row_blocks as u32),
        })
    }

    /// One amax, of the whole matrix, or those of the stored rows of a shard.
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

/// `found` has the bytes of its part of `whole`.
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

fn params(stream: RandomStream, hadamard: Option<Hadamard>) -> Nvfp4Params {
    Nvfp4Params {
        hadamard,
        ..Nvfp4Params::new(Rounding::Stochastic(stream))
    }
}

/// A shard by the oracle, with the amax of the whole matrix.
fn of_oracle(
    whole: &Whole,
    shard: Shard,
    usage: Usage,
    scope: AmaxGranularity,
    params: &Nvfp4Params,
) -> QuantizedTensor {
    let (x, (rows, cols)) = (whole.values(shard), shard.shape);
    let amax = whole.amax(scope, shard, usage);
    reference::quantize(&x, rows, cols, usage, &amax, params, 0).unwrap()
}

/// The transforms that a usage has.
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

/// Runs `check` on each shard of each kind of tensor, given the tensor of the whole matrix.
fn each_shard(
    whole: &Whole,
    check: impl Fn(Shard, Usage, AmaxGranularity, &Nvfp4Params, &QuantizedTensor),
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
            // A shard that draws as a tensor of its own has other bits.
            let own = Nvfp4Params {
                rounding: Rounding::Stochastic(STREAM),
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
        let request = QuantRequest {
            amax: &amax,
            scope,
            copy: (*params).into(),
        };
        let what = format!("{usage:?} {scope:?} {:?}", params.hadamard);
        let found = quantize::quantize(&client, &x, &Groups::One, usage, &request).unwrap();
        assert_part(&host(&client, &found), expected, shard, &what);
        if scope == AmaxGranularity::PerTensor {
            // The kernel of tiles makes rowwise tensors beside columnwise ones. Rowwise ones are
            // not transformed.
            let mut beside = request.clone();
            beside.copy.hadamard = None;
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
        let by = |stream| EdenParams {
            hadamard,
            target: TARGET,
            stream,
        };
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
                quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard, TARGET, stream)
                    .unwrap();
            assert_part(&host(&client, &found), &expected, shard, &what);
        }
        let within = STREAM.at(BlockPosition {
            first: 4,
            row_blocks: None,
        });
        let refused = reference::ms_eden(&whole.x, rows, cols, usage, amax, &by(within));
        assert!(refused.unwrap_err().to_string().contains("multiples of 8"));
    }
}

/// The groups of one rank, from some group on, draw what they draw among all groups.
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
        let made = |shard: Shard, sizes: &[usize], stream| {
            let (rows, cols) = shard.shape;
            let x = upload(&client, &whole.values(shard), rows, cols);
            let Groups::Offsets { offsets, count } = offsets(&client, sizes) else {
                unreachable!("offsets");
            };
            let amax = device_amax(&client, &vec![Amax::Tensor(4.0); sizes.len()]);
            let request = QuantRequest {
                amax: &amax,
                scope: AmaxGranularity::PerTensor,
                copy: params(stream, None).into(),
            };
            let (row, col) = match usage {
                Usage::Rowwise => (Some(&request), None),
                Usage::Columnwise => (None, Some(&request)),
            };
            let groups = GroupOffsets { offsets, count };
            let made = quantize::quantize_side_by_side(&client, &x, &groups, row, col);
            made.map(|(row, col)| row.or(col).unwrap())
        };
        let all = made(whole.shards()[0], &sizes, STREAM).unwrap();
        let position = BlockPosition {
            first: blocks_before as u64,
            row_blocks: None,
        };
        let found = made(own, &sizes[before..], STREAM.at(position)).unwrap();
        let (all_codes, codes) = (read(&client, &all.codes), read(&client, &found.codes));
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
