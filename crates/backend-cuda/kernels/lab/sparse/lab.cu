// Judges and times the kernels of top-k attention by themselves: decisions against plain C++, rows and
// attention against the arena, and the time of each kernel and of all three together.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>
#include "all.cuh"
#define CHECK(call) do { cudaError_t e_ = (call); if (e_ != cudaSuccess) { printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); exit(1); } } while (0)

static const u32 G = 8, GROUP = 4, H = 32, W = 128;
struct Rules { double percent; u32 k_min, k_max, sinks, recent; float ws; float threshold; u32 flags; float soft = INFINITY; int late = 0; };

__global__ void fill(Element* x, size_t n, unsigned seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned z = (unsigned)(i * 2654435761u) ^ (unsigned)(i >> 32) ^ seed; z ^= z >> 16; z *= 2246822519u; z ^= z >> 13; z *= 3266489917u; z ^= z >> 16;
        float a = 0; for (int j = 0; j < 4; j++) { a += ((z >> 8) / 8388608.0f - 1.0f); z = z * 1664525u + 1013904223u; }
        x[i] = (u16)f16_of(a * scale);
    }
}
__global__ void spin_read(const uint4* x, size_t n, uint4* out) { uint4 s = {0,0,0,0}; for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) { uint4 v = __ldg(x + i); s.x ^= v.x; s.y ^= v.y; s.z ^= v.z; s.w ^= v.w; } if (s.x == 0x12345 && s.y == 77) *out = s; }

template <class T> T* dev(size_t n, bool zero = true) { T* p; CHECK(cudaMalloc(&p, std::max<size_t>(n * sizeof(T), 16))); if (zero) CHECK(cudaMemset(p, 0, std::max<size_t>(n * sizeof(T), 16))); return p; }
template <class T> std::vector<T> get(const T* p, size_t n) { std::vector<T> v(n); CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost)); return v; }
template <class P> void launch(void (*k)(P), dim3 grid, int threads, size_t shared, P p, cudaStream_t s) {
    cudaLaunchConfig_t c = {}; c.gridDim = grid; c.blockDim = threads; c.dynamicSmemBytes = shared; c.stream = s;
    cudaLaunchAttribute a; a.id = cudaLaunchAttributeProgrammaticStreamSerialization; a.val.programmaticStreamSerializationAllowed = 1;
    c.attrs = &a; c.numAttrs = 1; CHECK(cudaLaunchKernelEx(&c, k, p));
}
static float lane_sum(const float* x) { float s[32]; memcpy(s, x, 128); for (int h = 16; h; h /= 2) for (int i = 0; i < h; i++) s[i] = s[i] + s[i + h]; return s[0]; }

struct Lab {
    u32 n, kind, width, page_bytes, stride; Rules r; bool host; cudaStream_t s;
    u8 *arena, *digests; float *frame, *mean, *qkv, *labels, *asked, *importances, *out, *partials, *sums, *raw; u16* rounded; u32 *tables, *scores, *tasks, *done;
    float2* ssums; SparseRow* rows; HeadState* states; uint2 *marks, *moves; u8* pages; Tally* tallies; HeadRule* rules; Question* asks;
    u32 slots, ws_pages; u64 head_bytes, dhead; size_t shared; std::vector<u32> table;
    std::vector<std::vector<u32>> used; std::vector<u32> now; std::vector<std::vector<float>> label; std::vector<u32> cut;  // reference
    std::vector<float> q; std::mt19937 rng{5};
    ScoreParams sp; DecideParams dp; GatherRowsParams gp; SparseParams ap; int blocks, gather_blocks; u32 bringing;

