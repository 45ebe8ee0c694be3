//! Layers in FP8 beside those in NVFP4: by pattern, and by a number of bits per weight.

use burn::tensor::{Device, FloatDType};
use nvfp4_formats::format::e4m3;
use nvfp4_test_support::{Scratch, golden};
use regex::Regex;

use super::tests::options;
use super::text::{CalibrationText, calibrate};
use super::*;
use crate::decoder::Decoder;
use crate::eval::{Windows, compare};
use crate::hf::TensorFolder;
use crate::interchange::{Checkpoint, Dialect, Fp8Inputs, Fp8Scales, LayerFormat, Scheme};
use nvfp4_formats::ptq::block_amax;

fn regexes(texts: &[&str]) -> Vec<Regex> {
    texts.iter().map(|text| Regex::new(text).unwrap()).collect()
}

/// Returns the model in high precision, tokens, and their calibration.
fn calibrated(name: &str) -> (Decoder, Vec<u32>, Calibration) {
    let device = Device::flex();
    let model = Decoder::load(&golden(name), &device, FloatDType::F32).unwrap();
    let tokens: Vec<u32> = (0..96).map(|i| (i * i * 37 + 11) % 288).collect();
    let text = CalibrationText {
        length: 32,
        sequences: 3,
        products: false,
    };
    let calibration = calibrate(&model, &tokens, text).unwrap();
    (model, tokens, calibration)
}

#[test]
fn patterns_choose_fp8_for_whole_fused_groups() {
    let model = golden("llama3-tiny");
    let original = TensorFolder::open(&model).unwrap();
    let (_, _, calibration) = calibrated("llama3-tiny");
    for (dialect, scheme, scales, inputs) in [
        (
            Dialect::CompressedTensors,
            Scheme::W4a16,
            Fp8Scales::Channel,
            Fp8Inputs::HighPrecision,
        ),
        (
            Dialect::CompressedTensors,
            Scheme::W4a4,
            Fp8Scales::Channel,
            Fp8Inputs::PerToken,
        ),
        (
            Dialect::ModelOpt,
            Scheme::W4a16,
            Fp8Scales::Tensor,
            Fp8Inputs::Static,
        ),
        (
            Dialect::ModelOpt,
            Scheme::W4a4,
            Fp8Scales::Tensor,
            Fp8Inputs::Static,
        ),
    ] {
        let out = Scratch::new(&format!("fp8-{}-{}", dialect.name(), scheme.name()));
        let mut options = options(dialect, scheme, Method::Rtn);
        options.fp8 = regexes(&[r"0\.self_attn\.k_proj$", "down_proj"]);
        options.exclude = regexes(&[r"1\.self_attn\.o_proj$"]);
        let done = quantize_folder(&model, &out, &options, &calibration).unwrap();
        let checkpoint = Checkpoint::open(&out).unwrap();
        let in_fp8: Vec<&String> = checkpoint.fp8_layers().keys().collect();
        let expected = [
            "0.mlp.down",
            "0.self_attn.k",
            "0.self_attn.q",
            "0.self_attn.v",
            "1.mlp.down",
        ];
        assert_eq!(
            in_fp8,
            expected
                .map(|name| format!("model.layers.{name}_proj"))
                .each_ref()
        );
        assert_eq!(checkpoint.layers().len(), 8);
        assert!(
            checkpoint
                .layers()
                .values()
                .all(|it| { it.input_global.is_some() == (scheme == Scheme::W4a4) })
        );
        let group = ["q", "k", "v"].map(|it| format!("model.layers.0.self_attn.{it}_proj"));
        let values = |module: &String| {
            let tensor = original.get(&format!("{module}.weight")).unwrap();
            tensor.to_f32().unwrap()
        };
        let of_group = group.iter().map(|module| block_amax(&values(module)));
        let of_group = of_group.fold(0f32, f32::max);
        for module in in_fp8 {
            let weight = checkpoint.fp8_weight(module).unwrap();
            assert_eq!(
                (weight.format.scales, weight.format.inputs),
                (scales, inputs)
            );
            let original = values(module);
            let k = weight.shape[1];
            for (row, values) in original.chunks(k).enumerate() {
                let amax = match scales {
                    Fp8Scales::Channel => block_amax(values),
                    _ if group.contains(module) => of_group,
                    _ => block_amax(&original),
                };
                let scale = amax / 448.0;
                let found = weight.scales[row % weight.scales.len()];
                assert_eq!(found, scale, "{module}, {row}");
                for (value, code) in values.iter().zip(&weight.codes[row * k..]) {
                    assert_eq!(*code, e4m3::encode_element(value / scale));
                }
            }
            let largest = calibration.inputs[module].amax();
            let static_scale = (inputs == Fp8Inputs::Static).then_some(largest / 448.0);
            assert_eq!(weight.input_scale, static_scale, "{module}");
            let report = done.layers.iter().find(|it| it.module == *module).unwrap();
            assert_eq!(report.format, WeightFormat::Fp8);
            assert!(report.sqnr > 28.0, "{report:?}");
        }
        let device = Device::flex();
        Decoder::load_for_inference(&out, &device, FloatDType::F32, None).unwrap();
    }
}

