// Merges the chunks of the rows that were split, from left to right.
//
// Grid: (row that was split, query head and piece of COLUMNS columns). First all threads together work out
// how the chunks of a span are weighed, which leaves one operation to each link of the long chain of
// sums, or two where the maximum moves: that is seldom. Meanwhile the chunks come in batches through a
// ring of DEPTH.

// The chunks that a row sees.
struct Chunks {
    u32 first, end;
};

DEVICE Chunks chunks_of(const Cuts& cuts, u32 n_keys, u32 window) {
    const u32 end = n_keys > 0 ? chunk_of(cuts, n_keys - 1) + 1 : 0;
    return Chunks{chunk_of(cuts, first_key_of(n_keys, window)), end};
}

struct MergeParams {
    const float* partials;
    const float* sums;
    const Split* splits;
    float* out;
    u16* rounded;
    u32* n_taken;  // by splits: set to 0 for the next ones
    u32 n_kv_heads;
    u32 group;
    u32 window;
    Cuts cuts;
};
static_assert(sizeof(MergeParams) == MERGE_PARAMS_SIZE, "the host's MergeParams differs");

#define MERGE_THREADS 128
#define MERGE_OWN 2  // chunks that a thread weighs
#define MERGE_SPAN (MERGE_OWN * MERGE_THREADS)
#define MERGE_EIGHT 8  // chunks that are looked at together

template <int COLUMNS, int DEPTH, int SHARED>
struct Merger {
    static const int BATCH = MERGE_BATCH_FLOATS / COLUMNS;  // chunks
    static_assert(MERGE_SPAN % BATCH == 0 && BATCH % MERGE_EIGHT == 0, "whole batches and eights");

    // A piece of the chunks of one head of one row, and where the thread has a share of it. All of it is known
    // before there is anything to merge.
    struct Piece {
        u32 n;  // chunks
        u32 column, n_columns;
        const float2* sums;  // of the thread's first chunk of a span
        const float* source;  // of the first chunk that the thread brings,
        u32 target;           // and where that goes
        u32 n_brought;        // chunks that are left from there on
        u32 stride;           // from chunk to chunk, in lines
    };

    // How each chunk of a span, and all before it, are weighed; the chunk's sum; and the eights of which the
    // maximum moves, a bit for each.
    struct Weighed {
        float before[MERGE_SPAN], after[MERGE_SPAN], sum[MERGE_SPAN];
        u8 moved[MERGE_SPAN / MERGE_EIGHT];
    };
    static_assert(MERGE_SPAN == 256 && MERGE_THREADS == 128, "a byte of each warp, and a word of all");
    static_assert(DEPTH * MERGE_BATCH_FLOATS * 4 + sizeof(Weighed) == SHARED, "the host's memory");

    // Brings the results of a batch, or nothing if there is none.
    DEVICE void load(const Piece& piece, u32 batch) {
        const u32 APART = MERGE_THREADS / (COLUMNS / 4);  // chunks that a thread brings
        const float* source = piece.source + (u64)(batch * BATCH) * (piece.stride * WIDTH);
        const u32 target = piece.target + batch % DEPTH * (MERGE_BATCH_FLOATS * 4);
        UNROLL
        for (int i = 0; i < BATCH; i += APART) {
            if (batch * BATCH + i < piece.n_brought)
                copy_async(target + i * COLUMNS * 4, source, 16);
            source += APART * piece.stride * WIDTH;
        }
        copy_commit();
    }

    // Asks for the maxima and sums of the thread's chunks of a span.
    DEVICE void fetch(const Piece& piece, u32 start, float2 (&own)[MERGE_OWN]) {
        UNROLL
        for (int i = 0; i < MERGE_OWN; i++) {
            own[i] = make_float2(-INFINITE, 0.0f);
            if (start + threadIdx.x * MERGE_OWN + i < piece.n)
                own[i] = piece.sums[(start + i) * piece.stride];
        }
    }

    // Weighs the chunks of a span; `m` is the maximum of everything before it, and then of the span too.
    // Gives the eights of which it moves.
    DEVICE u32 weigh_span(const float2 (&own)[MERGE_OWN], float& m, Weighed& weighed) {
        __shared__ float maxima[MERGE_THREADS / 32];
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float upto = own[0].x;
        UNROLL
        for (int i = 1; i < MERGE_OWN; i++) upto = fmaxf(upto, own[i].x);
        UNROLL
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto = fmaxf(upto, other);
        }
        if (lane == 31) maxima[warp] = upto;
        __syncthreads();
        float left = m;
        UNROLL
        for (u32 i = 0; i < MERGE_THREADS / 32; i++) {
            if (i < warp) left = fmaxf(left, maxima[i]);
            m = fmaxf(m, maxima[i]);
        }
        const float inside = __shfl_up_sync(~0u, upto, 1);
        if (lane > 0) left = fmaxf(left, inside);
        bool is_moved = false;
        UNROLL
        for (int i = 0; i < MERGE_OWN; i++) {
            const Weights w = weigh(left, own[i].x);
            const u32 at = threadIdx.x * MERGE_OWN + i;
            weighed.before[at] = w.before, weighed.after[at] = w.after;
            weighed.sum[at] = own[i].y;
            is_moved |= w.before != 1.0f;
            left = w.m;
        }
        const u32 THREADS = MERGE_EIGHT / MERGE_OWN;  // of an eight
        const u32 moved = __ballot_sync(~0u, is_moved) >> lane * THREADS % 32;
        const u32 eights = __ballot_sync(~0u, (moved & ((1u << THREADS) - 1)) != 0);
        if (lane == 0) weighed.moved[warp] = (u8)eights;
        __syncthreads();
        return *(const u32*)weighed.moved;
    }

    // Chunks that are looked at together.
    struct Eight {
        float x[MERGE_EIGHT], after[MERGE_EIGHT], sum[MERGE_EIGHT];
    };

    DEVICE void load_four(const float* source, float* target) {
        const float4 four = *(const float4*)source;
        target[0] = four.x, target[1] = four.y, target[2] = four.z, target[3] = four.w;
    }

    // Loads the chunks from `c` on; their weights are those from `at` on.
    DEVICE void load_eight(const float* column, u32 c, const Weighed& weighed, u32 at, Eight& eight) {
        UNROLL
        for (int i = 0; i < MERGE_EIGHT; i++) eight.x[i] = column[(c + i) * COLUMNS];
        UNROLL
        for (int i = 0; i < MERGE_EIGHT; i += 4) {
            load_four(weighed.after + at + i, eight.after + i);
            load_four(weighed.sum + at + i, eight.sum + i);
        }
    }

    DEVICE void add_eight(const Eight& eight, bool is_moved, const float* before, float& o, float& l) {
        if (is_moved) {
            UNROLL
            for (int i = 0; i < MERGE_EIGHT; i++) {
                o = __fmaf_rn(eight.x[i], eight.after[i], __fmul_rn(o, before[i]));
                l = __fmaf_rn(eight.sum[i], eight.after[i], __fmul_rn(l, before[i]));
            }
            return;
        }
        UNROLL
        for (int i = 0; i < MERGE_EIGHT; i++) {
            o = __fmaf_rn(eight.x[i], eight.after[i], o);
            l = __fmaf_rn(eight.sum[i], eight.after[i], l);
        }
    }

    // Adds a batch of `n` chunks, whose weights begin at `at`, to a column.
    DEVICE void add(const float* column, u32 n, const Weighed& weighed, u32 at, u32 moved, float& o,
                    float& l) {
        const u32 n_eights = n / MERGE_EIGHT;
        const auto is_moved = [&](u32 c) { return (moved >> (at + c) / MERGE_EIGHT & 1) != 0; };
        Eight one, other;
        if (n_eights > 0) load_eight(column, 0, weighed, at, one);
        for (u32 i = 0; i < n_eights; i += 2) {
            const u32 c = i * MERGE_EIGHT;
            const u32 second = c + MERGE_EIGHT, third = second + MERGE_EIGHT;
            if (i + 1 < n_eights) load_eight(column, second, weighed, at + second, other);
            add_eight(one, is_moved(c), weighed.before + at + c, o, l);
            if (i + 1 == n_eights) break;
            if (i + 2 < n_eights) load_eight(column, third, weighed, at + third, one);
            add_eight(other, is_moved(second), weighed.before + at + second, o, l);
        }
        for (u32 c = n_eights * MERGE_EIGHT; c < n; c++) {
            const float before = weighed.before[at + c], after = weighed.after[at + c];
            o = __fmaf_rn(column[c * COLUMNS], after, __fmul_rn(o, before));
            l = __fmaf_rn(weighed.sum[at + c], after, __fmul_rn(l, before));
        }
    }

    // The block's piece of a row.
    DEVICE Piece piece_of(const MergeParams& p, const Split& split, u32 head, u32 ring) {
        const u32 n_heads = p.n_kv_heads * p.group, QUADS = COLUMNS / 4, thread = threadIdx.x;
        const Chunks chunks = chunks_of(p.cuts, split.n_keys, p.window);
        const u64 first = (u64)(split.partial + chunks.first) * n_heads + head;
        const u32 at = thread % QUADS * 4, row = thread / QUADS;
        Piece piece;
        piece.n = chunks.end - chunks.first;
        piece.stride = n_heads;
        piece.column = blockIdx.y / n_heads * COLUMNS;
        piece.n_columns = min((u32)COLUMNS, WIDTH - piece.column);
        piece.sums = (const float2*)p.sums + first + thread * MERGE_OWN * n_heads;
        piece.source = p.partials + (first + row * n_heads) * WIDTH + piece.column + at;
        piece.target = ring + (row * COLUMNS + at) * 4;
        piece.n_brought = at < piece.n_columns && row < piece.n ? piece.n - row : 0;
        return piece;
    }

    DEVICE void run(const MergeParams& p) {
        extern __shared__ __align__(128) float ring[];  // [DEPTH][MERGE_BATCH_FLOATS], Weighed
        allow_next();
        const u32 n_heads = p.n_kv_heads * p.group, thread = threadIdx.x;
        const u32 head = blockIdx.y % n_heads;
        const Split split = p.splits[blockIdx.x];
        const Piece piece = piece_of(p, split, head, shared_address(ring));
        Weighed& weighed = *(Weighed*)(ring + DEPTH * MERGE_BATCH_FLOATS);
        const u32 i = piece.column + thread;
        const u64 target = ((u64)split.row * n_heads + head) * HEAD_DIM + i;
        float m = -INFINITE, l = 0.0f, o = 0.0f;
        float* const out = p.out + target;
        u16* const rounded = p.rounded + target;
        float2 own[MERGE_OWN];
        u32 moved = 0;
        wait_for_previous();
        fetch(piece, 0, own);
        for (u32 k = 0; k < DEPTH - 1; k++) load(piece, k);
        if (blockIdx.x + blockIdx.y + thread == 0) *p.n_taken = 0;
        for (u32 start = 0; start < piece.n; start += BATCH) {
            const u32 at = start % MERGE_SPAN, batch = start / BATCH;
            if (at == 0) {
                moved = weigh_span(own, m, weighed);
                fetch(piece, start + MERGE_SPAN, own);
            }
            copy_wait<DEPTH - 2>();
            __syncthreads();
            // Nobody needs the batch before this one.
            load(piece, batch + DEPTH - 1);
            if (thread < piece.n_columns)
                add(ring + batch % DEPTH * MERGE_BATCH_FLOATS + thread,
                    min(piece.n - start, (u32)BATCH), weighed, at, moved, o, l);
        }
        if (thread >= piece.n_columns || i >= HEAD_DIM) return;
        const float x = o * (1.0f / l);
        *out = x;
        *rounded = (u16)bf16_of(x);
    }
};

#define MERGE(name, COLUMNS, DEPTH, SHARED)                                                    \
    extern "C" __global__ void __maxnreg__(MERGE_REGISTERS) name(MergeParams p) {              \
        Merger<COLUMNS, DEPTH, SHARED>::run(p);                                                \
    }
MERGE_ENTRIES
