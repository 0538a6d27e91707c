"""Numbers belong to what they describe: digests of models and tokenizers, seals, and no place of this machine in any record."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import surgery as package
from surgery.errors import UserError
from surgery.evaluation import asking, cells, entries
from surgery.evaluation.bench import measure
from surgery.evaluation.report import Report
from surgery.evaluation.results import ModelReport
from surgery.evaluation.task import Task
from surgery.exporting import folder as export_folder
from surgery.exporting.export import export
from surgery.exporting.folder import RECORD, Exported
from surgery.figures.views import page
from surgery.jobs import locating_stage, report_folder
from surgery.loading import digests
from surgery.loading.digests import conditions, model_digest, tokenizer_digest
from surgery.locating.ledger import Ledger
from surgery.locating.locate import locate
from surgery.locating.ranking import Ranking
from surgery.records.names import display_name, strip_paths
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Lora, Recipe, Tune
from surgery.records.record import code_digest, environment, provenance
from surgery.runtime.ownership.files import put, writing
from surgery.splicing.splice import adopt, graft_parameters, splice
from surgery.tuning.lora import adapted, adapters
from surgery.world.tokenizer import build_tokenizer
from tests.models import VOCABULARY, random_base

TOKENIZER = build_tokenizer()
HEADS, LAYER = Plan(sites=("L1.H3", "L2.H0,5")), Plan(kind="layer", sites=("L1",), seed=3)
QUICK = Bench(pairs=(4,), limit=6, windows=2, window=16, contexts=())
ASKED = ("--set", "locate={options: {pairs: 4}, examples: 4, layers: false}")
SIZES = ("--set", "bench={pairs: [4], limit: 6, windows: 2, window: 16, contexts: []}")


def ruined(model):
    """Its grafts, as bad tuning would leave them."""
    with torch.no_grad():
        for p in graft_parameters(model).values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p.dtype))
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base in a folder."""
    place = tmp_path_factory.mktemp("numbers")
    random_base(vocab_size=VOCABULARY).save_pretrained(place / "base")
    TOKENIZER.save_pretrained(place / "base")
    return place


# Digests


def test_a_base_and_the_same_base_adopted_are_one_model(family_base):
    assert model_digest(family_base) == model_digest(adopt(family_base))
    other = adopt(family_base)
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1
    assert model_digest(other) != model_digest(splice(family_base, Plan(sites=("L1.H3",))))


def test_live_reloaded_in_shards_and_joined_have_one_digest(tmp_path, place):
    """In float16. Heads and adapters that are merged; a layer is mamba_ssm's too, which our classes read back."""
    base = package.load(place / "base", dtype="float16").model
    base.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    for plan, forms in ((HEADS, ("hf", "patch")), (LAYER, ("hf", "patch", "mamba_ssm"))):
        hybrid = ruined(splice(base, plan))
        if plan is HEADS:
            with adapted(hybrid, Lora(target_modules=("in_proj",), r=2), seed=0, out=None), torch.no_grad():
                for p in adapters(hybrid).values():
                    p.fill_(0.02)
        live = model_digest(hybrid)
        for form in forms:
            options = {"max_shard_size": "80KB"} if form == "hf" else {}
            out = tmp_path / f"{plan.kind}-{form}"
            export(hybrid, out, format=form, tokenizer=TOKENIZER, plan=plan, base=str(tmp_path / "base"), **options)
            assert Exported.read(out / RECORD, unsealed="refuse").digest == live
            loaded = package.load(out)
            assert model_digest(loaded.model) == live, form
            assert tokenizer_digest(loaded.tokenizer) == tokenizer_digest(TOKENIZER)
        assert model_digest(package.load(out, dtype="float64").model) != live


def test_a_digest_sees_every_number_and_setting():
    base = random_base()
    seen = [model_digest(base), model_digest(random_base(time_step_limit=(0.0, 0.05)))]
    for sign in (1, -1):
        seen.append(model_digest(splice(base, Plan(sites=("L1.H3",), starts={"L1.H3": {"sign": sign}}))))
    hybrid = splice(base, Plan(sites=("L1.H3",)))
    for p in graft_parameters(hybrid).values():
        with torch.no_grad():
            p.view(-1)[-1] += 1e-3
        seen.append(model_digest(hybrid))
    seen.append(model_digest(hybrid.to(torch.bfloat16)))
    assert len({*seen}) == len(seen)


