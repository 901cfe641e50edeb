// What the blocks that decide about one head have of it, and how they meet.

// A block's share of a head.
struct Share {
    u32 index, count;  // of the head's blocks
    u32 n_heads;       // that choose at once, at most
    Question ask;
    Tally* tally;
    uint2* marks;    // of the head
    u32* scores;     // of the share, from its first place on
    u32 start, end;  // places
    u32 n_met;       // times that the blocks met
};

// Counts what has ended: what the block wrote is there for whoever finds that all has.
DEVICE void count_end(u32* done, u32 n) {
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    atomicAdd(done, n);
}

// Gives the block its share: true if there is one. Nobody writes labels before all have looked.
DEVICE bool take_share(const DecideParams& p, Looks& looks, u32& number, Share& share) {
    const u32 thread = threadIdx.x, n = p.heads.n_rows * p.heads.n_kv_heads;
    const bool is_known = recalls(p);
    if (!(p.flags & FLAG_TOGETHER)) {
        number = blockIdx.y, share.index = blockIdx.x, share.count = gridDim.x, share.n_heads = n;
        if (is_known) recall(p, number, 1, share.index == 0, looks);
        else look_at(p, number, 1, looks);
        if (!is_known && share.index == 0 && thread == 0)
            tell(p, number, looks.lookups[0], looks.similarities[0]);
        return chooses(p, looks.lookups[0]);
    }
    if (is_known) recall(p, 0, n, blockIdx.x == 0, looks);
    else look_at(p, 0, n, looks);
    if (!is_known && blockIdx.x == 0 && thread < n)
        tell(p, thread, looks.lookups[thread], looks.similarities[thread]);
    // A lane for each head.
    static_assert(LOOK_MAX <= 32, "a warp has all heads");
    const u32 lane = thread % 32;
    u32 choosing = __ballot_sync(~0u, lane < n && chooses(p, looks.lookups[lane % LOOK_MAX]));
    share.n_heads = __popc(choosing);
    if (share.n_heads == 0) {
        // The others have nothing to say.
        if (p.done && blockIdx.x == 0) count_end(p.done, ALL_ENDED);
        return false;
    }
    if (!is_known && thread == 0) atomicAdd(&p.tallies->n_looked, 1u);
    share.count = min(gridDim.x / share.n_heads, (u32)MAX_BLOCKS);
    share.index = blockIdx.x % share.count;
    LOOP for (u32 before = blockIdx.x / share.count; before > 0; before--) choosing &= choosing - 1;
    number = __ffs(choosing) - 1;
    return choosing != 0;
}

// Asks for what the share reads, before anybody needs it.
DEVICE void fetch_share(const DecideParams& p, const Share& share) {
#if HAS_BULK
    const u32 end = (share.end + PAGE - 1) / PAGE;
    LOOP for (u32 page = share.start / PAGE + threadIdx.x; page < end; page += SCORE_THREADS) {
        const u64 entry = (u64)share.ask.table_row * p.score.pages.table_len + page;
        if (p.score.kind != SCORE_KEYS)
            bulk_prefetch(digest_of(p.score, share.ask, p.score.pages.tables[entry]), p.score.page_bytes);
        bulk_prefetch(share.marks + page * PAGE, PAGE * sizeof(uint2));
    }
#endif
}

// The block has ended. There is one row, so that all heads have equally many blocks; the first one makes up for
// how many there are. Those without a share have nothing to say.
DEVICE void end_share(const DecideParams& p, const Share& share) {
    if (p.done) count_end(p.done, blockIdx.x == 0 ? ALL_ENDED + 1 - share.n_heads * share.count : 1u);
}

// Says that the block has come to a meeting: what it wrote before is there for those who wait.
DEVICE void arrive(Share& share) {
    share.n_met++;
    __syncthreads();
    if (share.count == 1 || threadIdx.x > 0) return;
    __threadfence();
    atomicAdd(&share.tally->n_arrived, 1u);
}

// Thread 0 waits until a number that others raise is so large.
DEVICE void wait_until(const u32* number, u32 least) {
    u32 n;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(number) : "memory");
    } while (n < least);
}

// Waits for the other blocks; what they wrote before is there.
DEVICE void wait_for_others(const Share& share) {
    if (share.count > 1 && threadIdx.x == 0)
        wait_until(&share.tally->n_arrived, share.n_met * share.count);
    __syncthreads();
}

DEVICE void meet(Share& share) {
    arrive(share);
    wait_for_others(share);
}

// Waits until all blocks have looked, which the first blocks of all heads that choose do. Thread 0.
DEVICE void wait_for_looks(const DecideParams& p, const Share& share) {
    Tally* first = p.tallies;
    wait_until(&first->n_looked, gridDim.x);
    if (atomicAdd(&first->n_passed, 1u) + 1 == share.n_heads) first->n_looked = first->n_passed = 0;
}

// The block needs the tally no more; the last one makes it zero again.
DEVICE void leave(const Share& share) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&share.tally->n_left, 1u) + 1 == share.count;
    }
    __syncthreads();
    if (!is_last) return;
    LOOP for (u32 i = threadIdx.x; i < 5 * BINS / 4; i += SCORE_THREADS)
        ((uint4*)share.tally->digits)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) share.tally->n_arrived = share.tally->n_left = 0;
}

