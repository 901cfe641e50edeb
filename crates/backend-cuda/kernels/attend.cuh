// Attention over pages, as the kernels that compute it share it:
// out[t, h] = softmax(scale q[t, h] K) V, causal, and not further back than the window. KV of 16 bits, or
// of 8 that become floats, on tensor cores. PARTS says how exactly: with two f16, or three bf16, to f32's accuracy.
//
// A warp takes up to sixteen *lines*: pairs of a token and a query head of one KV head. Keys are cut
// into chunks at fixed places from the sequence's start. For each chunk it goes in steps of 32 keys:
//
//   s = q K             q is the sum of PARTS 16-bit floats, or rounded to one; a chain along D each
//   m, p = exp2(s - m)  m is near the chunk's running maximum: it moves, and what came before is scaled
//                       down, when that is MOST_ABOVE above it
//   l, o                sums of p and of p V; p is split as q is; one chain along the keys
//
// and chunks are merged from left to right. Masked keys have p = 0, and adding zero changes nothing.
// A *tile* (many lines, all chunks) and a *split* (the lines of one token, one chunk; `merge` does
// the rest) both do this, so a row has the same bits however it came to be computed.

#define STEP 32
#define STEP_PAGES (STEP / PAGE)
#define STAGE_BYTES (STEP_PAGES * HEAD_PAGE_BYTES)
#define KEY_TILES (STEP / 8)
#define KT (WIDTH / 32)     // pieces of 32 columns
#define PAIRS (WIDTH / 16)  // pairs of tiles of eight columns
#define TILES (2 * PAIRS)

// Chunks are short at the beginning, so that short sequences have many: `n_small` of SMALL_CHUNK keys, then
// `n_middle` of MIDDLE_CHUNK, then `n_large` of `large`, and then LARGE_CHUNK, which is the most.
struct Cuts {
    u32 n_small, n_middle, large, n_large;
};
static_assert(SMALL_CHUNK % STEP == 0 && MIDDLE_CHUNK % STEP == 0 && LARGE_CHUNK % STEP == 0,
              "chunks are whole steps");

DEVICE u32 chunk_of(const Cuts& cuts, u32 key) {
    const u32 small_end = cuts.n_small * SMALL_CHUNK;
    const u32 middle_end = small_end + cuts.n_middle * MIDDLE_CHUNK;
    const u32 small = min(key, small_end), middle = min(key, middle_end);
    const u32 large = min(key, middle_end + cuts.n_large * cuts.large);
    return small / SMALL_CHUNK + (middle - small) / MIDDLE_CHUNK + (large - middle) / cuts.large +
           (key - large) / LARGE_CHUNK;
}

DEVICE u32 chunk_start(const Cuts& cuts, u32 chunk) {
    const u32 small = min(chunk, cuts.n_small), middle = min(chunk - small, cuts.n_middle);
    const u32 rest = chunk - small - middle, large = min(rest, cuts.n_large);
    return small * SMALL_CHUNK + middle * MIDDLE_CHUNK + large * cuts.large + (rest - large) * LARGE_CHUNK;
}

struct AttendParams {
    const float* qkv;  // [T, q_stride]
    const u8* layer;   // [G][slot][page]
    float* out;        // [T, H D]
    u16* rounded;      // the same, rounded to bf16
    float* partials;   // [partial][G][group][WIDTH]
    float* sums;       // [partial][G][group][2]: maximum, sum
    const u32* tasks;
    const u32* n_tasks;  // of splits, and beside it how many were taken
    const u32* tables;   // [row][table_len]
    // For splits that rotate q and k, and append k and v: [T][HEAD_DIM / 2] cosine and sine; else null.
    const float* angles;
    u64 head_bytes;     // of all slots of one head
    Near near;
    u32 q_stride;       // floats
    u32 table_len;
    u32 n_kv_heads;
    u32 group;
    u32 window;    // keys that a row sees at most
    u32 prefetch;  // steps that splits bring to the second-level cache ahead of their use, or 0
    Cuts cuts;
    u32 tile_parts;  // blocks that share a task of many lines
    u32 is_halves;   // whether a pair that is rotated is HEAD_DIM / 2 apart, or neighbours
    u32 is_contiguous;  // whether a page's slot is its place in the tables
    float scale;        // times log2(e)
};
static_assert(sizeof(AttendParams) == ATTEND_PARAMS_SIZE, "the host's AttendParams differs");

