//! `nvfp4 generate`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::Args;
use nvfp4_lm::bytes::{generate, is_trained, load};
use nvfp4_lm::checkpoint::resolve;
use nvfp4_lm::decoder::Decoder;
use nvfp4_lm::decoder::generate::{Generation, TextStream};
use nvfp4_lm::encoder::EncoderModel;
use nvfp4_lm::hf::{DecoderConfig, GenerationConfig, Tokenizer};
use nvfp4_lm::model::{LanguageModel, Transformer};
use nvfp4_lm::sampling::SamplingConfig;
use nvfp4_lm::text::{Characters, StopStrings};
use nvfp4_lm::tokens::ChatTemplate;
use nvfp4_lm::tokens::chat::Message;
use nvfp4_lm::train::Checkpoint;

use crate::device::install_decorator;
use crate::options::shared::{DecodingOptions, InferenceOptions, KvName};
use crate::terminal::note;

/// Default limit on the number of generated tokens.
const TOKENS: usize = 256;

#[derive(Args)]
pub(crate) struct Generate {
    /// Load the model from this folder: a Hugging Face folder, in high precision or quantized to
    /// NVFP4, or the folder of a `train` run, of one of its recipes, or of a checkpoint
    ///
    /// The tokens of a model trained by `train` are bytes.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Continue this text
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Treat the prompt as a user message, in the chat template of the model's folder
    #[arg(long, conflicts_with = "no_special_tokens")]
    chat: bool,
    /// Do not add special tokens to the prompt
    ///
    /// By default, a prompt begins with one start-of-text token if the tokenizer has one.
    #[arg(long)]
    no_special_tokens: bool,
    /// Generate at most this many tokens [default: from the model's folder, else 256; limited by
    /// the model's maximum context]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Divide the logits by this temperature; 0 takes the most probable token [default: from the
    /// model's folder, else 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Sample from this many most probable tokens [default: from the model's folder, else all]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the most probable tokens whose probabilities sum to this value [default: from
    /// the model's folder, else 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Penalize tokens that already occur in the text; 1 disables the penalty [default: from the
    /// model's folder, else 1]
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f64>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed the random numbers: sampling
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    decoding: DecodingOptions,
    #[command(flatten)]
    inference: InferenceOptions,
}

impl Generate {
    pub(crate) fn run(self) -> Result<()> {
        match is_trained(&self.model)? {
            true => self.with_checkpoint(),
            false => self.with_decoder(),
        }
    }

    /// Generates text with a byte language model.
    fn with_checkpoint(self) -> Result<()> {
        for (option, is_given) in [
            ("scheme", self.inference.scheme.is_some()),
            ("kv", self.decoding.kv.is_some()),
            ("head", self.decoding.head.is_some()),
            ("no-graph", self.decoding.no_graph),
            ("chat", self.chat),
            ("no-special-tokens", self.no_special_tokens),
            ("dtype", self.inference.compute.dtype.is_some()),
        ] {
            ensure!(
                !is_given,
                "{option} is given, but {} holds a model of `train`, which computes by the recipe \
                 that it was trained with: it is for models in Hugging Face folders",
                self.model.display()
            );
        }
        let path = resolve(&self.model)?;
        let device = self.inference.compute.device.name()?.open()?;
        let checkpoint = Checkpoint::load(&path)?;
        let wrong = || format!("cannot use checkpoint {}", path.display());
        if checkpoint.state.run.config.decorate.is_some() {
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
        // Print the prompt with the first byte: by then everything has been checked.
        let mut begin = Some(&self.prompt);
        let chosen = (self.tokens.unwrap_or(TOKENS), &sampling);
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

    /// Generates text with a model in Hugging Face format.
    fn with_decoder(self) -> Result<()> {
        let InferenceOptions { scheme, compute } = self.inference;
        let (name, device, dtype) = compute.open()?;
        let model = Decoder::load_for_inference(&self.model, &device, dtype, scheme)?;
        let model = model.with_head(self.decoding.head.unwrap_or_default())?;
        let settings = GenerationConfig::read(&self.model, model.config())?;
        let tokenizer = Tokenizer::read(&self.model, model.config().vocab, &settings.eos)?;
        let sampling = self.sampling(&SamplingConfig::of(&settings, self.seed));
        settings.check_supported(sampling.temperature != 0.0)?;
        let prompt = self.prompt_tokens(&tokenizer)?;
        let most = self.most(&settings, prompt.len(), model.config())?;
        let generation = Generation {
            sampling,
            eos: settings.eos,
            graph: self.decoding.graph(name),
            kv: self.decoding.kv.map(KvName::precision),
            ..Generation::greedy(most)
        };
        let mut text = TextStream::new(&tokenizer, &self.stop)?;
        let mut out = std::io::stdout().lock();
        // Print the prompt with the first token: by then everything has been checked.
        let mut begin = Some(&self.prompt);
        let added = model.generate(&[prompt], &generation, |_, token| {
            if let Some(prompt) = begin.take() {
                write!(out, "{prompt}")?;
            }
            write!(out, "{}", text.push(token)?)?;
            out.flush()?;
            Ok(!text.is_stopped())
        })?;
        let is_stopped = text.is_stopped();
        writeln!(out, "{}", text.finish()?)?;
        out.flush()?;
        // The text was cut by the model's limit, not by an option.
        if self.tokens.is_none() && added[0].len() == most && most < TOKENS && !is_stopped {
            note!("ended after {most} tokens: the model or its folder allows no more");
        }
        Ok(())
    }

    /// Returns the tokens of the prompt.
    fn prompt_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        if self.no_special_tokens {
            return tokenizer.encode(&self.prompt, false);
        }
        if !self.chat {
            return tokenizer.encode_text(&self.prompt);
        }
        let template = ChatTemplate::read(&self.model)?.with_context(|| {
            format!(
                "chat is given, but {} has no chat template",
                self.model.display()
            )
        })?;
        let message = Message {
            role: "user".into(),
            content: self.prompt.clone(),
        };
        // The template writes special tokens itself.
        tokenizer.encode(&template.render(&[message], true)?, false)
    }

    /// Returns the maximum number of tokens to add to a prompt of `prompt` tokens.
    fn most(
        &self,
        settings: &GenerationConfig,
        prompt: usize,
        config: &DecoderConfig,
    ) -> Result<usize> {
        config.check_length("the length of the prompt", prompt)?;
        if let Some(tokens) = self.tokens {
            let total = prompt + tokens;
            let what =
                format!("tokens is {tokens}, with a prompt of {prompt} the length of the text");
            config.check_length(&what, total)?;
            return Ok(tokens);
        }
        let asked = settings.max_new_tokens.unwrap_or(TOKENS);
        let longest = settings.max_length.unwrap_or(usize::MAX);
        Ok(asked.min(longest.min(config.longest()).saturating_sub(prompt)))
    }

    /// Returns the sampling parameters of the model's folder, overridden by the options.
    fn sampling(&self, of_folder: &SamplingConfig) -> SamplingConfig {
        let mut config = of_folder.clone();
        config.temperature = self.temperature.unwrap_or(config.temperature);
        config.top_k = self.top_k.or(config.top_k);
        config.top_p = self.top_p.unwrap_or(config.top_p);
        config.repetition_penalty = self.repetition_penalty.unwrap_or(config.repetition_penalty);
        config
    }
}
