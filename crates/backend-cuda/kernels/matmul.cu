// out[t, row] = sum_k W[row, k] x[t, k] + bias[row], or added to what is there.
//
// W packed (weights.cuh), x [T, stride] bf16, out [T, out_stride]. A warp multiplies 16 MT rows of W
// with 8 NT rows of x, cell after cell through a ring of stages in shared memory.
//
// The cells of a row are cut into SEGMENTS equal parts. Inside a segment an output is one chain of
// m16n8k16 instructions along k; with quantised weights the chain is one run long, and runs are
// added with fused multiply-adds. Segments are added from left to right.
//
//   16 bits   acc = mma(acc, W, x)                     f16 weights as the sum of two bf16
//   8, 4      acc = fma(offset, sum(x), fma(scale, mma(0, codes, x), acc))
//   all       total = total + acc                      at the end of a segment
//
// A *gated* W has rows of two matrices, interleaved by eights, and the output is one of half as many:
// silu(of the first) * (of the second), also rounded to bf16.
//
// For few rows of x (`Few`) a block takes 16 MT rows of W, and each of its warps one segment: a
// decode step is short of rows, and the device needs many loads in flight. For more (`Many`) warps
// share W and x, and walk the segments one after the other. Both do the same additions in the same
// order, so a row has the same bits in any batch.

struct MatmulParams {
    const u8* packed;
    const float* bias;  // or null
    const u16* x;
    float* out;
    u16* rounded;    // of a gated product
    u32 rows;        // of this part of the weight
    u32 cells;       // of 64 columns
    u32 n_x;         // rows of x
    u32 x_stride;    // in elements
    u32 out_stride;  // in elements
    u32 out_first;   // first output of this part
    u32 is_added;
    u32 is_gated;
};
static_assert(sizeof(MatmulParams) == MATMUL_PARAMS_SIZE, "the host's MatmulParams differs");

#if BITS < 16
// The matrix instruction's operand for one step of a cell, from the lane's codes of that step.
DEVICE void decode(const uint4& codes, u32 step, u32 (&a)[4]) {
#if BITS == 4
    const u32 word = step == 0 ? codes.x : step == 1 ? codes.y : step == 2 ? codes.z : codes.w;
    UNROLL
    for (int reg = 0; reg < 4; reg++) {
        // The bits of 128 + code; subtracting leaves the code, exactly.
        const u32 biased = (word >> (4 * reg) & 0x000F000Fu) | 0x43004300u;
        const u32 minus = ZERO == 8 ? 0xC308C308u : 0xC300C300u;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(a[reg])
            : "r"(biased), "r"(0x3F803F80u), "r"(minus));
    }
#else
    const u32 words[2] = {step % 2 ? codes.z : codes.x, step % 2 ? codes.w : codes.y};
    UNROLL
    for (int reg = 0; reg < 4; reg++) {
        const u32 word = words[reg / 2], first = reg % 2 * 2;
        // The bits of 2^23 + code + 128 as a float.
        const u32 low = __byte_perm(word, 0x4B000000u, 0x7540 + first);
        const u32 high = __byte_perm(word, 0x4B000000u, 0x7540 + first + 1);
        const float x = __uint_as_float(low) - 8388736.0f;
        const float y = __uint_as_float(high) - 8388736.0f;
        // Eight bits fit the upper half of a float, so dropping the lower one is exact.
        a[reg] = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
    }
#endif
}
#endif

#if TYPE == F16
// An f16 as the sum of two bf16, exactly: eleven bits are eight and three.
DEVICE void split(const uint4& bits, u32 (&high)[4], u32 (&low)[4]) {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    UNROLL
    for (int reg = 0; reg < 4; reg++) {
        const float x = f16_to_float(words[reg] & 0xFFFF), y = f16_to_float(words[reg] >> 16);
        high[reg] = bf16x2(x, y);
        low[reg] = bf16x2(x - bf16_to_float(high[reg] & 0xFFFF), y - bf16_to_float(high[reg] >> 16));
    }
}
#endif

