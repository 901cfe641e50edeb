// Attention of rows that are alone in their sequences, each chunk of keys computed apart.
//
// A warp takes one chunk of one KV head of one row at a time, and needs nobody: it brings its pages
// through a ring of its own, keys and values in turn, and no warp waits for another. There are as many
// warps as the device holds at once. Each has one task to begin with and then takes the next that
// nobody has; large chunks come first, so that all end together. How many tasks there are is read from
// device memory, so that the grid does not depend on lengths. Reads each page once, and writes a
// partial result for each chunk.
//
// Where nothing else has, splits also do what rope.cu does: they rotate queries when they load them, and
// the warp whose chunk ends with the row's own key puts that key and its value into the page, and into
// the copy of the page that it has.

struct Split {
    u32 row;  // of the batch
    u32 n_keys;
    u32 table_row;
    u32 partial;  // where the result of the row's first chunk goes
};
static_assert(sizeof(Split) == SPLIT_SIZE, "the host's Split differs");

// One chunk of a split: a task for each set of lines of each KV head.
struct Part {
    u32 row_chunk;  // row of the batch, chunk << 16
    u32 n_keys;
    u32 table_row;
    u32 partial;  // where its result goes
};
static_assert(sizeof(Part) == PART_SIZE, "the host's Part differs");

#define CHUNK_PAGES (LARGE_CHUNK / PAGE)
#define QUEUE 4  // tasks whose pages may be on their way
#define HALF_PAGE (HEAD_PAGE_BYTES / 2)
#define HALF_BYTES (STEP_PAGES * HALF_PAGE)  // keys, or values, of a step
static_assert(CHUNK_PAGES <= 32, "a lane for each page of a chunk");

// A task: which part, and which lines of it. Lines are counted KV head by KV head.
struct Work {
    Part part;
    u32 lines;  // none if it is not below their number

    DEVICE u32 chunk(const Work& work) { return work.part.row_chunk >> 16; }

    // Its steps. Chunks that lie before the window have none.
    DEVICE u32 first_step(const AttendParams& p, const Work& work) {
        const u32 start = first_key_of(work.part.n_keys, p.window);
        return max(chunk_start(p.cuts, chunk(work)), start) / STEP;
    }
    DEVICE u32 end_step(const AttendParams& p, const Work& work) {
        return (min(chunk_start(p.cuts, chunk(work) + 1), work.part.n_keys) + STEP - 1) / STEP;
    }
};

// The slot of a page of a task's row.
DEVICE u32 slot_at(const AttendParams& p, const Work& work, u32 page) {
    const u64 place = (u64)work.part.table_row * p.table_len + page;
    return p.is_contiguous ? (u32)place : p.tables[place];
}

// Sets of lines, of all KV heads.
template <int R>
DEVICE u32 n_sets(const AttendParams& p) {
    return p.n_kv_heads * ((p.group + 8 * R - 1) / (8 * R));
}

#define IS_NEAR (1u << 31)  // a frame instead of a slot

// What brings the pages: it is ahead of the computation. The task after the one that is brought is
// looked up little by little, because each look waits for the one before it.
template <int R>
struct Feed {
    Work work;
    bool is_done;
    bool is_values;  // whether values come next, or keys
    u32 step, end_step;
    u32 stage;    // of the ring, where the next half of a step goes
    u32 n_begun;  // tasks
    // Of the task: its head's pages, those that are seen, its first page and the lane's page's slot.
    const u8* head;
#if ROWS
    const u8* near_head;
#endif
    u32 seen_first, seen_end;
    u32 first_page;
    u32 slot;
    u32 n_works;  // of all warps
    // The next task: how much of it is known, and that.
    u32 known;
    u32 index;
    Work next;
    u32 next_slot;

