#!/usr/bin/env python3
"""Fills the tables in the documents from what the program says and what was measured.

A table stands between two markers, `<!-- fovea:NAME -->` and `<!-- /fovea:NAME -->`; NAME is
  support    `fovea info --support`
  bench      every bench/results/<machine>/*.json, the newest per machine, suite and engines
  summary    a line for each of those: fovea beside the best peer of each case
"""

import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- fovea:(\w+) -->\n)(.*?)(<!-- /fovea:\2 -->)", re.DOTALL)


def support_table(program):
    done = subprocess.run([program, "info", "--support"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"report: `{program} info --support` exited with {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def without_cuda(table):
    return "| portable" not in table.splitlines()[0]


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values))


BEST = "best peer"  # of each case: whoever was fastest there


def ratios(rows, field="ms"):
    """A figure of each peer over fovea's on the same case: {(peer, dtype, pass): [(ratio, row), ...]}."""
    key = lambda row: (row["suite"], row["case"], row["pass"])
    ours, theirs = {}, {}
    for row in rows:
        if not row[field]:
            continue
        if row["impl"].startswith("fovea-"):
            ours.setdefault(key(row), row)  # the engine under test comes first, fovea-reference after
        else:
            theirs.setdefault(key(row), []).append(row)
    several = len({row["impl"] for peers in theirs.values() for row in peers}) > 1
    groups = {}
    for place, peers in theirs.items():
        own = ours.get(place)
        if own is None:
            continue
        compared = [(row["impl"], row[field]) for row in peers]
        if several:
            compared.append((BEST, min(row[field] for row in peers)))
        for impl, figure in compared:
            groups.setdefault((impl, own["dtype"], own["pass"]), []).append((figure / own[field], own))
    return groups


def machine_facts(machine):
    """What was measured, in words: the GPU where there was one, else the CPU."""
    if machine.get("gpu"):
        facts = [machine["gpu"]]
        facts += [f"CUDA {machine['cuda']}"] if machine.get("cuda") else []
        facts += [f"driver {machine['driver']}"] if machine.get("driver") else []
        facts += [f"SM at {machine['gpu_sm_mhz']:.0f} MHz"] if machine.get("gpu_sm_mhz") else []
        if machine.get("gpu_power_limit_w"):
            facts += [f"power limit {machine['gpu_power_limit_w']:.0f} W"]
    else:
        facts = [machine["cpu"], f"{machine['threads']} threads"]
        facts += [machine["isa"]] if machine.get("isa") else []
    return facts + ([f"torch {machine['torch']}"] if machine.get("torch") else [])


def engines_of(rows):
    return sorted({row["impl"] for row in rows if row["impl"].startswith("fovea-")})


def result_table(result, link):
    rows = result["rows"]
    suites = sorted({row["suite"] for row in rows if row["suite"]})
    facts = [" and ".join(engines_of(rows))] + machine_facts(result["machine"])
    facts += [result["date"][:10], f"commit `{result['commit'][:12]}`"]
    titles = ["peer", "dtype", "pass", "cases", "peer time / fovea time, geometric mean", "worst case",
              "best TFLOP/s of fovea"]
    # Of layers on a GPU, whose allocator tells exactly what was taken beside inputs and outputs.
    layers = result["machine"].get("gpu") and any(row.get("layer") for row in rows)
    memory = ratios(rows, "mem_bytes") if layers else None
    if memory is not None:
        titles.append("peer's extra memory / fovea's, geometric mean")
    lines = [
        f"**{', '.join(suites)}**: " * bool(suites)
        + f"{', '.join(facts)} ([data]({link}))",
        "",
        "| " + " | ".join(titles) + " |",
        "|---" * len(titles) + "|",
    ]
    # The best peer last of all, the forward pass before the backward.
    order = lambda item: (item[0][0] == BEST, item[0][0], item[0][1], item[0][2] != "fwd")
    for (peer, dtype, name), pairs in sorted(ratios(rows).items(), key=order):
        values = [value for value, _ in pairs]
        best = max((own["tflops"] or 0) for _, own in pairs)
        line = (
            f"| {peer} | {dtype} | {name} | {len(values)} | {geometric_mean(values):.2f} "
            f"| {min(values):.2f} | {f'{best:.3g}' if best else '-'} |"
        )
        if memory is not None:
            shares = [value for value, _ in memory.get((peer, dtype, name), [])]
            line += f" {geometric_mean(shares):.2f} |" if shares else " - |"
        lines.append(line)
    wrong = [row for row in rows if row["impl"].startswith("fovea-") and row["ok"] is False]
    if wrong:
        lines += ["", f"{len(wrong)} of fovea's rows failed their accuracy check."]
    unchecked = [row for row in rows if row["impl"].startswith("fovea-") and row["ok"] is None]
    if unchecked:
        lines += ["", f"Timed without an accuracy check: {len(unchecked)} of fovea's rows."]
    return "\n".join(lines)


