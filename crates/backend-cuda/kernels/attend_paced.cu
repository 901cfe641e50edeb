// Splits of long sequences, or of many: as `attend_split.cu`, but for when rings are filled.
//
// Rings are filled while the kernels before still run. Those are short of latency, not of bandwidth: behind
// all rings at once, each of their loads would wait for microseconds. So before they end, few halves of a
// block are on their way at a time, in the order of its warps. What that costs is more than it gives where
// tasks are few, and beside products that are waited for: those have the kernels of `attend_split.cu`.

#if HAS_BULK && OWNS_QUERIES(1)

// Bytes of a block that are on their way before the kernels before have ended.
#define EARLY_BYTES 32768

// One warp: eight lines at a time, a ring of STAGES halves of steps. A block has N_WARPS rings, then tasks of each
// warp, then barriers of all halves and the one that says that the kernels before have ended.
template <int N_WARPS, int STAGES>
struct Paced {
    typedef Splitter<1, STAGES> Plain;
    typedef typename Plain::Mix Mix;
    typedef typename Plain::Place Place;
    static const int OWN_AT = N_WARPS * STAGES * HALF_BYTES;
    static const int BARRIERS_AT = OWN_AT + N_WARPS * QUEUE * 32;
    static const int OVER_AT = BARRIERS_AT + N_WARPS * STAGES * 8;
    static const int BLOCK_BYTES = BARRIERS_AT + N_WARPS * 64;
    static const int N_EARLY = EARLY_BYTES / HALF_BYTES;
    static_assert(STAGES < 8 && sizeof(Work) <= 32, "room for barriers and tasks");

    // What a warp has of the block's memory.
    struct Room {
        u8* ring;
        Work* queue;
        u32 halves;  // of the ring, the first one's address
        u32 ready;   // that of its barriers,
        u32 over;    // and of the block's

        DEVICE Room of(u8* shared) {
            // What is the same for all lanes, and does not look so: it is not worked out again and again.
            const u32 warp = threadIdx.x / 32, block = __shfl_sync(~0u, shared_address(shared), 0);
            return Room{shared + warp * STAGES * HALF_BYTES,
                        (Work*)(shared + OWN_AT + warp * QUEUE * 32), block + warp * STAGES * HALF_BYTES,
                        block + BARRIERS_AT + warp * STAGES * 8, block + OVER_AT};
        }
    };

    // Brings keys or values of the next step; pages that are not seen become zeros.
    DEVICE void bring(const AttendParams& p, Feed<1>& feed, const Room& room, bool is_values) {
        if (feed.is_done) return;
        const u32 page = feed.step * STEP_PAGES;
        const u32 target = room.halves + feed.stage * HALF_BYTES, ready = room.ready + feed.stage * 8;
        const u32 half = is_values ? HALF_PAGE : 0;
        u32 slots[STEP_PAGES];
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            slots[i] = __shfl_sync(~0u, feed.slot, page + i - feed.first_page);
        const bool are_seen = page >= feed.seen_first && page + STEP_PAGES <= feed.seen_end;
        if (__builtin_expect(are_seen, true))
            Plain::bring_all(feed, half, slots, target, ready);
        else
            Plain::bring_some(feed, half, slots, target, ready);
        feed.stage = feed.stage == STAGES - 1 ? 0 : feed.stage + 1;
        if (!is_values) return;
        feed.step++;
        if (__builtin_expect(feed.step == feed.end_step, false))
            Feed<1>::begin_next(p, feed, room.queue);
        else if (feed.known < 3 && feed.step + LOOK_AHEAD >= feed.end_step)
            Feed<1>::look(p, feed);
    }

    // The same into the half that all lanes have read. What is brought there is of the kind of what was read if
    // the ring has whole steps.
    DEVICE void bring_next(const AttendParams& p, Feed<1>& feed, const Room& room, bool was_values) {
        __syncwarp();
        bring(p, feed, room, was_values != (STAGES % 2 != 0));
    }

    // Waits for half a step, and gives its place.
    DEVICE u32 await(const Room& room, const Place& place) {
        barrier_wait(room.ready + place.stage * 8, place.phase);
        __syncwarp();
        return place.stage * HALF_BYTES;
    }

    // Finds the first task of the warp.
    DEVICE void begin(const AttendParams& p, Feed<1>& feed, const Room& room) {
        // Tasks and tables were there before the step began. Neighbouring warps of a block are far
        // from each other, so that few tasks meet many blocks.
        feed.is_done = false, feed.stage = 0, feed.n_begun = 0;
        const u32 first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
        // There is room for as many as there are warps: this need not wait for their number.
        feed.next.part = ((const Part*)p.tasks)[first / n_sets<1>(p)];
        feed.n_works = *p.n_tasks * n_sets<1>(p);
        if (threadIdx.x % 32 < STAGES) barrier_init(room.ready + threadIdx.x % 32 * 8);
        if (threadIdx.x == 0) barrier_init(room.over);
        __syncthreads();
        feed.next.lines = first < feed.n_works ? first % n_sets<1>(p) : ~0u;
        feed.next_slot = Feed<1>::slot_of(p, feed.next);
    }

