//! Which tile a shape takes, with the measurements behind it.

use std::fmt;

use cubecl::client::Client;

use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    tensor::FloatKind,
};

use super::{
    cublaslt::{self, Format, Problem},
    kernels::{sm90_w4a16, small_m},
    product::{Operand, OperandLayout},
    scheduler::GroupedDim,
    tiles::{Multiply, SM90_TILE_M, SM120_TILE_N, Sm90Tile, Sm120Tile, W4a16Tile},
};

/// Which kernels a product takes on Hopper and on consumer Blackwell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// `b` is decoded in registers; with the height of a band of tiles.
    W4a16(W4a16Tile, usize),
    /// Few rows, `b` decoded in registers by a kernel without the copy engine.
    SmallM,
    /// Packed operands are decoded to bf16 before the product; with the height of a band.
    DequantThenBf16(Sm90Tile, usize),
    /// Codes and scales go to block-scaled matrix instructions.
    BlockScaled(Sm120Tile),
}

impl Plan {
    /// The path of devices that it is made for; few rows of a packed `b` have the same kernel on both.
    pub(super) fn path(self) -> GemmBackend {
        match self {
            Self::W4a16(..) | Self::SmallM | Self::DequantThenBf16(..) => GemmBackend::Sm90Wgmma,
            Self::BlockScaled(_) => GemmBackend::Sm120BlockScaled,
        }
    }

    /// Whether its kernel reads bf16 operands in columns, where `a` and where `b` is stored so.
    pub(super) fn takes_columns(self, [a, b]: [bool; 2]) -> bool {
        match self {
            Self::DequantThenBf16(tile, _) => !b || tile.takes_columns(),
            Self::W4a16(..) | Self::SmallM | Self::BlockScaled(_) => !a && !b,
        }
    }

    /// Whether plain arithmetic stands in for an instruction, so that other devices can run the rest.
    pub(super) fn is_emulated(self) -> bool {
        matches!(self, Self::BlockScaled(shape) if shape.multiply == Multiply::Software)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::W4a16(tile, _) => {
                let (m, n) = (tile.rows_a, tile.rows_b());
                write!(
                    f,
                    "wgmma, packed `b` decoded in registers, tiles of {m} x {n}"
                )
            }
            Self::SmallM => write!(f, "few rows, packed `b` decoded in registers, mma.sync"),
            Self::DequantThenBf16(tile, _) => {
                let n = tile.n();
                write!(
                    f,
                    "wgmma, packed operands decoded to bf16 before, tiles of {SM90_TILE_M} x {n}"
                )
            }
            Self::BlockScaled(shape) => {
                let (m, n) = (shape.tile_m(), SM120_TILE_N);
                let by = match shape.multiply {
                    Multiply::Instruction => "block-scaled mma.sync on the codes",
                    Multiply::Software => "block-scaled mma.sync in software",
                };
                write!(f, "{by}, tiles of {m} x {n}")
            }
        }
    }
}

/// Microseconds that a cube takes for a tile with a contraction of 8192, the kernel that reads bf16.
///
/// Measured (H100, bf16 operands, TFLOP/s of 128 x 256 / 128 x 128 / 128 x 64): 8192 cubed 798 / 640 /
/// -, 4096 cubed 762 / 682 / 440, 2048 cubed 667 / 627 / 487, 256 x 8192 x 8192 (a narrow tile fills
/// more processors) 427 / 597 / 466, 128 x 8192 x 8192 216 / 312 / 329. Of 128 x 176: 0.74 of 128 x 256 (H200).
const DECODED: [(Sm90Tile, f64); 4] = [
    (Sm90Tile::N256, 89.0),
    (Sm90Tile::N176, 65.5),
    (Sm90Tile::N128, 49.0),
    (Sm90Tile::N64, 32.0),
];

/// The same for the kernel that decodes `b` in registers, of tiles that hold `rows_a` x `ways`.
///
/// Measured (H100, both operands packed, N = K = 8192, so many rows of `a` that each processor has one
/// tile, all of the product's own work included; the first with an earlier main loop). Groups, 8192 rows x 4096 x
/// 7168, microseconds with tiles of 256 / 128 rows: 32 equal groups 711 / 794, 32 of unequal size 996 / 1008.
const FUSED: [(usize, usize, f64); 5] = [
    (256, 1, 94.0),
    (128, 1, 52.0),
    (128, 2, 39.0),
    (64, 2, 27.0),
    (32, 4, 26.0),
];

