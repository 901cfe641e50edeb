// Decides about the heads of rows: whether the last selection serves, and if not, which places are
// chosen, which rows of the working set go, and which rows are brought where.
//
//   look up ── hit ──► nothing changes
//      └── miss ─► scores ─► k best, equal ones by place ─► working set, least recently chosen go first
//
// The head's places are shared by gridDim.x blocks, which wait for each other; all of them are on the
// device at once. Every block looks up by itself, so that hits cost nothing but that. What is decided
// is what attention/src/topk decides from the same scores, number by number: the sums of a cosine have
// the order of `reuse::cosine`, k is computed in f64, and ties have its order.
//
// Reads digests of all places once, and 8 bytes of marks three times; all else is smaller. Scores are in
// the second-level cache. Grid: (share, row and head).

#define FLAG_REUSES 1
#define FLAG_WHOLE 2
#define FLAG_NOTHING 4  // only sinks and the last places are seen
#define AGGREGATE_HARMONIC 0
#define AGGREGATE_MIN 1
#define AGGREGATE_MEAN 2
#define BINS 2048
// Longer than this ago is the same as this long ago; `AGE_MAX` of working_set.rs.
#define AGE_MAX (BINS - 1)
#define MAX_BLOCKS 32

// What the blocks of a head tell each other; zero before and after.
struct Tally {
    u32 n_arrived;
    u32 padding[31];
    u32 digits[3][BINS];  // scores by their digits
    u32 ages[BINS];       // rows of the working set that are not chosen, by age
    // Written anew each time.
    u32 own_digits[MAX_BLOCKS][BINS / 2];
    u32 own_ages[MAX_BLOCKS][BINS];
    uint2 changes[MAX_BLOCKS];  // rows that go, rows that come
};
#define TALLY_ZEROS (32 + 4 * BINS)
static_assert(sizeof(Tally) == TALLY_SIZE, "the host's Tally differs");

// Of one head.
struct HeadRule {
    float threshold;
    float weight;
};

struct DecideParams {
    ScoreParams score;
    SparseHeads heads;
    float* labels;             // [state row][state_stride][group][D], from the layer's first head on
    const HeadRule* rules;     // [G]
    const float* importances;  // [G][group]
    Tally* tallies;            // [row][G]
    uint2* moves;              // [row][G][stride]: place, row of the working set
    double percent;
    u64 mark_stride;
    u32 first_head;            // of the layer, of all heads of the model
    u32 k_min, k_max;
    u32 sinks, recent;
    float working_set;
    u32 max_age;
    u32 aggregate;
    u32 flags;
    u32 padding;
};
static_assert(sizeof(DecideParams) == DECIDE_PARAMS_SIZE, "the host's DecideParams differs");

// A block's share of a head.
struct Share {
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
    if (gridDim.x > 1 && threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&share.tally->n_arrived, 1u);
        u32 n;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(n)
                         : "l"(&share.tally->n_arrived)
                         : "memory");
        } while (n < share.n_met * gridDim.x);
    }
    __syncthreads();
}

struct Similarity {
    float value;
    bool is_there;
};

// The similarity of the group's queries to the label; every thread gets it.
DEVICE Similarity similarity_of(const DecideParams& p, const Share& share, const float* label,
                                float* cosines) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.heads.group;
    for (u32 g = warp; g < group; g += SCORE_WARPS) {
        float ab = 0.0f, aa = 0.0f, bb = 0.0f;
        for (u32 e = lane; e < HEAD_DIM; e += 32) {
            const float a = score_query(p.score, share.ask, g, e), b = label[g * HEAD_DIM + e];
            ab = __fadd_rn(ab, __fmul_rn(a, b));
            aa = __fadd_rn(aa, __fmul_rn(a, a));
            bb = __fadd_rn(bb, __fmul_rn(b, b));
        }
        ab = warp_sum(ab), aa = warp_sum(aa), bb = warp_sum(bb);
        const float cosine = __fdiv_rn(ab, __fsqrt_rn(__fmul_rn(aa, bb)));
        if (lane == 0) cosines[g] = fabsf(cosine) < INFINITE ? cosine : 0.0f;
    }
    __syncthreads();
    const float* importances = p.importances + share.ask.head * group;
    if (p.aggregate == AGGREGATE_MIN) {
        float least = cosines[0];
        for (u32 g = 1; g < group; g++) least = fminf(least, cosines[g]);
        return Similarity{least, true};
    }
    if (p.aggregate == AGGREGATE_MEAN) {
        float sum = 0.0f;
        for (u32 g = 0; g < group; g++) sum = __fadd_rn(sum, cosines[g]);
        return Similarity{__fdiv_rn(sum, (float)group), true};
    }
    float total = 0.0f, weights = 0.0f, sum = 0.0f;
    for (u32 g = 0; g < group; g++) total = __fadd_rn(total, importances[g]);
    for (u32 g = 0; g < group; g++) {
        if (cosines[g] <= 0.0f) return Similarity{0.0f, false};
        const float weight = total > 0.0f ? __fdiv_rn(importances[g], total) : 1.0f;
        weights = __fadd_rn(weights, weight);
        sum = __fadd_rn(sum, __fdiv_rn(weight, cosines[g]));
    }
    return Similarity{__fdiv_rn(weights, sum), true};
}

