"""What mlx-lm answers for a folder. A script for the engine's own environment, which needs the package mlx-lm (and on Linux
mlx[cpu]):

    python -P ask_mlx_lm.py < job.json > answers.json

job: {"folder": str, "prompts": [[token id, ...], ...], "new": [how many tokens to choose after each prompt, ...]}
answers: {"version": str, "setting": str, "alone": [...], "together": [...]}, for each prompt [[chosen token, {token:
log-probability}], ...]

By mlx-lm's generator of batches: alone, each prompt is a request by itself; together, all are sent at once, of which no more
than SEATS run at a time, so that requests join as others leave. Prompts are read one at a time, in pieces of PIECE tokens.
"""

import json
import os
import sys
from importlib import metadata

SEATS, PIECE, TOP = 4, 64, 5


def main() -> None:
    job = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        json.dump(answers(**job), out)


def answers(folder: str, prompts: list[list[int]], new: list[int]) -> dict:
    from mlx_lm import load

    model, _ = load(folder)
    alone = [_asked(model, [prompt], [count])[0] for prompt, count in zip(prompts, new, strict=True)]
    setting = f"on {_device()}"
    return {
        "version": metadata.version("mlx-lm"), "setting": setting, "alone": alone, "together": _asked(model, prompts, new),
    }  # fmt: skip


def _asked(model, prompts: list[list[int]], new: list[int]) -> list:
    """Greedy tokens after the prompts, each with the log-probabilities of the TOP most probable ones."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, completion_batch_size=SEATS, prefill_batch_size=1, prefill_step_size=PIECE)
    numbers = generator.insert(prompts, new)
    steps: dict = {number: [] for number in numbers}
    while told := generator.next_generated():
        for each in told:
            steps[each.uid].append(_step(each.token, each.logprobs))
    generator.close()
    return [steps[number] for number in numbers]


def _step(token: int, logprobs) -> list:
    import mlx.core as mx

    values = logprobs.astype(mx.float32)
    best = mx.argsort(-values)[:TOP].tolist()
    return [int(token), {str(other): values[other].item() for other in best}]


def _device() -> str:
    import mlx.core as mx

    return "a CPU" if mx.default_device().type == mx.DeviceType.cpu else "a GPU"


if __name__ == "__main__":
    main()
