"""Fixtures shared by all rooms: no network, and a real S3 server on loopback where a test asks for it."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PRETRAIN_CACHE_DIR"] = tempfile.mkdtemp(prefix="pretrain-tests-")
atexit.register(shutil.rmtree, os.environ["PRETRAIN_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: idle threads that spin would cost a core
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # and where a test wants threads, they wait without spinning


@dataclass
class S3Server:
    """A moto server; buckets are made on demand."""

    endpoint: str
    _buckets: set[str] = field(default_factory=set)

    def bucket(self, name: str) -> str:
        """Make a bucket if it is not there yet, and return its uri."""
        if name not in self._buckets:
            import boto3

            boto3.client("s3", endpoint_url=self.endpoint).create_bucket(Bucket=name)
            self._buckets.add(name)
        return f"s3://{name}"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """S3 on loopback, with the process's AWS_* variables pointing to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
            patch.setenv("AWS_ACCESS_KEY_ID", "testing")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
            patch.setenv("AWS_REGION", "us-east-1")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            _wait_for(port, server)
            yield S3Server(endpoint)
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, f"moto_server ended with code {server.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"moto_server did not listen on port {port} within {seconds} s")


LONGEST = ("test_benchmarks.py", "test_assets.py", "test_loader_equality.py", "test_train.py", "test_checkpoint.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long modules first, so that no worker is left alone with one at the end."""
    place = {name: position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI nothing skips but what cannot be required: what a test needs is installed, or the run fails."""
    report = yield
    required = item.get_closest_marker("optional") is None
    if report.skipped and required and os.environ.get("PRETRAIN_TESTS_FORBID_SKIPS"):
        report.outcome, report.longrepr = "failed", f"skipped, which CI forbids: {report.longrepr}"
    return report
