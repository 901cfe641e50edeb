"""Puts together what `cuda_bench FILE.json topk WORDS` wrote, and draws it.

    python3 speed.py --commit HASH --machine "one H200, ..." --out results.json [--svg steps.svg] [--bars bars.svg]
        [--layer layer.svg] [--points points.svg [--also RECORD]] FILE...

A file may hold the reports of several runs, one behind the other, also those of `step`, which attend to everything.
The plot has milliseconds of a step against the length of the context, a line for each policy, way over the link, and
share of heads that turn; `--bars` has a bar for each policy, by residents, of the longest context; `--layer` what a
layer's kernels take by `breakdown`, a bar for each policy. `--points` has how many times as long as `auto` other policies take,
by context and number of sequences, their rows brought by blocks of the device or by threads; with steps of an earlier
record too.
"""
import argparse
import json
import math
import re

STEP = re.compile(r"topk (\S+), (.+?)(, ahead)?, (\d+) x (\d+), (\d+ turn|traced): (\d+) % hits, ([\d.]+) % moved")
FULL = re.compile(r"step (\S+), (\d+) x (\d+)$")
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
    rows = next((word + " rows, " for word in words if word in ("fp8", "int8")), "")
    resident = next((int(word[9:]) for word in words if word.startswith("resident=")), 0)
    graph = "eager" not in words
    for kernel in report["kernels"]:
        found, full = STEP.match(kernel["name"]), FULL.match(kernel["name"])
        if full:
            yield {
                "shape": full[1], "policy": "full attention", "ahead": False, "sequences": int(full[2]),
                "tokens": int(full[3]), "pages": "device", "way": way, "resident": 0, "heads_turn": "",
                "graph": graph,
                "ms": round(kernel["us"] / 1e3, 3),
            }
        if not found:
            continue
        shape, policy, ahead, n, tokens, turn, hits, moved = found.groups()
        yield {
            "shape": shape, "policy": policy, "ahead": bool(ahead), "sequences": int(n),
            "tokens": int(tokens), "pages": "host" if "host" in words else "device", "way": rows + way, "resident": resident,
            "heads_turn": turn, "graph": graph, "hits_percent": int(hits), "moved_percent": float(moved),
            "ms": round(kernel["us"] / 1e3, 3),
        }


def name_of(step):
    ahead = ", ahead" if step["ahead"] else ""
    if step["policy"] == "full attention":
        return f"{step['sequences']} x {step['shape']}, full attention, device"
    way = "" if step["pages"] == "device" else f", {step['way']}"
    way += f", {step['resident']} layers whole" if step["resident"] else ""
    way += "" if step["graph"] else ", no graph"
    of = f"{step['sequences']} x {step['shape']}, {step['policy']}{ahead}"
    return f"{of}, {step['pages']}{way}, {step['heads_turn'].replace(' ', ' % ')}"


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


def bars(found):
    """A bar for each policy, in the order of the files, beside one with residents."""
    longest = max(step["tokens"] for step in found)
    found = [step for step in found if step["tokens"] == longest]
    label = lambda step: step["policy"] + (", ahead" if step["ahead"] else "")
    names = list(dict.fromkeys(map(label, found)))
    residents = sorted({step["resident"] for step in found})
    most, height = max(step["ms"] for step in found), 14 * len(residents) + 8
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {60 + height * len(names)}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="10" y="18">milliseconds of a step, {longest // 1024}K tokens</text>']
    for i, resident in enumerate(residents):
        out.append(f'<rect x="{300 + 160 * i}" y="9" width="12" height="10" fill="{COLORS[i]}"/>'
                   f'<text x="{318 + 160 * i}" y="18">{resident or "no"} layers whole</text>')
    for step in found:
        i = residents.index(step["resident"])
        y, width = 32 + height * names.index(label(step)) + 14 * i, 480 * step["ms"] / most
        out.append(f'<rect x="240" y="{y}" width="{width:.1f}" height="12" fill="{COLORS[i]}"/>'
                   f'<text x="{246 + width:.1f}" y="{y + 10}">{step["ms"]:.2f}</text>')
    for i, name in enumerate(names):
        out.append(f'<text x="232" y="{32 + height * i + height / 2}" text-anchor="end">{name}</text>')
    return "\n".join(out + ["</svg>\n"])


def layers(all_reports):
    """What each policy's layer is made of: [(policy, {kernel: us})], by `of a layer:` behind its step."""
    found = []
    for report in all_reports:
        for kernel in report["kernels"]:
            step = STEP.match(kernel["name"])
            if step:
                found.append((f"{step[2]}, {int(step[5]) // 1024}K", {}))
            elif kernel["name"].startswith("of a layer: ") and found:
                found[-1][1][kernel["name"][12:]] = kernel["us"]
    return [layer for layer in found if layer[1]]


def stacks(found):
    """Stacked bars, the kernels that take most with a colour of their own."""
    sums = {}
    for _, kernels in found:
        for name, us in kernels.items():
            sums[name] = sums.get(name, 0) + us
    named = sorted(sums, key=sums.get, reverse=True)[: len(COLORS) - 1]
    most = max(sum(kernels.values()) for _, kernels in found)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {76 + 24 * len(found)}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>',
           '<text x="10" y="18">microseconds of a layer, each kernel by itself</text>']
    for i, name in enumerate(named + ["others"]):
        x, y = 10 + i % 4 * 210, 30 + i // 4 * 16
        out.append(f'<rect x="{x}" y="{y}" width="12" height="10" fill="{COLORS[i]}"/>'
                   f'<text x="{x + 18}" y="{y + 9}">{name}</text>')
    for j, (name, kernels) in enumerate(found):
        x, y = 240.0, 70 + 24 * j
        others = sum(us for kernel, us in kernels.items() if kernel not in named)
        for i, us in enumerate([kernels.get(kernel, 0) for kernel in named] + [others]):
            width = 560 * us / most
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="16" fill="{COLORS[i]}"/>')
            x += width
        out.append(f'<text x="232" y="{y + 12}" text-anchor="end">{name}</text>'
                   f'<text x="{x + 5:.1f}" y="{y + 12}">{sum(kernels.values()):.0f}</text>')
    return "\n".join(out + ["</svg>\n"])


