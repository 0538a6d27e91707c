"""CPU time that the command line takes to start: python tools/startup.py [--out FILE.json] [--against recipes/startup.json]

Each command runs several times in a process of its own, and the least CPU time counts (user and system). A ratio to `python -c
"import typer"`, taken in the same run, says the same on every machine; --against fails where a ratio is more than twice the
recorded one, as it is as soon as torch is imported.
"""

import argparse
import resource
import subprocess
import sys

from surgery.records.record import Environment, Record, environment

UNIT = "import typer"
COMMANDS = {
    UNIT: ("-c", "import typer"),
    "import surgery": ("-c", "import surgery"),
    "surgery --version": ("-m", "surgery", "--version"),
    "surgery --help": ("-m", "surgery", "--help"),
    "surgery locate --help": ("-m", "surgery", "locate", "--help"),
    "surgery lcoate": ("-m", "surgery", "lcoate"),
    "surgery locate": ("-m", "surgery", "locate"),
}
BOUND = 2.0


class Startup(Record):
    """seconds: the least CPU time of each command. ratios: to that of `import typer`."""

    environment: Environment
    rounds: int
    seconds: dict[str, float]
    ratios: dict[str, float]


def measure(rounds: int = 5) -> Startup:
    """The commands take turns, so that a disturbance of the machine hits all of them."""
    seconds = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            seconds[name] = min(seconds[name], _cpu_seconds(arguments))
    return Startup(
        environment=environment(("typer", "rich", "pydantic")),
        rounds=rounds,
        seconds={name: round(value, 3) for name, value in seconds.items()},
        ratios={name: round(value / seconds[UNIT], 2) for name, value in seconds.items()},
    )


def slower(now: Startup, recorded: Startup) -> list[str]:
    """One line for each command whose ratio is beyond the bound."""
    return [
        f"{name} takes {now.ratios[name]} times as long as {UNIT}; {recorded.ratios[name]} times is on record"
        for name in recorded.ratios
        if now.ratios[name] > BOUND * recorded.ratios[name]
    ]


def _cpu_seconds(arguments: tuple[str, ...]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="write the record to this file")
    parser.add_argument("--against", help="compare with this record")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    startup = measure(arguments.rounds)
    for name, value in startup.seconds.items():
        print(f"{value:7.3f} s CPU  {startup.ratios[name]:5.2f}  {name}")
    if arguments.out:
        arguments.out.write_text(startup.text())
    if arguments.against and (lines := slower(startup, Startup.read(arguments.against))):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
