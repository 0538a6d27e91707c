"""Hidden-state alignment: the layers of an SSM learn, each by itself, to do what a Transformer's layers do (stage 2 of MOHAWK,
arXiv 2408.10189, as in Llamba, arXiv 2502.14458).

The student has its teacher's embedding, norms, MLPs and head, and mixers of its own. A mixer gets the hidden states that enter
the *teacher's* layer and learns to give what the teacher's attention gives. No layer sees the errors of another one, so the
student is not aligned end to end. In this state the paper replaces its layers by the teacher's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.patching import hooked
from surgery.runtime.progress import Track
from surgery.tuning.optimizer import cosine_schedule


def align_layers(
    student: Any, teacher: PreTrainedModel, batches: Iterator[Tensor], *, steps: int, learning_rate: float,
    layers: Sequence[int] | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """Copy what the two share, train the student's mixers, and return the log: every 50 steps, the relative error of each
    layer.

    student: a family whose blocks are a Transformer's with another mixer (Llamba), whose heads may be grafted. teacher: a
    Transformer of the common decoder layout and of the same sizes. batches: token ids (b, t), padded with 0 on the right.
    layers: train the mixers of these alone, all unless given. Raises UserError if the two do not fit.
    """
    copy_shared(student, teacher)
    layers = range(len(student.base_model.layers)) if layers is None else layers
    mixers = {layer: student.base_model.layers[layer].mixer for layer in layers}
    trained = [p.requires_grad_() for mixer in mixers.values() for p in mixer.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = cosine_schedule(optimizer, steps // 20, steps)
    log: list[dict[str, float]] = []
    progress = Track(range(steps), "align layers")
    for step in progress:
        ids = next(batches)
        real = (ids != 0).flip(1).cumsum(1).flip(1) > 0  # up to the last token that is no padding
        states = attention_states(teacher, ids)
        errors = [_relative_error(mixer(states[i][0])[real], states[i][1][real]) for i, mixer in mixers.items()]
        torch.stack(errors).sum().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.note = "relative errors " + ", ".join(f"{error.item():.3f}" for error in errors)
        if (step + 1) % 50 == 0:
            log.append({"step": step + 1, **{f"L{i}": round(error.item(), 4) for i, error in zip(layers, errors, strict=True)}})
    return log


@torch.no_grad()
def attention_states(teacher: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The inputs and the outputs of every attention of a Transformer, (b, t, d) each, before the residual is added."""
    states: list[tuple[Tensor, Tensor]] = []

    def note(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        states.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0]))

    blocks = teacher.base_model.layers
    with hooked(lambda: [block.self_attn.register_forward_hook(note, with_kwargs=True) for block in blocks]):
        teacher.base_model(input_ids=ids, use_cache=False)
    return states


@torch.no_grad()
def copy_shared(student: Any, teacher: Any) -> None:
    """Copy embedding, norms, MLPs and head. Raises UserError if the two models do not fit."""
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


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """The squared error, divided by the square of the target."""
    return (output - target).square().sum() / target.square().sum()
