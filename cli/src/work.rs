//! Progress of the library's work: a bar on a terminal, else a line every few seconds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use nvfp4_lm::progress::{Progress, Unit, listen};

use crate::terminal::{has_bars, note};

/// Template of the bar; the message is [`figures`].
const TEMPLATE: &str = "{prefix} {wide_bar:.cyan/blue} {msg}";
/// Work that takes less time is not shown.
const SHORT: Duration = Duration::from_millis(300);
/// Interval between lines where there is no bar.
const EVERY: Duration = Duration::from_secs(10);

/// True while the progress of a training is shown, which includes its evaluations.
static IS_HIDDEN: AtomicBool = AtomicBool::new(false);

/// Hides or shows the work from here on.
pub(crate) fn set_hidden(is_hidden: bool) {
    IS_HIDDEN.store(is_hidden, Ordering::Relaxed);
}

/// Shows the work of this thread.
pub(crate) fn show() {
    let shown = Mutex::new(None);
    listen(Some(Arc::new(move |progress: &Progress<'_>| {
        let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
        update(&mut shown, progress);
    })));
}

/// Hides the work of this thread: other ranks than the first are quiet.
pub(crate) fn hide() {
    listen(None);
}

/// Work that is shown.
struct Shown {
    task: &'static str,
    /// Amount that was done at the beginning.
    first: usize,
    begun: Instant,
    /// Time of the last line.
    printed: Instant,
    bar: Option<ProgressBar>,
}

impl Shown {
    fn new(progress: &Progress<'_>) -> Self {
        let now = Instant::now();
        Self {
            task: progress.task,
            first: progress.done,
            begun: now,
            printed: now,
            bar: None,
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Shows `progress` in place of what is shown.
fn update(shown: &mut Option<Shown>, progress: &Progress<'_>) {
    let is_same = |shown: &Shown| shown.task == progress.task;
    if progress.has_ended || IS_HIDDEN.load(Ordering::Relaxed) {
        shown.take_if(|shown| is_same(shown));
        return;
    }
    if !shown.as_ref().is_some_and(is_same) {
        // Removes the bar of the former work before there is another one.
        *shown = None;
    }
    let shown = shown.get_or_insert_with(|| Shown::new(progress));
    let taken = shown.begun.elapsed();
    let text = || figures(progress, shown.first, taken);
    if has_bars() && taken >= SHORT {
        let text = text();
        let bar = shown.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
            // Complete before it is drawn.
            let bar = ProgressBar::new(progress.total as u64).with_prefix(progress.task);
            bar.with_message(text.clone()).with_style(style)
        });
        bar.set_message(text);
        bar.set_position(progress.done as u64);
    } else if !has_bars() && shown.printed.elapsed() >= EVERY {
        note!("{} {}", progress.task, text());
        shown.printed = Instant::now();
    }
}

/// Formats the amounts, the rate, the remaining time and the part of `progress`, of which `first`
/// was done before the last `taken`.
fn figures(progress: &Progress<'_>, first: usize, taken: Duration) -> String {
    let &Progress {
        unit, total, part, ..
    } = progress;
    let done = progress.done.min(total);
    let amount = |amount: usize| match unit {
        Unit::Bytes => HumanBytes(amount as u64).to_string(),
        _ => amount.to_string(),
    };
    let name = match unit {
        Unit::Bytes => "",
        Unit::Layers => " layers",
        Unit::Sequences => " sequences",
        Unit::Tokens => " tokens",
        Unit::Questions => " questions",
    };
    let mut text = format!("{}/{}{name}", amount(done), amount(total));
    let rate = (done - first.min(done)) as f64 / taken.as_secs_f64().max(1e-3);
    if rate > 0.0 {
        let left = Duration::from_secs_f64((total - done) as f64 / rate);
        let rate = match unit {
            Unit::Bytes => HumanBytes(rate as u64).to_string(),
            _ if rate < 100.0 => format!("{rate:.2}{name}"),
            _ => format!("{rate:.0}{name}"),
        };
        text += &format!("  {rate}/s  ETA {}", HumanDuration(left));
    }
    match part {
        "" => text,
        part => text + "  " + part,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_rate_and_remaining_time() {
        let progress = |unit, done, total, part| Progress {
            task: "load",
            unit,
            done,
            total,
            part,
            has_ended: false,
        };
        let two = Duration::from_secs(2);
        for (unit, [first, done, total], part, expected) in [
            (Unit::Bytes, [0, 0, 4096], "", "0 B/4.00 KiB"),
            (
                Unit::Bytes,
                [0, 2048, 6144],
                "",
                "2.00 KiB/6.00 KiB  1.00 KiB/s  ETA 4 seconds",
            ),
            // A resumed work counts what it did itself.
            (
                Unit::Layers,
                [7, 8, 14],
                "layers.1.mlp.up_proj",
                "8/14 layers  0.50 layers/s  ETA 12 seconds  layers.1.mlp.up_proj",
            ),
            // Estimates of the total may be low.
            (
                Unit::Tokens,
                [0, 900, 800],
                "",
                "800/800 tokens  400 tokens/s  ETA 0 seconds",
            ),
        ] {
            let progress = progress(unit, done, total, part);
            assert_eq!(figures(&progress, first, two), expected);
        }
    }

    #[test]
    fn the_end_of_another_work_is_not_that_of_the_shown_one() {
        let progress = |task, has_ended| Progress {
            task,
            unit: Unit::Layers,
            done: 1,
            total: 2,
            part: "",
            has_ended,
        };
        let mut shown = None;
        update(&mut shown, &progress("quantize", false));
        update(&mut shown, &progress("load", true));
        assert_eq!(shown.as_ref().map(|shown| shown.task), Some("quantize"));
        update(&mut shown, &progress("quantize", true));
        assert!(shown.is_none());
    }
}
