"""`regrasp <verb>`: every verb has its file, help stays light, mistakes are named."""

import ast
import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import regrasp
from regrasp.scripts.main import COMMANDS, EXTRAS, main

ROOT = Path(regrasp.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    names = [n for n in listed.split("\0") if n and not n.startswith("tests/")]
    return [ROOT / name for name in names if (ROOT / name).exists()]


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_is_a_file_with_args_and_main(verb, capsys):
    import importlib

    module = importlib.import_module(f"regrasp.scripts.{COMMANDS[verb].module}")
    assert dataclasses.is_dataclass(module.Args)
    assert module.Args.__dataclass_params__.frozen, f"{verb}: Args must be frozen"
    module.Args()  # every option has a default
    with pytest.raises(SystemExit) as left:
        main([*verb.split(), "--help"])
    assert left.value.code == 0
    assert f"usage: regrasp {verb}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main([*verb.split(), "--no-such-option", "1"])
    assert left.value.code not in (0, None)


def test_every_command_file_has_a_verb():
    files = {p.stem for p in sources() if p.parent.name == "scripts" and p.stem != "docs_tables"}
    commands = {f for f in files if "class Args" in (ROOT / f"scripts/{f}.py").read_text()}
    assert commands == {command.module for command in COMMANDS.values()}


def test_help_imports_no_verb():
    code = (
        "import sys; from regrasp.scripts.main import main; main(['--help']); main(['bench'])\n"
        "heavy = {'torch', 'mujoco', 'zarr', 'lerobot', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'help imports {heavy}' if heavy else 0)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert all(verb in out.stdout for verb in COMMANDS)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("evl --episodes 2", "eval"), ("bench stor", "bench store"), ("collect data", "data collect")],
)
def test_unknown_verb_names_the_nearest(typed, meant):
    with pytest.raises(SystemExit, match=f"did you mean .*'{meant}'"):
        main(typed.split())


def test_unknown_verb_fails():
    done = subprocess.run(
        [sys.executable, "-m", "regrasp.scripts.main", "nonsense"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no command 'nonsense'" in done.stderr


@pytest.mark.parametrize(
    ("missing", "verb", "extra"), [("mujoco", "bench store", "sim"), ("torch", "eval", "train")]
)
def test_missing_package_says_how_to_install_it(missing, verb, extra, monkeypatch):
    class Verb:
        @dataclasses.dataclass(frozen=True)
        class Args:
            """Nothing to choose."""

        @staticmethod
        def main(args):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=f"{missing}.part")

    monkeypatch.setitem(sys.modules, f"regrasp.scripts.{COMMANDS[verb].module}", Verb)
    with pytest.raises(SystemExit, match=rf"{missing}.*pip install 'regrasp\[{extra}\]'"):
        main(verb.split())


def test_a_missing_module_of_our_own_is_not_hidden(monkeypatch):
    monkeypatch.setitem(sys.modules, "regrasp.scripts.bench_store", None)
    with pytest.raises(ModuleNotFoundError, match="bench_store"):
        main(["bench", "store"])


def test_every_optional_import_has_its_extra():
    assert set(EXTRAS.values()) <= set(PROJECT["optional-dependencies"])
    base = {"msgpack", "numcodecs", "numpy", "rich", "safetensors", "tyro", "websockets", "zarr"}
    assert base == {d.split(">")[0].split("=")[0] for d in PROJECT["dependencies"]}
    base |= {"regrasp"}
    unknown = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in (n.partition(".")[0] for n in names):
                if name not in base | set(EXTRAS) | set(sys.stdlib_module_names):
                    unknown.setdefault(name, str(path.relative_to(ROOT)))
    assert not unknown, f"imports without an extra in scripts/main.py: {unknown}"
