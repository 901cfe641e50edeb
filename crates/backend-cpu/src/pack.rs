//! Weights as the kernels want them: sixteen rows side by side, so that one vector register holds
//! one output feature per lane.
//!
//! A matrix is cut into *groups* of 16 rows. A group is a run of *units*; a unit covers the 16 rows
//! and 32 columns (256 for the K formats) and holds the scales first, then the codes:
//!
//! ```text
//!   group:  unit 0 | unit 1 | ...                        along the columns
//!   unit:   header (scales of 16 rows) | block 0 | ... | block BLOCKS-1
//!   block:  codes of 16 rows x 32 columns, in planes of 64 bytes; 8 bits a code shown:
//!           quad 0: row 0 col 0..4, row 1 col 0..4, ... row 15 col 0..4
//!           quad 1: row 0 col 4..8, ...                  up to quad 7: col 28..32
//! ```
//!
//! A quad is what `vpdpbusd` and an AMX tile row eat. Narrower codes share bytes between quads: in
//! the 4-bit plane, vector `i` has quad `i` in its low and quad `i + 4` in its high nibbles; in the
//! 2-bit plane vector `i` has quads `i, i + 2, i + 4, i + 6`; in the 1-bit plane bit `q` is quad
//! `q`. Codes of 5, 3 and 6 bits are a 4- or 2-bit plane plus the plane of their high bits.
//!
//! Codes are unsigned; a weight is `scale * (code - OFFSET) + min`. The size is that of the file
//! (three K formats store their 6-bit scales as bytes, 2 to 4 % more), the file's own copy is not
//! kept.

#![expect(non_camel_case_types, reason = "the formats' own names")]

mod file;
#[cfg(test)]
mod tests;

use nuthatch_backend::{DeviceError, HostMatrix, WeightType};

use crate::mem::{Region, SharedMut, Slab};
use crate::pool::Pool;
use file::{RowUnit, unpack_file_unit};

/// Rows of a group: the lanes of a 512-bit register of floats.
pub(crate) const LANES: usize = 16;
/// Columns of a block.
pub(crate) const BLOCK: usize = 32;
/// Four columns of sixteen rows, one byte each.
pub(crate) const QUAD_BYTES: usize = 64;
/// Quads of a block.
pub(crate) const QUADS: usize = BLOCK / 4;

/// How a unit stores its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    /// `d: [f16; 16]`.
    Half,
    /// `d: [f16; 16], m: [f16; 16]`.
    HalfMin,
    /// `d, dmin: [f16; 16]`, then `scale, min: [[u8; 16]; 8]`, one for each block.
    ByteMin,
    /// `d: [f16; 16]`, then `scale: [[i8; 16]; 16]`, one for each half block.
    Signed,
    /// `d, dmin: [f16; 16]`, then `[[u8; 16]; 16]`: low nibble scale, high nibble min.
    Nibbles,
}

/// A packed integer format; one zero-sized type for each, so that kernels are compiled for it.
pub(crate) trait Format: Send + Sync + 'static {
    /// Bits of a code.
    const BITS: usize;
    /// Subtracted from a code.
    const OFFSET: i32;
    /// How scales are stored.
    const SCALES: Scales;
    /// Blocks of a unit.
    const BLOCKS: usize = match Self::SCALES {
        Scales::Half | Scales::HalfMin => 1,
        Scales::ByteMin | Scales::Signed | Scales::Nibbles => 8,
    };
    /// Scales of a block: 1, or 2 when each half has its own.
    const SUBS: usize = match Self::SCALES {
        Scales::Half | Scales::HalfMin | Scales::ByteMin => 1,
        Scales::Signed | Scales::Nibbles => 2,
    };
    /// Whether weights have a minimum added.
    const MINS: bool = match Self::SCALES {
        Scales::HalfMin | Scales::ByteMin | Scales::Nibbles => true,
        Scales::Half | Scales::Signed => false,
    };
    /// Bytes of a unit's scales.
    const HEADER_BYTES: usize = match Self::SCALES {
        Scales::Half => 32,
        Scales::HalfMin => 64,
        Scales::ByteMin => 64 + 256,
        Scales::Signed => 32 + 256,
        Scales::Nibbles => 64 + 256,
    };
    /// Bytes of a block's codes.
    const BLOCK_BYTES: usize = QUAD_BYTES * Self::BITS;
    /// Bytes of a unit.
    const UNIT_BYTES: usize = Self::HEADER_BYTES + Self::BLOCKS * Self::BLOCK_BYTES;
}

