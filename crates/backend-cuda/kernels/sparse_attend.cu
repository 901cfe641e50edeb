// Attention of single rows to what their heads see: the first places and the tail from the arena, and
// the working set between, in one list of pages:
//
//   [ pages of 0 .. n_first ][ pages of the working set ][ pages of cut .. kv_len )
//
// where those of the working set may have rows in eight bits (KEPT, sparse_set.cuh).
//
// A task is a chunk of pages of one head, a longer one if the heads of its row see many. A warp takes every n-th
// task, and needs nobody: its pages come through a ring of its own, the next ones while one is computed
// (sparse_page.cuh). `sparse_merge` brings the chunks of a head together. Chunks are counted from the list's
// beginning, so that a row has the same bits in any company. Reads each page once.
// Reference: backend-cpu/src/attend/picks.rs; conformance: picks_match, picks_rows_agree; tests/rows.rs.

#define SHORT_CHUNK 4  // pages
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
    u32 row_tasks;    // that the heads of a row should have at most, if chunks are not short then
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

// What a head sees, as a list of pages.
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

// One page of the list: where it is, how large, which of its tokens are seen, and beside those whether it is of the
// working set.
struct SeenPage {
    const u8* page;
    u32 n_bytes, mask;
};
#define IS_MEMBER (1u << 31)

DEVICE u32 tokens_between(u32 start, u32 end) {
    return start >= end ? 0 : ((1u << (end - start)) - 1) << start;
}

template <bool KEPT>
DEVICE SeenPage page_at(const SparseParams& p, const SparseRow& row, const HeadState& state,
                        const Seen& seen, u32 head, u32 i) {
    if (i >= seen.n_pages) return SeenPage{0, 0, 0};
    if (i - seen.first_pages < seen.member_pages) {
        i -= seen.first_pages;
        const u32 n_bytes = set_page_bytes(KEPT);
        const u8* page = row.pages + (u64)state.first * SET_UNIT + (u64)i * n_bytes;
        return SeenPage{page, n_bytes, tokens_between(0, min(seen.n_members - i * PAGE, (u32)PAGE)) | IS_MEMBER};
    }
    const bool is_first = i < seen.first_pages;
    if (!is_first) i += seen.cut / PAGE - seen.member_pages - seen.first_pages;
    const u32 start = is_first ? 0 : max(seen.cut, i * PAGE) - i * PAGE;
    const u32 end = (is_first ? seen.n_first : seen.kv_len) - i * PAGE;
    const u8* page = page_of(p.pages, head, row.table_row, i);
    return SeenPage{page, HEAD_PAGE_BYTES, tokens_between(start, min(end, (u32)PAGE))};
}

#if KV != KV_F32

// Pages of a task, if the heads of its row see so many together: of many pages fewer chunks are to be
// brought together, and heads that see much have no longer tasks than others. What other rows see does not
// matter, so that a row has the same bits in any company.
DEVICE u32 chunk_of(const SparseParams& p, u32 row_pages) {
    return max((row_pages + p.row_tasks - 1) / p.row_tasks, (u32)SHORT_CHUNK);
}

// What tasks of a batch are: the first of each row and head, and the pages of one, of each row.
struct Tasks {
    u32 first[MAX_NUMBERS + 1];
    u32 chunk[MAX_NUMBERS];
};

// Works out the first task of each head, and how many there are.
DEVICE void count_tasks(const SparseParams& p, Tasks& all) {
    const u32 n_heads = p.heads.n_kv_heads, n = p.heads.n_rows * n_heads;
    u32* tasks = all.first;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const SparseRow row = p.heads.rows[i / n_heads];
        tasks[i + 1] = seen_by(row, *state_of(p.heads, row, i % n_heads)).n_pages;
    }
    __syncthreads();
    for (u32 row = threadIdx.x; row < p.heads.n_rows; row += blockDim.x) {
        u32 pages = 0;
        for (u32 head = 0; head < n_heads; head++) pages += tasks[row * n_heads + head + 1];
        all.chunk[row] = chunk_of(p, pages);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < n; i += blockDim.x)
        tasks[i + 1] = (tasks[i + 1] + all.chunk[i / n_heads] - 1) / all.chunk[i / n_heads];
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
    u32 number, head;    // of its row and head
    u32 index;
    u32 first, n_pages;  // in the list
    SparseRow row;
    HeadState state;
    Seen seen;
};

