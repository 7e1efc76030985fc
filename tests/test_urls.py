"""Where a URL points, and what is made of what a server answers: without any server."""

from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from aioload.readers.answers import error_of_status, seconds_of_retry_after
from aioload.readers.policy import passes
from aioload.readers.urls import Place, place_of


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket/a/b", ("s3://bucket", "a/b")),
        ("S3://bucket/a%20b?c#d", ("s3://bucket", "a%20b?c#d")),
        ("abfss://fs@account.dfs.core.windows.net/a", ("abfss://fs@account.dfs.core.windows.net", "a")),
        ("memory://a/b", ("memory://", "a/b")),
        ("memory:///a/b", ("memory://", "a/b")),
        ("http://host:80/a/b%20c#d", ("http://host:80", "a/b c")),
        ("http://host/a?b", ("http://host/a?b", "")),
        ("https://host/a%2Fb", ("https://host/a%2Fb", "")),
        ("https://host", ("https://host/", "")),
    ],
)
def test_where_a_url_points(url: str, place: tuple[str, str]) -> None:
    assert place_of(url) == Place(*place)


def test_what_statuses_mean() -> None:
    kinds = {404: FileNotFoundError, 410: FileNotFoundError, 401: PermissionError, 403: PermissionError}
    for status in range(400, 600):
        error = error_of_status(status, "url")
        assert isinstance(error, kinds.get(status, OSError))
        assert passes(error) == (status in (408, 425, 429) or status >= 500), status
        assert error.filename == "url"
        assert not hasattr(error, "retry_after_s")
    assert error_of_status(503, "url", 1.5).retry_after_s == 1.5  # type: ignore[attr-defined]


def test_what_retry_after_says() -> None:
    now_s = datetime(2024, 1, 1, tzinfo=UTC).timestamp()
    later = format_datetime(datetime(2024, 1, 1, 0, 1, tzinfo=UTC), usegmt=True)
    assert seconds_of_retry_after("120", now_s) == 120
    assert seconds_of_retry_after(later, now_s) == 60
    assert seconds_of_retry_after(later, now_s + 100) == 0
    assert seconds_of_retry_after("-1", now_s) == 0
    for nonsense in ("", "soon", "inf", "nan", "Mon, 99 Jan 2024"):
        assert seconds_of_retry_after(nonsense, now_s) is None