macro_rules! formats {
    ($($name:ident: $bits:literal, $offset:literal, $scales:ident;)*) => {$(
        pub(crate) struct $name;
        impl Format for $name {
            const BITS: usize = $bits;
            const OFFSET: i32 = $offset;
            const SCALES: Scales = Scales::$scales;
        }
    )*};
}

formats! {
    Q4_0: 4, 8, Half;
    Q4_1: 4, 0, HalfMin;
    Q5_0: 5, 16, Half;
    Q5_1: 5, 0, HalfMin;
    Q8_0: 8, 128, Half;
    Q2_K: 2, 0, Nibbles;
    Q3_K: 3, 4, Signed;
    Q4_K: 4, 0, ByteMin;
    Q5_K: 5, 0, ByteMin;
    Q6_K: 6, 32, Signed;
}

/// Calls `$body` with `$f` naming the format type of an integer [`WeightType`].
macro_rules! with_format {
    ($dtype:expr, $f:ident => $body:expr, float => $float:expr) => {
        match $dtype {
            WeightType::Q4_0 => {
                type $f = $crate::pack::Q4_0;
                $body
            }
            WeightType::Q4_1 => {
                type $f = $crate::pack::Q4_1;
                $body
            }
            WeightType::Q5_0 => {
                type $f = $crate::pack::Q5_0;
                $body
            }
            WeightType::Q5_1 => {
                type $f = $crate::pack::Q5_1;
                $body
            }
            WeightType::Q8_0 => {
                type $f = $crate::pack::Q8_0;
                $body
            }
            WeightType::Q2_K => {
                type $f = $crate::pack::Q2_K;
                $body
            }
            WeightType::Q3_K => {
                type $f = $crate::pack::Q3_K;
                $body
            }
            WeightType::Q4_K => {
                type $f = $crate::pack::Q4_K;
                $body
            }
            WeightType::Q5_K => {
                type $f = $crate::pack::Q5_K;
                $body
            }
            WeightType::Q6_K => {
                type $f = $crate::pack::Q6_K;
                $body
            }
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => $float,
        }
    };
}
pub(crate) use with_format;

/// A weight type that is not quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    F16,
    Bf16,
}

impl Float {
    /// The float type of a weight, or `None` if it is quantised.
    pub(crate) fn of(dtype: WeightType) -> Option<Float> {
        match dtype {
            WeightType::F32 => Some(Float::F32),
            WeightType::F16 => Some(Float::F16),
            WeightType::BF16 => Some(Float::Bf16),
            WeightType::Q4_0
            | WeightType::Q4_1
            | WeightType::Q5_0
            | WeightType::Q5_1
            | WeightType::Q8_0
            | WeightType::Q2_K
            | WeightType::Q3_K
            | WeightType::Q4_K
            | WeightType::Q5_K
            | WeightType::Q6_K => None,
        }
    }

    /// Bytes of one weight.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }
}

/// One matrix, packed. Rows past the last are zero.
pub(crate) struct Packed {
    pub(crate) dtype: WeightType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// `[groups][units][unit bytes]`, or `[groups][cols][16]` floats as they are in the file.
    pub(crate) bytes: Region<u8>,
    /// Bytes of a group.
    pub(crate) group_bytes: usize,
    pub(crate) bias: Option<Vec<f32>>,
}

impl Packed {
    /// Copies a matrix into packed form.
    pub(crate) fn new(
        pool: &Pool,
        slab: &mut Slab,
        matrix: &HostMatrix<'_>,
    ) -> Result<Packed, DeviceError> {
        let HostMatrix { dtype, rows, cols, bytes, bias } = *matrix;
        let row_bytes = dtype.row_bytes(cols).filter(|_| rows > 0 && cols > 0);
        let expected = row_bytes.and_then(|b| b.checked_mul(rows)).unwrap_or(0);
        if expected != bytes.len() || expected == 0 {
            return Err(DeviceError::WeightSize { dtype, rows, cols, got: bytes.len(), expected });
        }
        assert!(bias.is_none_or(|b| b.len() == rows));
        let row_bytes = expected / rows;
        let n_groups = rows.div_ceil(LANES);
        let group_bytes = with_format!(dtype,
            F => cols / (BLOCK * F::BLOCKS) * F::UNIT_BYTES,
            float => cols * LANES * dtype.block_bytes());
        let mut packed = slab.cut::<u8>(n_groups * group_bytes, "weights")?;
        let target = SharedMut::new(&mut packed);
        pool.run(n_groups, &|group| {
            #[expect(unsafe_code, reason = "threads write disjoint groups")]
            // SAFETY: each group index is run once, and groups do not overlap.
            let target = unsafe { target.part(group * group_bytes, group_bytes) };
            let first = group * LANES;
            let n = LANES.min(rows - first);
            let source = &bytes[first * row_bytes..(first + n) * row_bytes];
            with_format!(dtype,
                F => pack_group::<F>(dtype, source, row_bytes, target),
                float => pack_float_group(source, row_bytes, dtype.block_bytes(), target));
        });
        let bias = bias.map(<[f32]>::to_vec);
        Ok(Packed { dtype, rows, cols, bytes: packed, group_bytes, bias })
    }

