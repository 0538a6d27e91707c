"""What two forms of one model are compared by: their tensors, their logits after prompts of several lengths, and the greedy
tokens of a padded batch.

This file needs torch and transformers alone. As a script it answers for folders, in a process of its own and on the CPU:

    python -P answers.py PLACE NEW FOLDER HOW [FOLDER HOW ...] > answers.safetensors

HOW: by which of READ the folder is read; with ":disk" its weights are on the disk, each to be fetched when its module is called
(device_map). PLACE: the folder that holds this package, or "-" to hide it, as if it were not installed. NEW: how many greedy
tokens; with 0 the model computes nothing. The file holds the answers of the first folder as "0 ...", of the second as "1 ...",
and the tensors' digests in its metadata.
"""

import contextvars
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

LENGTHS = (1, 6, 17, 40)
NEW = 64  # greedy tokens


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors in a model's folder, by name: parameters, tied ones once, the buffers that are saved, and what quantised
    modules save beside their weights."""
    settle(model)
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers | scales(model)


def scales(model: nn.Module) -> dict[str, Tensor]:
    """What quantised modules save beside their weights: by these names they have no tensor of their own."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in own}


def held(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The same with their values: those that accelerate keeps on the CPU or the disk one after the other."""
    saved = tensors(model)
    return named_values(model, list(saved)) if any(map(is_away, saved.values())) else iter(saved.items())


def held_names(model: Any) -> list[str]:
    """The names of the same."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return [name for name, tensor in tensors(model).items() if not (is_away(tensor) and name in tied)]


def is_away(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_meta", False))


def named_values(model: nn.Module, names: list[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, one after the other, those that are fetched only until the next one is asked for. names: as
    state_dict has them; by default those of all parameters. Of weights that are tied and were put away, which share no tensor
    any more, the first alone."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for name in [name for name, _ in model.named_parameters()] if names is None else names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, leaf)
        if not tensor.is_meta:
            yield name, tensor
        elif name not in tied:
            with own_fetched(module):
                yield name, getattr(module, leaf)


@contextmanager
def own_fetched(module: nn.Module) -> Iterator[None]:
    """While this lasts, a module's own tensors have values."""
    with ExitStack() as after:
        for hook in fetching_hooks(getattr(module, "_hf_hook", None)):
            hook.pre_forward(module)
            after.callback(hook.post_forward, module, None)
        yield


def fetching_hooks(hook: Any) -> list[Any]:
    """Of a module's hook, the parts that fetch its weights: AlignDevicesHook of accelerate, which is not imported for models
    that are in memory."""
    return [part for part in getattr(hook, "hooks", (hook,)) if hasattr(part, "weights_map") and part.offload]


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, in float32; of a quantised one, whatever is not quantised. What is fetched becomes float32 then."""
    if not getattr(model, "is_quantized", False):
        return model.float()
    settle(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def settle(model: PreTrainedModel) -> None:
    """Undo what bitsandbytes' modules do to themselves in a forward, and keep them from more: biases change their dtype, and on
    CPUs with bfloat16 instructions, the scales of 4-bit weights are rounded for good."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            if module.bias is not None:
                module.bias.data = module.bias.data.to(model.dtype)
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def tensor_digest(tensor: Tensor) -> str:
    """ "float32 1536x768 ", and the sha256 of that and of the bytes."""
    what = f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))} "
    total = hashlib.sha256(what.encode())
    total.update(bytes_of(tensor))
    return what + total.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class LockstepRunner:
    """Calls that run a model forwards, each in a thread of its own, of which one runs at a time. They go through the modules
    together: what a module fetches is fetched once for all calls that have come to it. Each call computes what it would alone.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.change = threading.Condition()
        self.me = threading.local()
        self.waiting: dict[int, int] = {}  # call -> the place of the module that it has come to; -1 before the first
        self.place = -1  # of the last module that calls were let into,
        self.next: list[int] = []  # and those of them that have not gone on yet: they do one after the other
        self.turn: int | None = None
        self.failure: BaseException | None = None

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the calls return. Raises what one of them raises."""
        results: list[Any] = [None] * len(calls)
        self.waiting = dict.fromkeys(range(len(calls)), -1)
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(self._do, i, call, results), daemon=True)
            for i, call in enumerate(calls)
        ]
        with ExitStack() as after:
            for place, module in enumerate(self.model.modules()):
                for hook in fetching_hooks(getattr(module, "_hf_hook", None)):
                    after.callback(self._share(hook, module, place))
            try:
                for thread in threads:
                    thread.start()
                self._pass_on()
                for thread in threads:
                    thread.join()
            except BaseException as error:  # a user stops it
                self._fail(error)
                for thread in threads:
                    thread.join()
        if self.failure is not None:
            raise self.failure
        return results

    def _do(self, number: int, call: Callable[[], Any], results: list[Any]) -> None:
        self.me.number = number
        try:
            self._wait()
            with torch.inference_mode():
                results[number] = call()
        except BaseException as error:
            self._fail(error)
        else:
            self._pass_on()

    def _share(self, hook: Any, module: nn.Module, place: int) -> Callable[[], None]:
        """From now on the hook fetches for the first call that comes, and releases after the last that leaves. Returns what
        ends that."""
        fetch, release, users, fetched = hook.pre_forward, hook.post_forward, 0, False

        def come(module: nn.Module, *args: Any, **named: Any) -> Any:
            nonlocal users, fetched
            self.waiting[self.me.number] = place
            self._pass_on()
            self._wait()
            hook.offload = not fetched  # what it does but for fetching, it does for each
            users, fetched = users + 1, True
            return fetch(module, *args, **named)

        def leave(module: nn.Module, output: Any) -> Any:
            nonlocal users, fetched
            users -= 1
            fetched = users > 0 or (self.place == place and bool(self.next))  # these are still to come
            hook.offload = not fetched
            try:
                return release(module, output)
            finally:
                hook.offload = True

        def end() -> None:
            del hook.pre_forward, hook.post_forward  # those of its class appear again
            hook.offload = True
            if fetched:  # a call failed within
                release(module, None)

        hook.pre_forward, hook.post_forward = come, leave
        return end

    def _pass_on(self) -> None:
        """To the next call at the same module; else to all that wait at the first one."""
        with self.change:
            if not self.next and self.waiting:
                self.place = min(self.waiting.values())
                self.next = [number for number, place in self.waiting.items() if place == self.place]
            self.turn = self.next.pop(0) if self.next else None
            self.waiting.pop(self.turn, None)  # type: ignore[arg-type]
            self.change.notify_all()

    def _wait(self) -> None:
        with self.change:
            self.change.wait_for(lambda: self.turn == self.me.number or self.failure is not None)
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: BaseException) -> None:
        with self.change:
            self.failure = self.failure or error
            self.change.notify_all()


