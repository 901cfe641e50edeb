// Decides about the heads of rows: whether the last selection serves, and if not, which places are
// chosen, which rows of the working set go, and which rows are brought where.
//
//   look up ── hit ──► nothing changes
//      └── miss ─► scores ─► k best, equal ones by place ─► working set, least recently chosen go first
//
// The places of a head that misses are shared by blocks, which wait for each other; all of them are on
// the device at once. Every block looks up by itself, so that hits cost nothing but that. If heads are
// few, each block looks at all of them, and the blocks share the heads that miss. What is decided is what
// attention/src/topk decides from the same scores, number by number: the sums of a cosine have the order
// of `reuse::cosine`, k is computed in f64, and ties have its order.
//
// Reads digests of all places once, and 8 bytes of marks three times; all else is smaller. Scores are in
// the second-level cache. Grid: (blocks), or (share, row and head).

// A block's share of a head.
struct Share {
    u32 index, count;  // of the head's blocks
    Question ask;
    Tally* tally;
    uint2* marks;    // of the head
    u32* scores;     // of the head
    u32* freed;      // [place]: rows that go, from each block's first place on
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

// Rows that a selection of `n` places has; `Budget::weighted_rows`.
DEVICE u32 rows_of(const DecideParams& p, u32 n, float weight) {
    const double wanted = ceil(__ddiv_rn(__dmul_rn(__dmul_rn(p.percent, (double)weight), (double)n), 100.0));
    const u32 k = wanted >= 4294967295.0 ? ~0u : (u32)wanted;
    return min(min(max(k, p.k_min), p.k_max), n);
}

// The sum over the block's threads before this one, and over all of them.
DEVICE u32 scan_of(u32 own, u32* counts, u32& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 upto = own;
    UNROLL
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
    }
    __syncthreads();
    if (lane == 31) counts[warp] = upto;
    __syncthreads();
    u32 before = upto - own;
    total = 0;
    UNROLL
    for (int i = 0; i < SCORE_WARPS; i++) {
        const u32 n = counts[i];
        if (i < warp) before += n;
        total += n;
    }
    return before;
}

struct Bin {
    u32 number, rest;
};

// The bin of the `k`-th from above, and which one in it that is; 1 <= k <= all.
DEVICE Bin find_bin(const u32* bins, u32 k, u32* shared) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, EACH = BINS / SCORE_THREADS;
    u32 own[EACH], sum = 0;
    UNROLL
    for (int i = 0; i < EACH; i++) {
        own[i] = __ldcg(bins + BINS - 1 - (thread * EACH + i));
        sum += own[i];
    }
    u32 upto = sum;
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
    }
    __syncthreads();
    if (lane == 31) shared[warp] = upto;
    __syncthreads();
    for (u32 i = 0; i < warp; i++) upto += shared[i];
    u32 before = upto - sum;
    if (before < k && k <= upto) {
        for (int i = 0; i < EACH; i++) {
            if (k <= before + own[i]) {
                shared[SCORE_WARPS] = BINS - 1 - (thread * EACH + i);
                shared[SCORE_WARPS + 1] = k - before;
                break;
            }
            before += own[i];
        }
    }
    __syncthreads();
    return Bin{shared[SCORE_WARPS], shared[SCORE_WARPS + 1]};
}

DEVICE void clear_bins(u32* bins) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += SCORE_THREADS) bins[i] = 0;
    __syncthreads();
}

// Adds the block's bins to the head's, and keeps the first `n_kept` for the other blocks to see.
DEVICE void add_bins(const u32* bins, u32* all, u32* own, u32 n_kept) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += SCORE_THREADS) {
        if (bins[i] > 0) atomicAdd(all + i, bins[i]);
        if (i < n_kept) own[i] = bins[i];
    }
}

// What is chosen: all above the threshold, and the first few that reach it.
struct Choice {
    u32 threshold, n_equal;
    u32 n_before;  // that reach it, in the blocks before
};