// Where the sixteen bytes `chunk` of a cell's activations lie in a row: neighbouring rows use
// different halves of the banks.
DEVICE u32 x_chunk(u32 row, u32 chunk) { return (chunk ^ (row & 1) << 2) * 16; }

// Adds one cell's products; `w` is the first of MT tiles, W_STRIDE apart, and `x` the first of 8 NT
// rows of 128 bytes.
template <int MT, int NT, int W_STRIDE>
DEVICE void multiply(const u8* w, const u8* x, float (&acc)[MT][NT][4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if BITS == 16
    UNROLL
    for (int half = 0; half < 2; half++) {
        uint4 b[NT];
        UNROLL
        for (int j = 0; j < NT; j++)
            b[j] = *(const uint4*)(x + (j * 8 + g) * 128 + x_chunk(g, half * 4 + t));
        UNROLL
        for (int s = 0; s < 2; s++) {
            UNROLL
            for (int i = 0; i < MT; i++) {
                const u32 at = ((half * 2 + s) * 32 + lane) * 16;
                const uint4 bits = *(const uint4*)(w + i * W_STRIDE + at);
#if TYPE == BF16
                const u32 a[4] = {bits.x, bits.y, bits.z, bits.w};
                UNROLL
                for (int j = 0; j < NT; j++)
                    mma_bf16(acc[i][j], a, s ? b[j].z : b[j].x, s ? b[j].w : b[j].y);
#else
                u32 high[4], low[4];
                split(bits, high, low);
                UNROLL
                for (int j = 0; j < NT; j++) {
                    mma_bf16(acc[i][j], high, s ? b[j].z : b[j].x, s ? b[j].w : b[j].y);
                    mma_bf16(acc[i][j], low, s ? b[j].z : b[j].x, s ? b[j].w : b[j].y);
                }
#endif
            }
        }
    }
#else
    const u32 ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
    UNROLL
    for (int run = 0; run < 64 / RUN; run++) {
        const int STEPS = RUN / 16;
        u32 b[NT][STEPS][2];
        UNROLL
        for (int j = 0; j < NT; j++) {
            const u8* row = x + (j * 8 + g) * 128;
#if RUN == 32
            const uint4 bits = *(const uint4*)(row + x_chunk(g, run * 4 + t));
            b[j][0][0] = bits.x, b[j][0][1] = bits.y;
            b[j][STEPS - 1][0] = bits.z, b[j][STEPS - 1][1] = bits.w;
#else
            const uint2 bits =
                *(const uint2*)(row + x_chunk(g, run * 2 + t / 2) + t % 2 * 8);
            b[j][0][0] = bits.x, b[j][0][1] = bits.y;
#endif
        }
        float sums[NT][4];
        if (HAS_OFFSET) {
            UNROLL
            for (int j = 0; j < NT; j++) {
                UNROLL
                for (int e = 0; e < 4; e++) sums[j][e] = 0.0f;
                UNROLL
                for (int s = 0; s < STEPS; s++) mma_bf16(sums[j], ones, b[j][s][0], b[j][s][1]);
            }
        }
        UNROLL
        for (int i = 0; i < MT; i++) {
            const u8* cell = w + i * W_STRIDE;
            float part[NT][4];
            UNROLL
            for (int j = 0; j < NT; j++)
                UNROLL
                for (int e = 0; e < 4; e++) part[j][e] = 0.0f;
            UNROLL
            for (int s = 0; s < STEPS; s++) {
                const int step = run * STEPS + s;
                const u32 at = BITS == 4 ? lane * 16 : (step / 2 * 32 + lane) * 16;
                u32 a[4];
                decode(*(const uint4*)(cell + at), step, a);
                UNROLL
                for (int j = 0; j < NT; j++) mma_bf16(part[j], a, b[j][s][0], b[j][s][1]);
            }
            UNROLL
            for (int r = 0; r < 2; r++) {
                const float scale = cell_scale(cell, run, g + 8 * r);
                const float offset = HAS_OFFSET ? cell_offset(cell, run, g + 8 * r) : 0.0f;
                UNROLL
                for (int j = 0; j < NT; j++) {
                    UNROLL
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        float sum = __fmaf_rn(scale, part[j][e], acc[i][j][e]);
                        if (HAS_OFFSET) sum = __fmaf_rn(offset, sums[j][e], sum);
                        acc[i][j][e] = sum;
                    }
                }
            }
        }
    }
#endif
}

