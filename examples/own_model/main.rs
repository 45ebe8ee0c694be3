//! Trains a language model over bytes in NVFP4: `own_model TEXT_FILE`.
//!
//! It trains on the first GPU, or with `BURN_DEVICE=flex` for a few steps on the CPU. A second call
//! resumes from the folder `checkpoint`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::{env, fs};

use burn::config::Config;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::Initializer;
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use nvfp4::graph::{GraphSteps, copy_into};
use nvfp4::nn::{Embedding, LmHead, ResidualStream, RmsNorm, RmsNormConfig};
use nvfp4::nn::{RopeCache, RopeCacheConfig};
use nvfp4::optim::{AdamW, AdamWConfig, ParameterMoments};
use nvfp4::state::assign_layer_ids;
use nvfp4::{Nvfp4Error, Nvfp4Recipe, Nvfp4State};
use nvfp4::{Nvfp4TransformerBlock, Nvfp4TransformerBlockConfig};

#[cfg(test)]
mod tests;

const CONTEXT: usize = 128;

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    blocks: Vec<Nvfp4TransformerBlock>,
    norm: RmsNorm,
    head: LmHead,
    positions: RopeCache,
    #[module(skip)]
    activation: FloatDType,
}

impl Model {
    fn new(activation: FloatDType, device: &Device) -> Result<Self, Nvfp4Error> {
        let (width, heads, hidden, blocks) = (256, 4, 704, 4);
        let recipe = Nvfp4Recipe::preset("nvidia")?;
        let block = Nvfp4TransformerBlockConfig::new(width, heads, hidden);
        let block = block.with_recipe(recipe.clone());
        let blocks = (0..blocks).map(|_| block.try_init(device));
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        let model = Self {
            embedding: Embedding::new(normal.init([256, width], device)),
            blocks: blocks.collect::<Result<_, _>>()?,
            norm: RmsNormConfig::new(width)
                .with_epsilon(1e-6)
                .try_init(device)?,
            head: LmHead::new(normal.init([width, 256], device)),
            positions: RopeCacheConfig::new(CONTEXT, width / heads).try_init(device)?,
            activation,
        };
        // The random bits of a layer then depend only on its place in the model.
        assign_layer_ids(&model);
        // Selects the layers that stay in high precision; none with this recipe.
        recipe.apply(&model)?;
        Ok(model)
    }

    fn loss(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>, Nvfp4Error> {
        let x = self.embedding.try_forward_as(inputs, self.activation);
        let mut stream = ResidualStream::from(x?);
        for block in &self.blocks {
            let block = block.try_forward_stream(stream, &self.positions, None)?;
            stream = block.output;
        }
        let (_, x) = self.norm.forward_stream(stream);
        let [rows, time] = targets.dims();
        self.head.try_loss(x, targets.reshape([rows * time]))
    }
}

/// State that a step reads and writes. A graph needs all of it at constant addresses.
struct Run {
    model: Option<Model>,
    optimizer: AdamW,
    batch: Option<[Tensor<2, Int>; 2]>,
    loss: Option<Tensor<1>>,
}

impl Run {
    fn model(&self) -> &Model {
        self.model.as_ref().expect("a step puts it back")
    }

    /// Sets the batch of the next step. With `in_place`, writes it where the graph reads it.
    fn load(&mut self, new: [Tensor<2, Int>; 2], in_place: bool) -> Result<(), Nvfp4Error> {
        let [inputs, targets] = new;
        self.batch = Some(match self.batch.take() {
            Some([x, y]) if in_place => [copy_into(x, inputs)?, copy_into(y, targets)?],
            _ => [inputs, targets],
        });
        Ok(())
    }

    /// Takes a step. It reads nothing back from the device, so that a graph can capture it.
    fn step(&mut self) -> Result<(), Nvfp4Error> {
        let [inputs, targets] = self.batch.clone().expect("`load` sets it");
        let model = self.model.take().expect("a step puts it back");
        let loss = model.loss(inputs, targets)?;
        self.loss = Some(loss.clone().without_autodiff());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optimizer.try_step_begun(model, gradients)?);
        Ok(())
    }
}

