// What `decide` is told, and the beginning of it: whether the last selection of a head still serves, and
// which block goes on with which head.

#define FLAG_REUSES 1
#define FLAG_WHOLE 2
#define FLAG_NOTHING 4  // only sinks and the last places are seen
#define FLAG_TOGETHER 8  // every block looks at all heads
#define FLAG_LATE 16  // the attention of the layer is over: about those that it served once more
#define FLAG_LOOKS 32  // nobody has looked before it: all of them were served
#define AGGREGATE_HARMONIC 0
#define AGGREGATE_MIN 1
#define AGGREGATE_MEAN 2
#define BINS 2048
// Longer than this ago is the same as this long ago; `AGE_MAX` of working_set.rs.
#define AGE_MAX (BINS - 1)
#define MAX_BLOCKS 64
#define LOOK_MAX 16  // heads that a block looks at
#define TILE (4 * SCORE_THREADS)  // places of a block that are counted together

// What the blocks of a head tell each other; zero before and after.
struct Tally {
    u32 n_arrived;
    u32 n_left;    // blocks that need it no more
    u32 n_looked;  // of the first one: blocks that have looked at all heads
    u32 n_passed;  // of the first one: heads that waited for those
    u32 padding[28];
    u32 digits[4][BINS];  // scores, sorted finer and finer
    u32 ages[BINS];       // rows of the working set that are not chosen, by age
    // Written anew each time.
    u32 own_digits[MAX_BLOCKS][BINS];
    u32 own_ages[MAX_BLOCKS][BINS];  // of at least each age
    u32 n_new[MAX_BLOCKS];           // places that come
    float edges[MAX_BLOCKS][MAX_GROUP * N_FOLLOWERS];  // raw scores of a share's last places, the last first
};
static_assert(sizeof(Tally) == TALLY_SIZE, "the host's Tally differs");

// Of one head.
struct HeadRule {
    float threshold;
    float weight;
    float soft;  // the similarity from which on a miss is served late
    u32 padding;
};

struct DecideParams {
    ScoreParams score;
    SparseHeads heads;
    float* labels;             // [state row][state_stride][group][D], from the layer's first head on
    const HeadRule* rules;     // [G]
    const float* importances;  // [G][group]
    Tally* tallies;            // [row][G]
    uint2* moves;              // [row][G][stride]: place, row of the working set
    Codes codes;               // what rows that are far come as
    u32* done;                 // what counts blocks that have ended, if there is one row and they look together; or null
    double percent;
    u64 mark_stride;
    u32 first_head;            // of the layer, of all heads of the model
    u32 k_min, k_max;
    u32 sinks, recent;
    float working_set;
    u32 max_age;
    u32 aggregate;
    u32 flags;
    u32 fade;                  // what a score loses with each place that follows it; 0 if nobody follows
    u32 n_bringing;            // blocks that bring rows, about; 0 if somebody else does
    u32 padding;
};
static_assert(sizeof(DecideParams) == DECIDE_PARAMS_SIZE, "the host's DecideParams differs");

DEVICE u64 label_at(const DecideParams& p, const SparseRow& row, u32 head) {
    return ((u64)row.state_row * p.heads.state_stride + head) * p.heads.group * HEAD_DIM;
}

// Where the tail begins if a selection is made now.
DEVICE u32 cut_of(const DecideParams& p, u32 kv_len) {
    return max(kv_len > p.recent ? kv_len - p.recent : 0, min(p.sinks, kv_len));
}

struct Similarity {
    float value;
    bool is_there;
};

// The similarity of a group's queries to their label, from their cosines.
DEVICE Similarity similarity_of(const DecideParams& p, const float* importances, const float* cosines) {
    const u32 group = p.heads.group;
    if (p.aggregate == AGGREGATE_MIN) {
        float least = cosines[0];
        LOOP for (u32 g = 1; g < group; g++) least = fminf(least, cosines[g]);
        return Similarity{least, true};
    }
    if (p.aggregate == AGGREGATE_MEAN) {
        float sum = 0.0f;
        LOOP for (u32 g = 0; g < group; g++) sum = __fadd_rn(sum, cosines[g]);
        return Similarity{__fdiv_rn(sum, (float)group), true};
    }
    float total = 0.0f, weights = 0.0f, sum = 0.0f;
    LOOP for (u32 g = 0; g < group; g++) total = __fadd_rn(total, importances[g]);
    LOOP for (u32 g = 0; g < group; g++) {
        if (cosines[g] <= 0.0f) return Similarity{0.0f, false};
        const float weight = total > 0.0f ? __fdiv_rn(importances[g], total) : 1.0f;
        weights = __fadd_rn(weights, weight);
        sum = __fadd_rn(sum, __fdiv_rn(weight, cosines[g]));
    }
    return Similarity{__fdiv_rn(weights, sum), true};
}

