"""Decode the body of a request into a batch: image files, base64, or arrays in JSON or raw form."""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpl.core.errors import InputError
from dpl.data.images import decode
from dpl.data.transforms import Evaluation

__all__ = ["RequestDecoder"]


@dataclass(frozen=True)
class RequestDecoder:
    """Turns requests into batches for one network; limits are checked first."""

    transform: Evaluation
    shape: tuple[int, ...]  # of one image, as the network expects it, for example (3, 224, 224)
    max_batch: int
    max_pixels: int

    def from_body(self, kind: str, body: bytes, shape: str | None) -> Tensor:
        """Decode a body by its content type; `shape` is the header X-Shape."""
        if kind == "application/json":
            return self._from_json(body)
        if kind == "application/octet-stream":
            return self._from_raw(body, shape)
        if kind.startswith("image/"):
            return self.from_files([body])
        raise InputError(
            f"Content-Type {kind[:80]!r}: expected multipart/form-data, application/json, "
            "application/octet-stream or image/*"
        )

    def from_files(self, files: Sequence[bytes]) -> Tensor:
        """Decode image files; the size of each is read from its header first."""
        self._check_count(len(files))
        images = [
            self.transform(decode(data, max_pixels=self.max_pixels, name=f"image {i}")) for i, data in enumerate(files)
        ]
        return torch.stack(images)

    def _from_json(self, body: bytes) -> Tensor:
        """Read {"images": [base64, ...]} or {"arrays": [nested lists of numbers]}."""
        document = _parse(body)
        if not isinstance(document, dict) or len(document.keys() & {"images", "arrays"}) != 1:
            raise InputError('body: expected a JSON object with either "images" (base64) or "arrays" (nested lists)')
        unknown = sorted(set(document) - {"images", "arrays"})
        if unknown:
            raise InputError(f"body: unknown key {unknown[0][:50]!r}; expected images or arrays only")
        key, entries = next(iter(document.items()))
        if not isinstance(entries, list):
            raise InputError(f"{key} is {type(entries).__name__}: expected a list with one entry per image")
        self._check_count(len(entries))
        if key == "images":
            return self.from_files([_unbase64(i, entry) for i, entry in enumerate(entries)])
        return self._from_lists(entries)

    def _from_raw(self, body: bytes, shape: str | None) -> Tensor:
        """Read little-endian 32-bit floats; `shape` is written as `8,3,32,32`."""
        try:
            sizes = tuple(int(part) for part in (shape or "").split(","))
        except ValueError:
            sizes = ()
        self._check_shape(sizes, "header X-Shape")
        if len(body) != 4 * int(np.prod(sizes)):
            raise InputError(f"body has {len(body)} bytes: X-Shape {shape} needs {4 * int(np.prod(sizes))}")
        return self._checked(np.frombuffer(body, dtype="<f4").reshape(sizes).astype(np.float32))

    def _from_lists(self, images: list[Any]) -> Tensor:
        try:
            values = np.array(images)
        except (ValueError, RecursionError) as error:
            raise InputError(
                "arrays: lists have different lengths; expected one rectangular block of numbers"
            ) from error
        if values.dtype.kind not in "fiu":
            raise InputError("arrays: expected numbers only")
        self._check_shape(values.shape, "arrays")
        with np.errstate(over="ignore"):
            return self._checked(values.astype(np.float32))

    def _checked(self, values: "np.ndarray[Any, np.dtype[np.float32]]") -> Tensor:
        good = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not good.all():
            raise InputError(f"arrays: non-finite values in images {np.flatnonzero(~good)[:8].tolist()}; remove them")
        return torch.from_numpy(values)

    def _check_shape(self, shape: tuple[int, ...], what: str) -> None:
        if tuple(shape[1:]) != self.shape or shape[0] < 1:
            wanted = ",".join(map(str, self.shape))
            raise InputError(f"{what}: shape {','.join(map(str, shape[:8])) or 'missing'}; expected N,{wanted}")
        self._check_count(shape[0])

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.max_batch:
            raise InputError(f"{count} images in one request; expected 1 to {self.max_batch}")


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise InputError(f"body: not valid JSON ({reason})") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unbase64(index: int, text: Any) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"image {index} is {type(text).__name__}: expected base64 text")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"image {index}: not base64 ({error})") from error
