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
// A head may be served late: what it has serves once more, attention keeps its queries, and it chooses in a
// second launch (FLAG_LATE), beside what comes after; if all heads may, there is no first one (FLAG_LOOKS).
//
// A miss is a chain of latencies, so blocks meet as seldom as they can: once for the sums of softmax,
// mostly twice for the threshold of scores, and once for who goes. Rows that go and places that come are
// two lists, which whoever brings rows puts together, and marks the places. That are some of the head's
// blocks, once all have written their lists, because they are there: a kernel that comes next would wait for
// a place behind the blocks of a product. Few of them, because each keeps such a block from its place.
//
// Reads digests of all places once, 8 bytes of marks twice, and rows that come; all else is smaller. Scores are in shared
// memory, or in the second-level cache. Grid: (blocks), or (share, row and head).

// Rows that a working set has at most if selections have `k`; `Policy::set_size`.
DEVICE u32 capacity_of(const DecideParams& p, u32 k) { return (u32)ceilf(__fmul_rn((float)k, p.working_set)); }

// Rows that a selection of `n` places has; `LayerHeads::n_chosen`. The first one fills the working set.
DEVICE u32 rows_of(const DecideParams& p, u32 n, float weight, bool is_first) {
    const double wanted = ceil(__ddiv_rn(__dmul_rn(__dmul_rn(p.percent, (double)weight), (double)n), 100.0));
    const u32 k = wanted >= 4294967295.0 ? ~0u : (u32)wanted;
    const u32 usual = min(min(max(k, p.k_min), p.k_max), n);
    return is_first ? min(max(usual, capacity_of(p, usual)), n) : usual;
}

// The sum over the block's threads before this one, and over all of them.
template <class T>
DEVICE T scan_of(T own, T* counts, T& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T upto = own;
    UNROLL
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
    }
    __syncthreads();
    if (lane == 31) counts[warp] = upto;
    __syncthreads();
    T before = upto - own;
    total = 0;
    UNROLL
    for (int i = 0; i < SCORE_WARPS; i++) {
        const T n = counts[i];
        if (i < warp) before += n;
        total += n;
    }
    return before;
}

// A bin, which one in it is meant, and how many it has.
struct Bin {
    u32 number, rest, n;
};

// The bin of the `k`-th from above, and which one in it that is; 1 <= k <= all.
DEVICE Bin find_bin(const u32* bins, u32 k, u32* shared) {
    const u32 thread = threadIdx.x, EACH = BINS / SCORE_THREADS;
    u32 own[EACH], sum = 0;
    UNROLL
    for (int i = 0; i < EACH; i++) {
        own[i] = __ldcg(bins + BINS - 1 - (thread * EACH + i));
        sum += own[i];
    }
    u32 total;
    u32 before = scan_of(sum, shared, total);
    const u32 upto = before + sum;
    if (before < k && k <= upto) {
        for (int i = 0; i < EACH; i++) {
            if (k <= before + own[i]) {
                shared[SCORE_WARPS] = BINS - 1 - (thread * EACH + i);
                shared[SCORE_WARPS + 1] = k - before;
                shared[SCORE_WARPS + 2] = own[i];
                break;
            }
            before += own[i];
        }
    }
    __syncthreads();
    return Bin{shared[SCORE_WARPS], shared[SCORE_WARPS + 1], shared[SCORE_WARPS + 2]};
}

// Adds the block's bins to the head's.
DEVICE void add_bins(const u32* bins, u32* all) {
    __syncthreads();
    LOOP for (u32 i = threadIdx.x; i < BINS; i += SCORE_THREADS)
        if (bins[i] > 0) atomicAdd(all + i, bins[i]);
}

// What is chosen: all above the threshold, and of those that reach it all, or the first few.
struct Choice {
    u32 threshold;
    bool has_ties;
    u32 n_equal;   // of ties
    u32 n_before;  // ties in the blocks before
};

