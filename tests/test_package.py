"""How the package sits among others."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROGRAM = """
import os, sys
assert sys.path[0] in ("", os.getcwd()), sys.path  # the repository's root comes before everything else
import kernels
print(kernels.marker)
import surgery.kernels.ssd
print(surgery.kernels.ssd.SSD_SCAN.name == "ssd_scan", sys.modules["kernels"] is kernels)
"""


def test_our_folder_does_not_shadow_hugging_faces_package_of_the_same_name(tmp_path):
    """transformers imports `kernels`. Ours has no __init__.py, so a regular package wins, even from further down sys.path."""
    fake = tmp_path / "kernels"
    fake.mkdir()
    (fake / "__init__.py").write_text('marker = "hf"\n')
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {
        "PYTHONPATH": str(tmp_path)
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["hf", "True", "True"]
