# Two commands on a fresh machine: `make demo` edits a built-in model in three minutes, `make test` runs the tests. Each makes the
# environment (.venv) first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow check record wheel gpu gpu-carry gpu-rehearsal clean

# A model this small gains little by a second thread, which takes a quarter more of the processor's time.
demo: .venv/.core
	OMP_NUM_THREADS=1 $(BIN)/surgery run recipes/demo.yaml --resume --out runs/demo

test: .venv/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: .venv/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The table of sizes in docs/architecture.md, measured again.
record: .venv/.dev
	$(BIN)/python tools/architecture.py --write

wheel: .venv/.dev
	$(BIN)/python -m build --no-isolation

# What wants a GPU. It installs nothing: it takes the environment of this folder, or else the Python that is here.
gpu:
	@P=$(BIN)/python; [ -x $$P ] || P=$(PYTHON); S=$$(mktemp -d); \
	[ ! -f .gpu-carry/site.tar.xz ] || tar xJf .gpu-carry/site.tar.xz -C $$S; PYTHONPATH=$$S exec $$P -m tools.gpu

# What a machine without a network may lack for `make gpu`, for Python 3.12: 7 MB.
CARRIED := transformers pydantic pydantic-core annotated-types typing-inspection typing-extensions peft
gpu-carry: .venv/.core
	rm -rf .gpu-carry && mkdir -p .gpu-carry/site
	$(BIN)/pip freeze | grep -i -E "^($(subst $() ,|,$(subst -,[-_],$(CARRIED))))==" > .gpu-carry/wanted
	$(BIN)/pip install --quiet --no-compile --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	    --target .gpu-carry/site -r .gpu-carry/wanted
	MAMBA_SKIP_CUDA_BUILD=TRUE $(BIN)/pip download --quiet --no-deps --no-build-isolation --no-binary :all: -d .gpu-carry mamba-ssm
	tar xzf .gpu-carry/mamba_ssm-*.tar.gz -C .gpu-carry && mv .gpu-carry/mamba_ssm-*/mamba_ssm .gpu-carry/site/
	tar cJf .gpu-carry/site.tar.xz -C .gpu-carry/site . && rm -r .gpu-carry/site .gpu-carry/mamba_ssm-* .gpu-carry/wanted

# The kernels of GPUs in Triton's interpreter, on a CPU: no GPU is needed.
gpu-rehearsal: .venv/.dev
	[ -d .gpu-rehearsal/triton ] || $(BIN)/pip install --quiet --no-compile --no-deps --target .gpu-rehearsal triton einops
	[ -d .gpu-rehearsal/mamba_ssm ] || { MAMBA_SKIP_CUDA_BUILD=TRUE $(BIN)/pip download --quiet --no-deps \
	    --no-build-isolation --no-binary :all: -d .gpu-rehearsal mamba-ssm && cd .gpu-rehearsal && \
	    tar xzf mamba_ssm-*.tar.gz && mv mamba_ssm-*/mamba_ssm . ; }
	PYTHONPATH=.gpu-rehearsal $(BIN)/python -m pytest -n 0 tests/kernels tests/surgery/tuning/test_waits.py

clean:
	rm -rf .venv build dist

# Without --no-compile pip would compile all modules of torch; only what a command imports is compiled here, once.
.venv/.core: pyproject.toml constraints.txt
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import surgery.pipeline"
	touch $@

.venv/.dev: .venv/.core
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@
