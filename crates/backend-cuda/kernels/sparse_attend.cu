// Attention of single rows to what their heads see: the first places and the tail from the arena, and
// the working set between, in one list of pages:
//
//   [ pages of 0 .. n_first ][ pages of the working set ][ pages of cut .. kv_len )
//
// A task is a chunk of pages of one head, a longer one if the head sees many. A warp takes every n-th task,
// and needs nobody: its pages come through a ring of its own, the next step's while one is computed. `sparse_merge` brings the
// chunks of a head together. Chunks are counted from the list's beginning, so that a row has the same
// bits in any company. Reads each page once. Reference: backend-cpu/src/attend/picks.rs; conformance:
// picks_match, picks_rows_agree.

#define SHORT_CHUNK 4  // pages
#define SPARSE_STAGES 2
#define MAX_NUMBERS 1024  // rows and heads of a batch

struct SparseParams {
    SparseHeads heads;
    SparsePages pages;
    const float* qkv;
    float* out;       // [T, H D]
    u16* rounded;
    float* partials;  // [task][group][WIDTH]
    float* sums;      // [task][group][2]
    u32* tasks;       // [row][G] + 1: the first task of each
    u32* done;        // ALL_ENDED if those who decide about this have ended; or null
    float* asked;     // [state row][state_stride][group][D]: where queries are kept, or null
    u32 q_stride;     // floats
    float scale;      // times log2(e)
    u32 head_tasks;   // that a head should have at most, if chunks are not short then
    u32 is_early;     // whether pages are asked for before the kernel before this one has ended
};
static_assert(sizeof(SparseParams) == SPARSE_PARAMS_SIZE, "the host's SparseParams differs");

// Keeps the query of a row's query head `h`, for the selection that is made late: others soon take its place.
DEVICE void keep_query(const SparseParams& p, const SparseRow& row, u32 h, u32 n_threads) {
    if (!p.asked) return;
    float* kept = p.asked + ((u64)row.state_row * p.heads.state_stride * p.heads.group + h) * HEAD_DIM;
    const float* query = p.qkv + (u64)row.row * p.q_stride + h * HEAD_DIM;
    for (u32 i = threadIdx.x; i < HEAD_DIM; i += n_threads) kept[i] = query[i];
}

// What a head sees, as pages.
struct Seen {
    u32 n_first, n_members, cut, kv_len;
    u32 first_pages, member_pages, n_pages;
};

DEVICE Seen seen_by(const SparseRow& row, const HeadState& state) {
    Seen seen;
    seen.n_first = state.n_first, seen.n_members = state.n_members;
    seen.cut = state.cut, seen.kv_len = row.kv_len;
    seen.first_pages = (seen.n_first + PAGE - 1) / PAGE;
    seen.member_pages = (seen.n_members + PAGE - 1) / PAGE;
    const u32 tail = seen.cut < seen.kv_len
                         ? (seen.kv_len + PAGE - 1) / PAGE - seen.cut / PAGE : 0;
    seen.n_pages = seen.first_pages + seen.member_pages + tail;
    return seen;
}

// One page of the list: where it is, and which of its tokens are seen.
struct SeenPage {
    const u8* page;
    u32 tokens;
};

DEVICE u32 tokens_between(u32 start, u32 end) {
    return start >= end ? 0 : ((1u << (end - start)) - 1) << start;
}

DEVICE SeenPage page_at(const SparseParams& p, const SparseRow& row, const HeadState& state,
                        const Seen& seen, u32 head, u32 i) {
    if (i >= seen.n_pages) return SeenPage{0, 0};
    if (i < seen.first_pages) {
        const u8* page = page_of(p.pages, head, row.table_row, i);
        return SeenPage{page, tokens_between(0, min(seen.n_first - i * PAGE, (u32)PAGE))};
    }
    i -= seen.first_pages;
    if (i < seen.member_pages) {
        const u8* page = row.pages + (u64)(state.first_page + i) * HEAD_PAGE_BYTES;
        return SeenPage{page, tokens_between(0, min(seen.n_members - i * PAGE, (u32)PAGE))};
    }
    i += seen.cut / PAGE - seen.member_pages;
    const u32 start = max(seen.cut, i * PAGE) - i * PAGE;
    const u8* page = page_of(p.pages, head, row.table_row, i);
    return SeenPage{page, tokens_between(start, min(seen.kv_len - i * PAGE, (u32)PAGE))};
}

