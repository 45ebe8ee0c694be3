//! Steps of epochs, and more steps for a run.

use anyhow::{Result, ensure};
use burn_nvfp4::recipe::RecipeSchedule;

use super::schedule::Schedule;

/// Returns the number of steps in `epochs` passes of `steps_per_epoch` steps, rounded up.
///
/// # Errors
/// Returns an error if `epochs` is not a positive number.
pub(crate) fn steps_of(epochs: f64, steps_per_epoch: f64) -> Result<u64> {
    ensure!(
        epochs.is_finite() && epochs > 0.0,
        "epochs is {epochs}, but it must be a positive number"
    );
    // Without the error of the product, as in 0.1 * 30.
    let steps = epochs * steps_per_epoch - 1e-9;
    Ok(steps.ceil().max(1.0) as u64)
}

/// Checks that the run of `schedule` can be extended to `steps` steps. Describes its learning rate;
/// none if it has these steps already.
///
/// # Errors
/// Returns an error that names the number if the run has more steps, or that names the phases of
/// `recipes` if it has several: they begin after shares of the steps.
pub(crate) fn extension(
    schedule: &Schedule,
    recipes: &RecipeSchedule,
    steps: u64,
) -> Result<Option<String>> {
    let old = schedule.steps;
    ensure!(
        steps >= old,
        "steps is {steps}, but the run has {old}: a resumed run can be extended to more steps, and \
         --stop-at stops it earlier"
    );
    if steps == old {
        return Ok(None);
    }
    ensure!(
        recipes.phases().len() == 1,
        "steps is {steps}, but the run has {old} and the phases {recipes}, which begin after shares \
         of them: more steps would move their beginnings, so that the run cannot be extended"
    );
    let longer = Schedule { steps, ..*schedule };
    Ok(Some(format!(
        "extended from {old} to {steps} steps: the learning rate continues on the cosine of {steps} \
         steps, which has {:.3e} in step {}; the cosine of {old} steps ended at {:.3e}",
        longer.learning_rate(old),
        old + 1,
        schedule.learning_rate(old - 1),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Preset, RecipeName, RunConfig};

    #[test]
    fn runs_get_more_steps_and_never_fewer() {
        let config = RunConfig {
            steps: 100,
            warmup: 0,
            lr: 1.0,
            ..RunConfig::preset(Preset::default(), "flex")
        };
        let (schedule, recipe) = (config.step_schedule(), RecipeName::f32());
        let recipes = config.recipe_schedule(&recipe).unwrap();
        let extension = |steps| extension(&schedule, &recipes, steps);
        assert_eq!(extension(100).unwrap(), None);
        // Half of the cosine is (1 + 0.1) / 2.
        let said = extension(200).unwrap().unwrap();
        for part in [
            "100 to 200 steps",
            "5.500e-1 in step 101",
            "ended at 1.002e-1",
        ] {
            assert!(said.contains(part), "no {part}: {said}");
        }
        let error = extension(99).unwrap_err().to_string();
        assert!(
            error.contains("steps is 99, but the run has 100"),
            "{error}"
        );
        let healed = RunConfig {
            healing: Some("0.5".parse().unwrap()),
            recipe: "nvidia".parse().unwrap(),
            ..config
        };
        let recipes = healed.recipe_schedule(&healed.recipe).unwrap();
        let error = super::extension(&healed.step_schedule(), &recipes, 101);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("phases nvidia"), "{error}");
    }
}
