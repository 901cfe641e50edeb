// Takes a matrix from the order of its file to the order of the products (weights.cuh).
//
// file [rows][row_bytes], packed [rows / 16][cells][CELL_BYTES]. One thread per lane of a cell; rows
// and columns beyond the matrix become zeros. Reads the file once, writes the packed matrix once.
//
// The rows of two stacked matrices of `half` rows each can be interleaved, so that a tile is eight rows
// of one and the same eight of the other.

struct PackParams {
    const u8* file;
    u8* packed;
    u64 row_bytes;
    u32 rows;
    u32 cols;
    u32 cells;
    u32 tiles;
    u32 half;  // 0 if rows stay in order
    u32 padding;
};
static_assert(sizeof(PackParams) == PACK_PARAMS_SIZE, "the host's PackParams differs");

// Which row of the file becomes a row of the packed matrix.
DEVICE u64 file_row(const PackParams& p, u32 row) {
    if (p.half == 0) return row;
    return row / 16 * 8 + row % 8 + (row / 8 % 2 ? p.half : 0);
}

// The stored code of one weight.
DEVICE u32 code_at(const PackParams& p, u32 row, u32 k) {
    const bool inside = row < p.rows && k < p.cols;
#if BITS == 16
    return inside ? ((const u16*)(p.file + file_row(p, row) * p.row_bytes))[k] : 0;
#else
    int code = ZERO;
    if (inside) {
        const u8* block =
            p.file + file_row(p, row) * p.row_bytes + (u64)(k / BLOCK_LEN) * BLOCK_BYTES;
        code = file_code(block, k % BLOCK_LEN);
    }
    return BITS == 8 ? (u32)(code + 128) : (u32)code;
#endif
}

extern "C" __global__ void pack(PackParams p) {
    begin();
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 cell_idx = thread / 32;
    if (cell_idx >= (u64)p.tiles * p.cells) return;
    const u32 lane = thread % 32, g = lane / 4, t = lane % 4;
    const u32 first_row = (u32)(cell_idx / p.cells) * 16;
    const u32 first_k = (u32)(cell_idx % p.cells) * 64;
    u8* cell = p.packed + cell_idx * CELL_BYTES;
    for (u32 step = 0; step < 4; step++) {
        [[maybe_unused]] u32 word4 = 0;
        for (u32 reg = 0; reg < 4; reg++) {
            const u32 row = first_row + g + reg % 2 * 8;
            const u32 k = first_k + column_of(step, t, reg / 2 * 2);
            const u32 first = code_at(p, row, k), second = code_at(p, row, k + 1);
#if BITS == 16
            ((u32*)cell)[(step * 32 + lane) * 4 + reg] = first | second << 16;
#elif BITS == 8
            const u32 at = (step / 2 * 32 + lane) * 16 + step % 2 * 8 + reg * 2;
            ((u16*)cell)[at / 2] = (u16)(first | second << 8);
#else
            word4 |= first << (4 * reg) | second << (16 + 4 * reg);
#endif
        }
#if BITS == 4
        ((u32*)cell)[lane * 4 + step] = word4;
#endif
    }
#if BITS < 16
    if (lane >= 16) return;
    Scale* scales = (Scale*)(cell + CODE_BYTES);
    const u32 row = first_row + lane;
    for (u32 run = 0; run < 64 / RUN; run++) {
        const u32 k = first_k + run * RUN;
        float scale = 0.0f, offset = 0.0f;
        if (row < p.rows && k < p.cols) {
            const u8* block =
                p.file + file_row(p, row) * p.row_bytes + (u64)(k / BLOCK_LEN) * BLOCK_BYTES;
            scale = file_scale(block, k % BLOCK_LEN);
            offset = file_offset(block, k % BLOCK_LEN);
        }
        scales[run * 16 * (1 + HAS_OFFSET) + lane] = scale_bits(scale);
        if (HAS_OFFSET) scales[run * 16 * (1 + HAS_OFFSET) + 16 + lane] = scale_bits(offset);
    }
#endif
}
