// The products of matmul.cu for many rows of x, by Hopper's matrix instruction of four warps.
//
// A block takes WIDE rows of W and WIDE rows of x at a time, and as many of these tiles as come to it.
// One warp brings both through a ring: W by runs, x by the copy engine's tiles, which swizzle it as the
// instruction wants it. The other eight each take sixteen rows of W from the ring into registers, where
// they already lie in order, and multiply them with all rows of x. Two blocks that share x by the copy
// engine, and tell each other when a stage is free, ran at 0.6 of the speed on one H200.
//
// An output is the same chain of sums of sixteen products as in matmul.cu: the same bits.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && TYPE == BF16

// A tile of x, as the copy engine knows it.
struct alignas(128) TileMap {
    u64 opaque[16];
};

struct WideParams {
    TileMap x;
    MatmulParams product;
};
static_assert(sizeof(WideParams) == WIDE_PARAMS_SIZE, "the host's WideParams differs");

#define WIDE 128
#define WIDE_X_BYTES (WIDE * 128)
#define WIDE_STAGE (WIDE / 16 * CELL_BYTES + WIDE_X_BYTES)
#define WIDE_BARRIERS (WIDE_STAGES * WIDE_STAGE)
static_assert(WIDE_BARRIERS + 16 * WIDE_STAGES == WIDE_SHARED, "the host's shared memory differs");
static_assert(CELL_BYTES * (WIDE / 16) % 1024 == 0, "tiles of x begin where their pattern does");
// Blocks of x that follow each other before the next rows of W: they stay in the second-level cache.
#define WIDE_GROUP 16

