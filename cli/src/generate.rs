//! `nvfp4 generate`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use burn::tensor::Device;
use clap::Args;
use nvfp4_lm::decoder::generate::{Generation, TextStream};
use nvfp4_lm::decoder::{Decoder, sampling::SamplingConfig};
use nvfp4_lm::hf::{GenerationConfig, Tokenizer};
use nvfp4_lm::interchange::Scheme;

use crate::decode_cost::KvName;
use crate::device::{ComputeType, DeviceName};

#[derive(Args)]
pub(crate) struct Generate {
    /// Load the model from this folder, as Hugging Face has them: in high precision, or quantized to
    /// NVFP4
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
    /// Store keys and values so [default: fp8 where the model's folder quantizes the cache, else bf16]
    #[arg(long, value_name = "TYPE")]
    kv: Option<KvName>,
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
        let dtype = ComputeType::or_of(self.dtype, name);
        let device: Device = name.open()?.without_autodiff();
        let model = Decoder::load_for_inference(&self.model, &device, dtype, self.scheme)?;
        let settings = GenerationConfig::read(&self.model, model.config())?;
        let tokenizer = Tokenizer::read(&self.model, model.config().vocab, &settings.eos)?;
        let prompt = tokenizer.encode(&self.prompt, true)?;
        let generation = Generation {
            most: self.tokens,
            sampling: self.sampling(&settings),
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
    fn sampling(&self, settings: &GenerationConfig) -> SamplingConfig {
        let mut config = SamplingConfig::of(settings, self.seed);
        config.temperature = self.temperature.unwrap_or(config.temperature);
        config.top_k = self.top_k.or(config.top_k);
        config.top_p = self.top_p.unwrap_or(config.top_p);
        config.repetition_penalty = self.repetition_penalty.unwrap_or(config.repetition_penalty);
        config
    }
}
