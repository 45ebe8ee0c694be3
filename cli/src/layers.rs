//! Progress bar for layer-by-layer work.

use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::has_bars;

/// Template of the bar.
const TEMPLATE: &str = "{prefix} {wide_bar:.cyan/blue} {pos}/{len}  {msg}  ETA {eta}";

/// Bar on a terminal, nothing elsewhere: the command prints a summary at its end.
pub(crate) struct LayerBar(Option<ProgressBar>);

impl LayerBar {
    pub(crate) fn new(task: &'static str) -> Self {
        Self(has_bars().then(|| {
            let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
            ProgressBar::new(0).with_style(style).with_prefix(task)
        }))
    }

    /// Shows that `done` of `total` layers are finished, and that `layer` is in progress.
    pub(crate) fn show(&mut self, done: usize, total: usize, layer: &str) {
        if let Some(bar) = &self.0 {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
            bar.set_message(layer.to_owned());
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}
