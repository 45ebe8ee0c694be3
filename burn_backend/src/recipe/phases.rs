//! Recipes over the steps of a run.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use nvfp4_formats::Nvfp4Error;
use serde::{Deserialize, Serialize};

use super::Nvfp4Recipe;
use super::schedule::{Healing, LayerMode};

/// Syntax of a [`NamedSchedule`].
const SYNTAX: &str = "RECIPE[:MODE],SHARE=RECIPE[:MODE],.., as in `nvidia,0.85=nvidia:fwd_bf16`";

/// Modes by their names in a [`NamedSchedule`]; [`LayerMode::Recipe`] has none.
const MODES: [(&str, LayerMode); 3] = [
    ("fwd_bf16", LayerMode::HighPrecisionForward),
    ("bwd_bf16", LayerMode::HighPrecisionBackward),
    ("bf16", LayerMode::HighPrecision),
];

/// Phase of a [`NamedSchedule`].
#[derive(Debug, Clone, PartialEq)]
pub struct NamedPhase {
    /// Share of the steps after which the phase begins.
    pub begins: f64,
    /// Name of the recipe.
    pub recipe: String,
    /// Mode of the layers: `fwd_bf16`, `bwd_bf16` and `bf16` compute the forward, the backward or
    /// both in high precision, the type of the activations.
    pub mode: LayerMode,
}

impl fmt::Display for NamedPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.begins != 0.0 {
            write!(f, "{}=", self.begins)?;
        }
        f.write_str(&label(&self.recipe, self.mode))
    }
}

/// Returns the name of a phase: recipe and mode.
fn label(recipe: &str, mode: LayerMode) -> String {
    let name = MODES.iter().find(|(_, of_name)| *of_name == mode);
    let mode = name.map(|(name, _)| format!(":{name}"));
    format!("{recipe}{}", mode.unwrap_or_default())
}

impl FromStr for NamedPhase {
    type Err = Nvfp4Error;

    fn from_str(text: &str) -> Result<Self, Nvfp4Error> {
        let error = |expected: String| {
            Nvfp4Error::value("schedule", format!("the phase `{text}`"), expected)
        };
        let (begins, named) = match text.split_once('=') {
            None => (0.0, text),
            Some((share, named)) => {
                let share: f64 = share.trim().parse().map_err(|_| error(SYNTAX.into()))?;
                (share, named)
            }
        };
        let (recipe, mode) = match named.trim().rsplit_once(':') {
            None => (named.trim(), LayerMode::Recipe),
            Some((recipe, mode)) => {
                let found = MODES.iter().find(|(name, _)| *name == mode);
                let names = MODES.map(|(name, _)| name).join(", ");
                let unknown = || error(format!("one of the modes {names} after the colon"));
                (recipe, found.ok_or_else(unknown)?.1)
            }
        };
        if recipe.is_empty() {
            return Err(error(SYNTAX.into()));
        }
        Ok(Self {
            begins,
            recipe: recipe.into(),
            mode,
        })
    }
}

/// Schedule of recipes by name, in text form: `nvidia,0.85=nvidia:fwd_bf16`. The first phase begins
/// at 0, which may be left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NamedSchedule(Vec<NamedPhase>);

impl NamedSchedule {
    /// Returns the phases in order; there is at least one.
    pub fn phases(&self) -> &[NamedPhase] {
        &self.0
    }

    /// Replaces the name of each recipe by the one that `name` returns.
    ///
    /// # Errors
    /// Returns the error of `name`.
    pub fn renamed<E>(self, mut name: impl FnMut(&str) -> Result<String, E>) -> Result<Self, E> {
        let phases = self.0.into_iter().map(|phase| {
            let recipe = name(&phase.recipe)?;
            Ok(NamedPhase { recipe, ..phase })
        });
        Ok(Self(phases.collect::<Result<_, E>>()?))
    }

    /// Looks the recipes up with `find`.
    ///
    /// # Errors
    /// Returns an error that names the phase if `find` returns one, or if the recipe is invalid in
    /// a [`RecipeSchedule`].
    pub fn resolve<E: fmt::Display>(
        &self,
        mut find: impl FnMut(&str) -> Result<Nvfp4Recipe, E>,
    ) -> Result<RecipeSchedule, Nvfp4Error> {
        let phases = self.0.iter().enumerate().map(|(index, phase)| {
            let NamedPhase {
                begins,
                recipe,
                mode,
            } = phase;
            let found = find(recipe).map_err(|error| {
                // The alternate form of an `anyhow::Error` includes its causes.
                let expected = format!("a recipe that exists: {error:#}");
                phase_error(index, &phase.to_string(), "", expected)
            })?;
            Ok(RecipePhase {
                begins: *begins,
                name: recipe.clone(),
                recipe: found,
                mode: *mode,
            })
        });
        RecipeSchedule::new(phases.collect::<Result<_, Nvfp4Error>>()?)
    }
}

