// Activations as bf16, for products.
//
// round_rows: out[t, p, i] is part p of x[t, i], zeros from `cols` to `stride`. With one part it is
// x rounded; with three, their sum is x. x [rows, cols]; out [rows, parts, stride].
//
// sum_rows: out[t, first + i] = sum_p products[t, p, i] + bias[i], or added to what is there: what
// three parts were multiplied to, brought together. products [rows, parts, n].

struct RoundParams {
    const float* x;
    u16* out;
    u32 rows;
    u32 cols;
    u32 stride;
    u32 parts;
};
static_assert(sizeof(RoundParams) == ROUND_PARAMS_SIZE, "the host's RoundParams differs");

extern "C" __global__ void round_rows(RoundParams p) {
    begin();
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)p.rows * p.stride) return;
    const u64 row = at / p.stride, i = at % p.stride;
    float x = i < p.cols ? p.x[row * p.cols + i] : 0.0f;
    for (u32 part = 0; part < p.parts; part++) {
        const u32 bits = bf16_of(x);
        p.out[(row * p.parts + part) * p.stride + i] = (u16)bits;
        // What is not finite is told by the first part alone.
        x = fabsf(x) < INFINITE ? x - bf16_to_float(bits) : 0.0f;
    }
}

struct SumParams {
    const float* products;
    const float* bias;  // or null
    float* out;
    u32 rows;
    u32 n;
    u32 parts;
    u32 out_stride;
    u32 out_first;
    u32 is_added;
};
static_assert(sizeof(SumParams) == SUM_PARAMS_SIZE, "the host's SumParams differs");

extern "C" __global__ void sum_rows(SumParams p) {
    begin();
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)p.rows * p.n) return;
    const u64 row = at / p.n, i = at % p.n;
    float sum = 0.0f;
    for (u32 part = 0; part < p.parts; part++) sum += p.products[(row * p.parts + part) * p.n + i];
    if (p.bias) sum += p.bias[i];
    float* out = p.out + row * p.out_stride + p.out_first + i;
    *out = p.is_added ? *out + sum : sum;
}
