"""How far answers move when pages come back from the disk in fewer bits.

    python3 eval/store/cold.py target/release/nuthatch [--json FILE]

Texts of this repository are prompts. Each is computed once and kept in each type; after a restart it is
loaded, and the distribution of the next token (its twenty best) and a greedy answer are compared with
those of exact pages. Needs nothing but Python.
"""

import argparse
import glob
import http.client
import json
import math
import os
import shutil
import tempfile

from resume import Server

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
N_CHARS = 6000
N_ANSWER = 32


def prompts():
    """The beginnings and middles of long texts."""
    found = []
    for path in sorted(glob.glob(os.path.join(ROOT, "*.md")) + glob.glob(os.path.join(ROOT, "docs", "*.md"))):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        found += [text[at : at + N_CHARS] for at in range(0, len(text) - N_CHARS, 2 * N_CHARS)]
    return found[:24]


def ask(server, prompt):
    """The best next tokens with their logarithms, a greedy answer, and how much was cached."""
    body = {"model": "any", "prompt": prompt, "max_tokens": N_ANSWER, "temperature": 0, "logprobs": 20}
    connection = http.client.HTTPConnection(*server.place, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    page = answer.read()
    assert answer.status == 200, page
    connection.close()
    page = json.loads(page)
    choice = page["choices"][0]
    cached = page["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["logprobs"]["top_logprobs"][0], choice["text"], cached


def divergence(exact, other):
    """Of the exact distribution from the other one, over the exact one's best tokens."""
    least = min(other.values())
    return sum(math.exp(p) * (p - other.get(token, least)) for token, p in exact.items())


def measure(binary, folder, dtype, texts, truth):
    words = ["--kv-disk", f"{folder}/{dtype}:4GiB", "--kv-cold-dtype", dtype]
    with Server(binary, *words) as server:
        for text in texts:
            ask(server, text)
        server.settle()
        metrics = server.metrics()
    n_pages = metrics["nuthatch:disk_saves_total:saved"]
    with Server(binary, *words) as server:
        answers = [ask(server, text) for text in texts]
    loaded = [(exact, got) for exact, got in zip(truth, answers) if got[2] > 0]
    kls = sorted(divergence(exact[0], got[0]) for exact, got in loaded)
    return {
        "dtype": dtype,
        "bytes_per_token": round(metrics["nuthatch:disk_bytes_written_total"] / n_pages / 16),
        "prompts_loaded": len(loaded),
        "kl_mean": round(sum(kls) / len(kls), 6),
        "kl_max": round(kls[-1], 6),
        "same_first_token": sum(
            max(e[0], key=e[0].get) == max(g[0], key=g[0].get) for e, g in loaded
        ),
        "same_answer": sum(e[1] == g[1] for e, g in loaded),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--json")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="nuthatch-cold-", dir=".")
    try:
        texts = prompts()
        with Server(args.binary) as server:
            truth = [ask(server, text) for text in texts]
        rows = []
        for dtype in ["auto", "int8", "fp8", "int4"]:
            rows.append(measure(args.binary, folder, dtype, texts, truth))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        shutil.rmtree(folder)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"command": "python3 eval/store/cold.py NUTHATCH", "rows": rows}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
