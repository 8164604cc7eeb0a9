"""One small Ray cluster for all tests that need one: two CPUs, loopback, no dashboard; it ends with them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from specgraft.config import StreamSection


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'specgraft[ray]'")
    from specgraft.stream.cluster import connect, ray

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])  # actors read `media`
    try:
        assert connect(StreamSection(producers=2, cpus=0.9, bound_mb=60))
        yield
    finally:
        ray().shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
