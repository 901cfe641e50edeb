// Rows on their way from the arena, on the device or on the host, to the working sets: brought by the blocks
// that have decided about a head, or by a kernel of its own.
//
// A warp finds the ways of 32 moves, one in each lane, while rows of the 32 before come. Rows travel in groups, of
// which several are on their way to its ring in shared memory at a time, because each is for long; they come in the
// order in which they were sent for. A group that has come is put down, its pieces of sixteen bytes in the order of
// their new places, and the next one is sent for. Bulk copies need no registers for that, and what else the
// multiprocessor loads does not wait behind them; each takes the warp as long as putting down a row, so rows that lie
// side by side come in one.

#define RING_MOST 32  // rows of a warp that are on their way

// Where rows that come to the working set of a head find their places.
struct Places {
    uint2* marks;  // of the head's places, or null
    u8* pages;     // of working sets
    u32 first;     // SET_UNITs behind those, where the head's set begins
    u32 n_gone;    // rows that are free: the first moves take those,
    u32 behind;    // and the others, counted from here, the rows behind the last
    u32 now;
};

// One row on its way: where its key is, without what its place in the page does to the order of its pieces, and
// the page that it goes to.
struct Way {
    const u8* source;
    u8* target;
    u32 tokens;  // its place there, or the scales of its key and value; and its place where it goes to
};

// What is known of a way so far. Each look loads what the next one's addresses come from, and a while passes between
// them: a warp that waits for one puts no rows down meanwhile.
#define N_LOOKS 3
struct Search {
    u32 row, head, number;  // the move, among those of a head of a row
    uint2 move;             // the place that comes, and a row of the set that is free
    u32 table_row;
    u32 slot;   // of the place's page
    u32 found;  // the frame of the page, or the scales of the codes
    u8* target;
    u32 to;  // its place there
};

// `lists` knows whose move each index is, and where it finds its place.
template <u32 NUMBER, bool CODES, typename Lists>
DEVICE void look(const SparsePages& pages, const Codes& codes, const Lists& lists, u32 index, Search& search) {
    const u32 place = search.move.x;
    if (NUMBER == 0) {
        lists.find(index, search.row, search.head, search.number);
        // Other blocks may have written it.
        search.move = __ldcg(lists.moves(search.row, search.head) + search.number);
        search.table_row = lists.table_row(search.row);
    } else if (NUMBER == 1) {
        search.slot = pages.tables[(u64)search.table_row * pages.table_len + place / PAGE];
    } else {
        if (CODES) search.found = *(const u16*)scales_at(codes, search.head, search.slot, place % PAGE);
        else search.found = frame_of(pages.near, search.slot);
        const Places places = lists.places(search.row, search.head);
        search.to = search.number < places.n_gone ? search.move.y : places.behind + search.number;
        search.target = places.pages + (u64)places.first * SET_UNIT +
                        (u64)(search.to / PAGE) * set_page_bytes(CODES && codes.are_kept);
        if (places.marks) places.marks[place] = make_uint2(places.now, search.to);
    }
}

// The way of a move whose search has ended.
template <bool CODES, typename Lists>
DEVICE Way way_of(const SparsePages& pages, const Codes& codes, const Lists& lists, u32 index,
                  const Search& search) {
    const u32 token = search.move.x % PAGE;
    const u8* staged = lists.template staged<CODES>(index);
    Way way;
    if (staged) way.source = staged;
    else if (CODES) way.source = codes_at(codes, search.head, search.slot, token);
    else
        way.source = page_at(pages.layer, pages.head_bytes, pages.near, search.head, search.slot, search.found) +
                     token * ROW_BYTES;
    way.target = search.target;
    way.tokens = (CODES ? search.found : token) | search.to % PAGE << 16;
    return way;
}

// Where a piece is, from the beginning of its token's row on, in bytes.
DEVICE u32 piece_from(u32 token, u32 piece) { return (piece_at(token, piece) - token * ROW_PIECES) * 16; }

