"""From a nemotron_h export to GGUF, and llama.cpp's own answers. Optional: it needs

pip install xllamacpp gguf                                     # llama.cpp, built
pip download --no-deps --no-binary :all: llama-cpp-python      # its source, for the converter: unpack it, and let
export LLAMA_CPP=.../vendor/llama.cpp                          # name the folder that holds convert_hf_to_gguf.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surgery.exporting import nemotron_h
from surgery.records.plan import Plan
from surgery.splicing.splice import splice

TWO = Plan(kind="layer", sites=("L0", "L2"), width=32)
SOURCE = Path(os.environ.get("LLAMA_CPP", "nowhere"))
# The converter knows tokenizers by a digest; ours is none of them, and ids are all that is compared.
CONVERT = """
import runpy, sys
source, folder, out = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
sys.argv = ["convert", folder, "--outtype", "f32", "--outfile", out]
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (SOURCE / "convert_hf_to_gguf.py").exists(), reason="LLAMA_CPP names no source of llama.cpp, whose converter it needs"
)
def test_llama_cpp_gives_the_same_answers(tiny, tmp_path):
    """The built-in model, because the server swallows tokens that are half a character, which a random model makes."""
    llama = pytest.importorskip("xllamacpp", reason="xllamacpp, a build of llama.cpp, is not installed")
    tokenizer, size = tiny.tokenizer, tiny.model.config.vocab_size
    assert size % 8 == 0  # or the converter would fill it up
    hybrid = splice(tiny.model, TWO)
    (tmp_path / "export").mkdir()
    nemotron_h.write(hybrid, tmp_path / "export", tokenizer=tokenizer, plan=TWO, base="a base")
    command = [sys.executable, "-c", CONVERT, str(SOURCE), str(tmp_path / "export"), str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    options = llama.CommonParams()
    options.model.path = str(tmp_path / "model.gguf")
    options.n_ctx, options.n_parallel, options.warmup, options.cpuparams.n_threads = 256, 1, False, 1
    options.cache_type_k = options.cache_type_v = llama.ggml_type.GGML_TYPE_F32  # 16 bits are its default
    options.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(options)
    generator = torch.Generator().manual_seed(0)
    for length in (1, 6, 17, 40):
        prompt = torch.randint(len(tokenizer), (length,), generator=generator).tolist()
        asked = {
            "prompt": prompt,
            "n_predict": 64,
            "n_probs": size,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        steps = server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        chosen = [step["id"] for step in steps]
        assert len(chosen) == 64
        with torch.inference_mode():
            ours = hybrid(torch.tensor([prompt + chosen])).logits[0, length - 1 : -1].log_softmax(-1)
        assert ours.argmax(-1).tolist() == chosen
        theirs = torch.full_like(ours, torch.nan)
        for row, step in zip(theirs, steps, strict=True):
            row[[entry["id"] for entry in step["top_logprobs"]]] = torch.tensor([e["logprob"] for e in step["top_logprobs"]])
        torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=0)
