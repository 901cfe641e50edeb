// Merges the chunks of the rows that were split, from left to right.
//
// Grid: (row that was split, query head and piece of COLUMNS columns). Chunks come in batches through a
// ring of DEPTH, maxima and sums behind the rest. The weights of a batch are worked out by all threads
// together, which leaves one operation to each link of the long chain of sums, or two where the maximum
// moves: that is seldom.

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
    u32 padding;
    Cuts cuts;
};
static_assert(sizeof(MergeParams) == MERGE_PARAMS_SIZE, "the host's MergeParams differs");

#define MERGE_THREADS 128

template <int COLUMNS, int DEPTH, int SHARED>
struct Merger {
    static const int BATCH = MERGE_BATCH_FLOATS / COLUMNS;  // chunks
    static const int BATCH_WARPS = (BATCH + 31) / 32;       // that work out weights
    static const int STAGE_FLOATS = MERGE_BATCH_FLOATS + 2 * BATCH;
    static_assert(DEPTH * STAGE_FLOATS * 4 == SHARED, "the host's memory differs");
    static_assert(BATCH <= MERGE_THREADS && BATCH % 4 == 0, "a thread for the weights of a chunk");

    // A piece of the chunks of one head of one row.
    struct Piece {
        u64 first, stride;  // chunks, counted in lines
        u32 n;              // chunks
        u32 column, n_columns;
    };

    // Brings the results of a batch, or nothing if there is none.
    DEVICE void load(const MergeParams& p, const Piece& piece, u32 batch, u32 ring) {
        const u32 QUADS = COLUMNS / 4, start = batch * BATCH;
        const u32 n = start < piece.n ? min(piece.n - start, (u32)BATCH) : 0;
        const u32 target = ring + batch % DEPTH * (STAGE_FLOATS * 4);
        if (threadIdx.x < n)
            copy_eight(target + (MERGE_BATCH_FLOATS + 2 * threadIdx.x) * 4,
                       p.sums + (piece.first + (start + threadIdx.x) * piece.stride) * 2);
        for (u32 i = threadIdx.x; i < n * QUADS; i += MERGE_THREADS) {
            const u32 chunk = i / QUADS, at = i % QUADS * 4;
            if (at >= piece.n_columns) continue;
            const u64 line = piece.first + (start + chunk) * piece.stride;
            copy_async(target + (chunk * COLUMNS + at) * 4,
                       p.partials + line * WIDTH + piece.column + at, 16);
        }
        copy_commit();
    }

    DEVICE void run(const MergeParams& p) {
        extern __shared__ __align__(128) float ring[];  // [DEPTH][STAGE_FLOATS]
        __shared__ float before[BATCH], maxima[BATCH_WARPS];
        __shared__ __align__(16) float after[BATCH], lengths[BATCH];
        allow_next();
        const Split split = p.splits[blockIdx.x];
        const Chunks chunks = chunks_of(p.cuts, split.n_keys, p.window);
        const u32 n_heads = p.n_kv_heads * p.group, thread = threadIdx.x, lane = thread % 32;
        const u32 head = blockIdx.y % n_heads;
        Piece piece;
        piece.stride = n_heads;
        piece.first = (u64)(split.partial + chunks.first) * n_heads + head;
        piece.n = chunks.end - chunks.first;
        piece.column = blockIdx.y / n_heads * COLUMNS;
        piece.n_columns = min((u32)COLUMNS, WIDTH - piece.column);
        const u32 n_batches = (piece.n + BATCH - 1) / BATCH;
        float m = -INFINITE, l = 0.0f, o = 0.0f;
        wait_for_previous();
        if (blockIdx.x + blockIdx.y + thread == 0) *p.n_taken = 0;
        for (u32 i = 0; i < DEPTH - 1; i++) load(p, piece, i, shared_address(ring));
        for (u32 i = 0; i < n_batches; i++) {
            const u32 n = min(piece.n - i * BATCH, (u32)BATCH);
            const float* source = ring + i % DEPTH * STAGE_FLOATS;
            copy_wait<DEPTH - 2>();
            __syncthreads();
            float2 own = make_float2(-INFINITE, 0.0f);
            if (thread < n) own = ((const float2*)(source + MERGE_BATCH_FLOATS))[thread];
            // The maximum of everything up to this chunk, and of everything before it.
            float upto = own.x;
            for (u32 step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(~0u, upto, step);
                if (lane >= step) upto = fmaxf(upto, other);
            }
            if (lane == 31 && thread / 32 < BATCH_WARPS) maxima[thread / 32] = upto;
            __syncthreads();
            // Nobody needs the batch before this one.
            load(p, piece, i + DEPTH - 1, shared_address(ring));
            float left = m;
            for (u32 warp = 0; warp < BATCH_WARPS; warp++) {
                if (warp < thread / 32) left = fmaxf(left, maxima[warp]);
                m = fmaxf(m, maxima[warp]);
            }
            const float inside = __shfl_up_sync(~0u, upto, 1);
            const Weights w = weigh(lane == 0 ? left : fmaxf(left, inside), own.x);
            if (thread < BATCH)
                before[thread] = w.before, after[thread] = w.after, lengths[thread] = own.y;
            const bool is_moved = __syncthreads_or(thread < n && w.before != 1.0f);
            if (thread >= piece.n_columns) continue;
            source += thread;
            u32 c = 0;
            if (!is_moved) {
#pragma unroll 4
                for (; c + 4 <= n; c += 4) {
                    const float4 by = *(const float4*)(after + c);
                    const float4 length = *(const float4*)(lengths + c);
                    o = __fmaf_rn(source[c * COLUMNS], by.x, o);
                    l = __fmaf_rn(length.x, by.x, l);
                    o = __fmaf_rn(source[(c + 1) * COLUMNS], by.y, o);
                    l = __fmaf_rn(length.y, by.y, l);
                    o = __fmaf_rn(source[(c + 2) * COLUMNS], by.z, o);
                    l = __fmaf_rn(length.z, by.z, l);
                    o = __fmaf_rn(source[(c + 3) * COLUMNS], by.w, o);
                    l = __fmaf_rn(length.w, by.w, l);
                }
            }
#pragma unroll 4
            for (; c < n; c++) {
                o = __fmaf_rn(source[c * COLUMNS], after[c], __fmul_rn(o, before[c]));
                l = __fmaf_rn(lengths[c], after[c], __fmul_rn(l, before[c]));
            }
        }
        const u32 i = piece.column + thread;
        if (thread >= piece.n_columns || i >= HEAD_DIM) return;
        const u64 target = ((u64)split.row * n_heads + head) * HEAD_DIM + i;
        const float x = o * (1.0f / l);
        p.out[target] = x;
        p.rounded[target] = (u16)bf16_of(x);
    }
};

#define MERGE(name, COLUMNS, DEPTH, SHARED)                                                    \
    extern "C" __global__ void __launch_bounds__(MERGE_THREADS) name(MergeParams p) {          \
        Merger<COLUMNS, DEPTH, SHARED>::run(p);                                                \
    }
MERGE_ENTRIES
