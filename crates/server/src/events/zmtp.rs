//! ZMTP 3.0, ZeroMQ's protocol on TCP: as much of it as a publisher and a desk need.
//!
//! ```text
//!   greeting   FF 00 x8 7F | 03 00 | "NULL" to 20 bytes | 00 | 00 x31       64 bytes, both ways
//!   frame      flags | length: 1 byte, or 8 if long | body                  flags: 1 more, 2 long, 4 command
//!   READY      command: 05 "READY" | name: 1 byte length | value: 4 byte length | ...
//! ```
//!
//! What peers send is bounded: their frames are short, and a message has few of them.

use std::io;
use std::time::Duration;

use bytes::{Buf as _, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

/// Bytes of a frame that a peer sends: topics, numbers and names are short.
const FRAME_BYTES: usize = 4096;
/// Frames of a message that a peer sends.
const N_FRAMES: usize = 8;
/// Time for the words at the beginning, and in which a peer must take what it is sent.
const PATIENCE: Duration = Duration::from_secs(30);

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) is_more: bool,
    pub(crate) is_command: bool,
    pub(crate) body: Bytes,
}

/// A connection to a peer that has said who it is.
#[derive(Debug)]
pub(crate) struct Peer<S> {
    stream: S,
    received: BytesMut,
    /// Frames of a message whose end has not come.
    frames: Vec<Bytes>,
    /// What is said and not written yet.
    unsent: BytesMut,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Peer<S> {
    /// Says that we are a socket of the kind `own`, and expects one of `others`.
    pub(crate) async fn greet(stream: S, own: &str, others: &[&str]) -> io::Result<Self> {
        let (received, unsent) = (BytesMut::new(), BytesMut::new());
        let mut peer = Peer { stream, received, frames: Vec::new(), unsent };
        match timeout(PATIENCE, peer.shake(own, others)).await {
            Ok(outcome) => outcome.map(|()| peer),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    async fn shake(&mut self, own: &str, others: &[&str]) -> io::Result<()> {
        self.stream.write_all(&greeting()).await?;
        while self.received.len() < GREETING_BYTES {
            self.fill().await?;
        }
        let greeting = self.received.split_to(GREETING_BYTES);
        check_greeting(&greeting)?;
        self.stream.write_all(&ready(own)).await?;
        loop {
            if let Some(frame) = parse(&mut self.received)? {
                let kind = socket_type(&frame).ok_or_else(|| malformed("no READY"))?;
                let is_fine = others.iter().any(|other| other.as_bytes() == kind);
                return if is_fine { Ok(()) } else { Err(malformed("another kind of socket")) };
            }
            self.fill().await?;
        }
    }

    /// The next message. May be dropped while it waits, and nothing is lost.
    pub(crate) async fn receive(&mut self) -> io::Result<Vec<Bytes>> {
        loop {
            while let Some(frame) = parse(&mut self.received)? {
                if frame.is_command {
                    self.obey(&frame.body);
                    continue;
                }
                if self.frames.len() == N_FRAMES {
                    return Err(malformed("a message of too many frames"));
                }
                self.frames.push(frame.body);
                if !frame.is_more {
                    return Ok(std::mem::take(&mut self.frames));
                }
            }
            self.flush().await?;
            self.fill().await?;
        }
    }

    /// Sends a message.
    pub(crate) async fn send(&mut self, frames: &[&[u8]]) -> io::Result<()> {
        for (i, frame) in frames.iter().enumerate() {
            let more = if i + 1 < frames.len() { MORE } else { 0 };
            write_frame(&mut self.unsent, more, frame);
        }
        self.flush().await
    }

    /// Answers a question whether we are there; other commands mean nothing to us.
    fn obey(&mut self, command: &[u8]) {
        // PING has two bytes of time to live and a context, which PONG repeats.
        let Some(rest) = command.strip_prefix(b"\x04PING") else { return };
        let pong = [b"\x04PONG", rest.get(2..).unwrap_or_default()].concat();
        write_frame(&mut self.unsent, COMMAND, &pong);
    }

    /// Writes what is said. May be dropped while it waits: what is not written yet stays.
    async fn flush(&mut self) -> io::Result<()> {
        let write = async {
            while !self.unsent.is_empty() {
                if self.stream.write_buf(&mut self.unsent).await? == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
            }
            Ok(())
        };
        match timeout(PATIENCE, write).await {
            // A long message's memory is not kept.
            Ok(outcome) => outcome.map(|()| self.unsent = BytesMut::new()),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.received).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

/// Takes the next frame from what was received; `None` if it has not all come.
pub(crate) fn parse(received: &mut BytesMut) -> io::Result<Option<Frame>> {
    let Some(&flags) = received.first() else { return Ok(None) };
    if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
        return Err(malformed("flags that do not exist"));
    }
    let (len, head) = if flags & LONG == 0 {
        let Some(&len) = received.get(1) else { return Ok(None) };
        (u64::from(len), 2)
    } else {
        let Some(bytes) = received.get(1..9).and_then(|bytes| bytes.try_into().ok()) else {
            return Ok(None);
        };
        (u64::from_be_bytes(bytes), 9)
    };
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    if len > FRAME_BYTES {
        return Err(malformed("a frame that is too long"));
    }
    if received.len() < head + len {
        return Ok(None);
    }
    received.advance(head);
    let body = received.split_to(len).freeze();
    Ok(Some(Frame { is_more: flags & MORE != 0, is_command: flags & COMMAND != 0, body }))
}

fn write_frame(bytes: &mut impl BufMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => bytes.put_slice(&[flags, len]),
        Err(_) => {
            bytes.put_u8(flags | LONG);
            bytes.put_u64(body.len() as u64);
        }
    }
    bytes.put_slice(body);
}

fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    (bytes[0], bytes[9]) = (0xff, 0x7f);
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn check_greeting(bytes: &[u8]) -> io::Result<()> {
    let is_zmtp = bytes[0] == 0xff && bytes[9] & 1 == 1;
    if !is_zmtp || bytes[10] < 3 {
        return Err(malformed("not ZMTP 3"));
    }
    let mechanism = &bytes[12..32];
    if mechanism.strip_prefix(b"NULL").is_none_or(|rest| rest.iter().any(|&byte| byte != 0)) {
        return Err(malformed("a security mechanism other than NULL"));
    }
    Ok(())
}

fn ready(own: &str) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", own), ("Identity", "")] {
        body.push(name.len() as u8);
        body.extend(name.as_bytes());
        body.extend((value.len() as u32).to_be_bytes());
        body.extend(value.as_bytes());
    }
    let mut bytes = Vec::new();
    write_frame(&mut bytes, COMMAND, &body);
    bytes
}

/// The kind of socket that a READY names.
fn socket_type(frame: &Frame) -> Option<&[u8]> {
    let mut rest = frame.body.strip_prefix(b"\x05READY").filter(|_| frame.is_command)?;
    while !rest.is_empty() {
        let (name, after) = rest.split_at_checked(usize::from(rest[0]) + 1)?;
        let (len, after) = after.split_first_chunk::<4>()?;
        let (value, after) = after.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if name[1..].eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        rest = after;
    }
    None
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> impl Strategy<Value = Vec<(bool, Vec<u8>)>> {
        prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..600)), 0..6)
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_however_it_is_cut(frames in frames(), cut in 1_usize..700) {
            let mut bytes = Vec::new();
            for (is_more, body) in &frames {
                write_frame(&mut bytes, u8::from(*is_more), body);
            }
            let (mut received, mut read) = (BytesMut::new(), Vec::new());
            for part in bytes.chunks(cut) {
                received.extend_from_slice(part);
                while let Some(frame) = parse(&mut received).unwrap() {
                    prop_assert!(!frame.is_command);
                    read.push((frame.is_more, frame.body.to_vec()));
                }
            }
            prop_assert_eq!(read, frames);
            prop_assert!(received.is_empty());
        }

        #[test]
        fn nothing_that_is_sent_is_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut received = BytesMut::from(&bytes[..]);
            while let Ok(Some(frame)) = parse(&mut received) {
                prop_assert!(frame.body.len() <= FRAME_BYTES);
                let command = Frame { is_command: true, ..frame };
                let _ = socket_type(&command);
            }
            let mut said = bytes.clone();
            said.splice(0..0, *b"\x05READY");
            let frame = Frame { is_more: false, is_command: true, body: said.into() };
            let _ = socket_type(&frame);
            if let Some(bytes) = bytes.first_chunk::<GREETING_BYTES>() {
                let _ = check_greeting(bytes);
            }
        }
    }

    #[test]
    fn our_own_words_are_understood() {
        assert!(check_greeting(&greeting()).is_ok());
        let mut received = BytesMut::from(&ready("PUB")[..]);
        let frame = parse(&mut received).unwrap().unwrap();
        assert_eq!(socket_type(&frame), Some(&b"PUB"[..]));
        let mut long = BytesMut::from(&[LONG, 0, 0, 0, 0, 0, 0, 16, 1][..]);
        assert!(parse(&mut long).is_err(), "longer than a frame may be");
    }

    /// A pipe that holds fewer bytes than the answer, so that it is dropped when half of it is written.
    #[tokio::test]
    async fn an_answer_that_is_dropped_half_way_goes_on() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let (received, unsent) = (BytesMut::new(), BytesMut::new());
        let mut peer = Peer { stream: ours, received, frames: Vec::new(), unsent };
        let context = [7; 200];
        let mut ping = Vec::new();
        write_frame(&mut ping, COMMAND, &[b"\x04PING\0\0", &context[..]].concat());
        let moment = timeout(Duration::from_millis(50), peer.receive());
        let (written, dropped) = tokio::join!(theirs.write_all(&ping), moment);
        written.unwrap();
        assert!(dropped.is_err(), "nobody has read the answer");
        let read = async {
            let mut all = BytesMut::new();
            let mut frames = Vec::new();
            while frames.len() < 3 {
                theirs.read_buf(&mut all).await.unwrap();
                while let Some(frame) = parse(&mut all).unwrap() {
                    frames.push(frame);
                }
            }
            frames
        };
        let (sent, frames) = tokio::join!(peer.send(&[b"topic", b"batch"]), read);
        sent.unwrap();
        assert!(frames[0].is_command && frames[0].body[..] == [b"\x04PONG", &context[..]].concat());
        assert_eq!((&frames[1].body[..], &frames[2].body[..]), (&b"topic"[..], &b"batch"[..]));
    }
}