// Writes one output.
DEVICE void store(const MatmulParams& p, u32 row, u32 column, float sum) {
    if (row >= p.rows || column >= p.n_x) return;
    float* out = p.out + (u64)column * p.out_stride + p.out_first + row;
    if (p.bias) sum += p.bias[row];
    if (p.is_added) sum += *out;
    *out = sum;
}

// Writes one output of a gated product; `row` is that of the first factor, eight before the other.
DEVICE void store_gated(const MatmulParams& p, u32 row, u32 column, float gate, float up) {
    if (row >= p.rows || column >= p.n_x) return;
    if (p.bias) gate += p.bias[row], up += p.bias[row + 8];
    const u64 at = (u64)column * p.out_stride + row / 16 * 8 + row % 8;
    const float y = gated(gate, up);
    p.out[at] = y;
    p.rounded[at] = (u16)bf16_of(y);
}

// First cell of a segment.
DEVICE u32 segment_start(u32 segment, u32 cells) {
    return (segment * cells + SEGMENTS - 1) / SEGMENTS;
}

template <int MT, int NT, int STAGES, int SHARED>
struct Few {
    static const int STAGE_BYTES = MT * CELL_BYTES + 8 * NT * 128;
    static const int SUMS = MT * NT * 128;
    static_assert(STAGE_BYTES * STAGES * SEGMENTS == SHARED, "the host's shared memory differs");
    static_assert(SUMS * 4 <= STAGE_BYTES * STAGES, "the sums fit where the stages were");

    // One cell of each tile, by one warp.
    DEVICE void load_w(const MatmulParams& p, u32 stage, u32 cell) {
        const u32 lane = threadIdx.x % 32;
        const u32 tiles = (p.rows + 15) / 16;
        UNROLL
        for (int i = 0; i < MT; i++) {
            const u32 tile = blockIdx.x * MT + i;
            const bool inside = tile < tiles;
            const u8* source = p.packed + (inside ? ((u64)tile * p.cells + cell) * CELL_BYTES : 0);
            UNROLL
            for (int at = 0; at < CELL_BYTES; at += 512) {
                if (at + lane * 16 < CELL_BYTES)
                    copy_async(stage + i * CELL_BYTES + at + lane * 16, source + at + lane * 16,
                               inside ? 16 : 0);
            }
        }
    }

    // One cell of each row of x.
    DEVICE void load_x(const MatmulParams& p, u32 stage, u32 cell) {
        const u32 lane = threadIdx.x % 32;
        UNROLL
        for (int i = 0; i < 2 * NT; i++) {
            const u32 column = i * 4 + lane / 8, row = blockIdx.y * 8 * NT + column;
            const bool inside = row < p.n_x;
            const u16* source =
                p.x + (inside ? (u64)row * p.x_stride + cell * 64 + lane % 8 * 8 : 0);
            const u32 target = MT * CELL_BYTES + column * 128 + x_chunk(column, lane % 8);
            copy_async(stage + target, source, inside ? 16 : 0);
        }
    }

