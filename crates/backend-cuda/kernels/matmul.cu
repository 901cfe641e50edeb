// The products of matmul.cuh for few rows of x, and for many on devices without a wider instruction.

template <int MT, int NT, int STAGES, int SHARED>
struct Few {
    static const int STAGE_BYTES = MT * CELL_BYTES + 8 * NT * 128;
    static_assert(STAGE_BYTES * STAGES * SEGMENTS == SHARED, "the host's shared memory differs");
    static_assert(MT * NT * 512 <= STAGE_BYTES * STAGES, "the sums fit where the stages were");

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
        Outputs<MT, NT> outputs;
        outputs.fetch(p);
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
            multiply<MT, NT, CELL_BYTES>(stage, Rows{stage + MT * CELL_BYTES}, acc);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        finish<MT, NT, STAGES * STAGE_BYTES>(p, shared, acc, outputs);
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
            multiply<MT, NT, CELL_BYTES>(w, Rows{x}, acc);
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
        // Each kind by itself: of what is unrolled, a launch then fetches only what it runs.
        if (p.is_gated)
            store_all<2>(p, first_row, first_column, total);
        else
            store_all<4>(p, first_row, first_column, total);
    }

    // Stores a lane's outputs; of gated ones the first two of four are the gates of the others.
    template <int N>
    DEVICE void store_all(const MatmulParams& p, u32 first_row, u32 first_column,
                          const float (&total)[MT][NT][4]) {
        UNROLL
        for (int i = 0; i < MT; i++)
            UNROLL
            for (int j = 0; j < NT; j++)
                UNROLL
                for (int e = 0; e < N; e++) {
                    const u32 row = first_row + i * 16 + e / 2 * 8;
                    const u32 column = first_column + j * 8 + e % 2;
                    const float2 added = fetch_added(p, row, column);
                    if (N == 2)
                        store_gated(p, row, column, total[i][j][e], total[i][j][e + 2 & 3], added);
                    else
                        store(p, row, column, total[i][j][e], added);
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
