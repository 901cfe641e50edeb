// A piece of a question by a whole block: raw scores, and for each query the largest and the sum of powers; and what
// is made of those of all pieces.

// What is known of some of a query's raw scores: the largest, and the sum of powers of what they are less.
struct Sums {
    float largest, sum;
};

DEVICE Sums both_sums(Sums a, Sums b) {
    const float largest = fmaxf(a.largest, b.largest), base = largest == -INFINITE ? 0.0f : largest;
    return Sums{largest, a.sum * exp2_of(a.largest - base) + b.sum * exp2_of(b.largest - base)};
}

// Raw scores of 32 places by them, to `raw`, where those of queries are `stride` apart. Of a single set of queries
// those before place `n` of the piece are added to the sums of the lane's query, too.
DEVICE void score_nibbles(const ScoreParams& p, const Question& ask, const ScoreRoom& room, u32 at,
                          const Nibbles& nibbles, float* raw, u32 stride, u32 n, Sums& lane_sums) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 lines = (p.width + 7) / 8, steps = (lines + 3) / 4;
    LOOP for (u32 set = 0; set * 8 < p.group; set++) {
        const u32* operands = room.queries + set * (steps * 64 + 16);
        const int begin = (int)operands[steps * 64 + 8 + g];
        int sums[4][4];
        UNROLL
        for (int j = 0; j < 4; j++)
            UNROLL
            for (int e = 0; e < 4; e++) sums[j][e] = begin;
        LOOP for (u32 s = 0; s < steps; s++) {
            const uint2 codes = *(const uint2*)(operands + (s * 32 + lane) * 2);
            const u32 a[4] = {codes.x, 0, codes.y, 0};
            UNROLL
            for (int j = 0; j < 4; j++) {
                u32 word = nibbles.words[j];
                if (s > 0) word = s * 4 + t < lines ? nibble_words(p, ask, room, at + j * 8)[s * 4 * PAGE] : 0;
                mma_s8(sums[j], a, word & 0x0F0F0F0F, word >> 4 & 0x0F0F0F0F);
            }
        }
        const u32 query = set * 8 + g;
        if (query >= p.group) continue;
        const float factor = __uint_as_float(operands[steps * 64 + g]);
        float scores[4][2], largest = -INFINITE, sum = 0.0f;
        UNROLL
        for (int j = 0; j < 4; j++) {
            UNROLL
            for (int e = 0; e < 2; e++)
                scores[j][e] = (float)sums[j][e] * f16_to_float(nibbles.units[j] >> 16 * e & 0xFFFF) * factor;
            const u32 place = at + j * 8 + t * 2;
            *(float2*)(raw + (u64)query * stride + place) = make_float2(scores[j][0], scores[j][1]);
            UNROLL
            for (int e = 0; e < 2; e++) {
                if (place + e >= n) scores[j][e] = -INFINITE;
                largest = fmaxf(largest, scores[j][e]);
            }
        }
        if (p.group > 8) continue;
        const float base = largest == -INFINITE ? 0.0f : largest;
        UNROLL
        for (int j = 0; j < 4; j++) sum += exp2_of(scores[j][0] - base) + exp2_of(scores[j][1] - base);
        lane_sums = both_sums(lane_sums, Sums{largest, sum});
    }
}

// The sums of all scores of a block's lanes, to those of the piece.
DEVICE void leave_sums(const ScoreParams& p, Sums own, float2* to) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __shared__ Sums parts[8][SCORE_WARPS];
    UNROLL
    for (int step = 1; step < 4; step *= 2)
        own = both_sums(own, Sums{__shfl_xor_sync(~0u, own.largest, step), __shfl_xor_sync(~0u, own.sum, step)});
    if (lane % 4 == 0) parts[lane / 4][warp] = own;
    __syncthreads();
    if (warp >= p.group) return;
    own = parts[warp][lane % SCORE_WARPS];
    const float largest = warp_max(own.largest), base = largest == -INFINITE ? 0.0f : largest;
    const float sum = warp_sum(lane < SCORE_WARPS ? own.sum * exp2_of(own.largest - base) : 0.0f);
    if (lane == 0) to[warp] = make_float2(largest, sum);
}

