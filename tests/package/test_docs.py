"""The docs say what is true: generated pages are current, commands parse, Python blocks run."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import regrasp
import tyro
from regrasp.episodes.results import Figure, write_result
from regrasp.scripts import docs_tables
from regrasp.scripts.main import COMMANDS

ROOT = Path(regrasp.__file__).parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def written():
    """Commands in indented lines and in the result files: (page, command)."""
    found = []
    for page in PAGES:
        for line in re.findall(r"^    (?:\$ )?(regrasp [a-z].*)$", page.read_text(), re.M):
            command = line.split("  #")[0].strip()
            if " needs the package " not in command:  # a message that is quoted
                found += [(page.name, part) for part in command.split(" && ")]
    return sorted(set(found))


def test_generated_pages_are_current():
    docs_tables.main(docs_tables.Args(ROOT, check=True))


@pytest.mark.parametrize(("page", "command"), written())
def test_commands_in_the_docs_exist(page, command):
    words = shlex.split(command)[1:]
    verb = next(v for v in (" ".join(words[:2]), words[0]) if v in COMMANDS)
    module = importlib.import_module(f"regrasp.scripts.{COMMANDS[verb].module}")
    tyro.cli(module.Args, args=words[len(verb.split()) :])


def test_the_docs_show_every_command():
    shown = " ".join(command for _, command in written()) + " make demo"
    assert [verb for verb in COMMANDS if f"regrasp {verb}" not in shown] == []


GUIDES = [p.stem for p in PAGES if "```python" in p.read_text()]


@pytest.mark.parametrize("guide", GUIDES)
def test_python_blocks_run(guide, tmp_path):
    text = (ROOT / f"docs/{guide}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    env = {**os.environ, "MUJOCO_GL": "egl", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_make_targets_in_the_docs_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:`|^    )make ([a-z]+)", page.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


def test_page_of_a_result(tmp_path):
    figures = {
        "physics_ratio": Figure(4.5, 4.25, 4.75, 12, "ratio"),
        "steps": Figure(123456.0, unit="steps"),
    }
    write_result("bench_sim", "regrasp bench sim", {"a": 1}, [0, 1], figures, tmp_path)
    records = docs_tables.load(tmp_path)
    overview = docs_tables.results_page(records)
    assert "](results/bench_sim.md)" in overview
    assert "`physics_ratio` 4.50 (4.25 to 4.75), >= 5: **missed**" in overview
    page = docs_tables.result_page(records[0])
    assert "| `physics_ratio` | 4.50 | 4.25 to 4.75 | 12 | ratio | >= 5: **missed** |" in page
    assert "| `steps` | 123,456 |" in page
    assert "    regrasp bench sim\n" in page
    readme = f"a\n{docs_tables.BEGIN}\nold\n{docs_tables.END}\nb\n"
    made = docs_tables.with_headlines(readme, records)
    assert "old" not in made
    assert "| 4.50 | 4.25 to 4.75 |" in made
    assert made.startswith("a\n")
    assert made.endswith("b\n")
    assert docs_tables.with_headlines(made, records) == made


def test_stale_page_is_noticed(tmp_path):
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"{docs_tables.BEGIN}\n{docs_tables.END}")
    docs_tables.main(docs_tables.Args(tmp_path))
    docs_tables.main(docs_tables.Args(tmp_path, check=True))
    page = tmp_path / "docs/results.md"
    page.write_text(page.read_text() + "typed by hand\n")
    with pytest.raises(SystemExit, match="make docs"):
        docs_tables.main(docs_tables.Args(tmp_path, check=True))
