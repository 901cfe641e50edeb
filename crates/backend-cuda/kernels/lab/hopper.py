"""Whether Hopper's kernels are right, and how fast they and their alternatives are, on one GPU.

    python3 hopper.py compile                            needs NVRTC only, on the library path
    python3 hopper.py products few attention decode          needs a GPU and PyTorch; some minutes

Products are compared with those of `matmul_8` bit by bit, attention with `attend_tile`, with `attend_split`
and with a sum in float64. Peers of the same run are `torch.matmul` and SDPA's flash attention. `decode`
times alternatives of `attend_split` and of the merge after it.
"""

import ctypes as C
import os
import struct
import sys
from concurrent.futures import ProcessPoolExecutor

KERNELS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Name, rows of x of a tile, stages, tiles of x that follow each other.
WIDES = [("w128", 128, 6, 16), ("w192", 192, 5, 16), ("w192g8", 192, 5, 8), ("w192g32", 192, 5, 32)]
# Name, type of keys and values, head width, stages.
ATTENDS = [("f16", "KV_F16", 128, 4), ("bf16", "KV_BF16", 128, 4), ("f16d64", "KV_F16", 64, 4), ("f16s3", "KV_F16", 128, 3)]
FEW_SHARED = (2048 + 1024) * 4 * 8
KV_HEADS, GROUP = 8, 4
HEADS = KV_HEADS * GROUP
NO_WINDOW = 2**32 - 1
# Warps look at a task before they know how many there are.
ROOM = [0] * 4 * 132 * 12


def read(name):
    return open(os.path.join(KERNELS, name), encoding="utf-8").read() + "\n"


def source(constants, files):
    return "".join(f"#define {key} {value}\n" for key, value in constants.items()) + "".join(map(read, files))


def compile_source(text):
    nvrtc, program, size = C.CDLL("libnvrtc.so.13"), C.c_void_p(), C.c_size_t()
    nvrtc.nvrtcCreateProgram(C.byref(program), text.encode(), b"lab.cu", 0, None, None)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ptxas-options=--verbose"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (C.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, C.byref(size))
    log = C.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    log = log.value.decode()
    if failed:
        raise SystemExit(log)
    nvrtc.nvrtcGetCUBINSize(program, C.byref(size))
    cubin = C.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin.raw, [line for line in log.splitlines() if "C75" in line or "spill" in line and " 0 bytes spill stores" not in line]


def wide_shared(nx, stages):
    return stages * (16384 + nx * 128 + 8)


def build_wide(variant):
    _, nx, stages, group = variant
    constants = dict(
        TYPE="BF16", CELL_BYTES=2048, SEGMENTS=8, MATMUL_PARAMS_SIZE=96, PACK_PARAMS_SIZE=48, WIDE_PARAMS_SIZE=256,
        WIDE_GROUP=group, MATMUL_ENTRIES=f"FEW(matmul_8, 1, 1, 4, {FEW_SHARED})",
        WIDE_ENTRIES=f"WIDE_ENTRY(matmul_wide, {nx}, {stages}, {wide_shared(nx, stages)})",
    )
    return compile_source(source(constants, ["prelude.cuh", "weights.cuh", "pack.cu", "matmul.cuh", "matmul.cu", "hopper.cuh", "matmul_wide.cu"]))


# Tiles of sixteen rows of a weight, tiles of eight rows of x, stages.
FEWS = [
    (1, 1, 4), (2, 1, 4), (3, 1, 4), (1, 2, 3), (2, 2, 3), (2, 2, 4), (3, 2, 3), (1, 4, 2), (2, 4, 2), (2, 4, 3), (3, 4, 2), (4, 4, 2),
    (2, 8, 2), (3, 8, 2),
]


def few_shared(mt, nt, stages):
    return (mt * 2048 + nt * 1024) * stages * 8