/// Microseconds for decoding a row of 8192 elements to bf16: 2.56 bytes an element at 2.7 TB/s.
const DECODE_ROW: f64 = 0.0078;

/// Height of a band of tiles that run side by side, in tiles: with 132 processors and tiles of 128 x
/// 256, a band of 16 reads about as many rows of either operand at a time.
///
/// Measured (H100, 128 x 256, TFLOP/s for bands of 2 / 4 / 8 / 16): 8192 cubed 759 / 781 / 782 / 789,
/// 4096 cubed 755 / 762 / 762 / 767, 8192 x 14336 x 4096 705 / 758 / 767 / 771.
const BAND: usize = 16;

/// What [`GemmBackend::Cmma`] runs.
pub(super) const TILES: &str =
    "tiles decoded to bf16 in shared memory, 16x16x16 matrix instructions";

/// The kernels of Hopper for `a` times `b`, `m` x `n` with a contraction of `k` as stored, in `groups` groups.
pub fn plan(
    client: &Client,
    a: &Operand,
    b: &Operand,
    (m, n, k): (usize, usize, usize),
    grouping: GroupedDim,
    groups: usize,
) -> Plan {
    plan_of(
        processors(client),
        [a.storage(), b.storage()],
        (m, n, k),
        grouping,
        groups,
    )
}

/// Whether [`product`](super::product()) of two packed operands, `m` x `n` with a contraction of `k` as
/// stored, decodes both to bf16 before it multiplies: then an operand that nothing else reads may as well
/// be quantized to values ([`Storage::Bf16Unscaled`](crate::Storage::Bf16Unscaled)). The product has the same bits.
pub fn decodes(client: &Client, (m, n, k): (usize, usize, usize)) -> bool {
    let path = super::path_of(&Capabilities::of(client), n, k);
    path == GemmBackend::Sm90Wgmma && decodes_on(processors(client), (m, n, k))
}

/// [`decodes`] on Hopper with this many processors.
fn decodes_on(processors: usize, shape: (usize, usize, usize)) -> bool {
    let plan = plan_of(
        processors,
        [OperandLayout::Packed; 2],
        shape,
        GroupedDim::None,
        1,
    );
    matches!(plan, Plan::DequantThenBf16(..))
}

/// [`plan`] on either path that has plans.
///
/// # Errors
/// When the operands do not fit the path.
pub(super) fn plan_on(
    client: &Client,
    path: GemmBackend,
    a: &Operand,
    b: &Operand,
    shape: (usize, usize, usize),
    grouping: GroupedDim,
    groups: usize,
) -> Result<Plan, Nvfp4Error> {
    if path != GemmBackend::Sm120BlockScaled {
        return Ok(plan(client, a, b, shape, grouping, groups));
    }
    let packed = (a.is_packed(), b.is_packed());
    block_scaled(processors(client), packed, shape, grouping).ok_or_else(|| {
        Nvfp4Error::value(
            "a",
            "bf16 elements",
            "packed ones, or few rows and no groups",
        )
    })
}

fn processors(client: &Client) -> usize {
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    processors.unwrap_or(132) as usize
}

/// The plan of consumer Blackwell, or `None` where a product takes the portable kernel: contractions in
/// groups and bf16 operands, but for few rows of them. Not measured.
pub(super) fn block_scaled(
    processors: usize,
    (a_packed, b_packed): (bool, bool),
    (m, n, k): (usize, usize, usize),
    grouping: GroupedDim,
) -> Option<Plan> {
    match grouping {
        GroupedDim::None if b_packed && small_m::takes(m, k) => Some(Plan::SmallM),
        GroupedDim::None | GroupedDim::M if a_packed && b_packed => Some(Plan::BlockScaled(
            Sm120Tile::of(processors, m, n, Multiply::Instruction),
        )),
        _ => None,
    }
}

