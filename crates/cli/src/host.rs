//! What this machine has and says: how much memory there is, how much is free, what time it is.
//!
//! A container's limit counts as the machine's memory, because it is what the process may use.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Memory of this machine in bytes, if the system tells.
pub(crate) fn total_memory() -> Option<u64> {
    let total = meminfo("MemTotal:")?;
    Some(cgroup_limit().map_or(total, |limit| limit.min(total)))
}

/// Memory that a new process can have without swapping, if the system tells.
pub(crate) fn available_memory() -> Option<u64> {
    let available = meminfo("MemAvailable:")?;
    Some(cgroup_free().map_or(available, |free| free.min(available)))
}

/// Seconds since 1970 by the machine's wall clock, for answers that say when they were made.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// Lets this process have `n` connections and files open, as far as the system allows. Says how many it
/// may have now, if the system tells.
pub(crate) fn allow_files(n: u64) -> Option<u64> {
    rlimit::increase_nofile_limit(n).ok()
}

/// Memory that a process has now, in bytes, if there is such a process.
pub(crate) fn resident_memory(pid: u32) -> Option<u64> {
    parse_meminfo(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "VmRSS:")
}

fn meminfo(key: &str) -> Option<u64> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?, key)
}

fn parse_meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

const CGROUP: &str = "/sys/fs/cgroup";

fn cgroup_limit() -> Option<u64> {
    read_number(&Path::new(CGROUP).join("memory.max"))
}

fn cgroup_free() -> Option<u64> {
    let limit = cgroup_limit()?;
    let used = read_number(&Path::new(CGROUP).join("memory.current"))?;
    // Cached files are counted as used, but are given up when memory is needed.
    let stat = std::fs::read_to_string(Path::new(CGROUP).join("memory.stat")).ok()?;
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let cached: u64 = cached.and_then(|n| n.trim().parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

/// A file with one number; `max` is none.
fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_kib() {
        let text = "MemTotal:       24689764 kB\nMemAvailable:   20000000 kB\nHugePages_Total: 0\n";
        assert_eq!(parse_meminfo(text, "MemTotal:"), Some(24_689_764 * 1024));
        assert_eq!(parse_meminfo(text, "MemAvailable:"), Some(20_000_000 * 1024));
        assert_eq!(parse_meminfo(text, "HugePages_Total:"), None);
        assert_eq!(parse_meminfo("", "MemTotal:"), None);
    }
}
