"""What vLLM answers for a folder. A script for the engine's own environment, which needs vLLM and, for hybrids, this package:

    python -P ask_vllm.py < job.json > answers.json

job: {"folder": str, "prompts": [[token id, ...], ...], "new": [how many tokens to choose after each prompt, ...]}
answers: {"version": str, "alone": [...], "together": [...], "cached": [[prompt, how many of its tokens were kept, [...]], ...],
"failed": str}, for each prompt [[chosen token, {token: log-probability}], ...]

Alone, each prompt is a request by itself. Together, all are sent at once: no more than SEATS run at a time, so that requests
join as others leave. Prompts are read in pieces of PIECE tokens. Cached: with prefix caching, a prompt, and then the same one
with its answer and the next prompt behind it, and without the answer. failed: why vLLM did not answer so, if it did not.
"""

import gc
import json
import os
import sys
from importlib import metadata

SEATS, PIECE, TOP = 4, 64, 5
MEMORY = 2 << 30  # bytes for caches: vLLM would take nearly all that the machine has


def main() -> None:
    job = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # vLLM writes to the standard output too
        json.dump(answers(**job), out)


def answers(folder: str, prompts: list[list[int]], new: list[int]) -> dict:
    longest = 2 * (max(map(len, prompts)) + max(new)) + 1
    ask = _start(folder, longest, caching=False)
    said: dict = {
        "version": version_of("vllm"),
        "alone": [ask([prompt], [count])[0][1] for prompt, count in zip(prompts, new, strict=True)],
    }
    said |= {"together": [steps for _, steps in ask(prompts, new)], "cached": [], "failed": ""}
    del ask
    try:
        ask = _start(folder, longest, caching=True)
        for prompt, count, steps, after, more in zip(prompts, new, said["alone"], prompts[1:], new[1:], strict=False):
            ask([prompt], [count])
            for text in ([*prompt, *(token for token, _ in steps), *after], prompt + after):
                said["cached"].append([text, *ask([text], [more])[0]])
    except Exception as error:
        said["failed"] = f"{type(error).__name__}: {error}"
    return said


def _start(folder: str, longest: int, *, caching: bool):
    """What asks a new engine: prompts, and numbers of tokens -> how many of a prompt's tokens it had kept, and the steps."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()  # the one before was in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), and has to go
    own = {"dtype": "float32", "max_num_seqs": SEATS, "max_num_batched_tokens": PIECE, "max_logprobs": TOP, "seed": 0}
    own |= {"max_model_len": longest, "enable_prefix_caching": caching, "kv_cache_memory_bytes": MEMORY}
    llm = LLM(folder, disable_log_stats=True, **own)

    def ask(some: list[list[int]], counts: list[int]) -> list:
        how = [SamplingParams(temperature=0, max_tokens=count, logprobs=TOP, ignore_eos=True) for count in counts]
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in some], how, use_tqdm=False)
        answered = []
        for each in done:
            chosen = zip(each.outputs[0].token_ids, each.outputs[0].logprobs, strict=True)
            steps = [[token, {str(other): entry.logprob for other, entry in found.items()}] for token, found in chosen]
            answered.append((each.num_cached_tokens or 0, steps))
        return answered

    return ask


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