DEVICE u32 look_up(const DecideParams& p, const Share& share, const HeadState& state, u32 kv_len,
                   const float* label, float* cosines, float& similarity) {
    similarity = 0.0f;
    if (!(p.flags & FLAG_REUSES)) return LOOKUP_ALWAYS;
    if (!state.has_label) return LOOKUP_FIRST;
    if (kv_len - state.made_at >= p.max_age) return LOOKUP_AGED;
    const Similarity found = similarity_of(p, share, label, cosines);
    if (!found.is_there) return LOOKUP_TURNED_FAR;
    similarity = found.value;
    return found.value > p.rules[share.ask.head].threshold ? LOOKUP_HIT : LOOKUP_TURNED;
}

// Rows that a selection of `n` places has; `Budget::weighted_rows`.
DEVICE u32 rows_of(const DecideParams& p, u32 n, float weight) {
    const double wanted = ceil(__ddiv_rn(__dmul_rn(__dmul_rn(p.percent, (double)weight), (double)n), 100.0));
    const u32 k = wanted >= 4294967295.0 ? ~0u : (u32)wanted;
    return min(min(max(k, p.k_min), p.k_max), n);
}

// How many of the block's threads before this one have a flag, and how many have it in all.
DEVICE u32 rank_of(bool flag, u32* counts, u32& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 bits = __ballot_sync(~0u, flag);
    __syncthreads();
    if (lane == 0) counts[warp] = __popc(bits);
    __syncthreads();
    u32 before = __popc(bits & ((1u << lane) - 1));
    total = 0;
    for (u32 i = 0; i < SCORE_WARPS; i++) {
        if (i < warp) before += counts[i];
        total += counts[i];
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

// Finds the choice of the k best places of the head, by eleven, eleven and ten bits of the scores.
DEVICE Choice choose(const DecideParams& p, Share& share, u32 k, u32* bins, u32* shared) {
    const u32 first = max(share.start, p.sinks);
    u32 prefix = 0, mask = 0, rest = k;
    UNROLL
    for (int pass = 0; pass < 3; pass++) {
        const u32 shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, digits = pass == 2 ? 1023 : 2047;
        clear_bins(bins);
        for (u32 place = first + threadIdx.x; place < share.end; place += SCORE_THREADS) {
            const u32 score = share.scores[place];
            if ((score & mask) == prefix) atomicAdd(&bins[score >> shift & digits], 1u);
        }
        add_bins(bins, share.tally->digits[pass], share.tally->own_digits[blockIdx.x],
                 pass == 2 ? BINS / 2 : 0);
        meet(share);
        const Bin bin = find_bin(share.tally->digits[pass], rest, shared);
        prefix |= bin.number << shift, mask |= digits << shift, rest = bin.rest;
    }
    u32 n_before = 0;
    for (u32 i = 0; i < blockIdx.x; i++) n_before += __ldcg(&share.tally->own_digits[i][prefix & 1023]);
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
    add_bins(bins, share.tally->ages, share.tally->own_ages[blockIdx.x], BINS);
    meet(share);
    u32 sum = 0;
    for (u32 i = threadIdx.x; i < BINS; i += SCORE_THREADS) sum += __ldcg(&share.tally->ages[i]);
    __syncthreads();
    if (threadIdx.x == 0) shared[0] = 0;
    __syncthreads();
    atomicAdd(&shared[0], sum);
    __syncthreads();
    const u32 total = k + shared[0];
    if (total <= capacity) return Leaving{~0u, 0, 0};
    const Bin bin = find_bin(share.tally->ages, total - capacity, shared);
    u32 n_before = 0;
    for (u32 i = 0; i < blockIdx.x; i++) n_before += __ldcg(&share.tally->own_ages[i][bin.number]);
    return Leaving{bin.number, bin.rest, n_before};
}

// Marks the chosen: all bits of their scores.
DEVICE void mark_chosen(const DecideParams& p, const Share& share, bool is_all, Choice choice, u32* counts) {
    u32 n_equal = choice.n_before;
    for (u32 first = share.start; first < share.end; first += SCORE_THREADS) {
        const u32 place = first + threadIdx.x;
        const bool is_there = place < share.end && place >= p.sinks;
        const u32 score = is_there ? share.scores[place] : 0;
        u32 total = 0, rank = 0;
        if (!is_all) rank = rank_of(is_there && score == choice.threshold, counts, total);
        const bool is_equal = score == choice.threshold && n_equal + rank < choice.n_equal;
        const bool is_chosen = is_there && (is_all || score > choice.threshold || is_equal);
        if (place < share.end) share.scores[place] = is_chosen ? ~0u : 0;
        n_equal += total;
    }
    __syncthreads();
}

// Brings the working set up to date; gives how many rows went and came.
DEVICE uint2 change_set(const DecideParams& p, Share& share, const HeadState& state, u32 now,
                        Leaving leaving, uint2* moves, u32* counts) {
    const bool is_whole = p.flags & FLAG_WHOLE && p.working_set == 1.0f;
    u32 n_same = leaving.n_before, n_gone = 0, n_new = 0;
    for (u32 first = share.start; first < share.end; first += SCORE_THREADS) {
        const u32 place = first + threadIdx.x;
        const bool is_there = place < share.end;
        const uint2 mark = is_there ? share.marks[place] : make_uint2(0, 0);
        const bool is_chosen = is_there && share.scores[place] != 0, was_member = mark.x > 0;
        const u32 age = was_member ? age_of(now, mark.x) : 0;
        const bool is_idle = was_member && !is_chosen;
        u32 total, unused;
        const u32 rank = rank_of(is_idle && age == leaving.age, counts, total);
        const bool goes =
            is_idle && (age > leaving.age || (age == leaving.age && n_same + rank < leaving.n_equal));
        n_same += total;
        const u32 gone = rank_of(goes && !is_whole, counts, total);
        if (goes && !is_whole) share.freed[share.start + n_gone + gone] = mark.y;
        n_gone += total;
        rank_of(is_chosen && (!was_member || is_whole), counts, unused);
        n_new += unused;
        if (goes) share.marks[place] = make_uint2(0, 0);
        if (is_chosen && was_member) share.marks[place].x = now;
    }
    if (threadIdx.x == 0) share.tally->changes[blockIdx.x] = make_uint2(n_gone, n_new);
    meet(share);
    u32 all_gone = 0, all_new = 0, new_before = 0;
    for (u32 i = 0; i < gridDim.x; i++) {
        const uint2 change = __ldcg(&share.tally->changes[i]);
        if (i < blockIdx.x) new_before += change.y;
        all_gone += change.x, all_new += change.y;
    }
    // A row that comes takes the place of one that goes, in order, and then those behind the last.
    const u32 n_members = is_whole ? 0 : state.n_members;
    const u32 n_pieces = (share.ask.n + PIECE - 1) / PIECE;
    for (u32 first = share.start; n_new > 0 && first < share.end; first += SCORE_THREADS) {
        const u32 place = first + threadIdx.x;
        const bool is_there = place < share.end;
        const uint2 mark = is_there ? share.marks[place] : make_uint2(0, 0);
        const bool comes = is_there && share.scores[place] != 0 && (mark.x == 0 || is_whole);
        u32 total;
        u32 i = new_before + rank_of(comes, counts, total);
        if (comes) {
            const u32 number = i;
            u32 row = n_members + i - all_gone;
            if (i < all_gone) {
                u32 block = 0;
                for (; i >= __ldcg(&share.tally->changes[block]).x; block++)
                    i -= __ldcg(&share.tally->changes[block]).x;
                row = __ldcg(share.freed + block * n_pieces / gridDim.x * PIECE + i);
            }
            share.marks[place] = make_uint2(now, row);
            moves[number] = make_uint2(place, row);
        }
        new_before += total;
    }
    return make_uint2(all_gone, all_new);
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS) decide(DecideParams p) {
    extern __shared__ __align__(128) u32 shared_words[];
    __shared__ u32 bins[BINS];
    __shared__ u32 shared[SCORE_WARPS + 2];
    __shared__ float cosines[MAX_GROUP];
    __shared__ float2 totals[MAX_GROUP];
    begin();
    const u32 number = blockIdx.y, head = number % p.heads.n_kv_heads, thread = threadIdx.x;
    const SparseRow row = p.heads.rows[number / p.heads.n_kv_heads];
    HeadState* target = state_of(p.heads, row, head);
    const HeadState state = *target;
    float* label = p.labels + ((u64)row.state_row * p.heads.state_stride + head) * p.heads.group * HEAD_DIM;
    const bool is_first = blockIdx.x == 0 && thread == 0;
    const u32 least = min(p.sinks, row.kv_len);
    const u32 cut = max(row.kv_len > p.recent ? row.kv_len - p.recent : 0, least);
    Share share;
    share.ask = Question{number, row.row, row.table_row, head, cut};
    share.tally = p.tallies + number;
    share.marks = row.marks + (p.first_head + head) * p.mark_stride;
    share.scores = p.score.scores + (u64)number * p.score.stride;
    // Raw scores are not needed any more when rows are freed.
    share.freed = (u32*)(p.score.raw + (u64)number * p.score.group * p.score.stride);
    share.n_met = 0;
    float similarity = 0.0f;
    const u32 lookup = cut <= p.sinks || p.flags & FLAG_NOTHING
                           ? LOOKUP_NOTHING
                           : look_up(p, share, state, row.kv_len, label, cosines, similarity);
    // Whoever is late reads nothing of what is written here.
    if (is_first) {
        target->lookup = lookup, target->similarity = similarity;
        target->n_chosen = target->n_moved = target->n_moves = 0;
        if (lookup == LOOKUP_NOTHING) target->cut = cut, target->n_first = least;
    }
    if (lookup == LOOKUP_NOTHING || lookup == LOOKUP_HIT) return;

    const u32 n_pieces = (cut + PIECE - 1) / PIECE;
    const u32 first_piece = blockIdx.x * n_pieces / gridDim.x;
    const u32 end_piece = (blockIdx.x + 1) * n_pieces / gridDim.x;
    share.start = first_piece * PIECE, share.end = min(end_piece * PIECE, cut);
    const u32 k = rows_of(p, cut - p.sinks, p.rules[head].weight);
    const bool is_all = k >= cut - p.sinks;
    const ScoreRoom room = score_room(p.score, shared_words);
    if (first_piece < end_piece) prepare_queries(p.score, share.ask, room);
    for (u32 piece = first_piece; piece < end_piece; piece++)
        score_piece(p.score, share.ask, room, piece);
    // Nobody reads the state or the label after this.
    meet(share);
    if (blockIdx.x == 0 && p.flags & FLAG_REUSES)
        for (u32 i = thread; i < p.heads.group * HEAD_DIM; i += SCORE_THREADS)
            label[i] = score_query(p.score, share.ask, i / HEAD_DIM, i % HEAD_DIM);
    if (p.score.kind != SCORE_SIGNS) {
        total_sums(p.score, share.ask, totals);
        for (u32 place = share.start + thread; place < share.end; place += SCORE_THREADS)
            share.scores[place] = finish_score(p.score, share.ask, totals, place);
        __syncthreads();
    }
    Choice choice = {~0u, 0, 0};
    if (!is_all && k > 0) choice = choose(p, share, k, bins, shared);
    mark_chosen(p, share, is_all, choice, shared);
    const u32 now = state.now + 1;
    const u32 capacity = (u32)ceilf(__fmul_rn((float)k, p.working_set));
    const Leaving leaving = find_leaving(p, share, now, k, capacity, bins, shared);
    uint2* moves = p.moves + (u64)number * p.score.stride;
    const uint2 changes = change_set(p, share, state, now, leaving, moves, shared);
    if (is_first) {
        const bool is_whole = p.flags & FLAG_WHOLE && p.working_set == 1.0f;
        target->has_label = p.flags & FLAG_REUSES ? 1 : 0;
        target->cut = cut, target->made_at = row.kv_len, target->now = now;
        target->n_members = (is_whole ? 0 : state.n_members) - changes.x + changes.y;
        target->n_first = least;
        target->n_chosen = k;
        target->n_moved = p.flags & FLAG_WHOLE ? k : changes.y;
        target->n_moves = changes.y;
    }
}
