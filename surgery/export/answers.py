"""What two forms of one model are compared by: logits after prompts of several lengths, and greedy tokens of a padded batch.

It needs torch and transformers alone, and as a script it asks folders as a user does who has not installed this package:

    python -I answers.py OUT.safetensors NAME LINES [NAME LINES ...]

LINES: Python that loads `tokenizer` and `model`. The answers lie in OUT under the names.
"""

import math
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

LENGTHS = (1, 6, 17, 40)


@torch.inference_mode()
def answers(model: PreTrainedModel, vocabulary: int, new: int = 64) -> dict[str, Tensor]:
    """By name: `prompt 17`, the logits at every position of a prompt, one row alone (t, V); `batch`, those of each new token
    after a left-padded batch of all the prompts (b, new, V); `tokens` (b, new), what was chosen. On the CPU, in float32.

    vocabulary: prompts are made of token ids below this.
    """
    training, generator = model.training, torch.Generator().manual_seed(0)
    model.eval()
    try:
        prompts = [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]
        found = {
            f"prompt {len(prompt)}": model(input_ids=prompt[None].to(model.device), use_cache=False).logits[0].float().cpu()
            for prompt in prompts
        }
        ids = torch.stack([torch.nn.functional.pad(prompt, (max(LENGTHS) - len(prompt), 0)) for prompt in prompts])
        real = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - length for length in LENGTHS]).long()
        # No end of text: every row has as many tokens as every other.
        greedy = GenerationConfig(
            min_new_tokens=new, max_new_tokens=new, do_sample=False, num_beams=1, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        made: Any = model.generate(  # type: ignore[operator]
            ids.to(model.device), attention_mask=real.to(model.device), generation_config=greedy
        )
    finally:
        model.train(training)
    found["batch"] = torch.stack(made.logits, dim=1).float().cpu()
    found["tokens"] = made.sequences[:, max(LENGTHS) :].cpu()
    return found


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of logits; infinity if other tokens were chosen, or a logit is not a number."""
    if not torch.equal(first["tokens"], second["tokens"]):
        return float("inf")
    each = [(first[name] - second[name]).abs().max() for name in first if name != "tokens"]
    worst = torch.stack(each).max().item()  # Python's max() would lose what is not a number
    return float("inf") if math.isnan(worst) else worst


def main(out: str, *asked: str) -> None:
    sys.modules["surgery"] = None  # type: ignore[assignment]  # whoever imports it fails, as if it were not there
    found: dict[str, Tensor] = {}
    for name, lines in zip(asked[::2], asked[1::2], strict=True):
        user: dict[str, Any] = {}
        exec(lines, user)
        given = answers(user["model"].float(), len(user["tokenizer"]))
        found |= {f"{name} {what}": value.contiguous() for what, value in given.items()}
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
