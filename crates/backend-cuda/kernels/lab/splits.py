"""Where the time of decode attention goes, on one GPU: stamps of every warp of `attend_split` and `attend_merge`.

    python3 splits.py compile      needs NVRTC only, on the library path
    python3 splits.py              needs a GPU and PyTorch; a few seconds

Launches follow each other as in a step, over several layers. A stamp is the multiprocessor's clock, brought to the
device's timer by the largest offset that all stamps of that multiprocessor allow: the timer moves in steps of
256 ns. Times are in microseconds, from the end of the merge before; the columns are the first, the tenth part, the
median, nine tenths and the last. Stamps themselves cost about a microsecond a launch.
"""

import ctypes as C
import struct
import sys

import hopper
from hopper import MERGE_SHARED, MERGES, NO_WINDOW, ROOM, compile_source, read, split_shared

STAMPS, UNITS, LAUNCHES = 8, 132 * 12, 64
OF_SPLIT = ["entry", "ring asked for", "wait over", "queries", "first keys", "first step done", "last values", "stored"]
OF_MERGE = ["entry", "wait over", "weighed", "first batch", "chain done", "stored"]
# KV heads, query heads of each, width; sequences and keys; where chunks get longer, and the last ones.
CASES = [((8, 4, 128), (1, 32768), (896, 8192, 512)), ((4, 7, 128), (1, 32768), (2048, 8192, 384)), ((4, 7, 128), (1, 131072), (2048, 8192, 384))]
WARPS, STAGES = 7, 3
N_LARGE = 4000  # all of them

STAMP = f"""
extern "C" __device__ u64 STAMPS[2 * {LAUNCHES} * {UNITS} * {STAMPS} * 2];
DEVICE void stamp(u32 kind, u32 launch, u32 unit, u32 k) {{
    u64 time, clock;
    u32 multiprocessor;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
    asm volatile("mov.u64 %0, %clock64;" : "=l"(clock)::"memory");
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor)::"memory");
    if (threadIdx.x % 32 != 0 || unit >= {UNITS}) return;
    u64* at = STAMPS + (((u64)(kind * {LAUNCHES} + launch) * {UNITS} + unit) * {STAMPS} + k) * 2;
    at[0] = time, at[1] = clock | (u64)multiprocessor << 48;
}}
"""


def after(text, line, more):
    assert text.count(line) == 1, line
    return text.replace(line, line + more)


def before(text, line, more):
    assert text.count(line) == 1, line
    return text.replace(line, more + line)


def stamped_split(text):
    """The launch's number comes in a parameter that splits do not use."""
    stamp = lambda k: f" stamp(0, p.tile_parts, blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, {k});\n"
    text = after(text, "        extern __shared__ __align__(128) u8 shared[];\n        allow_next();\n", stamp(0))
    text = after(text, "        for (u32 i = 0; i < STAGES; i++) bring(p, feed, own, ring);\n", stamp(1))
    text = before(text, "        Lines<R> lines;\n", stamp(2))
    text = before(text, "            begin_chunk(lines);\n", f"if (n_done == 1) {stamp(3)} bool is_first = n_done == 1;\n")
    text = after(text, "                u8* keys = await(own, ring, place);\n", f"if (is_first) {stamp(4)}")
    text = after(text, "                Mix::mix(values, s, down, lines, mix);\n", f"if (is_first) {stamp(5)} is_first = false;\n")
    text = after(text, "                u8* values = await(own, ring, place);\n", f"if (step + 1 == end_step) {stamp(6)}")
    return after(text, "            store_partial(p, work.part.partial, lines, mix);\n", stamp(7))


