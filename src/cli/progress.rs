//! What a run shows while it trains: a bar on a terminal, else a line now and then.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use nvfp4::lm::config::{Recipe, RunConfig};
use nvfp4::lm::train::{Observer, Row};

/// Shows the progress of one recipe, and passes on that the user wants to stop.
pub(crate) struct Progress {
    recipe: Recipe,
    steps: u64,
    /// Steps that were done when the bar was made.
    first: u64,
    /// On a terminal.
    bar: Option<ProgressBar>,
    started: Instant,
    valid_loss: Option<f64>,
    interrupt: Arc<AtomicBool>,
}

impl Progress {
    pub(crate) fn new(
        recipe: Recipe,
        config: &RunConfig,
        first: u64,
        interrupt: Arc<AtomicBool>,
    ) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(
                "{prefix:>6} {wide_bar:.cyan/blue} {pos}/{len}  {msg}  ETA {eta}",
            )
            .expect("the template is valid");
            let bar = ProgressBar::new(config.steps)
                .with_style(style)
                .with_prefix(recipe.name().to_string());
            bar.set_position(first);
            bar.reset_eta();
            bar.enable_steady_tick(std::time::Duration::from_millis(200));
            bar
        });
        let started = Instant::now();
        Self {
            recipe,
            steps: config.steps,
            first,
            bar,
            started,
            valid_loss: None,
            interrupt,
        }
    }

    /// Take the bar away.
    pub(crate) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish();
        }
    }

    /// Time to the end, if the rest goes as the steps so far.
    fn remaining(&self, step: u64) -> String {
        let done = step.saturating_sub(self.first);
        if done == 0 {
            return "?".into();
        }
        let left = self
            .started
            .elapsed()
            .mul_f64((self.steps - step) as f64 / done as f64);
        HumanDuration(left).to_string()
    }
}

impl Observer for Progress {
    fn step(&mut self, step: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(step);
        }
    }

    fn row(&mut self, row: &Row) {
        self.valid_loss = row.valid_loss.or(self.valid_loss);
        let valid = self
            .valid_loss
            .map(|loss| format!("  valid {loss:.4}"))
            .unwrap_or_default();
        let train = row
            .train_loss
            .map(|loss| format!("loss {loss:.4}"))
            .unwrap_or_default();
        let speed = row
            .tokens_per_s
            .map(|speed| format!("  {speed:.0} tokens/s"))
            .unwrap_or_default();
        match &self.bar {
            Some(bar) => bar.set_message(format!("{train}{valid}{speed}")),
            None => {
                // Only what this very row has measured.
                let valid = row
                    .valid_loss
                    .map(|loss| format!("  valid {loss:.4}"))
                    .unwrap_or_default();
                eprintln!(
                    "{:>6}  step {}/{}  {train}{valid}{speed}  ETA {}",
                    self.recipe.name(),
                    row.step,
                    self.steps,
                    self.remaining(row.step)
                );
            }
        }
    }

    fn checkpoint(&mut self, path: &Path) {
        tracing::debug!("wrote {}", path.display());
    }

    fn interrupted(&mut self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }
}
