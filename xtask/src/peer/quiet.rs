//! Is anything else running? A comparison on a busy machine flatters whoever spins less.
//!
//! llama.cpp's threads wait for each other by spinning, so a third busy thread on the machine can
//! slow it down a hundredfold while another engine only loses its share.

use std::time::Duration;

/// Share of the CPU time above which a measurement is not to be trusted.
pub(super) const BUSY_MAX: f64 = 0.1;

/// How long the machine is watched.
const WATCH: Duration = Duration::from_secs(1);

/// Share of the machine's CPU time that others used in the last moment; none where it is not told.
pub(super) fn busy_share() -> Option<f64> {
    let before = Ticks::read(&std::fs::read_to_string("/proc/stat").ok()?)?;
    std::thread::sleep(WATCH);
    let after = Ticks::read(&std::fs::read_to_string("/proc/stat").ok()?)?;
    Some(after.busy_since(before))
}

/// Runs something, and says which share of the CPU time the host of a virtual machine gave to others
/// meanwhile.
pub(super) fn stolen_during<T>(run: impl FnOnce() -> T) -> (T, f64) {
    let now = || std::fs::read_to_string("/proc/stat").ok().and_then(|stat| Ticks::read(&stat));
    let before = now();
    let value = run();
    let share = now().zip(before).map_or(0.0, |(after, before)| after.stolen_since(before));
    (value, share)
}

/// Clock ticks of all CPUs since the system started.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ticks {
    all: f64,
    idle: f64,
    stolen: f64,
}

impl Ticks {
    /// The line `cpu user nice system idle iowait ...`.
    fn read(stat: &str) -> Option<Self> {
        let numbers = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<f64> =
            numbers.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        // Guests are counted among user and nice already.
        let all = ticks.iter().take(8).sum();
        let stolen = ticks.get(7).copied().unwrap_or(0.0);
        Some(Self { all, idle: ticks.get(3)? + ticks.get(4)?, stolen })
    }

    fn stolen_since(self, before: Self) -> f64 {
        (self.stolen - before.stolen) / (self.all - before.all).max(1.0)
    }

    fn busy_since(self, before: Self) -> f64 {
        let all = self.all - before.all;
        if all <= 0.0 { 0.0 } else { 1.0 - (self.idle - before.idle) / all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_what_was_not_idle() {
        let before = Ticks::read("cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 1 1 1 1 1\n").unwrap();
        let after = Ticks::read("cpu  60 0 10 120 10 0 0 0 0 0\n").unwrap();
        assert!((after.busy_since(before) - 0.5).abs() < 1e-9);
        let after = Ticks::read("cpu  30 0 10 100 0 0 0 60 0 0\n").unwrap();
        assert!((after.stolen_since(before) - 0.6).abs() < 1e-9);
        assert_eq!(Ticks::read("intr 5\n"), None);
    }
}