    // Looks at a bit more of the next task. Where every warp has one at most, there is none.
    DEVICE void look(const AttendParams& p, Feed& feed) {
        const u32 lane = threadIdx.x % 32, n_warps = gridDim.x * (blockDim.x / 32);
        if (feed.n_works <= n_warps) {
            feed.next.lines = ~0u, feed.known = 3;
            return;
        }
        if (feed.known == 0) {
            if (lane == 0) feed.index = atomicAdd((u32*)p.n_tasks + 1, 1u);
        } else if (feed.known == 1) {
            load_work(p, __shfl_sync(~0u, feed.index, 0) + n_warps, feed);
        } else if (feed.known == 2) {
            feed.next_slot = slot_of(p, feed.next);
        }
        feed.known++;
    }

    DEVICE void load_work(const AttendParams& p, u32 index, Feed& feed) {
        feed.next.lines = index < feed.n_works ? index % n_sets<R>(p) : ~0u;
        if (feed.next.lines != ~0u)
            feed.next.part = ((const Part*)p.tasks)[index / n_sets<R>(p)];
    }

    // The slot of the lane's page of a task's chunk, or its frame with the highest bit.
    DEVICE u32 slot_of(const AttendParams& p, const Work& work) {
        if (work.lines == ~0u) return 0;
        const u32 lane = threadIdx.x % 32, n_keys = work.part.n_keys;
        const u32 page = chunk_start(p.cuts, Work::chunk(work)) / PAGE + lane;
        const bool is_seen = page >= first_key_of(n_keys, p.window) / PAGE &&
                             page < (n_keys + PAGE - 1) / PAGE && lane < CHUNK_PAGES;
        if (!is_seen) return 0;
        const u32 slot = slot_at(p, work, page);
        const u32 frame = frame_of(p.near, slot);
        return frame == NOT_NEAR ? slot : IS_NEAR | frame;
    }

    // Where a page of the task's head is.
    DEVICE const u8* page_at(const Feed& feed, u32 slot) {
#if ROWS
        if (slot & IS_NEAR) return feed.near_head + (u64)(slot & ~IS_NEAR) * HEAD_PAGE_BYTES;
#endif
        return feed.head + (u64)slot * HEAD_PAGE_BYTES;
    }

    // Begins the next task that has steps, and tells the computation.
    DEVICE void begin_next(const AttendParams& p, Feed& feed, Work* queue) {
        for (;;) {
            while (feed.known < 3) look(p, feed);
            feed.work = feed.next, feed.slot = feed.next_slot;
            feed.known = 0;
            feed.is_done = feed.work.lines == ~0u;
            feed.step = feed.is_done ? 0 : Work::first_step(p, feed.work);
            feed.end_step = feed.is_done ? 0 : Work::end_step(p, feed.work);
            if (feed.is_done || feed.step < feed.end_step) break;
        }
        if (threadIdx.x % 32 == 0) queue[feed.n_begun % QUEUE] = feed.work;
        feed.n_begun++;
        if (feed.is_done) return;
        const u32 n_keys = feed.work.part.n_keys, sets = (p.group + 8 * R - 1) / (8 * R);
        feed.head = p.layer + feed.work.lines / sets * p.head_bytes;
#if ROWS
        feed.near_head = near_page(p.near, feed.work.lines / sets, 0);
#endif
        feed.seen_first = first_key_of(n_keys, p.window) / PAGE;
        feed.seen_end = (n_keys + PAGE - 1) / PAGE;
        feed.first_page = chunk_start(p.cuts, Work::chunk(feed.work)) / PAGE;
    }
};

// The key and the value of a row, which are not in their page yet; a lane has elements lane, lane + 32, ...
struct Fresh {
    static const int N = WIDTH / 32;
    bool is_here, is_written;  // whether the task's chunk ends with them, and whether it writes the page
    u32 slot;
    float key[N], value[N];
    float2 angles[N];

