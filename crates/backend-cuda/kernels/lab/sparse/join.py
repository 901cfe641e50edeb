"""Joins the kernels of top-k attention into one file, for `lab.cu` on a GPU and for `emu.h` without one.

    python3 join.py && nvcc -std=c++20 -O2 -gencode=arch=compute_90a,code=sm_90a lab.cu -o lab
    ./lab check        decisions, rows and attention against plain C++ (`check 5000 host`: at most so
                       many tokens, pages on the host)
    ./lab              times of each kernel at 32K and 128K tokens, pages on the device and on the host
    ./lab gather       rows over the link against the copy engine, and beside reads of weights

    python3 join.py && g++ -std=c++20 -O2 -ffp-contract=off -w -pthread lab_emu.cpp -o lab_emu
    ./lab_emu 5000 0 9   tokens, first case, steps: the same checks with a fiber for each thread
"""
import re
from pathlib import Path

K = str(Path(__file__).resolve().parents[2]) + '/'
c={'COMPACT':1,'KV':'KV_F16','HEAD_DIM':128,'HEAD_PAGE_BYTES':8192,'PARTS':1,'SMALL_CHUNK':64,'MIDDLE_CHUNK':128,'LARGE_CHUNK':256,'ROWS':1,'MAX_GROUP':16,'N_FOLLOWERS':7,'GATHER_THREADS':96,'GATHER_RING_BYTES':7680,'RING_BYTES':2048,'MAX_WIDTH':1024,'ATTEND_PARAMS_SIZE':'sizeof(AttendParams)','SET_UNIT':64,'ATTEND_WARPS':8,'ATTEND_SHARED':8*(2*8192+2048+128)}
for n,t in [('SPARSE_ROW','SparseRow'),('HEAD_STATE','HeadState'),('DIGEST_PARAMS','DigestParams'),('READ_KEYS_PARAMS','ReadKeysParams'),('SCORE_PARAMS','ScoreParams'),('QUESTION','Question'),('ASKED_PARAMS','AskedParams'),('TALLY','Tally'),('DECIDE_PARAMS','DecideParams'),('GATHER_ROWS_PARAMS','GatherRowsParams'),('POST_PARAMS','PostParams'),('SPARSE_PARAMS','SparseParams')]: c[n+'_SIZE']=f'sizeof({t})'
c['SPARSE_ENTRIES']='SPARSE(sparse_attend_8, 1, false, 2, ATTEND_WARPS, ATTEND_SHARED, 640)'
files=['prelude.cuh','kv.cuh','attend.cuh','codes.cuh','sparse.cuh','sparse_set.cuh','sparse_digest.cu','sparse_score.cuh','sparse_piece.cuh','sparse_score.cu','sparse_look.cuh','sparse_share.cuh','sparse_settle.cuh','sparse_move.cuh','sparse_decide.cu','sparse_gather.cu','sparse_post.cu','sparse_page.cuh','sparse_attend.cu']
s=''.join(f'#define {k} {v}\n' for k,v in c.items())+''.join(open(K+f).read() for f in files)
open('all.cuh','w').write(s)

