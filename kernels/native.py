"""C kernels that are compiled on first use, and the threads that run them.

A kernel is one C file beside this one, with vectors.h. The system's compiler ($CC, else cc) makes a library for this very
processor, which is kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache) under a digest of all that it depends on.
Where that folder cannot be written to, or others can write to it, every process makes its own.
ctypes releases the interpreter's lock during a call, so other threads go on, and several run a kernel side by side.
"""

import ctypes
import errno
import hashlib
import os
import platform
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.kernels.functions import TRACED, learns, transformed

# No -ffast-math: infinities and NaN keep their meaning, and sums the order in which they are written.
FLAGS = "-O3 -std=gnu11 -fPIC -shared -fno-strict-aliasing -fno-math-errno -fno-trapping-math -ffp-contract=fast".split()
FOLDER = Path(__file__).parent
_STARTED_IN = os.getpid()
STEP_ALONE = 2**21  # numbers in the states of a step up to which starting a second thread takes longer than it saves
PATIENCE = 300  # seconds that a compiler may take; on a machine that does much else it may take many
LIBRARY = re.compile(r"[a-z_]+-[0-9a-f]{20}\.so")
BUILDING = "building-"  # names of folders in the cache
TARGETS = ("-march=native", "-mcpu=native", "")  # the first that the compiler knows; ARM's often know the second alone


@cache
def load(name: str) -> ctypes.CDLL:
    """The library made from `name`.c. Raises RuntimeError, with the reason, where it cannot be made or loaded."""
    source, header = FOLDER / f"{name}.c", FOLDER / "vectors.h"
    if not source.exists():
        raise RuntimeError(f"{source.name} is not here: an exported checkpoint carries Python alone")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    flags, target = _for_this_processor(compiler)
    # Home folders are shared by machines with other processors, compilers and C libraries.
    depends = (source.read_bytes(), header.read_bytes(), " ".join([*compiler, *flags]), *platform.libc_ver(), target)
    digest = hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else part.encode() for part in depends)).hexdigest()
    file = f"{name}-{digest[:20]}.so"
    command = [*compiler, *flags, str(source), "-o"]
    try:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        cache = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")
        return _kept(Path(cache) / "mamba-surgery" / "kernels" / file, command)
    except OSError:  # read-only, full, or mounted so that nothing in it may be executed
        with tempfile.TemporaryDirectory(prefix="surgery-") as folder:  # what is loaded stays when its file is gone
            return _build(Path(folder) / file, command)


def _kept(library: Path, command: list[str]) -> ctypes.CDLL:
    """Load a library, made first where it is not there yet or is broken. Raises PermissionError where others may have written
    what would be loaded."""
    if not library.parent.exists():
        library.parent.parent.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(mode=0o700, exist_ok=True)
    _check_own(library.parent)
    if os.path.lexists(library):
        _check_own(library)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # a file that lost its end when the machine stopped
            pass
    _sweep(library.parent)
    # Made in a folder of its own and renamed: no other process ever sees half a library.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=BUILDING) as folder:
        built = Path(folder) / library.name
        loaded = _build(built, command)
        built.chmod(0o700)  # a umask may let the group write, and then it would not be taken again
        os.replace(built, library)
    return loaded


def _check_own(path: Path) -> None:
    about = os.lstat(path)
    if about.st_uid != os.geteuid() or about.st_mode & 0o022 or stat.S_ISLNK(about.st_mode):
        raise PermissionError(errno.EACCES, "others may have written it", str(path))


def _build(library: Path, command: list[str]) -> ctypes.CDLL:
    _call([*command, str(library)])
    return ctypes.CDLL(str(library))


