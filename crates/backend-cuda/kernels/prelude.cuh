// Shared device code, put in front of every kernel: numbers, matrix instructions, copies.
//
// No headers: NVRTC finds none on a machine that has only the driver and NVRTC itself.
//
// Shape legend: T query rows, H query heads, G key/value heads, D head width, S = 16 tokens of a
// page, K columns of a weight.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define INFINITE __int_as_float(0x7f800000)

// Sixteen-bit floats, as bits.

DEVICE float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE float f16_to_float(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}

DEVICE u32 bf16_of(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

DEVICE u32 f16_of(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

DEVICE u32 bf16x2(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

DEVICE u32 f16x2(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// Four signed bytes as f16, the first two of them in `low`. A byte that is flipped to be unsigned is the
// end of a number from 1024 on.
DEVICE void f16_of_bytes(u32 bytes, u32& low, u32& high) {
    bytes ^= 0x80808080u;
    low = __byte_perm(bytes, 0x64646464u, 0x5140);
    high = __byte_perm(bytes, 0x64646464u, 0x5342);
    // Less 1024 + 128.
    asm("sub.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0x64806480u));
    asm("sub.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0x64806480u));
}

// 2^x. Exact for 0, and 0 for minus infinity.
DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// silu(gate) * up. Where expf overflows the quotient is zero, which is what the formula tends to.
DEVICE float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// c += A B, where A is 16 x 16, B is 16 x 8 and c is 16 x 8 floats over the 32 lanes of a warp.
// Lane = 4 g + t holds: a0 (row g), a1 (row g + 8), a2 (row g), a3 (row g + 8); b0, b1 (column g);
// c0, c1 (row g, columns 2t, 2t + 1), c2, c3 (row g + 8). Which of the sixteen inner indices a
// lane's pairs stand for is free, as long as A and B agree.

DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of whole numbers: A is 16 x 32 and B is 32 x 8 of eight bits, four in a register.
DEVICE void mma_s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Kernels are queued so that one may begin before the one before it has ended. `allow_next` lets the
// next one do so, and `wait_for_previous` comes before the first look at what the previous one wrote, and
// before the first write.

DEVICE void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void begin() {
    allow_next();
    wait_for_previous();
}

// Copies of sixteen bytes that do not wait; `n_bytes` below sixteen fills with zeros.

DEVICE void copy_async(u32 shared, const void* global, u32 n_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(n_bytes)
                 : "memory");
}

// The same of four bytes.
DEVICE void copy_word_async(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// The same of eight bytes.
DEVICE void copy_eight(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Copies of whole runs by the copy engine, which tell a barrier in shared memory when they are there.

#if __CUDA_ARCH__ >= 900
#define HAS_BULK 1

DEVICE void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and says how many bytes are to come.
DEVICE void barrier_expect(u32 barrier, u32 n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(n_bytes)
                 : "memory");
}

// Waits for the end of a phase; phases are counted modulo two.
DEVICE void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// Whether a phase has ended.
DEVICE bool barrier_test(u32 barrier, u32 phase) {
    u32 has_ended;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(has_ended)
        : "r"(barrier), "r"(phase)
        : "memory");
    return has_ended != 0;
}

DEVICE void bulk_copy(u32 shared, const void* global, u32 n_bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared),
        "l"(global), "r"(n_bytes), "r"(barrier)
        : "memory");
}

// The same of what nobody needs again: it leaves the second-level cache first.
DEVICE void bulk_copy_once(u32 shared, const void* global, u32 n_bytes, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
        "l"(global), "r"(n_bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Two such runs into places that follow each other, by one lane of a whole warp: the barrier is told of both.
DEVICE void bulk_copy_two(u32 shared, const void* first, const void* second, u32 n_bytes, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xffffffff;\n"
        "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%4], %6;\n"
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%2], %5, [%4], %7;\n"
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%1], [%3], %5, [%4], %7;\n"
        "}" ::"r"(shared),
        "r"(shared + n_bytes), "l"(first), "l"(second), "r"(barrier), "r"(n_bytes), "r"(2 * n_bytes),
        "l"(policy)
        : "memory");
}

// Brings a run into the second-level cache, and tells nobody.
DEVICE void bulk_prefetch(const void* global, u32 n_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(n_bytes)
                 : "memory");
}

// Ordinary writes before this come before copies of the engine after it.
DEVICE void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of writes to all memory, also those of others that this thread knows of.
DEVICE void bulk_fence_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
#else
#define HAS_BULK 0
#endif

// Writes what is soon read, and leaves the second-level cache last.
DEVICE void store_kept(float* target, float x, float y) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" ::"l"(target), "f"(x),
                 "f"(y), "l"(policy)
                 : "memory");
}

DEVICE void store_kept(float* target, float x) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(target), "f"(x), "l"(policy)
                 : "memory");
}

DEVICE void store_zeros(u32 shared) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Sums over the warp in one order; every lane gets the result.
DEVICE float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

DEVICE float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
