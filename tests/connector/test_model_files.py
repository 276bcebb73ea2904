"""Which files of a model are in the keys of its KV: those that vLLM builds it from, wherever options say they are."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import vllm
from vllm.transformers_utils.configs.ultravox import UltravoxConfig

from kvprefetch.connector.identity import identity
from kvprefetch.connector.identity.namespace import fingerprinted, rank_keys
from kvprefetch.connector.identity.start import Start
from tests.connector.test_checkpoint import write_tensors
from tests.connector.test_fingerprint import described, loaded, media, running, write_model

SOURCES = Path(vllm.__file__).parent
START = Start("engine", "1" * 32, 2**62)


def key(folder: Path | str, **changes: Any) -> str:
    """The prefix of the keys of an engine that serves this model."""
    config = described(folder, **changes)
    found = fingerprinted(config, rank_keys(model="tiny", tp_rank=0), running, START)
    assert found.unknown == ""
    return found.prefixes[0]


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def load_format(at: Path) -> Iterator[str]:
    """A folder with consolidated*.safetensors and others: --load-format says which are loaded."""
    model = write_model(at / "model")
    write_tensors(model / "consolidated.safetensors", {"norm": 32})
    assert key(model, load_format="auto") == key(model, load_format="mistral")
    assert key(model, load_format="hf") == key(model, load_format="safetensors")
    yield key(model, load_format="auto")
    yield key(model, load_format="hf")


def config_format(at: Path) -> Iterator[str]:
    """A folder with params.json and config.json: --config-format says which one the model is built from."""
    model = write_model(at / "model")
    write(model / "params.json", {"dim": 64})
    for name in ("hf", "mistral"):
        yield key(model, config_format=name)


def towers_configuration(at: Path) -> Iterator[str]:
    """Ultravox takes its language model's configuration from `text_model_id`."""
    model, tower = write_model(at / "model"), write_model(at / "tower")
    for theta in (1e4, 5e5):
        write(tower / "config.json", {"model_type": "llama", "hidden_size": 64, "rope_theta": theta})
        yield key(model, hf_config=UltravoxConfig(text_model_id=str(tower)))


def subfolders_configuration(at: Path) -> Iterator[str]:
    """Kimi-Audio's tower is that of whisper-large-v3/config.json."""
    model = write_model(at / "model")
    for heads in (20, 10):
        write(model / "whisper-large-v3" / "config.json", {"encoder_attention_heads": heads})
        yield key(model)


def adapters_in_a_subfolder(at: Path) -> Iterator[str]:
    model = write_model(at / "model")
    for scale in (1, 2):
        write(model / "adapters" / "retrieval" / "adapter_config.json", {"lora_alpha": scale, "r": 1})
        yield key(model)


def processors_beside_another_configuration(at: Path) -> Iterator[str]:
    """With --hf-config-path vLLM takes the processors from the model's own folder."""
    model, other = write_model(at / "model"), write_model(at / "other")
    for size in (224, 448):
        write(model / "preprocessor_config.json", {"size": size})
        yield key(model, hf_config_path=str(other), multimodal_config=media())


def quantization_beside_another_configuration(at: Path) -> Iterator[str]:
    model, other = write_model(at / "model"), write_model(at / "other")
    write(other / "quantize_config.json", {"bits": 4})
    for bits in (4, 8):
        write(model / "quantize_config.json", {"bits": bits})
        yield key(model, hf_config_path=str(other))


def quantization_config_file(at: Path) -> Iterator[str]:
    """--hf-overrides names a file; its content counts, and not its path."""
    model = write_model(at / "model")
    for bits in (8, 4):
        found = set()
        for folder in ("one", "another"):
            file = write(at / folder / "torchao.json", {"_type": f"Int{bits}WeightOnlyConfig"})
            found.add(key(model, hf_overrides={"quantization_config_file": str(file)}))
        assert len(found) == 1
        yield found.pop()


def class_of_processor(at: Path) -> Iterator[str]:
    """vLLM takes it from tokenizer_config.json where no processor's file names one."""
    model = write_model(at / "model")
    for name in ("LlavaProcessor", "FuyuProcessor"):
        write(model / "tokenizer_config.json", {"processor_class": name})
        yield key(model, multimodal_config=media())
    write(model / "preprocessor_config.json", {"processor_class": "LlavaProcessor"})
    named = key(model, multimodal_config=media())
    write(model / "tokenizer_config.json", {"processor_class": "LlavaProcessor"})
    assert key(model, multimodal_config=media()) == named


