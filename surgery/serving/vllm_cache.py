"""What vLLM's workers are asked for when a hybrid's cost is measured (bench_vllm.py)."""

from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec


class CacheSizes:
    """Mixed into vLLM's worker by --worker-extension-cls."""

    get_kv_cache_spec: Any  # the worker's own

    def cache_sizes(self) -> dict[str, int]:
        """Bytes that vLLM reserves, of all layers of this worker: token, for each token of a request (keys and values); state,
        for each request, however long, as pages of the size that vLLM gives them; needed, how many of these are used."""
        sizes = {"token": 0, "state": 0, "needed": 0}
        for spec in self.get_kv_cache_spec().values():
            if isinstance(spec, MambaSpec):
                sizes["state"] += spec.page_size_bytes
                sizes["needed"] += spec.state_content_size_bytes
            else:
                sizes["token"] += spec.page_size_bytes // spec.block_size
        return sizes
