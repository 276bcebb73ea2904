"""Digests of a model's own files: its weights, its configuration, and the Python code that comes with them.

Weights are read in part, so that a start stays cheap.  Changes are seen for certain in these parts:

    safetensors   the header, every tensor below 1 MiB, and of a larger one a page each 16 MiB and its last page
    .bin, .pt     files up to 16 MiB; of a larger one the first and the last MiB and a page each MiB between them

torch writes the CRC-32 of each tensor into the last bytes of its files, so a change of any tensor is seen there, too.
Content that cannot be read as expected is an error (OSError, ValueError), never a digest of less.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DIGEST_BYTES = 16
PAGE_BYTES = 4096
MIB = 1 << 20
SMALL_TENSOR_BYTES = MIB
TENSOR_STRIDE_BYTES = 16 * MIB
SMALL_FILE_BYTES = 16 * MIB
# The library's own bound (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000

# vLLM's load formats that read these files (DefaultModelLoader._prepare_weights).
_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral")
_TORCH = ("pt", "npcache")
_TORCH_AS_WELL = ("auto", "hf")

# Files that say how a model computes (lists/files.tsv has the rest).
CONFIGURATION = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)
# Files that say how an image, a video or a sound is processed before the model sees it.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Files that make a tokenizer.
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "*.tiktoken",
)
_DATA = (".json", ".yaml", ".yml", ".npy", ".npz")
# Keys of a configuration about its origin or its libraries; the engine's dtype is compared on its own.
_PROVENANCE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")

READABLE = "(serve the model from files that this process can read)"
_DECIDING = (".safetensors", ".bin", ".pt", ".py", *_DATA)

_Range = tuple[int, int]  # offset and length, in bytes


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def folder(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the folder of a model, by its path or by its name on the Hub, where vLLM has downloaded it."""
    if os.path.exists(name):
        return Path(name)
    from vllm import envs
    from vllm.transformers_utils.repo_utils import hf_api

    if envs.VLLM_USE_MODELSCOPE:
        from modelscope.hub.snapshot_download import snapshot_download

        found = snapshot_download(model_id=name, revision=revision, cache_dir=download_dir, local_files_only=True)
        return Path(found)
    return Path(hf_api().snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))


def check_unchanged(folder: Path, since_ns: int) -> None:
    """Raise ValueError if these files may not be those that were loaded, by an engine configured at `since_ns`.

    `since_ns`: Unix time.  A snapshot in the Hub's cache never changes, but its name (`main`) may name another one by
    now.  A first download, which is the engine's own, has no other one beside it.
    """
    if folder.parent.name == "snapshots":
        refs = folder.parent.parent / "refs"
        moved = [ref for ref in refs.rglob("*") if ref.is_file() and ref.read_text().strip() == folder.name]
        changed = moved if len(list(folder.parent.iterdir())) > 1 else []
    else:
        changed = _below(folder, *_DECIDING)
    for file in changed:
        if file.stat().st_ctime_ns > since_ns:
            raise ValueError(f"changed after the engine began to load the model, so start the engine anew: file={file}")


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(folders: Iterable[Path], load_format: str) -> str:
    """Return the digest of all files that vLLM may load from these folders, and of their indexes."""
    found = []
    for each in folders:
        files = _weight_files(each, load_format)
        if not files:
            raise ValueError(f"there are no weights to read: load_format={load_format} folder={each} {READABLE}")
        found += [digest_of(index.read_bytes()) for index in sorted(each.glob("*.index.json"))]
        found.append(sample(files))
        if len({file.name.startswith("consolidated") for file in each.glob("*.safetensors")}) == 2:
            found.append("mistral" if load_format in ("auto", "mistral") else "hf")
    return digest_of(" ".join(found).encode())


def _weight_files(folder: Path, load_format: str) -> list[Path]:
    """Return at least the files that vLLM loads, also from subfolders, which some models name themselves."""
    if load_format not in _SAFETENSORS + _TORCH:
        raise ValueError(
            f"the weights are not files of the model's folder: load_format={load_format} (load from files)"
        )
    files = [] if load_format in _TORCH else _below(folder, ".safetensors")
    if load_format in _TORCH or (load_format in _TORCH_AS_WELL and not any(folder.glob("*.safetensors"))):
        files += _below(folder, ".bin") + _below(folder, ".pt")
    return files


def _below(folder: Path, *suffixes: str) -> list[Path]:
    """Look behind symbolic links, too, as vLLM does and Path.rglob does not."""
    found = glob.iglob("**/*.*", root_dir=folder, recursive=True)
    return [folder / name for name in sorted(name for name in found if name.endswith(suffixes))]