    void init(u32 n_, u32 kind_, u32 width_, Rules r_, bool host_, u8* shared_arena) {
        n = n_, kind = kind_, width = width_, r = r_, host = host_; CHECK(cudaStreamCreate(&s));
        stride = (n + 512 + PIECE - 1) / PIECE * PIECE; slots = stride / 16; head_bytes = (u64)slots * HEAD_PAGE_BYTES;
        page_bytes = kind == SCORE_SIGNS ? 16 * width / 8 : kind == SCORE_NIBBLES ? 16 * (width / 2 + 2) : 16 * (width + 2); dhead = (u64)slots * page_bytes;
        arena = shared_arena; fill<<<1024, 256>>>((Element*)arena, (size_t)G * head_bytes / 2, 7, 1.0f); CHECK(cudaDeviceSynchronize());
        digests = dev<u8>(G * dhead); std::vector<float> f(W * width); std::normal_distribution<float> nd; for (auto& x : f) x = nd(rng) * 0.09f;
        frame = dev<float>(f.size()); CHECK(cudaMemcpy(frame, f.data(), f.size() * 4, cudaMemcpyHostToDevice)); mean = dev<float>(G * W);
        table.resize(slots); for (u32 i = 0; i < slots; i++) table[i] = (u32)((u64)i * 7919 % slots);
        tables = dev<u32>(slots); CHECK(cudaMemcpy(tables, table.data(), slots * 4, cudaMemcpyHostToDevice));
        DigestParams d = {}; d.arena = arena, d.digests = digests, d.frame = frame, d.mean = mean, d.head_bytes = head_bytes, d.digest_head_bytes = dhead, d.frame_stride = 0, d.rows = slots * 16, d.kind = kind, d.width = width, d.page_bytes = page_bytes;
        u32* all = dev<u32>(slots); std::vector<u32> ids(slots); for (u32 i = 0; i < slots; i++) ids[i] = i; CHECK(cudaMemcpy(all, ids.data(), slots * 4, cudaMemcpyHostToDevice)); d.slots = all;
        cudaEvent_t e0, e1; CHECK(cudaEventCreate(&e0)); CHECK(cudaEventCreate(&e1)); CHECK(cudaEventRecord(e0, s));
        launch(digest_keys, dim3(slots * 16 / 8, G), 128, 0, d, s); CHECK(cudaEventRecord(e1, s)); CHECK(cudaStreamSynchronize(s)); float ms; CHECK(cudaEventElapsedTime(&ms, e0, e1));
        printf("  digests of %u tokens x %u heads: %.2f ms\n", slots * 16, G, ms);
        qkv = dev<float>((H + 2 * G) * W); labels = dev<float>(H * W); asked = dev<float>(H * W); std::vector<float> im(H, 0.5f); for (u32 i = 0; i < H; i++) im[i] = 0.2f + 0.1f * (i % 5); importances = dev<float>(H); CHECK(cudaMemcpy(importances, im.data(), H * 4, cudaMemcpyHostToDevice));
        out = dev<float>(H * W); rounded = dev<u16>(H * W); u32 ntask = G * (slots / 4 + 4); partials = dev<float>((size_t)ntask * GROUP * W); sums = dev<float>(ntask * GROUP * 2); tasks = dev<u32>(G + 1), done = dev<u32>(1); CHECK(cudaMemset(done, 0, 4));
        raw = dev<float>((size_t)G * GROUP * stride); scores = dev<u32>((size_t)G * stride); ssums = dev<float2>(G * (stride / PIECE) * GROUP);
        marks = dev<uint2>((size_t)G * stride); moves = dev<uint2>((size_t)G * stride); tallies = dev<Tally>(G);
        ws_pages = (u32)(ceil(std::max(r.percent * 1.4 * stride / 100.0, (double)r.k_min) * r.ws) / 16) + 2; pages = dev<u8>((u64)G * ws_pages * HEAD_PAGE_BYTES);
        std::vector<HeadState> st(G); memset(st.data(), 0, G * sizeof(HeadState)); for (u32 h = 0; h < G; h++) st[h].first = h * ws_pages * (HEAD_PAGE_BYTES / SET_UNIT), st[h].n_pages = ws_pages; states = dev<HeadState>(G); CHECK(cudaMemcpy(states, st.data(), G * sizeof(HeadState), cudaMemcpyHostToDevice));
        std::vector<HeadRule> hr(G, HeadRule{r.threshold, 1.0f, r.soft, 0}); for (u32 h = 0; h < G; h++) hr[h].weight = 0.6f + 0.1f * h; rules = dev<HeadRule>(G); CHECK(cudaMemcpy(rules, hr.data(), G * sizeof(HeadRule), cudaMemcpyHostToDevice)); for (u32 h = 0; h < G; h++) weights.push_back(hr[h].weight);
        ws_pages = ws_pages; rows = dev<SparseRow>(1); asks = dev<Question>(G);
        sp = {}; sp.qkv = qkv, sp.digests = digests, sp.frame = frame, sp.raw = raw, sp.scores = scores, sp.sums = ssums, sp.digest_head_bytes = dhead, sp.frame_stride = 0; sp.pages = SparsePages{arena, tables, head_bytes, Near{}, slots, 0}; sp.stride = stride, sp.q_stride = (H + 2 * G) * W, sp.group = GROUP, sp.kind = kind, sp.width = width, sp.page_bytes = page_bytes, sp.scale = 1.0f / sqrtf(128.0f);
        shared = 4 * (GROUP * PIECE + (kind == SCORE_SIGNS ? GROUP * width / 32 : kind == SCORE_NIBBLES ? (GROUP + 7) / 8 * ((width + 31) / 32 * 64 + 16) : (GROUP + 7) / 8 * ((width + 15) / 16 * 128 + 8)) + PIECE_PAGES);
        dp = {}; dp.score = sp; dp.heads = SparseHeads{rows, states, G, 1, G, GROUP}; dp.labels = labels, dp.rules = rules, dp.importances = importances, dp.tallies = tallies, dp.moves = moves, dp.percent = r.percent, dp.mark_stride = stride, dp.k_min = r.k_min, dp.k_max = r.k_max, dp.sinks = r.sinks, dp.recent = r.recent, dp.working_set = r.ws, dp.max_age = ~0u, dp.flags = r.flags;
        gp = {}; gp.heads = dp.heads, gp.pages = sp.pages, gp.moves = moves, gp.mark_stride = stride, gp.stride = stride;
        ap = {}; ap.heads = dp.heads, ap.pages = sp.pages, ap.qkv = qkv, ap.out = out, ap.rounded = rounded, ap.partials = partials, ap.sums = sums, ap.tasks = tasks, ap.asked = r.late ? asked : nullptr, ap.q_stride = sp.q_stride, ap.scale = sp.scale * 1.4426950408889634f, ap.row_tasks = few_tasks ? 3 : 132 * ATTEND_WARPS - G;
        blocks = 16; gather_blocks = host ? 8 : 132; bringing = host ? 8 : ~0u;
        CHECK(cudaFuncSetAttribute(decide, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024)); CHECK(cudaFuncSetAttribute(score_pieces, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024)); CHECK(cudaFuncSetAttribute(sparse_attend_8, cudaFuncAttributeMaxDynamicSharedMemorySize, ATTEND_SHARED));
        used.assign(G, std::vector<u32>(stride, 0)); now.assign(G, 0); label.resize(G); cut.assign(G, 0); members.resize(G); q.resize(H * W); std::normal_distribution<float> nq; for (auto& x : q) x = nq(rng);
    }
    std::vector<float> weights; std::vector<std::vector<u32>> members;
    void turn(int percent, float turned) { std::normal_distribution<float> nd; for (u32 h = 0; h < G; h++) { float c = (int)(rng() % 100) < percent ? turned : 0.995f, sn = sqrtf(1 - c * c); for (u32 i = 0; i < GROUP * W; i++) q[h * GROUP * W + i] = c * q[h * GROUP * W + i] + sn * nd(rng); } CHECK(cudaMemcpyAsync(qkv, q.data(), q.size() * 4, cudaMemcpyHostToDevice, s)); }
    void put_row(u32 len) { SparseRow row = {0, len, 0, 0, marks, pages}; CHECK(cudaMemcpyAsync(rows, &row, sizeof row, cudaMemcpyHostToDevice, s)); CHECK(cudaStreamSynchronize(s)); }
    void k_decide(u32 more = 0) { dp.done = more || apart ? nullptr : done; dp.n_bringing = more ? 0 : bringing; dp.flags = r.flags | more | (apart ? 0 : FLAG_TOGETHER); dp.score.qkv = more ? asked : qkv, dp.score.q_stride = more ? H * W : sp.q_stride; launch(decide, apart ? dim3(blocks, G) : dim3(std::min<u32>(blocks * G, G * (stride / PIECE))), SCORE_THREADS, shared, dp, s); }
    bool apart = false, few_tasks = false;
    void k_gather() { launch(sparse_gather, dim3(gather_blocks), GATHER_THREADS, GATHER_THREADS / 32 * GATHER_RING_BYTES + 4 * (G + 1), gp, s); }
    void k_attend() { ap.done = apart ? nullptr : done, ap.is_early = 1; launch(sparse_attend_8, dim3(132), 32 * ATTEND_WARPS, ATTEND_SHARED, ap, s); }
    void k_merge() { launch(sparse_merge, dim3(1, H), MERGE_THREADS, 0, ap, s); }
    // One step, checked.
    bool step(u32 len, int percent, float turned, bool deep) {
        turn(percent, turned); put_row(len);
        u32 c = std::max(len > r.recent ? len - r.recent : 0, std::min(r.sinks, len));
        std::vector<Question> ask; for (u32 h = 0; h < G; h++) ask.push_back(Question{h, 0, 0, h, c}); CHECK(cudaMemcpyAsync(asks, ask.data(), G * sizeof(Question), cudaMemcpyHostToDevice, s));
        AskedParams a = {sp, asks}; launch(score_pieces, dim3((c + PIECE - 1) / PIECE, G), SCORE_THREADS, shared, a, s); if (kind != SCORE_SIGNS) launch(score_finish, dim3((c + PIECE - 1) / PIECE, G), SCORE_THREADS, 0, a, s);
        CHECK(cudaStreamSynchronize(s)); auto sc = get(scores, (size_t)G * stride);
        const auto old_members = members; const auto old_cut = cut; const bool is_served = r.late == 2 && !label[0].empty();
        if (!is_served) { k_decide(); if (!bringing) k_gather(); CHECK(cudaStreamSynchronize(s)); }
        if (!apart && !is_served && get(done, 1)[0] != ALL_ENDED) { printf("%x blocks have ended\n", get(done, 1)[0]); return false; }
        auto st = get(states, G);
        k_attend(); k_merge(); CHECK(cudaStreamSynchronize(s));
        // Other layers' queries take their place.
        if (r.late) { std::vector<float> none(H * W, 1e30f); CHECK(cudaMemcpy(qkv, none.data(), none.size() * 4, cudaMemcpyHostToDevice)); k_decide(FLAG_LATE | (is_served ? FLAG_LOOKS : 0)); CHECK(cudaStreamSynchronize(s)); auto after = get(states, G); for (u32 h = 0; h < G; h++) { bool is_late = after[h].lookup == LOOKUP_LATE; u32 moves = is_late ? after[h].n_moves : st[h].n_moves; if (!is_late && after[h].n_moves) { printf("head %u would move again\n", h); return false; } st[h] = after[h]; st[h].n_moves = moves; } k_gather(); CHECK(cudaStreamSynchronize(s)); }
        auto mk = get(marks, (size_t)G * stride);
        auto ta = get((u32*)tallies, G * sizeof(Tally) / 4); bool ok = true; for (u32 h = 0; h < G; h++) for (u32 i = 0; i < 32 + 5 * BINS; i++) if (ta[h * sizeof(Tally) / 4 + i]) { printf("tally %u word %u\n", h, i); return false; }
        for (u32 h = 0; h < G; h++) {
            float simil = 0; u32 look = LOOKUP_ALWAYS;
            if (r.flags & FLAG_REUSES) { if (label[h].empty()) look = LOOKUP_FIRST; else { float tot = 0, w = 0, sum = 0; bool far = false; for (u32 g = 0; g < GROUP; g++) tot += 0.2f + 0.1f * ((h * GROUP + g) % 5); for (u32 g = 0; g < GROUP && !far; g++) { float ab[32] = {}, aa[32] = {}, bb[32] = {}; for (u32 i = 0; i < W; i++) { float x = q[(h * GROUP + g) * W + i], y = label[h][g * W + i]; float xy = x * y, xx = x * x, yy = y * y; ab[i % 32] = ab[i % 32] + xy; aa[i % 32] = aa[i % 32] + xx; bb[i % 32] = bb[i % 32] + yy; } float p = lane_sum(aa) * lane_sum(bb); float co = lane_sum(ab) / sqrtf(p); if (co <= 0) far = true; float im = (0.2f + 0.1f * ((h * GROUP + g) % 5)) / tot; w = w + im; sum = sum + im / co; } simil = w / sum; look = !far && simil > r.threshold ? LOOKUP_HIT : (far ? -1.0f : simil) >= r.soft ? LOOKUP_LATE : far ? LOOKUP_TURNED_FAR : LOOKUP_TURNED; if (far) simil = 0; } }
            if (look == LOOKUP_LATE && (st[h].seen_members != old_members[h].size() || st[h].seen_cut != old_cut[h])) { printf("head %u: saw %u from %u, should be %zu from %u\n", h, st[h].seen_members, st[h].seen_cut, old_members[h].size(), old_cut[h]); return false; }
            if (look != st[h].lookup || simil != st[h].similarity) { printf("head %u: lookup %u %.9g, should be %u %.9g\n", h, st[h].lookup, st[h].similarity, look, simil); return false; }
            if (look != LOOKUP_HIT) {
                double wanted = ceil(r.percent * (double)weights[h] * (double)(c - r.sinks) / 100.0); u32 k = std::min(std::min(std::max((u32)wanted, r.k_min), r.k_max), c - r.sinks);
                // A first selection fills the working set.
                if (std::all_of(used[h].begin(), used[h].end(), [](u32 u) { return u == 0; })) k = std::min(std::max(k, (u32)ceilf((float)k * r.ws)), c - r.sinks);
                std::vector<u32> order; for (u32 i = r.sinks; i < c; i++) order.push_back(i); const u32* own = sc.data() + (size_t)h * stride;
                std::nth_element(order.begin(), order.begin() + std::min<size_t>(k, order.size() - 1), order.end(), [&](u32 x, u32 y) { return own[x] != own[y] ? own[x] > own[y] : x < y; }); order.resize(k);
                now[h]++; u32 missing = 0; if (r.flags & FLAG_WHOLE && r.ws == 1.0f) std::fill(used[h].begin(), used[h].end(), 0);
                u32 cap = (u32)ceilf((float)k * r.ws); std::vector<char> ch(stride, 0); for (u32 p : order) { missing += used[h][p] == 0; ch[p] = 1; }
                for (u32 p = 0; p < stride; p++) if (ch[p]) used[h][p] = now[h]; else if (cap <= k) used[h][p] = 0;
                u32 total = 0; std::vector<std::pair<u32, u32>> idle; for (u32 p = 0; p < stride; p++) if (used[h][p]) { total++; if (!ch[p]) idle.push_back({used[h][p], p}); }
                if (total > std::max(cap, k)) { std::sort(idle.begin(), idle.end()); for (u32 i = 0; i < total - std::max(cap, k); i++) used[h][idle[i].second] = 0; }
                label[h].assign(q.begin() + h * GROUP * W, q.begin() + (h + 1) * GROUP * W); cut[h] = c;
                if (st[h].n_chosen != k || st[h].n_moves != missing || st[h].now != now[h]) { printf("head %u: chosen %u moves %u now %u, should be %u %u %u\n", h, st[h].n_chosen, st[h].n_moves, st[h].now, k, missing, now[h]); ok = false; }
            }
            std::vector<u32> mem; u32 wrong = 0, first = ~0u; for (u32 p = 0; p < stride; p++) { if (used[h][p]) mem.push_back(p); if (mk[(size_t)h * stride + p].x != used[h][p]) { wrong++; first = std::min(first, p); } }
            if (wrong) { printf("head %u: %u stamps wrong, first %u: %u for %u\n", h, wrong, first, mk[(size_t)h * stride + first].x, used[h][first]); ok = false; }
            if (st[h].n_members != mem.size() || st[h].cut != cut[h]) { printf("head %u: members %u for %zu, cut %u for %u\n", h, st[h].n_members, mem.size(), st[h].cut, cut[h]); ok = false; }
            std::vector<char> taken(mem.size(), 0); for (u32 p : mem) { u32 row = mk[(size_t)h * stride + p].y; if (row >= mem.size() || taken[row]) { printf("head %u place %u row %u twice or out of %zu\n", h, p, row, mem.size()); ok = false; break; } taken[row] = 1; }
            members[h] = mem;
            if (!ok) return false;
        }
        auto seen_members = members; auto seen_cut = cut; for (u32 h = 0; h < G; h++) if (st[h].lookup == LOOKUP_LATE) seen_members[h] = old_members[h], seen_cut[h] = old_cut[h];
        if (deep) ok = check_attention(len, mk, seen_members, seen_cut);
        n_hits = n_late = n_moved = 0; for (u32 h = 0; h < G; h++) n_late += st[h].lookup == LOOKUP_LATE, n_hits += st[h].lookup == LOOKUP_HIT, n_moved += st[h].n_moved;
        return ok;
    }
    u32 n_hits, n_late, n_moved;
    static float h2f(u16 b) { __half x; memcpy(&x, &b, 2); return __half2float(x); }
    static u32 piece(u32 t, u32 p) { u32 turn = t / 2 % 4 | t % 2 * 4; return t * 16 + (p ^ turn); }
    bool check_attention(u32 len, const std::vector<uint2>& mk, const std::vector<std::vector<u32>>& seen_members, const std::vector<u32>& seen_cut) {
        auto got = get(out, H * W);
        for (u32 h : {0u, 3u, 7u}) {
            std::vector<u8> own(head_bytes); CHECK(cudaMemcpy(own.data(), arena + h * head_bytes, head_bytes, cudaMemcpyDefault)); auto ws = get(pages + (u64)h * ws_pages * HEAD_PAGE_BYTES, (size_t)ws_pages * HEAD_PAGE_BYTES);
            auto row = [&](const std::vector<u8>& b, u64 page, u32 t, bool v, float* x) { const u8* at = b.data() + page * HEAD_PAGE_BYTES + (v ? HALF_PAGE_BYTES : 0); for (u32 p = 0; p < 16; p++) for (u32 e = 0; e < 8; e++) { u16 bits; memcpy(&bits, at + piece(t, p) * 16 + e * 2, 2); x[p * 8 + e] = h2f(bits); } };
            float x[128], y[128];
            for (u32 p : members[h]) { u32 rr = mk[(size_t)h * stride + p].y; for (int v = 0; v < 2; v++) { row(own, table[p / 16], p % 16, v, x); row(ws, rr / 16, rr % 16, v, y); if (memcmp(x, y, 512)) { printf("head %u place %u row %u differs\n", h, p, rr); return false; } } }
            std::vector<u32> seen; for (u32 i = 0; i < std::min(r.sinks, seen_cut[h]); i++) seen.push_back(i); for (u32 p : seen_members[h]) seen.push_back(p); for (u32 i = seen_cut[h]; i < len; i++) seen.push_back(i);
            for (u32 g = 0; g < GROUP; g += 3) { std::vector<double> sc; double mx = -1e30; for (u32 p : seen) { row(own, table[p / 16], p % 16, false, x); double d = 0; for (int e = 0; e < 128; e++) d += (double)__half2float(__float2half(q[(h * GROUP + g) * W + e])) * x[e]; d /= sqrt(128.0); sc.push_back(d); mx = std::max(mx, d); } double tot = 0; std::vector<double> o(128, 0); for (size_t i = 0; i < seen.size(); i++) { double p = exp(sc[i] - mx); tot += p; row(own, table[seen[i] / 16], seen[i] % 16, true, x); for (int e = 0; e < 128; e++) o[e] += p * x[e]; } double off = 0; for (int e = 0; e < 128; e++) off = std::max(off, fabs(o[e] / tot - got[(h * GROUP + g) * W + e])); if (!(off < 2e-3)) { printf("head %u query %u: off by %g\n", h, g, off); return false; } }
        }
        return true;
    }
    float time(const char* name, int n, auto&& f, auto&& before) { std::vector<float> t; cudaEvent_t a, b; CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&b)); for (int i = 0; i < n; i++) { before(); CHECK(cudaStreamSynchronize(s)); CHECK(cudaEventRecord(a, s)); f(); CHECK(cudaEventRecord(b, s)); CHECK(cudaStreamSynchronize(s)); float ms; CHECK(cudaEventElapsedTime(&ms, a, b)); t.push_back(ms * 1e3f); } std::sort(t.begin(), t.end()); printf("    %-34s median %8.1f us, least %8.1f\n", name, t[t.size() / 2], t[0]); return t[t.size() / 2]; }
};

