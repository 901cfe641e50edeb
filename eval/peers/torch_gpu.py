"""PyTorch on a GPU as a peer: decode with FlashInfer in one CUDA graph, prefill with flash SDPA.

    pip install torch && pip install --no-deps flashinfer-python==0.3.1 einops pynvml nvidia-ml-py tabulate click
    python eval/peers/torch_gpu.py --decode 1x8192,32x8192 --prefill 8192,32768 --attention 1x32768 --json FILE

Random bf16 weights in a model's shape: speed does not depend on their values. Decode replays one
captured step, greedy sampling included, over pages in a random order. Prefill is one pass over all
tokens of a prompt; only the last one's logits are computed. `attention` is FlashInfer's decode kernel
alone, captured over several layers. The floor is the bytes that must be read over the read bandwidth
that was measured first.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PAGE = 16

# layers, hidden, query heads, key/value heads, head width, width inside, vocabulary, bias of q, k, v
SHAPES = {
    "llama3-8b": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "qwen2.5-14b": (48, 5120, 40, 8, 128, 13824, 152064, True),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064, True),
    "llama2-7b": (32, 4096, 32, 32, 128, 11008, 32000, False),
    "smollm2-135m": (30, 576, 9, 3, 64, 1536, 49152, False),
}


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def milliseconds(run, repeat=20):
    """Median time of a call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def read_bandwidth():
    """Bytes a second of a reduction over 2 GiB, which reads and writes next to nothing."""
    source = torch.randn(1 << 29, device="cuda")
    return 4 * source.numel() / milliseconds(source.max) * 1e3


class Pages:
    """Keys and values of a batch, on pages in a random order, and FlashInfer's plan for it."""

    def __init__(self, shape, n_layers, batch, depth):
        import flashinfer

        _, _, heads, kv_heads, width, *_ = shape
        n_pages = batch * depth // PAGE
        self.kv = [random(n_pages, 2, kv_heads, PAGE, width) for _ in range(n_layers)]
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * (depth // PAGE)
        pages = torch.randperm(n_pages, device="cuda").int()
        filled = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
        self.last = pages[starts[1:].long() - 1].long()
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=filled,
        )
        self.wrapper.plan(
            starts, pages, filled, heads, kv_heads, width, PAGE,
            q_data_type=torch.bfloat16, data_type=torch.bfloat16,
        )

    def attend(self, layer, q, k=None, v=None):
        if k is not None:
            self.kv[layer][self.last, 0, :, PAGE - 1] = k
            self.kv[layer][self.last, 1, :, PAGE - 1] = v
        return self.wrapper.run(q, self.kv[layer])


class Model:
    def __init__(self, shape):
        self.shape = shape
        n_layers, hidden, heads, kv_heads, width, inside, vocab, has_bias = shape
        qkv = (heads + 2 * kv_heads) * width
        self.table, self.head, self.norm = random(vocab, hidden), random(vocab, hidden), random(hidden)
        self.layers = [
            (
                random(hidden), random(qkv, hidden), random(qkv) if has_bias else None,
                random(hidden, heads * width), random(hidden), random(2 * inside, hidden), random(hidden, inside),
            )
            for _ in range(n_layers)
        ]

    def angles(self, positions):
        width = self.shape[4]
        speeds = 1.0 / 500000 ** (torch.arange(0, width, 2, device="cuda").float() / width)
        angles = positions.float()[:, None] * speeds
        return angles.cos().bfloat16()[:, None], angles.sin().bfloat16()[:, None]

    def forward(self, tokens, angles, attend, n_outputs):
        _, hidden, heads, kv_heads, width, *_ = self.shape
        cos, sin = angles

        def turned(x):
            low, high = x.chunk(2, -1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        x = self.table[tokens]
        for layer, (norm, qkv, bias, out, norm2, gate_up, down) in enumerate(self.layers):
            rows = F.linear(F.rms_norm(x, (hidden,), norm), qkv, bias)
            q, k, v = (
                part.view(len(tokens), -1, width)
                for part in rows.split([heads * width, kv_heads * width, kv_heads * width], -1)
            )
            attended = attend(layer, turned(q), turned(k), v)
            x = x + F.linear(attended.reshape(len(tokens), -1), out)
            gate, up = F.linear(F.rms_norm(x, (hidden,), norm2), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[-n_outputs:], (hidden,), self.norm), self.head)

    def weight_bytes(self):
        n_layers, hidden, heads, kv_heads, width, inside, vocab, _ = self.shape
        layer = hidden * ((2 * heads + 2 * kv_heads) * width + 3 * inside)
        return 2 * (n_layers * layer + vocab * hidden)


