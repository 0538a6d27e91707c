"""What mlx-lm answers for the built-in model with two layer grafts: python -m tools.mlx_record [PYTHON]

Writes mlx-lm's proof in the export's record to recipes/mlx.json, for docs/howto/serve-mlx-lm.md. PYTHON: of an environment with
mlx-lm, as `make serving-mlx` makes one.
"""

import sys
import tempfile
from pathlib import Path

import surgery
from surgery.exporting.folder import Exported
from surgery.records.plan import Plan
from surgery.records.site import Site

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "mlx.json"

if __name__ == "__main__":
    python = Path(sys.argv[1]) if sys.argv[1:] else ROOT / ".venv-mlx/bin/python"
    base = surgery.load(str(ROOT / "checkpoints/tiny-mamba2"))
    hybrid = surgery.splice(base, Plan(kind="layer", sites=(Site(0), Site(2)), width=32))
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "hybrid"
        surgery.export(hybrid, out, format="nemotron_h", engines=["mlx_lm"], engine_python=python)
        RECORD.write_text(Exported.read(out / "export.json", unsealed="refuse").engines[0].text())
