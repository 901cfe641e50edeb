//! One connection, and what it may cost: time for its heads, and time in which it takes what it is
//! sent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::Watcher;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::HttpLimits;

/// Bytes of a request's head.
const HEAD_BYTES: usize = 64 << 10;

/// What all connections have in common.
#[derive(Clone)]
pub(crate) struct Greeter {
    pub(crate) router: Router,
    pub(crate) tls: Option<TlsAcceptor>,
    pub(crate) limits: HttpLimits,
}

impl Greeter {
    /// Serves a connection until its end. What goes wrong with it is its client's affair.
    pub(crate) async fn serve(self, stream: TcpStream, watcher: Watcher) {
        // Tokens are small, and each is wanted at once.
        let _ = stream.set_nodelay(true);
        let stream = Impatient::new(stream, self.limits.write_time);
        let outcome = match &self.tls {
            None => self.speak(stream, watcher).await,
            Some(tls) => match timeout(self.limits.head_time, tls.accept(stream)).await {
                Ok(Ok(stream)) => self.speak(stream, watcher).await,
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("no handshake in time".to_owned()),
            },
        };
        if let Err(error) = outcome {
            tracing::debug!(error, "a connection ended");
        }
    }

    async fn speak<S>(&self, stream: S, watcher: Watcher) -> Result<(), String>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = TowerToHyperService::new(self.router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head_time)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        watcher.watch(connection).await.map_err(|error| error.to_string())
    }
}

/// A stream whose writes fail when the other side takes nothing for too long.
struct Impatient {
    stream: TcpStream,
    patience: Duration,
    /// Runs while a write waits.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    fn new(stream: TcpStream, patience: Duration) -> Self {
        Impatient { stream, patience, deadline: None }
    }

    /// What a write came to, unless it has waited for too long.
    fn judge<T>(&mut self, poll: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.deadline = None;
            return poll;
        }
        let patience = self.patience;
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(patience)));
        match deadline.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
        }
    }
}

impl AsyncRead for Impatient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Impatient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(poll, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.judge(poll, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
