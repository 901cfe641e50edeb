// Digests of keys, taken from the pages that the keys were written to.
//
//   signs      [16 tokens][width / 32]   words of 32 bits: sum over e of frame[e][r] (k[e] - mean[e]) > 0
//   channels   [16 tokens][width]        eight bits: sum over e of frame[e][r] k[e]; width filled up to
//                                        16; then what one stands for, [16 tokens] f16
//   nibbles    [width / 8][16 tokens]    four bytes, each of channel c in its low and of channel c + 4 in
//                                        its high half, both with 8 added; then as above
//   bounds     [min|max][D]              f16: of the page's tokens up to the one that was written
//
// Sums go along e, fused, as on the CPU (backend-cpu/src/topk/mod.rs): equal keys have equal digests.
// Grid: (eight rows, head). Reads a key and the frame for each eight rows. Conformance: scores_match.

#define DIGEST_SIGNS 0
#define DIGEST_CHANNELS 1
#define DIGEST_BOUNDS 2
#define DIGEST_NIBBLES 4
#define DIGEST_TOKENS 8
#define DIGEST_THREADS 128
#define DIGEST_STAGE 4096  // floats of the frame that are at hand

struct DigestParams {
    const u8* arena;        // [head][slot][page]
    u8* digests;            // [head][slot][page's digest]
    const float* frame;     // [head][D][width], or one for all
    const float* mean;      // [head][D]
    const u32* places;      // [rows], or null: rows are then all tokens of `slots`
    const u32* table_rows;  // [rows]
    const u32* tables;      // [row][table_len]
    const u32* slots;
    u64 head_bytes;         // of all slots of one head
    Near near;
    u64 digest_head_bytes;
    u64 frame_stride;       // floats from head to head
    u32 rows;
    u32 table_len;
    u32 kind;
    u32 width;
    u32 page_bytes;         // of a page's digest
    u32 padding;
};
static_assert(sizeof(DigestParams) == DIGEST_PARAMS_SIZE, "the host's DigestParams differs");

// The bounds of the page of a row, if it is the last of its page.
DEVICE void digest_bounds(const DigestParams& p, u32 row, u32 slot, u32 token) {
    const u32 next = row + 1;
    const bool is_last = p.places ? next == p.rows || token == PAGE - 1 ||
                                        p.table_rows[next] != p.table_rows[row] ||
                                        p.places[next] != p.places[row] + 1
                                  : token == PAGE - 1;
    if (!is_last) return;
    const u32 head = blockIdx.y;
    const Element* page = (const Element*)page_in(p.arena, p.head_bytes, p.near, head, slot);
    u16* out = (u16*)(p.digests + head * p.digest_head_bytes + (u64)slot * p.page_bytes);
    for (u32 e = threadIdx.x; e < HEAD_DIM; e += DIGEST_THREADS) {
        float least = INFINITE, most = -INFINITE;
        for (u32 i = 0; i <= token; i++) {
            const float x = element_value(page[key_at(i, e)]);
            least = fminf(least, x), most = fmaxf(most, x);
        }
        out[e] = (u16)f16_of(least);
        out[HEAD_DIM + e] = (u16)f16_of(most);
    }
}

// Writes a token's products in eight bits; `channels` of backend/src/topk.rs. A whole warp.
DEVICE void digest_channels(const DigestParams& p, const float* products, u8* page, u32 token) {
    const u32 lane = threadIdx.x % 32, row_bytes = p.page_bytes / PAGE - 2;
    float most = 0.0f;
    for (u32 r = lane; r < p.width; r += 32) most = fmaxf(most, fabsf(products[r]));
    const u32 bits = f16_of(__fdiv_rn(warp_max(most), 127.0f));
    const float unit = f16_to_float(bits), scale = unit > 0.0f ? __fdiv_rn(1.0f, unit) : 0.0f;
    for (u32 r = lane; r < row_bytes; r += 32) {
        const float x = r < p.width ? roundf(__fmul_rn(products[r], scale)) : 0.0f;
        page[token * row_bytes + r] = (u8)(int)fminf(fmaxf(x, -128.0f), 127.0f);
    }
    if (lane == 0) *(u16*)(page + PAGE * row_bytes + token * 2) = (u16)bits;
}

// The same in four bits; `nibbles` of backend/src/topk.rs.
DEVICE void digest_nibbles(const DigestParams& p, const float* products, u8* page, u32 token) {
    const u32 lane = threadIdx.x % 32, lines = (p.width + 7) / 8;
    float most = 0.0f;
    for (u32 r = lane; r < p.width; r += 32) most = fmaxf(most, fabsf(products[r]));
    const u32 bits = f16_of(__fdiv_rn(warp_max(most), 7.0f));
    const float unit = f16_to_float(bits), scale = unit > 0.0f ? __fdiv_rn(1.0f, unit) : 0.0f;
    for (u32 line = lane; line < lines; line += 32) {
        u32 word = 0;
        for (u32 i = 0; i < 8 && line * 8 + i < p.width; i++) {
            const int code = (int)roundf(__fmul_rn(products[line * 8 + i], scale));
            word |= (u32)(min(max(code, -8), 7) + 8) << (i % 4 * 8 + i / 4 * 4);
        }
        *(u32*)(page + line * 4 * PAGE + token * 4) = word;
    }
    if (lane == 0) *(u16*)(page + lines * 4 * PAGE + token * 2) = (u16)bits;
}

