"""The script of the fresh process that reads an export back, and the questions that both sides answer.

It needs torch and transformers alone. It imports them, waits for a request (one JSON on standard input: folder, reader,
base, dtype, device, threads, verify), and prints the answers as a safetensors file. reader "transformers": this package is
hidden, as if it were not installed, and the code in the folder runs; "surgery": this package joins the patch in the folder to
its base.
"""

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

LENGTHS = {"quick": (6, 24), "full": (1, 6, 17, 40)}  # tokens of the prompts
NEW = {"quick": 4, "full": 64}  # greedy tokens


def make_prompts(model: Any, tokens: int, verify: str) -> list[Tensor]:
    """Random ids that the model and a tokenizer of so many tokens both know, the same ones in every process."""
    generator = torch.Generator().manual_seed(0)
    known = min(tokens, len(model.get_input_embeddings().weight))
    return [torch.randint(known, (length,), generator=generator) for length in LENGTHS[verify]]


@torch.inference_mode()
def answer(model: Any, tokens: int, verify: str) -> dict[str, Tensor]:
    """`prompt 17`: logits (t, V) at all places of a prompt of 17 tokens, without a cache. `batch` (b, new, V) and `tokens`
    (b, new): of greedy decoding with a cache, all prompts in one left-padded batch. In float32, on the CPU."""
    model, prompts = model.eval(), make_prompts(model, tokens, verify)
    answers = {
        f"prompt {len(prompt)}": model(input_ids=prompt[None].to(model.device), use_cache=False).logits[0].float().cpu()
        for prompt in prompts
    }
    longest, new = max(map(len, prompts)), NEW[verify]
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    real = torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in prompts]).long()
    greedy = GenerationConfig(
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    own, model.generation_config = model.generation_config, greedy  # which would fill what is not set here
    try:
        made = model.generate(ids.to(model.device), attention_mask=real.to(model.device), generation_config=greedy)
    finally:
        model.generation_config = own
    answers["batch"] = torch.stack(made.logits, dim=1).float().cpu()
    answers["tokens"] = made.sequences[:, longest:].cpu()
    return answers


def checksums(model: PreTrainedModel) -> dict[str, str]:
    """Name -> dtype, shape and CRC of every tensor that a folder holds."""
    sums = {}
    for name, tensor in model.state_dict().items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        sums[name] = f"{tensor.dtype} {list(tensor.shape)} {zlib.crc32(data):08x}"
    return sums


def main() -> None:
    """Answer one request."""
    out = os.dup(1)
    os.dup2(2, 1)  # what anything prints while loading goes to standard error
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(request["threads"])
    if request["reader"] == "surgery":
        sys.path.append(str(Path(__file__).resolve().parents[2]))
        from surgery.exporting.patch import join_patch

        model, tokenizer = join_patch(request["folder"], request["base"])
    else:
        sys.modules["surgery"] = None  # type: ignore[assignment]  # imports of it fail
        model = AutoModelForCausalLM.from_pretrained(request["folder"], trust_remote_code=True, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(request["folder"], trust_remote_code=True)
    sums = checksums(model)
    model = model.to(request["device"], getattr(torch, request["dtype"]))
    answers = {name: value.contiguous() for name, value in answer(model, len(tokenizer), request["verify"]).items()}
    with os.fdopen(out, "wb") as file:
        file.write(save(answers, metadata=sums))


if __name__ == "__main__":
    main()
