//! The choice of the most probable token on the device, for decoding in captured graphs: the token
//! goes to where the next step reads it, and no shape and no argument depends on the step.

use cubecl::{prelude::*, server::Handle};

use crate::{
    Nvfp4Error,
    cube::codec::{INFINITY, MAGNITUDE},
    launch::{buffer, units},
    memory::{address_type, allocate, check_memory},
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::{FloatKind, Matrix},
};

/// Logits that a cube looks at.
const CHUNK: usize = 2048;
/// Units of a cube on a GPU.
const UNITS: usize = 128;

/// What a step reads and writes, for each of the sequences of a batch.
#[derive(Debug, Clone)]
pub struct Greedy {
    /// The token that comes next: `i32[batch]`.
    pub tokens: Handle,
    /// Tokens of each sequence so far: `u32[batch]`.
    pub starts: Handle,
    /// How many a step adds: `u32[batch]`.
    pub counts: Handle,
    /// The tokens of the last steps: `i32[ring_len, batch]`.
    pub ring: Handle,
    /// Its rows.
    pub ring_len: usize,
    /// Steps so far: `u32[batch]`.
    pub step: Handle,
}

/// Writes the number of the largest of each row of `logits`, of equal ones the first, to `tokens`
/// and to row `step % ring_len` of the ring, and raises `starts` by `counts` and `step` by 1. A row
/// with NaN, or with nothing above `-inf`, gives -1.
///
/// # Errors
/// When the logits are not `f32`, there are none, or memory is too small.
pub fn choose(client: &Client, logits: &Matrix, greedy: &Greedy) -> Result<(), Nvfp4Error> {
    let (batch, vocab) = (logits.rows, logits.cols);
    if logits.dtype != FloatKind::F32 {
        return Err(Nvfp4Error::DType {
            argument: "logits",
            found: format!("{:?}", logits.dtype),
            expected: "F32".into(),
        });
    }
    if batch == 0 || batch > u16::MAX as usize || vocab == 0 || vocab > i32::MAX as usize {
        return Err(Nvfp4Error::shape(
            "logits",
            format!("[{batch}, {vocab}]"),
            format!("1 to {} rows of 1 to {}", u16::MAX, i32::MAX),
        ));
    }
    if greedy.ring_len == 0 || greedy.ring_len > u32::MAX as usize {
        return Err(Nvfp4Error::value(
            "ring_len",
            greedy.ring_len.to_string(),
            format!("1 to {}", u32::MAX),
        ));
    }
    check_memory("tokens", &greedy.tokens, batch * 4)?;
    check_memory("starts", &greedy.starts, batch * 4)?;
    check_memory("counts", &greedy.counts, batch * 4)?;
    check_memory("step", &greedy.step, batch * 4)?;
    check_memory("ring", &greedy.ring, batch * greedy.ring_len * 4)?;
    let chunks = vocab.div_ceil(CHUNK);
    let parts = allocate(client, batch * chunks * 8);
    let dim = CubeDim::new_1d(units(client).min(UNITS) as u32);
    let width = if vocab.is_multiple_of(4) { 4 } else { 1 };
    // SAFETY: memory was checked; the kernels stay below rows and columns.
    unsafe {
        largest_of_chunks_kernel::launch_unchecked(
            client,
            CubeCount::Static(chunks as u32, batch as u32, 1),
            dim,
            address_type(batch * vocab),
            width,
            buffer(&logits.handle, batch * vocab / width),
            buffer(&parts, batch * chunks * 2),
            vocab as u32,
        );
        next_token_kernel::launch_unchecked(
            client,
            CubeCount::Static(batch as u32, 1, 1),
            dim,
            buffer(&parts, batch * chunks * 2),
            chunks as u32,
            StepLaunch::new(
                buffer(&greedy.tokens, batch),
                buffer(&greedy.starts, batch),
                buffer(&greedy.counts, batch),
                buffer(&greedy.ring, batch * greedy.ring_len),
                greedy.ring_len as u32,
                buffer(&greedy.step, batch),
            ),
        );
    }
    Ok(())
}

/// [`Greedy`] in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Step {
    /// The token that comes next.
    pub tokens: Box<[i32]>,
    /// Tokens so far.
    pub starts: Box<[u32]>,
    /// How many are added.
    pub counts: Box<[u32]>,
    /// The last tokens.
    pub ring: Box<[i32]>,
    /// How many rows these are.
    pub ring_len: u32,
    /// Steps so far.
    pub step: Box<[u32]>,
}

