"""A versioned segment of named tensors in shared memory: one process writes, others map the same pages.

For weights on their way from learner to engines on one node. A segment is a file (in /dev/shm, or any folder) with
two buffers: version n+1 is written while n stays readable, and a buffer under construction carries no version. What
was written is described by a `Manifest`, small and picklable, which travels by other means; `read` gives tensors only
if the segment still holds exactly what the manifest says. It knows nothing of models: tied tensors are the caller's
to pass once.

File: 4096 bytes of header (int64 lanes, see `_Lane`), the table as JSON, then the two buffers. Every tensor begins at
a multiple of 64 bytes; the gap behind it is zero and counts in its checksum.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlneuron.device.oplog import host_copy

MAGIC = 0x524C4E53484D31  # "RLNSHM1"
_HEADER_BYTES = 4096
_ALIGNMENT = 64
_WRITING = -1


class _Lane(IntEnum):
    """int64 lanes of the header."""

    MAGIC = 0
    TABLE_BYTES = 1
    BUFFER_BYTES = 2
    VERSION_0 = 3  # version in buffer 0, or _WRITING
    VERSION_1 = 4


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor of a segment; `dtype` is torch's name without "torch."."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What one `write` put into a segment."""

    path: str
    version: int
    buffer: int
    """Which of the two buffers holds it."""
    count: int
    """Number of tensors."""
    specs: dict[str, TensorSpec]
    checksums: dict[str, int]
    """Sum of each tensor's memory as int64 lanes, modulo 2^64."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        return Manifest(**{**data, "specs": _specs_from_json(data["specs"])})


def _specs_from_json(data: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(spec["shape"]), spec["dtype"]) for name, spec in data.items()}


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    assert isinstance(dtype, torch.dtype), spec.dtype
    return dtype


def _padded_bytes(spec: TensorSpec) -> int:
    num_bytes = _dtype(spec).itemsize
    for size in spec.shape:
        num_bytes *= size
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def checksum(lanes: Tensor) -> int:
    """Sum of an int64 tensor, wrapped: one pass at memory speed."""
    return int(lanes.sum())


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        Path(path).unlink(missing_ok=True)


class SharedTensors:
    """One mapping of a segment. Make it with `create` (the writer) or `open` (readers).

    Not for two writers, nor for threads that write. The file goes when the writer closes it or exits; mappings that
    are still open stay valid until they are dropped.
    """

    def __init__(self, path: Path, memory: Tensor, specs: dict[str, TensorSpec], *, owner: bool) -> None:
        self.path = path
        self.specs = specs
        self._memory = memory
        self._header = memory[:_HEADER_BYTES].view(torch.int64)
        start = _HEADER_BYTES + int(self._header[_Lane.TABLE_BYTES])
        size = int(self._header[_Lane.BUFFER_BYTES])
        self._buffers = [memory[start + i * size : start + (i + 1) * size] for i in range(2)]
        self._version = 0
        self._finalizer = weakref.finalize(self, _unlink, str(path), os.getpid()) if owner else None

    @staticmethod
    def create(path: str | Path, tensors: Mapping[str, Tensor | TensorSpec]) -> SharedTensors:
        """A new segment for tensors of these shapes and dtypes; a file left over at `path` is replaced.

        Raises OSError naming needed and free bytes when the folder's file system is too small.
        """
        path = Path(path)
        specs = {name: x if isinstance(x, TensorSpec) else spec_of(x) for name, x in tensors.items()}
        table = json.dumps({name: asdict(spec) for name, spec in specs.items()}).encode()
        table_bytes = -(-len(table) // _ALIGNMENT) * _ALIGNMENT
        buffer_bytes = sum(map(_padded_bytes, specs.values()))
        total_bytes = _HEADER_BYTES + table_bytes + 2 * buffer_bytes
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserved now: a full tmpfs would otherwise kill the process by SIGBUS in the middle of a write.
            os.posix_fallocate(descriptor, 0, total_bytes)
        except OSError as error:
            path.unlink()
            stats = os.statvfs(path.parent)
            raise OSError(
                error.errno, f"{path}: {total_bytes} bytes needed, {stats.f_bavail * stats.f_frsize} free there"
            ) from error
        finally:
            os.close(descriptor)
        memory = torch.from_file(str(path), shared=True, size=total_bytes, dtype=torch.uint8)
        memory[_HEADER_BYTES : _HEADER_BYTES + len(table)] = torch.frombuffer(bytearray(table), dtype=torch.uint8)
        memory[_HEADER_BYTES + len(table) : _HEADER_BYTES + table_bytes] = ord(" ")
        header = memory[:_HEADER_BYTES].view(torch.int64)
        header[_Lane.TABLE_BYTES], header[_Lane.BUFFER_BYTES] = table_bytes, buffer_bytes
        header[_Lane.VERSION_0] = header[_Lane.VERSION_1] = _WRITING
        header[_Lane.MAGIC] = MAGIC
        return SharedTensors(path, memory, specs, owner=True)

    @staticmethod
    def open(path: str | Path) -> SharedTensors:
        """Maps an existing segment. Raises ValueError if the file is none."""
        path = Path(path)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"shared tensors: {path} cannot be opened: {error.strerror}.") from error
        if size < _HEADER_BYTES:
            raise ValueError(f"shared tensors: {path} has {size} bytes and is no segment.")
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        header = memory[:_HEADER_BYTES].view(torch.int64)
        table_bytes, buffer_bytes = int(header[_Lane.TABLE_BYTES]), int(header[_Lane.BUFFER_BYTES])
        if int(header[_Lane.MAGIC]) != MAGIC or size != _HEADER_BYTES + table_bytes + 2 * buffer_bytes:
            raise ValueError(f"shared tensors: {path} is no segment, or one that is still being made.")
        table = json.loads(bytes(memory[_HEADER_BYTES : _HEADER_BYTES + table_bytes].tolist()))
        return SharedTensors(path, memory, _specs_from_json(table), owner=False)

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Copies `tensors` (of any device) in as `version`, which must grow. ValueError if they are not the table's."""
        assert version > self._version, f"version {version} does not follow {self._version}"
        _compare("the tensors given", {name: spec_of(x) for name, x in tensors.items()}, self.specs)
        buffer = 0 if int(self._header[_Lane.VERSION_0]) != self._version else 1
        lane = _Lane.VERSION_0 + buffer
        self._header[lane] = _WRITING
        with host_copy():
            for name, view in self._views(buffer).items():
                view.copy_(tensors[name].detach())
        checksums = self._checksums(buffer)
        self._header[lane] = version
        self._version = version
        return Manifest(
            path=str(self.path),
            version=version,
            buffer=buffer,
            count=len(self.specs),
            specs=dict(self.specs),
            checksums=checksums,
        )

    def read(self, manifest: Manifest) -> dict[str, Tensor]:
        """The tensors that `manifest` describes, as CPU views of the shared pages: do not write to them.

        They hold until the writer's second `write` from here. Raises ValueError naming the difference if the segment
        does not hold exactly what the manifest says: version, names, shapes, dtypes, count, checksums.
        """
        if manifest.count != len(manifest.specs):
            raise ValueError(f"shared tensors: count is {manifest.count} for {len(manifest.specs)} names.")
        _compare("the manifest", manifest.specs, self.specs)
        self._check_version(manifest)
        checksums = self._checksums(manifest.buffer)
        self._check_version(manifest)
        wrong = [name for name in self.specs if checksums[name] != manifest.checksums.get(name)]
        if wrong:
            raise ValueError(f"shared tensors: the checksum of {wrong[0]} and {len(wrong) - 1} others does not match.")
        return self._views(manifest.buffer)

    def close(self, *, unlink: bool = False) -> None:
        """Removes the file if `unlink` (the writer's). The mapping itself goes with the last view."""
        if unlink:
            self.path.unlink(missing_ok=True)
        if self._finalizer is not None and unlink:
            self._finalizer.detach()

    def _check_version(self, manifest: Manifest) -> None:
        held = [int(self._header[lane]) for lane in (_Lane.VERSION_0, _Lane.VERSION_1)]
        if manifest.buffer not in (0, 1) or held[manifest.buffer] != manifest.version:
            now = max(held)
            raise ValueError(
                f"shared tensors: version {manifest.version} is not in the segment, which holds "
                f"{'none yet' if now == _WRITING else now}; it was overwritten or is still being written."
            )

    def _regions(self, buffer: int) -> dict[str, Tensor]:
        """Each tensor's bytes, gap included."""
        start, regions = 0, {}
        for name, spec in self.specs.items():
            regions[name] = self._buffers[buffer][start : start + _padded_bytes(spec)]
            start += _padded_bytes(spec)
        return regions

    def _views(self, buffer: int) -> dict[str, Tensor]:
        views = {}
        for name, region in self._regions(buffer).items():
            spec = self.specs[name]
            flat = region.view(_dtype(spec))
            count = torch.Size(spec.shape).numel()
            views[name] = flat[:count].view(spec.shape)
        return views

    def _checksums(self, buffer: int) -> dict[str, int]:
        return {name: checksum(region.view(torch.int64)) for name, region in self._regions(buffer).items()}


def _compare(what: str, given: Mapping[str, TensorSpec], held: Mapping[str, TensorSpec]) -> None:
    """Raises ValueError with the first differences of names, shapes and dtypes."""
    missing, unexpected = sorted(set(held) - set(given)), sorted(set(given) - set(held))
    if missing or unexpected:
        raise ValueError(
            f"shared tensors: {what} has {len(given)} names, the segment {len(held)}: missing {missing[:3] or 'none'}, "
            f"unexpected {unexpected[:3] or 'none'}."
        )
    for name, spec in given.items():
        if spec != held[name]:
            raise ValueError(
                f"shared tensors: {name} is {list(spec.shape)} {spec.dtype} in {what}, "
                f"{list(held[name].shape)} {held[name].dtype} in the segment."
            )
