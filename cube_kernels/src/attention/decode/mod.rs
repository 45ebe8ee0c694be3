//! Decoding: attention of a few new tokens per sequence over a cache of keys and values.
//!
//! The lengths of the sequences are in device memory, and the cache has a fixed capacity: no shape
//! and no argument of a launch depends on the length of a sequence, so a captured graph works for
//! every step. [`decode`] writes the new keys and values to the cache and attends to them in the
//! same launch. The keys of a sequence are split into runs (split-KV); the cube that finishes the
//! last run sums the partial results. [`append`] only writes, for prompts, whose attention is
//! [`forward`](super::forward).
//!
//! Results are bit-identical to [`reference::attention`](crate::reference::attention) on every
//! device, except with matrix instructions: those of CUDA GPUs, if queries and the cache have the
//! same 16-bit type, the head size is a multiple of 16 up to 128, the scale is positive, and a tile
//! fits in a cube's shared memory. Results are then within rounding of the reference, and a sequence
//! has the same bits in any batch.

mod append;
#[cfg(feature = "proof")]
pub(crate) mod instances;
mod kernel;
mod merge;
mod mma;
mod mma_merge;
mod plan;
mod run;
mod tile;

use cubecl::{client::Client, ir::ElemType, ir::UIntKind, prelude::*, server::Handle};

use self::append::{CacheShapeLaunch, NewTokensLaunch, append_kernel};
use self::kernel::decode_run_kernel;
use self::merge::DecodeOutputLaunch;
use self::mma::decode_mma_kernel;
use self::mma_merge::MmaOutputLaunch;
use self::plan::{DecodePlan, WARPS};
use super::{Heads, MAX_HEAD, MAX_TOKENS, Rope, TokenSequences, scalar};
use crate::{
    AttentionParams, Nvfp4Error,
    capabilities::{conversion_of, is_cpu, overlaps_kernels},
    launch::{buffer, grid, units},
    memory::{address_type, allocate, check_memory, is_aligned},
    reference::attention::{DECODE_TILE, decode_splits},
    tensor::FloatKind,
    zeroed::counters,
};

pub use plan::CacheKind;

/// Units per team on a GPU.
const UNITS: usize = 128;

/// Smallest number of queries of a team, if the cube has that many. With one query per team, cubes
/// of four would have so many units that an SM had registers for one cube instead of two.
const ROWS_OF_TEAM: usize = 2;

/// Keys and values of a batch of sequences, `[batch, capacity, kv_heads, head]` each, in device
/// memory.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// Keys.
    pub k: Handle,
    /// Values.
    pub v: Handle,
    /// Number of sequences.
    pub batch: usize,
    /// Largest number of tokens per sequence.
    pub capacity: usize,
    /// Number of heads of keys and values.
    pub kv_heads: usize,
    /// Elements per head, a multiple of 8.
    pub head: usize,
    /// Storage of elements.
    pub kind: CacheKind,
    /// Scales of keys and values, by which E4M3 elements are multiplied. 1 for other types.
    pub scales: [f32; 2],
}

impl KvCache {
    fn len(&self) -> usize {
        self.batch * self.capacity * self.kv_heads * self.head
    }
}

/// New tokens, `time` per sequence, one sequence after another, with padding after each sequence's
/// tokens.
#[derive(Debug, Clone)]
pub struct NewTokens<'a> {
    /// Queries.
    pub q: Heads,
    /// Keys.
    pub k: Heads,
    /// Values.
    pub v: Heads,
    /// Number of tokens of each sequence in the cache: `u32[batch]`. Tokens beyond the cache's
    /// capacity are neither written nor attended to.
    pub starts: &'a Handle,
    /// Number of new tokens of each sequence without padding: `u32[batch]`.
    pub counts: &'a Handle,
    /// Rotation of queries and keys, if any.
    pub rope: Option<&'a Rope>,
}

