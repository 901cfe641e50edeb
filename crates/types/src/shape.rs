//! The shape of a model's KV, and the arithmetic of its memory.

use std::fmt;

/// How a key or value is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KvDtype {
    /// 32-bit floats.
    F32,
    /// 16-bit floats with 11 significant bits; the default.
    #[default]
    F16,
    /// 16-bit floats with the range of 32-bit ones and 8 significant bits.
    Bf16,
    /// 8-bit integers with a scale for each token and head, an approximation; these layers are f16.
    Int8(LayerSet),
    /// 8-bit floats, e4m3, with a scale for each token and head, in the same way.
    Fp8(LayerSet),
}

impl KvDtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::Int8(_) | KvDtype::Fp8(_) => 1,
        }
    }

    /// Whether elements are codes that a scale makes numbers of.
    pub fn is_coded(self) -> bool {
        matches!(self, KvDtype::Int8(_) | KvDtype::Fp8(_))
    }

    /// Bytes of the scale beside one token's key, or value, of one head.
    pub fn scale_bytes(self) -> usize {
        if self.is_coded() { size_of::<f32>() } else { 0 }
    }

    /// Layers that are stored differently from the others.
    pub fn wide_layers(self) -> LayerSet {
        match self {
            KvDtype::Int8(wide) | KvDtype::Fp8(wide) => wide,
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => LayerSet::NONE,
        }
    }

    /// How one layer is stored.
    pub fn of_layer(self, layer: u32) -> KvDtype {
        match self {
            KvDtype::Int8(wide) | KvDtype::Fp8(wide) if wide.contains(layer) => KvDtype::F16,
            KvDtype::Int8(_) => KvDtype::Int8(LayerSet::NONE),
            KvDtype::Fp8(_) => KvDtype::Fp8(LayerSet::NONE),
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => self,
        }
    }
}

/// Some of a model's first 128 layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerSet(u128);

impl LayerSet {
    /// No layer.
    pub const NONE: LayerSet = LayerSet(0);

    /// The first `n` layers, or all that sets can have.
    pub const fn first(n: u32) -> Self {
        if n < u128::BITS { LayerSet((1 << n) - 1) } else { LayerSet(u128::MAX) }
    }

    /// The set of these layers; `None` if there is one that sets cannot have.
    pub fn of(layers: &[u32]) -> Option<Self> {
        let bit = |&layer: &u32| 1u128.checked_shl(layer);
        layers.iter().try_fold(0, |set, layer| Some(set | bit(layer)?)).map(LayerSet)
    }

    /// Whether a layer is in it.
    pub fn contains(self, layer: u32) -> bool {
        1u128.checked_shl(layer).is_some_and(|bit| self.0 & bit != 0)
    }

    /// Its layers, ascending.
    pub fn layers(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |&layer| self.contains(layer))
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Some of a model's first 2048 heads, counting those of all its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSet([u64; Self::MOST as usize / 64]);

impl HeadSet {
    /// Heads that sets can have.
    pub const MOST: u32 = 2048;

    /// No head.
    pub const NONE: HeadSet = HeadSet([0; Self::MOST as usize / 64]);

    /// The set of these heads, but for those that sets cannot have.
    pub fn of(heads: impl IntoIterator<Item = u32>) -> Self {
        let mut set = Self::NONE;
        for head in heads {
            if let Some(part) = set.0.get_mut(head as usize / 64) {
                *part |= 1 << (head % 64);
            }
        }
        set
    }

    /// Whether a head is in it.
    pub fn contains(&self, head: usize) -> bool {
        self.0.get(head / 64).is_some_and(|part| part >> (head % 64) & 1 == 1)
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8(_) => "int8",
            KvDtype::Fp8(_) => "fp8",
        })?;
        match self.wide_layers().layers().collect::<Vec<_>>()[..] {
            [] => Ok(()),
            ref layers => write!(f, " but for layers {layers:?}"),
        }
    }
}

/// How keys and values are stored far away, in fewer bits: an approximation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ColdDtype {
    /// 8-bit integers with a scale for each token and head.
    Int8,
    /// 8-bit floats, e4m3, with a scale for each token and head.
    Fp8,
    /// 4-bit integers with a scale for each 32 numbers.
    Int4,
}

impl ColdDtype {
    /// All, for tests.
    pub const ALL: [ColdDtype; 3] = [ColdDtype::Int8, ColdDtype::Fp8, ColdDtype::Int4];
}

