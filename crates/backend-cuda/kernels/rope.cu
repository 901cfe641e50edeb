// Normalises the heads of q and k if there are weights for it, rotates them by their positions, and
// writes k and v to the pages of their sequences.
//
// qkv [T, (H + 2 G) D], with G = 0 in a layer that owns no keys and values; a warp takes one head of
// one row. A head's norm sums elements i, i + 32, ... per lane, then lanes by halves. Reads qkv once,
// writes its q part and one token of each page.

struct RopeParams {
    float* qkv;
    u8* layer;            // [G][slot][page]
    const float* q_norm;  // [D] or null
    const float* k_norm;
    const float* angles;  // [T][rotated / 2] cosine and sine
    const u32* places;      // [T]: which token of its sequence a row is
    const u32* table_rows;  // [T]
    const u32* tables;      // [row][table_len]
    u64 head_bytes;         // of all slots of one head
    Near near;
    Codes codes;
    u32 rows;
    u32 n_heads;
    u32 n_kv_heads;
    u32 table_len;
    u32 half;  // rotated / 2
    u32 is_halves;
    float eps;
    u32 defers;  // whether pages that have copies are written later, by `write_far`
    u32 only_queries;
    u32 near_heads;  // KV heads, from the first on, whose pages may have copies
};
static_assert(sizeof(RopeParams) == ROPE_PARAMS_SIZE, "the host's RopeParams differs");

#define WARPS 4
#define ROPE_PIECES ((HEAD_DIM + 31) / 32)  // elements of a lane
#define ROPE_PAIRS ((HEAD_DIM + 63) / 64)   // pairs that it rotates

extern "C" __global__ void __launch_bounds__(32 * WARPS) rope_append(RopeParams p) {
    allow_next();
    __shared__ float heads[WARPS][HEAD_DIM];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 all = p.n_heads + 2 * p.n_kv_heads;
    const u64 task = (u64)blockIdx.x * WARPS + warp;
    if (task >= (u64)p.rows * all) return;
    const u32 row = (u32)(task / all), head = (u32)(task % all);
    float* source = p.qkv + ((u64)row * all + head) * HEAD_DIM;
    float* x = heads[warp];
    const bool is_query = head < p.n_heads, is_value = head >= p.n_heads + p.n_kv_heads;
    if (p.only_queries && !is_query) return;
    const float* norm = is_query ? p.q_norm : is_value ? 0 : p.k_norm;
    // Places and tables were there before the step began.
    const u32 place = is_query ? 0 : p.places[row];
    const u32 slot = is_query ? 0 : p.tables[(u64)p.table_rows[row] * p.table_len + place / PAGE];
    wait_for_previous();
    // Everything is asked for before anything is used.
    const float2* angles = (const float2*)p.angles + (u64)row * p.half;
    float own[ROPE_PIECES], sum = 0.0f;
    float2 turns[ROPE_PAIRS];
    UNROLL
    for (int k = 0; k < ROPE_PIECES; k++)
        own[k] = lane + 32 * k < HEAD_DIM ? source[lane + 32 * k] : 0.0f;
    UNROLL
    for (int k = 0; k < ROPE_PAIRS; k++)
        turns[k] = !is_value && lane + 32 * k < p.half ? angles[lane + 32 * k] : make_float2(1, 0);
    UNROLL
    for (int k = 0; k < ROPE_PIECES; k++)
        if (lane + 32 * k < HEAD_DIM) {
            x[lane + 32 * k] = own[k];
            sum = __fmaf_rn(own[k], own[k], sum);
        }
    if (norm) {
        const float scale = 1.0f / __fsqrt_rn(warp_sum(sum) / (float)HEAD_DIM + p.eps);
        for (u32 i = lane; i < HEAD_DIM; i += 32) x[i] = x[i] * scale * norm[i];
    }
    __syncwarp();
    if (!is_value) {
        UNROLL
        for (int k = 0; k < ROPE_PAIRS; k++) {
            const u32 i = lane + 32 * k;
            if (i >= p.half) continue;
            const u32 first = p.is_halves ? i : 2 * i, second = p.is_halves ? i + p.half : 2 * i + 1;
            const float2 angle = turns[k];
            const float a = x[first], b = x[second];
            x[first] = turned_first(a, b, angle);
            x[second] = turned_second(a, b, angle);
        }
        __syncwarp();
    }
    if (is_query) {
        for (u32 i = lane; i < HEAD_DIM; i += 32) source[i] = x[i];
        return;
    }
    const u32 kv_head = (head - p.n_heads) % p.n_kv_heads;
    const u32 token = place % PAGE;
#if CODED
    u8* page = p.layer + kv_head * p.head_bytes + (u64)slot * HEAD_PAGE_BYTES;
    float largest = 0.0f;
    for (u32 i = lane; i < HEAD_DIM; i += 32) largest = fmaxf(largest, fabsf(finite(x[i])));
    const float2 scale = code_scale(warp_max(largest));
    if (lane == 0) *scale_of(page + (is_value ? VALUES_AT : 0), token) = scale.x;
    for (u32 i = lane; i < HEAD_DIM; i += 32)
        page[is_value ? value_at(token, i) : key_at(token, i)] = code_of(finite(x[i]) * scale.y);
#else
    Element* page = (Element*)(p.layer + kv_head * p.head_bytes + (u64)slot * HEAD_PAGE_BYTES);
    const u32 frame = kv_head < p.near_heads ? frame_of(p.near, slot) : NOT_NEAR;
    Element* copy = frame == NOT_NEAR ? 0 : (Element*)near_page(p.near, kv_head, frame);
    for (u32 i = lane; i < HEAD_DIM; i += 32) {
        const u32 at = is_value ? value_at(token, i) : key_at(token, i);
        const Element y = is_value ? value_element(x[i]) : key_element(x[i]);
        if (copy) copy[at] = y;
        if (!copy || !p.defers) page[at] = y;
    }
    if (p.codes.rows && (!copy || !p.defers)) {
        __syncwarp();
        write_code(p.codes, kv_head, slot, token, is_value, [&](u32 i) {
            return element_value(is_value ? value_element(x[i]) : key_element(x[i]));
        });
    }
#endif
}