static void gather_sweep(u8* arena, u64 bytes, bool host) {
    // Rows of one layer's heads, from wherever the arena is.
    Lab l; l.init(131072, SCORE_CHANNELS, 32, Rules{3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES}, host, arena);
    u8* big = dev<u8>(256u << 20, false); l.put_row(131072); printf("gather from %s, 8 heads, sorted random rows of 512 B; copy engine of as many bytes beside it\n", host ? "host" : "HBM");
    for (u32 n : {16u, 64u, 256u, 1024u, 4096u, 16384u}) {
        std::mt19937 rng(n); std::vector<uint2> mv((size_t)G * l.stride); for (u32 h = 0; h < G; h++) { std::vector<u32> p; for (u32 i = 0; i < n; i++) p.push_back(rng() % 131000); std::sort(p.begin(), p.end()); for (u32 i = 0; i < n; i++) mv[(size_t)h * l.stride + i] = make_uint2(p[i], i); }
        CHECK(cudaMemcpy(l.moves, mv.data(), mv.size() * 8, cudaMemcpyHostToDevice)); std::vector<HeadState> st = get(l.states, G); for (u32 h = 0; h < G; h++) st[h].n_moves = st[h].n_gone = n, st[h].first = h * 1024 * (HEAD_PAGE_BYTES / SET_UNIT), st[h].lookup = LOOKUP_HIT; CHECK(cudaMemcpy(l.states, st.data(), G * sizeof(HeadState), cudaMemcpyHostToDevice)); SparseRow row = {0, 131072, 0, 0, l.marks, big}; CHECK(cudaMemcpy(l.rows, &row, sizeof row, cudaMemcpyHostToDevice));
        double b = (double)G * n * 512; printf("  %6u rows a head, %9.0f KiB:", n, b / 1024);
        for (int nb : {4, 8, 16, 32, 132}) { l.gather_blocks = nb; cudaEvent_t a, e; CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&e)); float best = 1e9; for (int i = 0; i < 6; i++) { CHECK(cudaEventRecord(a, l.s)); for (int j = 0; j < 4; j++) l.k_gather(); CHECK(cudaEventRecord(e, l.s)); CHECK(cudaStreamSynchronize(l.s)); float ms; CHECK(cudaEventElapsedTime(&ms, a, e)); best = std::min(best, ms / 4); } printf(" %d: %.1f us %.1f GB/s;", nb, best * 1e3, b / best / 1e6); }
        float best = 1e9; cudaEvent_t a, e; CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&e)); for (int i = 0; i < 6; i++) { CHECK(cudaEventRecord(a, l.s)); for (int j = 0; j < 4; j++) CHECK(cudaMemcpyAsync(big, arena, (size_t)b, cudaMemcpyDefault, l.s)); CHECK(cudaEventRecord(e, l.s)); CHECK(cudaStreamSynchronize(l.s)); float ms; CHECK(cudaEventElapsedTime(&ms, a, e)); best = std::min(best, ms / 4); } printf(" copy: %.1f us %.1f GB/s\n", best * 1e3, b / best / 1e6);
    }
    // Beside memory-bound reads of 436 MB (a layer's weights) on another stream.
    u8* weights = dev<u8>(436u << 20); cudaStream_t s2; CHECK(cudaStreamCreate(&s2)); uint4* o = dev<uint4>(1); cudaEvent_t a, e; CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&e));
    for (int reader : {1056, 528, 264, 248}) for (int nb : {0, 4, 8, 16}) { l.gather_blocks = nb; float best = 1e9; for (int i = 0; i < 8; i++) { CHECK(cudaDeviceSynchronize()); if (nb) for (int j = 0; j < 3; j++) l.k_gather(); CHECK(cudaEventRecord(a, s2)); for (int j = 0; j < 4; j++) spin_read<<<reader, 512, 0, s2>>>((uint4*)weights, (436u << 20) / 16, o); CHECK(cudaEventRecord(e, s2)); CHECK(cudaDeviceSynchronize()); float ms; CHECK(cudaEventElapsedTime(&ms, a, e)); best = std::min(best, ms / 4); } printf("  reading 436 MiB by %d blocks while %d blocks gather: %.1f us\n", reader, nb, best * 1e3); }
}

