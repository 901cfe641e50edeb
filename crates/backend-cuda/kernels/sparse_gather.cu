// Brings rows from the arena, on the device or on the host, to the working sets.
//
// moves [row][G][stride], each a place that comes, which ascend, and a row of the set that is free. For rows that
// were not brought by those who decided: the host has, or it is late, or threads of the host were asked for them
// (`sparse_post`); those are waited for, and rows come from where they were staged. The places are marked, if there
// are marks. Grid: as many blocks as may be busy with it. Reads and writes two rows, K and V, for each move.
// Conformance: picks_match.

struct GatherRowsParams {
    SparseHeads heads;
    SparsePages pages;
    const uint2* moves;
    u64 mark_stride;
    const u8* staged;  // [n_staged] rows that threads of the host have brought, or null
    u32* tickets;      // of what was asked for, and of what has come
    u32* is_closed;    // in memory of the host: whether nobody brings rows any more
    u32 n_staged;
    u32 first_head;    // of the layer, of all heads of the model
    u32 stride;        // of moves
    u32 padding;
    Codes codes;       // what rows that are far come as
};
static_assert(sizeof(GatherRowsParams) == GATHER_ROWS_PARAMS_SIZE, "the host's params differ");

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

// Works out how many rows the heads before each have to bring; gives how many there are in all. Rows are no kernel's
// work but uploaded, so they are there before the kernel before this one has ended; states are not.
DEVICE u32 count_moves(const GatherRowsParams& p, u32* firsts) {
    const u32 n = p.heads.n_rows * p.heads.n_kv_heads, lane = threadIdx.x % 32;
    const auto state_at = [&](u32 i) {
        const u32 at = min(i, n - 1);
        return state_of(p.heads, p.heads.rows[at / p.heads.n_kv_heads], at % p.heads.n_kv_heads);
    };
    const HeadState* state = state_at(lane);
    wait_for_previous();
    if (threadIdx.x < 32) {
        u32 before = 0;
        for (u32 start = 0; start < n; start += 32) {
            const u32 i = start + lane;
            u32 own = i < n ? state->n_moves : 0;
            if (start + 32 < n) state = state_at(i + 32);
            u32 upto = own;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(~0u, upto, step);
                if (lane >= step) upto += other;
            }
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

// The moves of all heads, one behind the other.
struct AllMoves {
    const GatherRowsParams& p;
    const u32* firsts;
    bool is_staged;

    __device__ void find(u32 index, u32& row, u32& head, u32& number) const {
        const u32 n_heads = p.heads.n_kv_heads, low = head_at(firsts, p.heads.n_rows * n_heads, index);
        row = low / n_heads, head = low % n_heads, number = index - firsts[low];
    }

    __device__ const uint2* moves(u32 row, u32 head) const {
        return p.moves + (u64)(row * p.heads.n_kv_heads + head) * p.stride;
    }

    __device__ u32 table_row(u32 row) const { return p.heads.rows[row].table_row; }

    __device__ Places places(u32 of_row, u32 head) const {
        const SparseRow& row = p.heads.rows[of_row];
        const HeadState* state = state_of(p.heads, row, head);
        Places places;
        places.marks = row.marks ? row.marks + (p.first_head + head) * p.mark_stride : nullptr;
        places.pages = row.pages, places.first = state->first;
        places.n_gone = state->n_gone, places.behind = state->n_members - state->n_moves, places.now = state->now;
        return places;
    }

    template <bool CODES>
    __device__ const u8* staged(u32 index) const {
        return is_staged ? p.staged + (u64)index * 2 * (CODES ? CODE_WIDTH : ROW_BYTES) : nullptr;
    }
};

// All of it, for rows as they are or in eight bits.
template <bool CODES>
DEVICE void gather(const GatherRowsParams& p) {
    __shared__ u64 barriers[GATHER_THREADS / 32 * RING_MOST];
    extern __shared__ __align__(128) u32 shared_words[];
    // Those in eight bits have half as many pieces, and work in each.
    const Ring<CODES, GATHER_RING_BYTES, CODES ? 2 : 4> ring((u8*)shared_words, barriers);
    allow_next();
    u32* firsts = shared_words + GATHER_THREADS / 32 * GATHER_RING_BYTES / 4;
    const u32 n_all = count_moves(p, firsts);
    bool is_staged = p.staged && n_all > 0 && n_all <= p.n_staged;
    if (is_staged) is_staged = have_come(p);
    const u32 warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, n_warps = gridDim.x * GATHER_THREADS / 32;
    bring_rows<CODES>(warp, n_warps, n_all, is_staged ? ROW_BYTES : HALF_PAGE_BYTES, p.pages, p.codes,
                      ring, AllMoves{p, firsts, is_staged});
}

// Beside two blocks of a product with one row there is room for two warps of 56 registers in each quarter of a
// multiprocessor; what does not fit there makes products, or attention, wait for a second round. Two blocks may
// come to the same one, so a block has at most four warps; three bring as much, and disturb less.
#define GATHER_BOUNDS __launch_bounds__(GATHER_THREADS, 65536 / 56 / GATHER_THREADS)

extern "C" __global__ void GATHER_BOUNDS sparse_gather(GatherRowsParams p) {
    gather<false>(p);
}

extern "C" __global__ void GATHER_BOUNDS sparse_gather_codes(GatherRowsParams p) {
    gather<true>(p);
}
