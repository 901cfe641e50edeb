// Brings rows from the arena, on the device or on the host, to the working sets.
//
// moves [row][G][stride]: places that come, which ascend, and beside them rows of the working set that
// are free: the first moves take those, the others the rows behind the last. A thread copies pieces of
// sixteen bytes, several at a time, because each is on its way for long. If threads of the host were
// asked for rows (`sparse_post`), they are waited for, and rows come from where they were staged.
// Afterwards the places are marked, if there are marks, and the tallies of `decide` are zero again. Grid: as many blocks as may be busy with it. Reads and writes two row
// pieces, K and V, for each move. Conformance: picks_match.

struct GatherRowsParams {
    SparseHeads heads;
    SparsePages pages;
    const uint2* moves;
    u32* tallies;      // [row][G][tally_words], or null
    u64 tally_words;
    u64 mark_stride;
    const u8* staged;  // [n_staged] rows that threads of the host have brought, or null
    u32* tickets;      // of what was asked for, and of what has come
    u32 n_staged;
    u32 first_head;    // of the layer, of all heads of the model
    u32 stride;        // of moves
    u32 n_zeros;       // words of a tally
};
static_assert(sizeof(GatherRowsParams) == GATHER_ROWS_PARAMS_SIZE, "the host's params differ");

#define GATHER_THREADS 512
#define GATHER_PIECES 8  // of a thread that are on their way: eight blocks fill the link
#define GATHER_NUMBERS 1024  // rows and heads; `MAX_NUMBERS` of sparse_attend.cu
#define MOVE_PIECES (2 * ROW_PIECES)

// A sixteenth of a row, or so, on its way.
struct Flight {
    uint4 bits;
    u8* target;
};

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

DEVICE Flight take_off(const GatherRowsParams& p, const u32* firsts, u32 at, bool is_staged) {
    const u32 index = at / MOVE_PIECES, piece = at % MOVE_PIECES;
    const u32 low = head_at(firsts, p.heads.n_rows * p.heads.n_kv_heads, index);
    const u32 head = low % p.heads.n_kv_heads;
    const SparseRow& row = p.heads.rows[low / p.heads.n_kv_heads];
    const HeadState* state = state_of(p.heads, row, head);
    const u32 number = index - firsts[low];
    const uint2 move = p.moves[(u64)low * p.stride + number];
    const u32 half = piece / ROW_PIECES * HALF_PAGE_BYTES, part = piece % ROW_PIECES;
    const u32 token = move.x % PAGE;
    // A staged row has its key and its value, each as in its page.
    const u8* source = is_staged ? p.staged + ((u64)index * 2 + piece / ROW_PIECES) * ROW_BYTES -
                                       token * ROW_BYTES
                                 : page_of(p.pages, head, row.table_row, move.x / PAGE) + half;
    Flight flight;
    flight.bits = *(const uint4*)(source + piece_at(token, part) * 16);
    const u32 to = number < state->n_gone ? move.y : state->n_members - state->n_moves + number;
    const u32 page = state->first_page + to / PAGE;
    flight.target = row.pages + (u64)page * HEAD_PAGE_BYTES + half + piece_at(to % PAGE, part) * 16;
    if (piece == 0 && row.marks)
        row.marks[(p.first_head + head) * p.mark_stride + move.x] = make_uint2(state->now, to);
    return flight;
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
                has_chosen = state->lookup != LOOKUP_NOTHING && state->lookup != LOOKUP_HIT;
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

extern "C" __global__ void __launch_bounds__(GATHER_THREADS) sparse_gather(GatherRowsParams p) {
    begin();
    __shared__ u32 firsts[GATHER_NUMBERS + 1], chosen[GATHER_NUMBERS / 32];
    const u32 n = p.heads.n_rows * p.heads.n_kv_heads, n_all = count_moves(p, firsts, chosen);
    const u32 stride = gridDim.x * GATHER_THREADS, thread = blockIdx.x * GATHER_THREADS + threadIdx.x;
    const u32 end = n_all * MOVE_PIECES;
    const bool is_staged = p.staged && n_all > 0 && n_all <= p.n_staged;
    if (is_staged && threadIdx.x == 0) {
        u32 came;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(came) : "l"(p.tickets + 1) : "memory");
        } while (came != p.tickets[0]);
    }
    __syncthreads();
    for (u32 first = thread; first < end; first += GATHER_PIECES * stride) {
        Flight flights[GATHER_PIECES];
        UNROLL
        for (int i = 0; i < GATHER_PIECES; i++)
            if (first + i * stride < end) flights[i] = take_off(p, firsts, first + i * stride, is_staged);
        UNROLL
        for (int i = 0; i < GATHER_PIECES; i++)
            if (first + i * stride < end) *(uint4*)flights[i].target = flights[i].bits;
    }
    // The second word of the first counts blocks, whoever has chosen.
    if (p.tallies && thread == 0) p.tallies[1] = 0;
    for (u32 number = 0; p.tallies && number < n; number++)
        if (chosen[number / 32] >> number % 32 & 1)
            for (u32 i = thread; i < p.n_zeros; i += stride) p.tallies[number * p.tally_words + i] = 0;
}