DEVICE bool find_task(const SparseParams& p, const Tasks& all, u32 index, SparseTask& task) {
    const u32 n = p.heads.n_rows * p.heads.n_kv_heads;
    const u32* tasks = all.first;
    if (index >= tasks[n]) return false;
    // The last head whose first task is not behind this one; those that see nothing have no tasks.
    u32 low = 0, high = n;
    while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if (tasks[middle] <= index) low = middle;
        else high = middle;
    }
    task.index = index, task.number = low, task.head = low % p.heads.n_kv_heads;
    const u32 chunk = all.chunk[low / p.heads.n_kv_heads];
    task.first = (index - tasks[low]) * chunk, task.n_pages = chunk;
    task.row = p.heads.rows[low / p.heads.n_kv_heads];
    task.state = *state_of(p.heads, task.row, task.head);
    task.seen = seen_by(task.row, task.state);
    return true;
}

// Whether a page of the list is of the working set.
DEVICE bool is_of_set(const SparseTask& task, u32 page) {
    return page - task.seen.first_pages < task.seen.member_pages;
}

template <int R, bool KEPT, int STAGES>
struct Sparse {
    static const int RING = STAGES * HEAD_PAGE_BYTES;
    static const int BARRIERS = RING + Group<R>::Q_BYTES;
    static const int MASKS = BARRIERS + STAGES * 8;
    static const int WARP_BYTES = BARRIERS + 128;
    static_assert(set_page_bytes(KEPT) <= HEAD_PAGE_BYTES, "pages of sets fit where others do");
    static_assert(STAGES <= SHORT_CHUNK, "what is brought is one task ahead at most");
    static_assert(STAGES * 12 <= 128, "there is room for barriers and masks");

    // Brings a page, which a lane has found; the others follow it.
    DEVICE void bring(const SeenPage& found, u32 lane_of, u8* own, u32 stage) {
        const u32 lane = threadIdx.x % 32, ring = shared_address(own), target = ring + stage * HEAD_PAGE_BYTES;
        if (lane == lane_of) ((u32*)(own + MASKS))[stage] = found.mask;
#if HAS_BULK
        if (lane != lane_of) return;
        const u32 ready = ring + BARRIERS + stage * 8;
        barrier_expect(ready, found.n_bytes);
        if (found.n_bytes) bulk_copy(target, found.page, found.n_bytes, ready);
#else
        const u8* page = (const u8*)__shfl_sync(~0u, (u64)found.page, lane_of);
        const u32 n_bytes = __shfl_sync(~0u, found.n_bytes, lane_of);
        for (u32 at = lane * 16; at < n_bytes; at += 512) copy_async(target + at, page + at, 16);
        copy_commit();
#endif
    }

    // Computes a page that has come.
    DEVICE void compute(const u8* page, u32 mask, const uint2* queries, Group<R>& group) {
        float s[R][4];
#if KEEPS_CODES
        if (KEPT && mask & IS_MEMBER) {
            score_page<R>(SetKeys{shared_address(page)}, queries, s);
            weigh_page(mask, set_scales(page), group, s);
            const SetValues values(page, mask);
            if (values.have_rest) mend<R>(page, s);
            return mix_page(values, s, group);
        }
#endif
        score_page<R>(PageKeys{shared_address(page)}, queries, s);
        weigh_page(mask, make_float2(1.0f, 1.0f), group, s);
        mix_page(PageValues{page + HALF_PAGE_BYTES}, s, group);
    }

