// Brings rows from the arena, on the device or on the host, to the working sets.
//
// moves [row][G][stride]: places that come, which ascend, and beside them rows of the working set that
// are free: the first moves take those, the others the rows behind the last. A warp finds the ways of 32
// moves, one in each lane, and then copies their pieces of sixteen bytes, several at a time, because each
// is on its way for long. If threads of the host were asked for rows (`sparse_post`), they are waited for,
// and rows come from where they were staged. The places are marked, if there are marks, and afterwards
// the tallies of `decide` are zero again. Grid: as many blocks as may be busy with it. Reads and writes
// two rows, K and V, for each move. Conformance: picks_match.

struct GatherRowsParams {
    SparseHeads heads;
    SparsePages pages;
    const uint2* moves;
    u32* tallies;      // [row][G][tally_words], or null
    u64 tally_words;
    u64 mark_stride;
    const u8* staged;  // [n_staged] rows that threads of the host have brought, or null
    u32* tickets;      // of what was asked for, and of what has come
    u32* is_closed;    // in memory of the host: whether nobody brings rows any more
    u32 n_staged;
    u32 first_head;    // of the layer, of all heads of the model
    u32 stride;        // of moves
    u32 n_zeros;       // words of a tally
    Codes codes;       // what rows that are far come as
};
static_assert(sizeof(GatherRowsParams) == GATHER_ROWS_PARAMS_SIZE, "the host's params differ");

#define MOVE_PIECES (2 * ROW_PIECES)

// The last head whose first row is not behind this one; heads without rows are passed over.
DEVICE u32 head_at(const u32* firsts, u32 n, u32 index) {
    u32 low = 0, high = n;
    while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if (firsts[middle] <= index) low = middle;
        else high = middle;
    }
    return low;
}

// One row on its way: where its key is and where it goes, each without what its place in the page
// does to the order of its pieces.
struct Way {
    const u8* source;
    u8* target;
    u32 tokens;  // of its page, or the scales of its key and value; and of the page that it goes to
};

// Finds the way of a move, and marks its place.
template <bool CODES>
DEVICE Way way_of(const GatherRowsParams& p, const u32* firsts, u32 index, bool is_staged) {
    const u32 low = head_at(firsts, p.heads.n_rows * p.heads.n_kv_heads, index);
    const u32 head = low % p.heads.n_kv_heads, number = index - firsts[low];
    const uint2 move = p.moves[(u64)low * p.stride + number];
    const SparseRow& row = p.heads.rows[low / p.heads.n_kv_heads];
    const HeadState* state = state_of(p.heads, row, head);
    const u32 to = number < state->n_gone ? move.y : state->n_members - state->n_moves + number;
    const u32 page = state->first_page + to / PAGE, token = move.x % PAGE;
    Way way;
    if (CODES) {
        const u32 slot = p.pages.tables[(u64)row.table_row * p.pages.table_len + move.x / PAGE];
        const u64 at = code_row(p.codes, head, slot, token);
        way.source = is_staged ? p.staged + (u64)index * 2 * CODE_WIDTH : p.codes.rows + at * 2 * CODE_WIDTH;
        way.tokens = ((const u16*)p.codes.scales)[at] | to % PAGE << 16;
    } else {
        way.source = is_staged ? p.staged + (u64)index * 2 * ROW_BYTES
                               : page_of(p.pages, head, row.table_row, move.x / PAGE) + token * ROW_BYTES;
        way.tokens = token | to % PAGE << 16;
    }
    way.target = row.pages + (u64)page * HEAD_PAGE_BYTES + to % PAGE * ROW_BYTES;
    if (row.marks)
        row.marks[(p.first_head + head) * p.mark_stride + move.x] = make_uint2(state->now, to);
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

// Works out how many rows the heads before each have to bring, and as bits whether a head has chosen;
// gives how many there are in all.
DEVICE u32 count_moves(const GatherRowsParams& p, u32* firsts, u32* chosen) {
    const u32 n = p.heads.n_rows * p.heads.n_kv_heads, lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        u32 before = 0;
        for (u32 start = 0; start < n; start += 32) {
            const u32 i = start + lane;
            u32 own = 0;
            bool has_chosen = false;
            if (i < n) {
                const SparseRow& row = p.heads.rows[i / p.heads.n_kv_heads];
                const HeadState* state = state_of(p.heads, row, i % p.heads.n_kv_heads);
                own = state->n_moves;
                // Those that choose late have not before their turn.
                has_chosen = state->lookup != LOOKUP_NOTHING && state->lookup != LOOKUP_HIT &&
                             state->made_at == row.kv_len;
            }
            u32 upto = own;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(~0u, upto, step);
                if (lane >= step) upto += other;
            }
            const u32 bits = __ballot_sync(~0u, has_chosen);
            if (lane == 0) chosen[start / 32] = bits;
            if (i < n) firsts[i] = before + upto - own;
            before += __shfl_sync(~0u, upto, 31);
        }
        if (lane == 0) firsts[n] = before;
    }
    __syncthreads();
    return firsts[n];
}

