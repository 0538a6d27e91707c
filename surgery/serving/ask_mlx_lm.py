"""What mlx-lm answers for a folder. A script for the engine's own environment, which needs the package mlx-lm (and on Linux
mlx[cpu]):

    python -P ask_mlx_lm.py < job.json > answers.json

job: {"folder": str, "prompts": [[token id, ...], ...], "new": [how many tokens to choose after each prompt, ...]}
answers: {"version": str, "alone": [...], "together": [...], "cached": [[prompt, how many of its tokens were kept, [...]], ...],
"failed": ""}, for each prompt [[chosen token, {token: log-probability}], ...]

By mlx-lm's generator of batches: alone, each prompt is a request by itself; together, all are sent at once, of which no more
than SEATS run at a time, so that requests join as others leave. Prompts are read one at a time, in pieces of PIECE tokens.
Cached: with the caches of prompts that mlx-lm's server keeps, a prompt, and then the same one with its answer and the next
prompt behind it, and without the answer.
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
    from mlx_lm.models.cache import LRUPromptCache

    model, _ = load(folder)
    alone = [_asked(model, [prompt], [count])[0] for prompt, count in zip(prompts, new, strict=True)]
    said: dict = {"version": metadata.version("mlx-lm"), "alone": alone, "together": _asked(model, prompts, new)}
    said |= {"cached": [], "failed": ""}
    for prompt, count, steps, after, more in zip(prompts, new, alone, prompts[1:], new[1:], strict=False):
        kept = LRUPromptCache()
        _asked(model, [prompt], [count], kept)
        for text in ([*prompt, *(token for token, _ in steps), *after], prompt + after):
            had = len(text) - len(kept.fetch_nearest_cache("", text)[1])
            said["cached"].append([text, had, _asked(model, [text], [more], kept)[0]])
    return said


def _asked(model, prompts: list[list[int]], new: list[int], kept=None) -> list:
    """Greedy tokens after the prompts, each with the log-probabilities of the TOP most probable ones. kept: caches of prompts
    that are gone on from, and put back."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, completion_batch_size=SEATS, prefill_batch_size=1, prefill_step_size=PIECE)
    caches, rest = None, prompts
    if kept is not None:
        (cache, left) = kept.fetch_nearest_cache("", prompts[0])
        caches, rest = [cache], [left]
    read = [prompt[: len(prompt) - len(left)] for prompt, left in zip(prompts, rest, strict=True)]
    numbers = generator.insert(rest, new, caches=caches, all_tokens=read)
    steps: dict = {number: [] for number in numbers}
    while told := generator.next_generated():
        for each in told:
            steps[each.uid].append(_step(each.token, each.logprobs))
            if kept is not None and each.prompt_cache is not None:
                kept.insert_cache("", list(each.all_tokens), each.prompt_cache)
    generator.close()
    return [steps[number] for number in numbers]


def _step(token: int, logprobs) -> list:
    import mlx.core as mx

    values = logprobs.astype(mx.float32)
    best = mx.argsort(-values)[:TOP].tolist()
    return [int(token), {str(other): values[other].item() for other in best}]


if __name__ == "__main__":
    main()