    // Asks for them; nothing waits for the answer yet. Codes need all registers, and ask when they are put.
    DEVICE void fetch(const AttendParams& p, const Work& work, u32 sets, Fresh& fresh) {
        const u32 n_keys = work.part.n_keys;
        fresh.is_here =
            CAN_ROTATE && p.angles && chunk_start(p.cuts, Work::chunk(work) + 1) >= n_keys;
        if (!fresh.is_here) return;
        fresh.is_written = work.lines % sets == 0;
        fresh.slot = slot_at(p, work, (n_keys - 1) / PAGE);
        if (!CODED) load(p, work, sets, fresh);
    }

    DEVICE void load(const AttendParams& p, const Work& work, u32 sets, Fresh& fresh) {
        const u32 lane = threadIdx.x % 32;
        const u64 row = work.part.row_chunk & 0xFFFF;
        const u32 head = p.n_kv_heads * p.group + work.lines / sets;
        const float* key = p.qkv + row * p.q_stride + head * HEAD_DIM;
        const float2* angles = (const float2*)p.angles + row * (HEAD_DIM / 2);
        UNROLL
        for (int i = 0; i < N; i++) {
            const u32 at = lane + 32 * i;
            fresh.key[i] = key[at], fresh.value[i] = key[p.n_kv_heads * HEAD_DIM + at];
            fresh.angles[i] = angles[p.is_halves ? at % (HEAD_DIM / 2) : at / 2];
        }
    }

    DEVICE float key_at_lane(const AttendParams& p, const Fresh& fresh, int i) {
        const float x = fresh.key[i], near = __shfl_xor_sync(~0u, x, 1);
        const float y = p.is_halves ? fresh.key[(i + N / 2) % N] : near;
        const bool is_first = p.is_halves ? i < N / 2 : threadIdx.x % 2 == 0;
        return is_first ? turned_first(x, y, fresh.angles[i])
                        : turned_second(y, x, fresh.angles[i]);
    }

    // Puts keys, or values, into half a page: into the warp's copy, and where it came from.
    DEVICE void put(const AttendParams& p, const Work& work, u32 sets, Fresh& fresh, bool is_values,
                    u8* stage) {
        if (CODED) load(p, work, sets, fresh);
        const u32 place = work.part.n_keys - 1, token = place % PAGE;
        u8* page = (u8*)p.layer + work.lines / sets * p.head_bytes +
                   (u64)fresh.slot * HEAD_PAGE_BYTES + (is_values ? HALF_PAGE : 0);
        u8* copy = stage + place / PAGE % STEP_PAGES * HALF_PAGE;
        float own[N];
        UNROLL
        for (int i = 0; i < N; i++)
            own[i] = is_values ? fresh.value[i] : key_at_lane(p, fresh, i);
#if CODED
        float largest = 0.0f;
        UNROLL
        for (int i = 0; i < N; i++) largest = fmaxf(largest, fabsf(own[i] = finite(own[i])));
        const float2 scale = code_scale(warp_max(largest));
        if (threadIdx.x % 32 == 0) {
            *scale_of(copy, token) = scale.x;
            if (fresh.is_written) *scale_of(page, token) = scale.x;
        }
#endif
        UNROLL
        for (int i = 0; i < N; i++) {
            const u32 column = threadIdx.x % 32 + 32 * i;
#if CODED
            const Element x = code_of(own[i] * scale.y);
#else
            const Element x = is_values ? value_element(own[i]) : key_element(own[i]);
#endif
            const u32 at = is_values ? value_at(token, column) - VALUES_AT : key_at(token, column);
            ((Element*)copy)[at] = x;
            if (fresh.is_written) ((Element*)page)[at] = x;
        }
#if HAS_BULK
        bulk_fence();
#endif
        __syncwarp();
    }
};

// Queries are in registers where there is room for them.
#define OWNS_QUERIES(R) (R == 1 && PARTS == 1 && WIDTH <= 128 && !CODED)
template <bool IS_OWN>
struct SplitQueries {
    typedef SharedQueries Type;
};
template <>
struct SplitQueries<true> {
    typedef OwnQueries<KT * 2> Type;
};

