// Attention of rows that are alone in their sequences, each chunk of keys computed apart.
//
// A warp takes one chunk of one KV head of one row at a time, and needs nobody: it brings its pages
// through a ring of its own, and no warp waits for another. There are as many warps as the device
// holds at once, each with a run of neighbouring tasks, so that pages of the next task are on their
// way while one ends. How many tasks there are is read from device memory, so that the grid does not
// depend on lengths. Reads each page once, and writes a partial result for each chunk.

struct Split {
    u32 row;  // of the batch
    u32 n_keys;
    u32 table_row;
    u32 partial;  // where the result of the row's first chunk goes
};
static_assert(sizeof(Split) == SPLIT_SIZE, "the host's Split differs");

#define CHUNK_PAGES (LARGE_CHUNK / PAGE)
static_assert(CHUNK_PAGES <= 32, "a lane for each page of a chunk");

// The chunks that a row sees.
struct Chunks {
    u32 first, end;
};

DEVICE Chunks chunks_of(u32 n_keys, u32 window) {
    return Chunks{chunk_of(first_key_of(n_keys, window)), n_keys > 0 ? chunk_of(n_keys - 1) + 1 : 0};
}

// Sets of lines of a KV head.
template <int R>
DEVICE u32 n_sets(const AttendParams& p) {
    return (p.group + 8 * R - 1) / (8 * R);
}

template <int R>
DEVICE u32 n_tasks(const AttendParams& p, const Split& split) {
    const Chunks chunks = chunks_of(split.n_keys, p.window);
    return (chunks.end - chunks.first) * p.n_kv_heads * n_sets<R>(p);
}

// A warp's way through its tasks, step after step. Tasks are ordered by row, KV head, set of lines and
// chunk.
struct Walk {
    Split split;
    u32 index;  // of the split
    u32 kv_head;
    u32 set;  // of lines
    u32 chunk, end_chunk;
    u32 n_left;  // tasks after this one
    u32 step, end_step;
};

DEVICE void begin_task(const AttendParams& p, Walk& walk) {
    const u32 start = first_key_of(walk.split.n_keys, p.window);
    walk.step = max(chunk_start(walk.chunk), start) / STEP;
    walk.end_step = (min(chunk_start(walk.chunk + 1), walk.split.n_keys) + STEP - 1) / STEP;
}

// Goes to the next task; false at the end.
template <int R>
DEVICE bool next_task(const AttendParams& p, Walk& walk) {
    if (walk.n_left == 0) return false;
    walk.n_left--;
    if (++walk.chunk == walk.end_chunk) {
        if (++walk.set == n_sets<R>(p)) {
            walk.set = 0;
            if (++walk.kv_head == p.n_kv_heads) {
                walk.kv_head = 0;
                walk.split = ((const Split*)p.tasks)[++walk.index];
            }
        }
        const Chunks chunks = chunks_of(walk.split.n_keys, p.window);
        walk.chunk = chunks.first, walk.end_chunk = chunks.end;
    }
    begin_task(p, walk);
    return true;
}

// Finds the warp's first task; false if it has none.
template <int R>
DEVICE bool find_first(const AttendParams& p, Walk& walk) {
    const Split* splits = (const Split*)p.tasks;
    const u32 lane = threadIdx.x % 32;
    // Neighbouring warps of a block are far from each other, so that few tasks meet many blocks.
    const u32 n_warps = gridDim.x * (blockDim.x / 32);
    const u32 own = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    u32 total = 0;
    for (u32 base = 0; base < p.n_splits; base += 32)
        total += __reduce_add_sync(
            ~0u, base + lane < p.n_splits ? n_tasks<R>(p, splits[base + lane]) : 0u);
    const u32 first = (u32)((u64)total * own / n_warps);
    const u32 end = (u32)((u64)total * (own + 1) / n_warps);
    if (first == end) return false;
    u32 before = 0;
    for (u32 base = 0;; base += 32) {
        Split split = {0, 0, 0, 0};
        if (base + lane < p.n_splits) split = splits[base + lane];
        const u32 n = n_tasks<R>(p, split);
        u32 upto = n;
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += other;
        }
        const u32 found = __ballot_sync(~0u, before + upto > first);
        if (found == 0) {
            before += __shfl_sync(~0u, upto, 31);
            continue;
        }
        const u32 holder = __ffs(found) - 1;
        const u32 within = first - before - __shfl_sync(~0u, upto - n, holder);
        walk.split.row = __shfl_sync(~0u, split.row, holder);
        walk.split.n_keys = __shfl_sync(~0u, split.n_keys, holder);
        walk.split.table_row = __shfl_sync(~0u, split.table_row, holder);
        walk.split.partial = __shfl_sync(~0u, split.partial, holder);
        walk.index = base + holder;
        const Chunks chunks = chunks_of(walk.split.n_keys, p.window);
        const u32 lines = within / (chunks.end - chunks.first);
        walk.kv_head = lines / n_sets<R>(p), walk.set = lines % n_sets<R>(p);
        walk.chunk = chunks.first + within % (chunks.end - chunks.first);
        walk.end_chunk = chunks.end;
        walk.n_left = end - first - 1;
        begin_task(p, walk);
        return true;
    }
}

