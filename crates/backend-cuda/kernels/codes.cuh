// Rows in eight bits beside pages that are far: what is brought over the link, in half the bytes.
//
// A token's key, and its value, is a byte for each number and a power of two for all of them, as
// backend/src/row_code.rs has it. They are made of what the page holds, so whoever writes a page can
// make them.

#define CODE_FP8 1
#define CODE_INT8 2
#define CODE_WIDTH ((HEAD_DIM + 31) / 32 * 32)
#define CODE_PIECES (2 * CODE_WIDTH / 16)  // of a key and a value

struct Codes {
    u8* const* rows;  // [G] each head's [slot][16 tokens][K|V][CODE_WIDTH], mostly in memory of the host; or null
    u8* scales;       // [G][slot][16 tokens][K|V], on the device: exponents of floats, with their bias
    u64 n_slots;
    u32 kind;         // CODE_*
    u32 are_kept;     // whether they stay codes in working sets
};

#if !CODED
// Where the codes of a token of a head's page are.
DEVICE u8* codes_at(const Codes& codes, u32 head, u32 slot, u32 token) {
    return codes.rows[head] + ((u64)slot * PAGE + token) * 2 * CODE_WIDTH;
}

// Where their scales are.
DEVICE u8* scales_at(const Codes& codes, u32 head, u32 slot, u32 token) {
    return codes.scales + ((head * codes.n_slots + slot) * PAGE + token) * 2;
}

// The least power of two by which the largest number has a code.
DEVICE u32 row_scale(u32 kind, float largest) {
    const u32 bits = __float_as_uint(largest);
    const u32 top = kind == CODE_FP8 ? 0x600000 : 0x7E0000;
    const int scale = (int)(bits >> 23) + ((bits & 0x7FFFFF) > top) - (kind == CODE_FP8 ? 8 : 6);
    return bits ? max(scale, 1) : 0;
}

DEVICE u32 row_code(u32 kind, float x) {
    if (kind == CODE_FP8) return e4m3_of(x);
    return (u32)max(-127, min(__float2int_rn(x), 127)) & 0xFF;
}

DEVICE float code_number(u32 kind, u32 code) {
    if (kind == CODE_INT8) return (float)(int)(signed char)code;
    // Moved, the bits of an e4m3 number are those of a 256th of it.
    return f16_to_float((u16)((code & 0x80) << 8 | (code & 0x7F) << 7)) * 256.0f;
}

// Codes a token's key, or value, whose numbers are as its page has them. A whole warp.
template <typename Number>
DEVICE void write_code(const Codes& codes, u32 head, u32 slot, u32 token, bool is_value, const Number& number) {
    const u32 lane = threadIdx.x % 32;
    float largest = 0.0f;
    for (u32 i = lane; i < HEAD_DIM; i += 32) largest = fmaxf(largest, fabsf(finite(number(i))));
    const u32 scale = row_scale(codes.kind, warp_max(largest));
    const float inverse = __uint_as_float((254 - scale) << 23);
    u8* out = codes_at(codes, head, slot, token) + is_value * CODE_WIDTH;
    for (u32 first = lane * 4; first < CODE_WIDTH; first += 128) {
        u32 four = 0;
        for (u32 j = 0; j < 4; j++)
            if (first + j < HEAD_DIM)
                four |= row_code(codes.kind, finite(number(first + j)) * inverse) << 8 * j;
        *(u32*)(out + first) = four;
    }
    if (lane == 0) scales_at(codes, head, slot, token)[is_value] = (u8)scale;
}

#if KV == KV_F16 || KV == KV_BF16
#define EXPANDS_PAIRS 1
#if KV == KV_F16
// The least exponent of a float that pairs can be multiplied by, and an element's bits of 2^8 times that power.
#define LEAST_POWER 105
#define POWER_BITS(power) (((power) - 104) << 10)
#else
// The least exponent, and an element's bits of 2^120 times that power.
#define LEAST_POWER 1
#define POWER_BITS(power) (((power) + 120) << 7)
#endif
#define MOST_POWER 134  // the largest exponent

// Two e4m3 numbers, in the upper halves of two elements, times two powers. Moved, their bits are those of a 256th,
// or a 2^120th, of them.
DEVICE u32 expand_two(u32 two, u32 powers) {
    u32 out;
#if KV == KV_F16
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(two & 0x80008000u | two >> 1 & 0x3F803F80u), "r"(powers));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(out)
        : "r"(two & 0x80008000u | two >> 4 & 0x07F007F0u), "r"(powers), "r"(0x80008000u));
#endif
    return out;
}
#else
#define EXPANDS_PAIRS 0
#endif

// Sixteen codes as elements, times a power of two.
DEVICE void expand(u32 kind, uint4 sixteen, float factor, uint4 (&out)[sizeof(Element)]) {
    const u32 codes[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
    u32 words[4 * sizeof(Element)];
#if EXPANDS_PAIRS
    const u32 power = __float_as_uint(factor) >> 23;
    if (kind == CODE_FP8 && power >= LEAST_POWER && power <= MOST_POWER) {
        const u32 powers = POWER_BITS(power) * 0x10001u;
        UNROLL
        for (int i = 0; i < 4; i++) {
            words[2 * i] = expand_two(__byte_perm(codes[i], 0, 0x1404), powers);
            words[2 * i + 1] = expand_two(__byte_perm(codes[i], 0, 0x3424), powers);
        }
        out[0] = make_uint4(words[0], words[1], words[2], words[3]);
        out[1] = make_uint4(words[4], words[5], words[6], words[7]);
        return;
    }
#endif
    UNROLL
    for (int i = 0; i < 16; i++) {
        const Element x =
            value_element(code_number(kind, codes[i / 4] >> i % 4 * 8 & 0xFF) * factor);
#if KV == KV_F32
        words[i] = __float_as_uint(x);
#else
        words[i / 2] = i % 2 ? words[i / 2] | (u32)x << 16 : x;
#endif
    }
    UNROLL
    for (int k = 0; k < sizeof(Element); k++)
        out[k] = make_uint4(words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]);
}
#endif
