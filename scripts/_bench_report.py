"""The benchmark's page and plots, from its result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.results import Figure
from regrasp.monitors.conformal import false_alarm_band

#: The policies that were compared: result file -> heading.
POLICIES: dict[str, str] = {
    "monitors": "The shipped VLA",
    "monitors_act": "LeRobot's ACT",
}

#: Columns of the leaderboard: figure -> heading.
COLUMNS: dict[str, str] = {
    "twa_length_matched": "TWA, length-matched",
    "auroc_length_matched": "AUROC, length-matched",
    "tpr": "failures detected",
    "early_share": "in the first third",
    "false_alarm_rate": "false alarms",
    "twa": "TWA",
    "p99_ms": "p99 ms",
    "samples": "samples",
}


def ranked(figures: Mapping[str, Figure], prefix: str = "") -> list[str]:
    """Entries by length-matched TWA, the best first."""
    tail = ".twa_length_matched"
    keys = [
        k.removeprefix(prefix).removesuffix(tail)
        for k in figures
        if k.startswith(prefix) and k.endswith(tail)
    ]
    keys = [k for k in keys if "." not in k and "_minus_" not in k]
    return sorted(keys, key=lambda k: -figures[f"{prefix}{k}{tail}"].value)


def leaderboard(figures: Mapping[str, Figure], chosen: Mapping[str, str], prefix: str = "") -> str:
    """A Markdown table; ``chosen`` says what stands behind each entry."""
    head = ["monitor", "window and rule", *COLUMNS.values()]
    rows = [head, ["---"] * len(head)]
    for key in ranked(figures, prefix):
        name = f"**{key}**" if key == "default" else key
        cells = [name, chosen.get(key, "")]
        for column in COLUMNS:
            where = "" if column in ("p99_ms", "samples") else prefix
            cells.append(_cell(figures.get(f"{where}{key}.{column}")))
        rows.append(cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3g}"
    return f"{figure.value:.3f} ({figure.low:.3f} to {figure.high:.3f})"


def breakdown(figures: Mapping[str, Figure], kind: str) -> str:
    """What the default sees, by ``family`` or ``severity``, as a Markdown table."""
    stem = f"default.{kind}."
    names = sorted({k.removeprefix(stem).rpartition(".")[0] for k in figures if k.startswith(stem)})
    rows = [
        [kind, "failures", "detected", "in the first third", "successes that alarmed"],
        ["---"] * 5,
    ]
    for name in names:
        found = {
            part: figures.get(f"{stem}{name}.{part}")
            for part in ("tpr", "early_share", "alarmed_success")
        }
        hits = found["tpr"]
        count = "" if hits is None else str(hits.n)
        rows.append([name, count, *(_cell(found[part]) for part in found)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The page ``docs/monitors_benchmark.md``, from the records of :data:`POLICIES` there are."""
    parts = [INTRODUCTION]
    for record in records:
        figures, chosen = record["figures"], record["protocol"]["chosen"]
        failures = record["protocol"]["failures"]
        parts += [
            f"## {POLICIES[record['name']]}",
            f"{failures['seen']} failures in {failures['seen_episodes']} held-out episodes of seen "
            f"tasks, {failures['unseen']} in {failures['unseen_episodes']} of unseen ones.",
            f"![TWA of each monitor]({record['name']}_leaderboard.png)",
            "### Seen tasks",
            leaderboard(figures, chosen),
            "### Unseen tasks",
            leaderboard(figures, chosen, "unseen."),
            "### The default less each baseline, paired",
            _differences(figures),
            "### What the default sees, and what it does not",
            breakdown(figures, "family"),
            breakdown(figures, "severity"),
            f"![Promised and observed false alarms]({record['name']}_promise.png) "
            f"![When failures are detected]({record['name']}_delay.png)",
        ]
    return "\n\n".join(parts) + "\n"


def _differences(figures: Mapping[str, Figure]) -> str:
    rows = [["less", "seen tasks", "unseen tasks"], ["---"] * 3]
    stem, tail = "default_minus_", ".twa_length_matched"
    for key in figures:
        if key.startswith(stem):
            rows.append(
                [
                    key.removeprefix(stem).removesuffix(tail),
                    _cell(figures[key]),
                    _cell(figures.get(f"unseen.{key}")),
                ]
            )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


