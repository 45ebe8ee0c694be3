//! Amax requests and launches.

use cubecl::{prelude::*, server::Handle};

use super::{
    super::{
        prologue::{Input, Prologue, PrologueOutArgs, run_prologue},
        tile::{self, Grouping, ShapeLaunch},
    },
    fold::{AmaxOutLaunch, AmaxPlan, STRIP},
    kernel::{AMAX_UNROLL, AmaxTilesLaunch, amax_kernel, amax_tiles_kernel},
    strips::{STRIP_WORDS, amax_lines_kernel, amax_strips_kernel},
};
use crate::{
    Hadamard, Nvfp4Error, Usage,
    capabilities::{conversion_of, is_cpu},
    cube::hadamard::{SignsLaunch, signs_of},
    launch::{
        Words, buffer, computed_tile_cubes, grid, resident_grid, resident_units, tile_cubes,
        tile_runs, units,
    },
    memory::address_type,
    tensor::{AmaxGranularity, FloatKind, Groups, Matrix},
    zeroed::{zeros_beside, zeros_of_step},
};

/// Amax values to compute in one read of a matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AmaxRequest {
    /// For rowwise tensors: per group, or per row (per token).
    pub rows: Option<AmaxGranularity>,
    /// For columnwise tensors: per group, or per column of each group; of the transformed values if
    /// there is a transform.
    pub cols: Option<(AmaxGranularity, Option<Hadamard>)>,
}

impl AmaxRequest {
    /// Requests amax values only for a tensor along `usage`. `hadamard` applies to a columnwise
    /// tensor, and has no effect on a rowwise one.
    pub fn along(usage: Usage, scope: AmaxGranularity, hadamard: Option<Hadamard>) -> Self {
        match usage {
            Usage::Rowwise => Self {
                rows: Some(scope),
                cols: None,
            },
            Usage::Columnwise => Self {
                rows: None,
                cols: Some((scope, hadamard)),
            },
        }
    }
}

impl AmaxRequest {
    /// Returns the plan of a kernel that computes the values while it writes a matrix of `kind` in
    /// whole words, if [strips](STRIP) suffice.
    pub(crate) fn of_written(&self, client: &Client, kind: FloatKind) -> Option<AmaxPlan> {
        let plan = self.plan(client, kind);
        (self.rows.is_some() && plan.has_strips()).then_some(plan)
    }

    /// Returns the numbers of requested values of a matrix of `rows` x `cols` in `groups`.
    pub(crate) fn lens(&self, groups: usize, rows: usize, cols: usize) -> [usize; 2] {
        let len = |scope, each| match scope {
            AmaxGranularity::PerTensor => groups,
            AmaxGranularity::PerRow => each,
        };
        [
            self.rows.map_or(0, |scope| len(scope, rows)),
            self.cols.map_or(0, |(scope, _)| len(scope, groups * cols)),
        ]
    }

    /// Returns the plan of an amax kernel for one group of rows, loading whole words of `kind`.
    fn plan(&self, client: &Client, kind: FloatKind) -> AmaxPlan {
        let hadamard = self.hadamard();
        AmaxPlan {
            rows: self.rows,
            cols: self.cols.map(|(scope, _)| scope),
            hadamard: hadamard.map(|hadamard| hadamard.size()),
            default_signs: hadamard == Some(Hadamard::default()),
            grouping: Grouping::One,
            elements: false,
            units: units(client),
            planes: !is_cpu(client),
            conversion: conversion_of(client),
            kind,
        }
    }

    /// Returns true if one amax of the untransformed matrix is all that is requested.
    pub(in crate::quantize) fn is_one_amax(&self) -> bool {
        let whole = AmaxGranularity::PerTensor;
        match (self.rows, self.cols) {
            (Some(scope), None) | (None, Some((scope, None))) => scope == whole,
            _ => false,
        }
    }

    /// Returns the transform of the columns.
    fn hadamard(&self) -> Option<Hadamard> {
        self.cols.and_then(|(_, hadamard)| hadamard)
    }

    /// Returns zeroed buffers of these lengths for the requested values.
    pub(crate) fn zeros(&self, client: &Client, lens: [usize; 2]) -> Amaxes {
        let [rows, cols] = zeros_beside(client, lens);
        Amaxes {
            rows: self.rows.map(|_| rows),
            cols: self.cols.map(|_| cols),
        }
    }

