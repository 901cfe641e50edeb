// Runs kernels on the CPU to judge what they compute: a fiber for each thread of a block, a thread of the
// system for each block of a row of the grid, memory of the device is memory.
#pragma once
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
struct dim3 { unsigned x, y, z; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
struct uint2 { unsigned x, y; }; struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16))); struct float2 { float x, y; } __attribute__((aligned(8))); struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; } inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; } inline float2 make_float2(float a, float b) { return {a, b}; } inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
namespace emu {
struct Warp { int live = 0, arrived = 0; unsigned gen = 0; unsigned long long slot[32]; unsigned regs[32][6]; const void* ptr[32]; };
struct Fiber { ucontext_t ctx; bool done = false; unsigned tid; Warp* warp; };
struct Block { std::vector<Fiber> fibers; std::vector<Warp> warps; int live, arrived = 0; unsigned gen = 0; ucontext_t main; dim3 idx, dim, grid; std::function<void()> body; };
inline thread_local Block* block; inline thread_local Fiber* cur; inline thread_local unsigned char* dynamic_base; inline thread_local void* stacks = nullptr; inline thread_local size_t stack_bytes = 0;
inline void yield() { swapcontext(&cur->ctx, &block->main); }
inline void entry() { block->body(); cur->done = true; block->live--; cur->warp->live--; if (block->live && block->arrived == block->live) { block->arrived = 0; block->gen++; } if (cur->warp->live && cur->warp->arrived == cur->warp->live) { cur->warp->arrived = 0; cur->warp->gen++; } yield(); }
inline void sync_block() { Block* b = block; unsigned g = b->gen; if (++b->arrived == b->live) { b->arrived = 0; b->gen++; return; } while (b->gen == g) yield(); }
inline void sync_warp() { Warp* w = cur->warp; unsigned g = w->gen; if (++w->arrived == w->live) { w->arrived = 0; w->gen++; return; } while (w->gen == g) yield(); }
inline void run_block(dim3 idx, dim3 grid, unsigned threads, size_t shared, const std::function<void()>& body) {
    const size_t STACK = 48 << 10; Block b; b.body = body; b.idx = idx, b.grid = grid, b.dim = dim3(threads); b.live = threads; b.fibers.resize(threads); b.warps.resize((threads + 31) / 32);
    if (stack_bytes < threads * STACK) { if (stacks) munmap(stacks, stack_bytes); stack_bytes = threads * STACK; stacks = mmap(0, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); }
    std::vector<unsigned char> mem(shared + 256); memset(mem.data(), 0xEE, mem.size()); dynamic_base = (unsigned char*)(((size_t)mem.data() + 127) / 128 * 128); block = &b;
    for (unsigned i = 0; i < threads; i++) { Fiber& f = b.fibers[i]; f.tid = i; f.warp = &b.warps[i / 32]; f.warp->live++; getcontext(&f.ctx); f.ctx.uc_stack.ss_sp = (char*)stacks + i * STACK; f.ctx.uc_stack.ss_size = STACK; f.ctx.uc_link = &b.main; makecontext(&f.ctx, (void (*)())entry, 0); }
    size_t left = threads; unsigned idle = 0; while (left) { left = 0; unsigned before = b.gen; for (auto& f : b.fibers) if (!f.done) { cur = &f; swapcontext(&b.main, &f.ctx); left += !f.done; } (void)before; if (++idle > 50000000) { printf("stuck\n"); abort(); } }
}
template <class P> void launch(void (*k)(P), dim3 grid, int threads, size_t shared, P p, bool together) {
    for (unsigned y = 0; y < grid.y; y++) {
        if (together) { std::vector<std::thread> all; for (unsigned x = 0; x < grid.x; x++) all.emplace_back([=] { run_block(dim3(x, y), grid, threads, shared, [=] { k(p); }); if (stacks) munmap(stacks, stack_bytes), stacks = nullptr, stack_bytes = 0; }); for (auto& t : all) t.join(); }
        else for (unsigned x = 0; x < grid.x; x++) run_block(dim3(x, y), grid, threads, shared, [=] { k(p); });
    }
}
template <class T> T exchange(T v, unsigned from) { Warp* w = cur->warp; memset(&w->slot[cur->tid % 32], 0, 8); memcpy(&w->slot[cur->tid % 32], &v, sizeof v); sync_warp(); T r; memcpy(&r, &w->slot[from], sizeof r); sync_warp(); return r; }
struct Tid { unsigned x; }; inline Tid tid() { return {cur->tid}; }
}
#define threadIdx (emu::tid())
#define blockIdx (emu::block->idx)
#define blockDim (emu::block->dim)
#define gridDim (emu::block->grid)
#define __syncthreads emu::sync_block
#define __syncwarp emu::sync_warp
template <class T> T __shfl_xor_sync(unsigned, T v, int step) { return emu::exchange(v, emu::cur->tid % 32 ^ step); }
template <class T> T __shfl_up_sync(unsigned, T v, unsigned step) { unsigned l = emu::cur->tid % 32; return emu::exchange(v, l >= step ? l - step : l); }
template <class T> T __shfl_sync(unsigned, T v, int from) { return emu::exchange(v, from % 32); }
inline unsigned __ballot_sync(unsigned, bool f) { emu::Warp* w = emu::cur->warp; unsigned l = emu::cur->tid % 32; w->slot[l] = f; emu::sync_warp(); unsigned r = 0; for (int i = 0; i < 32; i++) r |= (unsigned)(w->slot[i] & 1) << i; emu::sync_warp(); return r; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned from) { unsigned long long both = (unsigned long long)b << 32 | a; unsigned r = 0; for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (from >> 4 * i & 7) & 255) << 8 * i; return r; }
inline bool __any_sync(unsigned m, bool f) { return __ballot_sync(m, f) != 0; }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); } inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
template <class T> T __ldcg(const T* p) { return *(const volatile T*)p; }
inline float2 __ldcg(const float2* p) { return *p; } inline uint2 __ldcg(const uint2* p) { return *p; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); } inline float __fmul_rn(float a, float b) { return a * b; } inline float __fadd_rn(float a, float b) { return a + b; } inline float __fdiv_rn(float a, float b) { return a / b; } inline float __fsqrt_rn(float a) { return sqrtf(a); } inline double __dmul_rn(double a, double b) { return a * b; } inline double __ddiv_rn(double a, double b) { return a / b; }
inline int __float2int_rn(float x) { return (int)rintf(x); } inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; } inline int __ffs(unsigned x) { return __builtin_ffs(x); } inline int __popc(unsigned x) { return __builtin_popcount(x); } inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; } inline float __int_as_float(int x) { return __uint_as_float(x); } inline unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
template <class A, class B> auto min(A a, B b) { using T = std::common_type_t<A, B>; return (T)a < (T)b ? (T)a : (T)b; } template <class A, class B> auto max(A a, B b) { using T = std::common_type_t<A, B>; return (T)a > (T)b ? (T)a : (T)b; }
typedef unsigned char u8; typedef signed char i8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define DEVICE static inline
#define UNROLL
#define INFINITE __int_as_float(0x7f800000)
DEVICE float bf16_to_float(u32 b) { return __uint_as_float(b << 16); }
DEVICE float f16_to_float(u32 b) { u16 s = b; _Float16 h; memcpy(&h, &s, 2); return (float)h; }
DEVICE u32 bf16_of(float x) { u32 b = __float_as_uint(x); if (x != x) return 0x7fff; return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
DEVICE u32 f16_of(float x) { _Float16 h = (_Float16)x; u16 s; memcpy(&s, &h, 2); return s; }
DEVICE u32 bf16x2(float l, float h) { return bf16_of(l) | bf16_of(h) << 16; } DEVICE u32 f16x2(float l, float h) { return f16_of(l) | f16_of(h) << 16; }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE void f16_of_bytes(u32 b, u32& low, u32& high) { low = f16x2((i8)b, (i8)(b >> 8)), high = f16x2((i8)(b >> 16), (i8)(b >> 24)); }
template <class F> void emu_mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, F value) {
    emu::Warp* w = emu::cur->warp; u32 l = emu::cur->tid % 32; for (int i = 0; i < 4; i++) w->regs[l][i] = a[i]; w->regs[l][4] = b0, w->regs[l][5] = b1; emu::sync_warp();
    u32 g = l / 4, t = l % 4; float out[4]; for (int e = 0; e < 4; e++) { u32 row = e / 2, col = t * 2 + e % 2; float s = c[e]; for (u32 k = 0; k < 4; k++) for (int half = 0; half < 2; half++) for (int e2 = 0; e2 < 2; e2++) { u32 A = w->regs[g * 4 + k][row + half * 2] >> e2 * 16 & 0xffff, B = w->regs[col * 4 + k][4 + half] >> e2 * 16 & 0xffff; s += value(A) * value(B); } out[e] = s; }
    emu::sync_warp(); for (int e = 0; e < 4; e++) c[e] = out[e];
}
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emu_mma(c, a, b0, b1, bf16_to_float); }
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emu_mma(c, a, b0, b1, f16_to_float); }
DEVICE void mma_s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emu::Warp* w = emu::cur->warp; u32 l = emu::cur->tid % 32; for (int i = 0; i < 4; i++) w->regs[l][i] = a[i]; w->regs[l][4] = b0, w->regs[l][5] = b1; emu::sync_warp();
    u32 g = l / 4, t = l % 4; int out[4]; for (int e = 0; e < 4; e++) { u32 row = e / 2, col = t * 2 + e % 2; int s = c[e]; for (u32 k = 0; k < 4; k++) for (int half = 0; half < 2; half++) for (int b = 0; b < 4; b++) s += (i8)(w->regs[g * 4 + k][row + half * 2] >> b * 8) * (i8)(w->regs[col * 4 + k][4 + half] >> b * 8); out[e] = s; }
    emu::sync_warp(); for (int e = 0; e < 4; e++) c[e] = out[e];
}
DEVICE void emu_ldmatrix(uint4& b, const void* row, bool turned) { emu::Warp* w = emu::cur->warp; u32 l = emu::cur->tid % 32; w->ptr[l] = row; emu::sync_warp(); u32 g = l / 4, t = l % 4, r[4]; for (int m = 0; m < 4; m++) { u16 x, y; memcpy(&x, (const char*)w->ptr[m * 8 + (turned ? 2 * t : g)] + (turned ? g : 2 * t) * 2, 2); memcpy(&y, (const char*)w->ptr[m * 8 + (turned ? 2 * t + 1 : g)] + (turned ? g : 2 * t + 1) * 2, 2); r[m] = x | (u32)y << 16; } emu::sync_warp(); b = uint4{r[0], r[1], r[2], r[3]}; }
DEVICE void emu_ldmatrix(uint4& b, u32 row, bool turned) { emu_ldmatrix(b, (const void*)(emu::dynamic_base + row), turned); }
DEVICE void allow_next() {} DEVICE void wait_for_previous() {} DEVICE void begin() {}
DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - emu::dynamic_base); }
DEVICE void copy_async(u32 s, const void* g, u32 n) { memset(emu::dynamic_base + s, 0, 16); memcpy(emu::dynamic_base + s, g, n); } DEVICE void copy_commit() {} template <int N> void copy_wait() {}
#ifndef HAS_BULK
#define HAS_BULK 1
#endif
DEVICE void barrier_init(u32) {} DEVICE void barrier_expect(u32, u32) {} DEVICE void barrier_wait(u32, u32) {} DEVICE bool barrier_test(u32, u32) { return true; } inline void __nanosleep(unsigned) {} DEVICE void bulk_copy(u32 s, const void* g, u32 n, u32) { memcpy(emu::dynamic_base + s, g, n); } DEVICE void bulk_fence() {} DEVICE void bulk_fence_all() {} DEVICE void bulk_prefetch(const void*, u32) {}
DEVICE void store_zeros(u32 s) { memset(emu::dynamic_base + s, 0, 16); }
DEVICE float warp_sum(float x) { for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(~0u, x, s); return x; } DEVICE float warp_max(float x) { for (int s = 16; s > 0; s /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, s)); return x; }

// Turns a matrix of eight rows: lane 4 g + t has elements 2t and 2t + 1 of row g.
DEVICE u32 emu_turn(u32 two) {
    const u32 l = emu::cur->tid % 32, g = l / 4, t = l % 4;
    const u32 first = emu::exchange(two, 8 * t + g / 2), second = emu::exchange(two, 8 * t + 4 + g / 2);
    return (first >> g % 2 * 16 & 0xFFFF) | (second >> g % 2 * 16) << 16;
}
