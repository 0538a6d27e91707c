"""What vLLM answers for a folder. A script for the engine's own environment, which needs vLLM and, for hybrids, this package:

    python -P ask_vllm.py < job.json > answers.json

job: {"folder": str, "prompts": [[token id, ...], ...], "new": [how many tokens to choose after each prompt, ...]}
answers: {"version": str, "alone": [...], "together": [...]}, for each prompt [[chosen token, {token: log-probability}], ...]

Alone, each prompt is a request by itself. Together, all are sent at once: no more than SEATS run at a time, so that requests
join as others leave. Prompts are read in pieces of PIECE tokens.
"""

import json
import os
import sys
from importlib import metadata

SEATS, PIECE, TOP = 4, 64, 5


def main() -> None:
    job = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # vLLM writes to the standard output too
        json.dump(answers(**job), out)


def answers(folder: str, prompts: list[list[int]], new: list[int]) -> dict:
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) + count for prompt, count in zip(prompts, new, strict=True))
    llm = LLM(
        folder, dtype="float32", max_model_len=longest + 1, max_num_seqs=SEATS, max_num_batched_tokens=PIECE, max_logprobs=TOP,
        disable_log_stats=True, seed=0,
    )  # fmt: skip
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    greedy = [SamplingParams(temperature=0, max_tokens=count, logprobs=TOP, ignore_eos=True) for count in new]

    def ask(some: list, how: list) -> list:
        return [_steps(request.outputs[0]) for request in llm.generate(some, how, use_tqdm=False)]

    alone = [ask([request], [how])[0] for request, how in zip(requests, greedy, strict=True)]
    return {"version": version_of("vllm"), "alone": alone, "together": ask(requests, greedy)}


def _steps(output) -> list:
    return [
        [token, {str(other): entry.logprob for other, entry in each.items()}]
        for token, each in zip(output.token_ids, output.logprobs, strict=True)
    ]


def version_of(package: str) -> str:
    """Of `package`, or of the one for CPUs, which is installed by another name."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
