//! Probes of tensor memory and of single instructions, on the tensor cores or the software model.
//! Results are compared with the semantics in the PTX ISA.

use cubecl::{prelude::*, server::Handle};

use crate::{
    cube::ptx::{BlockScaled, TMEM_COLUMNS, TMEM_LANES},
    format::{e2m1, e4m3, swizzle::swizzle, ue8m0},
    gemm::kernels::{
        sm100::engine::{TMEM_WORDS, VIOLATIONS},
        sm100::probe::{
            B_CODES_AT, IMAGE, POISON, PROBE_UNITS, ROW, SCALE_COLUMN, SCALES_AT, step_kernel,
            step_model_kernel, tmem_round_trip_kernel,
        },
        sm100::tile::{SM100_TILE_M, SM100_TILE_N},
    },
    memory::{allocate, download, upload},
    reference::philox::philox4x32,
    zeroed::zeros,
};

/// Block scales per row of an image: one word.
const BLOCKS: usize = 4;

/// Returns random words.
fn words(seed: u32, len: usize) -> Vec<u32> {
    let counters = 0..len.div_ceil(4) as u32;
    let all = counters.flat_map(|counter| philox4x32([counter, 0, 0, 0], [seed, 0]));
    all.take(len).collect()
}

/// Expected value of a word of tensor memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Expected {
    /// These exact bits.
    Bits(u32),
    /// This number; zeros of either sign are equal.
    Number(f32),
}

impl Expected {
    fn is(self, word: u32) -> bool {
        match self {
            Self::Bits(bits) => word == bits,
            Self::Number(number) => f32::from_bits(word) == number,
        }
    }

    fn shown(self, word: u32) -> String {
        match self {
            Self::Bits(bits) => format!("{word:#010x}, and should be {bits:#010x}"),
            Self::Number(number) => {
                format!(
                    "{} ({word:#010x}), and should be {number}",
                    f32::from_bits(word)
                )
            }
        }
    }
}

/// Compares a dump of tensor memory, `[column][lane]`, with the expected values.
///
/// # Errors
/// Returns the first word that differs.
fn compare(
    what: &str,
    dump: &[u32],
    expected: impl Fn(usize, usize) -> Expected,
) -> Result<(), String> {
    let at = |i: usize| (i / TMEM_LANES, i % TMEM_LANES);
    let is_wrong = |i: &usize| {
        let (column, lane) = at(*i);
        !expected(column, lane).is(dump[*i])
    };
    let wrong: Vec<usize> = (0..dump.len()).filter(is_wrong).collect();
    let Some(first) = wrong.first() else {
        return Ok(());
    };
    let (column, lane) = at(*first);
    Err(format!(
        "{what}: lane {lane}, column {column} holds {} ({} of {} words differ)",
        expected(column, lane).shown(dump[*first]),
        wrong.len(),
        dump.len()
    ))
}

/// Downloads the words of tensor memory in `handle`.
fn dump(client: &Client, handle: &Handle) -> Result<Vec<u32>, String> {
    let bytes = download(client, handle, 4 * TMEM_WORDS).map_err(|error| error.to_string())?;
    let words = bytes.chunks_exact(4);
    Ok(words
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect())
}

/// Writes a unique word to each lane and column, and reads them back.
///
/// # Errors
/// Returns the first word that differs.
pub(super) fn tmem_round_trip(client: &Client) -> Result<(), String> {
    let written = words(1, TMEM_WORDS);
    let source = upload(client, bytemuck::cast_slice(&written));
    let out = allocate(client, 4 * TMEM_WORDS);
    // SAFETY: both buffers have a word for each lane and column.
    unsafe {
        tmem_round_trip_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(PROBE_UNITS),
            BufferArg::from_raw_parts(source, TMEM_WORDS),
            BufferArg::from_raw_parts(out.clone(), TMEM_WORDS),
        );
    }
    compare("round trip", &dump(client, &out)?, |column, lane| {
        Expected::Bits(written[column * TMEM_LANES + lane])
    })
}

/// Operands of a multiplication: one code per byte, with the scales of one step for NVFP4, or of
/// all steps for MXFP8.
struct Operands {
    format: BlockScaled,
    a: Vec<u8>,
    b: Vec<u8>,
    a_scales: Vec<u8>,
    b_scales: Vec<u8>,
}