# Without a GPU.
i=s.index('// Shared device code'); j=s.index('// How keys and values lie in a page')
s=s[:i]+s[j:]
s=s.replace('extern __shared__ __align__(128) u32 shared_words[];','u32* shared_words = (u32*)emu::dynamic_base;').replace('extern __shared__ __align__(128) u8 shared[];','u8* shared = emu::dynamic_base;')
s=re.sub(r'asm volatile\("ld\.acquire.*?"=r"\((\w+)\).*?"l"\((.*?)\)\s*: "memory"\);',r'\1 = __atomic_load_n(\2, __ATOMIC_ACQUIRE); sched_yield();',s,flags=re.S)
s=re.sub(r'asm\("movmatrix.*?\);','out = emu_turn(two);',s)
s=re.sub(r'asm volatile\("ldmatrix[^"]*trans.*?: "memory"\);','emu_ldmatrix(b, row, true);',s,flags=re.S)
s=re.sub(r'asm volatile\("ldmatrix.*?: "memory"\);','emu_ldmatrix(b, row, false);',s,flags=re.S)
s=re.sub(r'copy_word_async\(shared_address\((.*?)\), (.*?)\);',r'*(\1) = *(\2);',s)
s=s.replace('_Pragma("unroll")','')
s=re.sub(r'asm\("(?:sub|mul|fma|cvt)\..*?\);','',s,flags=re.S)  # of codes, which are not compiled here
assert 'asm' not in s.replace('assembl',''), re.findall('.*asm.*',s)
open('all_emu.h','w').write('#include "emu.h"\n'+s)
l=open('lab.cu').read()
i=l.index('static const u32 G'); l=l[i:]
l=re.sub(r'__global__ void fill.*?\n}\n','',l,flags=re.S,count=1)
l=re.sub(r'__global__ void spin_read.*?\n','',l,count=1)
l=re.sub(r'template <class P> void launch\(.*?\n}\n','template <class P> void launch(void (*k)(P), dim3 grid, int threads, size_t shared, P p, int) { emu::launch(k, grid, threads, shared, p, (void*)k == (void*)decide); }\n',l,flags=re.S,count=1)
l=l.replace('fill<<<1024, 256>>>((Element*)arena, (size_t)G * head_bytes / 2, 7, 1.0f);','{ std::mt19937 fr(7); std::normal_distribution<float> fd; for (size_t i = 0; i < (size_t)G * head_bytes / 2; i++) ((Element*)arena)[i] = (u16)f16_of(fd(fr)); }')
i=l.index('static void gather_sweep'); l=l[:i]
l=re.sub(r'    float time\(const char.*?\n','',l)
l=l.replace('__half2float(__float2half(q[(h * GROUP + g) * W + e]))','f16_to_float(f16_of(q[(h * GROUP + g) * W + e]))').replace('__half x; memcpy(&x, &b, 2); return __half2float(x);','return f16_to_float(b);')
l=l.replace('cudaEvent_t e0, e1; CHECK(cudaEventCreate(&e0)); CHECK(cudaEventCreate(&e1)); CHECK(cudaEventRecord(e0, s));','').replace('CHECK(cudaEventRecord(e1, s)); CHECK(cudaStreamSynchronize(s)); float ms; CHECK(cudaEventElapsedTime(&ms, e0, e1));','').replace('printf("  digests of %u tokens x %u heads: %.2f ms\\n", slots * 16, G, ms);','')
l=l.replace('gather_blocks = host ? 8 : 132; bringing = host ? 8 : ~0u;','gather_blocks = 3; bringing = 3;').replace('dim3(132), 32 * ATTEND_WARPS','dim3(2), 32 * ATTEND_WARPS')
shim='''
#define CHECK(x) x
typedef int cudaStream_t; enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault, cudaFuncAttributeMaxDynamicSharedMemorySize };
inline void cudaStreamCreate(int*) {} inline void cudaStreamSynchronize(int) {} inline void cudaDeviceSynchronize() {}
template <class T> void cudaMalloc(T** p, size_t n) { *p = (T*)aligned_alloc(256, (n + 255) / 256 * 256); } inline void cudaMemset(void* p, int v, size_t n) { memset(p, v, n); }
inline void cudaMemcpy(void* a, const void* b, size_t n, int) { memcpy(a, b, n); } inline void cudaMemcpyAsync(void* a, const void* b, size_t n, int, int) { memcpy(a, b, n); }
template <class F> void cudaFuncSetAttribute(F, int, int) {}
'''
main='''
int main(int argc, char** argv) {
    setvbuf(stdout, 0, _IOLBF, 0); u64 bytes = (u64)G * (8192 / 16) * HEAD_PAGE_BYTES; u8* arena = dev<u8>(bytes);
    struct { const char* name; u32 kind, width; Rules r; } cases[] = {
        {"loki:32 3% x3 qsac", SCORE_CHANNELS, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES}}, {"hata:128 10% qsac", SCORE_SIGNS, 128, {10.0, 64, ~0u, 16, 64, 1.0f, 0.85f, FLAG_REUSES}},
        {"loki:16 5% x1.5 always", SCORE_CHANNELS, 16, {5.0, 256, 300, 16, 64, 1.5f, 0.85f, 0}}, {"hata:256 10% whole", SCORE_SIGNS, 256, {10.0, 64, ~0u, 4, 1, 1.0f, 0.85f, FLAG_REUSES | FLAG_WHOLE}},
        {"loki:32 bits=4 3% x3 qsac", SCORE_NIBBLES, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES}}, {"loki:32 3% x3 soft", SCORE_CHANNELS, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES, 0.3f, 1}}, {"loki:32 3% x3 late", SCORE_CHANNELS, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES, -1.0f, 2}}, {"hata:128 whole late", SCORE_SIGNS, 128, {10.0, 64, ~0u, 16, 64, 1.0f, 0.85f, FLAG_REUSES | FLAG_WHOLE, -1.0f, 2}}};
    u32 n = argc > 1 ? atoi(argv[1]) : 700; int from = argc > 2 ? atoi(argv[2]) : 0, steps = argc > 3 ? atoi(argv[3]) : 8; bool all_ok = true;
    for (int ci = from; ci < 8; ci++) for (int nb : {1, -3}) { auto& c = cases[ci]; Lab l; l.apart = nb < 0, l.few_tasks = ci % 2; nb = abs(nb); l.init(n, c.kind, c.width, c.r, false, arena); l.blocks = l.apart ? std::min<u32>(nb, l.stride / PIECE) : nb; if (nb > 1) l.bringing = ci % 2 ? ~0u : 0; bool ok = true; for (int i = 0; i < steps && ok; i++) { ok = l.step(n + i, i % 3 ? 40 : 0, i % 5 ? 0.7f : 0.1f, i + 2 >= steps); if (!ok) printf("FAILED at step %d\\n", i); } printf("%s %s n %u, %d blocks: hits %u and late %u of 8, moved %u\\n", ok ? "ok" : "FAILED", c.name, n, l.blocks, l.n_hits, l.n_late, l.n_moved); all_ok &= ok; }
    return !all_ok;
}
'''
open('lab_emu.cpp','w').write('#include "all_emu.h"\n'+shim+l+main)
