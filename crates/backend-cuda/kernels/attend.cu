// out[t, h] = softmax(scale q[t, h] K) V over the pages of the row's sequence: causal, and not
// further back than the window. 16-bit KV, on tensor cores, with f32 accuracy.
//
// A warp takes sixteen *lines*: pairs of a token and a query head of one KV head. For each chunk of
// 256 keys, cut at multiples from the sequence's start, it goes in steps of 64 keys:
//
//   s = q K             q is split into PARTS 16-bit floats whose sum it is; one chain along D
//   m, p = exp2(s - m)  the running maximum of the chunk; what came before is scaled down
//   l, o                sums of p and of p V; p is split as q is; one chain along the keys
//
// and chunks are merged from left to right. A *tile* (many lines, all chunks, TEAM warps sharing
// the pages) and a *split* (the lines of one token, one chunk; `merge` does the rest) do the same
// arithmetic in the same order. Masked keys have p = 0, and adding zero changes nothing. So a row
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
    u32 partial;  // where a split's result goes
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
#define STEP 64
#define STEP_PAGES (STEP / PAGE)
#define STAGES 2
#define STAGE_BYTES (STEP_PAGES * HEAD_PAGE_BYTES)
#define NT (WIDTH / 8)    // tiles of eight columns
#define KT (WIDTH / 32)   // pieces of 32 columns

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

template <int TEAM>
struct Attention {
    // Per warp: the lines' queries as operands, [KT * 2 steps][PARTS][lane] of sixteen bytes.
    static const int Q_BYTES = KT * 2 * PARTS * 512;

    DEVICE void barrier() {
        if (TEAM > 1)
            __syncthreads();
        else
            __syncwarp();
    }

