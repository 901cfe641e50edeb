// How keys and values lie in a page of one head, for a fixed KV type and head width.
//
// An arena is [layer][kv head][slot][page]. With 16-bit types a page is as the matrix instructions want
// it in shared memory, so that it is copied as it is; the head width is filled up to a multiple of 32
// with zeros, which nobody writes:
//
//   K   [8 tokens: 2][32 columns][token][4 pieces of 8 columns]    piece c is in place c ^ (token / 2)
//   V   [column][2 pieces of 8 tokens]                             piece c is in place c ^ (column / 4)
//
// each modulo the number of places. So eight pieces that are read at once lie in different banks, and
// Hopper's instructions know both patterns (of 64 and of 32 bytes).
//
// With f32 it is K [16][D], then V [16][D].
//
// With eight bits a code stands for a number that its token's scale is to be multiplied by. A lane's eight
// operands of a matrix instruction are eight bytes that follow each other, which become floats in registers:
//
//   K   [32 columns][8 tokens: 2][lane][8 columns], then 16 scales
//   V   [16 columns][lane][2 columns][4 tokens],    then 16 scales
//
// In an arena of which single tokens are read (ROWS) a token's key is one run, and so is its value:
// K [16][WIDTH], then V [16][WIDTH]. With 16-bit types the pieces of sixteen bytes of a token change
// places by its number in the page, so that eight tokens' pieces lie in different banks of shared
// memory when a page is copied there as it is.

#define PAGE 16
#define KV_F32 0
#define KV_F16 1
#define KV_BF16 2
#define KV_INT8 3  // 128 more than the number
#define KV_FP8 4   // e4m3
#define CODED (KV == KV_INT8 || KV == KV_FP8)

#if KV == KV_F32
#define WIDTH HEAD_DIM
typedef float Element;
#elif CODED
#define WIDTH ((HEAD_DIM + 31) / 32 * 32)
typedef u8 Element;
#else
#define WIDTH ((HEAD_DIM + 31) / 32 * 32)
typedef u16 Element;
#endif
#define SCALES_AT (PAGE * WIDTH)                            // of keys, or values, from the first one on
#define VALUES_AT (PAGE * WIDTH + (CODED ? 4 * PAGE : 0))  // elements
static_assert(2 * VALUES_AT * sizeof(Element) == HEAD_PAGE_BYTES, "the host's page differs");

#ifndef ROWS
#define ROWS 0
#endif
#define HALF_PAGE_BYTES (HEAD_PAGE_BYTES / 2)  // keys, or values
#define ROW_BYTES (HALF_PAGE_BYTES / PAGE)     // a key, or a value
#define ROW_PIECES (ROW_BYTES / 16)

// Where a piece of sixteen bytes of a token's key, or value, is; counted in pieces of its half page.
DEVICE u32 piece_at(u32 token, u32 piece) {
#if KV == KV_F32
    return token * ROW_PIECES + piece;
#else
    // Rows whose length is no multiple of 128 bytes begin in two places already.
    const u32 turn = token / 2 % 4 | (WIDTH % 64 == 0 ? token % 2 * 4 : 0);
    return token * ROW_PIECES + (piece ^ turn);
#endif
}

#if CODED
DEVICE u32 key_at(u32 token, u32 i) {
    const u32 lane = token % 8 * 4 + i % 8 / 2;
    return ((i / 32 * 2 + token / 8) * 32 + lane) * 8 + i % 32 / 8 * 2 + i % 2;
}

DEVICE u32 value_at(u32 token, u32 i) {
    const u32 lane = i % 8 * 4 + token % 8 / 2;
    return VALUES_AT + (i / 16 * 32 + lane) * 8 + i % 16 / 8 * 4 + token / 8 * 2 + token % 2;
}
#else
#if KV != KV_F32
// Where eight columns of a token's key are; counted in pieces of sixteen bytes.
DEVICE u32 key_piece(u32 token, u32 c) {
    return token / 8 * WIDTH + c / 4 * 32 + token % 8 * 4 + (c % 4 ^ token % 8 / 2);
}

// Where one column of eight tokens' values is, from the first value on.
DEVICE u32 value_piece(u32 column, u32 c) { return column * 2 + (c ^ column / 4 % 2); }
#endif

DEVICE u32 key_at(u32 token, u32 i) {
#if KV == KV_F32
    return token * WIDTH + i;
#elif ROWS
    return piece_at(token, i / 8) * 8 + i % 8;
#else
    return key_piece(token, i / 8) * 8 + i % 8;
#endif
}

DEVICE u32 value_at(u32 token, u32 i) {
#if KV == KV_F32
    return VALUES_AT + token * WIDTH + i;
#elif ROWS
    return VALUES_AT + piece_at(token, i / 8) * 8 + i % 8;
#else
    return VALUES_AT + value_piece(i, token / 8) * 8 + token % 8;
#endif
}
#endif

// Pages may be far, in memory of the host, and some of them then have a copy on the device. What is
// written goes to both.
struct Near {
    const u32* frames;  // [slot] where its copy is, or NOT_NEAR; null if no page is far
    u8* layer;          // [G][frame][page]
    u64 head_bytes;     // of all frames of one head
};
#define NOT_NEAR (~0u)

// Only of arenas whose single tokens are read are pages far.
DEVICE u32 frame_of(const Near& near, u32 slot) {
    return ROWS && near.frames ? near.frames[slot] : NOT_NEAR;
}

