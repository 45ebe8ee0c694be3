//! Training, and the comparison of `f32` with NVFP4.

use std::array;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::optim::GradientsParams;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Int, Tensor, TensorData};
use nvfp4::optim::AdamWConfig;
use nvfp4::state::assign_layer_ids;
use nvfp4::{QuantizeConfig, QuantizeReport, quantize};

/// Size of a model and of its training.
#[derive(Clone, Copy)]
pub struct Settings {
    pub width: usize,
    pub layers: usize,
    pub batch: usize,
    pub steps: u64,
    pub learning_rate: f64,
}

/// A model with its data.
pub trait Example: Module {
    const SETTINGS: Settings;

    fn new(settings: &Settings, device: &Device) -> Self;

    /// Returns the loss of a batch; different seeds have different batches.
    fn loss(&self, batch: usize, seed: u64) -> Tensor<1>;

    /// Applies the trained model, and returns what came out. Files start with `name`.
    fn show(&self, name: &Path) -> Result<String, Box<dyn Error>>;

    /// Returns the device of the parameters.
    fn device(&self) -> Device {
        self.devices().swap_remove(0)
    }
}

/// Random numbers of the data. They are equal on all devices.
pub struct Random(pub u64);

impl Random {
    /// Returns `N` numbers below `bound`.
    pub fn below<const N: usize>(&mut self, bound: usize) -> [usize; N] {
        array::from_fn(|_| {
            // SplitMix64.
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (x ^ (x >> 31)) as usize % bound
        })
    }
}

pub fn ids<const D: usize>(ids: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(ids, shape), device)
}

/// Returns a parameter with normal values.
pub fn normal<const D: usize>(shape: [usize; D], std: f64, device: &Device) -> Param<Tensor<D>> {
    Initializer::Normal { mean: 0.0, std }.init(shape, device)
}

/// Returns the fraction of `found` that equals `expected`, in percent.
pub fn percent_equal<const D: usize>(found: Tensor<D, Int>, expected: Tensor<D, Int>) -> f32 {
    100.0 * found.equal(expected).float().mean().into_scalar::<f32>()
}

/// Trains `model`, and returns it with the loss of each step.
pub fn train<E: Example>(
    mut model: E,
    settings: &Settings,
) -> Result<(E, Vec<f32>), Box<dyn Error>> {
    let mut optimizer = AdamWConfig::default().try_init()?;
    let mut losses = Vec::new();
    for step in 0..settings.steps {
        let loss = model.loss(settings.batch, step);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let remaining = 1.0 - step as f64 / settings.steps as f64;
        let warm_up = ((step + 1) as f64 / 20.0).min(1.0);
        let learning_rate = settings.learning_rate * warm_up.min(remaining);
        model = optimizer.try_step(learning_rate, model, gradients)?;
    }
    Ok((model, losses))
}

/// Trains a model and prints its loss: `name` is that of the arithmetic.
fn run<E: Example>(model: E, name: &str, settings: &Settings) -> Result<E, Box<dyn Error>> {
    model.device().seed(0);
    let start = Instant::now();
    let (model, losses) = train(model, settings)?;
    let seconds = start.elapsed().as_secs_f64();
    let last = &losses[losses.len() - losses.len().div_ceil(20)..];
    let last = last.iter().sum::<f32>() / last.len() as f32;
    let shown = show(&model.valid(), Path::new(name))?;
    println!(
        "{name:5}  loss {:.4} -> {last:.4} in {seconds:.0} s; {shown}",
        losses[0]
    );
    Ok(model)
}

/// Applies a trained model, always with the same random numbers.
pub fn show<E: Example>(model: &E, name: &Path) -> Result<String, Box<dyn Error>> {
    model.device().seed(1);
    model.show(name)
}

/// Packs the weights of a trained model for inference. Returns it with what was packed.
pub fn packed<E: Example>(model: &E) -> Result<(E, QuantizeReport), Box<dyn Error>> {
    Ok(quantize(model.valid(), &QuantizeConfig::new())?)
}

/// Trains `B`, which has the layers of burn-nn, in f32, and `N` or a decorated `B` in NVFP4.
pub fn compare<B: Example, N: Example>(
    decorate: bool,
    steps: Option<u64>,
) -> Result<(), Box<dyn Error>> {
    let device = Device::default();
    device.seed(0);
    let mut settings = B::SETTINGS;
    settings.steps = steps.unwrap_or(settings.steps);
    println!("{} steps on {device:?}", settings.steps);
    let device = device.autodiff();
    // All start with the same parameters: a record of Burn's layers is one of ours.
    let start = B::new(&settings, &device).into_record().into_bytes()?;
    let start = || ModuleRecord::from_bytes(start.clone());
    let model = B::new(&settings, &device).load_record(start()?);
    // Before the first run, because some devices cannot run decorated models.
    let decorated = match decorate {
        true => Some(decorated(B::new(&settings, &device).load_record(start()?))?),
        false => None,
    };
    run(model, "f32", &settings)?;
    if let Some(model) = decorated {
        return run_decorated(model, &settings);
    }
    let model = N::new(&settings, &device).load_record(start()?);
    // The random bits of a layer then depend only on its place in the model.
    assign_layer_ids(&model);
    let model = run(model, "NVFP4", &settings)?;
    let (model, report) = packed(&model)?;
    println!("packed {}", show(&model, Path::new("packed"))?);
    print!("{report}");
    Ok(())
}

/// Decorates a model of burn-nn's layers.
pub fn decorated<E: Example>(model: E) -> Result<E, Box<dyn Error>> {
    let model = nvfp4::decorate(model, &nvfp4::Nvfp4Recipe::new())?;
    assign_layer_ids(&model);
    Ok(model)
}

fn run_decorated<E: Example>(model: E, settings: &Settings) -> Result<(), Box<dyn Error>> {
    let model = run(model, "NVFP4", settings)?;
    let report = nvfp4::decorate::report(&model)?;
    print!("{report}");
    Ok(report.check()?)
}