impl fmt::Display for NamedSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phases: Vec<String> = self.0.iter().map(NamedPhase::to_string).collect();
        f.write_str(&phases.join(","))
    }
}

impl FromStr for NamedSchedule {
    type Err = Nvfp4Error;

    fn from_str(text: &str) -> Result<Self, Nvfp4Error> {
        let phases: Vec<NamedPhase> = match text.trim() {
            "" => Vec::new(),
            text => text.split(',').map(str::parse).collect::<Result<_, _>>()?,
        };
        check_shares(phases.iter().map(|phase| (phase.begins, phase.to_string())))?;
        Ok(Self(phases))
    }
}

impl TryFrom<String> for NamedSchedule {
    type Error = Nvfp4Error;

    fn try_from(text: String) -> Result<Self, Nvfp4Error> {
        text.parse()
    }
}

impl From<NamedSchedule> for String {
    fn from(schedule: NamedSchedule) -> Self {
        schedule.to_string()
    }
}

/// Phase of a [`RecipeSchedule`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipePhase {
    /// Share of the steps after which the phase begins: 0 or more, less than 1.
    pub begins: f64,
    /// Name of the recipe, for messages.
    pub name: String,
    /// Recipe of the layers, without healing.
    pub recipe: Nvfp4Recipe,
    /// Extent to which the layers follow the recipe.
    #[serde(default)]
    pub mode: LayerMode,
}

impl RecipePhase {
    /// Returns recipe and mode by name, as in `nvidia:fwd_bf16`.
    pub fn label(&self) -> String {
        label(&self.name, self.mode)
    }

    /// Returns true if the layers quantize an operand.
    pub fn is_quantized(&self) -> bool {
        self.recipe.is_quantized() && self.mode != LayerMode::HighPrecision
    }

    /// Returns true if the recipe keeps the same layers in high precision as that of `other`.
    fn keeps_layers_of(&self, other: &Self) -> bool {
        let kept = |phase: &Self| {
            // `ParamGroup` does not implement equality.
            let group = format!("{:?}", phase.recipe.high_precision);
            (group, phase.recipe.layers)
        };
        kept(self) == kept(other)
    }
}

/// Recipes of a run over its steps: each phase begins after a share of the steps. Healing is the
/// schedule of [`Nvfp4Recipe::schedule`].
///
/// A training loop calls [`apply`](Self::apply) before each step. Its serde form is the list of
/// phases.
///
/// ```
/// use burn_nvfp4::recipe::RecipeSchedule;
///
/// let schedule: RecipeSchedule = "nvidia,0.5=fwd_nvfp4_bwd_mxfp8,0.85=bf16".parse()?;
/// assert_eq!(schedule.recipe_at(60, 100).name, "fwd_nvfp4_bwd_mxfp8");
/// # Ok::<(), burn_nvfp4::Nvfp4Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<RecipePhase>", into = "Vec<RecipePhase>")]
pub struct RecipeSchedule(Vec<RecipePhase>);

impl RecipeSchedule {
    /// Creates a schedule.
    ///
    /// # Errors
    /// Returns an error that names the phase if there is none, the first one does not begin at 0, a
    /// share is not in [0, 1) or not larger than the one before, or if a recipe does not pass
    /// [`Nvfp4Recipe::check`], has healing, or has another seed than the first one: a run has one
    /// seed.
    pub fn new(phases: Vec<RecipePhase>) -> Result<Self, Nvfp4Error> {
        check_shares(phases.iter().map(|phase| (phase.begins, phase.label())))?;
        for (index, phase) in phases.iter().enumerate() {
            let error = |found: &str, expected| phase_error(index, &phase.label(), found, expected);
            let RecipePhase { recipe, .. } = phase;
            if recipe.healing.is_some() {
                let expected = "a recipe without: the schedule has the later phases";
                return Err(error(" with healing", expected.into()));
            }
            recipe.check().map_err(|wrong| {
                let expected = format!("a recipe that passes its checks: {wrong}");
                error("", expected)
            })?;
            let seed = phases[0].recipe.seed;
            if recipe.seed != seed {
                let found = format!(" with seed {}", recipe.seed);
                return Err(error(&found, format!("{seed}, the seed of phase 1")));
            }
        }
        Ok(Self(phases))
    }

    /// Returns the phases in order; there is at least one.
    pub fn phases(&self) -> &[RecipePhase] {
        &self.0
    }

