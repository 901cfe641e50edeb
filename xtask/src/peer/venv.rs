//! Builds llama-cpp-python for this CPU, once.
//!
//! Two traps are avoided. With `GGML_NATIVE=ON` on a CPU with AVX512-FP16, gcc 12 sends llama.cpp's
//! narrow dot products into a scalar tail, which would flatter us; and its AMX path dies on an
//! illegal instruction. So the instruction sets are named one by one.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::shell;

/// The version measured; change it together with the results.
const VERSION: &str = "0.3.36";

/// CPU flag of Linux, option of ggml.
const OPTIONS: [(&str, &str); 5] = [
    ("avx512f", "GGML_AVX512"),
    ("avx512_vnni", "GGML_AVX512_VNNI"),
    ("avx512vbmi", "GGML_AVX512_VBMI"),
    ("avx512_bf16", "GGML_AVX512_BF16"),
    ("avx_vnni", "GGML_AVX_VNNI"),
];

/// The interpreter of a virtual environment that has llama-cpp-python.
pub(super) fn llama_cpp() -> Result<PathBuf> {
    let folder = shell::target_dir().join("peers").join("llama-cpp");
    let python = folder.join("bin").join("python");
    let options = options(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    let wanted = format!("{VERSION} {options}\n");
    let stamp = folder.join("nuthatch-stamp.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    println!("building llama.cpp from the Python registry: some minutes, once ({options})");
    shell::run(shell::command("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    pip(&folder, &["cmake", "ninja"], "")?;
    let package = format!("llama-cpp-python=={VERSION}");
    pip(&folder, &["--no-binary", "llama-cpp-python", "--no-cache-dir", &package], &options)?;
    std::fs::write(&stamp, wanted).with_context(|| stamp.display().to_string())?;
    Ok(python)
}

fn pip(folder: &Path, words: &[&str], cmake_args: &str) -> Result<()> {
    let bin = folder.join("bin");
    let path = shell::variable("PATH").unwrap_or_default();
    let mut command = shell::command(bin.join("python"));
    command.args(["-m", "pip", "install", "--quiet"]).args(words);
    command.env("PATH", format!("{}:{path}", bin.display()));
    shell::run(command.env("CMAKE_ARGS", cmake_args))
}

/// `CMAKE_ARGS` for a CPU with these flags.
fn options(cpuinfo: &str) -> String {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    if !has("avx512f") {
        return "-DGGML_NATIVE=ON".to_owned();
    }
    let mut options = "-DGGML_NATIVE=OFF".to_owned();
    for (_, option) in OPTIONS.iter().filter(|(flag, _)| has(flag)) {
        options.push_str(&format!(" -D{option}=ON"));
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_are_named_one_by_one() {
        let check = |flags: &str, expect: &str| assert_eq!(options(flags), expect);
        check("", "-DGGML_NATIVE=ON");
        check("flags : fma avx2", "-DGGML_NATIVE=ON");
        check(
            "flags : avx512f avx512_vnni amx_int8",
            "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON",
        );
    }
}
