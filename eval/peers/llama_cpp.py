"""Measures llama.cpp in llama-bench's terms: prefill (pp) and decode at a depth (tg).

    python llama_cpp.py --model X.gguf --threads 2 --prefill 512,2048,8192 --depth 128,2048,8000 --json -

Needs the package llama-cpp-python; `cargo xtask peer llama-cpp` builds it and calls this file.
It uses the library's low-level calls only, with llama-bench's settings: batches of 2048 tokens,
micro-batches of 512, KV in f16, random tokens.
One process loads the model once and measures each setting of flash attention with its own context.
The prompt of the longest test also serves the decode tests: the cache is cut back to each depth.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import time

# This file has the package's name, so its own folder must not be searched for it.
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
import llama_cpp as lib  # noqa: E402

N_BATCH = 2048
N_UBATCH = 512
# Shorter tests are repeated, so that each yields about the same measuring time.
SHORT_TOKENS = 512
SHORT_REPEATS = 3


def stolen_ticks():
    """Clock ticks of all CPUs, and those that the host of a virtual machine gave to others."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        return sum(ticks), ticks[7]
    except (OSError, IndexError, ValueError):
        return 0, 0


class Bench:
    """One context of the model, with the calls that a test needs."""

    def __init__(self, model, n_ctx, threads, flash):
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = N_BATCH
        params.n_ubatch = N_UBATCH
        params.n_threads = threads
        params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        params.no_perf = True
        self.ctx = lib.llama_init_from_model(model, params)
        if not self.ctx:
            raise SystemExit(f"llama.cpp made no context of {n_ctx} tokens")
        self.memory = lib.llama_get_memory(self.ctx)
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        source = random.Random(1)
        self.tokens = [source.randrange(n_vocab) for _ in range(n_ctx)]

    def close(self):
        lib.llama_free(self.ctx)

    def decode(self, tokens):
        ids = (lib.llama_token * len(tokens))(*tokens)
        status = lib.llama_decode(self.ctx, lib.llama_batch_get_one(ids, len(tokens)))
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")

    def prefill(self, n):
        """Seconds to read `n` tokens into an empty cache."""
        lib.llama_memory_clear(self.memory, True)
        start = time.perf_counter()
        for at in range(0, n, N_BATCH):
            self.decode(self.tokens[at : min(at + N_BATCH, n)])
        lib.llama_synchronize(self.ctx)
        return time.perf_counter() - start

    def cut(self, depth):
        """Forgets everything from position `depth` on."""
        if not lib.llama_memory_seq_rm(self.memory, 0, depth, -1):
            raise SystemExit(f"llama.cpp cannot cut the cache to {depth}")

    def generate(self, depth, n):
        """Seconds for `n` decode steps that start with `depth` tokens in the cache."""
        self.cut(depth)
        self.decode(self.tokens[:1])  # one step outside the measurement, as after a prefill
        lib.llama_synchronize(self.ctx)
        self.cut(depth)
        start = time.perf_counter()
        for at in range(n):
            self.decode(self.tokens[at : at + 1])
            lib.llama_synchronize(self.ctx)
        return time.perf_counter() - start


def gen_for(depth):
    """Decode steps measured at a depth: fewer where each is slow."""
    return 64 if depth < 1024 else 32 if depth < 4096 else 24


def measure(model, args, flash):
    """All tests with one setting of flash attention."""
    prefill, depths = args.prefill, args.depth
    longest = max(prefill + [depth + gen_for(depth) for depth in depths])
    bench = Bench(model, (longest + 255) // 256 * 256, args.threads, flash)
    tests = []

    def record(name, n, depth, run, repeats):
        seconds, stolen = [], []
        for _ in range(repeats):
            all_before, stolen_before = stolen_ticks()
            seconds.append(run())
            all_after, stolen_after = stolen_ticks()
            stolen.append((stolen_after - stolen_before) / max(1, all_after - all_before))
        tests.append({
            "name": name, "tokens": n, "depth": depth, "flash_attn": flash,
            "tokens_per_s": [n / s for s in seconds], "stolen": stolen,
        })
        print(f"{name} {n} @ {depth} flash={int(flash)}: "
              f"{n / statistics.median(seconds):.1f} tokens/s", file=sys.stderr, flush=True)

    bench.prefill(min(SHORT_TOKENS, longest))  # warms caches and thread pools
    in_cache = 0
    for n in sorted(prefill):
        repeats = args.repeat * (SHORT_REPEATS if n <= SHORT_TOKENS else 1)
        record("pp", n, 0, lambda n=n: bench.prefill(n), repeats)
        in_cache = n
    for depth in sorted(depths, reverse=True):
        if in_cache < depth:
            bench.prefill(depth)
        n = args.gen or gen_for(depth)
        record("tg", n, depth, lambda d=depth, n=n: bench.generate(d, n), args.repeat)
        in_cache = depth
    bench.close()
    return tests


def numbers(text):
    return [int(word) for word in text.split(",") if word]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prefill", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--depth", type=numbers, default=[128, 2048, 8000])
    parser.add_argument("--gen", type=int, default=0, help="decode steps; 0: by depth")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--flash", choices=["on", "off", "both"], default="both")
    parser.add_argument("--json", help="file for the result, or - for standard output")
    args = parser.parse_args()

    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(args.model.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {args.model}")
    tests = []
    for flash in {"on": [True], "off": [False], "both": [False, True]}[args.flash]:
        tests += measure(model, args, flash)
    result = {
        "engine": f"llama.cpp (llama-cpp-python {lib.__version__})",
        "system": lib.llama_print_system_info().decode().strip(),
        "threads": args.threads,
        "tests": tests,
    }
    text = json.dumps(result, indent=2)
    if args.json == "-":
        print(text)
    elif args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