// What a look-up needs of a head besides its query.
struct Known {
    u32 kv_len, has_label, made_at;
    float threshold, soft;
};

DEVICE u32 look_up(const DecideParams& p, Known known, const float* importances, const float* cosines,
                   float& similarity) {
    similarity = 0.0f;
    if (cut_of(p, known.kv_len) <= p.sinks || p.flags & FLAG_NOTHING) return LOOKUP_NOTHING;
    if (!(p.flags & FLAG_REUSES)) return LOOKUP_ALWAYS;
    if (!known.has_label) return LOOKUP_FIRST;
    if (known.kv_len - known.made_at >= p.max_age) return LOOKUP_AGED;
    const Similarity found = similarity_of(p, importances, cosines);
    similarity = found.is_there ? found.value : 0.0f;
    if (found.is_there && found.value > known.threshold) return LOOKUP_HIT;
    if ((found.is_there ? found.value : -1.0f) >= known.soft) return LOOKUP_LATE;
    return found.is_there ? LOOKUP_TURNED : LOOKUP_TURNED_FAR;
}

// What a block has found.
struct Looks {
    float cosines[LOOK_MAX * MAX_GROUP];
    float importances[LOOK_MAX * MAX_GROUP];
    u32 lookups[LOOK_MAX];
    float similarities[LOOK_MAX];
};

// Whether a head chooses now.
DEVICE bool chooses(const DecideParams& p, u32 lookup) {
    if (p.flags & FLAG_LATE) return lookup == LOOKUP_LATE;
    return lookup != LOOKUP_NOTHING && lookup != LOOKUP_HIT && lookup != LOOKUP_LATE;
}

// Where a row's queries are; those that attention has kept lie as labels do.
DEVICE u32 query_row(const DecideParams& p, const SparseRow& row) {
    return p.flags & FLAG_LATE ? row.state_row : row.row;
}

// A query and its label.
struct Pair {
    const float *query, *label;
};

DEVICE Pair pair_of(const DecideParams& p, u32 first, u32 i) {
    const u32 group = p.heads.group, number = first + i / group, g = i % group;
    const u32 head = number % p.heads.n_kv_heads;
    const SparseRow& row = p.heads.rows[number / p.heads.n_kv_heads];
    return Pair{p.score.qkv + (u64)query_row(p, row) * p.score.q_stride + (head * group + g) * HEAD_DIM,
                p.labels + label_at(p, row, head) + g * HEAD_DIM};
}

#define LOOK_PIECES ((HEAD_DIM + 31) / 32)

// Their cosine; a whole warp.
DEVICE float cosine_of(const float (&a)[LOOK_PIECES], const float (&b)[LOOK_PIECES]) {
    float ab = 0.0f, aa = 0.0f, bb = 0.0f;
    UNROLL
    for (int e = 0; e < LOOK_PIECES; e++) {
        if (e * 32 + threadIdx.x % 32 >= HEAD_DIM) continue;
        ab = __fadd_rn(ab, __fmul_rn(a[e], b[e]));
        aa = __fadd_rn(aa, __fmul_rn(a[e], a[e]));
        bb = __fadd_rn(bb, __fmul_rn(b[e], b[e]));
    }
    ab = warp_sum(ab), aa = warp_sum(aa), bb = warp_sum(bb);
    const float cosine = __fdiv_rn(ab, __fsqrt_rn(__fmul_rn(aa, bb)));
    return fabsf(cosine) < INFINITE ? cosine : 0.0f;
}

