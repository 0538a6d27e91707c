"""What llama.cpp answers for a GGUF file. A script for the engine's own environment, which needs the package xllamacpp, a build
of llama.cpp with its server:

    python -P ask_llama_cpp.py < job.json > answers.json

job: {"folder": a folder with model.gguf, "prompts": [[token id, ...], ...], "new": [how many tokens to choose after each
prompt, ...], "texts": [str, ...]}
answers: {"version": str, "setting": str, "alone": [...], "together": [...], "otherwise": {setting: [...]}, "texts": [[token id,
...], ...]}, for each prompt [[chosen token, {token: log-probability}], ...]

Alone, each prompt is a request by itself. Together, all are sent at once to a server with SEATS seats, so that requests join as
others leave. Prompts are read in pieces of PIECE tokens. Both are asked without flash attention and with a cache in float32;
otherwise: alone, with flash attention and the cache that llama.cpp takes unless told otherwise, in float16.
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


def answers(folder: str, prompts: list[list[int]], new: list[int], texts: list[str]) -> dict:
    file = os.path.join(folder, "model.gguf")
    longest = max(len(prompt) + count for prompt, count in zip(prompts, new, strict=True)) + 1

    def alone(server) -> list:
        return [steps(server, prompt, count) for prompt, count in zip(prompts, new, strict=True)]

    exact = start(file, longest)
    said: dict[str, Any] = {
        "version": metadata.version("xllamacpp"), "setting": "without flash attention",
        "alone": alone(exact), "texts": [split(exact, text) for text in texts],
    }  # fmt: skip
    server = start(file, longest, seats=SEATS)
    with ThreadPoolExecutor(len(prompts)) as threads:
        said["together"] = list(threads.map(steps, [server] * len(prompts), prompts, new))
    said["otherwise"] = {"with flash attention and a cache in float16": alone(start(file, longest, flash=True))}
    return said


def start(file: str, longest: int, *, seats: int = 1, flash: bool = False):
    """A server on the CPU for texts of at most `longest` tokens."""
    import xllamacpp as llama

    options = llama.CommonParams()
    options.model.path = file
    options.n_ctx, options.n_parallel, options.n_gpu_layers = seats * longest, seats, 0
    options.n_batch, options.n_ubatch, options.warmup = PIECE, PIECE, False
    if threads := int(os.environ.get("OMP_NUM_THREADS") or 0):
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    kind = llama.llama_flash_attn_type
    options.flash_attn_type = kind.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kind.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if not flash:
        options.cache_type_k = options.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    return llama.Server(options)


def steps(server, prompt: list[int], count: int) -> list:
    """Greedy tokens after a prompt. An end of text ends a request: the next one goes on after it."""
    chosen: list = []
    while len(chosen) < count:
        asked: dict[str, Any] = {
            "prompt": prompt + [token for token, _ in chosen], "n_predict": count - len(chosen), "temperature": 0,
            "n_probs": TOP, "return_tokens": True, "cache_prompt": False,
        }  # fmt: skip
        said = post(server, "/completion", asked)
        if not said["tokens"]:
            raise RuntimeError(f"it chose no token after {len(asked['prompt'])}")
        chosen += paired(said["tokens"], said["completion_probabilities"])
    return chosen


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


def split(server, text: str) -> list[int]:
    return post(server, "/tokenize", {"content": text, "add_special": True})["tokens"]


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
