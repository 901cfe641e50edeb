//! A policy as text.

use std::fmt;
use std::str::FromStr;

use super::policy::{Aggregate, Budget, Policy, Qsac, Refresh, Retriever, Reuse, Soft};

/// What may be written.
pub const GRAMMAR: &str = "\
RETRIEVER[,OPTION=VALUE]...
  RETRIEVER    auto             what was found best; options change it
               hata[:BITS]      hash codes, 128 or 256 bits [256]
               quest            bounds of each page
               loki[:N]         principal channels [16]
               ds[:N]           channels that matter most [16]
               exact            exact scores
               streaming        sinks and recent tokens only
               full             everything
  bits         8 or 4           of each of loki's channels [8]
  k            10% or 512       tokens of a selection, as a share of the context or a number [10%]
  k_min, k_max N                bounds of the share [256, none]
  focus        3                how many times as many important heads have [1]
  follow       0.5              what a token's score is worth to the next [0]
  reuse        none             select at each step [none]
               qsac(eta=0.8,p=3,floor=-1,max_age=N,thresholds=adaptive|fixed,
                    aggregate=harmonic|min|mean,soft=-1,soft_eta=S)
                                select when the query has turned away; a query
                                at least as similar as soft, of important heads
                                soft_eta, is served first by what is there
               lru(page=8,capacity=3)
                                cache pages, the least recently used going first
  refresh      delta or whole   what is moved when the selection changes [delta]
  working_set  1.5              rows that stay, in selections [1]
  sinks        N                first tokens, always attended [16]
  recent       N                last tokens, always attended [64]
  dense_layers N                first layers that attend to everything [0]
  from         N                tokens of a sequence from which on tokens are chosen [0]
  speculate    on or off        choose by the query of the layer before [off]";

/// What `auto` stands for: small selections that add up to a tenth of the context, more of it for
/// important heads, with what follows the best tokens, made again when the query has turned away.
/// docs/sparse-answers.md has what it was found best by.
pub const AUTO: &str =
    "loki:32,bits=4,k=4%,k_min=32,focus=6,follow=0.5,reuse=qsac(eta=0.9,floor=0.7),working_set=2.5";

/// A policy that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem} in {text:?}; a policy is\n{GRAMMAR}")]
pub struct SpecError {
    /// What was written.
    pub text: String,
    /// What is wrong with it.
    pub problem: String,
}

impl FromStr for Policy {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse(text).map_err(|problem| SpecError { text: text.to_owned(), problem })
    }
}

fn parse(text: &str) -> Result<Policy, String> {
    let mut parts = split(text)?.into_iter();
    let mut policy = match parts.next().unwrap_or_default() {
        "auto" => parse(AUTO)?,
        name => Policy { retriever: parse_retriever(name)?, ..Policy::default() },
    };
    let mut seen = Vec::new();
    for part in parts {
        let (key, value) =
            part.split_once('=').ok_or_else(|| format!("{part:?} is no OPTION=VALUE"))?;
        let (key, value) = (key.trim(), value.trim());
        if seen.contains(&key) {
            return Err(format!("{key} is there twice"));
        }
        seen.push(key);
        set(&mut policy, key, value)?;
    }
    if policy.is_soft() && policy.speculates {
        return Err("soft and speculate=on do not go together".to_owned());
    }
    if policy.budget.min > policy.budget.max {
        let (min, max) = (policy.budget.min, policy.budget.max);
        return Err(format!("k_min {min} is above k_max {max}"));
    }
    Ok(policy)
}

/// Parts between commas, except those inside parentheses.
fn split(text: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0usize);
    for (i, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1).ok_or("a parenthesis closes what is not open")?,
            ',' if depth == 0 => {
                parts.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    if depth > 0 {
        return Err("a parenthesis is not closed".to_owned());
    }
    parts.push(text[start..].trim());
    Ok(parts)
}

fn parse_retriever(text: &str) -> Result<Retriever, String> {
    let (name, width) = match text.split_once(':') {
        Some((name, width)) => (name, Some(number(text, width, 1, 1 << 16)?)),
        None => (text, None),
    };
    let retriever = match name {
        "hata" => Retriever::Hata { bits: width.unwrap_or(256) },
        "loki" => Retriever::Loki { channels: width.unwrap_or(16), bits: 8 },
        "ds" => Retriever::DoubleSparsity { channels: width.unwrap_or(16) },
        "quest" if width.is_none() => Retriever::Quest,
        "exact" if width.is_none() => Retriever::Exact,
        "streaming" if width.is_none() => Retriever::Streaming,
        "full" if width.is_none() => Retriever::Full,
        _ => return Err(format!("{text:?} is no retriever")),
    };
    if let Retriever::Hata { bits } = retriever
        && (bits % 64 != 0 || bits > 1024)
    {
        return Err(format!("{bits} bits are no multiple of 64 up to 1024"));
    }
    Ok(retriever)
}