    /// The bytes of one group of 16 rows.
    pub(crate) fn group(&self, group: usize) -> &[u8] {
        &self.bytes[group * self.group_bytes..(group + 1) * self.group_bytes]
    }

    /// Expands row `row` to floats.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        let group = self.group(row / LANES);
        with_format!(self.dtype,
            F => expand_row::<F>(group, row % LANES, out),
            float => expand_float_row(self.dtype, group, row % LANES, out));
    }
}

fn pack_float_group(source: &[u8], row_bytes: usize, size: usize, target: &mut [u8]) {
    for (lane, row) in source.chunks_exact(row_bytes).enumerate() {
        for (col, element) in row.chunks_exact(size).enumerate() {
            let at = (col * LANES + lane) * size;
            target[at..at + size].copy_from_slice(element);
        }
    }
}

fn expand_float_row(dtype: WeightType, group: &[u8], lane: usize, out: &mut [f32]) {
    let size = dtype.block_bytes();
    for (col, value) in out.iter_mut().enumerate() {
        let at = (col * LANES + lane) * size;
        nuthatch_backend::quant::dequantize_row(
            dtype,
            &group[at..at + size],
            std::slice::from_mut(value),
        );
    }
}

fn pack_group<F: Format>(dtype: WeightType, source: &[u8], row_bytes: usize, target: &mut [u8]) {
    let file_unit = dtype.block_bytes();
    let mut unit =
        RowUnit { codes: [0; 256], d: [0; 2], min: [0; 2], scales: [0; 16], mins: [0; 16] };
    let mut quads = [0u8; QUAD_BYTES * QUADS * 8];
    for (u, target) in target.chunks_exact_mut(F::UNIT_BYTES).enumerate() {
        let (header, blocks) = target.split_at_mut(F::HEADER_BYTES);
        for (lane, row) in source.chunks_exact(row_bytes).enumerate() {
            unpack_file_unit(dtype, &row[u * file_unit..(u + 1) * file_unit], &mut unit);
            write_header::<F>(header, lane, &unit);
            let codes = &unit.codes[..F::BLOCKS * BLOCK];
            for (q, quad) in codes.chunks_exact(4).enumerate() {
                quads[q * QUAD_BYTES + lane * 4..][..4].copy_from_slice(quad);
            }
        }
        for (b, block) in blocks.chunks_exact_mut(F::BLOCK_BYTES).enumerate() {
            fold_planes::<F>(&quads[b * QUAD_BYTES * QUADS..][..QUAD_BYTES * QUADS], block);
        }
    }
}

fn write_header<F: Format>(header: &mut [u8], lane: usize, unit: &RowUnit) {
    header[lane * 2..][..2].copy_from_slice(&unit.d);
    if F::MINS {
        header[32 + lane * 2..][..2].copy_from_slice(&unit.min);
    }
    match F::SCALES {
        Scales::Half | Scales::HalfMin => {}
        Scales::ByteMin => {
            for b in 0..8 {
                header[64 + b * LANES + lane] = unit.scales[b];
                header[64 + 128 + b * LANES + lane] = unit.mins[b];
            }
        }
        Scales::Signed => {
            for (s, &scale) in unit.scales.iter().enumerate() {
                header[32 + s * LANES + lane] = scale;
            }
        }
        Scales::Nibbles => {
            for (s, &scale) in unit.scales.iter().enumerate() {
                header[64 + s * LANES + lane] = scale;
            }
        }
    }
}