// Whether queries and weights are f16, or bf16.
#define IS_F16 (KV == KV_F16 || (CODED && PARTS == 1))

// How far scores may be above m, as an exponent of two. Parts of small p keep all their bits only if m is
// the maximum itself.
#define MOST_ABOVE (PARTS == 1 ? 8.0f : 0.0f)

// All p are multiplied with two to this, so that small ones keep their bits and large ones are finite.
#if IS_F16
#define P_EXPONENT (PARTS == 1 ? 7.0f : 14.0f)
DEVICE float part_value(u32 bits) { return f16_to_float(bits & 0xFFFF); }
DEVICE u32 part_pair(float x, float y) { return f16x2(x, y); }
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(c, a, b0, b1); }
#else
#define P_EXPONENT 0.0f
DEVICE float part_value(u32 bits) { return bf16_to_float(bits & 0xFFFF); }
DEVICE u32 part_pair(float x, float y) { return bf16x2(x, y); }
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }
#endif

// Takes the leading part off two floats.
DEVICE u32 take_part(float& x, float& y) {
    const u32 bits = part_pair(x, y);
    x -= part_value(bits);
    y -= part_value(bits >> 16);
    return bits;
}

// Brings the largest of a line near 2^14: the factor is a power of two.
DEVICE float line_factor(float largest) {
#if IS_F16
    if (!(largest > 0.0f && largest < INFINITE)) return 1.0f;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    exponent = 14 - (exponent < -100 ? -100 : exponent);
    return __uint_as_float((u32)(exponent + 127) << 23);
#else
    return 1.0f;
#endif
}

// What a line knows after some keys: o is kept beside it. Sums are of exp2(s - m), times
// 2^P_EXPONENT.
struct Total {
    float m, l;
};

// How two totals are weighed when they become one.
struct Weights {
    float before, after, m;
};

DEVICE Weights weigh(float before, float after) {
    const float m = fmaxf(before, after);
    // Where nothing was seen on either side, nothing may become NaN.
    const float base = m == -INFINITE ? 0.0f : m;
    return Weights{exp2_of(before - base), exp2_of(after - base), m};
}

DEVICE float mix(float before, float after, const Weights& w) {
    return __fmaf_rn(after, w.after, __fmul_rn(before, w.before));
}

// The first key that a row with `n_keys` keys up to itself sees.
DEVICE u32 first_key_of(u32 n_keys, u32 window) { return n_keys > window ? n_keys - window : 0; }

// The lines of one warp: 8 R of them. A lane = 4 g + t has a share of line g, and if R is 2 of g + 8.
//
// With R = 1, the lower half of the matrix instruction's rows is free: there go the queries' second
// parts, so that one instruction does for both. The sums are those of R = 2.
template <int R>
struct Lines {
    static const int SETS = R == 1 ? (PARTS + 1) / 2 : PARTS;
    // Queries as operands, [KT * 2 steps][SETS][lane] of sixteen bytes.
    static const int Q_BYTES = KT * 2 * SETS * 512;

    u32 first_row;  // of the batch: that of line 0
    u32 kv_head;
    u32 first, n;   // lines; line i is query head i % group of row first_row + i / group
    u32 start[R], end[R];           // keys that the lane's lines see
    u32 inside_start, inside_end;   // keys that all lines see
    float factor[R];                // of their scores
    // Of the chunk so far.
    Total total[R];
    float o[TILES][4];
#if CODED
    // What o is to be multiplied by: a power of two above all scales of values that were seen, so that
    // weights are f16.
    float unit[R];
#endif
};

template <int R>
DEVICE void begin_totals(Lines<R>& lines) {
    UNROLL
    for (int r = 0; r < R; r++) lines.total[r].m = -INFINITE, lines.total[r].l = 0.0f;
}

template <int R>
DEVICE void begin_chunk(Lines<R>& lines) {
    begin_totals(lines);
    UNROLL
    for (int n = 0; n < TILES; n++)
        UNROLL
        for (int e = 0; e < 4; e++) lines.o[n][e] = 0.0f;
#if CODED
    UNROLL
    for (int r = 0; r < R; r++) lines.unit[r] = 0.0f;
#endif
}

