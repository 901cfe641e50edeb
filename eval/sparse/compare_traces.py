"""Compares two traces of decisions, recorded by `nuthatch eval --record-trace FILE.jsonl`.

    python3 compare_traces.py CPU.jsonl CUDA.jsonl

Both must be of the same command on two devices. While a trace is recorded, a device that decides by
itself is compared with the host's decisions from the same queries and scores, and the command fails
where they differ. Queries of two devices differ (the CPU rounds activations to eight bits for quantised
weights), so here selections may differ where scores do: printed is how often everything is the same, and
how much selections overlap. Fails
if the steps are not the same, or if selections overlap by less than `--overlap` on the average.
"""
import argparse
import json
import sys
from collections import defaultdict


def decisions(path):
    with open(path) as lines:
        for line in lines:
            yield json.loads(line)


def kind(lookup):
    return lookup if isinstance(lookup, str) else next(iter(lookup))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("traces", nargs=2)
    args.add_argument("--overlap", type=float, default=0.9)
    args = args.parse_args()
    sums = defaultdict(lambda: defaultdict(float))
    left, right = map(decisions, args.traces)
    n_left = n_right = 0
    for a, b in zip(left, right):
        n_left, n_right = n_left + 1, n_right + 1
        where = [(d["row"], d["policy"], d["layer"], d["head"], d["kv_len"]) for d in (a, b)]
        if where[0] != where[1]:
            sys.exit(f"decision {n_left} is about {where[0]} and {where[1]}")
        sums_of = sums[a["policy"]]
        sums_of["n"] += 1
        sums_of["lookup"] += kind(a["lookup"]) == kind(b["lookup"])
        sums_of["moved a"] += a["n_moved"]
        sums_of["moved b"] += b["n_moved"]
        if a["chosen"] is not None and b["chosen"] is not None:
            x, y = set(a["chosen"]), set(b["chosen"])
            sums_of["chosen"] += 1
            sums_of["same"] += x == y
            sums_of["overlap"] += len(x & y) / max(len(x), len(y), 1)
        x, y = set(a["places"]), set(b["places"])
        sums_of["attended"] += len(x & y) / max(len(x), len(y), 1)
    n_left, n_right = n_left + sum(1 for _ in left), n_right + sum(1 for _ in right)
    is_good = n_left == n_right
    print(f"{n_left} and {n_right} decisions")
    for policy, s in sorted(sums.items()):
        n, n_chosen = s["n"], max(s["chosen"], 1)
        print(
            f"policy {policy}: lookups alike {s['lookup'] / n:.4f}, of {s['chosen']:.0f} selections "
            f"of both the same {s['same'] / n_chosen:.4f}, overlap {s['overlap'] / n_chosen:.4f}; "
            f"attended alike {s['attended'] / n:.4f}; rows moved {s['moved a']:.0f} and "
            f"{s['moved b']:.0f}"
        )
        is_good &= s["chosen"] == 0 or s["overlap"] / n_chosen >= args.overlap
    sys.exit(0 if is_good else "the traces differ")


main()