// Finds the choice of the k best places of the head: the range of scores in which the k-th is gets
// narrower until all of it is chosen, or it is one number. Scores of the whole range are counted already.
DEVICE Choice choose(const DecideParams& p, Share& share, u32 k, u32* bins, u32* shared) {
    const bool is_signs = p.score.kind == SCORE_SIGNS;
    Range range = whole_range(p);
    u32 rest = k;
    LOOP for (u32 pass = 0;; pass++) {
        const bool is_coarse = pass == 0 && !is_signs;
        const u32 shift = is_coarse ? COARSE_SHIFT : shift_of(range);
        if (pass > 0) {
            clear_bins(bins);
            LOOP for (u32 first = share.start; first < share.end; first += TILE) {
                const u32 place = first + threadIdx.x * 4;
                u32 scores[4];
                load_four(share.scores + (place - share.start), scores);
                UNROLL
                for (int i = 0; i < 4; i++)
                    if (chooses_from(p, share, place + i) && scores[i] - range.low < range.high - range.low)
                        atomicAdd(&bins[(scores[i] - range.low) >> shift], 1u);
            }
        }
        add_bins(bins, share.tally->digits[pass]);
        u32* own_digits = share.tally->own_digits[share.index];
        LOOP for (u32 i = threadIdx.x; shift == 0 && i < range.high - range.low; i += SCORE_THREADS)
            own_digits[i] = bins[i];
        meet(share);
        const Bin bin = find_bin(share.tally->digits[pass], rest, shared);
        rest = bin.rest;
        if (is_coarse) range = coarse_range(bin.number);
        else range.low += bin.number << shift, range.high = range.low + (1u << shift);
        if (bin.n == rest) return Choice{range.low, false, 0, 0};
        if (shift > 0) continue;
        const u32 own =
            threadIdx.x < share.index ? __ldcg(&share.tally->own_digits[threadIdx.x][bin.number]) : 0;
        u32 n_before;
        scan_of(own, shared, n_before);
        return Choice{range.low, true, rest, n_before};
    }
}

DEVICE u32 age_of(u32 now, u32 stamp) { return min(now - stamp, (u32)AGE_MAX); }

// Four places of a thread: their marks, and which of them are chosen.
struct Four {
    uint2 marks[4];
    bool is_chosen[4], is_new[4], is_idle[4];
};

// The two halves of marks as they come.
struct Halves {
    uint4 low, high;
};

// Asks for the marks of four places; those behind the share are others', or nobody's.
DEVICE Halves load_marks(const Share& share, u32 place) {
    const uint4* marks = (const uint4*)(share.marks + place);
    return Halves{marks[0], marks[1]};
}

DEVICE Four four_of(const Share& share, u32 place, const Halves& halves) {
    Four four;
    four.marks[0] = make_uint2(halves.low.x, halves.low.y), four.marks[1] = make_uint2(halves.low.z, halves.low.w);
    four.marks[2] = make_uint2(halves.high.x, halves.high.y), four.marks[3] = make_uint2(halves.high.z, halves.high.w);
    UNROLL
    for (int i = 0; i < 4; i++)
        if (place + i >= share.end) four.marks[i].x = 0;
    return four;
}

// Says what becomes of four places, from whether they are chosen.
DEVICE void sort_four(Four& four, bool is_whole) {
    UNROLL
    for (int i = 0; i < 4; i++) {
        four.is_new[i] = four.is_chosen[i] && (four.marks[i].x == 0 || is_whole);
        four.is_idle[i] = !four.is_chosen[i] && four.marks[i].x > 0;
    }
}

// Writes whether places are chosen over their scores, and counts rows that are not, by age, in `bins`;
// gives how many places are new.
DEVICE u32 survey(const DecideParams& p, const Share& share, bool is_all, Choice choice, u32 now,
                  bool is_whole, u32* bins, u32* counts) {
    clear_bins(bins);
    u32 n_equal = choice.n_before, n_new = 0, total = 0;
    Halves next = load_marks(share, share.start + threadIdx.x * 4);
    LOOP for (u32 first = share.start; first < share.end; first += TILE) {
        const u32 place = first + threadIdx.x * 4;
        u32 scores[4], own = 0;
        bool is_there[4];
        Four four = four_of(share, place, next);
        // Known before they are needed.
        if (first + TILE < share.end) next = load_marks(share, place + TILE);
        load_four(share.scores + (place - share.start), scores);
        UNROLL
        for (int i = 0; i < 4; i++) {
            is_there[i] = chooses_from(p, share, place + i);
            own += is_there[i] && scores[i] == choice.threshold;
        }
        u32 rank = 0;
        if (choice.has_ties) rank = n_equal + scan_of(own, counts, total), n_equal += total;
        UNROLL
        for (int i = 0; i < 4; i++) {
            const bool is_equal = is_there[i] && scores[i] == choice.threshold;
            const bool reaches = choice.has_ties ? scores[i] > choice.threshold ||
                                                       (is_equal && rank < choice.n_equal)
                                                 : scores[i] >= choice.threshold;
            four.is_chosen[i] = is_there[i] && (is_all || reaches);
            rank += is_equal;
            scores[i] = four.is_chosen[i];
        }
        *(uint4*)(share.scores + (place - share.start)) =
            make_uint4(scores[0], scores[1], scores[2], scores[3]);
        sort_four(four, is_whole);
        UNROLL
        for (int i = 0; i < 4; i++) {
            if (four.is_idle[i]) atomicAdd(&bins[age_of(now, four.marks[i].x)], 1u);
            n_new += four.is_new[i];
        }
    }
    scan_of(n_new, counts, total);
    return total;
}