// Whether splits can rotate queries: a lane then has both elements of a pair.
#define CAN_ROTATE (HEAD_DIM % 64 == 0)

// Rotates a query of which the lane has elements k * 32 + pair * 8 + t * 2, and the one after.
DEVICE void rotate_query(const AttendParams& p, u64 row, float (&x)[KT][8]) {
    const u32 t = threadIdx.x % 4;
    const float* angles = p.angles + row * HEAD_DIM;
    if (p.is_halves) {
        UNROLL
        for (int k = 0; k < KT / 2; k++)
            UNROLL
            for (int pair = 0; pair < 4; pair++) {
                const float4 both = *(const float4*)(angles + (k * 32 + pair * 8 + t * 2) * 2);
                const float2 turns[2] = {make_float2(both.x, both.y), make_float2(both.z, both.w)};
                UNROLL
                for (int e = 0; e < 2; e++) {
                    float &a = x[k][2 * pair + e], &b = x[k + KT / 2][2 * pair + e];
                    const float first = turned_first(a, b, turns[e]);
                    b = turned_second(a, b, turns[e]), a = first;
                }
            }
        return;
    }
    UNROLL
    for (int k = 0; k < KT; k++)
        UNROLL
        for (int pair = 0; pair < 4; pair++) {
            const float2 angle = ((const float2*)angles)[k * 16 + pair * 4 + t];
            float &a = x[k][2 * pair], &b = x[k][2 * pair + 1];
            const float first = turned_first(a, b, angle);
            b = turned_second(a, b, angle), a = first;
        }
}

// Queries as operands, of which a lane sees its own: in shared memory.
struct SharedQueries {
    u32* operands;

    __device__ SharedQueries(u32* room) : operands(room) {}
    __device__ void set(u32 at, u32 reg, u32 bits) {
        operands[(at * 32 + threadIdx.x % 32) * 4 + reg] = bits;
    }
    __device__ uint4 operator[](u32 at) const {
        return *(const uint4*)(operands + (at * 32 + threadIdx.x % 32) * 4);
    }
};

// The same in registers.
template <int N>
struct OwnQueries {
    u32 operands[N][4];

    __device__ OwnQueries(u32*) {}
    __device__ void set(u32 at, u32 reg, u32 bits) { operands[at][reg] = bits; }
    __device__ uint4 operator[](u32 at) const {
        return make_uint4(operands[at][0], operands[at][1], operands[at][2], operands[at][3]);
    }
};

// Splits the lines' queries into operands; rotates them first if ROTATES and there are angles.
template <int R, bool ROTATES = false, typename Queries>
DEVICE void load_queries(const AttendParams& p, Lines<R>& lines, Queries& queries) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL
    for (int r = 0; r < R; r++) {
        const u32 line = lines.first + g + 8 * r;
        const u64 row = lines.first_row + line / p.group;
        const u32 head = lines.kv_head * p.group + line % p.group;
        const float* q = p.qkv + row * p.q_stride + head * HEAD_DIM;
        float x[KT][8];
        float largest = 0.0f;
        UNROLL
        for (int k = 0; k < KT; k++)
            UNROLL
            for (int pair = 0; pair < 4; pair++) {
                const u32 i = k * 32 + pair * 8 + t * 2;
                float2 two = make_float2(0.0f, 0.0f);
                if (g + 8 * r < lines.n && i < HEAD_DIM) two = *(const float2*)(q + i);
                x[k][2 * pair] = two.x, x[k][2 * pair + 1] = two.y;
            }
        if (ROTATES && CAN_ROTATE && p.angles && g + 8 * r < lines.n) rotate_query(p, row, x);
        UNROLL
        for (int k = 0; k < KT; k++)
            UNROLL
            for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[k][i]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float up = line_factor(largest);
        lines.factor[r] = p.scale * (1.0f / up);
        UNROLL
        for (int k = 0; k < KT; k++)
            UNROLL
            for (int pair = 0; pair < 4; pair++) {
                float a = x[k][2 * pair] * up, b = x[k][2 * pair + 1] * up;
                const u32 step = k * 2 + pair / 2;
                UNROLL
                for (int part = 0; part < (R == 1 ? 2 * Lines<R>::SETS : PARTS); part++) {
                    const u32 bits = part < PARTS ? take_part(a, b) : 0;
                    const u32 set = R == 1 ? part / 2 : part;
                    const u32 reg = pair % 2 * 2 + (R == 1 ? part % 2 : r);
                    queries.set(step * Lines<R>::SETS + set, reg, bits);
                }
            }
    }
}

