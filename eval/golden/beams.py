"""What transformers' own beam search answers to the golden prompts of some of the models.

`make.py` calls this after it has made the models.
"""

import json

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

BEAM_MODELS = [
    ("llama3", LlamaForCausalLM),
    ("mistral-window", MistralForCausalLM),
    ("qwen2-window", Qwen2ForCausalLM),
]
N_BEAM_TOKENS = 20


def beam_settings():
    """Widths, penalties and ends in all combinations, and each of the rarer settings once."""
    for width in [2, 4, 8]:
        for length_penalty in [0.5, 1.0, 2.0]:
            for early_stopping in [True, False, "never"]:
                yield dict(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    usual = dict(width=4, length_penalty=1.0, early_stopping=False)
    yield dict(usual, width=1)
    yield dict(usual, length_penalty=-1.0)
    yield dict(usual, length_penalty=0.0, early_stopping="never")
    yield dict(usual, n_eos=0)
    yield dict(usual, n_eos=3)
    yield dict(usual, min_tokens=9)
    yield dict(usual, repetition_penalty=1.3)


@torch.no_grad()
def beam_search(model, prompt, setting, eos):
    """The answers without their ends, their scores, and whether each was ended by a token."""
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        do_sample=False,
        num_beams=setting["width"],
        num_return_sequences=setting["width"],
        length_penalty=setting["length_penalty"],
        early_stopping=setting["early_stopping"],
        max_new_tokens=N_BEAM_TOKENS,
        min_new_tokens=setting.get("min_tokens"),
        repetition_penalty=setting.get("repetition_penalty"),
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    if setting["width"] == 1:
        # One beam is greedy search to transformers, which gives no score.
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = [score.log_softmax(-1)[0, token].item() for score, token in zip(out.scores, tokens)]
        rows, scores = [tokens], [sum(logprobs) / len(tokens) ** setting["length_penalty"]]
    else:
        lengths = (out.beam_indices >= 0).sum(-1)
        rows = [row[len(prompt) :][:n].tolist() for row, n in zip(out.sequences, lengths)]
        scores = out.sequences_scores.tolist()
    answers = []
    for row, score in zip(rows, scores):
        stopped = row[-1] in eos
        answers.append(dict(tokens=row[:-1] if stopped else row, stopped=stopped, score=float(f"{score:.7g}")))
    return answers


def beam_case(name, models, prompt, setting, generator):
    """Of some choices of the tokens that end an answer, the one by which most answers end; and none
    that hangs on rounding."""
    n_eos = setting.get("n_eos", 1)
    # Tokens that the search meets when nothing ends it.
    endless = beam_search(models[0], prompt, setting, [])
    met = torch.tensor(sorted({token for answer in endless for token in answer["tokens"]}))
    best, most = None, min(n_eos, 1) - 1
    for _ in range(20 if n_eos else 1):
        eos = met[torch.randperm(len(met), generator=generator)[:n_eos]].tolist()
        answers = beam_search(models[0], prompt, setting, eos)
        gaps = [a["score"] - b["score"] for a, b in zip(answers, answers[1:])]
        stopped = sum(a["stopped"] for a in answers)
        if stopped > most and all(gap > 1e-6 for gap in gaps):
            exact = beam_search(models[1], prompt, setting, eos)
            if [a["tokens"] for a in answers] == [a["tokens"] for a in exact]:
                best, most = dict(setting, eos=eos, answers=answers), stopped
    assert best, f"{name}: no tokens end {setting} well"
    return dict(model=name, **best)


def make(out_folder, seed):
    """What transformers' own beam search gives."""
    out = []
    for name, model_class in BEAM_MODELS:
        generator = torch.Generator().manual_seed(seed)
        prompt = load_file(out_folder / name / "golden.safetensors")["prompt"].long()
        models = [
            model_class.from_pretrained(out_folder / name, dtype=dtype, attn_implementation="eager").eval()
            for dtype in (torch.float32, torch.float64)
        ]
        for setting in beam_settings():
            out.append(beam_case(name, models, prompt, setting, generator))
    with open(out_folder / "beams.json", "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in out) + "\n]\n")