impl NewTokens<'_> {
    fn time(&self, cache: &KvCache) -> usize {
        self.q.tokens / cache.batch.max(1)
    }

    fn check(&self, cache: &KvCache) -> Result<(), Nvfp4Error> {
        let Self { q, k, v, .. } = self;
        q.check("q")?;
        k.check("k")?;
        v.check_like("v", "k", k)?;
        k.check_type("k", "q", q)?;
        let expected = [q.tokens, cache.kv_heads, cache.head];
        if k.shape() != expected || q.head != cache.head {
            return Err(Nvfp4Error::shape(
                "k",
                format!("{:?} beside heads of {} in `q`", k.shape(), q.head),
                format!("{expected:?}, as the cache has it"),
            ));
        }
        if !q.heads.is_multiple_of(k.heads) {
            return Err(Nvfp4Error::shape(
                "k",
                format!("{} heads", k.heads),
                format!("a divisor of {}, the heads of `q`", q.heads),
            ));
        }
        if !cache.head.is_multiple_of(8) || cache.head > MAX_HEAD {
            return Err(Nvfp4Error::shape(
                "cache",
                format!("heads of {}", cache.head),
                format!("a multiple of 8, at most {MAX_HEAD}"),
            ));
        }
        let tokens = cache.batch * cache.capacity;
        if cache.batch == 0 || cache.batch > u16::MAX as usize || tokens > MAX_TOKENS {
            return Err(Nvfp4Error::shape(
                "cache",
                format!("{} sequences of {} tokens", cache.batch, cache.capacity),
                format!(
                    "1 to {} sequences, and at most {MAX_TOKENS} tokens",
                    u16::MAX
                ),
            ));
        }
        TokenSequences::Equal(cache.batch).check("q", q.tokens)?;
        for scale in cache.scales {
            if !(scale > 0.0 && scale.is_finite() && (1.0 / scale).is_finite()) {
                return Err(Nvfp4Error::value(
                    "cache.scales",
                    scale.to_string(),
                    "positive numbers whose reciprocals are finite",
                ));
            }
        }
        let bytes = cache.len() * cache.kind.element(q.dtype);
        check_memory("cache.k", &cache.k, bytes)?;
        check_memory("cache.v", &cache.v, bytes)?;
        if !is_aligned(&cache.k) || !is_aligned(&cache.v) {
            let found = "memory that does not begin at a multiple of 16 bytes";
            return Err(Nvfp4Error::value("cache", found, "memory that does"));
        }
        check_memory("starts", self.starts, cache.batch * 4)?;
        check_memory("counts", self.counts, cache.batch * 4)?;
        match self.rope {
            Some(rope) => rope.check(q, TokenSequences::Equal(q.tokens.max(1))),
            None => Ok(()),
        }
    }
}

/// Writes the new values and the new keys, rotated by their positions, to the cache, and the
/// rotated queries to `queries`, contiguous `[tokens, heads, head]`. A position beyond the tables
/// is rotated like their last one.
///
/// # Errors
/// Returns an error if shapes or types do not fit, or memory is too small.
pub fn append(
    client: &Client,
    new: &NewTokens<'_>,
    cache: &KvCache,
    queries: &Heads,
) -> Result<(), Nvfp4Error> {
    new.check(cache)?;
    queries.check_like("queries", "q", &new.q)?;
    if new.q.tokens == 0 {
        return Ok(());
    }
    let plan = plan(client, new, cache, None);
    let vectors = new.q.tokens * (new.q.heads + cache.kv_heads) * cache.head / plan.width;
    let (cubes, dim) = grid(client, vectors);
    let elements = cache.len() / plan.width;
    // SAFETY: everything was checked against its memory; the kernel stays below tokens, room and
    // positions whatever the starts and counts are.
    unsafe {
        append_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            indices(new, cache),
            plan.width,
            tokens(new, cache),
            buffer(&cache.k, elements),
            buffer(&cache.v, elements),
            shape(new, cache, None),
            buffer(&queries.handle, queries.span()),
            plan,
            new.q.dtype.storage_type(),
            cache_type(cache, new.q.dtype),
        );
    }
    Ok(())
}