def build_few(variant):
    constants = dict(
        TYPE="BF16", CELL_BYTES=2048, SEGMENTS=8, MATMUL_PARAMS_SIZE=96, PACK_PARAMS_SIZE=48,
        MATMUL_ENTRIES=f"FEW(matmul, {', '.join(map(str, variant))}, {few_shared(*variant)})",
    )
    return compile_source(source(constants, ["prelude.cuh", "weights.cuh", "pack.cu", "matmul.cuh", "matmul.cu"]))


# Columns of a block of `merge`, and its shared memory.
MERGE_SHARED = {columns: (3 * 2048 + 3 * 256) * 4 + 32 for columns in (16, 32, 64, 128)}
MERGES = dict(
    MERGE_PARAMS_SIZE=80, MERGE_BATCH_FLOATS=2048,
    MERGE_ENTRIES=" ".join(f"MERGE(merge_{columns}, {columns}, 3, {shared})" for columns, shared in MERGE_SHARED.items()),
)


def attend_shared(d, stages):
    page, queries = 2 * 16 * d * 2, d // 16 * 512
    return dict(tile=4 * page + 4 * queries + 64, wide=stages * (4 * page + 16) + 8 * queries, split=7 * (3 * page + 320))


def build_attend(variant):
    _, kv, d, stages = variant
    shared = attend_shared(d, stages)
    constants = dict(
        KV=kv, HEAD_DIM=d, HEAD_PAGE_BYTES=2 * 16 * d * 2, ROWS=0, PARTS=1, SMALL_CHUNK=USUAL[0], MIDDLE_CHUNK=USUAL[1], LARGE_CHUNK=USUAL[2],
        SPLIT_ENTRIES=f"SPLIT(attend_split_8, 1, 7, 3, {shared['split']})", TILE_STAGES=2, TILE_SHARED=shared["tile"],
        WIDE_STAGES=stages, WIDE_SHARED=shared["wide"], TASK_SIZE=32, ATTEND_PARAMS_SIZE=168, PART_SIZE=16, SPLIT_SIZE=16,
        **MERGES,
    )
    return compile_source(source(constants, ["prelude.cuh", "kv.cuh", "hopper.cuh", "attend.cuh", "attend_tile.cu", "attend_wide.cu", "attend_feed.cuh", "attend_split.cu", "attend_merge.cu"]))


