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
    u32 rows;
    u32 n_heads;
    u32 n_kv_heads;
    u32 table_len;
    u32 half;  // rotated / 2
    u32 is_halves;
    float eps;
    u32 padding;
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
    Element* page = (Element*)(p.layer + kv_head * p.head_bytes + (u64)slot * HEAD_PAGE_BYTES);
    for (u32 i = lane; i < HEAD_DIM; i += 32) {
        if (is_value)
            page[value_at(token, i)] = value_element(x[i]);
        else
            page[key_at(token, i)] = key_element(x[i]);
    }
}
