//! Matrix instructions of one warp, and loads of their fragments.

use cubecl::prelude::*;

/// Loads four 8 x 8 matrices of two-byte elements (or of 32 E2M1 codes per row): lane `8 i + r`
/// provides the address of row `r` of matrix `i`, sixteen bytes, and lane `4 r + c` receives word
/// `c` of row `r` of each: `ldmatrix.x4`.
///
/// PTX ISA "Warp-level matrix load instruction: ldmatrix"; PTX 6.5, sm_75 and later.
#[cube]
pub fn ldmatrix_x4(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {w}, [{a}];",
        w = out(_) words, a = in(_) address
    );
    Vector::<u32, Const<4>>::reinterpret(words)
}

/// [`ldmatrix_x4()`] that transposes each matrix: lane `4 r + c` receives the elements of rows `2
/// c` and `2 c + 1` in column `r`: `ldmatrix.x4.trans`.
///
/// PTX ISA "Warp-level matrix load instruction: ldmatrix"; PTX 6.5, sm_75 and later.
#[cube]
pub fn ldmatrix_x4_trans(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {w}, [{a}];",
        w = out(_) words, a = in(_) address
    );
    Vector::<u32, Const<4>>::reinterpret(words)
}

/// Returns `c + a · b` for bf16 operands as registers of pairs, and f32 accumulators:
/// `mma.sync.m16n8k16`.
///
/// PTX ISA "Warp Level Matrix Multiply-Accumulate Instructions: mma"; PTX 7.0, sm_80 and later.
#[cube]
pub fn mma_m16n8k16_bf16(
    c: Vector<f32, Const<4>>,
    a0: u32,
    a1: u32,
    a2: u32,
    a3: u32,
    b0: u32,
    b1: u32,
) -> Vector<f32, Const<4>> {
    let d: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "{d}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {c};",
        d = out(_) d, c = in(_) Vector::<f32, Const<4>>::reinterpret(c),
        a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3, b0 = in(_) b0, b1 = in(_) b1,
        options(pure, nomem)
    );
    Vector::<f32, Const<4>>::reinterpret(d)
}

/// Returns `c + a · b` for f16 operands as registers of pairs, and f32 accumulators:
/// `mma.sync.m16n8k16`.
///
/// PTX ISA "Warp Level Matrix Multiply-Accumulate Instructions: mma"; PTX 7.0, sm_80 and later.
#[cube]
pub fn mma_m16n8k16_f16(
    c: Vector<f32, Const<4>>,
    a0: u32,
    a1: u32,
    a2: u32,
    a3: u32,
    b0: u32,
    b1: u32,
) -> Vector<f32, Const<4>> {
    let d: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "{d}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {c};",
        d = out(_) d, c = in(_) Vector::<f32, Const<4>>::reinterpret(c),
        a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3, b0 = in(_) b0, b1 = in(_) b1,
        options(pure, nomem)
    );
    Vector::<f32, Const<4>>::reinterpret(d)
}

/// Returns `c + a · b` for E4M3 operands as registers of four with a UE8M0 scale per row of 32, and
/// `f32` accumulators: `mma.sync.m16n8k32` with `block_scale`. Scales are byte `byte` of a word, in
/// lane `4 g` for row `g` of `a`, in lane `4 g + 1` for row `g + 8`, and in lane `4 g` for row `g`
/// of `b`.
///
/// PTX ISA "Warp Level Matrix Multiply-Accumulate Instructions: mma" and "Block Scaling for
/// mma.sync"; PTX 8.7, sm_120a and later of that family.
#[cube]
pub fn mma_m16n8k32_mxfp8(
    c: Vector<f32, Const<4>>,
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<2>>,
    a_scales: u32,
    b_scales: u32,
    #[comptime] byte: u32,
) -> Vector<f32, Const<4>> {
    let d: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X",
        ".f32.e4m3.e4m3.f32.ue8m0 {d}, {a}, {b}, {c}, {sa}, {{{i}, 0}}, {sb}, {{{i}, 0}};",
        d = out(_) d, c = in(_) Vector::<f32, Const<4>>::reinterpret(c),
        a = in(_) Vector::<u32, Const<4>>::reinterpret(a),
        b = in(_) Vector::<u32, Const<2>>::reinterpret(b),
        sa = in(_) a_scales, sb = in(_) b_scales, i = const byte,
        options(pure, nomem)
    );
    Vector::<f32, Const<4>>::reinterpret(d)
}
