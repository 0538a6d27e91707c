"""Gradient checkpointing changes neither the loss nor a gradient."""

from functools import cache

import torch

from surgery.checking.law import LEAST, Law, NotApplicable, Subject, prepared


def cases(s: Subject):
    if not s.model.supports_gradient_checkpointing:
        raise NotApplicable("it does not support gradient checkpointing")
    model = prepared(s.model).float().train()  # in float32, in which backward computes again what forward has computed
    model.activation_checkpointing_disable()

    def learn():
        model.zero_grad()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of dropout
            loss = model(input_ids=s.ids[:2, :24], labels=s.ids[:2, :24], use_cache=False).loss
            loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    @cache
    def both():
        plain = learn()
        model.activation_checkpointing_enable()
        return plain, learn()

    def loss():
        (plain, _), (again, _) = both()
        return again, plain, LEAST * max(1.0, float(plain))

    def gradients():
        (_, plain), (_, again) = both()
        if lost := sorted(plain.keys() - again.keys()):
            raise ArithmeticError(f"'{lost[0]}' gets no gradient")
        largest = max(float(gradient.abs().max()) for gradient in plain.values())
        found, right = (torch.cat([each[name].flatten() for name in plain]) for each in (again, plain))
        return found, right, LEAST * max(1.0, largest)

    return {"the loss": loss, "gradients": gradients}


LAW = Law(
    "gradient checkpointing",
    "training with less memory learns something else",
    "leave gradient_checkpointing off",
    cases,
)
