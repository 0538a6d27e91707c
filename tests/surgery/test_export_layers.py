"""Exports that are verified layer by layer, or by their tensors alone: what is held, what is claimed, what is found."""

import gc
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import MambaConfig, MambaForCausalLM

import surgery
from surgery.commands.tune_hybrid import tune_hybrid
from surgery.errors import UserError
from surgery.exporting import export as exporting
from surgery.exporting import folder, fresh_process, verify
from surgery.exporting.export import export
from surgery.exporting.formats import format_of, hf
from surgery.exporting.verify import Proof, chosen, difference, in_float32, whole_size
from surgery.loading.digests import fingerprint, identify, model_digest
from surgery.loading.streamed import Live, by_layers
from surgery.models.answers import LENGTHS, READ, LockstepRunner, answers, tensor_digest, tensors
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.runtime.ownership.replacing import building
from surgery.splicing.splice import splice
from tests.models import VOCABULARY, random_selective
from tests.surgery.test_export_proof import HEADS, LAYER, base_of, hybrid_of

CASES = {
    "hf": ["mamba2 heads", "falcon-mamba heads", "llamba heads", "mamba layer"],
    "patch": ["mamba heads", "falcon-mamba heads", "llamba layer"],
    "nemotron_h": ["mamba2 layer"],
    "mamba_ssm": ["mamba layer", "mamba2 rope"],
}


def saved(place, what, tokenizer, dtype=torch.bfloat16):
    """The hybrid of a base that lies in a folder, in 16 bits, and the options of its export."""
    plan, place = HEADS if "heads" in what else LAYER, place / "base"
    base = base_of(what).to(dtype)
    base.save_pretrained(place)
    tokenizer.save_pretrained(place)
    hybrid = splice(base, plan) if what.split()[1] in ("heads", "layer") else hybrid_of(what).to(dtype)
    return hybrid, {"tokenizer": tokenizer, "plan": plan, "base": str(place)}


FIRST = [  # of every form; the others of it are slow
    pytest.param(form, what, marks=pytest.mark.slow if i else ())
    for form, every in CASES.items()
    for i, what in enumerate(every)
]


@pytest.mark.parametrize(("form", "what"), FIRST)
def test_weights_stay_in_their_files(form, what, tokenizer, tmp_path, monkeypatch):
    """While the model of the folder answers; the graft of a patch, which is small, is read at once."""
    hybrid, options = saved(tmp_path, what, tokenizer)
    before, away = model_digest(hybrid), []

    def looked_at(real, package, folders, new):
        ((place, how),) = folders.items()
        assert how.endswith(":disk")
        model, _ = READ[how.removesuffix(":disk")](str(place), True)
        away.append([name for name, p in model.named_parameters() if not p.is_meta])
        return real(package, folders, new)

    monkeypatch.setattr(verify, "ask", partial(looked_at, verify.ask))
    proof = export(hybrid, tmp_path / "out", format=form, verify="layers", **options)
    assert (proof.verify, proof.tokens) == ("layers", verify.NEW_BY_LAYERS)
    assert proof.tensors == len(tensors(hybrid)) + (form == "nemotron_h")  # whose head is a tensor of its own
    assert proof.difference <= proof.tolerance
    assert "read back layer by layer in a fresh process by" in proof.line()
    assert all(".graft." in name for name in away[0]), away
    assert (model_digest(hybrid), hybrid.dtype) == (before, torch.bfloat16)
    assert folder.check(tmp_path / "out").proof == proof
    assert proof.line() in (tmp_path / "out" / "README.md").read_text()
    if form != "nemotron_h":
        assert model_digest(surgery.load(tmp_path / "out").model) == before


@pytest.mark.parametrize("what", ["mamba2 heads", "falcon-mamba heads", "llamba layer"])
def test_a_model_in_16_bits_answers_in_32_without_a_copy(what):
    half = hybrid_of(what).to(torch.bfloat16)
    streamed = by_layers(half)
    assert all(p.is_meta for p in streamed.parameters())
    assert difference(answers(in_float32(half), 99, 4), answers(streamed, 99, 4)) <= 1e-4
    assert in_float32(whole := hybrid_of(what), "layers") is whole