fn set(policy: &mut Policy, key: &str, value: &str) -> Result<(), String> {
    match key {
        "bits" => match (&mut policy.retriever, value) {
            (Retriever::Loki { bits, .. }, "4") => *bits = 4,
            (Retriever::Loki { bits, .. }, "8") => *bits = 8,
            (Retriever::Loki { .. }, _) => return Err(format!("bits is 8 or 4, not {value:?}")),
            _ => return Err("bits is an option of loki alone".to_owned()),
        },
        "k" => {
            if let Some(percent) = value.strip_suffix('%') {
                policy.budget.percent = f64::from(float(key, percent, 0.0, 100.0)?);
            } else {
                let n = number(key, value, 1, u32::MAX)?;
                policy.budget = Budget { percent: 0.0, min: n, max: n };
            }
        }
        "k_min" => policy.budget.min = number(key, value, 0, u32::MAX)?,
        "k_max" => policy.budget.max = number(key, value, 1, u32::MAX)?,
        "focus" => policy.focus = float(key, value, 1.0, 1000.0)?,
        "follow" => policy.follow = parse_follow(key, value)?,
        "reuse" => policy.reuse = parse_reuse(value)?,
        "refresh" => {
            policy.refresh = match value {
                "delta" => Refresh::Delta,
                "whole" => Refresh::Whole,
                _ => return Err(format!("refresh is delta or whole, not {value:?}")),
            }
        }
        "working_set" => policy.working_set = float(key, value, 1.0, 1000.0)?,
        "sinks" => policy.sinks = number(key, value, 0, u32::MAX)?,
        "recent" => policy.recent = number(key, value, 1, u32::MAX)?,
        "dense_layers" => policy.dense_layers = number(key, value, 0, u32::MAX)?,
        "from" => policy.from = number(key, value, 0, u32::MAX)?,
        "speculate" => {
            policy.speculates = match value {
                "on" => true,
                "off" => false,
                _ => return Err(format!("speculate is on or off, not {value:?}")),
            }
        }
        _ => return Err(format!("{key:?} is no option")),
    }
    Ok(())
}

fn parse_follow(key: &str, text: &str) -> Result<f32, String> {
    match float(key, text, 0.0, 0.99)? {
        0.0 => Ok(0.0),
        // A score that is halved ten times for each step is worth nothing to anybody.
        x => Ok(x.max(0.001)),
    }
}

fn parse_reuse(text: &str) -> Result<Reuse, String> {
    let (name, arguments) = match text.split_once('(') {
        Some((name, rest)) => {
            let inner = rest.strip_suffix(')').ok_or_else(|| format!("{text:?} is no reuse"))?;
            (name, inner)
        }
        None => (text, ""),
    };
    let arguments = arguments.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pairs = arguments
        .map(|part| part.split_once('=').ok_or_else(|| format!("{part:?} is no OPTION=VALUE")))
        .collect::<Result<Vec<_>, _>>()?;
    for (i, (key, _)) in pairs.iter().enumerate() {
        if pairs[..i].iter().any(|(before, _)| before == key) {
            return Err(format!("{key} is there twice"));
        }
    }
    match name {
        "none" if pairs.is_empty() => Ok(Reuse::Never),
        "qsac" => parse_qsac(&pairs).map(Reuse::Qsac),
        "lru" => {
            let (mut page, mut capacity) = (8, 3.0);
            for &(key, value) in &pairs {
                match key {
                    "page" => page = number(key, value, 1, 1 << 16)?,
                    "capacity" => capacity = float(key, value, 1.0, 1000.0)?,
                    _ => return Err(format!("{key:?} is no option of lru")),
                }
            }
            Ok(Reuse::PageLru { page, capacity })
        }
        _ => Err(format!("{text:?} is no reuse")),
    }
}

