// How well places fit the queries of one head: larger numbers for better ones.
//
//   signs          bits that agree, summed over the group
//   channels       sum over the group of softmax over all places of scale (frame q) . digest
//   nibbles        the same of digests in four and queries in eight bits, whose sums are whole numbers
//   keys, bounds   the same of scale q . k, and of the largest that a key of the page could have
//
// Places are taken in pieces of PIECE. A piece leaves raw scores (times log2 e) and, for each query, their
// maximum and their sum of powers; once all pieces are there, each is finished by itself. What a place
// gets does not depend on who computes which piece. Channels are multiplied on tensor cores, with
// queries in two parts, which stand in the upper and the lower half of the matrix.

// Loops whose lengths are not known. What decides is compiled twice, once with loops as they are: of a program
// through which each multiprocessor goes once a layer, instructions come from afar.
#undef LOOP
#ifdef COMPACT
#define LOOP _Pragma("unroll 1")
#else
#define LOOP
#endif
#define SCORE_SIGNS 0
#define SCORE_CHANNELS 1
#define SCORE_BOUNDS 2
#define SCORE_KEYS 3
#define SCORE_NIBBLES 4
#define PIECE 2048
#define PIECE_PAGES (PIECE / PAGE)
#define SCORE_THREADS 512
#define SCORE_WARPS (SCORE_THREADS / 32)
#define LOG2_E 1.4426950408889634f

struct ScoreParams {
    const float* qkv;
    const u8* digests;    // [G][slot][page's digest] of the layer
    const float* frame;   // [G][D][width] of the layer, or one for all
    const float* weights; // [G][width] of the layer, by which products of queries are multiplied, or null
    float* raw;           // [question][group][stride]
    u32* scores;          // [question][stride]
    float2* sums;         // [question][stride / PIECE][group]: maximum, sum
    u64 digest_head_bytes;
    u64 frame_stride;
    SparsePages pages;
    u32 stride;           // places that a question may have, whole pieces
    u32 q_stride;         // floats
    u32 group;
    u32 kind;
    u32 width;
    u32 page_bytes;       // of a page's digest
    float scale;
    u32 padding;
};
static_assert(sizeof(ScoreParams) == SCORE_PARAMS_SIZE, "the host's ScoreParams differs");

// What is asked.
struct Question {
    u32 number;  // where its scratch is
    u32 row;     // of the batch
    u32 table_row;
    u32 head;
    u32 n;       // places
};

// Shared memory of a block.
struct ScoreRoom {
    float* raw;    // [group][PIECE]
    u32* queries;  // as they meet the digest
    u32* slots;    // [PIECE_PAGES]
};

// Words that queries need; the host counts them too.
DEVICE u32 query_words(const ScoreParams& p) {
    if (p.kind == SCORE_SIGNS) return p.group * p.width / 32;
    // Operands of each step of sixteen channels, and a factor for each query.
    if (p.kind == SCORE_CHANNELS) return (p.group + 7) / 8 * ((p.width + 15) / 16 * 128 + 8);
    // Operands of each step of 32 channels, a factor and a beginning for each query.
    if (p.kind == SCORE_NIBBLES) return (p.group + 7) / 8 * ((p.width + 31) / 32 * 64 + 16);
    return p.group * HEAD_DIM;
}

DEVICE ScoreRoom score_room(const ScoreParams& p, u32* shared) {
    u32* queries = shared + p.group * PIECE;
    return ScoreRoom{(float*)shared, queries, queries + query_words(p)};
}

DEVICE float score_query(const ScoreParams& p, const Question& ask, u32 g, u32 e) {
    return p.qkv[(u64)ask.row * p.q_stride + (ask.head * p.group + g) * HEAD_DIM + e];
}

// A power of two that brings `largest` near 2^12.
DEVICE float channel_factor(float largest) {
    if (!(largest > 0.0f && largest < INFINITE)) return 1.0f;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    exponent = 12 - (exponent < -100 ? -100 : exponent);
    return __uint_as_float((u32)(exponent + 127) << 23);
}

// Turns channels of queries into operands: of step s, lane 4 g + t has channels 16 s + 4 t .. + 4 of query
// g, leading parts in registers 0 and 2, the rest in 1 and 3.
DEVICE void channel_operands(const ScoreParams& p, const float* channels, u32 set, u32* out) {
    const u32 steps = (p.width + 15) / 16, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* factors = (float*)(out + steps * 128);
    LOOP for (u32 g = warp; g < 8; g += SCORE_WARPS) {
        const bool is_there = set * 8 + g < p.group;
        const float* own = channels + (set * 8 + g) * p.width;
        float largest = 0.0f;
        LOOP for (u32 c = lane; is_there && c < p.width; c += 32) largest = fmaxf(largest, fabsf(own[c]));
        const float up = channel_factor(warp_max(largest));
        if (lane == 0) factors[g] = LOG2_E * (1.0f / up);
        LOOP for (u32 i = lane; i < steps * 4; i += 32) {
            const u32 s = i / 4, t = i % 4;
            UNROLL
            for (int half = 0; half < 2; half++) {
                float x[2];
                UNROLL
                for (int e = 0; e < 2; e++) {
                    const u32 c = s * 16 + t * 4 + half * 2 + e;
                    x[e] = is_there && c < p.width ? own[c] * up : 0.0f;
                }
                const u32 high = f16x2(x[0], x[1]);
                const u32 low = f16x2(x[0] - f16_to_float(high & 0xFFFF),
                                      x[1] - f16_to_float(high >> 16));
                u32* target = out + (s * 32 + g * 4 + t) * 4 + half * 2;
                target[0] = high, target[1] = low;
            }
        }
    }
}