#if KV != KV_F32

// Pages of a task, whole steps: of many pages fewer chunks are to be brought together. What others see
// does not matter, so that a row has the same bits in any company.
DEVICE u32 chunk_of(const SparseParams& p, const Seen& seen) {
    const u32 pages = (seen.n_pages + p.head_tasks - 1) / p.head_tasks;
    return max((pages + STEP_PAGES - 1) / STEP_PAGES * STEP_PAGES, (u32)SHORT_CHUNK);
}

// Works out the first task of each head, and how many there are.
DEVICE void count_tasks(const SparseParams& p, u32* tasks) {
    const u32 n = p.heads.n_rows * p.heads.n_kv_heads;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const SparseRow row = p.heads.rows[i / p.heads.n_kv_heads];
        const Seen seen = seen_by(row, *state_of(p.heads, row, i % p.heads.n_kv_heads));
        tasks[i + 1] = (seen.n_pages + chunk_of(p, seen) - 1) / chunk_of(p, seen);
    }
    if (threadIdx.x == 0) tasks[0] = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        u32 before = 0;
        for (u32 first = 1; first <= n; first += 32) {
            const u32 i = first + threadIdx.x;
            u32 upto = i <= n ? tasks[i] : 0;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(~0u, upto, step);
                if (threadIdx.x >= step) upto += other;
            }
            if (i <= n) tasks[i] = before + upto;
            before += __shfl_sync(~0u, upto, 31);
        }
    }
    __syncthreads();
}

// Whether all is decided that this step sees, and brought, while the kernel before this one may still run. What
// was decided is there then, also for the copy engine. The whole block.
DEVICE bool is_decided(const SparseParams& p) {
    __shared__ u32 n_ended;
    if (!p.done || !p.is_early) return false;
    if (threadIdx.x == 0)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n_ended) : "l"(p.done) : "memory");
    __syncthreads();
#if HAS_BULK
    bulk_fence_all();
#endif
    return n_ended == ALL_ENDED;
}

// The task that pages are brought for, or that is computed.
struct SparseTask {
    u32 index, number;  // of the task, and of its row and head
    u32 head;
    SparseRow row;
    HeadState state;
    Seen seen;
};

DEVICE bool find_task(const SparseParams& p, const u32* tasks, u32 index, SparseTask& task) {
    const u32 n = p.heads.n_rows * p.heads.n_kv_heads;
    if (index >= tasks[n]) return false;
    // The last head whose first task is not behind this one.
    u32 low = 0, high = n;
    while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if (tasks[middle] <= index) low = middle;
        else high = middle;
    }
    // Heads that see nothing have no tasks.
    while (tasks[low + 1] <= index) low++;
    task.index = index, task.number = low, task.head = low % p.heads.n_kv_heads;
    task.row = p.heads.rows[low / p.heads.n_kv_heads];
    task.state = *state_of(p.heads, task.row, task.head);
    task.seen = seen_by(task.row, task.state);
    return true;
}

template <int R>
struct Sparse {
    static const int RING = SPARSE_STAGES * STAGE_BYTES;
    static const int MASKS = RING + Lines<R>::Q_BYTES;
    static const int BARRIERS = MASKS + 16;
    static const int WARP_BYTES = BARRIERS + 16 + 96;

    // Whether the first step of a task sees only pages of the working set.
    DEVICE bool is_of_set(const SparseParams& p, const SparseTask& task, u32 tasks_before) {
        const u32 first = (task.index - tasks_before) * chunk_of(p, task.seen);
        return first >= task.seen.first_pages &&
               first + STEP_PAGES <= task.seen.first_pages + task.seen.member_pages;
    }

