// out[t, h] = softmax(scale q[t, h] K) V over the pages of the row's sequence: causal, and not
// further back than the window. 16-bit KV, on tensor cores, with f32 accuracy.
//
// A warp takes sixteen *lines*: pairs of a token and a query head of one KV head. For each chunk of
// 256 keys, cut at multiples from the sequence's start, it goes in steps of 32 keys:
//
//   s = q K             q is split into PARTS 16-bit floats whose sum it is; a chain along D each
//   m, p = exp2(s - m)  the running maximum of the chunk; what came before is scaled down
//   l, o                sums of p and of p V; p is split as q is; one chain along the keys
//
// and chunks are merged from left to right. The four warps of a block share the pages. In a *tile*
// (many lines, all chunks) each warp has its own lines. In a *split* (the lines of one token, some
// chunks; `merge` does the rest) all have the same lines: each scores eight of a step's keys, and
// mixes a quarter of the columns. Both do the same arithmetic in the same order. Masked keys have p = 0, and adding zero changes nothing. So a row
// has the same bits however it came to be computed.
//
// qkv [T, (H + 2 G) D]; out [T, H D], and the same rounded to bf16. Grid: (task, KV head). Reads each
// page of a task once.

struct Task {
    u32 first_row;  // of the batch
    u32 first_line, n_lines;
    u32 position;  // of the sequence's first row
    u32 table_row;
    u32 first_chunk, end_chunk;
    u32 partial;  // where the result of a split's first chunk goes
};

struct AttendParams {
    const float* qkv;
    const u8* layer;  // [G][slot][page]
    float* out;
    u16* rounded;
    float* partials;  // [partial][G][group][WIDTH]
    float* sums;      // [partial][G][group][2]: maximum, sum
    const Task* tasks;
    const u32* tables;  // [row][table_len]
    u64 head_bytes;     // of all slots of one head
    u32 table_len;
    u32 n_kv_heads;
    u32 group;
    u32 window;  // keys that a row sees at most
    float scale; // times log2(e)
    u32 padding;
};
static_assert(sizeof(Task) == TASK_SIZE, "the host's Task differs");
static_assert(sizeof(AttendParams) == ATTEND_PARAMS_SIZE, "the host's AttendParams differs");

#define CHUNK 256
#define STEP 32
#define STEP_PAGES (STEP / PAGE)
#define STAGE_BYTES (STEP_PAGES * HEAD_PAGE_BYTES)
#define TEAM 4             // warps of a block
#define KT (WIDTH / 32)    // pieces of 32 columns
#define PAIRS (WIDTH / 16) // pairs of tiles of eight columns
static_assert(STEP / 8 == TEAM, "each warp of a split scores eight keys");

// Parts of a float, and what it is multiplied with before so that small parts keep their bits.
#if KV == KV_F16
#define PARTS 2
#define P_SCALE 16384.0f
DEVICE float part_value(u32 bits) { return f16_to_float(bits & 0xFFFF); }
DEVICE u32 part_pair(float x, float y) { return f16x2(x, y); }
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(c, a, b0, b1); }
#else
#define PARTS 3
#define P_SCALE 1.0f
DEVICE float part_value(u32 bits) { return bf16_to_float(bits & 0xFFFF); }
DEVICE u32 part_pair(float x, float y) { return bf16x2(x, y); }
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }
#endif

// Takes the leading part off two floats.
DEVICE u32 take_part(float& x, float& y) {
    const u32 bits = part_pair(x, y);
    x -= part_value(bits);
    y -= part_value(bits >> 16);
    return bits;
}

// Brings the largest of a line near 2^14: the factor is a power of two.
DEVICE float line_factor(float largest) {
#if KV == KV_F16
    if (!(largest > 0.0f && largest < INFINITE)) return 1.0f;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    exponent = 14 - (exponent < -100 ? -100 : exponent);
    return __uint_as_float((u32)(exponent + 127) << 23);
#else
    return 1.0f;
#endif
}