def stamped_merge(text):
    """The launch's number comes as the window."""
    unit = "(blockIdx.x * gridDim.y + blockIdx.y) * (blockDim.x / 32) + threadIdx.x / 32"
    stamp = lambda k: f" stamp(1, p.window, {unit}, {k});\n"
    text = text.replace("chunks_of(p.cuts, split.n_keys, p.window)", "chunks_of(p.cuts, split.n_keys, ~0u)")
    text = after(text, "        allow_next();\n", stamp(0))
    text = after(text, "        wait_for_previous();\n", stamp(1))
    text = after(text, "                moved = weigh_span(own, m, weighed);\n", f"if (start == 0) {stamp(2)}")
    text = after(text, "            copy_wait<DEPTH - 2>();\n", f"if (start == 0) {stamp(3)}")
    text = before(text, "        const float x = o * (1.0f / l);\n", stamp(4))
    return after(text, "        *rounded = (u16)bf16_of(x);\n", stamp(5))


def build():
    constants = dict(
        KV="KV_F16", HEAD_DIM=128, HEAD_PAGE_BYTES=64 * 128, ROWS=0, PARTS=1, SMALL_CHUNK=64, MIDDLE_CHUNK=192, LARGE_CHUNK=512,
        SPLIT_ENTRIES=f"SPLIT(attend_split_8, 1, {WARPS}, {STAGES}, {split_shared(WARPS, STAGES)})", ATTEND_PARAMS_SIZE=168, PART_SIZE=16,
        SPLIT_SIZE=16, **MERGES,
    )
    text = "".join(f"#define {key} {value}\n" for key, value in constants.items()) + read("prelude.cuh") + STAMP
    text += "".join(map(read, ("kv.cuh", "attend.cuh", "attend_feed.cuh"))) + stamped_split(read("attend_split.cu"))
    return compile_source(text + stamped_merge(read("attend_merge.cu")))