// What brings the pages: it walks ahead of the computation.
struct Feed {
    Walk walk;
    bool is_done;
    u32 turn;
    // Of the task: its head's pages, those that are seen, its first page and the lane's page's slot.
    const u8* head;
    u32 seen_first, seen_end;
    u32 first_page;
    u32 slot;
};

DEVICE void find_slots(const AttendParams& p, Feed& feed) {
    const u32 n_keys = feed.walk.split.n_keys;
    feed.head = p.layer + feed.walk.kv_head * p.head_bytes;
    feed.seen_first = first_key_of(n_keys, p.window) / PAGE;
    feed.seen_end = (n_keys + PAGE - 1) / PAGE;
    feed.first_page = chunk_start(feed.walk.chunk) / PAGE;
    const u32 page = feed.first_page + threadIdx.x % 32;
    const u32* table = p.tables + (u64)feed.walk.split.table_row * p.table_len;
    const bool is_seen = page >= feed.seen_first && page < feed.seen_end;
    feed.slot = is_seen && threadIdx.x % 32 < CHUNK_PAGES ? table[page] : 0;
}

// Whether the step's pages were complete before this pass: the row's own page is written by it.
DEVICE bool is_old(const Feed& feed) {
    return !feed.is_done && (feed.walk.step + 1) * STEP_PAGES <= (feed.walk.split.n_keys - 1) / PAGE;
}

// One warp of `attend_split`: 8 R lines at a time, a ring of STAGES steps.
template <int R, int STAGES>
struct Splitter {
    static const int RING = STAGES * STAGE_BYTES;
    static const int BARRIERS = RING + Lines<R>::Q_BYTES;
    static const int WARP_BYTES = BARRIERS + 64;
    static_assert(STAGES <= 8, "a barrier for each stage");

