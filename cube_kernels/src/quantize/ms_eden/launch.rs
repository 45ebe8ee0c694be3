//! MS-EDEN requests and launches.

use cubecl::{prelude::*, server::Handle};

use super::{
    super::{
        check::check_position,
        packed_source::{PackedSource, SourcePlan},
        plan::behind_earlier,
        source::Source,
        target::TargetSpec,
        tile::{Grouping, ROWS, ShapeLaunch, map_tiles},
    },
    arguments::{
        EdenDrawLaunch, EdenInputsLaunch, EdenOutLaunch, EdenPackedLaunch, EdenScalesArgs,
        EdenStoredArgs, EdenValuesArgs,
    },
    kernel::{ms_eden_amax_kernel, ms_eden_kernel},
    plane_tile::OWN,
    position::{EdenPolicy, EdenTilesLaunch, TURNS},
    screen::screen,
    search::{Search, search_pair},
    transform::EdenTransform,
};
use crate::{
    BLOCK, BlockPosition, Nvfp4Error, RandomStream, StoredForm, Usage,
    capabilities::Capabilities,
    cube::{
        eden::LINES,
        philox::{Numbering, RandomLaunch},
    },
    launch::{buffer, multiprocessors, tile_grid, units, vector_size},
    memory::{address_type, allocate, check_memory},
    reference::{
        EDEN_AMAX_FACTOR, EDEN_BLOCK_FACTOR, EDEN_GROUP, eden_position, padding::padded_bound,
    },
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
    zeroed::zeros_of_step,
};

/// Source of MS-EDEN: a matrix or a quantized tensor, and the groups of its rows.
type GroupedSource<'a> = (Source<'a>, &'a Groups);

/// Access pattern of a kernel that loads a matrix.
#[derive(Debug, Clone, Copy)]
struct StoredElements {
    /// Elements per vectorized load.
    width: usize,
    kind: FloatKind,
    /// True if elements are loaded in words of two.
    words: bool,
}

impl StoredElements {
    /// Returns the vector length of a load, in items of [`elem`](Self::elem).
    fn items(self) -> usize {
        if self.words {
            self.width / 2
        } else {
            self.width
        }
    }

    fn elem(self) -> ElemType {
        match self.words {
            true => u32::elem_type_native(),
            false => self.kind.storage_type(),
        }
    }
}

/// A source as stored in memory.
enum Stored<'a> {
    Matrix(&'a Matrix, Groups),
    Packed(PackedSource<'a>),
}

impl<'a> Stored<'a> {
    fn new((source, groups): GroupedSource<'a>) -> Result<Self, Nvfp4Error> {
        Ok(match source {
            Source::Matrix(matrix) => Self::Matrix(matrix, groups.clone()),
            Source::Quantized { tensor, .. } => Self::Packed(PackedSource::even("source", tensor)?),
            Source::Activation { .. } => unreachable!("an activation is written first"),
        })
    }

    /// Returns the number of stored rows and their length.
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Matrix(matrix, _) => (matrix.rows, matrix.cols),
            Self::Packed(packed) => (packed.rows, packed.cols),
        }
    }

    /// Returns the groups of stored rows.
    fn groups(&self) -> &Groups {
        match self {
            Self::Matrix(_, groups) => groups,
            Self::Packed(packed) => &packed.groups,
        }
    }

    /// Returns how a kernel loads the elements of a matrix. A packed source has no elements and
    /// uses one fixed value.
    fn elements(&self, policy: &EdenPolicy) -> StoredElements {
        match self {
            Self::Matrix(matrix, _) => {
                let width = vector_size(matrix.dtype, matrix.cols);
                // A unit has this many lines at a time.
                let most = if policy.planes() && policy.across {
                    OWN
                } else {
                    width
                };
                StoredElements {
                    width: width.min(most),
                    kind: matrix.dtype,
                    words: policy.words,
                }
            }
            Self::Packed(_) => StoredElements {
                width: 1,
                kind: FloatKind::F32,
                words: false,
            },
        }
    }

    /// Returns the argument of a kernel that loads `elements` at a time.
    fn arg<F: Numeric, N: Size>(&self, elements: StoredElements) -> EdenStoredArgs<F, N> {
        match self {
            // SAFETY: the matrix was checked against its memory.
            Self::Matrix(matrix, _) => EdenStoredArgs::Matrix(unsafe {
                buffer(&matrix.handle, matrix.len() / elements.width)
            }),
            Self::Packed(packed) => EdenStoredArgs::Packed(packed.arg()),
        }
    }

    fn plan(&self) -> SourcePlan {
        match self {
            Self::Matrix(_, groups) => SourcePlan {
                per_row: false,
                swizzled: false,
                grouping: Grouping::of(groups),
            },
            Self::Packed(packed) => packed.plan,
        }
    }
}