DEVICE u32 score_signs(const ScoreParams& p, const Question& ask, const ScoreRoom& room, u32 at) {
    const u32 words = p.width / 32;
    const uint2* row = (const uint2*)(digest_of(p, ask, room.slots[at / PAGE]) +
                                      at % PAGE * (p.page_bytes / PAGE));
    u32 n_same = 0;
    LOOP for (u32 w = 0; w < words / 2; w++) {
        const uint2 key = row[w];
        LOOP for (u32 g = 0; g < p.group; g++) {
            const u32* query = room.queries + g * words + 2 * w;
            n_same += __popc(~(key.x ^ query[0])) + __popc(~(key.y ^ query[1]));
        }
    }
    return n_same;
}

// What stands for the product of a query and the key at a place.
DEVICE float score_plain(const ScoreParams& p, const Question& ask, const ScoreRoom& room, u32 g, u32 at) {
    const float* q = (const float*)room.queries + g * HEAD_DIM;
    const u32 slot = room.slots[at / PAGE];
    float sum = 0.0f;
    if (p.kind == SCORE_BOUNDS) {
        const u16* bounds = (const u16*)digest_of(p, ask, slot);
        LOOP for (u32 e = 0; e < HEAD_DIM; e++)
            sum += fmaxf(q[e] * f16_to_float(bounds[e]), q[e] * f16_to_float(bounds[HEAD_DIM + e]));
        return sum;
    }
    const Element* page = (const Element*)page_in(p.pages.layer, p.pages.head_bytes, p.pages.near,
                                                  ask.head, slot);
    LOOP for (u32 e = 0; e < HEAD_DIM; e++) sum = __fmaf_rn(q[e], element_value(page[key_at(at % PAGE, e)]), sum);
    return sum;
}

// One piece of a question, by a whole block; queries are prepared. If it `keeps` raw scores, they stay
// in the room, and so do bits that agree.
DEVICE void score_piece(const ScoreParams& p, const Question& ask, const ScoreRoom& room, u32 piece,
                        bool keeps) {
    const u32 start = piece * PIECE, n = min(ask.n - start, (u32)PIECE);
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    __syncthreads();
    LOOP for (u32 i = thread; i < PIECE_PAGES; i += SCORE_THREADS)
        room.slots[i] = i * PAGE < n
                            ? p.pages.tables[(u64)ask.table_row * p.pages.table_len + start / PAGE + i]
                            : 0;
    __syncthreads();
    float* raw = p.raw + (u64)ask.number * p.group * p.stride + start;
    float2* sums = p.sums + ((u64)ask.number * (p.stride / PIECE) + piece) * p.group;
    if (p.kind == SCORE_SIGNS) {
        u32* scores = keeps ? (u32*)room.raw : p.scores + (u64)ask.number * p.stride + start;
        LOOP for (u32 i = thread; i < n; i += SCORE_THREADS) scores[i] = score_signs(p, ask, room, i);
        return;
    }
    if (p.kind == SCORE_CHANNELS) {
        LOOP for (u32 i = warp * 32; i < n; i += SCORE_THREADS) score_channels(p, ask, room, i);
    } else if (p.kind == SCORE_NIBBLES) {
        const bool is_direct = p.group <= 8;
        float* to = keeps || !is_direct ? room.raw : raw;
        const u32 stride = keeps || !is_direct ? PIECE : p.stride;
        Nibbles own;
        Sums lane_sums = {-INFINITE, 0.0f};
        LOOP for (u32 i = warp * 32; i < n; i += SCORE_THREADS) {
            load_nibbles(p, ask, room, i, own);
            score_nibbles(p, ask, room, i, own, to, stride, n, lane_sums);
        }
        // Of more queries the sums are left to the loops below.
        if (is_direct) return leave_sums(p, lane_sums, sums);
    } else {
        LOOP for (u32 i = thread; i < p.group * PIECE; i += SCORE_THREADS)
            if (i % PIECE < n) room.raw[i] = score_plain(p, ask, room, i / PIECE, i % PIECE);
    }
    __syncthreads();
    LOOP for (u32 i = thread; !keeps && i < p.group * PIECE; i += SCORE_THREADS)
        if (i % PIECE < n) raw[(u64)(i / PIECE) * p.stride + i % PIECE] = room.raw[i];
    // Several warps share a query.
    __shared__ float2 parts[SCORE_WARPS];
    u32 n_parts = 1;
    while (2 * n_parts * p.group <= SCORE_WARPS) n_parts *= 2;
    const u32 g = warp / n_parts;
    if (g < p.group) {
        const float* own = room.raw + g * PIECE;
        float largest = -INFINITE, sum = 0.0f;
        LOOP for (u32 i = warp % n_parts * 32 + lane; i < n; i += n_parts * 32) largest = fmaxf(largest, own[i]);
        largest = warp_max(largest);
        const float base = largest == -INFINITE ? 0.0f : largest;
        LOOP for (u32 i = warp % n_parts * 32 + lane; i < n; i += n_parts * 32) sum += exp2_of(own[i] - base);
        sum = warp_sum(sum);
        if (lane == 0) parts[warp] = make_float2(largest, sum);
    }
    __syncthreads();
    if (thread < p.group) {
        float largest = -INFINITE, sum = 0.0f;
        LOOP for (u32 i = 0; i < n_parts; i++) largest = fmaxf(largest, parts[thread * n_parts + i].x);
        const float base = largest == -INFINITE ? 0.0f : largest;
        LOOP for (u32 i = 0; i < n_parts; i++) {
            const float2 part = parts[thread * n_parts + i];
            sum += part.y * exp2_of(part.x - base);
        }
        sums[thread] = make_float2(largest, sum);
    }
}

