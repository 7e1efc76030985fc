"""Sample files: the two sets of files that are loaded, made once and kept."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

NUM_FLOATS = 992
NPY_HEADER_BYTES = 128
JPEG_SIZE = (500, 375)


def cache_folder() -> Path:
    """Return where files are kept unless another place is asked for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioload-benchmarks"


def npy_files(root: Path, num_files: int = 20_000) -> list[str]:
    """Return the paths of ``.npy`` files of 4 KB: a header of 128 bytes and 992 float32."""
    return _made_once(root / f"npy-{num_files}", num_files, "{:06d}.npy", _write_npy_files)


def jpeg_files(root: Path, num_files: int = 2_000) -> list[str]:
    """Return the paths of JPEG photos of 500 x 375 pixels."""
    return _made_once(root / f"jpeg-{num_files}", num_files, "{:05d}.jpg", _write_jpeg_files)


def _made_once(folder: Path, num_files: int, name: str, write: Callable[[list[Path]], None]) -> list[str]:
    """Let ``write`` make the files in a folder that gets its name only when it is complete."""
    names = [name.format(number) for number in range(num_files)]
    if not folder.exists():
        print(f"making {num_files:,} files in {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
        write([unfinished / name for name in names])
        unfinished.rename(folder)
    return [str(folder / name) for name in names]


def _write_npy_files(paths: list[Path]) -> None:
    rng = np.random.default_rng(0)
    for path in paths:
        np.save(path, rng.random(NUM_FLOATS, dtype=np.float32))


def _write_jpeg_files(paths: list[Path]) -> None:
    rng = np.random.default_rng(0)
    photos = _photos()
    for number, path in enumerate(paths):
        _variant(photos[number % len(photos)], rng).save(path, quality=90)


def _photos() -> list[Image.Image]:
    """Return the colour photos that scikit-learn and scikit-image carry in their packages."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    arrays = [*load_sample_images().images, data.astronaut(), data.chelsea(), data.coffee(), data.rocket()]
    return [Image.fromarray(array) for array in arrays]


def _variant(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return a random crop of the photo, of the size and shape of all, in another light."""
    width, height = JPEG_SIZE
    scale = min(photo.width / width, photo.height / height) * rng.uniform(0.6, 1.0)
    left = rng.uniform(0, photo.width - scale * width)
    top = rng.uniform(0, photo.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    image = photo.resize(JPEG_SIZE, Image.Resampling.BICUBIC, box=box)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(rng.uniform(0.8, 1.2))
    return image
