//! `nvfp4 generate`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::Args;
use nvfp4_lm::bytes::{generate, is_trained, load};
use nvfp4_lm::checkpoint::{Checkpoint, resolve};
use nvfp4_lm::decoder::generate::{Generation, TextStream};
use nvfp4_lm::decoder::{Decoder, HeadPrecision};
use nvfp4_lm::encoder::EncoderModel;
use nvfp4_lm::hf::{GenerationConfig, Tokenizer};
use nvfp4_lm::interchange::Scheme;
use nvfp4_lm::model::{LanguageModel, Transformer};
use nvfp4_lm::sampling::SamplingConfig;
use nvfp4_lm::text::{Characters, StopStrings};

use crate::decode_cost::KvName;
use crate::device::{ComputeType, DeviceName, install_decorator};

#[derive(Args)]
pub(crate) struct Generate {
    /// Load the model from this folder: one as Hugging Face has them, in high precision or
    /// quantized to NVFP4; or that of a run of `train`, of one of its recipes, or of a checkpoint
    ///
    /// A model of `train` goes on byte by byte: its tokens are bytes.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Continue this text
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Generate at most this many tokens
    #[arg(long, value_name = "N", default_value_t = 256)]
    tokens: usize,
    /// Divide the logits: 0 takes the most probable token [default: what the model's folder says,
    /// else 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Draw from this many most probable tokens [default: what the model's folder says, else all]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw from the most probable tokens that have this probability together [default: what the
    /// model's folder says, else 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Make tokens that the text has less probable; 1 changes nothing [default: what the model's
    /// folder says, else 1]
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f64>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed the choices
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Quantize activations of a quantized model (w4a4) or leave them as they are (w4a16) [default:
    /// what the model's folder says]
    #[arg(long, value_name = "SCHEME")]
    scheme: Option<Scheme>,
    /// Store keys and values so [default: fp8 where the model's folder quantizes the cache, else
    /// bf16]
    #[arg(long, value_name = "TYPE")]
    kv: Option<KvName>,
    /// Compute logits with the head in this precision: faster decoding, logits that differ a little
    /// [default: stored]
    #[arg(long, value_name = "TYPE")]
    head: Option<HeadPrecision>,
    /// Launch the kernels of a step one by one on a GPU, and not as a CUDA graph
    #[arg(long)]
    no_graph: bool,
    /// Compute in this type [default: bf16 on a GPU, f32 else]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<ComputeType>,
    /// Run on this device: flex, cpu or cuda:N [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
}

impl Generate {
    pub(crate) fn run(self) -> Result<()> {
        let name = DeviceName::or_best(self.device)?;
        match is_trained(&self.model)? {
            true => self.with_checkpoint(name),
            false => self.with_decoder(name),
        }
    }

    /// Text of a byte language model.
    fn with_checkpoint(self, name: DeviceName) -> Result<()> {
        for (option, is_given) in [
            ("scheme", self.scheme.is_some()),
            ("kv", self.kv.is_some()),
            ("head", self.head.is_some()),
            ("no-graph", self.no_graph),
            ("dtype", self.dtype.is_some()),
        ] {
            ensure!(
                !is_given,
                "{option} is given, but {} holds a model of `train`, which computes by the recipe \
                 that it was trained with: it is for models in Hugging Face folders",
                self.model.display()
            );
        }
        let path = resolve(&self.model)?;
        let device = name.open()?;
        let checkpoint = Checkpoint::load(&path)?;
        let wrong = || format!("cannot use checkpoint {}", path.display());
        if checkpoint.state.config.decorate.is_some() {
            install_decorator()?;
            let model: EncoderModel = load(checkpoint, &device).with_context(wrong)?;
            self.print_bytes(&model, &device)
        } else {
            let model: Transformer = load(checkpoint, &device).with_context(wrong)?;
            self.print_bytes(&model, &device)
        }
    }

    fn print_bytes(self, model: &impl LanguageModel, device: &Device) -> Result<()> {
        let sampling = self.sampling(&SamplingConfig {
            seed: self.seed,
            ..SamplingConfig::default()
        });
        let (mut characters, mut stops) = (Characters::default(), StopStrings::new(&self.stop)?);
        let mut out = std::io::stdout().lock();
        // With the first byte: by then everything has been checked.
        let mut begin = Some(&self.prompt);
        let chosen = (self.tokens, &sampling);
        generate(model, device, self.prompt.as_bytes(), chosen, |byte| {
            if let Some(prompt) = begin.take() {
                write!(out, "{prompt}")?;
            }
            write!(out, "{}", stops.push(&characters.push(&[byte])))?;
            out.flush()?;
            Ok(!stops.is_stopped())
        })?;
        if let Some(prompt) = begin {
            write!(out, "{prompt}")?;
        }
        writeln!(out, "{}", stops.finish(&characters.finish()))?;
        Ok(out.flush()?)
    }

    /// Text of a model in Hugging Face's layout.
    fn with_decoder(self, name: DeviceName) -> Result<()> {
        let dtype = ComputeType::or_of(self.dtype, name);
        let device: Device = name.open()?.without_autodiff();
        let model = Decoder::load_for_inference(&self.model, &device, dtype, self.scheme)?;
        let model = model.with_head(self.head.unwrap_or_default())?;
        let settings = GenerationConfig::read(&self.model, model.config())?;
        let tokenizer = Tokenizer::read(&self.model, model.config().vocab, &settings.eos)?;
        let prompt = tokenizer.encode(&self.prompt, true)?;
        let generation = Generation {
            most: self.tokens,
            sampling: self.sampling(&SamplingConfig::of(&settings, self.seed)),
            eos: settings.eos,
            graph: matches!(name, DeviceName::Cuda(_)) && !self.no_graph,
            kv: self.kv.map(KvName::precision),
            ..Generation::greedy(self.tokens)
        };
        let mut text = TextStream::new(&tokenizer, &self.stop)?;
        let mut out = std::io::stdout().lock();
        // With the first token: by then everything has been checked.
        let mut begin = Some(&self.prompt);
        model.generate(&[prompt], &generation, |_, token| {
            if let Some(prompt) = begin.take() {
                write!(out, "{prompt}")?;
            }
            write!(out, "{}", text.push(token)?)?;
            out.flush()?;
            Ok(!text.is_stopped())
        })?;
        writeln!(out, "{}", text.finish()?)?;
        Ok(out.flush()?)
    }

    /// What the folder of the model asks for, with the options over it.
    fn sampling(&self, of_folder: &SamplingConfig) -> SamplingConfig {
        let mut config = of_folder.clone();
        config.temperature = self.temperature.unwrap_or(config.temperature);
        config.top_k = self.top_k.or(config.top_k);
        config.top_p = self.top_p.unwrap_or(config.top_p);
        config.repetition_penalty = self.repetition_penalty.unwrap_or(config.repetition_penalty);
        config
    }
}
