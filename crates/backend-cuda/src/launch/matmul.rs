//! `matmul.cu` and `matmul_f32.cu`: products, and the tiles that they are cut into.

use nuthatch_backend::{DeviceError, WeightType};

use super::matmul_one::{self, Normed};
use super::{Address, count, matmul_wide, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel, Memory};
use crate::weight::{Part, WeightKernels};

params! {
    /// Mirrors `MatmulParams`.
    MatmulParams {
        packed: Address,
        bias: Address,
        x: Address,
        out: Address,
        rounded: Address,
        rows: u32,
        cells: u32,
        n_x: u32,
        x_stride: u32,
        out_stride: u32,
        out_first: u32,
        is_added: u32,
        is_gated: u32,
        norm_x: Address,
        norm_weight: Address,
        norm_eps: f32,
        norm_threads: u32,
    }
}

params! {
    /// Mirrors `MatmulF32Params`.
    MatmulF32Params {
        w: Address,
        bias: Address,
        x: Address,
        out: Address,
        rows: u32,
        cols: u32,
        n_x: u32,
        out_stride: u32,
        out_first: u32,
        is_added: u32,
    }
}

/// Parts of a row's sum: the warps of a block of `Few`, `SEGMENTS` of `matmul.cu`.
pub(crate) const SEGMENTS: usize = 8;

/// How a block cuts a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(crate) name: &'static str,
    /// Warps along the weight's rows and along the activations'; each takes a segment if not given.
    warps: Option<[usize; 2]>,
    /// Tiles of 16 rows of the weight, and of 8 rows of activations, of each warp.
    tiles: [usize; 2],
    /// Cells of 64 columns that the ring in shared memory holds.
    stages: usize,
}

/// Tiles, for few rows of activations first. All of them compute the same bits. A tall one follows the one
/// that it stands for where that would take two rounds.
pub(crate) fn tiles(dtype: WeightType) -> Vec<Tile> {
    let is_float = dtype.block_len() == 1;
    let few = |name, tiles, stages| Tile { name, warps: None, tiles, stages };
    // Cells of quantised weights are small, so more of them have to be on their way.
    let (deepest, deep) = if is_float { (4, 3) } else { (6, 4) };
    let mut tiles = vec![
        few("matmul_8", [1, 1], deepest),
        few("matmul_16", [1, 2], deep),
        few("matmul_32", [2, 4], 3),
        few("matmul_64", [2, 8], 2),
        Tile { name: "matmul_many", warps: Some([2, 4]), tiles: [4, 4], stages: 3 },
    ];
    if is_float {
        tiles.insert(3, few("matmul_32_tall", [3, 4], 2));
    }
    tiles
}

impl Tile {
    /// Rows of the weight, and of the activations, that a block takes.
    fn shape(&self) -> (usize, usize) {
        let [wm, wn] = self.warps.unwrap_or([1, 1]);
        (16 * wm * self.tiles[0], 8 * wn * self.tiles[1])
    }

    fn threads(&self) -> usize {
        32 * self.warps.map_or(SEGMENTS, |[wm, wn]| wm * wn)
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(&self, dtype: WeightType) -> usize {
        let (rows, columns) = self.shape();
        let rings = if self.warps.is_none() { SEGMENTS } else { 1 };
        (rows / 16 * cell_bytes(dtype) + columns * 128) * self.stages * rings
    }
}

/// Bytes of 16 rows by 64 columns: codes, scales and offsets, as `kernels/weights.cuh` draws them.
pub(crate) fn cell_bytes(dtype: WeightType) -> usize {
    let (bits, run, scale_bytes) = match dtype {
        WeightType::F32 => unreachable!("f32 weights are not packed"),
        WeightType::F16 | WeightType::BF16 => (16, 64, 0),
        WeightType::Q4_0 => (4, 32, 2),
        WeightType::Q4_1 => (4, 32, 4),
        WeightType::Q5_0 | WeightType::Q8_0 => (8, 32, 2),
        WeightType::Q5_1 => (8, 32, 4),
        WeightType::Q2_K => (8, 16, 8),
        WeightType::Q3_K | WeightType::Q6_K => (8, 16, 4),
        WeightType::Q4_K => (4, 32, 8),
        WeightType::Q5_K => (8, 32, 8),
    };
    16 * 64 * bits / 8 + 16 * (64 / run) * scale_bytes
}

/// The kernels of all tiles, for the compiler.
pub(crate) fn entries(dtype: WeightType) -> String {
    let entry = |tile: Tile| {
        let Tile { name, warps, tiles: [mt, nt], stages } = tile;
        let shared = tile.shared_bytes(dtype);
        match warps {
            None => format!("FEW({name}, {mt}, {nt}, {stages}, {shared})"),
            Some([wm, wn]) => format!("MANY({name}, {wm}, {wn}, {mt}, {nt}, {stages}, {shared})"),
        }
    };
    tiles(dtype).into_iter().map(entry).collect::<Vec<_>>().join(" ")
}

/// Activations as the packed kernels read them: bf16, each row padded to `stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) address: Address,
    pub(crate) stride: usize,
    pub(crate) n: usize,
    /// What the only row is made of, if it is not there yet.
    pub(crate) normed: Option<Normed>,
}