fn parse_qsac(pairs: &[(&str, &str)]) -> Result<Qsac, String> {
    let mut qsac = Qsac::default();
    let (mut soft, mut soft_eta) = (None, None);
    for &(key, value) in pairs {
        match (key, value) {
            ("soft", _) => soft = Some(float(key, value, -1.0, 1.0)?),
            ("soft_eta", _) => soft_eta = Some(float(key, value, -1.0, 1.0)?),
            ("eta", _) => qsac.eta = float(key, value, -1.0, 1.0)?,
            ("p", _) => qsac.p = float(key, value, 0.0, 100.0)?,
            ("floor", _) => qsac.floor = float(key, value, -1.0, 1.0)?,
            ("max_age", _) => qsac.max_age = Some(number(key, value, 1, u32::MAX)?),
            ("thresholds", "adaptive") => qsac.is_adaptive = true,
            ("thresholds", "fixed") => qsac.is_adaptive = false,
            ("aggregate", "harmonic") => qsac.aggregate = Aggregate::Harmonic,
            ("aggregate", "min") => qsac.aggregate = Aggregate::Min,
            ("aggregate", "mean") => qsac.aggregate = Aggregate::Mean,
            _ => return Err(format!("{key}={value} is no option of qsac")),
        }
    }
    qsac.soft = match (soft, soft_eta) {
        (None, Some(_)) => return Err("soft_eta needs soft".to_owned()),
        (soft, eta) => soft.map(|floor| Soft { floor, eta: eta.unwrap_or(floor) }),
    };
    Ok(qsac)
}

fn number(key: &str, text: &str, least: u32, most: u32) -> Result<u32, String> {
    let n: u32 = text.parse().map_err(|_| format!("{text:?} of {key} is no whole number"))?;
    if (least..=most).contains(&n) {
        Ok(n)
    } else {
        Err(format!("{n} of {key} is not between {least} and {most}"))
    }
}

fn float(key: &str, text: &str, least: f32, most: f32) -> Result<f32, String> {
    let x: f32 = text.parse().map_err(|_| format!("{text:?} of {key} is no number"))?;
    // NaN is between nothing.
    if (least..=most).contains(&x) {
        Ok(x)
    } else {
        Err(format!("{x} of {key} is not between {least} and {most}"))
    }
}

impl fmt::Display for Policy {
    /// As it is read, without what is as by default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.retriever {
            Retriever::Full => f.write_str("full")?,
            Retriever::Streaming => f.write_str("streaming")?,
            Retriever::Exact => f.write_str("exact")?,
            Retriever::Hata { bits } => write!(f, "hata:{bits}")?,
            Retriever::Quest => f.write_str("quest")?,
            Retriever::Loki { channels, bits: 8 } => write!(f, "loki:{channels}")?,
            Retriever::Loki { channels, bits } => write!(f, "loki:{channels},bits={bits}")?,
            Retriever::DoubleSparsity { channels } => write!(f, "ds:{channels}")?,
        }
        let default = Policy::default();
        let (budget, usual) = (self.budget, default.budget);
        if budget.percent == 0.0 && budget.min == budget.max {
            write!(f, ",k={}", budget.min)?;
        } else {
            if budget.percent != usual.percent {
                write!(f, ",k={}%", budget.percent as f32)?;
            }
            if budget.min != usual.min {
                write!(f, ",k_min={}", budget.min)?;
            }
            if budget.max != usual.max {
                write!(f, ",k_max={}", budget.max)?;
            }
        }
        if self.focus != default.focus {
            write!(f, ",focus={}", self.focus)?;
        }
        if self.follow != default.follow {
            write!(f, ",follow={}", self.follow)?;
        }
        self.fmt_reuse(f)?;
        if self.refresh == Refresh::Whole {
            f.write_str(",refresh=whole")?;
        }
        if self.working_set != default.working_set {
            write!(f, ",working_set={}", self.working_set)?;
        }
        for (key, value, usual) in [
            ("sinks", self.sinks, default.sinks),
            ("recent", self.recent, default.recent),
            ("dense_layers", self.dense_layers, default.dense_layers),
            ("from", self.from, default.from),
        ] {
            if value != usual {
                write!(f, ",{key}={value}")?;
            }
        }
        if self.speculates { f.write_str(",speculate=on") } else { Ok(()) }
    }
}

