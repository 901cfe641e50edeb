//! Rotary position embedding: how far each pair of a head turns per position.
//!
//! The plain frequencies are `theta^(-2i/D)`. A scaling stretches them so that a model trained to a
//! short context works in a longer one.
//!
//! **Frequencies are fixed for the life of an engine.** Keys are cached after they were rotated, so
//! a key that was written when the sequence was short must still fit a query that comes when it is
//! long. Two scalings of the literature depend on the current length; here they depend on the context
//! that the engine was started with instead:
//! - dynamic NTK takes the base that belongs to that context, if it is beyond the trained one;
//! - longrope takes the long factors if and only if that context is beyond the trained one.
//!
//! A result is therefore the same at every length, and equal to that of the transformers library for
//! a sequence of exactly that context (dynamic) or on the same side of the trained one (longrope).

use std::f64::consts::TAU;
use std::str::FromStr;

use nuthatch_backend::{RopeSpec, RopeStyle};

use crate::config::{invalid, parse_scaling};
use crate::error::ConfigError;

/// How a model rotates its heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the plain frequencies.
    pub theta: f64,
    /// Width that is rotated: that of a head.
    pub dim: u32,
    /// Which elements are rotated together.
    pub style: RopeStyle,
    /// `[dim / 2]` divisors of the plain frequencies, from GGUF's `rope_freqs`.
    pub divisors: Option<Vec<f32>>,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// How frequencies are stretched. `original` is the context that the model was trained to.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All by the same factor.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// By a larger base, the longer the context (NTK-aware).
    Dynamic {
        /// At least 1.
        factor: f64,
        /// Up to here nothing is stretched.
        original: u32,
    },
    /// High frequencies not, low ones wholly, a ramp between.
    Yarn(Yarn),
    /// The same idea with the ramp of Llama 3.1.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Wavelengths are measured against this.
        original: u32,
        /// Wavelengths above `original / low_freq_factor` are stretched wholly.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are left alone.
        high_freq_factor: f64,
    },
    /// Each frequency by a factor of its own.
    LongRope {
        /// Longest context over `original`; decides the attention factor.
        factor: f64,
        /// Up to here the short factors hold.
        original: u32,
        /// `[dim / 2]` for contexts up to `original`.
        short: Vec<f32>,
        /// `[dim / 2]` for longer ones.
        long: Vec<f32>,
        /// Instead of the one that follows from `factor`.
        attention_factor: Option<f64>,
    },
}

/// Parameters of YaRN.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// At least 1.
    pub factor: f64,
    /// Rotations are counted over this context.
    pub original: u32,
    /// Pairs with more rotations than this are left alone.
    pub beta_fast: f64,
    /// Pairs with fewer rotations than this are stretched wholly.
    pub beta_slow: f64,
    /// Instead of the one that follows from `factor`.
    pub attention_factor: Option<f64>,
    /// Weight of `ln(factor)` in the attention factor, if `mscale_all_dim` is given too.
    pub mscale: Option<f64>,
    /// Weight of `ln(factor)` in its divisor, if `mscale` is given too.
    pub mscale_all_dim: Option<f64>,
    /// Whether the ends of the ramp are rounded outwards to whole pairs.
    pub truncate: bool,
}

