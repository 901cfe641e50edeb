"""What a conversation costs that comes back from the disk, by how its files are read.

    python3 eval/store/ways.py target/release/nuthatch [--tokens 6000] [--new 40/1000] [--rounds 2] [--json FILE]
        [--words "--device cuda"] [--ways uring,direct/threads] [--forms plain/int8/encrypted]
"""

import argparse
import http.client
import itertools
import json
import os
import pathlib
import tempfile

from resume import PAGE_LEN, Server, median, prompt_of

ADMIN = "may-forget"
FORMS = {"plain": [], "int8": ["--kv-cold-dtype", "int8"], "encrypted": ["--kv-key-file", "KEY"]}


def forget_files(folder):
    """Lets the system write files out and forget what it has of them."""
    for path in pathlib.Path(folder).glob("*.kvseg"):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def forget(server):
    """Lets the server forget what it has in memory."""
    connection = http.client.HTTPConnection(*server.place, timeout=60)
    connection.request("POST", "/reset_prefix_cache", "{}", {"Authorization": f"Bearer {ADMIN}"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()


def ways(args, folder, form):
    """Seconds to the first token of a conversation that goes on with a few new tokens, by how its files
    are read, by whether the system has them in its page cache, and by whether the first layers are
    computed while the others come. Each way is a server of its own, which forgets between requests."""
    where = f"{folder}/{form}"
    pathlib.Path(folder, "key").write_bytes(bytes(range(32)))
    words = [word.replace("KEY", f"{folder}/key") for word in FORMS[form]]
    words += ["--kv-disk", f"{where}:4GiB", *args.words.split()]
    prompt = prompt_of("a", args.tokens)
    table, answers = {}, []
    with Server(args.binary, *words) as server:
        server.first_token(prompt_of("warm", 300))
        table["computed"] = [(round(server.first_token(prompt)[0], 4), 0, 0)]
        server.settle()
    for io in args.ways.split("/"):
        for layers in ("true", "false"):
            flags = ["--kv-disk-io", io, "--kv-disk-layers", layers, "--admin-key", ADMIN]
            with Server(args.binary, *words, *flags) as server:
                server.first_token(prompt_of("warm", 300))
                for new, is_cold, i in itertools.product(args.new.split("/"), (False, True), range(args.rounds)):
                    how = f"{'cold' if is_cold else 'cached'}, {'layers' if layers == 'true' else 'whole'}"
                    forget(server)
                    if is_cold:
                        forget_files(where)
                    before = server.metrics().get("nuthatch:disk_loads_total:early", 0)
                    turn = prompt + prompt_of((io, layers, new, is_cold, i), int(new))
                    took, cached, answer = server.first_token(turn, answer=True)
                    early = server.metrics().get("nuthatch:disk_loads_total:early", 0) - before
                    answers.append((turn, answer))
                    is_loaded = cached >= args.tokens - PAGE_LEN
                    row = (round(took, 4), int(early), int(is_loaded))
                    table.setdefault(f"{io}, {how}, {new} new", []).append(row)
                    server.settle(0.1)
    n_same = 0
    with Server(args.binary, *args.words.split()) as server:
        for turn, answer in answers:
            n_same += server.first_token(turn, answer=True)[2] == answer
    rows = {
        name: {
            "first_token_s": median(took for took, *_ in all),
            "all_s": [took for took, *_ in all],
            # Of these, how many were computed while pages came, and how many loaded at all.
            "early": sum(early for _, early, _ in all),
            "loaded": sum(loaded for *_, loaded in all),
        }
        for name, all in table.items()
    }
    # Those of an engine that computed everything; int8 is an approximation.
    rows["computed"] |= {"same_answers": n_same, "answers": len(answers)}
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--new", default="40", help="tokens of the turn that goes on")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--words", default="--device cpu", help="more words for the server")
    parser.add_argument("--ways", default="threads/uring/threads,direct/uring,direct")
    parser.add_argument("--forms", default="plain", help="of pages: " + "/".join(FORMS))
    parser.add_argument("--json", help="adds the results to this file")
    args = parser.parse_args()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in args.forms.split("/"):
            table |= {f"{form}, {name}": row for name, row in ways(args, folder, form).items()}
    for name, row in table.items():
        print(f"{name:48} {row}")
    if args.json:
        path = pathlib.Path(args.json)
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(result | {"ways": table}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
