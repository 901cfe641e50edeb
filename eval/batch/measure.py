"""Measures `nuthatch batch`: what sharing a long system prompt saves, what many sequences at a time
give, how many fit into a budget, and what happens when far too many are asked for.

    cargo build --release
    python3 eval/batch/measure.py target/release/nuthatch --json eval/results/batch.json

Each measurement is one batch from an empty cache:

- shared: 64 chats that begin with the same system prompt of about a thousand tokens, with and
  without sharing;
- short: 64 short chats, some at a time;
- storm: the short ones alone, then 32 at a time in pages for about eight, so that most are
  preempted: recomputed, then swapped to the host;
- fit: 40 chats of 300 to 2,000 tokens in 1 GiB of pages, against room for the whole context for each.

All measurements of one file must give the same answers, token for token: with hits and without, alone
and in a batch, recomputed and swapped.
With `--write FOLDER` the files of requests are only written.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile

RULES = [
    "Answer in plain words that a student of the first year understands.",
    "Say first what is asked for, then why it is so, then what follows from it.",
    "Name numbers with their units, and say when a number is only an estimate.",
    "Do not begin with a greeting and do not end with an offer of more help.",
    "When a question has two meanings, choose the common one and say so.",
    "Prefer a short example to a long definition, and a drawing in text to both.",
    "If you do not know something, say that you do not know it.",
    "Write dates as year, month and day, and times with twenty-four hours.",
]
TOPICS = [
    "tides", "glaciers", "bridges", "bees", "volcanoes", "compilers", "vaccines", "sailing",
    "bread", "railways", "comets", "coral", "paper", "clocks", "maps", "salt",
]
QUESTIONS = [
    "Explain {} in three sentences.",
    "What is the most common mistake that people make about {}?",
    "Who found out how {} work, and when?",
    "Give me one number about {} that surprises people.",
]


# Room for 768 tokens of SmolLM2, 23,040 bytes each.
STORM = ["--kv-cache-memory-bytes", "17MiB"]


def system_prompt(n_rules):
    rules = (f"Rule {i + 1}. {RULES[i % len(RULES)]}" for i in range(n_rules))
    return "You are a careful teacher. " + " ".join(rules)


def requests(n, system, max_tokens):
    for i in range(n):
        question = QUESTIONS[i // len(TOPICS) % len(QUESTIONS)].format(TOPICS[i % len(TOPICS)])
        messages = [{"role": "user", "content": question}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            # Every run computes the same number of tokens.
            "ignore_eos": True,
        }
        yield {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }


def long_requests(n):
    """Chats of different lengths without a common beginning."""
    for i, request in enumerate(requests(n, None, 160)):
        n_rules = 14 + (i * 37) % 86
        message = request["body"]["messages"][0]
        message["content"] = f"Note {i}. " + system_prompt(n_rules) + " " + message["content"]
        yield request


def write(folder):
    files = {
        # 53 rules are about a thousand tokens of SmolLM2's vocabulary.
        "shared.jsonl": requests(64, system_prompt(53), 64),
        "short.jsonl": requests(64, None, 64),
        "long.jsonl": long_requests(40),
    }
    for name, lines in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def run(binary, folder, name, words):
    output = os.path.join(folder, "out.jsonl")
    if os.path.exists(output):
        os.remove(output)
    command = [binary, "batch", os.path.join(folder, name), "-o", output, "--json"]
    if "-c" not in words:
        command += ["-c", "2K"]
    result = subprocess.run(command + words, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command + words)}: {result.stderr}")
    summary = json.loads(result.stdout)
    del summary["output"]
    texts = []
    with open(output, encoding="utf-8") as file:
        for line in sorted(map(json.loads, file), key=lambda line: line["custom_id"]):
            texts.append(line["response"]["body"]["choices"][0]["message"]["content"])
    summary["words"] = words
    summary["file"] = name
    return summary, texts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("binary", nargs="?", default="target/release/nuthatch")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--write", metavar="FOLDER", help="only write the requests")
    parser.add_argument("--seqs", default="1,2,4,8,16,32")
    parser.add_argument("--only", choices=["shared", "short", "storm", "fit"])
    args = parser.parse_args()
    if args.write:
        os.makedirs(args.write, exist_ok=True)
        write(args.write)
        return
    groups = {
        "shared": [("shared.jsonl", []), ("shared.jsonl", ["--no-enable-prefix-caching"])],
        "short": [("short.jsonl", ["--max-num-seqs", n]) for n in args.seqs.split(",")],
        "storm": [("short.jsonl", ["--max-num-seqs", "1"])] + [
            ("short.jsonl", ["--max-num-seqs", "32", "-c", "512"] + STORM + words)
            for words in ([], ["--swap-space", "64MiB"])
        ],
        "fit": [("long.jsonl", ["--max-num-seqs", "256", "-c", "8K", "--kv-cache-memory-bytes", "1GiB"])],
    }
    measurements = [m for name, group in groups.items() if args.only in (None, name) for m in group]
    results = []
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for name, words in measurements:
            summary, texts = run(args.binary, folder, name, words)
            if answers.setdefault(name, texts) != texts:
                sys.exit(f"{name} {words}: other answers than before")
            results.append(summary)
            print(
                f"{name:13} {' '.join(words):28} {summary['seconds']:7.2f} s "
                f"{summary['completion_tokens_per_s']:7.1f} tokens/s "
                f"prompts {summary['prompt_tokens']}, cached {summary['cached_tokens']}, "
                f"at most {summary['max_running']} at a time, waste {summary['waste']:.1%}, "
                f"preempted {summary['preemptions']}, swapped {summary['swaps']}"
            )
    if args.json:
        today = datetime.date.today().isoformat()
        record = {"date": today, "threads": os.cpu_count(), "measurements": results}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