impl Rope {
    /// The frequencies for sequences of at most `max_context` tokens; see the module's rule.
    pub fn spec(&self, max_context: usize) -> RopeSpec {
        let plain = self.plain();
        let attention_factor = match &self.scaling {
            RopeScaling::None
            | RopeScaling::Linear { .. }
            | RopeScaling::Dynamic { .. }
            | RopeScaling::Llama3 { .. } => 1.0,
            RopeScaling::Yarn(yarn) => yarn.attention_factor(),
            RopeScaling::LongRope { factor, original, attention_factor, .. } => attention_factor
                .unwrap_or_else(|| long_attention_factor(*factor, f64::from(*original))),
        };
        let scaled: Vec<f64> = match &self.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain.iter().map(|freq| freq / factor).collect(),
            RopeScaling::Dynamic { factor, original } => {
                self.dynamic(*factor, *original, max_context)
            }
            RopeScaling::Yarn(yarn) => yarn.frequencies(&plain, self.theta),
            RopeScaling::Llama3 { factor, original, low_freq_factor, high_freq_factor } => {
                let (low, high) = (*low_freq_factor, *high_freq_factor);
                let original = f64::from(*original);
                plain.iter().map(|&freq| llama3(freq, *factor, original, low, high)).collect()
            }
            RopeScaling::LongRope { original, short, long, .. } => {
                let factors = if max_context > *original as usize { long } else { short };
                plain.iter().zip(factors).map(|(freq, &factor)| freq / f64::from(factor)).collect()
            }
        };
        RopeSpec {
            inv_freq: scaled.into_iter().map(|freq| freq as f32).collect(),
            attention_factor: attention_factor as f32,
            style: self.style,
        }
    }

    /// `[dim / 2]` the frequencies before any scaling.
    fn plain(&self) -> Vec<f64> {
        let dim = f64::from(self.dim);
        let mut plain: Vec<f64> =
            (0..self.dim / 2).map(|pair| self.theta.powf(-2.0 * f64::from(pair) / dim)).collect();
        for (freq, &divisor) in plain.iter_mut().zip(self.divisors.iter().flatten()) {
            *freq /= f64::from(divisor);
        }
        plain
    }

    fn dynamic(&self, factor: f64, original: u32, max_context: usize) -> Vec<f64> {
        let dim = f64::from(self.dim);
        let length = (max_context as f64).max(f64::from(original)) / original as f64;
        let stretch = (factor * length - (factor - 1.0)).powf(dim / (dim - 2.0));
        Rope { theta: self.theta * stretch, ..self.clone() }.plain()
    }

    /// Checks every number, so that [`Rope::spec`] gives finite ones.
    pub(crate) fn validate(&self, head_dim: u32) -> Result<(), ConfigError> {
        // Comparisons with NaN are false, so NaN is refused everywhere.
        let check = |ok: bool, key: &str, found: f64, allowed| {
            if ok { Ok(()) } else { Err(invalid(key, found, allowed)) }
        };
        let positive = |key: &str, found: f64| {
            check(found > 0.0 && found <= 1e9, key, found, "above 0, at most 1e9")
        };
        let at_least_1 =
            |key, found: f64| check((1.0..=1e6).contains(&found), key, found, "1 to 1000000");
        let original_ok = |original: u32| {
            let found = f64::from(original);
            check(original >= 2, "the original context", found, "at least 2")
        };
        let factors = |key: &str, factors: &[f32]| {
            let expected = self.dim as usize / 2;
            if factors.len() != expected {
                return Err(invalid(key, factors.len(), "one for each pair of a head's elements"));
            }
            factors.iter().try_for_each(|&factor| positive(key, f64::from(factor)))
        };

        check(self.theta > 1.0 && self.theta <= 1e18, "rope theta", self.theta, "above 1")?;
        check(self.dim == head_dim, "the rotated width", f64::from(self.dim), "that of a head")?;
        if let Some(divisors) = &self.divisors {
            factors("rope_freqs", divisors)?;
        }
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => at_least_1("the rope factor", *factor),
            RopeScaling::Dynamic { factor, original } => {
                at_least_1("the rope factor", *factor)?;
                original_ok(*original)?;
                check(self.dim > 2, "the rotated width", f64::from(self.dim), "above 2 for dynamic")
            }
            RopeScaling::Yarn(yarn) => {
                at_least_1("the rope factor", yarn.factor)?;
                original_ok(yarn.original)?;
                positive("beta_fast", yarn.beta_fast)?;
                positive("beta_slow", yarn.beta_slow)?;
                for scale in [yarn.mscale, yarn.mscale_all_dim].into_iter().flatten() {
                    check((0.0..=1e6).contains(&scale), "mscale", scale, "0 to 1000000")?;
                }
                yarn.attention_factor.map_or(Ok(()), |given| positive("attention_factor", given))
            }
            RopeScaling::Llama3 { factor, original, low_freq_factor, high_freq_factor } => {
                at_least_1("the rope factor", *factor)?;
                original_ok(*original)?;
                positive("low_freq_factor", *low_freq_factor)?;
                positive("high_freq_factor", *high_freq_factor)?;
                let ordered = high_freq_factor > low_freq_factor;
                check(ordered, "high_freq_factor", *high_freq_factor, "above low_freq_factor")
            }
            RopeScaling::LongRope { factor, original, short, long, attention_factor } => {
                positive("the rope factor", *factor)?;
                original_ok(*original)?;
                factors("short_factor", short)?;
                factors("long_factor", long)?;
                attention_factor.map_or(Ok(()), |given| positive("attention_factor", given))
            }
        }
    }
}

