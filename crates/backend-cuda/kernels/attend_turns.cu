// Merges the chunks of splits that `attend_paced.cu` has computed: as `attend_merge.cu`, but from registers.
//
// Grid: (row that was split, query head and piece of COLUMNS columns). A warp takes 32 columns of 32 chunks at
// a time: a lane has one column of all of them, and knows how one of them is weighed. Warps of the same
// columns take turns to add what they have, so that everything is on its way, or there, before its turn comes.
// A link of the chain of sums is one operation, or two where the maximum moves: that is seldom.

#if HAS_BULK && OWNS_QUERIES(1)

#define TURN_WARPS 4

// With OWNS, a warp has its weights in registers before its turn comes; without, there is room for twice as
// many blocks.
template <int COLUMNS, bool OWNS>
struct TurnMerger {
    static const u32 BESIDE = COLUMNS / 32;         // warps of different columns
    static const u32 N_TURNS = TURN_WARPS / BESIDE;  // warps of the same ones

    // How the chunks of a warp, and all before each, are weighed; and their sums.
    struct Weighed {
        float before[32], after[32], sum[32];
    };

    // Weighs the chunks of all turns, of which a lane has one; `m` is the maximum of everything before them,
    // and then theirs too. Gives those of the warp's chunks at which it moves.
    DEVICE u32 weigh_chunks(const float2& own, float& m, float* maxima, Weighed& weighed) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float upto = own.x;
        UNROLL
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto = fmaxf(upto, other);
        }
        if (lane == 31) maxima[warp] = upto;
        __syncthreads();
        float left = m;
        UNROLL
        for (u32 i = 0; i < N_TURNS; i++) {
            if (i < warp / BESIDE) left = fmaxf(left, maxima[i * BESIDE]);
            m = fmaxf(m, maxima[i * BESIDE]);
        }
        const float inside = __shfl_up_sync(~0u, upto, 1);
        if (lane > 0) left = fmaxf(left, inside);
        const Weights w = weigh(left, own.x);
        weighed.before[lane] = w.before, weighed.after[lane] = w.after, weighed.sum[lane] = own.y;
        // The vote orders no memory.
        __syncwarp();
        return __ballot_sync(~0u, w.before != 1.0f);
    }

    template <int N>
    DEVICE void load(const float* source, float* target) {
        UNROLL
        for (int i = 0; i < N; i += 4) {
            const float4 four = *(const float4*)(source + i);
            target[i] = four.x, target[i + 1] = four.y, target[i + 2] = four.z, target[i + 3] = four.w;
        }
    }

    // What a warp adds when its turn comes.
    struct Own {
        float x[32], after[32], sum[32];
    };

    // Adds `n` chunks, rounded up to eights: those that are not there have no weight.
    DEVICE void add(Own& own, u32 n, u32 moved, const Weighed& weights, float& o, float& l) {
        UNROLL
        for (int eight = 0; eight < 32; eight += 8) {
            if (eight >= n) break;
            if (!OWNS) load<8>(weights.after + eight, own.after + eight);
            if (!OWNS) load<8>(weights.sum + eight, own.sum + eight);
            if ((moved >> eight & 0xFF) == 0) {
                UNROLL
                for (int i = eight; i < eight + 8; i++) {
                    o = __fmaf_rn(own.x[i], own.after[i], o);
                    l = __fmaf_rn(own.sum[i], own.after[i], l);
                }
                continue;
            }
            UNROLL
            for (int i = eight; i < eight + 8; i++) {
                o = __fmaf_rn(own.x[i], own.after[i], __fmul_rn(o, weights.before[i]));
                l = __fmaf_rn(own.sum[i], own.after[i], __fmul_rn(l, weights.before[i]));
            }
        }
    }

    // The turn goes from warp to warp.
    DEVICE void await_turn() {
        if (N_TURNS > 1) asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / 32) : "memory");
    }
    DEVICE void pass_turn() {
        const u32 next = (threadIdx.x / 32 + BESIDE) % TURN_WARPS;
        if (N_TURNS > 1) asm volatile("bar.arrive %0, 64;" ::"r"(1 + next) : "memory");
    }

    DEVICE void run(const MergeParams& p) {
        __shared__ float maxima[2][TURN_WARPS];
        __shared__ float2 carried[BESIDE * 32];
        __shared__ __align__(16) Weighed weighed[TURN_WARPS];
        allow_next();
        const u32 n_heads = p.n_kv_heads * p.group, head = blockIdx.y % n_heads;
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, turn = warp / BESIDE;
        const u32 place = warp % BESIDE * 32 + lane, column = blockIdx.y / n_heads * COLUMNS + place;
        const Split split = p.splits[blockIdx.x];
        const Chunks chunks = chunks_of(p.cuts, split.n_keys, p.window);
        const u32 n = chunks.end - chunks.first;
        const bool is_here = column < WIDTH;
        const u64 line = (u64)(split.partial + chunks.first) * n_heads + head;
        const float2* const sums = (const float2*)p.sums + line;
        const float* const partials = p.partials + line * WIDTH + column;
        const u64 target = ((u64)split.row * n_heads + head) * HEAD_DIM + column;
        float m = -INFINITE, l = 0.0f, o = 0.0f;
        wait_for_previous();
        if (blockIdx.x + blockIdx.y + threadIdx.x == 0) *p.n_taken = 0;
        for (u32 span = 0; span < n; span += N_TURNS * 32) {
            const u32 first = span + turn * 32, n_own = first < n ? min(n - first, 32u) : 0;
            float2 total = make_float2(-INFINITE, 0.0f);
            if (lane < n_own) total = __ldcg(sums + (first + lane) * n_heads);
            Own own;
            const float* source = partials + (u64)first * n_heads * WIDTH;
            UNROLL
            for (int i = 0; i < 32; i++) {
                own.x[i] = is_here && i < n_own ? __ldcg(source) : 0.0f;
                source += n_heads * WIDTH;
            }
            Weighed& weights = weighed[warp];
            const u32 moved = weigh_chunks(total, m, maxima[span / (N_TURNS * 32) % 2], weights);
            if (n_own == 0) break;
            if (OWNS) load<32>(weights.after, own.after);
            if (OWNS) load<32>(weights.sum, own.sum);
            if (first > 0) {
                await_turn();
                if (N_TURNS > 1) o = carried[place].x, l = carried[place].y;
            }
            add(own, n_own, moved, weights, o, l);
            if (first + 32 >= n) break;
            if (N_TURNS > 1) carried[place] = make_float2(o, l);
            pass_turn();
        }
        // Who had the last turn has all of it.
        if (!is_here || column >= HEAD_DIM || turn != (n - 1) / 32 % N_TURNS) return;
        const float all = o * (1.0f / l);
        p.out[target] = all;
        p.rounded[target] = (u16)bf16_of(all);
    }
};

#define TURN(name, COLUMNS, OWNS)                                                                     \
    extern "C" __global__ void __maxnreg__((OWNS ? 2 : 1) * TURN_REGISTERS) name(MergeParams p) {     \
        TurnMerger<COLUMNS, OWNS>::run(p);                                                            \
    }
TURN_ENTRIES

#endif