DEVICE void barrier_init_for(u32 barrier, u32 n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Brings 64 columns of WIDE rows.
DEVICE void tile_copy(u32 shared, const TileMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// What the instruction has to know of x in shared memory: rows of 128 bytes, swizzled by eights.
DEVICE u64 tile_descriptor(u32 shared) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (shared & 0x3FFFF) >> 4;
}

// d = A B, or d + A B, where A is 64 x 16 over the lanes of four warps, and B is 16 x 128.
DEVICE void wide_mma(float (&d)[64], const uint4& a, u64 b, u32 is_added) {
    asm volatile(
        "{\n"
        ".reg .pred added;\n"
        "setp.ne.b32 added, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, added, 1, 1, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(is_added));
}

DEVICE void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all products; only then is `d` what it says.
DEVICE void wide_wait(float (&d)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        :
        : "memory");
}

// Where a tile is.
struct WideTile {
    u32 w, x;  // counted in tiles

    DEVICE WideTile at(const MatmulParams& p, u32 index) {
        const u32 n_w = (p.rows + WIDE - 1) / WIDE, n_x = (p.n_x + WIDE - 1) / WIDE;
        const u32 group = index / (n_w * WIDE_GROUP), inside = index % (n_w * WIDE_GROUP);
        const u32 columns = min(n_x - group * WIDE_GROUP, (u32)WIDE_GROUP);
        return WideTile{inside / columns, group * WIDE_GROUP + inside % columns};
    }

    DEVICE u32 count(const MatmulParams& p) {
        return (p.rows + WIDE - 1) / WIDE * ((p.n_x + WIDE - 1) / WIDE);
    }
};

// Where a warp is in the ring.
struct WidePlace {
    u32 stage, phase;

    DEVICE void go_on(WidePlace& place) {
        place.phase ^= place.stage == WIDE_STAGES - 1;
        place.stage = place.stage == WIDE_STAGES - 1 ? 0 : place.stage + 1;
    }
};

DEVICE void wide_bring(const WideParams& p, u32 ring) {
    const u32 tiles = (p.product.rows + 15) / 16, cells = p.product.cells;
    WidePlace place = {0, 0};
    for (u32 i = blockIdx.x; i < WideTile::count(p.product); i += gridDim.x) {
        const WideTile tile = WideTile::at(p.product, i);
        const u32 first = tile.w * (WIDE / 16), n = min(tiles - first, (u32)WIDE / 16);
        for (u32 cell = 0; cell < cells; cell++) {
            const u32 ready = ring + WIDE_BARRIERS + place.stage * 8;
            const u32 target = ring + place.stage * WIDE_STAGE;
            barrier_wait(ready + WIDE_STAGES * 8, place.phase ^ 1);
            barrier_expect(ready, n * CELL_BYTES + WIDE_X_BYTES);
            for (u32 t = 0; t < n; t++)
                bulk_copy(target + t * CELL_BYTES,
                          p.product.packed + ((u64)(first + t) * cells + cell) * CELL_BYTES,
                          CELL_BYTES, ready);
            tile_copy(target + WIDE / 16 * CELL_BYTES, p.x, cell * 64, tile.x * WIDE, ready);
            WidePlace::go_on(place);
        }
    }
}

// Sixteen rows of one cell of W, in the order of the instruction.
DEVICE void wide_load(const u8* w, uint4 (&a)[4]) {
    const u32 lane = threadIdx.x % 32;
    UNROLL
    for (int step = 0; step < 4; step++) a[step] = *(const uint4*)(w + (step * 32 + lane) * 16);
}

DEVICE void wide_store(const MatmulParams& p, const WideTile& tile, const float (&total)[64]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 row = tile.w * WIDE + threadIdx.x / 32 * 16 + g;
    UNROLL
    for (int j = 0; j < 16; j++) {
        const u32 column = tile.x * WIDE + j * 8 + t * 2;
        UNROLL
        for (int e = 0; e < 2; e++) {
            const float upper = total[j * 4 + e], lower = total[j * 4 + 2 + e];
            if (p.is_gated) {
                store_gated(p, row, column + e, upper, lower);
            } else {
                store(p, row, column + e, upper);
                store(p, row + 8, column + e, lower);
            }
        }
    }
}

DEVICE void wide_compute(const WideParams& p, const u8* shared, u32 ring) {
    const u32 warp = threadIdx.x / 32, cells = p.product.cells;
    const u32 barriers = ring + WIDE_BARRIERS;
    const u8* own = shared + warp * CELL_BYTES;
    float acc[64], total[64];
    uint4 a[4], next[4];
    WidePlace place = {0, 0};
    UNROLL
    for (int j = 0; j < 64; j++) acc[j] = 0.0f;
    for (u32 i = blockIdx.x; i < WideTile::count(p.product); i += gridDim.x) {
        UNROLL
        for (int j = 0; j < 64; j++) total[j] = 0.0f;
        u32 segment = 0, is_begun = 0;
        barrier_wait(barriers + place.stage * 8, place.phase);
        wide_load(own + place.stage * WIDE_STAGE, a);
        for (u32 cell = 0; cell < cells; cell++) {
            const u64 x =
                tile_descriptor(ring + place.stage * WIDE_STAGE + WIDE / 16 * CELL_BYTES);
            wide_begin();
            UNROLL
            for (int step = 0; step < 4; step++)
                wide_mma(acc, a[step], x + step * 2, step > 0 ? 1 : is_begun);
            wide_commit();
            // While the products run, the next rows of W come.
            const u32 free = barriers + (WIDE_STAGES + place.stage) * 8;
            WidePlace::go_on(place);
            if (cell + 1 < cells) {
                barrier_wait(barriers + place.stage * 8, place.phase);
                wide_load(own + place.stage * WIDE_STAGE, next);
            }
            wide_wait(acc);
            if (threadIdx.x % 32 == 0) barrier_arrive(free);
            UNROLL
            for (int step = 0; step < 4; step++) a[step] = next[step];
            is_begun = 1;
            if (cell + 1 < segment_start(segment + 1, cells)) continue;
            // Segments without cells add nothing.
            while (segment < SEGMENTS && segment_start(segment + 1, cells) <= cell + 1) segment++;
            is_begun = 0;
            UNROLL
            for (int j = 0; j < 64; j++) total[j] += acc[j];
        }
        wide_store(p.product, WideTile::at(p.product, i), total);
    }
}

extern "C" __global__ void __launch_bounds__(288, 1) matmul_wide(const __grid_constant__ WideParams p) {
    extern __shared__ __align__(1024) u8 wide_shared[];
    const u32 ring = shared_address(wide_shared), barriers = ring + WIDE_BARRIERS;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < WIDE_STAGES; i++) {
            barrier_init_for(barriers + i * 8, 1);
            barrier_init_for(barriers + (WIDE_STAGES + i) * 8, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    begin();
    if (threadIdx.x < 256)
        wide_compute(p, wide_shared, ring);
    else if (threadIdx.x == 256)
        wide_bring(p, ring);
}
#endif
