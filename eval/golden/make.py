#!/usr/bin/env python3
"""Makes the golden models: tiny random models, and what Hugging Face transformers computes on them.

Requirements: pip install torch transformers safetensors gguf
(last run with torch 2.15, transformers 5.22, safetensors 0.8, gguf 0.19)

    python eval/golden/make.py            writes crates/model/tests/golden/
    python eval/golden/make.py --only yarn

Each folder holds a model as its users would have it (config.json and safetensors, or one .gguf
file) and a `golden.safetensors` with, in f32:

    prompt         [P]      i32, the tokens of the prompt
    greedy         [16]     i32, the tokens that follow, each the argmax of the logits before it
    rows           [R]      i32, positions whose logits are stored: some of the prompt, the last of
                            it, and every greedy token but the last
    logits         [R, V]   the logits at those positions
    inv_freq       [D/2]    the frequencies that transformers used
    and the metadata `golden`, JSON with `max_context` (the context that the engine must be started
    with) and `attention_factor` (what cosine and sine were multiplied by).

The reference is one forward pass over the whole sequence (prompt and greedy tokens), eager
attention, all in f32. That one pass serves two purposes. It makes the reference independent of
transformers' cache. And it fixes the frequencies: transformers' dynamic and longrope scalings depend
on the length of the sequence so far, but an engine that caches rotated keys must choose them once,
from the context that it was started with. So for `dynamic` the sequence is exactly `max_context` long
(prompt + 16 tokens), the last step extends it to that length, and for `longrope` the prompt is longer
than the original context and so is `max_context`; there is also a `longrope-short` whose context is
the original one. Greedy tokens are found by passes over sequences padded to the full length, so that
every step uses the frequencies of the full length; causal attention does not see the padding.

`shared.py` has the models whose layers share keys and values.

Beside the folders, `rope.json` has the frequencies of real and odd rotations by transformers' own
functions, `quants.json` a few blocks of every quantised type with their values, and `beams.json` the
answers of `generate(num_beams=...)` to the golden prompts of some of the models.

The GGUF models are written by the `gguf` package from the same weights, quantised by it, and the
reference runs on the dequantised weights.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import beams
import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = Path(__file__).resolve().parents[2] / "crates" / "model" / "tests" / "golden"
N_GREEDY = 16
FACTORS_SHORT = [1.0, 1.02, 1.1, 1.15, 1.3, 1.5, 1.6, 1.7]
FACTORS_LONG = [1.0, 1.2, 1.5, 2.0, 2.6, 3.1, 3.6, 4.0]

# What all models share unless they say otherwise. Odd sizes on purpose: a vocabulary that is not a
# multiple of a register, a feed-forward width that is not a power of two.
BASE = dict(
    vocab_size=163,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    attn_implementation="eager",
)


# A smaller shape, for the models that show one detail only: all of them together stay below 3 MB.
SMALL = dict(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def rope(kind, theta=10000.0, **more):
    return dict(rope_type=kind, rope_theta=theta, **more)


class Case:
    """One golden model."""

    def __init__(self, name, model, config, prompt=48, max_context=None, dtype=None, shards=1, **over):
        self.name, self.shards, self.prompt = name, shards, prompt
        self.dtype = dtype or torch.bfloat16
        if config is Qwen2Config:
            # It has no such key: a head is always the hidden size over the heads.
            over.pop("head_dim", None)
        self.config = config(**{**BASE, **over})
        self.model_class = model
        self.max_context = max_context


def llama(name, **over):
    return Case(name, LlamaForCausalLM, LlamaConfig, **over)


def rope_case(name, **over):
    """A small Llama with a scaled rotation."""
    return llama(name, **{**SMALL, "tie_word_embeddings": True, **over})


def cases():
    yield llama("llama-tied", dtype=torch.float32, tie_word_embeddings=True, **SMALL)
    yield llama(
        "llama3",
        max_position_embeddings=256,
        rope_parameters=rope(
            "llama3",
            theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    )
    yield llama("llama2-mha", num_key_value_heads=4, shards=2)
    yield llama("llama-bias", dtype=torch.float16, attention_bias=True, **SMALL)
    yield Case(
        "mistral-window", MistralForCausalLM, MistralConfig, prompt=70, sliding_window=21
    )
    yield Case("qwen2", Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True, rms_norm_eps=1e-6)
    yield Case(
        "qwen2-window",
        Qwen2ForCausalLM,
        Qwen2Config,
        **SMALL,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=13,
        max_window_layers=1,
    )
    yield Case("qwen3", Qwen3ForCausalLM, Qwen3Config, head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=True)
    yield rope_case("linear", rope_parameters=rope("linear", factor=4.0))
    yield rope_case(
        "dynamic",
        prompt=56,
        max_context=56 + N_GREEDY,
        max_position_embeddings=32,
        rope_parameters=rope("dynamic", factor=2.0),
    )
    yield rope_case(
        "yarn",
        prompt=60,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0),
    )
    yield rope_case(
        "yarn-mscale",
        rope_parameters=rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=4.0,
            mscale=0.7,
            mscale_all_dim=1.3,
            truncate=False,
        ),
    )
    for name, context in [("longrope", 128), ("longrope-short", 64)]:
        long = name == "longrope"
        yield rope_case(
            name,
            prompt=60 if long else 40,
            max_context=context,
            rope_parameters=rope(
                "longrope",
                factor=4.0,
                original_max_position_embeddings=32 if long else 64,
                short_factor=FACTORS_SHORT,
                long_factor=FACTORS_LONG,
            ),
        )


def randomise(model, generator):
    """Weights large enough that attention is peaked and logits are far from flat."""
    for name, weight in model.named_parameters():
        with torch.no_grad():
            if name.endswith("norm.weight"):
                weight.copy_(1.0 + 0.2 * torch.randn(weight.shape, generator=generator))
            elif name.endswith("bias"):
                weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
            elif "embed" in name or "lm_head" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
            else:
                gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(
                    gain / math.sqrt(weight.shape[1]) * torch.randn(weight.shape, generator=generator)
                )


@torch.no_grad()
def reference(case, model, generator):
    """The golden tensors and their metadata."""
    model = model.eval()
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    vocab = case.config.vocab_size
    prompt = torch.randint(3, vocab, (case.prompt,), generator=generator)
    total = case.prompt + N_GREEDY
    tokens = torch.zeros(total, dtype=torch.long)
    tokens[: case.prompt] = prompt
    for at in range(case.prompt, total):
        logits = model(tokens[None]).logits[0]
        tokens[at] = logits[at - 1].argmax()
    logits = model(tokens[None]).logits[0]
    # Ties would make the greedy tokens a matter of rounding.
    top = logits[case.prompt - 1 : total - 1].topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-3, f"{case.name}: a tie, change the seed"
    spread = logits.std()
    assert spread > 0.5, f"{case.name}: flat logits {spread}"

    rows = sorted({0, 1, case.prompt // 3, case.prompt // 2, case.prompt - 2}) + list(
        range(case.prompt - 1, total - 1)
    )
    # The frequencies of the last pass: the full length's.
    rotary = model.model.rotary_emb
    tensors = dict(
        prompt=prompt.int(),
        greedy=tokens[case.prompt :].int(),
        rows=torch.tensor(rows).int(),
        logits=logits[rows].contiguous(),
        inv_freq=rotary.inv_freq.float().contiguous(),
    )
    metadata = dict(
        max_context=case.max_context or case.config.max_position_embeddings,
        attention_factor=float(rotary.attention_scaling),
    )
    return tensors, metadata


def write_golden(folder, tensors, metadata):
    # One key only: the order of several would differ from run to run.
    save_file(tensors, folder / "golden.safetensors", metadata=dict(golden=json.dumps(metadata)))


def make(case, seed, patch=None):
    folder = OUT / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    model = case.model_class(case.config)
    randomise(model, generator)
    model = model.to(case.dtype)
    if case.shards == 1:
        model.save_pretrained(folder)
    else:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=int(size / case.shards * 1.1))
        assert len(list(folder.glob("model-*.safetensors"))) == case.shards
    # Read back in f32: converting the model itself would leave rounded frequencies in it.
    model = case.model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if patch:
        patch(model)
    write_golden(folder, *reference(case, model, generator))


def permute(weight, n_heads):
    """From halves (element i turns with i + D/2) to the pairs (2i with 2i + 1) of GGUF's Llama."""
    rows = weight.shape[0]
    return weight.reshape(n_heads, 2, rows // n_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def gguf_file(path, arch, config, state, quant):
    """Writes the model, and puts the dequantised weights into `state`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        heads = next((n for key, n in heads.items() if arch == "llama" and key in name), None)
        if array.ndim == 1:
            assert heads is None or "bias" not in name
            writer.add_tensor(gguf_name(name), array)
            continue
        if heads:
            array = permute(array, heads)
        packed = gguf.quants.quantize(np.ascontiguousarray(array), quant)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=quant)
        array = gguf.quants.dequantize(packed, quant).astype(np.float32)
        if heads:
            array = unpermute(array, heads)
        state[name] = torch.from_numpy(np.ascontiguousarray(array))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unpermute(weight, n_heads):
    rows = weight.shape[0]
    return weight.reshape(n_heads, rows // n_heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def make_gguf(seed):
    for arch, model_class, config_class, over in [
        ("llama", LlamaForCausalLM, LlamaConfig, dict(SMALL, tie_word_embeddings=True)),
        ("qwen2", Qwen2ForCausalLM, Qwen2Config, dict(SMALL)),
    ]:
        for quant in [Q.F16, Q.Q8_0, Q.Q4_0]:
            name = f"gguf-{arch}-{quant.name.lower()}"
            case = Case(name, model_class, config_class, **over)
            folder = OUT / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            generator = torch.Generator().manual_seed(seed)
            model = model_class(case.config)
            randomise(model, generator)
            state = dict(model.state_dict())
            gguf_file(folder / "model.gguf", arch, case.config, state, quant)
            model.load_state_dict(state)
            write_golden(folder, *reference(case, model, generator))
            seed += 1


def rope_cases():
    """Rotations of real models and odd ones: a config.json's keys, and the context to start with."""
    llama = dict(hidden_size=4096, num_attention_heads=32, max_position_embeddings=8192)
    small = dict(hidden_size=256, num_attention_heads=4, max_position_embeddings=4096)
    llama3 = dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    longrope = dict(
        rope_type="longrope",
        short_factor=[1.0 + i / 100 for i in range(32)],
        long_factor=[1.0 + i * i / 20 for i in range(32)],
    )
    yield dict(llama, rope_theta=500000.0), 8192
    yield dict(llama, rope_theta=500000.0, max_position_embeddings=131072, rope_scaling=llama3), 131072
    yield dict(llama, head_dim=64, rope_scaling=dict(llama3, factor=32.0)), 131072
    yield dict(llama, rope_theta=1e6, max_position_embeddings=32768, rope_scaling=yarn), 131072
    yield dict(small, rope_theta=1e5, rope_scaling=dict(yarn, type="yarn", original_max_position_embeddings=8192)), 32768
    yield dict(small, rope_scaling=dict(yarn, attention_factor=1.25, beta_fast=16.0, beta_slow=2.0)), 131072
    yield dict(small, rope_scaling=dict(yarn, mscale=0.707, mscale_all_dim=1.0)), 131072
    yield dict(small, rope_scaling=dict(yarn, truncate=False, original_max_position_embeddings=300)), 131072
    yield dict(small, rope_scaling=dict(yarn, factor=1.0)), 32768
    yield dict(small, rope_parameters=dict(yarn, rope_theta=5e5)), 131072
    yield dict(small, rope_scaling=dict(rope_type="linear", factor=3.5)), 4096
    yield dict(small, rope_scaling=dict(rope_type="dynamic", factor=2.0)), 4000
    yield dict(small, rope_scaling=dict(rope_type="dynamic", factor=2.0)), 8192
    yield dict(small, rope_scaling=dict(rope_type="dynamic", factor=8.0)), 30001
    yield dict(small, original_max_position_embeddings=1024, rope_scaling=longrope), 1024
    yield dict(small, original_max_position_embeddings=1024, rope_scaling=longrope), 1025
    yield dict(small, rope_scaling=dict(longrope, original_max_position_embeddings=512, factor=16.0)), 4096
    yield dict(small, rope_scaling=dict(longrope, attention_factor=1.19, original_max_position_embeddings=512)), 4096


def make_rope():
    """What transformers' own functions make of rotations, without any model."""
    out = []
    for keys, context in rope_cases():
        config = dict(
            model_type="llama",
            vocab_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            rms_norm_eps=1e-5,
            **keys,
        )
        # A copy: transformers moves keys about in the dictionaries that it is given.
        parsed = LlamaConfig(**json.loads(json.dumps(config)))
        kind = parsed.rope_parameters["rope_type"]
        if kind == "default":
            theta, dim = parsed.rope_parameters["rope_theta"], parsed.head_dim
            inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
            factor = 1.0
        else:
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](parsed, device="cpu", seq_len=context)
        out.append(
            dict(
                config=config,
                max_context=context,
                attention_factor=float(factor),
                inv_freq=[float(f"{value:.9g}") for value in inv_freq.float().tolist()],
            )
        )
    with open(OUT / "rope.json", "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in out) + "\n]\n")


