//! Dequantization of words: eight E2M1 codes times their E4M3 scale to pairs of bf16, which is
//! exact, with the instructions of sm_80 and later (CUDA C++ only). The global scale factor is not
//! applied ("unscaled").

use cubecl::prelude::*;

/// Returns eight E2M1 codes, element 0 in the lowest nibble, times the bf16 in both halves of
/// `scale`, as eight bf16 in order: `$multiply p, p, scale$end` is the multiplication of a pair.
///
/// The two bytes of a bf16 magnitude are looked up separately (`prmt` takes the lower three bits of
/// each of four nibbles as an index into eight bytes): 0, .5, 1, 1.5, 2, 3, 4, 6 are 0x0000,
/// 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0. The product of a code and an E4M3 scale
/// has at most six significant bits, so the multiplication is exact.
macro_rules! decode_codes {
    ($name:ident, $multiply:literal, $end:literal) => {
        #[cube]
        pub fn $name(codes: u32, scale: u32) -> Vector<u32, Const<4>> {
            let pairs: Vector<u32, Const<4>>;
            gpu_asm!(
                "{{ .reg .b32 m, u, h0, l0, h1, l1, s, p<4>;",
                "and.b32 m, {c}, 0x77777777; shr.u32 u, m, 16;",
                "prmt.b32 h0, 0x3f3f3f00, 0x40404040, m; prmt.b32 l0, 0xc0800000, 0xc0804000, m;",
                "prmt.b32 h1, 0x3f3f3f00, 0x40404040, u; prmt.b32 l1, 0xc0800000, 0xc0804000, u;",
                "prmt.b32 p0, l0, h0, 0x5140; prmt.b32 p1, l0, h0, 0x7362;",
                "prmt.b32 p2, l1, h1, 0x5140; prmt.b32 p3, l1, h1, 0x7362;",
                "shl.b32 s, {c}, 12; and.b32 s, s, 0x8000; or.b32 p0, p0, s;",
                "shl.b32 s, {c}, 24; and.b32 s, s, 0x80000000; or.b32 p0, p0, s;",
                "shl.b32 s, {c}, 4; and.b32 s, s, 0x8000; or.b32 p1, p1, s;",
                "shl.b32 s, {c}, 16; and.b32 s, s, 0x80000000; or.b32 p1, p1, s;",
                "shr.u32 s, {c}, 4; and.b32 s, s, 0x8000; or.b32 p2, p2, s;",
                "shl.b32 s, {c}, 8; and.b32 s, s, 0x80000000; or.b32 p2, p2, s;",
                "shr.u32 s, {c}, 12; and.b32 s, s, 0x8000; or.b32 p3, p3, s;",
                "and.b32 s, {c}, 0x80000000; or.b32 p3, p3, s;",
                $multiply, "p0, p0, {s}", $end, $multiply, "p1, p1, {s}", $end,
                $multiply, "p2, p2, {s}", $end, $multiply, "p3, p3, {s}", $end,
                "mov.b32 %0, p0; mov.b32 %1, p1; mov.b32 %2, p2; mov.b32 %3, p3;",
                // Every operand must be named; the results are named by number.
                "// {o}",
                "}}",
                o = out(_) pairs, c = in(_) codes, s = in(_) scale,
                options(pure, nomem)
            );
            Vector::<u32, Const<4>>::reinterpret(pairs)
        }
    };
}

// `mul.bf16x2` requires sm_90; before, an addition of -0 replaces it.
decode_codes!(decode_e2m1x8, "mul.rn.bf16x2", ";");
decode_codes!(
    decode_e2m1x8_sm80,
    "mov.b32 m, 0x80008000; fma.rn.bf16x2",
    ", m;"
);

/// Returns two E4M3 bytes, the first in the lower eight bits, each times 2^118 as a bf16 in both
/// halves of a word: `cvt.rn.f16x2.e4m3x2` is exact, and so is every step after it (448 · 2^118 <
/// 2^127).
#[cube]
pub fn decode_e4m3x2(bytes: u16) -> Vector<u32, Const<2>> {
    let scales: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b32 h; .reg .b16 x, y; .reg .f32 f, g;",
        "cvt.rn.f16x2.e4m3x2 h, {b}; mov.b32 {{x, y}}, h;",
        "cvt.f32.f16 f, x; cvt.f32.f16 g, y;",
        // 2^118
        "mul.rn.f32 f, f, 0f7A800000; mul.rn.f32 g, g, 0f7A800000;",
        "cvt.rn.bf16x2.f32 %0, f, f; cvt.rn.bf16x2.f32 %1, g, g;",
        "// {o}",
        "}}",
        o = out(_) scales, b = in(_) bytes,
        options(pure, nomem)
    );
    Vector::<u32, Const<2>>::reinterpret(scales)
}

