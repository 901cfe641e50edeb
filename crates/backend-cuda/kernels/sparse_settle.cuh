// Scores of a block's share, from what its pieces left: made, followed, and counted for the first time.

DEVICE void load_four(const u32* from, u32 (&to)[4]) {
    const uint4 four = *(const uint4*)from;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// Whether a place of the share is one that may be chosen.
DEVICE bool chooses_from(const DecideParams& p, const Share& share, u32 place) {
    return place >= p.sinks && place < share.end;
}

// Scores that are sorted into bins, from `low` to below `high`.
struct Range {
    u32 low, high;
};

// Bits of a score that a bin does not tell apart.
DEVICE u32 shift_of(Range range) {
    const u32 n = range.high - range.low;
    return n <= BINS ? 0 : 32 - __clz((n - 1) / BINS);
}

// Probabilities are first sorted by exponent and five bits: those from 2^-60 to 2^4.
#define COARSE_LOW ((127u - 60) << 23)
#define COARSE_SHIFT 18

DEVICE u32 coarse_bin(u32 score) {
    return score < COARSE_LOW ? 0 : min((score - COARSE_LOW) >> COARSE_SHIFT, (u32)BINS - 1);
}

DEVICE Range coarse_range(u32 bin) {
    return Range{bin == 0 ? 0 : COARSE_LOW + (bin << COARSE_SHIFT),
                 bin == BINS - 1 ? 1u << 31 : COARSE_LOW + ((bin + 1) << COARSE_SHIFT)};
}

// Where scores are sought at first: by their exponent and five bits, or, of bits that agree, one by one.
DEVICE Range whole_range(const DecideParams& p) {
    return Range{0, p.score.kind == SCORE_SIGNS ? p.score.group * p.score.width + 1 : 1u << 31};
}

// Counts a score of the whole range.
DEVICE void count_score(const DecideParams& p, u32 score, u32* bins) {
    const u32 bin = p.score.kind == SCORE_SIGNS ? score >> shift_of(whole_range(p)) : coarse_bin(score);
    atomicAdd(&bins[bin], 1u);
}

DEVICE void clear_bins(u32* bins) {
    __syncthreads();
    LOOP for (u32 i = threadIdx.x; i < BINS; i += SCORE_THREADS) bins[i] = 0;
    __syncthreads();
}

// What scores are made of: those of the group, `stride` apart, or one of bits that agree.
struct Raw {
    const float* first;  // of the share
    u64 stride;
};

DEVICE Raw raw_of(const DecideParams& p, const Share& share, const ScoreRoom& room, bool keeps) {
    if (keeps) return Raw{room.raw, PIECE};
    const u64 stride = p.score.stride, number = share.ask.number;
    if (p.score.kind == SCORE_SIGNS) return Raw{(const float*)p.score.scores + number * stride + share.start, 0};
    return Raw{p.score.raw + number * p.score.group * stride + share.start, stride};
}

// The score of a place of the share.
DEVICE u32 score_of(const DecideParams& p, const float2* totals, const float* raw, u64 stride) {
    return p.score.kind == SCORE_SIGNS ? __float_as_uint(*raw) : finish_score(p.score, totals, raw, stride);
}

// The same of four.
DEVICE void score_four(const DecideParams& p, const float2* totals, const Raw& raw, u32 at, u32 (&scores)[4]) {
    if (p.score.kind == SCORE_SIGNS) return load_four((const u32*)raw.first + at, scores);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // Few, and each is on its way for long.
#pragma unroll 4
    for (u32 g = 0; g < p.score.group; g++) {
        const float2 total = totals[g];
        const float4 next = *(const float4*)(raw.first + g * raw.stride + at);
        sums[0] = add_finished(total.x, total.y, next.x, sums[0]);
        sums[1] = add_finished(total.x, total.y, next.y, sums[1]);
        sums[2] = add_finished(total.x, total.y, next.z, sums[2]);
        sums[3] = add_finished(total.x, total.y, next.w, sums[3]);
    }
    UNROLL
    for (int i = 0; i < 4; i++) scores[i] = finished(sums[i]);
}

// Leaves raw scores of the share's last places to the block behind it.
DEVICE void leave_edge(const DecideParams& p, const Share& share, const Raw& raw) {
    const u32 n = share.end - share.start;
    const u32 n_raw = p.score.kind == SCORE_SIGNS ? 1 : p.score.group;
    LOOP for (u32 i = threadIdx.x; i < n_raw * N_FOLLOWERS; i += SCORE_THREADS) {
        const u32 back = i % N_FOLLOWERS + 1;
        if (back <= n) share.tally->edges[share.index][i] = raw.first[i / N_FOLLOWERS * raw.stride + n - back];
    }
}

// Scores of the eight places before each thread's four, in the order of places.
DEVICE void load_earlier(const u32* tile, const u32* before, u32 (&earlier)[8]) {
    UNROLL
    for (int part = 0; part < 2; part++) {
        const int at = (int)threadIdx.x * 4 - 8 + part * 4;
        const uint4 four = *(const uint4*)(at < 0 ? before + 8 + at : tile + at);
        earlier[part * 4] = four.x, earlier[part * 4 + 1] = four.y;
        earlier[part * 4 + 2] = four.z, earlier[part * 4 + 3] = four.w;
    }
}

// Makes the scores of the share of what its pieces left, gives places the best of their own score and of those of
// the places before them, less `fade` for each step (`topk::follow`), and counts them in `bins`.
// A thread has four places of each piece. `tile` is shared memory for those of one, and may be where the raw scores
// of a single piece are, which nobody else reads.
DEVICE void settle(const DecideParams& p, const Share& share, const Raw& raw, u32* tile, const float2* totals,
                   u32* bins) {
    static_assert(PIECE == 4 * SCORE_THREADS && N_FOLLOWERS < 8, "four places of a thread, and two threads before");
    __shared__ float edge[MAX_GROUP * N_FOLLOWERS];
    // Of the places before a piece: not yet the best of those before them.
    __shared__ __align__(16) u32 before[2][8];
    const u32 thread = threadIdx.x, n = share.end - share.start;
    const bool has_edge = p.fade > 0 && share.index > 0;
    LOOP for (u32 i = thread; has_edge && i < MAX_GROUP * N_FOLLOWERS; i += SCORE_THREADS)
        edge[i] = __ldcg(&share.tally->edges[share.index - 1][i]);
    clear_bins(bins);
    if (thread < 8) {
        const bool is_there = has_edge && thread >= 8 - N_FOLLOWERS;
        before[0][thread] = is_there ? score_of(p, totals, edge + 7 - thread, N_FOLLOWERS) : 0;
    }
    LOOP for (u32 start = 0; start < n; start += PIECE) {
        const u32 at = start + thread * 4, turn = start / PIECE % 2;
        u32* stay = share.scores == tile ? tile + start : tile;
        u32 own[4];
        if (at < n) score_four(p, totals, raw, at, own);
        UNROLL
        for (int i = 0; i < 4; i++) own[i] = at + i < n ? own[i] : 0;
        if (p.fade > 0) {
            *(uint4*)(stay + thread * 4) = make_uint4(own[0], own[1], own[2], own[3]);
            if (thread >= SCORE_THREADS - 2)
                *(uint4*)(before[1 - turn] + (thread - (SCORE_THREADS - 2)) * 4) =
                    make_uint4(own[0], own[1], own[2], own[3]);
            __syncthreads();
            u32 earlier[8];
            load_earlier(stay, before[turn], earlier);
            UNROLL
            for (int i = 3; i >= 0; i--) {
                u32 best = own[i];
                UNROLL
                for (int step = 1; step <= N_FOLLOWERS; step++) {
                    const u32 score = i >= step ? own[(i - step) & 3] : earlier[(8 + i - step) & 7];
                    const u32 lost = step * p.fade;
                    if (share.start + at + i >= p.sinks + step) best = max(best, max(score, lost) - lost);
                }
                own[i] = best;
            }
            __syncthreads();
        }
        UNROLL
        for (int i = 0; i < 4; i++)
            if (chooses_from(p, share, share.start + at + i)) count_score(p, own[i], bins);
        *(uint4*)(share.scores + at) = make_uint4(own[0], own[1], own[2], own[3]);
    }
    __syncthreads();
}
