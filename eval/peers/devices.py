"""Compares greedy answers of one model on two devices, and shows the logits where they part.

    python eval/peers/devices.py --nuthatch target/release/nuthatch \\
        --one "--model X-f32.gguf --device cpu" --other "--model X.gguf --device cuda --exact-activations"

A tie is where both devices list both tokens within the tolerance of each other. The error is that of
the logarithms of all probabilities that both list, up to where they part.
"""

import argparse
import concurrent.futures
import json
import math
import pathlib
import shlex
import subprocess
import sys


def answer(args, options, prompt):
    mode, text = prompt
    command = [args.nuthatch, "run", *shlex.split(options), "--prompt", text, "--greedy", "--json"]
    command += ["--logprobs", "5", "--max-tokens", str(args.tokens)] + ["--raw"] * (mode == "raw")
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def lead(steps, at, token, other):
    """How much likelier `token` was than `other`, if both are listed."""
    known = dict(map(tuple, steps[at]))
    return known[token] - known[other] if token in known and other in known else math.inf


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nuthatch", required=True)
    parser.add_argument("--one", required=True, help="options of the first device")
    parser.add_argument("--other", required=True, help="options of the second device")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--tolerance", type=float, default=0.01, help="nats of a tie")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    prompts = json.loads(pathlib.Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    prompts = [(mode, text) for mode in ("chat", "raw") for text in prompts[mode]]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        ones = list(pool.map(lambda prompt: answer(args, args.one, prompt), prompts))
        others = list(pool.map(lambda prompt: answer(args, args.other, prompt), prompts))
    counts, errors = {"equal": 0, "tie": 0, "differ": 0}, []
    for (mode, text), one, other in zip(prompts, ones, others):
        pairs = list(zip(one["ids"], other["ids"]))
        parted = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        for at in range(len(pairs) if parted is None else parted + 1):
            known = dict(map(tuple, other["steps"][at]))
            errors += [value - known[token] for token, value in one["steps"][at] if token in known]
        verdict, note = "equal", f"{len(pairs)} tokens"
        if parted is not None:
            a, b = pairs[parted]
            leads = lead(one["steps"], parted, a, b), lead(other["steps"], parted, b, a)
            verdict = "tie" if max(leads) <= args.tolerance else "differ"
            note = f"at token {parted}: {a} leads {b} by {leads[0]:.4f}, {b} leads {a} by {leads[1]:.4f} nats"
        counts[verdict] += 1
        print(f"{verdict:<7}{mode:<6}{text[:40]!r:<44}{note}")
    rms = math.sqrt(sum(error * error for error in errors) / max(len(errors), 1))
    print(f"{counts}; logarithms differ by {rms:.5f} nats rms, {max(map(abs, errors)):.5f} at most")
    sys.exit(counts["differ"] > 0)


if __name__ == "__main__":
    main()
