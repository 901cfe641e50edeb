//! Many rows at once with the int8 tiles of AMX: 16 rows of activations by 16 outputs, exact
//! integers for one block, then the same fused multiply-adds as the vector kernels.
//!
//! The scale changes with each block, so a product tile lives for one block only; the tiles of one
//! batch of blocks are multiplied while the sums of the batch before are scaled.

#![expect(unsafe_code, reason = "tile instructions have no intrinsics yet")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::{MAX_TILE, Tile};
use crate::acts::{Acts, TILE as TILE_ROWS};
use crate::pack::{BLOCK, Format, LANES, QUAD_BYTES, QUADS, with_format};

use nuthatch_backend::WeightType;

/// Columns whose unfolded codes and scales are kept at once: they fit the first cache levels.
const PANEL_BLOCKS: usize = 64;
/// Product tiles in flight.
const BATCH: usize = 4;

/// 16 outputs' unfolded codes, scales and minima for up to [`PANEL_BLOCKS`] blocks.
#[repr(C, align(64))]
struct Panel {
    codes: [[u8; QUAD_BYTES * QUADS]; PANEL_BLOCKS],
    scale: [[f32; LANES]; PANEL_BLOCKS * 2],
    min: [[f32; LANES]; PANEL_BLOCKS * 2],
}

/// Memory that one thread reuses from group to group; it holds no state between them.
struct Scratch {
    panel: Box<Panel>,
    /// Sums of all rows for the group's 16 outputs.
    sums: Vec<[[f32; LANES]; TILE_ROWS]>,
}

std::thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::new(Scratch {
        panel: Box::new(Panel {
            codes: [[0; QUAD_BYTES * QUADS]; PANEL_BLOCKS],
            scale: [[0.0; LANES]; PANEL_BLOCKS * 2],
            min: [[0.0; LANES]; PANEL_BLOCKS * 2],
        }),
        sums: Vec::new(),
    });
}

/// Two batches of product tiles.
#[repr(C, align(64))]
struct Products([[[i32; LANES * TILE_ROWS]; BATCH]; 2]);

/// Tile shapes for `ldtilecfg`: tile 0..4 products, 4 activations, 5 weights.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

/// Gives the tile state back, so that the system need not save it.
pub(super) fn release() {
    // SAFETY: only called on machines with AMX; releasing twice is harmless.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Computes one group for all rows of the product.
pub(super) fn group(tile: &Tile<'_>, acts: &Acts) {
    let bytes = tile.part.group(tile.group);
    with_format!(tile.part.dtype,
        F => {
            assert_eq!(bytes.len(), acts.n_blocks / F::BLOCKS * F::UNIT_BYTES);
            assert_eq!(acts.tile, TILE_ROWS);
            // SAFETY: the machine has the features (`Cpu::new` checked); sizes are asserted.
            SCRATCH.with_borrow_mut(|scratch| unsafe {
                group_tiles::<F>(tile, bytes, acts, scratch);
            });
        },
        float => unreachable!("floats have their own kernel"));
}

/// # Safety
///
/// The machine has the features; `bytes` holds the units of all blocks of `acts`, whose rows are
/// padded to tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")]
unsafe fn group_tiles<F: Format>(
    tile: &Tile<'_>,
    bytes: &[u8],
    acts: &Acts,
    scratch: &mut Scratch,
) {
    configure::<F>();
    let (panel, sums) = (&mut scratch.panel, &mut scratch.sums);
    sums.clear();
    sums.resize(acts.rows.div_ceil(TILE_ROWS), [[0.0; LANES]; TILE_ROWS]);
    let mut start = 0;
    while start < acts.n_blocks {
        let n = PANEL_BLOCKS.min(acts.n_blocks - start);
        // SAFETY: `PANEL_BLOCKS` is a whole number of units, so `start` begins one.
        unsafe {
            fill_panel::<F>(panel, bytes.as_ptr().add(start / F::BLOCKS * F::UNIT_BYTES), n);
        }
        for (t, sums) in sums.iter_mut().enumerate() {
            // SAFETY: tile `t` and blocks `start..start + n` exist.
            unsafe { row_tile::<F>(panel, acts, start, n, t, sums) };
        }
        start += n;
    }
    for (row, sums) in sums.iter().flatten().take(acts.rows).enumerate() {
        tile.store(row, sums);
    }
}

fn configure<F: Format>() {
    let mut config = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes_per_row: [0; 16],
        rows: [0; 16],
    };
    let width = BLOCK / F::SUBS;
    for product in 0..BATCH {
        config.rows[product] = TILE_ROWS as u8;
        config.bytes_per_row[product] = 64;
    }
    config.rows[4] = TILE_ROWS as u8;
    config.bytes_per_row[4] = width as u16;
    config.rows[5] = (width / 4) as u8;
    config.bytes_per_row[5] = QUAD_BYTES as u16;
    // SAFETY: the configuration is 64 valid bytes of palette 1; the process has permission for
    // tiles (`Isa::detect`).
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
}

