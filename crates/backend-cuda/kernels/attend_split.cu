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

// Weighted values as `mix_values` has them, in the lines' own sums.
template <int R>
struct Straight {
    DEVICE void begin(Straight&) {}

    DEVICE void mix(const u8* values, const float (&s)[KEY_TILES][2 * R], const float (&down)[R],
                    Lines<R>& lines, Straight&) {
        mix_values<R, HALF_PAGE>(values, s, down, lines.o);
    }

    DEVICE void store(float* partials, const Lines<R>& lines, const Straight&) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL
        for (int r = 0; r < R; r++) {
            if (g + 8 * r >= lines.n) continue;
            UNROLL
            for (int n = 0; n < TILES; n++)
                store_kept(partials + (g + 8 * r) * WIDTH + n * 8 + t * 2, lines.o[n][2 * r],
                           lines.o[n][2 * r + 1]);
        }
    }
};

// Values of a page's tokens as the rows of an instruction: `value_operand` has its two middle ones the other
// way round.
template <typename Values>
DEVICE void value_rows(Values values, u32 pair, u32 (&rows)[4]) {
#if LEAN && !ROWS
    const u32 lane = threadIdx.x % 32;
    const uint4 b =
        load_matrices(values + value_piece(lane / 8 % 2 * 8 + lane % 8, lane / 16) * 16 + pair * 512);
    rows[0] = b.x, rows[1] = b.y, rows[2] = b.z, rows[3] = b.w;
#else
    const uint4 b = value_operand(values, pair);
    rows[0] = b.x, rows[1] = b.z, rows[2] = b.y, rows[3] = b.w;
#endif
}

// The same of eight lines, which would leave half of the matrix instruction's rows empty: values are the
// rows, and weights the columns. Sums are of the same products in the same order, so they have the same
// bits. Of sixteen columns a lane = 4 g + t has g and g + 8, of lines 2t and 2t + 1.
struct Turned {
    float o[PAIRS][4];

    DEVICE void begin(Turned& turned) {
        UNROLL
        for (int pair = 0; pair < PAIRS; pair++)
            UNROLL
            for (int e = 0; e < 4; e++) turned.o[pair][e] = 0.0f;
    }

    template <typename Values>
    DEVICE void mix(Values values, const float (&s)[KEY_TILES][2], const float (&down)[1], Lines<1>&,
                    Turned& turned) {
        if (has_moved(down)) {
            const u32 line = threadIdx.x % 4 * 8;  // its first lane
            const float downs[2] = {__shfl_sync(~0u, down[0], line),
                                    __shfl_sync(~0u, down[0], line + 4)};
            UNROLL
            for (int pair = 0; pair < PAIRS; pair++)
                UNROLL
                for (int e = 0; e < 4; e++) turned.o[pair][e] *= downs[e % 2];
        }
        UNROLL
        for (int page = 0; page < STEP_PAGES; page++) {
            u32 weights[PARTS][4];
            weight_operands<1>(s, page, weights);
            UNROLL
            for (int pair = 0; pair < PAIRS; pair++) {
                u32 rows[4];
                value_rows(values + page * HALF_PAGE, pair, rows);
                UNROLL
                for (int part = 0; part < PARTS; part++)
                    mma(turned.o[pair], rows, weights[part][0], weights[part][2]);
            }
        }
    }

    DEVICE void store(float* partials, const Lines<1>& lines, const Turned& turned) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL
        for (int e = 0; e < 2; e++) {
            if (2 * t + e >= lines.n) continue;
            float* line = partials + (2 * t + e) * WIDTH + g;
            UNROLL
            for (int pair = 0; pair < PAIRS; pair++) {
                store_kept(line + pair * 16, turned.o[pair][e]);
                store_kept(line + pair * 16 + 8, turned.o[pair][e + 2]);
            }
        }
    }
};

// Codes are weighed line by line.
#define TURNS(R) (R == 1 && !CODED)
template <int R, bool IS_TURNED>
struct SplitMix {
    typedef Straight<R> Type;
};
template <int R>
struct SplitMix<R, true> {
    typedef Turned Type;
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
    typedef typename SplitMix<R, TURNS(R)>::Type Mix;
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
        else if (feed.known < 3 && feed.step + LOOK_AHEAD >= feed.end_step)
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
#if HAS_BULK
        static_assert(STEP_PAGES == 2, "two copies");
        if (!LEAN) return bring_by_first(feed, half, slots, target, ready);
        bulk_copy_two(target, Feed<R>::page_at(feed, slots[0]) + half,
                      Feed<R>::page_at(feed, slots[1]) + half, HALF_PAGE, ready);
#else
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            for (u32 at = threadIdx.x % 32 * 16; at < HALF_PAGE; at += 512)
                copy_async(target + i * HALF_PAGE + at,
                           Feed<R>::page_at(feed, slots[i]) + half + at, 16);
#endif
    }

#if HAS_BULK
    DEVICE void bring_by_first(const Feed<R>& feed, u32 half, const u32 (&slots)[STEP_PAGES], u32 target,
                               u32 ready) {
        if (threadIdx.x % 32 != 0) return;
        barrier_expect(ready, HALF_BYTES);
        UNROLL
        for (int i = 0; i < STEP_PAGES; i++)
            bulk_copy_once(target + i * HALF_PAGE, Feed<R>::page_at(feed, slots[i]) + half, HALF_PAGE,
                           ready);
    }
#endif

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

    DEVICE void store_partial(const AttendParams& p, u64 partial, const Lines<R>& lines,
                              const Mix& mix) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u64 first = (partial * p.n_kv_heads + lines.kv_head) * p.group + lines.first;
        UNROLL
        for (int r = 0; r < R; r++)
            if (t == 0 && g + 8 * r < lines.n)
                ((float2*)p.sums)[first + g + 8 * r] = make_float2(lines.total[r].m, lines.total[r].l);
        Mix::store(p.partials + first * WIDTH, lines, mix);
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
        Mix mix;
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
            Mix::begin(mix);
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
                Mix::mix(values, s, down, lines, mix);
                bring_next(p, feed, own, ring);
            }
#if CODED
            end_chunk(lines);
#endif
            store_partial(p, work.part.partial, lines, mix);
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
