//! A hub on this machine: enough of its protocol to list a repository and download its files.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::{nuthatch, text};

/// Files of the one repository, `org/tiny`.
struct Hub {
    files: BTreeMap<&'static str, Vec<u8>>,
    token: Option<&'static str>,
    requests: AtomicU32,
    log: Mutex<Vec<String>>,
}

impl Hub {
    /// Starts a hub; its thread ends with the test process.
    fn start(
        files: impl IntoIterator<Item = (&'static str, &'static [u8])>,
        token: Option<&'static str>,
    ) -> (Arc<Hub>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files.into_iter().map(|(name, bytes)| (name, bytes.to_vec())).collect();
        let hub = Arc::new(Hub { files, token, requests: 0.into(), log: Mutex::default() });
        let shared = Arc::clone(&hub);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that hangs up is its own affair.
                let _ = stream.and_then(|stream| shared.serve(stream));
            }
        });
        (hub, address)
    }

    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let request = lines.next().unwrap_or(Ok(String::new()))?;
        let headers: Vec<String> =
            lines.map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
        let header = |name: &str| {
            headers.iter().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
            })
        };
        self.log.lock().unwrap().push(request.clone());
        let path = request.split(' ').nth(1).unwrap_or_default();
        let authorised = self
            .token
            .is_none_or(|token| header("authorization") == Some(format!("Bearer {token}")));
        let found = path.strip_prefix("/org/tiny/resolve/main/").and_then(|f| self.files.get(f));
        let (status, body, range) = if !authorised {
            ("401 Unauthorized", Vec::new(), None)
        } else if path == "/api/models/org/tiny/revision/main" {
            let list: Vec<String> =
                self.files.keys().map(|f| format!(r#"{{"rfilename":"{f}"}}"#)).collect();
            let json = format!(r#"{{"sha":"c0ffee","siblings":[{}]}}"#, list.join(","));
            ("200 OK", json.into_bytes(), None)
        } else if let Some(bytes) = found {
            let range = header("range").unwrap_or("bytes=0-".to_owned());
            let (start, end) = range.trim_start_matches("bytes=").split_once('-').unwrap();
            let start: usize = start.parse().unwrap();
            let end = end.parse().map_or(bytes.len(), |end: usize| (end + 1).min(bytes.len()));
            let range = format!("bytes {start}-{}/{}", end.max(1) - 1, bytes.len());
            ("206 Partial Content", bytes[start..end].to_vec(), Some(range))
        } else {
            ("404 Not Found", Vec::new(), None)
        };
        let etag = format!("\"{:x}\"", path.bytes().map(u64::from).sum::<u64>());
        let range = range.map(|range| format!("Content-Range: {range}\r\n")).unwrap_or_default();
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: {etag}\r\nX-Repo-Commit: c0ffee\r\n\
             {range}Connection: close\r\n\r\n",
            body.len()
        )?;
        stream.write_all(&body)
    }
}

const DIRECTORY: [(&str, &[u8]); 6] = [
    ("README.md", b"read me"),
    ("config.json", b"{\"model_type\": \"llama\"}"),
    ("model-00001-of-00002.safetensors", b"first"),
    ("model-00002-of-00002.safetensors", b"second"),
    (
        "model.safetensors.index.json",
        br#"{"weight_map": {"a": "model-00001-of-00002.safetensors",
                            "b": "model-00002-of-00002.safetensors"}}"#,
    ),
    ("tokenizer.json", b"{}"),
];

