// out[t] = table[tokens[t]], decoded from the packed table.
//
// out [T, d]. One block per row; reads one row's share of its tile, writes 4 d bytes.

struct EmbedParams {
    const u8* packed;
    const u32* tokens;
    float* out;
    u32 d;
    u32 cells;
    u32 last;  // row of the table
    u32 padding;
};
static_assert(sizeof(EmbedParams) == EMBED_PARAMS_SIZE, "the host's EmbedParams differs");

extern "C" __global__ void embed(EmbedParams p) {
    begin();
    // Where nothing could be drawn there is no token, and nobody looks at the row.
    const u32 token = min(p.tokens[blockIdx.x], p.last);
    const u32 row = token % 16;
    const u8* tile = p.packed + (u64)(token / 16) * p.cells * CELL_BYTES;
    for (u32 k = threadIdx.x; k < p.d; k += blockDim.x) {
        const u8* cell = tile + (u64)(k / 64) * CELL_BYTES;
        const Place at = place_of(k % 64);
        const u32 lane = row % 8 * 4 + at.t, reg = at.e / 2 * 2 + row / 8;
        float value;
#if BITS == 16
        const u32 bits = ((const u16*)cell)[((at.step * 32 + lane) * 4 + reg) * 2 + at.e % 2];
        value = TYPE == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
#else
#if BITS == 8
        const u32 byte = (at.step / 2 * 32 + lane) * 16 + at.step % 2 * 8 + reg * 2 + at.e % 2;
        const int code = (int)cell[byte] - 128;
#else
        const u32 word = ((const u32*)cell)[lane * 4 + at.step];
        const int code = (int)(word >> (4 * reg + 16 * (at.e % 2)) & 15) - ZERO;
#endif
        const u32 run = k % 64 / RUN;
        value = cell_scale(cell, run, row) * (float)code;
        if (HAS_OFFSET) value += cell_offset(cell, run, row);
#endif
        p.out[(u64)blockIdx.x * p.d + k] = value;
    }
}