    // Brings one step of a task; tokens that are seen go beside it.
    DEVICE void bring(const SparseParams& p, const SparseTask& task, u32 tasks_before, u32 step, u8* own,
                      u32 stage) {
        const u32 lane = threadIdx.x % 32;
        const u32 first = (task.index - tasks_before) * chunk_of(p, task.seen) + step * STEP_PAGES;
        const u32 ring = shared_address(own), target = ring + stage * STAGE_BYTES;
        SeenPage pages[STEP_PAGES];
        u32 tokens = 0, n_bytes = 0;
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++) {
            pages[i] = page_at(p, task.row, task.state, task.seen, task.head, first + i);
            tokens |= pages[i].tokens << i * PAGE;
            n_bytes += pages[i].page ? HEAD_PAGE_BYTES : 0;
        }
        if (lane == 0) ((u32*)(own + MASKS))[stage] = tokens;
#if HAS_BULK
        const u32 ready = ring + BARRIERS + stage * 8;
        if (lane == 0) barrier_expect(ready, n_bytes);
#endif
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++) {
            const u32 to = target + i * HEAD_PAGE_BYTES;
#if HAS_BULK
            if (pages[i].page && lane == 0) bulk_copy(to, pages[i].page, HEAD_PAGE_BYTES, ready);
            if (pages[i].page) continue;
            for (u32 at = lane * 16; at < HEAD_PAGE_BYTES; at += 512) store_zeros(to + at);
            bulk_fence();
#else
            for (u32 at = lane * 16; at < HEAD_PAGE_BYTES; at += 512)
                copy_async(to + at, pages[i].page ? pages[i].page + at : p.pages.layer,
                           pages[i].page ? 16 : 0);
#endif
        }
#if !HAS_BULK
        copy_commit();
#endif
    }

    DEVICE void take_lines(const SparseParams& p, const SparseTask& task, Lines<R>& lines,
                           SharedQueries& operands) {
        AttendParams queries;
        queries.qkv = p.qkv, queries.q_stride = p.q_stride;
        queries.group = p.heads.group, queries.scale = p.scale;
        lines.first_row = task.row.row, lines.kv_head = task.head;
        lines.first = 0, lines.n = p.heads.group;
        // What is seen is told by masks.
        lines.inside_start = 0, lines.inside_end = ~0u;
        UNROLL
        for (int r = 0; r < R; r++) lines.start[r] = 0, lines.end[r] = ~0u;
        __syncwarp();
        load_queries<R>(queries, lines, operands);
        __syncwarp();
    }

    DEVICE void store(const SparseParams& p, u64 index, const Lines<R>& lines) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL
        for (int r = 0; r < R; r++) {
            if (g + 8 * r >= lines.n) continue;
            const u64 at = index * p.heads.group + g + 8 * r;
            if (t == 0)
                *(float2*)(p.sums + at * 2) = make_float2(lines.total[r].m, lines.total[r].l);
            UNROLL
            for (int n = 0; n < TILES; n++)
                *(float2*)(p.partials + at * WIDTH + n * 8 + t * 2) =
                    make_float2(lines.o[n][2 * r], lines.o[n][2 * r + 1]);
        }
    }

    DEVICE void run(const SparseParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        __shared__ u32 tasks[MAX_NUMBERS + 1];
        allow_next();
        // Queries, the last page and room for results are not there before the kernel before has ended; what was
        // decided on a branch may be.
        const bool is_early = is_decided(p);
        if (!is_early) wait_for_previous();
        const u32 lane = threadIdx.x % 32, t = lane % 4, warp = threadIdx.x / 32;
        u8* own = shared + warp * WARP_BYTES;
        u32* operands = (u32*)(own + RING);
#if HAS_BULK
        if (lane == 0)
            for (u32 i = 0; i < SPARSE_STAGES; i++) barrier_init(shared_address(own) + BARRIERS + i * 8);
        __syncwarp();
#endif
        count_tasks(p, tasks);
        // Neighbouring warps of a block are far from each other, so that few tasks meet many blocks.
        const u32 n_warps = gridDim.x * (blockDim.x / 32);
        SparseTask ahead, task;
        u32 n_brought = 0;
        bool is_ahead = find_task(p, tasks, warp * gridDim.x + blockIdx.x, ahead);
        const bool is_brought = is_early && is_ahead && is_of_set(p, ahead, tasks[ahead.number]);
        if (is_brought) bring(p, ahead, tasks[ahead.number], 0, own, 0);
        if (is_early) wait_for_previous();
        if (is_ahead && !is_brought) bring(p, ahead, tasks[ahead.number], 0, own, 0);
        if (blockIdx.x == 0)
            for (u32 i = threadIdx.x; i <= p.heads.n_rows * p.heads.n_kv_heads; i += blockDim.x)
                p.tasks[i] = tasks[i];
        Lines<R> lines;
        SharedQueries queries = {operands};
        u32 number = ~0u;
        while (is_ahead) {
            task = ahead;
            if (task.number != number) take_lines(p, task, lines, queries);
            number = task.number;
            begin_chunk(lines);
            const u32 n_steps = chunk_of(p, task.seen) / STEP_PAGES;
            for (u32 step = 0; step < n_steps; step++) {
                const u32 turn = n_brought, stage = turn % SPARSE_STAGES;
                n_brought++;
                // The stage that comes next was read in the step before.
                __syncwarp();
                if (step + 1 < n_steps) {
                    bring(p, task, tasks[task.number], step + 1, own, n_brought % SPARSE_STAGES);
                } else {
                    is_ahead = find_task(p, tasks, task.index + n_warps, ahead);
                    if (is_ahead) bring(p, ahead, tasks[ahead.number], 0, own, n_brought % SPARSE_STAGES);
                    else copy_commit();
                }
#if HAS_BULK
                barrier_wait(shared_address(own) + BARRIERS + stage * 8,
                             turn / SPARSE_STAGES % 2);
#else
                copy_wait<1>();
#endif
                __syncwarp();
                const u32 tokens = ((const u32*)(own + MASKS))[stage];
                if (tokens == 0) continue;
                const u8* pages = own + stage * STAGE_BYTES;
                float s[KEY_TILES][2 * R], down[R];
                score<R, HEAD_PAGE_BYTES>(pages, queries, s);
                if (tokens != ~0u)
                    UNROLL
                    for (int j = 0; j < KEY_TILES; j++)
                        UNROLL
                        for (int e = 0; e < 2 * R; e++)
                            if (!(tokens >> (j * 8 + t * 2 + e % 2) & 1)) s[j][e] = -INFINITE;
                soften<R>(0, lines, s, down);
                mix_values<R, HEAD_PAGE_BYTES>(pages + HALF_PAGE_BYTES, s, down, lines.o);
            }
            store(p, task.index, lines);
        }
    }
};