def test_a_tokenizer_is_its_tokens_and_not_what_it_did_last():
    before, other = tokenizer_digest(TOKENIZER), build_tokenizer()
    other(["a long one", "b"], padding=True, truncation=True, max_length=2)
    other.chat_template = "{{ messages }}"
    assert tokenizer_digest(other) == before
    other.model_max_length = 77
    assert tokenizer_digest(other) != before
    other = build_tokenizer()
    other.add_tokens(["mamba"])
    assert tokenizer_digest(other) != before
    other = build_tokenizer()
    other.eos_token = "."  # what documents end with
    assert tokenizer_digest(other) != before


def test_a_tokenizer_without_a_tokenizer_json_is_the_file_that_it_reads(tmp_path):
    """One written in Python, as SentencePiece's: pieces of one vocabulary may be scored in two ways."""
    vocabulary = tmp_path / "tokenizer.model"
    read = SimpleNamespace(
        special_tokens_map={}, model_max_length=9, get_vocab=lambda: {"a": 0, "b": 1}, vocab_file=str(vocabulary)
    )
    digests = []
    for content in (b"a b", b"b a", b"a b"):
        vocabulary.write_bytes(content)
        digests.append(tokenizer_digest(read))
    assert digests[0] == digests[2] != digests[1]
    read.add_bos_token = True
    assert tokenizer_digest(read) != digests[2]


def test_conditions_name_what_computes(base):
    """Not what only reads or draws: another peft changes no answer."""
    assert {*conditions(base, TOKENIZER).packages} == {"torch", "transformers"}


