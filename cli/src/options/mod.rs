//! Options of a run, in layers: flags override a file, which overrides a preset.
//!
//! A layer is a set of keys and values. Every key is a field of [`RunConfig`] or [`Request`]. These
//! structs also define the flags, so no list of keys is repeated here.

pub(crate) mod file;
pub(crate) mod line;
pub(crate) mod listed;
pub(crate) mod recipes;
mod request;
pub(crate) mod shared;
#[cfg(all(test, feature = "flex"))]
mod tests;

use std::path::Path;

use anyhow::{Result, ensure};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches};
use nvfp4_lm::config::{ExpertDispatchName, ModelKind, Preset, RecipeName, RunConfig};
use nvfp4_lm::data::Corpus;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::device::DeviceName;
use file::{Fields, OF_SESSION, OptionsFile, unknown_option};
use request::{Compare, Request};

/// One layer: the flags of a command line, or the keys of a file. Keys are the flag names with `_`
/// instead of `-`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "Fields")]
pub(crate) struct Options(Fields);

/// Options of quantized recipes, which a run in high precision refuses.
const OF_QUANTIZED: [&str; 5] = [
    "rht",
    "stochastic_rounding",
    "weight_2d",
    "rht_signs",
    "high_precision",
];

/// Options that a resumed run may change: its device, its ranks and its steps. `None` keeps the
/// value of the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Resumed {
    pub(crate) device: Option<DeviceName>,
    pub(crate) tp: Option<usize>,
    pub(crate) ep: Option<usize>,
    pub(crate) ep_dispatch: Option<ExpertDispatchName>,
    pub(crate) steps: Option<u64>,
    /// Excludes steps.
    pub(crate) epochs: Option<f64>,
}

impl From<Fields> for Options {
    /// Drops keys whose value is `null`, so that they count as unset.
    fn from(mut fields: Fields) -> Self {
        fields.retain(|_, value| !value.is_null());
        Self(fields)
    }
}

impl Args for Options {
    fn augment_args(command: clap::Command) -> clap::Command {
        RunConfig::augment_args_for_update(Request::augment_args(command))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Options {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut config = RunConfig::preset(Preset::default(), "");
        config.update_from_arg_matches(matches)?;
        let request = Request::from_arg_matches(matches)?;
        let mut given = fields(&config);
        given.extend(fields(&request));
        let own = Self::augment_args(clap::Command::new(""));
        given.retain(|key, _| {
            own.get_arguments()
                .any(|flag| flag.get_id().as_str() == key)
                && matches.value_source(key) == Some(ValueSource::CommandLine)
        });
        if request.no_compare {
            given.insert("compare".into(), false.into());
        }
        Ok(Self(given))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?.over(std::mem::take(self));
        Ok(())
    }
}

/// Returns the number of steps in `epochs` passes over the training text of `config`.
///
/// # Errors
/// Returns an error if the text cannot be read, or if `epochs` is not a positive number.
pub(crate) fn steps_of(config: &RunConfig, epochs: f64) -> Result<u64> {
    let corpus = Corpus::load(&config.data, config.data_bytes)?;
    config.steps_of(epochs, corpus.fingerprint().train_bytes)
}

/// Returns the fields of a struct.
fn fields(of: &impl Serialize) -> Fields {
    match serde_json::to_value(of) {
        Ok(Value::Object(fields)) => fields,
        other => unreachable!("options are structs of plain values: {other:?}"),
    }
}

/// Returns `base` with the values of `layer`, whose keys must be fields of it.
fn overlay<T: Serialize + DeserializeOwned>(base: &T, layer: &Fields) -> Result<T> {
    let mut all = fields(base);
    for (key, value) in layer {
        all.insert(key.clone(), value.clone());
        // Deserialize one key at a time, because an error for the whole would not name the wrong
        // value.
        serde_json::from_value::<T>(Value::Object(all.clone()))
            .map_err(|error| anyhow::anyhow!("{key} is {value}, but {error}"))?;
    }
    Ok(serde_json::from_value(Value::Object(all))?)
}

impl Options {
    /// Reads a `--config` file, except the keys of the session, which are arguments.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let mut file = OptionsFile::read(path)?;
        file.fields.retain(|key, _| !OF_SESSION.contains(&&**key));
        for (key, value) in &file.fields {
            let one = Self(Fields::from_iter([(key.clone(), value.clone())]));
            let checked = one.split().and_then(|(_, values)| {
                overlay(&RunConfig::preset(Preset::default(), ""), &values)
            });
            file.at(key, checked)?;
        }
        Ok(file.fields.into())
    }

    /// Returns true if no option is set.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if `key` is set.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Returns true if no recipe is named.
    pub(crate) fn recipe_is_unset(&self) -> bool {
        !["recipe", "compare", "schedule"]
            .iter()
            .any(|key| self.has(key))
    }

    /// Returns the options that a resumed run may change. Fails if any other is set.
    pub(crate) fn of_resumed(mut self) -> Result<Resumed> {
        let mut take = |key: &str| self.0.remove(key);
        let [device, tp, ep] = [take("device"), take("tp"), take("ep")];
        let [ep_dispatch, steps, epochs] = [take("ep_dispatch"), take("steps"), take("epochs")];
        ensure!(
            self.is_empty(),
            "--resume continues the run as it was configured: leave out all options but --device, \
             --tp, --ep, --ep-dispatch, --steps, --epochs, --stop-at and --tensorboard"
        );
        let ranks = |given: Option<Value>| given.map(serde_json::from_value).transpose();
        Ok(Resumed {
            device: device.map(serde_json::from_value).transpose()?,
            tp: ranks(tp)?,
            ep: ranks(ep)?,
            ep_dispatch: ep_dispatch.map(serde_json::from_value).transpose()?,
            steps: steps.map(serde_json::from_value).transpose()?,
            epochs: epochs.map(serde_json::from_value).transpose()?,
        })
    }

