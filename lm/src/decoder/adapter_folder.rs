//! A folder of LoRA adapters in PEFT's format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use crate::checkpoint::read_json;
use crate::hf::folder::{ADAPTER_FILE, check_adapter_folder};
use crate::hf::tensors::list;
use crate::hf::{StoredTensor, TensorFolder, is_neutral};

/// File with the adapters' tensors.
pub(super) const TENSORS: &str = "adapter_model.safetensors";
/// Tensors of one adapter.
pub(super) const PARTS: [&str; 2] = ["lora_A", "lora_B"];
/// Prefix of the names of tensors.
const PREFIX: &str = "base_model.model.";

/// Returns the name of the tensor `part` of the adapter of `module`.
pub(super) fn tensor_name(module: &str, part: &str) -> String {
    format!("{PREFIX}{module}.{part}.weight")
}

/// Fields of `adapter_config.json` that do not change what the tensors compute. The tensors
/// themselves say which modules have adapters.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Values of `init_lora_weights` that leave the weights of the model as they were.
const INITIALIZATIONS: [&str; 3] = ["eva", "gaussian", "orthogonal"];

/// A folder of LoRA adapters: `adapter_config.json` and `adapter_model.safetensors`.
#[derive(Debug)]
pub struct AdapterFolder {
    path: PathBuf,
    config: Config,
    tensors: TensorFolder,
}

/// What the computation needs of `adapter_config.json`.
#[derive(Debug)]
struct Config {
    base: Option<String>,
    rank: usize,
    scale: f64,
    /// Names of modules, or their ends; empty if the field is a pattern.
    targets: Vec<String>,
}

impl Config {
    fn from_json(json: &Map<String, Value>) -> Result<Self> {
        let kind = json.get("peft_type").unwrap_or(&Value::Null);
        ensure!(
            kind == "LORA",
            "`peft_type` is {kind}, but only adapters of type \"LORA\" are supported"
        );
        for (field, value) in json {
            let is_supported = match &**field {
                "peft_type" | "r" | "lora_alpha" => true,
                "use_rslora" => value.is_null() || value.is_boolean(),
                "bias" => value == "none",
                "init_lora_weights" => {
                    let is_known = || INITIALIZATIONS.iter().any(|name| value == name);
                    value.is_null() || value.is_boolean() || is_known()
                }
                name => HARMLESS.contains(&name) || is_neutral(name, value),
            };
            ensure!(
                is_supported,
                "`{field}` is {value}, which is not supported: it changes what the adapters compute"
            );
        }
        let field = |name: &str| json.get(name).unwrap_or(&Value::Null);
        let (rank, alpha) = (field("r"), field("lora_alpha"));
        let read = rank.as_u64().filter(|rank| *rank > 0);
        let read = read.with_context(|| format!("`r` is {rank}, but must be a rank of at least 1"));
        let rank = read? as usize;
        let read = alpha.as_f64();
        let alpha =
            read.with_context(|| format!("`lora_alpha` is {alpha}, but must be a number"))?;
        let is_rank_stabilized = json.get("use_rslora") == Some(&Value::Bool(true));
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let targets = json.get("target_modules").and_then(Value::as_array);
        Ok(Self {
            base: json.get("base_model_name_or_path").and_then(text),
            rank,
            scale: match is_rank_stabilized {
                true => alpha / (rank as f64).sqrt(),
                false => alpha / rank as f64,
            },
            targets: targets.into_iter().flatten().filter_map(text).collect(),
        })
    }
}