// Maximum and inverse of the sum over all pieces of each query, to `totals` in shared memory.
DEVICE void total_sums(const ScoreParams& p, const Question& ask, float2* totals) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 n_pieces = (ask.n + PIECE - 1) / PIECE;
    const float2* sums = p.sums + (u64)ask.number * (p.stride / PIECE) * p.group;
    LOOP for (u32 g = warp; g < p.group; g += SCORE_WARPS) {
        Sums own = {-INFINITE, 0.0f};
        // A few at a time, because each is on its way for long.
        LOOP for (u32 first = lane; first < n_pieces; first += 4 * 32) {
            float2 next[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                next[i] = first + i * 32 < n_pieces ? __ldcg(&sums[(first + i * 32) * p.group + g])
                                                    : make_float2(-INFINITE, 0.0f);
            UNROLL
            for (int i = 0; i < 4; i++) own = both_sums(own, Sums{next[i].x, next[i].y});
        }
        const float largest = warp_max(own.largest), base = largest == -INFINITE ? 0.0f : largest;
        const float sum = warp_sum(own.sum * exp2_of(own.largest - base));
        if (lane == 0) totals[g] = make_float2(base, 1.0f / sum);
    }
    __syncthreads();
}

// What a query adds to the score of a place, once its totals are there: the maximum, and the inverse of the sum.
DEVICE float add_finished(float largest, float inverse, float raw, float sum) {
    return __fmaf_rn(exp2_of(raw - largest), inverse, sum);
}

// Positive floats are ordered as their bits are; what is no number is worth nothing.
DEVICE u32 finished(float sum) { return sum != sum ? 0 : __float_as_uint(sum); }

// The score of a place; raw scores of the group are `stride` apart.
DEVICE u32 finish_score(const ScoreParams& p, const float2* totals, const float* raw, u64 stride) {
    float sum = 0.0f;
    LOOP for (u32 g = 0; g < p.group; g++)
        sum = add_finished(totals[g].x, totals[g].y, raw[g * stride], sum);
    return finished(sum);
}