#define SPARSE(name, R, WARPS, SHARED)                                                       \
    static_assert(WARPS * Sparse<R>::WARP_BYTES == SHARED, "the host's memory differs");     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) name(SparseParams p) {       \
        Sparse<R>::run(p);                                                                   \
    }
SPARSE_ENTRIES

// Brings the chunks of each head together. A block takes one query head of one row; its threads take
// every eighth chunk of two columns each, and their sums are added in order. It has room beside a block of
// `decide_beside`. Grid: (row, query head).

#define MERGE_PARTS 8
#define MERGE_PAIRS 64
#define MERGE_THREADS (MERGE_PARTS * MERGE_PAIRS)
#define MERGE_BATCH 1024  // chunks

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) sparse_merge(SparseParams p) {
    begin();
    __shared__ float weights[MERGE_BATCH];
    __shared__ float2 rest[MERGE_PARTS][MERGE_PAIRS];
    __shared__ float totals[MERGE_PARTS], warps[MERGE_THREADS / 32];
    const u32 thread = threadIdx.x, part = thread / MERGE_PAIRS, pair = thread % MERGE_PAIRS;
    const u32 n_heads = p.heads.n_kv_heads * p.heads.group, g = blockIdx.y % p.heads.group;
    const u32 number = blockIdx.x * p.heads.n_kv_heads + blockIdx.y / p.heads.group;
    const u32 first = p.tasks[number], n = p.tasks[number + 1] - first;
    keep_query(p, p.heads.rows[blockIdx.x], blockIdx.y, MERGE_THREADS);
    // For the next step.
    if (p.done && thread == 0 && blockIdx.x + blockIdx.y == 0) *p.done = 0;
    float largest = -INFINITE;
    for (u32 i = thread; i < n; i += MERGE_THREADS)
        largest = fmaxf(largest, p.sums[((u64)(first + i) * p.heads.group + g) * 2]);
    largest = warp_max(largest);
    if (thread % 32 == 0) warps[thread / 32] = largest;
    __syncthreads();
    largest = warps[0];
    for (u32 i = 1; i < MERGE_THREADS / 32; i++) largest = fmaxf(largest, warps[i]);
    const float base = largest == -INFINITE ? 0.0f : largest;
    for (u32 piece = 0; piece < WIDTH; piece += 2 * MERGE_PAIRS) {
        const u32 column = piece + pair * 2;
        float2 sum = make_float2(0.0f, 0.0f);
        float total = 0.0f;
        for (u32 start = 0; start < n; start += MERGE_BATCH) {
            const u32 end = min(n - start, (u32)MERGE_BATCH);
            __syncthreads();
            for (u32 i = thread; i < end; i += MERGE_THREADS)
                weights[i] = exp2_of(p.sums[((u64)(first + start + i) * p.heads.group + g) * 2] - base);
            __syncthreads();
#pragma unroll 8
            for (u32 i = part; i < end; i += MERGE_PARTS) {
                const u64 at = (u64)(first + start + i) * p.heads.group + g;
                const float2 x = column < WIDTH ? *(const float2*)(p.partials + at * WIDTH + column)
                                                : make_float2(0.0f, 0.0f);
                sum.x = __fmaf_rn(weights[i], x.x, sum.x), sum.y = __fmaf_rn(weights[i], x.y, sum.y);
                total = __fmaf_rn(weights[i], p.sums[at * 2 + 1], total);
            }
        }
        __syncthreads();
        rest[part][pair] = sum;
        if (pair == 0) totals[part] = total;
        __syncthreads();
        if (part > 0) continue;
        sum = make_float2(0.0f, 0.0f), total = 0.0f;
        for (u32 i = 0; i < MERGE_PARTS; i++)
            sum.x += rest[i][pair].x, sum.y += rest[i][pair].y, total += totals[i];
        const u64 row = p.heads.rows[blockIdx.x].row;
        const u64 target = (row * n_heads + blockIdx.y) * HEAD_DIM + column;
        const float x[2] = {sum.x * (1.0f / total), sum.y * (1.0f / total)};
        for (u32 i = 0; i < 2; i++)
            if (column + i < HEAD_DIM) p.out[target + i] = x[i], p.rounded[target + i] = (u16)bf16_of(x[i]);
    }
}

