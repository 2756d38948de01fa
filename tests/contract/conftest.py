"""Real servers for the contract suites."""

from __future__ import annotations

import pytest

from tests.support.gcs_fake.process import gcs_fake
from tests.support.seaweedfs import seaweedfs_server

pytest.register_assert_rewrite("tests.contract.suite")


@pytest.fixture(scope="session")
def seaweedfs():
    with seaweedfs_server() as server:
        yield server


@pytest.fixture(scope="session")
def gcs():
    with gcs_fake() as server:
        yield server
