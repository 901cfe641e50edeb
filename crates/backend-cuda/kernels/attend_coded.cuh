// What attention over codes does beside attend.cuh: a score is multiplied by its key's scale, and a weight
// by its value's.

#if CODED
// The scales of the lane's keys of a step, or of their values.
template <int STRIDE>
DEVICE void load_scales(const u8* stage, float (&scales)[KEY_TILES][2]) {
    UNROLL
    for (int j = 0; j < KEY_TILES; j++) {
        const u8* half = stage + j / 2 * STRIDE;
        const float2 two = *(const float2*)scale_of(half, j % 2 * 8 + threadIdx.x % 4 * 2);
        scales[j][0] = two.x, scales[j][1] = two.y;
    }
}

template <int R, int STRIDE>
DEVICE void scale_scores(const u8* stage, float (&s)[KEY_TILES][2 * R]) {
    float scales[KEY_TILES][2];
    load_scales<STRIDE>(stage, scales);
    UNROLL
    for (int j = 0; j < KEY_TILES; j++)
        UNROLL
        for (int e = 0; e < 2 * R; e++) s[j][e] = __fmul_rn(s[j][e], scales[j][e % 2]);
}

// Multiplies the weights of a step by the scales of the values, in units of the largest that each line has
// seen: what came before is scaled down when that grows.
template <int R, int STRIDE>
DEVICE void weigh_values(const u8* stage, float (&s)[KEY_TILES][2 * R], float (&down)[R],
                         float (&unit)[R]) {
    float scales[KEY_TILES][2];
    load_scales<STRIDE>(stage, scales);
    UNROLL
    for (int r = 0; r < R; r++) {
        float largest = 0.0f;
        UNROLL
        for (int j = 0; j < KEY_TILES; j++)
            UNROLL
            for (int e = 0; e < 2; e++)
                if (s[j][2 * r + e] > 0.0f) largest = fmaxf(largest, scales[j][e]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (largest >= unit[r] && largest > 0.0f) {
            const float up = __uint_as_float((__float_as_uint(largest) & 0x7F800000) + 0x800000);
            down[r] *= unit[r] * (1.0f / up);
            unit[r] = up;
        }
        const float inverse = unit[r] > 0.0f ? 1.0f / unit[r] : 0.0f;
        UNROLL
        for (int j = 0; j < KEY_TILES; j++)
            UNROLL
            for (int e = 0; e < 2; e++) {
                // Where a weight is zero, the scale may be anything.
                float& weight = s[j][2 * r + e];
                weight = weight > 0.0f ? __fmul_rn(weight, scales[j][e] * inverse) : 0.0f;
            }
    }
}

// After a chunk's last step.
template <int R>
DEVICE void end_chunk(Lines<R>& lines) {
    UNROLL
    for (int n = 0; n < TILES; n++)
        UNROLL
        for (int e = 0; e < 2 * R; e++) lines.o[n][e] *= lines.unit[e / 2];
}
#endif
