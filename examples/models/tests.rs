//! Tiny models, on the CPU.

use std::path::Path;

use burn::module::Module;
use burn::tensor::Device;
use nvfp4::state::assign_layer_ids;

use super::*;
use training::{Example, Settings, show, train};

const TINY: Settings = Settings {
    width: 32,
    layers: 2,
    batch: 16,
    steps: 40,
    learning_rate: 1e-2,
};

/// Trains a tiny model in NVFP4 for a few steps. Its loss on a fixed batch must fall below `factor`
/// times what it was.
#[track_caller]
fn trained<E: Example>(factor: f32) -> E {
    let device = Device::flex().autodiff();
    device.seed(0);
    let model = E::new(&TINY, &device);
    assign_layer_ids(&model);
    let loss = |model: &E| model.loss(64, u64::MAX).into_scalar::<f32>();
    let before = loss(&model);
    let (model, _) = train(model, &TINY).unwrap();
    let after = loss(&model);
    assert!(after < factor * before, "{before} -> {after}");
    model
}

#[test]
fn diffusion() {
    let model = trained::<nvfp4_layers::diffusion::Flux>(0.7);
    let folder = env::temp_dir().join(format!("nvfp4-models-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (packed, report) = training::packed(&model).unwrap();
    let [before, after] =
        [("samples", &model.valid()), ("packed", &packed)].map(|(name, model)| {
            show(model, &folder.join(name)).unwrap();
            std::fs::read(folder.join(name).with_extension("ppm")).unwrap()
        });
    std::fs::remove_dir_all(folder).unwrap();
    assert_eq!(before.len(), "P6 256 256 255\n".len() + 256 * 256 * 3);
    // The same noise becomes almost the same images.
    let distances = before
        .iter()
        .zip(&after)
        .map(|(a, b)| a.abs_diff(*b) as f32);
    let distance = distances.sum::<f32>() / before.len() as f32;
    assert!(distance > 0.0 && distance < 20.0, "{distance} of 255");
    let kept: Vec<_> = report.kept.iter().map(|kept| &kept.path[..]).collect();
    assert_eq!(kept, ["words.weight", "positions", "head"]);
    assert!(4 * report.bytes() < report.bytes_before(), "{report}");
}

#[test]
fn vision() {
    let model = trained::<nvfp4_layers::vision::Vit>(0.9);
    model.valid().show(Path::new("")).unwrap();
}

#[test]
fn convolution() {
    let model = trained::<nvfp4_layers::convolution::Cnn>(0.9);
    model.valid().show(Path::new("")).unwrap();
}

#[test]
fn translation() {
    let model = trained::<nvfp4_layers::translation::Seq>(0.9);
    model.valid().show(Path::new("")).unwrap();
}

/// The report names every layer that is not in NVFP4.
#[cfg(feature = "cpu")]
#[test]
fn the_report_names_convolutions() {
    use burn_layers::convolution::Cnn;

    nvfp4::decorate::install().unwrap();
    let model = Cnn::new(&Cnn::SETTINGS, &Device::cpu());
    let model = nvfp4::decorate(model, &nvfp4::Nvfp4Recipe::new()).unwrap();
    let report = nvfp4::decorate::report(&model).unwrap();
    let layers: Vec<_> = report.layers.keys().collect();
    assert_eq!(layers, ["hidden"]);
    let expected = ["convolutions.0", "convolutions.1", "head"];
    assert_eq!(report.left_alone, expected);
}

/// The unchanged model of burn-nn's layers trains after `decorate`, each linear layer in NVFP4.
/// CubeCL's CPU runtime takes seconds per step.
#[cfg(feature = "cpu")]
#[test]
fn decorated_vision() {
    nvfp4::decorate::install().unwrap();
    let device = nvfp4_test_support::cpu_runtime(Device::cpu).autodiff();
    device.seed(0);
    let settings = Settings {
        layers: 1,
        batch: 2,
        steps: 2,
        ..TINY
    };
    let model = training::decorated(burn_layers::vision::Vit::new(&settings, &device)).unwrap();
    let (model, losses) = train(model, &settings).unwrap();
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    let report = nvfp4::decorate::report(&model).unwrap();
    report.check().unwrap();
    assert_eq!(report.layers.len(), 7, "{report}");
    assert_eq!(report.left_alone, ["head"]);
}

#[test]
fn bad_arguments_are_refused() {
    let parse = |arguments: &[&str]| Options::parse(arguments.iter().map(|text| text.to_string()));
    let options = parse(&["vision", "--steps", "3", "--decorate"]).unwrap();
    assert_eq!((options.steps, options.decorate), (Some(3), true));
    let error = parse(&["vision", "--steps", "0"]).err().unwrap();
    assert!(error.to_string().contains("--steps is 0"), "{error}");
}