    // Brings the pages of the next step; those that are not seen become zeros.
    DEVICE void bring(const AttendParams& p, Feed& feed, u32 ring) {
        if (feed.is_done) {
            copy_commit();
            return;
        }
        const u32 lane = threadIdx.x % 32, stage = feed.turn % STAGES;
        const u32 page = feed.walk.step * STEP_PAGES;
#if HAS_BULK
        const u32 ready = ring + BARRIERS + stage * 8;
        u32 n_bytes = 0;
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            if (page + i >= feed.seen_first && page + i < feed.seen_end) n_bytes += HEAD_PAGE_BYTES;
        if (lane == 0) barrier_expect(ready, n_bytes);
        if (p.prefetch > 0) {
            const u32 own = feed.first_page + lane, ahead = page + p.prefetch * STEP_PAGES;
            if (own >= ahead && own < ahead + STEP_PAGES && lane < CHUNK_PAGES &&
                own < feed.seen_end && own >= feed.seen_first)
                bulk_prefetch(feed.head + (u64)feed.slot * HEAD_PAGE_BYTES, HEAD_PAGE_BYTES);
        }
#endif
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++) {
            const bool inside = page + i >= feed.seen_first && page + i < feed.seen_end;
            const u32 slot = __shfl_sync(~0u, feed.slot, page + i - feed.first_page);
            const u8* source = feed.head + (u64)slot * HEAD_PAGE_BYTES;
            const u32 place = ring + stage * STAGE_BYTES + i * HEAD_PAGE_BYTES;
#if HAS_BULK
            if (inside) {
                if (lane == 0) bulk_copy(place, source, HEAD_PAGE_BYTES, ready);
                continue;
            }
            for (u32 at = lane * 16; at < HEAD_PAGE_BYTES; at += 512) store_zeros(place + at);
            bulk_fence();
#else
            for (u32 at = lane * 16; at < HEAD_PAGE_BYTES; at += 512)
                copy_async(place + at, source + at, inside ? 16 : 0);
#endif
        }
#if !HAS_BULK
        copy_commit();
#endif
        feed.turn++;
        if (++feed.walk.step < feed.walk.end_step) return;
        feed.is_done = !next_task<R>(p, feed.walk);
        if (!feed.is_done) find_slots(p, feed);
    }

    // Makes the lines those of the task.
    DEVICE void take_lines(const AttendParams& p, const Walk& walk, Lines<R>& lines, u32* operands) {
        const u32 g = threadIdx.x % 32 / 4, n_keys = walk.split.n_keys;
        lines.first_row = walk.split.row, lines.kv_head = walk.kv_head;
        lines.first = walk.set * 8 * R;
        lines.n = min(p.group - lines.first, 8u * R);
        lines.inside_start = first_key_of(n_keys, p.window), lines.inside_end = n_keys;
        UNROLL
        for (int r = 0; r < R; r++) {
            lines.start[r] = lines.inside_start;
            lines.end[r] = g + 8 * r < lines.n ? n_keys : 0;
        }
        // Nobody reads the queries before, and then these are there.
        __syncwarp();
        load_queries<R>(p, lines, operands);
        __syncwarp();
    }

    DEVICE void store_partial(const AttendParams& p, const Walk& walk, const Lines<R>& lines) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u64 partial = walk.split.partial + walk.chunk;
        UNROLL
        for (int r = 0; r < R; r++) {
            if (g + 8 * r >= lines.n) continue;
            const u64 at =
                (partial * p.n_kv_heads + lines.kv_head) * p.group + lines.first + g + 8 * r;
            if (t == 0)
                *(float2*)(p.sums + at * 2) = make_float2(lines.total[r].m, lines.total[r].l);
            UNROLL
            for (int n = 0; n < TILES; n++)
                *(float2*)(p.partials + at * WIDTH + n * 8 + t * 2) =
                    make_float2(lines.o[n][2 * r], lines.o[n][2 * r + 1]);
        }
    }

    DEVICE void run(const AttendParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        allow_next();
        u8* own = shared + threadIdx.x / 32 * WARP_BYTES;
        u32* operands = (u32*)(own + RING);
        const u32 ring = shared_address(own);
        Walk walk;
        // Rows and tables were there before the step began.
        if (!find_first<R>(p, walk)) {
            wait_for_previous();
            return;
        }
#if HAS_BULK
        if (threadIdx.x % 32 == 0)
            for (u32 i = 0; i < STAGES; i++) barrier_init(ring + BARRIERS + i * 8);
        __syncwarp();
#endif
        Feed feed;
        feed.walk = walk, feed.is_done = false, feed.turn = 0;
        find_slots(p, feed);
        // The kernels before this one in the same pass write only the pages that the rows end in.
        while (feed.turn < STAGES - 1 && is_old(feed)) bring(p, feed, ring);
        wait_for_previous();
        for (u32 i = feed.turn; i < STAGES - 1; i++) bring(p, feed, ring);
        Lines<R> lines;
        take_lines(p, walk, lines, operands);
        begin_chunk(lines);
        for (u32 turn = 0;; turn++) {
#if HAS_BULK
            barrier_wait(ring + BARRIERS + turn % STAGES * 8, turn / STAGES % 2);
#else
            copy_wait<STAGES - 2>();
#endif
            // Every lane's copies are there, and no lane reads the step before.
            __syncwarp();
            bring(p, feed, ring);
            attend_step<R>(own + turn % STAGES * STAGE_BYTES, operands, walk.step * STEP, lines);
            if (++walk.step < walk.end_step) continue;
            store_partial(p, walk, lines);
            begin_chunk(lines);
            const u32 index = walk.index, kv_head = walk.kv_head, set = walk.set;
            if (!next_task<R>(p, walk)) break;
            if (walk.index != index || walk.kv_head != kv_head || walk.set != set)
                take_lines(p, walk, lines, operands);
        }
    }
};

#define SPLIT(name, R, WARPS, STAGES, SHARED)                                                  \
    static_assert(WARPS * Splitter<R, STAGES>::WARP_BYTES == SHARED, "the host's memory");     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) name(AttendParams p) {         \
        Splitter<R, STAGES>::run(p);                                                           \
    }
SPLIT_ENTRIES

// Merges the chunks of the rows that were split, from left to right.
//
// Grid: (row that was split, query head and piece of `columns` columns). Chunks come in batches: the
// next one is on its way while one is added. The weights of a batch are worked out by all threads
// together, which leaves two operations to each link of the long chain of sums.