def captured(run):
    """A call that replays what `run` queues."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def decode(model, batch, depth, bandwidth):
    n_layers, _, _, kv_heads, width, *_ = model.shape
    pages = Pages(model.shape, n_layers, batch, depth)
    tokens = torch.zeros(batch, dtype=torch.long, device="cuda")
    angles = model.angles(torch.full((batch,), depth - 1, device="cuda"))

    def step():
        tokens.copy_(model.forward(tokens, angles, pages.attend, batch).argmax(-1))

    ms = milliseconds(captured(step))
    n_bytes = model.weight_bytes() + 4 * n_layers * kv_heads * width * depth * batch
    floor = n_bytes / bandwidth * 1e3
    return {"ms": round(ms, 3), "floor_ms": round(floor, 3), "of_floor": round(floor / ms, 3)}


def attention(shape, batch, depth, bandwidth):
    n_layers, (_, _, heads, kv_heads, width, *_) = 4, shape
    pages = Pages(shape, n_layers, batch, depth)
    q = random(batch, heads, width)

    def run():
        for layer in range(n_layers):
            pages.attend(layer, q)

    ms = milliseconds(captured(run)) / n_layers
    share = 4 * kv_heads * width * depth * batch / bandwidth * 1e3 / ms
    return {"us": round(ms * 1e3, 1), "of_roof": round(share, 3)}


def prefill(model, length):
    def attend(_, q, k, v):
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    tokens = torch.randint(0, model.shape[6], (length,), device="cuda")
    angles = model.angles(torch.arange(length, device="cuda"))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        ms = milliseconds(lambda: model.forward(tokens, angles, attend, 1), 5)
        n_layers, _, heads, kv_heads, width, *_ = model.shape
        q, k = random(length, heads, width), random(length, kv_heads, width)
        alone = milliseconds(lambda: attend(0, q, k, k), 5)
    operations = 2 * length * length * heads * width
    return {
        "ms": round(ms, 2), "tokens_per_s": round(length / ms * 1e3),
        "attention_ms": round(alone, 3), "attention_tflop_per_s": round(operations / alone / 1e9, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", choices=SHAPES)
    parser.add_argument("--decode", default="", help="batches, such as 1x8192,32x8192")
    parser.add_argument("--attention", default="", help="batches of the decode kernel alone")
    parser.add_argument("--prefill", default="", help="lengths of prompts, such as 8192")
    parser.add_argument("--json", help="where the figures go")
    args = parser.parse_args()
    torch.manual_seed(0)
    split = lambda text: [tuple(map(int, part.split("x"))) for part in text.split(",") if part]
    bandwidth, shape = read_bandwidth(), SHAPES[args.model]
    rows = [{"peer": "torch", "version": torch.__version__, "read_gb_per_s": round(bandwidth / 1e9)}]

    def add(what, name, run):
        row = {"model": args.model, what: name}
        try:
            with torch.no_grad():
                row.update(run())
        except (torch.OutOfMemoryError, RuntimeError, ImportError) as error:
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()

    print(json.dumps(rows[0]), flush=True)
    for batch, depth in split(args.attention):
        add("attention", f"{batch}x{depth}", lambda: attention(shape, batch, depth, bandwidth))
    model = Model(shape) if args.decode or args.prefill else None
    for batch, depth in split(args.decode):
        add("decode", f"{batch}x{depth}", lambda: decode(model, batch, depth, bandwidth))
    for (length,) in split(args.prefill):
        add("prefill", str(length), lambda: prefill(model, length))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
