// Asks threads of the host for the rows that are to be brought: the other way to bring them.
//
// The host finds addresses of rows, in the order in which `sparse_gather` will look for them, how many
// there are, and a new ticket; once the rows are on the device, the ticket is there too. If there are
// none, or more than there is room for, nobody is asked. Grid: (blocks). Writes 8 bytes a row over the
// link.

// In memory of the host.
struct Order {
    u32 ticket;
    u32 n;
    u32 is_closed;
    u32 padding[13];
    u64 rows[1];  // where keys of rows are; values are HALF_PAGE_BYTES behind, or right behind codes
};

struct PostParams {
    GatherRowsParams gather;
    Order* order;
    u32* n_ended;  // blocks; zero before and after
};
static_assert(sizeof(PostParams) == POST_PARAMS_SIZE, "the host's PostParams differs");

extern "C" __global__ void __launch_bounds__(GATHER_THREADS) sparse_post(PostParams post) {
    begin();
    const GatherRowsParams& p = post.gather;
    extern __shared__ __align__(128) u32 shared_words[];
    u32* firsts = shared_words;
    const u32 n_all = count_moves(p, firsts);
    const bool asks = n_all > 0 && n_all <= p.n_staged;
    for (u32 index = blockIdx.x * GATHER_THREADS + threadIdx.x; asks && index < n_all;
         index += gridDim.x * GATHER_THREADS) {
        const u32 number = head_at(firsts, p.heads.n_rows * p.heads.n_kv_heads, index);
        const SparseRow& row = p.heads.rows[number / p.heads.n_kv_heads];
        const u32 place = p.moves[(u64)number * p.stride + index - firsts[number]].x;
        const u32 slot = p.pages.tables[(u64)row.table_row * p.pages.table_len + place / PAGE];
        const u32 head = number % p.heads.n_kv_heads;
        const u8* key = p.codes.rows
            ? codes_at(p.codes, head, slot, place % PAGE)
            : p.pages.layer + head * p.pages.head_bytes + (u64)slot * HEAD_PAGE_BYTES + place % PAGE * ROW_BYTES;
        post.order->rows[index] = (u64)key;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(post.n_ended, 1u) + 1 < gridDim.x) return;
    // The last block: what the others wrote is there.
    __threadfence_system();
    *post.n_ended = 0;
    if (!asks) return;
    const u32 ticket = p.tickets[0] + 1;
    p.tickets[0] = ticket;
    post.order->n = n_all;
    __threadfence_system();
    *(volatile u32*)&post.order->ticket = ticket;
}
