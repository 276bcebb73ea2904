"""The digest of a rank's weights: what is in it, what a sample sees, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from kvprefetch.connector.identity import weights
from kvprefetch.connector.identity.weights import LEAST, LIMIT_BYTES, MOST, NotComparable, combined, digest, places

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Many threads wait for each other where they share a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(**tensors: torch.Tensor) -> nn.Module:
    found = nn.Module()
    for name, tensor in tensors.items():
        found.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return found


def of(**tensors: torch.Tensor) -> bytes:
    return digest([model(**tensors)])


def test_equal_weights_have_equal_digests_in_whatever_order_and_memory() -> None:
    values = torch.arange(3.0 * 40_000).reshape(3, 40_000)
    turned = values.t().contiguous().t()
    part = torch.cat([torch.zeros(3, 5), values], dim=1)[:, 5:]
    assert not turned.is_contiguous()
    assert not part.is_contiguous()
    first = of(a=values, b=torch.ones(3))
    assert len(first) == 16
    assert (
        first == of(b=torch.ones(3), a=values.clone()) == of(a=turned, b=torch.ones(3)) == of(a=part, b=torch.ones(3))
    )


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(4, 2)},
        {"a": torch.zeros(2, 4)},
        {"a": torch.zeros(4, 2, dtype=torch.bfloat16)},
        {"a": torch.zeros(4, 2), "b": torch.zeros(1)},
        {"a": torch.tensor([0, 0, 0, 0, 0, 0, 0, -0.0]).reshape(4, 2)},
    ],
    ids=["name", "shape", "dtype", "one more", "sign of zero"],
)
def test_whatever_else_differs_is_seen(other: dict[str, torch.Tensor]) -> None:
    assert of(**other) != of(a=torch.zeros(4, 2))


def test_every_value_of_a_small_tensor_counts() -> None:
    before = of(a=torch.zeros(LEAST, dtype=torch.bfloat16))
    for at in (0, 1, LEAST // 2, LEAST - 1):
        changed = torch.zeros(LEAST, dtype=torch.bfloat16)
        changed[at] = 1
        assert of(a=changed) != before


def test_drafts_models_buffers_and_unlike_dtypes_count() -> None:
    main, draft = model(a=torch.zeros(4)), model(a=torch.zeros(4, dtype=torch.float8_e4m3fn))
    both = digest([main, draft])
    assert both != digest([draft, main])
    assert both != digest([main])
    draft.register_buffer("scale", torch.tensor(1.0))
    with_scale = digest([main, draft])
    assert with_scale != both
    draft.scale.fill_(2.0)  # type: ignore[operator,union-attr]
    assert digest([main, draft]) != with_scale


def test_layers_around_which_vllm_puts_adapters_keep_their_names() -> None:
    plain, wrapped = nn.Module(), nn.Module()
    plain.q, wrapped.q = model(weight=torch.ones(4)), nn.Module()
    wrapped.q.base_layer = model(weight=torch.ones(4))
    assert digest([plain]) == digest([wrapped])


@pytest.mark.parametrize("size", [LEAST + 1, 3 * MOST - 1, 10**7, 7 * 10**9])
def test_the_places_are_one_in_each_equal_part(size: int) -> None:
    count = min(MOST, size - 1)
    found = places("0.layers.3.qkv_proj.weight", size, count, CPU)
    number = torch.arange(count)
    assert bool(((number * size - count < found * count) & (found * count < (number + 1) * size)).all())
    other = places("0.layers.4.qkv_proj.weight", size, count, CPU)
    assert size < 20 * count or int((found == other).sum()) < count // 10, "each tensor has places of its own"


def test_the_places_are_the_same_everywhere_and_for_ever() -> None:
    """Engines of all machines and releases look at the same values."""
    found = places("0.layers.3.qkv_proj.weight", 4096 * 6144, MOST, CPU).tolist()
    assert [found[0], found[1], found[-1]] == PINNED


PINNED = [704, 1330, 25165803]


def test_a_change_of_one_value_in_100_000_all_over_a_model_is_seen() -> None:
    """The probability that the docstring promises: of 10 steps of a trainer on 24 layers the sample misses none."""
    torch.manual_seed(7)
    size = 1 << 20
    tensors = {
        f"layer{i}_{name}": torch.randn(size).bfloat16() for i in range(6) for name in ("qkv", "o", "up", "down")
    }
    held = model(**tensors)
    seen = {digest([held])}
    for _ in range(10):
        for each in held.parameters():
            chosen = torch.randint(size, (size // 100_000,))
            each.view(torch.int16)[chosen] ^= 1
        seen.add(digest([held]))
    assert len(seen) == 11


def test_what_is_read_is_bounded() -> None:
    """Of many tensors the sample gets smaller, down to LEAST values of each; more are not compared."""
    one = torch.zeros(1, dtype=torch.bfloat16)
    many = LIMIT_BYTES // (2 * LEAST) + 1
    with pytest.raises(NotComparable, match=f"too many tensors: tensors={many} max_bytes={LIMIT_BYTES}"):
        of(**{f"a{i}": one.expand(LEAST + 1) for i in range(many)})
    read = 0

    def counting(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(parts: list[torch.Tensor]) -> torch.Tensor:
            nonlocal read
            read += sum(each.nbytes for each in parts)
            return function(parts)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", counting(torch.cat))
        patch.setattr(weights, "LIMIT_BYTES", 1 << 20)
        of(**{f"a{i}": one.expand(1 << 20) for i in range(24)})
    assert 1 << 19 < read <= 1 << 20


class Linear(nn.Module):
    """As vLLM's layers: its weights are where `quant_method` put them."""

    quant_method = object()

    def weight_loader(self) -> None: ...


def test_a_layer_whose_weights_are_not_in_its_parameters_is_not_compared() -> None:
    """As vLLM's CPU backend packs them for oneDNN; the parameter it leaves has no values."""
    gone, none, meta, bias = nn.Module(), nn.Module(), nn.Module(), nn.Module()
    gone.q, none.q, meta.q, bias.q = (
        model(weight=torch.empty(0)),
        Linear(),
        model(a=torch.ones(2, device="meta")),
        Linear(),
    )
    bias.q.register_parameter("bias", nn.Parameter(torch.ones(4)))
    for each in (gone, none, meta, bias):
        with pytest.raises(NotComparable):
            digest([each])
    bias.q.register_parameter("weight", nn.Parameter(torch.ones(4, 4)))
    assert digest([bias])


def test_the_id_of_an_engine_is_that_of_its_ranks_in_their_order() -> None:
    assert combined([b"a" * 16, b"b" * 16]) != combined([b"b" * 16, b"a" * 16])
    assert len(combined([b"a" * 16])) == 32