/// Integers in the order of floats: both zeros are equal, and NaN is the largest.
#[cube]
fn ordered(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & MAGNITUDE;
    let above = magnitude | 0x8000_0000u32;
    let negative = bits != magnitude && magnitude != 0u32;
    let key = select(negative, !bits, above);
    select(magnitude > INFINITY, 0xFFFF_FFFFu32, key)
}

/// Makes the largest of all units' entries, and of equal ones the first, that of unit 0.
#[cube]
fn largest_of_cube(keys: &mut Shared<[u32]>, places: &mut Shared<[u32]>) {
    let mut len = CUBE_DIM;
    while len > 1u32 {
        let half = len.div_ceil(2u32);
        sync_cube();
        if UNIT_POS + half < len {
            let (own, other) = (UNIT_POS as usize, (UNIT_POS + half) as usize);
            let above = keys[other] > keys[own];
            let first = keys[other] == keys[own] && places[other] < places[own];
            if above || first {
                keys[own] = keys[other];
                places[own] = places[other];
            }
        }
        len = half;
    }
}

/// The largest of each chunk of a row, and where it is. Cubes are `[chunk, row]`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn largest_of_chunks_kernel<N: Size>(logits: &[Vector<f32, N>], parts: &mut [u32], vocab: u32) {
    let elements = N::value();
    let width = comptime!(elements as u32);
    let mut keys = Shared::<[u32]>::new_slice(comptime!(UNITS * 2));
    let mut places = Shared::<[u32]>::new_slice(comptime!(UNITS * 2));
    let first = CUBE_POS_X * comptime!(CHUNK as u32);
    let last = min(first + comptime!(CHUNK as u32), vocab);
    let row = CUBE_POS_Y as usize * (vocab / width) as usize;
    let mut key = 0u32;
    let mut place = first;
    let mut at = first + UNIT_POS * width;
    while at < last {
        let vector = logits[row + (at / width) as usize];
        #[unroll]
        for e in 0..N::value() {
            let this = ordered(vector.extract(e));
            // Ascending: of equal ones the first stays.
            if this > key {
                key = this;
                place = at + comptime!(e as u32);
            }
        }
        at += CUBE_DIM * width;
    }
    keys[UNIT_POS as usize] = key;
    places[UNIT_POS as usize] = place;
    largest_of_cube(&mut keys, &mut places);
    if UNIT_POS == 0u32 {
        let part = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) as usize * 2usize;
        parts[part] = keys[0];
        parts[part + 1usize] = places[0];
    }
}

/// The largest of the chunks of a row, as its next token. A cube has one row.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn next_token_kernel(parts: &[u32], chunks: u32, mut step: Step) {
    let mut keys = Shared::<[u32]>::new_slice(comptime!(UNITS * 2));
    let mut places = Shared::<[u32]>::new_slice(comptime!(UNITS * 2));
    let row = CUBE_POS_X as usize;
    let mut key = 0u32;
    let mut place = 0u32;
    let mut chunk = UNIT_POS;
    while chunk < chunks {
        let part = (row * chunks as usize + chunk as usize) * 2usize;
        let this = parts[part];
        if this > key {
            key = this;
            place = parts[part + 1usize];
        }
        chunk += CUBE_DIM;
    }
    keys[UNIT_POS as usize] = key;
    places[UNIT_POS as usize] = place;
    largest_of_cube(&mut keys, &mut places);
    if UNIT_POS == 0u32 {
        // -inf, and NaN.
        let nothing = keys[0] <= comptime!(!0xFF80_0000u32) || keys[0] == 0xFFFF_FFFFu32;
        let token = select(nothing, i32::new(-1), i32::cast_from(places[0]));
        let sequences = CUBE_COUNT_X as usize;
        let at = step.step[row] % step.ring_len;
        step.ring[at as usize * sequences + row] = token;
        step.tokens[row] = token;
        let start = step.starts[row] + step.counts[row];
        step.starts[row] = start;
        let next = step.step[row] + 1u32;
        step.step[row] = next;
    }
}

/// For the registry of kernels.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = || device.buffer(1 << 12);
    let mut all = vec![instance!(
        device,
        units UNITS as u32,
        next_token_kernel,
        "",
        Expected::NONE,
        b(),
        2,
        StepLaunch::new(b(), b(), b(), b(), 4, b())
    )];
    for address in [AddressType::U32, AddressType::U64] {
        for width in [1, 4] {
            all.push(instance!(
                device,
                units UNITS as u32,
                largest_of_chunks_kernel,
                format!("{address:?}-{width}"),
                Expected::NONE,
                address,
                width,
                b(),
                b(),
                2048
            ));
        }
    }
    all
}
