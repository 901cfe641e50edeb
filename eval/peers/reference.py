"""Judges greedy answers by the same weights in f32: which engine's probabilities are closer?

    pip install torch transformers accelerate gguf
    cargo xtask peer greedy --json pairs.json
    python eval/peers/reference.py --model X.gguf --pairs pairs.json

Prints the root mean square error of the log probabilities of each step's best three tokens, and what
the reference thinks where the two engines part.
"""

import argparse
import json
import math
import os

import torch
from transformers import AutoModelForCausalLM

TOP = 3


def log_probs(model, answer):
    """Log probabilities after each token of the answer's prompt end and of the answer."""
    ids = answer["prompt_ids"] + answer["ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits[len(answer["prompt_ids"]) - 1 :].double(), -1)


def rms(errors):
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the GGUF file that both engines read")
    parser.add_argument("--pairs", required=True, help="what peer greedy --json wrote")
    args = parser.parse_args()
    folder, name = os.path.split(os.path.abspath(args.model))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    with open(args.pairs, encoding="utf-8") as file:
        pairs = json.load(file)
    errors = {"nuthatch": [], "llama_cpp": []}
    for pair in pairs:
        truth = {}
        for engine, found in errors.items():
            truth[engine] = log_probs(model, pair[engine])
            for at, step in enumerate(pair[engine]["steps"]):
                found += [value - truth[engine][at, token].item() for token, value in step[:TOP]]
        ours, theirs = pair["nuthatch"]["ids"], pair["llama_cpp"]["ids"]
        parted = [at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b]
        note = "equal"
        if parted:
            at = parted[0]
            lead = (truth["nuthatch"][at, ours[at]] - truth["nuthatch"][at, theirs[at]]).item()
            side = "nuthatch" if lead > 0 else "llama.cpp"
            note = f"part at {at}; the reference prefers {side} by {abs(lead):.3f} nats"
        prompt = pair["prompt"][:40].replace("\n", " ")
        print(f"{pair['mode']:<6}{prompt:<42}{note}")
    for engine, found in errors.items():
        print(f"{engine}: rms error {rms(found):.4f} nats, largest {max(map(abs, found)):.3f}")


if __name__ == "__main__":
    main()
