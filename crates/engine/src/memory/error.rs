//! What does not fit, with its numbers.

use std::fmt;

/// What does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Weights, working memory and host pages leave no room for pages.
    #[error(
        "the weights need {}, working memory {}{}{}, but only {} may be used",
        Bytes(*weights), Bytes(*working), TopK(*deciding, *max_seqs),
        Swap(" and swap space ", *host_bytes), Bytes(*usable)
    )]
    Weights {
        /// Bytes for pages of the host that were asked for.
        host_bytes: u64,
        /// Bytes of the weights.
        weights: u64,
        /// Bytes of tables, activations and logits.
        working: u64,
        /// Bytes of what the device decides by.
        deciding: u64,
        /// Sequences at one time.
        max_seqs: u32,
        /// Bytes that may be used.
        usable: u64,
    },
    /// The KV pages that were asked for do not fit beside the weights.
    #[error(
        "{} of KV{} were asked for beside {} of weights and {} of working memory{}, but only {} are \
         available",
        Bytes(*kv_asked), Swap(" and swap space of ", *host_bytes), Bytes(*weights),
        Bytes(*working), TopK(*deciding, *max_seqs), Bytes(*available)
    )]
    Kv {
        /// Bytes of KV that were asked for.
        kv_asked: u64,
        /// Bytes for pages of the host that were asked for.
        host_bytes: u64,
        /// Bytes of the weights.
        weights: u64,
        /// Bytes of tables, activations and logits.
        working: u64,
        /// Bytes of what the device decides by.
        deciding: u64,
        /// Sequences at one time.
        max_seqs: u32,
        /// Bytes that are available.
        available: u64,
    },
    /// The host has no room for the pages that were asked for.
    #[error("{} of KV on the host were asked for, but only {} may be used", Bytes(*asked), Bytes(*usable))]
    Host {
        /// Bytes of KV that were asked for.
        asked: u64,
        /// Bytes of the host that may be used.
        usable: u64,
    },
    /// The device has no room for what it needs of pages that are far.
    #[error(
        "{} on the device are too few: top-k attention of {max_seqs} sequences of {max_context} \
         tokens needs {}, digests {}, copies of pages for prompts and of those that are always seen {}{}; \
         fewer sequences, a shorter context or a policy with fewer rows need less",
        Bytes(*budget), Bytes(*deciding), Bytes(*digests), Bytes(*copies),
        Swap(" and rows on their way ", *staged)
    )]
    Near {
        /// Bytes that may be used.
        budget: u64,
        /// Bytes of what the device decides by.
        deciding: u64,
        /// Bytes of one sequence's digests.
        digests: u64,
        /// Bytes of the copies of pages that are needed.
        copies: u64,
        /// Bytes for rows on their way, where threads of the host bring them.
        staged: u64,
        /// Sequences at one time.
        max_seqs: u32,
        /// Tokens of a sequence.
        max_context: u32,
    },
    /// One sequence of the context that was asked for does not fit.
    #[error(
        "a sequence of {max_context} tokens needs {} of KV, but the budget has room for {} \
         ({fits} tokens)",
        Bytes(*kv_needed), Bytes(*kv_budget)
    )]
    Context {
        /// The context that was asked for.
        max_context: u32,
        /// Bytes of KV that it needs.
        kv_needed: u64,
        /// Bytes of KV that there is room for.
        kv_budget: u64,
        /// Tokens that would fit.
        fits: u64,
    },
    /// A number that makes no sense, whatever the memory.
    #[error("{field} is {value}, but must be {allowed}")]
    Invalid {
        /// What was given.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        allowed: &'static str,
    },
}

/// What is said about bytes that there need not be.
struct Swap(&'static str, u64);

impl fmt::Display for Swap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Swap(words, bytes) = *self;
        if bytes == 0 { Ok(()) } else { write!(f, "{words}{}", Bytes(bytes)) }
    }
}

/// What is said about the bytes that a device decides by, where it does.
struct TopK(u64, u32);

impl fmt::Display for TopK {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            TopK(0, _) => Ok(()),
            TopK(bytes, n) => write!(f, ", top-k attention of {n} sequences {}", Bytes(bytes)),
        }
    }
}

/// Bytes for people.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (unit, shift) in UNITS {
            if self.0 >> shift > 0 {
                return write!(f, "{:.1} {unit}", self.0 as f64 / (1u64 << shift) as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}
