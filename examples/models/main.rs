//! Trains small models in `f32` and in NVFP4: `models MODEL [--decorate] [--steps N]`.
//!
//! MODEL is `diffusion`, `vision`, `convolution` or `translation`, each in a file of its name. All
//! train on generated data, on the device that `BURN_DEVICE` names (by default the first GPU of a
//! build with `cuda`, otherwise the CPU).
//!
//! The files of the models take their layers from `super::nn`. They are compiled twice below: with
//! the layers of burn-nn, and with those of `nvfp4::nn`. `--decorate` decorates the layers of burn-nn
//! instead.

// Both modules below have the same files.
#![allow(clippy::duplicate_mod)]

use std::env;
use std::error::Error;

use training::compare;

mod shapes;
#[cfg(test)]
mod tests;
mod training;

#[path = "."]
mod burn_layers {
    use burn::nn;

    pub mod convolution;
    pub mod diffusion;
    pub mod translation;
    pub mod vision;
}

#[path = "."]
mod nvfp4_layers {
    use nvfp4::nn;

    pub mod convolution;
    pub mod diffusion;
    pub mod translation;
    pub mod vision;
}

#[derive(Default)]
struct Options {
    model: String,
    decorate: bool,
    steps: Option<u64>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--decorate" => options.decorate = true,
                "--steps" => {
                    let steps = arguments.next().ok_or("--steps needs a number")?;
                    let number = steps.parse().ok().filter(|steps| *steps > 0);
                    let message = format!("--steps is {steps}, but must be an integer above 0");
                    options.steps = Some(number.ok_or(message)?);
                }
                model => options.model = model.into(),
            }
        }
        Ok(options)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    use {burn_layers as burns, nvfp4_layers as ours};

    let options = Options::parse(env::args().skip(1))?;
    if options.decorate {
        nvfp4::decorate::install()?;
    }
    let Options {
        model,
        decorate,
        steps,
    } = options;
    match model.as_str() {
        "diffusion" => compare::<burns::diffusion::Flux, ours::diffusion::Flux>(decorate, steps),
        "vision" => compare::<burns::vision::Vit, ours::vision::Vit>(decorate, steps),
        "convolution" => {
            compare::<burns::convolution::Cnn, ours::convolution::Cnn>(decorate, steps)
        }
        "translation" => {
            compare::<burns::translation::Seq, ours::translation::Seq>(decorate, steps)
        }
        model => {
            let models = "diffusion, vision, convolution or translation";
            Err(format!("MODEL is `{model}`, but must be {models}").into())
        }
    }
}
