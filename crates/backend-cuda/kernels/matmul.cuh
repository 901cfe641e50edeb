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
// decode step is short of rows, and the device needs many loads in flight. `One` is the same for a single
// row, which the block may normalise first as norm.cu does, and keeps then. For more (`Many`) warps share W
// and x, and walk the segments one after the other. All do the same additions in the same order, so a
// row has the same bits in any batch.

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
    // Of `One`: what x is made of, or null.
    const float* norm_x;
    const float* norm_weight;
    float norm_eps;
    u32 norm_threads;  // of a block of norm.cu
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

// Where the sixteen bytes `chunk` of a cell's activations lie in a row: those of eight rows use all banks.
DEVICE u32 x_chunk(u32 row, u32 chunk) { return (chunk ^ (row & 7)) * 16; }

// The matrix instruction's operands of eight rows of x for two steps, from chunk `first` on.
DEVICE void load_operands(const u8* x, u32 first, u32 (&b)[2][2]) {
    const u32 row = threadIdx.x % 8, chunk = threadIdx.x % 32 / 8;
    const u32 address = shared_address(x + row * 128 + x_chunk(row, first + chunk));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0][0]), "=r"(b[0][1]), "=r"(b[1][0]), "=r"(b[1][1])
                 : "r"(address)
                 : "memory");
}

// One cell of eights of rows, of 128 bytes each, in a stage.
struct Rows {
    const u8* first;

    __device__ void load(u32 eight, u32 chunk, u32 (&b)[2][2]) const {
        load_operands(first + eight * 1024, chunk, b);
    }
};

