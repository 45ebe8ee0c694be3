//! Progress of a run: a bar on a terminal, else one line per row of metrics.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use burn::tensor::Device;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};
use nvfp4::recipe::{RecipePhase, RecipeSchedule};
use nvfp4_lm::config::RecipeName;
use nvfp4_lm::metrics::Row;
use nvfp4_lm::train::{Observer, Settings};

use crate::kernels::Waiting;
use crate::terminal::{has_bars, note};
use crate::work;

/// Exit code after an interrupt, as shells use it for SIGINT.
pub(crate) const INTERRUPTED: u8 = 130;

/// Makes Ctrl-C set `interrupt`; a second Ctrl-C ends the process.
pub(crate) fn watch_interrupts(interrupt: &Arc<AtomicBool>) -> Result<()> {
    let flag = interrupt.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            // A second Ctrl-C exits at once. This is safe because checkpoints are written
            // atomically.
            std::process::exit(INTERRUPTED.into());
        }
        eprintln!("\nstopping after this step; once more to stop at once");
    })
    .context("cannot watch for Ctrl-C")
}

/// Template of the bar; the message is [`figures`].
const TEMPLATE: &str = "{prefix:>6} {wide_bar:.cyan/blue} {pos}/{len}  {msg}  ETA {eta}";

/// Shows the progress of one recipe, and reports whether the user wants to stop.
pub(crate) struct Progress {
    recipe: RecipeName,
    steps: u64,
    steps_per_epoch: f64,
    /// Steps already done when the bar was made.
    first: u64,
    /// Progress bar, on a terminal only.
    bar: Option<ProgressBar>,
    started: Instant,
    valid_loss: Option<f64>,
    interrupt: Arc<AtomicBool>,
    /// Set until the first step is done, on devices that compile kernels.
    waiting: Option<Waiting>,
}

impl Progress {
    /// Starts at step `first` of a run with `settings`. `compiles` is true if `device` compiles
    /// kernels.
    pub(crate) fn new(
        settings: &Settings,
        first: u64,
        interrupt: Arc<AtomicBool>,
        device: &Device,
        compiles: bool,
    ) -> Self {
        work::set_hidden(true);
        let (recipe, steps) = (settings.recipe.clone(), settings.schedule.steps);
        let bar = has_bars().then(|| {
            let bar = bar(&recipe, steps, first, ProgressDrawTarget::stderr());
            bar.enable_steady_tick(std::time::Duration::from_millis(200));
            bar
        });
        let waiting = compiles.then(|| {
            let bar = bar.clone();
            Waiting::new(device, move |compiled| {
                let text = format!("waiting for the first step: {compiled} kernels compiled");
                show(bar.as_ref(), &text);
            })
        });
        Self {
            recipe,
            steps,
            steps_per_epoch: settings.steps_per_epoch,
            first,
            bar,
            started: Instant::now(),
            valid_loss: None,
            interrupt,
            waiting,
        }
    }

    /// Replaces the bar by a line, so that the next output begins on a line.
    pub(crate) fn finish(self) {
        work::set_hidden(false);
        if let Some(bar) = &self.bar {
            let line = self.last_line(bar);
            bar.finish_and_clear();
            note!("{line}");
        }
    }

    /// Describes the step that `bar` shows.
    fn last_line(&self, bar: &ProgressBar) -> String {
        let (recipe, step) = (self.recipe.name(), bar.position());
        format!("{recipe:>6}  step {step}/{}  {}", self.steps, bar.message())
    }

