// The products of matmul.cuh with a single row of x, which may be the norm of another.
//
// A block takes 16 rows of W. Reads each weight once; the row is read by every block. Shared memory ends
// with the row if it is made here, and may be shorter than the longest one needs; a row that is there comes cell by
// cell, beside the weights that it meets, so that a long one leaves room to others.

// One cell of the only row.
struct Row {
    const u8* cell;

    __device__ void load(u32, u32 chunk, u32 (&b)[2][2]) const {
        const u32 lane = threadIdx.x % 32;
        const u32* words = (const u32*)(cell + chunk * 16) + lane % 4;
        UNROLL
        for (int i = 0; i < 4; i++) b[i / 2][i % 2] = lane < 4 ? words[i * 4] : 0;
    }
};

// A block for a single row of x; its ring holds W alone.
template <int STAGES, int SHARED>
struct One {
    static const int RING = STAGES * CELL_BYTES;
    static const int ROW_CELL = 128;  // bytes
    static_assert(RING * SEGMENTS + ONE_ROW_BYTES == SHARED, "the host's shared memory differs");
    static_assert(SEGMENTS * STAGES * ROW_CELL <= ONE_CELLS_BYTES, "the host's room for cells is shorter");
    static_assert(RING >= 512, "the sums fit where the stages were");

    DEVICE void load_w(const MatmulParams& p, u32 stage, u32 cell) {
        const u32 lane = threadIdx.x % 32;
        const u8* source = p.packed + ((u64)blockIdx.x * p.cells + cell) * CELL_BYTES;
        UNROLL
        for (int at = 0; at < CELL_BYTES; at += 512)
            if (at + lane * 16 < CELL_BYTES)
                copy_async(stage + at + lane * 16, source + at + lane * 16, 16);
    }

    // A cell of the row as it is.
    DEVICE void load_x(const MatmulParams& p, u32 place, u32 cell) {
        const u32 at = threadIdx.x % 32 * 16;
        if (at < ROW_CELL) copy_async(place + at, (const u8*)p.x + cell * ROW_CELL + at, 16);
    }

    // The first ones of the warp, whose weights are on their way.
    DEVICE void begin_row(const MatmulParams& p, u8* cells, u32 first, u32 end, Outputs<1, 1>& outputs) {
        wait_for_previous();
        outputs.fetch(p);
        const u32 n = min(end - first, (u32)STAGES - 1) * ROW_CELL;
        for (u32 at = threadIdx.x % 32 * 16; at < n; at += 512)
            *(uint4*)(cells + at) = *(const uint4*)((const u8*)p.x + first * ROW_CELL + at);
        __syncwarp();
    }

    // The row made of another, with the sums of norm.cu: this block's warp `w` stands for that one's
    // warps w, w + 8, ...
    DEVICE void normalise_row(const MatmulParams& p, u8* row, Outputs<1, 1>& outputs) {
        __shared__ float sums[32];
        const u32 d = p.cells * 64, first = threadIdx.x * 4, stride = 32 * SEGMENTS * 4;
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float4 x[ONE_PIECES], w[ONE_PIECES];
        UNROLL
        for (int k = 0; k < ONE_PIECES; k++)
            if (first + k * stride < d) w[k] = *(const float4*)(p.norm_weight + first + k * stride);
        wait_for_previous();
        outputs.fetch(p);
        UNROLL
        for (int k = 0; k < ONE_PIECES; k++) {
            x[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first + k * stride < d) x[k] = *(const float4*)(p.norm_x + first + k * stride);
        }
        UNROLL
        for (int k = 0; k < 4; k++) {
            if ((warp + SEGMENTS * k) * 32 >= p.norm_threads) continue;
            float sum = 0.0f;
            UNROLL
            for (int j = k; j < ONE_PIECES; j += 4) {
                sum = __fmaf_rn(x[j].x, x[j].x, sum);
                sum = __fmaf_rn(x[j].y, x[j].y, sum);
                sum = __fmaf_rn(x[j].z, x[j].z, sum);
                sum = __fmaf_rn(x[j].w, x[j].w, sum);
            }
            sum = warp_sum(sum);
            if (lane == 0) sums[warp + SEGMENTS * k] = sum;
        }
        __syncthreads();
        float total = 0.0f;
        for (u32 i = 0; i < p.norm_threads / 32; i++) total += sums[i];
        const float scale = 1.0f / __fsqrt_rn(total / (float)d + p.norm_eps);
        UNROLL
        for (int k = 0; k < ONE_PIECES; k++) {
            if (first + k * stride >= d) continue;
            const u32 low = bf16x2(x[k].x * scale * w[k].x, x[k].y * scale * w[k].y);
            const u32 high = bf16x2(x[k].z * scale * w[k].z, x[k].w * scale * w[k].w);
            *(uint2*)(row + (first + k * stride) * 2) = make_uint2(low, high);
        }
    }

    DEVICE void run(const MatmulParams& p) {
        extern __shared__ __align__(128) u8 shared[];
        const u32 warp = threadIdx.x / 32;
        const u32 first = segment_start(warp, p.cells), end = segment_start(warp + 1, p.cells);
        const u8* ring = shared + warp * RING;
        u8* row = shared + SEGMENTS * RING;
        const bool is_made = p.norm_x;
        u8* cells = row + warp * STAGES * ROW_CELL;
        const u32 address = shared_address(ring);
        float acc[1][1][4] = {{{0.0f, 0.0f, 0.0f, 0.0f}}};
        allow_next();
        // Weights do not depend on what was computed before.
        for (u32 s = 0; s < STAGES - 1; s++) {
            if (first + s < end) load_w(p, address + s * CELL_BYTES, first + s);
            copy_commit();
        }
        Outputs<1, 1> outputs;
        if (is_made) {
            normalise_row(p, row, outputs);
            __syncthreads();
        } else {
            begin_row(p, cells, first, end, outputs);
        }
        u32 slot = 0;
        for (u32 cell = first; cell < end; cell++) {
            copy_wait<STAGES - 2>();
            // Every lane's copies of this stage are there, and no lane reads the one before it.
            __syncwarp();
            const u32 next = cell + STAGES - 1;
            const u32 open = slot == 0 ? STAGES - 1 : slot - 1;
            if (next < end) {
                load_w(p, address + open * CELL_BYTES, next);
                if (!is_made) load_x(p, shared_address(cells) + open * ROW_CELL, next);
            }
            copy_commit();
            const u8* x = is_made ? row + cell * ROW_CELL : cells + slot * ROW_CELL;
            multiply<1, 1, CELL_BYTES>(ring + slot * CELL_BYTES, Row{x}, acc);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        finish<1, 1, RING>(p, shared, acc, outputs);
    }
};

#define ONE(name, STAGES, SHARED)                                                              \
    extern "C" __global__ void __launch_bounds__(32 * SEGMENTS) name(MatmulParams p) {         \
        One<STAGES, SHARED>::run(p);                                                           \
    }
ONE_ENTRY