// Adds one cell's products; `w` is the first of MT tiles, W_STRIDE apart, and `x` has 8 NT rows.
template <int MT, int NT, int W_STRIDE, typename X>
DEVICE void multiply(const u8* w, const X& x, float (&acc)[MT][NT][4]) {
    const u32 lane = threadIdx.x % 32;
#if BITS == 16
    UNROLL
    for (int half = 0; half < 2; half++) {
        u32 b[NT][2][2];
        UNROLL
        for (int j = 0; j < NT; j++) x.load(j, half * 4, b[j]);
        UNROLL
        for (int s = 0; s < 2; s++) {
            UNROLL
            for (int i = 0; i < MT; i++) {
                const u32 at = ((half * 2 + s) * 32 + lane) * 16;
                const uint4 bits = *(const uint4*)(w + i * W_STRIDE + at);
#if TYPE == BF16
                const u32 a[4] = {bits.x, bits.y, bits.z, bits.w};
                UNROLL
                for (int j = 0; j < NT; j++) mma_bf16(acc[i][j], a, b[j][s][0], b[j][s][1]);
#else
                u32 high[4], low[4];
                split(bits, high, low);
                UNROLL
                for (int j = 0; j < NT; j++) {
                    mma_bf16(acc[i][j], high, b[j][s][0], b[j][s][1]);
                    mma_bf16(acc[i][j], low, b[j][s][0], b[j][s][1]);
                }
#endif
            }
        }
    }
#else
    const u32 g = lane / 4, ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
    const int STEPS = RUN / 16;
    u32 b[NT][2][2];
    UNROLL
    for (int run = 0; run < 64 / RUN; run++) {
        const int first = run * STEPS % 2;  // of the two steps in b
        if (first == 0)
            UNROLL
            for (int j = 0; j < NT; j++) x.load(j, run * STEPS * 2, b[j]);
        float sums[NT][4];
        if (HAS_OFFSET) {
            UNROLL
            for (int j = 0; j < NT; j++) {
                UNROLL
                for (int e = 0; e < 4; e++) sums[j][e] = 0.0f;
                UNROLL
                for (int s = 0; s < STEPS; s++)
                    mma_bf16(sums[j], ones, b[j][first + s][0], b[j][first + s][1]);
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
                for (int j = 0; j < NT; j++)
                    mma_bf16(part[j], a, b[j][first + s][0], b[j][first + s][1]);
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

DEVICE float* out_at(const MatmulParams& p, u32 row, u32 column) {
    return p.out + (u64)column * p.out_stride + p.out_first + row;
}

// What an output is added to: the bias, and what is there, or the other factor's bias. It is fetched while
// the product is computed.
DEVICE float2 fetch_added(const MatmulParams& p, u32 row, u32 column) {
    float2 added = make_float2(0.0f, 0.0f);
    if (row >= p.rows || column >= p.n_x) return added;
    if (p.bias) added.x = p.bias[row];
    if (p.is_added) added.y = *out_at(p, row, column);
    if (p.bias && p.is_gated && row % 16 < 8) added.y = p.bias[row + 8];
    return added;
}

// Writes one output, added to what was fetched.
DEVICE void store(const MatmulParams& p, u32 row, u32 column, float sum, float2 added) {
    if (row >= p.rows || column >= p.n_x) return;
    if (p.bias) sum += added.x;
    if (p.is_added) sum += added.y;
    *out_at(p, row, column) = sum;
}

// Writes one output of a gated product; `row` is that of the first factor, eight before the other.
DEVICE void store_gated(const MatmulParams& p, u32 row, u32 column, float gate, float up,
                        float2 bias) {
    if (row >= p.rows || column >= p.n_x) return;
    if (p.bias) gate += bias.x, up += bias.y;
    const u64 at = (u64)column * p.out_stride + row / 16 * 8 + row % 8;
    const float y = gated(gate, up);
    p.out[at] = y;
    p.rounded[at] = (u16)bf16_of(y);
}

// First cell of a segment.
DEVICE u32 segment_start(u32 segment, u32 cells) {
    return (segment * cells + SEGMENTS - 1) / SEGMENTS;
}

// The sum over all segments.
template <int RING>
DEVICE float total_at(const u8* shared, u32 at) {
    float total = 0.0f;
    UNROLL
    for (int segment = 0; segment < SEGMENTS; segment++)
        total += ((const float*)(shared + segment * RING))[at];
    return total;
}

// The outputs that a thread writes when the segments of its block come together.
template <int MT, int NT>
struct Outputs {
    static const int ALL = MT * NT * 128, N = (ALL + 32 * SEGMENTS - 1) / (32 * SEGMENTS);
    float2 added[N];

    // Where a thread's output is among the block's sums.
    DEVICE u32 at(int i) { return i * 32 * SEGMENTS + threadIdx.x; }
    DEVICE u32 row(u32 at) {
        return (blockIdx.x * MT + at / 128 / NT) * 16 + at / 64 % 2 * 8 + at % 32 / 4;
    }
    DEVICE u32 column(u32 at) {
        return (blockIdx.y * NT + at / 128 % NT) * 8 + at % 4 * 2 + at / 32 % 2;
    }

    // Fetches what they are added to.
    __device__ __forceinline__ void fetch(const MatmulParams& p) {
        UNROLL
        for (int i = 0; i < N; i++)
            added[i] = at(i) < ALL ? fetch_added(p, row(at(i)), column(at(i))) : make_float2(0, 0);
    }
};

// Brings the segments of a block's warps together, and writes the outputs. The ring of each warp, of
// RING bytes, becomes the place of its sums.
template <int MT, int NT, int RING>
DEVICE void finish(const MatmulParams& p, u8* shared, const float (&acc)[MT][NT][4],
                   const Outputs<MT, NT>& outputs) {
    typedef Outputs<MT, NT> Own;
    const u32 lane = threadIdx.x % 32;
    float* sums = (float*)(shared + threadIdx.x / 32 * RING);
    __syncwarp();
    UNROLL
    for (int i = 0; i < MT; i++)
        UNROLL
        for (int j = 0; j < NT; j++)
            UNROLL
            for (int e = 0; e < 4; e++) sums[((i * NT + j) * 4 + e) * 32 + lane] = acc[i][j][e];
    __syncthreads();
    UNROLL
    for (int i = 0; i < Own::N; i++) {
        const u32 at = Own::at(i), row = Own::row(at), column = Own::column(at);
        if (at >= Own::ALL) break;
        if (!p.is_gated)
            store(p, row, column, total_at<RING>(shared, at), outputs.added[i]);
        else if (at / 64 % 2 == 0)
            store_gated(p, row, column, total_at<RING>(shared, at), total_at<RING>(shared, at + 64),
                        outputs.added[i]);
    }
}