/// [`plan`] from what decides it: the number of processors, and how the operands are stored. A packed
/// `b` beside an `a` in columns is decoded before, whatever the shape: no other kernel reads columns.
pub(super) fn plan_of(
    processors: usize,
    [a, b]: [OperandLayout; 2],
    (m, n, k): (usize, usize, usize),
    grouping: GroupedDim,
    groups: usize,
) -> Plan {
    let decode = |operand: OperandLayout, rows: usize| match operand {
        OperandLayout::Packed => rows as f64 * DECODE_ROW,
        OperandLayout::KMajor | OperandLayout::MnMajor => 0.0,
    };
    // Along the contraction every group has an output of its own.
    let outputs = match grouping {
        GroupedDim::K => groups,
        GroupedDim::None | GroupedDim::M => 1,
    };
    let waves = |tiles: usize| tiles.div_ceil(processors) as f64;
    let decoded = DECODED.map(|(tile, cost)| {
        let tiles = outputs * m.div_ceil(SM90_TILE_M) * n.div_ceil(tile.n());
        let before = decode(a, m) + decode(b, n * groups);
        (
            Plan::DequantThenBf16(tile, BAND),
            waves(tiles) * cost + before,
        )
    });
    let fused = FUSED.map(|(rows_a, ways, cost)| {
        let tile = W4a16Tile { rows_a, ways };
        let tiles = m.div_ceil(rows_a) * n.div_ceil(tile.rows_b());
        (Plan::W4a16(tile, BAND), waves(tiles) * cost + decode(a, m))
    });
    let columns = [a, b].map(|operand| operand == OperandLayout::MnMajor);
    let cheapest = |plans: &[(Plan, f64)]| {
        let possible = plans.iter().filter(|plan| plan.0.takes_columns(columns));
        let best = possible.min_by(|x, y| x.1.total_cmp(&y.1));
        best.expect("there are tiles").0
    };
    let in_registers = b == OperandLayout::Packed && a != OperandLayout::MnMajor;
    match grouping {
        GroupedDim::None if in_registers && small_m::takes(m, k) => Plan::SmallM,
        _ if !in_registers || !sm90_w4a16::takes(k) => cheapest(&decoded),
        GroupedDim::K => cheapest(&decoded),
        // A tile at the end of a group is as narrow as its rows.
        GroupedDim::M => {
            let rows_a = if m.div_ceil(groups) < 256 { 128 } else { 256 };
            // Rows of tiles of one group side by side, and no more: they read the same rows of `b`, those of
            // other groups only push each other's rows of `a` out of the cache (H100, bands of 16 instead: 32
            // equal groups 682 us instead of 670, 128 1101 instead of 1055).
            let band = (m / (groups * rows_a)).clamp(1, BAND);
            Plan::W4a16(W4a16Tile { rows_a, ways: 1 }, band)
        }
        GroupedDim::None => cheapest(&[fused.as_slice(), decoded.as_slice()].concat()),
    }
}

/// The plan of other CUDA devices, or `None` where a product takes tiles ([`TILES`]): few rows with a packed
/// `b` have their own kernel where there are its instructions, from sm_80 on. The memory of the operands begins at multiples of 16 bytes.
pub(super) fn portable(
    capabilities: &Capabilities,
    b_packed: bool,
    (m, n, k): (usize, usize, usize),
    grouping: GroupedDim,
) -> Option<Plan> {
    let has_instructions = capabilities.compute_capability.is_some_and(|sm| sm >= 80);
    let takes = b_packed && n.is_multiple_of(2) && small_m::takes(m, k);
    (has_instructions && takes && grouping == GroupedDim::None).then_some(Plan::SmallM)
}

/// The path and the kernels that [`product`](super::product()) takes on this device for an `m` x `n` output
/// with a contraction of `k`, the operands packed or bf16 as `packed` says of `a` and `b`; with more
/// than one group, those of [`gemm_grouped_rows`](super::gemm_grouped_rows()). What `nvfp4 doctor
/// --shape` prints.
pub fn kernel_of(
    client: &Client,
    packed: (bool, bool),
    shape: (usize, usize, usize),
    groups: usize,
) -> (GemmBackend, String) {
    kernel_for(
        &Capabilities::of(client),
        processors(client),
        packed,
        shape,
        groups,
        &|problem| cublaslt::supports(client, problem),
    )
}