/// # Safety
///
/// `units` points to the units of `n` blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")]
unsafe fn fill_panel<F: Format>(panel: &mut Panel, units: *const u8, n: usize) {
    for block in 0..n {
        // SAFETY: the unit of block `block` exists; the panel has room for `PANEL_BLOCKS`.
        unsafe {
            let unit = units.add(block / F::BLOCKS * F::UNIT_BYTES);
            let b = block % F::BLOCKS;
            let quads = super::avx512::unfold::<F>(unit.add(F::HEADER_BYTES + b * F::BLOCK_BYTES));
            for (q, quad) in quads.into_iter().enumerate() {
                _mm512_store_si512(
                    panel.codes[block].as_mut_ptr().add(q * QUAD_BYTES).cast(),
                    quad,
                );
            }
            for sub in 0..F::SUBS {
                let (scale, min) = super::avx512::scales::<F>(unit, b, sub);
                _mm512_store_ps(panel.scale[block * 2 + sub].as_mut_ptr(), scale);
                _mm512_store_ps(panel.min[block * 2 + sub].as_mut_ptr(), min);
            }
        }
    }
}

/// Adds the products of `n` blocks to the sums of one tile of 16 rows.
///
/// # Safety
///
/// Tiles are configured for `F`; blocks `start..start + n` and tile `t` exist in `acts`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")]
unsafe fn row_tile<F: Format>(
    panel: &Panel,
    acts: &Acts,
    start: usize,
    n: usize,
    t: usize,
    sums: &mut [[f32; LANES]; TILE_ROWS],
) {
    let steps = n * F::SUBS;
    let mut products = std::mem::MaybeUninit::<Products>::uninit();
    let products = products.as_mut_ptr().cast::<i32>();
    // SAFETY: offsets stay inside the two batches; see `multiply` and `scale_rows`.
    unsafe {
        let batch_at = |batch: usize| products.add(batch % 2 * BATCH * LANES * TILE_ROWS);
        let mut acc = [_mm512_setzero_ps(); TILE_ROWS];
        for (acc, sums) in acc.iter_mut().zip(&*sums) {
            *acc = _mm512_loadu_ps(sums.as_ptr());
        }
        let n_batches = steps.div_ceil(BATCH);
        multiply::<F>(panel, acts, (start, t), 0..steps.min(BATCH), batch_at(0));
        for batch in 0..n_batches {
            let next = (batch + 1) * BATCH;
            if next < steps {
                let range = next..steps.min(next + BATCH);
                multiply::<F>(panel, acts, (start, t), range, batch_at(batch + 1));
            }
            let range = batch * BATCH..steps.min(next);
            for (i, step) in range.enumerate() {
                let product = batch_at(batch).add(i * LANES * TILE_ROWS);
                scale_rows::<F>(panel, acts, (start, t), step, product, &mut acc);
            }
        }
        for (acc, sums) in acc.iter().zip(sums) {
            _mm512_storeu_ps(sums.as_mut_ptr(), *acc);
        }
    }
}

