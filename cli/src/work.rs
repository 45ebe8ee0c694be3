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
        if let Some(line) = update(&mut shown, progress, has_bars()) {
            note!("{line}");
        }
    })));
}

/// Hides the work of this thread: other ranks than the first are quiet.
pub(crate) fn hide() {
    listen(None);
}

/// Work that is shown. Work that begins before it ends is a part of it.
struct Shown {
    task: &'static str,
    unit: Unit,
    done: usize,
    total: usize,
    part: String,
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
            unit: progress.unit,
            done: progress.done,
            total: progress.total,
            part: progress.part.to_owned(),
            first: progress.done,
            begun: now,
            printed: now,
            bar: None,
        }
    }

    /// Takes over the amounts of `progress`, which is of this work.
    fn update(&mut self, progress: &Progress<'_>) {
        (self.done, self.total) = (progress.done, progress.total);
        progress.part.clone_into(&mut self.part);
    }

    /// Describes the work, and the part `inner` of it if there is one in progress.
    fn text(&self, inner: Option<&Progress<'_>>) -> String {
        let own = Progress {
            task: self.task,
            unit: self.unit,
            done: self.done,
            total: self.total,
            part: &self.part,
            has_ended: false,
        };
        let text = figures(&own, self.first, self.begun.elapsed());
        match inner {
            None => text,
            Some(inner) => format!("{text} ({} {})", inner.task, amounts(inner)),
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

/// Shows `progress` by a bar if `has_bars` is true; else returns the line to print, if one is due.
fn update(shown: &mut Option<Shown>, progress: &Progress<'_>, has_bars: bool) -> Option<String> {
    let is_inner = (shown.as_ref()).is_some_and(|shown| shown.task != progress.task);
    if IS_HIDDEN.load(Ordering::Relaxed) || (progress.has_ended && !is_inner) {
        *shown = None;
        return None;
    }
    let shown = shown.get_or_insert_with(|| Shown::new(progress));
    if !is_inner {
        shown.update(progress);
    }
    let inner = Some(progress).filter(|it| is_inner && !it.has_ended);
    if has_bars {
        if shown.begun.elapsed() >= SHORT {
            let text = shown.text(inner);
            let (task, done, total) = (shown.task, shown.done, shown.total);
            let bar = shown.bar.get_or_insert_with(|| {
                let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
                // Complete before it is drawn.
                let bar = ProgressBar::new(total as u64).with_prefix(task);
                bar.with_message(text.clone()).with_style(style)
            });
            bar.set_message(text);
            bar.set_position(done as u64);
        }
        return None;
    }
    if shown.printed.elapsed() < EVERY {
        return None;
    }
    shown.printed = Instant::now();
    Some(format!("{} {}", shown.task, shown.text(inner)))
}

/// Formats the amount done, the amount of the whole work, and their unit.
fn amounts(progress: &Progress<'_>) -> String {
    let &Progress { unit, total, .. } = progress;
    let amount = |amount: usize| match unit {
        Unit::Bytes => HumanBytes(amount as u64).to_string(),
        _ => amount.to_string(),
    };
    format!(
        "{}/{}{}",
        amount(progress.done.min(total)),
        amount(total),
        name(unit)
    )
}

/// Returns the name of the unit after an amount.
const fn name(unit: Unit) -> &'static str {
    match unit {
        Unit::Bytes => "",
        Unit::Layers => " layers",
        Unit::Sequences => " sequences",
        Unit::Tokens => " tokens",
        Unit::Questions => " questions",
    }
}

/// Formats the amounts, the rate, the remaining time and the part of `progress`, of which `first`
/// was done before the last `taken`.
fn figures(progress: &Progress<'_>, first: usize, taken: Duration) -> String {
    let &Progress {
        unit, total, part, ..
    } = progress;
    let (done, name) = (progress.done.min(total), name(unit));
    let mut text = amounts(progress);
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

    fn progress<'a>(task: &'static str, done: usize, part: &'a str) -> Progress<'a> {
        Progress {
            task,
            unit: Unit::Layers,
            done,
            total: 2,
            part,
            has_ended: false,
        }
    }

    fn ended(task: &'static str) -> Progress<'static> {
        Progress {
            has_ended: true,
            ..progress(task, 1, "")
        }
    }

    #[test]
    fn work_within_the_shown_one_is_a_part_of_it() {
        let mut shown: Option<Shown> = None;
        let mut tell = |progress: &Progress<'_>, is_due: bool| {
            if let Some(shown) = shown.as_mut().filter(|_| is_due) {
                shown.printed = Instant::now() - EVERY;
            }
            let line = update(&mut shown, progress, false);
            (line, shown.as_ref().map(|shown| shown.task))
        };
        assert_eq!(
            tell(&progress("quantize", 1, "q"), false),
            (None, Some("quantize"))
        );
        // Its lines are due although the inner work begins and ends in between.
        let (line, task) = tell(&progress("load", 0, ""), true);
        assert_eq!(
            line.as_deref(),
            Some("quantize 1/2 layers  q (load 0/2 layers)")
        );
        assert_eq!(task, Some("quantize"));
        let (line, task) = tell(&ended("load"), true);
        assert_eq!(line.as_deref(), Some("quantize 1/2 layers  q"));
        assert_eq!(task, Some("quantize"));
        assert_eq!(
            tell(&progress("quantize", 2, ""), false),
            (None, Some("quantize"))
        );
        assert_eq!(tell(&ended("quantize"), true), (None, None));
        // The end of work that is not shown shows nothing.
        assert_eq!(tell(&ended("load"), true), (None, None));
    }

    #[test]
    fn lines_have_no_colors_and_no_carriage_returns() {
        let mut shown = Some(Shown::new(&progress("quantize", 0, "")));
        shown.as_mut().unwrap().printed = Instant::now() - EVERY;
        let line = update(&mut shown, &progress("quantize", 1, "q"), false).unwrap();
        assert!(line.chars().all(|c| !c.is_control()), "{line:?}");
        assert!(line.starts_with("quantize 1/2 layers  "), "{line}");
        // The next line is not due.
        assert!(update(&mut shown, &progress("quantize", 2, ""), false).is_none());
    }
}
