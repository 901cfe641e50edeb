"""Averages of what `nuthatch eval --json` found, by policy, task and length.

    python3 accuracy.py CELLS.json RESULTS.json...            writes the averages of each cell
    python3 accuracy.py CELLS.json RESULTS.json... --against CPU.json...

Prints, for each model and policy, the average of its cells, the difference from `full` on the same
prompts with its standard error, rows attended and moved as averages of shares of the context, and rows
moved for a token over all prompts (of a head; bytes are these times a row's); with `--against`, how often other results
of the same prompts have the same score and the same answer.
"""
import argparse
import json
from collections import defaultdict
from statistics import fmean, pstdev


KEYS = ("score", "live_hits", "frozen_hits", "attended", "moved")


def records(paths, names):
    """By model, policy and prompt; `names` has the models' names by fingerprint."""
    found = {}
    for path in paths:
        results = json.load(open(path))
        model = names.setdefault(results["fingerprint"], results["model"].removesuffix(".gguf"))
        for r in results["records"]:
            # What was never asked has no prompt.
            if r["n_prompt"]:
                found[model, r["policy"], r["task"], r["length"], r["sample"]] = r
    return found


def mean(rs, key):
    values = [r[key] for r in rs if r.get(key) is not None]
    return round(fmean(values), 5) if values else None


def rows_moved(rs):
    """Rows that moved of a head, of all answers together and for each of their tokens but the first."""
    steps = [max(r["n_answer"] - 1, 1) for r in rs]
    rows = [(r.get("moved") or 0) * (r["n_prompt"] + r["n_answer"] / 2) for r in rs]
    total = sum(n * x for n, x in zip(steps, rows))
    return {"rows_moved": round(total), "rows_moved_a_token": round(total / sum(steps), 1)}


def main():
    args = argparse.ArgumentParser()
    args.add_argument("cells")
    args.add_argument("results", nargs="+")
    args.add_argument("--against", nargs="+", default=[])
    args.add_argument("--what", default="answers found by policies of top-k attention")
    args.add_argument("--command", default="")
    args.add_argument("--machine", default="")
    args = args.parse_args()
    names = {}
    found, others = records(args.results, names), records(args.against, names)
    by_policy, by_cell = defaultdict(list), defaultdict(list)
    for (model, policy, *prompt), r in found.items():
        full = found.get((model, "full", *prompt))
        by_policy[model, policy].append((r, full, others.get((model, policy, *prompt))))
        by_cell[model, policy, r["task"], r["length"]].append(r)
    cells = [
        {"model": model, "policy": policy, "task": task, "length": length, "n": len(rs)}
        | {key: mean(rs, key) for key in KEYS if mean(rs, key) is not None}
        for (model, policy, task, length), rs in sorted(by_cell.items())
    ]
    about = {"what": args.what, "command": args.command, "machine": args.machine}
    about["policies"] = [
        {"model": model, "policy": policy} | rows_moved([r for r, _, _ in rs])
        for (model, policy), rs in by_policy.items()
    ]
    lines = ",\n".join(json.dumps(cell) for cell in cells)
    with open(args.cells, "w") as out:
        out.write(json.dumps(about)[:-1] + ', "cells": [\n' + lines + "\n]}\n")
    print("| model | policy | prompts | answers | against full | attended % | moved % | rows a token | as others |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (model, policy), rs in by_policy.items():
        own = [cell["score"] for cell in cells if (cell["model"], cell["policy"]) == (model, policy)]
        off = [100 * (r["score"] - full["score"]) for r, full, _ in rs if full]
        error = pstdev(off) / len(off) ** 0.5 if off else 0
        plain = [r for r, _, _ in rs]
        share = [f"{100 * (mean(plain, key) or 0):.2f}" for key in ("attended", "moved")]
        both = [(r, other) for r, _, other in rs if other]
        alike = [sum(r[key] == o[key] for r, o in both) for key in ("score", "answer")]
        text = f"{alike[0]} scores, {alike[1]} answers of {len(both)}" if both else ""
        print(
            f"| {model} | `{policy}` | {len(rs)} | {100 * fmean(own):.1f} | "
            f"{fmean(off) if off else 0:+.1f} ± {error:.1f} | {share[0]} | {share[1]} | "
            f"{rows_moved(plain)['rows_moved_a_token']} | {text} |"
        )


main()