/// Returns two E4M3 bytes, the first in the lower eight bits, each times 2^118, as one pair of
/// bf16: the values of [`decode_e4m3x2()`].
#[cube]
pub fn decode_e4m3_pair(bytes: u32) -> u32 {
    let bytes = u32::reinterpret(bytes);
    let pair: u32;
    gpu_asm!(
        "{{ .reg .b32 h; .reg .b16 x, y; .reg .f32 f, g; mov.b32 {{x, y}}, {b};",
        "cvt.rn.f16x2.e4m3x2 h, x; mov.b32 {{x, y}}, h;",
        "cvt.f32.f16 f, x; cvt.f32.f16 g, y;",
        // 2^118
        "mul.rn.f32 f, f, 0f7A800000; mul.rn.f32 g, g, 0f7A800000;",
        "cvt.rn.bf16x2.f32 {o}, g, f; }}",
        o = out(_) pair, b = in(_) bytes,
        options(pure, nomem)
    );
    u32::reinterpret(pair)
}

/// [`decode_e4m3x2()`] for devices without that conversion instruction, which requires sm_89.
/// Exponent and mantissa of a byte are moved to the lowest exponent bits of a bf16, which yields
/// the scale times 2^-120 (its bias is 7, that of bf16 is 127; a byte with a zero exponent becomes
/// a subnormal). Two multiplications by 2^119 correct this, exactly. The one byte that is NaN would
/// become a number.
#[cube]
pub fn decode_e4m3x2_sm80(bytes: u16) -> Vector<u32, Const<2>> {
    let scales: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b32 v, w, s, c, m; .reg .pred p; cvt.u32.u16 v, {b};",
        "mov.b32 c, 0x7B007B00; mov.b32 m, 0x80008000;",
        "and.b32 w, v, 0x7f; setp.eq.u32 p, w, 0x7f; mul.lo.u32 w, w, 0x00100010;",
        "and.b32 s, v, 0x80; mul.lo.u32 s, s, 0x01000100; or.b32 w, w, s;",
        "fma.rn.bf16x2 w, w, c, m; fma.rn.bf16x2 w, w, c, m; selp.b32 %0, 0x7fff7fff, w, p;",
        "shr.u32 v, v, 8;",
        "and.b32 w, v, 0x7f; setp.eq.u32 p, w, 0x7f; mul.lo.u32 w, w, 0x00100010;",
        "and.b32 s, v, 0x80; mul.lo.u32 s, s, 0x01000100; or.b32 w, w, s;",
        "fma.rn.bf16x2 w, w, c, m; fma.rn.bf16x2 w, w, c, m; selp.b32 %1, 0x7fff7fff, w, p;",
        "// {o}",
        "}}",
        o = out(_) scales, b = in(_) bytes,
        options(pure, nomem)
    );
    Vector::<u32, Const<2>>::reinterpret(scales)
}

/// Returns eight E2M1 codes times `scale` of [`decode_e4m3x2()`], as pairs of bf16: codes (0, 4),
/// (1, 5), (2, 6), (3, 7), each 2^-8 times its value.
///
/// Exponent and mantissa of a code in the lowest exponent bits of a bf16 represent the code times
/// 2^-126: its bias is 1, that of bf16 is 127, and codes with a zero exponent become subnormals.
/// The multiplication by the scale times 2^118 brings it back into the normal range, exactly: six
/// significant bits between 2^-18 and 2^4. Codes four apart are 16 bits apart, so one instruction
/// handles both halves. A multiplication by 2^12 + 2^6 copies a code to the positions of the sign
/// and of the magnitude, on a pipe that the mask operations leave idle.
#[cube]
pub fn decode_e2m1x8_pairs(codes: u32, scale: u32) -> Vector<u32, Const<4>> {
    let pairs: Vector<u32, Const<4>>;
    gpu_asm!(
        "{{ .reg .b32 u, m, p<4>; mov.b32 m, 0x80008000;",
        "and.b32 p0, {c}, 0x000f000f; mul.lo.u32 p0, p0, 0x1040; and.b32 p0, p0, 0x81c081c0;",
        "and.b32 p1, {c}, 0x00f000f0; mul.lo.u32 p1, p1, 0x104; and.b32 p1, p1, 0x81c081c0;",
        "shr.u32 u, {c}, 8;",
        "and.b32 p2, u, 0x000f000f; mul.lo.u32 p2, p2, 0x1040; and.b32 p2, p2, 0x81c081c0;",
        "and.b32 p3, u, 0x00f000f0; mul.lo.u32 p3, p3, 0x104; and.b32 p3, p3, 0x81c081c0;",
        // `mul.bf16x2` requires sm_90; an FMA with -0 requires sm_80.
        "fma.rn.bf16x2 %0, p0, {s}, m; fma.rn.bf16x2 %1, p1, {s}, m;",
        "fma.rn.bf16x2 %2, p2, {s}, m; fma.rn.bf16x2 %3, p3, {s}, m;",
        "// {o}",
        "}}",
        o = out(_) pairs, c = in(_) codes, s = in(_) scale,
        options(pure, nomem)
    );
    Vector::<u32, Const<4>>::reinterpret(pairs)
}

