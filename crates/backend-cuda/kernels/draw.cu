// Chooses a token from each row of logits, as `Draw` of the crate `backend` says.
//
// logits [rows, vocab]; one block per row. Filters are searches for the worst token that is kept: keys
// that are ordered like logits are looked at four bits at a time, from the top, and a pass over the
// row sums what lies in each of the sixteen ranges. All sums have one order, so a draw repeats.

struct Draw {
    double uniform;
    float temperature;
    float top_p;
    float min_p;
    u32 top_k;
    u32 first_moved, n_moved;
};

struct Moved {
    u32 token;
    float factor, minus, plus;
};

struct DrawParams {
    float* logits;
    const Draw* draws;
    const Moved* moved;
    u32* tokens;
    u32 vocab;
    u32 padding;
};
static_assert(sizeof(Draw) == DRAW_SIZE, "the host's Draw differs");
static_assert(sizeof(Moved) == MOVED_SIZE, "the host's Moved differs");
static_assert(sizeof(DrawParams) == DRAW_PARAMS_SIZE, "the host's DrawParams differs");

#define DRAW_THREADS 1024
#define DRAW_WARPS 32
#define NO_TOKEN ~0u

// e^x for x <= 0, bit for bit that of the engine's own sampler.
DEVICE float exp_neg(float x) {
    const float y = __fmul_rn(x, 1.44269504088896340736f);
    const float clamped = y > -126.0f ? y : -126.0f;
    const float rounded = __fadd_rn(clamped, 12582912.0f);
    const float r = __fsub_rn(clamped, __fsub_rn(rounded, 12582912.0f));
    const float series[6] = {1.3333558e-3f, 9.618129e-3f, 5.550411e-2f, 0.2402265f, 0.69314718056f,
                             1.0f};
    float p = 1.540353e-4f;
    UNROLL
    for (int i = 0; i < 6; i++) p = __fadd_rn(__fmul_rn(p, r), series[i]);
    const float power = __uint_as_float((__float_as_uint(rounded) << 23) + (127u << 23));
    return y > -126.0f ? __fmul_rn(p, power) : 0.0f;
}

// A number that is ordered like the logit; both zeros have one.
DEVICE u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The worst token that is kept.
struct Cut {
    u32 key, id;
};

struct Row {
    const float* logits;
    u32 vocab;
    float max, sharpness;
    Cut cut;
    // What lies below cannot be reached by top-p.
    float lowest;
};

DEVICE bool is_kept(const Row& row, u32 key, u32 id) {
    return key > row.cut.key || (key == row.cut.key && id <= row.cut.id);
}

DEVICE float weight_of(const Row& row, float x) {
    return exp_neg(__fmul_rn(__fsub_rn(x, row.max), row.sharpness));
}

