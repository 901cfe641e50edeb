"""Writes sampling.txt: what Hugging Face's logits processors leave of random logits.

    python make_sampling.py > sampling.txt      (needs torch and transformers)

One case is four lines: parameters, prompt, logits, and the kept tokens as id:probability.
"""

import random

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 32


def processors(temperature, top_k, top_p, min_p, repetition):
    chain = LogitsProcessorList()
    if repetition != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(repetition))
    chain.append(TemperatureLogitsWarper(temperature))
    if top_k > 0:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chain.append(MinPLogitsWarper(min_p))
    return chain


def main():
    rng = random.Random(17)
    torch.manual_seed(17)
    for _ in range(60):
        params = (
            rng.choice([0.25, 0.5, 1.0, 1.5]),
            rng.choice([0, 0, 1, 5, 20, 32, 100]),
            rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
            rng.choice([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
            rng.choice([1.0, 1.0, 1.25, 0.5]),
        )
        prompt = [rng.randrange(VOCAB) for _ in range(6)]
        # Rounded, so that the text holds the number exactly.
        logits = (torch.randn(VOCAB) * rng.choice([0.5, 2.0, 6.0]) * 1024).round() / 1024
        scores = processors(*params)(torch.tensor([prompt]), logits[None].clone())[0]
        probs = torch.softmax(scores.double(), -1)
        kept = [(i, p) for i, p in enumerate(probs.tolist()) if scores[i] > -float("inf")]
        print(*params)
        print(*prompt)
        print(*(repr(x) for x in logits.tolist()))
        print(*(f"{i}:{p:.9f}" for i, p in kept))


main()
