// How one weight type lies in memory: as its file has it, and as the products read it.
//
// Products read *cells* of 16 rows by 64 columns, in the order in which the lanes of a warp need
// them for the matrix instruction, so that a warp's load is one run of 512 bytes:
//
//   matrix   [tile of 16 rows][cell of 64 columns]
//   cell     codes, then for each run of RUN columns: 16 scales, then 16 offsets if there are any
//   codes    16 bits: [step of 16 columns][lane][a0 a1 a2 a3]           2048 bytes
//             8 bits: [two steps][lane][step][a0 a1 a2 a3], plus 128    1024 bytes
//             4 bits: [lane][step], a word whose nibble i is the first of a_i and 4 + i the second
//
// A lane 4 g + t holds rows g (a0, a2) and g + 8 (a1, a3), and of a step's columns 2 t, 2 t + 1 (a0, a1),
// 2 t + 8 and 2 t + 9 (a2, a3).
//
// Types with blocks of 256 get their scales multiplied out, which is exact in f32; codes of 5 and
// 6 bits, and those of 2 and 3, take 8.

#define F16 1
#define BF16 2
#define Q4_0 3
#define Q4_1 4
#define Q5_0 5
#define Q5_1 6
#define Q8_0 7
#define Q2_K 8
#define Q3_K 9
#define Q4_K 10
#define Q5_K 11
#define Q6_K 12

#if TYPE == F16 || TYPE == BF16
#define BITS 16
#elif TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q4_K
#define BITS 4
#else
#define BITS 8
#endif

#if TYPE == Q2_K || TYPE == Q3_K || TYPE == Q6_K
#define RUN 16
#else
#define RUN 32
#endif

#define HAS_OFFSET \
    (TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q2_K || TYPE == Q4_K || TYPE == Q5_K)
#define IS_WIDE (TYPE >= Q2_K)

// What four-bit codes count from.
#if TYPE == Q4_0
#define ZERO 8
#else
#define ZERO 0
#endif

#if IS_WIDE
typedef float Scale;
DEVICE float scale_value(Scale x) { return x; }
DEVICE Scale scale_bits(float x) { return x; }
#else
typedef u16 Scale;
DEVICE float scale_value(Scale x) { return f16_to_float(x); }
DEVICE Scale scale_bits(float x) { return (Scale)f16_of(x); }
#endif

#define CODE_BYTES (16 * 64 * BITS / 8)
#if BITS == 16
#define SCALE_BYTES 0
#else
#define SCALE_BYTES (64 / RUN * 16 * (1 + HAS_OFFSET) * (int)sizeof(Scale))
#endif
static_assert(CODE_BYTES + SCALE_BYTES == CELL_BYTES, "the host's cell differs");

// Where column `k` of a cell is: step, t and the place among the lane's four.
struct Place {
    u32 step, t, e;
};

DEVICE Place place_of(u32 k) { return Place{k / 16, k % 8 / 2, k % 16 / 8 * 2 + k % 2}; }

DEVICE u32 column_of(u32 step, u32 t, u32 e) { return step * 16 + e / 2 * 8 + t * 2 + e % 2; }

#if BITS < 16
// A run's scale and offset for one row of a cell.
DEVICE float cell_scale(const u8* cell, u32 run, u32 row) {
    const Scale* scales = (const Scale*)(cell + CODE_BYTES);
    return scale_value(scales[run * 16 * (1 + HAS_OFFSET) + row]);
}

DEVICE float cell_offset(const u8* cell, u32 run, u32 row) {
    const Scale* scales = (const Scale*)(cell + CODE_BYTES);
    return scale_value(scales[run * 16 * (1 + HAS_OFFSET) + 16 + row]);
}

// A block of the file: code, scale and offset of its weight `i`. The formats are drawn in the
// crate `backend`, in quant/blocks.rs and quant/k_blocks.rs.

DEVICE float half_at(const u8* block, u32 at) {
    return f16_to_float(block[at] | (u32)block[at + 1] << 8);
}

// The code of weight `i` from planes of 32 weights.
DEVICE u32 plane(const u8* bytes, u32 bits, u32 i) {
    const u32 planes = 8 / bits;
    return bytes[i / (32 * planes) * 32 + i % 32] >> (i / 32 % planes * bits) & ((1u << bits) - 1);
}

DEVICE u32 nibble(const u8* bytes, u32 i) {
    return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4;
}

DEVICE u32 six_bit_scale(const u8* packed, u32 j) {
    return j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
}

DEVICE u32 six_bit_offset(const u8* packed, u32 j) {
    return j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | packed[j] >> 6 << 4;
}

