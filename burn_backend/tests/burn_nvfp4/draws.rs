//! From a recipe to its GEMMs: the format of each operand, and the bits that it draws.

use burn_core::tensor::{DType, Int, Tensor};
use burn_nvfp4::functions::quantize;
use burn_nvfp4::ops::{
    AmaxGranularity, BackwardSource, BlockShape, Format, LinearSpec, OperandSpec, QuantRounding,
};
use burn_nvfp4::{Hadamard, Nvfp4Recipe, Nvfp4Tensor, RandomStream, RngState, Rounding, Usage};
use nvfp4_formats::{BlockScaling, ErrorNorm, HadamardSize};

use crate::support::{Matrix, device, flex_only, skip_where_small_only};

const RANDOMNESS: RngState = RngState {
    seed: 5,
    layer: 3,
    offset: 9,
    rht_signs: Hadamard::DEFAULT_SIGNS,
};

/// Returns the operands, in the order of [`NAMES`].
fn operands(spec: &LinearSpec) -> [OperandSpec; 6] {
    [
        spec.fprop_x,
        spec.fprop_w,
        spec.dgrad_dy,
        spec.dgrad_w,
        spec.wgrad_x,
        spec.wgrad_dy,
    ]
}

const NAMES: [&str; 6] = [
    "fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.x", "wgrad.dy",
];

/// Describes an operand in words.
fn words(operand: &OperandSpec) -> String {
    let scale = |scaling: &BlockScaling| match scaling {
        BlockScaling::Standard => "",
        BlockScaling::Headroom => " headroom",
        BlockScaling::FourOverSix(ErrorNorm::Mae) => " 4/6 mae",
        BlockScaling::FourOverSix(ErrorNorm::Mse) => " 4/6 mse",
        BlockScaling::Static => " static",
    };
    let Some(params) = operand.params() else {
        return "high".into();
    };
    match params.format {
        Format::Mxfp8 => return "mxfp8".into(),
        Format::Mxfp4 => return "mxfp4".into(),
        Format::Nvfp4 => {}
    }
    let rounding = match params.rounding {
        QuantRounding::MsEden(_) => return "ms-eden".into(),
        QuantRounding::Elements(Rounding::Nearest) => "",
        QuantRounding::Elements(Rounding::Stochastic(_)) => " sr",
    };
    let block = match params.block {
        BlockShape::Block1d => "1x16",
        BlockShape::Block2d => "16x16",
    };
    let amax = match params.amax {
        AmaxGranularity::PerTensor => "",
        AmaxGranularity::PerRow => " per-token",
    };
    let transform = params.hadamard.map(|h| h.size().elements());
    let transform = transform.map_or(String::new(), |size| format!(" rht{size}"));
    format!(
        "{block}{}{amax}{transform}{rounding}",
        scale(&params.scaling)
    )
}

/// Checks the definition of each preset in docs/src/recipes.md and the papers, written out here,
/// against the operands of its GEMMs.
#[test]
fn presets_are_what_they_are_called_after() {
    flex_only!();
    use BackwardSource::{Forward, Original};
    let (sr, rht) = ("1x16 sr", "1x16 rht16");
    let rht_sr = "1x16 rht16 sr";
    let mae = "1x16 4/6 mae";
    let (mse, eden) = ("1x16 4/6 mse", "ms-eden");
    let presets = [
        (
            "nvidia",
            ["1x16", "16x16", sr, "16x16", rht, rht_sr],
            Original,
        ),
        (
            "nvidia_4over6",
            [mae, "16x16 4/6 mae", sr, "16x16 4/6 mae", rht, rht_sr],
            Original,
        ),
        (
            "nvidia_headroom",
            [
                "1x16",
                "16x16",
                "1x16 headroom sr",
                "16x16",
                rht,
                "1x16 headroom rht16 sr",
            ],
            Original,
        ),
        ("quartet2", [mse, mse, eden, eden, eden, eden], Forward),
        (
            "per_token",
            [
                "1x16 per-token",
                "16x16",
                "1x16 per-token sr",
                "16x16",
                "1x16 per-token rht16",
                "1x16 per-token rht16 sr",
            ],
            Original,
        ),
        (
            "fwd_nvfp4_bwd_mxfp8",
            ["1x16", "16x16", "mxfp8", "mxfp8", "mxfp8", "mxfp8"],
            Original,
        ),
        (
            "fwd_nvfp4_bwd_mxfp8_dequantized",
            ["1x16", "16x16", "mxfp8", "mxfp8", "mxfp8", "mxfp8"],
            Forward,
        ),
        (
            "fwd_nvfp4_bwd_bf16",
            ["1x16", "16x16", "high", "high", "high", "high"],
            Forward,
        ),
        (
            "weight_only_qat",
            ["high", "1x16", "high", "high", "high", "high"],
            Forward,
        ),
        ("mxfp8", ["mxfp8"; 6], Original),
        ("mxfp4", ["mxfp4"; 6], Original),
        ("bf16", ["high"; 6], Original),
    ];
    assert!(Nvfp4Recipe::preset_names().eq(presets.map(|(name, ..)| name)));
    for (name, expected, source) in presets {
        let spec = Nvfp4Recipe::preset(name).unwrap().spec(&RANDOMNESS);
        assert_eq!(
            operands(&spec).map(|operand| words(&operand)),
            expected,
            "{name}"
        );
        // Unquantized backward operands are the forward's values or the originals.
        assert_eq!(spec.source, source, "{name}");
    }
}

