// Writes whole pages from others, in order, all layers and heads: values as they are, keys turned.
//
// One block per (layer, head). The two elements of a key that turn together belong to one thread, so
// that a page may be its own source. Reads and writes one page of one head per block and shift.

struct Shift {
    u32 source, target;
    u32 is_turned;  // if not, keys keep their bits
    u32 padding;
};

struct ShiftParams {
    u8* arena;            // [head][slot][page]
    const Shift* shifts;
    const float2* turns;  // [shift][rotated / 2] cosine and sine
    u64 head_bytes;       // of all slots of one head
    u32 n_shifts;
    u32 half;  // rotated / 2
    u32 is_halves;
    u32 padding;
};
static_assert(sizeof(Shift) == SHIFT_SIZE, "the host's Shift differs");
static_assert(sizeof(ShiftParams) == SHIFT_PARAMS_SIZE, "the host's ShiftParams differs");

// The two elements of a key that turn together; those that do not turn are in pairs too.
DEVICE uint2 pair_at(const ShiftParams& p, u32 i) {
    return p.is_halves && i < p.half ? make_uint2(i, i + p.half) : make_uint2(2 * i, 2 * i + 1);
}

#if CODED
#define SHIFT_PAIRS ((HEAD_DIM + 63) / 64)  // of a lane

// A warp takes a token's key, whose scale changes too.
DEVICE void turn_codes(const ShiftParams& p, u32 shift, const u8* source, u8* target) {
    const u32 lane = threadIdx.x % 32;
    for (u32 token = threadIdx.x / 32; token < PAGE; token += blockDim.x / 32) {
        const float scale = *scale_of(source, token);
        float largest = 0.0f, first[SHIFT_PAIRS], second[SHIFT_PAIRS];
        UNROLL
        for (int k = 0; k < SHIFT_PAIRS; k++) {
            const u32 i = lane + 32 * k;
            if (i >= HEAD_DIM / 2) continue;
            const uint2 at = pair_at(p, i);
            const float a = finite(code_value(source[key_at(token, at.x)]) * scale);
            const float b = finite(code_value(source[key_at(token, at.y)]) * scale);
            const float2 turn =
                i < p.half ? p.turns[(u64)shift * p.half + i] : make_float2(1.0f, 0.0f);
            first[k] = a * turn.x - b * turn.y, second[k] = b * turn.x + a * turn.y;
            largest = fmaxf(largest, fmaxf(fabsf(first[k]), fabsf(second[k])));
        }
        const float2 coded = code_scale(warp_max(largest));
        UNROLL
        for (int k = 0; k < SHIFT_PAIRS; k++) {
            const u32 i = lane + 32 * k;
            if (i >= HEAD_DIM / 2) continue;
            const uint2 at = pair_at(p, i);
            target[key_at(token, at.x)] = code_of(first[k] * coded.y);
            target[key_at(token, at.y)] = code_of(second[k] * coded.y);
        }
        if (lane == 0) *scale_of(target, token) = coded.x;
    }
}

DEVICE void shift_page(const ShiftParams& p, u32 n, const u8* source, u8* target) {
    const bool is_turned = p.shifts[n].is_turned;
    const u32 first = is_turned ? VALUES_AT / 16 : 0;
    for (u32 at = first + threadIdx.x; at < HEAD_PAGE_BYTES / 16; at += blockDim.x)
        ((uint4*)target)[at] = ((const uint4*)source)[at];
    if (is_turned) turn_codes(p, n, source, target);
}
#else
DEVICE void shift_page(const ShiftParams& p, u32 n, const u8* from, u8* to) {
    const Element* source = (const Element*)from;
    Element* target = (Element*)to;
    for (u32 at = threadIdx.x; at < PAGE * HEAD_DIM; at += blockDim.x) {
        const u32 token = at / HEAD_DIM, i = at % HEAD_DIM;
        target[value_at(token, i)] = source[value_at(token, i)];
        if (i >= 2 * p.half) target[key_at(token, i)] = source[key_at(token, i)];
    }
    for (u32 at = threadIdx.x; at < PAGE * p.half; at += blockDim.x) {
        const u32 token = at / p.half, i = at % p.half;
        const uint2 pair = pair_at(p, i);
        const u32 first = key_at(token, pair.x), second = key_at(token, pair.y);
        Element x = source[first], y = source[second];
        if (p.shifts[n].is_turned) {
            const float2 turn = p.turns[(u64)n * p.half + i];
            const float a = element_value(x), b = element_value(y);
            x = key_element(a * turn.x - b * turn.y);
            y = key_element(b * turn.x + a * turn.y);
        }
        target[first] = x;
        target[second] = y;
    }
}
#endif

extern "C" __global__ void shift_pages(ShiftParams p) {
    begin();
    u8* pages = p.arena + blockIdx.x * p.head_bytes;
    for (u32 n = 0; n < p.n_shifts; n++) {
        const Shift shift = p.shifts[n];
        shift_page(p, n, pages + (u64)shift.source * HEAD_PAGE_BYTES,
                   pages + (u64)shift.target * HEAD_PAGE_BYTES);
        // The next source may be this target.
        __syncthreads();
    }
}