def newest_results():
    """(path, result) of each machine, suite and engines: GPUs first."""
    newest = {}
    for path in sorted((ROOT / "bench" / "results").glob("*/*.json")):
        result = json.loads(path.read_text())
        if not ratios(result["rows"]):
            continue  # measured beside nobody
        suites = tuple(sorted({row["suite"] for row in result["rows"]}))
        key = (path.parent.name, suites, tuple(engines_of(result["rows"])))
        if key not in newest or newest[key][1]["date"] < result["date"]:
            newest[key] = (path, result)
    return [newest[key] for key in sorted(newest, key=lambda key: (not newest[key][1]["machine"].get("gpu"), key))]


NO_RESULTS = "No results are recorded yet."


def bench_tables(folder):
    tables = [result_table(result, os.path.relpath(path, folder)) for path, result in newest_results()]
    return "\n\n".join(tables) or NO_RESULTS


def summary_row(result):
    rows = result["rows"]
    machine = result["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}"
    compared = ratios(rows)
    peers = {impl for impl, _, _ in compared}
    judge = BEST if BEST in peers else peers.pop()  # who is alone is the best
    cells = []
    for passes in (("fwd",), ("bwd", "fwd+bwd")):
        values = [value for (impl, _, name), pairs in compared.items() if impl == judge and name in passes
                  for value, _ in pairs]
        cells.append(f"{geometric_mean(values):.2f} ({min(values):.2f})" if values else "-")
    engines = ", ".join(name.removeprefix("fovea-") for name in engines_of(rows))
    ours = [row for row in rows if row["impl"].startswith("fovea-")]
    checked = f"{sum(row['ok'] is True for row in ours)} of {len(ours)}"
    return "| " + " | ".join([rows[0]["suite"], engines, where, *cells, checked, result["date"][:10]]) + " |"


def summary_table():
    titles = ["suite", "engines", "on", "forward", "backward, or both", "checked", "measured"]
    lines = [summary_row(result) for _, result in newest_results()]
    return "\n".join(["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|", *lines]) if lines else NO_RESULTS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", required=True, help="path of the program fovea")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a table is stale")
    options = parser.parse_args()

    makers = {
        "support": lambda document: support_table(options.program),
        "bench": lambda document: bench_tables(document.parent),
        "summary": lambda document: summary_table(),
    }
    stale = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = document.read_text()

        def fill(match):
            if match[2] not in makers:
                sys.exit(f"report: {document.name}: marker is {match[2]}, must be one of {', '.join(makers)}")
            table = makers[match[2]](document)
            if match[2] == "support" and without_cuda(table) and not without_cuda(match[3]):
                print("report: this build has no CUDA engines; the support table is left as it is")
                return match[0]
            return f"{match[1]}{table}\n{match[4]}"

        fresh = MARKED.sub(fill, text)
        if fresh == text:
            continue
        stale.append(document.relative_to(ROOT).as_posix())
        if not options.check:
            document.write_text(fresh)
    if options.check and stale:
        sys.exit(f"report: stale tables in {', '.join(stale)}; run `./run report`")
    print("report: " + (f"refreshed {', '.join(stale)}" if stale else "all tables are current"))


if __name__ == "__main__":
    main()