// Rows that go: those that were not chosen for longer than `age`, and the first few of just that age.
struct Leaving {
    u32 age, n_equal;
};

// What a block has before its share, and what there is in all: rows that go, places that come, rows of
// just the age of which only some go.
struct Before {
    u32 n_gone, n_new, n_same;
    u32 all_gone, all_new;
};

// Tells the other blocks what was surveyed, hears what they say, and finds who goes so that `capacity`
// rows stay.
DEVICE Leaving find_leaving(Share& share, u32 n_new, u32 now, u32 k, u32 capacity, bool is_whole,
                            u32* bins, u32* counts, Before& before) {
    const u32 thread = threadIdx.x, EACH = BINS / SCORE_THREADS, n_ages = min(now, (u32)AGE_MAX) + 1;
    add_bins(bins, share.tally->ages);
    // Rows of at least each age.
    u32 own[EACH], sum = 0, total;
    UNROLL
    for (int i = 0; i < EACH; i++) own[i] = sum += bins[BINS - 1 - (thread * EACH + i)];
    const u32 older = scan_of(sum, counts, total);
    u32* own_ages = share.tally->own_ages[share.index];
    UNROLL
    for (int i = 0; i < EACH; i++) {
        const u32 age = BINS - 1 - (thread * EACH + i);
        if (age <= n_ages) own_ages[age] = older + own[i];
    }
    if (thread == 0) share.tally->n_new[share.index] = n_new;
    meet(share);
    // A thread for each block.
    const bool is_block = thread < share.count;
    const u32* ages = share.tally->own_ages[is_block ? thread : 0];
    u32 n_idle;
    scan_of(is_block ? __ldcg(ages) : 0, counts, n_idle);
    Leaving leaving = {0, 0};
    if (capacity > k && n_idle + k <= capacity) {
        leaving.age = ~0u;
    } else if (capacity > k) {
        const Bin bin = find_bin(share.tally->ages, n_idle + k - capacity, counts);
        leaving = Leaving{bin.number, bin.rest};
    }
    u32 above = 0, same = 0;
    if (is_block && leaving.age != ~0u && !is_whole) {
        above = leaving.age < AGE_MAX ? __ldcg(ages + leaving.age + 1) : 0;
        same = __ldcg(ages + leaving.age) - above;
    }
    const u32 comes = is_block ? __ldcg(&share.tally->n_new[thread]) : 0;
    const u32 same_before = scan_of(same, counts, total);
    const u32 n_same = min(same, leaving.n_equal - min(leaving.n_equal, same_before));
    // Two counts in one number; places of all blocks may need all bits.
    u64* pairs = (u64*)counts;
    u64 all;
    const u64 upto =
        scan_of((u64)comes << 32 | (above + n_same), pairs, all);
    __shared__ Before shared_before;
    if (thread == share.index)
        shared_before =
            Before{(u32)upto, (u32)(upto >> 32), same_before, (u32)all, (u32)(all >> 32)};
    __syncthreads();
    before = shared_before;
    return leaving;
}

