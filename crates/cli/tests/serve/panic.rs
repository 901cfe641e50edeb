//! What a fault in one request does to a server that runs: nothing to the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_engine::{Engine, EngineOptions, Pooling, SizeRequest, Sizes};
use nuthatch_model::ModelFiles;
use nuthatch_server::{Endpoint, HttpLimits, Server, ServerConfig, Stopped, ToolFormat, listen};
use nuthatch_tokens::{Tokenizer, Words};
use nuthatch_types::{KvDtype, Sampling, SystemClock};
use serde_json::json;

use super::client::{At, Serve};
use crate::tiny::Tiny;

/// The next request that asks for the time panics.
static IS_ARMED: AtomicBool = AtomicBool::new(false);

fn unix_seconds() -> u64 {
    assert!(!IS_ARMED.swap(false, Ordering::SeqCst), "as the test wants");
    1
}

#[test]
fn a_panic_fails_one_request_of_a_running_server() {
    let tiny = Tiny::new();
    let files = ModelFiles::open(tiny.dir.path()).unwrap();
    let sizes = Sizes::compute(&SizeRequest::for_model(&files, KvDtype::F32, 1 << 30)).unwrap();
    let backend = Arc::new(Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap());
    let clock = Arc::new(SystemClock::start());
    let engine = Engine::load(backend, &files, &sizes, &EngineOptions::default(), clock)
        .unwrap()
        .spawn()
        .unwrap();
    let json = std::fs::read(tiny.dir.path().join("tokenizer.json")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_json(json).unwrap());
    let words = Words { tokenizer, ends: Vec::new(), template: None };
    let config = ServerConfig {
        names: vec!["tiny".to_owned()],
        endpoint: Endpoint::new(words, Sampling::greedy(), sizes.max_context, ToolFormat::None),
        sizes,
        device: "cpu".to_owned(),
        api_keys: Vec::new(),
        admin_key: None,
        isolates_tenants: false,
        sessions: None,
        pooling: Pooling::Last,
        tls: None,
        events: None,
        limits: HttpLimits::default(),
        unix_seconds,
    };
    let listener = listen("127.0.0.1", 0).unwrap();
    let server = Server::new(config, listener, engine.clone()).unwrap();
    let at = At(server.address().unwrap().to_string());
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    let running = std::thread::spawn(move || server.run(|| stopping.load(Ordering::SeqCst)));

    let body = json!({"prompt": "Hello", "max_tokens": 4, "ignore_eos": true, "temperature": 0});
    let ask = |is_stream: bool| {
        let mut body = body.clone();
        body["stream"] = is_stream.into();
        at.ask("POST", "/v1/completions", &[], &body.to_string())
    };
    let whole = ask(false);
    assert_eq!(whole.status, 200, "{}", whole.body);
    for is_stream in [false, true] {
        IS_ARMED.store(true, Ordering::SeqCst);
        let failed = ask(is_stream);
        assert_eq!(failed.status, 500, "{}", failed.body);
        assert_eq!(failed.json()["error"]["type"], "server_error", "{}", failed.body);
        let after = ask(false);
        assert_eq!((after.status, &after.json()["choices"]), (200, &whole.json()["choices"]));
    }
    assert_eq!(at.metric("nuthatch:panics_total", ""), 2.0);
    assert_eq!(at.metric("vllm:num_requests_running", ""), 0.0);
    stop.store(true, Ordering::SeqCst);
    assert_eq!(running.join().unwrap().unwrap(), Stopped::Drained);
    engine.shutdown().unwrap();
}

/// A shell that allows few open files is no limit, as long as the system allows more.
#[test]
fn more_connections_than_a_shell_allows() {
    let serve = Serve::start_with_files(64, &[]);
    let connections: Vec<_> = (0..200).map(|_| serve.connect()).collect();
    assert_eq!(serve.get("/health").status, 200);
    drop(connections);
}
