//! Top-k attention from the command line, on a tiny model.

use serde_json::Value;

use super::text;
use super::tiny::Tiny;

#[test]
fn everything_attended_is_the_exact_answer() {
    let tiny = Tiny::new();
    let words = ["-p", "Hello, hello, hello!", "--max-tokens", "24", "--greedy", "--json"];
    let ids = |more: &[&str]| tiny.json("run", &[&words[..], more].concat())["answers"].clone();
    let exact = ids(&[]);
    assert_eq!(ids(&["--sparse", "full"]), exact);
    assert_eq!(ids(&["--sparse", "hata:64"]), exact, "short contexts are attended whole");
}

#[test]
fn a_typo_shows_the_grammar() {
    let tiny = Tiny::new();
    let output = tiny.output("run", &["Hello", "--sparse", "hata,kk=1"], "");
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("\"kk\" is no option"), "{error}");
    assert!(error.contains("qsac(eta=0.8,p=3"), "{error}");
}

/// The tiny model's context is too short for questions, so importances come from a table.
#[test]
fn a_profile_is_made_used_and_refused_by_other_models() {
    let tiny = Tiny::new();
    tiny.write("heads.tsv", "0.5\n-0.001\n");
    let (file, table) = (tiny.dir.path().join("heads.json"), tiny.dir.path().join("heads.tsv"));
    let (path, table) = (file.to_str().unwrap(), table.to_str().unwrap());
    let output = tiny.output("profile", &["--import", table, "-o", path], "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let profile: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((&profile["version"], &profile["importance"][0]), (&1.into(), &0.5.into()));
    let run = ["Hello", "--max-tokens", "4", "--sparse", "hata:64", "--head-profile", path];
    assert!(tiny.output("run", &run, "").status.success());
    let mut other = profile.clone();
    other["n_kv_heads"] = 2.into();
    std::fs::write(&file, other.to_string()).unwrap();
    let output = tiny.output("run", &run, "");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("head profile"), "{}", text(&output.stderr));
    let output = tiny.output("profile", &["--samples", "2", "-o", path], "");
    assert!(text(&output.stderr).contains("does not fit"), "{}", text(&output.stderr));
}
