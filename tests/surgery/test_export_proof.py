"""The proof of an export: a fresh process reads it back, by the classes that its users have, and answers as the live model.

A format and family that are not in WRITTEN do not go together: test_export_formats.py has the reason for which it is refused.
"""

import contextlib
import json
import os
import re
import subprocess
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM, SmolLM3Config

from surgery.errors import UserError
from surgery.exporting import folder, fresh_process, verify
from surgery.exporting.export import export
from surgery.exporting.formats import format_of, hf, patch
from surgery.exporting.verify import OURS, compare, difference, in_float32
from surgery.loading.checkpoint import load_base
from surgery.models.answers import LENGTHS, NEW, answers, tensor_digest, tensors
from surgery.records.plan import Plan
from surgery.runtime.ownership.replacing import building
from surgery.splicing.splice import graft_parameters, splice
from tests.models import VOCABULARY, names, random_base, random_llamba, random_selective
from tests.surgery.stock_bases import CONFIGURATIONS, plan_for
from tests.surgery.stock_bases import base_of as stock_base
from tests.surgery.test_layer_graft import random_donor

HEADS, LAYER = Plan(sites=("L0.H3", "L1.H0,5")), Plan(kind="layer", sites=("L1",), width=16)
DONOR = Plan(kind="layer", sites=("L1",), donor="a donor")
FAMILIES = {
    "mamba2": partial(random_base, num_hidden_layers=2),
    "mamba": partial(random_selective, MambaConfig, MambaForCausalLM, num_hidden_layers=2),
    "falcon-mamba": partial(random_selective, FalconMambaConfig, FalconMambaForCausalLM, num_hidden_layers=2),
    "llamba": partial(random_llamba, n_layer=2),
}
ANY = [f"{family} {kind}" for family in FAMILIES for kind in ("heads", "layer")]
WRITTEN = {  # rope: attention with grouped queries, positions and biases, of a Transformer; grouped: without the latter two
    "hf": [*ANY, "mamba2 rope", "falcon_h1 heads", "olmo_hybrid heads"],
    "patch": ["mamba2 heads", "mamba rope", "falcon-mamba heads", "llamba layer"],
    "nemotron_h": ["mamba2 layer", "mamba2 grouped"],
    "mamba_ssm": ["mamba2 rope", "mamba layer"],
}
CASES = [(form, what) for form, every in WRITTEN.items() for what in every]
FEW = 5  # greedy tokens of the quick cases
# Every form, heads, layers and attention of a Transformer; all others are asked by the slow tests.
QUICK = (("hf", "llamba heads"), ("hf", "falcon_h1 heads"), ("hf", "olmo_hybrid heads"),
         ("patch", "mamba rope"), ("nemotron_h", "mamba2 grouped"), ("mamba_ssm", "mamba layer"))  # fmt: skip


def base_of(what):
    """With the tokenizer's vocabulary; the same weights every time."""
    if (name := what.split()[0]) in CONFIGURATIONS:
        return stock_base(name, vocab_size=VOCABULARY)
    return FAMILIES[what.split()[0]](vocab_size=VOCABULARY)


def hybrid_of(what):
    base, kind = base_of(what), what.split()[1]
    if what.split()[0] in CONFIGURATIONS:
        hybrid = splice(base, plan_for(base))
    elif kind in ("heads", "layer"):
        hybrid = splice(base, HEADS if kind == "heads" else LAYER)
    else:
        fields = {"no_rope_layers": [1, int(kind == "rope"), 1], "attention_bias": kind == "rope"}
        hybrid = splice(base, DONOR, random_donor(SmolLM3Config, hidden=base.config.hidden_size, **fields))
    with torch.no_grad():
        for p in graft_parameters(hybrid).values():
            p.add_(0.01)  # as if tuned
    return hybrid


@pytest.fixture(scope="module")
def there(tmp_path_factory, tokenizer, tiny, read_back_here):
    """A quick case or not -> what two fresh processes, one with this package and one without it, answer for all such cases; and
    for an export of the demo's base by the lines of its card. Quick ones are asked for a few tokens."""
    return cache(lambda quick: answered(tmp_path_factory, tokenizer, tiny, read_back_here, quick))