// Brings marks up to date, and writes the lists of rows that go and of places that come; whoever brings
// the rows marks those.
DEVICE void change_set(const Share& share, u32 now, Leaving leaving, Before before, bool is_whole,
                       uint2* moves, u32* counts) {
    u64* sums = (u64*)counts;
    u32 n_older = 0, n_same = before.n_same, n_new = before.n_new;
    Halves next = load_marks(share, share.start + threadIdx.x * 4);
    LOOP for (u32 first = share.start; first < share.end; first += TILE) {
        const u32 place = first + threadIdx.x * 4;
        Four four = four_of(share, place, next);
        if (first + TILE < share.end) next = load_marks(share, place + TILE);
        u32 chosen[4];
        load_four(share.scores + (place - share.start), chosen);
        UNROLL
        for (int i = 0; i < 4; i++) four.is_chosen[i] = chosen[i];
        sort_four(four, is_whole);
        // Three counts in one number.
        u64 own = 0, total;
        bool is_older[4], is_same[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const u32 age = four.is_idle[i] ? age_of(now, four.marks[i].x) : 0;
            is_older[i] = four.is_idle[i] && leaving.age != ~0u && age > leaving.age;
            is_same[i] = four.is_idle[i] && age == leaving.age;
            own += (u64)four.is_new[i] << 42 | (u64)is_same[i] << 21 | is_older[i];
        }
        const u64 upto = scan_of(own, sums, total);
        u32 older = n_older + (upto & 0x1FFFFF), same = n_same + (upto >> 21 & 0x1FFFFF);
        u32 comes = n_new + (u32)(upto >> 42);
        n_older += total & 0x1FFFFF, n_same += total >> 21 & 0x1FFFFF, n_new += (u32)(total >> 42);
        UNROLL
        for (int i = 0; i < 4; i++) {
            if (is_older[i] || (is_same[i] && same < leaving.n_equal)) {
                // Those of just the age go in order, up to the last.
                const u32 n_before = min(before.n_same, leaving.n_equal);
                const u32 at = before.n_gone + older + min(same, leaving.n_equal) - n_before;
                if (!is_whole) moves[at].y = four.marks[i].y;
                share.marks[place + i] = make_uint2(0, 0);
            }
            older += is_older[i], same += is_same[i];
            if (four.is_new[i]) moves[comes++].x = place + i;
            else if (four.is_chosen[i]) share.marks[place + i].x = now;
        }
    }
}

// What was made for a head.
struct Made {
    u32 cut, now, k, n_members;
    Before before;
};

// Remembers the label of the head and what was made. The first of its blocks.
DEVICE void remember(const DecideParams& p, const Share& share, const SparseRow& row, HeadState* target,
                     const Made& made) {
    // Others may still look at what is remembered of this head, unless that was done before.
    if (p.flags & FLAG_TOGETHER && !recalls(p) && threadIdx.x == 0) wait_for_looks(p, share);
    __syncthreads();
    float* label = p.labels + label_at(p, row, share.ask.head);
    LOOP for (u32 i = threadIdx.x; p.flags & FLAG_REUSES && i < p.heads.group * HEAD_DIM; i += SCORE_THREADS)
        label[i] = score_query(p.score, share.ask, i / HEAD_DIM, i % HEAD_DIM);
    if (threadIdx.x > 0) return;
    const Before& before = made.before;
    target->has_label = p.flags & FLAG_REUSES ? 1 : 0;
    target->cut = made.cut, target->made_at = row.kv_len, target->now = made.now;
    target->n_members = made.n_members;
    target->n_first = min(p.sinks, row.kv_len);
    target->n_chosen = made.k;
    target->n_moved = p.flags & FLAG_WHOLE ? made.k : before.all_new;
    target->n_moves = before.all_new;
    target->n_gone = before.all_gone;
}

// How many of a head's blocks bring its rows.
DEVICE u32 bringing(const DecideParams& p, const Share& share) {
    return p.n_bringing == 0 ? 0 : min((p.n_bringing - 1) / share.n_heads + 1, share.count);
}

// The moves of the head that was decided about.
struct OwnMoves {
    const uint2* all;
    Places own;
    u32 its_table_row, its_head;

    __device__ void find(u32 index, u32& row, u32& head, u32& number) const { row = 0, head = its_head, number = index; }
    __device__ const uint2* moves(u32, u32) const { return all; }
    __device__ u32 table_row(u32) const { return its_table_row; }
    __device__ const Places& places(u32, u32) const { return own; }

    template <bool CODES>
    __device__ const u8* staged(u32) const {
        return nullptr;
    }
};

// By so many warps that each has time for few rows at once.
template <bool CODES>
DEVICE void bring_head(const DecideParams& p, const Share& share, const OwnMoves& moves, u32 n_moves, u8* room,
                       u64* barriers) {
    const Ring<CODES, RING_BYTES, CODES ? 2 : 1> ring(room, barriers);
    const u32 n_blocks = bringing(p, share), warp = threadIdx.x / 32 * n_blocks + share.index;
    bring_rows<CODES>(warp, n_blocks * SCORE_WARPS, n_moves, HALF_PAGE_BYTES, p.score.pages, p.codes, ring, moves);
}

