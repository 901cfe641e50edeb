//! Frequencies against those of the transformers library, and what a user's flags make of them.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{Golden, golden_dir};
use nuthatch_backend::RopeStyle;
use nuthatch_model::{ModelConfig, ModelFiles, RopeKind, RopeOverride, RopeScaling, Yarn};

/// transformers computes powers in f32, so its frequencies carry some of f32's rounding.
const RELATIVE_TOLERANCE: f64 = 2e-6;

fn assert_close(found: &[f32], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs() / expected;
        assert!(error < RELATIVE_TOLERANCE, "{what}: pair {i} is {found}, not {expected}");
    }
}

#[test]
fn frequencies_are_those_of_transformers() {
    let json = std::fs::read(golden_dir().join("rope.json")).unwrap();
    let cases: Vec<serde_json::Value> = serde_json::from_slice(&json).unwrap();
    assert!(cases.len() >= 18);
    for case in cases {
        let what = case["config"].to_string();
        let config = ModelConfig::from_json(what.as_bytes(), None).unwrap();
        let max_context = case["max_context"].as_u64().unwrap() as usize;
        let spec = config.rope_spec(max_context);
        let expected: Vec<f64> =
            case["inv_freq"].as_array().unwrap().iter().map(|f| f.as_f64().unwrap()).collect();
        assert_close(&spec.inv_freq, &expected, &what);
        let factor = case["attention_factor"].as_f64().unwrap();
        assert!((f64::from(spec.attention_factor) - factor).abs() < 1e-6, "{what}");
    }
}

#[test]
fn goldens_have_the_frequencies_that_their_reference_used() {
    for golden in Golden::all() {
        let files = ModelFiles::open(&golden.model).unwrap();
        let spec = files.config().rope_spec(golden.max_context);
        let expected: Vec<f64> = golden.inv_freq.iter().map(|&f| f64::from(f)).collect();
        assert_close(&spec.inv_freq, &expected, &golden.name);
        let factor = f64::from(spec.attention_factor);
        assert!((factor - golden.attention_factor).abs() < 1e-6, "{}", golden.name);
        let is_pairs = golden.name.starts_with("gguf-llama");
        assert_eq!(spec.style == RopeStyle::Pairs, is_pairs, "{}", golden.name);
    }
}

/// A Llama trained to 8192 tokens, with more keys.
fn llama(more: &str) -> ModelConfig {
    let json = format!(
        r#"{{"model_type": "llama", "vocab_size": 32, "hidden_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 8192{more}}}"#
    );
    ModelConfig::from_json(json.as_bytes(), None).unwrap()
}