def run_case(gpu, cubin, case):
    """Queues launches as one graph, twice; gives the stamps of the second time."""
    (kv_heads, group, d), (n_seqs, depth), (small_end, middle_end, large) = case
    heads, pages, chunks, start = kv_heads * group, depth // 16, [], 0
    ints = lambda words: torch.tensor(words, dtype=torch.int32, device="cuda")
    while start < depth:
        chunks.append(0 if start < small_end else 1 if start < middle_end else 2)
        start += (64, 192, large)[chunks[-1]]
    layers = min(32, max(2, (600 << 20) // (n_seqs * depth * kv_heads * d * 4)))
    arena = torch.randn(layers, kv_heads, n_seqs * depth * d * 2, device="cuda", dtype=torch.float16)
    qkv, table = torch.randn(n_seqs, (heads + 2 * kv_heads) * d, device="cuda"), torch.randperm(n_seqs * pages, device="cuda").int()
    out, rounded = torch.zeros(n_seqs, heads * d, device="cuda"), torch.zeros(n_seqs, heads * d, device="cuda", dtype=torch.bfloat16)
    partials, sums = [torch.zeros(n_seqs * len(chunks) * heads * width, device="cuda") for width in (d, 2)]
    parts = ints([word for size in (2, 1, 0) for row in range(n_seqs) for i, found in enumerate(chunks) if found == size
                  for word in (row | i << 16, depth, row, row * len(chunks) + i)] + ROOM)
    splits, counts = ints([word for row in range(n_seqs) for word in (row, depth, row, row * len(chunks))]), ints([n_seqs * len(chunks), 0])
    shared = split_shared(WARPS, STAGES)
    module = C.c_void_p()
    gpu.check(gpu.cu.cuModuleLoadData(C.byref(module), cubin), "load")
    split, merge = [C.c_void_p() for _ in range(2)]
    for function, name, bytes_of in ((split, "attend_split_8", shared), (merge, "merge_32", MERGE_SHARED[32])):
        gpu.check(gpu.cu.cuModuleGetFunction(C.byref(function), module, name.encode()), name)
        gpu.check(gpu.cu.cuFuncSetAttribute(function, 8, bytes_of), "shared memory")
        gpu.check(gpu.cu.cuFuncSetAttribute(function, 9, 100), "division of the first-level cache")
    turn = [0]

    def launch():
        turn[0] += 1
        number = turn[0] % LAUNCHES
        params = struct.pack("<QQQQQQQQQQQQQQIIIIIIIIIIIIIf", qkv.data_ptr(), arena[turn[0] % layers].data_ptr(), out.data_ptr(), rounded.data_ptr(),
                             partials.data_ptr(), sums.data_ptr(), parts.data_ptr(), counts.data_ptr(), table.data_ptr(), 0, n_seqs * pages * 64 * d, 0, 0, 0,
                             qkv.shape[1], pages, kv_heads, group, NO_WINDOW, 0, small_end // 64, (middle_end - small_end) // 192, large, N_LARGE, number, 0, 0, 1.4426950408889634 / d**0.5)
        gpu.launch(split, (132, 1, 1), 32 * WARPS, shared, params)
        params = struct.pack("<QQQQQQIIIIIIII", partials.data_ptr(), sums.data_ptr(), splits.data_ptr(), out.data_ptr(), rounded.data_ptr(),
                             counts.data_ptr() + 4, kv_heads, group, number, small_end // 64, (middle_end - small_end) // 192, large, N_LARGE, 0)
        gpu.launch(merge, (n_seqs, heads * d // 32, 1), 128, MERGE_SHARED[32], params)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(24):
            launch()
    graph.replay()
    torch.cuda.synchronize()
    address, size = C.c_uint64(), C.c_size_t()
    gpu.check(gpu.cu.cuModuleGetGlobal_v2(C.byref(address), C.byref(size), module, b"STAMPS"), "stamps")
    gpu.check(gpu.cu.cuMemsetD8_v2(address, 0, size), "clear")
    graph.replay()
    torch.cuda.synchronize()
    raw = torch.empty(size.value // 8, dtype=torch.int64)
    gpu.check(gpu.cu.cuMemcpyDtoH_v2(C.c_void_p(raw.data_ptr()), address, size), "read")
    return raw.view(2, LAUNCHES, UNITS, STAMPS, 2), len(chunks)


def aligned(raw):
    """Times of all stamps in microseconds, and which are known."""
    known, multiprocessor = raw[..., 0] != 0, raw[..., 1] >> 48
    time, clock = raw[..., 0].double(), (raw[..., 1] & ((1 << 48) - 1)).double()
    time, clock = (time - time[known].min()) / 1e3, (clock - clock[known].min()) / 1e3
    found, rates = torch.zeros_like(time), []
    groups = [known & (multiprocessor == i) for i in multiprocessor[known].unique()]
    for at in groups:
        rates.append(((clock[at].max() - clock[at].min()) / (time[at].max() - time[at].min())).item())
    rate = sorted(rates)[len(rates) // 2]
    for at in groups:
        found[at] = clock[at] / rate + (time[at] - clock[at] / rate).max()
    return found, known


def report(raw):
    time, known = aligned(raw)
    starts = {i: time[0, i][known[0, i]].min().item() for i in range(LAUNCHES) if known[0, i].any()}
    order, rows = sorted(starts, key=starts.get), {}
    print(f"  a launch each {(starts[order[20]] - starts[order[4]]) / 16:.2f} us")
    for last, i in zip(order[6:16], order[7:17]):
        begin = time[1, last][known[1, last]].max()
        for kind, names in ((0, OF_SPLIT), (1, OF_MERGE)):
            for k, name in enumerate(names):
                values = (time[kind, i, :, k][known[kind, i, :, k]] - begin).sort().values
                rows.setdefault(f"{('split', 'merge')[kind]} {name}", []).append([values[min(len(values) - 1, int(q * len(values)))].item() for q in (0, 0.1, 0.5, 0.9, 1)])
    for name, found in rows.items():
        print(f"  {name:<24}" + "".join(f"{sum(column) / len(column):8.2f}" for column in zip(*found)), flush=True)


if __name__ == "__main__":
    cubin, remarks = build()
    print(*remarks)
    if sys.argv[1:] != ["compile"]:
        import torch

        hopper.torch = torch
        torch.manual_seed(7)
        torch.zeros(1, device="cuda")
        gpu = hopper.Driver()
        for case in CASES:
            raw, n_chunks = run_case(gpu, cubin, case)
            print(f"{case}, {n_chunks} chunks", flush=True)
            report(raw)
