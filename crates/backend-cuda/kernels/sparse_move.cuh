// Rows on their way from the arena, on the device or on the host, to the working sets: brought by the blocks
// that have decided about a head, or by a kernel of its own.
//
// A warp finds the ways of 32 moves, one in each lane. Several rows are on their way to its ring in shared
// memory at a time, because each is for long; whichever has come is put down, its pieces of sixteen bytes in
// the order of its new place, and another one is sent for. Bulk copies need no registers for that, and what
// else the multiprocessor loads does not wait behind them.

#define RING_MOST 22  // rows of a warp that are on their way

// What moves to the working set of a head.
struct Arrivals {
    const uint2* moves;  // places that come, which ascend, and beside them rows of the set that are free
    uint2* marks;        // of the head's places, or null
    u8* pages;           // of working sets
    u32 table_row, head;
    u32 first;           // SET_UNITs behind those, where the head's set begins
    u32 n_gone;          // rows that are free: the first moves take those,
    u32 behind;          // and the others, counted from here, the rows behind the last
    u32 now;
};

// One row on its way: where its key is, without what its place in the page does to the order of its pieces, and
// the page that it goes to.
struct Way {
    const u8* source;
    u8* target;
    u32 tokens;  // its place there, or the scales of its key and value; and its place where it goes to
};

// Finds the way of a move, from the arena or from where it was staged, and marks its place.
template <bool CODES>
DEVICE Way way_of(const SparsePages& pages, const Codes& codes, const Arrivals& all, u32 number,
                  const u8* staged) {
    // Other blocks may have written it.
    const uint2 move = __ldcg(all.moves + number);
    const u32 to = number < all.n_gone ? move.y : all.behind + number;
    const u32 token = move.x % PAGE, page_bytes = set_page_bytes(CODES && codes.are_kept);
    Way way;
    if (CODES) {
        const u32 slot = pages.tables[(u64)all.table_row * pages.table_len + move.x / PAGE];
        way.source = staged ? staged : codes_at(codes, all.head, slot, token);
        way.tokens = *(const u16*)scales_at(codes, all.head, slot, token) | to % PAGE << 16;
    } else {
        way.source =
            staged ? staged : page_of(pages, all.head, all.table_row, move.x / PAGE) + token * ROW_BYTES;
        way.tokens = token | to % PAGE << 16;
    }
    way.target = all.pages + (u64)all.first * SET_UNIT + (u64)(to / PAGE) * page_bytes;
    if (all.marks) all.marks[move.x] = make_uint2(all.now, to);
    return way;
}

// Where a piece is, from the beginning of its token's row on, in bytes.
DEVICE u32 piece_from(u32 token, u32 piece) { return (piece_at(token, piece) - token * ROW_PIECES) * 16; }

// Rows that a warp puts down together, and lanes that each has: more of them cost fewer instructions, but those in
// eight bits have half as many pieces, and work in each.
template <bool CODES>
struct Together {
    static const u32 N = CODES ? 2 : 4, LANES = 32 / N;
};

// Puts down a row, or what is coded there, that has come to shared memory, by as many lanes as it has.
template <bool CODES>
DEVICE void put_down(const u8* row, u8* page, u32 tokens, u32 kind, bool are_kept) {
    const u32 n_lanes = Together<CODES>::LANES, token = tokens >> 16, lane = threadIdx.x % n_lanes;
    u8* target = page + token * ROW_BYTES;
    LOOP for (u32 part = lane; !CODES && part < ROW_PIECES; part += n_lanes) {
        const u32 from = piece_from(tokens & 0xFFFF, part), to = piece_from(token, part);
        const uint4 key = *(const uint4*)(row + from), value = *(const uint4*)(row + ROW_BYTES + from);
        *(uint4*)(target + to) = key;
        *(uint4*)(target + HALF_PAGE_BYTES + to) = value;
    }
    LOOP for (u32 at = lane; CODES && at < CODE_PIECES; at += n_lanes) {
        const u32 half = at / (CODE_PIECES / 2), part = at % (CODE_PIECES / 2);
        const u32 scale = tokens >> half * 8 & 0xFF;
#if KEEPS_CODES
        if (are_kept) {
            keep_piece(page, token, half, part, *(const uint4*)(row + at * 16), scale);
            continue;
        }
#endif
        uint4 out[sizeof(Element)];
        expand(kind, *(const uint4*)(row + at * 16), __uint_as_float(scale << 23), out);
        u8* to = target + half * HALF_PAGE_BYTES;
        UNROLL
        for (u32 k = 0; k < sizeof(Element); k++)
            if (part * sizeof(Element) + k < ROW_PIECES)
                *(uint4*)(to + piece_from(token, part * sizeof(Element) + k)) = out[k];
    }
}

// Where rows of a warp come to: a slot for each of its first N lanes.
template <bool CODES, u32 BYTES = RING_BYTES>
struct Ring {
    static const u32 HALF = CODES ? CODE_WIDTH : ROW_BYTES;
    static const u32 N = BYTES / (2 * HALF) < RING_MOST ? BYTES / (2 * HALF) : RING_MOST;
    u8* rows;
    u32 barrier;  // of the lane's slot
    u32 phase;

