//! A server on the tiny model, and a client that speaks just enough HTTP.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

use crate::tiny::{Tiny, spawn};

/// A server that runs, and is killed when it is dropped.
pub(crate) struct Serve {
    child: Child,
    at: At,
    /// Where it publishes what its cache holds, if it does.
    pub(crate) events: Option<String>,
    /// What it says on stderr, line by line, when it has ended.
    log: Option<JoinHandle<String>>,
    _tiny: Tiny,
}

/// The address of a server.
pub(crate) struct At(pub(crate) String);

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The events of a stream, the last one being `[DONE]`, which is left out.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> =
            self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{}", self.body);
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// Contexts long enough that an answer takes a while.
pub(crate) const LONG: [&str; 6] = ["-c", "32K", "--rope-scaling", "yarn", "--rope-scale", "256"];

impl Serve {
    /// Starts a server and waits until it listens.
    pub(crate) fn start(words: &[&str]) -> Self {
        Serve::start_by(words, Tiny::spawn)
    }

    /// Starts it from a shell in which at most `n` files may be open.
    pub(crate) fn start_with_files(n: u32, words: &[&str]) -> Self {
        Serve::start_by(words, |tiny, command, words| {
            let command = tiny.command(command, words);
            let limit = format!("ulimit -S -n {n} && exec \"$0\" \"$@\"");
            let mut shell = Command::new("sh");
            shell.args(["-c", &limit]).arg(command.get_program()).args(command.get_args());
            spawn(&mut shell)
        })
    }

    fn start_by(words: &[&str], spawn: impl Fn(&Tiny, &str, &[&str]) -> Child) -> Self {
        let tiny = Tiny::new();
        let all = [&["--port", "0", "--served-model-name", "tiny"], words].concat();
        let mut child = spawn(&tiny, "serve", &all);
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        let place = |line: &str| {
            let place = line.split_once("://").map(|(_, rest)| rest.split([',', '\n']).next());
            place.flatten().unwrap_or_else(|| panic!("{line}")).to_owned()
        };
        let at = At(place(&line));
        let mut events = None;
        if words.contains(&"--kv-events-config") {
            let mut second = String::new();
            lines.read_line(&mut second).unwrap();
            events = Some(place(&second));
            line += &second;
        }
        let log = std::thread::spawn(move || {
            let mut rest = String::new();
            lines.read_to_string(&mut rest).unwrap();
            line + &rest
        });
        Serve { child, at, events, log: Some(log), _tiny: tiny }
    }

    /// Where the server is.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.at.0)
    }

    /// The process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.ask("POST", path, &[], &body.to_string())
    }

    /// Waits until a metric is as it should be.
    pub(crate) fn wait_for(&self, name: &str, is_fine: impl Fn(f64) -> bool) {
        for _ in 0..600 {
            if is_fine(self.metric(name, "")) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{name} is {}", self.metric(name, ""));
    }

    /// Asks the server to end, as a supervisor does.
    pub(crate) fn terminate(&self) {
        let pid = self.child.id().to_string();
        let status = std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for the server's end, and gives what it said.
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        (status, self.log.take().unwrap().join().unwrap())
    }
}

impl std::ops::Deref for Serve {
    type Target = At;

    fn deref(&self) -> &At {
        &self.at
    }
}

impl At {
    /// A connection to the server.
    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.0).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends a request, and gives the connection on which its response will come.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &[&str], body: &str) -> TcpStream {
        let mut stream = self.connect();
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
        for header in headers {
            head += &format!("{header}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    /// Sends a request and waits for the whole response.
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &[&str], body: &str) -> Response {
        receive(self.send(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.ask("GET", path, &[], "")
    }

    /// The value of a metric, added over its labels that contain `label`.
    pub(crate) fn metric(&self, name: &str, label: &str) -> f64 {
        let page = self.get("/metrics");
        let lines = page.body.lines().filter(|line| {
            line.split_once('{').is_some_and(|(start, rest)| start == name && rest.contains(label))
        });
        let values: Vec<f64> =
            lines.map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
        assert!(!values.is_empty(), "no {name}: {}", page.body);
        values.iter().sum()
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a response to the end of its connection.
pub(crate) fn receive(mut stream: TcpStream) -> Response {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head: {}", String::from_utf8_lossy(&bytes)));
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let pair = |line: &str| {
        let (name, value) = line.split_once(':').unwrap();
        (name.to_ascii_lowercase(), value.trim().to_owned())
    };
    let headers: Vec<(String, String)> = lines.map(pair).collect();
    let is_chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    let body = &bytes[end + 4..];
    let body = if is_chunked { unchunked(body) } else { body.to_vec() };
    Response { status, headers, body: String::from_utf8(body).unwrap() }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") {
        let len = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        whole.extend_from_slice(&bytes[end + 2..end + 2 + len]);
        bytes = &bytes[end + 2 + len + 2..];
        if len == 0 {
            break;
        }
    }
    whole
}
