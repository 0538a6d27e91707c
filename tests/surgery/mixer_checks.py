"""What tests of single mixers ask of a model."""


def entering(model, ids):
    """What enters the mixer of layer 0."""
    seen = []
    handle = model.mixer_at(0).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
    )
    model(ids)
    handle.remove()
    return seen[0]
