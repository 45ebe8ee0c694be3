//! Recipes, looked up by name or read from a file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::builder::PossibleValue;
use nvfp4::Nvfp4Recipe;
use nvfp4_lm::config::RecipeName;

use crate::terminal::note;

/// Names of recipes that are no presets: the alias of `nvidia`, and high precision in f32.
const OTHERS: [&str; 2] = [RecipeName::ALIAS, "f32"];

/// Stands for the file of a recipe in the values that `--help` lists.
pub(crate) const FILE: &str = "FILE.json";

/// Returns the values that `--help` lists.
pub(crate) fn values() -> Vec<PossibleValue> {
    let names = Nvfp4Recipe::preset_names().chain(["f32"]);
    let alias = PossibleValue::new(RecipeName::ALIAS).help("Another name of nvidia");
    let file = PossibleValue::new(FILE).help("The recipe in this file");
    names.map(PossibleValue::new).chain([alias, file]).collect()
}

/// Returns the recipe called `name`; if it names a file, reads the file into `recipes`. Replaces the
/// alias of a recipe by its name, and says so.
pub(crate) fn named(
    name: &str,
    option: &str,
    recipes: &mut BTreeMap<String, Nvfp4Recipe>,
) -> Result<RecipeName> {
    if name == RecipeName::ALIAS {
        let recipe = RecipeName::nvidia();
        note!("{option} {name} is another name of {recipe}");
        return Ok(recipe);
    }
    let path = Path::new(name);
    if path.extension().is_none_or(|extension| extension != "json") {
        return name
            .parse()
            .map_err(|error| anyhow::anyhow!("{option} is {name}, but {error}"));
    }
    let recipe = fs::read_to_string(path).map_err(anyhow::Error::from);
    let recipe = recipe.and_then(|json| Ok(Nvfp4Recipe::from_json(&json)?));
    let recipe = recipe.with_context(|| format!("{option} {name} is no recipe"))?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let found: RecipeName = stem
        .parse()
        .map_err(|error| anyhow::anyhow!("{option} is {name}, but {error}"))?;
    ensure!(
        Nvfp4Recipe::preset_names()
            .chain(OTHERS)
            .all(|preset| preset != stem),
        "{option} is {name}, but {stem} is the name of a preset: rename the file"
    );
    recipes.insert(stem.into(), recipe);
    Ok(found)
}
