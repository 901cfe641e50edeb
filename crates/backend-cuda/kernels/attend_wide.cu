// What attend_tile.cu computes, by Hopper's matrix instruction of four warps: the same bits.
//
// A block takes the lines of a task, sixteen for each of eight warps. A ninth brings the pages through a
// ring, SPAN keys at a time. Four warps at a time compute the scores of all of them, then go in steps: the
// weights of one while the values of the one before are added, and the next scores behind the last
// values. The other four do the same, so that one of them multiplies while the other one weighs.
// Pages that nobody sees are not brought, but others instead: what is masked has no weight, and values
// are finite. Grid: (task, KV head).

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && PARTS == 1 && (WIDTH == 64 || WIDTH == 128) && !ROWS && \
    !CODED

#define SPAN 64  // keys
#define SPAN_PAGES (SPAN / PAGE)
#define SPAN_STEPS (SPAN / STEP)
#define SPAN_KEYS_BYTES (SPAN_PAGES * HEAD_PAGE_BYTES / 2)
#define SPAN_BYTES (2 * SPAN_KEYS_BYTES)
#define WIDE_TEAM 8  // warps that compute
#define WIDE_QUERIES (WIDE_STAGES * SPAN_BYTES)
#define WIDE_BARRIERS (WIDE_QUERIES + WIDE_TEAM * TileLines::Q_BYTES)
static_assert(WIDE_BARRIERS + 16 * WIDE_STAGES == WIDE_SHARED, "the host's memory differs");
static_assert(SMALL_CHUNK % SPAN == 0 && MIDDLE_CHUNK % SPAN == 0, "chunks are whole spans");
typedef RingPlace<WIDE_STAGES> SpanPlace;

// The spans of a task, and its pages that are seen.
struct Spans {
    u32 first, end;
    u32 first_page, last_page;
};

DEVICE Spans spans_of(const AttendParams& p, const Task& task) {
    const u32 seen = task.place + (task.first_line + task.n_lines - 1) / p.group + 1;
    const u32 start = first_key_of(task.place + task.first_line / p.group + 1, p.window);
    return Spans{start / SPAN, (seen + SPAN - 1) / SPAN, start / PAGE, (seen - 1) / PAGE};
}

// Brings all spans, by one warp: each of its first lanes a page at a time.
DEVICE void bring_spans(const AttendParams& p, const Task& task, u32 ring) {
    const u32 lane = threadIdx.x % 32;
    const Spans spans = spans_of(p, task);
    const u8* head = p.layer + blockIdx.y * p.head_bytes;
    const u32* table = p.tables + (u64)task.table_row * p.table_len;
    if (lane >= SPAN_PAGES) return;
    const auto slot_of = [&](u32 span) {
        return table[min(max(span * SPAN_PAGES + lane, spans.first_page), spans.last_page)];
    };
    SpanPlace place = {0, 0};
    u32 next = slot_of(spans.first);
    for (u32 span = spans.first; span < spans.end; span++) {
        const u8* page = head + (u64)next * HEAD_PAGE_BYTES;
        next = slot_of(span + 1);
        const u32 ready = ring + WIDE_BARRIERS + place.stage * 8;
        const u32 target = ring + place.stage * SPAN_BYTES + lane * (HEAD_PAGE_BYTES / 2);
        barrier_wait(ready + WIDE_STAGES * 8, place.phase ^ 1);
        barrier_expect(ready, HEAD_PAGE_BYTES);
        bulk_copy(target, page, HEAD_PAGE_BYTES / 2, ready);
        bulk_copy(target + SPAN_KEYS_BYTES, page + HEAD_PAGE_BYTES / 2, HEAD_PAGE_BYTES / 2, ready);
        place.go_on();
    }
}

// Queues the scores of a span.
DEVICE void queue_scores(u32 stage, const uint4 (&q)[2 * KT], float (&s)[SPAN / 2]) {
    wide_begin();
    UNROLL
    for (int step = 0; step < 2 * KT; step++)
        wide_mma(s, q[step],
                 matrix_descriptor<64>(stage + step / 2 * 512 + step % 2 * 32, WIDTH * 16), step > 0);
    wide_commit();
}

// What comes after this in the program is done after these are known.
DEVICE void known(uint4& x) {
    asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)::"memory");
}

// Queues the weighted values of a step, which are the first of a chunk if they are not added.
DEVICE void queue_values(u32 values, const uint4 (&weights)[STEP_PAGES], float (&o)[WIDTH / 2],
                         u32 is_added) {
    wide_begin();
    UNROLL
    for (int page = 0; page < STEP_PAGES; page++)
        wide_mma(o, weights[page], matrix_descriptor<32>(values + page * (HEAD_PAGE_BYTES / 2), 256),
                 page > 0 ? 1 : is_added);
    wide_commit();
}

