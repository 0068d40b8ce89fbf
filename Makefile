# Expanse eBPF. `make help` lists what can be made.
#
# Every target can be repeated and interrupted: a step leaves its mark only when it is complete, and
# is run again only when something that it was made from has changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules
export DEBIAN_FRONTEND := noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin

# What is compiled, and by what: clang for the BPF programs, libbpf for their headers and the loader. BCC finds
# the names of kernels in traces.
BUILD_PACKAGES := clang libbpf-dev libbpf1 python3-bpfcc
# clang-format checks bpf/, the rest is called by tests; the browser opens flame graphs.
TEST_PACKAGES := clang-format bpftool iproute2 runc busybox-static chromium-headless-shell libc6-dev musl-tools openssl
# tests/guests: the emulator, what makes disk images, a compiler for programs that run there.
GUEST_PACKAGES := qemu-system-x86 qemu-system-arm cpio e2fsprogs debian-archive-keyring gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross

PROTOS := $(wildcard expanse_ebpf/wire/*.proto)
BUILD_SOURCES := pyproject.toml $(PROTOS) $(wildcard bpf/*.py bpf/*.bpf.c bpf/include/*.h)
GENERATED := $(PROTOS:.proto=_pb2.py) $(PROTOS:.proto=_pb2.pyi) \
	$(foreach source,$(wildcard bpf/*.bpf.c),$(foreach machine,x86_64 aarch64,\
	expanse_ebpf/kernel/objects/$(patsubst bpf/%.bpf.c,%,$(source)).$(machine).bpf.o))
# Something that was deleted by hand is made again.
ifneq ($(words $(GENERATED)),$(words $(wildcard $(GENERATED))))
$(shell rm -f $(VENV)/.built)
endif

# A virtual environment that was moved, or whose Python is gone, is made again.
ifneq ($(shell test -x $(BIN)/python && cat $(VENV)/.python 2>/dev/null),$(CURDIR))
$(shell rm -f $(VENV)/.python)
endif

# $(call packages,NAME...): install the Debian packages among them that are missing.
define packages
command -v dpkg-query >/dev/null || { echo "note: this is not Debian; these packages' programs must be there: $(1)"; exit 0; }
missing=$$(comm -23 <(printf '%s\n' $(1) | sort) \
	<(dpkg-query -W -f='$${db:Status-Status} $${Package}\n' $(1) 2>/dev/null | sed -n 's/^installed //p' | sort -u) | xargs)
[[ -n $$missing ]] || exit 0
if (( EUID != 0 )); then
	echo "error: Debian packages are missing; as root: apt-get install $$missing" >&2
	exit 1
fi
echo "Installing $$missing"
apt-get -qq update
apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends $$missing </dev/null >/dev/null
endef

# A Python that can make virtual environments and has what Expanse imports.
define find_python
find_python() {
	local candidate
	for candidate in $(PYTHON) python3.11 /usr/bin/python3.11 python3 /usr/bin/python3 python3.12 python3.13 python3.14; do
		if "$$candidate" -c 'import sys, ctypes, ensurepip, sqlite3, ssl, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then
			echo "$$candidate"
			return
		fi
	done
	return 1
}
endef

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

.PHONY: root
root:
	@(( EUID == 0 )) || { echo "error: this loads BPF programs and makes cgroups: run it as root" >&2; exit 1; }

.PHONY: run
run: root install ## Watch a small training job of its own: agent, controller and top (needs root; DEMO_SECONDS=60)
	@exec $(BIN)/expanse-ebpf demo

.PHONY: test
test: lint build/promtool build/pprof ## Check the sources and run the tests, some in emulated machines (needs root; 45 min)
	@$(BIN)/python -m pytest --ignore=tests/guests
	exec $(BIN)/python -m pytest -v --durations=5 tests/guests

.PHONY: test-guests
test-guests: install test-packages ## Run what needs other kernels and machines, on all of them (1 h)
	@exec $(BIN)/python -m pytest -v --durations=20 tests/guests --matrix

.PHONY: bench-quick
bench-quick: root install ## Measure what watching costs two small jobs here, roughly (needs root; 8 min)
	@exec $(BIN)/expanse-ebpf bench run bench/plans/quick.toml

.PHONY: lint
lint: install test-packages ## Check style, types and formatting
	@$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy bpf/build_hook.py
	clang-format --dry-run --Werror $(wildcard bpf/*.c bpf/include/*.h)

.PHONY: format
format: install test-packages ## Format the sources
	@$(BIN)/ruff check --fix --select I
	$(BIN)/ruff format
	clang-format -i $(wildcard bpf/*.c bpf/include/*.h)

.PHONY: build
build: install ## Build the wheel into dist/
	@$(BIN)/python -m build --wheel --no-isolation

.PHONY: install
install: $(VENV)/.built ## Install into .venv, and the Debian packages that are needed

.PHONY: lock
lock: $(VENV)/.python ## Write requirements.txt anew from pyproject.toml
	@rm -rf build/lock
	$(BIN)/python -m venv build/lock
	build/lock/bin/pip install -qq pip-tools
	CUSTOM_COMPILE_COMMAND="make lock" build/lock/bin/pip-compile --quiet --upgrade --extra bench --extra dev --generate-hashes \
		--strip-extras --allow-unsafe --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file requirements.txt pyproject.toml

.PHONY: clean
clean: ## Remove everything that was made, .venv included
	@rm -rf $(VENV) build dist expanse_ebpf/kernel/objects $(GENERATED) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: build-packages
build-packages:
	@$(call packages,$(BUILD_PACKAGES))

.PHONY: test-packages
test-packages: ## Install the Debian packages that the tests need
	@$(call packages,$(TEST_PACKAGES) $(GUEST_PACKAGES))

$(VENV)/.python:
	@$(find_python)
	if ! python=$$(find_python); then
		(
			$(call packages,python3-venv)
		)
		python=$$(find_python) || {
			echo "error: no Python >= 3.11 with ensurepip, sqlite3, ssl and ctypes; name one: make PYTHON=/path/to/python3" >&2
			exit 1
		}
	fi
	echo "Making $(VENV) with $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
	"$$python" -m venv --clear $(VENV)
	echo $(CURDIR) >$@

$(VENV)/.requirements: requirements.txt $(VENV)/.python
	@if ! sha256sum --check --status $@ 2>/dev/null; then
		echo "Installing the packages of requirements.txt"
		$(BIN)/python -m pip install -qq --require-hashes --only-binary :all: -r requirements.txt
	fi
	sha256sum requirements.txt >$@

$(VENV)/.built: $(BUILD_SOURCES) $(VENV)/.requirements | build-packages
	@echo "Building the BPF programs and the protobuf code"
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	touch $@

# One program out of Debian's prometheus package; installing that would start a server.
build/promtool:
	@mkdir -p build/prometheus
	cd build/prometheus
	command -v apt-get >/dev/null || { echo "error: put promtool of Prometheus at build/promtool" >&2; exit 1; }
	apt-get -qq download prometheus 2>/dev/null || { apt-get -qq update; apt-get -qq download prometheus; }
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool
	chmod +x promtool
	mv promtool ..
	cd ..
	rm -r prometheus

# `go tool pprof` without Go, which takes 0.5 GB.
build/pprof:
	@mkdir -p build/go
	cd build/go
	command -v apt-get >/dev/null || { echo "error: put pprof, the tool that comes with Go, at build/pprof" >&2; exit 1; }
	fetch() {
		apt-get -qq download "$$(apt-cache depends golang-go | sed -nE 's/^ *Depends: (golang-[0-9.]+-go)$$/\1/p')" 2>/dev/null
	}
	fetch || { apt-get -qq update; fetch; }
	dpkg-deb --fsys-tarfile golang-*.deb | tar -xO --wildcards './usr/lib/go-*/pkg/tool/*/pprof' >pprof
	chmod +x pprof
	mv pprof ..
	cd ..
	rm -r go