impl Operands {
    /// Random codes without NaN, and random positive scales: from 2^-4 to 30 for NVFP4, from 2^-8
    /// to 2^7 for MXFP8. Products of two elements are exact.
    fn random(format: BlockScaled, seed: u32) -> Self {
        let code = |word: u32| match (format, word as u8) {
            (BlockScaled::Nvfp4, byte) => byte & 15,
            (BlockScaled::Mxfp8, byte) if byte & 0x7f == 0x7f => byte ^ 1,
            (BlockScaled::Mxfp8, byte) => byte,
        };
        let scale = |word: u32| match format {
            BlockScaled::Nvfp4 => 0x18 + (word % 72) as u8,
            BlockScaled::Mxfp8 => 119 + (word % 16) as u8,
        };
        let codes = |seed, rows: usize| -> Vec<u8> {
            let words = words(seed, rows * format.tile_k());
            words.into_iter().map(code).collect()
        };
        let scales = |seed, rows: usize| -> Vec<u8> {
            let words = words(seed, rows * BLOCKS);
            words.into_iter().map(scale).collect()
        };
        Self {
            format,
            a: codes(seed, SM100_TILE_M),
            b: codes(seed + 1, SM100_TILE_N),
            a_scales: scales(seed + 2, SM100_TILE_M),
            b_scales: scales(seed + 3, SM100_TILE_N),
        }
    }

    /// Replaces each row of a step of `a` (or else `b`) with a single 1, in the column with the
    /// row's index modulo the columns of a step.
    fn one_hot(mut self, of_a: bool, step: usize) -> Self {
        let (width, columns) = (self.format.tile_k(), self.format.step_k());
        let one = match self.format {
            BlockScaled::Nvfp4 => 2,
            BlockScaled::Mxfp8 => 0x38,
        };
        let codes = if of_a { &mut self.a } else { &mut self.b };
        for (row, codes) in codes.chunks_exact_mut(width).enumerate() {
            let codes = &mut codes[step * columns..][..columns];
            codes.fill(0);
            codes[row % columns] = one;
        }
        self
    }

    /// Packs `codes` into bytes, row after row.
    fn bytes(&self, codes: &[u8]) -> Vec<u8> {
        match self.format {
            BlockScaled::Nvfp4 => codes
                .chunks_exact(2)
                .map(|pair| pair[0] | pair[1] << 4)
                .collect(),
            BlockScaled::Mxfp8 => codes.to_vec(),
        }
    }

    /// Returns the image that TMA and bulk copies write to shared memory.
    fn image(&self) -> Vec<u8> {
        let mut image = vec![0; IMAGE];
        for (codes, at) in [(&self.a, 0), (&self.b, B_CODES_AT)] {
            for (i, byte) in self.bytes(codes).into_iter().enumerate() {
                let (row, place) = (i / ROW, i % ROW);
                // The swizzle permutes the 16-byte chunks of a row.
                let part = (place / 16) ^ (row % 8);
                image[at + row * ROW + part * 16 + place % 16] = byte;
            }
        }
        let mut at = SCALES_AT;
        for (scales, rows) in [
            (&self.a_scales, SM100_TILE_M),
            (&self.b_scales, SM100_TILE_N),
        ] {
            let tiles = swizzle(scales, rows, BLOCKS);
            image[at..at + tiles.len()].copy_from_slice(&tiles);
            at += tiles.len();
        }
        image
    }

    /// Returns the sums of `step`, row-major.
    fn sums(&self, step: usize) -> Vec<f32> {
        let (width, columns) = (self.format.tile_k(), self.format.step_k());
        let element = |code: u8, k: usize, scales: &[u8]| match self.format {
            BlockScaled::Nvfp4 => e2m1::decode(code) * e4m3::decode(scales[k / 16]),
            BlockScaled::Mxfp8 => e4m3::decode_element(code) * ue8m0::decode(scales[step]),
        };
        let decoded = |codes: &[u8], scales: &[u8]| -> Vec<f32> {
            let rows = codes.chunks_exact(width).zip(scales.chunks_exact(BLOCKS));
            rows.flat_map(|(codes, scales)| {
                let codes = &codes[step * columns..][..columns];
                let elements = codes.iter().enumerate();
                elements
                    .map(|(k, code)| element(*code, k, scales))
                    .collect::<Vec<f32>>()
            })
            .collect()
        };
        let a = decoded(&self.a, &self.a_scales);
        let b = decoded(&self.b, &self.b_scales);
        let mut sums = Vec::new();
        for a in a.chunks_exact(columns) {
            for b in b.chunks_exact(columns) {
                sums.push(a.iter().zip(b).map(|(x, y)| x * y).sum());
            }
        }
        sums
    }

    /// Returns the expected content of tensor memory at `column` and `lane` after the copies of
    /// scales: the scales of a row are in all lanes that are equal to it modulo 32.
    fn scale_word(&self, column: usize, lane: usize) -> Expected {
        let Some(column) = column.checked_sub(SCALE_COLUMN as usize) else {
            return Expected::Bits(POISON);
        };
        let row = column % 4 * 32 + lane % 32;
        let word = |scales: &[u8], row: usize| {
            let word = &scales[BLOCKS * row..][..BLOCKS];
            Expected::Bits(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        };
        match column / 4 {
            0 => word(&self.a_scales, row),
            1 => word(&self.b_scales, row),
            2 => word(&self.b_scales, row + 128),
            _ => Expected::Bits(POISON),
        }
    }
}

/// Executor of a probe.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Executor {
    /// The tensor cores.
    Instruction,
    /// The software model.
    Model,
}

