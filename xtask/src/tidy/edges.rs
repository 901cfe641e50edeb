//! Rule: crates depend on each other only in the direction of the design.
//!
//! ```text
//!   cli ─► server ─► engine ─► scheduler ─► cache ─► types
//!              │        └─► model ─► attention ─► store ─► backend ─► types
//!              └─► tokens ─► types              backend-cpu, backend-cuda ─► backend
//! ```
//!
//! A device crate is named by `cli` and by tests only. The bookkeeping crates use nothing from
//! outside that does more than compute; `anyhow` stays in programs and tests.

use anyhow::{Context, Result};
use serde_json::Value;

use super::Complaint;

/// Prefix of our package names.
const PREFIX: &str = "nuthatch-";

/// For each crate, the crates it may use.
const ALLOWED: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("tokens", &["types"]),
    ("cache", &["types"]),
    ("scheduler", &["cache", "types"]),
    ("backend", &["types"]),
    ("backend-cpu", &["backend", "types"]),
    ("backend-cuda", &["backend", "types"]),
    ("store", &["backend", "types"]),
    ("remote", &["store"]),
    ("attention", &["store", "backend", "types"]),
    ("model", &["attention", "store", "backend", "types"]),
    ("engine", &["scheduler", "cache", "model", "attention", "store", "backend", "types"]),
    ("wire", &["types"]),
    ("server", &["engine", "tokens", "wire", "types"]),
    ("testkit", &["scheduler", "model", "engine", "backend", "types"]),
    (
        "cli",
        &[
            "server",
            "engine",
            "scheduler",
            "cache",
            "model",
            "tokens",
            "wire",
            "backend",
            "backend-cpu",
            "backend-cuda",
            "remote",
            "types",
        ],
    ),
    ("xtask", &[]),
];

/// What tests may use besides.
const ALLOWED_IN_TESTS: &[&str] = &["backend-cpu", "backend-cuda", "testkit"];

/// Crates that use nothing from outside, except what only computes: error texts and a keyed hash.
const PURE: &[&str] = &["types", "cache", "scheduler"];
const PURE_MAY_USE: &[&str] = &["thiserror", "siphasher"];

/// Crates that may use `anyhow` outside tests.
const PROGRAMS: &[&str] = &["cli", "xtask"];

/// Checks the packages that `cargo metadata --no-deps` lists.
pub(crate) fn check(metadata: &Value, found: &mut Vec<Complaint>) -> Result<()> {
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    for package in packages {
        let name = short(package["name"].as_str().context("a package without a name")?);
        let Some((_, allowed)) = ALLOWED.iter().find(|(of, _)| *of == name) else {
            found.push(complain(name, "is not in the drawing: add it to xtask/src/tidy/edges.rs"));
            continue;
        };
        let edges = package["dependencies"].as_array().context("a package without a list")?;
        for edge in edges {
            let target = edge["name"].as_str().context("a dependency without a name")?;
            let dev = edge["kind"] == "dev";
            if let Some(message) = judge(name, allowed, target, dev) {
                found.push(complain(name, message));
            }
        }
    }
    Ok(())
}

fn judge(name: &str, allowed: &[&str], target: &str, dev: bool) -> Option<String> {
    if let Some(ours) = target.strip_prefix(PREFIX) {
        let fine =
            allowed.contains(&ours) || (dev && (ours == name || ALLOWED_IN_TESTS.contains(&ours)));
        return (!fine).then(|| format!("may not use {ours}"));
    }
    if dev {
        return None;
    }
    if target == "anyhow" && !PROGRAMS.contains(&name) {
        return Some("anyhow is for programs and tests: a library has an error enum".to_owned());
    }
    if PURE.contains(&name) && !PURE_MAY_USE.contains(&target) {
        return Some(format!("{target}: this crate uses nothing from outside"));
    }
    None
}

/// The package's name without our prefix.
pub(crate) fn short(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

fn complain(name: &str, message: impl Into<String>) -> Complaint {
    Complaint { path: format!("package {name}"), line: 0, message: message.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(from: &str, to: &str, kind: Option<&str>) -> usize {
        let metadata = serde_json::json!({
            "packages": [{ "name": from, "dependencies": [{ "name": to, "kind": kind }] }]
        });
        let mut found = Vec::new();
        check(&metadata, &mut found).unwrap();
        found.len()
    }

    #[test]
    fn edges_point_down() {
        assert_eq!(edge("nuthatch-engine", "nuthatch-model", None), 0);
        assert_eq!(edge("nuthatch-model", "nuthatch-engine", None), 1);
        assert_eq!(edge("nuthatch-cache", "nuthatch-scheduler", None), 1);
    }

    #[test]
    fn devices_are_named_by_the_binary_and_by_tests() {
        assert_eq!(edge("nuthatch-cli", "nuthatch-backend-cpu", None), 0);
        assert_eq!(edge("nuthatch-engine", "nuthatch-backend-cpu", Some("dev")), 0);
        assert_eq!(edge("nuthatch-engine", "nuthatch-backend-cpu", None), 1);
        assert_eq!(edge("nuthatch-engine", "nuthatch-testkit", None), 1);
    }

    #[test]
    fn the_heart_uses_nothing_from_outside() {
        assert_eq!(edge("nuthatch-cache", "tokio", None), 1);
        assert_eq!(edge("nuthatch-cache", "thiserror", None), 0);
        assert_eq!(edge("nuthatch-cache", "proptest", Some("dev")), 0);
        assert_eq!(edge("nuthatch-model", "anyhow", None), 1);
        assert_eq!(edge("nuthatch-cli", "anyhow", None), 0);
    }

    #[test]
    fn a_new_crate_needs_a_place() {
        assert_eq!(edge("nuthatch-utils", "serde", None), 1);
    }

    #[test]
    fn the_table_has_no_cycle() {
        for (at, (name, allowed)) in ALLOWED.iter().enumerate() {
            for used in *allowed {
                let place = ALLOWED.iter().position(|(other, _)| other == used);
                assert!(place.is_some_and(|place| place < at), "{name} uses {used}");
            }
        }
    }
}
