//! The signals that ask a process to end.

use tokio::sync::watch;

/// SIGXFSZ on Linux.
const FILE_SIZE_SIGNAL: i32 = 25;

/// Counts the signals that ask this process to end, SIGTERM and Ctrl-C, from now on.
pub(super) fn counted() -> watch::Receiver<u32> {
    use tokio::signal::unix::{SignalKind, signal};
    let (sender, receiver) = watch::channel(0);
    // A file that reaches the process's size limit is to be an error like a full disk, not the end.
    let size_limit = signal(SignalKind::from_raw(FILE_SIZE_SIGNAL));
    let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    tokio::spawn(async move {
        let _size_limit = size_limit;
        if let (Ok(mut terminate), Ok(mut interrupt)) = signals {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                sender.send_modify(|count| *count += 1);
            }
        }
        // Kept, so that whoever waits goes on waiting.
        std::future::pending::<()>().await;
        drop(sender);
    });
    receiver
}
