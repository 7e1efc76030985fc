"""What goes wrong with a file says which file it was."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outcomes import EVERY_WAY
from PIL import Image, UnidentifiedImageError

from aioload import ErrorContext, FileDataset, ImageFolder, error_context


def to_number(data: bytes, _: int) -> int:
    return int(data)


def numbered_files(folder: Path) -> FileDataset[int]:
    """Return a dataset of the numbers 0 to 3, of whose files number 2 is missing."""
    for index in (0, 1, 3):
        (folder / str(index)).write_text(str(index))
    return FileDataset([folder / str(index) for index in range(4)], to_number)


def remove(_: Path) -> None:
    pass


def make_folder(path: Path) -> None:
    path.mkdir()


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_unreadable(path: Path) -> None:
    path.write_text("2")
    path.chmod(0)


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (remove, FileNotFoundError),
        (make_folder, IsADirectoryError),
        (make_dangling_link, FileNotFoundError),
        (make_loop, OSError),
        pytest.param(
            make_unreadable,
            PermissionError,
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file"),
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    spoil: Callable[[Path], None], kind: type[OSError], tmp_path: Path
) -> None:
    dataset = numbered_files(tmp_path)
    path = tmp_path / "2"
    spoil(path)
    for load in EVERY_WAY:
        zero, one, error, three = load(dataset)
        assert (zero, one, three) == ([0], [1], [3])
        assert isinstance(error, kind)
        assert error.filename == str(path)
        assert error_context(error) == ErrorContext(2, path, "read")
        assert error.__notes__ == [f"aioload: failed at stage 'read', index 2, location {str(path)!r}"]


def test_content_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    dataset = numbered_files(tmp_path)
    (tmp_path / "2").write_text("two")
    for load in EVERY_WAY:
        zero, one, error, three = load(dataset)
        assert (zero, one, type(error), three) == ([0], [1], ValueError, [3])
        assert error_context(error) == ErrorContext(2, tmp_path / "2", "decode")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scramble(path: Path) -> None:
    path.write_bytes(b"no image at all")


@pytest.mark.parametrize(
    ("spoil", "kind", "text", "stage"),
    [
        (cut, OSError, "truncated", "decode"),
        (empty, OSError, r"empty file \(0 bytes\)", "decode"),
        (scramble, UnidentifiedImageError, "cannot identify", "decode"),
        (Path.unlink, FileNotFoundError, "No such file", "read"),
    ],
)
def test_an_image_that_is_broken_is_named(
    spoil: Callable[[Path], None], kind: type[OSError], text: str, stage: str, tmp_path: Path
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        Image.linear_gradient("L").convert("RGB").save(tmp_path / name / "1.jpg", quality=95)
    dataset = ImageFolder(tmp_path)
    path = tmp_path / "b" / "1.jpg"
    spoil(path)
    for load in EVERY_WAY:
        before, error, after = load(dataset)
        assert (before[1].tolist(), after[1].tolist()) == ([0], [2])
        with pytest.raises(kind, match=text) as caught:
            raise error
        assert caught.value is error
        assert error_context(error) == ErrorContext(1, str(path), stage)
        assert str(path) in error.__notes__[-1]


def test_a_transform_that_fails_is_a_failure_to_decode(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "a" / "1.png")
    error = LookupError("transform")

    def transform(_: Any) -> Any:
        raise error

    for load in EVERY_WAY:
        assert load(ImageFolder(tmp_path, transform)) == [error]
        assert error_context(error) == ErrorContext(0, str(tmp_path / "a" / "1.png"), "decode")