    /// Returns the signs of the transform.
    pub(crate) fn signs(&self) -> SignsLaunch {
        signs_of(self.hadamard())
    }
}

/// Amax values: `f32` in device memory.
#[derive(Debug, Clone, Default)]
pub struct Amaxes {
    /// For rowwise tensors: one per group, or per row.
    pub rows: Option<Handle>,
    /// For columnwise tensors: one per group, or `groups x cols`.
    pub cols: Option<Handle>,
}

impl Amaxes {
    /// Returns the output argument of a kernel, with these lengths. A buffer that was not requested
    /// is replaced by the other one, which the kernel then does not use in its place.
    ///
    /// # Panics
    /// Panics if neither was requested.
    pub(crate) fn arg(&self, [rows_len, cols_len]: [usize; 2]) -> AmaxOutLaunch {
        let one = self.rows.as_ref().or(self.cols.as_ref());
        let rows = one.expect("one is asked for");
        let cols = self.cols.as_ref().unwrap_or(rows);
        // SAFETY: this many values were allocated.
        unsafe { AmaxOutLaunch::new(buffer(rows, rows_len.max(1)), buffer(cols, cols_len.max(1))) }
    }
}

/// Computes several kinds of amax values in one read of `x`; 0 for empty ranges. See
/// [`reference::amax_rows`](crate::reference::amax_rows),
/// [`reference::amax_cols`](crate::reference::amax_cols) and
/// [`reference::amax_rht`](crate::reference::amax_rht). The amax of rows after the last group is
/// undefined.
///
/// # Errors
/// Returns an error if the groups do not fit, or if the memory of `x` is smaller than its shape.
pub fn amaxes(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    request: &AmaxRequest,
) -> Result<Amaxes, Nvfp4Error> {
    find(client, &Input::plain(x)?, groups, request, None)
}

/// Runs [`run_prologue`] and [`amaxes`] in one read of the inputs. Elements of rows after the last
/// group are undefined.
///
/// # Errors
/// See [`amaxes`] and [`run_prologue`].
pub fn run_prologue_with_amaxes(
    client: &Client,
    prologue: Prologue<'_>,
    groups: &Groups,
    request: &AmaxRequest,
) -> Result<(Matrix, Amaxes), Nvfp4Error> {
    let input = Input::new(prologue)?;
    if request.rows.is_none() && request.cols.is_none() {
        let found = find(client, &input, groups, request, None)?;
        return Ok((run_prologue(client, prologue)?, found));
    }
    let Matrix {
        rows, cols, dtype, ..
    } = input.matrix;
    let out = Matrix::empty(client, rows, cols, dtype);
    let found = find(client, &input, groups, request, Some(&out))?;
    Ok((out, found))
}

fn find(
    client: &Client,
    input: &Input,
    groups: &Groups,
    request: &AmaxRequest,
    written: Option<&Matrix>,
) -> Result<Amaxes, Nvfp4Error> {
    let Input {
        matrix: x, words, ..
    } = input;
    groups.check(x.rows)?;
    let lens = request.lens(groups.count(), x.rows, x.cols);
    let found = request.zeros(client, lens);
    if x.is_empty() || (request.rows.is_none() && request.cols.is_none()) {
        return Ok(found);
    }
    let tile_cols = x.cols.div_ceil(tile::cols(x.dtype));
    let row_tiles = groups.units(x.rows, tile::ROWS);
    let (count, dim) = match groups {
        Groups::One if input.is_plain() => tile_cubes(client, row_tiles * tile_cols),
        Groups::One => computed_tile_cubes(client, row_tiles * tile_cols),
        _ => tile_runs(client, row_tiles, tile_cols),
    };
    let plan = AmaxPlan {
        grouping: Grouping::of(groups),
        elements: words.elem.size() == 2,
        units: dim.x as usize,
        ..request.plan(client, x.dtype)
    };
    let out = found.arg(lens);
    if input.is_plain() && plan.has_strips() {
        launch_strips(client, x, out, request.signs(), plan);
        return Ok(found);
    }
    let span = tile::span(plan.hadamard);
    // Not read without a map.
    let unread = found.rows.as_ref().or(found.cols.as_ref());
    let unread = unread.expect("one is asked for");
    let map = tile::map_tiles(client, (x.rows, x.cols), groups, row_tiles, span, unread);
    let shape = ShapeLaunch::new(x.rows, x.cols, groups.count(), tile_cols);
    // SAFETY: the kernel masks every access by the shapes it is given.
    unsafe {
        amax_tiles_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(input.longest()),
            words.width,
            words.arg(),
            input.prologue_inputs(),
            written.map_or(PrologueOutArgs::None, |out| {
                PrologueOutArgs::Matrix(Words::of(out).arg())
            }),
            AmaxTilesLaunch::new(map, shape, row_tiles),
            out,
            request.signs(),
            plan,
            words.elem,
        );
    }
    Ok(found)
}