# Keys of chunks (at first, then, at last) and where they get longer; how many of the first two there are.
n_of = lambda cuts: (cuts[3] // cuts[0], (cuts[4] - cuts[3]) // cuts[1])
USUAL = (64, 192, 512, 896, 8192)
FEW = (64, 192, 512, 8192, 32768)
# Shapes: KV heads, query heads of each, width; batches; and for each alternative warps, stages, chunks.
LONG = [(1, 8192), (1, 32768), (1, 131072), (8, 8192), (32, 8192), (32, 32768)]
MANY_CUTS = [USUAL, (64, 128, 512, 1024, 8192), (64, 128, 512, 2048, 8192), (64, 192, 512, 2048, 8192), (96, 96, 512, 8160, 8160),
             (64, 128, 384, 1024, 8192), (64, 256, 512, 1024, 8192), (128, 256, 512, 1024, 32768), (64, 128, 512, 1024, 16384)]
FOUR_CUTS = [USUAL, (64, 192, 512, 2048, 32768), (64, 128, 512, 2048, 32768), (64, 128, 512, 4096, 32768), FEW, (64, 128, 512, 8192, 32768),
             (64, 192, 384, 2048, 20480), (64, 192, 384, 8192, 20480)]
SHAPES = [
    ((8, 4, 128), LONG, [(7, 3, cuts) for cuts in MANY_CUTS]),
    ((4, 7, 128), LONG[:3] + LONG[4:5], [(7, 3, cuts) for cuts in FOUR_CUTS] + [(6, 4, FOUR_CUTS[1])]),
    ((8, 5, 128), LONG[1:3], [(7, 3, cuts) for cuts in MANY_CUTS[:4]]),
    ((32, 1, 128), LONG[1:2], [(7, 3, cuts) for cuts in MANY_CUTS[:4]]),
    ((3, 3, 64), [(1, 1024), *LONG[:3]], [(12, 3, cuts) for cuts in (FEW, (64, 128, 512, 8192, 32768), (64, 128, 256, 8192, 32768),
                                          (96, 192, 512, 8160, 32736), (64, 64, 512, 8192, 16384))]),
]
SPLITS = sorted({(warps, stages, cuts[:3], shape[2]) for shape, _, alternatives in SHAPES for warps, stages, cuts in alternatives})


def split_shared(warps, stages, d=128):
    return warps * (stages * 32 * d * 2 + 64 + 32 * 8)


def build_split(variant):
    warps, stages, (small, middle, large), d = variant
    constants = dict(
        KV="KV_F16", HEAD_DIM=d, HEAD_PAGE_BYTES=64 * d, ROWS=0, PARTS=1, SMALL_CHUNK=small, MIDDLE_CHUNK=middle, LARGE_CHUNK=large,
        SPLIT_ENTRIES=f"SPLIT(attend_split_8, 1, {warps}, {stages}, {split_shared(warps, stages, d)})", ATTEND_PARAMS_SIZE=168, PART_SIZE=16,
        SPLIT_SIZE=16, **MERGES,
    )
    return compile_source(source(constants, ["prelude.cuh", "kv.cuh", "attend.cuh", "attend_feed.cuh", "attend_split.cu", "attend_merge.cu"]))


class Attribute(C.Structure):
    _fields_ = [("id", C.c_int), ("padding", C.c_char * 4), ("value", C.c_int), ("rest", C.c_char * 60)]


class Config(C.Structure):
    _fields_ = [(name, C.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")] + [
        ("stream", C.c_void_p), ("attributes", C.POINTER(Attribute)), ("n_attributes", C.c_uint),
    ]


class Driver:
    def __init__(self):
        self.cu = C.CDLL("libcuda.so.1")

    def check(self, status, what):
        if status:
            raise RuntimeError(f"{what}: {status}")

    def kernel(self, cubin, name, shared=0):
        module, function = C.c_void_p(), C.c_void_p()
        self.check(self.cu.cuModuleLoadData(C.byref(module), cubin), "load")
        self.check(self.cu.cuModuleGetFunction(C.byref(function), module, name.encode()), name)
        if shared:
            self.check(self.cu.cuFuncSetAttribute(function, 8, shared), "shared memory")
        self.check(self.cu.cuFuncSetAttribute(function, 9, 100), "division of the first-level cache")
        return function

    def launch(self, function, grid, threads, shared, params):
        params = C.create_string_buffer(params, len(params))
        arguments = (C.c_void_p * 1)(C.cast(params, C.c_void_p))
        stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
        # As the engine queues kernels: each may begin before the one before it has ended.
        early = Attribute(6, b"", 1)
        config = Config(*grid, threads, 1, 1, shared, stream, C.pointer(early), 1)
        self.check(self.cu.cuLaunchKernelEx(C.byref(config), function, arguments, None), "launch")


def timed(run, n):
    for _ in range(2):
        run()
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        for _ in range(n):
            run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / n)
    return best


def recorded(run, n):
    """Times calls that are queued together, which Python is too slow for."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            run()
    return timed(graph.replay, 3) / n


def differ(a, b):
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return (a.view(kind) != b.view(kind)).sum().item()


def products(driver, built):
    kernels = [(variant, driver.kernel(cubin, "matmul_wide", wide_shared(variant[1], variant[2]))) for variant, (cubin, _) in zip(WIDES, built)]
    cubin = built[0][0]
    pack, few = driver.kernel(cubin, "pack"), driver.kernel(cubin, "matmul_8", FEW_SHARED)

    def make(n, k):
        w = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
        cells, tiles = (k + 63) // 64, (n + 15) // 16
        packed = torch.zeros(tiles * cells * 2048, dtype=torch.uint8, device="cuda")
        params = struct.pack("<QQQIIIIII", w.data_ptr(), packed.data_ptr(), k * 2, n, k, cells, tiles, 0, 0)
        driver.launch(pack, ((tiles * cells * 32 + 255) // 256, 1, 1), 256, 0, params)
        return w, packed

    def params(packed, x, out, n, added=0, rounded=None):
        (nx, k), gated = x.shape, rounded is not None
        where = rounded.data_ptr() if gated else 0
        return struct.pack("<QQQQQIIIIIIIIQQfI", packed.data_ptr(), 0, x.data_ptr(), out.data_ptr(), where, n, k // 64, nx, k,
                           n // 2 if gated else n, 0, added, gated, 0, 0, 0.0, 0)

    def tile_map(x, rows):
        room = (C.c_uint8 * 256)()
        base = (C.addressof(room) + 127) // 128 * 128
        (nx, k), u64, u32 = x.shape, C.c_uint64, C.c_uint32
        # bf16, swizzled by 128 bytes, lines of 256 bytes, zeros beyond the end.
        driver.check(driver.cu.cuTensorMapEncodeTiled(C.c_void_p(base), 9, 2, C.c_void_p(x.data_ptr()), (u64 * 2)(k, nx), (u64 * 1)(k * 2),
                                                      (u32 * 2)(64, rows), (u32 * 2)(1, 1), 0, 3, 3, 0), "tile map")
        return C.string_at(base, 128)

    def run_few(packed, x, out, n, **how):
        driver.launch(few, ((n + 15) // 16, (x.shape[0] + 7) // 8, 1), 256, FEW_SHARED, params(packed, x, out, n, **how))

    def run(variant, kernel):
        _, columns, stages, _ = variant

        def run(packed, x, out, n, **how):
            block = tile_map(x, columns) + params(packed, x, out, n, **how)
            tiles = (n + 127) // 128 * ((x.shape[0] + columns - 1) // columns)
            driver.launch(kernel, (min(tiles, 132), 1, 1), 384, wide_shared(columns, stages), block.ljust(256, b"\0"))
        return run

    runs = [(variant[0], run(variant, kernel)) for variant, kernel in kernels]
    for n, k, nx in [(128, 64, 128), (128, 512, 128), (256, 4096, 128), (1000, 4096, 300), (2064, 14336, 1000)]:
        (w, packed), x, before = make(n, k), torch.randn(nx, k, device="cuda").bfloat16(), torch.randn(nx, n, device="cuda")
        truth, expected = x.double() @ w.double().T, torch.full((nx, n), float("nan"), device="cuda")
        run_few(packed, x, expected, n)
        error = ((expected.double() - truth).norm() / truth.norm()).item()
        for name, wide in runs:
            out, added, expected_added = torch.full_like(expected, float("nan")), before.clone(), before.clone()
            wide(packed, x, out, n)
            wide(packed, x, added, n, added=1)
            run_few(packed, x, expected_added, n, added=1)
            found = [differ(out, expected), differ(added, expected_added)]
            if n % 16 == 0:
                floats = [torch.full((nx, n // 2), float("nan"), device="cuda") for _ in range(2)]
                halves = [torch.zeros(nx, n // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
                run_few(packed, x, floats[0], n, rounded=halves[0])
                wide(packed, x, floats[1], n, rounded=halves[1])
                found += [differ(*floats), differ(*halves)]
            print(f"{n} x {k}, {nx} rows, {name}: error {error:.1e}, outputs that differ {found}", flush=True)
    for n, k in [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)]:
        w, packed = make(n, k)
        for nx in [512, 2048, 8192]:
            x, out = torch.randn(nx, k, device="cuda").bfloat16(), torch.zeros(nx, n, device="cuda")
            rounded, plain = [torch.empty(nx, width, device="cuda", dtype=torch.bfloat16) for width in (n // 2, n)]
            how = dict(rounded=rounded) if n == 28672 else dict(added=1) if n == 4096 else {}
            giga = 2 * n * k * nx / 1e9
            repeats = min(40, max(3, int(10000 / giga)))
            rates = [f"{name} {giga / timed(lambda: wide(packed, x, out, n, **how), repeats):.0f}" for name, wide in runs]
            peer = giga / timed(lambda: torch.matmul(x, w.T, out=plain), repeats)
            print(f"{n} x {k}, {nx} rows, {list(how)}: {'  '.join(rates)}  torch {peer:.0f} TFLOP/s", flush=True)


def few(driver, built):
    """Times products of few rows, each as it would be queued in a step: many different weights."""
    pack = driver.kernel(built[0][0], "pack")
    kernels = [(variant, driver.kernel(cubin, "matmul", few_shared(*variant))) for variant, (cubin, _) in zip(FEWS, built)]
    for n, k in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]:
        cells, tiles, copies = k // 64, n // 16, max(1, 300_000_000 // (n * k * 2))
        w = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
        packed = [torch.zeros(tiles * cells * 2048, dtype=torch.uint8, device="cuda") for _ in range(copies)]
        for target in packed:
            params = struct.pack("<QQQIIIIII", w.data_ptr(), target.data_ptr(), k * 2, n, k, cells, tiles, 0, 0)
            driver.launch(pack, ((tiles * cells * 32 + 255) // 256, 1, 1), 256, 0, params)
        for nx in (8, 16, 32, 64):
            x, expected, line = torch.randn(nx, k, device="cuda").bfloat16(), None, []
            for (mt, nt, stages), kernel in kernels:
                if nt * 8 != nx:
                    continue
                out, turn = torch.full((nx, n), float("nan"), device="cuda"), [0]

                def run():
                    turn[0] = (turn[0] + 1) % copies
                    params = struct.pack("<QQQQQIIIIIIIIQQfI", packed[turn[0]].data_ptr(), 0, x.data_ptr(), out.data_ptr(), 0, n, cells, nx, k, n, 0, 0, 0, 0, 0, 0.0, 0)
                    driver.launch(kernel, ((tiles + mt - 1) // mt, 1, 1), 256, few_shared(mt, nt, stages), params)

                us = recorded(run, 24) * 1e3
                expected = out if expected is None else expected
                line.append(f"{mt}x{nt}x{stages} {us:.1f} us" + (" DIFFERS" if differ(out, expected) else ""))
            y = torch.empty(nx, n, device="cuda", dtype=torch.bfloat16)
            others = [w.clone() for _ in range(copies)]
            peer = recorded(lambda: [torch.matmul(x, other.T, out=y) for other in others], 8) / copies * 1e3
            print(f"{n} x {k}, {nx} rows, {n * k * 2 / 4.4e6:.1f} us at least: {'; '.join(line)}; torch {peer:.1f} us", flush=True)
            del others


class Case:
    """Rows of one sequence, its pages in a scattered order."""

    def __init__(self, driver, built, name, place, rows, window=NO_WINDOW, outliers=False):
        index = [variant[0] for variant in ATTENDS].index(name)
        _, kv, self.d, stages = ATTENDS[index]
        self.driver, self.place, self.rows, self.window, d = driver, place, rows, window, self.d
        n_pages, dtype = (place + rows + 15) // 16, torch.float16 if kv == "KV_F16" else torch.bfloat16
        self.k, self.v = [torch.randn(KV_HEADS, n_pages * 16, d, device="cuda").to(dtype) for _ in range(2)]
        if outliers:
            self.k[:, ::97] *= 8
        self.qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * d, device="cuda")
        token, i = torch.arange(16, device="cuda").view(16, 1), torch.arange(d, device="cuda").view(1, d)
        c = i // 8
        key_at = (token // 8 * d + c // 4 * 32 + token % 8 * 4 + ((c % 4) ^ (token % 8 // 2))) * 8 + i % 8
        value_at = 16 * d + (i * 2 + ((token // 8) ^ (i // 4 % 2))) * 8 + token % 8
        pages = torch.zeros(KV_HEADS, n_pages, 32 * d, dtype=dtype, device="cuda")
        pages[:, :, key_at.flatten()] = self.k.view(KV_HEADS, n_pages, 16 * d)
        pages[:, :, value_at.flatten()] = self.v.view(KV_HEADS, n_pages, 16 * d)
        order = torch.randperm(n_pages, device="cuda")
        self.arena, self.table = torch.empty_like(pages), order.to(torch.int32)
        self.arena[:, order] = pages
        self.out = torch.full((rows, HEADS * d), float("nan"), device="cuda")
        self.rounded = torch.zeros(rows, HEADS * d, device="cuda", dtype=torch.bfloat16)
        cubin, shared = built[index][0], attend_shared(d, stages)
        self.kernels = {}
        for kind, lines, threads in [("tile", 64, 128), ("wide", 128, 384)]:
            firsts = reversed(range(0, rows * GROUP, lines))
            tasks = [word for first in firsts for word in (0, first, min(lines, rows * GROUP - first), place, 0, 0, 0, 0)]
            tasks = torch.tensor(tasks, dtype=torch.int32, device="cuda")
            self.kernels[kind] = driver.kernel(cubin, f"attend_{kind}", shared[kind]), threads, shared[kind], tasks
        self.split = driver.kernel(cubin, "attend_split_8", shared["split"]), shared["split"]
        self.merge = driver.kernel(cubin, "merge_32", MERGE_SHARED[32])

    def params(self, out, tasks, counts=0, partials=0, sums=0):
        return struct.pack("<QQQQQQQQQQQQQQIIIIIIIIIIIIIf", self.qkv.data_ptr(), self.arena.data_ptr(), out.data_ptr(), self.rounded.data_ptr(),
                           partials, sums, tasks.data_ptr(), counts, self.table.data_ptr(), 0, self.arena.shape[1] * 64 * self.d, 0, 0, 0,
                           self.qkv.shape[1], self.table.numel(), KV_HEADS, GROUP, self.window, 0, *n_of(USUAL), USUAL[2], 0, 0, 0, 0, 1.4426950408889634 / self.d**0.5)

    def run(self, kind):
        kernel, threads, shared, tasks = self.kernels[kind]
        self.driver.launch(kernel, (tasks.numel() // 8, KV_HEADS, 1), threads, shared, self.params(self.out, tasks))

    def decode(self, row):
        """The row as if it were alone in its step."""
        n_keys, start, n = self.place + row + 1, 0, 0
        while start < n_keys:
            start, n = start + USUAL[0 if start < USUAL[3] else 1 if start < USUAL[4] else 2], n + 1
        ints = lambda words: torch.tensor(words, dtype=torch.int32, device="cuda")
        parts, counts, split = ints([word for i in range(n) for word in (row | i << 16, n_keys, 0, i)] + ROOM), ints([n, 0]), ints([row, n_keys, 0, 0])
        partials, sums = [torch.zeros(n * HEADS * width, device="cuda") for width in (self.d, 2)]
        out, (kernel, shared) = torch.full_like(self.out, float("nan")), self.split
        self.driver.launch(kernel, (132, 1, 1), 224, shared, self.params(out, parts, counts.data_ptr(), partials.data_ptr(), sums.data_ptr()))
        params = struct.pack("<QQQQQQIIIIIIII", partials.data_ptr(), sums.data_ptr(), split.data_ptr(), out.data_ptr(), self.rounded.data_ptr(),
                             counts.data_ptr() + 4, KV_HEADS, GROUP, self.window, *n_of(USUAL), USUAL[2], 0, 0)
        self.driver.launch(self.merge, (1, HEADS * (self.d // 32), 1), 128, MERGE_SHARED[32], params)
        torch.cuda.synchronize()
        return out[row]

    def truth(self, row):
        end = self.place + row + 1
        seen = slice(max(0, end - self.window), end)
        q = self.qkv[row, : HEADS * self.d].double().view(KV_HEADS, GROUP, self.d)
        p = torch.softmax(torch.einsum("gqd,gnd->gqn", q, self.k[:, seen].double()) / self.d**0.5, -1)
        return torch.einsum("gqn,gnd->gqd", p, self.v[:, seen].double()).flatten()


def attention(driver, built):
    for name, place, rows, window, outliers in [
        ("f16", 0, 1, NO_WINDOW, False), ("f16", 0, 40, NO_WINDOW, False), ("f16", 5, 300, NO_WINDOW, True), ("f16", 3000, 200, NO_WINDOW, True),
        ("f16", 9000, 70, NO_WINDOW, False), ("f16", 3000, 200, 777, False), ("bf16", 2000, 333, NO_WINDOW, True),
        ("f16d64", 0, 500, NO_WINDOW, True), ("f16d64", 8300, 130, NO_WINDOW, True), ("f16s3", 3000, 200, NO_WINDOW, False),
    ]:
        case, found = Case(driver, built, name, place, rows, window, outliers), {}
        for kind in ("tile", "wide"):
            case.out.fill_(float("nan"))
            case.run(kind)
            torch.cuda.synchronize()
            found[kind] = case.out.clone()
        picked = sorted({0, rows // 2, rows - 1})
        errors = [((found["wide"][row].double() - case.truth(row)).norm() / case.truth(row).norm()).item() for row in picked]
        alone = [differ(case.decode(row), found["wide"][row]) for row in picked]
        print(f"{name}, {rows} rows at {place}, window {window}: error {max(errors):.1e}, outputs that differ from the tile's "
              f"{differ(found['tile'], found['wide'])}, from rows alone {alone}", flush=True)
    for name in ("f16", "f16s3", "bf16", "f16d64"):
        for place, rows in [(0, 512), (0, 4096), (0, 8192), (7680, 512), (30720, 2048), (24576, 8192)]:
            case = Case(driver, built, name, place, rows)
            giga = 4 * rows * (place + rows / 2) * HEADS * case.d / 1e9
            rates = [f"{kind} {giga / timed(lambda: case.run(kind), 5):.0f}" for kind in ("tile", "wide")]
            print(f"{name}, {rows} rows at {place}: {'  '.join(rates)} TFLOP/s", flush=True)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for n in (8192, 32768):
        q, k, v = [torch.randn(1, HEADS, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            ms = timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), 3)
        print(f"SDPA flash, {n} rows: {2 * n * n * HEADS * 128 / 1e9 / ms:.0f} TFLOP/s", flush=True)


def decode(driver, built):
    """Times `attend_split` with `merge`, for alternatives of both; and alone, where it is the first one."""
    cubins = {variant: cubin for variant, (cubin, _) in zip(SPLITS, built)}
    for (kv_heads, group, d), batches, alternatives in SHAPES:
        for n_seqs, depth in batches:
            decode_batch(driver, cubins, (kv_heads, group, d), (n_seqs, depth), alternatives)


def decode_batch(driver, cubins, shape, batch, alternatives):
    (kv_heads, group, d), (n_seqs, depth) = shape, batch
    heads, page, pages = kv_heads * group, 64 * d, depth // 16
    ints = lambda words: torch.tensor(words, dtype=torch.int32, device="cuda")
    n_bytes = n_seqs * depth * kv_heads * d * 4
    # As many layers as make the second-level cache forget, and as much time for each.
    layers, n_slots, first = min(16, max(1, (400 << 20) // n_bytes)), n_seqs * pages, None
    n = max(8, min(64, (3 << 30) // n_bytes))
    arena = torch.randn(layers, kv_heads, n_slots * page // 2, device="cuda", dtype=torch.float16)
    qkv, table = torch.randn(n_seqs, (heads + 2 * kv_heads) * d, device="cuda"), torch.randperm(n_slots, device="cuda").int()
    rounded = torch.zeros(n_seqs, heads * d, device="cuda", dtype=torch.bfloat16)
    print(f"{kv_heads} x {group} heads of {d}, {n_seqs} x {depth}, {n_bytes / 4.45e6:.1f} us at least", flush=True)
    for warps, stages, cuts in alternatives:
        chunks, start, line = [], 0, []
        while start < depth:
            chunks.append(cuts[0] if start < cuts[3] else cuts[1] if start < cuts[4] else cuts[2])
            start += chunks[-1]
        partials, sums = [torch.zeros(n_seqs * len(chunks) * heads * width, device="cuda") for width in (d, 2)]
        parts = ints([word for size in cuts[2::-1] for row in range(n_seqs) for i, found in enumerate(chunks) if found == size
                      for word in (row | i << 16, depth, row, row * len(chunks) + i)] + ROOM)
        splits = ints([word for row in range(n_seqs) for word in (row, depth, row, row * len(chunks))])
        counts, shared = ints([n_seqs * len(chunks), 0]), split_shared(warps, stages, d)
        cubin = cubins[warps, stages, cuts[:3], d]
        split = driver.kernel(cubin, "attend_split_8", shared)
        for columns in (16, 32, 64, 128):
            n_blocks = n_seqs * heads * (d // columns)
            if columns > d or n_blocks > 2100:
                continue
            merge = driver.kernel(cubin, f"merge_{columns}", MERGE_SHARED[columns])
            out, turn = torch.full((n_seqs, heads * d), float("nan"), device="cuda"), [0]

            def run(has_merge=True):
                turn[0] = (turn[0] + 1) % layers
                params = struct.pack("<QQQQQQQQQQQQQQIIIIIIIIIIIIIf", qkv.data_ptr(), arena[turn[0]].data_ptr(), out.data_ptr(), rounded.data_ptr(),
                                     partials.data_ptr(), sums.data_ptr(), parts.data_ptr(), counts.data_ptr(), table.data_ptr(), 0, n_slots * page, 0, 0, 0,
                                     qkv.shape[1], pages, kv_heads, group, NO_WINDOW, 0, *n_of(cuts), cuts[2], 0, 0, 0, 0, 1.4426950408889634 / d**0.5)
                driver.launch(split, (132, 1, 1), 32 * warps, shared, params)
                params = struct.pack("<QQQQQQIIIIIIII", partials.data_ptr(), sums.data_ptr(), splits.data_ptr(), out.data_ptr(), rounded.data_ptr(),
                                     counts.data_ptr() + 4, kv_heads, group, NO_WINDOW, *n_of(cuts), cuts[2], 0, 0)
                if has_merge:
                    driver.launch(merge, (n_seqs, heads * (d // columns), 1), 128, MERGE_SHARED[columns], params)

            us = recorded(run, n) * 1e3
            turn[0] = 0
            run()
            torch.cuda.synchronize()
            first = out.clone() if first is None else first
            off = ((out - first).norm() / first.norm()).item()
            line.append(f"merge {columns} {us:.1f} us {n_bytes / us / 4.45e6:.3f}" + (f" OFF {off:.0e}" if not off < 1e-3 else ""))
        # Tasks that warps take one after the other are counted down by the merge: without it, only where there are few.
        if n_seqs * len(chunks) * kv_heads <= 132 * warps:
            line.append(f"without {recorded(lambda: run(False), n) * 1e3:.1f}")
        print(f"  {warps}x{stages} {cuts} {len(chunks)} chunks: {'; '.join(line)}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:] or ["compile"]
    with ProcessPoolExecutor() as pool:
        wides = list(pool.map(build_wide, WIDES)) if {"compile", "products"} & set(words) else []
        attends = list(pool.map(build_attend, ATTENDS)) if {"compile", "attention"} & set(words) else []
        splits = list(pool.map(build_split, SPLITS)) if {"compile", "decode"} & set(words) else []
        fews = list(pool.map(build_few, FEWS)) if {"compile", "few"} & set(words) else []
    for variant, (_, remarks) in [*zip(WIDES, wides), *zip(ATTENDS, attends), *zip(SPLITS, splits), *zip(FEWS, fews)]:
        print(variant if isinstance(variant[0], int) else variant[0], *remarks)
    if words != ["compile"]:
        import torch

        torch.manual_seed(7)
        torch.zeros(1, device="cuda")
        gpu = Driver()
        for word, run in [("products", lambda: products(gpu, wides)), ("few", lambda: few(gpu, fews)), ("attention", lambda: attention(gpu, attends)), ("decode", lambda: decode(gpu, splits))]:
            if word in words:
                run()