INTRODUCTION = """# Monitors compared

    regrasp monitors bench

Made by that command and `make docs`; intervals are 95 %: Wilson for rates, else bootstrap.
A policy is rolled out in libero_object and libero_spatial, unperturbed and with injected failures.
Scores are trained on some initial states of the *seen* tasks; each one's window and threshold style
are chosen on others, by length-matched TWA; thresholds are set at alpha 0.05 on others again, from
unperturbed successes; and everything is measured on held-out initial states, in seen tasks and in
tasks that no monitor was trained or calibrated on.

- **Length-matched**: a failure lasts to the time limit and a success does not, so that elapsed
  time separates them. Here each failure is cut to the length of a success of the same task;
  failures that only begin later are left out. The clock then has an AUROC of one half.
- **TWA**: half the share of quiet successes, and half the share of detected failures, each worth
  what was left of the time limit at its alarm. Never alarming has one half.
- **In the first third**: of the time from the moment a failure began to the episode's end. It
  begins where the best stage reached is lost for good, or where the robot stays longer at one than
  any success did; never before what was injected.
- **False alarms**: unperturbed successes that alarmed, which alpha bounds on average. A successful
  episode that was disturbed and alarmed is no false alarm here, but it costs TWA.
- **Samples**: chunks that the policy must draw at each inference; more than one costs the policy
  time that p99, the score's own, does not show. The *default* is the best of those that need one.
- Episodes with a wrong instruction are shown apart: the policy does well what it was told.
"""


def plot_leaderboard(figures: Mapping[str, Figure], path: Path) -> None:
    """Length-matched TWA with its interval, seen and unseen tasks."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    keys = ranked(figures)[::-1]
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(keys) + 1.2))
    for offset, prefix, label, colour in (
        (0.15, "", "seen tasks", "#1b6ca8"),
        (-0.15, "unseen.", "unseen tasks", "#d9822b"),
    ):
        shown = [figures[f"{prefix}{k}.twa_length_matched"] for k in keys]
        values = np.array([f.value for f in shown])
        errors = [values - [f.low for f in shown], np.array([f.high for f in shown]) - values]
        rows = np.arange(len(keys)) + offset
        axes.errorbar(
            values, rows, xerr=errors, fmt="o", ms=4, capsize=2, color=colour, label=label
        )
    axes.axvline(0.5, color="grey", lw=0.8, ls="--")
    axes.set_yticks(np.arange(len(keys)), keys)
    axes.set_xlabel("TWA, length-matched (0.5: never alarming)")
    axes.legend(loc="lower right", frameon=False)
    _save(figure, path)


def plot_promise(observed: Mapping[str, Mapping[float, Sequence[int]]], path: Path) -> None:
    """Promised against observed false alarms, with the band that the promise allows."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 4.2))
    first = next(iter(observed.values()))
    alphas = np.array(sorted(float(a) for a in first))
    band = np.array([false_alarm_band(first[a][1], a, first[a][2]) for a in alphas])
    axes.fill_between(alphas, band[:, 0], band[:, 1], color="#dddddd", label="95 % band")
    axes.plot(alphas, alphas, color="grey", lw=0.8, ls="--")
    for name, counts in observed.items():
        axes.plot(alphas, [counts[a][0] / counts[a][1] for a in alphas], "o-", ms=3, label=name)
    axes.set_xlabel("false alarms promised (alpha)")
    axes.set_ylabel("observed on held-out successes")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_delay(lead: Mapping[str, np.ndarray], path: Path) -> None:
    """Share of failures detected by each part of the time between onset and end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 4.2))
    grid = np.linspace(0, 0.999, 200)
    for name, fractions in lead.items():
        axes.plot(grid, [(fractions <= g).mean() for g in grid], label=name)
    axes.axvline(1 / 3, color="grey", lw=0.8, ls="--")
    axes.set_xlabel("time since the failure began, of all the time until its end")
    axes.set_ylabel("share of failures detected")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