def test_each_weight_is_fetched_once_for_all_prompts(monkeypatch):
    """And once for every further token; what each prompt computes is what it computes without the others, bit for bit."""
    streamed, fetched = by_layers(hybrid_of("mamba heads").to(torch.bfloat16)), Counter()

    def counting(live, name, own=Live.__getitem__):
        fetched[name] += 1
        return own(live, name)

    monkeypatch.setattr(Live, "__getitem__", counting)
    together = answers(streamed, 99, 3)
    assert set(fetched.values()) == {3}, fetched
    assert len(fetched) == len(streamed.state_dict())
    fetched.clear()
    monkeypatch.setattr(LockstepRunner, "run", lambda _, calls: [call() for call in calls])
    apart = answers(streamed, 99, 3)
    assert set(fetched.values()) == {len(LENGTHS) + 3}, fetched
    assert together.keys() == apart.keys()
    assert all(torch.equal(together[name], apart[name]) for name in apart)


def test_calls_in_step_end_as_they_would_apart():
    """One after the other where nothing is fetched; in any order of modules; an error in one ends all, and nothing stays."""
    streamed = by_layers(hybrid_of("mamba2 heads").to(torch.bfloat16))
    ids = torch.tensor([[1, 2, 3]])

    def forward(times):
        return [streamed(input_ids=ids, use_cache=False).logits for _ in range(times)][-1]

    expected = forward(1)
    short, long = LockstepRunner(streamed).run([partial(forward, 1), partial(forward, 3)])
    assert torch.equal(short, expected)
    assert torch.equal(long, expected)
    assert LockstepRunner(torch.nn.Identity()).run([lambda: 1, lambda: 2]) == [1, 2]

    def failing():
        with register_module_forward_pre_hook(lambda module, _: 1 / 0 if module is streamed.backbone.layers[1] else None):
            return forward(1)

    with pytest.raises(ZeroDivisionError):
        LockstepRunner(streamed).run([partial(forward, 2), failing, partial(forward, 1)])
    assert all(p.is_meta for p in streamed.parameters())
    assert torch.equal(forward(1), expected)


def deep(layers, dtype=torch.bfloat16):
    fields = {"hidden_size": 192, "num_hidden_layers": layers, "vocab_size": VOCABULARY, "state_size": 4}
    return splice(random_selective(MambaConfig, MambaForCausalLM, **fields).to(dtype), Plan(sites=("L1.H3,5",)))


# `most`: the most bytes of float32 that new tensors held at any matrix product, whichever thread made it. What there was before
# gc.freeze() is not looked through.
COUNTING = """\
import gc, torch
linear, most = torch.nn.functional.linear, 0

def held():
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    here = [t.untyped_storage() for t in tensors if t.dtype == torch.float32 and t.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())

def counting(*arguments):
    global most
    most = max(most, held())
    return linear(*arguments)

torch.nn.functional.linear = counting
gc.freeze()
"""


def test_what_is_held_does_not_grow_with_depth(monkeypatch):
    """But for every layer's output, and for what a cache holds of it."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # which puts it back afterwards
    counted: dict = {}

    def most(layers, way):
        hybrid = deep(layers)
        torch.nn.functional.linear = nn_linear
        exec(COUNTING, counted)
        try:
            answers(in_float32(hybrid, way), 99, 2)
        finally:
            gc.unfreeze()
        return counted["most"], 2 * hybrid.num_parameters()

    nn_linear = torch.nn.functional.linear
    (few, _), (many, stored) = (most(layers, "layers") for layers in (3, 12))
    outputs = 4 * (sum(LENGTHS) + 4 * 40) * 192  # tokens alone and in the batch, width, in float32
    cache = 4 * 4 * 384 * (4 + 4)  # rows, channels, states and convolution
    assert 0 < few <= many <= few + 9 * (outputs + cache)  # layers
    assert most(12, "full")[0] >= many + stored  # the measurement sees what is held


# Runs a script, and then says what its tensors held.
AND_ITS_PEAK = f"""\
{COUNTING}
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stderr.write(f"most: {{most}} bytes")
"""


@pytest.mark.slow  # eight processes; test_what_is_held_does_not_grow_with_depth counts bytes in this one
@pytest.mark.parametrize("form", ["hf", "patch"])
def test_the_fresh_process_holds_a_few_layers(form, tokenizer, tmp_path):
    """By the tensors of a model at two depths, of which the deeper one is larger by 150 MB in float32."""
    peaks = {}
    for layers in (2, 26):
        fields = {"hidden_size": 512, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
        base = random_selective(MambaConfig, MambaForCausalLM, **fields).to(torch.bfloat16)
        place = tmp_path / str(layers)
        base.save_pretrained(place / "base")
        tokenizer.save_pretrained(place / "base")
        plan = Plan(sites=("L1.H3",))
        with building(place / "out") as new:
            with new.filling() as out:
                format_of(form).write(splice(base, plan), out, tokenizer=tokenizer, plan=plan, base=str(place / "base"))
            new.replace()
        reader = format_of(form).READER
        root = str(Path(fresh_process.__file__).parents[2]) if form == "patch" else "-"
        for on_disk in (True, False):
            asked = [str(place / "out"), reader.how + ":disk" * on_disk]
            command = [sys.executable, "-P", "-c", AND_ITS_PEAK, fresh_process.script.__file__, root, "2", *asked]
            done = subprocess.run(command, capture_output=True, check=True)
            peaks[layers, on_disk] = int(re.findall(rb"most: (\d+) bytes", done.stderr)[0])
    grown = {on_disk: peaks[26, on_disk] - peaks[2, on_disk] for on_disk in (True, False)}
    print({key: f"{value / 2**20:.0f} MiB" for key, value in (peaks | grown).items()})
    outputs = 4 * (sum(LENGTHS) + 4 * 40) * 512  # as in the test above
    cache = 4 * 4 * 1024 * (16 + 4)
    assert grown[False] >= 120e6
    assert grown[True] <= 24 * (outputs + cache) < grown[False] / 4


def tampered(real, change, hybrid, place, **options):
    """A format's write, after which something changes what it wrote."""
    real(hybrid, place, **options)
    change(place)