    /// Returns true if a model whose layers were built with the recipe of the first phase follows the
    /// schedule without [`apply`](Self::apply).
    pub fn is_constant(&self) -> bool {
        matches!(&self.0[..], [only] if only.mode == LayerMode::Recipe)
    }

    /// Returns the index of the phase of step `step` (from 0) of `steps`.
    pub fn index_at(&self, step: u64, steps: u64) -> usize {
        let has_begun = |phase: &RecipePhase| step as f64 >= phase.begins * steps as f64;
        self.0.iter().rposition(has_begun).unwrap_or(0)
    }

    /// Returns the phase of step `step` (from 0) of `steps`.
    pub fn recipe_at(&self, step: u64, steps: u64) -> &RecipePhase {
        &self.0[self.index_at(step, steps)]
    }

    /// Returns the steps (from 0) of phase `index` in a run of `steps`; a phase of a short run may
    /// have none.
    pub fn steps_of(&self, index: usize, steps: u64) -> Range<u64> {
        let first = |phase: &RecipePhase| ((phase.begins * steps as f64).ceil() as u64).min(steps);
        first(&self.0[index])..self.0.get(index + 1).map_or(steps, first)
    }

    /// Returns true if the phases keep different layers in high precision. Phases that quantize
    /// nothing keep those of the phase before.
    pub(crate) fn selects_layers(&self) -> bool {
        let mut quantized = self.0.iter().filter(|phase| phase.is_quantized());
        quantized.any(|phase| !phase.keeps_layers_of(&self.0[0]))
    }
}

impl fmt::Display for RecipeSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |phase: &RecipePhase| NamedPhase {
            begins: phase.begins,
            recipe: phase.name.clone(),
            mode: phase.mode,
        };
        NamedSchedule(self.0.iter().map(named).collect()).fmt(f)
    }
}

/// Parses a [`NamedSchedule`] of presets.
impl FromStr for RecipeSchedule {
    type Err = Nvfp4Error;

    fn from_str(text: &str) -> Result<Self, Nvfp4Error> {
        text.parse::<NamedSchedule>()?.resolve(Nvfp4Recipe::preset)
    }
}

impl TryFrom<Vec<RecipePhase>> for RecipeSchedule {
    type Error = Nvfp4Error;

    fn try_from(phases: Vec<RecipePhase>) -> Result<Self, Nvfp4Error> {
        Self::new(phases)
    }
}

impl From<RecipeSchedule> for Vec<RecipePhase> {
    fn from(schedule: RecipeSchedule) -> Self {
        schedule.0
    }
}

impl Nvfp4Recipe {
    /// Returns the schedule of this recipe, called `name` in messages: one phase, and a second one
    /// if it heals.
    ///
    /// # Errors
    /// Returns an error if the recipe does not pass [`check`](Self::check).
    pub fn schedule(&self, name: &str) -> Result<RecipeSchedule, Nvfp4Error> {
        self.check()?;
        let phase = |begins, mode| RecipePhase {
            begins,
            name: name.into(),
            recipe: self.clone().with_healing(None),
            mode,
        };
        let whole = phase(0.0, LayerMode::Recipe);
        RecipeSchedule::new(match self.healing {
            Some(healing @ Healing { at_fraction, .. }) if at_fraction < 1.0 => {
                let healed = phase(at_fraction, healing.mode());
                match at_fraction {
                    0.0 => vec![healed],
                    _ => vec![whole, healed],
                }
            }
            _ => vec![whole],
        })
    }
}

/// Checks the shares of named phases.
fn check_shares(phases: impl Iterator<Item = (f64, String)>) -> Result<(), Nvfp4Error> {
    let mut last = None;
    for (index, (begins, name)) in phases.enumerate() {
        let error = |expected: String| {
            phase_error(index, &name, &format!(" that begins at {begins}"), expected)
        };
        if !(0.0..1.0).contains(&begins) {
            let expected = "a share of the steps, 0 or more and less than 1";
            return Err(error(expected.into()));
        }
        match last {
            None if begins != 0.0 => {
                return Err(error("0: the first phase begins with the run".into()));
            }
            Some(last) if begins <= last => {
                return Err(error(format!(
                    "more than {last}, where phase {index} begins"
                )));
            }
            _ => last = Some(begins),
        }
    }
    last.map(drop)
        .ok_or_else(|| Nvfp4Error::value("schedule", "no phase", "at least one phase"))
}

/// Returns an error about a phase.
fn phase_error(index: usize, name: &str, found: &str, expected: String) -> Nvfp4Error {
    let found = format!("phase {} (`{name}`){found}", index + 1);
    Nvfp4Error::value("schedule", found, expected)
}