def sample(files: Sequence[Path]) -> str:
    """Return the digest of the sizes of these files and of the parts that are read (see above)."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            digest.update(struct.pack("<Q", size))
            try:
                for part in _safetensors(fd, size) if path.suffix == ".safetensors" else _spread(size):
                    for content in _read(fd, *part):
                        digest.update(content)
            except ValueError as error:
                raise ValueError(f"{path.name}: {error} (download it again)") from None
    return digest.hexdigest()


def _read(fd: int, at: int, length: int) -> Iterator[bytes]:
    end = at + length
    while at < end:
        content = os.pread(fd, min(MIB, end - at), at)
        if not content:
            raise ValueError(f"file ends too early: offset={at} expected={end}")
        yield content
        at += len(content)


def _spread(size: int) -> list[_Range]:
    if size <= SMALL_FILE_BYTES:
        return [(0, size)]
    between = [(at, PAGE_BYTES) for at in range(MIB, size - MIB, MIB)]
    return [(0, MIB), *between, (size - MIB, MIB)]


def _safetensors(fd: int, size: int) -> list[_Range]:
    """Return the ranges to read of a safetensors file; neighbours are joined."""
    content, data = _header(fd, size)
    found: list[_Range] = [(0, data)]
    end = data
    for begin, stop in sorted(_offsets(name, entry) for name, entry in content.items() if name != "__metadata__"):
        if data + begin != end or stop < begin or data + stop > size:
            raise ValueError(f"tensors do not fill the file: data_offsets={[begin, stop]} expected={end - data}")
        end = data + stop
        if stop - begin < SMALL_TENSOR_BYTES:
            if sum(found[-1]) == data + begin:
                found[-1] = (found[-1][0], found[-1][1] + stop - begin)
            else:
                found.append((data + begin, stop - begin))
        else:
            last = end - PAGE_BYTES
            found += [(at, PAGE_BYTES) for at in (*range(data + begin, last, TENSOR_STRIDE_BYTES), last)]
    if end != size:
        raise ValueError(f"tensors do not fill the file: end={end} size={size}")
    return found


def _header(fd: int, size: int) -> tuple[dict[str, Any], int]:
    """Return the header's JSON and the offset of the tensors, behind eight bytes with the header's length and it."""
    length = struct.unpack("<Q", b"".join(_read(fd, 0, 8)))[0]
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"header does not fit: header_bytes={length} max={min(MAX_HEADER_BYTES, size - 8)}")
    try:
        content = json.loads(b"".join(_read(fd, 8, length)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"header is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("header is not a JSON object")
    return content, 8 + length


def _offsets(name: str, entry: Any) -> _Range:
    match entry:
        case {"data_offsets": [int(begin), int(end)]}:
            return begin, end
    raise ValueError(f"tensor has no data_offsets: tensor={name[:64]!r}")


# --- configuration and code -------------------------------------------------------------------------------------------


def configuration(folders: Iterable[Path], names: Sequence[str], *, needed: bool = True) -> dict[str, Any]:
    """Return the content of these files without its provenance, each from the first folder that has it."""
    found: dict[str, Any] = {}
    for folder in folders:
        for name in names:
            if name not in found and (folder / name).exists():
                found[name] = _lasting(json.loads((folder / name).read_bytes()))
    if needed and not found:
        raise ValueError(f"there is no configuration to read: expected={' or '.join(names[:2])} {READABLE}")
    return found


def processor_class(folders: Iterable[Path], processors: Mapping[str, Any]) -> str:
    """Return the class that vLLM takes from tokenizer_config.json, where no processor's file names one; or ""."""
    named = [*processors.values(), *configuration(folders, ("tokenizer_config.json",), needed=False).values()]
    *first, last = [each.get("processor_class", "") if isinstance(each, dict) else "" for each in named] or [""]
    return "" if any(first) else str(last)


def data(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the data files of these folders, by their names in them, each from the first folder that has it."""
    found: dict[str, Path] = {}
    for each in folders:
        for file in _below(each, *_DATA):
            found.setdefault(file.relative_to(each).as_posix(), file)
    return found


def tokenizer(folder: Path) -> str:
    """Return the digest of the files that make a tokenizer; "" where there are none."""
    files = sorted({file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()})
    return digest_of(" ".join([f"{each.name} {sample([each])}" for each in files]).encode()) if files else ""


def _lasting(config: Any) -> Any:
    """Return the model's own part of a configuration and of those within it."""
    if not isinstance(config, dict):
        return config
    return {
        name: _lasting(value) if isinstance(value, dict) and "model_type" in value else value
        for name, value in config.items()
        if name not in _PROVENANCE
    }


def code(folders: Iterable[Path]) -> str:
    """Return the digest of all Python files in these folders, by their names in them; "" where there are none."""
    found = [
        f"{file.relative_to(each)} {digest_of(file.read_bytes())}" for each in folders for file in _below(each, ".py")
    ]
    return digest_of("\n".join(found).encode()) if found else ""


def repositories(configuration: object) -> list[str]:
    """Return the other repositories that a configuration takes code from (`auto_map`, "owner/name--file.Class")."""
    return sorted(set(re.findall(r'"([\w.-]+/[\w.-]+)--', json.dumps(configuration))))
