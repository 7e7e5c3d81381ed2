"""The training step on one GPU: time, memory and arithmetic, beside another trainer's and the device's own rate.

    python benchmarks/train_gpu.py rate ours:qwen3-8b theirs:qwen3-8b ours:qwen3-8b:domino:profile

Every part is `NAME[:SHAPE[:OPTION...]]`; `--lock FILE` before them lets several processes take turns in measuring.
Parts:

    rate        the device's bf16 matrix product and copy, on random data
    ours        a step of draftsmith (options: a method's name, `checkpointing`, `eager`, `flex`, `graphs`, `profile`,
                `host`, the host's share of a step, `xTOKENS`, the tokens of a row)
    theirs      a step of SpecForge's DFlash model (package `specforge`) with its own optimiser (options: `plain`,
                torch's AdamW on bf16 weights instead; `checkpointing`; `profile`)
    sizes       the first steps on batches of several numbers of blocks: what is compiled at each
    target      the target's forward with random weights, capturing what the draft reads (what an online step adds)

Shapes are those of a 5-layer draft: qwen3-8b with 4 documents of 3,072 tokens and 512 anchors (`qwen3-8b-1`: 1
document), smollm2 with 16 documents of 448 tokens and 128 anchors. Weights, tokens and features are random. Prints one
JSON line a part; a part that fails prints its traceback and the others go on.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from device_timing import draw_weights
from torch import Tensor
from train_timing import LOCK, measured, timed, waits

from draftsmith.algorithms.costs import QWEN3_8B, in_dimensions_of
from draftsmith.algorithms.registry import algorithm, all_algorithms
from draftsmith.algorithms.trainee import Computation, Draw
from draftsmith.drafts.config import DraftConfig, RopeConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.rope import Rope
from draftsmith.features.packing import collate, pack_rows
from draftsmith.features.record import Record
from draftsmith.features.schema import FINAL_STATE, TAPS
from draftsmith.targets.ends import TargetEnds
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.graphs import BatchGraphs
from draftsmith.training.micro_batch import MicroBatch
from draftsmith.training.options import TrainOptions
from draftsmith.training.parallel import Parallel
from draftsmith.training.update import Updater

SMOLLM2 = DraftConfig(
    architecture="dflash",
    hidden_size=576,
    num_hidden_layers=5,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
    rope=RopeConfig(rope_theta=100_000.0),
    layer_types=("full_attention",) * 5,
    block_size=16,
    mask_token_id=17,
    target_layer_ids=(1, 8, 14, 20, 27),
    num_target_layers=30,
)


@dataclass(frozen=True)
class Shape:
    """documents, each of `tokens` tokens with `anchors` anchors; laid out in rows of `tokens_per_row`."""

    config: DraftConfig
    documents: int
    tokens: int
    anchors: int
    tokens_per_row: int


SHAPES = {
    "qwen3-8b": Shape(QWEN3_8B, 4, 3072, 512, 3072),
    "qwen3-8b-1": Shape(QWEN3_8B, 1, 3072, 512, 3072),
    "smollm2": Shape(SMOLLM2, 16, 448, 128, 7168),
}


# --- the device -----------------------------------------------------------------------------------------------------


def rate(options: Sequence[str]) -> dict[str, Any]:
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product, _ = timed(lambda: a @ b, 20)
    lasting, _ = timed(lambda: a @ b, 1200)  # as long as the steps are measured: the clocks settle to what power allows
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy, _ = timed(lambda: target.copy_(source), 10)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tflops": round(2 * size**3 / product / 1e12, 1),
        "lasting_tflops": round(2 * size**3 / lasting / 1e12, 1),
        "copy_tb_s": round(2 * 4 * (1 << 30) / copy / 1e12, 2),
    }


# --- draftsmith -----------------------------------------------------------------------------------------------------


def random_ends(config: DraftConfig) -> TargetEnds:
    shape = (config.vocab_size, config.hidden_size)
    embedding, head = (0.02 * torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return TargetEnds(embedding, head)


def random_records(shape: Shape, lengths: Sequence[int], *, final_state: bool) -> list[Record]:
    config = shape.config
    widths = {TAPS: len(config.target_layer_ids) * config.hidden_size}
    if final_state:
        widths[FINAL_STATE] = config.hidden_size
    return [
        Record(
            f"document-{number}",
            torch.randint(config.vocab_size, (length,)),
            torch.ones(length, dtype=torch.bool),
            {name: torch.randn(length, width, device="cuda").bfloat16().cpu() for name, width in widths.items()},
        )
        for number, length in enumerate(lengths)
    ]


def micro_batch(shape: Shape, method: Any, rows: list[list[Record]], section: Any) -> MicroBatch:
    packed = collate(rows, shape.tokens_per_row)
    maker = method.examples(shape.config, section)
    examples = maker.examples(packed, Draw(seed=0, epoch=0, most=shape.anchors))
    return MicroBatch(packed, examples, maker.work(packed, examples)).to(torch.device("cuda"))


def our_step(shape: Shape, name: str, options: Sequence[str]) -> tuple[Callable[[MicroBatch], None], Any, Any]:
    """(a whole optimiser step on one micro-batch, the method, its section)."""
    method = algorithm(name)
    published = {} if method.architecture == "dflash" else method.published_head
    section = method.section(algorithm=method.name, **published)
    with torch.device("meta"):
        draft = Draft(shape.config)
    draft = draft.to_empty(device="cuda")
    draw_weights(draft)  # as `Draft.from_config`, but for the place and its time
    draft.backbone.rope = Rope(shape.config).cuda()
    how = Computation(
        torch.device("cuda"),
        torch.bfloat16,
        "flex" if "flex" in options else "anchored",
        recompute="checkpointing" in options,
        compile_layers="eager" not in options,
    )
    trainee = method.trainee(draft, random_ends(shape.config), section, how)
    loss = DraftLoss(draft, trainee, autocast=torch.bfloat16)
    loss.train()
    parallel = Parallel(loss, "ddp", Accelerator(mixed_precision="no"))
    updater = Updater(loss, parallel, TrainOptions())

    graphs = BatchGraphs(parallel.forward, list(loss.parameters())) if "graphs" in options else None
    half = share_done(1, 2, torch.device("cuda"))

    def step(batch: MicroBatch) -> None:
        updater.clear()
        if graphs is not None:
            numerator, denominator, _ = graphs.run(batch, half)
        else:
            numerator, denominator, _ = parallel.forward(batch, half)
            numerator.backward()
        updater.apply(numerator.detach().double(), denominator.double(), 1e-4)

    return step, method, section


def of_method(shape: Shape, options: Sequence[str]) -> tuple[Shape, str]:
    names = [method.name for method in all_algorithms() if method.name in options]
    name = names[0] if names else "dflash"
    for option in options:
        if option.startswith("x") and option[1:].isdigit():
            shape = replace(shape, tokens_per_row=int(option[1:]))
    return replace(shape, config=in_dimensions_of(shape.config, algorithm(name))), name


def random_rows(shape: Shape, method: Any) -> list[list[Record]]:
    """The shape's documents, dealt to rows."""
    lengths = [shape.tokens] * shape.documents
    records = random_records(shape, lengths, final_state=method.capture(shape.config).final_state)
    return [[records[i] for i in row] for row in pack_rows(lengths, shape.tokens_per_row)]


