// Attention of many lines of one sequence to all its chunks.
//
// A block takes the lines of a task, sixteen for each warp; its warps share the pages, which come
// through a ring in shared memory. Grid: (task, KV head); tasks that have more lines are shared by
// several blocks. Reads each page of a task once.

struct Task {
    u32 first_row;  // of the batch
    u32 first_line, n_lines;
    u32 place;  // of the sequence's first row
    u32 table_row;
    u32 padding[3];
};
static_assert(sizeof(Task) == TASK_SIZE, "the host's Task differs");

#define TEAM 4  // warps of a block
typedef Lines<2> TileLines;
#define TILE_BARRIERS (TILE_STAGES * STAGE_BYTES + TEAM * TileLines::Q_BYTES)
static_assert(TILE_BARRIERS + 64 == TILE_SHARED && TILE_STAGES <= 8, "the host's memory differs");

// The pages of a task, of which each lane knows where one of 32 is at a time.
struct Pages {
    const u32* table;
    u32 first, end;  // those that are seen
    u32 known;       // the first that is known
    u64 page;
};

DEVICE void find_pages(const AttendParams& p, Pages& pages, u32 page) {
    pages.known = page / 32 * 32;
    const u32 own = pages.known + threadIdx.x % 32;
    const bool inside = own >= pages.first && own < pages.end;
    const u32 slot = inside ? pages.table[own] : 0;
    pages.page = inside ? (u64)page_in(p.layer, p.head_bytes, p.near, blockIdx.y, slot) : (u64)p.layer;
}

