"""The whole job, and every verb by itself, on the models of published_models.py.

`make test` reads their configurations (test_recipes.py does the whole job on a Llamba, test_cli.py on a Mamba-2), `make
test-slow` does it on every published model, and in these on every tokenizer.
"""

import csv
import json
from pathlib import Path

import pytest
import torch

from surgery import adopt, load
from surgery.errors import UserError
from surgery.evaluation import suites
from surgery.exporting.export import export
from surgery.more import TASKS
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Data
from surgery.serving.original_config import original_config
from surgery.splicing.splice import splice
from tests.models import SAME, but_slow, float64
from tests.published_models import DTYPES, LAYOUTS, PUBLISHED, TOKENIZERS, PublishedModel, original, stock

NAMES, WORDS = tuple(PUBLISHED), tuple(TOKENIZERS)
# Every published model once, the half precisions, layouts and tokenizers in turns; float32 is in all other tests.
SOME = [
    PublishedModel(name, DTYPES[1 + (i + i // 4) % 2], LAYOUTS[i % 3 % 2], WORDS[i % len(WORDS)], spare=0 if i == 0 else 37)
    for i, name in enumerate(NAMES)
]
PAINTED = "mistralai/Mamba-Codestral-7B-v0.1"  # with controls, and figures of tokens that no font has
# Fewer of everything than by default, and nothing else.
FEW = """
locate: {examples: 4, options: {pairs: 4}}
tune: {steps: 2, batch_size: 2, lessons: [{options: {pairs: [2, 4]}, queries: 2}], text_batch_size: 1, text_tokens: 24,
       skill_batch_size: 2}
bench: {pairs: [4], limit: 4, windows: 2, window: 32, contexts: [16]}
"""
# Heads by choice, hints and LoRA, from dictionaries and from needles in text. A processor is slow in half precision.
CHOICE = """
dtype: float32
locate: {examples: 2, options: {pairs: 3}}
plan: {by: choice, heads: 2, auto: {candidates: 2, examples: 2, skill_examples: 2}}
tune:
  steps: 2
  batch_size: 2
  lessons:
    - {options: {pairs: [2, 3]}, queries: 2}
    - {probe: needle, options: {length: 120, source: lessons}}
  hints: {weight: 0.3}
  lora: {target_modules: [in_proj]}
  text_batch_size: 1
  text_tokens: 24
  skill_batch_size: 2
bench: {pairs: [3], limit: 2, windows: 2, window: 32, contexts: [], controls: false}
"""


@pytest.fixture
def written(tmp_path):
    """Write a checkpoint: its folder, and the settings that a user has to give with it."""

    def write(checkpoint: PublishedModel) -> tuple[Path, list[str]]:
        checkpoint.write(tmp_path / "checkpoint")
        words = checkpoint.tokenizer_in(tmp_path / "checkpoint")
        apart = words != tmp_path / "checkpoint"
        return tmp_path / "checkpoint", ["--set", f"tokenizer={words}"] if apart else []

    return write


def finite(record) -> None:
    """No number anywhere in a JSON file is infinite, or none: Python writes those by name."""
    json.loads(record.read_text(), parse_constant=lambda name: pytest.fail(f"{record} holds {name}"))


@pytest.mark.slow  # test_recipes.py and test_cli.py have quick ones
@pytest.mark.parametrize("checkpoint", SOME, ids=str)
def test_the_whole_job(surgery, written, tmp_path, request, checkpoint):
    if checkpoint.published == PAINTED:
        request.getfixturevalue("painted")
    folder, _ = written(checkpoint)
    words = f"tokenizer: {folder}/tokenizer\n" if (folder / "tokenizer").exists() else ""
    (tmp_path / "few.yaml").write_text(f"model: {folder}\n{words}{FEW}")
    controls = checkpoint.published == PAINTED
    status, out, err = surgery("run", "few.yaml", "--anyway", "--set", f"bench.controls={str(controls).lower()}")
    assert status == 0, err
    assert ("control_same_layer" in out) == controls
    done = tmp_path / "runs" / "few"
    report = json.loads((done / "report.json").read_text())
    assert report["models"]["tuned"]["kv"]["4"]["n"] == 4
    for name in ("ranking.json", "report.json"):
        finite(done / name)
    hybrid = load(done / "hybrid")
    assert {str(p.dtype) for n, p in hybrid.model.named_parameters() if ".graft." not in n} == {f"torch.{checkpoint.dtype}"}


@pytest.mark.slow  # where evidence stands, with each tokenizer, has a quick test in test_hinting.py
@pytest.mark.parametrize("words", ["Llama 2", "no special tokens"])
def test_heads_by_choice_learn_from_hints(surgery, written, tmp_path, words):
    """Choice and hints have to find the answer's tokens in the prompt, whatever the tokenizer makes of its beginning."""
    folder, _ = written(PublishedModel("mistralai/Mamba-Codestral-7B-v0.1", "float16", "one file", words))
    (tmp_path / "choice.yaml").write_text(f"model: {folder}\n{CHOICE}")
    status, _, err = surgery("run", "choice.yaml", "--anyway")
    assert status == 0, err
    done = tmp_path / "runs" / "choice"
    assert Plan.read(done / "plan.json").places
    with (done / "tuning" / "tuned.csv").open() as file:
        assert all(float(row["hints"]) > 0 for row in csv.DictReader(file))


STEP_BY_STEP = (
    PublishedModel("state-spaces/mamba2-130m", "float16", "one file", "GPT-NeoX"),
    PublishedModel("cartesia-ai/Llamba-3B", "float16", "shards", "Llama 3"),
    PublishedModel("tiiuae/falcon-mamba-7b", "float16", "one file", "no special tokens"),
)


@pytest.mark.slow  # on a base of the toolkit's own it is a quick test of test_cli.py
@pytest.mark.parametrize("checkpoint", STEP_BY_STEP, ids=str)
def test_every_verb_by_itself(surgery, written, tmp_path, checkpoint):
    folder, words = written(checkpoint)
    (tmp_path / "few.yaml").write_text(f"model: x\n{FEW}")
    few = ["--recipe", "few.yaml"]

    def call(*arguments):
        status, out, err = surgery(*arguments)
        assert status == 0, err
        return out

    call("locate", folder, *few, *words, "--out", "ranked")
    finite(tmp_path / "ranked" / "ranking.json")
    call("plan", "ranked/ranking.json", "--set", "plan.heads=2")
    call("splice", folder, "ranked/plan.json", *words, "--out", "spliced")
    call("tune", "spliced", *few, "--out", "tuned")
    call("export", "tuned", "--format", "hf", "--out", "whole")
    call("export", "tuned", "--format", "patch", "--out", "patch")
    call("bench", folder, "spliced", "whole", "patch", *few, *words, "--out", "compared")
    finite(tmp_path / "compared" / "report.json")
    call("export", "patch", "--format", "hf", "--out", "joined")  # its tokenizer goes along where its base has none
    assert load(tmp_path / "joined").tokenizer.get_vocab() == load(tmp_path / "whole").tokenizer.get_vocab()
    whole, joined = load(tmp_path / "whole").model, load(tmp_path / "joined").model
    assert all(torch.equal(mine, yours) for mine, yours in zip(whole.parameters(), joined.parameters(), strict=True))
    for name in ("whole", "patch"):
        assert "Nothing was sent to someone/hybrid" in call("publish", name, "someone/hybrid", "--dry-run")


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_published_configuration_computes_what_transformers_does(tmp_path, name):
    """Read in float64 by both; and stored in a precision, it is loaded in that."""
    ids = torch.randint(1, 600, (2, 19), generator=torch.Generator().manual_seed(0))
    for dtype, layout in (("bfloat16", "shards"), ("float16", "one file")):
        checkpoint, folder = PublishedModel(name, dtype, layout, "GPT-NeoX"), tmp_path / dtype
        checkpoint.write(folder)
        words = str(checkpoint.tokenizer_in(folder))
        assert load(folder, tokenizer=words).model.dtype == getattr(torch, dtype)
        base = load(folder, tokenizer=words, dtype="float64").model
        theirs = base if original(name) else stock(folder).double()
        mine = adopt(base)
        with float64():
            torch.testing.assert_close(mine(ids).logits, theirs(ids).logits, **SAME)
        assert type(mine) is not type(theirs) or name.startswith("cartesia-ai")
        assert mine(ids).logits.std() > 0.01


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("state-spaces/mamba-130m-hf", change) for change in (
            {"rms_norm": None}, {"d_model": 768}, {"ssm_cfg": {"dt_rank": 7}}, {"fused_add_norm": "yes"},
        )),
        ("state-spaces/mamba-130m-hf", {"norm_before_gate": False}),  # it has no such norm
        ("mistralai/Mamba-Codestral-7B-v0.1", {"rms_norm": False}),
        ("mistralai/Mamba-Codestral-7B-v0.1", {"norm_before_gate": "always"}),
        ("mistralai/Mamba-Codestral-7B-v0.1", {"attn_layer_idx": [1]}),
        ("AntonV/mamba2-130m-hf", {"tie_embeddings": False}),
        ("a fine-tuned Mamba-2", {"sliding_window": 5}),
        ("tiiuae/falcon-mamba-7b", {"num_attention_heads": 8}),
        ("cartesia-ai/Llamba-3B", {"rope_theta": 500000.0}),
        ("cartesia-ai/Llamba-3B", {"lm_head_prenorm": "layer"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_would_compute_something_else_is_refused(tmp_path, name, change):
    checkpoint = PublishedModel(name, "float32", "one file", "GPT-NeoX")
    ((field, value),) = change.items()
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config() | change))
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    family = PUBLISHED[name][0]["model_type"]
    assert str(caught.value).startswith(
        f"the configuration's field '{field}' ({value!r}) is not handled by the {family} family"
    )


def test_what_an_original_folder_may_also_hold():
    """Notes about the file, and arguments that were not given; not the same names with something in them."""
    fields, sizes = PUBLISHED["state-spaces/mamba2-130m"]
    plain = fields | sizes
    notes = {"architectures": ["MambaLMHeadModel"], "torch_dtype": "float16", "transformers_version": "4.40.0"}
    ssm = {"layer": "Mamba2", "layer_idx": None, "process_group": None, "device": None, "dtype": None}
    assert original_config(plain | notes | {"ssm_cfg": ssm}).to_dict() == original_config(plain).to_dict()
    with pytest.raises(UserError, match=r"ssm_cfg\.process_group 'world' is not handled"):
        original_config(plain | {"ssm_cfg": ssm | {"process_group": "world"}})


@pytest.mark.parametrize("words", but_slow(WORDS, "Llama 2"))
def test_bench_decides_as_lm_eval_does_on_the_exported_folder(written, tmp_path, words):
    """Answer by answer, whatever the tokenizer makes of a prompt and its candidates."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra 'eval' (lm-evaluation-harness)")
    from lm_eval.tasks import TaskManager

    folder, _ = written(PublishedModel("AntonV/mamba2-130m-hf", "float32", "one file", words))
    base, plan = load(folder), Plan(sites=("L1.H2",))
    hybrid = splice(base.model, plan)
    export(hybrid, tmp_path / "hybrid", tokenizer=base.tokenizer, plan=plan, base="a base")
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    # The command wants a token that begins a text, to put before an empty prompt, of which there is none.
    begin = "" if base.tokenizer.bos_token else ",prefix_token_id=0"
    said = lm_eval.simple_evaluate(
        "hf", f"pretrained={tmp_path / 'hybrid'}{begin}", ["surgery_kv_4", "surgery_mqar_8"], limit=30, batch_size=8,
        device="cpu", bootstrap_iters=0, task_manager=manager,
    )  # fmt: skip
    options = Bench(suites=("retrieval",), pairs=(4, 8), limit=30, contexts=())
    ours = {task.name: task for task in suites.tasks(options, base.tokenizer, Data(), 0)}
    for task, name in (("surgery_kv_4", "kv.4"), ("surgery_mqar_8", "mqar.8")):
        decided = ours[name].measure(hybrid).values.tolist()
        assert decided == [sample["acc"] for sample in sorted(said["samples"][task], key=lambda sample: sample["doc_id"])]
        assert len(decided) == 30
        assert 0 < sum(decided) < 30