#[test]
fn experts_of_a_layer_are_in_fp8_together() {
    let model = golden("qwen3moe-tiny");
    let out = Scratch::new("fp8-experts");
    let mut options = options(Dialect::CompressedTensors, Scheme::W4a16, Method::Rtn);
    options.fp8 = regexes(&[r"layers\.1\.mlp\.experts\.2\.up_proj$"]);
    quantize_folder(&model, &out, &options, &Calibration::new()).unwrap();
    let checkpoint = Checkpoint::open(&out).unwrap();
    let mut in_fp8 = checkpoint.fp8_layers().keys();
    assert!(in_fp8.all(|module| module.contains("layers.1.mlp.experts.")));
    assert_eq!(checkpoint.fp8_layers().len(), 12);
    Decoder::load_for_inference(&out, &Device::flex(), FloatDType::F32, None).unwrap();
}

#[test]
fn contradictory_options_are_refused() {
    let model = golden("llama3-tiny");
    let compressed = Dialect::CompressedTensors;
    for (dialect, fp8, exclude, smooth, says) in [
        (
            compressed,
            "k_proj",
            "q_proj",
            Smoothing::None,
            "fp8 and exclude both match",
        ),
        (
            compressed,
            "w7_proj",
            "q_proj",
            Smoothing::None,
            "fp8 is \"w7_proj\", which matches no",
        ),
        (
            compressed,
            "lm_head",
            "q_proj",
            Smoothing::None,
            "which matches no linear layer",
        ),
        (
            Dialect::ModelOpt,
            "o_proj",
            "q_proj",
            Smoothing::None,
            "static scales of their inputs",
        ),
        (
            compressed,
            "o_proj",
            "q_proj",
            Smoothing::Awq,
            "smooth is awq",
        ),
    ] {
        let out = Scratch::new("fp8-refused");
        let mut options = options(dialect, Scheme::W4a16, Method::Rtn);
        options.fp8 = regexes(&[fp8]);
        options.exclude = regexes(&[exclude]);
        options.smooth = smooth;
        let calibration = match smooth {
            Smoothing::None => Calibration::new(),
            Smoothing::Awq => calibrated("llama3-tiny").2,
        };
        let error = quantize_folder(&model, &out, &options, &calibration);
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains(says), "{error}\nnot: {says}");
    }
}