// Four matrices of eight rows of sixteen bytes each, of which each lane names a row: a lane gets of each
// the elements 2t and 2t + 1 of row g.
DEVICE uint4 load_matrices(u32 row) {
    uint4 b;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
                 : "r"(row)
                 : "memory");
    return b;
}
DEVICE uint4 load_matrices(const u8* row) { return load_matrices(shared_address(row)); }

// The same turned: a lane gets elements g of rows 2t and 2t + 1.
DEVICE uint4 load_turned(const u8* row) {
    uint4 b;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
                 : "r"(shared_address(row))
                 : "memory");
    return b;
}

// Whether a warp's own instructions are what takes time. Narrow heads have twelve warps, which wait for each
// other's: these were 2 to 3 % slower with fewer.
#define LEAN (WIDTH > 96)

// Operands for two steps along the columns: those of a piece of 32, of eight tokens of a page. Addresses are one
// of the lane, which a kernel may know as that in shared memory, and a distance.
template <typename Keys>
DEVICE uint4 key_operand(Keys keys, u32 k, u32 eight) {
    const u32 lane = threadIdx.x % 32;
#if CODED
    return operands_of(keys + ((k * 2 + eight) * 32 + lane) * 8);
#elif ROWS
    return load_matrices(keys + piece_at(eight * 8 + lane % 8, k * 4 + lane / 8) * 16);
#else
    if (!LEAN) return load_matrices(keys + key_piece(eight * 8 + lane % 8, k * 4 + lane / 8) * 16);
    return load_matrices(keys + key_piece(lane % 8, lane / 8) * 16 + (eight * WIDTH + k * 32) * 16);
#endif
}

// Operands for two tiles of eight columns: the values of a page's tokens.
DEVICE uint4 value_operand(const u8* values, u32 pair) {
    const u32 lane = threadIdx.x % 32;
#if CODED
    return operands_of(values + (pair * 32 + lane) * 8);
#elif ROWS
    return load_turned(values + piece_at(lane / 8 % 2 * 8 + lane % 8, pair * 2 + lane / 16) * 16);
#else
    return load_matrices(values +
                         value_piece(pair * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2) * 16);
#endif
}

// Scores of the keys of a step: of tile j, keys 2t and 2t + 1, for each of the lane's lines. The keys
// of its pages are STRIDE apart.
template <int R, int STRIDE, typename Queries, typename Keys>
DEVICE void score(Keys stage, const Queries& queries, float (&s)[KEY_TILES][2 * R]) {
    const int SETS = Lines<R>::SETS;
    float sums[KEY_TILES][SETS][4];
    UNROLL
    for (int j = 0; j < KEY_TILES; j++)
        UNROLL
        for (int set = 0; set < SETS; set++)
            UNROLL
            for (int e = 0; e < 4; e++) sums[j][set][e] = 0.0f;
    UNROLL
    for (int k = 0; k < KT; k++) {
        uint4 b[KEY_TILES];
        UNROLL
        for (int j = 0; j < KEY_TILES; j++) {
            b[j] = key_operand(stage + j / 2 * STRIDE, k, j % 2);
        }
        UNROLL
        for (int i = 0; i < 2; i++)
            UNROLL
            for (int set = 0; set < SETS; set++) {
                const uint4 bits = queries[(k * 2 + i) * SETS + set];
                const u32 q[4] = {bits.x, bits.y, bits.z, bits.w};
                UNROLL
                for (int j = 0; j < KEY_TILES; j++)
                    mma(sums[j][set], q, i ? b[j].z : b[j].x, i ? b[j].w : b[j].y);
            }
    }
    UNROLL
    for (int j = 0; j < KEY_TILES; j++)
        UNROLL
        for (int e = 0; e < 2 * R; e++) {
            s[j][e] = sums[j][0][e];
            UNROLL
            for (int part = 1; part < PARTS; part++)
                s[j][e] += R == 1 ? sums[j][part / 2][e + part % 2 * 2] : sums[j][part][e];
        }
}