// Finds the choice of the k best places of the head, by eleven, eleven and nine bits of the scores, of
// which the highest is zero; numbers of bits that agree have no more than eleven, mostly.
DEVICE Choice choose(const DecideParams& p, Share& share, u32 k, u32* bins, u32* shared) {
    const u32 first = max(share.start, p.sinks);
    const bool is_small = p.score.kind == SCORE_SIGNS && p.score.group * p.score.width < BINS;
    u32 prefix = 0, mask = 0, rest = k;
    for (u32 pass = is_small ? 2 : 0; pass < 3; pass++) {
        const u32 shift = pass == 0 ? 20 : pass == 1 ? 9 : 0;
        const u32 digits = pass == 2 && !is_small ? 511 : BINS - 1;
        clear_bins(bins);
        for (u32 place = first + threadIdx.x; place < share.end; place += SCORE_THREADS) {
            const u32 score = share.scores[place];
            if ((score & mask) == prefix) atomicAdd(&bins[score >> shift & digits], 1u);
        }
        add_bins(bins, share.tally->digits[pass], share.tally->own_digits[share.index],
                 pass == 2 ? digits + 1 : 0);
        meet(share);
        const Bin bin = find_bin(share.tally->digits[pass], rest, shared);
        prefix |= bin.number << shift, mask |= digits << shift, rest = bin.rest;
    }
    const u32 last = is_small ? prefix : prefix & 511;
    const u32 own = threadIdx.x < share.index ? __ldcg(&share.tally->own_digits[threadIdx.x][last]) : 0;
    u32 n_before;
    scan_of(own, shared, n_before);
    return Choice{prefix, rest, n_before};
}

// Rows that go: those that were not chosen for longer than `age`, and the first few of just that age.
struct Leaving {
    u32 age, n_equal;
    u32 n_before;
};

DEVICE u32 age_of(u32 now, u32 stamp) { return min(now - stamp, (u32)AGE_MAX); }

// Finds who goes so that `capacity` rows stay. Marks of the chosen are written in `scores`: all bits.
DEVICE Leaving find_leaving(const DecideParams& p, Share& share, u32 now, u32 k, u32 capacity,
                            u32* bins, u32* shared) {
    // Only the chosen stay.
    if (capacity <= k) return Leaving{0, 0, 0};
    clear_bins(bins);
    for (u32 place = share.start + threadIdx.x; place < share.end; place += SCORE_THREADS) {
        const u32 stamp = share.marks[place].x;
        if (stamp > 0 && share.scores[place] != ~0u) atomicAdd(&bins[age_of(now, stamp)], 1u);
    }
    add_bins(bins, share.tally->ages, share.tally->own_ages[share.index], BINS);
    meet(share);
    u32 sum = 0;
    for (u32 i = threadIdx.x; i < BINS; i += SCORE_THREADS) sum += __ldcg(&share.tally->ages[i]);
    u32 total;
    scan_of(sum, shared, total);
    total += k;
    if (total <= capacity) return Leaving{~0u, 0, 0};
    const Bin bin = find_bin(share.tally->ages, total - capacity, shared);
    const u32 own =
        threadIdx.x < share.index ? __ldcg(&share.tally->own_ages[threadIdx.x][bin.number]) : 0;
    u32 n_before;
    scan_of(own, shared, n_before);
    return Leaving{bin.number, bin.rest, n_before};
}

