"""Small random models of the exact Hugging Face class, the built-in checkpoint, and what all tests share."""

import gc
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from surgery.figures import plotting
from surgery.figures.views import atlas, mixing
from surgery.hybrids.llamba import LlambaConfig, LlambaForCausalLM
from surgery.runtime.ownership.files import put
from surgery.runtime.ownership.folder import RECORD
from surgery.world.tokenizer import build_tokenizer
from tools.double import float64

# A case that takes long, or is drawn slowly, on a busy machine is no failure; and every run draws the same ones.
hypothesis.settings.register_profile(
    "anywhere", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("anywhere")

ROOT = Path(__file__).parent.parent
TINY = ROOT / "checkpoints" / "tiny-mamba2"
VOCABULARY = -(-len(build_tokenizer()) // 16) * 16  # of the built-in world, padded as checkpoints are

VARIANTS = {
    "plain": {},
    "groups": {"n_groups": 2},
    "group per two heads, biases": {"n_groups": 4, "use_bias": True},
    "no conv bias": {"use_conv_bias": False},
    "dt limit": {"n_groups": 2, "time_step_limit": (0.0, 0.05)},
    "untied": {"tie_word_embeddings": False},
}


def random_base(**changes) -> Mamba2ForCausalLM:
    """3 layers of 8 heads; the same weights every time."""
    torch.manual_seed(0)
    fields = {
        "num_heads": 8, "head_dim": 16, "vocab_size": 99, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 3,
        "n_groups": 1, "chunk_size": 16, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    return Mamba2ForCausalLM(Mamba2Config(**fields | changes)).eval()


def names(folder):
    """What lies in a folder, but for the records of what is ours."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.name != RECORD)


def subject(model: PreTrainedModel):
    """A model as it is, not adopted, with the world's tokenizer."""
    from surgery.locating.subject import Subject
    from surgery.models.anatomy import anatomy

    return Subject(model, build_tokenizer(), anatomy(model))


def random_selective(config: type, model: type, **changes) -> PreTrainedModel:
    """A Mamba-1 or Falcon-Mamba of 3 layers of 64 channels; the same weights every time."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": 99, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    made = model(config(**fields | changes)).eval()
    with torch.no_grad():  # as initialised, B, C and the time step hardly depend on the input
        for block in made.backbone.layers:
            block.mixer.x_proj.weight.normal_(std=0.5)
    return made


def random_llamba(**changes) -> PreTrainedModel:
    """3 layers of 8 heads; the same weights every time."""
    torch.manual_seed(0)
    ssm = {"d_state": 8, "n_v_heads": 8, "n_qk_heads": 8, "chunk_size": 16}
    fields = {"vocab_size": 99, "d_model": 64, "n_layer": 3, "mlp_cfg": {"intermediate_size": 96}, "pad_vocab_size_multiple": 1}
    made = LlambaForCausalLM(LlambaConfig(**fields | changes, ssm_cfg=ssm, pad_token_id=0)).eval()
    with torch.no_grad():  # as initialised, its grafts would change next to nothing
        for block in made.backbone.layers:
            block.mixer.in_proj.weight.normal_(std=0.3)
    return made


# Bases of every family that can be operated on.
BASES = {
    **{name: partial(random_base, **changes) for name, changes in VARIANTS.items()},
    "mamba": partial(random_selective, MambaConfig, MambaForCausalLM),
    "mamba, biases, untied": partial(random_selective, MambaConfig, MambaForCausalLM, use_bias=True, tie_word_embeddings=False),
    "falcon mamba": partial(random_selective, FalconMambaConfig, FalconMambaForCausalLM),
    "llamba": random_llamba,
}


@pytest.fixture(params=BASES, ids=lambda name: name.replace(",", "").replace(" ", "-"))
def family_base(request) -> PreTrainedModel:
    return BASES[request.param]()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """That of the built-in world; do not change it."""
    return build_tokenizer()


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """A Mamba-2 that reads the built-in world; do not change it."""
    return random_base(vocab_size=VOCABULARY)


def storages():
    """Place -> what holds the numbers of a tensor, of all that are alive in this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and type(thing) is not FakeTensor]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_meta}


@pytest.fixture
def live_bytes():
    """Counts the bytes of all tensors that were made since the test began. Those from before are kept until it ends: what other
    tests have left might go at any moment, and be subtracted."""
    before = storages()
    return lambda: sum(storage.nbytes() for place, storage in storages().items() if place not in before)


@pytest.fixture
def in_float64():
    with float64():
        yield


def but_slow(values, *quick):
    """The cases of a law: of those that are not `quick`, each is a test of `make test-slow`."""
    return [
        value if value in quick else pytest.param(*(value if type(value) is tuple else [value]), marks=pytest.mark.slow)
        for value in values
    ]


# Between two ways of computing in float64, for numbers of order 1.
SAME = {"rtol": 1e-9, "atol": 1e-10}


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(1, 99, (2, 37), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def tiny():
    """The built-in checkpoint, loaded once; do not change it."""
    import surgery

    return surgery.load(TINY)


PROVED = 3  # greedy tokens, of a test that exports for other reasons


@pytest.fixture(scope="session", autouse=True)
def modules_stay():
    """The garbage collector looks no more through what was imported: 600,000 objects, a third of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def read_back_here():
    """A test that exports for other reasons pays no fresh process: the same lines load the folder in this one, and the same
    comparison follows, with fewer tokens. Tests of the proof itself ask for `fresh_process`."""
    from surgery.exporting import verify
    from surgery.kernels.dispatch import use
    from surgery.models.answers import load_and_answer

    ask = verify.ask

    def here(_, folders, new):
        with use(**verify.KERNELS):
            return [load_and_answer(folder, how, min(new, PROVED)) for folder, how in folders.items()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "ask", here)
        yield ask


@pytest.fixture
def fresh_process(monkeypatch, read_back_here):
    """Exports are proved as they are outside the tests."""
    from surgery.exporting import verify

    monkeypatch.setattr(verify, "ask", read_back_here)


@pytest.fixture(autouse=True)
def nothing_stays_on():
    """No test leaves a mode of torch behind, such as a default device: what is compiled later would trace it."""
    yield
    assert not torch._C._len_torch_function_stack()
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture(scope="session", autouse=True)
def timed_once():
    """What is timed, and no test looks at the time: of each round of decoding one token, where a bench says what tokens cost,
    and of forwards one, where a run says what it will cost. It would take a third of a run."""
    from surgery.evaluation import decoding
    from surgery.models import pace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "TOKENS", 1)
        patch.setattr(pace, "REPEATS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def unannounced():
    """Jobs do not say what they will cost, which has tests of its own and would take an eighth of each. Those ask for
    `announced`. Gives what it has replaced."""
    from surgery.costs import announced

    own = announced._undisturbed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announced, "_undisturbed", lambda work: None)
        yield own


@pytest.fixture
def announced(monkeypatch, unannounced):
    monkeypatch.setattr("surgery.costs.announced._undisturbed", unannounced)


class Nothing:
    """A figure, its axes, and all that they give: whatever is drawn on it."""

    def __getattr__(self, name):
        if name.startswith("__"):  # numpy asks for some
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    def __getitem__(self, _):
        return self

    def __iter__(self):
        return iter(())

    def get_ylim(self):
        return 0.0, 1.0


@pytest.fixture(scope="session", autouse=True)
def unpainted():
    """Figures are neither laid out nor painted, and for those of a ranking nothing is computed: it would take most of a run.
    Tests that look at figures ask for `painted`. Gives what it has replaced."""
    places = ((plotting, "drawing"), (plotting, "legend"), (atlas, "located"), (mixing, "located"))
    own = [(module, name, getattr(module, name)) for module, name in places]

    def drawn(name):
        return lambda *arguments: put(arguments[-1] / name, b"a picture")

    @contextmanager
    def drawing(path, rows=1, columns=1, **_):
        axes = np.empty((rows, columns), object)
        axes.fill(Nothing())
        yield Nothing(), axes
        if path is not None:
            put(path, b"a picture")

    with pytest.MonkeyPatch.context() as patch:
        for (module, name, _), instead in zip(own, (drawing, Nothing(), drawn("atlas.png"), drawn("mixing.png")), strict=True):
            patch.setattr(module, name, instead)
        yield own


@pytest.fixture
def painted(monkeypatch, unpainted):
    for module, name, own in unpainted:
        monkeypatch.setattr(module, name, own)


@pytest.fixture
def surgery(monkeypatch, capsys, tmp_path):
    """Call the command in an empty working directory: (status, standard output, standard error)."""
    from surgery.cli import app as cli

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["surgery", *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call