impl Policy {
    fn fmt_reuse(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reuse {
            Reuse::Never => Ok(()),
            Reuse::PageLru { page, capacity } => {
                write!(f, ",reuse=lru(page={page},capacity={capacity})")
            }
            Reuse::Qsac(Qsac { eta, p, floor, is_adaptive, aggregate, max_age, soft }) => {
                write!(f, ",reuse=qsac(eta={eta},p={p}")?;
                if floor != Qsac::default().floor {
                    write!(f, ",floor={floor}")?;
                }
                if let Some(max_age) = max_age {
                    write!(f, ",max_age={max_age}")?;
                }
                if !is_adaptive {
                    f.write_str(",thresholds=fixed")?;
                }
                if let Some(Soft { floor, eta }) = soft {
                    write!(f, ",soft={floor}")?;
                    if eta != floor {
                        write!(f, ",soft_eta={eta}")?;
                    }
                }
                f.write_str(match aggregate {
                    Aggregate::Harmonic => ")",
                    Aggregate::Min => ",aggregate=min)",
                    Aggregate::Mean => ",aggregate=mean)",
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_read_and_written() {
        let text = "hata:256,k=10%,reuse=qsac(eta=0.8,p=3),refresh=delta,working_set=1.5,sinks=16,recent=64";
        let policy: Policy = text.parse().unwrap();
        assert_eq!(
            policy,
            Policy { reuse: Reuse::Qsac(Qsac::default()), working_set: 1.5, ..Policy::default() }
        );
        assert_eq!(policy.to_string(), "hata:256,reuse=qsac(eta=0.8,p=3),working_set=1.5");
        for text in [
            "full",
            "streaming,recent=256",
            "exact,k=512,refresh=whole",
            "hata:128,k=5%,k_min=0,k_max=4096,reuse=lru(page=8,capacity=3)",
            "quest,dense_layers=2,from=32768",
            "loki:32,reuse=qsac(eta=0.75,p=2,max_age=64,thresholds=fixed,aggregate=min)",
            "ds:8,refresh=whole,sinks=0,speculate=on",
            "hata:256,reuse=qsac(eta=0.8,p=3,aggregate=mean)",
            "loki:32,follow=0.5",
            "loki:40,bits=4,k=4%",
            "hata:256,focus=6,reuse=qsac(eta=0.9,p=2,floor=0.7)",
            "loki:32,reuse=qsac(eta=0.9,p=3,soft=-1)",
            "loki:32,reuse=qsac(eta=0.9,p=3,soft=0.25,soft_eta=0.75,aggregate=min)",
        ] {
            let policy: Policy = text.parse().unwrap();
            assert_eq!(policy.to_string(), text);
        }
    }

    #[test]
    fn auto_is_a_policy_that_options_change() {
        let auto: Policy = "auto".parse().unwrap();
        assert_eq!(AUTO.parse::<Policy>().unwrap(), auto);
        assert_eq!("auto,sinks=4".parse::<Policy>().unwrap(), Policy { sinks: 4, ..auto });
        assert!("auto:3".parse::<Policy>().is_err());
    }

    #[test]
    fn a_typo_is_an_error_that_shows_the_grammar() {
        for (text, problem) in [
            ("", "\"\" is no retriever"),
            ("hat", "\"hat\" is no retriever"),
            ("full:3", "\"full:3\" is no retriever"),
            ("hata:100", "100 bits are no multiple of 64 up to 1024"),
            ("hata:x", "\"x\" of hata:x is no whole number"),
            ("hata,k", "\"k\" is no OPTION=VALUE"),
            ("hata,k=200%", "200 of k is not between 0 and 100"),
            ("hata,k=NaN%", "NaN of k is not between 0 and 100"),
            ("hata,k=0", "0 of k is not between 1 and 4294967295"),
            ("hata,kk=1", "\"kk\" is no option"),
            ("hata,k=1%,k=2%", "k is there twice"),
            ("hata,k_min=9,k_max=8", "k_min 9 is above k_max 8"),
            ("hata,reuse=qsac(eta=2)", "2 of eta is not between -1 and 1"),
            ("hata,reuse=qsac(eat=1)", "eat=1 is no option of qsac"),
            ("hata,reuse=qsac(eta=0.8,p=3,eta=0.9)", "eta is there twice"),
            ("hata,reuse=qsac(soft=-2)", "-2 of soft is not between -1 and 1"),
            ("hata,reuse=qsac(soft_eta=0)", "soft_eta needs soft"),
            ("hata,reuse=qsac(soft=0),speculate=on", "soft and speculate=on do not go together"),
            ("hata,reuse=qsac(eta=1", "a parenthesis is not closed"),
            ("hata,reuse=qsac)", "a parenthesis closes what is not open"),
            ("hata,follow=1", "1 of follow is not between 0 and 0.99"),
            ("loki:32,bits=3", "bits is 8 or 4, not \"3\""),
            ("hata,bits=4", "bits is an option of loki alone"),
            ("hata,refresh=some", "refresh is delta or whole, not \"some\""),
            ("hata,working_set=0.5", "0.5 of working_set is not between 1 and 1000"),
            ("hata,recent=0", "0 of recent is not between 1 and 4294967295"),
        ] {
            let error = text.parse::<Policy>().unwrap_err();
            assert_eq!(error.problem, problem, "{text}");
            assert!(error.to_string().contains("qsac(eta=0.8,p=3"), "{error}");
        }
    }

    #[test]
    fn a_budget_is_a_share_within_bounds() {
        let budget = Budget { percent: 10.0, min: 256, max: 1000 };
        let rows = [0, 100, 300, 2560, 2561, 8000, 100_000].map(|n| budget.rows(n));
        assert_eq!(rows, [0, 100, 256, 256, 257, 800, 1000]);
    }
}
