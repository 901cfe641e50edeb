"""Makes the seeds of the fuzz targets: the smallest files that the parsers accept.

    pip install gguf safetensors numpy tokenizers
    python fuzz/make_seeds.py
"""

import json
import os

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seeds")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def path(target, name):
    folder = os.path.join(HERE, target)
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, name)


def llama_gguf():
    """One layer, width 32, eight tokens."""
    width, vocab = 32, ["<s>", "</s>", "a", "b", "c", "ab", "abc", "d"]
    writer = gguf.GGUFWriter(path("gguf", "llama.gguf"), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    ones = np.ones(width, dtype=np.float32)
    square = np.zeros((width, width), dtype=np.float16)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocab), width), dtype=np.float16))
    writer.add_tensor("output_norm.weight", ones)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", ones)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(target, name, text):
    with open(path(target, name), "w", encoding="utf-8") as file:
        file.write(text)


def configs():
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": [2, 3],
    }
    write("config_json", "llama.json", json.dumps(base))
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write("config_json", "llama3.json", json.dumps(base | {"rope_scaling": scaling}))
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    qwen = base | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
    write("config_json", "qwen3.json", json.dumps(qwen | {"rope_scaling": yarn}))
    mistral = base | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    write("config_json", "mistral.json", json.dumps(mistral | {"sliding_window": 32}))
    write("config_json", "shared.json", json.dumps(base | {"num_kv_shared_layers": 1}))
    write("config_json", "share_map.json", json.dumps(base | {"kv_share_map": [0, 0]}))


def tokenizer():
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "\u0120": 5}
    tokens = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<s>"])
    write("tokenizer_json", "bpe.json", tokens.to_str())


def main():
    llama_gguf()
    save_file({"a": np.zeros((2, 3), dtype=np.float16)}, path("safetensors_header", "one.safetensors"))
    configs()
    tokenizer()
    write("chat_template", "chatml.jinja", TEMPLATE)
    write("stop_matcher", "overlap.txt", "abc\nbcd\nababcabcd")
    write("gguf_vocab", "words.txt", "abcab abc d\n")


if __name__ == "__main__":
    main()