    DEVICE void run(const SparseParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        __shared__ Tasks tasks;
        allow_next();
        // Queries, the last page and room for results are not there before the kernel before has ended; what was
        // decided on a branch may be.
        const bool is_early = is_decided(p);
        if (!is_early) wait_for_previous();
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u8* own = shared + warp * WARP_BYTES;
        uint2* queries = (uint2*)(own + RING);
#if HAS_BULK
        if (lane == 0)
            for (u32 i = 0; i < STAGES; i++) barrier_init(shared_address(own) + BARRIERS + i * 8);
        __syncwarp();
#endif
        count_tasks(p, tasks);
        // Neighbouring warps of a block are far from each other, so that few tasks meet many blocks.
        const u32 n_warps = gridDim.x * (blockDim.x / 32);
        SparseTask ahead, task;
        u32 n_brought = 0, next_page = 0;
        bool is_ahead = find_task(p, tasks, warp * gridDim.x + blockIdx.x, ahead);
        // Pages of the task that are next, one in each lane: each look waits for others. What is not of working sets
        // may still change before the kernel before has ended.
        SeenPage found = {0, 0, 0};
        const auto look = [&](bool is_early) {
            const u32 i = ahead.first + next_page / 32 * 32 + lane;
            if (!is_early || is_of_set(ahead, i))
                found = page_at<KEPT>(p, ahead.row, ahead.state, ahead.seen, ahead.head, i);
        };
        const auto bring_next = [&]() {
            if (!is_ahead) return copy_commit();
            if (next_page % 32 == 0 && next_page > 0) look(false);
            bring(found, next_page % 32, own, n_brought++ % STAGES);
            if (++next_page < ahead.n_pages) return;
            next_page = 0;
            is_ahead = find_task(p, tasks, ahead.index + n_warps, ahead);
            if (is_ahead) look(false);
        };
        u32 n_early = 0;
        if (is_early && is_ahead) {
            look(true);
            while (n_early < STAGES - 1 && is_of_set(ahead, ahead.first + next_page)) bring_next(), n_early++;
        }
        if (is_early) wait_for_previous();
        if (is_ahead) look(false);
        for (; n_early < STAGES - 1; n_early++) bring_next();
        if (blockIdx.x == 0)
            for (u32 i = threadIdx.x; i <= p.heads.n_rows * p.heads.n_kv_heads; i += blockDim.x)
                p.tasks[i] = tasks.first[i];
        Group<R> group;
        u32 number = ~0u, turn = 0;
        // Of a task that begins, not all pages are on their way.
        bool is_here = is_ahead;
        while (is_here) {
            task = ahead;
            if (task.number != number) {
                const float* first = p.qkv + (u64)task.row.row * p.q_stride + task.head * p.heads.group * HEAD_DIM;
                __syncwarp();
                load_group(first, p.heads.group, p.scale, group, queries);
                number = task.number;
            }
            begin_group(group);
            for (u32 i = 0; i < task.n_pages; i++, turn++) {
                const u32 stage = turn % STAGES;
                // The stage that comes next was read in the turn before.
                __syncwarp();
                bring_next();
#if HAS_BULK
                barrier_wait(shared_address(own) + BARRIERS + stage * 8, turn / STAGES % 2);
#else
                copy_wait<STAGES - 1>();
#endif
                __syncwarp();
                const u32 mask = ((const u32*)(own + MASKS))[stage];
                if (mask & 0xFFFF) compute(own + stage * HEAD_PAGE_BYTES, mask, queries, group);
            }
            const u64 at = (u64)task.index * p.heads.group;
            store_group(group, p.heads.group, p.partials + at * WIDTH, p.sums + at * 2);
            is_here = is_ahead;
        }
    }
};

// With so many REGISTERS the warps fit beside a block of `decide_beside`.
#define SPARSE(name, R, KEPT, STAGES, WARPS, SHARED, REGISTERS)                 \
    static_assert(WARPS * Sparse<R, KEPT, STAGES>::WARP_BYTES == SHARED,        \
                  "the host's memory differs");                                 \
    extern "C" __global__ void __maxnreg__(REGISTERS) name(SparseParams p) {    \
        Sparse<R, KEPT, STAGES>::run(p);                                        \
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
    // A thread's own, of few chunks: they are read once.
    const bool are_few = n <= MERGE_BATCH;
    for (u32 i = thread; i < n; i += MERGE_THREADS) {
        const float m = p.sums[((u64)(first + i) * p.heads.group + g) * 2];
        if (are_few) weights[i] = m;
        largest = fmaxf(largest, m);
    }
    largest = warp_max(largest);
    if (thread % 32 == 0) warps[thread / 32] = largest;
    __syncthreads();
    largest = warps[0];
    for (u32 i = 1; i < MERGE_THREADS / 32; i++) largest = fmaxf(largest, warps[i]);
    const float base = largest == -INFINITE ? 0.0f : largest;
    for (u32 i = thread; are_few && i < n; i += MERGE_THREADS) weights[i] = exp2_of(weights[i] - base);
    for (u32 piece = 0; piece < WIDTH; piece += 2 * MERGE_PAIRS) {
        const u32 column = piece + pair * 2;
        float2 sum = make_float2(0.0f, 0.0f);
        float total = 0.0f;
        for (u32 start = 0; start < n; start += MERGE_BATCH) {
            const u32 end = min(n - start, (u32)MERGE_BATCH);
            __syncthreads();
            for (u32 i = thread; !are_few && i < end; i += MERGE_THREADS)
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
        const SeenPage found = page_at<false>(p, row, state, seen, head, i);
        const float* page = (const float*)found.page;
        float s = -INFINITE;
        if (lane < PAGE && found.mask >> lane & 1) {
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
            if (!(found.mask >> token & 1)) continue;
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