def ours(options: Sequence[str]) -> dict[str, Any]:
    shape, name = of_method(SHAPES[options[0]], options)
    step, method, section = our_step(shape, name, options)
    rows = random_rows(shape, method)
    batch = micro_batch(shape, method, rows, section)
    found = measured(lambda: step(batch), 8 if shape.config.hidden_size > 1000 else 30, options)
    flops, slots = batch.work.flops, int(batch.examples.valid.sum()) * batch.examples.input_ids.shape[-1]
    return found | {
        "tflop": round(flops / 1e12, 1),
        "tflops": round(flops / found["ms"] / 1e9, 1),
        "waits": waits(lambda: step(batch)),
        "block_tokens_per_s": round(slots / found["ms"] * 1e3),
        "context_tokens_per_s": round(batch.work.tokens / found["ms"] * 1e3),
    }


def sizes(options: Sequence[str]) -> dict[str, Any]:
    """Steps on batches of four numbers of blocks, one after the other: what torch.compile does at each."""
    from torch._dynamo.utils import counters

    shape, name = of_method(SHAPES[options[0]], options)
    step, method, section = our_step(shape, name, options)
    rows = random_rows(shape, method)
    torch._logging.set_logs(recompiles=True)
    found: dict[str, Any] = {"blocks": [], "graphs_compiled": [], "step_s": []}
    for anchors in (shape.anchors, shape.anchors // 2, shape.anchors // 4, shape.anchors):
        batch = micro_batch(replace(shape, anchors=anchors), method, rows, section)
        before, started = counters["stats"]["unique_graphs"], time.perf_counter()
        step(batch)
        torch.cuda.synchronize()
        found["blocks"].append(batch.examples.valid.numel())
        found["graphs_compiled"].append(counters["stats"]["unique_graphs"] - before)
        found["step_s"].append(round(time.perf_counter() - started, 2))
    return found


# --- SpecForge ------------------------------------------------------------------------------------------------------


def their_step(shape: Shape, options: Sequence[str]) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A whole optimiser step on input_ids [R, S], features [R, S, T*H] and loss_mask [R, S]."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer
    from transformers import Qwen3Config

    config = shape.config
    described = Qwen3Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope.as_parameters(),
        layer_types=list(config.layer_types),
        block_size=config.block.size,
        num_target_layers=config.num_target_layers,
        dflash_config={"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.block.mask_token_id},
    )
    described._attn_implementation = "flex_attention"
    with torch.device("cuda"):
        draft = DFlashDraftModel(described).to(torch.bfloat16)
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16)
        embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
    for frozen in (head, embedding):
        frozen.weight.data.normal_(std=0.02)
        frozen.requires_grad_(False)
    if "checkpointing" in options:
        draft.gradient_checkpointing_enable()
    draft.train()
    model = OnlineDFlashModel(
        draft,
        head,
        embedding,
        config.block.mask_token_id,
        config.block.size,
        num_anchors=shape.anchors,
        loss_decay_gamma=7.0,
    )
    optimizer: Any
    if "plain" in options:
        optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = BF16Optimizer(draft, lr=1e-4, max_grad_norm=1.0, total_steps=1000)

    def step(input_ids: Tensor, features: Tensor, loss_mask: Tensor) -> None:
        loss, _, _ = model(input_ids, features, loss_mask)
        loss.backward()
        optimizer.step()
        if "plain" in options:
            optimizer.zero_grad()

    return step