    // Of a block that has memory for BYTES, and RING_MOST barriers, for each warp. What was there is
    // read no more.
    __device__ Ring(u8* room, u64* barriers) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        rows = room + warp * BYTES;
        barrier = shared_address(barriers + warp * RING_MOST + lane % RING_MOST), phase = 0;
#if HAS_BULK
        if (lane < N) barrier_init(barrier);
        __syncwarp();
#endif
    }

    __device__ const u8* row(u32 slot) const { return rows + slot * 2 * HALF; }

    // Has rows come to the slots of the lanes that ask, with a value that is `half_bytes` behind its key.
    __device__ void send(bool asks, const u8* source, u32 half_bytes) {
        const u32 lane = threadIdx.x % 32;
#if HAS_BULK
        if (!asks) return;
        const u32 to = shared_address(row(lane));
        bulk_fence();
        barrier_expect(barrier, 2 * HALF);
        // What is coded lies side by side.
        bulk_copy(to, source, CODES ? 2 * HALF : HALF, barrier);
        if (!CODES) bulk_copy(to + HALF, source + half_bytes, HALF, barrier);
#else
        LOOP for (u32 left = __ballot_sync(~0u, asks); left; left &= left - 1) {
            const u32 slot = __ffs(left) - 1, to = shared_address(row(slot));
            const u8* from = (const u8*)__shfl_sync(~0u, (u64)source, slot);
            LOOP for (u32 at = lane * 16; at < 2 * HALF; at += 512)
                copy_async(to + at, from + (at < HALF ? at : at - HALF + half_bytes), 16);
        }
#endif
    }

    // Waits until rows have come to slots of the lanes that wait, and gives those; without barriers, all.
    __device__ u32 wait(bool waits) {
#if HAS_BULK
        u32 come;
        // Others need the multiprocessor meanwhile.
        while (!(come = __ballot_sync(~0u, waits && barrier_test(barrier, phase)))) __nanosleep(40);
        phase ^= come >> threadIdx.x % 32 & 1;
        __syncwarp();
        return come;
#else
        copy_commit();
        copy_wait<0>();
        __syncwarp();
        return __ballot_sync(~0u, waits);
#endif
    }
};

// Puts down what has come to some slots, where the lanes of these know its way.
template <bool CODES, u32 BYTES>
DEVICE void put_down_all(const Ring<CODES, BYTES>& ring, u32 come, const Way& way, const Codes& codes) {
    const u32 N = Together<CODES>::N;
    LOOP while (come) {
        u32 own = come;
        UNROLL for (u32 k = 1; k < N; k++)
            if (threadIdx.x % 32 >= k * Together<CODES>::LANES) own &= own - 1;
        const u32 slot = __ffs(own ? own : come) - 1;
        u8* target = (u8*)__shfl_sync(~0u, (u64)way.target, slot);
        const u32 tokens = __shfl_sync(~0u, way.tokens, slot);
        if (own) put_down<CODES>(ring.row(slot), target, tokens, codes.kind, codes.are_kept);
        UNROLL for (u32 k = 0; k < N; k++) come &= come - 1;
    }
    __syncwarp();
}

// Brings `n_all` rows, whose ways `find` finds, by `n_warps` warps, of which this is one; `half_bytes` are from
// a key to its value, unless they are coded, side by side. Each warp has a share of rows that follow each other;
// steps take a little longer if warps take runs of 32 in turns.
template <bool CODES, u32 BYTES, typename Find>
DEVICE void bring_rows(u32 warp, u32 n_warps, u32 n_all, u32 half_bytes, const Codes& codes,
                       Ring<CODES, BYTES> ring, const Find& find) {
    if (n_all == 0) return;
    const u32 lane = threadIdx.x % 32, share = (n_all + n_warps - 1) / n_warps;
    u32 first = warp * share, sent = 0;  // of the 32 rows from there on
    const u32 end = min(first + share, n_all);
    const auto find_own = [&](u32 first, Way& way) {
        if (first + lane < end) way = find(first + lane);
    };
    Way way = {nullptr, nullptr, 0}, next = way;
    find_own(first, way);
    Way own = way;  // of what comes to the lane's slot
    bool is_coming = false, is_new = true;
    for (;;) {
        const u32 open = __ballot_sync(~0u, !is_coming && lane < Ring<CODES, BYTES>::N);
        const u32 n_rows = first < end ? min(end - first, 32) : 0;
        const u32 row = sent + __popc(open & ((1u << lane) - 1));
        const u8* source = (const u8*)__shfl_sync(~0u, (u64)way.source, row % 32);
        u8* target = (u8*)__shfl_sync(~0u, (u64)way.target, row % 32);
        const u32 tokens = __shfl_sync(~0u, way.tokens, row % 32);
        const bool asks = (open >> lane & 1) && row < n_rows;
        if (asks) own.target = target, own.tokens = tokens, is_coming = true;
        ring.send(asks, source, CODES ? CODE_WIDTH : half_bytes);
        if (!__any_sync(~0u, is_coming)) return;
        // Known before it is needed: a chain of loads.
        if (is_new) find_own(first + 32, next);
        sent += __popc(open);
        is_new = n_rows > 0 && sent >= n_rows;
        if (is_new) way = next, sent = 0, first += 32;
        const u32 come = ring.wait(is_coming);
        if (come >> lane & 1) is_coming = false;
        put_down_all(ring, come, own, codes);
    }
}
