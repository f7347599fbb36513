"""One cache directory and few compiled graphs for the whole folder: each takes seconds to make."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.aoti import models
from zerogpu.aoti import CompiledGraph, aoti_compile


@pytest.fixture(scope="session", autouse=True)
def cache_dir(graph_cache: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGPU_CACHE_DIR", str(graph_cache))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield graph_cache


@pytest.fixture(scope="session")
def exported() -> torch.export.ExportedProgram:
    return models.export_mixed(models.mixed())


@pytest.fixture(scope="session")
def compiled(exported: torch.export.ExportedProgram) -> CompiledGraph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return aoti_compile(exported)


@pytest.fixture
def eager() -> models.Mixed:
    return models.mixed()


@pytest.fixture
def module(eager: models.Mixed) -> models.Mixed:
    return copy.deepcopy(eager)
