// The products of matmul.cu for many rows of x, by Hopper's matrix instruction of four warps.
//
// A block takes WIDE rows of W and NX rows of x at a time, and as many of these tiles as come to it.
// One warp brings both through a ring: W by runs, x by the copy engine's tiles, which swizzle it as the
// instruction wants it. Eight warps each take sixteen rows of W from the ring into registers, where they
// already lie in order, and multiply them with all rows of x; while one half of a cell is multiplied,
// the other half of the registers is filled. What bounds it is the second-level cache, which gives a
// multiprocessor about 28 bytes a cycle: so tiles are as large as two sets of sums fit the registers.
// (Pairs of blocks that bring x for each other took half as long again on one H200.)
//
// An output is the same chain of sums of sixteen products as in matmul.cu: the same bits.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && TYPE == BF16

// Tiles of x, as the copy engine knows them.
struct alignas(128) TileMap {
    u64 opaque[16];
};

struct WideParams {
    TileMap x;
    MatmulParams product;
};
static_assert(sizeof(WideParams) == WIDE_PARAMS_SIZE, "the host's WideParams differs");

#define WIDE 128
#define WIDE_TILES (WIDE / 16)
static_assert(CELL_BYTES * WIDE_TILES % 1024 == 0, "tiles of x begin where their pattern does");
// Blocks of x that follow each other before the next rows of W: they stay in the second-level cache.
#ifndef WIDE_GROUP
#define WIDE_GROUP 16
#endif

