//! Self-check that decides if a kernel without a hardware report may be a default on a device: on
//! first use it computes a few small exact GEMMs, and is enabled only if all results are correct.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex},
};

use cubecl::{client::Client, dry_run::launch_mode};

use super::{
    exact::ExactGemm,
    kernels::sm100::tile::{Sm100Form, Sm100Tile},
};
use crate::{
    Nvfp4Error,
    cube::ptx::BlockScaled,
    environment::{Environment, GemmChoice},
    tensor::Matrix,
};

/// Returns the GEMMs of the check of `tile`: every form in which it is a default, with partial
/// tiles in rows, columns and K, and an empty group.
fn cases(client: &Client, tile: Sm100Tile) -> Result<Vec<ExactGemm>, Nvfp4Error> {
    let format = tile.format.format();
    // MXFP8 has no global scales.
    let per_row = tile.format == BlockScaled::Nvfp4;
    let mut cases = vec![
        ExactGemm::dense(client, format, (130, 264, 352), per_row)?,
        ExactGemm::m_grouped(client, format, &[3, 0, 129, 40], (136, 96))?,
    ];
    if tile.form == Sm100Form::TwoCta {
        // More rows than a tile.
        cases.push(ExactGemm::dense(client, format, (389, 264, 96), per_row)?);
    }
    if tile.form == Sm100Form::OneCta {
        let unaligned: &[usize] = match tile.format {
            BlockScaled::Nvfp4 => &[16, 0, 304, 48],
            BlockScaled::Mxfp8 => &[32, 0, 288, 64],
        };
        cases.extend([
            ExactGemm::k_grouped(client, format, &[64, 0, 320, 128], (40, 136))?,
            ExactGemm::k_grouped(client, format, unaligned, (130, 8))?,
        ]);
    }
    Ok(cases)
}

/// Runs the check of `tile`; `multiply` computes each GEMM into `f32`.
///
/// # Errors
/// Returns the first wrong element, or the error of the kernel.
fn check(
    client: &Client,
    tile: Sm100Tile,
    multiply: impl Fn(&ExactGemm) -> Result<Matrix, Nvfp4Error>,
) -> Result<(), String> {
    let cases = cases(client, tile).map_err(|error| error.to_string())?;
    for case in cases {
        let found = multiply(&case).map_err(|error| format!("{}: {error}", case.what))?;
        case.compare(client, &found)?;
    }
    Ok(())
}

static FOUND: LazyLock<Verdicts> = LazyLock::new(Verdicts::default);

/// Returns the result of the check of `tile` on the device of `client`. The first call runs the
/// check and waits for the device; a mismatch is logged as one warning.
///
/// # Errors
/// Returns a description of the mismatch.
pub(crate) fn once(
    client: &Client,
    tile: Sm100Tile,
    multiply: impl Fn(&ExactGemm) -> Result<Matrix, Nvfp4Error>,
) -> Result<(), String> {
    refuse_if_asked(Environment::get().gemm)?;
    // A run that only compiles computes nothing.
    if launch_mode().is_skipped() {
        return Ok(());
    }
    FOUND.of(name(client, tile), || check(client, tile, multiply))
}

/// Key of a check: the device, format and form.
fn name(client: &Client, tile: Sm100Tile) -> String {
    let (format, form) = (tile.format, tile.form);
    format!("{format:?}, {form}, on {:?}", client.service_id())
}

/// Refuses the kernel if the environment variable `NVFP4_GEMM` disables it. A check in the same
/// process cannot survive a kernel that hangs or a device error.
fn refuse_if_asked(choice: GemmChoice) -> Result<(), String> {
    match choice {
        GemmChoice::Portable => Err("NVFP4_GEMM=portable asks for the portable kernel".into()),
        GemmChoice::Default | GemmChoice::Tcgen05 => Ok(()),
    }
}