/// Returns the amax of `source` after the transform of 128 along `usage`, in device memory: one
/// `f32`, or one per group of rows; 0 for an empty one. See
/// [`reference::ms_eden_amax`](crate::reference::ms_eden_amax).
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, if the groups do not fit, or if the
/// transform does not span 128 elements; also for groups with offsets that are packed along their
/// rows.
pub(in crate::quantize) fn ms_eden_amax(
    client: &Client,
    source: GroupedSource<'_>,
    usage: Usage,
    transform: &EdenTransform,
) -> Result<Handle, Nvfp4Error> {
    let geometry = Geometry::new(client, source, usage, transform, None)?;
    Ok(amax_of(client, &geometry, transform))
}

/// Computes [`ms_eden_amax`] of a matrix that [`can_screen`] accepts along and across its rows,
/// with a transform for each, in one read.
///
/// # Errors
/// See [`ms_eden_amax`].
pub(in crate::quantize) fn ms_eden_amax_pair(
    client: &Client,
    matrix: &Matrix,
    transforms: [&EdenTransform; 2],
) -> Result<[Handle; 2], Nvfp4Error> {
    let source = (Source::Matrix(matrix), &Groups::One);
    let rows = Geometry::new(client, source, Usage::Rowwise, transforms[0], None)?;
    let cols = Geometry::new(client, source, Usage::Columnwise, transforms[1], None)?;
    let screens = screen(client, matrix, transforms);
    let found = [zeros_of_step(client, 1), zeros_of_step(client, 1)];
    let search = |i: usize, geometry: &Geometry| Search {
        policy: geometry.policy,
        tiles: geometry.tiles(geometry.map(client, &found[i]), 0),
        tile_count: geometry.tile_count,
        screen: &screens[i],
        transform: transforms[i],
        amax: &found[i],
    };
    search_pair(client, matrix, [search(0, &rows), search(1, &cols)]);
    Ok(found)
}

/// [`ms_eden_amax`] for a source with known launch geometry.
fn amax_of(client: &Client, geometry: &Geometry, transform: &EdenTransform) -> Handle {
    let maxima = geometry.source.groups().count();
    let out = zeros_of_step(client, maxima);
    if geometry.tile_count == 0 {
        return out;
    }
    // SAFETY: this many values were allocated.
    let result = unsafe { buffer(&out, maxima) };
    let map = geometry.map(client, &out);
    let (count, dim, address) = geometry.launch();
    let signs = transform.arg(&out);
    let elements = geometry.source.elements(&geometry.policy);
    // SAFETY: the kernel masks every access by the shape.
    unsafe {
        ms_eden_amax_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            elements.items(),
            geometry.source.arg(elements),
            geometry.tiles(map, 0),
            result,
            signs,
            geometry.policy,
            elements.kind,
            elements.elem(),
        );
    }
    out
}

