"""Weights as safetensors files: one, or several with an index."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax.errors import RelaxError
from relax.megatron.hf.rules import Shape

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Older versions of transformers saved these, which are no weights: they follow from the configuration.
COMPUTED: Final = ".rotary_emb.inv_freq"


@attrs.frozen
class Header:
    """What is known of a tensor before it is read. `dtype` as safetensors calls it."""

    file: str
    shape: Shape
    dtype: str


@attrs.frozen(eq=False)
class SafetensorsFiles(Mapping[str, Tensor]):
    """The tensors of a directory, each read from its file when asked for.

    `index` says where each should lie, and is empty for a single file; `faults` is what is wrong with the files.
    """

    directory: Path
    index: Mapping[str, str]
    headers: Mapping[str, Header]
    faults: tuple[str, ...]

    @classmethod
    def of(cls, directory: Path) -> "SafetensorsFiles":
        """Reads the index, if there is one, and every file's header.

        Raises RelaxError where there is no file of weights, or where the index is none.
        """
        index = _read_index(directory)
        headers: dict[str, Header] = {}
        faults = []
        for file in sorted(set(index.values())) or [SINGLE]:
            try:
                found = _read_headers(directory, file)
            except (OSError, SafetensorError) as error:
                faults.append(f"{file}: cannot be read: {error}")
                continue
            for name, header in found.items():
                if index and index.get(name) != file:
                    faults.append(f"{file}: unexpected {name}, which {INDEX} does not name here")
                    continue
                if header.dtype not in DTYPES:
                    faults.append(f"{file}: {name} has dtype {header.dtype}, not one of {', '.join(DTYPES)}")
                headers[name] = header
        return cls(directory, index, headers, tuple(faults))

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every tensor."""
        return {name: header.shape for name, header in self.headers.items()}

    def place(self, name: str) -> str:
        """The file where tensor `name` lies, or should lie, or the index that does not name it."""
        if name in self.headers:
            return self.headers[name].file
        return self.index.get(name, INDEX) if self.index else SINGLE

    @property
    def dtype(self) -> torch.dtype:
        """The precision that holds every tensor without loss: float32, or the one that all of them have."""
        found = {DTYPES[header.dtype] for header in self.headers.values()}
        return found.pop() if len(found) == 1 else torch.float32

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.directory / self.headers[name].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def _read_index(directory: Path) -> Mapping[str, str]:
    """Tensor -> file; nothing where a single file holds all, which transformers too takes before an index."""
    if (directory / SINGLE).is_file():
        return {}
    path = directory / INDEX
    if not path.is_file():
        others = ", ".join(sorted(found.name for found in directory.glob("*.bin")))
        remedy = f"; save {others} as safetensors" if others else ""
        raise RelaxError(f"{directory}: holds neither {SINGLE} nor {INDEX}{remedy}")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        bad = [file for file in index.values() if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RelaxError(f"{path}: is no index of safetensors files: {error!r}") from error
    if bad or not index:
        raise RelaxError(f"{path}: names {'no file' if not index else f'{bad[0]!r}, which is no name of a file here'}")
    return {str(name): str(file) for name, file in index.items() if not name.endswith(COMPUTED)}


def _read_headers(directory: Path, file: str) -> dict[str, Header]:
    with safe_open(directory / file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys() if not name.endswith(COMPUTED)}  # noqa: SIM118
        return {name: Header(file, tuple(header.get_shape()), header.get_dtype()) for name, header in slices.items()}


def write(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Shape],
    directory: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int,
) -> None:
    """Writes `tensors`, whose names and shapes are known before, into `directory` in `dtype`.

    As one file, or as several of at most `max_shard_size` bytes; a tensor larger than that has a file of its own. Only
    one file's tensors are held at a time if they come in the order of `shapes`.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    index = _plan(sizes, max_shard_size)
    missing = {file: {name for name in index if index[name] == file} for file in index.values()}
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in missing}
    for name, tensor in tensors:
        file = index[name]
        waiting[file][name] = tensor.to(device="cpu", dtype=dtype).contiguous()
        missing[file].remove(name)
        if not missing[file]:
            save_file(waiting.pop(file), directory / file, metadata={"format": "pt"})
    if len(missing) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}, indent=2)
        (directory / INDEX).write_text(text + "\n", encoding="utf-8")


def _plan(sizes: Mapping[str, int], max_shard_size: int) -> dict[str, str]:
    """Which file each tensor goes to: as many in a row as fit."""
    shards: list[list[str]] = [[]]
    room = max_shard_size
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_size
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return dict.fromkeys(sizes, SINGLE)
    return {
        name: f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }
