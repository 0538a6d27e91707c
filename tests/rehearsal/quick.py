"""What the quick tests ask of both rehearsals, in one process: python -m tests.rehearsal.quick."""

from tests.rehearsal import rehearse, verbs
from tests.rehearsal.device import register

if __name__ == "__main__":
    register()
    rehearse.main(["mamba2", "float32", "bfloat16"])
    verbs.main(["float32", "bfloat16", "splice", "packed rows"])
