// out[t, i] = silu(gate_up[t, i]) * gate_up[t, F + i], and the same rounded to bf16.
//
// gate_up [rows, 2 F]; out [rows, F]. One thread per element; reads 8 F bytes a row, writes 6 F.

struct SwigluParams {
    const float* gate_up;
    float* out;
    u16* rounded;
    u32 f;
    u32 rows;
};
static_assert(sizeof(SwigluParams) == SWIGLU_PARAMS_SIZE, "the host's SwigluParams differs");

extern "C" __global__ void swiglu(SwigluParams p) {
    begin();
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)p.rows * p.f) return;
    const u64 row = at / p.f, i = at % p.f;
    const float gate = p.gate_up[row * 2 * p.f + i];
    const float up = p.gate_up[row * 2 * p.f + p.f + i];
    const float y = gated(gate, up);
    p.out[at] = y;
    p.rounded[at] = (u16)bf16_of(y);
}