#else

// With f32: plain, exact, and not made to be fast. A warp takes one query head of one row. Grid: (row,
// query head).

extern "C" __global__ void __launch_bounds__(32) sparse_attend_f32(SparseParams p) {
    begin();
    __shared__ float q[HEAD_DIM];
    const u32 lane = threadIdx.x, head = blockIdx.y / p.heads.group;
    const SparseRow row = p.heads.rows[blockIdx.x];
    const HeadState state = *state_of(p.heads, row, head);
    const Seen seen = seen_by(row, state);
    keep_query(p, row, blockIdx.y, 32);
    for (u32 i = lane; i < HEAD_DIM; i += 32)
        q[i] = p.qkv[(u64)row.row * p.q_stride + blockIdx.y * HEAD_DIM + i];
    __syncwarp();
    float m = -INFINITE, l = 0.0f, o[(HEAD_DIM + 31) / 32];
    UNROLL
    for (int i = 0; i < (HEAD_DIM + 31) / 32; i++) o[i] = 0.0f;
    for (u32 i = 0; i < seen.n_pages; i++) {
        const SeenPage found = page_at(p, row, state, seen, head, i);
        const float* page = (const float*)found.page;
        float s = -INFINITE;
        if (lane < PAGE && found.tokens >> lane & 1) {
            s = 0.0f;
            for (u32 e = 0; e < HEAD_DIM; e++) s = __fmaf_rn(q[e], page[key_at(lane, e)], s);
            s *= p.scale;
        }
        const float next = fmaxf(m, warp_max(s)), base = next == -INFINITE ? 0.0f : next;
        const float down = exp2_of(m - base), weight = exp2_of(s - base);
        m = next;
        l = __fmaf_rn(l, down, warp_sum(weight));
        UNROLL
        for (int n = 0; n < (HEAD_DIM + 31) / 32; n++) o[n] *= down;
        for (u32 token = 0; token < PAGE; token++) {
            const float w = __shfl_sync(~0u, weight, token);
            if (!(found.tokens >> token & 1)) continue;
            UNROLL
            for (int n = 0; n < (HEAD_DIM + 31) / 32; n++)
                if (n * 32 + lane < HEAD_DIM)
                    o[n] = __fmaf_rn(w, page[value_at(token, n * 32 + lane)], o[n]);
        }
    }
    UNROLL
    for (int n = 0; n < (HEAD_DIM + 31) / 32; n++) {
        const u32 column = n * 32 + lane;
        if (column >= HEAD_DIM) continue;
        const u64 at = ((u64)row.row * p.heads.n_kv_heads * p.heads.group + blockIdx.y) * HEAD_DIM + column;
        const float x = o[n] * (1.0f / l);
        p.out[at] = x;
        p.rounded[at] = (u16)bf16_of(x);
    }
}

#endif
