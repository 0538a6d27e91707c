"""What the doctor says of a model, as lines for the terminal."""

from collections.abc import Iterator

from surgery.doctor.examination import Examination, Exports, Layers, MixerSummary

KINDS = {"base": "a base for grafts", "hybrid": "a hybrid", "patch": "a patch", "other": "no base for grafts"}


def lines(found: Examination) -> Iterator[str]:
    """The model, what is possible in each run of equal layers, and as what it can be exported as it is."""
    depth = "" if found.depth is None else f", {found.depth} layers"
    yield f"{found.model}: {KINDS[found.kind]}{f' on {found.of}' if found.of else ''} ({found.model_type}{depth})"
    if found.why_not:
        yield f"  neither located in nor grafted: {found.why_not}"
    for layers in found.layers:
        several = len(layers.layers) > 1
        yield f"layer{'s' * several} {layers.name()}: {'; '.join(map(_mixing, layers.mixers)) or 'no mixer'}"
        yield f"  located by {' or '.join(layers.located)}" if layers.located else "  not located: it holds no heads"
        yield from _grafts(layers)
    if found.exports.possible or found.exports.refused:
        yield f"as it is: {_exported(found.exports)}"


def _mixing(mixing: MixerSummary) -> str:
    heads = f"{mixing.heads:,} channels" if mixing.width == 1 else f"{mixing.heads} heads of {mixing.width}"
    return f"{mixing.kind}, {heads} ({mixing.module})"


def _grafts(layers: Layers) -> Iterator[str]:
    channels = bool(layers.mixers) and layers.mixers[0].width == 1
    grafts = {"channels" if channels else "heads": layers.heads, "the whole layer": layers.layer}
    for name, answer in grafts.items():
        if answer.possible and answer.exports is not None:
            yield f"  {name} can become attention: {_exported(answer.exports)}"
    refused = {name: answer.why_not for name, answer in grafts.items() if not answer.possible}
    for reason, names in _by_reason(refused).items():
        yield f"  {' and '.join(names)} cannot become attention: {reason}"
    if layers.donor_layer.possible:
        yield "  can be the donor of layer grafts"


def _exported(exports: Exports) -> str:
    """ "exported as hf, patch; not as gguf (reason)"."""
    parts = [f"as {', '.join(exports.possible)}"] if exports.possible else []
    parts += [f"not as {', '.join(names)} ({reason})" for reason, names in _by_reason(exports.refused).items()]
    return f"exported {'; '.join(parts)}"


def _by_reason(refused: dict[str, str]) -> dict[str, list[str]]:
    """Reason -> all that is refused for it."""
    result: dict[str, list[str]] = {}
    for name, reason in refused.items():
        result.setdefault(reason, []).append(name)
    return result
