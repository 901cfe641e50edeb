"""Measures `nuthatch serve` under load with `nuthatch bench serve`.

    cargo build --release
    python3 eval/serve/measure.py target/release/nuthatch --json eval/results/serve.json

Three parts, of which `--only` chooses one:

- load: 64 streams at a time for `--seconds` (600). No request may fail; the server's memory is recorded
  each second, and its growth is the median of the last quarter less that of the second one.
- http: the same file of requests by `nuthatch batch` and by a fresh server with as many streams at a time,
  by turns, `--rounds` times; what the server gives less is what HTTP and streaming cost. The load
  generator runs on the same cores, and its time counts as the server's.
- peer: the same loads on this server and on llama-cpp-python's, by turns: the same GGUF, threads and
  requests at a time; prompts without anything in common, and prompts that share a long beginning.
  `--llama-python` is an interpreter that has llama_cpp (`cargo xtask peer llama-cpp` builds one in
  target/peers/llama-cpp); what its server needs besides is installed beside it, once. That server
  computes one request at a time and keeps the KV of the last one.

`--short` makes every part small, to see that it works.
"""

import argparse
import datetime
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server import Serve  # noqa: E402

EXTRAS = ["fastapi", "uvicorn", "pydantic-settings", "sse-starlette", "starlette-context", "pyyaml"]
MODEL = os.path.expanduser("~/.cache/nuthatch/models/SmolLM2-135M-Instruct.Q4_1.gguf")


class Nuthatch(Serve):
    name = "nuthatch"

    def __init__(self, args, words=()):
        super().__init__(args.binary, args.model, "-t", args.threads, "-c", "2K", *words)


class LlamaServer:
    name = "llama-cpp-python"

    def __init__(self, args):
        port = 18_080
        self.url = f"http://127.0.0.1:{port}"
        command = [args.llama_python, "-m", "llama_cpp.server", "--model", args.model,
                   "--n_ctx", "2048", "--n_threads", str(args.threads),
                   "--n_threads_batch", str(args.threads), "--host", "127.0.0.1",
                   "--port", str(port), "--interrupt_requests", "False", "--verbose", "False"]
        env = dict(os.environ, PYTHONPATH=args.extras)
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        for _ in range(600):
            time.sleep(0.2)
            if self.process.poll() is not None:
                sys.exit(f"the peer's server did not start: {' '.join(command)}")
            try:
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                opener.open(self.url + "/v1/models", timeout=2).read()
                return
            except OSError:
                continue
        sys.exit("the peer's server does not answer")

    def end(self):
        self.process.terminate()
        self.process.wait(timeout=60)


def bench(args, server, words, watch=False):
    """A load on a server, as `bench serve` measured it, with the time that the generator took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [args.binary, "bench", "serve", "--base-url", server.url, "--json", "-", *words]
    if watch:
        command += ["--watch-pid", str(server.process.pid)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: {result.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = json.loads(result.stdout)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures["generator_cpu_seconds"] = round(used, 3)
    del figures["base_url"]
    figures["model_id"] = os.path.basename(figures["model_id"])
    return figures


def load(args):
    seconds = min(30, args.seconds) if args.short else args.seconds
    # A pool that the load fills within a minute: memory that is touched for the first time looks like
    # growth.
    server = Nuthatch(args, ["--max-num-seqs", "64", "--kv-cache-memory-bytes", "400MiB"])
    try:
        words = ["--duration", str(seconds), "--max-concurrency", "64", "--random-input-len", "64",
                 "--random-output-len", "64"]
        figures = bench(args, server, words, watch=True)
    finally:
        server.end()
    rss = [bytes for _, bytes in figures["rss"]["samples"]]
    quarter = max(len(rss) // 4, 1)
    early, late = rss[quarter:2 * quarter] or rss, rss[-quarter:]
    growth = statistics.median(late) - statistics.median(early)
    figures["rss_growth_bytes"] = growth
    print(f"load: {figures['completed']} answered, {figures['failed']} failed, "
          f"{figures['output_throughput']:.1f} tokens/s; TTFT p50 {figures['median_ttft_ms']:.0f} "
          f"p99 {figures['p99_ttft_ms']:.0f} ms; ITL p50 {figures['median_itl_ms']:.0f} p99 "
          f"{figures['p99_itl_ms']:.0f} ms; memory {rss[0] >> 20} -> {rss[-1] >> 20} MiB, growth "
          f"{growth / 2**20:.2f} MiB")
    if figures["failed"]:
        sys.exit(f"requests failed: {figures['errors']}")
    return figures


def write_requests(path, n, n_tokens):
    """Chats without a common beginning beyond the template's."""
    topics = ["tides", "glaciers", "bridges", "bees", "volcanoes", "compilers", "vaccines", "sails"]
    with open(path, "w", encoding="utf-8") as file:
        for i in range(n):
            text = f"{i}: explain {topics[i % len(topics)]} in {i % 5 + 2} sentences."
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": n_tokens,
                    "temperature": 0, "ignore_eos": True}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
                    "body": body}
            file.write(json.dumps(line) + "\n")