def answered(tmp_path_factory, tokenizer, tiny, read_back_here, quick):
    """By the name of the case. Bases, and the folder in the card, are named from where the command was given."""
    place, asked = tmp_path_factory.mktemp("proof"), {OURS: {}, "transformers": {}}
    with contextlib.chdir(place):
        for form, what in (case for case in CASES if (case in QUICK) == quick):
            hybrid = hybrid_of(what)
            written, base = place / f"{form} {what}", f"base of {what}"
            written.mkdir()
            if form == "patch":
                base_of(what).save_pretrained(base)
                tokenizer.save_pretrained(base)
            format_of(form).write(hybrid, written, tokenizer=tokenizer, plan=hybrid.surgery.plan, base=base)
            reader = format_of(form).READER
            asked[reader.package][written] = reader.how
        plain, demo = asked["transformers"], Plan(sites=("L0.H3,5",))
        export(splice(tiny.model, demo), "demo", tokenizer=tiny.tokenizer, plan=demo, base=tiny.name)
        plain[place / "demo"] = format_of("hf").READER.how
        if quick:  # each weight is read when it is used
            (place / "on disk").symlink_to("hf llamba heads")
            (place / "changed").mkdir()
            hf.write(hybrid_of("mamba heads"), place / "changed", tokenizer=tokenizer, plan=HEADS, base="b")
            change_code(place / "changed")
            plain |= {place / name: f"{hf.READER.how}:disk" for name in ("on disk", "changed")}
        return {
            folder.name: answer
            for package, folders in asked.items()
            for folder, answer in zip(folders, read_back_here(package, folders, FEW if quick else NEW), strict=True)
        }


