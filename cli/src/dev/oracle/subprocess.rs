//! Runs a program with a time limit. A check on new hardware may hang, and a device error breaks
//! all later work in its process.

use std::{
    io::Read,
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// End and output of a program.
pub(super) struct Ended {
    /// Exit status; none if the program exceeded the limit and was killed.
    pub status: Option<ExitStatus>,
    /// Standard output.
    pub output: String,
    /// Standard error.
    pub error: String,
    /// Run time.
    pub took: Duration,
}

impl Ended {
    /// Returns the last `count` lines of both outputs.
    pub fn tail(&self, count: usize) -> Vec<String> {
        let lines = self.output.lines().chain(self.error.lines());
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        lines[lines.len().saturating_sub(count)..].to_vec()
    }
}

/// Runs `command` for at most `limit`.
///
/// # Errors
/// Returns an error if it cannot be started.
pub(super) fn run(command: &mut Command, limit: Duration) -> Result<Ended> {
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} cannot be started", command.get_program().display()))?;
    let output = Reader::of(child.stdout.take());
    let error = Reader::of(child.stderr.take());
    let status = loop {
        if let Some(status) = child.try_wait().context("a process that was started")? {
            break Some(status);
        }
        if start.elapsed() >= limit {
            // The program may have exited in the meantime.
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        thread::sleep(Duration::from_millis(20));
    };
    let is_ended = status.is_some();
    Ok(Ended {
        status,
        output: output.text(is_ended),
        error: error.text(is_ended),
        took: start.elapsed(),
    })
}

/// Thread that reads a pipe, so that the program never blocks on it.
struct Reader {
    bytes: Arc<Mutex<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Reader {
    fn of(pipe: Option<impl Read + Send + 'static>) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let into = bytes.clone();
        let thread = thread::spawn(move || {
            let Some(mut pipe) = pipe else { return };
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                let mut bytes = into.lock().unwrap_or_else(PoisonError::into_inner);
                bytes.extend_from_slice(&buffer[..count]);
            }
        });
        Self { bytes, thread }
    }

    /// Returns the text read: all of it if the program has ended. After a kill, the pipe may still
    /// be held open by a child of the program.
    fn text(self, is_ended: bool) -> String {
        if is_ended {
            // Reading does not panic.
            let _ = self.thread.join();
        }
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_outputs_are_read() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; exit 3"]);
        let ended = run(&mut command, Duration::from_secs(60)).unwrap();
        assert_eq!(ended.status.unwrap().code(), Some(3));
        assert_eq!((&*ended.output, &*ended.error), ("one\n", "two\n"));
        assert_eq!(ended.tail(1), ["two"]);
    }

    #[test]
    fn what_does_not_end_is_killed() {
        let mut command = Command::new("sleep");
        command.arg("600");
        let ended = run(&mut command, Duration::from_millis(50)).unwrap();
        assert!(ended.status.is_none());
        assert!(run(&mut Command::new("no such program"), Duration::ZERO).is_err());
    }
}