    DEVICE void run(const MatmulParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 first = segment_start(warp, p.cells), end = segment_start(warp + 1, p.cells);
        const u8* ring = shared + warp * STAGES * STAGE_BYTES;
        const u32 address = shared_address(ring);
        float acc[MT][NT][4];
        UNROLL
        for (int i = 0; i < MT; i++)
            UNROLL
            for (int j = 0; j < NT; j++)
                UNROLL
                for (int e = 0; e < 4; e++) acc[i][j][e] = 0.0f;
        // Weights do not depend on what was computed before.
        allow_next();
        for (u32 s = 0; s < STAGES - 1; s++)
            if (first + s < end) load_w(p, address + s * STAGE_BYTES, first + s);
        wait_for_previous();
        for (u32 s = 0; s < STAGES - 1; s++) {
            if (first + s < end) load_x(p, address + s * STAGE_BYTES, first + s);
            copy_commit();
        }
        u32 slot = 0;
        for (u32 cell = first; cell < end; cell++) {
            copy_wait<STAGES - 2>();
            // Every lane's copies of this stage are there, and no lane reads the one before it.
            __syncwarp();
            const u32 free = address + (slot == 0 ? STAGES - 1 : slot - 1) * STAGE_BYTES;
            const u32 next = cell + STAGES - 1;
            if (next < end) {
                load_w(p, free, next);
                load_x(p, free, next);
            }
            copy_commit();
            const u8* stage = ring + slot * STAGE_BYTES;
            multiply<MT, NT, CELL_BYTES>(stage, stage + MT * CELL_BYTES, acc);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        // The ring of each warp becomes the place of its sums.
        __syncwarp();
        float* sums = (float*)ring;
        UNROLL
        for (int i = 0; i < MT; i++)
            UNROLL
            for (int j = 0; j < NT; j++)
                UNROLL
                for (int e = 0; e < 4; e++) sums[((i * NT + j) * 4 + e) * 32 + lane] = acc[i][j][e];
        __syncthreads();
        for (u32 at = threadIdx.x; at < SUMS; at += 32 * SEGMENTS) {
            const u32 holder = at % 32, e = at / 32 % 4, j = at / 128 % NT, i = at / 128 / NT;
            const u32 row = (blockIdx.x * MT + i) * 16 + e / 2 * 8 + holder / 4;
            const u32 column = (blockIdx.y * NT + j) * 8 + holder % 4 * 2 + e % 2;
            if (!p.is_gated)
                store(p, row, column, total_at(shared, at));
            else if (e < 2)
                store_gated(p, row, column, total_at(shared, at), total_at(shared, at + 64));
        }
    }

    // The sum over all segments.
    DEVICE float total_at(const u8* shared, u32 at) {
        float total = 0.0f;
        UNROLL
        for (int segment = 0; segment < SEGMENTS; segment++)
            total += ((const float*)(shared + segment * STAGES * STAGE_BYTES))[at];
        return total;
    }
};

template <int WM, int WN, int MT, int NT, int STAGES, int SHARED>
struct Many {
    static const int THREADS = 32 * WM * WN;
    static const int TILES = WM * MT;
    static const int COLUMNS = 8 * WN * NT;
    static const int W_BYTES = TILES * CELL_BYTES;
    static const int STAGE_BYTES = W_BYTES + COLUMNS * 128;
    static_assert(STAGE_BYTES * STAGES == SHARED, "the host's shared memory differs");

