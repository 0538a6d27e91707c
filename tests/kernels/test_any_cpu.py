"""The C kernels compute the same on every processor: built for narrower and wider vectors than this one's, for ARM, and with
sanitizers that watch their memory and their arithmetic."""

import os
import shutil

import pytest

from surgery.kernels import native
from surgery.kernels.selective import SELECTIVE_SCAN
from surgery.kernels.ssd import SSD_SCAN
from tests.kernels.builds import CHECKS, building, remote, runs_here
from tests.kernels.inputs import make_scan, make_selective

PROCESSORS = {"SSE2": ["-march=x86-64"], "AVX2": ["-march=x86-64-v3"], "AVX-512": ["-march=x86-64-v4"]}
# Of vectors and of blocks, for processors that are not at hand; -O1 compiles in a third of the time.
EMULATED = [(lanes, rows) for lanes in (4, 8, 16) for rows in (2, 4, 8, 16) if rows <= 2 * lanes]
ON_ARM = (4, 8)
SIZES_ON_ARM = ("-DLANES=4", "-DROWS=8")


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if reason := SELECTIVE_SCAN.why_not(SELECTIVE_SCAN.backends["native"], *make_selective(1)):
        pytest.skip(reason)


MANY = pytest.mark.skipif(
    "SURGERY_ALL_BUILDS" not in os.environ, reason="SURGERY_ALL_BUILDS is not set, as `make sanitize` does: it takes a while"
)


@pytest.mark.parametrize(
    ("processor", "some"), [("SSE2", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in PROCESSORS)]
)
def test_built_for_a_processor(processor, some, monkeypatch, tmp_path):
    if not runs_here(*PROCESSORS[processor]):
        pytest.skip(f"this processor has no {processor}")
    with building(monkeypatch, tmp_path, PROCESSORS[processor]):
        for check in CHECKS.values():
            check(some)


@pytest.mark.parametrize(
    ("lanes", "rows"), [pytest.param(*build, marks=() if build == ON_ARM else [pytest.mark.slow, MANY]) for build in EMULATED]
)
def test_vectors_and_blocks_of_any_size(lanes, rows, monkeypatch, tmp_path):
    with building(monkeypatch, tmp_path, ["-O1", f"-DLANES={lanes}", f"-DROWS={rows}"]):
        for name, check in CHECKS.items():
            if rows == 2 or name in ("ssd", "attention"):  # the others have no blocks
                check()


@pytest.mark.parametrize("flags", ["-DLANES=2", "-DLANES=32", "-DLANES=4 -DROWS=16", "-DLANES=8 -DROWS=3"])
def test_what_does_not_fit_together_is_not_compiled(flags, monkeypatch, tmp_path):
    with building(monkeypatch, tmp_path, flags.split()), pytest.raises(RuntimeError, match="static assertion failed"):
        native.load("ssd")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_on_aarch64(threads, monkeypatch, tmp_path):
    """As on ARM's servers and on Apple's processors: NEON, vectors of 4 numbers, 32 registers."""
    compiler, emulator = (
        shutil.which("aarch64-linux-gnu-gcc"),
        shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static"),
    )
    if not compiler or not emulator:
        pytest.skip("no compiler or no emulator: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    with remote(monkeypatch, tmp_path, [compiler, "-static"], [emulator], threads):
        for check in CHECKS.values():
            check(threads > 1)


SANITIZERS = {
    "address and undefined": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@pytest.mark.slow
@MANY
@pytest.mark.parametrize("build", [*PROCESSORS, "ARM's sizes"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers(sanitizer, build, monkeypatch, tmp_path):
    """They see every read and write beside a tensor, overflows, shifts too far, bad alignment; and two threads in one place."""
    if build in PROCESSORS and not runs_here(*PROCESSORS[build]):
        pytest.skip(f"this processor has no {build}")
    flags = PROCESSORS.get(build, SIZES_ON_ARM)
    compiler = ["cc", "-O1", "-g", *SANITIZERS[sanitizer], *flags]
    with remote(monkeypatch, tmp_path, compiler, threads=1 if sanitizer != "thread" else 3):
        for check in CHECKS.values():
            check(sanitizer == "thread")


def test_a_column_that_is_left_out_is_seen(monkeypatch, tmp_path):
    """What was wrong on ARM until 0.7: squares of a triangle that were narrower than a block is high."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("ssd.c", "vectors.h"):
        text = (native.FOLDER / name).read_text()
        (sources / name).write_text(text.replace("j / SIDE * SIDE", "j / LANES * LANES"))
    monkeypatch.setattr(native, "FOLDER", sources)
    with building(monkeypatch, tmp_path, ["-O1", *SIZES_ON_ARM]):
        scan = make_scan(40, width=16, size=16)
        assert SSD_SCAN.why_not(SSD_SCAN.backends["native"], *scan, 256) is None  # nothing is wrong with the forward pass
        for m in scan:
            m.requires_grad_()
        reason = SSD_SCAN.why_not(SSD_SCAN.backends["native"], *scan, 256)
        assert reason is not None
        assert reason.startswith("its gradient is wrong: off by ")
        assert SSD_SCAN.choose(*scan, 256).name == "chunked"
