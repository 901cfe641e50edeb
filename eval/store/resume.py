"""What a conversation costs that comes back: from memory, from the host, from the disk, or computed.

    python3 eval/store/resume.py target/release/nuthatch [--tokens 6000] [--json FILE]

Measures the time to the first token of a prompt of random tokens, the length from which loading beats
computing and whether the engine knows it, the throughput that saving costs, and the bytes that are
written for each byte that is saved. Needs nothing but Python; the machine should be quiet.
"""

import argparse
import http.client
import json
import platform
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time

VOCAB = 40_000
PAGE_LEN = 16
MODEL = "smollm2"


class Server:
    """`nuthatch serve` with these words, for as long as the block lasts."""

    def __init__(self, binary, *words):
        names = ["--served-model-name", MODEL]
        command = [binary, "serve", "--port", "0", "--device", "cpu", *names, *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            found = re.search(r"served at https?://([^:]+):(\d+)", line)
            if found:
                self.place = (found.group(1), int(found.group(2)))
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return
        raise RuntimeError("the server did not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def first_token(self, prompt):
        """Seconds to the first token, and how many tokens of the prompt were cached."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(*self.place, timeout=600)
        begin = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        first, cached = None, 0
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.monotonic() - begin
            usage = json.loads(line[6:]).get("usage")
            if usage:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
        connection.close()
        return first, cached

    def metrics(self):
        connection = http.client.HTTPConnection(*self.place, timeout=60)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        found = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if not name.startswith("nuthatch:"):
                continue
            label = re.search(r'(?:end|reason)="([^"]*)"', name)
            found[name.partition("{")[0] + (f":{label.group(1)}" if label else "")] = float(value)
        return found

    def settle(self):
        """Waits until nothing more is saved."""
        before = -1
        while True:
            saved = self.metrics().get("nuthatch:disk_saves_total:saved", 0)
            if saved == before:
                return
            before = saved
            time.sleep(0.5)

    def written(self):
        """Bytes that the process has given to the file system."""
        with open(f"/proc/{self.process.pid}/io", encoding="ascii") as file:
            return int(re.search(r"^wchar: (\d+)", file.read(), re.M).group(1))


def prompt_of(seed, n_tokens):
    draw = random.Random(repr(seed))
    return [draw.randrange(100, VOCAB) for _ in range(n_tokens)]


def median(values):
    return round(statistics.median(values), 4)


def resumed(binary, folder, n_tokens, rounds):
    """Seconds to the first token of a conversation, by where it comes from."""
    seconds = {"recompute": [], "memory": [], "host": [], "disk": []}
    cached = {}
    disk = ["--kv-disk", f"{folder}/resume:4GiB"]
    for i in range(rounds):
        prompt, other = prompt_of(("a", i), n_tokens), prompt_of(("b", i), n_tokens)
        with Server(binary, *disk) as server:
            seconds["recompute"].append(server.first_token(prompt)[0])
            took, cached["memory"] = server.first_token(prompt)
            seconds["memory"].append(took)
            server.settle()
        with Server(binary, *disk) as server:
            # An engine that has computed something knows what computing costs.
            server.first_token(prompt_of(("c", i), 600))
            took, cached["disk"] = server.first_token(prompt)
            seconds["disk"].append(took)
        # Room for one conversation, and the rest on the host.
        bytes_kv = 23_040 * (n_tokens + 600)
        with Server(
            binary, "--max-num-seqs", "1", "--kv-cache-memory-bytes", str(bytes_kv), "--swap-space", "1GiB"
        ) as server:
            server.first_token(prompt)
            server.first_token(other)
            took, cached["host"] = server.first_token(prompt)
            seconds["host"].append(took)
    for where, tokens in cached.items():
        assert tokens >= n_tokens - 2 * PAGE_LEN, f"{where}: {tokens} of {n_tokens} tokens were cached"
    return {where: median(times) for where, times in seconds.items()} | {"cached_tokens": cached}


def crossover(binary, folder, lengths, rounds):
    """For each length: seconds when computed and when loaded, and what the engine chose."""
    table = []
    disk = ["--kv-disk", f"{folder}/crossover:4GiB"]
    for n_tokens in lengths:
        prompts = [prompt_of(("x", n_tokens, i), n_tokens) for i in range(rounds)]
        with Server(binary, *disk) as server:
            # Its costs are known before it is asked.
            server.first_token(prompt_of(("warm", n_tokens), 1500))
            computed = [server.first_token(prompt)[0] for prompt in prompts]
            server.settle()
        with Server(binary, *disk) as server:
            server.first_token(prompt_of(("warm again", n_tokens), 1500))
            loaded = [server.first_token(prompt) for prompt in prompts]
            declined = server.metrics()["nuthatch:disk_loads_declined_total"]
        table.append({
            "tokens": n_tokens,
            "computed_s": median(computed),
            "resumed_s": median(took for took, _ in loaded),
            "loaded": sum(cached > 0 for _, cached in loaded),
            "declined": int(declined),
            "of": rounds,
        })
    return table


def saving(binary, folder, rounds, n_prompts=12, n_tokens=512, n_answer=48):
    """Tokens a second with and without a disk tier, in turns, and bytes written for each saved."""

    def load(server, i):
        def one(k):
            body = {
                "model": MODEL,
                "prompt": prompt_of(("s", i, k), n_tokens),
                "max_tokens": n_answer,
                "temperature": 0,
                "ignore_eos": True,
            }
            connection = http.client.HTTPConnection(*server.place, timeout=600)
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            connection.close()

        begin = time.monotonic()
        threads = [threading.Thread(target=one, args=(k,)) for k in range(n_prompts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return n_prompts * (n_tokens + n_answer) / (time.monotonic() - begin)

    speeds = {"without": [], "with": []}
    with Server(binary, "--max-num-seqs", "4") as plain:
        with Server(binary, "--max-num-seqs", "4", "--kv-disk", f"{folder}/saving:4GiB") as disk:
            for server in (plain, disk):
                load(server, "warm")
            before = disk.written(), disk.metrics()
            for i in range(rounds):
                order = [("without", plain), ("with", disk)]
                for name, server in order if i % 2 else reversed(order):
                    speeds[name].append(load(server, i))
            disk.settle()
            after = disk.written(), disk.metrics()
    ratios = [a / b for a, b in zip(speeds["with"], speeds["without"])]
    grown = {name: after[1][name] - before[1].get(name, 0) for name in after[1]}
    pages = grown["nuthatch:disk_saves_total:saved"]
    return {
        "tokens_per_s_without": round(statistics.median(speeds["without"]), 1),
        "tokens_per_s_with": round(statistics.median(speeds["with"]), 1),
        "loss_percent": round(100 * (1 - statistics.median(ratios)), 2),
        "pages_saved": int(pages),
        "pages_not_saved": int(
            sum(grown[f"nuthatch:disk_saves_total:{end}"] for end in ("failed", "refused", "missed"))
        ),
        "write_amplification": round((after[0] - before[0]) / (pages * 23_040 * PAGE_LEN), 4),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="nuthatch-store-", dir=".")
    try:
        result = {
            "command": f"python3 eval/store/resume.py NUTHATCH --tokens {args.tokens} --rounds {args.rounds}",
            "model": "SmolLM2-135M-Instruct, the default; KV in f16, 23,040 bytes a token",
            "machine": platform.processor() or platform.machine(),
        }
        result["saving"] = saving(args.binary, folder, args.rounds + 2)
        print(json.dumps(result["saving"]), flush=True)
        result["first_token_s"] = resumed(args.binary, folder, args.tokens, args.rounds)
        print(json.dumps(result["first_token_s"]), flush=True)
        result["crossover"] = crossover(args.binary, folder, [40, 100, 200, 400, 1000, 3000], args.rounds)
        for row in result["crossover"]:
            print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(folder)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
