// out[t, row] = sum_k W[row, k] x[t, k] + bias[row] for f32 weights, all in f32.
//
// W [rows, cols], x [T, cols]. A warp takes one row of W and eight of x; lane i sums columns i,
// i + 32, ..., then lanes by halves. Plain and exact: files hold norms in f32, not matrices.

struct MatmulF32Params {
    const float* w;
    const float* bias;  // or null
    const float* x;
    float* out;
    u32 rows;
    u32 cols;
    u32 n_x;
    u32 out_stride;
    u32 out_first;
    u32 is_added;
};
static_assert(sizeof(MatmulF32Params) == MATMUL_F32_PARAMS_SIZE, "the host's params differ");

#define COLUMNS 8

extern "C" __global__ void matmul_f32(MatmulF32Params p) {
    begin();
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    const u32 first = blockIdx.y * COLUMNS;
    if (row >= p.rows) return;
    float acc[COLUMNS];
    UNROLL
    for (int j = 0; j < COLUMNS; j++) acc[j] = 0.0f;
    for (u32 k = lane; k < p.cols; k += 32) {
        const float w = p.w[(u64)row * p.cols + k];
        UNROLL
        for (int j = 0; j < COLUMNS; j++) {
            const u32 t = first + j;
            if (t < p.n_x) acc[j] = __fmaf_rn(w, p.x[(u64)t * p.cols + k], acc[j]);
        }
    }
    UNROLL
    for (int j = 0; j < COLUMNS; j++) {
        float sum = warp_sum(acc[j]);
        const u32 t = first + j;
        if (lane != 0 || t >= p.n_x) continue;
        float* out = p.out + (u64)t * p.out_stride + p.out_first + row;
        if (p.bias) sum += p.bias[row];
        if (p.is_added) sum += *out;
        *out = sum;
    }
}

struct EmbedF32Params {
    const float* table;
    const u32* tokens;
    float* out;
    u32 d;
    u32 last;  // row of the table
};
static_assert(sizeof(EmbedF32Params) == EMBED_F32_PARAMS_SIZE, "the host's params differ");

extern "C" __global__ void embed_f32(EmbedF32Params p) {
    begin();
    // As in embed.cu.
    const u32 token = min(p.tokens[blockIdx.x], p.last);
    const u64 source = (u64)token * p.d, target = (u64)blockIdx.x * p.d;
    for (u32 i = threadIdx.x; i < p.d; i += blockDim.x) p.out[target + i] = p.table[source + i];
}
