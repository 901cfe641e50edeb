"""What a conversation costs that comes back: from memory, the host, the disk, a store, or computed.

    python3 eval/store/resume.py target/release/nuthatch [--tokens 6000] [--redis PROGRAM] [--json FILE]

Measures the time to the first token of a prompt of random tokens, the length from which loading beats
computing and whether the engine knows it, the throughput that saving costs, and the bytes that are
written for each byte that is saved. With a `redis-server`, and a binary that has stores, also what comes
from there, what waiting requests gain by being fetched, and what a conversation costs whose oldest turns
were left out. Needs nothing but Python; the machine should be quiet.
"""

import argparse
import json
import math
import pathlib
import platform
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server import Serve  # noqa: E402

VOCAB = 40_000
PAGE_LEN = 16
MODEL = "smollm2"
LENGTHS = [40, 100, 200, 400, 1000, 3000]
RATES = [1_000_000_000, 50_000_000, 20_000_000, 5_000_000]


class Server(Serve):
    def __init__(self, binary, *words):
        device = [] if "--device" in words else ["--device", "cpu"]
        super().__init__(binary, *device, "--served-model-name", MODEL, *words)

    def first_token(self, prompt, answer=False):
        """Seconds to the first token, how many tokens of the prompt were cached, and the answer if it is
        asked for."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 16 if answer else 2,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin = time.monotonic()
        first, cached, text = None, 0, ""
        for line in self.post("/v1/completions", body):
            if not line.startswith(b"data: {"):
                continue
            first = first or time.monotonic() - begin
            event = json.loads(line[6:])
            text += "".join(choice["text"] for choice in event["choices"])
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return (first, cached, text) if answer else (first, cached)

    def settle(self, pause=0.5):
        """Waits until nothing more is saved."""
        before = -1
        while True:
            metrics = self.metrics()
            saved = sum(metrics.get(f"nuthatch:{tier}_saves_total:saved", 0) for tier in ("disk", "remote"))
            if saved == before:
                return
            before = saved
            time.sleep(pause)

    def written(self):
        """Bytes that the process has given to the file system, by whatever calls, in whole blocks."""
        with open(f"/proc/{self.process.pid}/io", encoding="ascii") as file:
            return int(re.search(r"^write_bytes: (\d+)", file.read(), re.M).group(1))


def start_redis(program):
    """A server on a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = ["--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("redis-server did not start")


def prompt_of(seed, n_tokens):
    draw = random.Random(repr(seed))
    return [draw.randrange(100, VOCAB) for _ in range(n_tokens)]


def median(values):
    return round(statistics.median(values), 4)


def slow_tiers(folder, redis):
    """The words for each slower tier."""
    tiers = {
        "disk": ["--kv-disk", f"{folder}/resume:4GiB"],
        "disk, int8": ["--kv-disk", f"{folder}/resume8:4GiB", "--kv-cold-dtype", "int8"],
        "disk, encrypted": ["--kv-disk", f"{folder}/resumex:4GiB", "--kv-key-file", f"{folder}/key"],
    }
    with open(f"{folder}/key", "wb") as file:
        file.write(bytes(range(32)))
    if redis:
        tiers["redis"] = ["--kv-remote", f"redis://127.0.0.1:{redis}"]
    return tiers


def resumed(binary, folder, n_tokens, rounds, redis):
    """Seconds to the first token of a conversation, by where it comes from."""
    tiers = slow_tiers(folder, redis)
    seconds = {name: [] for name in ("recompute", "memory", "host", *tiers)}
    cached = {}
    prompt, other = prompt_of("a", n_tokens), prompt_of("b", n_tokens)
    for name, words in tiers.items():
        with Server(binary, *words) as server:
            seconds["recompute"].append(server.first_token(prompt)[0])
            took, cached["memory"] = server.first_token(prompt)
            seconds["memory"].append(took)
            server.settle()
        for i in range(rounds):
            with Server(binary, *words) as server:
                # An engine that has computed something knows what computing costs.
                server.first_token(prompt_of(("c", i), 300))
                took, cached[name] = server.first_token(prompt)
                seconds[name].append(took)
        print(name, {name: seconds[name] for name in ("recompute", name)}, flush=True)
    # Room for one conversation, and the rest on the host.
    memory = ["--kv-cache-memory-bytes", 23_040 * (n_tokens + 600), "--swap-space", "1GiB"]
    with Server(binary, "--max-num-seqs", "1", *memory) as server:
        server.first_token(prompt)
        server.first_token(other)
        for _ in range(rounds):
            for tokens in (prompt, other):
                took, cached["host"] = server.first_token(tokens)
                seconds["host"].append(took)
    for where, tokens in cached.items():
        assert tokens >= n_tokens - 2 * PAGE_LEN, f"{where}: {tokens} of {n_tokens} tokens were cached"
    return {where: median(times) for where, times in seconds.items()} | {"cached_tokens": cached}


def turns(binary, folder, n_tokens, lengths=(1, 40, 100)):
    """Seconds to the first token of a conversation that goes on with so many new tokens, from memory and
    from the disk: what could be gained at most if loading took no time."""
    disk = ["--kv-disk", f"{folder}/turns:4GiB"]
    prompt = prompt_of("a", n_tokens)
    table = {}
    with Server(binary, *disk) as server:
        server.first_token(prompt)
        for n in lengths:
            table[n] = {"memory_s": round(server.first_token(prompt + prompt_of(("m", n), n))[0], 4)}
        server.settle()
    for n in lengths:
        with Server(binary, *disk) as server:
            server.first_token(prompt_of("c", 300))
            table[n]["disk_s"] = round(server.first_token(prompt + prompt_of(("d", n), n))[0], 4)
    return table


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


class Narrow:
    """A way to a server through which so many bytes a second come back."""

    def __init__(self, port, bytes_per_s):
        self.far, self.bytes_per_s, self.free = port, bytes_per_s, time.monotonic()
        self.lock = threading.Lock()
        self.gate = socket.create_server(("127.0.0.1", 0))
        self.port = self.gate.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            near, _ = self.gate.accept()
            far = socket.create_connection(("127.0.0.1", self.far))
            for source, target, is_slow in ((near, far, False), (far, near, True)):
                threading.Thread(target=self.pass_on, args=(source, target, is_slow), daemon=True).start()

    def pass_on(self, source, target, is_slow):
        try:
            while data := source.recv(65536):
                if is_slow:
                    with self.lock:
                        self.free = max(self.free, time.monotonic()) + len(data) / self.bytes_per_s
                        wait = self.free - time.monotonic()
                    time.sleep(max(wait, 0))
                target.sendall(data)
        except OSError:
            pass


def narrowed(binary, redis, rates, n_tokens=1000, n_prompts=4):
    """For each rate of a store: seconds when computed and when asked of it, one prompt after another."""
    table = []
    for rate in rates:
        prompts = [prompt_of(("n", rate, i), n_tokens) for i in range(n_prompts)]
        with Server(binary, "--kv-remote", f"redis://127.0.0.1:{redis}") as server:
            computed = [server.first_token(prompt)[0] for prompt in prompts]
            server.settle()
        way = Narrow(redis, rate)
        with Server(binary, "--kv-remote", f"redis://127.0.0.1:{way.port}") as server:
            server.first_token(prompt_of(("warm", rate), 300))
            asked = [server.first_token(prompt) for prompt in prompts]
        table.append({
            "bytes_per_s": rate,
            "computed_s": median(computed),
            "asked_s": [round(took, 3) for took, _ in asked],
            "cached_tokens": [cached for _, cached in asked],
        })
    return table


def both_sides(binary, redis, rate=10_000_000, lengths=(400, 5500)):
    """Through a way so narrow that computing short prompts and loading long ones is faster: what the
    engine does with both, after it has measured both."""
    table = []
    prompts = {n: [prompt_of(("b", n, i), n) for i in range(2)] for n in lengths}
    with Server(binary, "--kv-remote", f"redis://127.0.0.1:{redis}") as server:
        computed = {n: median(server.first_token(prompt)[0] for prompt in prompts[n]) for n in lengths}
        server.first_token(prompt_of("known", 400))
        server.settle()
    way = Narrow(redis, rate)
    with Server(binary, "--kv-remote", f"redis://127.0.0.1:{way.port}") as server:
        # What computing takes, at the beginning and far on, and what the way gives.
        server.first_token(prompt_of("other", 2500))
        server.first_token(prompt_of("known", 400))
        for n in lengths:
            asked = [server.first_token(prompt) for prompt in prompts[n]]
            table.append({
                "tokens": n,
                "computed_s": computed[n],
                "load_s": round(n * 23_040 / rate, 2),
                "asked_s": [round(took, 3) for took, _ in asked],
                "cached_tokens": [cached for _, cached in asked],
            })
    return {"bytes_per_s": rate, "lengths": table}


def waiting(binary, redis, rounds, rate=20_000_000, n_tokens=1000):
    """Seconds to the first token of a stored prompt: when nobody is before it, and from its turn on when
    it has waited, so that it was fetched."""
    prompts = [prompt_of(("w", i), n_tokens) for i in range(2 * rounds)]
    with Server(binary, "--kv-remote", f"redis://127.0.0.1:{redis}") as server:
        computed = median(server.first_token(prompt)[0] for prompt in prompts)
        server.settle()
    way = Narrow(redis, rate)
    alone, waited, cached = [], [], []
    with Server(binary, "--max-num-seqs", "1", "--kv-remote", f"redis://127.0.0.1:{way.port}") as server:
        server.first_token(prompt_of("first", 600))
        for i in range(rounds):
            took, n_cached = server.first_token(prompts[2 * i])
            alone.append(took)
            cached.append(n_cached)
            ends = []
            body = {"model": MODEL, "prompt": prompt_of(("before", i), 40), "max_tokens": 150,
                    "temperature": 0, "ignore_eos": True}
            before = threading.Thread(
                target=lambda: (server.post("/v1/completions", body).read(), ends.append(time.monotonic())))
            before.start()
            time.sleep(0.3)
            begin = time.monotonic()
            took, n_cached = server.first_token(prompts[2 * i + 1])
            before.join()
            waited.append(begin + took - ends[0])
            cached.append(n_cached)
    return {"tokens": n_tokens, "bytes_per_s": rate, "computed_s": computed, "alone_s": median(alone),
            "after_its_turn_s": median(waited), "cached_tokens": cached}


TALK = [
    "Nuthatches climb down trees head first, which hardly any other bird of their size does.",
    "In autumn they hide seeds behind bark and under moss, and come back for them in winter.",
    "They line the entrance of their nest with mud until only they fit through it.",
    "A pair stays together all year and defends its few hectares of old trees.",
    "Their call is loud for so small a bird and carries far through a bare wood.",
    "Oaks, beeches and hornbeams give them insects in summer and nuts in the cold months.",
]


def conversation(n_turns, seed):
    draw = random.Random(repr(("talk", seed)))
    messages = [{"role": "system", "content": "You know birds and answer in a few sentences."}]
    for turn in range(n_turns):
        facts = " ".join(draw.choice(TALK) for _ in range(5))
        messages.append({"role": "user", "content": f"Note {turn}: {facts} What follows from it?"})
        messages.append({"role": "assistant", "content": " ".join(draw.choice(TALK) for _ in range(4))})
    return messages


def divergence(exact, near):
    """Of the most likely tokens and of all others together, in nats."""
    known = [(math.exp(p), math.exp(near[token])) for token, p in exact.items() if token in near]
    rest = [max(1 - sum(side), 1e-6) for side in zip(*known)]
    return sum(p * math.log(p / q) for p, q in [*known, tuple(rest)])


def shifted(binary, folder, rounds, n_turns=8, n_dropped=2, n_answer=32):
    """A conversation without its oldest turns: time to the first token and the answer, computed and with
    --cache-reuse, and how far the probabilities of next tokens are from each other."""

    def ask(server, messages):
        body = {"model": MODEL, "messages": messages, "max_tokens": n_answer, "temperature": 0,
                "logprobs": True, "top_logprobs": 20, "stream": True, "stream_options": {"include_usage": True}}
        begin, first, cached, tokens = time.monotonic(), None, 0, []
        for line in server.post("/v1/chat/completions", body):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in event["choices"]:
                for token in (choice.get("logprobs") or {}).get("content") or []:
                    first = first or time.monotonic() - begin
                    top = {tuple(other["bytes"]): other["logprob"] for other in token["top_logprobs"]}
                    tokens.append((token["token"], top))
        return first, cached, tokens

    disk = ["--kv-disk", f"{folder}/shifted:4GiB", "--cache-reuse", "16"]
    question = {"role": "user", "content": "And where do they sleep?"}
    cut, found = [], {"computed_s": [], "reused_s": [], "cached_tokens": [], "same": [], "apart": []}
    with Server(binary, *disk) as server:
        for i in range(rounds):
            messages = conversation(n_turns, i)
            cut.append([messages[0], *messages[1 + 2 * n_dropped:], question])
            ask(server, messages)
        server.settle()
    with Server(binary) as plain, Server(binary, *disk) as reusing:
        for server in (plain, reusing):
            ask(server, conversation(2, "warm"))
        for messages in cut:
            took, _, exact = ask(plain, messages)
            found["computed_s"].append(took)
            took, cached, near = ask(reusing, messages)
            found["reused_s"].append(took)
            found["cached_tokens"].append(cached)
            same = next((i for i, (a, b) in enumerate(zip(exact, near)) if a[0] != b[0]), len(exact))
            found["same"].append(same)
            # Until they part, and where they part, both continue the same text.
            found["apart"] += [divergence(a[1], b[1]) for a, b in zip(exact[:same + 1], near)]
    return {
        "computed_s": median(found["computed_s"]),
        "reused_s": median(found["reused_s"]),
        "cached_tokens": found["cached_tokens"],
        "same_tokens_of_%d" % n_answer: found["same"],
        "kl": round(statistics.mean(found["apart"]), 4),
        "kl_of": len(found["apart"]),
    }


def saving(binary, folder, rounds, n_prompts=6, n_tokens=512, n_answer=48):
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
            server.post("/v1/completions", body).read()

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
    parser.add_argument("--redis", help="a redis-server")
    parser.add_argument("--parts", nargs="+", default=["saving", "first_token_s", "crossover"])
    parser.add_argument("--json", help="adds the results to this file")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="nuthatch-store-", dir=".")
    redis, port = start_redis(args.redis) if args.redis else (None, None)
    parts = {
        "saving": lambda: saving(args.binary, folder, args.rounds + 2),
        "first_token_s": lambda: resumed(args.binary, folder, args.tokens, args.rounds, port),
        "narrow_store": lambda: narrowed(args.binary, port, RATES),
        "crossover": lambda: crossover(args.binary, folder, LENGTHS, args.rounds),
        "turns": lambda: turns(args.binary, folder, args.tokens),
        "both_sides": lambda: both_sides(args.binary, port),
        "waiting": lambda: waiting(args.binary, port, args.rounds),
        "shifted": lambda: shifted(args.binary, folder, args.rounds),
    }
    result = {
        "command": f"python3 eval/store/resume.py NUTHATCH --tokens {args.tokens} --rounds {args.rounds}",
        "model": "SmolLM2-135M-Instruct, the default; KV in f16, 23,040 bytes a token",
        "machine": platform.processor() or platform.machine(),
    }
    if args.json and pathlib.Path(args.json).exists():
        result = json.loads(pathlib.Path(args.json).read_text(encoding="utf-8"))
    try:
        for part in args.parts:
            result[part] = parts[part]()
            print(part, json.dumps(result[part], indent=1), flush=True)
    finally:
        shutil.rmtree(folder)
        if redis:
            redis.kill()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
