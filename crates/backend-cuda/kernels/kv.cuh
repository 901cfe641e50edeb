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
// In an arena of which single tokens are read (ROWS) a token's key is one run, and so is its value:
// K [16][WIDTH], then V [16][WIDTH]. With 16-bit types the pieces of sixteen bytes of a token change
// places by its number in the page, so that eight tokens' pieces lie in different banks of shared
// memory when a page is copied there as it is.

#define PAGE 16
#define KV_F32 0
#define KV_F16 1
#define KV_BF16 2

#if KV == KV_F32
#define WIDTH HEAD_DIM
typedef float Element;
#else
#define WIDTH ((HEAD_DIM + 31) / 32 * 32)
typedef u16 Element;
#endif
#define PAGE_ELEMENTS (2 * PAGE * WIDTH)
static_assert(PAGE_ELEMENTS * sizeof(Element) == HEAD_PAGE_BYTES, "the host's page differs");

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
    return PAGE * WIDTH + token * WIDTH + i;
#elif ROWS
    return PAGE * WIDTH + piece_at(token, i / 8) * 8 + i % 8;
#else
    return PAGE * WIDTH + value_piece(i, token / 8) * 8 + token % 8;
#endif
}

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

// Where a page of one head is read from.
DEVICE const u8* page_in(const u8* layer, u64 head_bytes, const Near& near, u32 head, u32 slot) {
    const u32 frame = frame_of(near, slot);
    if (frame != NOT_NEAR) return near_page(near, head, frame);
    return layer + head * head_bytes + (u64)slot * HEAD_PAGE_BYTES;
}

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

// A pair of elements (a, b), rotated by an angle whose cosine and sine are known.
DEVICE float turned_first(float a, float b, float2 angle) {
    return __fmaf_rn(a, angle.x, -__fmul_rn(b, angle.y));
}

DEVICE float turned_second(float a, float b, float2 angle) {
    return __fmaf_rn(b, angle.x, __fmul_rn(a, angle.y));
}