// One warp of a split: 8 R lines at a time, a ring of STAGES halves of steps.
template <int R, int STAGES>
struct Splitter {
    static const int RING = STAGES * HALF_BYTES;
    static const int QUEUE_AT = RING + (OWNS_QUERIES(R) ? 0 : Lines<R>::Q_BYTES);
    static const int BARRIERS = QUEUE_AT + QUEUE * 32;
    static const int WARP_BYTES = BARRIERS + 64;
    static_assert(STAGES <= 8 && sizeof(Work) <= 32, "room for barriers and tasks");
    static_assert(STAGES / 2 + 2 <= QUEUE, "no more tasks on their way than the queue holds");

    // Brings keys or values of the next step; pages that are not seen become zeros.
    DEVICE void bring(const AttendParams& p, Feed<R>& feed, u8* own, u32 ring) {
        if (feed.is_done) {
            copy_commit();
            return;
        }
        const u32 lane = threadIdx.x % 32, page = feed.step * STEP_PAGES;
        const u32 target = ring + feed.stage * HALF_BYTES, ready = ring + BARRIERS + feed.stage * 8;
        const u32 half = feed.is_values ? HALF_PAGE : 0;
        u32 slots[STEP_PAGES];
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            slots[i] = __shfl_sync(~0u, feed.slot, page + i - feed.first_page);
        if (page >= feed.seen_first && page + STEP_PAGES <= feed.seen_end)
            bring_all(feed, half, slots, target, ready);
        else
            bring_some(feed, half, slots, target, ready);
#if HAS_BULK
        if (p.prefetch > 0 && !feed.is_values) {
            const u32 page_of_lane = feed.first_page + lane, ahead = page + p.prefetch * STEP_PAGES;
            if (page_of_lane >= ahead && page_of_lane < ahead + STEP_PAGES && lane < CHUNK_PAGES &&
                page_of_lane < feed.seen_end && page_of_lane >= feed.seen_first)
                bulk_prefetch(Feed<R>::page_at(feed, feed.slot), HEAD_PAGE_BYTES);
        }
#else
        copy_commit();
#endif
        feed.stage = feed.stage == STAGES - 1 ? 0 : feed.stage + 1;
        feed.is_values = !feed.is_values;
        if (!feed.is_values && ++feed.step == feed.end_step)
            Feed<R>::begin_next(p, feed, (Work*)(own + QUEUE_AT));
        else if (feed.known < 3)
            Feed<R>::look(p, feed);
    }

    // The same into the half that all lanes have read.
    DEVICE void bring_next(const AttendParams& p, Feed<R>& feed, u8* own, u32 ring) {
        __syncwarp();
        bring(p, feed, own, ring);
    }

    // All pages of a step are seen.
    DEVICE void bring_all(const Feed<R>& feed, u32 half, const u32 (&slots)[STEP_PAGES], u32 target,
                          u32 ready) {
        const u32 lane = threadIdx.x % 32;
#if HAS_BULK
        if (lane != 0) return;
        barrier_expect(ready, HALF_BYTES);
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            bulk_copy_once(target + i * HALF_PAGE, Feed<R>::page_at(feed, slots[i]) + half, HALF_PAGE,
                           ready);
#else
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            for (u32 at = lane * 16; at < HALF_PAGE; at += 512)
                copy_async(target + i * HALF_PAGE + at,
                           Feed<R>::page_at(feed, slots[i]) + half + at, 16);
#endif
    }

