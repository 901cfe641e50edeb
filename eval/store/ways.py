"""What a conversation costs that comes back from the disk, by how its files are read.

    python3 eval/store/ways.py target/release/nuthatch [--tokens 6000] [--rounds 2] [--json FILE]
"""

import argparse
import json
import os
import pathlib
import tempfile

from resume import PAGE_LEN, Server, median, prompt_of


def forget_files(folder):
    """Lets the system write files out and forget what it has of them."""
    for path in pathlib.Path(folder).glob("*.kvseg"):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ways(binary, folder, n_tokens, rounds, n_new=40):
    """Seconds to the first token of a conversation that goes on with a few new tokens, by how its files
    are read, by whether the system has them in its page cache, and by whether the first layers are
    computed while the others come."""
    where = f"{folder}/ways"
    disk = ["--kv-disk", f"{where}:4GiB"]
    prompt = prompt_of("a", n_tokens)
    with Server(binary, *disk) as server:
        server.first_token(prompt)
        server.settle()
    table = {}
    for i in range(rounds):
        for io in ("threads", "uring", "threads,direct", "uring,direct"):
            for is_cold in (False, True):
                for layers in ("true", "false"):
                    if is_cold:
                        forget_files(where)
                    with Server(binary, *disk, "--kv-disk-io", io, "--kv-disk-layers", layers) as server:
                        server.first_token(prompt_of(("c", i), 300))
                        took, cached = server.first_token(prompt + prompt_of(("d", i), n_new))
                        early = server.metrics().get("nuthatch:disk_loads_total:early", 0)
                    assert cached >= n_tokens - PAGE_LEN, cached
                    name = f"{io}, {'cold' if is_cold else 'cached'}, {'layers' if layers == 'true' else 'whole'}"
                    table.setdefault(name, []).append((round(took, 4), int(early)))
    return {
        name: {
            "first_token_s": median(took for took, _ in all),
            "all_s": [took for took, _ in all],
            "early": sum(n for _, n in all),
        }
        for name, all in table.items()
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="adds the results to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = ways(args.binary, folder, args.tokens, args.rounds)
    for name, row in table.items():
        print(f"{name:32} {row}")
    if args.json:
        path = pathlib.Path(args.json)
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(result | {"ways": table}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