// Puts down a row, or what is coded there, that has come to shared memory, by some lanes.
template <bool CODES>
DEVICE void put_down(const u8* key, const u8* value, const Way& way, const Codes& codes, u32 n_lanes) {
    const u32 token = way.tokens >> 16, lane = threadIdx.x % n_lanes;
    u8* target = way.target + token * ROW_BYTES;
    LOOP for (u32 part = lane; !CODES && part < ROW_PIECES; part += n_lanes) {
        const u32 from = piece_from(way.tokens & 0xFFFF, part), to = piece_from(token, part);
        const uint4 a = *(const uint4*)(key + from), b = *(const uint4*)(value + from);
        *(uint4*)(target + to) = a, *(uint4*)(target + HALF_PAGE_BYTES + to) = b;
    }
    LOOP for (u32 at = lane; CODES && at < CODE_PIECES; at += n_lanes) {
        const u32 half = at / (CODE_PIECES / 2), part = at % (CODE_PIECES / 2);
        const u32 scale = way.tokens >> half * 8 & 0xFF;
        const uint4 sixteen = *(const uint4*)((half ? value : key) + part * 16);
#if KEEPS_CODES
        if (codes.are_kept) {
            keep_piece(way.target, token, half, part, sixteen, scale);
            continue;
        }
#endif
        uint4 out[sizeof(Element)];
        expand(codes.kind, sixteen, __uint_as_float(scale << 23), out);
        u8* to = target + half * HALF_PAGE_BYTES;
        UNROLL
        for (u32 k = 0; k < sizeof(Element); k++)
            if (part * sizeof(Element) + k < ROW_PIECES)
                *(uint4*)(to + piece_from(token, part * sizeof(Element) + k)) = out[k];
    }
}

// Where rows of a warp come to: groups of rows, which are put down together. Of a group keys come first, then values;
// what is coded has both side by side, where it comes from too. More rows TOGETHER cost fewer instructions, fewer wait
// less for each other.
template <bool CODES, u32 BYTES, u32 TOGETHER>
struct Ring {
    static const u32 HALF = CODES ? CODE_WIDTH : ROW_BYTES;
    static const u32 N_ROWS = BYTES / (2 * HALF) < RING_MOST ? BYTES / (2 * HALF) : RING_MOST;
    static const u32 GROUP = N_ROWS >= 2 * TOGETHER ? TOGETHER : 1;
    static const u32 N_GROUPS = N_ROWS / GROUP;
    u8* rows;
    u32 barriers;  // of the groups

    // Of a block that has memory for BYTES, and RING_MOST barriers, for each warp. What was there is read no more.
    __device__ Ring(u8* room, u64* all_barriers) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        rows = room + warp * BYTES, barriers = shared_address(all_barriers + warp * RING_MOST);
#if HAS_BULK
        if (lane < N_GROUPS) barrier_init(barriers + lane * 8);
        // What was written there comes before what is copied there.
        bulk_fence();
        __syncwarp();
#endif
    }

    __device__ u8* key(u32 group, u32 row) const { return rows + (2 * group * GROUP + (CODES ? 2 : 1) * row) * HALF; }
    __device__ u8* value(u32 group, u32 row) const { return key(group, row) + (CODES ? 1 : GROUP) * HALF; }

    // Sends for `n` rows of a group, of which there may be none. Lanes from `first` on know where each is, and a
    // value is `half_bytes` behind its key; `begin` has a bit for each lane whose row does not follow the one before.
    // What was there has been read.
    __device__ void send(u32 group, u32 n, const u8* source, u32 first, u32 begin, u32 half_bytes) const {
        const u32 lane = threadIdx.x % 32;
#if HAS_BULK
        const u32 row = lane - first, barrier = barriers + group * 8;
        if (row < n && (row == 0 || begin >> lane & 1)) {
            const u32 later = begin >> lane >> 1, n_rows = min(later ? __ffs(later) : 32, n - row);
            const u32 to = shared_address(key(group, row)), n_bytes = n_rows * (CODES ? 2 : 1) * HALF;
            if (row == 0) barrier_expect(barrier, n * 2 * HALF);
            bulk_copy(to, source, n_bytes, barrier);
            if (!CODES) bulk_copy(to + GROUP * HALF, source + half_bytes, n_bytes, barrier);
        }
        __syncwarp();
#else
        LOOP for (u32 row = 0; row < n; row++) {
            const u8* from = (const u8*)__shfl_sync(~0u, (u64)source, first + row);
            LOOP for (u32 at = lane * 16; at < 2 * HALF; at += 512) {
                const u8* to = at < HALF ? key(group, row) + at : value(group, row) + at - HALF;
                copy_async(shared_address(to), from + (at < HALF ? at : at - HALF + half_bytes), 16);
            }
        }
        copy_commit();
#endif
    }

    // Waits for the group that was sent for first.
    __device__ void wait(u32 group, u32 phase) const {
#if HAS_BULK
        barrier_wait(barriers + group * 8, phase);
#else
        copy_wait<N_GROUPS - 1>();
        __syncwarp();
#endif
    }
};

