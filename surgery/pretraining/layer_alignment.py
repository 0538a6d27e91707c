"""Hidden-state alignment: an SSM's layers learn, one by one, what a Transformer's layers do (MOHAWK, arXiv 2408.10189, stage 2;
Llamba, arXiv 2502.14458).

The student has its teacher's embedding, norms, MLPs and head, and mixers of its own. A mixer sees the hidden states that the
*teacher's* layer sees and is to give what the teacher's attention gives. No layer ever sees another one's errors: the student
is not aligned end to end, which is the state in which the paper replaces its layers by the teacher's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.runtime.progress import Track
from surgery.tuning.optimizer import cosine_schedule


def align_layers(
    student: Any, teacher: PreTrainedModel, batches: Iterator[Tensor], *, steps: int, learning_rate: float
) -> list[dict[str, float]]:
    """Copy what the two share, train the student's mixers, and return the log: per 50 steps each layer's relative error.

    student: of a family whose blocks are a Transformer's with another mixer (Llamba); teacher: with the common decoder layout
    and the same sizes. batches: token ids (b, t), padded with 0 on the right.
    """
    copy_shared(student, teacher)
    mixers = [block.mixer for block in student.base_model.layers]
    trained = [p for mixer in mixers for p in mixer.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = cosine_schedule(optimizer, steps // 20, steps)
    log: list[dict[str, float]] = []
    progress = Track(range(steps), "align layers")
    for step in progress:
        ids = next(batches)
        real = (ids != 0).flip(1).cumsum(1).flip(1) > 0  # up to the last token that is no padding
        errors = [
            _relative(mixer(inputs)[real], wanted[real])
            for mixer, (inputs, wanted) in zip(mixers, attention_states(teacher, ids), strict=True)
        ]
        torch.stack(errors).sum().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.note = "relative errors " + ", ".join(f"{error.item():.3f}" for error in errors)
        if (step + 1) % 50 == 0:
            log.append({"step": step + 1, **{f"L{i}": round(error.item(), 4) for i, error in enumerate(errors)}})
    return log


@torch.no_grad()
def attention_states(teacher: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What enters and what leaves every attention of a Transformer: (b, t, d) each, before the residual is added."""
    states: list[tuple[Tensor, Tensor]] = []

    def note(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        states.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0]))

    hooks = [block.self_attn.register_forward_hook(note, with_kwargs=True) for block in teacher.base_model.layers]
    try:
        teacher.base_model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states


@torch.no_grad()
def copy_shared(student: Any, teacher: Any) -> None:
    """Embedding, norms, MLPs and head. Raises UserError if the two do not fit."""
    ours, theirs = student.base_model, teacher.base_model
    pairs = [(student.get_input_embeddings(), teacher.get_input_embeddings()), (student.lm_head, teacher.lm_head)]
    pairs.append((ours.final_layernorm, theirs.norm))
    if len(ours.layers) != len(theirs.layers):
        raise UserError(f"the teacher has {len(theirs.layers)} layers, the student {len(ours.layers)}")
    for block, other in zip(ours.layers, theirs.layers, strict=True):
        pairs += [
            (getattr(block, name), getattr(other, name)) for name in ("input_layernorm", "post_attention_layernorm", "mlp")
        ]
    for target, source in pairs:
        values = source.state_dict()
        for name, p in target.named_parameters():
            if name not in values or values[name].shape != p.shape:
                raise UserError(f"the teacher's {type(source).__name__} does not fit the student's: '{name}'")
            p.copy_(values[name])


def _relative(given: Tensor, wanted: Tensor) -> Tensor:
    """The squared error, relative to the square of what is wanted."""
    return (given - wanted).square().sum() / wanted.square().sum()