/// Multiplies up to [`BATCH`] (half) blocks and stores the products one after the other.
#[inline(always)]
unsafe fn multiply<F: Format>(
    panel: &Panel,
    acts: &Acts,
    (start, t): (usize, usize),
    steps: std::ops::Range<usize>,
    products: *mut i32,
) {
    for (i, step) in steps.enumerate() {
        let (block, sub) = (step / F::SUBS, step % F::SUBS);
        let at = acts.index(t * TILE_ROWS, start + block);
        // SAFETY: the tile reads 16 rows of 32 bytes at `at`, which exist because rows are padded,
        // and the weights' quads in the panel; it writes 16 x 64 bytes of `products`.
        unsafe {
            let x = acts.codes.as_ptr().add(at * BLOCK + sub * (BLOCK / F::SUBS));
            let w = panel.codes[block].as_ptr().add(sub * (QUADS / F::SUBS) * QUAD_BYTES);
            let product = products.add(i * LANES * TILE_ROWS);
            macro_rules! tile_product {
                ($tile:literal) => {
                    asm!(
                        concat!("tilezero tmm", $tile),
                        "tileloadd tmm4, [{x} + {x_stride}]",
                        "tileloadd tmm5, [{w} + {w_stride}]",
                        concat!("tdpbsud tmm", $tile, ", tmm4, tmm5"),
                        concat!("tilestored [{p} + {w_stride}], tmm", $tile),
                        x = in(reg) x,
                        x_stride = in(reg) BLOCK,
                        w = in(reg) w,
                        w_stride = in(reg) QUAD_BYTES,
                        p = in(reg) product,
                        options(nostack),
                    )
                };
            }
            match i {
                0 => tile_product!("0"),
                1 => tile_product!("1"),
                2 => tile_product!("2"),
                _ => tile_product!("3"),
            }
        }
    }
}

/// Scales one product tile into the sums: the same operations as the vector kernel's, per row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")]
unsafe fn scale_rows<F: Format>(
    panel: &Panel,
    acts: &Acts,
    (start, t): (usize, usize),
    step: usize,
    product: *const i32,
    acc: &mut [__m512; TILE_ROWS],
) {
    let (block, sub) = (step / F::SUBS, step % F::SUBS);
    let at = acts.index(t * TILE_ROWS, start + block);
    let sum_at = acts.sum_index(t * TILE_ROWS, start + block, (F::SUBS, sub));
    // SAFETY: panel entries of this block were filled; its 16 rows exist.
    unsafe {
        let scale = _mm512_load_ps(panel.scale[block * 2 + sub].as_ptr());
        let min = _mm512_load_ps(panel.min[block * 2 + sub].as_ptr());
        let x_scale = acts.scale.as_ptr().add(at);
        let x_sum = acts.sums.as_ptr().add(sum_at);
        let x_scaled_sum = acts.scaled_sums.as_ptr().add(sum_at);
        for (m, acc) in acc.iter_mut().enumerate() {
            let mut dot = _mm512_loadu_si512(product.add(m * LANES).cast());
            if F::OFFSET != 0 {
                let sum = _mm512_set1_epi32(*x_sum.add(m));
                dot = _mm512_sub_epi32(dot, times_offset::<F>(sum));
            }
            let both = _mm512_mul_ps(scale, _mm512_set1_ps(*x_scale.add(m)));
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both, *acc);
            if F::MINS {
                *acc = _mm512_fmadd_ps(min, _mm512_set1_ps(*x_scaled_sum.add(m)), *acc);
            }
        }
    }
}

/// `sum * F::OFFSET`; offsets are powers of two, and a shift takes one port for one cycle.
#[inline]
#[target_feature(enable = "avx512f")]
fn times_offset<F: Format>(sum: __m512i) -> __m512i {
    match F::OFFSET {
        4 => _mm512_slli_epi32::<2>(sum),
        8 => _mm512_slli_epi32::<3>(sum),
        16 => _mm512_slli_epi32::<4>(sum),
        32 => _mm512_slli_epi32::<5>(sum),
        _ => _mm512_slli_epi32::<7>(sum),
    }
}

const _: () = assert!(PANEL_BLOCKS.is_multiple_of(8) && MAX_TILE <= TILE_ROWS);