// Turns the scores of a step into weights; the chunk's totals so far are scaled down by `down`.
template <int R>
DEVICE void soften(u32 first_key, Lines<R>& lines, float (&s)[KEY_TILES][2 * R], float (&down)[R]) {
    const u32 t = threadIdx.x % 4;
    const bool is_inside =
        first_key >= lines.inside_start && first_key + STEP <= lines.inside_end;
    float minus[R], sum[R];
    if (!is_inside)
        UNROLL
        for (int j = 0; j < KEY_TILES; j++)
            UNROLL
            for (int e = 0; e < 2 * R; e++) {
                const u32 key = first_key + j * 8 + t * 2 + e % 2;
                const bool seen = key >= lines.start[e / 2] && key < lines.end[e / 2];
                s[j][e] = seen ? s[j][e] : -INFINITE;
            }
    UNROLL
    for (int r = 0; r < R; r++) {
        float largest = -INFINITE;
        UNROLL
        for (int j = 0; j < KEY_TILES; j++)
            largest = fmaxf(largest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        largest = __fmul_rn(largest, lines.factor[r]);
        const float before = lines.total[r].m;
        const float m = largest > before + MOST_ABOVE ? largest : before;
        // Where nothing was seen before, there is nothing to scale.
        down[r] = before == -INFINITE ? 1.0f : exp2_of(before - m);
        minus[r] = P_EXPONENT - (m == -INFINITE ? 0.0f : m);
        lines.total[r].m = m;
        sum[r] = 0.0f;
    }
    UNROLL
    for (int j = 0; j < KEY_TILES; j++)
        UNROLL
        for (int e = 0; e < 2 * R; e++) {
            s[j][e] = exp2_of(__fmaf_rn(s[j][e], lines.factor[e / 2], minus[e / 2]));
            sum[e / 2] += s[j][e];
        }
    UNROLL
    for (int r = 0; r < R; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        lines.total[r].l = __fmaf_rn(lines.total[r].l, down[r], sum[r]);
    }
}

// Whether the maximum of one of the warp's lines has moved: what is not moved is not touched.
template <int R>
DEVICE bool has_moved(const float (&down)[R]) {
    bool is_moved = down[0] != 1.0f;
    UNROLL
    for (int r = 1; r < R; r++) is_moved |= down[r] != 1.0f;
    return __any_sync(~0u, is_moved);
}

template <int R>
DEVICE void scale_down(const float (&down)[R], float (&o)[TILES][4]) {
    UNROLL
    for (int n = 0; n < TILES; n++)
        UNROLL
        for (int e = 0; e < 2 * R; e++) o[n][e] *= down[e / 2];
}

// The weights of a page's keys as operands.
template <int R>
DEVICE void weight_operands(const float (&s)[KEY_TILES][2 * R], int page, u32 (&a)[PARTS][4]) {
    UNROLL
    for (int reg = 0; reg < 4; reg++) {
        // Registers 0 and 1 are the first eight keys of the page, 2 and 3 the others; odd ones
        // are the lower rows.
        const int j = page * 2 + reg / 2, r = reg % 2;
        if (r < R) {
            float x = s[j][2 * (r % R)], y = s[j][2 * (r % R) + 1];
            UNROLL
            for (int part = 0; part < PARTS; part++) a[part][reg] = take_part(x, y);
        } else {
            UNROLL
            for (int part = 0; part < PARTS; part++) a[part][reg] = 0;
        }
    }
}

// Adds the weighted values of a step. The values of its pages are STRIDE apart.
template <int R, int STRIDE>
DEVICE void mix_values(const u8* stage, const float (&s)[KEY_TILES][2 * R], const float (&down)[R],
                       float (&o)[TILES][4]) {
    if (has_moved(down)) scale_down(down, o);
    UNROLL
    for (int page = 0; page < STEP_PAGES; page++) {
        u32 a[PARTS][4];
        weight_operands<R>(s, page, a);
        const u8* values = stage + page * STRIDE;
        UNROLL
        for (int pair = 0; pair < PAIRS; pair++) {
            const uint4 b = value_operand(values, pair);
            UNROLL
            for (int part = 0; part < PARTS; part++) {
                mma(o[2 * pair], a[part], b.x, b.y);
                mma(o[2 * pair + 1], a[part], b.z, b.w);
            }
        }
    }
}