def tokenizer_of_engram(at: Path) -> Iterator[str]:
    """DeepSeek V4.1 hashes n-grams over ids that the tokenizer's texts collapse."""
    model = write_model(at / "model")
    for text in ("a", "b"):
        write(model / "tokenizer.json", {"model": text})
        yield key(model, architecture="DeepseekV41ForCausalLM")


def another_tokenizer(at: Path) -> Iterator[str]:
    """--tokenizer: no list of models that read it is sure to be whole."""
    model, plain = write_model(at / "model"), key(write_model(at / "plain"))
    write(model / "tokenizer.json", {"model": "a"})
    assert key(model) == plain, "its tokens are in each block's hash"
    same = write(at / "same" / "tokenizer.json", {"model": "a"}).parent
    assert key(model, tokenizer=str(same)) == plain
    for text in ("b", "c"):
        yield key(model, tokenizer=str(write(at / text / "tokenizer.json", {"model": text}).parent))


def tokens_between_frames(at: Path) -> Iterator[str]:
    """Qwen3-VL puts tokens of its own between the frames of a video that is pruned."""
    model, options = write_model(at / "model"), {"architecture": "Qwen3VLForConditionalGeneration"}
    unpruned = set()
    for text in ("a", "b"):
        write(model / "tokenizer.json", {"model": text})
        unpruned.add(key(model, **options, multimodal_config=media()))
        yield key(model, **options, multimodal_config=media(video_pruning_rate=0.5))
    assert len(unpruned) == 1


def file_that_no_list_has(at: Path) -> Iterator[str]:
    model = write_model(at / "model")
    for number in (1, 2):
        write(model / "rotations.json", {"angle": number})
        yield key(model)


def modelscope(at: Path) -> Iterator[str]:
    """VLLM_USE_MODELSCOPE: a name means ModelScope's copy, not that of the Hub's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_MODELSCOPE", "True")
        for size in (64, 128):
            module: Any = ModuleType("modelscope.hub.snapshot_download")
            found = write_model(at / f"{size}", size=size)
            module.snapshot_download = lambda found=found, **_: str(found)
            for name in ("modelscope", "modelscope.hub"):
                patch.setitem(sys.modules, name, ModuleType(name))
            patch.setitem(sys.modules, module.__name__, module)
            yield key("team/model")


CASES = (
    load_format,
    config_format,
    towers_configuration,
    subfolders_configuration,
    adapters_in_a_subfolder,
    processors_beside_another_configuration,
    quantization_beside_another_configuration,
    quantization_config_file,
    class_of_processor,
    tokenizer_of_engram,
    another_tokenizer,
    tokens_between_frames,
    file_that_no_list_has,
    modelscope,
)


@pytest.mark.parametrize("case", CASES)
def test_another_file_makes_another_key(case: Callable[[Path], Iterator[str]], tmp_path: Path) -> None:
    one, other = case(tmp_path)
    assert one != other


HARMLESS = (
    "README.md",
    "chat_template.json",
    "config_sentence_transformers.json",
    "configuration.json",
    "generation_config.json",
    "1_Pooling/config.json",
    "inference/config.json",
    "inference/configs/config_16B.json",
    "onnx/config.json",
    "original/params.json",
    "recipe.yaml",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "vocab.json",
)


def test_files_that_decide_nothing_make_no_other_key(tmp_path: Path) -> None:
    """One copy of a model has them all, the next only those that vLLM downloads."""
    model = write_model(tmp_path / "model")
    plain = key(model)
    for name in HARMLESS:
        write(model / name, {"about": name})
        assert key(model) == plain, name


def test_each_model_that_reads_the_tokenizer_is_on_a_list() -> None:
    """A new vLLM's is not, and fails this test: look whether its embeddings or positions depend on it."""
    reads = re.compile(
        r"cached_tokenizer_from_config\((?!\w+: )|AutoTokenizer\.from_pretrained|tokenizers\.registry import"
    )
    found = []
    for folder in ("models", "model_executor/models"):
        for file in (SOURCES / folder).rglob("*.py"):
            if reads.search(file.read_text()):
                found.append(".".join(("vllm", *file.relative_to(SOURCES).with_suffix("").parts)))
    assert len(found) > 15
    assert [each for each in found if identity.rule("tokenizers", each) is None] == []


def test_a_changed_tokenizer_or_processor_is_seen_in_the_fingerprint_s_words(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write(model / "tokenizer.json", "{}")
    assert "tokenizer" in loaded(model, architecture="DeepseekV41ForCausalLM")
    assert "tokenizer" not in loaded(model)