// Brings 64 columns of some rows.
DEVICE void tile_copy(u32 shared, const TileMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

template <int NX, int STAGES, int SHARED>
struct Wide {
    static const int SUMS = NX / 2;  // of a thread
    static const int W_BYTES = WIDE_TILES * CELL_BYTES;
    static const int STAGE = W_BYTES + NX * 128;
    static const int BARRIERS = STAGES * STAGE;
    static_assert(BARRIERS + 8 * STAGES == SHARED, "the host's shared memory differs");
    typedef RingPlace<STAGES> Place;

    // Where a tile is, counted in tiles.
    struct At {
        u32 w, x;
    };

    DEVICE u32 tiles_of_w(const MatmulParams& p) { return (p.rows + WIDE - 1) / WIDE; }
    DEVICE u32 columns(const MatmulParams& p) { return (p.n_x + NX - 1) / NX; }
    DEVICE u32 count(const MatmulParams& p) { return tiles_of_w(p) * columns(p); }

    DEVICE At at(const MatmulParams& p, u32 index) {
        const u32 n_w = tiles_of_w(p);
        const u32 group = index / (n_w * WIDE_GROUP), inside = index % (n_w * WIDE_GROUP);
        const u32 n = min(columns(p) - group * WIDE_GROUP, (u32)WIDE_GROUP);
        return At{inside / n, group * WIDE_GROUP + inside % n};
    }

    // Stages are given back through the block's numbered barriers, at which the warp that brings waits for
    // all that multiply. (With barriers in shared memory one lane would arrive for its warp; racecheck does not
    // see that this orders what the other lanes have read, and it is no faster.)
    static const int MEETING = 256 + 32;  // threads

    DEVICE void release(u32 stage) {
        asm volatile("bar.arrive %0, %1;" ::"r"(1 + stage), "n"(MEETING) : "memory");
    }

    DEVICE void wait_for_release(u32 stage) {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + stage), "n"(MEETING) : "memory");
    }

    // By all lanes of one warp.
    DEVICE void bring(const WideParams& p, u32 ring) {
        const u32 tiles = (p.product.rows + 15) / 16, cells = p.product.cells;
        Place place = {0, 0};
        u32 n_brought = 0;
        for (u32 i = blockIdx.x; i < count(p.product); i += gridDim.x) {
            const At tile = at(p.product, i);
            for (u32 cell = 0; cell < cells; cell++) {
                if (n_brought++ >= STAGES) wait_for_release(place.stage);
                if (threadIdx.x % 32 == 0)
                    bring_cell(p, tile, cell, min(tiles - tile.w * WIDE_TILES, (u32)WIDE_TILES), ring,
                               place.stage);
                __syncwarp();
                place.go_on();
            }
        }
        // Every arrival is waited for.
        const u32 n_left = min(n_brought, (u32)STAGES);
        for (u32 i = n_brought - n_left; i < n_brought; i++) wait_for_release(i % STAGES);
    }

    // A cell of `n` sixteens of rows of W, and of the rows of x.
    DEVICE void bring_cell(const WideParams& p, const At& tile, u32 cell, u32 n, u32 ring, u32 stage) {
        const u32 ready = ring + BARRIERS + stage * 8, target = ring + stage * STAGE;
        const u32 cells = p.product.cells;
        const u8* w = p.product.packed + (u64)tile.w * WIDE_TILES * cells * CELL_BYTES;
        barrier_expect(ready, n * CELL_BYTES + NX * 128);
        tile_copy(target + W_BYTES, p.x, cell * 64, tile.x * NX, ready);
        for (u32 t = 0; t < n; t++)
            bulk_copy(target + t * CELL_BYTES, w + ((u64)t * cells + cell) * CELL_BYTES, CELL_BYTES,
                      ready);
    }

    // Two steps of sixteen rows of a cell of W.
    DEVICE void load(const u8* cell, u32 half, uint4 (&a)[2]) {
        UNROLL
        for (int s = 0; s < 2; s++)
            a[s] = *(const uint4*)(cell + ((half * 2 + s) * 32 + threadIdx.x % 32) * 16);
    }

    DEVICE void multiply_half(const uint4 (&a)[2], u64 x, u32 is_begun, float (&acc)[SUMS]) {
        wide_begin();
        wide_mma(acc, a[0], x, is_begun);
        wide_mma(acc, a[1], x + 2, 1);
        wide_commit();
    }

    DEVICE void compute(const WideParams& p, const u8* shared, u32 ring) {
        const u32 cells = p.product.cells, barriers = ring + BARRIERS;
        const u8* own = shared + threadIdx.x / 32 * CELL_BYTES;
        float acc[SUMS], total[SUMS];
        Place place = {0, 0};
        UNROLL
        for (int j = 0; j < SUMS; j++) acc[j] = 0.0f;
        for (u32 i = blockIdx.x; i < count(p.product); i += gridDim.x) {
            UNROLL
            for (int j = 0; j < SUMS; j++) total[j] = 0.0f;
            for (u32 segment = 0; segment < SEGMENTS; segment++) {
                const u32 first = segment_start(segment, cells);
                const u32 end = segment_start(segment + 1, cells);
                // Segments without cells add nothing.
                if (first == end) continue;
                uint4 low[2], high[2];
                barrier_wait(barriers + place.stage * 8, place.phase);
                load(own + place.stage * STAGE, 0, low);
                u32 before = 0;
                for (u32 cell = first; cell < end; cell++) {
                    const u32 stage = place.stage * STAGE;
                    const u64 x = matrix_descriptor<128>(ring + stage + W_BYTES, 1024);
                    multiply_half(low, x, cell > first, acc);
                    wide_wait_but_one();
                    if (cell > first) release(before);
                    load(own + stage, 1, high);
                    multiply_half(high, x + 4, 1, acc);
                    before = place.stage;
                    place.go_on();
                    if (cell + 1 == end) break;
                    barrier_wait(barriers + place.stage * 8, place.phase);
                    wide_wait_but_one();
                    load(own + place.stage * STAGE, 0, low);
                }
                wide_wait(acc);
                release(before);
                UNROLL
                for (int j = 0; j < SUMS; j++) total[j] += acc[j];
            }
            write(p.product, at(p.product, i), total);
        }
    }

    // Writes the sums of a tile: of each eight columns a lane has two, of rows g and g + 8.
    DEVICE void write(const MatmulParams& p, const At& tile, const float (&total)[SUMS]) {
        const u32 lane = threadIdx.x % 32, g = lane / 4;
        const u32 row = tile.w * WIDE + threadIdx.x / 32 * 16 + g;
        const u32 column = tile.x * NX + lane % 4 * 2;
        const int n_left = row < p.rows ? (int)(p.n_x - column) : 0;
        const bool has_lower = row + 8 < p.rows;
        const float upper = p.bias && row < p.rows ? p.bias[row] : 0.0f;
        const float lower = p.bias && has_lower ? p.bias[row + 8] : 0.0f;
        const u64 stride = p.out_stride;
        if (p.is_gated) {
            u64 at = column * stride + row / 16 * 8 + g;
            UNROLL
            for (int j = 0; j < NX / 8; j++, at += 8 * stride) {
                UNROLL
                for (int e = 0; e < 2; e++) {
                    float gate = total[4 * j + e], up = total[4 * j + 2 + e];
                    if (p.bias) gate += upper, up += lower;
                    if (8 * j + e >= n_left) continue;
                    const float y = gated(gate, up);
                    p.out[at + e * stride] = y;
                    p.rounded[at + e * stride] = (u16)bf16_of(y);
                }
            }
            return;
        }
        float* out = p.out + column * stride + p.out_first + row;
        const int BATCH = 4;
        UNROLL
        for (int first = 0; first < NX / 8; first += BATCH) {
            float sums[BATCH][4];
            // What they are added to is read before anything is written: the compiler cannot know that
            // these places differ.
            UNROLL
            for (int i = 0; i < BATCH; i++)
                UNROLL
                for (int e = 0; e < 4; e++) {
                    const bool inside =
                        8 * (first + i) + e % 2 < n_left && (e < 2 || has_lower);
                    const float* old = out + (8 * i + e % 2) * stride + e / 2 * 8;
                    float sum = total[4 * (first + i) + e];
                    if (p.bias) sum += e < 2 ? upper : lower;
                    sums[i][e] = p.is_added && inside ? sum + *old : sum;
                }
            UNROLL
            for (int i = 0; i < BATCH; i++)
                UNROLL
                for (int e = 0; e < 4; e++)
                    if (8 * (first + i) + e % 2 < n_left && (e < 2 || has_lower))
                        out[(8 * i + e % 2) * stride + e / 2 * 8] = sums[i][e];
            out += 8 * BATCH * stride;
        }
    }

    DEVICE void run(const WideParams& p) {
        extern __shared__ __align__(1024) u8 wide_shared[];
        const u32 ring = shared_address(wide_shared), barriers = ring + BARRIERS;
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < STAGES; i++) barrier_init_for(barriers + i * 8, 1);
            barriers_ready();
        }
        __syncthreads();
        begin();
        if (threadIdx.x < 256) {
            take_registers();
            compute(p, wide_shared, ring);
        } else {
            give_registers();
            if (threadIdx.x / 32 == 8) bring(p, ring);
        }
    }
};

#define WIDE_ENTRY(name, NX, STAGES, SHARED)                                                     \
    extern "C" __global__ void __launch_bounds__(384, 1)                                         \
        name(const __grid_constant__ WideParams p) {                                             \
        Wide<NX, STAGES, SHARED>::run(p);                                                        \
    }
WIDE_ENTRIES
#endif
