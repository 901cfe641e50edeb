// Hopper's matrix instruction of four warps, and what goes with it.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

DEVICE void barrier_init_for(u32 barrier, u32 n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}

// After the last `barrier_init_for`.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Where a block is in a ring.
template <int STAGES>
struct RingPlace {
    u32 stage, phase;

    __device__ void go_on() {
        phase ^= stage == STAGES - 1;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
};

// What the instruction has to know of a matrix in shared memory: rows of 32, 64 or 128 bytes in eights,
// swizzled, that are `stride` bytes apart.
template <int BYTES>
DEVICE u64 matrix_descriptor(u32 shared, u32 stride) {
    const u64 pattern = BYTES == 128 ? 1 : BYTES == 64 ? 2 : 3;
    return pattern << 62 | (u64)(stride >> 4) << 32 | (u64)1 << 16 | (shared & 0x3FFFF) >> 4;
}

// Registers of warps that multiply, and of those that only bring; for blocks of 384 threads.
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }

// Before products whose operands or sums were touched; after products that belong together.
DEVICE void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all products but those of the last commit.
DEVICE void wide_wait_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

#define FOUR(d) "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])
#define SIXTEEN(d) FOUR(d), FOUR((d) + 4), FOUR((d) + 8), FOUR((d) + 12)

// Waits for all products; only then is `d` what it says.
template <int N>
DEVICE void wide_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    UNROLL
    for (int i = 0; i < N; i += 16) asm volatile("" : SIXTEEN(d + i)::"memory");
}

#if defined(KV) && KV == KV_F16
#define WIDE_TYPES "f16.f16 "
#else
#define WIDE_TYPES "bf16.bf16 "
#endif

// d = A B, or d + A B, where A is 64 x 16 over the lanes of four warps, and B is 16 x 64, 128 or 192.
DEVICE void wide_mma(float (&d)[32], const uint4& a, u64 b, u32 is_added) {
    asm volatile(
        "{\n"
        ".reg .pred added;\n"
        "setp.ne.b32 added, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." WIDE_TYPES
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, added, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d), SIXTEEN(d + 16)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(is_added));
}

DEVICE void wide_mma(float (&d)[64], const uint4& a, u64 b, u32 is_added) {
    asm volatile(
        "{\n"
        ".reg .pred added;\n"
        "setp.ne.b32 added, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." WIDE_TYPES
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, added, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d), SIXTEEN(d + 16), SIXTEEN(d + 32), SIXTEEN(d + 48)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(is_added));
}

DEVICE void wide_mma(float (&d)[96], const uint4& a, u64 b, u32 is_added) {
    asm volatile(
        "{\n"
        ".reg .pred added;\n"
        "setp.ne.b32 added, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." WIDE_TYPES
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "{%96, %97, %98, %99}, %100, added, 1, 1, 0;\n"
        "}"
        : SIXTEEN(d), SIXTEEN(d + 16), SIXTEEN(d + 32),
          SIXTEEN(d + 48), SIXTEEN(d + 64), SIXTEEN(d + 80)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(is_added));
}

#endif