/// Quantizes `source` by MS-EDEN along `usage`, given the `amax` of its transformed values
/// ([`ms_eden_amax`]).
///
/// The result is the transformed matrix: K is padded to a multiple of 128, and its `amax` is the
/// one with which it is decoded. See [`reference::ms_eden`](crate::reference::ms_eden).
///
/// Each group of rows is quantized as a separate matrix with a separate amax. Only the indices of
/// random bits continue from group to group
/// ([`reference::ms_eden_at`](crate::reference::ms_eden_at)). Along [`Usage::Columnwise`] each
/// group is padded to a multiple of 128 rows. Tensors of [`Groups::Batch`] are then also a batch.
/// Those of [`Groups::Offsets`] are concatenated along the columns, like other NVFP4 tensors:
/// group `g` takes the elements from entry `g` of
/// [`GroupOffsets::aligned`](crate::moe::GroupOffsets::aligned)`(client, rows, 128)` on. There is
/// space for [`padded_bound`]`(rows, count, 128)` elements, and those after the
/// last group are not written.
///
/// # Errors
/// See [`ms_eden_amax`].
pub(in crate::quantize) fn ms_eden(
    client: &Client,
    source: GroupedSource<'_>,
    usage: Usage,
    target: &TargetSpec,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let (amax, transform) = (target.known_amax(), EdenTransform::of(target));
    let geometry = Geometry::new(client, source, usage, &transform, Some(target))?;
    let random = random_of(target);
    let (_, groups) = source;
    let maxima = groups.count();
    check_memory("amax", amax, maxima * 4)?;
    if geometry.tile_count == 0 {
        // For empty matrices the amax is 0, and so is the one for decoding.
        return Ok(result(client, source, usage, amax, target));
    }
    let out_amax = allocate(client, maxima * 4);
    let out = result(client, source, usage, &out_amax, target);
    let blocks = out.code_blocks();
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let amax_arg = unsafe { buffer(amax, maxima) };
    let map = geometry.map(client, amax);
    let words = out.scale_bytes() / 4;
    let values = match target.form {
        StoredForm::Bf16Unscaled => {
            EdenValuesArgs::Bf16Unscaled(unsafe { buffer(&out.codes, blocks * 2) })
        }
        form => {
            let scales = match form.has_tiles() {
                true => EdenScalesArgs::Swizzled(unsafe { buffer(&out.scales, words) }),
                false => EdenScalesArgs::Compact(unsafe { buffer(&out.scales, words / 2) }),
            };
            let codes = unsafe { buffer(&out.codes, blocks) };
            EdenValuesArgs::Packed(EdenPackedLaunch::new(codes, scales))
        }
    };
    let target_memory = EdenOutLaunch::new(values, unsafe { buffer(&out.amax, maxima) });
    let offset = match &target.offset {
        Some(offset) => unsafe { buffer(offset, 2) },
        // Not read.
        None => unsafe { buffer(amax, 1) },
    };
    let stream = RandomLaunch::of(random.key(), random.offset);
    let row_groups = out.blocks() * BLOCK / EDEN_GROUP;
    let (count, dim, address) = geometry.launch();
    let tiles = geometry.tiles(map, row_groups);
    let from = EdenInputsLaunch::new(amax_arg, EDEN_AMAX_FACTOR, EDEN_BLOCK_FACTOR);
    let earlier = match &geometry.earlier {
        Some(units) => unsafe { buffer(units, 1) },
        // Not read.
        None => unsafe { buffer(amax, 1) },
    };
    let position = geometry.position.into();
    let draw = EdenDrawLaunch::new(offset, stream, position, earlier, transform.arg(amax));
    let elements = geometry.source.elements(&geometry.policy);
    // SAFETY: the kernel masks every access by the shape.
    unsafe {
        ms_eden_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            elements.items(),
            geometry.source.arg(elements),
            tiles,
            from,
            target_memory,
            draw,
            geometry.policy,
            elements.kind,
            elements.elem(),
        );
    }
    Ok(out)
}

/// Returns the random stream of `target`.
///
/// # Panics
/// Panics if it is not quantized by MS-EDEN.
fn random_of(target: &TargetSpec) -> RandomStream {
    target.params.stream().expect("a tensor by MS-EDEN")
}

/// Allocates the result of [`ms_eden`], with undefined contents.
fn result(
    client: &Client,
    (source, groups): GroupedSource<'_>,
    usage: Usage,
    amax: &Handle,
    target: &TargetSpec,
) -> DeviceQuantized {
    let (rows, cols) = source.shape();
    let padded = |len: usize| len.next_multiple_of(EDEN_GROUP);
    let (shape, groups) = match (usage, groups) {
        (Usage::Rowwise, groups) => ((rows, padded(cols)), groups.clone()),
        (Usage::Columnwise, Groups::One) => ((padded(rows), cols), Groups::One),
        (Usage::Columnwise, &Groups::Batch(count)) => {
            ((count * padded(rows / count), cols), Groups::Batch(count))
        }
        (Usage::Columnwise, Groups::Offsets { count, .. }) => {
            ((padded_bound(rows, *count, EDEN_GROUP), cols), Groups::One)
        }
    };
    let layout = target.params.layout(shape, usage, target.form);
    DeviceQuantized::empty(client, layout, groups, amax)
}

/// Planes per SM for few tiles: three per scheduler. With more, the fixed work of each plane costs
/// more than it saves.
const PLANES_OF_SM: usize = 12;

/// Returns the number of planes that share a tile in a launch of `tiles` tiles, so that all SMs
/// have work: with few tiles the run time is that of one plane's work. Weights may have few tiles,
/// gradients have many. Always 1 on devices with E2M1 conversions (sm_100 and later), for which
/// ptxas spills registers.
fn planes_of_tile(client: &Client, policy: EdenPolicy, tiles: usize) -> usize {
    let is_shared =
        policy.planes() && policy.plain() && policy.packed && !policy.conversion.has_nearest();
    match PLANES_OF_SM * multiprocessors(client) / tiles.max(1) {
        2 | 3 if is_shared => 2,
        4.. if is_shared => TURNS,
        _ => 1,
    }
}

/// Launch geometry of either kernel.
struct Geometry<'a> {
    source: Stored<'a>,
    policy: EdenPolicy,
    /// Position of the result's rotation groups, counted in rotation groups.
    position: BlockPosition,
    /// Units of earlier groups of rows, one word.
    earlier: Option<Handle>,
    /// Tiles of 128 rows that restart at every group: those of the map.
    map_rows: usize,
    tile_rows: usize,
    tile_cols: usize,
    tile_count: usize,
    count: CubeCount,
    dim: CubeDim,
}