/// Where a product goes.
pub(crate) struct Target<'a> {
    pub(crate) out: &'a mut CudaBuf,
    /// Outputs of one row, of all parts.
    pub(crate) stride: usize,
    pub(crate) is_added: bool,
}

/// One part of a packed weight times rows of activations, into its place in `target`.
pub(crate) fn matmul(
    device: &Device,
    (part, kernels): (&Part, &WeightKernels),
    x: Rows,
    target: &mut Target<'_>,
) -> Result<(), DeviceError> {
    matmul_first(device, (part, kernels), x, part.rows, target)
}

/// The same of the part's first `n` rows.
pub(crate) fn matmul_first(
    device: &Device,
    (part, kernels): (&Part, &WeightKernels),
    x: Rows,
    n: usize,
    target: &mut Target<'_>,
) -> Result<(), DeviceError> {
    assert!(part.first + part.rows <= target.stride, "the part's outputs are in a row");
    assert!(x.n * target.stride <= target.out.len, "the rows fit out");
    let params = MatmulParams {
        bias: part.bias.as_ref().map_or(0, Memory::address),
        out: target.out.floats.address(),
        rows: count(part.rows.min(n)),
        out_stride: count(target.stride),
        out_first: count(part.first),
        is_added: u32::from(target.is_added),
        ..params_of(part, x)
    };
    launch(device, kernels, &params)
}

/// The same without bias into `products`, `[rows, outputs of the part]`.
pub(crate) fn matmul_apart(
    device: &Device,
    (part, kernels): (&Part, &WeightKernels),
    x: Rows,
    products: &Memory,
) -> Result<(), DeviceError> {
    assert!(x.n * part.rows * 4 <= products.bytes(), "the rows fit");
    let params = MatmulParams { out: products.address(), ..params_of(part, x) };
    launch(device, kernels, &params)
}

/// One gated weight times rows of activations: the activation of its halves.
pub(crate) fn matmul_gated(
    device: &Device,
    (part, kernels): (&Part, &WeightKernels),
    x: Rows,
    out: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let f = part.rows / 2;
    assert!(x.n * f <= out.len, "the rows fit out");
    out.set_fresh(x.n * f);
    let params = MatmulParams {
        bias: part.bias.as_ref().map_or(0, Memory::address),
        out: out.floats.address(),
        rounded: out.rounded.address(),
        out_stride: count(f),
        is_gated: 1,
        ..params_of(part, x)
    };
    launch(device, kernels, &params)
}

fn params_of(part: &Part, x: Rows) -> MatmulParams {
    assert_eq!(x.stride, part.cols.next_multiple_of(64), "rows of the weight's width");
    let params = MatmulParams {
        packed: part.memory.address(),
        bias: 0,
        x: x.address,
        out: 0,
        rounded: 0,
        rows: count(part.rows),
        cells: count(part.cols.div_ceil(64)),
        n_x: count(x.n),
        x_stride: count(x.stride),
        out_stride: count(part.rows),
        out_first: 0,
        is_added: 0,
        is_gated: 0,
        norm_x: 0,
        norm_weight: 0,
        norm_eps: 0.0,
        norm_threads: 0,
    };
    x.normed.map_or(params, |of| matmul_one::normed(&params, of))
}

