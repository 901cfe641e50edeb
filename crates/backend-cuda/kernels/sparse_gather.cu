// Brings rows from the arena, on the device or on the host, to the working sets.
//
// moves [row][G][stride]: place, row of the working set; places ascend. A thread copies pieces of
// sixteen bytes, several at a time, because each is on its way for long. Afterwards the tallies of
// `decide` are zero again. Grid: as many blocks as may be busy with it. Reads and writes two row
// pieces, K and V, for each move. Conformance: picks_match.

struct GatherRowsParams {
    SparseHeads heads;
    SparsePages pages;
    const uint2* moves;
    u32* tallies;      // [row][G][tally_words], or null
    u64 tally_words;
    u32 stride;        // of moves
    u32 n_zeros;       // words of a tally
};
static_assert(sizeof(GatherRowsParams) == GATHER_ROWS_PARAMS_SIZE, "the host's params differ");

#define GATHER_THREADS 512
#define GATHER_PIECES 4  // of a thread that are on their way
#define MOVE_PIECES (2 * ROW_PIECES)

// A sixteenth of a row, or so, on its way.
struct Flight {
    uint4 bits;
    u8* target;
};

DEVICE Flight take_off(const GatherRowsParams& p, const SparseRow& row, const HeadState& state, u32 head,
                       uint2 move, u32 piece) {
    const u32 half = piece / ROW_PIECES * HALF_PAGE_BYTES, at = piece % ROW_PIECES;
    const u8* source = page_of(p.pages, head, row.table_row, move.x / PAGE) + half;
    u8* target = row.pages + (u64)(state.first_page + move.y / PAGE) * HEAD_PAGE_BYTES + half;
    Flight flight;
    flight.bits = *(const uint4*)(source + piece_at(move.x % PAGE, at) * 16);
    flight.target = target + piece_at(move.y % PAGE, at) * 16;
    return flight;
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS) sparse_gather(GatherRowsParams p) {
    begin();
    const u32 stride = gridDim.x * GATHER_THREADS, thread = blockIdx.x * GATHER_THREADS + threadIdx.x;
    for (u32 number = 0; number < p.heads.n_rows * p.heads.n_kv_heads; number++) {
        const u32 head = number % p.heads.n_kv_heads;
        const SparseRow row = p.heads.rows[number / p.heads.n_kv_heads];
        const HeadState state = *state_of(p.heads, row, head);
        const bool is_chosen = state.lookup != LOOKUP_NOTHING && state.lookup != LOOKUP_HIT;
        if (p.tallies && is_chosen)
            for (u32 i = thread; i < p.n_zeros; i += stride) p.tallies[number * p.tally_words + i] = 0;
        const uint2* moves = p.moves + (u64)number * p.stride;
        const u32 n = state.n_moves * MOVE_PIECES;
        for (u32 first = thread; first < n; first += GATHER_PIECES * stride) {
            Flight flights[GATHER_PIECES];
            UNROLL
            for (int i = 0; i < GATHER_PIECES; i++) {
                const u32 at = first + i * stride;
                if (at < n)
                    flights[i] = take_off(p, row, state, head, moves[at / MOVE_PIECES], at % MOVE_PIECES);
            }
            UNROLL
            for (int i = 0; i < GATHER_PIECES; i++)
                if (first + i * stride < n) *(uint4*)flights[i].target = flights[i].bits;
        }
    }
}
