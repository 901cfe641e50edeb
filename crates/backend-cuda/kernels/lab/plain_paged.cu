// A plain paged decode attention in the manner of vLLM's XFormers backend (paged_attention_v1 and v2),
// and the same with the next pages brought to the second-level cache while one is computed (Dong et
// al., "Accelerating LLM Inference Throughput via Asynchronous KV Cache Prefetching"). The baseline of
// that paper; the engine does not use it.
//
//     nvcc -O3 -arch=sm_90a plain_paged.cu -o plain_paged && ./plain_paged
//
// As there: one block of four warps for each (query head, sequence, part), pages of 16 tokens, two
// lanes to a key, K [page][head][D / 8][16][8], V [page][head][D][16], scores of all keys of the part
// in shared memory. So a page of a KV head is read once for each query head that shares it.

#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                            \
    do {                                                                                       \
        cudaError_t error = (call);                                                            \
        if (error != cudaSuccess) {                                                            \
            printf("%s: %s\n", #call, cudaGetErrorString(error));                              \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

constexpr int D = 128, PAGE = 16, WARPS = 4, THREADS = 32 * WARPS;
constexpr int PAGE_BYTES = PAGE * D * 2;  // of K, and of V

struct Params {
    const half* q;     // [sequence][head][D]
    const half* keys;  // [page][kv head][D / 8][PAGE][8]
    const half* values;
    const int* tables;  // [sequence][pages]
    float* out;         // [part][sequence][head][D], not normalised
    float* totals;      // [part][sequence][head][2]
    int n_pages, n_keys, n_kv_heads, group, part_pages;
};

__device__ void prefetch(const void* address, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

__device__ float block_reduce(float x, float* shared, bool is_max) {
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, x, step);
        x = is_max ? fmaxf(x, other) : x + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
    for (int i = 1; i < WARPS; i++) x = is_max ? fmaxf(x, shared[i]) : x + shared[i];
    return x;
}

template <bool IS_PREFETCHED>
__global__ void __launch_bounds__(THREADS) plain(Params p) {
    extern __shared__ float scores[];
    __shared__ float reduced[WARPS];
    __shared__ float sums[WARPS][D];
    const int head = blockIdx.x, seq = blockIdx.y, part = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv_head = head / p.group, n_heads = p.n_kv_heads * p.group;
    const int first = part * p.part_pages, end = min(first + p.part_pages, p.n_pages);
    const int* table = p.tables + seq * p.n_pages;
    auto page_at = [&](const half* base, int page) {
        return base + ((size_t)table[page] * p.n_kv_heads + kv_head) * PAGE * D;
    };
    // Two lanes share a key: each has every second piece of eight columns.
    const int key = lane / 2, side = lane % 2;
    half2 q[D / 16][4];
    for (int i = 0; i < D / 16; i++) {
        const half* source = p.q + ((size_t)seq * n_heads + head) * D + (2 * i + side) * 8;
        *(uint4*)q[i] = *(const uint4*)source;
    }
    float largest = -INFINITY;
    for (int page = first + warp; page < end; page += WARPS) {
        if (IS_PREFETCHED && lane == 0 && page + WARPS < end)
            prefetch(page_at(p.keys, page + WARPS), PAGE_BYTES);
        const half* keys = page_at(p.keys, page);
        float sum = 0.0f;
        for (int i = 0; i < D / 16; i++) {
            const uint4 bits = *(const uint4*)(keys + ((2 * i + side) * PAGE + key) * 8);
            const half2* k = (const half2*)&bits;
            for (int j = 0; j < 4; j++) {
                const float2 a = __half22float2(q[i][j]), b = __half22float2(k[j]);
                sum += a.x * b.x + a.y * b.y;
            }
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        const bool is_seen = page * PAGE + key < p.n_keys;
        sum = is_seen ? sum * 0.08838834764f : -INFINITY;
        if (side == 0) scores[(page - first) * PAGE + key] = sum;
        largest = fmaxf(largest, sum);
    }
    // Values of the first pages come while scores are weighed.
    if (IS_PREFETCHED && lane == 0 && first + warp < end)
        prefetch(page_at(p.values, first + warp), PAGE_BYTES);
    largest = block_reduce(largest, reduced, true);
    float total = 0.0f;
    for (int i = threadIdx.x; i < (end - first) * PAGE; i += THREADS) {
        scores[i] = __expf(scores[i] - largest);
        total += scores[i];
    }
    total = block_reduce(total, reduced, false);
    // Two lanes share a column's page: each has eight tokens of it.
    float o[D / 16];
    for (int i = 0; i < D / 16; i++) o[i] = 0.0f;
    for (int page = first + warp; page < end; page += WARPS) {
        if (IS_PREFETCHED && lane == 0 && page + WARPS < end)
            prefetch(page_at(p.values, page + WARPS), PAGE_BYTES);
        const half* values = page_at(p.values, page);
        const float* weights = scores + (page - first) * PAGE + side * 8;
        for (int i = 0; i < D / 16; i++) {
            const uint4 bits = *(const uint4*)(values + (i * 16 + key) * PAGE + side * 8);
            const half2* v = (const half2*)&bits;
            for (int j = 0; j < 4; j++) {
                const float2 b = __half22float2(v[j]);
                o[i] += weights[2 * j] * b.x + weights[2 * j + 1] * b.y;
            }
        }
    }
    for (int i = 0; i < D / 16; i++) {
        o[i] += __shfl_xor_sync(~0u, o[i], 1);
        if (side == 0) sums[warp][i * 16 + key] = o[i];
    }
    __syncthreads();
    const size_t at = ((size_t)part * gridDim.y + seq) * n_heads + head;
    float sum = 0.0f;
    for (int i = 0; i < WARPS; i++) sum += sums[i][threadIdx.x];
    p.out[at * D + threadIdx.x] = sum;
    if (threadIdx.x == 0) p.totals[at * 2] = largest, p.totals[at * 2 + 1] = total;
}

__global__ void fill(half* x, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned z = (unsigned)i * 2654435761u + seed;
        z = (z ^ z >> 15) * 2246822519u;
        x[i] = __float2half(((z >> 8) / 8388608.0f - 1.0f));
    }
}

template <bool IS_PREFETCHED>
float time(const Params& p, dim3 grid, int rounds) {
    const int shared = p.part_pages * PAGE * 4;
    CHECK(cudaFuncSetAttribute(plain<IS_PREFETCHED>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    std::vector<float> times;
    for (int i = 0; i < rounds + 2; i++) {
        CHECK(cudaEventRecord(a));
        plain<IS_PREFETCHED><<<grid, THREADS, shared>>>(p);
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i >= 2) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e3f;
}

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 20;
    const int shapes[][4] = {{32, 1, 8, 4096}, {32, 1, 32, 2048}, {32, 1, 1, 32768}, {8, 4, 8, 8192}, {8, 4, 1, 32768}};
    for (const auto& [n_kv_heads, group, n_seqs, n_keys] : shapes) {
        Params p{};
        p.n_pages = n_keys / PAGE, p.n_keys = n_keys, p.n_kv_heads = n_kv_heads, p.group = group;
        // Version 1 takes a sequence whole if that fills the device, version 2 in parts of 512.
        p.part_pages = n_seqs * n_kv_heads * group >= 1024 ? p.n_pages : 512 / PAGE;
        const int parts = (p.n_pages + p.part_pages - 1) / p.part_pages, n_heads = n_kv_heads * group;
        const size_t n = (size_t)n_seqs * p.n_pages * n_kv_heads * PAGE * D;
        half *q, *keys, *values;
        float *out, *totals;
        int* tables;
        CHECK(cudaMalloc(&q, n_seqs * n_heads * D * 2));
        CHECK(cudaMalloc(&keys, n * 2));
        CHECK(cudaMalloc(&values, n * 2));
        CHECK(cudaMalloc(&out, (size_t)parts * n_seqs * n_heads * D * 4));
        CHECK(cudaMalloc(&totals, (size_t)parts * n_seqs * n_heads * 8));
        CHECK(cudaMalloc(&tables, n_seqs * p.n_pages * 4));
        std::vector<int> slots(n_seqs * p.n_pages);
        for (size_t i = 0; i < slots.size(); i++) slots[i] = (int)(i * 7919 % slots.size());
        CHECK(cudaMemcpy(tables, slots.data(), slots.size() * 4, cudaMemcpyHostToDevice));
        fill<<<1024, 256>>>(q, n_seqs * n_heads * D, 1);
        fill<<<1024, 256>>>(keys, n, 2);
        fill<<<1024, 256>>>(values, n, 3);
        p.q = q, p.keys = keys, p.values = values, p.tables = tables, p.out = out, p.totals = totals;
        const dim3 grid(n_heads, n_seqs, parts);
        const float off = time<false>(p, grid, rounds), on = time<true>(p, grid, rounds);
        const double bytes = 4.0 * n;
        printf("%d:%d heads, %d x %d: plain %.1f us (%.0f GB/s), prefetched %.1f us (%.0f GB/s), gain %.2f\n",
               n_heads, n_kv_heads, n_seqs, n_keys, off, bytes / off / 1e3, on, bytes / on / 1e3, off / on);
        for (void* x : {(void*)q, (void*)keys, (void*)values, (void*)out, (void*)totals, (void*)tables}) CHECK(cudaFree(x));
    }
    return 0;
}
