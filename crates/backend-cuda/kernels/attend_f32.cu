// Attention over f32 KV: plain, exact, and not made to be fast.
//
// A warp takes one query head of one row, and all its keys in steps of 32, one key per lane. Grid:
// (row, query head).

struct AttendF32Params {
    const float* qkv;
    const u8* layer;  // [G][slot][page]
    float* out;
    u16* rounded;
    const u32* places;      // [T]
    const u32* table_rows;  // [T]
    const u32* tables;      // [row][table_len]
    u64 head_bytes;
    Near near;
    u32 q_stride;  // floats
    u32 table_len;
    u32 n_kv_heads;
    u32 group;
    u32 window;
    float scale;  // times log2(e)
};
static_assert(sizeof(AttendF32Params) == ATTEND_F32_PARAMS_SIZE, "the host's params differ");

#define PIECES ((HEAD_DIM + 31) / 32)

extern "C" __global__ void __launch_bounds__(32) attend_f32(AttendF32Params p) {
    begin();
    __shared__ float q[HEAD_DIM];
    const u32 row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x;
    for (u32 i = lane; i < HEAD_DIM; i += 32) q[i] = p.qkv[(u64)row * p.q_stride + head * HEAD_DIM + i];
    __syncwarp();
    const u32 end = p.places[row] + 1;
    const u32 start = end > p.window ? end - p.window : 0;
    const u32* table = p.tables + (u64)p.table_rows[row] * p.table_len;
    const auto page_of = [&](u32 key) {
        return (const float*)page_in(p.layer, p.head_bytes, p.near, head / p.group, table[key / PAGE]);
    };
    float m = -INFINITE, l = 0.0f, o[PIECES];
    UNROLL
    for (int i = 0; i < PIECES; i++) o[i] = 0.0f;
    // Steps are cut at multiples of 32 from the start of the sequence.
    for (u32 first = start / 32 * 32; first < end; first += 32) {
        const u32 key = first + lane;
        const bool seen = key >= start && key < end;
        float s = -INFINITE;
        if (seen) {
            const float* page = page_of(key);
            s = 0.0f;
            for (u32 i = 0; i < HEAD_DIM; i++) s = __fmaf_rn(q[i], page[key_at(key % PAGE, i)], s);
            s *= p.scale;
        }
        const float next = fmaxf(m, warp_max(s));
        const float base = next == -INFINITE ? 0.0f : next;
        const float down = exp2_of(m - base);
        const float weight = exp2_of(s - base);
        m = next;
        l = __fmaf_rn(l, down, warp_sum(weight));
        UNROLL
        for (int i = 0; i < PIECES; i++) o[i] *= down;
        for (u32 j = 0; j < 32; j++) {
            const float w = __shfl_sync(~0u, weight, j);
            if (first + j < start || first + j >= end) continue;
            const float* page = page_of(first + j);
            UNROLL
            for (int i = 0; i < PIECES; i++) {
                const u32 column = i * 32 + lane;
                if (column < HEAD_DIM)
                    o[i] = __fmaf_rn(w, page[value_at((first + j) % PAGE, column)], o[i]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < PIECES; i++) {
        const u32 column = i * 32 + lane;
        if (column >= HEAD_DIM) continue;
        const u64 at = ((u64)row * p.n_kv_heads * p.group + head) * HEAD_DIM + column;
        const float x = o[i] * (1.0f / l);
        p.out[at] = x;
        p.rounded[at] = (u16)bf16_of(x);
    }
}