def test_the_code_counts(monkeypatch, tmp_path):
    """An edited checkout of one version is other code; so is an edited kernel."""
    from surgery.records import record as records

    root = tmp_path / "surgery"
    shutil.copytree(Path(records.__file__).parent.parent, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(records, "__file__", str(root / "records" / "record.py"))
    digests = [code_digest.__wrapped__()]
    assert digests == [code_digest()]
    for name in ("evaluation/task.py", "kernels/ssd.c"):
        with (root / name).open("a") as file:
            file.write("\n")
        digests.append(code_digest.__wrapped__())
    assert len({*digests}) == 3


# Cells


def test_a_cell_is_found_again_by_all_that_it_depends_on(place, tmp_path, monkeypatch):
    """Another tokenizer, kernel, device, version of lm_eval, package or code: measured anew."""
    model, measured = adopt(package.load(place / "base").model), []
    honest = asking.answer

    def counted(*arguments, **options):
        measured.append(1)
        return honest(*arguments, **options)

    def how_many(tokenizer=TOKENIZER):
        measured.clear()
        measure({"base": model}, tokenizer, QUICK, cells=tmp_path)
        return len(measured)

    monkeypatch.setattr(asking, "answer", counted)
    first = how_many()
    assert first == 4  # kv, kv with unseen keys, knowledge, letters
    assert how_many() == 0
    other = build_tokenizer()
    other.add_tokens(["Mamba"])
    assert how_many(other) == first
    for change in ({"code": "x"}, {"kernels": {"ssd_scan": "stock"}}, {"device": "H100"}, {"packages": {"torch": "3"}}):
        with monkeypatch.context() as patched:
            changed = lambda *a, change=change, **k: conditions(*a, **k).model_copy(update=change)  # noqa: E731
            patched.setattr(entries, "conditions", changed)
            assert how_many() == first, change
    with package.kernels.dispatch.use(ssd_scan="chunked"):
        assert conditions(model, TOKENIZER).kernels["ssd_scan"] == "chunked"
        assert how_many() == first
    task = Task("t", 0, "t", lambda _: None, harness="0.4.13")
    assert task.key() != Task("t", 0, "t", lambda _: None, harness="0.5").key()


def test_a_falsified_or_foreign_cell_is_refused_by_name(place, tmp_path):
    model = package.load(place / "base").model
    measure({"base": model}, TOKENIZER, QUICK, cells=tmp_path)
    path = next(path for path in tmp_path.iterdir() if '"kv.4"' in path.read_text())
    cell = cells.Cell.read(path)
    assert {"model", "tokenizer", "kernels", "device", "dtype", "lm_eval", "questions", "code"} <= cell.key.keys()
    better = cell.model_copy(update={"values": (1.0,) * 6})
    written = json.loads(path.read_text())
    for content, complaint in (
        ({**written, "values": [1.0] * 6}, "is not as it was written: its content does not fit its seal"),
        ({**json.loads(better.text()), "seal": None}, "has no seal"),
        (cell.model_copy(update={"key": cell.key | {"tokenizer": "x"}}).text(), "it was measured with another tokenizer"),
    ):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(UserError, match=complaint) as refused:
            measure({"base": model}, TOKENIZER, QUICK, cells=tmp_path)
        assert str(path) in str(refused.value)
        assert "delete it" in str(refused.value)
    path.unlink()
    assert measure({"base": model}, TOKENIZER, QUICK, cells=tmp_path)["base"].kv["4"].n == 6


# Rankings


def test_a_ranking_is_resumed_only_for_the_same_weights(surgery, place, tmp_path, monkeypatch):
    """A hybrid that was tuned again in its folder: its base has the same fingerprint, its grafts have not."""
    hybrid = splice(package.load(place / "base").model, Plan(sites=("L1.H3",)))
    for change in (lambda unchanged: unchanged, ruined):
        model = change(hybrid)
        model.save_pretrained("hybrid")
        TOKENIZER.save_pretrained("hybrid")
        status, out, err = surgery("locate", "hybrid", *ASKED, "--out", "out", "--resume")
        assert status == 0, err
        ranking = Ranking.read("out/ranking.json", unsealed="refuse")
        assert ranking.conditions.model == model_digest(model)
    assert "ranking.json is of another model: locating again" in err
    before = Path("out/ranking.json").read_bytes()
    assert surgery("locate", "hybrid", *ASKED, "--out", "out", "--resume")[0] == 0
    assert Path("out/ranking.json").read_bytes() == before

    Path("out/recipe.yaml").unlink()  # which would be enough to refuse
    other = ("--set", "locate={options: {pairs: 4}, examples: 4, layers: false, ablation: mean}")
    status, _, err = surgery("locate", "hybrid", *other, "--out", "out", "--resume")
    assert status == 0, err
    assert "out/ranking.json is of another locate.ablation (zero): locating again" in err
    Path("out/recipe.yaml").unlink()

    falsified = {"base_accuracy": {"accuracy": 1.0, "ci95": [1.0, 1.0], "n": 4}}
    for change, complaint in ((falsified, "does not fit its seal"), ({"seal": None}, "cannot be spliced")):
        Path("out/ranking.json").write_text(json.dumps(json.loads(before) | change))
        status, out, err = surgery("locate", "hybrid", *ASKED, "--out", "out", "--resume")
        assert (status, out, "ranking.json' was not written by this toolkit, or was changed since" in err) == (2, "", True)
        status, _, err = surgery("plan", "out/ranking.json")
        assert (status, complaint in err) == (2, True), err
    assert "out/ranking.json has no seal" in err
    assert surgery("locate", "hybrid", *ASKED, "--out", "out", "--overwrite")[0] == 2
    Path("out/ranking.json").unlink()  # the way out
    assert surgery("locate", "hybrid", *ASKED, "--out", "out", "--overwrite")[0] == 0
    monkeypatch.setattr(locating_stage, "questions_digest", lambda _: "another")  # other questions by the same recipe
    _, _, err = surgery("locate", "hybrid", *ASKED, "--out", "out", "--resume")
    assert "is of another set of questions: locating again" in err


def test_without_resume_nothing_that_was_kept_is_met(place, tmp_path, monkeypatch):
    """What a damaged part's complaint advises."""
    recipe, base, met = Recipe(model=str(place / "base")), package.load(place / "base"), []

    def rank(*_, kept, **__):
        met.append(kept.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(locating_stage, "rank", rank)
    for resume in (True, False):
        with writing(tmp_path), pytest.raises(KeyboardInterrupt):  # noqa: PT012
            put(tmp_path / "locate" / "part", b"measured")
            locating_stage.located(recipe, base, tmp_path, resume=resume)
    assert met == [True, False]


def test_a_report_shows_no_atlas_of_another_model(place, tmp_path, monkeypatch):
    base = adopt(package.load(place / "base").model)
    made, shown = provenance("base", "f", 0), []
    measured = ModelReport(description="", plan=None, conditions=conditions(base, TOKENIZER))
    report = Report(provenance=made, plan=None, models={"base": measured}, timings={}, training={}, settings={})
    ranking = locate(base, TOKENIZER, options={"pairs": 4}, examples=2, exact=False, layers=False)
    monkeypatch.setattr(report_folder.markdown, "render", lambda _: "")
    monkeypatch.setattr(page, "render", lambda _, atlas, __: shown.append(atlas) or "")
    other = ranking.conditions.model_copy(update={"model": "another"})
    for found in (ranking, ranking.model_copy(update={"conditions": other})):
        with writing(tmp_path):
            found.write(tmp_path / "ranking.json")
            report_folder.describe(report, tmp_path)
    assert shown == [ranking, None]


def test_a_part_of_a_ranking_is_what_its_name_says(tmp_path):
    def measured(number):
        return {"x": torch.full((2,), float(number))}

    ledger = Ledger(tmp_path, "weights")
    ledger.share([0, 1], str, measured)
    first, second = sorted(tmp_path.iterdir())
    held = first.read_bytes()
    shutil.copy(second, first)
    with pytest.raises(UserError, match=r"was changed after it was written.*delete it, and it is measured again"):
        ledger.share([0, 1], str, measured)
    first.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    with pytest.raises(UserError, match=r"was changed after it was written.*delete it, and it is measured again"):
        ledger.share([0, 1], str, measured)


# Cards


def test_a_card_takes_only_a_report_on_its_own_weights(surgery, place, tmp_path, monkeypatch):
    base = package.load(place / "base").model
    plan = Plan(sites=("L1.H3",), provenance=provenance("base", package.load(place / "base").fingerprint, 0))
    hybrid = splice(base, plan)
    export(hybrid, "spliced", tokenizer=TOKENIZER, plan=plan, base=str(place / "base"))
    assert surgery("bench", place / "base", "spliced", *SIZES, "--out", "measured")[0] == 0
    report = Report.read("measured/report.json", unsealed="refuse")
    assert report.models["spliced"].conditions == conditions(package.load("spliced").model, TOKENIZER)
    export(ruined(hybrid), "tuned", tokenizer=TOKENIZER, plan=plan, base=str(place / "base"))
    status, out, err = surgery("export", "tuned", "--report", "measured/report.json", "--out", "out")
    assert (status, out) == (2, "")
    complaint = "measured/report.json: the report measured other weights than these: bench what is to be exported"
    assert err.splitlines()[-1] == f"surgery: {complaint}"
    asked = ("--report", "measured/report.json", "--out", "out")
    status, _, err = surgery("export", "spliced", "--set", "dtype=bfloat16", *asked)
    assert status == 2
    assert "(they are in bfloat16, and it measured float32)" in err
    assert not Path("out").exists()
    passes, own = [], digests.identify
    with monkeypatch.context() as patch:
        for module in (digests, export_folder):
            patch.setattr(module, "identify", lambda model: passes.append(model) or own(model))
        status, _, err = surgery("export", "spliced", *asked)
    assert status == 0, err
    assert len(passes) == 1  # over all weights
    assert "The weights of this export are the row **spliced**, measured in float32." in Path("out/README.md").read_text()

    with pytest.raises(UserError, match="the report measured other weights than these"):
        export(hybrid, "no", tokenizer=TOKENIZER, plan=plan, base="b", report=report)
    # In another form the papers come along; in another dtype the report stays behind, and so does it from an edited folder.
    status, _, err = surgery("export", "out", "--set", "dtype=float64", "--out", "wide")
    assert status == 0
    assert "report and figures stay behind: the report measured other weights than these (they are in float64" in err
    assert "Nothing was measured" in Path("wide/README.md").read_text()

    old = {name: m.model_copy(update={"conditions": None}) for name, m in report.models.items()}
    report.model_copy(update={"models": old}).write("old.json")
    falsified = json.loads(Path("measured/report.json").read_text())
    falsified["models"]["spliced"]["kv"]["4"]["accuracy"] = 1.0
    Path("falsified.json").write_text(json.dumps(falsified))
    del falsified["seal"]
    Path("unsealed.json").write_text(json.dumps(falsified))
    for name, complaint in {
        "old.json": "the report measured other weights than these", "falsified.json": "does not fit its seal",
        "unsealed.json": "has no seal",
    }.items():  # fmt: skip
        status, out, err = surgery("export", "spliced", "--report", name, "--out", "no")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert complaint in err


# Seals


def test_a_seal_is_over_the_content_and_not_its_layout(tmp_path):
    path = tmp_path / "report.json"
    model = ModelReport(description="ä", plan=None)
    made = provenance("b", "f", 0)
    report = Report(provenance=made, plan=None, models={"base": model}, timings={"x": 0.1 + 0.2}, training={}, settings={})
    report.write(path)
    assert Report.read(path, unsealed="refuse") == report
    held = json.loads(path.read_text())
    path.write_text(json.dumps({name: held[name] for name in reversed(held)}))
    assert Report.read(path, unsealed="refuse") == report
    path.write_text(json.dumps(held | {"timings": {"x": 0.3}}))
    with pytest.raises(UserError, match="its content does not fit its seal"):
        Report.read(path, unsealed="take")


# Places


def test_names_for_others():
    names = {
        "state-spaces/mamba2-130m": "state-spaces/mamba2-130m", "/home/alice/models/x/": "x", "~/x": "x", "../runs/x": "x",
        "./x": "x", "a/b/c": "c", "world": "world", "https://hub/a/b.jsonl": "https://hub/a/b.jsonl", "file:///home/a/b": "b",
        ".": Path.cwd().name, "..": Path.cwd().parent.name,
    }  # fmt: skip
    assert {name: display_name(name) for name in names} == names
    assert strip_paths(strip_paths(names)) == strip_paths(names)
    tree = {"data": [{"source": "/home/alice/t.txt", "weight": 1.5}], "pairs": [4, 8], "none": None, "probe": "kv"}
    assert strip_paths(tree) == {"data": [{"source": "t.txt", "weight": 1.5}], "pairs": [4, 8], "none": None, "probe": "kv"}


def test_the_versions_of_what_is_in_use_are_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    assert "lm_eval" not in environment().packages
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    assert {"lm_eval", "peft", "tokenizers"} <= environment().packages.keys()


def test_no_record_and_no_export_says_where_its_maker_keeps_things(surgery, place, tmp_path, monkeypatch):
    """Everything is given by absolute paths; the folders of the run, and what is published, hold none of them."""
    home = tmp_path / "alice"
    (home / "deep").mkdir(parents=True)
    shutil.copytree(place / "base", home / "deep" / "base")
    for name, start in (("text.txt", 0), ("other.txt", 1)):
        text = "".join(TOKENIZER.decode([9 + i * i % (150 + start)]) + " " for i in range(start, 400))
        (home / "deep" / name).write_text(text)
    base = str(home / "deep" / "base")
    few = Tune(steps=1, batch_size=2, text_batch_size=1, text_tokens=24, skill_batch_size=2)
    options = QUICK.model_copy(update={"controls": False})
    recipe = Recipe(model=base, tokenizer=base, bench=options, tune=few).model_dump(mode="json")
    recipe["locate"] |= {"options": {"pairs": 4}, "examples": 4, "layers": False}
    recipe["bench"] |= {"include_path": str(home / "deep"), "data_path": str(home / "deep")}
    recipe["data"] = {"train_text": str(home / "deep" / "other.txt"), "held_out_text": str(home / "deep" / "text.txt")}
    (home / "recipe.yaml").write_text(json.dumps(recipe))
    out = home / "out"
    status, _, err = surgery("run", home / "recipe.yaml", "--out", out)
    assert status == 0, err
    asked = ("--recipe", home / "recipe.yaml")
    for verb in (
        ("tune", out / "hybrid", *asked, "--out", home / "tuned"),
        ("export", home / "tuned", "--format", "patch", "--out", home / "patch"),
        ("bench", home / "deep" / "base", home / "patch", *SIZES, "--out", home / "compared"),
    ):
        status, _, err = surgery(*verb)
        assert status == 0, err
    report = Report.read(out / "report.json", unsealed="refuse")
    assert report.provenance.base == "base"
    assert report.provenance.recipe["model"] == "base"
    assert report.provenance.recipe["data"]["held_out_text"] == "text.txt"
    # To go on here: of the run's own folder, not of an export.
    local = {"recipe.yaml", "state.json", "tuning.json", "adapter_config.json"}
    for folder in (out, home / "tuned", home / "patch", home / "compared"):
        for path in folder.rglob("*"):
            exported = any((above / RECORD).exists() for above in path.parents)
            if path.is_file() and (exported or path.name not in local):
                held = path.read_bytes()
                for secret in (str(home), str(tmp_path), "alice"):
                    assert secret.encode() not in held, path


def test_a_donor_is_named_and_not_placed(place, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    donor = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY)).eval()
    plan = Plan(kind="layer", sites=("L1",), donor=str(tmp_path / "alice" / "llama"))
    export(
        splice(package.load(place / "base").model, plan, donor), tmp_path / "out", tokenizer=TOKENIZER, plan=plan,
        base=str(place / "base"),
    )  # fmt: skip
    assert Plan.read(tmp_path / "out" / "plan.json").donor == "llama"
    assert all(b"alice" not in path.read_bytes() for path in (tmp_path / "out").iterdir())