#define MAX_POLLS (1u << 22)  // some seconds

// Waits for rows from the host; false if nobody brings them. The whole block.
DEVICE bool have_come(const GatherRowsParams& p) {
    __shared__ bool has_come;
    if (threadIdx.x == 0) {
        bool is_closed = false;
        u32 came = 0;
        for (u32 n = 1; !is_closed; n++) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(came) : "l"(p.tickets + 1) : "memory");
            if (came == p.tickets[0]) break;
            // The host's memory is far.
            if (n % 1024 == 0) is_closed = *(volatile u32*)p.is_closed;
            if (n == MAX_POLLS) *(volatile u32*)p.is_closed = is_closed = true;
        }
        has_come = !is_closed;
    }
    __syncthreads();
    return has_come;
}

// All of it, for rows as they are or in eight bits.
template <bool CODES>
DEVICE void gather(const GatherRowsParams& p) {
    begin();
    // As little as there is need for: two blocks of a product leave two kilobytes.
    extern __shared__ __align__(128) u32 shared_words[];
    const u32 n = p.heads.n_rows * p.heads.n_kv_heads;
    u32 *firsts = shared_words, *chosen = firsts + n + 1;
    const u32 n_all = count_moves(p, firsts, chosen);
    const u32 lane = threadIdx.x % 32;
    bool is_staged = p.staged && n_all > 0 && n_all <= p.n_staged;
    if (is_staged) is_staged = have_come(p);
    // A warp takes runs of 32 rows.
    const u32 stride = gridDim.x * GATHER_THREADS, half_bytes = is_staged ? ROW_BYTES : HALF_PAGE_BYTES;
    const u32 thread = threadIdx.x * gridDim.x + blockIdx.x;
    u32 first = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32;
    Way next = {nullptr, nullptr, 0};
    if (first + lane < n_all) next = way_of<CODES>(p, firsts, first + lane, is_staged);
    while (first < n_all) {
        const Way way = next;
        const u32 n_rows = min(n_all - first, 32u);
        first += stride;
        // Known before it is needed: a chain of loads.
        if (first + lane < n_all) next = way_of<CODES>(p, firsts, first + lane, is_staged);
        if (CODES) copy_codes(way, n_rows, p.codes.kind);
        else copy_rows(way, n_rows, half_bytes);
    }
    // The second word of the first counts blocks, whoever has chosen.
    if (p.tallies && thread == 0) p.tallies[1] = 0;
    for (u32 number = 0; p.tallies && number < n; number++)
        if (chosen[number / 32] >> number % 32 & 1)
            for (u32 i = thread; i < p.n_zeros / 4; i += stride)
                *(uint4*)(p.tallies + number * p.tally_words + i * 4) = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 1024 / GATHER_THREADS)
    sparse_gather(GatherRowsParams p) {
    gather<false>(p);
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 1024 / GATHER_THREADS)
    sparse_gather_codes(GatherRowsParams p) {
    gather<true>(p);
}