DEVICE double warp_sum(double x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Sums over the block in one order; every thread gets the result.
DEVICE double block_sum(double x) {
    __shared__ double sums[DRAW_WARPS];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    double total = 0.0;
    for (int i = 0; i < DRAW_WARPS; i++) total += sums[i];
    return total;
}

// Shows a thread its logits, by id: groups of sixteen where that is possible, which lets many loads be
// on their way.
template <typename Look>
DEVICE void for_each(const float* logits, u32 vocab, const Look& look) {
    u32 base = 0;
    if (vocab % 4 == 0) {
        for (; base + 16 * DRAW_THREADS <= vocab; base += 16 * DRAW_THREADS) {
            float4 x[4];
            UNROLL
            for (int k = 0; k < 4; k++)
                x[k] = *(const float4*)(logits + base + (k * DRAW_THREADS + threadIdx.x) * 4);
            UNROLL
            for (int k = 0; k < 4; k++) {
                const u32 id = base + (k * DRAW_THREADS + threadIdx.x) * 4;
                look(x[k].x, id), look(x[k].y, id + 1), look(x[k].z, id + 2), look(x[k].w, id + 3);
            }
        }
    }
    for (u32 id = base + threadIdx.x; id < vocab; id += DRAW_THREADS) look(logits[id], id);
}

// The largest logit and the lowest id that has it; NaN if there is a NaN, or if the largest is
// infinite.
struct Best {
    float max;
    u32 id;
};

DEVICE Best better(Best a, Best b) {
    return b.max > a.max || (b.max == a.max && b.id < a.id) ? b : a;
}

DEVICE Best find_best(const float* logits, u32 vocab) {
    __shared__ Best bests[DRAW_WARPS];
    Best best = {-INFINITE, NO_TOKEN};
    bool is_number = true;
    for_each(logits, vocab, [&](float x, u32 id) {
        is_number &= x == x;
        if (x > best.max) best = Best{x, id};
    });
    for (int step = 16; step > 0; step /= 2) {
        const Best other = {__shfl_xor_sync(~0u, best.max, step),
                            __shfl_xor_sync(~0u, best.id, step)};
        best = better(best, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    is_number = __syncthreads_and(is_number);
    for (int i = 0; i < DRAW_WARPS; i++) best = better(best, bests[i]);
    if (!is_number || !(fabsf(best.max) < INFINITE)) best.max = __int_as_float(0x7fffffff);
    return best;
}

// The id of the `n`-th token, from 1, that is kept and has this key. Rare: by one warp.
DEVICE u32 nth_equal(const Row& row, u32 key, u32 n) {
    __shared__ u32 found;
    if (threadIdx.x < 32) {
        u32 seen = 0;
        for (u32 base = 0; base < row.vocab && seen < n; base += 32) {
            const u32 id = base + threadIdx.x;
            const bool is_equal =
                id < row.vocab && key_of(row.logits[id]) == key && is_kept(row, key, id);
            const u32 mask = __ballot_sync(~0u, is_equal);
            if (seen + __popc(mask) >= n && threadIdx.x == 0) {
                u32 rest = mask;
                for (u32 i = seen + 1; i < n; i++) rest &= rest - 1;
                found = base + __ffs(rest) - 1;
            }
            seen += __popc(mask);
        }
    }
    __syncthreads();
    return found;
}

// Keeps, best first, the tokens before which there is less than `limit`: of tokens, or of weight.
template <bool BY_WEIGHT>
DEVICE void keep(Row& row, double limit) {
    __shared__ double sums[16][DRAW_WARPS], ranges[16];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 prefix = 0;
    double before = 0.0;
    for (int shift = 28; shift >= 0; shift -= 4) {
        float own[16];
        UNROLL
        for (int d = 0; d < 16; d++) own[d] = 0.0f;
        for_each(row.logits, row.vocab, [&](float x, u32 id) {
            if (BY_WEIGHT && x < row.lowest) return;
            const u32 key = key_of(x);
            if (shift < 28 && key >> (shift + 4) != prefix) return;
            if (!is_kept(row, key, id)) return;
            const float measure = BY_WEIGHT ? weight_of(row, x) : 1.0f;
            UNROLL
            for (int d = 0; d < 16; d++) own[d] += (key >> shift & 15) == d ? measure : 0.0f;
        });
        __syncthreads();
        UNROLL
        for (int d = 0; d < 16; d++) {
            const double sum = warp_sum((double)own[d]);
            if (lane == 0) sums[d][warp] = sum;
        }
        __syncthreads();
        if (threadIdx.x < 16) {
            double sum = 0.0;
            for (int i = 0; i < DRAW_WARPS; i++) sum += sums[threadIdx.x][i];
            ranges[threadIdx.x] = sum;
        }
        __syncthreads();
        // The range in which the limit is reached, or the last one in which there is anything.
        u32 digit = 15;
        double passed = before;
        for (int d = 15; d >= 0; d--) {
            if (ranges[d] == 0.0) continue;
            digit = d;
            before = passed;
            passed += ranges[d];
            if (passed >= limit) break;
        }
        prefix = prefix << 4 | digit;
        if (shift == 0) {
            // All that is left in the range has one key.
            const float x = prefix >> 31 ? __uint_as_float(prefix & 0x7fffffffu)
                                         : __uint_as_float(~prefix);
            const double each = BY_WEIGHT ? (double)weight_of(row, x) : 1.0;
            const u32 n_equal = (u32)(ranges[digit] / each + 0.5);
            const double wanted = ceil((limit - before) / each);
            const u32 n_wanted = wanted < 1.0 ? 1 : wanted < n_equal ? (u32)wanted : n_equal;
            const u32 id = n_wanted < n_equal ? nth_equal(row, prefix, n_wanted) : NO_TOKEN;
            // Equals that an earlier filter cut stay cut.
            const u32 last = row.cut.key == prefix ? min(row.cut.id, id) : id;
            row.cut = Cut{prefix, last};
        }
        __syncthreads();
    }
}

// The weight of a token that may be drawn, or 0.
DEVICE float share_of(const Row& row, float min_p, float x, u32 id) {
    if (!is_kept(row, key_of(x), id)) return 0.0f;
    const float weight = weight_of(row, x);
    return weight >= min_p ? weight : 0.0f;
}

// A run of ids, and where in the weight of what is kept of it the draw falls.
struct Run {
    u32 start, end;
    double left;
};

// Cuts a run into one for each warp, and leaves the one in which the draw falls.
DEVICE void narrow(const Row& row, float min_p, Run& run, bool is_share) {
    __shared__ double sums[DRAW_WARPS], rest;
    __shared__ u32 chosen;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 len = (run.end - run.start + DRAW_THREADS - 1) / DRAW_THREADS * 32;
    const u32 start = min(run.start + warp * len, run.end), end = min(start + len, run.end);
    double sum = 0.0;
#pragma unroll 8
    for (u32 id = start + lane; id < end; id += 32)
        sum += (double)share_of(row, min_p, row.logits[id], id);
    sum = warp_sum(sum);
    __syncthreads();
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (int i = 0; i < DRAW_WARPS; i++) total += sums[i];
        double left = is_share ? total * run.left : run.left;
        u32 last = 0;
        bool is_found = false;
        for (u32 i = 0; i < DRAW_WARPS && !is_found; i++) {
            if (sums[i] > 0.0) last = i;
            is_found = left < sums[i];
            if (!is_found) left -= sums[i];
        }
        chosen = last;
        // Rounding can leave a crumb after the last token, which then takes it.
        rest = is_found ? left : 2.0 * total;
    }
    __syncthreads();
    run.start += chosen * len;
    run.end = min(run.start + len, run.end);
    run.left = rest;
}

// Goes through the tokens that are kept, by id.
DEVICE void draw_kept(const Row& row, const Draw& draw, u32* token) {
    Run run = {0, row.vocab, draw.uniform};
    narrow(row, draw.min_p, run, true);
    narrow(row, draw.min_p, run, false);
    if (threadIdx.x >= 32) return;
    const u32 lane = threadIdx.x;
    u32 last = NO_TOKEN;
    for (u32 base = run.start; base < run.end; base += 32) {
        const u32 id = base + lane;
        const double own =
            id < run.end ? (double)share_of(row, draw.min_p, row.logits[id], id) : 0.0;
        double upto = own;
        for (u32 step = 1; step < 32; step *= 2) {
            const double other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += other;
        }
        const u32 possible = __ballot_sync(~0u, own > 0.0);
        const u32 reached = __ballot_sync(~0u, own > 0.0 && run.left < upto);
        if (possible) last = base + 31 - __clz(possible);
        if (reached) {
            last = base + __ffs(reached) - 1;
            break;
        }
        run.left -= __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) *token = last;
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS) draw_tokens(DrawParams p) {
    begin();
    const Draw draw = p.draws[blockIdx.x];
    float* logits = p.logits + (u64)blockIdx.x * p.vocab;
    u32* token = p.tokens + blockIdx.x;
    Best best = find_best(logits, p.vocab);
    if (best.max == best.max && draw.n_moved > 0) {
        for (u32 i = threadIdx.x; i < draw.n_moved; i += DRAW_THREADS) {
            const Moved moved = p.moved[draw.first_moved + i];
            if (moved.token >= p.vocab) continue;
            const float x = logits[moved.token];
            const float scaled =
                x > 0.0f ? __fdiv_rn(x, moved.factor) : __fmul_rn(x, moved.factor);
            logits[moved.token] = __fadd_rn(__fsub_rn(scaled, moved.minus), moved.plus);
        }
        __syncthreads();
        best = find_best(logits, p.vocab);
    }
    if (best.max != best.max || draw.temperature == 0.0f) {
        if (threadIdx.x == 0) *token = best.max == best.max ? best.id : NO_TOKEN;
        return;
    }
    // Kept finite, so that nothing times it is nothing.
    const float sharpness = fminf(__fdiv_rn(1.0f, draw.temperature), __int_as_float(0x7f7fffff));
    Row row = {logits, p.vocab, best.max, sharpness, Cut{0, NO_TOKEN}, -INFINITE};
    if (draw.top_k > 0 && draw.top_k < p.vocab) keep<false>(row, (double)draw.top_k);
    if (draw.top_p < 1.0f) {
        double sum = 0.0;
        for_each(logits, p.vocab,
                 [&](float x, u32 id) { sum += (double)share_of(row, 0.0f, x, id); });
        const double total = block_sum(sum);
        // All tokens below this together weigh less than what top-p leaves out.
        const float rest = (1.0f - draw.top_p) * (float)total / (float)p.vocab;
        row.lowest = best.max + logf(rest) * draw.temperature * 1.001f - 1.0e-3f;
        keep<true>(row, total * (double)draw.top_p);
    }
    draw_kept(row, draw, token);
}