int main(int argc, char** argv) {
    setvbuf(stdout, 0, _IOLBF, 0); u64 bytes = (u64)G * ((131072 + 512 + PIECE - 1) / PIECE * PIECE / 16) * HEAD_PAGE_BYTES; u8* arena = dev<u8>(bytes); u8* harena; CHECK(cudaHostAlloc(&harena, bytes, cudaHostAllocMapped));
    struct { const char* name; u32 kind, width; Rules r; } cases[] = {
        {"loki:32 3% x3 qsac", SCORE_CHANNELS, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES}}, {"hata:128 10% qsac", SCORE_SIGNS, 128, {10.0, 64, ~0u, 16, 64, 1.0f, 0.85f, FLAG_REUSES}},
        {"loki:16 5% x1.5 always", SCORE_CHANNELS, 16, {5.0, 256, 2000, 16, 64, 1.5f, 0.85f, 0}}, {"hata:256 10% whole", SCORE_SIGNS, 256, {10.0, 64, ~0u, 4, 1, 1.0f, 0.85f, FLAG_REUSES | FLAG_WHOLE}},
        {"loki:32 bits=4 3% x3 qsac", SCORE_NIBBLES, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES}}, {"loki:32 3% x3 soft", SCORE_CHANNELS, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES, 0.3f, 1}}, {"loki:32 3% x3 late", SCORE_CHANNELS, 32, {3.0, 64, ~0u, 16, 64, 3.0f, 0.85f, FLAG_REUSES, -1.0f, 2}}, {"hata:128 whole late", SCORE_SIGNS, 128, {10.0, 64, ~0u, 16, 64, 1.0f, 0.85f, FLAG_REUSES | FLAG_WHOLE, -1.0f, 2}}};
    if (argc > 1 && !strcmp(argv[1], "check")) {
        u32 most = argc > 2 ? atoi(argv[2]) : ~0u; bool host = argc > 3 && !strcmp(argv[3], "host");
        for (u32 n : {700u, 5000u, 40000u}) if (n <= most) for (auto& c : cases) for (int nb : {16, 5, 1, -16, -1}) { Lab l; l.apart = nb < 0; nb = abs(nb); l.init(n, c.kind, c.width, c.r, host, host ? harena : arena); l.blocks = l.apart ? std::min<u32>(nb, l.stride / PIECE) : nb; if (nb == 5) l.bringing = 0; bool ok = true; for (int i = 0; i < 14 && ok; i++) { ok = l.step(n + i, i % 3 ? 40 : 0, i % 5 ? 0.7f : 0.1f, i > 11); if (!ok) printf("FAILED at step %d\n", i); } printf("%s %s n %u, %d blocks%s: hits %u and late %u of 8, moved %u\n", ok ? "ok" : "FAILED", c.name, n, l.blocks, l.apart ? " apart" : "", l.n_hits, l.n_late, l.n_moved); }
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "gather")) { gather_sweep(harena, bytes, true); gather_sweep(arena, bytes, false); return 0; }
    for (int host = 0; host < 2; host++) for (u32 n : {32768u, 131072u}) for (int ci = 0; ci < 2; ci++) {
        auto& c = cases[ci]; Lab l; printf("%s, %u tokens, %s\n", c.name, n, host ? "host" : "HBM"); l.init(n, c.kind, c.width, c.r, host, host ? harena : arena); u32 len = n; for (int i = 0; i < 6; i++) if (!l.step(len++, 100, 0.7f, false)) { printf("FAILED\n"); break; }
        for (int turned : {100, 45, 12, 0}) { u32 hits = 0, moved = 0; for (int i = 0; i < 5; i++) { l.step(len++, turned, 0.7f, false); hits += l.n_hits, moved += l.n_moved; } printf("  %d turn: %.0f %% hits, moved %.2f %% of the rows\n", turned, hits * 100.0 / 40, moved * 100.0 / 40 / n);
            auto before = [&] { l.turn(turned, 0.7f); l.put_row(len++); }; const u32 usual = l.bringing; l.time("decide with rows", 9, [&] { l.k_decide(); }, before); l.bringing = 0; l.time("decide", 9, [&] { l.k_decide(); }, [&] { l.k_gather(); before(); }); l.k_gather(); l.time("gather", 9, [&] { l.k_gather(); }, [&] { before(); l.k_decide(); }); l.bringing = usual; l.time("attend", 9, [&] { l.k_attend(); }, [&] {}); l.time("merge", 9, [&] { l.k_merge(); }, [&] {}); l.time("all three", 15, [&] { l.k_decide(); l.k_attend(); l.k_merge(); }, before);
            for (int nb : {33, 8}) { l.blocks = nb; char t[64]; sprintf(t, "decide, %d blocks a head", nb); l.time(t, 9, [&] { l.k_decide(); }, before); } l.blocks = 16; if (len > n + 400) break; }
    }
    return 0;
}
