"""Puts together what `cuda_bench FILE.json topk WORDS` wrote, and draws it.

    python3 speed.py --commit HASH --machine "one H200, ..." --out results.json [--svg steps.svg] FILE...

A file may hold the reports of several runs, one behind the other. The plot has milliseconds of a step
against the length of the context, a line for each policy, way over the link, and share of heads that turn.
"""
import argparse
import json
import math
import re

STEP = re.compile(r"topk (\S+), (.+?)(, ahead)?, (\d+) x (\d+), (\d+) turn: (\d+) % hits, ([\d.]+) % moved")
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f"]


def reports(path):
    text, at = open(path).read(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        report, at = json.JSONDecoder().raw_decode(text, at)
        yield report


def steps(report):
    words = report["words"]
    way = next((word for word in words if word.startswith("threads=")), "blocks")
    for kernel in report["kernels"]:
        found = STEP.match(kernel["name"])
        if not found:
            continue
        shape, policy, ahead, n, tokens, turn, hits, moved = found.groups()
        yield {
            "shape": shape, "policy": policy, "ahead": bool(ahead), "sequences": int(n),
            "tokens": int(tokens), "pages": "host" if "host" in words else "device", "way": way,
            "heads_turn_percent": int(turn), "hits_percent": int(hits), "moved_percent": float(moved),
            "ms": round(kernel["us"] / 1e3, 3),
        }


def name_of(step):
    ahead = ", ahead" if step["ahead"] else ""
    way = "" if step["pages"] == "device" else f", {step['way']}"
    of = f"{step['sequences']} x {step['shape']}, {step['policy']}{ahead}"
    return f"{of}, {step['pages']}{way}, {step['heads_turn_percent']} % turn"


def svg(found):
    lines = {}
    for step in found:
        # The better of two runs.
        line = lines.setdefault(name_of(step), {})
        line[step["tokens"]] = min(step["ms"], line.get(step["tokens"], math.inf))
    lines = {name: sorted(line.items()) for name, line in lines.items() if len(line) > 1}
    if not lines:
        return None
    tokens = [t for points in lines.values() for t, _ in points]
    most, low, high = max(ms for p in lines.values() for _, ms in p), min(tokens), max(tokens)
    x = lambda t: 60 + 420 * math.log(t / low) / math.log(high / low)
    y = lambda ms: 320 - 290 * ms / most
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 360" font-family="sans-serif" font-size="11">',
           '<rect width="860" height="360" fill="white"/>']
    for t in sorted(set(tokens)):
        out.append(f'<text x="{x(t):.0f}" y="338" text-anchor="middle">{t // 1024}K</text>')
    for i in range(5):
        ms = most * i / 4
        out.append(f'<path d="M60 {y(ms):.1f}H480" stroke="#ddd"/><text x="52" y="{y(ms) + 4:.1f}" '
                   f'text-anchor="end">{ms:.1f}</text>')
    out.append('<text x="60" y="18">milliseconds of a step, by tokens of the context</text>')
    for i, (name, points) in enumerate(sorted(lines.items())):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{'L' if j else 'M'}{x(t):.1f} {y(ms):.1f}" for j, (t, ms) in enumerate(points))
        out.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        out.append(f'<path d="M495 {36 + 15 * i}h18" stroke="{color}" stroke-width="2"/>'
                   f'<text x="518" y="{40 + 15 * i}">{name}</text>')
    return "\n".join(out + ["</svg>\n"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--svg")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    all_reports = [report for path in args.files for report in reports(path)]
    found = [step for report in all_reports for step in steps(report)]
    kernels = [{"words": r["words"], "kernels": [k for k in r["kernels"] if not STEP.match(k["name"])]}
               for r in all_reports]
    result = {"commit": args.commit, "machine": args.machine, "command": "cuda_bench FILE.json topk WORDS",
              "note": args.note, "steps": found, "others": kernels}
    with open(args.out, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    drawn = svg(found) if args.svg else None
    if drawn:
        with open(args.svg, "w") as file:
            file.write(drawn)


if __name__ == "__main__":
    main()