/// Decodes one pair of [`decode_e2m1x8_pairs()`]: codes in the lowest nibbles of both halves of
/// `pair`, with zeros above them.
#[cube]
pub fn decode_e2m1_pair(pair: u32, scale: u32) -> u32 {
    let product: u32;
    gpu_asm!(
        "{{ .reg .b32 t; mul.lo.u32 t, {c}, 0x1040; and.b32 t, t, 0x81c081c0;",
        "mul.rn.bf16x2 {o}, t, {s}; }}",
        o = out(_) product, c = in(_) pair, s = in(_) scale,
        options(pure, nomem)
    );
    u32::reinterpret(product)
}

/// Returns the four E4M3 codes of a word as pairs of bf16, (0, 2) and (1, 3), exactly.
///
/// Exponent and mantissa of a code in the lowest exponent bits of a bf16 represent the code times
/// 2^-120: its bias is 7, that of bf16 is 127, and codes with a zero exponent become subnormals.
/// The multiplication by 2^120 corrects this. NaN codes become 480 with their sign, so the caller
/// must ensure NaN by other means.
#[cube]
pub fn decode_e4m3x4_pairs(codes: u32) -> Vector<u32, Const<2>> {
    let pairs: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b32 s, t, p<2>, c, m; mov.b32 c, 0x7B807B80; mov.b32 m, 0x80008000;",
        "shl.b32 s, {w}, 8; and.b32 s, s, m; shl.b32 t, {w}, 4; and.b32 t, t, 0x07f007f0;",
        "or.b32 p0, s, t;",
        "and.b32 s, {w}, m; shr.u32 t, {w}, 4; and.b32 t, t, 0x07f007f0;",
        "or.b32 p1, s, t;",
        // `mul.bf16x2` requires sm_90; an FMA with -0 requires sm_80.
        "fma.rn.bf16x2 %0, p0, c, m; fma.rn.bf16x2 %1, p1, c, m;",
        "// {o}",
        "}}",
        o = out(_) pairs, w = in(_) codes,
        options(pure, nomem)
    );
    Vector::<u32, Const<2>>::reinterpret(pairs)
}

/// Reorders four pairs in order, (0, 1), (2, 3), (4, 5), (6, 7), to (0, 2), (1, 3), (4, 6), (5, 7):
/// the order of [`decode_e4m3x4_pairs()`].
#[cube]
pub fn pair_alternate(pairs: Vector<u32, Const<4>>) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "// {i} {o}",
        "prmt.b32 %0, %4, %5, 0x5410; prmt.b32 %1, %4, %5, 0x7632;",
        "prmt.b32 %2, %6, %7, 0x5410; prmt.b32 %3, %6, %7, 0x7632;",
        o = out(_) out, i = in(_) Vector::<u32, Const<4>>::reinterpret(pairs),
        options(pure, nomem)
    );
    Vector::<u32, Const<4>>::reinterpret(out)
}

/// Reorders four pairs in order, (0, 1), (2, 3), (4, 5), (6, 7), to (0, 4), (1, 5), (2, 6), (3, 7):
/// the order of [`decode_e2m1x8_pairs()`].
#[cube]
pub fn interleave_pairs(pairs: Vector<u32, Const<4>>) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "// {i} {o}",
        "prmt.b32 %0, %4, %6, 0x5410; prmt.b32 %1, %4, %6, 0x7632;",
        "prmt.b32 %2, %5, %7, 0x5410; prmt.b32 %3, %5, %7, 0x7632;",
        o = out(_) out, i = in(_) Vector::<u32, Const<4>>::reinterpret(pairs),
        options(pure, nomem)
    );
    Vector::<u32, Const<4>>::reinterpret(out)
}