/// Returns the result of the check of `tile` on the device of `client`, or success if it has not
/// run.
///
/// # Errors
/// Returns a description of the mismatch.
pub(crate) fn known(client: &Client, tile: Sm100Tile) -> Result<(), String> {
    refuse_if_asked(Environment::get().gemm)?;
    let found = FOUND.0.lock().unwrap_or_else(|held| held.into_inner());
    found.get(&name(client, tile)).cloned().unwrap_or(Ok(()))
}

/// Results of checks by [`name`].
#[derive(Default)]
struct Verdicts(Mutex<HashMap<String, Result<(), String>>>);

impl Verdicts {
    /// Returns the stored result of `checked`, or runs `check` and stores its result. Concurrent
    /// callers wait for a running check.
    fn of(
        &self,
        checked: String,
        check: impl FnOnce() -> Result<(), String>,
    ) -> Result<(), String> {
        let mut found = self.0.lock().unwrap_or_else(|held| held.into_inner());
        if let Some(known) = found.get(&checked) {
            return known.clone();
        }
        let verdict = check().map_err(|error| format!("its self-check failed: {error}"));
        if let Err(error) = &verdict {
            tracing::warn!(
                %checked,
                "the tcgen05 kernel: {error}; GEMMs for which it would be the default \
                 take another one; `nvfp4 dev oracle tcgen05` writes a report"
            );
        }
        found.insert(checked, verdict.clone());
        verdict
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::tensor::FloatKind;

    /// Each form of the kernel has a separate check.
    #[test]
    fn forms_are_checked_by_themselves() {
        let client = crate::cpu_client();
        let tiles = BlockScaled::ALL
            .map(|format| Sm100Form::ALL.map(|form| Sm100Tile::instruction(format, form)));
        let mut names: Vec<String> = tiles
            .as_flattened()
            .iter()
            .map(|tile| name(&client, *tile))
            .collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 6, "{names:?}");
        // The kernels of every device compute the checked GEMMs correctly.
        for tile in tiles.as_flattened() {
            let own = |case: &ExactGemm| {
                let output = crate::gemm::gemm(&client, &crate::gemm::Gemm::of_exact(case));
                output.map(|output| output.matrix)
            };
            assert_eq!(check(&client, *tile, own), Ok(()), "{tile:?}");
        }
    }

    /// Each device is checked once, and the result is kept.
    #[test]
    fn devices_are_checked_once() {
        let verdicts = Verdicts::default();
        let runs = Cell::new(0);
        let ask = |device: &str, verdict: Result<(), String>| {
            verdicts.of(device.to_owned(), || {
                runs.set(runs.get() + 1);
                verdict
            })
        };
        let wrong = || Err("row 0".to_owned());
        assert_eq!(ask("a", Ok(())), Ok(()));
        assert_eq!(ask("a", wrong()), Ok(()));
        let said = ask("b", wrong()).unwrap_err();
        assert!(said.contains("row 0"), "{said}");
        assert_eq!(ask("b", Ok(())), Err(said));
        assert_eq!(runs.get(), 2);
    }

    #[test]
    fn the_portable_kernel_is_asked_for() {
        assert!(refuse_if_asked(GemmChoice::Portable).is_err());
        assert_eq!(refuse_if_asked(GemmChoice::Tcgen05), Ok(()));
        assert_eq!(refuse_if_asked(GemmChoice::Default), Ok(()));
    }

    /// A kernel that writes wrong results, or fails, does not pass.
    #[test]
    fn wrong_results_do_not_pass() {
        let client = crate::cpu_client();
        let tile = Sm100Tile::instruction(BlockScaled::Mxfp8, Sm100Form::OneCta);
        let zeros = |case: &ExactGemm| {
            let len = case.a.outer() * case.b.outer();
            let handle = client.create_from_slice(&vec![0; 4 * len]);
            Matrix::new(handle, case.a.outer(), case.b.outer(), FloatKind::F32)
        };
        let error = check(&client, tile, zeros).unwrap_err();
        assert!(error.contains("should be"), "{error}");
        let fails = |_: &ExactGemm| Err(Nvfp4Error::Launch("no such instruction".into()));
        let error = check(&client, tile, fails).unwrap_err();
        assert!(error.contains("no such instruction"), "{error}");
    }
}