impl<'a> Geometry<'a> {
    fn new(
        client: &Client,
        source: GroupedSource<'a>,
        usage: Usage,
        transform: &EdenTransform,
        target: Option<&TargetSpec>,
    ) -> Result<Self, Nvfp4Error> {
        let across = match source.0 {
            Source::Quantized { tensor, .. } => usage != tensor.usage(),
            _ => usage == Usage::Columnwise,
        };
        let source = Stored::new(source)?;
        transform.check()?;
        let offset = target.and_then(|target| target.offset.as_ref());
        // RHT groups are whole tiles of scales.
        let form = target.map_or(StoredForm::Rows, |target| target.form);
        let swizzled = form.has_tiles();
        let unscaled = form == StoredForm::Bf16Unscaled;
        if let Some(offset) = offset {
            check_memory("offset", offset, 8)?;
        }
        let (rows, cols) = source.shape();
        let mut position = BlockPosition::default();
        let mut numbering = Numbering::Own;
        let mut earlier = None;
        if let Some(target) = target {
            let own = random_of(target).position;
            check_position(&own, source.groups())?;
            position = eden_position(&own)?;
            numbering = Numbering::of(&position);
            if let Some(before) = &target.earlier {
                // Counted in rotation groups.
                let unit = match across {
                    true => (EDEN_GROUP, cols),
                    false => (1, cols.div_ceil(EDEN_GROUP)),
                };
                let (units, behind) = behind_earlier(before, &position, source.groups(), unit)?;
                (numbering, earlier, position) = (Numbering::Behind, Some(units), behind);
            }
        }
        let map_rows = source.groups().units(rows, ROWS);
        let plan = source.plan();
        // Scales in 128x4 tiles are also written for lines that pad a tile.
        let tiles_of = |lines: usize| match swizzled {
            true => lines.div_ceil(ROWS) * (ROWS / LINES),
            false => lines.div_ceil(LINES),
        };
        let (tile_rows, tile_cols) = match (across, plan.grouping) {
            (true, _) => (map_rows, tiles_of(cols)),
            (false, Grouping::One) => (tiles_of(rows), cols.div_ceil(EDEN_GROUP)),
            (false, _) => (map_rows * (ROWS / LINES), cols.div_ceil(EDEN_GROUP)),
        };
        let tile_count = match rows * cols {
            0 => 0,
            _ => tile_rows * tile_cols,
        };
        let conversion = Capabilities::of(client).conversion;
        // Only planes support word loads.
        let words = conversion.has_ptx()
            && (across || target.is_none() || unscaled)
            && match &source {
                Stored::Matrix(matrix, _) => matrix.dtype.size() == 2 && cols.is_multiple_of(2),
                Stored::Packed(_) => false,
            };
        let policy = EdenPolicy {
            across,
            packed: matches!(source, Stored::Packed(_)),
            words,
            source: plan,
            swizzled,
            device_offset: offset.is_some(),
            numbering,
            redrawn_signs: transform.redrawn.is_some(),
            unscaled,
            planes_of_tile: 1,
            conversion,
        };
        let policy = EdenPolicy {
            planes_of_tile: planes_of_tile(client, policy, tile_count),
            ..policy
        };
        let (planes, units) = match policy.planes() {
            true => {
                let planes = policy.planes_of_cube().min(units(client) / 32);
                (planes, 32 * planes)
            }
            false => (1, units(client)),
        };
        let pieces = tile_count * policy.planes_of_tile;
        let (count, _) = tile_grid(client, pieces.div_ceil(planes));
        let dim = CubeDim::new_1d(units as u32);
        Ok(Self {
            source,
            policy,
            position,
            earlier,
            map_rows,
            tile_rows,
            tile_cols,
            tile_count,
            count,
            dim,
        })
    }

    fn launch(&self) -> (CubeCount, CubeDim, AddressType) {
        let address = address_type(self.tile_count * LINES * EDEN_GROUP);
        (self.count.clone(), self.dim, address)
    }

    fn shape(&self) -> ShapeLaunch {
        let (rows, cols) = self.source.shape();
        ShapeLaunch::new(rows, cols, self.source.groups().count(), self.tile_cols)
    }

    /// `row_groups` are the rotation groups per line of the result.
    fn tiles(&self, map: BufferArg, row_groups: usize) -> EdenTilesLaunch {
        EdenTilesLaunch::new(map, self.shape(), self.tile_rows, row_groups)
    }

    fn map(&self, client: &Client, unread: &Handle) -> BufferArg {
        let (shape, groups) = (self.source.shape(), self.source.groups());
        map_tiles(client, shape, groups, self.map_rows, EDEN_GROUP, unread)
    }
}
