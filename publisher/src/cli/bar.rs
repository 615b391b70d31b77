//! A progress bar, on a terminal only.

use std::io::IsTerminal;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use weighbridge_snapshots::fetch::Progress;

/// Bytes done, with rate and time left; silent where standard error is no terminal, or `--json` asks for quiet.
pub(super) struct Bar(ProgressBar);

impl Bar {
    pub(super) fn new(what: &'static str, quiet: bool) -> Arc<Self> {
        let bar = ProgressBar::no_length().with_message(what);
        let target = if quiet || !std::io::stderr().is_terminal() {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        bar.set_draw_target(target);
        let style = "{msg} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Arc::new(Self(bar))
    }
}

impl Progress for Bar {
    fn start(&self, bytes: u64) {
        self.0.set_length(self.0.length().unwrap_or(0).saturating_add(bytes));
    }

    fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