def their_batch(shape: Shape, loss_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens and features for a loss mask [R, S] float32 on the device."""
    width = len(shape.config.target_layer_ids) * shape.config.hidden_size
    features = torch.randn(*loss_mask.shape, width, device="cuda", dtype=torch.bfloat16)
    return torch.randint(shape.config.vocab_size, loss_mask.shape, device="cuda"), features, loss_mask


def theirs(options: Sequence[str]) -> dict[str, Any]:
    shape = SHAPES[options[0]]
    step = their_step(shape, options)
    batch = their_batch(shape, torch.ones(shape.documents, shape.tokens, device="cuda"))
    return measured(lambda: step(*batch), 6 if shape.config.hidden_size > 1000 else 12, options)


# --- the target -----------------------------------------------------------------------------------------------------


def target(options: Sequence[str]) -> dict[str, Any]:
    """The forward that an online step has besides the draft's: the target's layers up to its final state."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape = SHAPES[options[0]]
    config = shape.config
    family = LlamaConfig if config.hidden_size == SMOLLM2.hidden_size else Qwen3Config
    described = family(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_target_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rope_parameters=config.rope.as_parameters(),
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    kept: dict[int, Tensor] = {}
    for number in config.target_layer_ids:

        def keep(module: Any, inputs: Any, output: Any, number: int = number) -> None:
            kept[number] = output if isinstance(output, Tensor) else output[0]

        model.model.layers[number].register_forward_hook(keep)
    input_ids = torch.randint(config.vocab_size, (shape.documents, shape.tokens), device="cuda")

    @torch.no_grad()
    def step() -> None:
        model.model(input_ids, use_cache=False)
        torch.cat([kept[number] for number in config.target_layer_ids], dim=-1)

    return measured(step, 8, options)


# A part's failure must not cost the others.
FAILURES = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, LookupError, AssertionError)
PARTS = {"rate": rate, "ours": ours, "theirs": theirs, "sizes": sizes, "target": target}


def release() -> None:
    torch._dynamo.reset()  # another shape is not to be compiled as a variant of this one
    gc.collect()
    torch.cuda.empty_cache()


def main(parts: Sequence[str], known: Mapping[str, Callable[[Sequence[str]], dict[str, Any]]] = PARTS) -> None:
    if parts[:1] == ["--lock"]:
        LOCK.append(parts[1])
        parts = parts[2:]
    for part in parts:
        name, *options = part.split(":")
        torch.manual_seed(0)
        try:
            print(json.dumps({"part": part, **known[name](options)}), flush=True)
        except FAILURES:
            print(json.dumps({"part": part, "error": traceback.format_exc()[-3000:]}), flush=True)
        sys.stderr.flush()
        release()


if __name__ == "__main__":
    main(sys.argv[1:])
