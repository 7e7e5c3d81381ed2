"""The draft's forward pass against the equations written out, and what may influence what."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.drafts import draft as draft_module
from draftsmith.drafts.attention import AttentionInputs, AttentionKind, DenseBlockAttention
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads import HEADS, HeadConfig
from draftsmith.drafts.heads.head import DraftSizes
from draftsmith.targets.ends import TargetEnds
from tests.drafts.plain import plain_forward
from tests.support.tiny_draft import scramble, tiny_draft

TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)
SLIDE = ("full_attention", "sliding_attention")


class Case:
    """R rows of S context tokens and N blocks of B slots, anchored at odd places."""

    def __init__(self, draft: Draft, *, rows: int = 2, context: int = 9, blocks: int = 2, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        config = draft.config
        size, taps = config.block.size, len(config.target_layer_ids)
        self.draft, self.context, self.size = draft, context, size
        self.embeddings = torch.randn(rows, blocks, size, config.hidden_size, generator=g)
        self.features = torch.randn(rows, context, taps * config.hidden_size, generator=g)
        self.context_positions = torch.arange(context).expand(rows, -1)
        self.anchors = torch.randint(1, context + 1, (rows, blocks), generator=g)
        self.positions = self.anchors[..., None] + torch.arange(size)

    def sees(self, row: int, kind: AttentionKind, query: int, key: int) -> bool:
        block, slot = divmod(query, self.size)
        anchor = int(self.anchors[row, block])
        if key < self.context:
            return key < anchor and (kind.window is None or key >= anchor + slot - (kind.window - 1))
        other_block, other = divmod(key - self.context, self.size)
        near = kind.window is None or abs(slot - other) < kind.window
        return other_block == block and near and (not kind.causal or other <= slot)

    def attend(self) -> DenseBlockAttention:
        rows, blocks = self.anchors.shape
        queries = blocks * self.size
        keys = self.context + queries
        return DenseBlockAttention(
            {
                kind: torch.tensor(
                    [[[[self.sees(r, kind, q, k) for k in range(keys)] for q in range(queries)]] for r in range(rows)]
                )
                for kind in set(self.draft.attention_kinds)
            }
        )

    def run(self, **changes: Tensor) -> Tensor:
        features = changes.get("features", self.features)
        embeddings = changes.get("embeddings", self.embeddings)
        with torch.no_grad():
            keys_values = self.draft.context_keys_values(features, self.context_positions)
            return self.draft(embeddings, self.positions, keys_values, self.attend())


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 1, "num_taps": 1},
        {"num_taps": 3, "block_size": 5},
        {"layer_types": SLIDE, "sliding_window": 4},
        {"layer_types": SLIDE, "sliding_window": 3, "causal": False},
        {"causal": True, "block_size": 2},
        {"attention_sinks": True, "num_key_value_heads": 1, "input_embedding_scale": 1.7},
        {"rope": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}, "num_key_value_heads": 4},
    ],
)
def test_equals_the_equations_in_fp64(options: dict[str, Any]) -> None:
    draft = tiny_draft(TARGET, **options)
    case = Case(draft, seed=len(options))
    kinds = draft.attention_kinds
    wanted = plain_forward(
        draft,
        case.embeddings,
        case.positions,
        case.features,
        case.context_positions,
        lambda row, layer, query, key: case.sees(row, kinds[layer], query, key),
    )
    torch.testing.assert_close(case.run().double(), wanted, atol=2e-5, rtol=1e-4)
    draft.double()  # the same network, so what is left is the fp32 angles
    torch.testing.assert_close(case.run(), wanted, atol=5e-6, rtol=1e-5)


def test_a_layer_slides_only_if_it_says_so() -> None:
    kinds = tiny_draft(TARGET, layer_types=SLIDE, sliding_window=4).attention_kinds
    assert kinds == (AttentionKind(None, False), AttentionKind(4, True))
    kinds = tiny_draft(TARGET, layer_types=SLIDE, sliding_window=4, causal=False).attention_kinds
    assert kinds == (AttentionKind(None, False), AttentionKind(4, False))
    kinds = tiny_draft(TARGET, layer_types=SLIDE, sliding_window=4, causal=True).attention_kinds
    assert kinds == (AttentionKind(None, True), AttentionKind(4, True))


def test_context_in_chunks_equals_context_at_once() -> None:
    draft = tiny_draft(TARGET)
    case = Case(draft, context=11)
    whole = draft.context_keys_values(case.features, case.context_positions)
    cuts = [(0, 1), (1, 6), (6, 11)]
    parts = [draft.context_keys_values(case.features[:, a:b], case.context_positions[:, a:b]) for a, b in cuts]
    for layer, (keys, values) in enumerate(whole):
        torch.testing.assert_close(keys, torch.cat([part[layer][0] for part in parts], 2), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, torch.cat([part[layer][1] for part in parts], 2), atol=1e-5, rtol=1e-5)


def test_one_block_alone_equals_the_block_among_others() -> None:
    """What decoding runs (rows of one block) is what training ran (packed rows of several)."""
    draft = tiny_draft(TARGET, layer_types=SLIDE, sliding_window=5)
    case = Case(draft, rows=1, blocks=3)
    together = case.run()
    for block in range(3):
        alone = Case(draft, rows=1, blocks=1)
        alone.features = case.features
        alone.embeddings, alone.anchors = case.embeddings[:, block : block + 1], case.anchors[:, block : block + 1]
        alone.positions = case.positions[:, block : block + 1]
        torch.testing.assert_close(alone.run()[:, 0], together[:, block], atol=1e-5, rtol=1e-5)


def test_rows_blocks_and_unseen_context_do_not_influence() -> None:
    case = Case(tiny_draft(TARGET), rows=2, blocks=2)
    before = case.run()
    embeddings = case.embeddings.clone()
    embeddings[0, 1, 3] += 1.0
    after = case.run(embeddings=embeddings)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, 0], after[0, 0])
    assert not torch.allclose(before[0, 1, 0], after[0, 1, 0])  # attention inside a block looks both ways
    features = case.features.clone()
    first_unseen = int(case.anchors[0].max())
    features[0, first_unseen:] += 1.0
    assert torch.equal(before, case.run(features=features))
    features[0, 0] += 1.0
    assert not torch.allclose(before[0], case.run(features=features)[0])


def test_the_order_of_taps_and_the_positions_matter() -> None:
    case = Case(tiny_draft(TARGET, num_taps=2))
    before = case.run()
    first, second = case.features.chunk(2, dim=-1)
    assert not torch.allclose(before, case.run(features=torch.cat((second, first), -1)))
    case.positions = case.positions + 1
    assert not torch.allclose(before, case.run())


def test_logits_come_from_the_targets_head_then_multiplier_and_softcap() -> None:
    g = torch.Generator().manual_seed(3)
    head = torch.randn(61, 20, generator=g)
    hidden = torch.randn(2, 3, 20, generator=g)
    ends = TargetEnds(head.clone(), head, softcap=4.0)
    targets_own = 4.0 * torch.tanh(hidden @ head.T / 4.0)
    torch.testing.assert_close(tiny_draft(TARGET).logits(hidden, ends), targets_own)
    capped = tiny_draft(TARGET, output_multiplier=0.5, final_logit_softcapping=1.5).logits(hidden, ends)
    torch.testing.assert_close(capped, 1.5 * torch.tanh(0.5 * targets_own / 1.5))
    half = TargetEnds(head.to(torch.bfloat16), head.to(torch.bfloat16))
    assert tiny_draft(TARGET).logits(hidden, half).dtype == torch.bfloat16


def test_the_dtype_of_the_weights_is_that_of_the_pass() -> None:
    case = Case(tiny_draft(TARGET, attention_sinks=True))
    wide = case.run()
    case.draft.to(torch.bfloat16)
    narrow = case.run()
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, atol=0.15, rtol=0.15)


def test_under_autocast_keys_and_queries_have_the_dtype_of_values() -> None:
    draft = tiny_draft(TARGET)
    seen: list[torch.dtype] = []

    def attend(inputs: AttentionInputs) -> Tensor:
        seen.extend(t.dtype for t in (inputs.q, inputs.context_k, inputs.context_v, inputs.block_k, inputs.block_v))
        return inputs.q

    case = Case(draft)
    with torch.autocast("cpu", torch.bfloat16):
        context = draft.context_keys_values(case.features, case.context_positions)
        draft(case.embeddings, case.positions, context, attend).sum().backward()
    assert set(seen) == {torch.bfloat16}
    assert draft.backbone.fc.weight.grad is None  # this attention ignores the context
    assert draft.backbone.layers[0].self_attn.q_proj.weight.grad.dtype == torch.float32


def test_every_parameter_has_a_gradient() -> None:
    draft = tiny_draft(TARGET, layer_types=SLIDE, sliding_window=4, attention_sinks=True)
    case = Case(draft)
    context = draft.context_keys_values(case.features, case.context_positions)
    draft(case.embeddings, case.positions, context, case.attend()).square().sum().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


class _Doubler(nn.Module):
    """Adds `shift` before a sublayer and scales its output by 1 + the first channel of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        assert hidden.dim() == 4  # [R, N, B, H]: blocks are told apart
        return hidden + self.shift, hidden[..., :1]

    def after(self, hidden: Tensor, state: Tensor) -> Tensor:
        return hidden * (1 + state)