    // Some pages of a step are not seen.
    DEVICE void bring_some(const Feed<R>& feed, u32 half, const u32 (&slots)[STEP_PAGES],
                           u32 target, u32 ready) {
        const u32 lane = threadIdx.x % 32, page = feed.step * STEP_PAGES;
        u32 n_bytes = 0;
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            if (page + i >= feed.seen_first && page + i < feed.seen_end) n_bytes += HALF_PAGE;
#if HAS_BULK
        if (lane == 0) barrier_expect(ready, n_bytes);
#endif
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++) {
            const bool is_seen = page + i >= feed.seen_first && page + i < feed.seen_end;
            const u8* from = Feed<R>::page_at(feed, slots[i]) + half;
            const u32 to = target + i * HALF_PAGE;
#if HAS_BULK
            if (is_seen && lane == 0) bulk_copy_once(to, from, HALF_PAGE, ready);
            if (is_seen) continue;
            for (u32 at = lane * 16; at < HALF_PAGE; at += 512) store_zeros(to + at);
            bulk_fence();
#else
            for (u32 at = lane * 16; at < HALF_PAGE; at += 512)
                copy_async(to + at, from + at, is_seen ? 16 : 0);
#endif
        }
    }

    // Where the computation is in the ring.
    struct Place {
        u32 stage, phase;
    };

    // Waits for half a step, and gives its place.
    DEVICE u8* await(u8* own, u32 ring, const Place& place) {
#if HAS_BULK
        barrier_wait(ring + BARRIERS + place.stage * 8, place.phase);
#else
        copy_wait<STAGES - 1>();
#endif
        __syncwarp();
        return own + place.stage * HALF_BYTES;
    }

    DEVICE void go_on(Place& place) {
        place.phase ^= place.stage == STAGES - 1;
        place.stage = place.stage == STAGES - 1 ? 0 : place.stage + 1;
    }

    // Makes the lines those of a task.
    template <typename Queries>
    DEVICE void take_lines(const AttendParams& p, const Work& work, Lines<R>& lines, Queries& queries) {
        const u32 g = threadIdx.x % 32 / 4, n_keys = work.part.n_keys;
        const u32 sets = (p.group + 8 * R - 1) / (8 * R);
        lines.first_row = work.part.row_chunk & 0xFFFF, lines.kv_head = work.lines / sets;
        lines.first = work.lines % sets * 8 * R;
        lines.n = min(p.group - lines.first, 8u * R);
        lines.inside_start = first_key_of(n_keys, p.window), lines.inside_end = n_keys;
        UNROLL
        for (int r = 0; r < R; r++) {
            lines.start[r] = lines.inside_start;
            lines.end[r] = g + 8 * r < lines.n ? n_keys : 0;
        }
        // Nobody reads the queries before, and then these are there.
        __syncwarp();
        load_queries<R, true>(p, lines, queries);
        __syncwarp();
    }

    DEVICE void store_partial(const AttendParams& p, u64 partial, const Lines<R>& lines) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL
        for (int r = 0; r < R; r++) {
            if (g + 8 * r >= lines.n) continue;
            const u64 at =
                (partial * p.n_kv_heads + lines.kv_head) * p.group + lines.first + g + 8 * r;
            if (t == 0)
                *(float2*)(p.sums + at * 2) = make_float2(lines.total[r].m, lines.total[r].l);
            UNROLL
            for (int n = 0; n < TILES; n++)
                store_kept(p.partials + at * WIDTH + n * 8 + t * 2, lines.o[n][2 * r],
                           lines.o[n][2 * r + 1]);
        }
    }

    DEVICE void run(const AttendParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        allow_next();
        u8* own = shared + threadIdx.x / 32 * WARP_BYTES;
        const Work* queue = (const Work*)(own + QUEUE_AT);
        const u32 ring = shared_address(own);
#if HAS_BULK
        if (threadIdx.x % 32 == 0)
            for (u32 i = 0; i < STAGES; i++) barrier_init(ring + BARRIERS + i * 8);
        __syncwarp();
#endif
        // Tasks and tables were there before the step began. Neighbouring warps of a block are far
        // from each other, so that few tasks meet many blocks.
        Feed<R> feed;
        feed.is_done = feed.is_values = false, feed.stage = 0, feed.n_begun = 0;
        const u32 first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
        // There is room for as many as there are warps: this need not wait for their number.
        feed.next.part = ((const Part*)p.tasks)[first / n_sets<R>(p)];
        feed.n_works = *p.n_tasks * n_sets<R>(p);
        feed.next.lines = first < feed.n_works ? first % n_sets<R>(p) : ~0u;
        feed.next_slot = Feed<R>::slot_of(p, feed.next);
        // The kernels before this one in the same pass write only the pages that the rows end in, if
        // this one does not: others are brought before those have ended. Which task comes next is known
        // afterwards.
        bool is_early = false;
        if (feed.next.lines != ~0u) {
            const u32 end = Work::first_step(p, feed.next) + (STAGES + 1) / 2;
            is_early = end < Work::end_step(p, feed.next) + STAGES % 2 &&
                       (p.angles || end * STEP_PAGES <= (feed.next.part.n_keys - 1) / PAGE);
        }
        if (!is_early) wait_for_previous();
        feed.known = 3;
        Feed<R>::begin_next(p, feed, (Work*)queue);
        if (is_early) feed.known = 3;
        for (u32 i = 0; i < STAGES; i++) bring(p, feed, own, ring);
        if (is_early) {
            wait_for_previous();
            feed.known = 0;
        }
        Lines<R> lines;
        typename SplitQueries<OWNS_QUERIES(R)>::Type queries = {(u32*)(own + RING)};
        Place place = {0, 0};
        u32 n_done = 0, last = ~0u;
        for (;;) {
            __syncwarp();
            const Work work = queue[n_done % QUEUE];
            n_done++;
            if (work.lines == ~0u) break;
            // Tasks that follow each other often have the same lines of the same row.
            const u32 same = (work.part.row_chunk & 0xFFFF) << 16 | work.lines;
            const u32 sets = (p.group + 8 * R - 1) / (8 * R);
            Fresh fresh;
            Fresh::fetch(p, work, sets, fresh);
            if (same != last) take_lines(p, work, lines, queries);
            last = same;
            begin_chunk(lines);
            const u32 end_step = Work::end_step(p, work);
            for (u32 step = Work::first_step(p, work); step < end_step; step++) {
                float s[KEY_TILES][2 * R], down[R];
                u8* keys = await(own, ring, place);
                go_on(place);
                const bool is_fresh = fresh.is_here && step + 1 == end_step;
                if (is_fresh) Fresh::put(p, work, sets, fresh, false, keys);
                score<R, HALF_PAGE>(keys, queries, s);
#if CODED
                scale_scores<R, HALF_PAGE>(keys, s);
#endif
                bring_next(p, feed, own, ring);
                soften<R>(step * STEP, lines, s, down);
                u8* values = await(own, ring, place);
                go_on(place);
                if (is_fresh) Fresh::put(p, work, sets, fresh, true, values);
#if CODED
                weigh_values<R, HALF_PAGE>(values, s, down, lines.unit);
#endif
                mix_values<R, HALF_PAGE>(values, s, down, lines.o);
                bring_next(p, feed, own, ring);
            }
#if CODED
            end_chunk(lines);
#endif
            store_partial(p, work.part.partial, lines);
        }
    }
};

// Registers of a thread. A quarter of a multiprocessor has 512 for each lane, of which a warp of `merge`
// wants MERGE_REGISTERS: it then is there when this kernel ends.
#define MERGE_REGISTERS 80
#define SPLIT_ROOM(WARPS) ((512 - MERGE_REGISTERS) / ((WARPS + 3) / 4) / 8 * 8)
#define SPLIT_REGISTERS(WARPS) (SPLIT_ROOM(WARPS) < 255 ? SPLIT_ROOM(WARPS) : 255)
#define SPLIT(name, R, WARPS, STAGES, SHARED)                                                  \
    static_assert(WARPS * Splitter<R, STAGES>::WARP_BYTES == SHARED, "the host's memory");     \
    extern "C" __global__ void __maxnreg__(SPLIT_REGISTERS(WARPS)) name(AttendParams p) {      \
        Splitter<R, STAGES>::run(p);                                                           \
    }
SPLIT_ENTRIES
