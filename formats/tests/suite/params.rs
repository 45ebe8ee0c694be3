//! Properties of the parameters of one quantized tensor, by which layers and kernels choose.

use nvfp4_formats::{
    AmaxGranularity, BlockPosition, BlockScaling, Format, Hadamard, HadamardSize, QuantParams,
    RandomStream, Rounding, StoredForm, Usage,
};

const STREAM: RandomStream = RandomStream::new(1, 2, 3);

/// Parameters of each kind, by name.
fn all() -> [(&'static str, QuantParams); 8] {
    let nearest = QuantParams::nvfp4(Rounding::Nearest);
    [
        ("nearest", nearest),
        (
            "stochastic",
            QuantParams::nvfp4(Rounding::Stochastic(STREAM)),
        ),
        (
            "transformed",
            QuantParams {
                hadamard: Some(Hadamard::default()),
                ..nearest
            },
        ),
        (
            "per row",
            QuantParams {
                amax: AmaxGranularity::PerRow,
                ..nearest
            },
        ),
        ("2d", QuantParams::nvfp4_2d(BlockScaling::Headroom)),
        ("eden", eden()),
        ("mxfp8", QuantParams::mxfp8()),
        ("mxfp4", QuantParams::mxfp4()),
    ]
}

fn eden() -> QuantParams {
    QuantParams::ms_eden(Hadamard::seeded_with_size(HadamardSize::H128, 5), STREAM)
}

/// Asserts that `holds` is true for the parameters of these names only.
fn assert_only(what: &str, names: &[&str], holds: impl Fn(&QuantParams) -> bool) {
    let all = all();
    let found = all.iter().filter(|(_, params)| holds(params));
    let found: Vec<&str> = found.map(|(name, _)| *name).collect();
    assert_eq!(found, names, "{what}");
}

#[test]
fn predicates_hold_for_their_kinds() {
    assert_only("random", &["stochastic", "eden"], |it| {
        !it.is_deterministic()
    });
    assert_only("MS-EDEN", &["eden"], QuantParams::is_ms_eden);
    assert_only("2d", &["2d"], QuantParams::is_2d);
    let made = ["eden", "mxfp8", "mxfp4"];
    assert_only("made from codes", &made, QuantParams::is_made_from_codes);
    let one = ["nearest", "stochastic", "transformed", "2d"];
    assert_only("one amax", &one, QuantParams::has_one_amax);
    let shared = ["nearest", "stochastic", "2d"];
    assert_only("shared amax", &shared, QuantParams::shares_amax);
    for (name, params) in all() {
        assert!(params.has_only_own_options(), "{name}");
        let stream = ["stochastic", "eden"].contains(&name).then_some(STREAM);
        assert_eq!(params.stream(), stream, "{name}");
    }
}

/// MX formats have no option, MS-EDEN has those of its draw, and elements have all.
#[test]
fn foreign_options_are_noticed() {
    let scaled = |params: QuantParams| QuantParams {
        scaling: BlockScaling::Headroom,
        ..params
    };
    let from_memory = |params: QuantParams| QuantParams {
        offset_in_memory: true,
        ..params
    };
    for mx in [QuantParams::mxfp8(), QuantParams::mxfp4()] {
        assert!(!scaled(mx).has_only_own_options());
        assert!(!from_memory(mx).has_only_own_options());
    }
    assert!(from_memory(eden()).has_only_own_options());
    assert!(!scaled(eden()).has_only_own_options());
    let nearest = QuantParams::nvfp4(Rounding::Nearest);
    assert!(scaled(from_memory(nearest)).has_only_own_options());
}

/// A position belongs to the random stream, if there is one.
#[test]
fn positions_are_those_of_the_stream() {
    let position = BlockPosition {
        first: 16,
        row_blocks: Some(8),
        ..BlockPosition::default()
    };
    for (name, params) in all() {
        let moved = params.at(position);
        match moved.stream() {
            Some(stream) => assert_eq!(stream, RandomStream { position, ..STREAM }, "{name}"),
            None => assert_eq!(moved, params, "{name}"),
        }
    }
}

#[test]
fn units_are_those_of_blocks_or_transforms() {
    let units = all().map(|(_, params)| params.unit());
    assert_eq!(units, [16, 16, 16, 16, 16, 128, 32, 32]);
    let large = QuantParams {
        hadamard: Some(Hadamard::seeded_with_size(HadamardSize::H64, 1)),
        ..QuantParams::nvfp4(Rounding::Nearest)
    };
    assert_eq!(large.unit(), 64);
}

#[test]
fn forms_are_those_that_a_format_has() {
    let (rows, tiles) = (StoredForm::Rows, StoredForm::Tiles);
    let (whole, unscaled) = (StoredForm::WholeTiles, StoredForm::Bf16Unscaled);
    let forms = [rows, tiles, whole, unscaled];
    let stored = |params: QuantParams| forms.map(|form| params.stored_form(form));
    assert_eq!(stored(QuantParams::nvfp4(Rounding::Nearest)), forms);
    let of_tiles = QuantParams::nvfp4_2d(BlockScaling::Standard);
    assert_eq!(stored(of_tiles), [rows, tiles, whole, rows]);
    assert_eq!(stored(QuantParams::mxfp8()), [rows, tiles, tiles, rows]);
    assert_eq!(stored(QuantParams::mxfp4()), [rows; 4]);
}

/// MS-EDEN pads its matrix along the blocks; the other fields are those of the parameters.
#[test]
fn layouts_are_those_of_the_parameters() {
    for (name, params) in all() {
        for usage in [Usage::Rowwise, Usage::Columnwise] {
            let layout = params.layout((33, 80), usage, StoredForm::Tiles);
            let shape = match (name, usage) {
                ("eden", Usage::Rowwise) => (33, 128),
                ("eden", Usage::Columnwise) => (128, 80),
                _ => (33, 80),
            };
            assert_eq!((layout.rows, layout.cols), shape, "{name}");
            assert_eq!((layout.usage, layout.format), (usage, params.format));
            assert_eq!((layout.scaling, layout.amax), (params.scaling, params.amax));
            assert_eq!(layout.hadamard, params.hadamard, "{name}");
            assert_eq!(layout.form, StoredForm::Tiles, "{name}");
        }
    }
    let nearest = QuantParams::from(Format::Nvfp4);
    let layout = nearest.layout((16, 16), Usage::Rowwise, StoredForm::Bf16Unscaled);
    assert_eq!(layout.form, StoredForm::Bf16Unscaled);
}
