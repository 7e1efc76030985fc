import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError
from scripts import Nursery

from aioload.datasets import ImageError, ImageFolder, decode_image
from aioload.errors import AioloadError, ArgumentError, DatasetNotFoundError, error_context
from aioload.types import StagedDataset

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
LOSSLESS = ("PNG", "BMP", "WEBP", "GIF", "TIFF")


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    if format == "WEBP":
        options.setdefault("lossless", True)
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def pixels(*colours: Any, mode: str = "RGB") -> Image.Image:
    """An image of one row."""
    image = Image.new(mode, (len(colours), 1))
    for x, colour in enumerate(colours):
        image.putpixel((x, 0), colour)
    return image


def palette(*indices: int) -> Image.Image:
    """A palette image of one row; index 0 is red, 1 green, 2 blue."""
    image = pixels(*indices, mode="P")
    image.putpalette([*RED, *GREEN, *BLUE])
    return image


def grey16(*values: int, dtype: str = "<u2") -> Image.Image:
    return Image.fromarray(np.array([values], dtype=dtype))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    array = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(array)


def row(data: bytes, mode: str = "RGB", **options: Any) -> list[list[int]]:
    array = decode_image(data, mode, **options)
    assert array.dtype == np.uint8
    assert array.shape[0] == 1
    result: list[list[int]] = array[0].tolist()
    return result