DEVICE void attend_spans(const AttendParams& p, const Task& task, u8* shared, u32 ring) {
    const u32 warp = threadIdx.x / 32, barriers = ring + WIDE_BARRIERS;
    const Spans spans = spans_of(p, task);
    TileLines lines = tile_lines(p, task, warp);
    u32* operands = (u32*)(shared + WIDE_QUERIES + warp * TileLines::Q_BYTES);
    SharedQueries queries = {operands};
    load_queries(p, lines, queries);
    __syncwarp();
    uint4 q[2 * KT];
    UNROLL
    for (int i = 0; i < 2 * KT; i++) q[i] = queries[i];

    Total total[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    float all[TILES][4], s[SPAN / 2];
    float(&o)[WIDTH / 2] = reinterpret_cast<float(&)[WIDTH / 2]>(lines.o);
    UNROLL
    for (int n = 0; n < TILES; n++)
        UNROLL
        for (int e = 0; e < 4; e++) all[n][e] = 0.0f;
    UNROLL
    for (int i = 0; i < SPAN / 2; i++) s[i] = 0.0f;
    begin_chunk(lines);
    u32 chunk_end = chunk_start(p.cuts, chunk_of(p.cuts, spans.first * SPAN) + 1);
    u32 is_begun = 0;
    SpanPlace place = {0, 0};
    barrier_wait(barriers, 0);
    queue_scores(ring, q, s);
    for (u32 span = spans.first; span < spans.end; span++) {
        wide_wait(o);
        wide_wait(s);
        if (span > spans.first) {
            const u32 before = place.stage == 0 ? WIDE_STAGES - 1 : place.stage - 1;
            if (threadIdx.x % 32 == 0) barrier_arrive(barriers + (WIDE_STAGES + before) * 8);
        }
        if (span * SPAN == chunk_end) {
            chunk_end = chunk_start(p.cuts, chunk_of(p.cuts, chunk_end) + 1);
            merge_chunk(lines, total, all);
            begin_totals(lines);
            is_begun = 0;
        }
        const u32 stage = ring + place.stage * SPAN_BYTES;
        uint4 weights[SPAN_STEPS][STEP_PAGES];
        UNROLL
        for (int step = 0; step < SPAN_STEPS; step++) {
            float down[2];
            auto& scores = reinterpret_cast<float(&)[SPAN_STEPS][KEY_TILES][4]>(s)[step];
            soften<2>(span * SPAN + step * STEP, lines, scores, down);
            UNROLL
            for (int page = 0; page < STEP_PAGES; page++) {
                u32 a[1][4];
                weight_operands<2>(scores, page, a);
                weights[step][page] = make_uint4(a[0][0], a[0][1], a[0][2], a[0][3]);
                known(weights[step][page]);
            }
            // The values of the step before are still being added. The compiler would wait for them before
            // the weights are worked out, were it not for two places to wait at.
            if (has_moved(down)) {
                if (step > 0) wide_wait(o);
                scale_down(down, lines.o);
            } else if (step > 0) {
                asm volatile("// the same");
                wide_wait(o);
            }
            queue_values(stage + SPAN_KEYS_BYTES + step * STEP_PAGES * (HEAD_PAGE_BYTES / 2),
                         weights[step], o, step > 0 ? 1 : is_begun);
        }
        is_begun = 1;
        place.go_on();
        if (span + 1 == spans.end) break;
        barrier_wait(barriers + place.stage * 8, place.phase);
        queue_scores(ring + place.stage * SPAN_BYTES, q, s);
    }
    wide_wait(o);
    merge_chunk(lines, total, all);
    store_lines(p, lines, total, all);
}

extern "C" __global__ void __launch_bounds__(384, 1) attend_wide(AttendParams p) {
    extern __shared__ __align__(1024) u8 wide_shared[];
    const u32 ring = shared_address(wide_shared), barriers = ring + WIDE_BARRIERS;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < WIDE_STAGES; i++) {
            barrier_init_for(barriers + i * 8, SPAN_PAGES);
            barrier_init_for(barriers + (WIDE_STAGES + i) * 8, WIDE_TEAM);
        }
        barriers_ready();
    }
    __syncthreads();
    // Tasks and tables were there before the step began.
    allow_next();
    const Task task = ((const Task*)p.tasks)[blockIdx.x];
    wait_for_previous();
    if (threadIdx.x < 32 * WIDE_TEAM) {
        take_registers();
        attend_spans(p, task, wide_shared, ring);
    } else {
        give_registers();
        if (threadIdx.x / 32 == WIDE_TEAM) bring_spans(p, task, ring);
    }
}
#endif
