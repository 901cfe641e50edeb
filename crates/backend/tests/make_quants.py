"""Makes quants.txt: blocks of random bytes and the floats that GGUF's own package decodes them to.

    pip install gguf numpy && python make_quants.py > quants.txt

One line a row: the type, the row's bytes in hex, the decoded little-endian f32 in hex. Scales are
finite f16 numbers of both signs, subnormals among them; all other bytes are random.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

# Byte offsets of the f16 fields of one block.
F16_AT = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
}


def main() -> None:
    rng = np.random.default_rng(1)
    print("# Made by make_quants.py: type, bytes, floats.")
    for kind in [T.F32, T.F16, T.BF16]:
        values = rng.standard_normal(24).astype(np.float32) * np.float32(10) ** rng.integers(-6, 4, 24)
        values = np.concatenate([values, [0.0, -0.0, 1.0, -65504.0]]).astype(np.float32)
        if kind == T.F32:
            row = values.view(np.uint8)
        elif kind == T.F16:
            row = values.astype(np.float16).view(np.uint8)
        else:
            row = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        show(kind, row)
    for kind, offsets in F16_AT.items():
        size = GGML_QUANT_SIZES[kind][1]
        blocks = rng.integers(0, 256, (2 if size > 40 else 4, size), dtype=np.uint8)
        for n, block in enumerate(blocks):
            for at in offsets:
                scale = np.float16(rng.standard_normal() * (1e-6 if n == 1 else 0.1))
                block[at : at + 2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
        show(kind, blocks.reshape(-1))


def show(kind: T, row: np.ndarray) -> None:
    floats = dequantize(row.reshape(1, -1), kind).astype(np.float32)
    print(kind.name, row.tobytes().hex(), floats.tobytes().hex())


main()