class _Wrapped(HeadConfig):
    """An architecture with a module around one sublayer, and one more."""

    architecture = "wrapped"

    def build(self, sizes: DraftSizes) -> nn.Module:
        return nn.ModuleDict({"extra": nn.Linear(sizes.hidden_size, 3)})

    def wrappers(self, sizes: DraftSizes) -> dict[str, nn.Module]:
        return {"mlp_conv": _Doubler(sizes.hidden_size)}


def test_a_head_may_wrap_the_sublayers_and_add_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS, "wrapped", _Wrapped)
    plain, wrapped = tiny_draft(TARGET, num_layers=1), tiny_draft(TARGET, num_layers=1, architecture="wrapped")
    names = {draft_module.file_name(name) for name in wrapped.state_dict()}
    assert {"layers.0.mlp_conv.shift", "extra.weight", "extra.bias"} <= names
    scramble(wrapped, 1)
    wrapped.load_state_dict(plain.state_dict(), strict=False)
    case, other = Case(plain), Case(wrapped)
    assert not torch.allclose(case.run(), other.run())
    fresh = Draft.from_config(wrapped.config)
    assert all(torch.isfinite(p).all() for p in fresh.parameters())
    assert fresh.head is not None


def test_a_wrapper_under_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Wrapped, "wrappers", lambda self, sizes: {"mlp_convolution": nn.Identity()})
    monkeypatch.setitem(HEADS, "wrapped", _Wrapped)
    with pytest.raises(ValueError, match="mlp_convolution"):
        tiny_draft(TARGET, architecture="wrapped")