#if TYPE == Q4_0
#define BLOCK_LEN 32
#define BLOCK_BYTES 18
DEVICE int file_code(const u8* b, u32 i) { return (int)nibble(b + 2, i); }
DEVICE float file_scale(const u8* b, u32 i) { return half_at(b, 0); }
DEVICE float file_offset(const u8* b, u32 i) { return 0.0f; }
#elif TYPE == Q4_1
#define BLOCK_LEN 32
#define BLOCK_BYTES 20
DEVICE int file_code(const u8* b, u32 i) { return (int)nibble(b + 4, i); }
DEVICE float file_scale(const u8* b, u32 i) { return half_at(b, 0); }
DEVICE float file_offset(const u8* b, u32 i) { return half_at(b, 2); }
#elif TYPE == Q5_0
#define BLOCK_LEN 32
#define BLOCK_BYTES 22
DEVICE int file_code(const u8* b, u32 i) {
    return (int)(nibble(b + 6, i) | (b[2 + i / 8] >> i % 8 & 1) << 4) - 16;
}
DEVICE float file_scale(const u8* b, u32 i) { return half_at(b, 0); }
DEVICE float file_offset(const u8* b, u32 i) { return 0.0f; }
#elif TYPE == Q5_1
#define BLOCK_LEN 32
#define BLOCK_BYTES 24
DEVICE int file_code(const u8* b, u32 i) {
    return (int)(nibble(b + 8, i) | (b[4 + i / 8] >> i % 8 & 1) << 4);
}
DEVICE float file_scale(const u8* b, u32 i) { return half_at(b, 0); }
DEVICE float file_offset(const u8* b, u32 i) { return half_at(b, 2); }
#elif TYPE == Q8_0
#define BLOCK_LEN 32
#define BLOCK_BYTES 34
DEVICE int file_code(const u8* b, u32 i) { return (i8)b[2 + i]; }
DEVICE float file_scale(const u8* b, u32 i) { return half_at(b, 0); }
DEVICE float file_offset(const u8* b, u32 i) { return 0.0f; }
#elif TYPE == Q2_K
#define BLOCK_LEN 256
#define BLOCK_BYTES 84
DEVICE int file_code(const u8* b, u32 i) { return (int)plane(b + 16, 2, i); }
DEVICE float file_scale(const u8* b, u32 i) { return half_at(b, 80) * (float)(b[i / 16] & 15); }
DEVICE float file_offset(const u8* b, u32 i) { return -half_at(b, 82) * (float)(b[i / 16] >> 4); }
#elif TYPE == Q3_K
#define BLOCK_LEN 256
#define BLOCK_BYTES 110
DEVICE int file_code(const u8* b, u32 i) {
    return (int)(plane(b + 32, 2, i) | plane(b, 1, i) << 2) - 4;
}
DEVICE float file_scale(const u8* b, u32 i) {
    const u8* scales = b + 96;
    const u32 j = i / 16;
    const u32 low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
    const u32 high = scales[8 + j % 4] >> (j / 4 * 2) & 3;
    return half_at(b, 108) * ((float)(low | high << 4) - 32.0f);
}
DEVICE float file_offset(const u8* b, u32 i) { return 0.0f; }
#elif TYPE == Q4_K
#define BLOCK_LEN 256
#define BLOCK_BYTES 144
DEVICE int file_code(const u8* b, u32 i) { return (int)plane(b + 16, 4, i); }
DEVICE float file_scale(const u8* b, u32 i) {
    return half_at(b, 0) * (float)six_bit_scale(b + 4, i / 32);
}
DEVICE float file_offset(const u8* b, u32 i) {
    return -half_at(b, 2) * (float)six_bit_offset(b + 4, i / 32);
}
#elif TYPE == Q5_K
#define BLOCK_LEN 256
#define BLOCK_BYTES 176
DEVICE int file_code(const u8* b, u32 i) {
    return (int)(plane(b + 48, 4, i) | plane(b + 16, 1, i) << 4);
}
DEVICE float file_scale(const u8* b, u32 i) {
    return half_at(b, 0) * (float)six_bit_scale(b + 4, i / 32);
}
DEVICE float file_offset(const u8* b, u32 i) {
    return -half_at(b, 2) * (float)six_bit_offset(b + 4, i / 32);
}
#elif TYPE == Q6_K
#define BLOCK_LEN 256
#define BLOCK_BYTES 210
DEVICE int file_code(const u8* b, u32 i) {
    const u32 low = b[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
    return (int)(low | plane(b + 128, 2, i) << 4) - 32;
}
DEVICE float file_scale(const u8* b, u32 i) {
    return half_at(b, 208) * (float)(i8)b[192 + i / 16];
}
DEVICE float file_offset(const u8* b, u32 i) { return 0.0f; }
#endif
#endif
