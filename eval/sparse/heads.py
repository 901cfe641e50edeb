"""What heads of a recorded trace do: how often their lookups miss, and how many rows they choose.

    nuthatch eval -m MODEL --text FILE --task niah_single_2,vt --length 8K --samples 1 --policy auto --record-trace TRACE
    python eval/sparse/heads.py TRACE > HEADS.json

`cuda_bench FILE topk ... heads=HEADS.json` makes up queries of which as many miss.
"""

import argparse
import collections
import json


def heads(path):
    """By layer and head: the share of lookups that miss, and rows of a working set as a share of the context."""
    missed, sets = collections.defaultdict(list), collections.defaultdict(list)
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            decision = json.loads(line)
            lookup = decision["lookup"]
            kind = lookup if isinstance(lookup, str) else next(iter(lookup))
            if kind == "first":
                continue
            at = (decision["layer"], decision["head"])
            missed[at].append(kind != "hit")
            sets[at].append(len(decision["places"]) / decision["kv_len"])
    mean = lambda values: sum(values) / len(values)
    layers = sorted({layer for layer, _ in missed})
    return [
        [[round(mean(missed[at]), 3), round(mean(sets[at]), 4)] for at in sorted(missed) if at[0] == layer]
        for layer in layers
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", help="what `--record-trace` wrote, by one policy")
    found = heads(parser.parse_args().trace)
    print("[")
    print(",\n".join("  " + json.dumps(layer) for layer in found))
    print("]")


if __name__ == "__main__":
    main()