    // Brings the pages of one step; those outside of `first_page..end_page` become zeros.
    DEVICE void load(const AttendParams& p, const Task& task, u32 stage, u32 step,
                            u32 first_page, u32 end_page) {
        const u8* head = p.layer + blockIdx.y * p.head_bytes;
        const u32* table = p.tables + (u64)task.table_row * p.table_len;
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++) {
            const u32 page = step * STEP_PAGES + i;
            const bool inside = page >= first_page && page < end_page;
            const u8* source = head + (inside ? (u64)table[page] * HEAD_PAGE_BYTES : 0);
            for (u32 at = threadIdx.x * 16; at < HEAD_PAGE_BYTES; at += TEAM * 512)
                copy_async(stage + i * HEAD_PAGE_BYTES + at, source + at, inside ? 16 : 0);
        }
        copy_commit();
    }

    // Splits the lines' queries into operands in shared memory; gives each line's score factor.
    DEVICE void load_queries(const AttendParams& p, const Task& task, u32 first_line,
                                    u32 n_lines, u32* operands, float (&factor)[2]) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u32 width = (p.group + 2) * p.n_kv_heads * HEAD_DIM;
        UNROLL
        for (int r = 0; r < 2; r++) {
            const u32 in_tile = g + 8 * r, line = first_line + in_tile;
            const bool inside = in_tile < n_lines;
            const u64 row = task.first_row + line / p.group;
            const u32 head = blockIdx.y * p.group + line % p.group;
            const float* q = p.qkv + row * width + head * HEAD_DIM;
            float largest = 0.0f;
            if (inside)
                for (u32 i = t; i < HEAD_DIM; i += 4) largest = fmaxf(largest, fabsf(q[i]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float up = line_factor(largest);
            factor[r] = p.scale * (1.0f / up);
            for (int step = 0; step < KT * 2; step++) {
                for (int e = 0; e < 4; e += 2) {
                    const u32 i = step / 2 * 32 + t * 8 + step % 2 * 4 + e;
                    float x = inside && i < HEAD_DIM ? q[i] * up : 0.0f;
                    float y = inside && i + 1 < HEAD_DIM ? q[i + 1] * up : 0.0f;
                    for (int part = 0; part < PARTS; part++) {
                        // Operand a: rows g and g + 8 of the first pair, then of the second.
                        operands[((step * PARTS + part) * 32 + lane) * 4 + e + r] = take_part(x, y);
                    }
                }
            }
        }
        __syncwarp();
    }

    // Adds one step's keys to the chunk's totals.
    DEVICE void add_step(const u8* stage, const u32* operands, u32 first_key,
                                const u32 (&start)[2], const u32 (&end)[2],
                                const float (&factor)[2], Total (&total)[2], float (&o)[NT][4]) {
        const u32 lane = threadIdx.x % 32, t = lane % 4;
        float s[STEP / 8][4];
        UNROLL
        for (int j = 0; j < STEP / 8; j++)
            UNROLL
            for (int e = 0; e < 4; e++) s[j][e] = 0.0f;
        UNROLL
        for (int k = 0; k < KT; k++) {
            u32 q[2][PARTS][4];
            UNROLL
            for (int i = 0; i < 2; i++)
                UNROLL
                for (int part = 0; part < PARTS; part++) {
                    const u32 at = (((k * 2 + i) * PARTS + part) * 32 + lane) * 4;
                    const uint4 bits = *(const uint4*)(operands + at);
                    q[i][part][0] = bits.x, q[i][part][1] = bits.y;
                    q[i][part][2] = bits.z, q[i][part][3] = bits.w;
                }
            UNROLL
            for (int j = 0; j < STEP / 8; j++) {
                const u8* keys = stage + j / 2 * HEAD_PAGE_BYTES;
                const uint4 b = *(const uint4*)(keys + ((k * 2 + j % 2) * 32 + lane) * 16);
                UNROLL
                for (int part = 0; part < PARTS; part++) mma(s[j], q[0][part], b.x, b.y);
                UNROLL
                for (int part = 0; part < PARTS; part++) mma(s[j], q[1][part], b.z, b.w);
            }
        }
        float largest[2] = {-INFINITE, -INFINITE};
        UNROLL
        for (int j = 0; j < STEP / 8; j++)
            UNROLL
            for (int e = 0; e < 4; e++) {
                const u32 key = first_key + j * 8 + t * 2 + e % 2;
                const bool seen = key >= start[e / 2] && key < end[e / 2];
                s[j][e] = seen ? __fmul_rn(s[j][e], factor[e / 2]) : -INFINITE;
                largest[e / 2] = fmaxf(largest[e / 2], s[j][e]);
            }
        float base[2], down[2], sum[2];
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
        for (int j = 0; j < STEP / 8; j++)
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
        UNROLL
        for (int n = 0; n < NT; n++)
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
            for (int n = 0; n < NT; n += 2) {
                const uint4 b = *(const uint4*)(values + (n / 2 * 32 + lane) * 16);
                UNROLL
                for (int part = 0; part < PARTS; part++) {
                    mma(o[n], a[part], b.x, b.y);
                    mma(o[n + 1], a[part], b.z, b.w);
                }
            }
        }
    }

    DEVICE void run(const AttendParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        const Task task = p.tasks[blockIdx.x];
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u32 ring = shared_address(shared);
        u32* operands = (u32*)(shared + STAGES * STAGE_BYTES + warp * Q_BYTES);

        // The warp's lines, and the keys that the whole task and each line of the lane see.
        const u32 first_line = task.first_line + warp * 16;
        const u32 n_lines =
            warp * 16 < task.n_lines ? min(task.n_lines - warp * 16, 16u) : 0;
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
        const u32 first_page = task_start / PAGE, end_page = (last_seen + PAGE - 1) / PAGE;
        const u32 first_step = max(task.first_chunk * CHUNK, task_start) / STEP;
        const u32 end_step = (min(task.end_chunk * CHUNK, last_seen) + STEP - 1) / STEP;

        for (u32 i = 0; i < STAGES - 1; i++) {
            if (first_step + i < end_step)
                load(p, task, ring + i * STAGE_BYTES, first_step + i, first_page, end_page);
            else
                copy_commit();
        }
        float factor[2];
        load_queries(p, task, first_line, n_lines, operands, factor);

        Total total[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
        Total chunk[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
        float all[NT][4], o[NT][4];
        UNROLL
        for (int n = 0; n < NT; n++)
            UNROLL
            for (int e = 0; e < 4; e++) all[n][e] = o[n][e] = 0.0f;
        for (u32 step = first_step; step < end_step; step++) {
            const u32 at = step - first_step;
            copy_wait<STAGES - 2>();
            // Everybody's copies of this step are there, and nobody reads the one before it.
            barrier();
            const u32 next = step + STAGES - 1;
            if (next < end_step)
                load(p, task, ring + (at + STAGES - 1) % STAGES * STAGE_BYTES, next, first_page,
                     end_page);
            else
                copy_commit();
            add_step(shared + at % STAGES * STAGE_BYTES, operands, step * STEP, start, end, factor,
                     chunk, o);
            const bool is_chunk_end = (step + 1) % (CHUNK / STEP) == 0 || step + 1 == end_step;
            if (TEAM > 1 && is_chunk_end) {
                Weights w[2];
                UNROLL
                for (int r = 0; r < 2; r++) {
                    w[r] = weigh(total[r].m, chunk[r].m);
                    total[r].l = mix(total[r].l, chunk[r].l, w[r]);
                    total[r].m = w[r].m;
                    chunk[r].m = -INFINITE;
                    chunk[r].l = 0.0f;
                }
                UNROLL
                for (int n = 0; n < NT; n++)
                    UNROLL
                    for (int e = 0; e < 4; e++) {
                        all[n][e] = mix(all[n][e], o[n][e], w[e / 2]);
                        o[n][e] = 0.0f;
                    }
            }
        }
        UNROLL
        for (int r = 0; r < 2; r++) {
            if (g + 8 * r >= n_lines) continue;
            const u32 line = first_line + g + 8 * r;
            if (TEAM == 1) {
                const u64 at =
                    ((u64)task.partial * p.n_kv_heads + blockIdx.y) * p.group + line;
                if (t == 0) {
                    p.sums[at * 2] = chunk[r].m;
                    p.sums[at * 2 + 1] = chunk[r].l;
                }
                UNROLL
                for (int n = 0; n < NT; n++)
                    *(float2*)(p.partials + at * WIDTH + n * 8 + t * 2) =
                        make_float2(o[n][2 * r], o[n][2 * r + 1]);
            } else {
                const u64 row = task.first_row + line / p.group;
                const u32 head = blockIdx.y * p.group + line % p.group;
                const u64 at = (row * p.n_kv_heads * p.group + head) * HEAD_DIM;
                const float inverse = 1.0f / total[r].l * (1.0f / P_SCALE);
                UNROLL
                for (int n = 0; n < NT; n++) {
                    const u32 i = n * 8 + t * 2;
                    if (i >= HEAD_DIM) continue;
                    const float x = all[n][2 * r] * inverse, y = all[n][2 * r + 1] * inverse;
                    *(float2*)(p.out + at + i) = make_float2(x, y);
                    *(u32*)(p.rounded + at + i) = bf16x2(x, y);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(32) attend_split(AttendParams p) {
    Attention<1>::run(p);
}

extern "C" __global__ void __launch_bounds__(128) attend_tile(AttendParams p) {
    Attention<4>::run(p);
}

// Merges the chunks of the rows that were split, from left to right.
//
// Grid: (row that was split, query head); thread i takes columns i, i + 128. Weights of up to BATCH
// chunks are worked out at a time, which is what makes the long chain of sums quick.

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
#define BATCH 128
#define PIECES ((HEAD_DIM + MERGE_THREADS - 1) / MERGE_THREADS)

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge(MergeParams p) {
    __shared__ float maxima[BATCH], before[BATCH], after[BATCH], lengths[BATCH];
    const Merge task = p.merges[blockIdx.x];
    const u32 head = blockIdx.y;
    const u64 stride = (u64)p.n_kv_heads * p.group;
    const u64 first = (u64)task.partial * stride + head;
    float m = -INFINITE, l = 0.0f, o[PIECES];
    UNROLL
    for (int i = 0; i < PIECES; i++) o[i] = 0.0f;
    for (u32 start = 0; start < task.n_partials; start += BATCH) {
        const u32 n = min(task.n_partials - start, (u32)BATCH);
        const u32 thread = threadIdx.x;
        if (thread < n) {
            const u64 at = first + (start + thread) * stride;
            maxima[thread] = p.sums[at * 2];
            lengths[thread] = p.sums[at * 2 + 1];
        }
        __syncthreads();
        if (thread < n) {
            // The maximum of everything before, by looking at all of it: short, and in parallel.
            float so_far = m;
            for (u32 i = 0; i < thread; i++) so_far = fmaxf(so_far, maxima[i]);
            const Weights w = weigh(so_far, maxima[thread]);
            before[thread] = w.before;
            after[thread] = w.after;
        }
        __syncthreads();
        UNROLL
        for (int piece = 0; piece < PIECES; piece++) {
            const u32 i = piece * MERGE_THREADS + thread;
            if (i >= HEAD_DIM) continue;
            const float* source = p.partials + (first + start * stride) * WIDTH + i;
#pragma unroll 8
            for (u32 c = 0; c < n; c++) {
                const float x = source[c * stride * WIDTH];
                o[piece] = __fmaf_rn(x, after[c], __fmul_rn(o[piece], before[c]));
            }
        }
        for (u32 c = 0; c < n; c++) {
            l = __fmaf_rn(lengths[c], after[c], __fmul_rn(l, before[c]));
            m = fmaxf(m, maxima[c]);
        }
        __syncthreads();
    }
    const float inverse = 1.0f / l * (1.0f / P_SCALE);
    const u64 target = ((u64)task.row * stride + head) * HEAD_DIM;
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
        const u32 i = piece * MERGE_THREADS + threadIdx.x;
        if (i >= HEAD_DIM) continue;
        const float x = o[piece] * inverse;
        p.out[target + i] = x;
        p.rounded[target + i] = (u16)bf16_of(x);
    }
}
