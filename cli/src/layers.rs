//! The progress of work that goes layer by layer.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// What the bar shows.
const TEMPLATE: &str = "{prefix} {wide_bar:.cyan/blue} {pos}/{len}  {msg}  ETA {eta}";

/// A bar on a terminal, nothing elsewhere: the command prints what it did when it has done it.
pub(crate) struct LayerBar(Option<ProgressBar>);

impl LayerBar {
    pub(crate) fn new(task: &'static str) -> Self {
        Self(std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
            ProgressBar::new(0).with_style(style).with_prefix(task)
        }))
    }

    /// `done` layers of `total` are done, and this one is worked on.
    pub(crate) fn show(&mut self, done: usize, total: usize, layer: &str) {
        if let Some(bar) = &self.0 {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
            bar.set_message(layer.to_owned());
        }
    }

    /// Take the bar away.
    pub(crate) fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}
