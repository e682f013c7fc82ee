//! Standard input and output as a transport that nothing else can write to, and the ends of a server's life.

use std::fs::File;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::CancellationToken;

/// The stream for replies. From now on whatever else writes to standard output or standard error writes to `log`: the
/// protocol stays clean, and a host that never reads standard error cannot block us.
///
/// # Errors
/// What the system refuses.
#[cfg(unix)]
pub fn claim_stdout(log: &File) -> io::Result<File> {
    use std::os::fd::AsFd;
    let replies = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    rustix::stdio::dup2_stdout(log)?;
    rustix::stdio::dup2_stderr(log)?;
    Ok(replies)
}

/// The stream for replies. Rust code of this program prints nothing, and the C libraries log through a callback.
///
/// # Errors
/// What the system refuses.
#[cfg(windows)]
pub fn claim_stdout(_log: &File) -> io::Result<File> {
    use std::os::windows::io::AsHandle;
    Ok(File::from(io::stdout().as_handle().try_clone_to_owned()?))
}

/// Makes a write beyond the limit of file sizes an error of that write. Without this the system ends the program.
#[cfg(unix)]
pub fn outlive_file_limits() {
    use std::sync::{Arc, atomic::AtomicBool};
    // The signal sets a flag that nobody reads: what failed is told by the write itself.
    if let Err(error) = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false))) {
        tracing::warn!("the limit of file sizes may end the program: {error}");
    }
}

/// There is no such limit.
#[cfg(windows)]
pub fn outlive_file_limits() {}

/// One direction of the way to the host. It trips a token when the host is gone: at the end of the input, even while
/// requests are being answered, and when a reply cannot be written.
pub struct Watched<T> {
    inner: T,
    ended: CancellationToken,
}

impl<T> Watched<T> {
    /// Wraps a stream.
    pub fn new(inner: T, ended: CancellationToken) -> Self {
        Self { inner, ended }
    }

    fn check<R>(&self, poll: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if let Poll::Ready(Err(_)) = poll {
            self.ended.cancel();
        }
        poll
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for Watched<W> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.check(poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.inner).poll_flush(cx);
        self.check(poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.check(poll)
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Watched<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let poll = Pin::new(&mut self.inner).poll_read(cx, buf);
        match &poll {
            Poll::Ready(Ok(())) if buf.filled().len() > before || buf.remaining() == 0 => {}
            Poll::Ready(_) => self.ended.cancel(),
            Poll::Pending => {}
        }
        poll
    }
}

/// Returns when the system or the user asks the program to end.
#[cfg(unix)]
pub async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut hangup)) = (signal(SignalKind::terminate()), signal(SignalKind::hangup())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = term.recv() => {}
        _ = hangup.recv() => {}
    }
}

/// Returns when the system or the user asks the program to end.
#[cfg(windows)]
pub async fn signal() {
    use tokio::signal::windows::{ctrl_break, ctrl_close, ctrl_shutdown};
    let (Ok(mut brk), Ok(mut close), Ok(mut shutdown)) = (ctrl_break(), ctrl_close(), ctrl_shutdown()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = brk.recv() => {}
        _ = close.recv() => {}
        _ = shutdown.recv() => {}
    }
}

/// Returns when the process that started this one is gone: its other children may hold the pipe open, so that no end of
/// input would come.
#[cfg(unix)]
pub async fn parent_gone() {
    let parent = rustix::process::getppid();
    // Without a parent to lose (a container's first process has none) there is nothing to wait for.
    let Some(pid) = parent.filter(|pid| !pid.is_init()) else {
        return std::future::pending().await;
    };
    if exit_of(pid).await.is_ok() {
        return;
    }
    // Where the system tells no exits of others.
    while rustix::process::getppid() == Some(pid) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Returns at the moment when a process exits; an error where it cannot be watched.
#[cfg(target_os = "linux")]
async fn exit_of(pid: rustix::process::Pid) -> io::Result<()> {
    let watch = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    // One with the same number that came later is not our parent.
    if rustix::process::getppid() != Some(pid) {
        return Ok(());
    }
    let wait = move || {
        // Readable once the process has ended.
        let mut fds = [rustix::event::PollFd::new(&watch, rustix::event::PollFlags::IN)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, None))
    };
    tokio::task::spawn_blocking(wait).await.map_err(io::Error::other)??;
    Ok(())
}

/// Returns at the moment when a process exits; an error where it cannot be watched.
#[cfg(all(unix, not(target_os = "linux")))]
async fn exit_of(_: rustix::process::Pid) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns when the process that started this one is gone: its other children may hold the pipe open, so that no end of
/// input would come.
#[cfg(windows)]
pub async fn parent_gone() {
    use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};
    let mut system = System::new();
    let mut started = |pid: Pid| {
        system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, ProcessRefreshKind::nothing());
        system.process(pid).map(|process| (process.parent(), process.start_time()))
    };
    let Some((Some(parent), _)) = started(Pid::from_u32(std::process::id())) else {
        return std::future::pending().await;
    };
    // The start time tells a parent from a later process with the same number.
    let Some((_, born)) = started(parent) else {
        return;
    };
    while started(parent).is_some_and(|(_, start)| start == born) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
