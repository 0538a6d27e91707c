"""What vLLM answers for a folder. A script for the engine's own environment, which needs vLLM and, for hybrids, this package:

    python -P ask_vllm.py < job.json > answers.json

job: {"folder": str, "prompts": [[token id, ...], ...], "new": [how many tokens to choose after each prompt, ...]}, with
"settings", if any, for vLLM's LLM; or a list of such, which are asked one after the other
answers: {"version": str, "alone": [...], "together": [...], "cached": [...]}, for each prompt [[chosen token, {token:
log-probability}], ...], and how many of its tokens vLLM had kept when it was asked together; or a list of such

Alone, each prompt is a request by itself. Together, all are sent at once: no more than SEATS run at a time, so that requests
join as others leave. Prompts are read in pieces of PIECE tokens.
"""

import gc
import json
import os
import sys
from importlib import metadata

SEATS, PIECE, TOP = 4, 64, 5


def main() -> None:
    jobs = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # vLLM writes to the standard output too
        json.dump([_alone(job) for job in jobs] if isinstance(jobs, list) else answers(**jobs), out)


def _alone(job: dict) -> dict:
    """One of several jobs. In one process (VLLM_ENABLE_V1_MULTIPROCESSING=0) an engine has to go before the next one starts."""
    from vllm.distributed import cleanup_dist_env_and_memory

    result = answers(**job)
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


def answers(folder: str, prompts: list[list[int]], new: list[int], settings: dict | None = None) -> dict:
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) + count for prompt, count in zip(prompts, new, strict=True))
    own = {"dtype": "float32", "max_num_seqs": SEATS, "max_num_batched_tokens": PIECE, "max_logprobs": TOP, "seed": 0}
    llm = LLM(folder, **own | {"max_model_len": longest + 1, "disable_log_stats": True} | (settings or {}))
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    greedy = [SamplingParams(temperature=0, max_tokens=count, logprobs=TOP, ignore_eos=True) for count in new]

    def ask(some: list, how: list) -> list:
        return llm.generate(some, how, use_tqdm=False)

    alone = [_steps(ask([request], [how])[0].outputs[0]) for request, how in zip(requests, greedy, strict=True)]
    together = ask(requests, greedy)
    return {
        "version": version_of("vllm"), "alone": alone, "together": [_steps(each.outputs[0]) for each in together],
        "cached": [each.num_cached_tokens or 0 for each in together],
    }  # fmt: skip


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