struct MergeParams {
    const float* partials;
    const float* sums;
    const Split* splits;
    float* out;
    u16* rounded;
    u32 n_kv_heads;
    u32 group;
    u32 window;
    u32 columns;  // of a block: a power of two from 32 to 128
};
static_assert(sizeof(MergeParams) == MERGE_PARAMS_SIZE, "the host's MergeParams differs");

#define MERGE_THREADS 128
#define BATCH_FLOATS 4096
#define BATCH_MAX (BATCH_FLOATS / 32)
static_assert(BATCH_MAX == MERGE_THREADS, "a thread works out the weights of a chunk");

// A piece of the chunks of one head of one row.
struct Piece {
    u64 first, stride;  // chunks, counted in lines
    u32 n;              // chunks
    u32 column, n_columns;
};

// Brings the results of a batch.
DEVICE void load_batch(const MergeParams& p, const Piece& piece, u32 start, u32 n, float* target) {
    const u32 shared = shared_address(target), quads = p.columns / 4;
    for (u32 i = threadIdx.x; i < n * quads; i += MERGE_THREADS) {
        const u32 chunk = i / quads, at = i % quads * 4;
        if (at >= piece.n_columns) continue;
        const u64 line = piece.first + (start + chunk) * piece.stride;
        copy_async(shared + (chunk * p.columns + at) * 4,
                   p.partials + line * WIDTH + piece.column + at, 16);
    }
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge(MergeParams p) {
    extern __shared__ __align__(128) float batches[];  // [2][BATCH_FLOATS]
    allow_next();
    __shared__ float before[BATCH_MAX], after[BATCH_MAX], lengths[BATCH_MAX];
    __shared__ float maxima[MERGE_THREADS / 32];
    const Split split = p.splits[blockIdx.x];
    const Chunks chunks = chunks_of(split.n_keys, p.window);
    const u32 n_heads = p.n_kv_heads * p.group, thread = threadIdx.x, lane = thread % 32;
    const u32 head = blockIdx.y % n_heads, batch = BATCH_FLOATS / p.columns;
    Piece piece;
    piece.stride = n_heads;
    piece.first = (u64)(split.partial + chunks.first) * n_heads + head;
    piece.n = chunks.end - chunks.first;
    piece.column = blockIdx.y / n_heads * p.columns;
    piece.n_columns = min(p.columns, WIDTH - piece.column);
    float m = -INFINITE, l = 0.0f, o = 0.0f;
    wait_for_previous();
    load_batch(p, piece, 0, min(piece.n, batch), batches);
    for (u32 start = 0; start < piece.n; start += batch) {
        const u32 n = min(piece.n - start, batch), next = start + batch;
        const u32 turn = start / batch % 2;
        if (next < piece.n)
            load_batch(p, piece, next, min(piece.n - next, batch), batches + (1 - turn) * BATCH_FLOATS);
        else
            copy_commit();
        float2 own = make_float2(-INFINITE, 0.0f);
        if (thread < n)
            own = *(const float2*)(p.sums + (piece.first + (start + thread) * piece.stride) * 2);
        // The maximum of everything up to this chunk, and of everything before it.
        float upto = own.x;
        for (u32 step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto = fmaxf(upto, other);
        }
        if (lane == 31) maxima[thread / 32] = upto;
        __syncthreads();
        float left = m;
        for (u32 i = 0; i < MERGE_THREADS / 32; i++) {
            if (i < thread / 32) left = fmaxf(left, maxima[i]);
            m = fmaxf(m, maxima[i]);
        }
        const float inside = __shfl_up_sync(~0u, upto, 1);
        const Weights w = weigh(lane == 0 ? left : fmaxf(left, inside), own.x);
        before[thread] = w.before;
        after[thread] = w.after;
        lengths[thread] = own.y;
        copy_wait<1>();
        __syncthreads();
        if (thread < piece.n_columns) {
            const float* source = batches + turn * BATCH_FLOATS + thread;
#pragma unroll 8
            for (u32 c = 0; c < n; c++) {
                o = __fmaf_rn(source[c * p.columns], after[c], __fmul_rn(o, before[c]));
                l = __fmaf_rn(lengths[c], after[c], __fmul_rn(l, before[c]));
            }
        }
        __syncthreads();
    }
    const u32 i = piece.column + thread;
    if (thread >= piece.n_columns || i >= HEAD_DIM) return;
    const u64 target = ((u64)split.row * n_heads + head) * HEAD_DIM + i;
    const float x = o * (1.0f / l * (1.0f / P_SCALE));
    p.out[target] = x;
    p.rounded[target] = (u16)bf16_of(x);
}