@torch.inference_mode()
def answers(model: PreTrainedModel, vocabulary: int, new: int = NEW) -> dict[str, Tensor]:
    """By name: `prompt 17`, the logits at all positions of the prompt of 17 tokens (t, V); `batch`, the logits of each new
    token after all prompts in one left-padded batch (b, new, V); `tokens`, which tokens were chosen there (b, new). On the
    CPU, in float32.

    Weights that are away are fetched once for all prompts, alone and in the batch, and once for each new token after the first.
    vocabulary: prompts are made of token ids below this.
    """
    training, generator = model.training, torch.Generator().manual_seed(0)
    away = any(fetching_hooks(getattr(module, "_hf_hook", None)) for module in model.modules())
    device = torch.device("cpu") if is_away(next(model.parameters())) else model.device
    prompts = [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]
    calls: list[Callable[[], Any]] = [
        *(partial(_alone, model, prompt.to(device)) for prompt in prompts),
        partial(_batch, model, prompts, new, device),
    ]
    model.eval()
    try:
        *alone, batch = LockstepRunner(model).run(calls) if away else [call() for call in calls]
    finally:
        model.train(training)
    return {f"prompt {len(prompt)}": logits for prompt, logits in zip(prompts, alone, strict=True)} | batch


def _alone(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    return model(input_ids=prompt[None], use_cache=False).logits[0].float().cpu()


def _batch(model: PreTrainedModel, prompts: list[Tensor], new: int, device: torch.device) -> dict[str, Tensor]:
    ids = torch.stack([nn.functional.pad(prompt, (max(LENGTHS) - len(prompt), 0)) for prompt in prompts])
    real = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - length for length in LENGTHS]).long()
    # Without an end of text, so that all rows have equally many tokens.
    greedy = GenerationConfig(
        min_new_tokens=new, max_new_tokens=new, do_sample=False, num_beams=1, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    generated: Any = model.generate(  # type: ignore[operator]
        ids.to(device), attention_mask=real.to(device), generation_config=greedy
    )
    return {
        "batch": torch.stack(generated.logits, dim=1).float().cpu(),
        "tokens": generated.sequences[:, max(LENGTHS) :].cpu(),
    }


def _by_transformers(folder: str, on_disk: bool, own_code: bool) -> tuple[Any, Any]:
    """own_code: by the modeling code in the folder, which was written together with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    placed: dict[str, Any] = {"device_map": {"": "disk"}} if on_disk else {}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=own_code, **placed)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=own_code)


def _by_this_package(folder: str, on_disk: bool) -> tuple[Any, Any]:
    import surgery

    loaded = surgery.load(folder, device="disk") if on_disk else surgery.load(folder)
    return loaded.model, loaded.tokenizer


# How a folder becomes a model and a tokenizer.
READ: dict[str, Callable[[str, bool], tuple[Any, Any]]] = {
    "transformers": partial(_by_transformers, own_code=False),
    "code in the folder": partial(_by_transformers, own_code=True),
    "this package": _by_this_package,
}


def load_and_answer(folder: Any, how: str, new: int = NEW) -> tuple[dict[str, Tensor], dict[str, str]]:
    """For the model in a folder: its answers, in float32, and the digests of its tensors as they were loaded. how: as above.
    new: the number of greedy tokens; with 0 nothing is computed, and there are no answers."""
    by, _, disk = how.partition(":")
    model, tokenizer = READ[by](str(folder), disk == "disk")
    digests = {name: tensor_digest(tensor) for name, tensor in held(model)}
    return answers(in_float32(model), len(tokenizer), new) if new else {}, digests


def main(place: str, new: str, *folders: str) -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what anything prints while loading goes to standard error
    if place == "-":
        sys.modules["surgery"] = None  # type: ignore[assignment]  # imports fail, as if it were not installed
    else:
        sys.path.append(place)
    for kernels in ("mamba_ssm", "causal_conv1d"):  # transformers' own Mambas would take them on the CPU too, where they fail
        sys.modules[kernels] = None  # type: ignore[assignment]
    all_answers: dict[str, Tensor] = {}
    all_digests: dict[str, str] = {}
    for number, (folder, how) in enumerate(zip(folders[::2], folders[1::2], strict=True)):
        tensors_of_one, digests = load_and_answer(folder, how, int(new))
        all_answers |= {f"{number} {key}": value.contiguous() for key, value in tensors_of_one.items()}
        all_digests |= {f"{number} {key}": value for key, value in digests.items()}
    with os.fdopen(out, "wb") as file:
        file.write(save(all_answers, metadata=all_digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
