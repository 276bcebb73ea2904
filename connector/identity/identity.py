"""Says what of an engine's options, environment and foreign code decides a block's bytes, by lists that name all of it.

`lists/environment.tsv` and `lists/fields.tsv` name each variable that vLLM reads and each field of its configurations,
with a reason on each line.  What decides is in the fingerprint with the value that vLLM makes of it, and left out where
that is the default of vLLM 0.32: a release that changes a default makes a difference.  A name that no line has may do
anything: if it is set, or is not its class's default, the engine shares with no other start.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from .checkpoint import digest_of

_LISTS = Path(__file__).with_name("lists")
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")


class Rule(NamedTuple):
    """A line of a list.

    `verdict`: decides, not, part (another part of the fingerprint has it), own (alone, unless it is the baseline),
    code (a name of Python code), or lines (of the field's own class).  `baseline`: JSON.
    """

    verdict: str
    baseline: str
    reason: str


@functools.cache
def rules(name: str) -> Mapping[str, Rule]:
    """Return the lines of a list, by name or pattern: "environment", "fields", "files" or "tokenizers"."""
    lines = (_LISTS / f"{name}.tsv").read_text().splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {each: Rule(*rest) for each, *rest in rows if each != "name"}


def rule(name: str, given: str) -> Rule | None:
    """Return the line for this name: its own, or that of the first pattern which it fits."""
    listed = rules(name)
    found = listed.get(given)
    return found or next((each for key, each in listed.items() if "*" in key and fnmatchcase(given, key)), None)


@dataclasses.dataclass
class Identity:
    """`decides`: values of deciding names. `alone`: why no other start may share."""

    decides: dict[str, str] = dataclasses.field(default_factory=dict)
    alone: list[str] = dataclasses.field(default_factory=list)


def of_engine(vllm_config: Any, environment: Mapping[str, str]) -> Identity:
    """Return what the lists say of an engine with these options and variables, and of the code that it runs."""
    found = Identity()
    _environment(found, environment)
    _fields(found, vllm_config, "VllmConfig")
    for plugin in _plugins(environment.get("VLLM_PLUGINS")):
        _code(found, f"plugin {plugin.name}", plugin.module, plugin.dist)
    _registered(found, vllm_config.model_config)
    _llama4(found, vllm_config.model_config)
    return found


def _environment(found: Identity, environment: Mapping[str, str]) -> None:
    from vllm import envs
    from vllm.platforms import current_platform

    known = envs.environment_variables
    listed = rules("environment")
    for name in sorted({*environment, *(each for each in listed if each in known)}):
        if (line := rule("environment", name)) is None:
            continue
        if name.startswith("VLLM_ROCM_") and not current_platform.is_rocm():
            continue  # its defaults differ between releases that share elsewhere
        if line.verdict == "decides":
            value = text(known[name]() if name in known else environment.get(name))
            if value != line.baseline:
                found.decides[name] = value
        elif line.verdict == "own" and name in environment:
            found.alone.append(f"{name} is set")


def _fields(found: Identity, config: Any, kind: str) -> None:
    listed = rules("fields")
    names = [each.name for each in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else vars(config)
    for name in names:
        value, key = getattr(config, name), f"{kind}.{name}"
        line = listed.get(key)
        if line is None:
            if not _is_default(config, name, value):
                found.alone.append(f"{key} is not its default")
        elif line.verdict == "lines" and value is not None:
            _fields(found, value, type(value).__name__)
        elif line.verdict == "code":
            if not any(fnmatchcase(str(value), each) for each in json.loads(line.baseline)):
                _code(found, key, str(value))
        elif line.verdict in ("decides", "own") and (said := text(value)) != line.baseline:
            if line.verdict == "own":
                found.alone.append(f"{key} is set")
            else:
                found.decides[key] = said


def _is_default(config: Any, name: str, value: object) -> bool:
    if not dataclasses.is_dataclass(config):
        return True  # a test's
    field = next(each for each in dataclasses.fields(config) if each.name == name)
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if hasattr(default, "get_default"):  # pydantic's
        default = default.get_default(call_default_factory=True)
    return bool(value == default)


def _llama4(found: Identity, model: Any) -> None:
    """As Llama4ForCausalLM.__init__ scales its queries: by what two files, two options and the length come to."""
    if str(model.architecture).startswith("Llama4"):
        given = model.try_get_generation_config() | model.override_generation_config
        name = "attn_temperature_tuning"
        found.decides[name] = text(given.get(name, model.max_model_len > 32_768))


# --- code -------------------------------------------------------------------------------------------------------------


def _plugins(chosen: str | None) -> Iterator[importlib.metadata.EntryPoint]:
    names = None if chosen is None else chosen.split(",")
    installed = importlib.metadata.entry_points()  # once for both groups: it reads a file of each package
    for plugin in (each for group in _PLUGINS for each in installed.select(group=group)):
        if (names is None or plugin.name in names) and not plugin.module.startswith("kvprefetch."):
            yield plugin


def reads_tokenizer(model: Any) -> bool:
    """Whether the model itself, not only what makes its prompts, reads the tokenizer."""
    from vllm.model_executor.models import registry

    now = registry.ModelRegistry.models.get(str(model.architecture))
    cls = getattr(now, "model_cls", None) or getattr(
        sys.modules.get(getattr(now, "module_name", "")), getattr(now, "class_name", ""), None
    )
    modules = [getattr(now, "module_name", "")] if cls is None else [each.__module__ for each in cls.__mro__]
    verdicts = {line.verdict for each in modules if (line := rule("tokenizers", each))}
    pruned = getattr(model.multimodal_config, "video_pruning_rate", None)
    return "decides" in verdicts or ("pruned" in verdicts and bool(pruned))


def _registered(found: Identity, model: Any) -> None:
    """A plugin may have put a class of its own in the place of vLLM's."""
    from vllm.model_executor.models import registry

    architecture = str(getattr(model, "architecture", ""))
    if (now := registry.ModelRegistry.models.get(architecture)) is None:
        return
    cls = getattr(now, "model_cls", None)
    at = (now.module_name, now.class_name) if cls is None else (cls.__module__, cls.__qualname__)
    module, name = registry._VLLM_MODELS.get(architecture, ("", ""))
    if at not in ((module, name), (f"vllm.model_executor.models.{module}", name)):
        found.decides["class"] = ":".join(at)
        _code(found, f"code of {architecture}", at[0])


def _code(found: Identity, what: str, name: str, owner: importlib.metadata.Distribution | None = None) -> None:
    """Enter the package that has this code: its version, and the digests of its files as they were installed."""
    package = name.partition(":")[0].partition(".")[0]
    if package == "vllm":
        return
    try:
        owners = [owner.name] if owner else importlib.metadata.packages_distributions().get(package, [])
        installed = _installed(owners)
        found.decides[what] = f"{name} {digest_of(installed.encode())}"
    except LookupError:
        found.alone.append(f"{what} is {name}, which no installed package has")


def _installed(distributions: Sequence[str]) -> str:
    """Raises LookupError where the files may be others than those that were installed."""
    lines = []
    for name in sorted(set(distributions)):
        one = importlib.metadata.distribution(name)
        origin = json.loads(one.read_text("direct_url.json") or "{}")
        hashes = {str(each): each.hash.value for each in one.files or () if each.hash and each.suffix in (".py", ".so")}
        if not hashes or origin.get("dir_info", {}).get("editable"):
            raise LookupError(name)
        lines += [f"{name} {one.version}", *sorted(map(" ".join, hashes.items()))]
    if not lines:
        raise LookupError(distributions)
    return "\n".join(lines)


# --- values -----------------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """Return JSON that is equal in all processes and releases for equal values. Raises TypeError where it cannot be."""
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> object:
    """Return JSON for a value that `json` cannot write; of a dataclass the fields that differ from their defaults.

    Raises TypeError for others: their text may differ from process to process.
    """
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Fraction):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {each.name: given for each in fields if (given := getattr(value, each.name)) != each.default}
    raise TypeError(f"cannot be compared: type={type(value).__name__} (give the option as JSON)")