@pytest.mark.parametrize(
    ("form", "what"),
    [
        pytest.param(*case, id="-".join(" ".join(case).split()), marks=() if case in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_fresh_process_answers_as_the_live_model(there, tokenizer, form, what):
    proof = compare(format_of(form).READER, hybrid_of(what), len(tokenizer), there((form, what) in QUICK)[f"{form} {what}"])
    assert proof.difference <= proof.tolerance
    assert (proof.prompts, proof.tokens) == (LENGTHS, FEW if (form, what) in QUICK else 64)
    print(proof.line())


def test_a_proof_asks_for_64_tokens(tokenizer, tmp_path, monkeypatch):
    asked, own = [], verify.ask
    monkeypatch.setattr(verify, "ask", lambda package, folders, new: asked.append(new) or own(package, folders, new))
    export(hybrid_of("mamba2 heads"), tmp_path / "out", tokenizer=tokenizer, plan=HEADS, base="b", verify="full")
    assert asked == [NEW] == [64]


def test_the_three_lines_of_the_card_generate_in_plain_transformers(there, tiny):
    """Of an export of the demo's base with the demo's grafts."""
    assert (
        compare(hf.READER, splice(tiny.model, Plan(sites=("L0.H3,5",))), len(tiny.tokenizer), there(True)["demo"]).tokens == FEW
    )


def change_code(place):
    """The modelling code of the folder computes something else."""
    file = place / "parts.py"
    text = file.read_text()
    assert "return F.softplus(at_least_float32(x))" in text
    file.write_text(text.replace("return F.softplus(at_least_float32(x))", "return 2 * F.softplus(at_least_float32(x))"))


def test_changed_code_is_found(there, tokenizer):
    """Without this package it is the folder's code that runs."""
    assert compare(hf.READER, hybrid_of("llamba heads"), len(tokenizer), there(True)["on disk"]).holds()
    with pytest.raises(UserError, match="transformers reads back is not the live model"):
        compare(hf.READER, hybrid_of("mamba heads"), len(tokenizer), there(True)["changed"])


def test_the_command_proves_and_says_so(surgery, tokenizer, tmp_path):
    for name, model in {"base": base_of("mamba2"), "hybrid": hybrid_of("mamba2 heads")}.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    HEADS.write(tmp_path / "hybrid" / "plan.json")
    status, out, err = surgery("export", "hybrid", "--format", "patch", "--base", "base", "--out", "patch")
    assert status == 0, err
    proof = folder.Exported.read("patch/export.json").proof
    assert (proof.reader, proof.version, proof.why) == (OURS, folder.environment().toolkit, None)
    assert (err.splitlines()[-1], out) == (proof.line(), "patch: patch\n")
    assert re.fullmatch(
        r"read back in a fresh process by mamba-surgery [\d.]+: logits differ by at most [\d.e-]+ after prompts of 1, 6, 17 "
        r"and 40 tokens, alone and in a padded batch; all \d+ greedy tokens of each are the same", proof.line(),
    )  # fmt: skip
    assert proof.line() in (tmp_path / "patch" / "README.md").read_text()


def test_the_line_says_who_did_not_read_it_and_why(tokenizer, tmp_path):
    proof = export(hybrid_of("mamba layer"), tmp_path / "x", format="mamba_ssm", tokenizer=tokenizer, plan=LAYER, base="b")
    assert folder.check(tmp_path / "x").proof == proof
    assert "by mamba-surgery" in proof.line()
    assert "(the kernels of mamba_ssm's own classes run on GPUs only)" in proof.line()
    plain = export(hybrid_of("mamba layer"), tmp_path / "y", tokenizer=tokenizer, plan=LAYER, base="b")
    assert "by transformers 5." in plain.line()
    assert "without mamba-surgery: " in plain.line()


def _other(key, change):
    """verify.ask with something else in its answers."""

    def ask(real, package, folders, new):
        ((found, digests),) = real(package, folders, new)
        return [(found | {key: change(found[key])}, digests) if key in found else (found, digests | {key: "x"})]

    return ask


@pytest.mark.parametrize(
    ("form", "key", "change", "complaint"),
    [
        ("nemotron_h", "batch", lambda logits: logits + 0.01, r"its logits differ by 0\.01; nothing was written"),
        ("nemotron_h", "prompt 17", lambda logits: logits * float("nan"), "is not the live model"),
        ("hf", "tokens", lambda tokens: tokens + 1, "is not the live model: it chooses other tokens; nothing was written"),
        ("hf", "lm_head.weight", None, r"the tensor 'lm_head\.weight' differs; nothing was written"),
    ],
)
def test_other_answers_leave_what_was_there(surgery, tokenizer, tmp_path, monkeypatch, form, key, change, complaint):
    hybrid_of("mamba2 layer").save_pretrained(tmp_path / "hybrid")
    tokenizer.save_pretrained(tmp_path / "hybrid")
    LAYER.write(tmp_path / "hybrid" / "plan.json")
    command = ("export", "hybrid", "--format", form, "--out", "out", "--overwrite")
    for before in (None, "an earlier export"):
        if before:
            with building(tmp_path / "out") as new:
                with new.filling() as place:
                    (place / "config.json").write_text("{}")
                new.replace()
        with monkeypatch.context() as patched:
            patched.setattr(verify, "ask", partial(_other(key, change), verify.ask))
            status, out, err = surgery(*command)
        assert (status, out, err.count("surgery: ")) == (2, "", 1)
        assert re.match(f"surgery: .*{complaint}", err.splitlines()[-1])  # behind the progress of writing what is exported
        assert sorted(os.listdir(tmp_path)) == (["hybrid", "out"] if before else ["hybrid"])
    assert names(tmp_path / "out") == ["config.json"]


@pytest.mark.parametrize(
    ("status", "said", "complaint"),
    [
        (
            1,
            b"Traceback\n  ...\nImportError: no mamba2\n",
            "transformers cannot read .* in a fresh process: ImportError: no mam",
        ),
        (-11, b"a warning\n", "signal 11 ended it$"),
        (
            -9,
            b"",
            "signal 9 ended it, as it does where memory runs out: --verify layers takes less, --verify tensors the least; ",
        ),
        (1, b"Traceback\nMemoryError\n", "MemoryError, as it does where memory runs out: --verify layers takes less"),
    ],
)
@pytest.mark.usefixtures("fresh_process")
def test_what_cannot_be_read_is_said_in_one_line(tokenizer, tmp_path, monkeypatch, status, said, complaint):
    died = subprocess.CompletedProcess([], status, stdout=b"", stderr=said)
    monkeypatch.setattr(fresh_process.subprocess, "run", lambda *_, **__: died)
    with pytest.raises(UserError, match=complaint):
        export(hybrid_of("mamba2 heads"), tmp_path / "out", tokenizer=tokenizer, plan=HEADS, base="b")
    assert os.listdir(tmp_path) == []


def test_a_difference_is_found():
    """Of a tensor, by its last bit; of the logits; of the tokens."""
    hybrid, other = hybrid_of("mamba2 heads"), hybrid_of("mamba2 heads")
    first = answers(hybrid, 99, new=3)
    assert first["batch"].shape == (4, 3, VOCABULARY)
    assert difference(first, answers(other, 99, new=3)) <= 1e-4
    assert difference(first, first | {"batch": first["batch"] + 0.01}) > 1e-3
    assert difference(first, first | {"tokens": first["tokens"] + 1}) == float("inf")
    assert difference(first, first | {"batch": first["batch"] * float("nan")}) == float("inf")
    with torch.no_grad():
        number = other.backbone.layers[1].mixer.D[3:4]
        number.copy_(torch.nextafter(number, number + 1))
    digests = {name: tensor_digest(tensor) for name, tensor in tensors(other).items()}
    with pytest.raises(UserError, match=r"the tensor 'backbone\.layers\.1\.mixer\.D' differs"):
        compare(hf.READER, hybrid, 99, (first, digests))


@pytest.mark.parametrize("what", WRITTEN["patch"])
def test_float32_is_a_copy_with_the_same_numbers(what):
    hybrid = hybrid_of(what)
    assert in_float32(hybrid) is hybrid
    half = hybrid_of(what).to(torch.bfloat16)
    wide = in_float32(half)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert tensors(wide).keys() == tensors(half).keys()
    assert all(torch.equal(tensor, tensors(half)[name].float()) for name, tensor in tensors(wide).items())
    assert difference(answers(wide, 99, 2), answers(half.float(), 99, 2)) <= 1e-4


def test_a_hybrid_in_16_bits_is_proved_in_32(tokenizer, tmp_path):
    half = hybrid_of("llamba heads").to(torch.bfloat16)
    assert export(half, tmp_path / "out", tokenizer=tokenizer, plan=HEADS, base="b").holds()
    assert half.dtype == torch.bfloat16


def test_what_a_tokenizer_names_as_code_is_not_run(tokenizer, tmp_path):
    """A stock tokenizer whose settings name code was loaded without it; the card's lines allow code, ours."""
    place = tmp_path / "words"
    tokenizer.save_pretrained(place)
    settings = json.loads((place / "tokenizer_config.json").read_text()) | {
        "auto_map": {"AutoTokenizer": ["someone/else--code.Words", None]}
    }
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    words = type(tokenizer).from_pretrained(place)
    assert words.init_kwargs["auto_map"]
    export(hybrid_of("mamba2 heads"), tmp_path / "out", tokenizer=words, plan=HEADS, base="b")
    assert "auto_map" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert words.init_kwargs["auto_map"]  # the caller's is as it was


def test_a_patch_of_another_base_is_no_proof(tokenizer, tmp_path):
    """What a fresh process would find: the base was changed after the patch had been written."""
    base = base_of("mamba2")
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    with building(tmp_path / "patch") as new:
        with new.filling() as place:
            patch.write(hybrid_of("mamba2 heads"), place, tokenizer=tokenizer, plan=HEADS, base=str(tmp_path / "base"))
        new.replace()
    with torch.no_grad():
        base.backbone.layers[0].mixer.D[0] += 1
    base.save_pretrained(tmp_path / "base")
    assert load_base(str(tmp_path / "base")).backbone.layers[0].mixer.D[0] == base.backbone.layers[0].mixer.D[0]
    with pytest.raises(UserError, match=r"the tensor 'backbone\.layers\.0\.mixer\.D' differs"):
        verify.prove(patch.READER, hybrid_of("mamba2 heads"), tokenizer, tmp_path / "patch")


def test_the_script_needs_no_package():
    """Its own file imports nothing of ours when it begins, or the process without the package could not run it."""
    text = Path(fresh_process.script.__file__).read_text()
    assert not re.search(r"^(from|import) (surgery|\.)", text, flags=re.M)