// A thread's four places of a tile.
DEVICE void load_four(const u32* from, u32 (&to)[4]) {
    const uint4 four = *(const uint4*)from;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// Marks the chosen: all bits of their scores.
DEVICE void mark_chosen(const DecideParams& p, const Share& share, bool is_all, Choice choice, u32* counts) {
    u32 n_equal = choice.n_before;
    for (u32 first = share.start; first < share.end; first += TILE) {
        const u32 place = first + threadIdx.x * 4;
        u32 scores[4], own = 0, total = 0;
        bool is_there[4];
        load_four(share.scores + place, scores);
        UNROLL
        for (int i = 0; i < 4; i++) {
            is_there[i] = place + i < share.end && place + i >= p.sinks;
            own += is_there[i] && scores[i] == choice.threshold;
        }
        u32 rank = is_all ? 0 : n_equal + scan_of(own, counts, total);
        UNROLL
        for (int i = 0; i < 4; i++) {
            const bool is_equal = is_there[i] && scores[i] == choice.threshold;
            const bool is_chosen = is_there[i] && (is_all || scores[i] > choice.threshold ||
                                                   (is_equal && rank < choice.n_equal));
            rank += is_equal;
            scores[i] = is_chosen ? ~0u : 0;
        }
        *(uint4*)(share.scores + place) = make_uint4(scores[0], scores[1], scores[2], scores[3]);
        n_equal += total;
    }
    __syncthreads();
}

// Marks of four places, and which of those are chosen.
struct Four {
    uint2 marks[4];
    bool is_chosen[4], is_new[4];
};

DEVICE Four load_marks(const Share& share, u32 place, bool is_whole) {
    Four four;
    u32 low[4], high[4], scores[4];
    load_four((const u32*)(share.marks + place), low);
    load_four((const u32*)(share.marks + place + 2), high);
    load_four(share.scores + place, scores);
    four.marks[0] = make_uint2(low[0], low[1]), four.marks[1] = make_uint2(low[2], low[3]);
    four.marks[2] = make_uint2(high[0], high[1]), four.marks[3] = make_uint2(high[2], high[3]);
    UNROLL
    for (int i = 0; i < 4; i++) {
        if (place + i >= share.end) four.marks[i].x = 0;
        four.is_chosen[i] = place + i < share.end && scores[i] != 0;
        four.is_new[i] = four.is_chosen[i] && (four.marks[i].x == 0 || is_whole);
    }
    return four;
}

// Brings the working set up to date; gives how many rows went and came.
DEVICE uint2 change_set(const DecideParams& p, Share& share, const HeadState& state, u32 now,
                        Leaving leaving, uint2* moves, u32* counts, u32* gone_before) {
    const bool is_whole = p.flags & FLAG_WHOLE && p.working_set == 1.0f;
    u32 n_same = leaving.n_before, n_gone = 0, n_new = 0;
    for (u32 first = share.start; first < share.end; first += TILE) {
        const u32 place = first + threadIdx.x * 4;
        const Four four = load_marks(share, place, is_whole);
        // Two counts in one number.
        u32 own = 0, total;
        UNROLL
        for (int i = 0; i < 4; i++) {
            const bool is_idle = four.marks[i].x > 0 && !four.is_chosen[i];
            own += (is_idle && age_of(now, four.marks[i].x) == leaving.age) + (four.is_new[i] << 16);
        }
        u32 rank = n_same + (scan_of(own, counts, total) & 0xFFFF), n_going = 0;
        bool goes[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const u32 age = four.marks[i].x > 0 ? age_of(now, four.marks[i].x) : 0;
            const bool is_idle = four.marks[i].x > 0 && !four.is_chosen[i];
            const bool is_same = is_idle && age == leaving.age;
            goes[i] = is_idle && (age > leaving.age || (is_same && rank < leaving.n_equal));
            rank += is_same;
            n_going += goes[i];
        }
        n_same += total & 0xFFFF, n_new += total >> 16;
        // Nobody goes if that is not known to be needed.
        if (!is_whole && leaving.age != ~0u) {
            u32 at = share.start + n_gone + scan_of(n_going, counts, total);
            UNROLL
            for (int i = 0; i < 4; i++)
                if (goes[i]) share.freed[at++] = four.marks[i].y;
            n_gone += total;
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            if (goes[i]) share.marks[place + i] = make_uint2(0, 0);
            if (four.is_chosen[i] && four.marks[i].x > 0) share.marks[place + i].x = now;
        }
    }
    if (threadIdx.x == 0) share.tally->changes[share.index] = make_uint2(n_gone, n_new);
    meet(share);
    // A thread for each block.
    const u32 block = threadIdx.x;
    const uint2 change = block < share.count ? __ldcg(&share.tally->changes[block]) : make_uint2(0, 0);
    u32 all_gone, all_new, new_before;
    const u32 gone = scan_of(change.x, counts, all_gone);
    if (block <= share.count) gone_before[block] = gone;
    scan_of(change.y, counts, all_new);
    scan_of(block < share.index ? change.y : 0, counts, new_before);
    // A row that comes takes the place of one that goes, in order, and then those behind the last.
    const u32 n_members = is_whole ? 0 : state.n_members;
    const u32 n_pieces = (share.ask.n + PIECE - 1) / PIECE;
    for (u32 first = share.start; n_new > 0 && first < share.end; first += TILE) {
        const u32 place = first + threadIdx.x * 4;
        const Four four = load_marks(share, place, is_whole);
        u32 own = 0, total;
        UNROLL
        for (int i = 0; i < 4; i++) own += four.is_new[i];
        u32 number = new_before + scan_of(own, counts, total);
        UNROLL
        for (int j = 0; j < 4; j++) {
            if (!four.is_new[j]) continue;
            u32 row = n_members + number - all_gone;
            if (number < all_gone) {
                // The last block before which no more went.
                u32 low = 0, high = share.count;
                while (low + 1 < high) {
                    const u32 middle = (low + high) / 2;
                    if (gone_before[middle] <= number) low = middle;
                    else high = middle;
                }
                row = __ldcg(share.freed + low * n_pieces / share.count * PIECE + number -
                             gone_before[low]);
            }
            share.marks[place + j] = make_uint2(now, row);
            moves[number] = make_uint2(place + j, row);
            number++;
        }
        new_before += total;
    }
    return make_uint2(all_gone, all_new);
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 2) decide(DecideParams p) {
    extern __shared__ __align__(128) u32 shared_words[];
    __shared__ u32 bins[BINS];
    __shared__ u32 shared[SCORE_WARPS + 2];
    __shared__ Looks looks;
    __shared__ float2 totals[MAX_GROUP];
    __shared__ u32 gone_before[MAX_BLOCKS + 1];
    begin();
    u32 number;
    Share share;
    if (!take_share(p, looks, number, share.index, share.count)) return;
    const u32 head = number % p.heads.n_kv_heads, thread = threadIdx.x;
    const SparseRow row = p.heads.rows[number / p.heads.n_kv_heads];
    HeadState* target = state_of(p.heads, row, head);
    const HeadState state = *target;
    const u32 cut = cut_of(p, row.kv_len), n_pieces = (cut + PIECE - 1) / PIECE;
    share.count = min(share.count, n_pieces);
    if (share.index >= share.count) return;
    share.ask = Question{number, row.row, row.table_row, head, cut};
    share.tally = p.tallies + number;
    share.marks = row.marks + (p.first_head + head) * p.mark_stride;
    share.scores = p.score.scores + (u64)number * p.score.stride;
    // Raw scores are not needed any more when rows are freed.
    share.freed = (u32*)(p.score.raw + (u64)number * p.score.group * p.score.stride);
    share.n_met = 0;
    const u32 first_piece = share.index * n_pieces / share.count;
    const u32 end_piece = (share.index + 1) * n_pieces / share.count;
    share.start = first_piece * PIECE, share.end = min(end_piece * PIECE, cut);
    const u32 k = rows_of(p, cut - p.sinks, p.rules[head].weight);
    const bool is_all = k >= cut - p.sinks;
    const ScoreRoom room = score_room(p.score, shared_words);
    // The raw scores of a single piece stay where they are.
    const bool keeps = end_piece - first_piece == 1;
    prepare_queries(p.score, share.ask, room);
    for (u32 piece = first_piece; piece < end_piece; piece++)
        score_piece(p.score, share.ask, room, piece, keeps);
    meet(share);
    if (p.score.kind != SCORE_SIGNS) {
        total_sums(p.score, share.ask, totals);
        const u64 at = (u64)number * p.score.group * p.score.stride;
        for (u32 place = share.start + thread; place < share.end; place += SCORE_THREADS)
            share.scores[place] =
                keeps ? finish_score(p.score, totals, room.raw + (place - share.start), PIECE)
                      : finish_score(p.score, totals, p.score.raw + at + place, p.score.stride);
        __syncthreads();
    }
    Choice choice = {~0u, 0, 0};
    if (!is_all && k > 0) choice = choose(p, share, k, bins, shared);
    mark_chosen(p, share, is_all, choice, shared);
    const u32 now = state.now + 1;
    const u32 capacity = (u32)ceilf(__fmul_rn((float)k, p.working_set));
    const Leaving leaving = find_leaving(p, share, now, k, capacity, bins, shared);
    uint2* moves = p.moves + (u64)number * p.score.stride;
    const uint2 changes = change_set(p, share, state, now, leaving, moves, shared, gone_before);
    if (share.index > 0) return;
    // Others may still look at what is remembered of this head.
    if (p.flags & FLAG_TOGETHER && thread == 0) {
        u32 n;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(&p.tallies->n_looked) : "memory");
        } while (n < gridDim.x);
    }
    __syncthreads();
    float* label = p.labels + label_at(p, row, head);
    for (u32 i = thread; p.flags & FLAG_REUSES && i < p.heads.group * HEAD_DIM; i += SCORE_THREADS)
        label[i] = score_query(p.score, share.ask, i / HEAD_DIM, i % HEAD_DIM);
    if (thread == 0) {
        const bool is_whole = p.flags & FLAG_WHOLE && p.working_set == 1.0f;
        target->has_label = p.flags & FLAG_REUSES ? 1 : 0;
        target->cut = cut, target->made_at = row.kv_len, target->now = now;
        target->n_members = (is_whole ? 0 : state.n_members) - changes.x + changes.y;
        target->n_first = min(p.sinks, row.kv_len);
        target->n_chosen = k;
        target->n_moved = p.flags & FLAG_WHOLE ? k : changes.y;
        target->n_moves = changes.y;
    }
}
