//! Running other programs, and the few facts about this checkout that chores need.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The root of the checkout.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace root")
}

/// Cargo's target folder, also when it was moved by the environment.
pub(crate) fn target_dir() -> PathBuf {
    variable("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// A variable of the environment, if it is set to text.
#[expect(clippy::disallowed_methods, reason = "xtask is not the engine: it has no Config to fill")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// A moment to measure from.
#[expect(clippy::disallowed_methods, reason = "chores report wall time; nothing replays them")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// `1.4 s`, `3 m 05 s`.
pub(crate) fn pretty(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 {
        return format!("{:.1} s", time.as_secs_f64());
    }
    format!("{} m {:02} s", seconds / 60, seconds % 60)
}

/// A program started in the root of the checkout.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// The cargo that runs this chore.
pub(crate) fn cargo() -> Command {
    command(variable("CARGO").unwrap_or_else(|| "cargo".to_owned()))
}

/// Runs a command with its output on the terminal; an error when it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    let status = command.status().with_context(|| format!("cannot start {line}"))?;
    if !status.success() {
        bail!("{line}: {status}");
    }
    Ok(())
}

/// Runs a command and returns all it wrote, whether it failed or not.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    let line = describe(command);
    command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {line}"))
}

/// Runs a command and returns its standard output; an error with its complaints when it fails.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let output = output(command)?;
    if !output.status.success() {
        bail!("{line}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{line} wrote bytes that are not text"))
}

/// Whether `cargo NAME` exists here.
pub(crate) fn has_cargo_tool(name: &str) -> bool {
    cargo()
        .args([name, "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Builds the release binary, once for every chore that needs it, and returns its path.
pub(crate) fn release_binary() -> Result<PathBuf> {
    run(cargo().args(["build", "--release", "--quiet", "--package", "nuthatch-cli"]))?;
    binary_in("release")
}

/// Builds the binary as the tests have it, and returns its path.
pub(crate) fn dev_binary() -> Result<PathBuf> {
    run(cargo().args(["build", "--quiet", "--workspace", "--bin", "nuthatch"]))?;
    binary_in("debug")
}

pub(crate) fn binary_in(profile: &str) -> Result<PathBuf> {
    let path = target_dir().join(profile).join(format!("nuthatch{}", std::env::consts::EXE_SUFFIX));
    if !path.is_file() {
        bail!("cargo built no {}", path.display());
    }
    Ok(path)
}

/// The command line as a person would type it.
fn describe(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    if let Some(name) = Path::new(&line).file_stem().map(|name| name.to_string_lossy().into_owned())
    {
        line = name;
    }
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_well() {
        assert_eq!(pretty(Duration::from_millis(1440)), "1.4 s");
        assert_eq!(pretty(Duration::from_secs(185)), "3 m 05 s");
    }

    #[test]
    fn a_command_line_is_named_without_its_folder() {
        assert_eq!(describe(Command::new("/usr/bin/git").arg("status")), "git status");
    }
}