/// Writes the new keys and values to the cache like [`append`], and returns the attention of the
/// new queries over all tokens of their sequences: contiguous `[tokens, heads, head]` in the type
/// of `q`, 0 for padding. A query sees no later token. Meant for few new tokens: the keys are read
/// once per eight queries.
///
/// # Errors
/// Returns the errors of [`append`], and an error if a parameter is out of range or does not
/// describe a causal softmax without an additional score.
pub fn decode(
    client: &Client,
    new: &NewTokens<'_>,
    cache: &KvCache,
    params: &AttentionParams,
) -> Result<Heads, Nvfp4Error> {
    new.check(cache)?;
    params.check()?;
    if !params.causal || params.quiet_softmax {
        return Err(Nvfp4Error::value(
            "params",
            format!("{params:?}"),
            "a causal softmax that is not quiet",
        ));
    }
    let q = &new.q;
    let out = Heads::empty(client, q.shape(), q.dtype);
    if q.tokens == 0 {
        return Ok(out);
    }
    let plan = plan(client, new, cache, Some(params));
    let splits = decode_splits(cache.kv_heads);
    let time = new.time(cache);
    let blocks = cache.kv_heads * (q.heads / cache.kv_heads * time).div_ceil(plan.rows);
    if blocks > u16::MAX as usize {
        return Err(Nvfp4Error::shape(
            "q",
            format!("{time} new tokens of a sequence"),
            "fewer: prompts have `append`",
        ));
    }
    let floats = cache.batch * blocks * splits * plan.rows * plan.part();
    let parts = allocate(client, floats * 4);
    let finished = counters(client, cache.batch * blocks);
    let elements = cache.len() / plan.width;
    let runs = CubeCount::Static(splits as u32, blocks as u32, cache.batch as u32);
    let widest = indices(new, cache).max(address_type(floats));
    let output = Output {
        parts: (&parts, floats),
        finished: (&finished, cache.batch * blocks),
        out: &out,
    };
    if plan.mma {
        // SAFETY: as below.
        unsafe {
            decode_mma_kernel::launch_unchecked(
                client,
                runs,
                CubeDim::new_1d(32 * WARPS as u32),
                widest,
                plan.width,
                tokens(new, cache),
                buffer(&cache.k, elements),
                buffer(&cache.v, elements),
                shape(new, cache, Some(params)),
                output.launch_mma(&plan),
                plan,
                q.dtype.storage_type(),
            );
        }
        return Ok(out);
    }
    // SAFETY: everything was checked against its memory, as in `append`.
    unsafe {
        decode_run_kernel::launch_unchecked(
            client,
            runs,
            CubeDim::new_1d((plan.teams * units(client).min(UNITS)) as u32),
            widest,
            plan.width,
            tokens(new, cache),
            buffer(&cache.k, elements),
            buffer(&cache.v, elements),
            shape(new, cache, Some(params)),
            output.launch(),
            plan,
            q.dtype.storage_type(),
            cache_type(cache, q.dtype),
        );
    }
    Ok(out)
}

/// Buffers of [`DecodeOutputLaunch`], with their numbers of elements.
struct Output<'a> {
    parts: (&'a Handle, usize),
    finished: (&'a Handle, usize),
    out: &'a Heads,
}

impl Output<'_> {
    /// Returns the arguments in which the values are followed by the largest scores and sums.
    fn launch_mma<F: Numeric>(&self, plan: &DecodePlan) -> MmaOutputLaunch<F> {
        let (parts, floats) = self.parts;
        let values = floats / plan.part() * plan.head;
        // SAFETY: as in `launch`.
        unsafe {
            MmaOutputLaunch::new(
                buffer(parts, values / 4),
                buffer(
                    &parts.clone().offset_start(values as u64 * 4),
                    floats - values,
                ),
                buffer(self.finished.0, self.finished.1),
                buffer(&self.out.handle, self.out.span()),
            )
        }
    }

    fn launch<F: Numeric>(&self) -> DecodeOutputLaunch<F> {
        // SAFETY: parts that are not written are not read; the memory is as large as it says.
        unsafe {
            DecodeOutputLaunch::new(
                buffer(self.parts.0, self.parts.1),
                buffer(self.finished.0, self.finished.1),
                buffer(&self.out.handle, self.out.span()),
            )
        }
    }
}