#[test]
fn a_directory_is_fetched_once_and_used_offline() {
    let home = tempfile::tempdir().unwrap();
    let (hub, address) = Hub::start(DIRECTORY, None);
    let pull = |offline: &str, words: &[&str]| {
        let mut command = nuthatch(home.path(), words);
        command.env("HF_ENDPOINT", &address).env("HF_HUB_OFFLINE", offline);
        command.env("HF_HOME", home.path().join("hf")).output().unwrap()
    };
    let before = pull("1", &["pull", "org/tiny"]);
    assert_eq!(before.status.code(), Some(1));
    let error = text(&before.stderr);
    assert!(error.contains("HF_HUB_OFFLINE forbids to ask the hub"), "{error}");

    let output = pull("0", &["pull", "org/tiny"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let path = home.path().join("hf/hub/models--org--tiny/snapshots/c0ffee");
    assert_eq!(text(&output.stdout), format!("{}\n", path.display()));
    for (name, bytes) in DIRECTORY.iter().filter(|(name, _)| *name != "README.md") {
        assert_eq!(std::fs::read(path.join(name)).unwrap(), *bytes, "{name}");
    }
    assert!(!path.join("README.md").exists(), "only what a model needs is fetched");

    // Pulling again asks for the list and downloads nothing; offline nothing is asked at all.
    hub.log.lock().unwrap().clear();
    assert!(pull("0", &["pull", "org/tiny"]).status.success());
    assert_eq!(*hub.log.lock().unwrap(), ["GET /api/models/org/tiny/revision/main HTTP/1.1"]);
    let n_requests = hub.requests.load(Ordering::SeqCst);
    assert_eq!(text(&pull("1", &["pull", "org/tiny"]).stdout), text(&output.stdout));
    // What is here runs without the hub, and fails only because it is no model.
    let run = pull("0", &["run", "org/tiny", "Hi"]);
    assert!(text(&run.stderr).contains("c0ffee/config.json"), "{}", text(&run.stderr));
    assert_eq!(hub.requests.load(Ordering::SeqCst), n_requests);
}

#[test]
fn a_gguf_is_picked_and_private_ones_need_a_token() {
    let home = tempfile::tempdir().unwrap();
    let files = [
        ("tiny.Q4_K_M.gguf", &b"GGUF four"[..]),
        ("tiny.Q8_0.gguf", &b"GGUF eight"[..]),
        ("config.json", b"{}"),
    ];
    let (_, address) = Hub::start(files, Some("secret"));
    let pull = |model: &str, token: &str| {
        let mut command = nuthatch(home.path(), &["pull", model]);
        command.env("HF_ENDPOINT", &address).env("HF_TOKEN", token).output().unwrap()
    };
    let refused = pull("org/tiny", "wrong");
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("set HF_TOKEN"), "{}", text(&refused.stderr));
    let fetched = |model| {
        let output = pull(model, "secret");
        assert!(output.status.success(), "{}", text(&output.stderr));
        std::fs::read(text(&output.stdout).trim_end()).unwrap()
    };
    assert_eq!(fetched("org/tiny:Q8_0"), b"GGUF eight");
    assert_eq!(fetched("org/tiny:tiny.Q8_0.gguf"), b"GGUF eight");
    assert_eq!(fetched("org/tiny"), b"GGUF four");
    let none = text(&pull("org/tiny:Q2_K", "secret").stderr);
    assert!(none.contains("no GGUF file matches `Q2_K`, there are: tiny.Q4_K_M.gguf"), "{none}");
    let missing = text(&pull("org/other", "secret").stderr);
    assert!(missing.contains("error: cannot get org/other from the hub"), "{missing}");
    assert!(missing.contains("there is no such repository"), "{missing}");
}

#[test]
fn a_plan_needs_only_the_hubs_config() {
    let home = tempfile::tempdir().unwrap();
    let config = br#"{"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "vocab_size": 49152, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "tie_word_embeddings": true}"#;
    let (hub, address) = Hub::start([("config.json", &config[..]), DIRECTORY[4]], None);
    let plan = nuthatch(home.path(), &["plan", "org/tiny"]).env("HF_ENDPOINT", &address).output();
    let plan = plan.unwrap();
    assert!(plan.status.success(), "{}", text(&plan.stderr));
    assert!(text(&plan.stdout).starts_with("org/tiny: 30 layers, 9 query heads"), "{plan:?}");
    let log = hub.log.lock().unwrap();
    assert!(log.iter().all(|request| request.contains("config.json")), "{log:?}");
}