impl fmt::Display for ColdDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ColdDtype::Int8 => "int8",
            ColdDtype::Fp8 => "fp8",
            ColdDtype::Int4 => "int4",
        })
    }
}

/// What is stored in fewer bits far away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdKv {
    /// How keys and values are stored.
    pub dtype: ColdDtype,
    /// Layers that are stored as they are.
    pub exact_layers: Vec<u32>,
}

impl fmt::Display for ColdKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dtype)?;
        match &self.exact_layers[..] {
            [] => Ok(()),
            layers => write!(f, " but for layers {layers:?}"),
        }
    }
}

/// How many pages each tier holds. There is one space of slots: the device's come first, then the
/// host's.
///
/// ```text
///   slot   [0, device)        [device, device + host)
///   tier   device             host
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvSlots {
    /// Slots of the device, which attention reads.
    pub device: u32,
    /// Slots of the host, where pages wait, or are read from where the device has no room.
    pub host: u32,
}

impl KvSlots {
    /// Slots of the device alone.
    pub fn on_device(device: u32) -> Self {
        KvSlots { device, host: 0 }
    }

    /// All slots.
    pub fn total(&self) -> u32 {
        self.device + self.host
    }
}

/// What it costs a device to read KV pages of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostReads {
    /// It cannot read them: they are only copied.
    #[default]
    Never,
    /// As little as its own, because they are in the same memory.
    Near,
    /// In each pass about as much as a copy, because they come over a link.
    Far,
}

/// The shape of one model's KV cache: an arena is `[layer][kv head][slot][page_len][K|V][D]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers that own KV.
    pub n_layers: u32,
    /// Key and value heads of one layer.
    pub n_kv_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Tokens of one page.
    pub page_len: u32,
    /// How one element is stored.
    pub dtype: KvDtype,
}

impl KvShape {
    /// Bytes of one token's key and value of one head of a layer.
    #[inline]
    pub fn row_bytes(&self, layer: u32) -> usize {
        let dtype = self.dtype.of_layer(layer);
        2 * (self.head_dim as usize * dtype.bytes() + dtype.scale_bytes())
    }

    /// Bytes of keys and values that one token needs over all layers.
    pub fn token_bytes(&self) -> usize {
        let heads = self.n_kv_heads as usize;
        (0..self.n_layers).map(|layer| heads * self.row_bytes(layer)).sum()
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        self.token_bytes() * self.page_len as usize
    }

    /// Pages that hold `n_tokens`, the last one perhaps partly.
    pub fn pages_for(&self, n_tokens: usize) -> usize {
        n_tokens.div_ceil(self.page_len as usize)
    }
}

/// How a page's bytes lie when they leave the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageImage {
    /// Bytes of one page over all layers.
    pub bytes: usize,
    /// Bytes of each layer, if the page is nothing but its layers, one after the other.
    pub layer_bytes: Option<usize>,
    /// Names everything beside the model and the tokens that decides what the bytes are.
    pub layout: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_llama2_70b_are_those_of_the_textbook() {
        let gqa = KvShape {
            n_layers: 80,
            n_kv_heads: 8,
            head_dim: 128,
            page_len: 16,
            dtype: KvDtype::F16,
        };
        assert_eq!(gqa.token_bytes(), 320 * 1024);
        assert_eq!(gqa.pages_for(0), 0);
        assert_eq!(gqa.pages_for(16), 1);
        assert_eq!(gqa.pages_for(17), 2);
    }

    #[test]
    fn eight_bits_have_scales_and_some_layers_stay_wide() {
        let wide = LayerSet::of(&[1, 127]).unwrap();
        assert_eq!(wide.layers().collect::<Vec<_>>(), [1, 127]);
        assert!(LayerSet::of(&[128]).is_none() && !wide.contains(128));
        assert_eq!(LayerSet::first(3).layers().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(LayerSet::first(0), LayerSet::NONE);
        assert!(LayerSet::first(128).contains(127) && LayerSet::first(999).contains(127));
        let dtype = KvDtype::Fp8(wide);
        let shape = KvShape { n_layers: 3, n_kv_heads: 2, head_dim: 64, page_len: 16, dtype };
        assert_eq!([0, 1, 2].map(|layer| shape.row_bytes(layer)), [136, 256, 136]);
        assert_eq!(shape.token_bytes(), 2 * (136 + 256 + 136));
        assert_eq!(dtype.to_string(), "fp8 but for layers [1, 127]");
    }
}