def http(args):
    n, n_tokens, rounds = (16, 24, 2) if args.short else (64, 128, args.rounds)
    # The template's beginning is common to all. A batch computes it for all at once, and a server, to
    # which they come one after another, only once; so nothing is shared here.
    seqs = ["--max-num-seqs", "16", "--no-enable-prefix-caching"]
    samples = {"batch": [], "serve": []}
    generator = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "requests.jsonl")
        write_requests(path, n, n_tokens)
        for i in range(rounds):
            # Whoever is first has the cooler machine: by turns.
            for way in ("batch", "serve") if i % 2 == 0 else ("serve", "batch"):
                if way == "batch":
                    output = os.path.join(folder, f"out{i}.jsonl")
                    command = [args.binary, "batch", path, "-m", args.model, "-o", output, "--json", "-t",
                               str(args.threads), "-c", "2K", *seqs]
                    result = subprocess.run(command, capture_output=True, text=True, check=False)
                    if result.returncode != 0:
                        sys.exit(f"{' '.join(command)}: {result.stderr}")
                    summary = json.loads(result.stdout)
                    tokens, seconds = summary["completion_tokens"], summary["seconds"]
                else:
                    server = Nuthatch(args, seqs)
                    try:
                        figures = bench(args, server, [
                            "--dataset-path", path, "--num-prompts", str(n), "--num-warmups", "0",
                            "--max-concurrency", str(n)])
                    finally:
                        server.end()
                    tokens, seconds = figures["total_output_tokens"], figures["duration"]
                    generator.append(figures["generator_cpu_seconds"])
                if tokens != n * n_tokens:
                    sys.exit(f"{way}: {tokens} tokens where {n * n_tokens} were asked for")
                samples[way].append(tokens / seconds)
    medians = {way: statistics.median(values) for way, values in samples.items()}
    pairs = [1 - serve / batch for serve, batch in zip(samples["serve"], samples["batch"])]
    cost = statistics.median(pairs)
    print(f"http: batch {medians['batch']:.1f}, server {medians['serve']:.1f} tokens/s (medians of "
          f"{rounds}); HTTP, streaming and the generator cost {100 * cost:.1f} % (median of pairs), "
          f"the generator alone took {statistics.median(generator):.2f} s of CPU")
    return {"requests": n, "tokens_each": n_tokens, "tokens_per_s": samples, "medians": medians,
            "cost_of_pairs": pairs, "cost": cost, "generator_cpu_seconds": generator}


def peer(args):
    install_extras(args)
    n, rounds = (4, 1) if args.short else (32, args.rounds)
    out = {}
    common = ["--num-prompts", str(n), "--max-concurrency", "8", "--random-output-len", "32"]
    kinds = {
        "apart": ["--random-input-len", "256"],
        "shared": ["--dataset-name", "shared-prefix", "--prefix-len", "512", "--num-prefixes", "2",
                   "--random-input-len", "32"],
    }
    for kind, words in kinds.items():
        runs = {"nuthatch": [], "llama-cpp-python": []}
        for i in range(rounds):
            makers = [lambda: Nuthatch(args, ["--max-num-seqs", "8"]), lambda: LlamaServer(args)]
            for make in makers if i % 2 == 0 else makers[::-1]:
                server = make()
                try:
                    runs[server.name].append(bench(args, server, common + words + ["--seed", str(i)]))
                finally:
                    server.end()
        for name, figures in runs.items():
            def middle(key):
                return statistics.median(run[key] for run in figures)
            print(f"peer, {kind}: {name} {middle('output_throughput'):.1f} tokens/s, TTFT p50 "
                  f"{middle('median_ttft_ms'):.0f} ms, TPOT p50 {middle('median_tpot_ms'):.0f} ms, "
                  f"E2EL p50 {middle('median_e2el_ms'):.0f} ms, failed {middle('failed'):.0f}")
        out[kind] = runs
    return out


def install_extras(args):
    stamp = os.path.join(args.extras, "stamp.txt")
    if not os.path.exists(stamp):
        subprocess.run([args.llama_python, "-m", "pip", "install", "--quiet", "--target",
                        args.extras, *EXTRAS], check=True)
        with open(stamp, "w", encoding="utf-8") as file:
            file.write(" ".join(EXTRAS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("binary", nargs="?", default="target/release/nuthatch")
    parser.add_argument("--only", choices=["load", "http", "peer"])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--llama-python", default="target/peers/llama-cpp/bin/python")
    parser.add_argument("--extras", default="target/peers/llama-server")
    parser.add_argument("--machine", default="", help="words about the machine, for the record")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    args.extras = os.path.abspath(args.extras)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            check=False).stdout.strip()
    record = {"what": "python3 eval/serve/measure.py " + " ".join(sys.argv[2:]).split(" --json")[0],
              "model": os.path.basename(args.model), "machine": args.machine, "commit": commit,
              "date": datetime.date.today().isoformat(), "threads": args.threads}
    for name, part in (("load", load), ("http", http), ("peer", peer)):
        if args.only in (None, name):
            record[name] = part(args)
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump(record, file, indent=1)
                    file.write("\n")


if __name__ == "__main__":
    main()
