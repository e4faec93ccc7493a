"""Decode the body of a request into a batch: image files, base64, or arrays in JSON or raw form."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from python_multipart import create_form_parser
from torch import Tensor

from dpl.core.errors import InputError
from dpl.data.images import decode
from dpl.data.transforms import Evaluation

__all__ = ["Body", "RequestDecoder"]

_IN_MEMORY: Any = {"MAX_MEMORY_FILE_SIZE": 2**40}
INFER = "infer"  # the kind of a body of the Open Inference Protocol; its `shape` is the length of the JSON part


@dataclass(frozen=True)
class Body:
    """The body of a request: its content type, its bytes, and the header that gives the shape of an array."""

    kind: str
    content: bytes
    shape: str | None = None


@dataclass(frozen=True)
class RequestDecoder:
    """Turns requests into batches for one network; limits are checked first."""

    transform: Evaluation
    shape: tuple[int, ...]  # of one image, as the network expects it, for example (3, 224, 224)
    max_batch: int
    max_pixels: int

    def from_body(self, body: Body) -> tuple[Tensor, dict[str, Any]]:
        """Decode a body by its content type; return the images, and facts that the body has about itself."""
        kind = body.kind.partition(";")[0].strip().lower()
        if kind == INFER:
            return self._from_tensors(body)
        if kind == "multipart/form-data":
            return self._from_files(self._files(body)), {}
        if kind == "application/json":
            return self._from_json(body.content), {}
        if kind == "application/octet-stream":
            return self._from_raw(body.content, body.shape), {}
        if kind.startswith("image/"):
            return self._from_files([body.content]), {}
        raise InputError(
            f"Content-Type {kind[:80]!r}: expected multipart/form-data, application/json, "
            "application/octet-stream or image/*"
        )

    def _from_files(self, files: Sequence[bytes]) -> Tensor:
        """Decode image files; the size of each is read from its header first."""
        self._check_count(len(files))
        images = [
            self.transform(decode(data, max_pixels=self.max_pixels, name=f"image {i}", untrusted=True))
            for i, data in enumerate(files)
        ]
        return torch.stack(images)

    def _files(self, body: Body) -> list[bytes]:
        """Return the files of a form."""
        found: list[bytes] = []

        def keep(part: Any) -> None:
            self._check_count(len(found) + 1)
            part.file_object.seek(0)
            found.append(part.file_object.read())

        def refuse(_field: Any) -> None:
            raise InputError("the form has fields that are no files; expected image files only")

        headers: Any = {"Content-Type": body.kind.encode("latin-1", "replace")}
        try:
            parser = create_form_parser(headers, refuse, keep, config=_IN_MEMORY)
            parser.write(body.content)
            parser.finalize()
        except InputError:
            raise
        except Exception as error:  # the parser has assertions for what it does not expect
            raise InputError(f"body: not a valid form ({type(error).__name__}: {error})") from error
        return found

    def _from_json(self, body: bytes) -> Tensor:
        """Read {"images": [base64, ...]} or {"arrays": [nested lists of numbers]}."""
        document = self._parse(body)
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
            return self._from_files([_unbase64(i, entry) for i, entry in enumerate(entries)])
        values = _numbers(entries, "arrays")
        self._check_shape(values.shape, "arrays")
        return _finite(values)

    def _from_raw(self, body: bytes, shape: str | None) -> Tensor:
        """Read little-endian 32-bit floats; `shape` is written as `8,3,32,32`."""
        try:
            sizes = tuple(int(part) for part in (shape or "").split(","))
        except ValueError:
            sizes = ()
        self._check_shape(sizes, "header X-Shape")
        if len(body) != 4 * int(np.prod(sizes)):
            raise InputError(f"body has {len(body)} bytes: X-Shape {shape} needs {4 * int(np.prod(sizes))}")
        return _finite(np.frombuffer(body, dtype="<f4").reshape(sizes).astype(np.float32))

    def _from_tensors(self, body: Body) -> tuple[Tensor, dict[str, Any]]:
        """Read a request of the Open Inference Protocol: JSON, then the bytes of binary tensors, if there are any."""
        length = int(body.shape) if body.shape and body.shape.isdecimal() else len(body.content)
        document = self._parse(body.content[:length])
        try:
            (tensor,) = document["inputs"]
            datatype, sizes = tensor["datatype"], tuple(int(size) for size in tensor["shape"])
            facts = {"id": document["id"]} if isinstance(document.get("id"), str) else {}
            data = tensor.get("data")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError("inputs: expected one tensor with name, datatype, shape and data") from error
        if datatype != "FP32":
            raise InputError(f"datatype {str(datatype)[:20]!r}: expected FP32")
        self._check_shape(sizes, "inputs")
        if data is None:
            return self._from_raw(body.content[length:], ",".join(map(str, sizes))), facts
        if not isinstance(data, list):
            raise InputError("data: expected a list of numbers")
        values = _numbers(data, "data")
        if values.size != np.prod(sizes):
            raise InputError(f"data has {values.size} numbers: shape {','.join(map(str, sizes))} needs another count")
        return _finite(values.reshape(sizes)), facts

    def _parse(self, body: bytes) -> Any:
        """Read JSON; lists and numbers are counted before any object is built."""
        channels, height, *_ = *self.shape, 1, 1
        lists = 8 + self.max_batch * (1 + channels * (1 + height))
        numbers = 8 + self.max_batch * int(np.prod(self.shape))
        if body.count(b"[") + body.count(b"{") > lists or body.count(b",") > lists + numbers:
            raise InputError("body: nested too deeply or too many values; send fewer images, or an octet-stream")
        try:
            return json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise InputError(f"body: not valid JSON ({reason})") from error

    def _check_shape(self, shape: tuple[int, ...], what: str) -> None:
        if tuple(shape[1:]) != self.shape or shape[0] < 1:
            wanted = ",".join(map(str, self.shape))
            raise InputError(f"{what}: shape {','.join(map(str, shape[:8])) or 'missing'}; expected N,{wanted}")
        self._check_count(shape[0])

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.max_batch:
            raise InputError(f"{count} images in one request; expected 1 to {self.max_batch}")


def _numbers(lists: list[Any], what: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
    try:
        values = np.array(lists)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what}: lists have different lengths; expected one rectangular block of numbers") from error
    if values.dtype.kind not in "fiu":
        raise InputError(f"{what}: expected numbers only")
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _finite(values: "np.ndarray[Any, np.dtype[np.float32]]") -> Tensor:
    good = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not good.all():
        raise InputError(f"arrays: non-finite values in images {np.flatnonzero(~good)[:8].tolist()}; remove them")
    return torch.from_numpy(values)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unbase64(index: int, text: Any) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"image {index} is {type(text).__name__}: expected base64 text")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InputError(f"image {index}: not base64 ({error})") from error