pub(super) fn plan(
    client: &Client,
    new: &NewTokens<'_>,
    cache: &KvCache,
    params: Option<&AttentionParams>,
) -> DecodePlan {
    let rows = new.q.heads / cache.kv_heads * new.time(cache);
    // Sums of the slices must fit in shared memory.
    let most = if cache.head > 128 { 4 } else { 8 };
    let halves = (cache.head / 2).is_multiple_of(8);
    let rows = rows.next_power_of_two().min(most);
    let planes = !is_cpu(client) && units(client).min(UNITS) == DECODE_TILE;
    let conversion = conversion_of(client);
    let plan = DecodePlan {
        head: cache.head,
        rows,
        width: if halves && new.q.dtype != FloatKind::F32 {
            8
        } else {
            4
        },
        rotary: new.rope.is_some(),
        softcap: params.is_some_and(|params| params.softcap.is_some()),
        unroll: !is_cpu(client),
        planes,
        teams: if planes {
            rows.div_ceil(ROWS_OF_TEAM)
        } else {
            1
        },
        staged: 0,
        concurrent: !is_cpu(client),
        overlaps: overlaps_kernels(client),
        kind: new.q.dtype,
        cache: cache.kind,
        mma: false,
        conversion,
    };
    let shared = client.properties().hardware.max_shared_memory_size;
    // The largest score of a row is that of the largest `q · k`.
    let is_ordered = params.is_some_and(|params| params.scale > 0.0);
    if is_ordered && let Some(plan) = plan.by_mma_in(shared) {
        return plan;
    }
    match planes && conversion.has_ptx() {
        true => plan.staged_in(shared),
        false => plan,
    }
}

fn tokens<F: Numeric>(new: &NewTokens<'_>, cache: &KvCache) -> NewTokensLaunch<F> {
    let (cos, sin, positions) = match new.rope {
        Some(rope) => (&rope.cos, &rope.sin, rope.positions),
        None => (new.starts, new.starts, 1),
    };
    let table = match new.rope {
        Some(_) => positions * cache.head / 2,
        None => 1,
    };
    // SAFETY: they were checked against their memory.
    unsafe {
        NewTokensLaunch::new(
            scalar::view(&new.q),
            scalar::view(&new.k),
            scalar::view(&new.v),
            buffer(new.starts, cache.batch),
            buffer(new.counts, cache.batch),
            new.time(cache) as u32,
            new.q.tokens as u32,
            buffer(cos, table),
            buffer(sin, table),
            positions as u32,
        )
    }
}

fn shape(
    new: &NewTokens<'_>,
    cache: &KvCache,
    params: Option<&AttentionParams>,
) -> CacheShapeLaunch {
    let [k_scale, v_scale] = cache.scales;
    let softcap = params.and_then(|params| params.softcap).unwrap_or(1.0);
    CacheShapeLaunch::new(
        cache.capacity as u32,
        cache.kv_heads as u32,
        (new.q.heads / cache.kv_heads) as u32,
        decode_splits(cache.kv_heads) as u32,
        params.and_then(|params| params.window).unwrap_or(0) as u32,
        params.map_or(1.0, |params| params.scale),
        softcap,
        1.0 / softcap,
        k_scale,
        1.0 / k_scale,
        v_scale,
        1.0 / v_scale,
    )
}

fn cache_type(cache: &KvCache, dtype: FloatKind) -> ElemType {
    match cache.kind {
        CacheKind::Float => dtype.storage_type(),
        CacheKind::E4m3 => ElemType::UInt(UIntKind::U8),
    }
}

/// Returns the width of the largest index.
fn indices(new: &NewTokens<'_>, cache: &KvCache) -> AddressType {
    let heads = [&new.q, &new.k, &new.v].map(|heads| heads.span());
    let tables = new.rope.map_or(0, |rope| rope.positions * cache.head / 2);
    let widest = heads.into_iter().chain([cache.len(), tables]).max();
    address_type(widest.unwrap_or(0))
}
