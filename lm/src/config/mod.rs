//! Configuration of a run: the shape of the model, the schedule and the recipe, with presets and
//! checks.
//!
//! Each value of a run is one field of [`RunConfig`]. The field's name is the flag and the key in
//! the files; its documentation is the text of `--help`.

mod choices;
mod extend;
mod model;
mod parallel;
mod presets;
mod run;
mod schedule;
#[cfg(test)]
mod tests;
mod uncaptured;

pub use choices::{
    Activation, Decoration, ExpertDispatchName, GradReduce, HealingOption, ModelKind,
    OptimizerName, Preset, RecipeName,
};
pub(crate) use extend::{extension, steps_of};
pub use model::{ModelConfig, VOCABULARY};
pub(crate) use run::one;
pub use run::{BALANCE_SHARE, RunConfig};
pub use schedule::Schedule;
pub(crate) use schedule::check_counts;
pub use uncaptured::Uncaptured;
