"""Pages on the host: a server with `--sparse` and `--kv-offload host` answers as it does without.

    python eval/serve/offload.py target/release/nuthatch --model FILE --words "--device cuda"

Streams at the same time with a common beginning, some of which leave early; then many that begin alike in
nothing, in so little memory that some give way. A sequence that gave way chooses anew when it comes
back, so only its length is checked. Prints what the servers counted.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from server import Serve, check, n_checks  # noqa: E402

NAMES = ["Ada", "Basil", "Clara", "Dorian", "Edith", "Felix", "Greta", "Hugo", "Iris", "Jonas"]


def story(n, start):
    """About twenty tokens a sentence."""
    lines = (
        f"Lamp {i} on the pier belongs to {NAMES[i * 7 % 10]}, whose boat has the number {i * i % 977}."
        for i in range(start, start + n)
    )
    return " ".join(lines)


def answer(server, prompt, n_tokens, leaves_after=None):
    """The text and the log probabilities of a stream; nothing if it is left early."""
    body = {
        "prompt": prompt,
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "stream": True,
    }
    stream = server.post("/v1/completions", body)
    text, logprobs = "", []
    for line in stream:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices", []):
            text += choice["text"]
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
        if leaves_after is not None and len(logprobs) >= leaves_after:
            stream.close()
            return None
    return text, logprobs


def crowd(server, prompts, n_tokens):
    """All prompts at the same time, and of every third a second one who leaves."""
    answers, failures = [None] * len(prompts), []

    def run(i, leaves_after):
        try:
            found = answer(server, prompts[i], n_tokens, leaves_after)
            if leaves_after is None:
                answers[i] = found
        except Exception as error:  # noqa: BLE001
            failures.append(f"{i}: {error}")

    begin = time.time()
    jobs = [(i, None) for i in range(len(prompts))]
    jobs += [(i, 3 + i % 5) for i in range(0, len(prompts), 3)]
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(not failures, failures)
    return answers, time.time() - begin


def same(found, expected):
    return sum(a == b for a, b in zip(found, expected))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--model", required=True)
    parser.add_argument("--words", default="", help="for every server")
    parser.add_argument("--sparse", default="auto")
    parser.add_argument("--budget", default="640MiB", help="for the server in which some give way")
    parser.add_argument("--sentences", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=12)
    args = parser.parse_args()
    words = ["--model", args.model, "--sparse", args.sparse, *args.words.split()]
    far = ["--kv-offload", "host"]
    common = story(args.sentences, 0)
    alike = [f"{common} Question {i}: whose is lamp {i * 11}? Answer:" for i in range(args.prompts)]
    apart = [story(args.sentences, 1000 * (i + 1)) for i in range(args.prompts)]

    small = subprocess.run(
        [args.binary, "serve", "--port", "0", *words, *far, "--kv-device-budget", "8MiB"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    check(small.returncode != 0 and "too few" in small.stderr, small.stderr)
    print(small.stderr.strip().splitlines()[-1])

    with Serve(args.binary, *words) as server:
        expected, seconds = crowd(server, alike, args.tokens)
        print(f"here: {len(alike)} with a common beginning in {seconds:.2f} s")
        again, seconds = crowd(server, alike, args.tokens)
        check(again == expected, "the same server answers otherwise")
        print(f"here: again in {seconds:.2f} s")
        expected_apart, seconds = crowd(server, apart, args.tokens)
        print(f"here: {len(apart)} with nothing in common in {seconds:.2f} s")
        metrics(server)

    with Serve(args.binary, *words, *far) as server:
        for what in ["far", "far, again"]:
            found, seconds = crowd(server, alike, args.tokens)
            print(f"{what}: {same(found, expected)} of {len(alike)} the same, {seconds:.2f} s")
            check(found == expected, what)
        found, seconds = crowd(server, apart, args.tokens)
        print(f"far, apart: {same(found, expected_apart)} of {len(apart)} the same, {seconds:.2f} s")
        check(found == expected_apart, "far, apart")
        metrics(server)
        server.end()

    budget = ["--kv-device-budget", args.budget]
    with Serve(args.binary, *words, *far, *budget) as server:
        found, seconds = crowd(server, apart, args.tokens)
        n_same = same(found, expected_apart)
        print(f"far, {args.budget}: {n_same} of {len(apart)} the same, {seconds:.2f} s")
        check(all(len(a[1]) == args.tokens for a in found), "answers are whole")
        found, seconds = crowd(server, alike, args.tokens)
        print(f"far, {args.budget}: {same(found, expected)} of {len(alike)} the same, {seconds:.2f} s")
        metrics(server)
        server.end()
    print(f"{n_checks()} checks")


def metrics(server):
    wanted = ("topk", "near", "far", "preempt", "swap")
    for name, value in server.metrics().items():
        if any(word in name for word in wanted):
            print(f"    {name} {value:g}")


if __name__ == "__main__":
    main()
