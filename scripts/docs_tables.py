"""The results pages and the README's headline figures, from `docs/results/*.json`: `make docs`.

No figure in the docs is typed by hand. Each result has a table of its own, so that figures measured
under different protocols never share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from regrasp.episodes.results import Figure, read_result
from regrasp.scripts._bench_report import POLICIES, page

#: What a result measures, in the order of the page; results not named here follow by name.
TITLES: dict[str, str] = {
    "demo": "The loop closed once: perturbed episodes without and with the supervisor",
    "monitors": "Monitors of the shipped policy, compared",
    "monitors_act": "Monitors of LeRobot's ACT, compared",
    "coverage": "Calibrations where the truth is known: promised and observed",
    "certify": "Certified acceleration of the shipped policy",
    "certify_study": "Certification where the truth is known",
    "bench_sim": "Simulation: stock LIBERO and ours side by side",
    "bench_store": "Random training windows: our store and LeRobotDataset on the same episodes",
    "experts": "Scripted experts on the training initial states",
    "eval_vla": "The shipped policy on held-out initial states",
    "failures": "Failures on purpose: yield, gates, recoveries",
    "world_model": "A world model with and without counterfactual failures",
    "curation": "Curation: finding defective demonstrations, and the policies that result",
    "diagnosis": "The diagnosis model on what it was not trained on",
    "reward": "The progress model on held-out tasks and initial states, beside a clock",
    "segments": "Rollouts cut by the progress model, against what was injected",
    "interventions": "Doing what diagnoses of natural failures say",
}

#: What was promised of a figure: (at least or at most, bound).
PROMISES: dict[tuple[str, str], tuple[str, float]] = {
    ("bench_sim", "physics_ratio"): (">=", 5.0),
    ("bench_sim", "pixels_ratio"): (">=", 15.0),
    ("bench_sim", "chunk_ratio"): (">=", 35.0),
    ("bench_sim", "two_worker_ratio"): (">=", 1.8),
    ("bench_store", "windows_ratio"): (">=", 10.0),
    ("experts", "libero_object"): (">=", 0.95),
    ("experts", "libero_spatial"): (">=", 0.95),
    ("experts", "libero_goal"): (">=", 0.85),
    ("eval_vla", "libero_object"): (">=", 0.85),
    ("eval_vla", "libero_spatial"): (">=", 0.75),
    ("demo", "minutes"): ("<=", 15.0),
    ("monitors", "default.twa"): (">=", 0.75),
    ("monitors", "default.lead_fraction"): ("<=", 1 / 3),
    ("monitors", "default.p99_ms"): ("<=", 1.0),
    ("coverage", "cells_outside"): ("<=", 0.0),
    ("certify", "speedup"): (">=", 4.0),
    ("certify", "preserved"): (">=", 0.85),
    ("certify", "rollouts_saved"): (">=", 0.6),
    ("failures", "samples"): (">=", 2000.0),
    ("failures", "types"): (">=", 12.0),
    ("failures", "tasks"): (">=", 20.0),
    ("failures", "recovery_success"): (">=", 0.7),
    ("failures", "gate_replay_pass"): (">=", 1.0),
    ("diagnosis", "detection_balanced_accuracy"): (">=", 0.85),
    ("diagnosis", "onset_within_10"): (">=", 0.6),
    ("diagnosis", "type_macro_accuracy"): (">=", 0.6),
}

#: Sentences of the README: (result, figure, what it is).
HEADLINES: tuple[tuple[str, str, str], ...] = (
    ("demo", "success_base", "success on perturbed episodes, the policy alone"),
    ("demo", "success_supervised", "the same episodes, supervised"),
    ("demo", "paired_difference", "paired difference of the two"),
    ("demo", "false_alarm_rate", "false alarms on unperturbed episodes"),
    ("eval_vla", "libero_object", "shipped policy, libero_object, held-out initial states"),
    ("eval_vla", "libero_spatial", "shipped policy, libero_spatial, held-out initial states"),
    ("eval_vla", "wrong_instruction", "the same policy, given a wrong instruction"),
    ("monitors", "default.twa", "default monitor on held-out rollouts: TWA"),
    ("monitors", "default_minus_fiper.twa_length_matched", "its length-matched TWA less FIPER's"),
    ("monitors", "default.early_share", "failures it detects in the first third of their time"),
    ("experts", "libero_object", "scripted experts, libero_object"),
    ("experts", "libero_spatial", "scripted experts, libero_spatial"),
    ("experts", "libero_goal", "scripted experts, libero_goal"),
    ("bench_sim", "physics_ratio", "control steps/s without rendering, over stock LIBERO"),
    ("bench_sim", "pixels_ratio", "control steps/s with two cameras, over stock LIBERO"),
    ("bench_store", "windows_ratio", "random training windows/s, over LeRobotDataset"),
)

BEGIN, END = "<!-- figures: made by `make docs` -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Args:
    """Write the results page and the README's figures.

    Attributes:
        root: the checkout.
        check: only say whether they are up to date (exit status 1 when not).
    """

    root: Path = Path()
    check: bool = False


def main(args: Args) -> None:
    """Write all, or compare all; SystemExit names the file that is out of date."""
    records = load(args.root / "docs/results")
    readme = args.root / "README.md"
    wanted = {
        args.root / "docs/results.md": results_page(records),
        **{
            args.root / f"docs/results/{record['name']}.md": result_page(record)
            for record in records
        },
        readme: with_headlines(readme.read_text(), records),
    }
    compared = [record for name in POLICIES for record in records if record["name"] == name]
    if compared:
        wanted[args.root / "docs/monitors_benchmark.md"] = page(compared)
    for path, text in wanted.items():
        if args.check and (not path.exists() or path.read_text() != text):
            raise SystemExit(f"{path} is not what docs/results/*.json say; run `make docs`")
        if not args.check:
            path.write_text(text)


def load(directory: Path) -> list[dict[str, Any]]:
    """Every result of ``directory``, in the order of the page."""
    order = {name: i for i, name in enumerate(TITLES)}
    names = sorted((p.stem for p in directory.glob("*.json")), key=lambda n: (order.get(n, 99), n))
    return [read_result(name, directory) for name in names]


def results_page(records: list[dict[str, Any]]) -> str:
    """The page ``docs/results.md``."""
    head = (
        "# Results\n\n"
        "Made by `make docs` from `docs/results/*.json`; each file was written by the command shown"
        " beside it, and has a page with all its figures. Intervals are 95 %: Wilson for rates,"
        " Newcombe or bootstrap for differences and ratios, normal for means. A promise counts as"
        " met when the value meets it; the interval says how sure that is. A `+` after a commit"
        " means that files differed from it.\n"
    )
    return "\n".join([head, *map(_entry, records)])


def _entry(record: dict[str, Any]) -> str:
    """One result on the overview: its command, and what was promised of it."""
    name, figures = record["name"], record["figures"]
    rows = [
        f"  - `{key}` {_number(figure.value)}"
        + (f" ({_interval(figure)})" if _interval(figure) else "")
        + f", {_promise(name, key, figure)}"
        for key, figure in figures.items()
        if (name, key) in PROMISES
    ]
    head = f"- **[{TITLES.get(name, name)}](results/{name}.md)**: {len(figures)} figures"
    return "\n".join([f"{head}, `{record['command']}`", *rows])


def with_headlines(readme: str, records: list[dict[str, Any]]) -> str:
    """``readme`` with the lines between its two markers made anew."""
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    figures = {record["name"]: record["figures"] for record in records}
    rows = [
        f"| {text} | {_number(figures[name][key].value)} | {_interval(figures[name][key])} |"
        for name, key, text in HEADLINES
        if key in figures.get(name, {})
    ]
    table = "\n".join(["| what | value | 95 % interval |", "| --- | --- | --- |", *rows])
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def result_page(record: dict[str, Any]) -> str:
    """One result's page: what, how, on what, and its table."""
    name, machine = record["name"], record["machine"]
    hardware = f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB"
    if machine["accelerator"]:
        hardware += f", {machine['accelerator']}"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    commit = record["commit"] or "unknown"
    commit = commit[:10] + ("+" if commit.endswith("+") else "")
    promised = any((name, key) in PROMISES for key in record["figures"])
    columns = ["figure", "value", "95 % interval", "n", "unit", *(["promise"] if promised else [])]
    rows = []
    for key, figure in record["figures"].items():
        n = "" if figure.n is None else f"{figure.n:,}"
        cells = [f"`{key}`", _number(figure.value), _interval(figure), n, figure.unit]
        rows.append(cells + ([_promise(name, key, figure)] if promised else []))
    return "\n".join(
        [
            f"# {TITLES.get(name, name)}\n",
            f"    {record['command']}\n",
            f"- file: [`{name}.json`]({name}.json), {record['date'][:10]},"
            f" commit {commit}, seeds {_seeds(record['seeds'])},"
            f" protocol `{record['protocol_hash']}`",
            f"- machine: {hardware}; Python {machine['python']}, {versions}\n",
            _row(columns),
            _row(["---"] * len(columns)),
            *map(_row, rows),
            "",
        ]
    )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _promise(name: str, key: str, figure: Figure) -> str:
    """The bound and whether the value keeps it."""
    if (name, key) not in PROMISES:
        return ""
    sign, bound = PROMISES[name, key]
    met = figure.value >= bound if sign == ">=" else figure.value <= bound
    return f"{sign} {_number(bound)}: {'met' if met else '**missed**'}"


def _interval(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"{_number(figure.low)} to {_number(figure.high)}"


def _number(value: float) -> str:
    """Three significant digits; integers in full, with separators."""
    if value == int(value) or abs(value) >= 1000:
        return f"{round(value):,}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits}f}" if digits <= 6 else f"{value:.2e}"


def _seeds(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds)) if len(seeds) <= 5 else f"{seeds[0]} to {seeds[-1]}"


if __name__ == "__main__":
    main(tyro.cli(Args))