impl RopeScaling {
    /// The context that a model with this scaling is good for, if its files say `position_limit`.
    ///
    /// Makers that stretch a model by YaRN or dynamic NTK often leave the limit as it was trained.
    pub(crate) fn context(&self, position_limit: u32) -> u32 {
        match self {
            RopeScaling::Dynamic { factor, original }
            | RopeScaling::Yarn(Yarn { factor, original, .. }) => {
                position_limit.max(stretched(*original, *factor))
            }
            RopeScaling::None
            | RopeScaling::Linear { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::LongRope { .. } => position_limit,
        }
    }
}

/// A context times a factor, rounded down; the conversion saturates.
fn stretched(original: u32, factor: f64) -> u32 {
    (f64::from(original) * factor) as u32
}

impl Yarn {
    /// YaRN with the paper's values.
    pub fn new(factor: f64, original: u32) -> Self {
        Yarn {
            factor,
            original,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }
    }

    /// What cosine and sine are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        let weighted = |weight: f64| {
            if self.factor <= 1.0 { 1.0 } else { 0.1 * weight * self.factor.ln() + 1.0 }
        };
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(given), _, _) => given,
            (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => {
                weighted(mscale) / weighted(all)
            }
            (None, _, _) => weighted(1.0),
        }
    }

    fn frequencies(&self, plain: &[f64], theta: f64) -> Vec<f64> {
        let dim = 2.0 * plain.len() as f64;
        // The pair that makes this many rotations over the original context.
        let pair_of = |rotations: f64| {
            dim * (f64::from(self.original) / (rotations * TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let mix = |(pair, &freq): (usize, &f64)| {
            let stretch = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            freq / self.factor * stretch + freq * (1.0 - stretch)
        };
        plain.iter().enumerate().map(mix).collect()
    }
}

fn llama3(freq: f64, factor: f64, original: f64, low: f64, high: f64) -> f64 {
    let wavelength = TAU / freq;
    if wavelength > original / low {
        return freq / factor;
    }
    if wavelength < original / high {
        return freq;
    }
    let smooth = (original / wavelength - low) / (high - low);
    (1.0 - smooth) * freq / factor + smooth * freq
}

fn long_attention_factor(factor: f64, original: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}

/// What a user who names longrope is told to give: it has a factor for each pair.
const LONGROPE: &str = "given with its factors, as the JSON object that config.json has under \
                        rope_scaling, or written into config.json";

/// A scaling that a user may ask for by name. [`RopeOverride::parameters`] can ask for any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants are those of `RopeScaling`")]
pub enum RopeKind {
    None,
    Linear,
    Dynamic,
    Yarn,
    Llama3,
}

impl FromStr for RopeKind {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        Ok(match name {
            "none" => RopeKind::None,
            "linear" => RopeKind::Linear,
            "dynamic" => RopeKind::Dynamic,
            "yarn" => RopeKind::Yarn,
            "llama3" => RopeKind::Llama3,
            "longrope" | "su" => return Err(invalid("rope scaling", name, LONGROPE)),
            _ => {
                return Err(invalid("rope scaling", name, "none, linear, dynamic, yarn or llama3"));
            }
        })
    }
}

/// What a user asked for instead of the model's own rotation; `None` keeps the model's.
///
/// A model trained to N tokens and `yarn` with scale 4 gives YaRN x4 over an original context of N,
/// and a context of 4 N. If the model is stretched already, N is what it was stretched from; only
/// Llama 3.1's scaling is part of the training and stays, below the new one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RopeOverride {
    /// The scaling; with a scale but no scaling, the model's own kind, or linear. `llama3` has the
    /// ramp of Llama 3.1.
    pub scaling: Option<RopeKind>,
    /// The scaling as a JSON object with the keys of `rope_scaling` in `config.json`, instead of
    /// `scaling`, `scale` and `original`.
    pub parameters: Option<String>,
    /// The factor.
    pub scale: Option<f64>,
    /// Base of the plain frequencies.
    pub theta: Option<f64>,
    /// The context that the model was trained to, where its files do not say so.
    pub original: Option<u32>,
}

