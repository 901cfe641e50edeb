// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, and the same rounded to bf16.
//
// x, out [rows, d]; weight [d]. One block per row: thread i sums elements 4 i .. 4 i + 4 of each 4096,
// then warps by halves, then the warps in order. Rows up to 16384 wide stay in registers, wider ones
// are read twice. Reads 4 d bytes, writes 6 d.

struct NormParams {
    const float* x;
    const float* weight;
    float* out;
    u16* rounded;
    u32 d;
    float eps;
};
static_assert(sizeof(NormParams) == NORM_PARAMS_SIZE, "the host's NormParams differs");

#define NORM_THREADS 1024
#define NORM_PIECES 4

// Elements i .. i + 4 of a row of d; beyond it zeros.
DEVICE float4 load_piece(const float* row, u32 i, u32 d) {
    if (d % 4 == 0 && i < d) return *(const float4*)(row + i);
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < d) x.x = row[i];
    if (i + 1 < d) x.y = row[i + 1];
    if (i + 2 < d) x.z = row[i + 2];
    if (i + 3 < d) x.w = row[i + 3];
    return x;
}

DEVICE void store_piece(const NormParams& p, u64 start, u32 i, float4 x, float4 w, float scale) {
    const float y[4] = {x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w};
    if (p.d % 4 == 0) {
        *(float4*)(p.out + start + i) = make_float4(y[0], y[1], y[2], y[3]);
        *(uint2*)(p.rounded + start + i) = make_uint2(bf16x2(y[0], y[1]), bf16x2(y[2], y[3]));
        return;
    }
    UNROLL
    for (int e = 0; e < 4; e++)
        if (i + e < p.d) p.out[start + i + e] = y[e], p.rounded[start + i + e] = (u16)bf16_of(y[e]);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_rows(NormParams p) {
    allow_next();
    __shared__ float sums[NORM_THREADS / 32];
    const u64 start = (u64)blockIdx.x * p.d;
    const u32 first = threadIdx.x * 4, stride = blockDim.x * 4;
    float4 x[NORM_PIECES], w[NORM_PIECES];
    // Weights do not depend on what was computed before.
    UNROLL
    for (int k = 0; k < NORM_PIECES; k++)
        if (first + k * stride < p.d) w[k] = load_piece(p.weight, first + k * stride, p.d);
    wait_for_previous();
    float sum = 0.0f;
    UNROLL
    for (int k = 0; k < NORM_PIECES; k++)
        if (first + k * stride < p.d) x[k] = load_piece(p.x + start, first + k * stride, p.d);
    UNROLL
    for (int k = 0; k < NORM_PIECES; k++)
        if (first + k * stride < p.d) {
            sum = __fmaf_rn(x[k].x, x[k].x, sum);
            sum = __fmaf_rn(x[k].y, x[k].y, sum);
            sum = __fmaf_rn(x[k].z, x[k].z, sum);
            sum = __fmaf_rn(x[k].w, x[k].w, sum);
        }
    for (u32 i = first + NORM_PIECES * stride; i < p.d; i += stride) {
        const float4 y = load_piece(p.x + start, i, p.d);
        sum = __fmaf_rn(y.x, y.x, sum);
        sum = __fmaf_rn(y.y, y.y, sum);
        sum = __fmaf_rn(y.z, y.z, sum);
        sum = __fmaf_rn(y.w, y.w, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (u32 i = 0; i < blockDim.x / 32; i++) total += sums[i];
    const float scale = 1.0f / __fsqrt_rn(total / (float)p.d + p.eps);
    UNROLL
    for (int k = 0; k < NORM_PIECES; k++)
        if (first + k * stride < p.d) store_piece(p, start, first + k * stride, x[k], w[k], scale);
    for (u32 i = first + NORM_PIECES * stride; i < p.d; i += stride)
        store_piece(p, start, i, load_piece(p.x + start, i, p.d), load_piece(p.weight, i, p.d), scale);
}
