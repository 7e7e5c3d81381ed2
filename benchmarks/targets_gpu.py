"""Targets of several kinds on one GPU at published shapes, random weights: steps, cycles, prompts, and the floor.

    python benchmarks/targets_gpu.py qwen3.5-9b qwen3.6-35b-a3b gpt-oss-20b --batches 1 8 --hf

`plain` is the step graph without a draft, `verify` the same at the width of a verify of 16 tokens, `cycle` a DFlash
draft's whole step (5 layers, blocks of 16). The floor is what a step must read, once, over the bandwidth of a large
copy: weights (of experts the expected number of different ones that the step's tokens are routed to), keys and values,
recurrent states (read and written). `prefill` is tokens/s of a prompt of 8,192 tokens; `hf` the target's own
`generate`, greedy, with its dynamic cache. Prints one JSON line a measurement; a part that fails prints its error and
the others go on.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from device_timing import draw_weights, measured_bandwidth, median_ms, profile, say
from engine_gpu import step_graph
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target

DTYPE = torch.bfloat16
BLOCK = 16
_DELTA = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, **_DELTA,
    },
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, **_DELTA,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    },
}  # fmt: skip


def build_target(name: str, layers: int | None, fuse: str) -> Target:
    fields = {"max_position_embeddings": 40960, "tie_word_embeddings": False, **SHAPES[name]}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**fields)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with torch.device("cuda"):  # buffers such as rope's need their values, which a meta model has not
            buffers = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**fields, **_FEW}))
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device="cuda").to(DTYPE)
    draw_weights(model)
    given = dict(buffers.named_buffers())
    for name_, buffer in model.named_buffers():
        if name_ in given and given[name_].shape == buffer.shape:
            buffer.copy_(given[name_])
    target = Target.from_model(model.requires_grad_(False))
    if fuse == "on":
        target.fuse()
    return target


_FEW = {"num_hidden_layers": 4}


def build_draft(target: Target) -> Draft:
    config, layers = target.text_config, target.num_layers
    fields = {
        "architecture": "dflash", "hidden_size": target.hidden_size, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288 if target.hidden_size > 3000 else 6144,
        "vocab_size": config.vocab_size, "max_position_embeddings": 40960, "rope": {"rope_theta": 1e6},
        "layer_types": ("full_attention",) * 5, "dtype": "bfloat16", "block_size": BLOCK,
        "mask_token_id": config.vocab_size - 1, "num_target_layers": layers,
        "target_layer_ids": tuple(round(1 + i * (layers - 4) / 4) for i in range(5)),
    }  # fmt: skip
    with torch.device("meta"):
        draft = Draft(DraftConfig.parse(fields))
    draft = draft.to_empty(device="cuda").to(DTYPE).eval()
    draw_weights(draft)
    return draft.requires_grad_(False)


def read_bytes(target: Target, batch: int, context: int, width: int) -> int:
    """What a pass of `width` tokens a row must read, and of recurrent states write."""
    total = 0
    experts = getattr(target.text_config, "num_experts", None) or getattr(target.text_config, "num_local_experts", None)
    for name, parameter in target.model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        if "embed_tokens" in name:
            continue  # a few rows
        if ".experts." in name and experts:
            chosen = target.text_config.num_experts_per_tok / experts
            size = int(size * (1 - (1 - chosen) ** (batch * width)))
        total += size
    cache = target.new_cache(1, context, width)
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        if state is not None:
            total += 2 * batch * state.numel() * state.element_size()
        else:
            total += batch * sum(tensor.numel() * tensor.element_size() for tensor in layer.tensors)
    return total


class Bench:
    def __init__(self, name: str, arguments: argparse.Namespace, bandwidth: float) -> None:
        self.name, self.arguments, self.bandwidth = name, arguments, bandwidth
        begin = time.perf_counter()
        self.target = build_target(name, arguments.layers, arguments.fuse)
        self.draft = build_draft(self.target)
        self.draft_bytes = sum(p.numel() * p.element_size() for p in self.draft.parameters())
        self.head_bytes = self.target.ends.head_weight.numel() * 2
        say(
            part="setup", target=name, fused=self.target.fused,
            weights_gb=round(torch.cuda.memory_allocated() / 1e9, 2), seconds=round(time.perf_counter() - begin, 1),
        )  # fmt: skip

    def steps(self, part: str, draft: Draft | None, width: int, **options: Any) -> None:
        for batch in self.arguments.batches:
            context = self.arguments.context
            engine = Engine(self.target, draft, EngineOptions(slots=batch, **options))
            run, eager, capture = step_graph(engine, batch, context)
            size = read_bytes(self.target, batch, context, width)
            if draft is not None:
                size += self.draft_bytes + self.head_bytes
            found, floor = median_ms(run), size / self.bandwidth * 1e3
            say(
                part=part, target=self.name, batch=batch, context=context, ms=round(found, 4), floor_ms=round(floor, 4),
                over_floor=round(found / floor, 3), first_step_s=round(eager, 2), capture_s=round(capture, 2),
            )  # fmt: skip
            if self.arguments.kernels and batch == self.arguments.batches[0]:
                idle, table = profile(run, 5, self.arguments.kernels)
                say(part=f"{part} profile", target=self.name, idle_between_kernels=round(idle, 4))
                print(table, flush=True)
            del run, engine
            torch.cuda.empty_cache()

    def plain(self) -> None:
        self.steps("plain", None, 1)

    def verify(self) -> None:
        self.steps("verify", None, BLOCK, verify_width=BLOCK)

    def cycle(self) -> None:
        self.steps("cycle", self.draft, BLOCK)

    def prefill(self) -> None:
        prompt = torch.randint(1000, (8192,)).tolist()
        for _ in range(2):  # the first compiles
            engine = Engine(self.target, None, EngineOptions(slots=1, max_length=8704))
            request = Request.of([prompt], max_new_tokens=4, sampling=SamplingOptions(), seed=0)
            (answer,) = engine.submit(request)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            while not answer.token_ids:
                engine.step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        say(part="prefill", target=self.name, tokens=8192, seconds=round(seconds, 3), tokens_s=round(8192 / seconds))

    def hf(self) -> None:
        ids = torch.randint(1000, (1, self.arguments.context), device="cuda")
        with torch.no_grad():
            for new in (4, 36):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                self.target.model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begin
        say(part="hf", target=self.name, batch=1, ms_a_token=round(seconds / 36 * 1e3, 2), new_tokens=36)


PARTS = ("plain", "verify", "cycle", "prefill", "hf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="+", choices=SHAPES)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=900, help="a step graph reads up to the next power of two")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--fuse", choices=("on", "off"), default="off")
    parser.add_argument("--kernels", type=int, default=0, help="kernels of a profile to print")
    arguments = parser.parse_args()
    bandwidth, failed = measured_bandwidth(), 0
    say(part="machine", device=torch.cuda.get_device_name(), torch=torch.__version__, tb_s=round(bandwidth / 1e12, 3))
    for name in arguments.targets:
        bench: Bench | None = None
        parts: list[tuple[str, Callable[[], None]]] = []
        try:
            bench = Bench(name, arguments, bandwidth)
            parts = [(part, getattr(bench, part)) for part in arguments.parts]
        except Exception:  # noqa: BLE001  the other targets are measured all the same
            traceback.print_exc()
            failed += 1
        for _, part in parts:
            try:
                part()
            except Exception:  # noqa: BLE001  so are the other parts
                traceback.print_exc()
                failed += 1
        bench, parts = None, []
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