impl RopeOverride {
    /// The rotation and the context that follow.
    pub(crate) fn apply(&self, rope: &Rope, max_context: u32) -> Result<(Rope, u32), ConfigError> {
        if let Some(parameters) = &self.parameters {
            return self.apply_parameters(parameters, rope, max_context);
        }
        let mut rope = rope.clone();
        rope.theta = self.theta.unwrap_or(rope.theta);
        let own_kind = match rope.scaling {
            RopeScaling::Yarn(_) => RopeKind::Yarn,
            RopeScaling::Dynamic { .. } => RopeKind::Dynamic,
            RopeScaling::None
            | RopeScaling::Linear { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::LongRope { .. } => RopeKind::Linear,
        };
        let kind = match (self.scaling, self.scale, self.original) {
            (None, None, None) => return Ok((rope, max_context)),
            (Some(kind), _, _) => kind,
            (None, _, _) => own_kind,
        };
        let (own_original, own_factor) = match &rope.scaling {
            RopeScaling::None => (max_context, None),
            RopeScaling::Linear { factor } => {
                ((f64::from(max_context) / factor) as u32, Some(*factor))
            }
            RopeScaling::Dynamic { factor, original }
            | RopeScaling::Yarn(Yarn { factor, original, .. }) => (*original, Some(*factor)),
            RopeScaling::LongRope { original, .. } => (*original, None),
            RopeScaling::Llama3 { factor, original, .. } if kind == RopeKind::Llama3 => {
                (*original, Some(*factor))
            }
            RopeScaling::Llama3 { .. } => {
                rope.divisors = Some(rope.as_divisors());
                (max_context, None)
            }
        };
        let original = self.original.unwrap_or(own_original);
        if kind == RopeKind::None {
            rope.scaling = RopeScaling::None;
            return Ok((rope, original));
        }
        let Some(factor) = self.scale.or(own_factor) else {
            return Err(ConfigError::Missing { key: "the rope scale".to_owned() });
        };
        rope.scaling = named(kind, &rope.scaling, factor, original);
        Ok((rope, stretched(original, factor)))
    }

    fn apply_parameters(
        &self,
        parameters: &str,
        rope: &Rope,
        max_context: u32,
    ) -> Result<(Rope, u32), ConfigError> {
        if self.scaling.is_some() || self.scale.is_some() || self.original.is_some() {
            return Err(invalid("rope scaling", "an object and more", "an object alone"));
        }
        let (scaling, theta) = parse_scaling(parameters, max_context)?;
        let theta = self.theta.or(theta).unwrap_or(rope.theta);
        let max_context = match &scaling {
            RopeScaling::None => max_context,
            RopeScaling::Linear { factor } => stretched(max_context, *factor),
            RopeScaling::Dynamic { factor, original }
            | RopeScaling::Yarn(Yarn { factor, original, .. })
            | RopeScaling::Llama3 { factor, original, .. }
            | RopeScaling::LongRope { factor, original, .. } => {
                max_context.max(stretched(*original, *factor))
            }
        };
        Ok((Rope { theta, scaling, ..rope.clone() }, max_context))
    }
}

/// A scaling of this kind; what its name does not say is as in the model's own, if that is of the
/// same kind.
fn named(kind: RopeKind, own: &RopeScaling, factor: f64, original: u32) -> RopeScaling {
    match (kind, own) {
        (RopeKind::Yarn, RopeScaling::Yarn(own)) => {
            RopeScaling::Yarn(Yarn { factor, original, ..own.clone() })
        }
        (RopeKind::Yarn, _) => RopeScaling::Yarn(Yarn::new(factor, original)),
        (RopeKind::Dynamic, _) => RopeScaling::Dynamic { factor, original },
        (RopeKind::Llama3, &RopeScaling::Llama3 { low_freq_factor, high_freq_factor, .. }) => {
            RopeScaling::Llama3 { factor, original, low_freq_factor, high_freq_factor }
        }
        (RopeKind::Llama3, _) => {
            let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
            RopeScaling::Llama3 { factor, original, low_freq_factor, high_freq_factor }
        }
        (RopeKind::Linear | RopeKind::None, _) => RopeScaling::Linear { factor },
    }
}

impl Rope {
    /// The scaled frequencies expressed as divisors of the plain ones, as GGUF stores Llama 3's.
    fn as_divisors(&self) -> Vec<f32> {
        let unscaled = Rope { divisors: None, scaling: RopeScaling::None, ..self.clone() }.plain();
        let scaled = self.spec(0).inv_freq;
        unscaled
            .iter()
            .zip(scaled)
            .map(|(plain, scaled)| (plain / f64::from(scaled)) as f32)
            .collect()
    }
}
