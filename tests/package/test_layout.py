"""The house rules that a machine can hold: packages, sizes, imports, what is committed."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import regrasp

ROOT = Path(regrasp.__file__).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = set(PYPROJECT["tool"]["setuptools"]["packages"])
WEIGHTS = {".safetensors", ".npz", ".npy", ".pt", ".onnx"}


def tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_packages_are_the_folders():
    folders = {str(Path(name).parent) for name in tracked("*.py")}
    # Not of the package: the tests, and distributions of their own.
    others = {"tests", *(str(Path(name).parent) for name in tracked("*/pyproject.toml"))}
    folders = {f for f in folders if f.split("/")[0] not in others}
    expected = {"regrasp" if f == "." else f"regrasp.{f.replace('/', '.')}" for f in folders}
    assert expected == PACKAGES
    for folder in folders:
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_no_file_above_500_lines():
    long = {}
    for name in tracked("*.py", "*.sh", "*.html", "*.md", "Makefile"):
        lines = len((ROOT / name).read_text().splitlines())
        if lines > 500:
            long[name] = lines
    assert not long, f"a file above 500 lines holds two ideas: {long}"


def test_weights_below_30_mb():
    sizes = {n: (ROOT / n).stat().st_size for n in tracked() if Path(n).suffix in WEIGHTS}
    assert sum(sizes.values()) < 30e6, sizes


def test_weights_are_safetensors():
    pickled = [
        n for n in tracked() if Path(n).suffix in {".pt", ".pth", ".ckpt", ".pkl", ".joblib"}
    ]
    assert not pickled


# Written in pieces, so that this file does not find itself.
HOSTS = ("py" + "pi.org", "python" + "hosted.org", "index-url " + "http", "index-url=" + "http")
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:root|work|home|Users|mnt|scratch)" + r"/[\w.]")


def test_no_machine_paths_and_no_registries():
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue  # pictures and weights
        found += [f"{name}: {host}" for host in HOSTS if host in text]
        found += [f"{name}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found, found


def test_the_machine_path_pattern_sees_what_it_should():
    assert MACHINE_PATH.search("open('/ro" + "ot/x')")
    assert MACHINE_PATH.search("path: /ho" + "me/user/data")
    assert not MACHINE_PATH.search("https://site.io/work/page, ../work/x, $HOME/work/y")


def test_lock_is_pinned_and_hashed():
    lock = (ROOT / "requirements.lock").read_text()
    pins = re.findall(r"^([a-z0-9][\w.\[\],-]*)(==\S+)?", lock, re.M)
    assert len(pins) > 50
    assert [name for name, version in pins if not version] == []
    blocks = re.split(r"\n(?=[a-z0-9])", lock)
    assert [b.splitlines()[0] for b in blocks if "--hash=sha256:" not in b] == []


def test_lock_covers_pyproject():
    project = PYPROJECT["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[\[<>=; ]", w)[0].lower().replace("_", "-") for w in wanted}
    locked = set(
        re.findall(r"^([a-z0-9][\w.-]*)==", (ROOT / "requirements.lock").read_text(), re.M)
    )
    assert names <= locked, f"run `make lock`: {sorted(names - locked)}"


# --- import-linter: the contracts hold, and each of them can be broken --------------------------
BREACHES = [
    ("episodes", "import regrasp.monitors"),
    ("policies", "import regrasp.sim"),
    ("sim", "import regrasp.recovery"),
    ("monitors", "import regrasp.relabel"),
    ("recovery", "import regrasp.policies"),
    ("hardware", "import regrasp.sim"),
]


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory):
    """A package of the same folders, all empty, under the same contracts."""
    root = tmp_path_factory.mktemp("contracts")
    for package in sorted(PACKAGES):
        folder = root / package.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def lint_imports(root):
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def test_contracts_hold_without_breach(skeleton):
    done = lint_imports(skeleton)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("package", "line"), BREACHES)
def test_every_contract_can_be_broken(skeleton, package, line):
    breach = skeleton / "regrasp" / package / "breach.py"
    breach.write_text(line + "\n")
    try:
        done = lint_imports(skeleton)
    finally:
        breach.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"regrasp.{package}.breach -> {line.split()[1]}" in done.stdout
