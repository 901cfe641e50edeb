//! What may be typed, and what comes of it.

use clap::Parser as _;
use nuthatch_engine::Eviction;
use nuthatch_model::RopeKind;

use super::run::split_positionals;
use super::*;
use crate::args::{Args, Command, RunArgs};
use crate::device::{Device, DeviceConfig, FarWay};

fn parse(words: &str) -> Command {
    let words = ["nuthatch", "run"].into_iter().chain(words.split_whitespace());
    Args::try_parse_from(words).unwrap().command
}

fn run_args(words: &[&str]) -> RunArgs {
    let words = ["nuthatch", "run"].iter().chain(words);
    let Command::Run(args) = Args::try_parse_from(words).unwrap().command else {
        panic!("not run");
    };
    *args
}

fn run(words: &[&str], terminal: bool) -> Result<RunConfig, String> {
    RunConfig::new(&run_args(words), terminal).map_err(|e| format!("{e:#}"))
}

fn bench(words: &str) -> Result<BenchConfig, String> {
    let words = ["nuthatch", "bench"].into_iter().chain(words.split_whitespace());
    let command = Args::try_parse_from(words).map_err(|e| e.to_string())?.command;
    let Command::Bench(args) = command else { panic!("not bench") };
    BenchConfig::new(&args).map_err(|e| format!("{e:#}"))
}

#[test]
fn positionals_are_told_apart() {
    let split = |words: &[&str]| split_positionals(&run_args(words)).map_err(|e| e.to_string());
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(split(&[]), Ok((None, None)));
    assert_eq!(split(&["Why is it so?"]), Ok((None, some("Why is it so?"))));
    assert_eq!(split(&["smollm2"]), Ok((some("smollm2"), None)));
    assert_eq!(split(&["a.gguf", "b"]), Ok((some("a.gguf"), some("b"))));
    assert_eq!(split(&["a b", "smollm2"]), Ok((some("a b"), some("smollm2"))));
    assert_eq!(split(&["-m", "x", "smollm2"]), Ok((some("x"), some("smollm2"))));
    assert_eq!(split(&["-p", "x", "hello"]), Ok((some("hello"), some("x"))));
    assert_eq!(split(&["-m", "x", "-p", "y"]), Ok((some("x"), some("y"))));
    let twice = "the prompt is given twice: `y` and `z`";
    assert_eq!(split(&["-m", "x", "-p", "y", "z"]), Err(twice.to_owned()));
    assert!(split(&["-m", "x", "a", "b"]).unwrap_err().contains("the model is given twice"));
}

#[test]
fn the_prompt_comes_from_the_line_or_stdin_or_a_person() {
    let prompt = |words: &[&str], terminal| run(words, terminal).map(|config| config.prompt);
    assert_eq!(prompt(&["Hello there"], true), Ok(Prompt::Text("Hello there".to_owned())));
    assert_eq!(prompt(&["-p", "-"], true), Ok(Prompt::Stdin));
    assert_eq!(prompt(&["smollm2", "-"], true), Ok(Prompt::Stdin));
    assert_eq!(prompt(&[], false), Ok(Prompt::Stdin));
    assert_eq!(prompt(&[], true), Ok(Prompt::Chat));
    assert_eq!(prompt(&["-p", "  "], true), Err("the prompt is empty".to_owned()));
    assert_eq!(prompt(&["--json"], true), Err("--json needs a prompt".to_owned()));
    assert_eq!(prompt(&["--raw"], true), Err("--raw needs a prompt".to_owned()));
}

#[test]
fn sampling_is_typed_then_the_models_then_ours() {
    let model = GenerationDefaults {
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.9),
        ..GenerationDefaults::default()
    };
    let sampling = |words: &[&str], model: &GenerationDefaults| {
        run(words, true).unwrap().sampling.sampling(model)
    };
    let own = sampling(&[], &GenerationDefaults::default());
    assert_eq!((own.temperature, own.top_k, own.top_p), (0.7, 40, 0.95));
    let models = sampling(&["--top-k", "5"], &model);
    assert_eq!((models.temperature, models.top_k, models.top_p), (0.6, 5, 0.9));
    assert_eq!(sampling(&["--greedy"], &model).temperature, 0.0);
    let greedy = GenerationDefaults { do_sample: Some(false), ..model };
    assert_eq!(sampling(&[], &greedy).temperature, 0.0);
    assert_eq!(sampling(&["--temp", "1.5"], &greedy).temperature, 1.5);
    let all = "--repeat-penalty 1.1 --frequency-penalty -0.5 --presence-penalty 0.5 --min-p 0.2 \
               --seed 7 --logprobs 3";
    let words: Vec<&str> = all.split_whitespace().collect();
    let all = sampling(&words, &greedy);
    assert_eq!((all.repetition_penalty, all.frequency_penalty), (1.1, -0.5));
    assert_eq!((all.presence_penalty, all.min_p, all.seed, all.n_logprobs), (0.5, 0.2, 7, Some(3)));
}