    // Halves of the first task that may be brought before the kernels before have ended. These write the
    // page that the row ends in, if this one does not. The task's last half is not among them: after it the
    // next task is looked for, which only then can be.
    DEVICE u32 n_early(const AttendParams& p, const Work& work) {
        if (work.lines == ~0u) return 0;
        const u32 start = Work::first_step(p, work), end = Work::end_step(p, work);
        const u32 last_page = (work.part.n_keys - 1) / PAGE;
        const u32 safe_end = p.angles ? end : min(end, last_page / STEP_PAGES);
        return safe_end > start ? min((u32)STAGES, 2 * (safe_end - start) - (safe_end == end)) : 0;
    }

    // Waits until few halves of the block are on their way, or the kernels before have ended.
    DEVICE void pace(const Room& room, u32 stage) {
        if (threadIdx.x / 32 * STAGES + stage < N_EARLY) return;
        const u32 before = room.ready + stage * 8 - N_EARLY * 8;
        while (!barrier_test(before, 0) && !barrier_test(room.over, 0));
        __syncwarp();
    }

    DEVICE void await_previous(const Room& room) {
        wait_for_previous();
        if (threadIdx.x == 0) barrier_expect(room.over, 0);
    }

    // Fills the ring, as far as that may be before the kernels before have ended, and waits for these.
    DEVICE void fill(const AttendParams& p, Feed<1>& feed, const Room& room) {
        const u32 n = n_early(p, feed.next);
        if (n == 0) await_previous(room);
        feed.known = 3;
        Feed<1>::begin_next(p, feed, room.queue);
        if (n > 0) feed.known = 3;
        // What is read once is worth little code: each launch fetches it anew.
        _Pragma("unroll 1")
        for (u32 i = 0; i < STAGES; i++) {
            if (i < n) pace(room, i);
            bring(p, feed, room, i % 2 != 0);
            if (i + 1 != n) continue;
            await_previous(room);
            feed.known = 0;
        }
    }

    DEVICE void run(const AttendParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        allow_next();
        const Room room = Room::of(shared);
        const Work* queue = room.queue;
        Feed<1> feed;
        begin(p, feed, room);
        fill(p, feed, room);
        Lines<1> lines;
        Mix mix;
        OwnQueries<KT * 2> queries = {nullptr};
        Place place = {0, 0};
        u32 n_done = 0, last = ~0u;
        for (;;) {
            __syncwarp();
            const Work work = queue[n_done % QUEUE];
            n_done++;
            if (work.lines == ~0u) break;
            // Tasks that follow each other often have the same lines of the same row.
            const u32 same = (work.part.row_chunk & 0xFFFF) << 16 | work.lines;
            const u32 sets = (p.group + 7) / 8;
            Fresh fresh;
            Fresh::fetch(p, work, sets, fresh);
            if (same != last) Plain::take_lines(p, work, lines, queries);
            last = same;
            begin_chunk(lines);
            Mix::begin(mix);
            const u32 end_step = Work::end_step(p, work);
            for (u32 step = Work::first_step(p, work); step < end_step; step++) {
                float s[KEY_TILES][2], down[1];
                const u32 keys = await(room, place);
                Plain::go_on(place);
                const bool is_fresh = __builtin_expect(fresh.is_here && step + 1 == end_step, false);
                if (is_fresh) Fresh::put(p, work, sets, fresh, false, room.ring + keys);
                score<1, HALF_PAGE>(room.halves + keys, queries, s);
                bring_next(p, feed, room, false);
                soften<1>(step * STEP, lines, s, down);
                const u32 values = await(room, place);
                Plain::go_on(place);
                if (is_fresh) Fresh::put(p, work, sets, fresh, true, room.ring + values);
                Mix::mix(room.halves + values, s, down, lines, mix);
                bring_next(p, feed, room, true);
            }
            Plain::store_partial(p, work.part.partial, lines, mix);
        }
    }
};

// Registers of a thread: those that two blocks of `attend_turns.cu` leave.
#define TURN_REGISTERS 64
#define PACED_ROOM(WARPS) ((512 - 2 * TURN_REGISTERS) / ((WARPS + 3) / 4) / 8 * 8)
#define PACED_REGISTERS(WARPS) (PACED_ROOM(WARPS) < 255 ? PACED_ROOM(WARPS) : 255)
#define PACED(name, WARPS, STAGES, SHARED)                                                            \
    static_assert(Paced<WARPS, STAGES>::BLOCK_BYTES == SHARED, "the host's memory");                  \
    extern "C" __global__ void __maxnreg__(PACED_REGISTERS(WARPS)) name(AttendParams p) {             \
        Paced<WARPS, STAGES>::run(p);                                                                 \
    }
PACED_ENTRIES

#endif