def other_bit(place):
    """Another number in the middle of the weights."""
    (file,) = place.glob("*.safetensors")
    state = load_file(file)
    name = next(name for name in sorted(state) if re.search(r"layers\.1\..*(D|q_proj\.weight)$", name))
    flat = state[name].view(-1).view(torch.int16)
    flat[len(flat) // 2] ^= 1
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize("way", ["full", "layers", "tensors"])
def test_a_changed_weight_is_found(way, tokenizer, tmp_path, monkeypatch):
    hybrid, options = saved(tmp_path, "mamba heads", tokenizer)
    monkeypatch.setattr(hf, "write", partial(tampered, hf.write, other_bit))
    with pytest.raises(UserError, match=r"the tensor 'backbone\.layers\.1\..*' differs; nothing was written"):
        export(hybrid, tmp_path / "out", verify=way, **options)
    assert os.listdir(tmp_path) == ["base"]


def test_by_tensors_alone(tokenizer, tmp_path):
    """Of every form in test_of_an_offloaded_hybrid."""
    hybrid, options = saved(tmp_path, "mamba2 layer", tokenizer)
    proof = export(hybrid, tmp_path / "out", verify="tensors", **options)
    assert (proof.verify, proof.difference, proof.tokens, proof.prompts) == ("tensors", None, 0, ())
    assert proof.tensors == len(tensors(hybrid))
    assert folder.check(tmp_path / "out").proof == proof
    assert proof.line() in (tmp_path / "out" / "README.md").read_text()
    assert "nothing was computed with them" in proof.line()


def test_in_several_files(tokenizer, tmp_path):
    hybrid, options = saved(tmp_path, "falcon-mamba heads", tokenizer)
    proof = export(hybrid, tmp_path / "out", verify="layers", max_shard_size="20KB", **options)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert (proof.verify, proof.tokens) == ("layers", verify.NEW_BY_LAYERS)


@pytest.mark.parametrize("how", [pytest.param(cpu_offload, marks=pytest.mark.slow), disk_offload])
def test_of_an_offloaded_hybrid(how, tokenizer, tmp_path):
    """Its own weights are fetched, too."""
    plan, place = LAYER, str(tmp_path / "base")
    base = base_of("mamba2 layer")
    base.save_pretrained(place)
    tokenizer.save_pretrained(place)
    expected = model_digest(splice(base_of("mamba2 layer"), plan))
    where = {"offload_dir": str(tmp_path / "away")} if how is disk_offload else {}
    hybrid = splice(how(base, execution_device="cpu", offload_buffers=True, **where), plan)
    count = len(tensors(splice(base_of("mamba2 layer"), plan)))
    for form, way in (("hf", "layers"), ("patch", "tensors"), ("nemotron_h", "tensors"), ("mamba_ssm", "tensors")):
        proof = export(hybrid, tmp_path / "out", format=form, verify=way, tokenizer=tokenizer, plan=plan, base=place)
        assert (proof.verify, proof.tensors) == (way, count + (form == "nemotron_h"))  # whose head is one of its own
        if form != "nemotron_h":
            assert model_digest(surgery.load(tmp_path / "out").model) == expected


def test_auto_is_full_where_that_fits(tokenizer, monkeypatch, capsys):
    hybrid, numbers = hybrid_of("mamba heads"), sum(tensor.numel() for tensor in tensors(hybrid_of("mamba heads")).values())
    assert (whole_size(hybrid), whole_size(hybrid_of("mamba heads").to(torch.bfloat16))) == (4 * numbers, 6 * numbers)
    for free, way in ((8 * numbers, "full"), (8 * numbers - 1, "layers")):
        monkeypatch.setattr(verify, "available", lambda free=free: free)
        assert chosen("auto", hybrid) == way
        said = capsys.readouterr().err
        assert ("verifying by 'layers': 'full' takes up to " in said) == (way == "layers")
        assert chosen("full", hybrid) == "full"  # what is asked for is done
    monkeypatch.setattr(verify, "is_quantised", lambda _: True)
    monkeypatch.setattr(verify, "available", lambda: 1)
    assert chosen("auto", hybrid) == "tensors"
    assert "verifying by 'tensors'" in capsys.readouterr().err
    with pytest.raises(UserError, match="quantised weights cannot be read layer by layer"):
        chosen("layers", hybrid)


def test_a_record_of_an_earlier_version_holds():
    old = {
        "reader": "transformers", "version": "5.23.0", "why": None, "difference": 3e-6, "tolerance": 1e-4,
        "prompts": [1, 6], "tokens": 64,
    }  # fmt: skip
    proof = Proof.model_validate_json(json.dumps(old))
    assert (proof.verify, proof.tensors, proof.holds()) == ("full", None, True)
    assert not Proof.model_validate_json(json.dumps(old | {"difference": 2e-4})).holds()
    assert not Proof.model_validate_json(json.dumps(old | {"difference": None})).holds()


def test_memory_that_runs_out_here_is_said(tokenizer, tmp_path, monkeypatch):
    def short(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    hybrid, options = saved(tmp_path, "mamba heads", tokenizer)
    monkeypatch.setattr(verify, "answers", short)
    for way, hint in (("full", "--verify layers takes less"), ("layers", "--verify tensors takes less")):
        with pytest.raises(UserError, match=f"memory ran out while the live model answered: {hint}"):
            export(hybrid, tmp_path / "out", verify=way, **options)
    assert os.listdir(tmp_path) == ["base"]


def test_a_disk_without_room_is_said_before_anything_is_written(tokenizer, tmp_path, monkeypatch):
    hybrid, options = saved(tmp_path, "mamba heads", tokenizer)
    monkeypatch.setattr(exporting, "free_disk", lambda _: 1000)
    for form in ("hf", "patch"):
        with pytest.raises(UserError, match=r"cannot write .*out: it takes [\d.]+ KiB, and 1 KiB are free there"):
            export(hybrid, tmp_path / "out", format=form, **options)
    assert os.listdir(tmp_path) == ["base"]


def test_a_proof_that_fails_loses_no_training(tokenizer, tmp_path, monkeypatch):
    hybrid, options = saved(tmp_path, "mamba heads", tokenizer, torch.float32)
    export(hybrid, tmp_path / "hybrid", **options)
    recipe = Recipe(
        model=str(tmp_path / "hybrid"),
        tune={"steps": 2, "batch_size": 2, "text_batch_size": 1, "text_tokens": 16, "lessons": [{"options": {"pairs": 2}}]},
    )

    def killed(*_):
        raise fresh_process.OutOfMemory("signal 9 ended it")

    with monkeypatch.context() as patched:
        patched.setattr(verify, "ask", killed)
        with pytest.raises(
            UserError, match=r"--verify layers .*what was tuned is kept in .*tuned-tuning: the same command with"
        ):
            tune_hybrid(recipe, tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()
    with monkeypatch.context() as patched:
        patched.setattr("surgery.tuning.steps.torch.optim.AdamW.step", None)  # no step is made
        log = tune_hybrid(recipe, tmp_path / "tuned", resume=True, verify="tensors")
    assert [record["step"] for record in log] == [1, 2]
    assert folder.check(tmp_path / "tuned").proof.verify == "tensors"
    assert model_digest(surgery.load(tmp_path / "tuned").model) != model_digest(hybrid)


def test_a_way_that_does_not_exist_is_refused_at_once(surgery):
    for verb, *arguments in (("export", ".", "--out", "z"), ("splice", "o/x", ".", "--out", "z"), ("tune", ".", "--out", "z"),
                             ("run", "x.yaml")):  # fmt: skip
        status, out, err = surgery(verb, *arguments, "--verify", "hope")
        assert (status, out) == (2, "")
        assert err == "surgery: cannot verify by 'hope'; there are auto, full, layers, tensors\n"


def test_one_pass_gives_all_digests():
    model = hybrid_of("mamba2 heads")
    identity = identify(model)
    assert (identity.digest, identity.fingerprint) == (model_digest(model), fingerprint(model))
    assert identity.tensors == {name: tensor_digest(tensor) for name, tensor in tensors(model).items()}