// Brings the pages of one step; those that are not seen become zeros.
DEVICE void load_step(const AttendParams& p, Pages& pages, u32 ring, u32 stage, u32 step, u32 end_step) {
    if (step >= end_step) {
        copy_commit();
        return;
    }
    const u32 page = step * STEP_PAGES;
    if (page / 32 * 32 != pages.known) find_pages(p, pages, page);
    const u32 target = ring + stage * STAGE_BYTES;
#if HAS_BULK
    const u32 ready = ring + TILE_BARRIERS + stage * 8;
    u32 n_bytes = 0;
    UNROLL
    for (int i = 0; i < STEP_PAGES; i++)
        if (page + i >= pages.first && page + i < pages.end) n_bytes += HEAD_PAGE_BYTES;
    if (threadIdx.x == 0) barrier_expect(ready, n_bytes);
#endif
    UNROLL
    for (int i = 0; i < STEP_PAGES; i++) {
        const bool inside = page + i >= pages.first && page + i < pages.end;
        const u8* source = (const u8*)__shfl_sync(~0u, pages.page, (page + i) % 32);
        const u32 place = target + i * HEAD_PAGE_BYTES;
#if HAS_BULK
        if (inside) {
            if (threadIdx.x == 0) bulk_copy(place, source, HEAD_PAGE_BYTES, ready);
            continue;
        }
        for (u32 at = threadIdx.x * 16; at < HEAD_PAGE_BYTES; at += TEAM * 512)
            store_zeros(place + at);
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
DEVICE void wait_step(u32 ring, u32 turn) {
#if HAS_BULK
    barrier_wait(ring + TILE_BARRIERS + turn % TILE_STAGES * 8, turn / TILE_STAGES % 2);
#else
    copy_wait<TILE_STAGES - 2>();
    __syncthreads();
#endif
}

// The lines of a warp of a task, and the keys that they see.
DEVICE TileLines tile_lines(const AttendParams& p, const Task& task, u32 warp) {
    const u32 g = threadIdx.x % 32 / 4;
    TileLines lines;
    lines.first_row = task.first_row, lines.kv_head = blockIdx.y;
    lines.first = task.first_line + warp * 16;
    lines.n = warp * 16 < task.n_lines ? min(task.n_lines - warp * 16, 16u) : 0;
    UNROLL
    for (int r = 0; r < 2; r++) {
        const u32 seen = task.place + (lines.first + g + 8 * r) / p.group + 1;
        lines.start[r] = first_key_of(seen, p.window);
        lines.end[r] = g + 8 * r < lines.n ? seen : 0;
    }
    // The first line sees the fewest keys, and the last line's window begins last.
    const u32 last_line = lines.first + max(lines.n, 1u) - 1;
    lines.inside_end = lines.n > 0 ? task.place + lines.first / p.group + 1 : 0;
    lines.inside_start = first_key_of(task.place + last_line / p.group + 1, p.window);
    return lines;
}

// Writes the outputs of a warp's lines.
DEVICE void store_lines(const AttendParams& p, const TileLines& lines, const Total (&total)[2],
                        const float (&all)[TILES][4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL
    for (int r = 0; r < 2; r++) {
        if (g + 8 * r >= lines.n) continue;
        const u32 line = lines.first + g + 8 * r;
        const u64 row = lines.first_row + line / p.group;
        const u32 head = lines.kv_head * p.group + line % p.group;
        const u64 at = (row * p.n_kv_heads * p.group + head) * HEAD_DIM;
        const float inverse = 1.0f / total[r].l;
        UNROLL
        for (int n = 0; n < TILES; n++) {
            const u32 i = n * 8 + t * 2;
            if (i >= HEAD_DIM) continue;
            const float x = all[n][2 * r] * inverse, y = all[n][2 * r + 1] * inverse;
            *(float2*)(p.out + at + i) = make_float2(x, y);
            *(u32*)(p.rounded + at + i) = bf16x2(x, y);
        }
    }
}

// Adds a chunk to what came before it.
DEVICE void merge_chunk(const TileLines& lines, Total (&total)[2], float (&all)[TILES][4]) {
    Weights w[2];
    float before[2];
    UNROLL
    for (int r = 0; r < 2; r++) {
        w[r] = weigh(total[r].m, lines.total[r].m);
        total[r].l = mix(total[r].l, lines.total[r].l, w[r]);
        total[r].m = w[r].m;
        before[r] = w[r].before;
    }
    if (has_moved(before)) scale_down(before, all);
    UNROLL
    for (int n = 0; n < TILES; n++)
        UNROLL
        for (int e = 0; e < 4; e++)
            all[n][e] = __fmaf_rn(lines.o[n][e], w[e / 2].after, all[n][e]);
}

extern "C" __global__ void __launch_bounds__(32 * TEAM) attend_tile(AttendParams p) {
    extern __shared__ __align__(128) u8 shared[];
    allow_next();
    // Tasks and tables were there before the step began.
    Task task = ((const Task*)p.tasks)[blockIdx.x / p.tile_parts];
    const u32 before = blockIdx.x % p.tile_parts * (16 * TEAM);
    if (before >= task.n_lines) return;
    task.first_line += before, task.n_lines = min(task.n_lines - before, 16u * TEAM);
    const u32 warp = threadIdx.x / 32;
    const u32 ring = shared_address(shared);
    u32* operands = (u32*)(shared + TILE_STAGES * STAGE_BYTES + warp * TileLines::Q_BYTES);

    TileLines lines = tile_lines(p, task, warp);
    const u32 last_seen = task.place + (task.first_line + task.n_lines - 1) / p.group + 1;
    const u32 start = first_key_of(task.place + task.first_line / p.group + 1, p.window);
    Pages pages;
    pages.table = p.tables + (u64)task.table_row * p.table_len;
    pages.first = start / PAGE;
    pages.end = (last_seen + PAGE - 1) / PAGE;
    const u32 first_step = start / STEP, end_step = (last_seen + STEP - 1) / STEP;
    find_pages(p, pages, first_step * STEP_PAGES);
#if HAS_BULK
    if (threadIdx.x == 0)
        for (u32 i = 0; i < TILE_STAGES; i++) barrier_init(ring + TILE_BARRIERS + i * 8);
    __syncthreads();
#endif
    wait_for_previous();
    for (u32 i = 0; i < TILE_STAGES - 1; i++) load_step(p, pages, ring, i, first_step + i, end_step);
    SharedQueries queries = {operands};
    load_queries(p, lines, queries);
    __syncthreads();
#if PARTS == 1 && WIDTH <= 128
    // There is room for them in registers.
    uint4 q[2 * KT];
    UNROLL
    for (int i = 0; i < 2 * KT; i++) q[i] = queries[i];
#else
    const SharedQueries& q = queries;
#endif

    Total total[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    float all[TILES][4];
    UNROLL
    for (int n = 0; n < TILES; n++)
        UNROLL
        for (int e = 0; e < 4; e++) all[n][e] = 0.0f;
    begin_chunk(lines);
    u32 chunk_end = chunk_start(p.cuts, chunk_of(p.cuts, first_step * STEP) + 1);
    for (u32 step = first_step; step < end_step; step++) {
        const u32 turn = step - first_step, next = (turn + TILE_STAGES - 1) % TILE_STAGES;
        wait_step(ring, turn);
        // Nobody reads the step before.
        __syncthreads();
        load_step(p, pages, ring, next, step + TILE_STAGES - 1, end_step);
        const u8* stage = shared + turn % TILE_STAGES * STAGE_BYTES;
        float s[KEY_TILES][4], down[2];
        score<2, HEAD_PAGE_BYTES>(stage, q, s);
#if CODED
        scale_scores<2, HEAD_PAGE_BYTES>(stage, s);
#endif
        soften<2>(step * STEP, lines, s, down);
#if CODED
        weigh_values<2, HEAD_PAGE_BYTES>(stage + HEAD_PAGE_BYTES / 2, s, down, lines.unit);
#endif
        mix_values<2, HEAD_PAGE_BYTES>(stage + HEAD_PAGE_BYTES / 2, s, down, lines.o);
        if ((step + 1) * STEP != chunk_end && step + 1 != end_step) continue;
        chunk_end = chunk_start(p.cuts, chunk_of(p.cuts, chunk_end) + 1);
#if CODED
        end_chunk(lines);
#endif
        merge_chunk(lines, total, all);
        begin_chunk(lines);
    }
    store_lines(p, lines, total, all);
}
