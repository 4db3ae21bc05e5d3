from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.pool import ProcessPool

# One seed for everyone: a failure here is a failure on every machine.
settings.register_profile("gossamer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gossamer")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Four processes in one Gloo group."""
    processes = ProcessPool(4, tmp_path_factory.mktemp("pool"))
    yield processes
    processes.close()