    DEVICE void load(const MatmulParams& p, u32 stage, u32 cell) {
        const u32 tiles = (p.rows + 15) / 16;
        UNROLL
        for (int first = 0; first < W_BYTES / 16; first += THREADS) {
            const u32 i = first + threadIdx.x;
            if (W_BYTES / 16 % THREADS != 0 && i >= W_BYTES / 16) break;
            const u32 tile = blockIdx.x * TILES + i / (CELL_BYTES / 16);
            const bool inside = tile < tiles;
            const u64 source =
                ((u64)tile * p.cells + cell) * CELL_BYTES + i % (CELL_BYTES / 16) * 16;
            copy_async(stage + i * 16, p.packed + (inside ? source : 0), inside ? 16 : 0);
        }
        UNROLL
        for (int first = 0; first < COLUMNS * 8; first += THREADS) {
            const u32 i = first + threadIdx.x, column = i / 8, chunk = i % 8;
            const u32 row = blockIdx.y * COLUMNS + column;
            const bool inside = row < p.n_x;
            const u64 source = (u64)row * p.x_stride + cell * 64 + chunk * 8;
            const u32 target = W_BYTES + column * 128 + x_chunk(column, chunk);
            copy_async(stage + target, p.x + (inside ? source : 0), inside ? 16 : 0);
        }
        copy_commit();
    }

    DEVICE void run(const MatmulParams& p) {
        begin();
        extern __shared__ __align__(128) u8 shared[];
        const u32 ring = shared_address(shared);
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        float acc[MT][NT][4], total[MT][NT][4];
        UNROLL
        for (int i = 0; i < MT; i++)
            UNROLL
            for (int j = 0; j < NT; j++)
                UNROLL
                for (int e = 0; e < 4; e++) acc[i][j][e] = total[i][j][e] = 0.0f;
        for (u32 s = 0; s < STAGES - 1; s++) {
            if (s < p.cells)
                load(p, ring + s * STAGE_BYTES, s);
            else
                copy_commit();
        }
        u32 segment = 0;
        for (u32 cell = 0; cell < p.cells; cell++) {
            copy_wait<STAGES - 2>();
            // Everybody's copies of this stage are there, and nobody reads the one before it.
            __syncthreads();
            const u32 next = cell + STAGES - 1;
            if (next < p.cells)
                load(p, ring + next % STAGES * STAGE_BYTES, next);
            else
                copy_commit();
            const u8* stage = shared + cell % STAGES * STAGE_BYTES;
            const u8* w = stage + warp % WM * MT * CELL_BYTES;
            const u8* x = stage + W_BYTES + warp / WM * NT * 8 * 128;
            multiply<MT, NT, CELL_BYTES>(w, x, acc);
            if (cell + 1 < segment_start(segment + 1, p.cells)) continue;
            // Segments without cells add nothing.
            while (segment < SEGMENTS && segment_start(segment + 1, p.cells) <= cell + 1) segment++;
            UNROLL
            for (int i = 0; i < MT; i++)
                UNROLL
                for (int j = 0; j < NT; j++)
                    UNROLL
                    for (int e = 0; e < 4; e++) {
                        total[i][j][e] += acc[i][j][e];
                        acc[i][j][e] = 0.0f;
                    }
        }
        const u32 first_row = (blockIdx.x * TILES + warp % WM * MT) * 16 + g;
        const u32 first_column = blockIdx.y * COLUMNS + warp / WM * NT * 8 + t * 2;
        UNROLL
        for (int i = 0; i < MT; i++)
            UNROLL
            for (int j = 0; j < NT; j++)
                UNROLL
                for (int e = 0; e < 4; e++) {
                    const u32 row = first_row + i * 16 + e / 2 * 8;
                    const u32 column = first_column + j * 8 + e % 2;
                    if (!p.is_gated)
                        store(p, row, column, total[i][j][e]);
                    else if (e < 2)
                        store_gated(p, row, column, total[i][j][e], total[i][j][(e + 2) % 4]);
                }
    }
};

#define FEW(name, MT, NT, STAGES, SHARED)                                                      \
    extern "C" __global__ void __launch_bounds__(32 * SEGMENTS) name(MatmulParams p) {         \
        Few<MT, NT, STAGES, SHARED>::run(p);                                                   \
    }
#define MANY(name, WM, WN, MT, NT, STAGES, SHARED)                                             \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN) name(MatmulParams p) {          \
        Many<WM, WN, MT, NT, STAGES, SHARED>::run(p);                                          \
    }
MATMUL_ENTRIES
