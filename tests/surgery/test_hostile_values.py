"""Names and values of strangers: shown as they are and no more, refused where nothing can have them."""

import json
import re

import pytest
import torch
import yaml

from surgery.doctor.examination import examine
from surgery.errors import UserError
from surgery.evaluation import markdown
from surgery.evaluation.report import Report
from surgery.exporting.export import export
from surgery.figures import comparisons
from surgery.hybrids.dual import DualMixer
from surgery.locating.locate import locate
from surgery.records.names import as_code, in_markdown, one_line
from surgery.records.plan import Plan
from surgery.records.recipe import Tune, read_recipe
from surgery.records.site import Site, split_sites
from surgery.runtime.printable import printable
from surgery.splicing.splice import splice
from surgery.tuning.loop import tune
from tests.models import ROOT, VOCABULARY, random_base, subject

PLAN = Plan(sites=("L1.H3",))
HOSTILE = ("a|b", "`touch x`", "x\n---\nlicense: mit\n---", "<script>alert(1)</script>", "[a](http://x)", "**b**", "\x1b[2Jx")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_stays_one_cell_and_one_line(name):
    (row,) = markdown.named_table(["model", "x"], [[name, "1"]]).splitlines()[2:]
    assert len(re.split(r"(?<!\\)\|", row)) == 4
    for shown in (in_markdown(name), as_code(name), one_line(name)):
        assert "\n" not in shown
        assert "\x1b" not in shown
    assert "<" not in in_markdown(name).replace("\\<", "")
    assert "\x1b" not in printable(name)


@pytest.mark.parametrize("name", [HOSTILE[2], HOSTILE[-1]])
def test_a_base_of_any_name_has_its_card(tokenizer, tmp_path, name):
    """Its front matter says what the base's card says of the licence, and nothing that a name says."""
    hybrid = splice(random_base(vocab_size=VOCABULARY), PLAN)
    export(hybrid, tmp_path / "out", tokenizer=tokenizer, plan=PLAN, base=name, verify="tensors")
    text = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert "license" not in front
    assert "\n---\nlicense" not in text
    assert "\x1b" not in text


def test_a_report_names_models_as_they_are_called():
    report = Report.read(ROOT / "recipes" / "demo-mamba2.report.json")
    named = {("tuned|x`<b>" if name == "tuned" else name): model for name, model in report.models.items()}
    page = markdown.render(report.model_copy(update={"models": named}))
    assert "tuned|x" not in page
    assert "tuned\\|x\\`\\<b\\>" in page


def test_a_task_that_the_base_was_not_asked_is_left_out():
    report = Report.read(ROOT / "recipes" / "demo-mamba2.report.json")
    base = report.models["base"].model_copy(update={"knowledge": None})
    assert comparisons.summaries(report.model_copy(update={"models": report.models | {"base": base}}))


@pytest.mark.parametrize("sites", ["L0.H5,5", ["L0.H3,5", 5], "L0.H1,2,1"])
def test_a_head_that_is_named_twice_is_refused(sites):
    with pytest.raises(UserError, match="names a head twice"):
        split_sites(sites)
    assert Site(0, (5, 3)) == Site(0, (3, 5))


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(UserError, match="a name is empty"):
        read_recipe(None, ["model=base", "data.held_out_text=''"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"), ({"grafts": 5}, "grafts is 5, and is to be a list of grafts"),
        ({"grafts": [5]}, "list of grafts|cannot read"),
        ({"grafts": [{"layer": 9, "heads": [0]}]}, "a graft is in layer 9"), ({"grafts": "H99"}, "at heads"),
    ],
)  # fmt: skip
def test_doctor_refuses_what_no_model_can_have(tokenizer, tmp_path, change, said):
    hybrid = splice(random_base(vocab_size=VOCABULARY), PLAN)
    hybrid.save_pretrained(tmp_path / "h", tokenizer=tokenizer)
    examine(str(tmp_path / "h"))
    content = json.loads((tmp_path / "h" / "config.json").read_text())
    if change.get("grafts") == "H99":
        change = {"grafts": [content["grafts"][0] | {"heads": [99]}]}
    (tmp_path / "h" / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=said):
        examine(str(tmp_path / "h"))


def test_tuning_leaves_the_callers_random_numbers_alone(tokenizer):
    hybrid = splice(random_base(vocab_size=VOCABULARY), PLAN)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tune(hybrid, tokenizer, Tune(steps=1, batch_size=2, text_batch_size=1, text_tokens=16))
    assert torch.equal(torch.rand(3), expected)


def test_an_attribution_that_fails_leaves_the_starts_of_the_grafts(monkeypatch):
    """It tries others, and puts back what it took, whatever happens."""
    grafts, attend, base = [], DualMixer.attend, random_base(vocab_size=VOCABULARY)

    def fails(mixer, *arguments, **named):
        if mixer.graft.log_tau.min() != 0:  # of a start that is tried
            grafts.append((mixer.graft, mixer.graft.signs))
            raise RuntimeError("no")
        return attend(mixer, *arguments, **named)

    monkeypatch.setattr(DualMixer, "attend", fails)
    with pytest.raises(RuntimeError, match="no"):
        locate(base, subject(base).tokenizer, options={"pairs": 3}, examples=2, exact=False)
    ((graft, tried),) = grafts[:1]
    assert float(graft.log_tau.abs().max()) == 0
    assert graft.signs is not tried
