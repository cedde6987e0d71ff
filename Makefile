# FlashCore's entry points. `make` alone lists the targets.

PREFIX ?= /usr/local

.DEFAULT_GOAL := help
.PHONY: help demo test test-all quick kernel profile gpu-check release-check lint format install clean setup

help: ## this list
	@echo "FlashCore: attention in C++20 and CUDA. Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
	  awk -F'|' '{ printf "%-22s %s\n", $$1, $$2 }'
	@echo "Missing packages are listed, then installed (apt, or pip into .venv); NO_INSTALL=1 only lists."
	@echo "JOBS=n limits the compilers that run at once. TORCH=0 leaves torch out of the tests."
	@echo "STAGES=\"build tests\" runs these stages alone; scripts/test --list names them."
	@echo "ALLOW_SKIP=\"name ...\" lets make test-all pass without these."

demo: ## set up, build, compute attention, check it, explain it, time it (3 minutes on 2 cores)
	@scripts/setup build
	@scripts/demo

test: ## set up and run the tests for every push, no GPU needed (7 to 10 minutes on 2 cores, 8 or 9 more for the first build)
	@scripts/setup test
	@scripts/test $(STAGES)

test-all: ## test, sanitizers, all CUDA kernels, wheel, frameworks, fuzzers
	@scripts/setup test
	@scripts/test --all $(STAGES)

quick: ## the tests for daily work, CPU only
	@TORCH=0 scripts/setup test
	@scripts/test --quick $(STAGES)

kernel: ## K=<id>: build one kernel alone, show registers, check and time it (half a minute)
	@scripts/setup build
	@scripts/kernel "$(K)"

profile: ## K=<id> CASE=<name>: that kernel on that case under ncu, in twenty lines
	@scripts/setup build
	@scripts/profile "$(K)" "$(CASE)"

gpu-check: ## on a machine with a GPU: every kernel against the oracle, sanitizers, bench (at most 25 minutes)
	@TORCH=0 scripts/setup test
	@scripts/gpu_check

release-check: ## before a release: 1,000,000 random problems, long shapes, long fuzzing (hours)
	@scripts/setup test
	@scripts/release_check

lint: ## check layout (clang-format 14), types (mypy) and code (clang-tidy)
	@scripts/setup dev
	@scripts/lint

format: ## format all sources with clang-format 14
	@scripts/setup dev
	@scripts/lint --fix

install: ## build and install into PREFIX (default /usr/local)
	@scripts/setup build
	@scripts/install "$(PREFIX)"

setup: ## install the packages that tests and linters need, nothing else
	@scripts/setup dev

clean: ## remove build/ (the .venv stays)
	rm -rf build