DEVICE u8* near_page(const Near& near, u32 head, u32 frame) {
    return near.layer + head * near.head_bytes + (u64)frame * HEAD_PAGE_BYTES;
}

// Where a page of one head is read from, if its copy is in that frame, or there is none.
DEVICE const u8* page_at(const u8* layer, u64 head_bytes, const Near& near, u32 head, u32 slot, u32 frame) {
    if (frame != NOT_NEAR) return near_page(near, head, frame);
    return layer + head * head_bytes + (u64)slot * HEAD_PAGE_BYTES;
}

DEVICE const u8* page_in(const u8* layer, u64 head_bytes, const Near& near, u32 head, u32 slot) {
    return page_at(layer, head_bytes, near, head, slot, frame_of(near, slot));
}

// What is not a number becomes 0, as everywhere in coded vectors.
DEVICE float finite(float x) { return fabsf(x) < INFINITE ? x : 0.0f; }

// The nearest e4m3 number.
DEVICE u8 e4m3_of(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80;
    x = fminf(fabsf(x), 448.0f);
    // Below 2^-6 the exponent stays, and so does the distance between numbers.
    const int exponent = max((int)(__float_as_uint(x) >> 23) - 127, -6);
    const int eighths = __float2int_rn(x * __uint_as_float((u32)(130 - exponent) << 23));
    return (u8)(sign | min((exponent + 6) * 8 + eighths, 0x7e));
}

#if CODED
// The scale of a token's key, or value, in its half of a page.
DEVICE float* scale_of(u8* half, u32 token) { return (float*)(half + SCALES_AT) + token; }
DEVICE const float* scale_of(const u8* half, u32 token) {
    return (const float*)(half + SCALES_AT) + token;
}

// The scale of a vector by its largest number without sign, and what numbers are multiplied by to
// be coded.
DEVICE float2 code_scale(float largest) {
    const float scale = __fdiv_rn(largest, KV == KV_INT8 ? 127.0f : 448.0f);
    return make_float2(scale, scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f);
}

// The nearest code.
DEVICE u8 code_of(float x) {
#if KV == KV_INT8
    return (u8)(128 + max(-127, min(__float2int_rn(x), 127)));
#else
    return e4m3_of(x);
#endif
}

// Two codes of four as f16, exactly: the first two, or the others.
DEVICE u32 two_of(u32 codes, bool is_second) {
    u32 two;
#if KV == KV_INT8
    // Behind 1024 a byte is a whole number.
    two = __byte_perm(codes, 0x64646464, is_second ? 0x4342 : 0x4140);
    asm("sub.f16x2 %0, %0, %1;" : "+r"(two) : "r"(0x64806480u));
#elif __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((u16)(is_second ? codes >> 16 : codes)));
#else
    // Moved, the bits of an e4m3 number are those of a 256th of it.
    const u32 wide = __byte_perm(codes, 0, is_second ? 0x3424 : 0x1404);
    two = (wide >> 1 & 0x3F803F80) | (wide & 0x80008000);
    asm("mul.f16x2 %0, %0, %1;" : "+r"(two) : "r"(0x5C005C00u));
#endif
    return two;
}

// Two codes as operands: f16 where weights are rounded to that, or else bf16, whose range is f32's.
DEVICE u32 operand_of(u32 codes, bool is_second) {
    const u32 two = two_of(codes, is_second);
    return PARTS == 1 ? two : bf16x2(f16_to_float(two & 0xFFFF), f16_to_float(two >> 16));
}

// A lane's operands.
DEVICE uint4 operands_of(const u8* codes) {
    const uint2 eight = *(const uint2*)codes;
    return make_uint4(operand_of(eight.x, false), operand_of(eight.x, true),
                      operand_of(eight.y, false), operand_of(eight.y, true));
}

// The number of a code.
DEVICE float code_value(u8 code) { return f16_to_float(two_of(code, false) & 0xFFFF); }
#else
DEVICE float element_value(Element x) {
#if KV == KV_F32
    return x;
#elif KV == KV_F16
    return f16_to_float(x);
#else
    return bf16_to_float(x);
#endif
}

// A key saturates; what is no number stays so, and spoils only rows that see it.
DEVICE Element key_element(float x) {
#if KV == KV_F32
    return x;
#elif KV == KV_F16
    return (u16)f16_of(x != x ? x : fminf(fmaxf(x, -65504.0f), 65504.0f));
#else
    return (u16)bf16_of(x);
#endif
}

// A value is always finite: a masked key has probability 0, and 0 times infinity is no number.
DEVICE Element value_element(float x) {
#if KV == KV_F32
    const float largest = __int_as_float(0x7f7fffff);
#elif KV == KV_F16
    const float largest = 65504.0f;
#else
    const float largest = __int_as_float(0x7f7f0000);
#endif
    const float y = x != x ? 0.0f : fminf(fmaxf(x, -largest), largest);
#if KV == KV_F32
    return y;
#elif KV == KV_F16
    return (u16)f16_of(y);
#else
    return (u16)bf16_of(y);
#endif
}
#endif

// A pair of elements (a, b), rotated by an angle whose cosine and sine are known.
DEVICE float turned_first(float a, float b, float2 angle) {
    return __fmaf_rn(a, angle.x, -__fmul_rn(b, angle.y));
}

DEVICE float turned_second(float a, float b, float2 angle) {
    return __fmaf_rn(b, angle.x, __fmul_rn(a, angle.y));
}