impl AdapterFolder {
    /// Opens the adapters in `folder`.
    ///
    /// # Errors
    /// Returns an error if a file is absent or malformed, or a field of the configuration asks for
    /// an unsupported kind of adapter.
    pub fn read(folder: &Path) -> Result<Self> {
        let context = || format!("adapter {}", folder.display());
        check_adapter_folder(folder).with_context(context)?;
        for file in [ADAPTER_FILE, TENSORS] {
            ensure!(folder.join(file).exists(), "{} has no {file}", context());
        }
        let path = folder.join(ADAPTER_FILE);
        let json = read_json(&path)?;
        let config = Config::from_json(&json).with_context(|| path.display().to_string())?;
        Ok(Self {
            path: folder.to_owned(),
            config,
            tensors: TensorFolder::open_file(&folder.join(TENSORS))?,
        })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder or the name of the model beside which the adapters were trained, if it is
    /// known.
    pub fn base(&self) -> Option<&str> {
        self.config.base.as_deref()
    }

    /// Returns the rank of all adapters.
    pub fn rank(&self) -> usize {
        self.config.rank
    }

    /// Returns the scale of the adapters' output.
    pub(super) fn scale(&self) -> f64 {
        self.config.scale
    }

    /// Returns the adapters by the names of their modules.
    ///
    /// # Errors
    /// Returns an error if there is none, if a tensor is not one of an adapter, or if a target has
    /// no adapter.
    pub(crate) fn modules(&self) -> Result<BTreeMap<&str, StoredAdapter<'_>>> {
        let mut modules = BTreeMap::<&str, StoredAdapter<'_>>::new();
        let mut unknown = Vec::new();
        for tensor in self.tensors.iter() {
            let found = tensor.name.strip_prefix(PREFIX).and_then(|name| {
                let (module, part) = name.strip_suffix(".weight")?.rsplit_once('.')?;
                Some((module, PARTS.iter().position(|name| *name == part)?))
            });
            let Some((module, part)) = found else {
                unknown.push(format!("`{}`", tensor.name));
                continue;
            };
            let adapter = modules.entry(module).or_insert(StoredAdapter {
                module,
                rank: self.config.rank,
                parts: [None, None],
            });
            adapter.parts[part] = Some(tensor);
        }
        ensure!(
            unknown.is_empty(),
            "{TENSORS} has tensors that are of no LoRA adapter: {}",
            list(&unknown)
        );
        ensure!(!modules.is_empty(), "{TENSORS} has no adapter");
        for target in &self.config.targets {
            let is_of = |module: &&str| {
                let before = module.strip_suffix(&**target);
                before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
            };
            ensure!(
                modules.keys().any(is_of),
                "`target_modules` of {ADAPTER_FILE} has `{target}`, but {TENSORS} has no adapter of \
                 such a module"
            );
        }
        Ok(modules)
    }
}

/// The tensors of one adapter.
pub(crate) struct StoredAdapter<'a> {
    module: &'a str,
    rank: usize,
    /// A (`[rank, d_in]`) and B (`[outputs, rank]`).
    parts: [Option<StoredTensor<'a>>; 2],
}

impl StoredAdapter<'_> {
    /// Returns the values of A as `[d_in, rank]`, and those of B as `[rank, outputs]`.
    ///
    /// # Errors
    /// Returns an error that names the tensor if one is absent, has another shape, or has a value
    /// that is not finite.
    pub(super) fn values(&self, [d_in, outputs]: [usize; 2]) -> Result<[Vec<f32>; 2]> {
        let of = |at: usize, expected: [usize; 2]| {
            let Some(tensor) = self.parts[at] else {
                bail!("`{}` is missing", tensor_name(self.module, PARTS[at]));
            };
            let &[rows, columns] = tensor.shape else {
                bail!("`{}` is {:?}, no matrix", tensor.name, tensor.shape);
            };
            let rank = [rows, columns][at];
            ensure!(
                rank == self.rank,
                "`{}` is {:?}, of rank {rank}, but `r` of {ADAPTER_FILE} is {}",
                tensor.name,
                tensor.shape,
                self.rank
            );
            ensure!(
                [rows, columns] == expected,
                "`{}` is {:?}, but {} of the model needs {expected:?}",
                tensor.name,
                tensor.shape,
                self.module
            );
            tensor.check_finite()?;
            let values = tensor.to_f32()?;
            let column = |column| values.iter().skip(column).step_by(columns).copied();
            Ok((0..columns).flat_map(column).collect())
        };
        Ok([of(0, [self.rank, d_in])?, of(1, [outputs, self.rank])?])
    }
}