def _sweep(folder: Path) -> None:
    """Remove what builds of a day ago have left, which were killed: our libraries, and folders with nothing else in them."""
    for left in folder.glob(f"{BUILDING}*"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 86400:
                for library in left.iterdir():
                    if LIBRARY.fullmatch(library.name):
                        library.unlink()
                left.rmdir()


def _for_this_processor(compiler: list[str]) -> tuple[list[str], bytes]:
    """The flags, and the macros that they predefine: these name the compiler's version and all that the processor can do."""
    for target in TARGETS:
        flags = [*FLAGS, *([target] if target else [])]
        try:
            return flags, _call([*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull])
        except RuntimeError as failure:
            reason = failure
    raise reason


def _call(command: list[str]) -> bytes:
    """What a compiler prints. Raises RuntimeError where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise RuntimeError(f"no C compiler: {failure}") from failure
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise RuntimeError(f"the C compiler '{command[0]}' fails: {message}")
    return done.stdout


class View(ctypes.Structure):
    """A tensor for C: where it lies, and its first three strides in numbers. The last is 1 in a tensor of four dimensions."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3))


_VIEW, _POINTER = Struct("@P3q"), Struct("@P")


class Workspace(ctypes.Structure):
    """What a kernel's functions are given: a subclass mirrors the structure of its C file. Create it with the numbers, in the
    order of the fields, and with the tensors by name.

    file: the C file's name, without its ending.
    """

    file: ClassVar[str]

    def __init__(self, *numbers: float, **tensors: Tensor | None):
        super().__init__(*numbers)
        self.fill(**tensors)

    def fill(self, **tensors: Tensor | None) -> None:
        """Enter tensors: each as a View where the field is one, else as a pointer."""
        offsets = _offsets(type(self))
        for name, m in tensors.items():
            if m is None:
                continue
            offset, view = offsets[name]
            if view:  # it takes a fraction of the time that making a View takes
                _VIEW.pack_into(self, offset, m.data_ptr(), *m.stride()[:3])
            else:
                _POINTER.pack_into(self, offset, m.data_ptr())

    def call(self, name: str) -> int:
        """What a function gives that computes a number alone."""
        return function(self.file, name)(ctypes.byref(self))

    def run(self, name: str, units: int) -> None:
        """Calls a function in as many threads as torch uses, at most `units`; each call works until no unit is left. Raises
        MemoryError where it says that there was no memory."""
        run, work = function(self.file, name), ctypes.byref(self)
        threads = min(torch.get_num_threads(), units)
        if threads == 1:
            run(work)
        elif team := _team(os.getpid()):
            team(run, work, threads, 0)
        else:
            waiting = [_pool(os.getpid(), threads - 1).submit(run, work) for _ in range(threads - 1)]
            run(work)
            for future in waiting:
                future.result()
        if self.failed:
            raise MemoryError("no memory for a kernel's workspace")


def fields(integers: str, tensors: str, views: str = "") -> tuple:
    """The fields of a Workspace, by their names in order: integers, tensors (with their strides those that are in
    `views`, too); and what all end with: `next`, the counter of units, and `failed`, whether there was no memory."""
    kinds = dict.fromkeys(views.split(), View)
    return (
        *((name, ctypes.c_int64) for name in integers.split()),
        *((name, kinds.get(name, ctypes.c_void_p)) for name in tensors.split()),
        *((name, ctypes.c_int64) for name in ("next", "failed")),
    )


@cache
def _offsets(kind: type[ctypes.Structure]) -> dict[str, tuple[int, bool]]:
    """Field -> its offset, and whether it is a View."""
    return {name: (getattr(kind, name).offset, of is View) for name, of in kind._fields_}  # type: ignore[misc]


@cache
def function(file: str, name: str) -> Any:
    """A function of a C file, made where it is not there yet. Raises RuntimeError as `load` does."""
    compiled = getattr(load(file), name)
    compiled.restype = ctypes.c_int64  # of those that have a result
    return compiled


@cache
def constant(file: str, name: str) -> int:
    """A number that a C file defines. Raises RuntimeError as `load` does."""
    return ctypes.c_int64.in_dll(load(file), name).value


def refuses(*tensors: Tensor | None) -> str | None:
    """Why no kernel here takes these, or None."""
    for m in tensors:
        if m is None:
            continue
        if not m.is_cpu:
            return "it runs on a CPU"
        if m.dtype == torch.float64:
            return "it computes in float32"
        # Subclasses keep their values elsewhere. Those of a trace are taken, by the operator of the operation.
        if type(m) not in (Tensor, torch.nn.Parameter) and not isinstance(m, TRACED):
            return "it takes plain tensors"
    return "it cannot be traced by torch.jit" if torch.jit.is_tracing() else transformed()


def step_refuses(state: Tensor, *others: Tensor | None) -> str | None:
    """Why no kernel here takes a step that changes `state`, or None."""
    if reason := refuses(state, *others):
        return reason
    if state.dtype != torch.float32 or not state.is_contiguous():
        return "it takes a contiguous state in float32"
    return "it has no gradient" if learns(state, *others) else None


def check(*shapes: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError for the first tensor of another shape: C would read whatever lies there."""
    for m, shape in shapes:
        if m is not None and m.shape != shape:
            raise ValueError(f"a tensor of shape {tuple(m.shape)} where {shape} belongs")


def floats(*tensors: Any) -> list[Any]:
    """Each in float32."""
    return [None if m is None else m.float() for m in tensors]


def contiguous(*tensors: Any) -> list[Any]:
    """Each contiguous, as C expects what is not passed as a View."""
    return [None if m is None else m.contiguous() for m in tensors]


def rows(*tensors: Tensor) -> list[Tensor]:
    """Each with its last dimension contiguous, copied where it is not."""
    return [m if m.stride(-1) == 1 else m.contiguous() for m in tensors]


@cache
def _team(process: int) -> Any:
    """What calls a function in the threads of torch's own OpenMP, or None where that cannot be had.

    Between torch's operations those threads spin: others would have to wait for a processor until they stop.
    """
    if process != _STARTED_IN:  # OpenMP's threads do not survive a fork
        return None
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu{'.dylib' if sys.platform == 'darwin' else '.so'}"
    try:
        team = ctypes.CDLL(str(library)).GOMP_parallel  # which LLVM's and Intel's OpenMP have as well
    except (OSError, AttributeError):
        return None
    team.argtypes, team.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return team


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:  # by process: threads do not survive a fork
    return ThreadPoolExecutor(workers, thread_name_prefix="surgery")