// The same in eight bits, for `score_nibbles`; `query_codes` of backend/src/topk.rs. Of step s, lane 4 g + t
// has channels 32 s + 8 t .. + 4 of query g in the first word, and the next four in the second.
DEVICE void nibble_operands(const ScoreParams& p, const float* channels, u32 set, u32* out) {
    const u32 steps = (p.width + 31) / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* factors = (float*)(out + steps * 64);
    int* begins = (int*)(factors + 8);
    LOOP for (u32 g = warp; g < 8; g += SCORE_WARPS) {
        const bool is_there = set * 8 + g < p.group;
        const float* own = channels + (set * 8 + g) * p.width;
        float largest = 0.0f;
        LOOP for (u32 c = lane; is_there && c < p.width; c += 32) largest = fmaxf(largest, fabsf(own[c]));
        largest = warp_max(largest);
        const bool is_something = largest > 1e-30f && largest < INFINITE;
        const float up = is_something ? __fdiv_rn(127.0f, largest) : 0.0f;
        // Whole numbers that floats hold.
        float sum = 0.0f;
        LOOP for (u32 i = lane; i < steps * 8; i += 32) {
            u32 word = 0;
            LOOP for (u32 e = 0; e < 4; e++) {
                const u32 c = i * 4 + e;
                const int code = is_there && c < p.width ? (int)roundf(__fmul_rn(own[c], up)) : 0;
                word |= (u32)(code & 0xFF) << e * 8;
                sum += (float)code;
            }
            out[(i / 8 * 32 + g * 4 + i % 8 / 2) * 2 + i % 2] = word;
        }
        sum = warp_sum(sum);
        if (lane > 0) continue;
        factors[g] = is_something ? LOG2_E * (__fdiv_rn(largest, 127.0f) * p.scale) : 0.0f;
        // Keys have eight added.
        begins[g] = -8 * (int)sum;
    }
}

// Products of the queries with the frame, [group][width], to the room of raw scores. A product is
// shared by as many threads as there are, because each waits for what it reads.
DEVICE void project_queries(const ScoreParams& p, const Question& ask, const ScoreRoom& room) {
    const float* frame = p.frame + ask.head * p.frame_stride;
    const float scale = p.kind == SCORE_CHANNELS ? p.scale : 1.0f;
    const u32 n = p.group * p.width, thread = threadIdx.x;
    float* queries = room.raw + p.group * (PIECE / 2);
    static_assert(MAX_WIDTH <= PIECE / 2 && HEAD_DIM <= PIECE / 2, "both halves have room");
    LOOP for (u32 i = thread; i < p.group * HEAD_DIM; i += SCORE_THREADS)
        queries[i] = score_query(p, ask, i / HEAD_DIM, i % HEAD_DIM) * scale;
    __syncthreads();
    u32 parts = SCORE_THREADS / n;
    parts = parts >= 8 ? 8 : parts >= 4 ? 4 : parts >= 2 ? 2 : 1;
    const u32 share = (HEAD_DIM + parts - 1) / parts;
    LOOP for (u32 i = thread; i < n * parts; i += SCORE_THREADS) {
        const u32 part = i / n, g = i % n / p.width, r = i % p.width;
        float sum = 0.0f;
        const u32 end = min((part + 1) * share, (u32)HEAD_DIM);
        LOOP for (u32 first = part * share; first < end; first += 16) {
            // Each is on its way for long.
            UNROLL
            for (int e = 0; e < 16; e++)
                if (first + e < end)
                    sum = __fmaf_rn(frame[(first + e) * p.width + r], queries[g * HEAD_DIM + first + e], sum);
        }
        room.raw[i] = sum;
    }
    __syncthreads();
    if (parts > 1 && thread < n) {
        float sum = room.raw[thread];
        LOOP for (u32 part = 1; part < parts; part++) sum += room.raw[part * n + thread];
        // Nobody else reads what is written here.
        room.raw[thread] = sum;
    }
    __syncthreads();
    if (p.weights == nullptr) return;
    const float* weights = p.weights + ask.head * p.width;
    LOOP for (u32 i = thread; i < n; i += SCORE_THREADS)
        room.raw[i] = __fmul_rn(room.raw[i], weights[i % p.width]);
    __syncthreads();
}

