"""One command for the systems of the literature: decode with pages on the host, policy by policy.

    python3 policies.py target/release/nuthatch --out FILE.json --words "--device cuda --shape llama3-8b \\
        --random-weights --depth 32768"

Runs `nuthatch bench` once for each policy, all with the same words, prints a table and writes the numbers.
`full` is exact attention with pages on the device; all others have `--kv-offload host --kv-resident off`.
What page LRU moves, and when, the CPU decides between layers; all others the device decides.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile
import time

POLICIES = {
    "full, on the device": None,
    "auto": "auto",
    "auto, decided ahead": "auto,speculate=on",
    "QSAC + delta": "hata:256,k_min=64,reuse=qsac(eta=0.8,p=3)",
    "QSAC + whole (LiteCache)": "hata:256,k_min=64,reuse=qsac(eta=0.8,p=3),refresh=whole",
    "always + delta": "hata:256,k_min=64",
    "prefetch only (InfiniGen)": "hata:256,k_min=64,refresh=whole,speculate=on",
    "page LRU by the CPU (RetroInfer)": "hata:256,k_min=64,reuse=lru(page=8,capacity=3)",
}


def run(args, name, policy):
    words = [args.binary, "bench", "--prompt", "0", "--gen", str(args.gen), "-r", "1",
             "--max-num-seqs", "1", *args.words.split()]
    if policy:
        words += ["--sparse", policy, "--kv-offload", "host", "--kv-resident", "off", *args.far.split()]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "bench.json"
        begin = time.time()
        try:
            done = subprocess.run([*words, "--json", str(path)], capture_output=True, text=True,
                                  timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return {"name": name, "policy": policy, "error": f"more than {args.timeout} s"}
        if done.returncode:
            return {"name": name, "policy": policy, "error": done.stderr.strip()[-400:]}
        found = json.loads(path.read_text())
    return {"name": name, "policy": policy, "seconds": round(time.time() - begin, 1), "bench": found}


def rate(found):
    """Tokens a second of decoding, the only test."""
    return round(found["bench"]["tests"][-1]["median"], 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--words", default="", help="for every run")
    parser.add_argument("--far", default="", help="for those with far pages")
    parser.add_argument("--only", default="", help="names or parts of names, with commas between them")
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    found = []
    for name, policy in POLICIES.items():
        if not any(part in name for part in args.only.split(",")):
            continue
        one = run(args, name, policy)
        found.append(one)
        if "error" in one:
            print(f"{name}: {one['error']}", flush=True)
            continue
        topk = one["bench"].get("topk") or {}
        moved = topk.get("moved")
        moved = "" if moved is None else f", {100 * moved:.2f} % moved"
        print(f"{name}: {rate(one)} tokens/s{moved}, {one['seconds']} s", flush=True)
        with open(args.out, "w") as file:
            file.write(json.dumps({"command": " ".join(["policies.py", args.words, args.far]), "runs": found},
                                  indent=1) + "\n")


if __name__ == "__main__":
    main()