def make_quants(seed):
    """Random blocks of every quantised type, with the gguf package's idea of their values."""
    random = np.random.default_rng(seed)
    # Where a block keeps its half-precision scales: random bits there could be NaN or infinite.
    scales = {
        Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0],
        Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208],
    }  # fmt: skip
    out = {}
    for quant, places in scales.items():
        _, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        blocks = random.integers(0, 256, (3, block_bytes), dtype=np.uint8)
        for row in blocks:
            for place in places:
                scale = np.float16(random.normal() * 0.05)
                row[place : place + 2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
        values = gguf.quants.dequantize(blocks, quant).astype(np.float32)
        assert np.isfinite(values).all()
        out[quant.name] = [
            dict(block=block.tobytes().hex(), values=row.tobytes().hex()) for block, row in zip(blocks, values)
        ]
    with open(OUT / "quants.json", "w") as file:
        json.dump(out, file, indent=0)
        file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="make only the folders whose name contains this")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    for seed, case in enumerate(cases()):
        if not only or only in case.name:
            make(case, 1000 + seed)
            print(case.name)
    # Here, because it uses this file.
    import shared

    shared.make_all(only)
    if not only or "gguf" in only:
        make_gguf(2000)
    if not only or "rope" in only:
        make_rope()
    if not only or "quants" in only:
        make_quants(3000)
    if not only or "beams" in only:
        beams.make(OUT, 4000)
    size = sum(file.stat().st_size for file in OUT.rglob("*") if file.is_file())
    print(f"{size} bytes in all")


if __name__ == "__main__":
    main()