// What a line knows after some keys: o is kept beside it.
struct Total {
    float m, l;
};

// How two totals are weighed when they become one.
struct Weights {
    float before, after, m;
};

DEVICE Weights weigh(float before, float after) {
    const float m = fmaxf(before, after);
    // Where nothing was seen on either side, nothing may become NaN.
    const float base = m == -INFINITE ? 0.0f : m;
    return Weights{exp2_of(before - base), exp2_of(after - base), m};
}

DEVICE float mix(float before, float after, const Weights& w) {
    return __fmaf_rn(after, w.after, __fmul_rn(before, w.before));
}

template <bool IS_SPLIT, int STAGES, int SHARED>
struct Attention {
    // The lines' queries as operands, [KT * 2 steps][PARTS][lane] of sixteen bytes, a set for each
    // warp or one for all.
    static const int Q_BYTES = KT * 2 * PARTS * 512;
    // Scores that the warps of a split give each other, [2][tile][lane] of sixteen bytes.
    static const int SCORES = STAGES * STAGE_BYTES + (IS_SPLIT ? 1 : TEAM) * Q_BYTES;
    static const int BARRIERS = SCORES + (IS_SPLIT ? 2 * TEAM * 512 : 0);
    static_assert(BARRIERS + 64 == SHARED && STAGES <= 8, "the host's shared memory differs");

    // Tiles of keys that a warp scores, and pairs of tiles of columns that it mixes.
    static const int SCORED = IS_SPLIT ? 1 : TEAM;
    static const int MIXED = IS_SPLIT ? (PAIRS + TEAM - 1) / TEAM : PAIRS;

    // The pair that is the warp's `i`-th; none if it is not below PAIRS.
    DEVICE u32 pair_at(u32 i) { return IS_SPLIT ? i * TEAM + threadIdx.x / 32 : i; }

    // The pages of a task, of which each lane knows one slot of 32 at a time.
    struct Pages {
        const u8* head;
        const u32* table;
        u32 first, end;  // those that are seen
        u32 known;       // the first whose slot is known
        u32 slot;
    };

    DEVICE void find_slots(Pages& pages, u32 page) {
        pages.known = page / 32 * 32;
        const u32 own = pages.known + threadIdx.x % 32;
        const bool inside = own >= pages.first && own < pages.end;
        pages.slot = inside ? pages.table[own] : 0;
    }

    // Brings the pages of one step; those that are not seen become zeros.
    DEVICE void load(Pages& pages, u32 ring, u32 stage, u32 step, u32 end_step) {
        if (step >= end_step) {
            copy_commit();
            return;
        }
        const u32 page = step * STEP_PAGES;
        if (page / 32 * 32 != pages.known) find_slots(pages, page);
        const u32 target = ring + stage * STAGE_BYTES;
#if HAS_BULK
        const u32 ready = ring + BARRIERS + stage * 8;
        u32 n_bytes = 0;
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            if (page + i >= pages.first && page + i < pages.end) n_bytes += HEAD_PAGE_BYTES;
        if (threadIdx.x == 0) barrier_expect(ready, n_bytes);
#endif
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++) {
            const bool inside = page + i >= pages.first && page + i < pages.end;
            const u32 slot = __shfl_sync(~0u, pages.slot, (page + i) % 32);
            const u8* source = pages.head + (u64)slot * HEAD_PAGE_BYTES;
            const u32 place = target + i * HEAD_PAGE_BYTES;
#if HAS_BULK
            if (inside) {
                if (threadIdx.x == 0) bulk_copy(place, source, HEAD_PAGE_BYTES, ready);
                continue;
            }
            for (u32 at = threadIdx.x * 16; at < HEAD_PAGE_BYTES; at += TEAM * 512)
                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place + at), "r"(0)
                             : "memory");
            bulk_fence();
#else
            UNROLL
            for (int first = 0; first < HEAD_PAGE_BYTES; first += TEAM * 512) {
                const u32 at = first + threadIdx.x * 16;
                if (at < HEAD_PAGE_BYTES) copy_async(place + at, source + at, inside ? 16 : 0);
            }
