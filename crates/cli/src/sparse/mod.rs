//! Top-k attention as a command uses it: the policy that was typed, and the profile of the model's
//! heads, which is found by the model's fingerprint.
//!
//! ```text
//!   --head-profile FILE  ->  <data>/profiles/<fingerprint>.json  ->  built in  ->  none
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use nuthatch_engine::topk::{Policy, Profile};
use nuthatch_engine::{Offload, TopKOptions};
use nuthatch_model::ModelFiles;
use nuthatch_types::TokenId;

use crate::args::{SparseArgs, Switch};
use crate::env::Env;
use crate::text;

/// Text from which averages are made that a profile lacks.
const CALIBRATION: &str = include_str!("calibration.txt");
/// The profile of the default model, so that its defaults work at once. The command that made it is
/// in it.
const BUILT_IN: &str = include_str!("smollm2-135m-instruct.json");
/// Largest profile that is read: hash codes of 512 bits of a model of 70B are 84 MB.
const PROFILE_BYTES_MAX: u64 = 256 << 20;

/// What the flags ask for; nothing if attention is exact.
pub(crate) fn options(
    files: &ModelFiles,
    args: &SparseArgs,
    env: &Env,
) -> anyhow::Result<Option<TopKOptions>> {
    args.sparse.map(|policy| options_of(files, &[policy], args, env)).transpose()
}

/// The same for any policies.
pub(crate) fn options_of(
    files: &ModelFiles,
    policies: &[Policy],
    args: &SparseArgs,
    env: &Env,
) -> anyhow::Result<TopKOptions> {
    let profile = find_profile(files, args.head_profile.as_deref(), env)?.map(Arc::new);
    let offload = args.kv_offload.as_ref().map(|_| Offload {
        budget: args.kv_device_budget,
        keeps_heads: args.kv_resident == Switch::On,
    });
    let (policies, text) = (policies.to_vec(), calibration_text(files));
    Ok(TopKOptions { policies, profile, text, offload })
}

/// The beginning of some text in the model's tokens; nothing if the model has no tokenizer.
pub(crate) fn calibration_text(files: &ModelFiles) -> Vec<TokenId> {
    let tokens = text::load(files, true).and_then(|text| Ok(text.words.raw(CALIBRATION)?));
    tokens.unwrap_or_else(|error| {
        tracing::debug!("no text for calibration: {error:#}");
        Vec::new()
    })
}

/// The model's fingerprint, in hexadecimal.
pub(crate) fn fingerprint(files: &ModelFiles) -> anyhow::Result<String> {
    Ok(files.fingerprint()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Where the profile of a model is kept, if there is a place.
pub(crate) fn profile_path(env: &Env, fingerprint: &str) -> Option<PathBuf> {
    let dir = env.profile_dir()?;
    Some(dir.join(format!("{fingerprint}.json")))
}

fn find_profile(
    files: &ModelFiles,
    path: Option<&Path>,
    env: &Env,
) -> anyhow::Result<Option<Profile>> {
    if let Some(path) = path {
        return read_profile(path).map(Some);
    }
    let fingerprint = fingerprint(files)?;
    if let Some(path) = profile_path(env, &fingerprint).filter(|path| path.is_file()) {
        return read_profile(&path).map(Some);
    }
    let built_in = Profile::from_json(BUILT_IN)?;
    Ok((built_in.fingerprint == fingerprint).then_some(built_in))
}

/// Reads a profile from a file.
pub(crate) fn read_profile(path: &Path) -> anyhow::Result<Profile> {
    let what = || format!("cannot read the head profile {}", path.display());
    let bytes = std::fs::metadata(path).with_context(what)?.len();
    ensure!(bytes <= PROFILE_BYTES_MAX, "{}: {bytes} bytes are too many", what());
    let text = std::fs::read_to_string(path).with_context(what)?;
    Profile::from_json(&text).with_context(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profile_is_whole() {
        let profile = Profile::from_json(BUILT_IN).unwrap();
        assert_eq!(profile.importance.len(), 30 * 9);
        assert!(profile.serves(&Policy::default()) && profile.command.starts_with("nuthatch"));
    }
}
