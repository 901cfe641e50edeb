// What the blocks that decide about one head have of it, how they meet, and what they tell each other of
// places that follow good ones.

// A block's share of a head.
struct Share {
    u32 index, count;  // of the head's blocks
    Question ask;
    Tally* tally;
    uint2* marks;    // of the head
    u32* scores;     // of the share, from its first place on
    u32 start, end;  // places
    u32 n_met;       // times that the blocks met
};

// Waits for the other blocks; what they wrote before is there.
DEVICE void meet(Share& share) {
    share.n_met++;
    __syncthreads();
    if (share.count > 1 && threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&share.tally->n_arrived, 1u);
        u32 n;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(n)
                         : "l"(&share.tally->n_arrived)
                         : "memory");
        } while (n < share.n_met * share.count);
    }
    __syncthreads();
}

// Leaves raw scores of the share's last places to the block behind it; those of a query are `stride` apart.
DEVICE void leave_edge(const DecideParams& p, const Share& share, const float* raw, u64 stride) {
    const u32 n = share.end - share.start;
    const u32 n_raw = p.score.kind == SCORE_SIGNS ? 1 : p.score.group;
    for (u32 i = threadIdx.x; i < n_raw * N_FOLLOWERS; i += SCORE_THREADS) {
        const u32 back = i % N_FOLLOWERS + 1;
        if (back <= n) share.tally->edges[share.index][i] = raw[i / N_FOLLOWERS * stride + n - back];
    }
}

// Gives places the best of their own score and of those before them, less `fade` for each step;
// `topk::follow`.
DEVICE void follow(const DecideParams& p, const Share& share, const float2* totals) {
    __shared__ float edge[MAX_GROUP * N_FOLLOWERS];
    __shared__ u32 before[N_FOLLOWERS];  // scores of the places before the share, the last first
    const u32 thread = threadIdx.x, n = share.end - share.start;
    const bool is_signs = p.score.kind == SCORE_SIGNS;
    for (u32 i = thread; share.index > 0 && i < MAX_GROUP * N_FOLLOWERS; i += SCORE_THREADS)
        edge[i] = __ldcg(&share.tally->edges[share.index - 1][i]);
    __syncthreads();
    if (share.index > 0 && thread < N_FOLLOWERS)
        before[thread] = is_signs ? __float_as_uint(edge[thread])
                                  : finish_score(p.score, totals, edge + thread, N_FOLLOWERS);
    __syncthreads();
    // From the last places on, so that nobody reads what was written already.
    for (u32 end = (n + SCORE_THREADS - 1) / SCORE_THREADS * SCORE_THREADS; end > 0; end -= SCORE_THREADS) {
        const u32 i = end - SCORE_THREADS + thread;
        u32 best = i < n ? share.scores[i] : 0;
        for (u32 step = 1; i < n && step <= N_FOLLOWERS && share.start + i >= p.sinks + step; step++) {
            const u32 lost = step * p.fade;
            const u32 score = i >= step ? share.scores[i - step] : before[step - i - 1];
            best = max(best, max(score, lost) - lost);
        }
        __syncthreads();
        if (i < n) share.scores[i] = best;
        __syncthreads();
    }
}