/// Cubes per SM with strips of two words: a unit takes 64 registers.
const WIDE_CUBES: usize = 4;
/// Minimum number of waves for strips of two words.
const WIDE_TURNS: usize = 2;

/// Cubes per SM of [`amax_lines_kernel()`]; twice as many are slower.
const LINE_CUBES: usize = 4;

/// Computes the amax values of `x`, whose memory was checked, from strips of its rows.
fn launch_strips(
    client: &Client,
    x: &Matrix,
    out: AmaxOutLaunch,
    signs: SignsLaunch,
    plan: AmaxPlan,
) {
    let blocks = x.rows.div_ceil(STRIP);
    let row_words = x.cols * x.dtype.size() / 4;
    // Strips of two words take fewer instructions per element, those of one word balance better:
    // the former need several waves. With an amax per column they also take registers.
    let wide = blocks * row_words / STRIP_WORDS;
    let is_wide =
        wide >= WIDE_TURNS * resident_units(client, WIDE_CUBES) && !plan.has_own_columns();
    let most = match is_cpu(client) || is_wide {
        true => STRIP_WORDS,
        false => 1,
    };
    let words = Words::of(x).of_at_most(most);
    let row_vectors = row_words / words.width;
    if !plan.is_whole() {
        // Along a row, the minimum number of cubes with a unit for each vector; down the rows, as
        // many as run at once.
        let units = units(client);
        let across = row_vectors.div_ceil(units);
        let dim = row_vectors.div_ceil(across).next_multiple_of(32).min(units);
        let down = resident_units(client, LINE_CUBES) / (across * dim);
        let count = CubeCount::Static(across as u32, down.clamp(1, blocks) as u32, 1);
        // SAFETY: the kernel stays below the rows and the vectors of each.
        unsafe {
            amax_lines_kernel::launch_unchecked(
                client,
                count,
                CubeDim::new_1d(dim as u32),
                address_type(x.len()),
                words.width,
                words.arg(),
                out,
                signs,
                x.rows,
                row_vectors,
                AmaxPlan { units, ..plan },
            );
        }
        return;
    }
    let (count, dim) = grid(client, blocks * row_vectors);
    // SAFETY: the kernel stays below the rows and the vectors of each.
    unsafe {
        amax_strips_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            words.width,
            words.arg(),
            out,
            signs,
            x.rows,
            row_vectors,
            plan,
        );
    }
}

/// Returns the amax of `x`, one `f32` in device memory; 0 for an empty matrix. Deterministic; NaN
/// and infinity propagate. See [`reference::amax`](crate::reference::amax).
///
/// # Errors
/// Returns an error if the memory of `x` is smaller than its shape.
pub fn amax_of_matrix(client: &Client, x: &Matrix) -> Result<Handle, Nvfp4Error> {
    x.check("x")?;
    let out = zeros_of_step(client, 1);
    if x.is_empty() {
        return Ok(out);
    }
    // The matrix is treated as one row; only its number of words matters.
    let flat = Matrix {
        rows: 1,
        cols: x.len(),
        ..x.clone()
    };
    let words = Words::of(&flat);
    let vectors = x.len() * x.dtype.size() / (words.elem.size() * words.width);
    let (count, dim) = resident_grid(client, vectors.div_ceil(AMAX_UNROLL));
    // SAFETY: the kernel stays below the number of vectors, and the memory was checked.
    unsafe {
        amax_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            words.width,
            words.arg(),
            buffer(&out, 1),
            vectors,
            words.elem.size() == 2,
            !is_cpu(client),
            conversion_of(client),
            x.dtype,
            words.elem,
        );
    }
    Ok(out)
}