fn launch(
    device: &Device,
    kernels: &WeightKernels,
    params: &MatmulParams,
) -> Result<(), DeviceError> {
    if let Some(one) = kernels.one.as_ref().filter(|_| matmul_one::takes(params)) {
        return matmul_one::launch(device, one, params);
    }
    let fits = |(tile, _): &&(Tile, Kernel)| params.n_x <= count(tile.shape().1);
    // Of the tiles that have a tall one behind them, a block fills a multiprocessor.
    let is_one_round =
        |tile: &Tile| params.rows.div_ceil(count(tile.shape().0)) <= device.n_multiprocessors();
    let is_better = |tall: &Tile, tile: &Tile| {
        tall.shape().1 == tile.shape().1 && is_one_round(tall) && !is_one_round(tile)
    };
    let (last, few) = kernels.matmul.split_last().expect("one tile fits every device");
    let mut fitting = few.iter().filter(fits);
    let (tile, kernel) = match (fitting.next(), fitting.next()) {
        (Some(found), Some(tall)) if is_better(&tall.0, &found.0) => tall,
        (Some(found), _) => found,
        (None, _) if kernels.wide.is_empty() => last,
        (None, _) if matmul_wide::fills(device, params) => {
            return matmul_wide::launch(device, &kernels.wide, params);
        }
        // Few rows at a time read the weight again and again, but by many blocks.
        (None, _) => few.last().unwrap_or(last),
    };
    let (tile_rows, tile_columns) = tile.shape();
    let grid = (params.rows.div_ceil(count(tile_rows)), params.n_x.div_ceil(count(tile_columns)));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel reads the packed part, whole by construction, and `n_x` rows of x, made
    // by `round`; it writes `n_x` rows of out, which the callers asserted to fit.
    unsafe {
        device.launch(kernel, grid, count(tile.threads()), params)
    }
}

/// One part of an f32 weight times `n_x` rows of activations.
pub(crate) fn matmul_f32(
    device: &Device,
    (part, kernel): (&Part, &Kernel),
    (x, n_x): (&CudaBuf, usize),
    target: &mut Target<'_>,
) -> Result<(), DeviceError> {
    assert!(part.first + part.rows <= target.stride, "the part's outputs are in a row");
    assert!(n_x * target.stride <= target.out.len, "the rows fit out");
    assert!(n_x * part.cols <= x.len, "the rows are in x");
    let params = MatmulF32Params {
        w: part.memory.address(),
        bias: part.bias.as_ref().map_or(0, Memory::address),
        x: x.floats.address(),
        out: target.out.floats.address(),
        rows: count(part.rows),
        cols: count(part.cols),
        n_x: count(n_x),
        out_stride: count(target.stride),
        out_first: count(part.first),
        is_added: u32::from(target.is_added),
    };
    let grid = (params.rows.div_ceil(F32_THREADS / 32), params.n_x.div_ceil(F32_COLUMNS));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel reads the whole part and `n_x` rows of x, and writes `n_x` rows of out;
    // all were asserted to be there.
    unsafe {
        device.launch(kernel, grid, F32_THREADS, &params)
    }
}

const F32_THREADS: u32 = 256;
/// Rows of activations of one block.
const F32_COLUMNS: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_not_larger_than_said() {
        // Bits of one weight, times ten.
        for (dtype, bits) in [
            (WeightType::BF16, 160),
            (WeightType::Q4_0, 45),
            (WeightType::Q4_1, 50),
            (WeightType::Q8_0, 85),
            (WeightType::Q4_K, 60),
            (WeightType::Q6_K, 100),
            (WeightType::Q2_K, 120),
        ] {
            assert_eq!(cell_bytes(dtype) * 80 / 1024, bits, "{dtype}");
            assert!(cell_bytes(dtype).is_multiple_of(64), "{dtype}");
        }
    }

    #[test]
    fn tiles_fit_a_hopper_and_one_of_them_every_device() {
        for dtype in WeightType::ALL.into_iter().filter(|&dtype| dtype != WeightType::F32) {
            let bytes: Vec<usize> =
                tiles(dtype).iter().map(|tile| tile.shared_bytes(dtype)).collect();
            assert!(bytes.iter().all(|&bytes| bytes <= 227 * 1024), "{dtype}: {bytes:?}");
            assert!(bytes.last().is_some_and(|&last| last <= 99 * 1024), "{dtype}: {bytes:?}");
        }
    }

    #[test]
    fn tiles_take_ever_more_rows() {
        for dtype in [WeightType::BF16, WeightType::Q4_1] {
            let mut columns: Vec<usize> = tiles(dtype).iter().map(|tile| tile.shape().1).collect();
            columns.dedup();
            assert_eq!(columns, [8, 16, 32, 64, 128]);
        }
    }
}
