"""The same story with the table and the checkpoints on S3: a real protocol server on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pretrain_assets_tests.conftest import S3Server
from pretrain_assets_tests.pipeline import PipelineStory, Project, open_project


@pytest.fixture(scope="class")
def project(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        yield from open_project(tmp_path_factory.mktemp("s3") / "home", f"{s3.bucket('project')}/prefix", patch)


@pytest.mark.slow
class TestS3Story(PipelineStory):
    """The whole story on S3."""
