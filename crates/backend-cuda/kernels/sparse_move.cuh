// Rows on their way from the arena, on the device or on the host, to the working sets: brought by the blocks
// that have decided about a head, or by a kernel of its own.
//
// A warp finds the ways of 32 moves, one in each lane, and then copies their pieces of sixteen bytes, several
// at a time, because each is on its way for long.

#define MOVE_PIECES (2 * ROW_PIECES)

// What moves to the working set of a head.
struct Arrivals {
    const uint2* moves;  // places that come, which ascend, and beside them rows of the set that are free
    uint2* marks;        // of the head's places, or null
    u8* pages;           // of working sets
    u32 table_row, head;
    u32 first_page;      // of the head's set
    u32 n_gone;          // rows that are free: the first moves take those,
    u32 behind;          // and the others, counted from here, the rows behind the last
    u32 now;
};

// One row on its way: where its key is and where it goes, each without what its place in the page
// does to the order of its pieces.
struct Way {
    const u8* source;
    u8* target;
    u32 tokens;  // of its page, or the scales of its key and value; and of the page that it goes to
};

// Finds the way of a move, from the arena or from where it was staged, and marks its place.
template <bool CODES>
DEVICE Way way_of(const SparsePages& pages, const Codes& codes, const Arrivals& all, u32 number,
                  const u8* staged) {
    // Other blocks may have written it.
    const uint2 move = __ldcg(all.moves + number);
    const u32 to = number < all.n_gone ? move.y : all.behind + number;
    const u32 page = all.first_page + to / PAGE, token = move.x % PAGE;
    Way way;
    if (CODES) {
        const u32 slot = pages.tables[(u64)all.table_row * pages.table_len + move.x / PAGE];
        const u64 at = code_row(codes, all.head, slot, token);
        way.source = staged ? staged : codes.rows + at * 2 * CODE_WIDTH;
        way.tokens = ((const u16*)codes.scales)[at] | to % PAGE << 16;
    } else {
        way.source =
            staged ? staged : page_of(pages, all.head, all.table_row, move.x / PAGE) + token * ROW_BYTES;
        way.tokens = token | to % PAGE << 16;
    }
    way.target = all.pages + (u64)page * HEAD_PAGE_BYTES + to % PAGE * ROW_BYTES;
    if (all.marks) all.marks[move.x] = make_uint2(all.now, to);
    return way;
}

// Where a piece is, from the beginning of its token's row on, in bytes.
DEVICE u32 piece_from(u32 token, u32 piece) { return (piece_at(token, piece) - token * ROW_PIECES) * 16; }

// Which piece of which of 32 rows.
struct Piece {
    u32 row, half, part;
};

DEVICE Piece piece_of(u32 at) {
    const u32 piece = at % MOVE_PIECES;
    return Piece{at / MOVE_PIECES % 32, piece / ROW_PIECES, piece % ROW_PIECES};
}

// Copies up to 32 rows whose ways the lanes know: the warp takes pieces in order, several in each lane
// before the first is put down.
DEVICE void copy_rows(Way way, u32 n_rows, u32 half_bytes) {
    const u32 lane = threadIdx.x % 32;
    for (u32 first = 0; first < n_rows * MOVE_PIECES; first += 32 * GATHER_PIECES) {
        uint4 bits[GATHER_PIECES];
        UNROLL
        for (int i = 0; i < GATHER_PIECES; i++) {
            const Piece piece = piece_of(first + i * 32 + lane);
            const u8* source = (const u8*)__shfl_sync(~0u, (u64)way.source, piece.row);
            const u32 token = __shfl_sync(~0u, way.tokens, piece.row) & 0xFFFF;
            if (first + i * 32 + lane < n_rows * MOVE_PIECES)
                bits[i] = *(const uint4*)(source + piece.half * half_bytes + piece_from(token, piece.part));
        }
        // Ways are asked for again, because registers are few: the kernel has to find room beside others.
        UNROLL
        for (int i = 0; i < GATHER_PIECES; i++) {
            const Piece piece = piece_of(first + i * 32 + lane);
            u8* target = (u8*)__shfl_sync(~0u, (u64)way.target, piece.row);
            const u32 token = __shfl_sync(~0u, way.tokens, piece.row) >> 16;
            if (first + i * 32 + lane < n_rows * MOVE_PIECES)
                *(uint4*)(target + piece.half * HALF_PAGE_BYTES + piece_from(token, piece.part)) = bits[i];
        }
    }
}

#define CODES_AT_ONCE 4  // expanding needs registers too

// The same for rows in eight bits, which become elements on their way.
DEVICE void copy_codes(const Way& way, u32 n_rows, u32 kind) {
    const u32 lane = threadIdx.x % 32;
    for (u32 first = lane; first < n_rows * CODE_PIECES + lane; first += 32 * CODES_AT_ONCE) {
        uint4 bits[CODES_AT_ONCE];
        UNROLL
        for (int i = 0; i < CODES_AT_ONCE; i++) {
            const u32 at = first + i * 32;
            const u8* source = (const u8*)__shfl_sync(~0u, (u64)way.source, at / CODE_PIECES % 32);
            if (at < n_rows * CODE_PIECES) bits[i] = *(const uint4*)(source + at % CODE_PIECES * 16);
        }
        UNROLL
        for (int i = 0; i < CODES_AT_ONCE; i++) {
            const u32 at = first + i * 32, row = at / CODE_PIECES % 32, piece = at % CODE_PIECES;
            const u32 half = piece / (CODE_PIECES / 2), part = piece % (CODE_PIECES / 2);
            u8* target = (u8*)__shfl_sync(~0u, (u64)way.target, row) + half * HALF_PAGE_BYTES;
            const u32 tokens = __shfl_sync(~0u, way.tokens, row), token = tokens >> 16;
            if (at >= n_rows * CODE_PIECES) continue;
            uint4 out[sizeof(Element)];
            expand(kind, bits[i], __uint_as_float((tokens >> half * 8 & 0xFF) << 23), out);
            UNROLL
            for (u32 k = 0; k < sizeof(Element); k++)
                if (part * sizeof(Element) + k < ROW_PIECES)
                    *(uint4*)(target + piece_from(token, part * sizeof(Element) + k)) = out[k];
        }
    }
}

// Brings `n_all` rows, whose ways `find` finds, by `n_warps` warps, of which this is one; `half_bytes` are from
// a key to its value. Each takes runs of up to 32 rows, as long as those of the others.
template <bool CODES, typename Find>
DEVICE void bring_rows(u32 warp, u32 n_warps, u32 n_all, u32 half_bytes, u32 kind, const Find& find) {
    const u32 lane = threadIdx.x % 32, n_runs = (n_all + 32 * n_warps - 1) / (32 * n_warps) * n_warps;
    if (n_all == 0) return;
    // Four rows keep a warp busy.
    const u32 run = min(((n_all + n_runs - 1) / n_runs + 3) / 4 * 4, 32u), stride = n_warps * run;
    u32 first = warp * run;
    Way next = {nullptr, nullptr, 0};
    if (lane < run && first + lane < n_all) next = find(first + lane);
    while (first < n_all) {
        const Way way = next;
        const u32 n_rows = min(n_all - first, run);
        first += stride;
        // Known before it is needed: a chain of loads.
        if (lane < run && first + lane < n_all) next = find(first + lane);
        if (CODES) copy_codes(way, n_rows, kind);
        else copy_rows(way, n_rows, half_bytes);
    }
}