#endif
        }
#if !HAS_BULK
        copy_commit();
#endif
    }

    // Waits for the pages of a step, which is the `turn`-th of the task.
    DEVICE void wait(u32 ring, u32 turn) {
#if HAS_BULK
        barrier_wait(ring + BARRIERS + turn % STAGES * 8, turn / STAGES % 2);
#else
        copy_wait<STAGES - 2>();
        __syncthreads();
#endif
    }

    // Splits the lines' queries into operands in shared memory; gives each line's score factor.
    DEVICE void load_queries(const AttendParams& p, const Task& task, u32 first_line, u32 n_lines,
                             u32* operands, float (&factor)[2]) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u32 width = (p.group + 2) * p.n_kv_heads * HEAD_DIM;
        UNROLL
        for (int r = 0; r < 2; r++) {
            const u32 in_tile = g + 8 * r, line = first_line + in_tile;
            const u64 row = task.first_row + line / p.group;
            const u32 head = blockIdx.y * p.group + line % p.group;
            const float* q = p.qkv + row * width + head * HEAD_DIM;
            float x[KT][8];
            float largest = 0.0f;
            UNROLL
            for (int k = 0; k < KT; k++) {
                const u32 i = k * 32 + t * 8;
                float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
                if (in_tile < n_lines && i < HEAD_DIM) {
                    low = *(const float4*)(q + i);
                    high = *(const float4*)(q + i + 4);
                }
                x[k][0] = low.x, x[k][1] = low.y, x[k][2] = low.z, x[k][3] = low.w;
                x[k][4] = high.x, x[k][5] = high.y, x[k][6] = high.z, x[k][7] = high.w;
            }
            UNROLL
            for (int k = 0; k < KT; k++)
                UNROLL
                for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[k][i]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float up = line_factor(largest);
            factor[r] = p.scale * (1.0f / up);
            UNROLL
            for (int k = 0; k < KT; k++)
                UNROLL
                for (int pair = 0; pair < 4; pair++) {
                    float a = x[k][2 * pair] * up, b = x[k][2 * pair + 1] * up;
                    const u32 step = k * 2 + pair / 2, reg = pair % 2 * 2 + r;
                    UNROLL
                    for (int part = 0; part < PARTS; part++) {
                        const u32 bits = take_part(a, b);
                        // The warps of a split share the work of writing.
                        if (!IS_SPLIT || k % TEAM == threadIdx.x / 32)
                            operands[((step * PARTS + part) * 32 + lane) * 4 + reg] = bits;
                    }
                }
        }
    }

    // Scores of SCORED tiles of eight keys, from tile `first` on.
    DEVICE void score(const u8* stage, const u32* operands, u32 first, float (&s)[SCORED][4]) {
        const u32 lane = threadIdx.x % 32;
        float sums[SCORED][PARTS][4];
        UNROLL
        for (int j = 0; j < SCORED; j++)
            UNROLL
            for (int part = 0; part < PARTS; part++)
                UNROLL
                for (int e = 0; e < 4; e++) sums[j][part][e] = 0.0f;
        UNROLL
        for (int k = 0; k < KT; k++) {
            uint4 b[SCORED];
            UNROLL
            for (int j = 0; j < SCORED; j++) {
                const u8* keys = stage + (first + j) / 2 * HEAD_PAGE_BYTES;
                b[j] = *(const uint4*)(keys + ((k * 2 + (first + j) % 2) * 32 + lane) * 16);
            }
            UNROLL
            for (int i = 0; i < 2; i++)
                UNROLL
                for (int part = 0; part < PARTS; part++) {
                    const u32 at = (((k * 2 + i) * PARTS + part) * 32 + lane) * 4;
                    const uint4 bits = *(const uint4*)(operands + at);
                    const u32 q[4] = {bits.x, bits.y, bits.z, bits.w};
                    UNROLL
                    for (int j = 0; j < SCORED; j++)
                        mma(sums[j][part], q, i ? b[j].z : b[j].x, i ? b[j].w : b[j].y);
                }
        }
        UNROLL
        for (int j = 0; j < SCORED; j++)
            UNROLL
            for (int e = 0; e < 4; e++) {
                s[j][e] = sums[j][0][e];
                UNROLL
                for (int part = 1; part < PARTS; part++) s[j][e] += sums[j][part][e];
            }
    }

    // Turns the scores of a step into weights; the chunk's totals so far are scaled down by `down`.
    DEVICE void soften(u32 first_key, const u32 (&start)[2], const u32 (&end)[2],
                       const float (&factor)[2], float (&s)[TEAM][4], Total (&total)[2],
                       float (&down)[2]) {
        const u32 t = threadIdx.x % 4;
        float largest[2] = {-INFINITE, -INFINITE};
        UNROLL
        for (int j = 0; j < TEAM; j++)
            UNROLL
            for (int e = 0; e < 4; e++) {
                const u32 key = first_key + j * 8 + t * 2 + e % 2;
                const bool seen = key >= start[e / 2] && key < end[e / 2];
                s[j][e] = seen ? __fmul_rn(s[j][e], factor[e / 2]) : -INFINITE;
                largest[e / 2] = fmaxf(largest[e / 2], s[j][e]);
            }
        float base[2], sum[2];
        UNROLL
        for (int r = 0; r < 2; r++) {
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
            const float m = fmaxf(total[r].m, largest[r]);
            base[r] = m == -INFINITE ? 0.0f : m;
            down[r] = exp2_of(total[r].m - base[r]);
            total[r].m = m;
            sum[r] = 0.0f;
        }
        UNROLL
        for (int j = 0; j < TEAM; j++)
            UNROLL
            for (int e = 0; e < 4; e++) {
                s[j][e] = exp2_of(s[j][e] - base[e / 2]);
                sum[e / 2] += s[j][e];
            }
        UNROLL
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            total[r].l = __fmaf_rn(total[r].l, down[r], sum[r]);
        }
    }

    // Adds the weighted values of a step to the warp's columns.
    DEVICE void mix_values(const u8* stage, const float (&s)[TEAM][4], const float (&down)[2],
                           float (&o)[2 * MIXED][4]) {
        const u32 lane = threadIdx.x % 32;
        UNROLL
        for (int n = 0; n < 2 * MIXED; n++)
            UNROLL
            for (int e = 0; e < 4; e++) o[n][e] *= down[e / 2];
        UNROLL
        for (int page = 0; page < STEP_PAGES; page++) {
            u32 a[PARTS][4];
            UNROLL
            for (int reg = 0; reg < 4; reg++) {
                // Registers 0 and 1 are the first eight keys of the page, 2 and 3 the others.
                const int j = page * 2 + reg / 2, e = reg % 2 * 2;
                float x = s[j][e] * P_SCALE, y = s[j][e + 1] * P_SCALE;
                UNROLL
                for (int part = 0; part < PARTS; part++) a[part][reg] = take_part(x, y);
            }
            const u8* values = stage + page * HEAD_PAGE_BYTES + HEAD_PAGE_BYTES / 2;
            UNROLL
            for (int i = 0; i < MIXED; i++) {
                if (IS_SPLIT && pair_at(i) >= PAIRS) continue;
                const uint4 b = *(const uint4*)(values + (pair_at(i) * 32 + lane) * 16);
                UNROLL
                for (int part = 0; part < PARTS; part++) {
                    mma(o[2 * i], a[part], b.x, b.y);
                    mma(o[2 * i + 1], a[part], b.z, b.w);
                }
            }
        }
    }

    // Writes what a split knows of one chunk.
    DEVICE void store_partial(const AttendParams& p, const Task& task, u32 chunk,
                              const Total (&total)[2], const float (&o)[2 * MIXED][4]) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u64 partial = task.partial + chunk - task.first_chunk;
        UNROLL
        for (int r = 0; r < 2; r++) {
            if (g + 8 * r >= task.n_lines) continue;
            const u64 at = (partial * p.n_kv_heads + blockIdx.y) * p.group + task.first_line + g +
                           8 * r;
            if (threadIdx.x < 32 && t == 0)
                *(float2*)(p.sums + at * 2) = make_float2(total[r].m, total[r].l);
            UNROLL
            for (int n = 0; n < 2 * MIXED; n++)
                if (pair_at(n / 2) < PAIRS)
                    *(float2*)(p.partials + at * WIDTH + pair_at(n / 2) * 16 + n % 2 * 8 + t * 2) =
                        make_float2(o[n][2 * r], o[n][2 * r + 1]);
        }
    }

    DEVICE void run(const AttendParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        allow_next();
        // Tasks and tables were there before the step began.
        const Task task = p.tasks[blockIdx.x];
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
        const u32 own = IS_SPLIT ? 0 : warp;
        const u32 ring = shared_address(shared);
        u32* operands = (u32*)(shared + STAGES * STAGE_BYTES + own * Q_BYTES);

        // The warp's lines, and the keys that the whole task and each line of the lane see.
        const u32 first_line = task.first_line + own * 16;
        const u32 n_lines = own * 16 < task.n_lines ? min(task.n_lines - own * 16, 16u) : 0;
        const u32 first_seen = task.position + task.first_line / p.group + 1;
        const u32 last_seen = task.position + (task.first_line + task.n_lines - 1) / p.group + 1;
        const u32 task_start = first_seen > p.window ? first_seen - p.window : 0;
        u32 start[2], end[2];
        UNROLL
        for (int r = 0; r < 2; r++) {
            const u32 seen = task.position + (first_line + g + 8 * r) / p.group + 1;
            start[r] = seen > p.window ? seen - p.window : 0;
            end[r] = g + 8 * r < n_lines ? seen : 0;
        }
        Pages pages;
        pages.head = p.layer + blockIdx.y * p.head_bytes;
        pages.table = p.tables + (u64)task.table_row * p.table_len;
        pages.first = task_start / PAGE;
        pages.end = (last_seen + PAGE - 1) / PAGE;
        const u32 first_step = max(task.first_chunk * CHUNK, task_start) / STEP;
        const u32 end_step = (min(task.end_chunk * CHUNK, last_seen) + STEP - 1) / STEP;
        find_slots(pages, first_step * STEP_PAGES);
#if HAS_BULK
        if (threadIdx.x == 0)
            for (u32 i = 0; i < STAGES; i++) barrier_init(ring + BARRIERS + i * 8);
        __syncthreads();
#endif
        wait_for_previous();
        for (u32 i = 0; i < STAGES - 1; i++) load(pages, ring, i, first_step + i, end_step);
        float factor[2];
        load_queries(p, task, first_line, n_lines, operands, factor);
        __syncthreads();

        Total total[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
        Total chunk[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
        float all[2 * MIXED][4], o[2 * MIXED][4];
        UNROLL
        for (int n = 0; n < 2 * MIXED; n++)
            UNROLL
            for (int e = 0; e < 4; e++) all[n][e] = o[n][e] = 0.0f;
        // Chunks that lie before the window have nothing to say.
        for (u32 i = task.first_chunk; IS_SPLIT && i < min(first_step * STEP / CHUNK, task.end_chunk);
             i++)
            store_partial(p, task, i, chunk, o);
        for (u32 step = first_step; step < end_step; step++) {
            const u32 at = step - first_step, next = (at + STAGES - 1) % STAGES;
            const u8* stage = shared + at % STAGES * STAGE_BYTES;
            float s[TEAM][4], down[2];
            wait(ring, at);
            if constexpr (IS_SPLIT) {
                float own_scores[1][4];
                score(stage, operands, warp, own_scores);
                float4* scores = (float4*)(shared + SCORES + at % 2 * TEAM * 512);
                scores[warp * 32 + lane] = make_float4(own_scores[0][0], own_scores[0][1],
                                                       own_scores[0][2], own_scores[0][3]);
                // All scores are there, and nobody reads the values of the step before.
                __syncthreads();
                load(pages, ring, next, step + STAGES - 1, end_step);
                UNROLL
                for (int j = 0; j < TEAM; j++) {
                    const float4 x = scores[j * 32 + lane];
                    s[j][0] = x.x, s[j][1] = x.y, s[j][2] = x.z, s[j][3] = x.w;
                }
            } else {
                // Nobody reads the step before.
                __syncthreads();
                load(pages, ring, next, step + STAGES - 1, end_step);
                score(stage, operands, 0, s);
            }
            soften(step * STEP, start, end, factor, s, chunk, down);
            mix_values(stage, s, down, o);
            const bool is_chunk_end = (step + 1) % (CHUNK / STEP) == 0 || step + 1 == end_step;
            if (!is_chunk_end) continue;
            if constexpr (IS_SPLIT) {
                store_partial(p, task, step * STEP / CHUNK, chunk, o);
            } else {
                Weights w[2];
                UNROLL
                for (int r = 0; r < 2; r++) {
                    w[r] = weigh(total[r].m, chunk[r].m);
                    total[r].l = mix(total[r].l, chunk[r].l, w[r]);
                    total[r].m = w[r].m;
                }
                UNROLL
                for (int n = 0; n < 2 * MIXED; n++)
                    UNROLL
                    for (int e = 0; e < 4; e++) all[n][e] = mix(all[n][e], o[n][e], w[e / 2]);
            }
            UNROLL
            for (int r = 0; r < 2; r++) chunk[r].m = -INFINITE, chunk[r].l = 0.0f;
            UNROLL
            for (int n = 0; n < 2 * MIXED; n++)
                UNROLL
                for (int e = 0; e < 4; e++) o[n][e] = 0.0f;
        }
        if constexpr (!IS_SPLIT) store_lines(p, task, first_line, n_lines, total, all);
    }

    // Writes the outputs of a tile's lines.
    DEVICE void store_lines(const AttendParams& p, const Task& task, u32 first_line, u32 n_lines,
                            const Total (&total)[2], const float (&all)[2 * MIXED][4]) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL
        for (int r = 0; r < 2; r++) {
            if (g + 8 * r >= n_lines) continue;
            const u32 line = first_line + g + 8 * r;
            const u64 row = task.first_row + line / p.group;
            const u32 head = blockIdx.y * p.group + line % p.group;
            const u64 at = (row * p.n_kv_heads * p.group + head) * HEAD_DIM;
            const float inverse = 1.0f / total[r].l * (1.0f / P_SCALE);
            UNROLL
            for (int n = 0; n < 2 * MIXED; n++) {
                const u32 i = n * 8 + t * 2;
                if (i >= HEAD_DIM) continue;
                const float x = all[n][2 * r] * inverse, y = all[n][2 * r + 1] * inverse;
                *(float2*)(p.out + at + i) = make_float2(x, y);
                *(u32*)(p.rounded + at + i) = bf16x2(x, y);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * TEAM) attend_split(AttendParams p) {
    Attention<true, SPLIT_STAGES, SPLIT_SHARED>::run(p);
}

extern "C" __global__ void __launch_bounds__(32 * TEAM) attend_tile(AttendParams p) {
    Attention<false, TILE_STAGES, TILE_SHARED>::run(p);
}

// Merges the chunks of the rows that were split, from left to right.
//
// Grid: (row that was split, query head); thread i takes columns i, i + 128. Chunks come in batches
// of 32: the next one is on its way while one is added, and one lane works out the weights of each
// chunk, which makes the long chain of sums quick.

struct Merge {
    u32 row;  // of the batch
    u32 partial, n_partials;
    u32 padding;
};

struct MergeParams {
    const float* partials;
    const float* sums;
    const Merge* merges;
    float* out;
    u16* rounded;
    u32 n_kv_heads;
    u32 group;
};
static_assert(sizeof(Merge) == MERGE_SIZE, "the host's Merge differs");
static_assert(sizeof(MergeParams) == MERGE_PARAMS_SIZE, "the host's MergeParams differs");

#define MERGE_THREADS 128
#define BATCH 32
#define PIECES ((HEAD_DIM + MERGE_THREADS - 1) / MERGE_THREADS)

// Brings the results of up to BATCH chunks.
DEVICE void load_batch(const MergeParams& p, u64 first, u64 stride, u32 n, float* target) {
    const u32 shared = shared_address(target);
    UNROLL
    for (int start = 0; start < BATCH * WIDTH / 4; start += MERGE_THREADS) {
        const u32 i = start + threadIdx.x, chunk = i / (WIDTH / 4), piece = i % (WIDTH / 4);
        if (chunk < n)
            copy_async(shared + i * 16, p.partials + (first + chunk * stride) * WIDTH + piece * 4,
                       16);
    }
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge(MergeParams p) {
    extern __shared__ __align__(128) float batches[];  // [2][BATCH][WIDTH]
    begin();
    __shared__ float before[BATCH], after[BATCH], lengths[BATCH], largest;
    const Merge task = p.merges[blockIdx.x];
    const u32 head = blockIdx.y, thread = threadIdx.x;
    const u64 stride = (u64)p.n_kv_heads * p.group;
    const u64 first = (u64)task.partial * stride + head;
    float m = -INFINITE, l = 0.0f, o[PIECES];
    UNROLL
    for (int i = 0; i < PIECES; i++) o[i] = 0.0f;
    load_batch(p, first, stride, min(task.n_partials, (u32)BATCH), batches);
    for (u32 start = 0; start < task.n_partials; start += BATCH) {
        const u32 n = min(task.n_partials - start, (u32)BATCH), next = start + BATCH;
        const u32 turn = start / BATCH % 2;
        if (next < task.n_partials)
            load_batch(p, first + next * stride, stride, min(task.n_partials - next, (u32)BATCH),
                       batches + (1 - turn) * BATCH * WIDTH);
        else
            copy_commit();
        if (thread < 32) {
            const u64 at = first + (start + thread) * stride;
            const float own = thread < n ? p.sums[at * 2] : -INFINITE;
            // The maximum of everything up to this chunk, and of everything before it.
            float upto = fmaxf(m, own);
            for (u32 step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(~0u, upto, step);
                if (thread >= step) upto = fmaxf(upto, other);
            }
            const float left = __shfl_up_sync(~0u, upto, 1);
            const Weights w = weigh(thread == 0 ? m : left, own);
            before[thread] = w.before;
            after[thread] = w.after;
            lengths[thread] = thread < n ? p.sums[at * 2 + 1] : 0.0f;
            if (thread == 31) largest = upto;
        }
        copy_wait<1>();
        __syncthreads();
        m = largest;
        UNROLL
        for (int piece = 0; piece < PIECES; piece++) {
            const u32 i = piece * MERGE_THREADS + thread;
            if (i >= HEAD_DIM) continue;
            const float* source = batches + turn * BATCH * WIDTH + i;
#pragma unroll 8
            for (u32 c = 0; c < n; c++)
                o[piece] = __fmaf_rn(source[c * WIDTH], after[c], __fmul_rn(o[piece], before[c]));
        }
        for (u32 c = 0; c < n; c++) l = __fmaf_rn(lengths[c], after[c], __fmul_rn(l, before[c]));
        __syncthreads();
    }
    const float inverse = 1.0f / l * (1.0f / P_SCALE);
    const u64 target = ((u64)task.row * stride + head) * HEAD_DIM;
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
        const u32 i = piece * MERGE_THREADS + thread;
        if (i >= HEAD_DIM) continue;
        const float x = o[piece] * inverse;
        p.out[target + i] = x;
        p.rounded[target + i] = (u16)bf16_of(x);
    }
}