// Prepares the queries of a question; the room of raw scores is used meanwhile.
DEVICE void prepare_queries(const ScoreParams& p, const Question& ask, const ScoreRoom& room) {
    if (p.kind == SCORE_NIBBLES) {
        project_queries(p, ask, room);
        const u32 words = (p.width + 31) / 32 * 64 + 16;
        LOOP for (u32 set = 0; set * 8 < p.group; set++)
            nibble_operands(p, room.raw, set, room.queries + set * words);
    } else if (p.kind == SCORE_SIGNS || p.kind == SCORE_CHANNELS) {
        project_queries(p, ask, room);
        const u32 words = (p.width + 15) / 16 * 128 + 8;
        // Whole warps: signs come by the 64.
        LOOP for (u32 i = threadIdx.x; p.kind == SCORE_SIGNS && i < p.group * p.width; i += SCORE_THREADS) {
            const u32 bits = __ballot_sync(~0u, room.raw[i] > 0.0f);
            if (threadIdx.x % 32 == 0) room.queries[i / 32] = bits;
        }
        LOOP for (u32 set = 0; p.kind == SCORE_CHANNELS && set * 8 < p.group; set++)
            channel_operands(p, room.raw, set, room.queries + set * words);
    } else {
        LOOP for (u32 i = threadIdx.x; i < p.group * HEAD_DIM; i += SCORE_THREADS)
            room.queries[i] = __float_as_uint(
                score_query(p, ask, i / HEAD_DIM, i % HEAD_DIM) * p.scale * LOG2_E);
    }
    __syncthreads();
}

DEVICE const u8* digest_of(const ScoreParams& p, const Question& ask, u32 slot) {
    return p.digests + ask.head * p.digest_head_bytes + (u64)slot * p.page_bytes;
}

// Raw scores of 32 places by channels, four tiles of eight; `at` is a place of the piece.
DEVICE void score_channels(const ScoreParams& p, const Question& ask, const ScoreRoom& room, u32 at) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 steps = (p.width + 15) / 16;
    const u8* rows[4];
    // What one stands for, of the two places whose sums this lane gets.
    u32 units[4];
    UNROLL
    for (int j = 0; j < 4; j++) {
        const u32 first = at + j * 8;
        const u8* page = digest_of(p, ask, room.slots[first / PAGE]);
        rows[j] = page + (first % PAGE + g) * steps * 16 + t * 4;
        units[j] = *(const u32*)(page + PAGE * steps * 16 + (first % PAGE + t * 2) * 2);
    }
    LOOP for (u32 set = 0; set * 8 < p.group; set++) {
        const u32* operands = room.queries + set * (steps * 128 + 8);
        float sums[4][4];
        UNROLL
        for (int j = 0; j < 4; j++)
            UNROLL
            for (int e = 0; e < 4; e++) sums[j][e] = 0.0f;
#pragma unroll 2
        for (u32 s = 0; s < steps; s++) {
            u32 bytes[4];
            UNROLL
            for (int j = 0; j < 4; j++) bytes[j] = *(const u32*)(rows[j] + s * 16);
            const uint4 bits = *(const uint4*)(operands + (s * 32 + lane) * 4);
            const u32 a[4] = {bits.x, bits.y, bits.z, bits.w};
            UNROLL
            for (int j = 0; j < 4; j++) {
                u32 low, high;
                f16_of_bytes(bytes[j], low, high);
                mma_f16(sums[j], a, low, high);
            }
        }
        const u32 query = set * 8 + g;
        if (query >= p.group) continue;
        const float factor = ((const float*)(operands + steps * 128))[g];
        UNROLL
        for (int j = 0; j < 4; j++)
            UNROLL
            for (int e = 0; e < 2; e++)
                room.raw[query * PIECE + at + j * 8 + t * 2 + e] =
                    (sums[j][e] + sums[j][e + 2]) * factor * f16_to_float(units[j] >> 16 * e & 0xFFFF);
    }
}

// Channels in four bits of 32 places, as a lane has them, and what one stands for, of the two places whose sums
// it gets. A word of a token has both operands of a lane: low and high halves.
struct Nibbles {
    u32 words[4], units[4];
};

DEVICE const u32* nibble_words(const ScoreParams& p, const Question& ask, const ScoreRoom& room, u32 first) {
    const u32 lane = threadIdx.x % 32;
    return (const u32*)digest_of(p, ask, room.slots[first / PAGE]) + first % PAGE + lane / 4 + lane % 4 * PAGE;
}

// Asks for those of the first step; `at` is a place of the piece.
DEVICE void load_nibbles(const ScoreParams& p, const Question& ask, const ScoreRoom& room, u32 at, Nibbles& nibbles) {
    static_assert(PAGE == 16, "a page has two tiles");
    const u32 lane = threadIdx.x % 32, t = lane % 4, lines = (p.width + 7) / 8;
    UNROLL
    for (int page = 0; page < 2; page++) {
        const u32* words = (const u32*)digest_of(p, ask, room.slots[at / PAGE + page]);
        const u32* units = words + lines * PAGE + t;
        UNROLL
        for (int tile = 0; tile < 2; tile++) {
            const int j = page * 2 + tile;
            nibbles.words[j] = t < lines ? words[t * PAGE + tile * 8 + lane / 4] : 0;
            nibbles.units[j] = units[tile * 4];
        }
    }
}
