// Attention to one page, of few queries: those of a head. Matrix instructions take sixteen rows and eight columns,
// so rows are the page's tokens, or columns of its values, and columns are queries:
//
//   s = K q        [16 tokens][8 queries], a chain along D or two; q is the sum of PARTS elements
//   o += V^T p     [16 columns][8 queries] for each sixteen columns; p is split as q is
//
// A lane = 4 g + t has of s tokens g and g + 8 and queries 2t and 2t + 1, of o columns g and g + 8 likewise. So few
// registers are for sums, and a warp takes a page at a time. Totals are those of attend.cuh; m moves, for all
// lanes at once, only when a score is MOST_ABOVE above it, and lanes add up their sums at the end.

#define STEPS (WIDTH / 16)
#define CHAINS (PARTS == 1 ? 2 : 1)

// Eight R queries of a head, and what is known of them so far.
template <int R>
struct Group {
    static const int Q_BYTES = STEPS * PARTS * R * 256;  // queries as operands

    float factor[R][2];  // of scores
    float m[R][2], l[R][2];
    float o[R][STEPS][4];
};

template <int R>
DEVICE void begin_group(Group<R>& group) {
    UNROLL
    for (int r = 0; r < R; r++) {
        UNROLL
        for (int e = 0; e < 2; e++) group.m[r][e] = -INFINITE, group.l[r][e] = 0.0f;
        UNROLL
        for (int step = 0; step < STEPS; step++)
            UNROLL
            for (int e = 0; e < 4; e++) group.o[r][step][e] = 0.0f;
    }
}

// Makes operands of `n` queries that are HEAD_DIM apart.
template <int R>
DEVICE void load_group(const float* queries, u32 n, float scale, Group<R>& group, uint2* operands) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL
    for (int r = 0; r < R; r++) {
        const float* query = queries + (g + 8 * r) * HEAD_DIM;
        float x[STEPS][4], largest = 0.0f;
        UNROLL
        for (int i = 0; i < 2 * STEPS; i++) {
            float2 two = make_float2(0.0f, 0.0f);
            if (g + 8 * r < n && i * 8 + t * 2 < HEAD_DIM) two = *(const float2*)(query + i * 8 + t * 2);
            x[i / 2][i % 2 * 2] = two.x, x[i / 2][i % 2 * 2 + 1] = two.y;
            largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float up = line_factor(largest), factor = scale * (1.0f / up);
        UNROLL
        for (int e = 0; e < 2; e++) group.factor[r][e] = __shfl_sync(~0u, factor, (t * 2 + e) * 4);
        UNROLL
        for (int step = 0; step < STEPS; step++) {
            float (&four)[4] = x[step];
            UNROLL
            for (int e = 0; e < 4; e++) four[e] *= up;
            UNROLL
            for (int part = 0; part < PARTS; part++)
                operands[((step * PARTS + part) * R + r) * 32 + lane] =
                    make_uint2(take_part(four[0], four[1]), take_part(four[2], four[3]));
        }
    }
}

// Keys and values of a page of rows, as operands.
struct PageKeys {
    u32 page;

    __device__ uint4 operator()(int step) {
        const u32 lane = threadIdx.x % 32;
        return load_matrices(page + piece_at(lane % 16, step * 2 + lane / 16) * 16);
    }
};

struct PageValues {
    const u8* values;

    __device__ uint4 operator()(int step) {
        const u32 lane = threadIdx.x % 32;
        return load_turned(values + piece_at(lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2) * 16);
    }
};

DEVICE void mma_of(float (&c)[4], uint4 a, u32 b0, u32 b1) {
    const u32 four[4] = {a.x, a.y, a.z, a.w};
    mma(c, four, b0, b1);
}

