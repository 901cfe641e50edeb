// Working sets whose rows stay in eight bits as they come (codes.cuh): half the memory, and half of what
// attention reads. Their pages are
//
//   K [16 tokens][WIDTH]   V [16 tokens][WIDTH]   a scale for each key   a factor for each value
//
// Of sixteen columns, column i is byte 2i + 1 and column 8 + i byte 2i, so that what a lane gets of a matrix of
// bytes belongs to two of its operands, of keys as well as of turned values. Pieces of sixteen bytes of
// a token change places by its number in the page, so that eight tokens' pieces lie in different banks.
// A factor is the power of two that `expand_two` takes. Where that is none that an element can be multiplied by,
// as of numbers above 57344, the lowest bits say which is left to be multiplied by.

#define KEEPS_CODES EXPANDS_PAIRS

// Bytes of a page of a working set.
DEVICE constexpr u32 set_page_bytes(bool is_kept) {
    return is_kept ? 2 * PAGE * CODE_WIDTH + 4 * PAGE : HEAD_PAGE_BYTES;
}
static_assert(HEAD_PAGE_BYTES % SET_UNIT == 0, "sets begin at whole units");

#if KEEPS_CODES
#define SET_HALF_BYTES (PAGE * WIDTH)
static_assert(CODE_WIDTH == WIDTH && set_page_bytes(true) % SET_UNIT == 0, "sets begin at whole units");

// Where a piece of a token is in its half of a page; counted in pieces of sixteen bytes.
DEVICE u32 set_piece_at(u32 token, u32 piece) {
    // Narrower rows begin in different banks already, but for those that are two, or four, tokens apart.
    const u32 turn = WIDTH % 128 == 0 ? token % 8 : WIDTH % 64 == 0 ? token / 2 % 4 : token / 4 % 2;
    return token * (WIDTH / 16) + (piece ^ turn);
}

#if KV == KV_F16
#define FACTOR_POWER 0x7C00
#define FACTOR_REST 0x3FF
#else
#define FACTOR_POWER 0x7F80
#define FACTOR_REST 0x7F
#endif

DEVICE u16 factor_of(u32 scale) {
    const u32 power = min(max(scale, (u32)LEAST_POWER), (u32)MOST_POWER);
    // Where the scale is zero, so are all numbers.
    return (u16)(POWER_BITS(power) | (scale ? scale - power & FACTOR_REST : 0));
}

// The power of two that a factor leaves.
DEVICE float rest_of(u32 factor) {
    // With f16 it may be below one.
    const u32 rest = factor & FACTOR_REST, sign = KV == KV_F16 ? rest & (FACTOR_REST + 1) / 2 : 0;
    return __uint_as_float((127 + rest - 2 * sign) << 23);
}

// Puts down a piece of a row that has come: of its key, or its value.
DEVICE void keep_piece(u8* page, u32 token, u32 half, u32 piece, uint4 codes, u32 scale) {
    u8* to = page + half * SET_HALF_BYTES + set_piece_at(token, piece) * 16;
    *(uint4*)to = make_uint4(__byte_perm(codes.x, codes.z, 0x1504), __byte_perm(codes.x, codes.z, 0x3726),
                             __byte_perm(codes.y, codes.w, 0x1504), __byte_perm(codes.y, codes.w, 0x3726));
    if (piece == 0)
        ((u16*)(page + 2 * SET_HALF_BYTES))[half * PAGE + token] = half ? factor_of(scale) : (u16)scale;
}

// Two e4m3 numbers, in the upper halves of two elements, times what is left to scores.
DEVICE u32 expand_key(u32 two) {
#if KV == KV_F16
    return two & 0x80008000u | two >> 1 & 0x3F803F80u;
#else
    return expand_two(two, POWER_BITS(127) * 0x10001u);
#endif
}

// Keys of a page as operands, of two steps at a time.
struct SetKeys {
    u32 page;
    uint4 both;

    __device__ uint4 operator()(int step) {
        const u32 lane = threadIdx.x % 32;
        if (step % 2 == 0) both = load_matrices(page + set_piece_at(lane % 16, step + lane / 16) * 16);
        const u32 first = step % 2 ? both.z : both.x, second = step % 2 ? both.w : both.y;
        return make_uint4(expand_key(first), expand_key(second), expand_key(first << 8), expand_key(second << 8));
    }
};

// What scores of tokens g and g + 8 are to be multiplied by.
DEVICE float2 set_scales(const u8* page) {
    const u16* scales = (const u16*)(page + 2 * SET_HALF_BYTES) + threadIdx.x % 32 / 4;
    const float left = KV == KV_F16 ? 256.0f : 1.0f;
    return make_float2(__uint_as_float(scales[0] << 23) * left, __uint_as_float(scales[8] << 23) * left);
}

// Values of a page as operands, of two steps at a time.
struct SetValues {
    const u8* values;
    u32 factors[2];  // of the lane's tokens 2t and 2t + 1, and of those eight behind them
    bool have_rest;
    uint4 both;

    // Of tokens that are not seen there are none: whatever is there must not spoil others.
    __device__ SetValues(const u8* set, u32 tokens) : values(set + SET_HALF_BYTES) {
        const u32 t = threadIdx.x % 4;
        const u32* all = (const u32*)(set + 2 * SET_HALF_BYTES + 2 * PAGE);
        u32 any = 0;
        UNROLL
        for (int i = 0; i < 2; i++) {
            const u32 seen = tokens >> (i * 8 + t * 2);
            const u32 two = all[i * 4 + t] & ((seen & 1) * 0xFFFF | (seen & 2) * 0x7FFF8000u);
            factors[i] = two & FACTOR_POWER * 0x10001u, any |= two;
        }
        have_rest = __any_sync(~0u, any & FACTOR_REST * 0x10001u);
    }

    __device__ uint4 operator()(int step) {
        const u32 lane = threadIdx.x % 32;
        if (step % 2 == 0)
            both = load_turned(values + set_piece_at(lane / 8 % 2 * 8 + lane % 8, step + lane / 16) * 16);
        const u32 first = step % 2 ? both.z : both.x, second = step % 2 ? both.w : both.y;
        return make_uint4(expand_two(first, factors[0]), expand_two(first << 8, factors[0]),
                          expand_two(second, factors[1]), expand_two(second << 8, factors[1]));
    }
};

// Multiplies the weights of tokens g and g + 8 by what their values' factors leave.
template <int R>
DEVICE void mend(const u8* page, float (&s)[R][4]) {
    const u16* factors = (const u16*)(page + 2 * SET_HALF_BYTES) + PAGE + threadIdx.x % 32 / 4;
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int e = 0; e < 4; e++) {
            s[r][e] *= rest_of(factors[e / 2 * 8]);
            // They have to be elements.
            if (KV == KV_F16) s[r][e] = fminf(s[r][e], 65504.0f);
        }
}
#endif
