// What splits are about: which chunk of which row a warp takes, where its pages are, and the key that is not
// in its page yet.

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
#define QUEUE 8  // tasks whose pages may be on their way
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

// Steps before the end of a task from which on the next one is looked up. A task that was taken earlier would
// wait for a warp that is busy, while others have nothing to do.
#define LOOK_AHEAD 3

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