/// [`kernel_of`] from what decides it: what the device can do, the number of its processors, and what
/// cuBLASLt answers on it.
#[doc(hidden)]
pub fn kernel_for(
    capabilities: &Capabilities,
    processors: usize,
    packed: (bool, bool),
    (m, n, k): (usize, usize, usize),
    groups: usize,
    supports: &dyn Fn(&Problem) -> Result<(), Nvfp4Error>,
) -> (GemmBackend, String) {
    let grouping = if groups > 1 {
        GroupedDim::M
    } else {
        GroupedDim::None
    };
    let shape = (m, n, k);
    let path = super::path_of(capabilities, n, k);
    let plan = match path {
        GemmBackend::Sm90Wgmma => {
            let stored = [packed.0, packed.1].map(OperandLayout::in_rows);
            Some(plan_of(processors, stored, shape, grouping, groups))
        }
        GemmBackend::Sm120BlockScaled => block_scaled(processors, packed, shape, grouping),
        GemmBackend::CublasLt | GemmBackend::Cmma | GemmBackend::Scalar => None,
    };
    if let Some(plan) = plan {
        return (path, plan.to_string());
    }
    if path == GemmBackend::Scalar {
        return (path, "one unit for each output element".into());
    }
    let few_rows = portable(capabilities, packed.1, shape, grouping);
    let other = few_rows.map_or(TILES.into(), |plan| plan.to_string());
    // The library would have all of a packed `b` decoded for few bf16 rows.
    let is_weight_only = packed == (false, true) && few_rows.is_some();
    if path != GemmBackend::CublasLt || groups > 1 || is_weight_only {
        return (GemmBackend::Cmma, other);
    }
    let (format, kernel) = match packed {
        (true, true) => (Format::Nvfp4, cublaslt::NVFP4),
        _ => (Format::Bf16, cublaslt::BF16),
    };
    let problem = Problem {
        format,
        m,
        n,
        k,
        out: FloatKind::Bf16,
        alpha: packed != (false, false),
        bias: false,
        accumulate: false,
        alignment: 16,
    };
    match supports(&problem) {
        Ok(()) => (path, kernel.into()),
        Err(refusal) => (GemmBackend::Cmma, format!("{other} ({refusal})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dense(m: usize, n: usize, k: usize) -> Plan {
        plan_of(
            132,
            [OperandLayout::Packed; 2],
            (m, n, k),
            GroupedDim::None,
            1,
        )
    }

    /// The plans that were measured to be the fastest, on an H100.
    #[test]
    fn plans_of_measured_shapes() {
        let fused = |rows_a, ways| Plan::W4a16(W4a16Tile { rows_a, ways }, BAND);
        assert_eq!(dense(1, 8192, 8192), Plan::SmallM);
        assert_eq!(dense(16, 4096, 14336), Plan::SmallM);
        assert_eq!(dense(16, 4096, 14352), Plan::SmallM);
        assert_eq!(dense(32, 8192, 8192), fused(32, 4));
        assert_eq!(dense(64, 8192, 8192), fused(64, 2));
        assert_eq!(dense(96, 8192, 8192), fused(128, 2));
        assert_eq!(dense(128, 8192, 8192), fused(128, 2));
        assert_eq!(dense(128, 4096, 4096), fused(64, 2));
        assert_eq!(dense(256, 8192, 8192), fused(128, 1));
        assert_eq!(dense(512, 8192, 8192), fused(256, 1));
        assert_eq!(dense(2048, 2048, 2048), fused(256, 1));
        assert_eq!(
            dense(8192, 8192, 8192),
            Plan::DequantThenBf16(Sm90Tile::N256, BAND)
        );
        assert_eq!(
            dense(8192, 2112, 7168),
            Plan::DequantThenBf16(Sm90Tile::N176, BAND)
        );
    }

    /// Where both operands are decoded, the kernel behind that is the same for values of either of them.
    #[test]
    fn values_change_no_plan() {
        for shape in [
            (8192, 4096, 4096),
            (8192, 8192, 8192),
            (8192, 14336, 4096),
            (8192, 2112, 7168),
        ] {
            assert!(decodes_on(132, shape), "{shape:?}");
            let (packed, values) = (OperandLayout::Packed, OperandLayout::KMajor);
            for storages in [[values, packed], [packed, values], [values; 2]] {
                let plan = plan_of(132, storages, shape, GroupedDim::None, 1);
                let (m, n, k) = shape;
                assert_eq!(plan, dense(m, n, k), "{shape:?}, {storages:?}");
            }
        }
        // The last is a weight gradient of few tiles, where decoding both operands costs more than it gains.
        for shape in [(16, 4096, 4096), (512, 8192, 8192), (4096, 4096, 8192)] {
            assert!(!decodes_on(132, shape), "{shape:?}");
        }
    }

    /// Consumer Blackwell: codes go to the instruction, few rows of a packed weight have their own kernel,
    /// and what neither takes is left to the portable one.
    #[test]
    fn plans_of_consumer_blackwell() {
        let plan = |packed, shape, grouping| block_scaled(84, packed, shape, grouping);
        let tile = |strips| {
            Some(Plan::BlockScaled(Sm120Tile {
                strips,
                multiply: Multiply::Instruction,
            }))
        };
        let (both, dense) = ((true, true), GroupedDim::None);
        assert_eq!(plan(both, (4096, 4096, 4096), dense), tile(2));
        assert_eq!(plan(both, (64, 8192, 8192), dense), tile(1));
        assert_eq!(plan(both, (4096, 4096, 4096), GroupedDim::M), tile(2));
        assert_eq!(plan(both, (8, 8192, 8192), dense), Some(Plan::SmallM));
        assert_eq!(
            plan((false, true), (8, 8192, 8192), dense),
            Some(Plan::SmallM)
        );
        assert_eq!(plan(both, (8, 8192, 48), dense), Some(Plan::SmallM));
        assert_eq!(plan((false, true), (64, 8192, 8192), dense), None);
        assert_eq!(plan(both, (64, 8192, 8192), GroupedDim::K), None);
    }

    /// Other CUDA devices: few rows of a packed weight from sm_80 on, tiles otherwise.
    #[test]
    fn plans_of_other_devices() {
        let device = |compute_capability| Capabilities {
            device: "a GPU".into(),
            runtime: "cuda",
            compute_capability,
            conversion: crate::cube::codec::Conversion::Sm80,
            gemm: GemmBackend::Cmma,
        };
        let (few, dense) = (Some(Plan::SmallM), GroupedDim::None);
        let datacenter = device(Some(100));
        assert_eq!(portable(&datacenter, true, (1, 8192, 8192), dense), few);
        assert_eq!(portable(&datacenter, true, (16, 10, 96), dense), few);
        assert_eq!(portable(&datacenter, true, (17, 8192, 8192), dense), None);
        assert_eq!(portable(&datacenter, true, (1, 8192, 48), dense), few);
        assert_eq!(portable(&datacenter, true, (1, 9, 8192), dense), None);
        assert_eq!(portable(&datacenter, false, (1, 8192, 8192), dense), None);
        assert_eq!(
            portable(&datacenter, true, (1, 8192, 8192), GroupedDim::M),
            None
        );
        assert_eq!(
            portable(&device(Some(80)), true, (1, 8192, 8192), dense),
            few
        );
        assert_eq!(
            portable(&device(Some(75)), true, (1, 8192, 8192), dense),
            None
        );
        assert_eq!(portable(&device(None), true, (1, 8192, 8192), dense), None);
    }

    /// What the fused kernel cannot read takes the other one.
    #[test]
    fn plans_of_other_operands() {
        let is_decoded = |plan| matches!(plan, Plan::DequantThenBf16(..));
        assert!(is_decoded(dense(64, 8192, 48)));
        let (packed, columns) = (OperandLayout::Packed, OperandLayout::MnMajor);
        let shape = (64, 8192, 8192);
        let bf16 = plan_of(
            132,
            [packed, OperandLayout::KMajor],
            shape,
            GroupedDim::None,
            1,
        );
        assert!(is_decoded(bf16));
        let beside = plan_of(132, [columns, packed], shape, GroupedDim::None, 1);
        assert!(is_decoded(beside));
        let depth = (4096, 4096, 8192);
        let depth = plan_of(132, [packed; 2], depth, GroupedDim::K, 8);
        assert!(is_decoded(depth));
        let rows = (8192, 4096, 7168);
        let rows = plan_of(132, [packed; 2], rows, GroupedDim::M, 64);
        assert_eq!(
            rows,
            Plan::W4a16(
                W4a16Tile {
                    rows_a: 128,
                    ways: 1
                },
                1
            )
        );
        // 176 columns are no multiple of 64: those tiles are for a `b` in rows.
        let narrow = |b| plan_of(132, [columns, b], (8192, 2112, 7168), GroupedDim::None, 1);
        assert_eq!(
            narrow(OperandLayout::KMajor),
            Plan::DequantThenBf16(Sm90Tile::N176, BAND)
        );
        assert_eq!(narrow(columns), Plan::DequantThenBf16(Sm90Tile::N128, BAND));
    }
}