DEVICE void load_lanes(const float* from, float (&to)[LOOK_PIECES]) {
    const u32 lane = threadIdx.x % 32;
    UNROLL
    for (int e = 0; e < LOOK_PIECES; e++) to[e] = e * 32 + lane < HEAD_DIM ? from[e * 32 + lane] : 0.0f;
}

// Looks at `n` heads, from the `first` on. What was remembered of them was there before the step began,
// so that only queries are waited for.
DEVICE void look_at(const DecideParams& p, u32 first, u32 n, Looks& looks) {
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = p.heads.group;
    const u32 n_pairs = p.flags & FLAG_REUSES ? n * group : 0;
    Known known = {0, 0, 0, 0.0f, 0.0f};
    if (thread < n) {
        const SparseRow& row = p.heads.rows[(first + thread) / p.heads.n_kv_heads];
        const u32 head = (first + thread) % p.heads.n_kv_heads;
        const HeadState* state = state_of(p.heads, row, head);
        const HeadRule rule = p.rules[head];
        known = Known{row.kv_len, state->has_label, state->made_at, rule.threshold, rule.soft};
    }
    LOOP for (u32 i = thread; i < n_pairs; i += SCORE_THREADS)
        looks.importances[i] =
            p.importances[(first + i / group) % p.heads.n_kv_heads * group + i % group];
    float labels[2][LOOK_PIECES], queries[2][LOOK_PIECES];
    Pair pairs[2];
    bool has_waited = false;
    // Two at a time, because each is on its way for long.
    LOOP for (u32 start = warp; start < n_pairs || !has_waited; start += 2 * SCORE_WARPS) {
        UNROLL
        for (int j = 0; j < 2; j++) {
            if (start + j * SCORE_WARPS >= n_pairs) continue;
            pairs[j] = pair_of(p, first, start + j * SCORE_WARPS);
            load_lanes(pairs[j].label, labels[j]);
        }
        if (!has_waited) wait_for_previous();
        has_waited = true;
        UNROLL
        for (int j = 0; j < 2; j++)
            if (start + j * SCORE_WARPS < n_pairs) load_lanes(pairs[j].query, queries[j]);
        UNROLL
        for (int j = 0; j < 2; j++) {
            if (start + j * SCORE_WARPS >= n_pairs) continue;
            const float cosine = cosine_of(queries[j], labels[j]);
            if (lane == 0) looks.cosines[start + j * SCORE_WARPS] = cosine;
        }
    }
    __syncthreads();
    if (thread < n)
        looks.lookups[thread] = look_up(p, known, looks.importances + thread * group,
                                        looks.cosines + thread * group, looks.similarities[thread]);
    __syncthreads();
}

// Writes what was found of a head, before anything is chosen.
DEVICE void tell(const DecideParams& p, u32 number, u32 lookup, float similarity) {
    const SparseRow& row = p.heads.rows[number / p.heads.n_kv_heads];
    HeadState* target = state_of(p.heads, row, number % p.heads.n_kv_heads);
    target->lookup = lookup, target->similarity = similarity;
    target->n_chosen = target->n_moved = target->n_moves = target->n_gone = 0;
    if (lookup == LOOKUP_LATE) target->seen_members = target->n_members, target->seen_cut = target->cut;
    if (lookup == LOOKUP_NOTHING)
        target->cut = cut_of(p, row.kv_len), target->n_first = min(p.sinks, row.kv_len);
}

// Whether it was looked before the layer attended.
DEVICE bool recalls(const DecideParams& p) { return (p.flags & (FLAG_LATE | FLAG_LOOKS)) == FLAG_LATE; }

// Recalls what was found of `n` heads, from the `first` on, before their layer attended.
DEVICE void recall(const DecideParams& p, u32 first, u32 n, bool tells, Looks& looks) {
    if (threadIdx.x < n) {
        const u32 number = first + threadIdx.x;
        const SparseRow& row = p.heads.rows[number / p.heads.n_kv_heads];
        HeadState* state = state_of(p.heads, row, number % p.heads.n_kv_heads);
        looks.lookups[threadIdx.x] = state->lookup;
        // Whoever chose before has its rows.
        if (tells && state->lookup != LOOKUP_LATE) state->n_moves = state->n_gone = 0;
    }
    __syncthreads();
}
