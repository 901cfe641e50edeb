// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, and the same rounded to bf16.
//
// x, out [rows, d]; weight [d]. One block per row: thread i sums elements i, i + 256, ..., then
// warps by halves, then the warps in order. Reads 4 d bytes twice (the second time from the
// cache), writes 6 d.

struct NormParams {
    const float* x;
    const float* weight;
    float* out;
    u16* rounded;
    u32 d;
    float eps;
};
static_assert(sizeof(NormParams) == NORM_PARAMS_SIZE, "the host's NormParams differs");

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) norm_rows(NormParams p) {
    begin();
    __shared__ float sums[THREADS / 32];
    const u64 start = (u64)blockIdx.x * p.d;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < p.d; i += THREADS) {
        const float x = p.x[start + i];
        sum = __fmaf_rn(x, x, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < THREADS / 32; i++) total += sums[i];
    const float scale = 1.0f / __fsqrt_rn(total / (float)p.d + p.eps);
    for (u32 i = threadIdx.x; i < p.d; i += THREADS) {
        const float y = p.x[start + i] * scale * p.weight[i];
        p.out[start + i] = y;
        p.rounded[start + i] = (u16)bf16_of(y);
    }
}
