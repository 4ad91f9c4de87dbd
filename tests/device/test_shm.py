"""Shared tensors: what is written is what is read, in another process too, and nothing else is ever served."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlneuron.device.shm import Manifest, SharedTensors, TensorSpec


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(7, 5, generator=generator) * scale,
        "norm.weight": (torch.arange(3.0) * scale).bfloat16(),
        "scalar": torch.tensor(2.5 * scale, dtype=torch.float64),
        "ids": torch.arange(11) * int(scale),
        "nothing": torch.empty(0, 4),
    }


@pytest.fixture
def segment(tmp_path: Path) -> SharedTensors:
    return SharedTensors.create(tmp_path / "segment", tensors())


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_read_gives_what_was_written_and_shares_memory(segment: SharedTensors) -> None:
    manifest = segment.write(1, tensors())
    reader = SharedTensors.open(manifest.path)
    views = reader.read(manifest)
    assert_equal(views, tensors())
    assert views["ids"].data_ptr() == reader.read(manifest)["ids"].data_ptr(), "a copy was made"
    assert manifest.count == 5 and manifest.specs["norm.weight"] == TensorSpec((3,), "bfloat16")


def test_manifest_survives_json_and_pickle(segment: SharedTensors) -> None:
    manifest = segment.write(4, tensors())
    for copy in (Manifest.from_json(json.loads(json.dumps(manifest.to_json()))), pickle.loads(pickle.dumps(manifest))):
        assert copy == manifest
        assert_equal(SharedTensors.open(copy.path).read(copy), tensors())


def test_the_version_before_stays_readable_and_the_one_before_that_is_refused(segment: SharedTensors) -> None:
    reader = SharedTensors.open(segment.path)
    manifests = [segment.write(version, tensors(version)) for version in (1, 2)]
    first = reader.read(manifests[0])
    assert_equal(first, tensors(1.0))
    assert_equal(reader.read(manifests[1]), tensors(2.0))
    segment.write(3, tensors(3.0))
    with pytest.raises(ValueError, match="version 1 is not in the segment, which holds 3"):
        reader.read(manifests[0])
    assert_equal(reader.read(manifests[1]), tensors(2.0))


def test_versions_must_grow(segment: SharedTensors) -> None:
    segment.write(2, tensors())
    with pytest.raises(AssertionError, match="version 2 does not follow 2"):
        segment.write(2, tensors())


def test_an_interrupted_write_is_never_served(segment: SharedTensors) -> None:
    first, second = segment.write(1, tensors(1.0)), segment.write(2, tensors(2.0))
    broken = tensors(3.0)
    broken["ids"] = Dying(broken["ids"])
    with pytest.raises(RuntimeError, match="died"):
        segment.write(3, broken)
    with pytest.raises(ValueError, match="version 1 is not in the segment"):
        SharedTensors.open(segment.path).read(first)
    assert_equal(SharedTensors.open(segment.path).read(second), tensors(2.0))


class Dying(torch.Tensor):
    """A tensor whose copy fails, as a device that is lost in the middle of a write."""

    def __new__(cls, data: Tensor) -> Dying:
        return torch.Tensor._make_subclass(cls, data)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise RuntimeError("died")
        return super().__torch_function__(func, types, args, kwargs or {})


def renamed(values: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in values.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace(m, version=9), "version 9 is not in the segment, which holds 1"),
        (lambda m: replace(m, buffer=1 - m.buffer), "version 1 is not in the segment"),
        (lambda m: replace(m, count=4), "count is 4 for 5 names"),
        (lambda m: replace(m, specs=renamed(m.specs, "ids", "idx")), r"missing \['ids'\], unexpected \['idx'\]"),
        (lambda m: replace(m, specs={**m.specs, "ids": TensorSpec((10,), "int64")}), r"ids is \[10\] int64 in the man"),
        (lambda m: replace(m, specs={**m.specs, "ids": TensorSpec((11,), "int32")}), r"ids is \[11\] int32 in the man"),
        (lambda m: replace(m, checksums={**m.checksums, "ids": 1}), "checksum of ids and 0 others does not match"),
    ],
)
def test_a_manifest_that_differs_is_refused(segment: SharedTensors, change: Any, message: str) -> None:
    manifest = segment.write(1, tensors())
    with pytest.raises(ValueError, match=message):
        SharedTensors.open(segment.path).read(change(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: renamed(t, "ids", "module.ids"), r"missing \['ids'\], unexpected \['module.ids'\]"),
        (lambda t: {name: x for name, x in t.items() if name != "ids"}, r"4 names, the segment 5: missing \['ids'\]"),
        (lambda t: {**t, "extra": torch.zeros(1)}, r"6 names, the segment 5: missing none, unexpected \['extra'\]"),
        (lambda t: {**t, "ids": torch.arange(12)}, r"ids is \[12\] int64 in the tensors given, \[11\] int64 in"),
        (lambda t: {**t, "ids": torch.arange(11.0)}, r"ids is \[11\] float32 in the tensors given, \[11\] int64 in"),
    ],
)
def test_tensors_that_differ_are_refused_and_nothing_changes(segment: SharedTensors, change: Any, message: str) -> None:
    manifest = segment.write(1, tensors())
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            segment.write(2, change(tensors(2.0)))
    assert_equal(SharedTensors.open(segment.path).read(manifest), tensors())


def test_one_changed_byte_is_found(segment: SharedTensors) -> None:
    manifest = segment.write(1, tensors())
    reader = SharedTensors.open(segment.path)
    segment._views(manifest.buffer)["embed.weight"].view(torch.uint8)[3, 2] ^= 1
    with pytest.raises(ValueError, match=r"checksum of embed.weight and 0 others"):
        reader.read(manifest)


def test_files_that_are_no_segment_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "long").write_bytes(b"x" * 10000)
    for name, message in (
        ("absent", "No such file"),
        ("short", "1 bytes and is no segment"),
        ("long", "is no segment"),
    ):
        with pytest.raises(ValueError, match=message):
            SharedTensors.open(tmp_path / name)


def test_a_full_file_system_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"bytes needed, \d+ free there"):
        SharedTensors.create(tmp_path / "huge", {"w": TensorSpec((1 << 45,), "float32")})
    assert not list(tmp_path.iterdir())


def test_the_file_goes_with_its_writer_and_views_stay(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_text("left over from a run that was killed")
    segment = SharedTensors.create(path, tensors())
    assert path.stat().st_mode & 0o777 == 0o600
    manifest = segment.write(1, tensors())
    views = SharedTensors.open(path).read(manifest)
    segment.close(unlink=True)
    assert not path.exists()
    assert_equal(views, tensors())
    SharedTensors.create(path, tensors())  # dropped without close
    assert not path.exists()


def _read_in_child(manifest: Manifest, pipe: Any) -> None:
    torch.set_num_threads(1)
    reader = SharedTensors.open(manifest.path)
    pipe.send({name: float(x.double().sum()) for name, x in reader.read(manifest).items()})
    second = pipe.recv()
    pipe.send({name: float(x.double().sum()) for name, x in reader.read(second).items()})


def test_another_process_reads_each_version(segment: SharedTensors) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_in_child, args=(segment.write(1, tensors()), theirs))
    child.start()
    for scale in (1.0, 2.0):
        if scale == 2.0:
            ours.send(segment.write(2, tensors(2.0)))
        assert ours.poll(60), "the reader did not answer"
        assert ours.recv() == {name: float(x.double().sum()) for name, x in tensors(scale).items()}
    child.join(30)
    assert child.exitcode == 0 and segment.path.exists(), "a reader must not remove the file"


def test_the_file_goes_when_the_writer_exits(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from rlneuron.device.shm import SharedTensors\n"
        "segment = SharedTensors.create(sys.argv[1], {'w': torch.ones(3)}); segment.write(1, {'w': torch.ones(3)})"
    )
    path = tmp_path / "segment"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
    assert not path.exists()
