//! `nvfp4 generate`.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
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

use crate::adapter;
use crate::chat::converse;
use crate::device::install_decorator;
use crate::options::shared::{DecodingOptions, InferenceOptions};
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
    /// Apply the LoRA adapters in this folder, in PEFT's format
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Continue this text
    #[arg(long, value_name = "TEXT", required_unless_present = "chat")]
    prompt: Option<String>,
    /// Treat the prompt as a user message, in the chat template of the model's folder; without
    /// --prompt, hold a conversation
    ///
    /// A conversation reads one message per line from the standard input until its end or a line
    /// `/exit`; a line `/reset` drops the messages so far. Any other line of a slash and one word is
    /// not sent. If the conversation exceeds the model's maximum context, the command ends with an
    /// error.
    #[arg(long, conflicts_with = "no_special_tokens")]
    chat: bool,
    /// Begin the chat with this system message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
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
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Sample from the K most probable tokens [default: from the model's folder, else all]
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
            ("adapter", self.adapter.is_some()),
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
        let prompt = self.prompt.as_deref().context("prompt is not given")?;
        let sampling = self.sampling(&SamplingConfig {
            seed: self.seed,
            ..SamplingConfig::default()
        })?;
        let (mut characters, mut stops) = (Characters::default(), StopStrings::new(&self.stop)?);
        let mut out = std::io::stdout().lock();
        // Print the prompt with the first byte: by then everything has been checked.
        let mut begin = Some(prompt);
        let chosen = (self.tokens.unwrap_or(TOKENS), &sampling);
        generate(model, device, prompt.as_bytes(), chosen, |byte| {
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
        let template = self.chat.then(|| self.template()).transpose()?;
        let InferenceOptions { scheme, compute } = self.inference;
        let (name, device, dtype) = compute.open()?;
        let model = Decoder::load_for_inference(&self.model, &device, dtype, scheme)?;
        let model = adapter::applied(model, &self.model, self.adapter.as_deref())?;
        let model = model.with_head(self.decoding.head.unwrap_or_default())?;
        let settings = GenerationConfig::read(&self.model, model.config())?;
        let tokenizer = Tokenizer::read(&self.model, model.config().vocab, &settings.eos)?;
        let sampling = self.sampling(&SamplingConfig::of(&settings, self.seed))?;
        settings.check_supported(sampling.temperature != 0.0)?;
        let generation = Generation {
            sampling,
            eos: settings.eos.clone(),
            graph: self.decoding.graph(name),
            kv: self.decoding.kv,
            ..Generation::greedy(0)
        };
        let mut writer = TextWriter {
            model: &model,
            tokenizer: &tokenizer,
            stops: &self.stop,
            generation,
        };
        let mut out = std::io::stdout().lock();
        match (self.prompt.as_deref(), template) {
            (Some(prompt), template) => {
                let tokens = self.prompt_tokens(prompt, template.as_ref(), &tokenizer)?;
                let most = self.most(&settings, tokens.len(), model.config())?;
                writer.generation.most = most;
                // A chat prints the answer alone.
                let shown = if template.is_some() { "" } else { prompt };
                let written = writer.write(tokens, shown, &mut out)?;
                // The text was cut by the model's limit, not by an option.
                if self.tokens.is_none() && written.is_cut && most < TOKENS {
                    note!("ended after {most} tokens: the model or its folder allows no more");
                }
                Ok(())
            }
            (None, Some(template)) => self.converse(&template, &settings, &mut writer, &mut out),
            (None, None) => bail!("prompt is not given"),
        }
    }

    /// Holds a conversation on standard input and output. Every answer is computed from all
    /// messages.
    fn converse<W: Write>(
        &self,
        template: &ChatTemplate,
        settings: &GenerationConfig,
        writer: &mut TextWriter<'_>,
        out: &mut W,
    ) -> Result<()> {
        let longest = settings.max_length.unwrap_or(usize::MAX);
        let longest = longest.min(writer.model.config().longest());
        let asked = self.tokens.or(settings.max_new_tokens).unwrap_or(TOKENS);
        let input = std::io::stdin();
        let has_mark = input.is_terminal();
        converse(
            input.lock(),
            out,
            self.system(),
            has_mark,
            |messages, out| {
                let tokens = writer
                    .tokenizer
                    .encode(&template.render(messages, true)?, false)?;
                let length = tokens.len();
                ensure!(
                    length < longest,
                    "the conversation has {length} tokens, but the model or its folder allows \
                 {longest}, with the answer: begin a new one"
                );
                let most = asked.min(longest - length);
                writer.generation.most = most;
                let written = writer.write(tokens, "", out)?;
                ensure!(
                    !written.is_cut || most < longest - length,
                    "the answer is cut: the conversation has {longest} tokens, and the model or its \
                 folder allows no more; begin a new one"
                );
                if written.is_cut {
                    note!("the answer is cut after {most} tokens (--tokens)");
                }
                // The next answer draws other random numbers.
                let seed = &mut writer.generation.sampling.seed;
                *seed = seed.wrapping_add(1);
                Ok(written.text)
            },
        )
    }

    /// Returns the system message, if there is one.
    fn system(&self) -> Option<Message> {
        let text = self.system.as_deref();
        text.map(|text| Message::new("system", text))
    }

    /// Returns the chat template of the model's folder.
    fn template(&self) -> Result<ChatTemplate> {
        ChatTemplate::read(&self.model)?.with_context(|| {
            format!(
                "chat is given, but {} has no chat template",
                self.model.display()
            )
        })
    }

    /// Returns the tokens of `prompt`, in `template` if there is one.
    fn prompt_tokens(
        &self,
        prompt: &str,
        template: Option<&ChatTemplate>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>> {
        match template {
            _ if self.no_special_tokens => tokenizer.encode(prompt, false),
            None => tokenizer.encode_text(prompt),
            Some(template) => {
                let messages = self
                    .system()
                    .into_iter()
                    .chain([Message::new("user", prompt)]);
                let messages: Vec<Message> = messages.collect();
                // The template writes special tokens itself.
                tokenizer.encode(&template.render(&messages, true)?, false)
            }
        }
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
    ///
    /// # Errors
    /// Returns an error if an option restricts the sampling, but tokens are not sampled.
    fn sampling(&self, of_folder: &SamplingConfig) -> Result<SamplingConfig> {
        let mut config = of_folder.clone();
        config.temperature = self.temperature.unwrap_or(config.temperature);
        config.top_k = self.top_k.or(config.top_k);
        config.top_p = self.top_p.unwrap_or(config.top_p);
        config.repetition_penalty = self.repetition_penalty.unwrap_or(config.repetition_penalty);
        for (name, is_given) in [
            ("top-k", self.top_k.is_some()),
            ("top-p", self.top_p.is_some()),
        ] {
            ensure!(
                !is_given || config.temperature != 0.0,
                "{name} is given, but temperature is 0, which takes the most probable token: give \
                 --temperature 1, or leave {name} out"
            );
        }
        Ok(config)
    }
}

/// Generates texts with a decoder and writes them as they come.
struct TextWriter<'a> {
    model: &'a Decoder,
    tokenizer: &'a Tokenizer,
    /// Texts before which a text ends.
    stops: &'a [String],
    generation: Generation,
}

/// A text that was written.
struct Written {
    text: String,
    /// True if the text ended because it has the maximum number of tokens.
    is_cut: bool,
}

impl TextWriter<'_> {
    /// Writes the continuation of `prompt` to `out`, after `begin`, and ends the line.
    fn write(&self, prompt: Vec<u32>, begin: &str, out: &mut impl Write) -> Result<Written> {
        let mut stream = TextStream::new(self.tokenizer, self.stops)?;
        let mut text = String::new();
        // Written with the first token: by then everything has been checked.
        let mut begin = Some(begin);
        let added = self
            .model
            .generate(&[prompt], &self.generation, |_, token| {
                let piece = stream.push(token)?;
                write!(out, "{}{piece}", begin.take().unwrap_or_default())?;
                out.flush()?;
                text += &piece;
                Ok(!stream.is_stopped())
            })?;
        let is_stopped = stream.is_stopped();
        let piece = stream.finish()?;
        writeln!(out, "{}{piece}", begin.unwrap_or_default())?;
        out.flush()?;
        Ok(Written {
            text: text + &piece,
            is_cut: added[0].len() == self.generation.most && !is_stopped,
        })
    }
}