/// Trains until step `steps` and returns the losses of its steps.
fn train(
    device: &Device,
    text: &[u8],
    steps: u64,
    folder: &Path,
) -> Result<Vec<f32>, Box<dyn Error>> {
    let is_gpu = *device == Device::cuda(0);
    // Parameters and moments are f32. Activations are bf16, which a CPU would have to emulate.
    let (activation, rows) = match is_gpu {
        true => (FloatDType::BF16, 64),
        false => (FloatDType::F32, 1),
    };
    let device = device.clone().autodiff();
    device.seed(0);
    let mut model = Model::new(activation, &device)?;
    let mut optimizer = AdamWConfig::default().try_init()?;
    if folder.join("progress.json").exists() {
        model = load(model, &mut optimizer, folder)?;
    }
    let mut run = Run {
        model: Some(model),
        optimizer,
        batch: None,
        loss: None,
    };
    let mut graph = match is_gpu {
        true => Some(GraphSteps::begin(run.model(), &device)?),
        false => None,
    };
    let mut losses = Vec::new();
    for step in run.optimizer.time()..steps {
        run.load(batch(text, step, rows, &device), graph.is_some())?;
        let learning_rate = 1e-3 * ((step + 1) as f64 / 100.0).min(1.0);
        run.optimizer.begin_step(learning_rate, &device)?;
        let mut outcome = Ok(());
        if let Some(graph) = &mut graph {
            // Calls the closure three times, captures the fourth call, and replays it from then on.
            graph.step(|| outcome = run.step())?;
        } else {
            outcome = run.step();
        }
        outcome?;
        let loss = run.loss.clone().expect("a step sets it");
        let loss = loss.into_scalar::<f32>();
        println!("step {}: loss {loss:.4}", step + 1);
        losses.push(loss);
        if (step + 1) % 100 == 0 || step + 1 == steps {
            save(run.model(), &run.optimizer, folder)?;
        }
    }
    Ok(losses)
}

/// Returns inputs and targets of a step. They depend only on the step, so that a run can resume.
fn batch(text: &[u8], step: u64, rows: usize, device: &Device) -> [Tensor<2, Int>; 2] {
    let starts = text.len() - CONTEXT;
    let row = |row| (step as usize * rows + row) * 7919 % starts;
    [0, 1].map(|shift| {
        let bytes = (0..rows).flat_map(|index| &text[row(index) + shift..][..CONTEXT]);
        let bytes: Vec<i32> = bytes.map(|byte| i32::from(*byte)).collect();
        Tensor::from_data(TensorData::new(bytes, [rows, CONTEXT]), device)
    })
}

/// State of a checkpoint besides parameters and moments.
#[derive(Config, Debug)]
struct Progress {
    /// Number of steps taken.
    step: u64,
    /// Offsets of the layers' random bits. Without them, a resumed run would repeat its first bits.
    layers: Nvfp4State,
}

fn save(model: &Model, optimizer: &AdamW, folder: &Path) -> Result<(), Box<dyn Error>> {
    // A folder is complete or absent: a run that is killed here resumes from the one before.
    let new = folder.with_extension("new");
    if new.exists() {
        fs::remove_dir_all(&new)?;
    }
    fs::create_dir_all(&new)?;
    model.clone().save_file(new.join("model.bpk"))?;
    for (file, is_second) in [("first.bpk", false), ("second.bpk", true)] {
        let mut moments = Moments {
            optimizer,
            is_second,
        };
        let moments = model.clone().map(&mut moments);
        moments.save_file(new.join(file))?;
    }
    let progress = Progress::new(optimizer.time(), Nvfp4State::collect(model));
    progress.save(new.join("progress.json"))?;
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::rename(new, folder)?;
    Ok(())
}

fn load(model: Model, optimizer: &mut AdamW, folder: &Path) -> Result<Model, Box<dyn Error>> {
    let progress = Progress::load(folder.join("progress.json"))?;
    let model = model.try_load_file(folder.join("model.bpk"))?;
    progress.layers.apply(&model)?;
    let values = |file: &str| -> Result<_, Box<dyn Error>> {
        let mut values = Values::default();
        let moments = model.clone().try_load_file(folder.join(file))?;
        moments.visit(&mut values);
        Ok(values.0)
    };
    let second = values("second.bpk")?.into_values();
    let moments = values("first.bpk")?.into_iter().zip(second);
    let moments = moments.map(|((id, first), second)| {
        let weight = None;
        let moments = ParameterMoments {
            first,
            second,
            weight,
        };
        (id, moments)
    });
    optimizer.restore(progress.step, moments.collect())?;
    Ok(model)
}

/// Replaces each parameter by one of its moments: Burn saves them as it saves a model.
struct Moments<'a> {
    optimizer: &'a AdamW,
    is_second: bool,
}

impl ModuleMapper for Moments<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, weight, mapper) = param.consume();
        let moments = &self.optimizer.moments()[&id.val()];
        let moment = match self.is_second {
            true => moments.second.clone(),
            false => moments.first.clone(),
        };
        Param::from_mapped_value(id, moment.reshape(weight.shape()), mapper)
    }
}

/// Flat values of all parameters, by id.
#[derive(Default)]
struct Values(BTreeMap<u64, Tensor<1>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val().without_autodiff();
        let elements = value.shape().num_elements();
        self.0.insert(param.id.val(), value.reshape([elements]));
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let text = fs::read(env::args().nth(1).ok_or("usage: own_model TEXT_FILE")?)?;
    if text.len() <= CONTEXT {
        return Err("the text is shorter than a sequence".into());
    }
    let device = Device::default();
    let steps = if device == Device::cuda(0) { 1000 } else { 4 };
    train(&device, &text, steps, Path::new("checkpoint"))?;
    Ok(())
}