class TestModes:
    @pytest.mark.parametrize("format", LOSSLESS)
    def test_rgb(self, format: str) -> None:
        assert row(encode(pixels(RED, GREEN, (0, 0, 255)), format)) == [[*RED], [*GREEN], [*BLUE]]

    def test_rgb_jpeg(self) -> None:
        array = decode_image(encode(Image.new("RGB", (16, 8), (200, 100, 50)), "JPEG"))
        assert array.shape == (8, 16, 3)
        assert np.abs(array.astype(int) - [200, 100, 50]).max() <= 2

    @pytest.mark.parametrize("format", LOSSLESS)
    def test_l(self, format: str) -> None:
        expected = [[v, v, v] for v in (0, 7, 255)]
        assert row(encode(pixels(0, 7, 255, mode="L"), format)) == expected

    @pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF"])
    def test_1(self, format: str) -> None:
        assert row(encode(pixels(0, 255, mode="1"), format)) == [[0, 0, 0], [255, 255, 255]]

    @pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF"])
    def test_p(self, format: str) -> None:
        assert row(encode(palette(2, 0, 1), format)) == [[*BLUE], [*RED], [*GREEN]]

    @pytest.mark.parametrize("format", ["PNG", "TIFF"])
    def test_la(self, format: str) -> None:
        data = encode(pixels((10, 0), (200, 128), mode="LA"), format)
        assert row(data) == [[10] * 3, [200] * 3]
        assert row(data, "LA") == [[10, 0], [200, 128]]

    @pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
    def test_rgba_drops_alpha_and_keeps_colours(self, format: str) -> None:
        options = {"exact": True} if format == "WEBP" else {}
        data = encode(pixels((1, 2, 3, 0), (4, 5, 6, 128), mode="RGBA"), format, **options)
        assert row(data) == [[1, 2, 3], [4, 5, 6]]
        assert row(data, "RGBA") == [[1, 2, 3, 0], [4, 5, 6, 128]]

    def test_pa(self) -> None:
        image = pixels((2, 0), (0, 128), mode="PA")
        image.putpalette([*RED, *GREEN, *BLUE])
        data = encode(image, "TIFF")
        assert Image.open(io.BytesIO(data)).mode == "PA"
        assert row(data) == [[*BLUE], [*RED]]

    @pytest.mark.parametrize("transparency", [1, b"\x80\x00"])
    def test_p_with_transparency(self, transparency: int | bytes) -> None:
        data = encode(palette(1, 0), "PNG", transparency=transparency)  # Pillow's convert() warns about bytes
        assert row(data) == [[*GREEN], [*RED]]
        assert row(data, "L") == [[150], [76]]
        assert [pixel[3] for pixel in row(data, "RGBA")] == [0, 255 if transparency == 1 else 128]

    @pytest.mark.parametrize(
        ("image", "transparency"), [(pixels(7, 9, mode="L"), 7), (pixels((7, 7, 7), (9, 9, 9)), (7, 7, 7))]
    )
    def test_a_transparent_colour(self, image: Image.Image, transparency: Any) -> None:
        data = encode(image, "PNG", transparency=transparency)
        assert row(data) == [[7] * 3, [9] * 3]
        assert row(data, "RGBA") == [[7, 7, 7, 0], [9, 9, 9, 255]]

    def test_cmyk_jpeg_of_adobe(self) -> None:
        data = encode(Image.new("CMYK", (16, 8), (0, 255, 255, 0)), "JPEG")
        assert b"Adobe" in data  # stored inverted
        assert Image.open(io.BytesIO(data)).mode == "CMYK"
        red, green, blue = decode_image(data).astype(int).reshape(-1, 3).T
        assert red.min() > 250
        assert max(green.max(), blue.max()) < 5

    def test_cmyk_tiff(self) -> None:
        assert row(encode(pixels((0, 255, 255, 0), (0, 0, 0, 255), mode="CMYK"), "TIFF")) == [[*RED], [0] * 3]

    def test_ycbcr(self) -> None:
        data = encode(pixels((76, 85, 255), (128, 128, 128), mode="YCbCr"), "TIFF")
        assert Image.open(io.BytesIO(data)).mode == "YCbCr"
        assert np.abs(np.array(row(data)) - [RED, (128, 128, 128)]).max() <= 1

    def test_lab(self) -> None:
        data = encode(pixels((255, 128, 128), (0, 128, 128), mode="LAB"), "TIFF")
        assert Image.open(io.BytesIO(data)).mode == "LAB"
        assert np.abs(np.array(row(data)) - [[255] * 3, [0] * 3]).max() <= 1
        assert np.abs(np.array(row(data, "L")) - [[255], [0]]).max() <= 1

    @pytest.mark.parametrize(
        ("format", "dtype", "mode"),
        [("PNG", "<u2", "I;16"), ("TIFF", "<u2", "I;16"), ("TIFF", ">u2", "I;16B"), ("PPM", "<u2", "I")],
    )
    def test_16_bit_grey_is_scaled_not_clipped(self, format: str, dtype: str, mode: str) -> None:
        data = encode(grey16(0, 255, 256, 0x80FF, 0xFFFF, dtype=dtype), format)
        assert Image.open(io.BytesIO(data)).mode == mode
        assert row(data, "L") == [[0], [0], [1], [0x80], [0xFF]]
        assert row(data) == [[v] * 3 for v in (0, 0, 1, 0x80, 0xFF)]

    def test_16_bit_grey_with_a_transparent_value(self) -> None:
        data = encode(grey16(0x8001, 0x8002), "PNG", transparency=0x8002)
        assert row(data) == [[0x80] * 3] * 2
        assert row(data, "LA") == [[0x80, 255], [0x80, 0]]

    def test_16_bit_colour_agrees_with_16_bit_grey(self) -> None:
        ppm = b"P6 1 1 65535\n" + bytes([0x12, 0x34, 0x80, 0xFF, 0xFF, 0xFF])
        assert row(ppm) == [[0x12, 0x80, 0xFF]]

    @pytest.mark.parametrize("dtype", ["i4", "f4"])
    def test_32_bit_grey_is_clipped(self, dtype: str) -> None:
        data = encode(Image.fromarray(np.array([[-5, 0, 200, 70000]], dtype)), "TIFF")
        assert Image.open(io.BytesIO(data)).mode == {"i4": "I", "f4": "F"}[dtype]
        assert row(data) == [[v] * 3 for v in (0, 0, 200, 255)]

    @pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
    @pytest.mark.parametrize(
        ("source", "format"),
        [
            *[(mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
            *[(mode, "JPEG") for mode in ("L", "RGB", "CMYK")],
            *[(mode, "TIFF") for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "I;16", "I", "F")],
        ],
    )
    def test_every_mode_gives_every_mode(self, source: str, format: str, mode: str) -> None:
        image = grey16(*[255 * 257] * 8) if source == "I;16" else Image.new("L", (8, 1), 255).convert(source)
        channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}[mode]
        array = decode_image(encode(image, format), mode)
        assert array.shape == (1, 8, channels)
        assert (array == 255).all()

    def test_an_unknown_mode_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="mode must be one of 'L', 'LA', 'RGB', 'RGBA', got 'BGR'"):
            decode_image(encode(pixels(RED), "PNG"), "BGR")