/// The measured divergence of a group is that of the folder in which only it is quantized; the
/// folder has the chosen formats, within the budget.
#[test]
fn bits_are_spent_where_the_divergence_decreases_most() {
    for (name, groups, unit) in [
        ("llama3-tiny", 8, "model.layers.1.mlp.down_proj"),
        ("qwen3moe-tiny", 6, "model.layers.0.self_attn.o_proj"),
    ] {
        let folder = golden(name);
        let (model, tokens, calibration) = calibrated(name);
        let mut options = options(Dialect::CompressedTensors, Scheme::W4a16, Method::Search);
        let choose = |bits: f64| {
            let text = (&tokens[..], 32);
            choose_formats(&folder, &model, &options, &calibration, text, bits)
        };
        for (bits, is_possible) in [(4.0, false), (4.4, false), (4.6, true), (16.0, false)] {
            let checked = check_bits(&folder, &options, bits);
            assert_eq!(checked.is_ok(), is_possible, "{name}: {bits}");
        }
        let choices = choose(7.0).unwrap();
        assert_eq!(choices, choose(7.0).unwrap(), "{name}: not deterministic");
        assert_eq!((choices.groups.len(), choices.tokens), (groups, 96));
        assert!(
            choices.bits <= 7.0 && choices.bits > 5.0,
            "{}",
            choices.bits
        );
        let cost = |choice: &budget::Choice, format| {
            let cost = choice.formats.iter().find(|it| it.format == format);
            cost.unwrap().kl
        };
        for choice in &choices.groups {
            let kl = [WeightFormat::Nvfp4, WeightFormat::Fp8].map(|it| cost(choice, it));
            assert!(kl[1] > 0.0 && kl[1] < kl[0], "{choice:?}");
            assert!(choice.why.contains("save"), "{choice:?}");
        }
        // With more bits, no group is more coarse in sum, and the sum of divergences decreases.
        let sum = |choices: &Choices| -> f64 {
            choices
                .groups
                .iter()
                .map(|choice| cost(choice, choice.format))
                .sum()
        };
        let [few, more] = [5.0, 9.0].map(|bits| sum(&choose(bits).unwrap()));
        assert!(few > sum(&choices) && sum(&choices) > more);

        let measured = choices
            .groups
            .iter()
            .find(|it| it.modules[0] == unit)
            .unwrap();
        for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
            let out = Scratch::new(&format!("bits-alone-{name}-{}", format.name()));
            let mut alone = options.clone();
            let others = TensorFolder::open(&folder).unwrap();
            let others = others.names().filter_map(|it| it.strip_suffix(".weight"));
            let others = others.filter(|it| it.ends_with("_proj") && *it != unit);
            let others = others.map(|it| Regex::new(&format!("^{}$", regex::escape(it))).unwrap());
            alone.exclude = others.collect();
            if format == WeightFormat::Fp8 {
                alone.fp8 = regexes(&[unit]);
            }
            quantize_folder(&folder, &out, &alone, &calibration).unwrap();
            let device = Device::flex();
            let changed = Decoder::load_for_inference(&out, &device, FloatDType::F32, None);
            let texts: Vec<Vec<u32>> = tokens.chunks(32).map(<[u32]>::to_vec).collect();
            let windows = Windows {
                length: 32,
                stride: 31,
            };
            let found = compare(&changed.unwrap(), &model, &texts, windows).unwrap();
            let nats: f64 = found.iter().map(|window| window.divergence).sum();
            let (found, expected) = (nats / 93.0, cost(measured, format));
            let error = (found - expected).abs() / expected;
            assert!(error < 1e-2, "{name}, {format:?}: {found}, not {expected}");
        }

        for bits in [4.4, 16.0, f64::NAN] {
            let error = choose(bits).unwrap_err().to_string();
            assert!(error.contains("this model allows at least 4.5"), "{error}");
        }
        options.formats = Some(choices.clone());
        let out = Scratch::new(&format!("bits-{name}"));
        let done = quantize_folder(&folder, &out, &options, &calibration).unwrap();
        assert_eq!(done.formats.as_ref(), Some(&choices));
        let checkpoint = Checkpoint::open(&out).unwrap();
        let mut bits = 0;
        for choice in &choices.groups {
            for module in &choice.modules {
                let expected = match checkpoint.format(module) {
                    None => WeightFormat::High,
                    Some(LayerFormat::Nvfp4(_)) => WeightFormat::Nvfp4,
                    Some(LayerFormat::Fp8(_)) => WeightFormat::Fp8,
                };
                assert_eq!(choice.format, expected, "{module}");
            }
        }
        bits += 8 * done.layers.iter().map(|layer| layer.bytes).sum::<usize>();
        let kept = done
            .kept
            .iter()
            .filter(|it| it.reason.reason() == "chosen by bits");
        bits += 8 * kept.map(|it| it.bytes).sum::<usize>();
        let weights: usize = choices.groups.iter().map(|choice| choice.weights).sum();
        assert_eq!(bits as f64 / weights as f64, choices.bits, "{name}");
        let json: serde_json::Value =
            crate::checkpoint::read_json(&out.join("nvfp4_quantize.json")).unwrap();
        assert_eq!(json["formats"]["budget"], 7.0);
        assert_eq!(json["formats"]["groups"].as_array().unwrap().len(), groups);
    }
}
