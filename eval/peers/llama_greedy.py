"""Greedy answers of llama.cpp, with the best candidates of every step.

    python llama_greedy.py --model X.gguf --prompts prompts.json --tokens 48 --json -

The prompts under "chat" go through the model's own chat template, those under "raw" do not.
`cargo xtask peer greedy` compares the result with nuthatch's.
"""

import argparse
import ctypes
import json
import os
import sys

# The folder holds a file with the package's name, so it must not be searched for it.
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
import jinja2.sandbox  # noqa: E402
import llama_cpp as lib  # noqa: E402
import numpy as np  # noqa: E402

N_CTX = 1024
TOP = 5


def load(path, threads):
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    lib.llama_log_set(silent, None)
    load.keep = silent  # the library calls it for as long as it lives
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    params = lib.llama_context_default_params()
    params.n_ctx = N_CTX
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 0
    return model, lib.llama_init_from_model(model, params)


def encode(vocab, text):
    """Tokens of `text`; special tokens are recognised, as in a rendered template."""
    data = text.encode()
    ids = (lib.llama_token * (len(data) + 8))()
    n = lib.llama_tokenize(vocab, data, len(data), ids, len(ids), True, True)
    if n < 0:
        raise SystemExit("llama_tokenize needs more room")
    return list(ids[:n])


def decode(vocab, ids):
    data = (lib.llama_token * len(ids))(*ids)
    text = ctypes.create_string_buffer(64 * len(ids) + 64)
    n = lib.llama_detokenize(vocab, data, len(ids), text, len(text), False, False)
    return text.raw[:n].decode(errors="replace")


def render(model, prompt):
    """The prompt in the model's chat template."""
    template = lib.llama_model_chat_template(model, None)
    if not template:
        raise SystemExit("the model has no chat template")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": prompt}]
    return environment.from_string(template.decode()).render(messages=messages, add_generation_prompt=True)


def step(ctx, tokens):
    ids = (lib.llama_token * len(tokens))(*tokens)
    if lib.llama_decode(ctx, lib.llama_batch_get_one(ids, len(tokens))) != 0:
        raise SystemExit("llama_decode failed")


def answer(model, ctx, prompt_ids, n):
    """`n` greedy tokens, or fewer when the model ends its answer."""
    vocab = lib.llama_model_get_vocab(model)
    n_vocab = lib.llama_vocab_n_tokens(vocab)
    lib.llama_memory_clear(lib.llama_get_memory(ctx), True)
    ids, steps, batch = [], [], prompt_ids
    while len(ids) < n:
        step(ctx, batch)
        logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, -1), (n_vocab,)).astype(np.float64)
        total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        best = np.argsort(-logits, kind="stable")[:TOP]
        steps.append([[int(at), float(logits[at] - total)] for at in best])
        token = int(best[0])
        ids.append(token)
        if lib.llama_vocab_is_eog(vocab, token):
            break
        batch = [token]
    return ids, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--prompts", required=True, help="a JSON object: chat and raw, lists of strings")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", default="-", help="file for the result, or - for standard output")
    args = parser.parse_args()
    with open(args.prompts, encoding="utf-8") as file:
        prompts = json.load(file)
    model, ctx = load(args.model, args.threads)
    vocab = lib.llama_model_get_vocab(model)
    answers = []
    for mode in ("chat", "raw"):
        for prompt in prompts[mode]:
            text = render(model, prompt) if mode == "chat" else prompt
            prompt_ids = encode(vocab, text)
            ids, steps = answer(model, ctx, prompt_ids, args.tokens)
            answers.append({
                "mode": mode, "prompt": prompt, "prompt_ids": prompt_ids,
                "ids": ids, "text": decode(vocab, ids), "steps": steps,
            })
    text = json.dumps({"engine": f"llama-cpp-python {lib.__version__}", "answers": answers})
    if args.json == "-":
        print(text)
    else:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
