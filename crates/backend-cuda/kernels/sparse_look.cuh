// What `decide` is told, and the beginning of it: whether the last selection of a head still serves, and
// which block goes on with which head.

#define FLAG_REUSES 1
#define FLAG_WHOLE 2
#define FLAG_NOTHING 4  // only sinks and the last places are seen
#define FLAG_TOGETHER 8  // every block looks at all heads
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
    u32 n_looked;  // of the first one: blocks that have looked at all heads
    u32 padding[30];
    u32 digits[3][BINS];  // scores by their digits
    u32 ages[BINS];       // rows of the working set that are not chosen, by age
    // Written anew each time.
    u32 own_digits[MAX_BLOCKS][BINS];
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
DEVICE Similarity similarity_of(const DecideParams& p, u32 head, const float* cosines) {
    const u32 group = p.heads.group;
    const float* importances = p.importances + head * group;
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

DEVICE u32 look_up(const DecideParams& p, const SparseRow& row, u32 head, const float* cosines,
                   float& similarity) {
    similarity = 0.0f;
    if (cut_of(p, row.kv_len) <= p.sinks || p.flags & FLAG_NOTHING) return LOOKUP_NOTHING;
    if (!(p.flags & FLAG_REUSES)) return LOOKUP_ALWAYS;
    const HeadState* state = state_of(p.heads, row, head);
    if (!state->has_label) return LOOKUP_FIRST;
    if (row.kv_len - state->made_at >= p.max_age) return LOOKUP_AGED;
    const Similarity found = similarity_of(p, head, cosines);
    if (!found.is_there) return LOOKUP_TURNED_FAR;
    similarity = found.value;
    return found.value > p.rules[head].threshold ? LOOKUP_HIT : LOOKUP_TURNED;
}

// What a block has found.
struct Looks {
    float cosines[LOOK_MAX * MAX_GROUP];
    u32 lookups[LOOK_MAX];
    float similarities[LOOK_MAX];
};

DEVICE bool chooses(u32 lookup) { return lookup != LOOKUP_NOTHING && lookup != LOOKUP_HIT; }

// Looks at `n` heads, from the `first` on.
DEVICE void look_at(const DecideParams& p, u32 first, u32 n, Looks& looks) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.heads.group;
    for (u32 i = warp; p.flags & FLAG_REUSES && i < n * group; i += SCORE_WARPS) {
        const u32 number = first + i / group, head = number % p.heads.n_kv_heads, g = i % group;
        const SparseRow& row = p.heads.rows[number / p.heads.n_kv_heads];
        const float* query = p.score.qkv + (u64)row.row * p.score.q_stride + (head * group + g) * HEAD_DIM;
        const float* label = p.labels + label_at(p, row, head) + g * HEAD_DIM;
        float ab = 0.0f, aa = 0.0f, bb = 0.0f;
        for (u32 e = lane; e < HEAD_DIM; e += 32) {
            const float a = query[e], b = label[e];
            ab = __fadd_rn(ab, __fmul_rn(a, b));
            aa = __fadd_rn(aa, __fmul_rn(a, a));
            bb = __fadd_rn(bb, __fmul_rn(b, b));
        }
        ab = warp_sum(ab), aa = warp_sum(aa), bb = warp_sum(bb);
        const float cosine = __fdiv_rn(ab, __fsqrt_rn(__fmul_rn(aa, bb)));
        if (lane == 0) looks.cosines[i] = fabsf(cosine) < INFINITE ? cosine : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < n) {
        const u32 i = threadIdx.x, number = first + i;
        const SparseRow& row = p.heads.rows[number / p.heads.n_kv_heads];
        looks.lookups[i] = look_up(p, row, number % p.heads.n_kv_heads, looks.cosines + i * group,
                                   looks.similarities[i]);
    }
    __syncthreads();
}

// Writes what was found of a head, before anything is chosen.
DEVICE void tell(const DecideParams& p, u32 number, u32 lookup, float similarity) {
    const SparseRow& row = p.heads.rows[number / p.heads.n_kv_heads];
    HeadState* target = state_of(p.heads, row, number % p.heads.n_kv_heads);
    target->lookup = lookup, target->similarity = similarity;
    target->n_chosen = target->n_moved = target->n_moves = 0;
    if (lookup == LOOKUP_NOTHING)
        target->cut = cut_of(p, row.kv_len), target->n_first = min(p.sinks, row.kv_len);
}

// Gives the block its share: true if there is one. Nobody writes labels before all have looked.
DEVICE bool take_share(const DecideParams& p, Looks& looks, u32& number, u32& index, u32& count) {
    const u32 thread = threadIdx.x, n = p.heads.n_rows * p.heads.n_kv_heads;
    if (!(p.flags & FLAG_TOGETHER)) {
        number = blockIdx.y, index = blockIdx.x, count = gridDim.x;
        look_at(p, number, 1, looks);
        if (index == 0 && thread == 0) tell(p, number, looks.lookups[0], looks.similarities[0]);
        return chooses(looks.lookups[0]);
    }
    look_at(p, 0, n, looks);
    if (blockIdx.x == 0 && thread < n) tell(p, thread, looks.lookups[thread], looks.similarities[thread]);
    u32 n_choosing = 0;
    for (u32 i = 0; i < n; i++) n_choosing += chooses(looks.lookups[i]);
    if (n_choosing == 0) return false;
    if (thread == 0) atomicAdd(&p.tallies->n_looked, 1u);
    count = min(gridDim.x / n_choosing, (u32)MAX_BLOCKS);
    index = blockIdx.x % count;
    u32 before = blockIdx.x / count;
    for (number = 0; number < n; number++) {
        if (!chooses(looks.lookups[number])) continue;
        if (before == 0) break;
        before--;
    }
    return number < n;
}