// Writes what the batch's rows have put into copies of pages to the pages themselves, which are far, and
// their codes.
//
// Threads that follow each other write bytes that do. Grid: as many blocks as may be busy with it. Reads
// and writes each row once.

struct WriteFarParams {
    u8* layer;              // [G][slot][page]
    const u32* places;      // [T]
    const u32* table_rows;  // [T]
    const u32* tables;      // [row][table_len]
    u64 head_bytes;
    Near near;
    Codes codes;
    u32 rows;
    u32 n_kv_heads;
    u32 table_len;
    u32 padding;
};
static_assert(sizeof(WriteFarParams) == WRITE_FAR_PARAMS_SIZE, "the host's WriteFarParams differs");

#define FAR_THREADS 512  // a warp for each token of a page

extern "C" __global__ void __launch_bounds__(FAR_THREADS) write_far(WriteFarParams p) {
    begin();
    const u64 n = (u64)p.n_kv_heads * 2 * p.rows * ROW_PIECES;
    for (u64 at = blockIdx.x * FAR_THREADS + threadIdx.x; at < n; at += gridDim.x * FAR_THREADS) {
        const u32 piece = at % ROW_PIECES, row = at / ROW_PIECES % p.rows;
        const u32 half = at / ROW_PIECES / p.rows, head = half / 2, place = p.places[row];
        const u32 slot = p.tables[(u64)p.table_rows[row] * p.table_len + place / PAGE];
        const u32 frame = frame_of(p.near, slot);
        if (frame == NOT_NEAR) continue;
        const u32 offset = half % 2 * HALF_PAGE_BYTES + (place % PAGE * ROW_PIECES + piece) * 16;
        u8* page = p.layer + head * p.head_bytes + (u64)slot * HEAD_PAGE_BYTES;
        *(uint4*)(page + offset) = *(const uint4*)(near_page(p.near, head, frame) + offset);
    }
#if !CODED
    const u32 n_warps = gridDim.x * (FAR_THREADS / 32);
    const u32 n_codes = p.codes.rows ? p.n_kv_heads * 2 * p.rows : 0;
    for (u32 at = blockIdx.x * (FAR_THREADS / 32) + threadIdx.x / 32; at < n_codes; at += n_warps) {
        const u32 row = at / 2 % p.rows, head = at / 2 / p.rows, place = p.places[row];
        const u32 slot = p.tables[(u64)p.table_rows[row] * p.table_len + place / PAGE];
        const u32 frame = frame_of(p.near, slot), token = place % PAGE;
        const bool is_value = at % 2;
        if (frame == NOT_NEAR) continue;
        const Element* page = (const Element*)near_page(p.near, head, frame);
        write_code(p.codes, head, slot, token, is_value, [&](u32 i) {
            return element_value(page[is_value ? value_at(token, i) : key_at(token, i)]);
        });
    }
#endif
}

// Makes the codes of whole pages that were written otherwise, of all heads from a layer on.
//
// Grid: (page, head), a warp for each two vectors. Reads each page once, over the link.

struct CodePagesParams {
    const u8* layer;   // [head][slot][page]
    const u32* slots;  // [n]
    u64 head_bytes;
    Codes codes;
};
static_assert(sizeof(CodePagesParams) == CODE_PAGES_PARAMS_SIZE, "the host's CodePagesParams differs");

extern "C" __global__ void __launch_bounds__(FAR_THREADS) code_pages(CodePagesParams p) {
    begin();
#if !CODED
    const u32 slot = p.slots[blockIdx.x], head = blockIdx.y, token = threadIdx.x / 32;
    const Element* page = (const Element*)(p.layer + head * p.head_bytes + (u64)slot * HEAD_PAGE_BYTES);
    for (u32 is_value = 0; is_value < 2; is_value++)
        write_code(p.codes, head, slot, token, is_value, [&](u32 i) {
            return element_value(page[is_value ? value_at(token, i) : key_at(token, i)]);
        });
#endif
}