class TestFrames:
    @pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
    def test_the_first_frame_counts(self, format: str) -> None:
        first, second, third = pixels(RED, GREEN), pixels(BLUE, BLUE), pixels(GREEN, RED)
        data = encode(first, format, save_all=True, append_images=[second, third])
        assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
        assert row(data) == [[*RED], [*GREEN]]

    def test_a_gif_with_transparency(self) -> None:
        more = [palette(2, 2), palette(0, 0)]
        data = encode(palette(1, 0), "GIF", save_all=True, append_images=more, transparency=1, disposal=2, loop=0)
        assert row(data) == [[*GREEN], [*RED]]
        assert row(data, "RGBA") == [[*GREEN, 0], [*RED, 255]]


UPRIGHT = {
    1: [[1, 2, 3], [4, 5, 6]],
    2: [[3, 2, 1], [6, 5, 4]],
    3: [[6, 5, 4], [3, 2, 1]],
    4: [[4, 5, 6], [1, 2, 3]],
    5: [[1, 4], [2, 5], [3, 6]],
    6: [[4, 1], [5, 2], [6, 3]],
    7: [[6, 3], [5, 2], [4, 1]],
    8: [[3, 6], [2, 5], [1, 4]],
}


class TestOrientation:
    @pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "TIFF lzw"])
    @pytest.mark.parametrize("tag", UPRIGHT)
    def test_stored_or_upright(self, format: str, tag: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = tag
        image = Image.fromarray(np.array(UPRIGHT[1], np.uint8))
        name, *compression = format.split()
        options = {"compression": "tiff_lzw"} if compression else {}
        data = encode(image, name, exif=exif, **options)
        assert decode_image(data)[:, :, 0].tolist() == UPRIGHT[tag]
        assert decode_image(data, "L")[:, :, 0].tolist() == UPRIGHT[tag]
        assert decode_image(data, orientation=False)[:, :, 0].tolist() == UPRIGHT[1]
        assert decode_image(data, max_pixels=6)[:, :, 0].tolist() == UPRIGHT[tag]

    def test_16_bit_grey_is_turned_too(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        assert decode_image(encode(grey16(0x100, 0x200), "PNG", exif=exif), "L").tolist() == [[[1]], [[2]]]

    def test_jpeg(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        data = encode(noise(32, 16), "JPEG", exif=exif)
        stored = decode_image(data, orientation=False)
        assert stored.shape == (16, 32, 3)
        assert np.array_equal(decode_image(data), np.rot90(stored, -1))

    @pytest.mark.parametrize("block", [b"", b"Exif\x00\x00", b"Exif\x00\x00nonsense", b"nonsense"])
    @pytest.mark.parametrize("format", ["PNG", "JPEG"])
    def test_a_broken_exif_block_is_ignored(self, format: str, block: bytes) -> None:
        assert decode_image(encode(noise(8, 4), format, exif=block)).shape == (4, 8, 3)


class TestBrokenFiles:
    def test_empty(self) -> None:
        with pytest.raises(ImageError, match=r"empty file \(0 bytes\)") as caught:
            decode_image(b"")
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value, AioloadError)

    @pytest.mark.parametrize("max_pixels", [None, 10_000])
    @pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF"])
    def test_truncated(self, format: str, max_pixels: int | None) -> None:
        data = encode(noise(40, 30), format)
        options = {"orientation": True, "max_pixels": max_pixels}
        assert decode_image(data, **options).shape == (30, 40, 3)  # type: ignore[arg-type]
        for percent in (60, 90):
            cut = data[: len(data) * percent // 100]
            with pytest.raises(OSError, match=r"."):
                decode_image(cut, **options)  # type: ignore[arg-type]
        assert not ImageFile.LOAD_TRUNCATED_IMAGES

    @pytest.mark.parametrize("max_pixels", [None, 10_000])
    @pytest.mark.parametrize("data", [b"x", b"not an image at all", b"\xff\xd8\xff", b"GIF89a"])
    def test_what_is_no_image(self, data: bytes, max_pixels: int | None) -> None:
        with pytest.raises(UnidentifiedImageError, match="cannot identify image file"):
            decode_image(data, max_pixels=max_pixels)

    def test_broken_content_is_an_os_error_whatever_pillow_raises(self) -> None:
        data = bytearray(encode(noise(40, 30), "PNG", compress_level=0))
        start = data.index(b"IDAT")
        data[start + 3] = 0x01  # no longer the name of a chunk
        with pytest.raises(OSError, match=r"."):
            decode_image(bytes(data))
        with pytest.raises(ImageError, match=r"broken image file \(.* bytes\): Truncated IHDR chunk") as caught:
            decode_image(data[:8] + b"\0\0\0\x01IHDR\0" + b"\x93\x19\x2b\x5e" + data[33:])
        assert isinstance(caught.value.__cause__, ValueError)


class TestMaxPixels:
    @pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM"])
    def test_an_image_over_the_limit_is_refused(self, format: str) -> None:
        data = encode(noise(20, 10), format)
        assert decode_image(data, max_pixels=200).shape == (10, 20, 3)
        with pytest.raises(ImageError, match="20x10 = 200 pixels is over max_pixels=199"):
            decode_image(data, max_pixels=199)

    def test_the_header_is_enough_to_refuse(self) -> None:
        data = encode(noise(20, 10), "PNG")
        header = data[: data.index(b"IDAT") + 4]
        with pytest.raises(ImageError, match="over max_pixels"):
            decode_image(header, max_pixels=199)

    @pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP"])
    def test_it_stands_in_for_the_guard_of_pillow(self, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
        data = encode(noise(20, 10), format)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
        with pytest.raises(Image.DecompressionBombError):
            decode_image(data)
        assert decode_image(data, max_pixels=200).shape == (10, 20, 3)
        assert Image.MAX_IMAGE_PIXELS == 50

    @pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "WEBP"])
    def test_within_it_pillow_does_not_warn(self, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
        data = encode(noise(20, 10), format)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)
        with pytest.warns(Image.DecompressionBombWarning):
            decode_image(data)
        assert decode_image(data, max_pixels=200).shape == (10, 20, 3)

    @pytest.mark.parametrize("max_pixels", [0, -1])
    def test_it_must_be_positive(self, max_pixels: int) -> None:
        with pytest.raises(ArgumentError, match=f"max_pixels must be at least 1.*got {max_pixels}"):
            decode_image(b"data", max_pixels=max_pixels)


class TestArray:
    @pytest.mark.parametrize("mode", ["L", "RGB"])
    def test_it_owns_writable_memory(self, mode: str) -> None:
        data = encode(pixels(RED), "PNG")
        array = decode_image(data, mode)
        assert array.flags.owndata
        assert array.flags.writeable
        assert array.flags.c_contiguous
        tensor = torch.from_numpy(array)  # a warning would be an error
        before = tensor.clone()
        tensor += 1
        assert torch.equal(torch.from_numpy(decode_image(data, mode)), before)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_kind_of_bytes(self, kind: Callable[[bytes], Any]) -> None:
        assert row(kind(encode(pixels(RED), "PNG"))) == [[*RED]]

    def test_threads_decode_at_once(self) -> None:
        files = [
            encode(noise(60, 40, seed), format)
            for seed, format in enumerate(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"] * 4)
        ]
        expected = [decode_image(data) for data in files]
        with ThreadPoolExecutor(8) as pool:
            for array, data in zip(expected * 5, pool.map(decode_image, files * 5), strict=True):
                assert np.array_equal(array, data)

    @pytest.mark.parametrize("max_pixels", [None, 1])
    def test_the_first_files_of_a_process_may_meet_in_threads(self, nursery: Nursery, max_pixels: int | None) -> None:
        # In its own process, since Pillow registers formats once.
        files = [encode(pixels(RED), format) for format in ("WEBP", "TIFF", "GIF", "PNG", "BMP")]
        program = (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "from aioload.datasets import decode_image\n"
            f"files = {files!r} * 8\n"
            "with ThreadPoolExecutor(8) as pool:\n"
            f"    decoded = list(pool.map(lambda data: decode_image(data, max_pixels={max_pixels}), files))\n"
            "assert all(array.tolist() == [[[255, 0, 0]]] for array in decoded)\n"
        )
        nursery.run_quietly(program)


def save(path: Path, colour: tuple[int, int, int] = RED) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix.lower()
    format = {".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF"}.get(suffix, suffix[1:].upper())
    path.write_bytes(encode(Image.new("RGB", (4, 2), colour), format))
    return str(path)


def touch(root: Path, *names: str) -> list[str]:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return [str(root / name) for name in names]


def red_of(image: NDArray[np.uint8]) -> int:
    return int(image[0, 0, 0])


class TestListing:
    def test_classes_and_samples(self, tmp_path: Path) -> None:
        paths = touch(tmp_path, "cat/10.png", "cat/9.jpg", "dog/a.jpg", "ant/.hidden.png")
        touch(tmp_path, "readme.txt", "stray.png", "cat/notes.txt", "cat/jpg", "cat/x.jpg.bak", "cat/x.png_")
        folder = ImageFolder(tmp_path)
        assert folder.classes == ["ant", "cat", "dog"]
        assert folder.class_to_idx == {"ant": 0, "cat": 1, "dog": 2}
        assert folder.samples == [(paths[3], 0), (paths[0], 1), (paths[1], 1), (paths[2], 2)]
        assert folder.targets == [0, 1, 1, 2]
        assert len(folder) == 4
        assert ImageFolder(str(tmp_path) + "/").samples == folder.samples

    def test_every_suffix_in_any_case(self, tmp_path: Path) -> None:
        suffixes = ["bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"]
        names = [f"c/{case(suffix)}.{case(suffix)}" for suffix in suffixes for case in (str.lower, str.upper)]
        paths = touch(tmp_path, *names)
        assert [path for path, _ in ImageFolder(tmp_path).samples] == sorted(paths)

    def test_folders_are_sorted_by_path_before_files(self, tmp_path: Path) -> None:
        paths = touch(tmp_path, "c/z.png", "c/a/2.png", "c/a/b/1.png", "c/a-b/3.png", "c/a b/4.png", "c/B/5.png")
        expected = [
            os.path.join(folder, file) for folder, _, files in sorted(os.walk(tmp_path / "c")) for file in sorted(files)
        ]
        assert sorted(expected) == sorted(paths)
        assert [path for path, _ in ImageFolder(tmp_path).samples] == expected

    def test_links_are_followed(self, tmp_path: Path) -> None:
        touch(tmp_path, "store/cats/1.png", "store/more/2.png", "store/3.png")
        root = tmp_path / "root"
        (root / "dog").mkdir(parents=True)
        (root / "cat").symlink_to(tmp_path / "store/cats")
        (root / "dog/deep").symlink_to(tmp_path / "store/more")
        (root / "dog/file.png").symlink_to(tmp_path / "store/3.png")
        assert ImageFolder(root).samples == [
            (str(root / "cat/1.png"), 0),
            (str(root / "dog/file.png"), 1),
            (str(root / "dog/deep/2.png"), 1),
        ]

    def test_loops_of_links_end(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        paths = touch(root, "a/1.png", "b/2.png")
        (root / "a/root").symlink_to(root)
        (root / "a/self").symlink_to(root / "a")
        (root / "all").symlink_to(root)
        (root / "a/circle.png").symlink_to(root / "a/circle.png")
        (root / "a/circle").symlink_to(root / "a/circle")
        folder = ImageFolder(root)
        assert folder.classes == ["a", "b"]
        assert folder.samples == [(paths[0], 0), (str(root / "a/circle.png"), 0), (paths[1], 1)]

    def test_links_to_each_other_end(self, tmp_path: Path) -> None:
        paths = touch(tmp_path, "a/1.png", "b/2.png")
        (tmp_path / "a/to_b").symlink_to(tmp_path / "b")
        (tmp_path / "b/to_a").symlink_to(tmp_path / "a")
        found = [path for path, _ in ImageFolder(tmp_path).samples]
        assert found == [paths[0], f"{tmp_path}/a/to_b/2.png", paths[1], f"{tmp_path}/b/to_a/1.png"]

    def test_a_broken_link_fails_when_it_is_read(self, tmp_path: Path) -> None:
        save(tmp_path / "a/1.png")
        (tmp_path / "a/2.png").symlink_to(tmp_path / "gone.png")
        folder = ImageFolder(tmp_path)
        assert len(folder) == 2
        with pytest.raises(FileNotFoundError):
            folder[1]

    def test_a_root_without_folders(self, tmp_path: Path) -> None:
        touch(tmp_path, "1.png", "2.png")
        with pytest.raises(DatasetNotFoundError, match=r"folder per class in '.*', found 2 files and no folder"):
            ImageFolder(tmp_path)

    def test_classes_without_images_are_named(self, tmp_path: Path) -> None:
        touch(tmp_path, "ant/1.png", "bee/notes.txt", "cat/1.png")
        (tmp_path / "dog").mkdir()
        with pytest.raises(DatasetNotFoundError, match=r"found none in 'bee', 'dog'; add images") as caught:
            ImageFolder(tmp_path)
        assert isinstance(caught.value, FileNotFoundError)
        assert isinstance(caught.value, AioloadError)

    def test_a_root_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            ImageFolder(tmp_path / "missing")
        assert caught.value.filename == str(tmp_path / "missing")

    def test_no_file_is_asked_for_its_status(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        touch(tmp_path, *[f"{name}/{i}.png" for name in "ab" for i in range(100)])

        def refuse(*args: object, **kwargs: object) -> None:
            pytest.fail("a status was asked for")

        with monkeypatch.context() as patch:
            for call in ("stat", "lstat", "open"):
                patch.setattr(os, call, refuse)
            assert len(ImageFolder(str(tmp_path))) == 200


class TestImageFolder:
    def test_samples_are_images_with_their_class(self, tmp_path: Path) -> None:
        save(tmp_path / "a/1.png", RED)
        save(tmp_path / "b/1.bmp", BLUE)
        folder = ImageFolder(tmp_path)
        image, target = folder[1]
        assert (image == BLUE).all()
        assert image.shape == (2, 4, 3)
        assert image.dtype == np.uint8
        assert target == 1
        assert (folder[-2][0] == RED).all()
        with pytest.raises(IndexError):
            folder[2]

    def test_is_staged(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a/1.png", GREEN)
        folder = ImageFolder(tmp_path)
        assert isinstance(folder, StagedDataset)
        assert folder.location(0) == folder.location(-1) == path
        image, target = folder.decode(encode(pixels(BLUE), "PNG"), 0)
        assert (image.tolist(), target) == ([[[*BLUE]]], 0)

    def test_the_transform_gets_the_array(self, tmp_path: Path) -> None:
        save(tmp_path / "a/1.png", (3, 4, 5))
        assert ImageFolder(tmp_path, transform=red_of)[0] == (3, 0)
        assert ImageFolder(tmp_path, red_of).decode(encode(pixels(RED), "PNG"), 0) == (255, 0)

    def test_options_reach_the_decoder(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        (tmp_path / "a").mkdir()
        (tmp_path / "a/1.png").write_bytes(encode(Image.new("RGB", (4, 2)), "PNG", exif=exif))
        assert ImageFolder(tmp_path, mode="L")[0][0].shape == (4, 2, 1)
        assert ImageFolder(tmp_path, orientation=False)[0][0].shape == (2, 4, 3)
        with pytest.raises(ImageError, match="over max_pixels=7"):
            ImageFolder(tmp_path, max_pixels=7)[0]
        with pytest.raises(ArgumentError, match="mode"):
            ImageFolder(tmp_path, mode="CMY")
        with pytest.raises(ArgumentError, match="max_pixels"):
            ImageFolder(tmp_path, max_pixels=0)

    def test_an_error_says_which_file_it_was(self, tmp_path: Path) -> None:
        save(tmp_path / "a/1.png")
        touch(tmp_path, "a/2.png")
        with pytest.raises(OSError, match=r"empty file \(0 bytes\)") as caught:
            ImageFolder(tmp_path)[1]
        assert error_context(caught.value) == (1, str(tmp_path / "a/2.png"), "decode")

    def test_pickles_with_its_transform(self, tmp_path: Path) -> None:
        save(tmp_path / "a/1.png")
        folder = ImageFolder(tmp_path, red_of, mode="L", max_pixels=100)
        copy = pickle.loads(pickle.dumps(folder))
        assert copy.samples == folder.samples
        assert copy[0] == folder[0] == (76, 0)

    def test_works_in_the_loader_of_torch(self, tmp_path: Path) -> None:
        for i, colour in enumerate([RED, GREEN, BLUE]):
            save(tmp_path / f"{i}/1.png", colour)
        loader = torch.utils.data.DataLoader(ImageFolder(tmp_path), batch_size=2, num_workers=0)
        (first, first_targets), (second, second_targets) = loader
        assert first.shape == (2, 2, 4, 3)
        assert first[1].unique(dim=0).tolist() == [[[*GREEN]] * 4]
        assert first_targets.tolist() == [0, 1]
        assert second[0, 0, 0].tolist() == [*BLUE]
        assert second_targets.tolist() == [2]