#[test]
fn seeds_differ_unless_given() {
    let seed = |words: &[&str]| run(words, true).unwrap().sampling.seed;
    assert_eq!(seed(&["--seed", "42"]), 42);
    // Of three random seeds at least two differ, but for one chance in 2^64.
    let seeds = [seed(&[]), seed(&[]), seed(&[])];
    assert!(seeds[0] != seeds[1] || seeds[1] != seeds[2]);
}

#[test]
fn engine_flags_have_the_names_people_know() {
    let words = "-t 3 --ctx-size 32K --kv-cache-dtype bf16 --kv-cache-memory-bytes 2GiB \
                 --block-size 16 --max-num-batched-tokens 1024 --max-num-seqs 4 \
                 --rope-scaling yarn --rope-scale 4 --rope-freq-base 10000";
    let Command::Run(args) = parse(words) else { panic!("not run") };
    let config = EngineConfig::new(&args.engine, 1).unwrap();
    assert_eq!((config.threads, config.max_context), (3, Some(32_768)));
    assert_eq!((config.kv_dtype, config.kv_bytes), (KvDtype::Bf16, Some(2 << 30)));
    assert_eq!((config.max_rows, config.max_seqs), (1024, 4));
    assert_eq!((config.rope.scaling, config.rope.scale), (Some(RopeKind::Yarn), Some(4.0)));
    let dtype = |words: &str| {
        let Command::Run(args) = parse(words) else { panic!("not run") };
        EngineConfig::new(&args.engine, 1).map(|config| config.kv_dtype.to_string())
    };
    assert_eq!(dtype("--kv-cache-dtype fp8_e4m3").unwrap(), "fp8");
    let words = "--kv-cache-dtype int8 --kv-cache-dtype-skip-layers 0,29";
    assert_eq!(dtype(words).unwrap(), "int8 but for layers [0, 29]");
    for (words, expected) in [
        ("--kv-cache-dtype-skip-layers 0", "needs --kv-cache-dtype int8 or fp8, not f16"),
        ("--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 128", "layers are 0 to 127"),
        ("--kv-cache-dtype int8 --kv-cold-dtype int4", "stored as they are"),
    ] {
        let error = dtype(words).unwrap_err().to_string();
        assert!(error.contains(expected), "{words}: {error}");
    }
    for alias in ["-c 8K", "--max-model-len 8192", "--context-length 8k"] {
        let Command::Run(args) = parse(alias) else { panic!("not run") };
        assert_eq!(args.engine.max_model_len, Some(8192), "{alias}");
    }
}

/// Sequences that the engine knows, and how it behaves.
fn options(words: &str) -> Result<(u32, EngineOptions), ConfigError> {
    let Command::Run(args) = parse(words) else { panic!("not run") };
    EngineConfig::new(&args.engine, 8).map(|config| (config.max_seqs, config.options))
}

#[test]
fn scheduling_flags_have_the_names_people_know() {
    let (n_seqs, default) = options("").unwrap();
    assert_eq!((n_seqs, default), (8, EngineOptions::default()));
    for words in ["--scheduling-policy prefix", "--schedule-policy lpm"] {
        assert!(matches!(options(words).unwrap().1.policy, Policy::Prefix { .. }), "{words}");
    }
    for words in ["--eviction-policy lfu", "--radix-eviction-policy lfu"] {
        assert_eq!(options(words).unwrap().1.eviction, Eviction::Lfu, "{words}");
    }
    for (words, expect) in [
        ("--enable-prefix-caching", true),
        ("--no-enable-prefix-caching", false),
        ("--disable-radix-cache", false),
        ("--no-enable-prefix-caching --enable-prefix-caching", true),
        ("--enable-prefix-caching --no-enable-prefix-caching", false),
    ] {
        assert_eq!(options(words).unwrap().1.prefix_caching, expect, "{words}");
    }
    for words in ["--max-num-seqs 3", "--max-running-requests 3", "--parallel 3"] {
        assert_eq!(options(words).unwrap().0, 3, "{words}");
    }
    // Displaced sequences stay known to the engine.
    let (n_seqs, mlfq) = options("--scheduling-policy mlfq --max-num-seqs 5").unwrap();
    assert_eq!(n_seqs, 10);
    assert!(matches!(mlfq.policy, Policy::Mlfq { max_running: 5, .. }));
    let words = "--scheduling-policy mlfq --max-num-seqs 5 --max-num-batched-tokens 9";
    assert!(options(words).unwrap_err().to_string().contains("at least twice --max-num-seqs (5)"));
    for words in ["--swap-space 4", "--kv-offloading-size 4", "--hicache-size 4096MiB"] {
        let Command::Run(args) = parse(words) else { panic!("not run") };
        assert_eq!(EngineConfig::new(&args.engine, 8).unwrap().host_bytes, 4 << 30, "{words}");
    }
}