/// Returns the streams that a spec draws from, by operand name.
fn streams(spec: &LinearSpec) -> Vec<(&'static str, RandomStream)> {
    let stream = |operand: &OperandSpec| operand.params()?.stream();
    let operands = operands(spec);
    let named = NAMES.into_iter().zip(&operands);
    named
        .filter_map(|(name, operand)| Some((name, stream(operand)?)))
        .collect()
}

/// No two operands of a layer, and no two layers, draw the same bits, in any preset and if every
/// operand is drawn.
#[test]
fn no_two_operands_draw_the_same_bits() {
    flex_only!();
    let mut every = Nvfp4Recipe::new().with_weight_2d(false);
    for operand in [
        &mut every.fprop.x,
        &mut every.fprop.w,
        &mut every.dgrad.dy,
        &mut every.dgrad.w,
        &mut every.wgrad.x,
        &mut every.wgrad.dy,
    ] {
        *operand = operand.stochastic();
    }
    every.check().unwrap();
    let presets = Nvfp4Recipe::preset_names().map(|name| {
        let both = ["dgrad.dy", "wgrad.dy"].as_slice();
        let drawn = match name {
            "nvidia" | "nvidia_4over6" | "nvidia_headroom" | "per_token" => both,
            "quartet2" => &NAMES[2..],
            _ => &[],
        };
        (name, Nvfp4Recipe::preset(name).unwrap(), drawn)
    });
    for (name, recipe, drawn) in presets.chain([("every", every, NAMES.as_slice())]) {
        let mut seen: Vec<(String, RandomStream)> = Vec::new();
        // Neighbors, and layers whose numbers differ only in a high bit.
        for layer in [0, 1, 2, 3, 1 << 40, 1 << 55] {
            let spec = recipe.spec(&RngState {
                layer,
                ..RANDOMNESS
            });
            let found = streams(&spec);
            assert!(found.iter().map(|(name, _)| name).eq(drawn), "{name}");
            for (operand, stream) in found {
                assert_eq!((stream.seed, stream.offset), (5, 9), "{name}: {operand}");
                let what = format!("{operand} of layer {layer}");
                for (other, taken) in &seen {
                    assert_ne!(stream.key(), taken.key(), "{name}: {what} and {other}");
                }
                seen.push((what, stream));
            }
        }
    }
}

/// MS-EDEN's signs are the same for both operands of a GEMM, and differ between GEMMs, layers and
/// steps.
#[test]
fn both_operands_of_a_product_have_the_same_signs() {
    flex_only!();
    let mut seen = Vec::new();
    for (layer, offset) in [(3, 9), (3, 10), (4, 9)] {
        let spec = Nvfp4Recipe::quartet2().spec(&RngState {
            layer,
            offset,
            ..RANDOMNESS
        });
        let signs = operands(&spec).map(|operand| {
            let params = operand.params().filter(|params| params.is_ms_eden());
            params.and_then(|params| params.hadamard)
        });
        let [None, None, dy, w, x, other_dy] = signs else {
            panic!("{signs:?}");
        };
        assert_eq!((dy, x), (w, other_dy));
        // Roles of the streams of dgrad's and wgrad's signs.
        for (signs, role) in [(dy, 4), (x, 5)] {
            assert!(!seen.contains(&signs), "layer {layer}, offset {offset}");
            seen.push(signs);
            let [low, high] = RandomStream::new(RANDOMNESS.seed, layer << 8 | role, 0).key();
            let key = u64::from(high) << 32 | u64::from(low);
            let seed = key.wrapping_add(offset.wrapping_mul(Hadamard::SEED_STEP));
            let expected = Hadamard::seeded_with_size(HadamardSize::H128, seed);
            assert_eq!(signs, Some(expected), "layer {layer}, offset {offset}");
        }
    }
}

fn codes(packed: &Nvfp4Tensor) -> Vec<u32> {
    let codes: Tensor<2, Int> = packed.codes().clone();
    codes.into_data().try_to_vec().unwrap()
}

fn scales(packed: &Nvfp4Tensor) -> Vec<u8> {
    packed.scales().clone().into_data().try_to_vec().unwrap()
}

/// The row-wise and column-wise tensors of one gradient: the row-wise tensor of its transpose is
/// the same matrix in memory, so the two differ only in their random bits.
#[test]
fn the_two_copies_of_a_gradient_are_rounded_apart() {
    skip_where_small_only!();
    let recipe = Nvfp4Recipe::new().with_rht(false);
    let spec = recipe.spec(&RANDOMNESS);
    let [dgrad, wgrad] = [spec.dgrad_dy, spec.wgrad_dy].map(|operand| {
        let params = operand.params().expect("in NVFP4");
        Rounding::Stochastic(params.stream().expect("with random bits"))
    });
    let dy = Matrix::gaussian(64, 128, DType::F32, 5).tensor(&device());
    let row = |rounding| quantize(dy.clone(), Usage::Rowwise, rounding, None);
    let col = |rounding| {
        let transposed = dy.clone().transpose();
        quantize(transposed, Usage::Columnwise, rounding, None)
    };
    let (first, second) = (row(dgrad), col(wgrad));
    assert_eq!(scales(&first), scales(&second));
    assert_eq!(codes(&first), codes(&col(dgrad)), "the same bits");
    let (first, second) = (codes(&first), codes(&second));
    let nibbles = (first.iter().zip(&second))
        .flat_map(|(a, b)| (0..8).map(move |i| (a ^ b) >> (4 * i) & 0xF != 0));
    let share = nibbles.filter(|differ| *differ).count() as f64 / (64.0 * 128.0);
    // Two draws of a value at `f` between its neighbors differ with probability 2 f (1 - f), 1/3 on
    // average.
    assert!((0.25..0.4).contains(&share), "{share} of the codes differ");
}