template <int R, typename Keys>
DEVICE void score_page(Keys keys, const uint2* operands, float (&s)[R][4]) {
    float sums[R][PARTS][CHAINS][4];
    UNROLL
    for (int i = 0; i < R * PARTS * CHAINS * 4; i++) (&sums[0][0][0][0])[i] = 0.0f;
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        const uint4 a = keys(step);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int part = 0; part < PARTS; part++) {
                const uint2 q = operands[((step * PARTS + part) * R + r) * 32 + threadIdx.x % 32];
                mma_of(sums[r][part][step % CHAINS], a, q.x, q.y);
            }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int e = 0; e < 4; e++) {
            s[r][e] = 0.0f;
            UNROLL
            for (int i = 0; i < PARTS * CHAINS; i++) s[r][e] += (&sums[r][0][0][0])[i * 4 + e];
        }
}

// Moves the maximum of queries to that of a page's scores, and scales down what came before.
template <int R>
DEVICE void raise(Group<R>& group, const float (&s)[R][4]) {
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int e = 0; e < 2; e++) {
            float largest = fmaxf(s[r][e], s[r][2 + e]);
            UNROLL
            for (int other = 4; other < 32; other *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
            const float before = group.m[r][e], m = fmaxf(before, largest);
            // Where nothing was seen before, there is nothing to scale.
            const float down = before == -INFINITE ? 1.0f : exp2_of(before - m);
            group.m[r][e] = m, group.l[r][e] *= down;
            UNROLL
            for (int step = 0; step < STEPS; step++)
                group.o[r][step][e] *= down, group.o[r][step][2 + e] *= down;
        }
}

// Turns scores into weights; those of tokens g and g + 8 are first multiplied by `by`.
template <int R>
DEVICE void weigh_page(u32 tokens, float2 by, Group<R>& group, float (&s)[R][4]) {
    const u32 g = threadIdx.x % 32 / 4;
    const bool is_seen[2] = {(tokens >> g & 1) != 0, (tokens >> (g + 8) & 1) != 0};
    bool rises = false;
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int e = 0; e < 4; e++) {
            const float factor = group.factor[r][e % 2] * (e < 2 ? by.x : by.y);
            s[r][e] = is_seen[e / 2] ? s[r][e] * factor : -INFINITE;
            rises |= s[r][e] > group.m[r][e % 2] + MOST_ABOVE;
        }
    if (__any_sync(~0u, rises)) raise(group, s);
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int e = 0; e < 4; e++) {
            const float m = group.m[r][e % 2];
            s[r][e] = exp2_of(s[r][e] + (P_EXPONENT - (m == -INFINITE ? 0.0f : m)));
            group.l[r][e % 2] += s[r][e];
        }
}

// Turns a matrix of eight rows, of which each lane has two elements.
DEVICE u32 transposed(u32 two) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(two));
    return out;
}

template <int R, typename Values>
DEVICE void mix_page(Values values, float (&s)[R][4], Group<R>& group) {
    u32 weights[R][PARTS][2];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            weights[r][part][0] = transposed(take_part(s[r][0], s[r][1]));
            weights[r][part][1] = transposed(take_part(s[r][2], s[r][3]));
        }
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        const uint4 a = values(step);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int part = 0; part < PARTS; part++)
                mma_of(group.o[r][step], a, weights[r][part][0], weights[r][part][1]);
    }
}

// Puts down what `n` queries have come to: sums of weighted values [query][WIDTH], and maximum and sum of weights.
template <int R>
DEVICE void store_group(const Group<R>& group, u32 n, float* values, float* sums) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int e = 0; e < 2; e++) {
            float l = group.l[r][e];
            UNROLL
            for (int other = 4; other < 32; other *= 2) l += __shfl_xor_sync(~0u, l, other);
            const u32 query = r * 8 + t * 2 + e;
            if (query >= n) continue;
            if (g == 0) *(float2*)(sums + query * 2) = make_float2(group.m[r][e], l);
            UNROLL
            for (int step = 0; step < STEPS; step++) {
                float* to = values + query * WIDTH + step * 16 + g;
                to[0] = group.o[r][step][e], to[8] = group.o[r][step][2 + e];
            }
        }
}
