"""What llama.cpp answers for the built-in model with two layer grafts: python -m tools.gguf_record

Writes llama.cpp's proof in the export's record to recipes/gguf.json, for docs/howto/serve-llama-cpp.md. It needs what
`make serving-llama-cpp` fetches.
"""

import os
import tempfile
from pathlib import Path

import surgery
from surgery.exporting.folder import Exported
from surgery.records.plan import Plan
from surgery.records.site import Site

ROOT = Path(__file__).parent.parent
HERE = ROOT / ".venv-llama-cpp"
RECORD = ROOT / "recipes" / "gguf.json"

if __name__ == "__main__":
    os.environ.setdefault("LLAMA_CPP", str(HERE / "llama.cpp"))
    hybrid = surgery.splice(
        surgery.load(str(ROOT / "checkpoints/tiny-mamba2")), Plan(kind="layer", sites=(Site(0), Site(2)), width=32)
    )
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "gguf"
        surgery.export(hybrid, out, format="gguf", engines=["llama_cpp"], engine_python=HERE / "bin/python")
        RECORD.write_text(Exported.read(out / "export.json", unsealed="refuse").engines[0].text())
