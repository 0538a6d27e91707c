"""`python -m build` makes a wheel and a source distribution that hold the whole package."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the repository without what git ignores."""
    if not (ROOT / ".git").exists():
        pytest.skip("the files of the repository are listed by git")
    files = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    copied = tmp_path_factory.mktemp("source")
    for name in files:
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copied / name, follow_symlinks=False)
    return copied


@pytest.fixture(scope="module")
def built(source, tmp_path_factory) -> tuple[set[str], set[str]]:
    """The names of the files in the wheel and in the source distribution."""
    pytest.importorskip("build", reason="the package build is not installed")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel, tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        return set(wheel.namelist()), {name.partition("/")[2] for name in archive.getnames()}


def test_both_hold_every_file_of_the_package(source, built):
    package = [path for folder in ("surgery", "kernels") for path in (source / folder).rglob("*") if path.is_file()]
    names = {path.relative_to(source).as_posix() for path in package}
    # surgery/kernels is a symbolic link to kernels.
    names = {f"surgery/{name}" if name.startswith("kernels/") else name for name in names}
    assert {"surgery/kernels/ssd.c", "surgery/probes/capitals.jsonl", "surgery/figures/page/page.css"} <= names
    for held in built:
        assert {name for name in held if name.startswith("surgery/") and not name.endswith("/")} >= names


def test_the_source_distribution_holds_what_its_readers_look_for(built):
    _, archive = built
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md"} <= archive


def test_the_wheel_holds_nothing_else(built):
    wheel, _ = built
    assert {name.partition("/")[0].partition("-")[0] for name in wheel} == {"surgery", "mamba_surgery"}