// Brings rows of the frame, from element `first` on, for as many columns as there are threads.
DEVICE void stage_frame(const DigestParams& p, u32 first, u32 column, float* stage) {
    const float* frame = p.frame + blockIdx.y * p.frame_stride + column;
    const u32 cols = min(p.width - column, (u32)DIGEST_THREADS);
    const u32 rows = min(DIGEST_STAGE / cols, HEAD_DIM - first);
    for (u32 i = threadIdx.x; i < rows * cols; i += DIGEST_THREADS)
        copy_word_async(shared_address(stage + i), frame + (first + i / cols) * p.width + i % cols);
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(DIGEST_THREADS) digest_keys(DigestParams p) {
    __shared__ float stage[DIGEST_STAGE];
    // The frame never changes: nobody is waited for.
    if (p.kind != DIGEST_BOUNDS) stage_frame(p, 0, 0, stage);
    begin();
    // Of channels, of which there are no more than elements.
    __shared__ float products[DIGEST_TOKENS][HEAD_DIM];
    __shared__ __align__(16) float keys[HEAD_DIM][DIGEST_TOKENS];
    __shared__ u32 slots[DIGEST_TOKENS], tokens[DIGEST_TOKENS];
    const u32 head = blockIdx.y, first = blockIdx.x * DIGEST_TOKENS, thread = threadIdx.x;
    const u32 n = min(p.rows - first, (u32)DIGEST_TOKENS);
    if (thread < n) {
        const u32 row = first + thread, place = p.places ? p.places[row] : row;
        tokens[thread] = place % PAGE;
        slots[thread] = p.places ? p.tables[(u64)p.table_rows[row] * p.table_len + place / PAGE]
                                 : p.slots[row / PAGE];
    }
    __syncthreads();
    if (p.kind == DIGEST_BOUNDS) {
        for (u32 i = 0; i < n; i++) digest_bounds(p, first + i, slots[i], tokens[i]);
        return;
    }
    for (u32 i = thread; i < DIGEST_TOKENS * HEAD_DIM; i += DIGEST_THREADS) {
        const u32 at = i / HEAD_DIM, e = i % HEAD_DIM;
        float x = 0.0f;
        if (at < n) {
            const Element* page =
                (const Element*)page_in(p.arena, p.head_bytes, p.near, head, slots[at]);
            x = element_value(page[key_at(tokens[at], e)]);
            if (p.kind == DIGEST_SIGNS) x -= p.mean[head * HEAD_DIM + e];
        }
        keys[e][at] = x;
    }
    __syncthreads();
    u8* target = p.digests + head * p.digest_head_bytes;
    const u32 row_bytes = p.page_bytes / PAGE;
    for (u32 column = 0; column < p.width; column += DIGEST_THREADS) {
        const u32 cols = min(p.width - column, (u32)DIGEST_THREADS), rows = DIGEST_STAGE / cols;
        const u32 r = column + thread;
        float sums[DIGEST_TOKENS];
        UNROLL
        for (int i = 0; i < DIGEST_TOKENS; i++) sums[i] = 0.0f;
        for (u32 start = 0; start < HEAD_DIM; start += rows) {
            if (column + start > 0) {
                __syncthreads();
                stage_frame(p, start, column, stage);
            }
            copy_wait<0>();
            __syncthreads();
            const u32 end = min(rows, HEAD_DIM - start);
#pragma unroll 8
            for (u32 e = 0; e < end && thread < cols; e++) {
                const float w = stage[e * cols + thread];
                UNROLL
                for (int i = 0; i < DIGEST_TOKENS; i++)
                    sums[i] = __fmaf_rn(w, keys[start + e][i], sums[i]);
            }
        }
        // Signs have whole warps.
        if (thread >= cols) continue;
        UNROLL
        for (int i = 0; i < DIGEST_TOKENS; i++) {
            if (i >= n) continue;
            if (p.kind != DIGEST_SIGNS) {
                products[i][r] = sums[i];
            } else {
                u8* own = target + (u64)slots[i] * p.page_bytes + tokens[i] * row_bytes;
                const u32 bits = __ballot_sync(~0u, sums[i] > 0.0f);
                if (thread % 32 == 0) *(u32*)(own + r / 32 * 4) = bits;
            }
        }
    }
    if (p.kind == DIGEST_SIGNS) return;
    __syncthreads();
    for (u32 i = thread / 32; i < n; i += DIGEST_THREADS / 32) {
        u8* page = target + (u64)slots[i] * p.page_bytes;
        if (p.kind == DIGEST_NIBBLES) digest_nibbles(p, products[i], page, tokens[i]);
        else digest_channels(p, products[i], page, tokens[i]);
    }
}

// The keys of the first places of one head, as floats: for calibration. Grid: (place).

struct ReadKeysParams {
    SparsePages pages;
    float* out;  // [n][D]
    u32 table_row, head, n, padding;
};
static_assert(sizeof(ReadKeysParams) == READ_KEYS_PARAMS_SIZE, "the host's ReadKeysParams differs");

extern "C" __global__ void read_keys(ReadKeysParams p) {
    begin();
    const u32 place = blockIdx.x;
    const Element* page = (const Element*)page_of(p.pages, p.head, p.table_row, place / PAGE);
    for (u32 e = threadIdx.x; e < HEAD_DIM; e += blockDim.x)
        p.out[(u64)place * HEAD_DIM + e] = element_value(page[key_at(place % PAGE, e)]);
}
