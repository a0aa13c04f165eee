"""Type checks on the wheel as a user installs it: `python -m regrasp.scripts.check_types`.

The repository root is the package, so a type checker run on the checkout would see modules named
``policies`` or ``sim``; on the installed wheel it sees what users see, ``py.typed`` included.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import regrasp

ROOT = Path(regrasp.__file__).parent


def build_wheel(root: Path, directory: Path) -> Path:
    """Build the wheel of the files git knows of, or would add, at ``root``; returns its path.

    Built from a copy: setuptools leaves a ``build/`` behind whose stale files would get into the
    next wheel. Nothing is downloaded; the setuptools of this environment builds.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    copy = directory / "source"
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():  # a deleted file is still listed until it is committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    built = subprocess.run([*command, directory, copy], capture_output=True, text=True)
    if built.returncode:
        raise RuntimeError(f"building the wheel failed:\n{built.stdout}{built.stderr}")
    return next(directory.glob("*.whl"))


def install_wheel(wheel: Path, directory: Path) -> Path:
    """Install ``wheel`` into a new virtual environment; returns its interpreter.

    The environment sees this one's packages, except that ``regrasp`` is the wheel's. A pure-Python
    wheel is installed by unpacking it.
    """
    venv.EnvBuilder(symlinks=True).create(directory)
    python = directory / "bin" / "python"
    site = next(directory.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    ours = Path(sys.prefix).glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in ours))
    return python


def main() -> int:
    """Build, install, check; returns mypy's exit status."""
    with tempfile.TemporaryDirectory(prefix="regrasp_types_") as scratch:
        wheel = build_wheel(ROOT, Path(scratch) / "wheel")
        python = install_wheel(wheel, Path(scratch) / "venv")
        # From another directory, where no folder of the checkout can be mistaken for a module.
        mypy = [sys.executable, "-m", "mypy", "-p", "regrasp", "--python-executable", str(python)]
        mypy += ["--config-file", str(ROOT / "pyproject.toml")]
        mypy += ["--cache-dir", str(ROOT / ".mypy_cache")]
        return subprocess.run(mypy, cwd=scratch).returncode


if __name__ == "__main__":
    sys.exit(main())