#[test]
fn virtual_pages_neither_move_nor_are_shared() {
    let (_, plain) = options("--kv-layout virtual").unwrap();
    assert!(!plain.prefix_caching && !plain.shares_pages);
    assert!(options("--kv-layout paged").unwrap().1.shares_pages);
    for words in
        ["--swap-space 4", "--kv-disk ./kv:1GiB", "--sparse auto", "--enable-prefix-caching"]
    {
        let error = options(&format!("--kv-layout virtual {words}")).unwrap_err().to_string();
        let name = words.split(' ').next().unwrap();
        assert!(error.contains(name), "{error}");
    }
    let config = DeviceConfig {
        device: DeviceArg::Cpu,
        threads: 1,
        is_exact: false,
        kernel_dir: None,
        kv_file: None,
        kv_virtual: true,
        far: FarWay { code: None, n_threads: 0 },
    };
    let far = FarWay { code: None, n_threads: 2 };
    let threads = DeviceConfig { far, kv_virtual: false, ..config.clone() };
    let Err(error) = Device::open(&threads) else { panic!("a CPU needs no threads for rows") };
    assert!(error.to_string().contains("--kv-transfer threads is for a GPU"), "{error}");
    let Err(error) = Device::open(&config) else { panic!("a CPU has no virtual pages") };
    assert!(error.to_string().contains("needs an NVIDIA GPU"), "{error}");
}

#[test]
fn there_are_seats_for_all_answers() {
    let config = |words: &[&str]| run(&[words, &["-p", "x"]].concat(), true).unwrap();
    let seats = |words: &[&str]| config(words).engine.max_seqs;
    assert_eq!(seats(&[]), 1);
    assert_eq!(seats(&["-n", "3"]), 3);
    assert_eq!(seats(&["-n", "100"]), 16);
    assert_eq!(seats(&["-n", "3", "--max-num-seqs", "9"]), 9);
    assert_eq!(seats(&["-n", "2", "--num-beams", "5"]), 5);
    let search = |words: &[&str]| config(&[&["--beam-width", "4"], words].concat()).sampling.beam();
    assert_eq!(search(&[]), Some(BeamParams::new(4)));
    let beam = search(&["--length-penalty", "-0.5", "--early-stopping"]).unwrap();
    assert_eq!((beam.length_penalty, beam.early_stopping), (-0.5, EarlyStopping::Yes));
    let early = |when| search(&[when]).unwrap().early_stopping;
    assert_eq!(early("--early-stopping=never"), EarlyStopping::Never);
    assert_eq!(early("--early-stopping=false"), EarlyStopping::No);
    assert_eq!(config(&[]).sampling.beam(), None);
}

#[test]
fn rope_scaling_is_a_name_or_an_object() {
    let rope = |text: &str| run(&["--rope-scaling", text], true).unwrap().engine.rope;
    assert_eq!(rope("llama3").scaling, Some(RopeKind::Llama3));
    let object = r#"{"rope_type": "llama3", "factor": 8.0}"#;
    assert_eq!(rope(object).parameters.as_deref(), Some(object));
    let words = ["nuthatch", "run", "--rope-scaling", "longrope"];
    let error = Args::try_parse_from(words).unwrap_err().to_string();
    assert!(error.contains("config.json has under rope_scaling"), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (words, expect) in [
        (&["--block-size", "32"][..], "--block-size is 32, but pages have 16 tokens"),
        (&["--threads", "0"], "--threads is 0"),
        (&["--max-tokens", "0"], "--max-tokens is 0"),
        (&["-n", "0"], "-n is 0"),
        (&["-n", "2"], "-n needs a prompt"),
        (&["-n", "3", "--beam-width", "2", "-p", "x"], "-n is 3, but must be at most"),
        (&["--beam-width", "0"], "beam_width is 0"),
        (&["--beam-width", "2", "--length-penalty", "nan"], "length_penalty is NaN"),
        (&["--beam-width", "600"], "--max-num-batched-tokens (512) is less"),
        (&["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (&["--max-num-seqs", "600"], "--max-num-batched-tokens (512) is less"),
        (&["--temperature", "nan"], "temperature is NaN, but must be 0 to 100"),
        (&["--top-p", "0"], "top_p is 0"),
        (&["--logprobs", "101"], "--logprobs is 101"),
        (&["-m", "nothing"], "no model called `nothing`"),
    ] {
        let error = run(words, true).unwrap_err();
        assert!(error.contains(expect), "{words:?}: {error}");
    }
    assert!(bench("--prompt 0 --gen 0").unwrap_err().contains("nothing to measure"));
    assert!(bench("--repeat 0").unwrap_err().contains("--repeat is 0"));
    assert!(bench("--prompt 1,x").is_err());
}

#[test]
fn tests_of_bench_are_lists() {
    let config = bench("--prompt 512,2048 --gen 0,128 --depth 0,8000 -r 5").unwrap();
    assert_eq!((config.prompts.clone(), config.generates.clone()), (vec![512, 2048], vec![128]));
    assert_eq!((config.depths.clone(), config.repeat), (vec![0, 8000], 5));
    assert_eq!(config.longest(), 10_050);
}