/// Folds eight quads of bytes into the format's planes.
fn fold_planes<F: Format>(quads: &[u8], block: &mut [u8]) {
    let quad = |q: usize, x: usize| quads[q * QUAD_BYTES + x];
    let low_bits = low_bits::<F>();
    for (i, vector) in block.chunks_exact_mut(QUAD_BYTES).enumerate() {
        for (x, byte) in vector.iter_mut().enumerate() {
            *byte = match plane::<F>(i) {
                Plane::Bytes => quad(i, x),
                Plane::Nibbles => (quad(i, x) & 15) | (quad(i + 4, x) & 15) << 4,
                Plane::Pairs(i) => (0..4).fold(0, |byte, s| {
                    let code = quad(i + 2 * s, x) >> if F::BITS == 6 { 4 } else { 0 };
                    byte | (code & 3) << (2 * s)
                }),
                Plane::Bits => (0..8).fold(0, |byte, q| byte | (quad(q, x) >> low_bits & 1) << q),
            };
        }
    }
}

enum Plane {
    Bytes,
    Nibbles,
    Pairs(usize),
    Bits,
}

/// Bits of a code that are in its first plane.
const fn low_bits<F: Format>() -> usize {
    match F::BITS {
        3 => 2,
        5 | 6 => 4,
        bits => bits,
    }
}

/// Which plane vector `i` of a block belongs to.
fn plane<F: Format>(i: usize) -> Plane {
    match (F::BITS, i) {
        (8, _) => Plane::Bytes,
        (4..=6, 0..4) => Plane::Nibbles,
        (6, _) => Plane::Pairs(i - 4),
        (2 | 3, 0..2) => Plane::Pairs(i),
        _ => Plane::Bits,
    }
}

/// The code at quad `q`, byte `x` of a block.
pub(crate) fn code<F: Format>(block: &[u8], q: usize, x: usize) -> u8 {
    let at = |i: usize| block[i * QUAD_BYTES + x];
    match F::BITS {
        8 => at(q),
        2 => at(q % 2) >> (2 * (q / 2)) & 3,
        3 => (at(q % 2) >> (2 * (q / 2)) & 3) | (at(2) >> q & 1) << 2,
        bits => {
            let low = at(q % 4) >> (4 * (q / 4)) & 15;
            match bits {
                5 => low | (at(4) >> q & 1) << 4,
                6 => low | (at(4 + q % 2) >> (2 * (q / 2)) & 3) << 4,
                _ => low,
            }
        }
    }
}

/// Scale and minimum of lane `lane` for half `sub` of block `b`.
pub(crate) fn scale<F: Format>(header: &[u8], b: usize, sub: usize, lane: usize) -> (f32, f32) {
    let half = |at: usize| f16_to_f32(u16::from_le_bytes([header[at], header[at + 1]]));
    let d = half(lane * 2);
    match F::SCALES {
        Scales::Half => (d, 0.0),
        Scales::HalfMin => (d, half(32 + lane * 2)),
        Scales::ByteMin => {
            let at = 64 + b * LANES + lane;
            (d * f32::from(header[at]), -(half(32 + lane * 2) * f32::from(header[at + 128])))
        }
        Scales::Signed => {
            let scale = header[32 + (2 * b + sub) * LANES + lane].cast_signed();
            (d * f32::from(scale), 0.0)
        }
        Scales::Nibbles => {
            let byte = header[64 + (2 * b + sub) * LANES + lane];
            (d * f32::from(byte & 15), -(half(32 + lane * 2) * f32::from(byte >> 4)))
        }
    }
}

/// Half to single precision in plain arithmetic, which compilers vectorise. Infinities become
/// large numbers; scales and cached values are finite.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
}

fn expand_row<F: Format>(group: &[u8], lane: usize, out: &mut [f32]) {
    let units = group.chunks_exact(F::UNIT_BYTES);
    for (unit, out) in units.zip(out.chunks_exact_mut(BLOCK * F::BLOCKS)) {
        let (header, blocks) = unit.split_at(F::HEADER_BYTES);
        for (b, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let block = &blocks[b * F::BLOCK_BYTES..][..F::BLOCK_BYTES];
            for (sub, out) in out.chunks_exact_mut(BLOCK / F::SUBS).enumerate() {
                let (scale, min) = scale::<F>(header, b, sub, lane);
                for (i, value) in out.iter_mut().enumerate() {
                    let col = sub * (BLOCK / F::SUBS) + i;
                    let code = code::<F>(block, col / 4, lane * 4 + col % 4);
                    *value = scale * (i32::from(code) - F::OFFSET) as f32 + min;
                }
            }
        }
    }
}
