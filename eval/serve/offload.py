"""Pages on the host: a server with `--sparse` and `--kv-offload host` answers as it does without.

    python eval/serve/offload.py target/release/nuthatch --model FILE --words "--device cuda"

Streams at the same time with a common beginning, some of which leave early; others that find it; then
many that begin alike in nothing, at last in so little memory that some give way. A sequence that gave way
chooses anew when it comes back, so only its length is checked. No two requests are the same: a page of an
answer that was given before takes the place of its twin, and its sequence chooses anew too. Prints what
the servers counted, and checks that it fits together: hits and lookups of live and frozen heads, moved
bytes, the link's utilisation, and that the device keeps no more than its budget. At last servers whose rows
come in eight bits, brought by the device and by threads: both answer alike, if nobody gives way.
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
    """All prompts at the same time, and a few others who leave."""
    answers, failures = [None] * len(prompts), []

    def run(i, leaves_after):
        try:
            last = "" if leaves_after is None else f" But {leaves_after}"
            found = answer(server, prompts[i] + last, n_tokens, leaves_after)
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--model", required=True)
    parser.add_argument("--words", default="", help="for every server")
    parser.add_argument("--sparse", default="auto")
    parser.add_argument("--budget", default="4GiB", help="of the second server with far pages")
    parser.add_argument("--few", default="--max-model-len 4096 --kv-cache-memory-bytes 160MB",
                        help="for the third, in which some give way")
    parser.add_argument("--coded", default="fp8", help="what rows come as at last; nothing for none")
    parser.add_argument("--sentences", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=12)
    args = parser.parse_args()
    words = ["--model", args.model, "--sparse", args.sparse, *args.words.split()]
    # Also where there would be room for all pages on the device.
    far = ["--kv-offload", "host", "--kv-resident", "off"]
    common, n = story(args.sentences, 0), args.prompts
    ask = "{} Question {}: whose is lamp {}? Answer:"
    sets = {
        "cold": [ask.format(common, i, i * 11) for i in range(n)],
        "warm": [ask.format(common, i, i * 13) for i in range(100, 100 + n)],
        "apart": [story(args.sentences, 1000 * (i + 1)) for i in range(n)],
    }

    small = subprocess.run(
        [args.binary, "serve", "--port", "0", *words, *far, "--kv-device-budget", "8MiB"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    check(small.returncode != 0 and "too few" in small.stderr, small.stderr)
    print(small.stderr.strip().splitlines()[-1])

    problems = []

    def compare(what, found, expected, seconds, must=True):
        n = sum(a == b for a, b in zip(found, expected))
        print(f"{what}: {n} of {len(expected)} the same, {seconds:.2f} s")
        for i, (a, b) in enumerate(zip(found, expected)):
            if a != b:
                same = [x == y for x, y in zip(a[1], b[1])]
                print(f"    {i}: from token {same.index(False) if False in same else len(same)} on")
        if must and n < len(expected):
            problems.append(what)

    # Short questions with long answers all begin, and then have no room.
    growing = [story(20, 500_000 + 1000 * i) for i in range(n)]
    n_grown = 400

    with Serve(args.binary, *words) as server:
        expected = {}
        for name, prompts in sets.items():
            expected[name], seconds = crowd(server, prompts, args.tokens)
            print(f"here, {name}: {n} answers of {args.tokens} tokens in {seconds:.2f} s")
        grown, seconds = crowd(server, growing, n_grown)
        print(f"here, growing: {n} answers of {n_grown} tokens in {seconds:.2f} s")
        metrics(server)

    with Serve(args.binary, *words, *far) as server:
        begin = time.time()
        for name, prompts in sets.items():
            found, seconds = crowd(server, prompts, args.tokens)
            compare(f"far, {name}", found, expected[name], seconds)
        plain = check_near(metrics(server), time.time() - begin)
        server.end()

    with Serve(args.binary, *words, *far, "--kv-device-budget", args.budget) as server:
        for name, prompts in sets.items():
            found, seconds = crowd(server, prompts, args.tokens)
            check(all(len(a[1]) == args.tokens for a in found), "answers are whole")
            compare(f"far, {args.budget}, {name}", found, expected[name], seconds, must=False)
        counted = check_near(metrics(server), None)
        check(counted["nuthatch:kv_near_budget_bytes"] == bytes_of(args.budget), "another budget")
        server.end()

    coded = None
    for way in [[], ["--kv-transfer", "threads=3"]] if args.coded else []:
        words_now = [*words, *far, "--kv-offload-dtype", args.coded, *way]
        with Serve(args.binary, *words_now) as server:
            begin, rounded = time.time(), {}
            for name, prompts in sets.items():
                rounded[name], seconds = crowd(server, prompts, args.tokens)
                what = f"far as {args.coded} {' '.join(way)}, {name}"
                check(all(len(a[1]) == args.tokens for a in rounded[name]), "answers are whole")
                compare(what + ", against exact rows", rounded[name], expected[name], seconds, must=False)
                if coded:
                    compare(what + ", against the device", rounded[name], coded[name], seconds)
            counted = check_near(metrics(server), time.time() - begin)
            # Half the bytes for each row.
            per_row = [bytes_per_moved_row(found) for found in (counted, plain)]
            check(abs(per_row[0] / per_row[1] - 0.5) < 0.01, per_row)
            coded = coded or rounded
            server.end()

    with Serve(args.binary, *words, *far, *args.few.split()) as server:
        found, seconds = crowd(server, growing, n_grown)
        check(all(len(a[1]) == n_grown for a in found), "answers are whole")
        compare("far, few pages, growing", found, grown, seconds, must=False)
        counted = metrics(server)
        n_preempted = counted["nuthatch:preemptions_by_cause_total:pages_short"]
        check(n_preempted > 0, "nobody gave way")
        server.end()
    check(not problems, problems)
    print(f"{n_checks()} checks")


def bytes_of(size):
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size.endswith(unit):
            return int(size[:-3]) * factor
    return int(size)


def bytes_per_moved_row(found):
    """Rows that were missing near come with their pages, as they are."""
    moved = found["nuthatch:topk_rows_total:moved"]
    filled = found["nuthatch:topk_rows_total:filled"]
    row = found["nuthatch:kv_row_bytes"]
    return (found["nuthatch:topk_moved_bytes_total"] - filled * row) / moved


def check_near(found, seconds):
    """What a server with far pages counted fits together."""
    near = {name: value for name, value in found.items() if name.startswith("nuthatch:kv_near_bytes:")}
    budget = found["nuthatch:kv_near_budget_bytes"]
    check(0 < sum(near.values()) <= budget, (near, budget))
    check(found["nuthatch:kv_far_bytes"] > 0, "no page is far")
    for heads in ("live", "frozen"):
        hits = found[f"nuthatch:topk_hits_total:{heads}"]
        lookups = found[f"nuthatch:topk_lookups_total:{heads}"]
        check(hits <= lookups, (heads, hits, lookups))
    check(found["nuthatch:topk_hits_total:live"] > 0, "no live head hit")
    rows = {kind: found[f"nuthatch:topk_rows_total:{kind}"] for kind in ("all", "attended", "moved")}
    check(0 < rows["moved"] < rows["attended"] < rows["all"], rows)
    moved, rate = found["nuthatch:topk_moved_bytes_total"], found["nuthatch:kv_link_bytes_per_second"]
    check(moved > 0 and rate > 1e9, (moved, rate))
    if seconds:
        use = moved / seconds / rate
        print(f"    link: {moved / 1e6:.1f} MB in {seconds:.1f} s, {100 * use:.2f} % of {rate / 1e9:.1f} GB/s")
        check(use < 1, use)
    return found


def metrics(server):
    wanted = ("topk", "near", "far", "preempt", "swap")
    found = server.metrics()
    for name, value in found.items():
        if any(word in name for word in wanted):
            print(f"    {name} {value:g}")
    return found


if __name__ == "__main__":
    main()
