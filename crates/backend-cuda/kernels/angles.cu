// angles[t, i] = (cos, sin) of positions[t] * inv_freq[i], times the attention factor.
//
// Once per step, for all layers, in f64: an angle that is rounded to f32 is off by 0.06 at position
// 1,000,000. One thread per angle.

struct AnglesParams {
    const u32* positions;
    const float* inv_freq;
    float* angles;  // [T][half][2]
    u32 rows;
    u32 half;
    float factor;
    u32 padding;
};
static_assert(sizeof(AnglesParams) == ANGLES_PARAMS_SIZE, "the host's AnglesParams differs");

extern "C" __global__ void rope_angles(AnglesParams p) {
    begin();
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)p.rows * p.half) return;
    const double angle = (double)p.positions[at / p.half] * (double)p.inv_freq[at % p.half];
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    p.angles[2 * at] = (float)cosine * p.factor;
    p.angles[2 * at + 1] = (float)sine * p.factor;
}
