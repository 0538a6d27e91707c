"""Tasks of lm-evaluation-harness, from a folder of the user's, on live models."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Mamba2Config, Mamba2ForCausalLM

from surgery.errors import UserError
from surgery.evaluation.bench import bench
from surgery.evaluation.lm_eval import harness_measurements
from surgery.evaluation.suites import Given
from surgery.records.recipe import Bench, Data

pytest.importorskip("lm_eval")
TASK = """
task: tiny_colors
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" red", " blue"]
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def folder(tmp_path):
    rows = [{"question": f"{name} wears", "label": i % 2} for i, name in enumerate("anchor apple badge bell".split())]
    (tmp_path / "colors.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny_colors.yaml").write_text(TASK.format(file=tmp_path / "colors.json"))
    return tmp_path


@pytest.fixture
def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1}
    return Mamba2ForCausalLM(
        Mamba2Config(vocab_size=1664, chunk_size=16, pad_token_id=0, initializer_range=0.4, **sizes)
    ).eval()


def test_a_task_of_ones_own_is_measured(base, folder):
    tokenizer = AutoTokenizer.from_pretrained("checkpoints/tiny-mamba2")
    options = Bench(tasks=("tiny_colors",), include_path=str(folder), suites=("speed",), contexts=(), controls=(), windows=1)
    report = bench({"base": base, "other": base}, tokenizer, options)
    assert report.verdict.measurement == "task.tiny_colors"
    assert report.base.results["task.tiny_colors"].n == 4
    asked = Given(tokenizer, options, Data(), 0)
    (measurement,) = harness_measurements(asked)
    with torch.no_grad():  # the log-probabilities of the two single-token choices, by hand
        choices = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" red", " blue")]
        questions = tokenizer([f"{name} wears" for name in "anchor apple badge bell".split()], add_special_tokens=False)[
            "input_ids"
        ]
        logits = [base(input_ids=torch.tensor([ids])).logits[0, -1] for ids in questions]
    assert [len(ids) for ids in choices] == [1, 1]
    right = [float(one[choices[i % 2][0]] > one[choices[1 - i % 2][0]]) for i, one in enumerate(logits)]
    assert np.array_equal(measurement.ask(base), right)


def test_an_unknown_task_is_named(folder, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager.all_tasks", property(lambda _: ["tiny_colors"]))
    options = Bench(tasks=("no_such_task",), include_path=str(folder))
    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__", lambda *_, **__: None)
    with pytest.raises(UserError, match="no_such_task"):
        harness_measurements(Given(None, options, Data(), 0))