#[test]
fn flags_stretch_a_model_from_what_it_was_trained_to() {
    let yarn4 =
        RopeOverride { scaling: Some(RopeKind::Yarn), scale: Some(4.0), ..RopeOverride::default() };
    let mut plain = llama("");
    plain.override_rope(&yarn4).unwrap();
    assert_eq!(plain.max_context, 32768);
    assert_eq!(plain.rope.scaling, RopeScaling::Yarn(Yarn::new(4.0, 8192)));
    // The same as if the file had said so.
    let in_file = llama(r#", "rope_scaling": {"type": "yarn", "factor": 4}"#);
    assert_eq!(in_file, plain);

    // Asking again counts from the training, not from the stretched context.
    plain.override_rope(&RopeOverride { scale: Some(2.0), ..RopeOverride::default() }).unwrap();
    assert_eq!(plain.max_context, 16384);
    assert_eq!(plain.rope.scaling, RopeScaling::Yarn(Yarn::new(2.0, 8192)));
    let none = RopeOverride { scaling: Some(RopeKind::None), ..RopeOverride::default() };
    plain.override_rope(&none).unwrap();
    assert_eq!(plain, llama(""));

    let linear = RopeOverride { scale: Some(2.0), ..RopeOverride::default() };
    plain.override_rope(&linear).unwrap();
    assert_eq!(
        (plain.max_context, &plain.rope.scaling),
        (16384, &RopeScaling::Linear { factor: 2.0 })
    );
    plain.override_rope(&none).unwrap();
    assert_eq!(plain, llama(""));

    let theta = RopeOverride { theta: Some(5e5), ..RopeOverride::default() };
    plain.override_rope(&theta).unwrap();
    assert_eq!(plain, llama(r#", "rope_theta": 500000.0"#));
}

#[test]
fn llama3_scaling_stays_below_a_new_one() {
    let mut config = llama(
        r#", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}"#,
    );
    let own = config.rope_spec(8192).inv_freq;
    let linear = RopeOverride {
        scaling: Some(RopeKind::Linear),
        scale: Some(2.0),
        ..RopeOverride::default()
    };
    config.override_rope(&linear).unwrap();
    assert_eq!(config.max_context, 16384);
    let expected: Vec<f64> = own.iter().map(|&freq| f64::from(freq) / 2.0).collect();
    assert_close(&config.rope_spec(8192).inv_freq, &expected, "linear over llama3");
}

#[test]
fn any_scaling_can_be_given_as_it_stands_in_a_file() {
    let json =
        |json: &str| RopeOverride { parameters: Some(json.to_owned()), ..RopeOverride::default() };
    let factors = format!("{:?}", vec![1.5; 32]);
    for object in [
        r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}"#
            .to_owned(),
        format!(
            r#"{{"type": "longrope", "factor": 4.0, "short_factor": {factors},
                "long_factor": {factors}, "original_max_position_embeddings": 2048}}"#
        ),
        r#"{"type": "yarn", "factor": 4, "beta_fast": 16, "rope_theta": 50000.0}"#.to_owned(),
        r#"{"type": "linear", "factor": 3}"#.to_owned(),
        r#"{"type": "default"}"#.to_owned(),
    ] {
        let in_file = llama(&format!(r#", "rope_scaling": {object}"#));
        let mut config = llama("");
        config.override_rope(&json(&object)).unwrap();
        assert_eq!(config.rope, in_file.rope, "{object}");
        assert!(config.max_context >= in_file.max_context, "{object}");
    }
    let mut config = llama("");
    let llama3 = RopeOverride {
        scaling: Some(RopeKind::Llama3),
        scale: Some(8.0),
        ..RopeOverride::default()
    };
    config.override_rope(&llama3).unwrap();
    assert_eq!(config.max_context, 65536);
    let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
    assert_eq!(
        config.rope.scaling,
        RopeScaling::Llama3 { factor: 8.0, original: 8192, low_freq_factor, high_freq_factor }
    );
    let error = "longrope".parse::<RopeKind>().unwrap_err().to_string();
    assert!(error.contains("written into config.json"), "{error}");
    for object in ["{", "3", r#"{"type": "new"}"#, r#"{"type": "longrope", "factor": 4}"#] {
        assert!(config.override_rope(&json(object)).is_err(), "{object}");
    }
    let both = RopeOverride { scale: Some(2.0), ..json(r#"{"type": "linear", "factor": 3}"#) };
    assert!(config.override_rope(&both).is_err());
}

#[test]
fn impossible_flags_are_refused_and_change_nothing() {
    let mut config = llama("");
    let refused = [
        RopeOverride { scaling: Some(RopeKind::Yarn), ..RopeOverride::default() },
        RopeOverride { scale: Some(0.5), ..RopeOverride::default() },
        RopeOverride { scale: Some(f64::NAN), ..RopeOverride::default() },
        RopeOverride { scale: Some(f64::INFINITY), ..RopeOverride::default() },
        RopeOverride { scale: Some(1e5), ..RopeOverride::default() },
        RopeOverride { theta: Some(0.0), ..RopeOverride::default() },
        RopeOverride { scale: Some(2.0), original: Some(0), ..RopeOverride::default() },
    ];
    for wanted in refused {
        assert!(config.override_rope(&wanted).is_err(), "{wanted:?}");
        assert_eq!(config, llama(""));
    }
    assert!("yarn2".parse::<RopeKind>().is_err());
}
