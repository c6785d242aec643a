# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Fixtures for the whole suite. Model factories as plain functions are in tiny_models.py."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import backends
import pytest
import tiny_models
import torch


@pytest.fixture(autouse=True)
def fresh_seed() -> None:
    """New random numbers in every test; pytest shows the seed of one that failed, and KVSPEED_TEST_SEED repeats it."""
    seed = int(os.environ.get("KVSPEED_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"KVSPEED_TEST_SEED={seed}")
    torch.manual_seed(seed)
    random.seed(seed)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_isa: run on every instruction set of this CPU, not only on the best one")
    config.addinivalue_line("markers", "without(*backends): do not run on these; see backends.py")
    config.addinivalue_line("markers", "attention: leave out what a GPU's segment_attention refuses")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `backend` runs on each."""
    if "backend" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker
        without = marker("without").args if marker("without") else ()
        names = backends.names(every_isa=marker("every_isa") is not None, without=without)
        metafunc.parametrize("backend", names, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what no GPU takes; test_ops_devices.py asserts that it is refused."""

    def refused(item: pytest.Item) -> bool:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        return item.get_closest_marker("attention") is not None and backends.leaves_out(
            parameters.get("backend", ""), parameters
        )

    items[:] = [item for item in items if not refused(item)]


@pytest.fixture
def backend(request: pytest.FixtureRequest, fresh_seed: None) -> Iterator[str]:
    """The backend that `backends.ops` runs on: an instruction set, "cpu" (the best of them), "simt" or "cuda"."""
    with backends.running(request.param):
        yield request.param


@pytest.fixture(params=tiny_models.ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    """Each supported architecture in turn."""
    return request.param


@pytest.fixture
def tiny_model() -> Callable[..., torch.nn.Module]:
    """The factory `tiny_models.tiny_model`."""
    return tiny_models.tiny_model


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of the converted SmolLM2-135M-Instruct (downloaded once into the cache folder).

    Skips, with the reason, where the download is impossible; fails instead when the variable CI is set.
    """
    from kvspeed.smollm2 import SmolLM2Unavailable, smollm2_path

    try:
        return smollm2_path(progress=False)
    except SmolLM2Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"SmolLM2 is needed in CI: {error}")
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


@pytest.fixture(scope="session")
def _smollm2_loaded(smollm2_dir: Path):
    from kvspeed.smollm2 import load_smollm2

    return load_smollm2(progress=False)


@pytest.fixture
def smollm2(_smollm2_loaded) -> Iterator[tuple[torch.nn.Module, object]]:
    """(model, tokenizer): the real SmolLM2-135M-Instruct in float32, loaded once a session, unpatched after a test."""
    model, tokenizer = _smollm2_loaded
    yield model, tokenizer
    from kvspeed import unpatch_model
    from kvspeed.state import state_of

    if state_of(model) is not None:
        unpatch_model(model)
