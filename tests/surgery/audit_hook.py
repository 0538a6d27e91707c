"""Writes down what a process of Python runs, starts and connects to, by the audit hook of Python. As sitecustomize.py in a
folder of PYTHONPATH it begins before anything else is imported, in every process that is started.

What is written goes to the file that the environment variable AUDIT names, one JSON list a line: [process, event, what, ...].
"""

import hashlib
import json
import os
import sys
from pathlib import Path

LOG = os.open(os.environ["AUDIT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "webbrowser.open")
CONNECTS = (
    "socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "http.client.connect",
    "urllib.Request",
)  # fmt: skip
OTHERS = ("ctypes.dlopen", "builtins.input", "cpython.run_command")


def write(*what: object) -> None:
    os.write(LOG, (json.dumps([os.getpid(), *map(str, what)]) + "\n").encode())


def caller() -> str:
    """The file of the code that called exec, but for the machinery of imports."""
    try:
        frame = sys._getframe(2)
    except ValueError:  # the text of python -c
        return ""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def hook(event: str, arguments: tuple) -> None:
    if event == "exec":
        file = getattr(arguments[0], "co_filename", "")
        if file.startswith("<frozen"):
            return
        if file.startswith("<") or not os.path.isabs(file):
            write("exec", file, caller())
        else:
            write("exec", file, hashlib.sha256(Path(file).read_bytes()).hexdigest() if "transformers_modules" in file else "")
    elif event == "import":
        if arguments[1]:  # an extension's file
            write("import", arguments[1])
    elif event == "pickle.find_class":
        write(event, *arguments)
    elif event == "subprocess.Popen":
        executable, command = arguments[:2]
        write(
            event, executable, json.dumps([os.fsdecode(part) for part in command] if not isinstance(command, str) else command)
        )
    elif event in STARTS or event in OTHERS:
        write(event, *arguments[:1])
    elif event in CONNECTS:
        write(event, *arguments[:2])
        raise ConnectionError("the test allows no connection")


sys.addaudithook(hook)