    /// Estimates the remaining time from the speed of the steps so far.
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

/// Prints a line above `bar`, or as a note if there is no bar.
fn show(bar: Option<&ProgressBar>, text: &str) {
    match bar {
        Some(bar) => bar.println(text),
        None => note!("{text}"),
    }
}

/// Makes a bar at step `first` of `steps`.
fn bar(recipe: &RecipeName, steps: u64, first: u64, target: ProgressDrawTarget) -> ProgressBar {
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
    let bar = ProgressBar::with_draw_target(Some(steps), target)
        .with_style(style)
        .with_prefix(recipe.name().to_string());
    bar.set_position(first);
    bar.reset_eta();
    bar
}

/// Describes the begin of phase `index` (from 0) at step `step` (from 0).
pub(crate) fn phase_begins(step: u64, index: usize, phase: &RecipePhase) -> String {
    let (number, label) = (index + 1, phase.label());
    format!("phase {number} begins with step {}: {label}", step + 1)
}

/// Describes the phases of a run of `steps` steps, of which `done` are done; nothing if it has one.
pub(crate) fn phases(recipes: &RecipeSchedule, (done, steps): (u64, u64)) -> Vec<String> {
    let all = recipes.phases();
    let lines = all.iter().enumerate().map(|(index, phase)| {
        let of_phase = recipes.steps_of(index, steps);
        let steps = match of_phase.is_empty() {
            true => "no step".into(),
            false => format!("steps {} to {}", of_phase.start + 1, of_phase.end),
        };
        let resumes = match done > 0 && of_phase.contains(&done) {
            true => "; the run resumes here",
            false => "",
        };
        let (number, count, label) = (index + 1, all.len(), phase.label());
        format!("phase {number} of {count}: {label}, {steps}{resumes}")
    });
    lines.filter(|_| all.len() > 1).collect()
}

/// Formats the epoch, the losses and the speed of `row`; `valid_loss` is the loss on the validation
/// text.
fn figures(row: &Row, valid_loss: Option<f64>, steps_per_epoch: f64) -> String {
    let epoch = row.step as f64 / steps_per_epoch;
    let parts = [
        Some(format!("epoch {epoch:.2}")),
        row.train_loss.map(|loss| format!("loss {loss:.4}")),
        valid_loss.map(|loss| format!("valid {loss:.4}")),
        row.tokens_per_s.map(|speed| format!("{speed:.0} tokens/s")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join("  ")
}

impl Observer for Progress {
    fn step(&mut self, step: u64) {
        if let Some(waiting) = self.waiting.take() {
            show(self.bar.as_ref(), &waiting.finish());
        }
        if let Some(bar) = &self.bar {
            bar.set_position(step);
        }
    }

    fn phase(&mut self, step: u64, index: usize, phase: &RecipePhase) {
        show(self.bar.as_ref(), &phase_begins(step, index, phase));
    }

    fn row(&mut self, row: &Row) {
        self.valid_loss = row.valid_loss.or(self.valid_loss);
        match &self.bar {
            Some(bar) => bar.set_message(figures(row, self.valid_loss, self.steps_per_epoch)),
            // Print only values that this row has measured.
            None => note!(
                "{:>6}  step {}/{}  {}  ETA {}",
                self.recipe.name(),
                row.step,
                self.steps,
                figures(row, row.valid_loss, self.steps_per_epoch),
                self.remaining(row.step)
            ),
        }
    }

    fn checkpoint(&mut self, path: &Path) {
        tracing::debug!("wrote {}", path.display());
    }

    fn interrupted(&mut self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use indicatif::TermLike;

    use super::*;

    /// A 120-column terminal that records its output.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl Screen {
        fn push(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            120
        }
        fn move_cursor_up(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.push(text)?;
            self.push("\n")
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.push(text)
        }
        fn clear_line(&self) -> io::Result<()> {
            self.push("\n")
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_shows_loss_speed_and_eta() {
        let screen = Screen::default();
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let recipe = RecipeName::nvidia();
        let mut progress = Progress {
            bar: Some(bar(&recipe, 20, 4, target)),
            recipe,
            steps: 20,
            steps_per_epoch: 16.0,
            first: 4,
            started: Instant::now(),
            valid_loss: Some(2.5),
            interrupt: Arc::default(),
            waiting: None,
        };
        progress.step(8);
        progress.row(&Row {
            step: 8,
            tokens: 1024,
            train_loss: Some(1.25),
            valid_loss: None,
            lr: 1e-3,
            tokens_per_s: Some(512.4),
        });
        // Draws the last state.
        let bar = progress.bar.clone().unwrap();
        bar.abandon();
        let shown = screen.0.lock().unwrap().clone();
        let last = shown.lines().last().unwrap_or_default();
        for part in [
            "nvidia ",
            "/20  epoch 0.50  loss 1.2500  valid 2.5000  512 tokens/s  ETA ",
        ] {
            assert!(last.contains(part), "{part}: {shown:?}");
        }
        let expected = "nvidia  step 8/20  epoch 0.50  loss 1.2500  valid 2.5000  512 tokens/s";
        assert_eq!(progress.last_line(&bar), expected);
        progress.finish();
    }
}
