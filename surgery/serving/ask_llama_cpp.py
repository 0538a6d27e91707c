"""What llama.cpp answers for a GGUF file. A script for the engine's own environment, which needs the package xllamacpp, a build
of llama.cpp with its server:

    python -P ask_llama_cpp.py < job.json > answers.json

job: {"folder": a folder with model.gguf, "prompts": [[token id, ...], ...], "new": [how many tokens to choose after each
prompt, ...]}
answers: {"version": str, "alone": [...], "together": [...], "cached": [[prompt, how many of its tokens were kept, [...]], ...],
"failed": ""}, for each prompt [[chosen token, {token: log-probability}], ...]

Alone, each prompt is a request by itself. Together, all are sent at once to a server with SEATS seats, so that requests join as
others leave. Cached: a prompt, and then the same one with its answer and the next prompt behind it, and without the answer, of
a server that keeps what it has read. Prompts are read in pieces of PIECE tokens, without flash attention and with a cache in
float32: as llama.cpp has both by default, log-probabilities differ by up to 0.1.
"""

import http.client
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

SEATS, PIECE, TOP = 4, 64, 5


def main() -> None:
    job = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # llama.cpp writes to the standard output too
    said = json.dumps(answers(**job)).encode()
    with os.fdopen(out, "wb") as file:
        file.write(said)


def answers(folder: str, prompts: list[list[int]], new: list[int]) -> dict:
    file, longest = os.path.join(folder, "model.gguf"), 2 * (max(map(len, prompts)) + max(new)) + 1
    server = start(file, longest)
    alone = [steps(server, prompt, count)[1] for prompt, count in zip(prompts, new, strict=True)]
    said: dict[str, Any] = {"version": metadata.version("xllamacpp"), "alone": alone, "cached": [], "failed": ""}
    for prompt, count, told, after, more in zip(prompts, new, alone, prompts[1:], new[1:], strict=False):
        steps(server, prompt, count, keep=True)
        for text in ([*prompt, *(token for token, _ in told), *after], prompt + after):
            said["cached"].append([text, *steps(server, text, more, keep=True)])
    server = start(file, longest, seats=SEATS)
    with ThreadPoolExecutor(len(prompts)) as threads:
        said["together"] = [each for _, each in threads.map(steps, [server] * len(prompts), prompts, new)]
    return said


def start(file: str, longest: int, seats: int = 1):
    """A server on the CPU for texts of at most `longest` tokens."""
    import xllamacpp as llama

    options = llama.CommonParams()
    options.model.path = file
    options.n_ctx, options.n_parallel, options.n_gpu_layers = seats * longest, seats, 0
    options.n_batch, options.n_ubatch, options.warmup = PIECE, PIECE, False
    if threads := int(os.environ.get("OMP_NUM_THREADS") or 0):
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.cache_type_k = options.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    return llama.Server(options)


def steps(server, prompt: list[int], count: int, keep: bool = False) -> tuple[int, list]:
    """How many tokens of the prompt it had kept, and greedy tokens after it. An end of text ends a request: the next one goes
    on after it."""
    chosen: list = []
    kept = None
    while len(chosen) < count:
        asked: dict[str, Any] = {
            "prompt": prompt + [token for token, _ in chosen], "n_predict": count - len(chosen), "temperature": 0,
            "n_probs": TOP, "return_tokens": True, "cache_prompt": keep,
        }  # fmt: skip
        said = post(server, "/completion", asked)
        if not said["tokens"]:
            raise RuntimeError(f"it chose no token after {len(asked['prompt'])}")
        kept = said["timings"]["cache_n"] if kept is None else kept
        chosen += paired(said["tokens"], said["completion_probabilities"])
    return kept or 0, chosen


def paired(tokens: list[int], entries: list[dict]) -> list:
    """Tokens, each with the probabilities that were told of it. The server tells none of a token that ends amid a character,
    and not which those are: entries that may belong to several tokens are left out."""
    first, last = places(tokens, entries), places(tokens[::-1], entries[::-1])[::-1]
    told = {
        one: {str(each["id"]): each["logprob"] for each in entry["top_logprobs"]}
        for one, other, entry in zip(first, last, entries, strict=True)
        if one == len(tokens) - 1 - other
    }
    return [[token, told.get(place, {})] for place, token in enumerate(tokens)]


def places(tokens: list[int], entries: list[dict]) -> list[int]:
    """The earliest places of the entries among the tokens, in order."""
    result, place = [], 0
    for entry in entries:
        place = tokens.index(entry["id"], place) + 1
        result.append(place - 1)
    return result


def post(server, path: str, asked: dict) -> dict:
    connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"))
    connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = answer.read().decode()
    if answer.status != 200:
        raise RuntimeError(f"it answers {said}")
    return json.loads(said)


if __name__ == "__main__":
    main()