    /// Returns these options with `recipe` as the only recipe, with `seed`, and with `device` if
    /// given.
    pub(crate) fn for_run(mut self, recipe: &str, seed: u64, device: Option<DeviceName>) -> Self {
        self.0.remove("healing");
        if recipe
            .parse()
            .is_ok_and(|recipe: RecipeName| recipe.is_high_precision())
        {
            for key in OF_QUANTIZED {
                self.0.remove(key);
            }
        }
        self.0.insert("recipe".into(), recipe.into());
        self.0.insert("seed".into(), seed.into());
        self.0.insert("compare".into(), false.into());
        if let Some(device) = device {
            self.0.insert("device".into(), device.to_string().into());
        }
        self
    }

    /// Puts these options over those of `below`. An option removes options that contradict it: a
    /// dense `model` removes the experts, and experts remove a dense `model`; a schedule removes a
    /// recipe and healing, and these remove a schedule; steps remove epochs, and epochs steps.
    pub(crate) fn over(self, below: Self) -> Self {
        let Self(mut all) = below;
        let dense = |fields: &Fields| fields.get("model").is_some_and(|kind| kind == "dense");
        let mut remove = |keys: &[&str]| all.retain(|key, _| !keys.contains(&key.as_str()));
        if dense(&self.0) {
            remove(&["experts", "top_k", "balance_loss"]);
        }
        if self.has("schedule") {
            remove(&["recipe", "healing"]);
        } else if self.has("recipe") || self.has("healing") {
            remove(&["schedule"]);
        }
        for (own, other) in [("steps", "epochs"), ("epochs", "steps")] {
            if self.has(own) {
                all.remove(other);
            }
        }
        if self.has("experts") && dense(&all) {
            all.remove("model");
        }
        all.extend(self.0);
        Self(all)
    }

    /// Splits the options into the request and the values of the configuration.
    fn split(self) -> Result<(Request, Fields)> {
        let requests = fields(&Request::default());
        let (requested, values): (Fields, Fields) = self
            .0
            .into_iter()
            .partition(|(key, _)| requests.contains_key(key));
        let known = fields(&RunConfig::preset(Preset::default(), ""));
        if let Some(unknown) = values.keys().find(|key| !known.contains_key(*key)) {
            let names = known.keys().chain(requests.keys()).map(String::as_str);
            return Err(unknown_option(unknown, names.chain(OF_SESSION)));
        }
        Ok((overlay(&Request::default(), &requested)?, values))
    }

    /// Takes unset options from the preset and the machine, and checks the result.
    pub(crate) fn resolve(self) -> Result<(RunConfig, DeviceName)> {
        let is_given = ["warmup", "seed", "experts"].map(|key| self.has(key));
        let [warmup_is_given, seed_is_given, experts_are_given] = is_given;
        let (request, values) = self.split()?;
        let device = request.device.name()?;
        let preset = request.preset.unwrap_or_default();
        let base = RunConfig::preset(preset, &device.to_string());
        let mut config = overlay(&base, &values)?;
        if let Some(epochs) = request.epochs {
            ensure!(
                !values.contains_key("steps"),
                "epochs is {epochs}, but steps is {}: leave one of them out",
                config.steps
            );
            config.steps = steps_of(&config, epochs)?;
        }

        let dense = request.model == Some(ModelKind::Dense);
        ensure!(
            !experts_are_given || !dense,
            "experts is {}, but model is dense: leave one of them out",
            config.model.experts.unwrap_or_default()
        );
        ensure!(
            base.model.experts.is_none() || !dense,
            "model is dense, but preset {preset} has experts: leave one of them out, or give \
             another preset"
        );
        let experts = request.model.and_then(ModelKind::experts);
        config.model.experts = config.model.experts.or(experts);
        config.decorate = request.decorate.and_then(|decorate| decorate.0);

        let mut named = |name: &str, option| recipes::named(name, option, &mut config.recipes);
        if let Some(name) = &request.recipe {
            config.recipe = named(name, "recipe")?;
        }
        if let Some(schedule) = request.schedule {
            let schedule = schedule
                .renamed(|name| named(name, "schedule").map(|found| found.name().to_owned()))?;
            if request.recipe.is_none() {
                config.recipe = named(&schedule.phases()[0].recipe, "schedule")?;
            }
            config.schedule = Some(schedule);
        }
        let compared: Option<Vec<RecipeName>> = match request.compare {
            Some(Compare::With(names)) => {
                let found = names.iter().map(|name| named(name, "compare"));
                Some(found.collect::<Result<_>>()?)
            }
            Some(Compare::Baseline(false)) => Some(Vec::new()),
            Some(Compare::Baseline(true)) => None,
            None if config.compare.is_empty() || config.recipe.is_high_precision() => {
                Some(Vec::new())
            }
            None => None,
        };
        config.compare = compared.unwrap_or_else(|| vec![config.baseline()]);
        if let (false, Some(own)) = (seed_is_given, config.recipes.get(config.recipe.name())) {
            config.seed = own.seed;
        }
        if !warmup_is_given {
            // The preset's warm-up may be longer than a short run.
            config.warmup = config.warmup.min(config.steps / 10);
        }
        config.check()?;
        Ok((config, device))
    }
}
