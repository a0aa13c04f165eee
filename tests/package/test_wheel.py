"""The wheel, built from what git holds and installed without its dependencies' help."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import regrasp
from regrasp.scripts.check_types import build_wheel, install_wheel

ROOT = Path(regrasp.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
#: Of the checkout, not of the package.
NOT_SHIPPED = {"bootstrap.sh"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return install_wheel(wheel, tmp_path_factory.mktemp("venv") / "venv")


def run(python, code, cwd):
    return subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True)


def test_wheel_holds_every_file_of_every_package(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    folders = {p.replace(".", "/").removeprefix("regrasp").lstrip("/") for p in PACKAGES} - {""}
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    missing = [
        name
        for name in listed
        if name.split("/")[0] in folders
        and Path(name).name not in NOT_SHIPPED
        and (ROOT / name).is_file()
        and f"regrasp/{name}" not in held
    ]
    assert not missing
    assert {"regrasp/py.typed", "regrasp/__init__.py"} <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    strangers = {name.split("/")[1] for name in held if name.startswith("regrasp/")} - folders
    assert strangers == {"__init__.py", "py.typed"}


def test_installed_wheel_imports_every_package(python, tmp_path):
    code = "import importlib, regrasp; print(regrasp.__file__)\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in PACKAGES
    )
    done = run(python, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)


def test_command_runs_from_the_wheel(python, tmp_path):
    done = run(python, "from regrasp.scripts.main import main; main(['--version'])", tmp_path)
    assert done.stdout == f"regrasp {PROJECT['project']['version']}\n"


def test_base_installation_needs_no_torch_and_no_mujoco(python, tmp_path):
    code = (
        "import sys\n"
        "for name in ('torch', 'mujoco', 'lerobot', 'transformers', 'diffusers', 'robosuite'):\n"
        "    sys.modules[name] = None  # as if it were not installed\n"
        "import regrasp.episodes.store, regrasp.episodes.reader, regrasp.policies.protocol\n"
        "import regrasp.monitors.runtime, regrasp.recovery.supervisor\n"
        "from regrasp.scripts.main import main\n"
        "main(['train', 'bc', '--help'])\n"
    )
    done = run(python, code, tmp_path)
    assert done.returncode == 1
    assert "pip install 'regrasp[train]'" in done.stderr, done.stderr


def test_types_fail_on_a_wrong_type(python, tmp_path):
    """A user's mistake is seen, so the wheel's ``py.typed`` works."""
    (tmp_path / "user.py").write_text(
        "from regrasp.episodes.types import StateLayout\nStateLayout(names=3, units=('m',))\n"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'incompatible type "int"' in done.stdout, done.stdout