// Brings the `n_all` rows of some lists by `n_warps` warps, of which this is one; `half_bytes` are from a key to its
// value, unless they are coded, side by side. Each warp has a share of rows that follow each other; steps take a
// little longer if warps take runs of 32 in turns.
template <bool CODES, u32 BYTES, u32 TOGETHER, typename Lists>
DEVICE void bring_rows(u32 warp, u32 n_warps, u32 n_all, u32 half_bytes, const SparsePages& pages,
                       const Codes& codes, const Ring<CODES, BYTES, TOGETHER>& ring, const Lists& lists) {
    typedef Ring<CODES, BYTES, TOGETHER> R;
    const u32 lane = threadIdx.x % 32, share = (n_all + n_warps - 1) / n_warps;
    u32 first = min(warp * share, n_all);  // of 32 rows, of which so many are sent for: those before are
    const u32 end = min(first + share, n_all);
    u32 left = end - first, n_sent = 32;
    first -= 32;
    if (left == 0) return;
    Way way = {nullptr, nullptr, 0}, own = way;  // of the lane's row of the 32, and of that row of the ring
    Search search;                               // for the 32 rows after those
    u32 n_looks = 0, begin = 0;
    const auto look_on = [&](u32 first) {
        const u32 index = first + lane;
        if (index < end && n_looks == 0) look<0, CODES>(pages, codes, lists, index, search);
        if (index < end && n_looks == 1) look<1, CODES>(pages, codes, lists, index, search);
        if (index < end && n_looks == 2) look<2, CODES>(pages, codes, lists, index, search);
        n_looks++;
    };
    const auto next_ways = [&]() {
        first += 32, n_sent = 0;
        const u32 index = first + lane;
        if (index < end && n_looks <= 0) look<0, CODES>(pages, codes, lists, index, search);
        if (index < end && n_looks <= 1) look<1, CODES>(pages, codes, lists, index, search);
        if (index < end && n_looks <= 2) look<2, CODES>(pages, codes, lists, index, search);
        n_looks = 0;
        if (index < end) way = way_of<CODES>(pages, codes, lists, index, search);
        const u8* before = (const u8*)__shfl_up_sync(~0u, (u64)way.source, 1);
        begin = __ballot_sync(~0u, way.source != before + (CODES ? 2 : 1) * R::HALF);
    };
    for (u32 phase = 1, is_full = 0;; phase ^= 1, is_full = 1) {
        LOOP for (u32 group = 0; group < R::N_GROUPS; group++) {
            if (is_full) {
                ring.wait(group, phase);
                const u32 n = min(left, R::GROUP), row = lane / (32 / R::GROUP), from = group * R::GROUP + row;
                Way its = own;
                its.target = (u8*)__shfl_sync(~0u, (u64)own.target, from);
                its.tokens = __shfl_sync(~0u, own.tokens, from);
                if (row < n) put_down<CODES>(ring.key(group, row), ring.value(group, row), its, codes, 32 / R::GROUP);
                __syncwarp();
                if ((left -= n) == 0) return;
            }
            if (n_sent == 32 && first + 32 < end) next_ways();
            const u32 n = min(end - first - n_sent, R::GROUP), row = lane - group * R::GROUP;
            ring.send(group, n, way.source, n_sent, begin, CODES ? R::HALF : half_bytes);
            u8* target = (u8*)__shfl_sync(~0u, (u64)way.target, (n_sent + row) % 32);
            const u32 tokens = __shfl_sync(~0u, way.tokens, (n_sent + row) % 32);
            if (row < n) own.target = target, own.tokens = tokens;
            n_sent += n;
            if (n_looks < N_LOOKS) look_on(first + 32);
        }
    }
}