DEVICE void decide_all(const DecideParams& p) {
    extern __shared__ __align__(128) u32 shared_words[];
    __shared__ __align__(8) u32 bins[BINS];
    __shared__ __align__(8) u32 shared[2 * SCORE_WARPS + 4];
    __shared__ Looks looks;
    __shared__ float2 totals[MAX_GROUP];
    allow_next();
    u32 number;
    Share share;
    if (!take_share(p, looks, number, share)) return;
    const u32 head = number % p.heads.n_kv_heads, thread = threadIdx.x;
    const SparseRow row = p.heads.rows[number / p.heads.n_kv_heads];
    HeadState* target = state_of(p.heads, row, head);
    const u32 cut = cut_of(p, row.kv_len), n_pieces = (cut + PIECE - 1) / PIECE;
    share.count = min(share.count, n_pieces);
    if (share.index >= share.count) return;
    share.ask = Question{number, query_row(p, row), row.table_row, head, cut};
    share.tally = p.tallies + number;
    share.marks = row.marks + (p.first_head + head) * p.mark_stride;
    share.n_met = 0;
    const u32 first_piece = share.index * n_pieces / share.count;
    const u32 end_piece = (share.index + 1) * n_pieces / share.count;
    share.start = first_piece * PIECE, share.end = min(end_piece * PIECE, cut);
    fetch_share(p, share);
    const HeadState state = *target;
    const u32 k = rows_of(p, cut - p.sinks, p.rules[head].weight, state.n_members == 0);
    const bool is_all = k >= cut - p.sinks, is_whole = p.flags & FLAG_WHOLE && p.working_set == 1.0f;
    const ScoreRoom room = score_room(p.score, shared_words);
    // Raw scores of a single piece stay in shared memory, and so do those of several once they are one number.
    const u32 n_own = end_piece - first_piece;
    const bool keeps = n_own == 1;
    share.scores = n_own <= p.score.group ? (u32*)room.raw
                                          : p.score.scores + (u64)number * p.score.stride + share.start;
    prepare_queries(p.score, share.ask, room);
    LOOP for (u32 piece = first_piece; piece < end_piece; piece++)
        score_piece(p.score, share.ask, room, piece, keeps);
    const Raw raw = raw_of(p, share, room, keeps);
    if (p.fade > 0) {
        __syncthreads();
        leave_edge(p, share, raw);
    }
    if (p.fade > 0 || p.score.kind != SCORE_SIGNS) meet(share);
    if (p.score.kind != SCORE_SIGNS) total_sums(p.score, share.ask, totals);
    settle(p, share, raw, (u32*)room.raw, totals, bins);
    Choice choice = {~0u, false, 0, 0};
    if (!is_all && k > 0) choice = choose(p, share, k, bins, shared);
    const u32 now = state.now + 1;
    const u32 capacity = capacity_of(p, k);
    const u32 n_new = survey(p, share, is_all, choice, now, is_whole, bins, shared);
    Before before;
    const Leaving leaving =
        find_leaving(share, n_new, now, k, capacity, is_whole, bins, shared, before);
    change_set(share, now, leaving, before, is_whole, p.moves + (u64)number * p.score.stride, shared);
    const u32 n_stay = (is_whole ? 0 : state.n_members) - before.all_gone;
    const bool brings = share.index < bringing(p, share);
    if (p.n_bringing > 0) arrive(share);
    if (share.index == 0) remember(p, share, row, target, Made{cut, now, k, n_stay + before.all_new, before});
    if (brings) wait_for_others(share);
    leave(share);
    if (!brings) return end_share(p, share);
    __shared__ OwnMoves moves;
    if (thread == 0) {
        moves.all = p.moves + (u64)number * p.score.stride;
        moves.own = Places{share.marks, row.pages, state.first, before.all_gone, n_stay, now};
        moves.its_table_row = row.table_row, moves.its_head = head;
    }
    __syncthreads();
    // Nobody needs scores and bins any more.
    static_assert(SCORE_WARPS * RING_MOST * sizeof(u64) <= sizeof(bins), "barriers of all warps fit where bins were");
    u8* rows = (u8*)shared_words;
    if (p.codes.rows) bring_head<true>(p, share, moves, before.all_new, rows, (u64*)bins);
    else bring_head<false>(p, share, moves, before.all_new, rows, (u64*)bins);
    end_share(p, share);
}

#ifdef COMPACT
extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 2) decide(DecideParams p) { decide_all(p); }
#else
// The same beside attention of the layer before, which would come in two waves if two blocks of this were on
// one multiprocessor. They are not: bounds for 800 threads leave so many registers to each that 512 of them
// fill more than half of it.
extern "C" __global__ void __launch_bounds__(800, 1) decide_beside(DecideParams p) { decide_all(p); }
#endif