/// Returns tensor memory after the copies of the scales of `operands` and, if `multiplies`, the
/// multiplication of `step`.
///
/// # Errors
/// Returns an error if the device failed, or if the model found a violation.
fn run_step(
    client: &Client,
    operands: &Operands,
    step: usize,
    multiplies: bool,
    executor: Executor,
) -> Result<Vec<u32>, String> {
    let multiplies = multiplies.then_some(operands.format);
    let image = upload(client, &operands.image());
    // SAFETY (of every buffer): images and tensor memory have this many words.
    let memory = |handle: &Handle, len| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let count = CubeCount::Static(1, 1, 1);
    let image = memory(&image, IMAGE / 4);
    match executor {
        Executor::Instruction => {
            let out = allocate(client, 4 * TMEM_WORDS);
            // SAFETY: the kernel reads an image, and writes a word for each lane and column.
            unsafe {
                step_kernel::launch_unchecked(
                    client,
                    count,
                    CubeDim::new_1d(PROBE_UNITS),
                    image,
                    memory(&out, TMEM_WORDS),
                    step as u32,
                    multiplies,
                );
            }
            dump(client, &out)
        }
        Executor::Model => {
            let poison = vec![POISON; TMEM_WORDS];
            let tmem = upload(client, bytemuck::cast_slice(&poison));
            let violations = zeros(client, VIOLATIONS);
            // SAFETY: the model checks its addresses.
            unsafe {
                step_model_kernel::launch_unchecked(
                    client,
                    count,
                    CubeDim::new_1d(1),
                    image,
                    memory(&tmem, TMEM_WORDS),
                    memory(&violations, VIOLATIONS),
                    step as u32,
                    multiplies,
                );
            }
            let found = download(client, &violations, 4 * VIOLATIONS);
            let found = found.map_err(|error| error.to_string())?;
            match found.iter().all(|byte| *byte == 0) {
                true => dump(client, &tmem),
                false => Err("the software model found a wrong command".into()),
            }
        }
    }
}

/// Copies distinct scales to tensor memory and dumps all of it.
///
/// # Errors
/// Returns the first word that differs.
pub(super) fn scale_copy(client: &Client, executor: Executor) -> Result<(), String> {
    let mut operands = Operands::random(BlockScaled::Nvfp4, 2);
    for (i, scale) in operands.a_scales.iter_mut().enumerate() {
        *scale = (i % 251) as u8;
    }
    for (i, scale) in operands.b_scales.iter_mut().enumerate() {
        *scale = (i % 241) as u8;
    }
    let dump = run_step(client, &operands, 0, false, executor)?;
    compare("scales", &dump, |column, lane| {
        operands.scale_word(column, lane)
    })
}

/// In `format`, multiplies one-hot rows of `a` with random `b`, and random `a` with one-hot rows of
/// `b`, at the first and last step of the swizzled rows. Each sum is a single product, so that a
/// misplaced code or scale shows. Scales must be unchanged.
///
/// # Errors
/// Returns the first word that differs.
pub(super) fn one_hot_mma(
    client: &Client,
    format: BlockScaled,
    executor: Executor,
) -> Result<(), String> {
    for step in [0, 3] {
        for which in ["a", "b"] {
            let operands = Operands::random(format, 10 + step as u32);
            let operands = operands.one_hot(which == "a", step);
            let dump = run_step(client, &operands, step, true, executor)?;
            let sums = operands.sums(step);
            let what = format!("one-hot {which}, step {step}");
            compare(&what, &dump, |column, lane| match column < SM100_TILE_N {
                true => Expected::Number(sums[lane * SM100_TILE_N + column]),
                false => operands.scale_word(column, lane),
            })?;
        }
    }
    Ok(())
}

const _: () = assert!(TMEM_WORDS == TMEM_COLUMNS * TMEM_LANES);

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    /// Images and expected values agree with the software model.
    #[test]
    fn the_model_passes() {
        let client = crate::cpu_client();
        assert_eq!(scale_copy(&client, Executor::Model), Ok(()));
        for format in BlockScaled::ALL {
            let found = one_hot_mma(&client, format, Executor::Model);
            assert_eq!(found, Ok(()), "{format:?}");
        }
    }

    /// A wrong word is reported with its position.
    #[test]
    fn differences_are_named() {
        let mut dump = vec![7; TMEM_WORDS];
        assert_eq!(compare("it", &dump, |_, _| Expected::Bits(7)), Ok(()));
        dump[300 * TMEM_LANES + 5] = 8;
        let error = compare("it", &dump, |_, _| Expected::Bits(7)).unwrap_err();
        assert!(error.contains("lane 5, column 300"), "{error}");
        assert!(error.contains("1 of 65536"), "{error}");
    }
}