OTHERS = [("InfiniGen: prefetch only", "prefetch only"), ("page LRU: its rows only", "rows of page LRU")]
WAYS = [("blocks", "rows brought as `auto`'s are"), ("threads=8", "by eight threads of the host")]
ASKED = 3.24


def points(found):
    """A column for each context and number of sequences, and in it how many times `auto` others take."""
    at = {}
    for step in found:
        if step["pages"] != "host" or step["heads_turn"] != "traced":
            continue
        place = (step["shape"], step["sequences"], step["tokens"])
        whole = step.get("resident")
        is_auto = step["policy"].startswith("auto (") and step.get("ahead") and step["way"] == "blocks"
        name = ("auto", whole) if is_auto else (step["policy"], step["way"])
        here = at.setdefault(place, {})
        if name not in here or step["ms"] < here[name][0]:
            here[name] = (step["ms"], whole)
    places = sorted(place for place, here in at.items() if (OTHERS[0][0], "blocks") in here)
    step_x = 780 / len(places)
    x = lambda i: 64 + step_x * i
    y = lambda times: 290 - 210 * math.log(times) / math.log(16)
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 335" font-family="sans-serif" font-size="11">',
           '<rect width="860" height="335" fill="white"/>',
           '<text x="10" y="18">how many times as long as `auto` a step takes</text>']
    for times in (1, 2, 4, 8, 16):
        out.append(f'<path d="M44 {y(times):.1f}H850" stroke="#ddd"/>'
                   f'<text x="38" y="{y(times) + 4:.1f}" text-anchor="end">{times}</text>')
    out.append(f'<path d="M44 {y(ASKED):.1f}H850" stroke="#333" stroke-dasharray="4 3"/>'
               f'<text x="850" y="{y(ASKED) - 4:.1f}" text-anchor="end">{ASKED}</text>')
    for i, (policy, name) in enumerate(OTHERS):
        for j, (way, how) in enumerate(WAYS):
            style = f'fill="{"white" if j else COLORS[i]}" stroke="{COLORS[i]}"'
            row = 18 + 14 * (2 * i + j)
            out.append(f'<circle cx="420" cy="{row - 4}" r="4" {style}/><text x="430" y="{row}">{name}, {how}</text>')
            for k, place in enumerate(places):
                ms, whole = at[place].get((policy, way), (0, None))
                auto, _ = at[place].get(("auto", whole), (0, None))
                if ms and auto:
                    times = ms / auto
                    out.append(f'<circle cx="{x(k) + 8 * i - 4:.1f}" cy="{y(times):.1f}" r="4" {style}/>')
    for k, (shape, n, tokens) in enumerate(places):
        many = f"{n} of " if n > 1 else ""
        out.append(f'<text x="{x(k):.1f}" y="308" text-anchor="middle" font-size="8">{many}{tokens // 1024}K</text>')
        if k == 0 or places[k - 1][0] != shape:
            out.append(f'<text x="{x(k) - 14:.1f}" y="328">{shape}</text>')
    return "\n".join(out + ["</svg>\n"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--svg")
    parser.add_argument("--bars")
    parser.add_argument("--layer")
    parser.add_argument("--points")
    parser.add_argument("--also", help="an earlier record, whose steps are drawn by --points too")
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
    if args.bars:
        with open(args.bars, "w") as file:
            file.write(bars(found))
    if args.points:
        more = json.load(open(args.also))["steps"] if args.also else []
        with open(args.points, "w") as file:
            file.write(points(found + more))
    if args.layer and layers(all_reports):
        with open(args.layer, "w") as file:
            file.write(stacks(layers(all_reports)))


if __name__ == "__main__":
    main()
