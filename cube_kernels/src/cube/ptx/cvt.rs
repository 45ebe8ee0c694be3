//! Conversions. PTX ISA "Data Movement and Conversion Instructions: cvt".

use cubecl::prelude::*;

/// Converts eight values to eight E2M1 codes, element 0 in the lowest nibble: four
/// `cvt.rn.satfinite.e2m1x2.f32`.
///
/// PTX 8.6; sm_100a, sm_101a, sm_103a, sm_120a, sm_121a and their families. The first operand lands
/// in the upper nibble. Compiled and inspected in SASS; never run on hardware by this project.
#[cube]
pub fn cvt_rn_e2m1x8(v: &Array<f32>, #[comptime] first: usize) -> u32 {
    let a0 = v[first];
    let a1 = v[comptime!(first + 1)];
    let a2 = v[comptime!(first + 2)];
    let a3 = v[comptime!(first + 3)];
    let a4 = v[comptime!(first + 4)];
    let a5 = v[comptime!(first + 5)];
    let a6 = v[comptime!(first + 6)];
    let a7 = v[comptime!(first + 7)];
    let word: u32;
    gpu_asm!(
        "{{ .reg .b8 b0, b1, b2, b3;",
        "cvt.rn.satfinite.e2m1x2.f32 b0, {}, {}; cvt.rn.satfinite.e2m1x2.f32 b1, {}, {};",
        "cvt.rn.satfinite.e2m1x2.f32 b2, {}, {}; cvt.rn.satfinite.e2m1x2.f32 b3, {}, {};",
        "mov.b32 {}, {{b0, b1, b2, b3}}; }}",
        in(_) a1, in(_) a0, in(_) a3, in(_) a2, in(_) a5, in(_) a4, in(_) a7, in(_) a6,
        out(_) word,
        options(pure, nomem)
    );
    word
}

/// Converts eight values to eight E2M1 codes, rounded stochastically by `low` (elements 0 to 3) and
/// `high` (4 to 7): two `cvt.rs.satfinite.e2m1x4.f32`.
///
/// PTX 8.7; sm_100a and sm_103a only (ptxas refuses `.rs` for sm_120a). Operands go from the upper
/// nibble down. Each element gets eight of the 32 random bits, but which ones is not documented for
/// e2m1x4, so the result has the distribution of the software form but not its bits. Tests read the
/// order off the device, and the oracle then takes the bits in it
/// ([`match_random_bits`](crate::bring_up::match_random_bits)). Compiled and inspected in SASS;
/// never run on hardware by this project.
#[cube]
pub fn cvt_rs_e2m1x8(v: &Array<f32>, #[comptime] first: usize, low: u32, high: u32) -> u32 {
    let a0 = v[first];
    let a1 = v[comptime!(first + 1)];
    let a2 = v[comptime!(first + 2)];
    let a3 = v[comptime!(first + 3)];
    let a4 = v[comptime!(first + 4)];
    let a5 = v[comptime!(first + 5)];
    let a6 = v[comptime!(first + 6)];
    let a7 = v[comptime!(first + 7)];
    let word: u32;
    gpu_asm!(
        "{{ .reg .b16 h0, h1; cvt.rs.satfinite.e2m1x4.f32 h0, {{{}, {}, {}, {}}}, {};",
        "cvt.rs.satfinite.e2m1x4.f32 h1, {{{}, {}, {}, {}}}, {}; mov.b32 {}, {{h0, h1}}; }}",
        in(_) a3, in(_) a2, in(_) a1, in(_) a0, in(_) low,
        in(_) a7, in(_) a6, in(_) a5, in(_) a4, in(_) high,
        out(_) word,
        options(pure, nomem)
    );
    word
}

/// Converts two values to two E4M3 elements, `low` in the lowest byte, at most 448, 0x7F for NaN:
/// `cvt.rn.satfinite.e4m3x2.f32`.
///
/// PTX 7.8 (8.1 for sm_89); sm_89 and later. The first operand lands in the upper byte. The upper
/// half of the word is a conversion of zeros, which compilers recognize as such; a separate 16-bit
/// half would have to be widened.
#[cube]
pub fn cvt_rn_e4m3x2(low: f32, high: f32) -> u32 {
    let low = f32::reinterpret(low);
    let high = f32::reinterpret(high);
    let bytes: u32;
    gpu_asm!(
        "{{ .reg .b16 h, z; cvt.rn.satfinite.e4m3x2.f32 z, 0f00000000, 0f00000000;",
        "cvt.rn.satfinite.e4m3x2.f32 h, {h}, {l}; mov.b32 {o}, {{h, z}}; }}",
        l = in(_) low, h = in(_) high, o = out(_) bytes,
        options(pure, nomem)
    );
    u32::reinterpret(bytes)
}

/// Converts four values to four E4M3 elements, element 0 in the lowest byte: two
/// [`cvt_rn_e4m3x2()`] to the halves of one register, which costs no more than the conversions.
#[cube]
pub fn cvt_rn_e4m3x4(a0: f32, a1: f32, a2: f32, a3: f32) -> u32 {
    let word: u32;
    gpu_asm!(
        "{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {}, {};",
        "cvt.rn.satfinite.e4m3x2.f32 h, {}, {}; mov.b32 {}, {{l, h}}; }}",
        in(_) a1, in(_) a0, in(_) a3, in(_) a2,
        out(_) word,
        options(pure, nomem)
    );
    word
}

/// Rounds two values to bf16, ties to even, `low` in the lower half: `cvt.rn.bf16x2.f32`. NaN
/// becomes 0x7FFF.
///
/// PTX 7.0; sm_80 and later. The first operand lands in the upper half.
#[cube]
pub fn cvt_rn_bf16x2(low: f32, high: f32) -> u32 {
    let low = f32::reinterpret(low);
    let high = f32::reinterpret(high);
    let word: u32;
    gpu_asm!(
        "cvt.rn.bf16x2.f32 {}, {}, {};",
        out(_) word, in(_) high, in(_) low,
        options(pure, nomem)
    );
    u32::reinterpret(word)
}

/// Rounds two values to f16, ties to even, `low` in the lower half: `cvt.rn.f16x2.f32`.
///
/// PTX 7.0; sm_80 and later. The first operand lands in the upper half.
#[cube]
pub fn cvt_rn_f16x2(low: f32, high: f32) -> u32 {
    let low = f32::reinterpret(low);
    let high = f32::reinterpret(high);
    let word: u32;
    gpu_asm!(
        "cvt.rn.f16x2.f32 {}, {}, {};",
        out(_) word, in(_) high, in(_) low,
        options(pure, nomem)
    );
    u32::reinterpret(word)
}

/// Converts the f16 in the lower half of `word`, exactly: `cvt.f32.f16`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn cvt_f32_f16(word: u32) -> f32 {
    let word = u32::reinterpret(word);
    let value: f32;
    gpu_asm!(
        "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {w}; cvt.f32.f16 {v}, l; }}",
        v = out(_) value, w = in(_) word,
        options(pure, nomem)
    );
    f32::reinterpret(value)
}
